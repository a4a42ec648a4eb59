"""Runs of a reproduction as values, and many of them side by side on all cores.

A `Spec` and the sources that a run imports state everything that it depends on. So its result is kept on disk under a
hash of both: what was interrupted continues where it was, and what another version played is played again. Runs are
simulations (trefoil.simulator); their truth differs from the planners' estimate by the noise of the spec.
"""

import ast
import gc
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from controller.planners.table import PLANNERS
from controller.settings import ControlSettings, FixedDemand, RelativeAccuracy, TriggerSettings
from trefoil.core.catalog import Catalog
from trefoil.core.device_types import DEVICE_TYPES
from trefoil.core.parts import Value
from trefoil.core.policies import POLICIES
from trefoil.core.units import HOUR_S
from trefoil.installation import MODELS, SHIPPED
from trefoil.runtime.files import replace_file
from trefoil.runtime.repository import load_family
from trefoil.simulator.report.result import Result
from trefoil.simulator.run import simulate
from trefoil.simulator.scenario.inputs import Provided
from trefoil.simulator.scenario.schema import (
    Arrivals,
    Carbon,
    FamilyObjective,
    FamilySlo,
    Node,
    Noise,
    Scenario,
    Served,
    SimulatedAvailability,
    Zone,
)

SOURCES: Final = Path(__file__).parents[2]
TABLE: Final = "controller.planners.table"  # imports every planner
JOBS: Final = "trefoil.simulator.engines.jobs"  # no study has jobs
DOCUMENTED: Final = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
OURS: Final = frozenset({"trefoil", "controller", "dispatcher", "power_agent", "carbon_feed"})
PUE: Final = 1.5  # CLOVER section 5.1
MEASURE_S: Final = 60.0  # over which a tail latency is watched
REPOSITORY: Final = SHIPPED / MODELS


@dataclass(frozen=True, slots=True)
class Spec:
    """Spec of one run. `trace` is a file, or "" with a `constant_g_per_kwh`; neither: the synthetic curve that ships.

    hours             of the trace; `speedup` of them pass in one simulated hour (load and moves run in simulated time).
    variants, shapes  what the planner may use; empty: all.
    energy, latency   factors on the profile's active joules and service times, by slice type ("" = every one).
    sleep    factor on what a sleeping GPU draws.
    repository  model repository of the family; "" = the one that ships.
    """

    family: str
    label: str
    policy: str
    rate_per_s: float
    slo_ms: float
    seed: int
    hours: float
    speedup: float = 1.0
    gpus: int = 10
    items: float = 1.0
    trace: str = ""
    constant_g_per_kwh: float | None = None
    fidelity: str = "request"
    mode: str = "lambda"
    lambda_weight: float = 0.5
    min_accuracy: float = 0.0
    base_j_per_request: float = 0.0
    base_intensity: float = 250.0
    awake_min: int = 1
    noise: float = 0.05
    device_noise: float = 0.03
    tick_s: float = 5.0
    step_s: float = 300.0
    bins: int = 480
    planner: tuple[tuple[str, Value], ...] = ()
    variants: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    energy: tuple[tuple[str, float], ...] = ()
    latency: tuple[tuple[str, float], ...] = ()
    sleep: float = 1.0
    device: str = "A100-SXM4-40GB"
    repository: str = ""
    exact_quantiles: bool = False
    forecast: str = "none"
    past: tuple[float, ...] = ()
    """Intensities of the hours before the trace begins, oldest first."""
    knows_truth: bool = False
    """The planner has profiled the very hardware (ORACLE); else it gets the model, and the truth differs."""

    @property
    def span_s(self) -> float:
        """Span of the run in simulated time [s]."""
        return self.hours * HOUR_S / self.speedup

    @property
    def key(self) -> str:
        """Key of the run, whatever process computes it."""
        return key_of(self, source_hash(self.policy, repository=self.repository))

    @property
    def name(self) -> str:
        """Name in messages."""
        return f"{self.family} {self.label} seed {self.seed}"

    @property
    def work(self) -> float:
        """How much there is to play, in about requests."""
        return self.rate_per_s * self.hours

    def play(self) -> "StudyRun":
        """Simulate it."""
        return run_spec(self)


class Playable(Protocol):
    """Spec of a run, of whatever study: a value that can be hashed and pickled."""

    @property
    def key(self) -> str:
        """Key of the run, whatever process computes it."""
        ...

    @property
    def name(self) -> str:
        """Name in messages."""
        ...

    @property
    def work(self) -> float:
        """How much there is to play, in about requests: long runs begin first."""
        ...

    def play(self) -> "StudyRun":
        """Simulate it."""
        ...


S = TypeVar("S", bound=Playable)


def key_of(spec: Any, sources: str) -> str:
    """Key of a run: a hash of its spec, a dataclass, and of the sources that it imports."""
    text = json.dumps({"sources": sources, **asdict(spec)}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


@cache
def source_hash(policy: str = "", module: str = __name__, repository: str = "") -> str:
    """Hash of the code of every module of ours that a run imports, and of the repository's families and profiles.

    Comments and docstrings are not code. Of a policy: without the planners that only others need, so that who improves
    one does not play all of them again. What only jobs need is left out too.
    """
    files = {path for suffix in ("*.toml", "*.csv") for path in family_folder("", repository).glob(f"*/{suffix}")}
    left, seen = [module], {JOBS}
    if policy:
        left.append(PLANNERS[POLICIES[policy].planner].make.__module__)
        seen.add(TABLE)
    while left:
        name = left.pop()
        if name in seen or name.partition(".")[0] not in OURS:
            continue
        seen.add(name)
        path = SOURCES.joinpath(*name.split("."))
        source = next((one for one in (path.with_suffix(".py"), path / "__init__.py") if one.exists()), None)
        if source is None:
            continue  # a name in a module, not a module
        files.add(source)
        left += _read(source.read_bytes())[1]
    digest = hashlib.sha256()
    for file in sorted(files):
        content = file.read_bytes()
        digest.update(file.name.encode() + (_read(content)[0] if file.suffix == ".py" else content))
    return digest.hexdigest()[:12]


@cache
def _read(source: bytes) -> tuple[bytes, tuple[str, ...]]:
    """Code of a module, and names of modules that it imports and of what it takes from them.

    What only types need is not imported.
    """
    tree = ast.parse(source)
    found, left = list[str](), list[ast.AST]([tree])
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            node.body[0] = ast.Pass()
    code = ast.dump(tree).encode()
    while left:
        node = left.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            left += node.orelse
            continue
        left += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return code, tuple(found)


@dataclass(frozen=True, slots=True)
class StudyRun:
    """Result of a run, plain enough for JSON. `evaluations`: candidates in the order in which they were measured."""

    spec: Any
    summary: Mapping[str, Any]
    series: Mapping[str, Sequence[float]]
    evaluations: Sequence[Mapping[str, Any]] = field(default=())
    decisions: Sequence[Mapping[str, Any]] = field(default=())

    def __getitem__(self, name: str) -> Any:
        return self.summary[name]


def family_folder(family: str, repository: str = "") -> Path:
    """Folder of a family; `repository` "": of the one that ships."""
    return (Path(repository) if repository else REPOSITORY) / family


def scenario_of(spec: Spec) -> Scenario:
    """Scenario of a spec."""
    zone = Zone(trace=Path(spec.trace) if spec.trace else None, constant_g_per_kwh=spec.constant_g_per_kwh)
    wanted = FamilyObjective(
        type=spec.mode,  # type: ignore[arg-type]
        slo=FamilySlo(latency_ms=spec.slo_ms),
        lambda_weight=spec.lambda_weight,
        accuracy=RelativeAccuracy(floor=spec.min_accuracy),
        base_j_per_request=spec.base_j_per_request,
        base_intensity_g_per_kwh=spec.base_intensity,
        window_s=spec.span_s,
        availability=SimulatedAvailability(spread_min=spec.awake_min),
    )
    per_node = 2 if spec.gpus % 2 == 0 else 1
    return Scenario(
        name=f"{spec.family}-{spec.label}",
        seed=spec.seed,
        duration_s=spec.span_s,
        fidelity=spec.fidelity,  # type: ignore[arg-type]
        step_s=spec.step_s,
        series_s=spec.span_s / spec.bins,
        exact_quantiles=spec.exact_quantiles,
        nodes=(Node(name="node", zone="grid", devices=(spec.device,) * per_node, count=spec.gpus // per_node),),
        families=(
            Served(
                name=spec.family,
                repository=family_folder("", spec.repository),
                items=spec.items,
                arrivals=Arrivals(rate_per_s=spec.rate_per_s),
                objective=wanted,
            ),
        ),
        carbon=Carbon(zones={"grid": zone}, speedup=spec.speedup, forecast=spec.forecast),  # type: ignore[arg-type]
        policy=spec.policy,
        parts={"planner": dict(spec.planner)},
        control=ControlSettings(
            tick_s=spec.tick_s if spec.fidelity == "request" else spec.step_s,
            pue=PUE,
            measure_s=MEASURE_S,
            move_horizon_s=HOUR_S / spec.speedup,  # for which an intensity of these traces holds
            tick_min_s=600.0 / spec.speedup,  # nothing changes in between but the intensity, which triggers by itself
            slo_boost_wear_s=12 * HOUR_S / spec.speedup,  # a profile's error does not pass
            triggers=TriggerSettings(slo_hold_s=30.0, slo_rest_s=2 * MEASURE_S),
            demand_fixed={spec.family: FixedDemand(rate_per_s=spec.rate_per_s, items_mean=spec.items)},
        ),
        noise=Noise(latency=spec.noise, energy=spec.noise, device_power=spec.device_noise),
    )


def catalogs(spec: Spec) -> tuple[Catalog, Catalog]:
    """Catalogs (the planner's, the true one before noise): the profile with the spec's limits and factors."""
    family, rows = load_family(family_folder(spec.family, spec.repository))
    energy, latency = dict(spec.energy), dict(spec.latency)
    changed = []
    for row in rows:
        if row.device_type != spec.device:
            continue
        e = energy.get("", 1.0) * energy.get(row.slice_type, 1.0) * energy.get(row.variant, 1.0)
        t = latency.get("", 1.0) * latency.get(row.slice_type, 1.0) * latency.get(row.variant, 1.0)
        changed.append(
            replace(
                row,
                energy_active_j_per_batch=row.energy_active_j_per_batch * e,
                latency_ms_p50=row.latency_ms_p50 * t,
                latency_ms_p95=row.latency_ms_p95 * t,
                latency_ms_p99=row.latency_ms_p99 * t,
                throughput_per_s=row.throughput_per_s / t,
                power_w=row.power_w * e / t,
            )
        )
    truth = Catalog((family,), tuple(changed))
    names = spec.variants or tuple(v.name for v in family.variants)
    known = Catalog(
        (replace(family, variants=tuple(v for v in family.variants if v.name in names)),),
        tuple(r for r in changed if r.variant in names and (not spec.shapes or r.slice_type in spec.shapes)),
    )
    return known, truth


def run_spec(spec: Spec) -> StudyRun:
    """Simulate the run of a spec.

    Raises:
        errors.TrefoilError: the spec cannot be run.
    """
    known, truth = catalogs(spec)
    before = {"grid": spec.past} if spec.past else {}
    provided = Provided(catalog=known, truth=truth, knows_truth=spec.knows_truth, carbon_before=before)
    with sleeping_at(spec.device, spec.sleep):
        return played(spec, scenario_of(spec), provided)


def played(spec: Playable, scenario: Scenario, provided: Provided) -> StudyRun:
    """Result of a spec's scenario, as JSON would give it back."""
    return as_run(spec, simulate(scenario, provided))


def as_run(spec: Playable, result: Result) -> StudyRun:
    """Run of a spec from its simulation's result, as JSON would give it back."""
    return _result(spec, json.loads(result.to_json()))


def _result(spec: Playable, plain: Mapping[str, Any]) -> StudyRun:
    return StudyRun(spec, plain["summary"], plain["series"], plain["evaluations"], plain["decisions"])


@contextmanager
def sleeping_at(device: str, ratio: float) -> Iterator[None]:
    """Let GPUs of a type draw that much of their sleep power, for hardware and planners alike, in this process."""
    usual = DEVICE_TYPES[device]
    DEVICE_TYPES[device] = replace(usual, sleep_w=usual.sleep_w * ratio)
    try:
        yield
    finally:
        DEVICE_TYPES[device] = usual


def run_all(
    specs: Iterable[S], folder: Path | None, jobs: int = 0, say: Callable[[str], None] = lambda _text: None
) -> dict[S, StudyRun]:
    """Results of all runs, those that are kept in `folder` from there. `jobs` 0: one process per core."""
    wanted = list(dict.fromkeys(specs))
    found = {spec: kept for spec in wanted if (kept := _load_result(folder, spec)) is not None}
    left = [spec for spec in wanted if spec not in found]
    if not left:
        return found
    workers = jobs or len(os.sched_getaffinity(0))
    if workers == 1 or len(left) == 1:
        for n, spec in enumerate(left, 1):
            found[spec] = _save_result(folder, spec.play())
            say(f"{n}/{len(left)} {spec.name}")
        return found
    gc.collect()  # here: in a process that is forked, a channel of grpc.aio that is collected waits forever
    with ProcessPoolExecutor(workers, initializer=gc.freeze) as pool:
        running = {pool.submit(_play, spec): spec for spec in sorted(left, key=lambda spec: -spec.work)}
        for n, future in enumerate(as_completed(running), 1):
            spec = running[future]
            found[spec] = _save_result(folder, future.result())
            say(f"{n}/{len(left)} {spec.name}")
    return found


def _play(spec: Playable) -> StudyRun:
    return spec.play()


def _load_result(folder: Path | None, spec: Playable) -> StudyRun | None:
    path = folder / f"{spec.key}.json" if folder is not None else None
    if path is None or not path.exists():
        return None
    return _result(spec, json.loads(path.read_text(encoding="utf-8")))


def _save_result(folder: Path | None, result: StudyRun) -> StudyRun:
    if folder is not None:
        replace_file(folder / f"{result.spec.key}.json", json.dumps(asdict(result), allow_nan=True), sync=False)
    return result
