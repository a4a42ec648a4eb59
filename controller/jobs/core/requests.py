"""What peers' zones offer for requests of families that allow other zones. Pure.

Source: ours. Data: the slots of this zone and of peers that have begun, families by peer. Result: offers that
dispatchers choose from, request by request.
Formulation: joules of a request of one item, alone in its batch, times carbon and PUE of its zone. At home they are the
    mean of the family's awake slices, weighted by the requests that each could answer. In a peer zone they are the mean
    of its pools with time left whose accuracy is not below the mean at home. Only `HEADROOM` of that time is offered:
    other zones may count on it too.
Deviations: idle joules are left out, since both zones keep their devices awake.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from trefoil.core.jobs.planned import DevicePool, ItemCost, RequestOffer, Slot
from trefoil.core.units import MS_PER_S, grams

HEADROOM: Final = 0.5


def request_offers(
    home: Slot, peers: Mapping[str, Sequence[Slot]], families: Mapping[str, Collection[str]], now_s: float
) -> tuple[RequestOffer, ...]:
    """Offers for requests that emit less elsewhere. `families`: by zone, whose requests it may answer."""
    found = (
        _offer(name, home, peers[zone][0], now_s)
        for zone in sorted(families.keys() & {zone for zone, slots in peers.items() if slots})
        for name in sorted(families[zone])
    )
    return tuple(one for one in found if one is not None)


def _offer(family: str, home: Slot, there: Slot, now_s: float) -> RequestOffer | None:
    left_s = there.carbon.ends_at_s - now_s
    if left_s <= 0 or not (here := list(_costs(home.pools, family, {pool.name: pool.total_s for pool in home.pools}))):
        return None
    floor = _mean([(rate, cost.accuracy) for rate, cost in here])
    free_s = {pool.name: pool.free_s for pool in there.pools}
    away = [(rate / left_s, cost) for rate, cost in _costs(there.pools, family, free_s) if cost.accuracy >= floor]
    if not away:
        return None
    here_g, away_g = (
        grams(_mean([(rate, cost.request_j) for rate, cost in costs]), slot.carbon.p50_g_per_kwh, slot.pue)
        for costs, slot in ((here, home), (away, there))
    )
    if away_g >= here_g:
        return None
    return RequestOffer(
        family, there.zone, here_g - away_g, there.carbon.p50_g_per_kwh, there.pue,
        HEADROOM * sum(rate for rate, _ in away), MS_PER_S * max(cost.request_s for _, cost in away), floor,
    )  # fmt: skip


def _costs(pools: Iterable[DevicePool], family: str, time_s: Mapping[str, float]) -> Iterable[tuple[float, ItemCost]]:
    """Requests that awake devices could answer in a time of theirs, and what one takes there."""
    for pool in pools:
        for cost in pool.costs if not (pool.idle_w or pool.wake_j) and time_s[pool.name] > 0 else ():
            if cost.family == family and cost.request_s > 0 and cost.request_j > 0:
                yield time_s[pool.name] / cost.request_s, cost


def _mean(weighted: Sequence[tuple[float, float]]) -> float:
    """Weighted mean; that of equal values is their value, which rounding would miss."""
    mean = sum(weight * value for weight, value in weighted) / sum(weight for weight, _ in weighted)
    return min(mean, max(value for _, value in weighted))
