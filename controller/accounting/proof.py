"""What in Redis proves how far the books go, where a value that says so may be false: another key that the same write
of the books has written too.
"""

from collections.abc import Mapping
from typing import Final

from controller.observe.reader import AHEAD_S
from controller.role.kept_files import ROLE
from trefoil.core.energy import EnergySample
from trefoil.core.outside.plausible import hour_starts_s
from trefoil.core.outside.stream_order import FOLDED_MAX, StreamOrder
from trefoil.runtime.state import State

MINUTES_READ: Final = 64  # of a node: the last few minutes of each of its devices
MINUTE_MAX_S: Final = 120.0  # of a fold; so much a stray minute can hide
WRITES_READ: Final = 10_000  # of the audit: half a minute of a large fleet


async def booked_minutes(
    state: State, now_s: float, offsets_s: Mapping[str, float | None]
) -> dict[str, tuple[int, float]]:
    """Seq and end, by its agent's clock, of the last minute of each device in `energy:minutes`: what came before is
    booked, whatever `accounted` says. A stray minute continues no other one, and does not count. `offsets_s`: by node,
    what stamps of its agent lack to be of this clock.

    Raises:
        errors.StateUnavailable: Redis does not answer.
    """
    order = StreamOrder[EnergySample](lambda _sample, _why: None, FOLDED_MAX)
    for name in await state.names(state.keys.energy_minutes("")):
        for _, minute in await state.tail(name, EnergySample, MINUTES_READ):
            if minute.ends_at_s <= now_s + AHEAD_S and minute.ends_at_s - minute.starts_at_s <= MINUTE_MAX_S:
                order.take(minute.device, minute, proven=True)
    return {
        str(device): (seq, end_s - (offsets_s.get(str(device).partition("/")[0]) or 0.0))
        for device, (seq, end_s) in order.last.items()
    }


async def stored_sums(
    state: State, now: str, since: str, until: str
) -> tuple[dict[str, dict[str, dict[str, float]]], list[str]]:
    """Sums by hour and family in the books of the hours from `since` on, `until` left out ("": none is); and keys of
    hours after `now` that no controller has written, which are left out too.

    Raises:
        errors.StateUnavailable: Redis does not answer.
    """
    prefix, found, false = state.keys.totals_prefix(), dict[str, dict[str, dict[str, float]]](), list[str]()
    written: set[str] | None = None
    for name in await state.names(prefix):
        family, _, hour = name.removeprefix(prefix).rpartition(":")
        if hour < since or (until and hour >= until) or hour_starts_s(hour) is None:
            continue
        if hour > now:
            written = await _written(state) if written is None else written
            if name not in written:
                false.append(name)
                continue
        found.setdefault(hour, {})[family] = await state.totals(name)
    return found, false


async def _written(state: State) -> set[str]:
    """Keys that controllers have written of late."""
    audit = await state.raw(state.keys.writes(ROLE), WRITES_READ)
    return {entry.get("key", "") for entry in audit if isinstance(entry, dict)}
