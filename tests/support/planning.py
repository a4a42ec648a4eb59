"""Views for planners: A100-40GB fleets and a family with service times like those of the digits."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from trefoil.core.brains import BudgetState, PlanView
from trefoil.core.carbon import CarbonForecast, CarbonReading, Factors, Method, Series
from trefoil.core.catalog import Catalog, Family, Variant
from trefoil.core.common import ProfileRow
from trefoil.core.demand import Demand
from trefoil.core.device_types import A100_40GB, T4, slice_type
from trefoil.core.fleet import DeviceState, DeviceStatus, DeviceType, FleetState, NodeStatus, SliceState, SliceStatus
from trefoil.core.objective import Objective, ObjectiveMode
from trefoil.core.plan import Plan

NOW_S = 1_000_000.0
SHAPES = ("1g.5gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb")
ACCURACY = {"xs": 0.886, "s": 0.938, "m": 0.960, "l": 0.993}
SERVICE_MS: Mapping[str, tuple[float, ...]] = {  # by SHAPES
    "xs": (20.0, 13.0, 11.0, 10.0, 9.0),
    "s": (34.0, 20.0, 16.0, 14.5, 12.0),
    "m": (55.0, 31.0, 23.0, 20.0, 16.0),
    "l": (118.0, 62.0, 44.0, 36.0, 25.0),
}
SERIES = Series("test", Method.AVERAGE, Factors.DIRECT)
DUCK = (250.0, 230.0, 240.0, 300.0, 210.0, 120.0, 90.0, 110.0, 240.0, 380.0, 350.0, 290.0)  # g/kWh, 12 steps of 4 h


def digits(
    service_ms: Mapping[str, Sequence[float]] = SERVICE_MS,
    accuracy: Mapping[str, float] = ACCURACY,
    load_s: float = 2.5,
) -> Catalog:
    """A family of one row per variant and slice type at batch 1; active power is proportional to the SMs."""
    variants = tuple(
        Variant(name, i, accuracy[name], "made up", 32, load_s, 10**i, "CC0-1.0")
        for i, name in enumerate(service_ms, 1)
    )
    rows = tuple(
        row(name, shape, mean_ms)
        for name, by_shape in service_ms.items()
        for shape, mean_ms in zip(SHAPES, by_shape, strict=True)
    )
    return Catalog((Family("digits", "top1", variants, {"": (75.0, 0.95)}),), rows)


def row(variant: str, shape: str, mean_ms: float, family: str = "digits") -> ProfileRow:
    """Gamma service of CV 0.05; 250 W when every SM is busy."""
    power_w = 250.0 * slice_type(A100_40GB, shape).sm_count / 98
    return ProfileRow(
        device_type=A100_40GB.name,
        slice_type=shape,
        family=family,
        variant=variant,
        stage=0,
        batch=1,
        clock_mhz=1410,
        cohosted=(),
        latency_ms_p50=mean_ms * 0.9992,
        latency_ms_p95=mean_ms * 1.0836,
        latency_ms_p99=mean_ms * 1.12,
        throughput_per_s=1000.0 / mean_ms,
        energy_active_j_per_batch=mean_ms / 1000.0 * power_w,
        power_w=power_w,
        memory_mib=32,
    )


def fleet(
    gpus: int = 2, nodes: int = 1, state: DeviceState = DeviceState.AWAKE, kind: DeviceType = A100_40GB
) -> FleetState:
    """Empty devices of one type, spread over nodes in turn."""
    held: dict[str, list[DeviceStatus]] = {f"node{n}": [] for n in range(nodes)}
    for i in range(gpus):
        node = f"node{i % nodes}"
        held[node].append(DeviceStatus(f"{node}/gpu{i // nodes}", kind, state, mig_current=True))
    return FleetState(tuple(NodeStatus(node=n, zone="test", devices=tuple(d)) for n, d in held.items()))


def applied(plan: Plan, before: FleetState) -> FleetState:
    """The fleet after a plan has been rolled out."""
    planned = {d.device: d for n in plan.nodes for d in n.devices}
    return FleetState(
        tuple(
            NodeStatus(
                node=node.node,
                zone=node.zone,
                devices=tuple(
                    DeviceStatus(
                        d.device,
                        d.type,
                        planned[d.device].target if d.device in planned else d.state,
                        tuple(
                            SliceStatus(key=s.key, state=SliceState.READY, hosted=s.hosted)
                            for s in planned[d.device].slices
                        )
                        if d.device in planned
                        else d.slices,
                        mig_current=True,
                    )
                    for d in node.devices
                ),
            )
            for node in before.nodes
        ),
        before.stale,
    )


def objective(**changes: object) -> Objective:
    """One replica, no spread: a GPU may sleep."""
    values: dict[str, object] = {
        "family": "digits",
        "mode": ObjectiveMode.BUDGET,
        "slo_ms": 65.0,
        "slo_quantile": 0.95,
        "min_accuracy": 0.973,
        "pue": 1.0,
        "number": 1,
        "window_s": 84.0,
        "replicas_min": 1,
        "spread_min": 1,
    }
    return Objective(**{**values, **changes})  # type: ignore[arg-type]


def reading(intensity: float, step: int = 0, length_s: float = 7.0) -> CarbonReading:
    """One interval of a trace."""
    starts = NOW_S + step * length_s
    return CarbonReading(SERIES, starts, starts + length_s, intensity, observed_at_s=starts)


def view(
    intensity: float = 250.0,
    rate: float = 26.0,
    high: float | None = None,
    *,
    catalog: Catalog | None = None,
    devices: FleetState | None = None,
    wanted: Sequence[Objective] | None = None,
    current: Plan | None = None,
    budgets: Sequence[BudgetState] = (),
    history: Sequence[float] = (),
    forecast: CarbonForecast | None = None,
    horizon_s: float = 30.0,
    gap_scv: float = 1.0,
    demand: Sequence[Demand] | None = None,
) -> PlanView:
    """A view of one family; `high` is the demand's high quantile."""
    now = reading(intensity)
    return PlanView(
        now_s=NOW_S,
        fleet=devices if devices is not None else fleet(),
        catalog=catalog if catalog is not None else digits(),
        objectives=tuple(wanted) if wanted is not None else (objective(),),
        demand=tuple(demand) if demand is not None else (Demand("digits", "", rate, high or 1.2 * rate, 1.0, gap_scv),),
        carbon=now,
        carbon_forecast=forecast,
        measured=(),
        current=current,
        trigger="test",
        move_horizon_s=horizon_s,
        pue=1.0,
        budgets=tuple(budgets),
        carbon_history=tuple(reading(ci, i - len(history)) for i, ci in enumerate(history)),
    )


def with_low_end(one: PlanView, gpus: int = 1) -> PlanView:
    """The same with T4s on its first node, as fast as a 1g slice: for planners that pair GPU types."""
    nodes = one.fleet.nodes
    held = tuple(DeviceStatus(f"{nodes[0].node}/t4-{n}", T4, DeviceState.AWAKE) for n in range(gpus))
    first = replace(nodes[0], devices=(*nodes[0].devices, *held))
    rows = [replace(r, device_type=T4.name, slice_type="whole") for r in one.catalog.rows if r.slice_type == SHAPES[0]]
    catalog = Catalog(one.catalog.families, (*one.catalog.rows, *rows))
    return replace(one, fleet=replace(one.fleet, nodes=(first, *nodes[1:])), catalog=catalog)
