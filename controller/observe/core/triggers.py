"""Triggers of planning: a named cause and the comparison behind it.

Source: CLOVER section 4.2 (a change of carbon intensity by more than 5 % starts an optimisation); load: two one-sided
tests with different patience, ours.
Data: what the plan in force was made for (intensity, demand, capacity, objectives, devices), what is observed now.
Decision: a `Trigger` or None.
Formulation, in order of urgency:
  start      There is no plan.
  loss       A slice of the plan is gone or failed for longer than `loss_hold_s`. A device is gone or out of service, or
             came back. A place on a device was taken by others, or is free again. A variant cannot be loaded, or can be
             loaded again. No dispatcher reaches a device of a silent node.
  objective  An objective's number or the fleet's watt cap differs from the plan's. A family is out of service.
  load       At once: p90 demand > capacity of the plan, and the rate is significantly above what the plan expected.
             Patiently, either way: p90 demand leaves [1 - down, 1 + up] x the planned one for `load_hold_s`.
  slo        Attainment (latency, TTFT, TPOT) < quantile - margin for `slo_hold_s`, no earlier than `slo_rest_s` after
             the last plan.
  scale      A governor at the top of its range wants capacity; rested as slo.
  accuracy   Accuracy of the answers < the objective's floor less `ACCURACY_SLACK`, held and rested as slo. It is for
             mixes that follow load, as with CLOVER's pull; policies that plan accuracy leave it out.
  carbon     |intensity - planned| > ratio x planned (or x a fixed base, if one is set).
  tick       The planner asked to be run again at this time.
`start`, `loss`, `objective` and `tick` (which belongs to the planner) are never switched off. The others are off unless
the policy's row names them.
Deviations: CLOVER compares with the intensity at the last optimisation; `carbon_base_g_per_kwh` > 0 fixes the base.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from controller.forecasters.last_max import Z_90
from controller.observe.core.plannable import out_of_service_reason
from controller.thresholds import CAUSES, Thresholds
from trefoil.core.brains import PlanView
from trefoil.core.demand import Demand, ScaleSignal
from trefoil.core.fleet import DeviceState, FleetState, SliceKey, SliceState
from trefoil.core.plan import Plan

ACCURACY_SLACK: Final = 0.005  # a window of some seconds is a sample of the mix
OPERATOR: Final = "operator"  # never found here: an operator requested a new plan
ALWAYS: Final = frozenset({"start", "loss", "objective", "tick"})


@dataclass(frozen=True, slots=True)
class PlanBasis:
    """Basis of the plan in force: what it was decided on, and what the triggers compare with."""

    at_s: float
    intensity_g_per_kwh: float
    demand: Mapping[str, Demand]
    capacity_per_s: Mapping[str, float]
    objective_numbers: Mapping[str, int]
    devices: frozenset[str]
    lost: frozenset[SliceKey] = frozenset()
    next_tick_at_s: float = math.inf
    unloadable: frozenset[str] = frozenset()
    max_watts: float = 0.0
    unreached: frozenset[str] = frozenset()
    taken: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class HoldTimers:
    """Timers of patient conditions: since when each holds, by name; one that stops holding is forgotten."""

    since_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Trigger:
    """Trigger of a decision: its cause and the comparison behind it."""

    cause: str
    why: str


def plan_basis(view: PlanView, plan: Plan, next_tick_at_s: float) -> PlanBasis:
    """Basis of a plan decided on this view."""
    return PlanBasis(
        at_s=view.now_s,
        intensity_g_per_kwh=view.carbon.intensity_g_per_kwh,
        demand={d.family: d for d in view.demand},
        capacity_per_s={family: e.capacity_per_s for family, e in plan.expected.items()},
        objective_numbers={o.family: o.number for o in view.objectives},
        devices=view.fleet.usable,
        unloadable=frozenset(view.fleet.unloadable),
        lost=frozenset(_lost_slices(view, plan)),
        next_tick_at_s=next_tick_at_s,
        max_watts=view.max_watts,
        unreached=_unreached(view.fleet),
        taken=view.fleet.taken,
    )


def evaluate_triggers(
    view: PlanView,
    basis: PlanBasis | None,
    timers: HoldTimers,
    thresholds: Thresholds,
    allowed: Iterable[str],
    rolling: bool = False,
    signals: Iterable[ScaleSignal] = (),
) -> tuple[Trigger | None, HoldTimers]:
    """Evaluate all triggers: the most urgent one, and the timers for the next call. `rolling`: a rollout continues;
    `signals` are of governors that want capacity.
    """
    if basis is None or view.current is None:
        return Trigger("start", "no plan is in force"), HoldTimers()
    causes = ALWAYS | set(allowed)
    found: list[Trigger] = []
    holding: dict[str, tuple[float, Trigger]] = {}
    if not rolling:
        holding |= _losses(view, view.current, basis, thresholds)
    found += _devices(view, basis)
    found += _models(view, basis)
    found += _objectives(view, basis)
    for demand in view.demand:
        found += _load_at_once(demand, basis, thresholds)
        holding |= _load_patient(demand, basis, thresholds)
    if not rolling and view.now_s - basis.at_s >= thresholds.slo_rest_s:
        holding |= _broken(view, thresholds)
        found += [Trigger("scale", f"{s.device} of {', '.join(s.families)} wants capacity: {s.why}") for s in signals]
    found += _carbon(view, basis, thresholds)
    if view.now_s >= basis.next_tick_at_s + thresholds.tick_grace_s:
        found.append(Trigger("tick", "the planner asked to be run again now"))
    since = {name: timers.since_s.get(name, view.now_s) for name in holding}
    found += [t for name, (hold_s, t) in holding.items() if view.now_s - since[name] >= hold_s]
    found = sorted((t for t in found if t.cause in causes), key=lambda t: CAUSES.index(t.cause))
    return (found[0] if found else None), HoldTimers(since)


def _lost_slices(view: PlanView, plan: Plan) -> Mapping[SliceKey, SliceState]:
    """Slices of a plan that are gone or failed, on nodes that report."""
    states, stale = view.fleet.slice_states, view.fleet.stale
    wanted = [p.key for node in plan.nodes if node.node not in stale for d in node.devices for p in d.slices]
    bad = (SliceState.FAILED, SliceState.GONE, SliceState.UNSPECIFIED)
    return {key: state for key in wanted if (state := states.get(key, SliceState.GONE)) in bad}


def _losses(view: PlanView, plan: Plan, basis: PlanBasis, thresholds: Thresholds) -> dict[str, tuple[float, Trigger]]:
    hold_s = thresholds.loss_hold_s
    return {
        f"loss:{key.name}": (hold_s, Trigger("loss", f"slice {key.name} of the plan is {state.name} for {hold_s:g} s"))
        for key, state in _lost_slices(view, plan).items()
        if key not in basis.lost  # planned again already, to no avail: its agent keeps trying
    }


def _devices(view: PlanView, basis: PlanBasis) -> list[Trigger]:
    now = view.fleet.usable
    gone, back = sorted(basis.devices - now), sorted(now - basis.devices)
    if gone:
        whys = {d.device: out_of_service_reason(d) for node in view.fleet.nodes for d in node.devices}
        return [Trigger("loss", "; ".join(f"{name}: {whys.get(name) or 'its node is stale'}" for name in gone))]
    if back:
        return [Trigger("loss", f"{', '.join(back)}: can be used (again)")]
    taken = view.fleet.taken
    came, left = sorted(taken - basis.taken), sorted(basis.taken - taken)
    if came:
        return [Trigger("loss", f"{', '.join(came)}: cannot be planned on, it is taken or not offered")]
    if left:
        return [Trigger("loss", f"{', '.join(left)}: can be planned on again")]
    silent = sorted(_unreached(view.fleet) - basis.unreached)
    return [Trigger("loss", f"{', '.join(silent)}: its node is stale, and no dispatcher reaches it")] if silent else []


def _unreached(fleet: FleetState) -> frozenset[str]:
    """Devices that are lost on nodes that do not report (observe/core/unreached.py)."""
    stale = [node for node in fleet.nodes if node.node in fleet.stale]
    return frozenset(d.device for node in stale for d in node.devices if d.state == DeviceState.LOST)


def _models(view: PlanView, basis: PlanBasis) -> list[Trigger]:
    now = view.fleet.unloadable
    gone, back = sorted(now.keys() - basis.unloadable), sorted(basis.unloadable - now.keys())
    if gone:
        return [Trigger("loss", "; ".join(f"{name} cannot be loaded: {now[name]}" for name in gone))]
    return [Trigger("loss", f"{', '.join(back)}: can be loaded again")] if back else []


def _objectives(view: PlanView, basis: PlanBasis) -> list[Trigger]:
    planned = basis.objective_numbers
    if view.max_watts != basis.max_watts:
        now, then = (f"{watts:g} W" if watts else "without a cap" for watts in (view.max_watts, basis.max_watts))
        return [Trigger("objective", f"the fleet may take {now}, planned for {then}")]
    if gone := sorted(planned.keys() - {o.family for o in view.objectives}):
        return [Trigger("objective", f"{', '.join(gone)}: planned for, and out of service now")]
    return [
        Trigger(
            "objective", f"objective of {o.family} is number {o.number}, planned for {planned.get(o.family, 'none')}"
        )
        for o in view.objectives
        if planned.get(o.family) != o.number
    ]


def _load_at_once(demand: Demand, basis: PlanBasis, thresholds: Thresholds) -> list[Trigger]:
    planned = basis.demand.get(demand.family)
    if planned is None:
        return [Trigger("load", f"{demand.family} is asked for and was not planned for")]
    rate, capacity = demand.rate_per_s, basis.capacity_per_s.get(demand.family, 0.0)
    chance = planned.rate_per_s + thresholds.load_sigmas * _error(planned.rate_per_s, thresholds)
    # A plan made on a ramp expected more than the rate of then: growth that it was made for is not news.
    limit = max(chance, _rate_of_p90(planned.rate_p90_per_s, thresholds))
    if demand.rate_p90_per_s <= capacity or rate <= limit:
        return []
    return [
        Trigger(
            "load",
            f"{demand.family}: p90 demand of {demand.rate_p90_per_s:.1f}/s exceeds the capacity of {capacity:.1f}/s; "
            f"{rate:.1f}/s came, {planned.rate_per_s:.1f}/s were planned (limit {limit:.1f}/s)",
        )
    ]


def _rate_of_p90(p90_per_s: float, thresholds: Thresholds) -> float:
    """The rate whose p90, counted over `rate_span_s`, this is."""
    half = Z_90 / math.sqrt(thresholds.rate_span_s) / 2
    return (math.sqrt(half * half + max(0.0, p90_per_s)) - half) ** 2


def _error(rate_per_s: float, thresholds: Thresholds) -> float:
    """Standard error of a rate that was counted over `rate_span_s`."""
    return math.sqrt(max(rate_per_s, 1.0) / thresholds.rate_span_s)


def _load_patient(demand: Demand, basis: PlanBasis, thresholds: Thresholds) -> dict[str, tuple[float, Trigger]]:
    planned = basis.demand.get(demand.family)
    if planned is None:
        return {}
    low = planned.rate_p90_per_s * (1 - thresholds.load_down_ratio)
    high = planned.rate_p90_per_s * (1 + thresholds.load_up_ratio)
    now = demand.rate_p90_per_s
    if low <= now <= high:
        return {}
    side, word, limit = ("<", "below", low) if now < low else (">", "above", high)
    why = (
        f"{demand.family}: p90 demand of {now:.1f}/s was {word} {limit:.1f}/s for {thresholds.load_hold_s:g} s "
        f"({planned.rate_p90_per_s:.1f}/s were planned)"
    )
    return {f"load{side}{demand.family}": (thresholds.load_hold_s, Trigger("load", why))}


def _broken(view: PlanView, thresholds: Thresholds) -> dict[str, tuple[float, Trigger]]:
    wanted = {o.family: o for o in view.objectives}
    found = {}
    for measured in view.measured:
        objective = wanted.get(measured.family)
        if objective is None or measured.rate_per_s * measured.window_s < thresholds.slo_requests_min:
            continue
        limit = objective.slo_quantile - thresholds.slo_margin
        if measured.slo_attainment < limit:
            why = (
                f"{measured.family}: {measured.slo_attainment:.1%} within {objective.slo_ms:g} ms over "
                f"{measured.window_s:g} s, below {limit:.1%}"
            )
            found[f"slo:{measured.family}"] = (thresholds.slo_hold_s, Trigger("slo", why))
        for name, limit_ms, asked, share in measured.tokens.short_of(objective.token_slo, thresholds.slo_margin):
            why = (
                f"{measured.family}: {name.upper()} of {share:.1%} of streams within {limit_ms:g} ms over "
                f"{measured.window_s:g} s, below {asked:.1%}"
            )
            found[f"{name}:{measured.family}"] = (thresholds.slo_hold_s, Trigger("slo", why))
        floor = max(objective.min_accuracy, objective.hard_min_accuracy)
        if measured.accuracy < floor - ACCURACY_SLACK:
            why = f"{measured.family}: accuracy {measured.accuracy:.4f} over {measured.window_s:g} s, below {floor:.4f}"
            found[f"accuracy:{measured.family}"] = (thresholds.slo_hold_s, Trigger("accuracy", why))
    return found


def _carbon(view: PlanView, basis: PlanBasis, thresholds: Thresholds) -> list[Trigger]:
    now, planned = view.carbon.intensity_g_per_kwh, basis.intensity_g_per_kwh
    base = thresholds.carbon_base_g_per_kwh or planned
    if abs(now - planned) <= thresholds.carbon_ratio * base:
        return []
    change = f"{(now - planned) / base:+.1%} of {base:.0f}" if base else f"{now - planned:+.0f}"  # a grid may emit none
    return [
        Trigger(
            "carbon",
            f"intensity {now:.0f} g/kWh is {change} g/kWh from the {planned:.0f} g/kWh planned for "
            f"(limit {thresholds.carbon_ratio:.0%})",
        )
    ]
