"""INFADAPTER: which variants serve, on how many cores each, and how much of the load each takes.

Source: InfAdapter (Salmani et al., EuroMLSys 23), Eq. 1; its public code for preset `artifact`.
Data: the forecast load, capacities th_m(n) and latencies p_m(n) fitted to profiled sizes, accuracies, load times.
Decision, every `tick_s`: n_m cores for each variant m, and its quota of the load, which becomes its share.
Formulation: a mixed-integer program,
  max  alpha AA - (beta RC + gamma LC), with:
  AA = sum_m load_m acc_m / load,  RC = sum_m n_m / B,  LC = max_m tc_m rt_m / max_m rt_m.
  load = sum_m load_m,  load_m <= th_m(n_m),  least_m z_m <= n_m <= B z_m,  RC <= 1,  n_m in steps of `core_step`.
th_m is slope_m n_m + intercept_m z_m, with z_m = 1 where the variant has any core, so that th_m(0) = 0. p_m(n) <= SLO
gives the least size least_m. rt_m = load_s + `start_s`. tc_m = 1 where m serves and does not run now (`resize_loads`:
nor with as many cores). Several devices: a variant may have a slice on each, in one program. Several families share the
budget B. The paper says that its weights normalise costs; how, and gamma, is its code's: AA a fraction, cores over the
budget, seconds over the slowest load. There alpha is called the paper's beta, and beta its gamma. Headroom is the
code's too: 0.8 of the capacity, 10 % more load.
Deviations: preset `artifact` has what else the code has: two cores at least, intercepts cut to whole numbers, four
skipped decisions after each one while the load does not rise. The code also rounds each capacity down to a whole
number, which we do not. Where nothing carries the load: the least accurate variant on all cores, as in the code, named
degraded.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from numpy.random import Generator

from controller.planners.exact.milp import Limits, Program
from controller.planners.infadapter.capacity import Capacity
from controller.planners.infadapter.cpu_slices import (
    PLANNED,
    Choice,
    CpuInput,
    InfAdapterSettings,
    Room,
    cpus_of,
    decide,
    has_only_gpus,
    read_devices,
    refused,
    smallest_on_all,
    still_coming,
)
from controller.planners.infadapter.gpus import plan_gpus
from trefoil.core.brains import Decision, PlanView
from trefoil.core.errors import CatalogError, InvalidInput

LIMITS: Final = Limits(nodes=100_000, gap=0.0)
NOTHING: Final = 1e-9
POINTS: Final = 100.0  # in which the solver counts, so that its tolerances are below a core's weight


@dataclass(frozen=True, slots=True)
class Found:
    """Best choice by Eq. 1, its value, and the proven gap."""

    chosen: tuple[Choice, ...]
    value: float
    gap: float


@dataclass(frozen=True, slots=True)
class InfAdapterPlanner:
    """Planner INFADAPTER. Pure: its state is the plan in force."""

    settings: InfAdapterSettings = InfAdapterSettings()

    def plan(self, view: PlanView, rng: Generator) -> Decision:
        """Plan sizes and shares for the forecast load."""
        return plan_sizes("infadapter", view, rng, self.settings, _choose)


def plan_sizes(
    planner: str,
    view: PlanView,
    rng: Generator,
    settings: InfAdapterSettings,
    choose: Callable[[CpuInput], Decision],
    single: bool = False,
) -> Decision:
    """Plan by Eq. 1: slices of GPUs where the fleet has no CPUs (`single`: of one variant), else the cores that
    `choose` decides on; nothing where no decision is due, or nothing can be planned."""
    settings = settings.of_all(sorted(view.objectives, key=lambda o: o.family))
    try:
        inputs = read_devices(view, settings)
        if has_only_gpus(inputs):
            return plan_gpus(inputs, planner, settings, rng, single)
        cpu = cpus_of(inputs, settings)
        if skipped := skips(view, cpu):
            return Decision(None, f"{planner}: {skipped}", view.now_s + settings.tick_s)
        return choose(cpu)
    except (InvalidInput, CatalogError) as error:
        return refused(planner, error, view, settings)


def _choose(cpu: CpuInput) -> Decision:
    found = best_sizes(cpu.room, cpu.capacities, cpu.wanted, cpu.settings)
    if found is None:
        return decide(cpu, "infadapter", smallest_on_all(cpu), "nothing carries the load", short(cpu))
    why = f"Eq. 1 = {found.value:.4f}, gap {found.gap:g}, for {_loads(cpu)}"
    return decide(cpu, "infadapter", found.chosen, why)


def _loads(cpu: CpuInput) -> str:
    return ", ".join(f"{rate:.1f}/s of {family}" for family, rate in cpu.wanted.items())


def short(cpu: CpuInput) -> str:
    """That the load is above all capacity."""
    has = "the least accurate variant has them all"
    return f"short_of_capacity: {cpu.room.budget:g} cores do not carry {_loads(cpu)}; {has}"


def skips(view: PlanView, cpu: CpuInput) -> str:
    """Why no decision is due: the last one's slices still come, or it is not old enough and the load not above it."""
    if coming := still_coming(view):
        return coming
    skipped, current = cpu.settings.skipped_max, view.current
    if not skipped or current is None or view.trigger != "tick":
        return ""
    planned = {route.family: route.params.get(PLANNED, 0.0) for route in current.routes}
    age_s = view.now_s - current.created_at_s
    if any(rate > planned.get(family, 0.0) for family, rate in cpu.wanted.items()):
        return ""
    due_s = (skipped + 0.5) * cpu.settings.tick_s
    return (
        f"no more load than planned for, {age_s:.0f} s ago; scaling down waits for {due_s:.0f} s"
        if age_s < due_s
        else ""
    )


def best_sizes(
    room: Room,
    capacities: Mapping[str, Sequence[Capacity]],
    wanted: Mapping[str, float],
    settings: InfAdapterSettings,
) -> Found | None:
    """Best sizes by Eq. 1; None where nothing carries the load.

    Raises:
        CpuLimitHit: the solver's safety net was reached.
    """
    program, parts = Program(), []
    alpha, beta, gamma = (POINTS * weight for weight in (settings.alpha, settings.beta, settings.gamma))
    units, budget = {d: int(c / room.step + 1e-9) for d, c in room.cores.items()}, int(room.budget / room.step + 1e-9)
    ready_s = {
        (f, c.variant.name): c.variant.load_s + settings.start_s for f, found in capacities.items() for c in found
    }
    slowest_s = max(ready_s.values())
    of_core, of_second = beta * room.step / room.budget, gamma / slowest_s if slowest_s else 0.0
    slowest = program.variable(of_second, 0.0, slowest_s)
    resizes = settings.resize_loads
    for family, found in capacities.items():
        for one in found:
            for device, most in units.items():
                least = max(1, math.ceil(one.least / room.step - 1e-9)) if math.isfinite(one.least) else budget + 1
                most = min(most, budget)
                if least > most:
                    continue
                serves = program.variable(0.0, 0, 1, integer=True)
                size = program.variable(of_core, 0, most, integer=True)
                load = program.variable(-alpha * one.variant.accuracy, 0.0, 1.0)  # of all of the family's
                program.row([(size, 1.0), (serves, -float(least))], low=0.0)
                program.row([(size, 1.0), (serves, -float(most))], high=0.0)
                slope, rate = one.slope * room.step, wanted[family]
                program.row([(load, 1.0), (size, -slope / rate), (serves, -one.intercept / rate)], high=0.0)
                program.row([(load, 1.0), (serves, -1.0)], high=0.0)
                _load_cost(
                    program, room, (device, family, one.variant.name), ready_s, (serves, size, most, slowest), resizes
                )
                parts.append((Choice(device, family, one.variant.name, 0.0, 0.0), size, load))
    for family in capacities:
        program.row([(load, 1.0) for choice, _, load in parts if choice.family == family], low=1.0, high=1.0)
    for device, most in units.items():
        program.row([(size, 1.0) for choice, size, _ in parts if choice.device == device], high=float(most))
    program.row([(size, 1.0) for _, size, _ in parts], high=float(budget))
    result = program.solve(LIMITS)
    if result is None:
        return None
    values = result.values
    chosen = tuple(
        choice._replace(cores=round(values[size]) * room.step, load_per_s=values[load] * wanted[choice.family])
        for choice, size, load in parts
        if values[load] > NOTHING
    )
    return Found(chosen, -result.objective / POINTS, result.gap)


def _load_cost(
    program: Program,
    room: Room,
    who: tuple[str, str, str],
    ready_s: Mapping[tuple[str, str], float],
    of: tuple[int, int, int, int],
    resizes: bool,
) -> None:
    """Let the slowest load be no less than this variant's, where it has to be loaded."""
    serves, size, most, slowest = of
    _, family, variant = who
    seconds = ready_s[family, variant]
    if not resizes:
        if (family, variant) not in room.loaded:
            program.row([(slowest, 1.0), (serves, -seconds)], low=0.0)
        return
    held = round(room.held.get(who, 0.0) / room.step)
    if not held or held > most:
        program.row([(slowest, 1.0), (serves, -seconds)], low=0.0)
        return
    stays = program.variable(0.0, 0, 1, integer=True)
    program.row([(stays, 1.0), (serves, -1.0)], high=0.0)
    program.row([(size, 1.0), (stays, float(most - held))], high=float(most))
    program.row([(size, 1.0), (stays, -float(held))], low=0.0)
    program.row([(slowest, 1.0), (serves, -seconds), (stays, seconds)], low=0.0)
