"""What a history with lies has to show beyond what every history has to."""

from tests.support.virtual.dispatch import NO_SLICE_WAIT_S
from tests.support.virtual.planner import FAMILY
from tests.support.virtual.system import System
from trefoil.core.demand import LoadForecast
from trefoil.runtime import codec

HEAL_S = 10.0  # after the last one, within which all has to be well again
JUDGED_S = 6.0  # for so long requests are sent after that
SAMPLE_MAX_J = 1_000.0
"""More than one true sample of a device here draws, and less than it can draw until `reader.AHEAD_S` from now."""
GRAMS_MAX_PER_J = 10_000.0 * 10.0 / 3.6e6  # the highest intensity and PUE that can be
PLANS = ("plan", "epoch:controller", "lease:controller")
"""Keys by which a worker without a table gets one."""


def judge(system: System, last_s: float) -> None:
    """What a history with lies has to show beyond what every history has to."""
    promises = system.promises
    healed_s = 1000.0 + last_s + HEAL_S
    failed = [r for r in system.requests if r.ends and r.ends[0] not in ("OK", "client left")]
    late = [r for r in failed if r.arrived_s >= healed_s]
    if late:
        promises.broken(f"{len(late)} requests failed after all had to be well: {sorted({r.ends[0] for r in late})}")
    served_s = min((r.arrived_s for r in system.requests if r.ends[:1] == ["OK"]), default=0.0)
    early = [
        r for r in failed
        if served_s <= r.arrived_s < healed_s and r.ends[0] != "connection lost" and not _bounded(system, r.arrived_s)
    ]  # fmt: skip
    if early:
        promises.broken(f"{len(early)} requests failed meanwhile: {sorted({r.ends[0] for r in early})}")
    _judge_books(system)


def _bounded(system: System, now_s: float) -> bool:
    """Whether requests may fail then: nobody signs and a plan was forged, or a worker's table and what Redis has to
    say of plans were both spoilt within HEAL_S, and a worker started between."""
    forged_s = [at_s for at_s, name in system.lies if name == "plan" and system.plan_key_file is None]
    tables_s = [at_s for at_s, name in system.lies if name == "table.jsonl"]
    plans_s = [at_s for at_s, name in system.lies if name in PLANS]
    return any(at_s - NO_SLICE_WAIT_S <= now_s < at_s + HEAL_S for at_s in forged_s) or any(
        abs(table_s - plan_s) < HEAL_S and min(table_s, plan_s) <= now_s < max(table_s, plan_s) + HEAL_S
        for table_s in tables_s for plan_s in plans_s
    )  # fmt: skip


def judge_counted(system: System) -> None:
    """The controller counts the load again."""
    forecast = codec.decode(LoadForecast, system.server.get(system.keys.forecast_load(FAMILY)) or b"")
    if not forecast.mean_per_s >= system.rate_per_s / 4:
        system.promises.broken(f"{forecast.mean_per_s:g}/s are counted of {system.rate_per_s:g}/s")


def _judge_books(system: System) -> None:
    """Joules are those that the nodes told of, and those that nobody can tell from true ones."""
    if system.faults["clocks"] and any(name.startswith("totals") for _, name in system.lies):
        return  # the hour that was spoilt may be over: nobody writes it again
    names = system.server.names(system.keys.totals_prefix())
    hours = [fields for name in names if isinstance(fields := system.server.value(name), dict)]
    booked_j, booked_g = (sum(float(hour.get(name, b"0")) for hour in hours) for name in (b"joules", b"grams"))
    if not 0.0 <= booked_g <= GRAMS_MAX_PER_J * max(0.0, booked_j):
        system.promises.broken(f"{booked_g:g} g are booked for {booked_j:.0f} J")
    drawn_j = sum(node.drawn_j for node in system.nodes.values())
    lies = max(1, sum(name.startswith("energy:") for _, name in system.lies))
    own = system.faults["accounting"]  # a file of sums that is right in every respect is what is gone on from
    if not (own or drawn_j - 4 * 60.0 * 12 <= booked_j <= drawn_j + lies * SAMPLE_MAX_J):
        system.promises.broken(f"{booked_j:.0f} J are booked of {drawn_j:.0f} J")
