"""Eq. 1 on GPUs: a size is a slice type.

Source: InfAdapter section 7 leaves GPUs to future work; ours. Data: devices, the columns of `columns.py` (th is the
rate of a slice by itself within the SLO), accuracies, load times. Decision: how many slices of which type each variant
has, in which configurations, and how much of the load each class takes.
Formulation: the program of `infadapter` with counts of slices for cores,
  RC = sum of compute slices (a whole GPU without MIG: 1) / all of them,  load_k <= th_k count_k,  counts within the
  configurations
B is the GPUs that there are; idle ones sleep. If no plan carries the load: the least accurate variant
on as much as it can use. Where slices lie: `exact/placement.py`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from numpy.random import Generator

from controller.planners.columns import ClassKey, columns
from controller.planners.exact.milp import Limits, Program
from controller.planners.exact.model import Problem, Solution, groups_of
from controller.planners.exact.placement import place
from controller.planners.infadapter.cpu_slices import InfAdapterSettings, planned_for
from controller.planners.plan_assembly import plan_of
from controller.planners.planning_input import PlanningInput
from controller.planners.uniform import expectation
from trefoil.core.brains import Decision
from trefoil.core.errors import InvalidInput
from trefoil.core.fleet import Configuration

LIMITS = Limits(nodes=10_000, gap=1e-6)
_Room = dict[tuple[str, str, str], list[tuple[int, float]]]
"""Slices used less slices there are, as terms of a row, by device type, zone and slice type."""


@dataclass(frozen=True, slots=True)
class _Terms:
    """What a program is made of. `only`: variants that it may use; `most`: carry as much as can be, at any cost."""

    wanted: Mapping[str, float]
    settings: InfAdapterSettings
    only: Collection[tuple[str, str]]
    most: bool = False


def plan_gpus(
    inputs: PlanningInput, planner: str, settings: InfAdapterSettings, rng: Generator, single: bool = False
) -> Decision:
    """Plan slices of GPUs by Eq. 1; `single`: with one variant.

    Raises:
        InvalidInput: no variant has a slice on which it meets its SLO.
    """
    groups = groups_of(inputs.devices)
    found = tuple(c for task in inputs.tasks for c in columns(inputs.view.catalog, task, inputs.devices, settings))
    bare = [t.family for t in inputs.tasks if not any(c.family == t.family for c in found)]
    if bare or not inputs.tasks:
        raise InvalidInput(
            "no variant meets its SLO on any slice" if bare else "no family has an objective",
            field=f"objective {bare[0]}: slo_ms" if bare else "objectives", remedy="a later SLO, or another policy",
        )  # fmt: skip
    problem = Problem(groups, found, inputs.tasks, inputs.view.move_horizon_s)
    wanted = {t.family: t.demand.rate_per_s * (1 + settings.load_margin) for t in inputs.tasks}
    variants = {(c.family, c.variant) for c in found}
    choices = [[one] for one in sorted(variants)] if single and len(inputs.tasks) == 1 else [sorted(variants)]
    solved = [_solve(problem, _Terms(wanted, settings, only)) for only in choices]
    best = min((s for s in solved if s is not None), key=lambda s: s.objective, default=None)
    degraded = ""
    if best is None:
        least = {t.family: min((c.accuracy, c.variant) for c in found if c.family == t.family)[1] for t in inputs.tasks}
        best = _solve(problem, _Terms(wanted, settings, list(least.items()), most=True))
        assert best is not None, "nothing has to be carried"
        degraded = (
            f"short_of_capacity: the GPUs do not carry {', '.join(f'{r:.1f}/s of {f}' for f, r in wanted.items())}"
        )
    hosted = place(problem, best)
    awake = {name for name, parts in hosted.items() if parts}
    expected = {
        t.family: expectation(inputs, t, best.traffic, best.slices, found, settings, rng, awake) for t in inputs.tasks
    }
    rates = {c.key: c.capacity_per_s(1) * settings.capacity_share for c in found}
    for family, told in expected.items():
        carried = sum(rates[key] * n for key, n in best.slices.items() if key.family == family)
        expected[family] = replace(told, capacity_per_s=carried)
    sizes = ", ".join(f"{key.variant} {n}x{key.slice_type}" for key, n in sorted(best.slices.items()))
    value = "nothing carries the load" if degraded else f"Eq. 1 = {-best.objective:.4f}, gap {best.gap:g}"
    why = f"{planner}: {sizes}; {value}"
    plan = plan_of(inputs, planner, hosted, best.traffic, found, settings, expected, why, best.gap, degraded)
    return Decision(planned_for(plan, wanted), why, inputs.view.now_s + settings.tick_s, degraded)


def _solve(problem: Problem, terms: _Terms) -> Solution | None:
    """Solve Eq. 1 over counts of slices; None: nothing carries the load."""
    program, settings = Program(), terms.settings
    usable = [c for c in problem.columns if (c.family, c.variant) in terms.only]
    ready_s = {(c.family, c.variant): c.load_s + settings.start_s for c in problem.columns}
    sizes = {c.key: c.shape.compute_slices for c in usable}
    all_sizes = sum(g.number * max(s.compute_slices for s in g.type.slice_types) for g in problem.groups)
    slowest_s = max(ready_s.values())
    per_size, per_s = settings.beta / all_sizes, settings.gamma / slowest_s if slowest_s else 0.0
    runs = {(r.family, r.variant) for d in problem.devices for r in d.running}
    slowest = program.variable(per_s, 0.0, slowest_s)
    loads: dict[str, list[tuple[int, float]]] = {family: [] for family in terms.wanted}
    counts: dict[ClassKey, int] = {}
    traffic: dict[ClassKey, int] = {}
    layouts, room = _layouts(program, problem)
    for one in usable:
        place_of = (one.device_type, one.key.zone, one.slice_type)
        if place_of not in room:
            continue
        rate = one.capacity_per_s(1) * settings.capacity_share
        most = float(7 * problem.number)
        count = program.variable(-rate if terms.most else per_size * sizes[one.key], 0, most, integer=True)
        load = program.variable(0.0 if terms.most else -settings.alpha * one.accuracy, 0.0, 1.0)
        program.row([(load, 1.0), (count, -rate / terms.wanted[one.family])], high=0.0)
        counts[one.key], traffic[one.key] = count, load
        room[place_of].append((count, 1.0))
        loads[one.family].append((load, 1.0))
        if (one.family, one.variant) not in runs and not terms.most:
            serves = program.variable(0.0, 0, 1, integer=True)
            program.row([(count, 1.0), (serves, -most)], high=0.0)
            program.row([(slowest, 1.0), (serves, -ready_s[one.family, one.variant])], low=0.0)
    for terms_of_place in room.values():
        program.row(terms_of_place, high=0.0)
    for each in loads.values():
        program.row(each, low=0.0 if terms.most else 1.0, high=1.0)
    found = program.solve(LIMITS)
    if found is None:
        return None
    held = {key: round(found.values[at]) for key, at in counts.items() if round(found.values[at]) > 0}
    return Solution(
        layouts=tuple((i, option, round(found.values[at])) for i, option, at in layouts if round(found.values[at]) > 0),
        slices=held,
        traffic={key: _share(found.values[traffic[key]], terms, n, key, problem) for key, n in held.items()},
        power_w=0.0,
        accuracy={},
        objective=found.objective,
        gap=found.gap,
    )


def _layouts(program: Program, problem: Problem) -> tuple[list[tuple[int, Configuration, int]], _Room]:
    """Variables of how many devices of a group are cut each way, and the room that they give."""
    layouts: list[tuple[int, Configuration, int]] = []
    room: _Room = {}
    for index, group in enumerate(problem.groups):
        if group.must_stay:
            continue
        taken = []
        for option in group.options:
            devices = program.variable(0.0, 0, group.number, integer=True)
            layouts.append((index, option, devices))
            taken.append((devices, 1.0))
            for shape, number in option.slices:
                room.setdefault((group.type.name, group.zone, shape), []).append((devices, -float(number)))
        program.row(taken, high=float(group.number))
    return layouts, room


def _share(load: float, terms: _Terms, number: int, key: ClassKey, problem: Problem) -> float:
    """Load of a class [1/s]; where all is wanted that can be, in proportion to what it carries."""
    if not terms.most:
        return load * terms.wanted[key.family]
    return number * next(c.capacity_per_s(1) for c in problem.columns if c.key == key)
