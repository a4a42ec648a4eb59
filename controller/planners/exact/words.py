"""The reason of a decision, in words and numbers."""

from collections import defaultdict
from collections.abc import Mapping

from controller.planners.exact.aims import Wish
from controller.planners.exact.mapping import Moves
from controller.planners.exact.model import Solution
from controller.planners.world import World
from trefoil.core.plan import Expected


def why(
    planner: str,
    world: World,
    solution: Solution,
    moved: Moves,
    wishes: Mapping[str, Wish],
    expected: Mapping[str, Expected],
    degraded: str,
    note: str,
) -> str:
    """Carbon, demand, the mix, what it costs against now, the price, the moves."""
    carbon = world.view.carbon
    awake = sum(n for _, _, n in solution.layouts)
    parts = [f"{planner} ({world.view.trigger}): {carbon.intensity_g_per_kwh:.0f} g/kWh"]
    for task in world.tasks:
        e, wish = expected[task.family], wishes[task.family]
        parts.append(
            f"{task.family}: {task.mean_per_s:.1f}/s (plan for {task.demand.rate_p90_per_s:.1f}/s): "
            f"{_mix(solution, task.family)}; accuracy {e.accuracy:.4f}, p95 {e.latency_ms_p95:.0f} ms of "
            f"{task.objective.slo_ms:.0f} ms, {e.joules_per_request:.2f} J and {e.grams_per_request * 1e3:.3f} mg a "
            f"request{_against(world, task.family, e)}"
        )
        if wish.why:
            parts.append(wish.why)
    parts.append(f"{awake} of {len(world.devices)} GPUs awake{_lost(world)}")
    parts.append(_moves(moved, world.view.move_horizon_s) + note)
    if degraded:
        parts.append(f"degraded: {degraded}")
    return "; ".join(parts)


def _mix(solution: Solution, family: str) -> str:
    total = sum(r for k, r in solution.traffic.items() if k[0] == family)
    shares: dict[str, float] = defaultdict(float)
    where: dict[str, list[str]] = defaultdict(list)
    for key in sorted(solution.traffic):
        if key[0] == family and total > 0:
            shares[key[3]] += solution.traffic[key] / total
            where[key[3]].append(f"{solution.slices[key]}x{key[2]}")
    return ", ".join(f"{v} {shares[v]:.1%} on {'+'.join(where[v])}" for v in sorted(shares, key=lambda v: -shares[v]))


def _against(world: World, family: str, e: Expected) -> str:
    measured = next((m for m in world.view.measured if m.family == family), None)
    if measured is not None and measured.grams_per_request:
        return f" (measured now {measured.grams_per_request * 1e3:.3f} mg)"
    current = world.view.current.expected.get(family) if world.view.current else None
    if current is not None and current.joules_per_request > 0:
        change = e.joules_per_request / current.joules_per_request - 1
        return f" ({change:+.1%} joules against the plan in force)"
    return ""


def _lost(world: World) -> str:
    stale = f", silent: {', '.join(world.view.fleet.stale)}" if world.view.fleet.stale else ""
    lost = f", {len(world.lost)} lost or out of service" if world.lost else ""
    left = f", left out: {'; '.join(f'{name} ({why})' for name, why in world.left)}" if world.left else ""
    return lost + left + stale


def _moves(moved: Moves, horizon_s: float) -> str:
    if not moved.any:
        return "nothing moves, only shares" if horizon_s >= 0 else ""
    words = [
        f"{number} {name if number == 1 else name + 's'}"
        for number, name in (
            (moved.starts, "slice start"),
            (moved.loads, "model load"),
            (moved.wakes, "wake-up"),
            (moved.sleeps, "sleep"),
        )
        if number
    ]
    return f"moves: {', '.join(words)} for {moved.energy_j:.0f} J, to pay back in {horizon_s:.0f} s"
