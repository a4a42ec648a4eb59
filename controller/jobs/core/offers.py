"""Offers between zones: what this one has left over, and whether what a peer offers can be. Pure.

Source: ours. Data: slots, portions of the jobs of this zone; a peer's offers, the time. Result: slots to offer; slots
of a peer to plan with, or why none: an offer is taken whole or not at all.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from trefoil.core.errors import InvalidInput
from trefoil.core.jobs.planned import DevicePool, Offers, Portion, Slot
from trefoil.core.outside.ranges import range_of

STALE_S: Final = 180.0  # then a peer's offer is dropped
SKEW_MAX_S: Final = 30.0  # by which the calendars of two zones may differ
SLOTS_MAX: Final = 49
POOLS_MAX: Final = 200
COSTS_MAX: Final = 200
DEVICES_MAX: Final = 10_000.0
ITEM_MAX_S: Final = 3600.0
ITEM_MAX_J: Final = 1e7
NAME_CHARS_MAX: Final = 200
CLOCKS: Final = "set one of the two clocks (chronyc tracking)"
SENDER: Final = "correct the peer: nothing of its offer is planned with"


def left_over(slots: Iterable[Slot], portions: Iterable[Portion]) -> tuple[Slot, ...]:
    """Slots of awake devices without the time that portions of jobs take."""
    taken: dict[tuple[str, str, float], float] = defaultdict(float)
    for one in portions:
        taken[one.zone, one.pool, one.ends_at_s] += one.device_s

    def rest(slot: Slot, pool: DevicePool) -> DevicePool:
        used_s = taken[slot.zone, pool.name, slot.carbon.ends_at_s]
        return replace(pool, free_s=max(0.0, pool.free_s - used_s), sure_s=max(0.0, pool.sure_s - used_s))

    return tuple(
        replace(slot, pools=tuple(rest(slot, pool) for pool in slot.pools if not pool.idle_w and not pool.wake_j))
        for slot in slots
    )


def check_offers(offers: Offers, zone: str, now_s: float) -> None:
    """Check what a peer offers. `zone`: as the settings name it.

    Raises:
        InvalidInput: another zone's, of another time, or a number that cannot be; names field, value and remedy.
    """
    if offers.zone != zone:
        remedy = "correct other_zones.zone here, or carbon.zone there"
        raise InvalidInput(f"other_zones.zone says {zone!r}", field="offers.zone", value=offers.zone, remedy=remedy)
    ahead_s = offers.made_at_s - now_s
    if not abs(ahead_s) <= SKEW_MAX_S:
        why = f"its clock is {abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} this one"
        raise InvalidInput(why, field="offers.made_at", value=offers.made_at_s, remedy=CLOCKS)
    _need("slots", len(offers.slots), 0, SLOTS_MAX)
    ends_s = -math.inf
    for slot in offers.slots:
        band = slot.carbon
        length_s = band.ends_at_s - band.starts_at_s
        _need("slots.starts_at", band.starts_at_s, max(ends_s, now_s - 2 * 86_400.0), now_s + 4 * 86_400.0)
        _need("slots.ends_at", band.ends_at_s, band.starts_at_s + 1e-3, band.starts_at_s + 86_400.0)
        ends_s = band.ends_at_s
        _need("slots.p50_g_per_kwh", band.p50_g_per_kwh, 0.0, range_of("p50_g_per_kwh").high)
        _need("slots.pue", slot.pue, 1.0, range_of("pue").high)
        _need("slots.pools", len(slot.pools), 0, POOLS_MAX)
        if len({pool.name for pool in slot.pools}) != len(slot.pools):
            raise InvalidInput("two of one name", field="offers.slots.pools.name", remedy=SENDER)
        for pool in slot.pools:
            _check_pool(pool, length_s)


def _check_pool(pool: DevicePool, length_s: float) -> None:
    _need("slots.pools.name", len(pool.name), 1, NAME_CHARS_MAX)
    _need("slots.pools.free_s", pool.free_s, 0.0, DEVICES_MAX * length_s)
    _need("slots.pools.sure_s", pool.sure_s, 0.0, DEVICES_MAX * length_s)
    _need("slots.pools.items", len(pool.costs), 0, COSTS_MAX)
    for cost in pool.costs:
        _need("slots.pools.items.device_s", cost.device_s, 1e-9, ITEM_MAX_S)
        _need("slots.pools.items.active_j", cost.active_j, 1e-9, ITEM_MAX_J)
        _need("slots.pools.items.accuracy", cost.accuracy, 0.0, 1.0)
        _need("slots.pools.items.variant", len(cost.variant), 0, NAME_CHARS_MAX)
        _need("slots.pools.items.request_s", cost.request_s, 1e-9 if cost.request_s else 0.0, ITEM_MAX_S)
        _need("slots.pools.items.request_j", cost.request_j, 1e-9 if cost.request_j else 0.0, ITEM_MAX_J)


def _need(field: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # NaN is neither
        raise InvalidInput(f"is not in {low:g}..{high:g}", field=f"offers.{field}", value=value, remedy=SENDER)


def slots_ahead(slots: Iterable[Slot], now_s: float) -> list[Slot]:
    """Slots that have not ended, of an offer that was checked; the first has begun, with the time left of it."""
    found: list[Slot] = []
    for slot in slots:
        band = slot.carbon
        if band.ends_at_s <= now_s:
            continue
        share = min(1.0, (band.ends_at_s - now_s) / (band.ends_at_s - band.starts_at_s))
        pools = tuple(replace(one, free_s=one.free_s * share, sure_s=one.sure_s * share) for one in slot.pools)
        starts_s = min(band.starts_at_s, now_s) if not found else band.starts_at_s
        found.append(replace(slot, carbon=replace(band, starts_at_s=starts_s), pools=pools))
    return found


def zones_of(
    allowed: Sequence[str], home: str, offered: Mapping[str, Sequence[Slot]], bounded: bool
) -> tuple[str, ...]:
    """Zones to plan a job in, its home first, as a PendingJob has them; empty: none. An empty name stands for a home
    where the job may not run. A job with a bound of grams stays at home: a peer does not know the bound."""
    at_home = not allowed or home in allowed
    peers = () if bounded else tuple(zone for zone in dict.fromkeys(allowed) if zone in offered and zone != home)
    return (home if at_home else "", *peers) if at_home or peers else ()
