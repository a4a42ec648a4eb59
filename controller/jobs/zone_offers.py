"""Asks peers' controllers for what their zones have left over for jobs (`GetOffers`).

An offer is believed only as a whole and within ranges; one that is refused, or not renewed for STALE_S, is dropped.
"""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import asdict, fields
from typing import Any, Final

from controller.jobs.core.offers import STALE_S, check_offers, slots_ahead
from protos.controller.v1 import controller_pb2, controller_pb2_grpc
from trefoil.core.carbon import CarbonBand
from trefoil.core.errors import TrefoilError, Unavailable
from trefoil.core.jobs.planned import DevicePool, ItemCost, Offers, Slot
from trefoil.runtime import rpc
from trefoil.runtime.clock import Clock
from trefoil.runtime.config import ServiceSettings
from trefoil.runtime.security.other_zones import OfferingZone
from trefoil.runtime.security.zone_channel import ZoneChannel

TIMEOUT_S: Final = 3.0
PERIOD_S: Final = 20.0  # between two questions to one peer


class ZoneOffers:
    """Offers of peers' zones."""

    def __init__(self, peers: Sequence[OfferingZone], own: ServiceSettings | None, clock: Clock) -> None:
        """`own`: settings of this service, whose TLS files are used where a peer names none.

        Raises:
            SettingError: certificates that cannot be used, or a token that would leave in clear text.
        """
        assert own is not None or not peers
        self._channels = {peer.zone: ZoneChannel(peer, own) for peer in peers if own is not None}
        self.families = {peer.zone: frozenset(peer.families) for peer in peers if peer.families}
        """Families whose requests a peer may answer, by zone."""
        self._clock = clock
        self._offers: dict[str, tuple[Offers, float]] = {}
        self._asked_s: dict[str, float] = {}

    async def ask(self, zones: Collection[str], now_s: float) -> tuple[dict[str, Sequence[Slot]], dict[str, str]]:
        """Slots of peers by zone, and why others offer none. `now_s`: of the calendar."""
        known = [zone for zone in sorted(zones) if zone in self._channels]
        wrong = dict(zip(known, await asyncio.gather(*(self._ask(zone, now_s) for zone in known)), strict=True))
        held_s = self._clock.monotonic_s() - STALE_S
        found: dict[str, Sequence[Slot]] = {
            zone: slots_ahead(offers.slots, now_s)
            for zone, (offers, at_s) in self._offers.items()
            if zone in known and at_s > held_s
        }
        return found, {zone: why for zone, why in wrong.items() if why}

    async def _ask(self, zone: str, now_s: float) -> str:
        at_s = self._clock.monotonic_s()
        if at_s - self._asked_s.get(zone, -PERIOD_S) < PERIOD_S:
            return ""
        self._asked_s[zone] = at_s
        try:
            stub = controller_pb2_grpc.ControllerStub(await self._channels[zone].get())
            response = await rpc.call(stub.GetOffers, controller_pb2.GetOffersRequest(), TIMEOUT_S)
            offers = offers_of(response)
            check_offers(offers, zone, now_s)
        except Unavailable as error:  # the last one goes stale
            return f"no offer: {error}"
        except TrefoilError as error:
            self._offers.pop(zone, None)
            return str(error)
        self._offers[zone] = offers, at_s
        return ""

    async def close(self) -> None:
        """Close the connections."""
        for channel in self._channels.values():
            await channel.close()


def offers_message(offers: Offers) -> Any:
    """Convert offers to a GetOffersResponse."""
    message = controller_pb2.GetOffersResponse(zone=offers.zone)
    message.made_at.FromMicroseconds(round(offers.made_at_s * 1e6))
    for slot in offers.slots:
        made = message.slots.add(p50_g_per_kwh=slot.carbon.p50_g_per_kwh, pue=slot.pue)
        made.starts_at.FromMicroseconds(round(slot.carbon.starts_at_s * 1e6))
        made.ends_at.FromMicroseconds(round(slot.carbon.ends_at_s * 1e6))
        for pool in slot.pools:
            items = [controller_pb2.OfferedItem(**asdict(cost)) for cost in pool.costs]
            made.pools.add(name=pool.name, free_s=pool.free_s, sure_s=pool.sure_s, items=items)
    return message


def offers_of(message: Any) -> Offers:
    """Offers of a GetOffersResponse; none of its numbers is checked."""

    def slot(one: Any) -> Slot:
        pools = tuple(
            DevicePool(
                pool.name, pool.free_s, pool.sure_s,
                tuple(ItemCost(*(getattr(cost, field.name) for field in fields(ItemCost))) for cost in pool.items),
            )
            for pool in one.pools
        )  # fmt: skip
        p50 = one.p50_g_per_kwh
        return Slot(
            message.zone, CarbonBand(_seconds(one.starts_at), _seconds(one.ends_at), p50, p50, p50), pools, one.pue
        )

    return Offers(message.zone, _seconds(message.made_at), tuple(map(slot, message.slots)))


def _seconds(time: Any) -> float:
    return float(time.seconds) + float(time.nanos) / 1e9
