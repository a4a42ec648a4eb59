"""Requests that another zone answers, because it emits less there (core/zone_choice.py).

A request goes once: it is marked, and neither the dispatcher there nor another worker here forwards it to a zone. It is
booked there, to the tenant that this zone is there; here it counts as arrived, so that there is capacity for it. What
comes back without an answer, or not in time, is served here. It is counted as "returned" if the zone surely did not
execute it, else as "repeated": its call is cancelled first, and inference has no side effects.
"""

import asyncio
import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Final

import grpc
import structlog
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from dispatcher.request.admission import DEADLINE_MAX_S, Request
from dispatcher.request.core.zone_choice import HELD_S, FamilyThere, Terms, ZoneSight, check_receipt, choose, moved
from dispatcher.routing.core.receipts import CARBON, ENERGY
from dispatcher.routing.request_parameters import FORWARDED, MIN_ACCURACY, RECEIPT, SLO_MS
from dispatcher.routing.slices import SERVICE
from dispatcher.service.local_worker import LocalWorker
from dispatcher.transport.calls import Keepalive, Metadata, NotTaken, Parts
from dispatcher.transport.core import kserve_wire
from dispatcher.transport.h2_channel import H2Channel, open_channel
from trefoil.core.demand import PROBE_TENANT
from trefoil.core.errors import InvalidInput
from trefoil.core.jobs.planned import RequestOffer
from trefoil.core.units import MG_PER_G
from trefoil.runtime.security.zone_channel import CLOSE_S, zone_tls

LOG = structlog.get_logger()
LOOK_S: Final = 1.0  # between two probes of a zone
PROBE_S: Final = 2.0
KEEPALIVE: Final = Keepalive(every_s=2.0, timeout_s=2.0)
CONNECT_S: Final = 3.0  # three round trips around the world, and a name that is looked up
FOLLOWED_S: Final = 30.0  # then offers are forgotten: the plan is read every two seconds
ZONE, MOVED_J, MOVED_G = "trefoil_zone", "trefoil_moved_j", "trefoil_moved_g"
LATE: Final = 2.0  # times its limit: the latency that counts for a request which had no answer in time
STATUS: Final = grpc.StatusCode
REFUSED: Final = (
    STATUS.UNAUTHENTICATED, STATUS.PERMISSION_DENIED, STATUS.RESOURCE_EXHAUSTED, STATUS.UNIMPLEMENTED,
    STATUS.NOT_FOUND, STATUS.FAILED_PRECONDITION,
)  # fmt: skip
"""Statuses by which a zone refuses a family's requests, whatever each asks for; none was executed."""
NOT_EXECUTED: Final = (*REFUSED, STATUS.INVALID_ARGUMENT)


class ZoneRequests:
    """Zones that answer requests. A part of the service, on one event loop."""

    def __init__(self, local: LocalWorker) -> None:
        """Raises SettingError: certificates that cannot be used, or a token that would leave in clear text."""
        settings = local.settings
        serving = [peer for peer in settings.other_zones if peer.inference_address]
        self._peers = {peer.zone: (peer, zone_tls(peer, settings, peer.inference_address)) for peer in serving}
        self._channels: dict[str, H2Channel] = {}
        self._sights = {zone: ZoneSight() for zone in self._peers}
        self._there = defaultdict[tuple[str, str], FamilyThere](FamilyThere)
        self.offers: dict[str, list[RequestOffer]] = {}
        """Those that are followed, by family."""
        self._followed_s = -math.inf
        self._clock, self._membership = local.clock, local.routing.membership
        self._counts = local.accounting.zone_total
        self._transfer_j_per_mb = settings.transfer_j_per_mb

    def __bool__(self) -> bool:
        """Whether any zone may answer."""
        return bool(self._peers)

    def follow(self, offers: Iterable[RequestOffer]) -> None:
        """Follow the offers of the plan that is in force."""
        self.offers, self._followed_s = {}, self._clock.monotonic_s()
        for offer in offers:
            if offer.zone in self._peers:
                self.offers.setdefault(offer.family, []).append(offer)
                self._there[offer.family, offer.zone]  # from now on it is there

    async def init(self) -> None:
        """Nothing: channels connect when they are used."""

    async def run(self) -> None:
        """Measure the round trip to each zone that offers anything, until cancelled."""
        while True:
            zones = {offer.zone for of in self.offers.values() for offer in of}
            await asyncio.gather(*(self._probe(zone) for zone in zones))
            await self._clock.sleep(LOOK_S)

    async def shutdown(self) -> None:
        """Close the connections."""
        await asyncio.gather(*(channel.close(CLOSE_S) for channel in self._channels.values()))

    async def _probe(self, zone: str) -> None:
        began_s, sight = self._clock.monotonic_s(), self._sights[zone]
        try:
            await self._call(zone, "ServerLive", (b"",), PROBE_S)
        except grpc.aio.AioRpcError as error:
            self._lose(zone, error)
        else:
            now_s = self._clock.monotonic_s()
            sight.reached((now_s - began_s) * 1e3, now_s)

    async def _call(self, zone: str, method: str, parts: Parts, timeout_s: float, metadata: Metadata = ()) -> bytes:
        peer, tls = self._peers[zone]
        if (channel := self._channels.get(zone)) is None:
            channel = open_channel(peer.inference_address, tls, keepalive=KEEPALIVE, connect_s=CONNECT_S)
            self._channels[zone] = channel
        if peer.token is not None:
            metadata = (*metadata, ("authorization", f"Bearer {peer.token.get_secret_value()}"))
        return (await channel.unary(f"/{SERVICE}/{method}", parts, timeout_s, metadata))[0]

    async def answer(self, request: Request) -> tuple[bytes, bytes, str, str] | None:
        """Answer of another zone: what it sent, parameters to append, its variant, its name; None: serve it here."""
        offers, ticket = self.offers.get(request.family), request.ticket
        stays = request.parameters.forwarded or request.idle_slice is not None
        if not offers or stays or ticket.sequence_id:
            return None
        began_s = self._clock.monotonic_s()
        if ticket.tenant == PROBE_TENANT or began_s - self._followed_s > FOLLOWED_S:
            return None
        limit_ms = ticket.slo_ms - (began_s - ticket.arrived_s) * 1e3 if ticket.slo_ms else 0.0
        limit_ms = min(limit_ms, DEADLINE_MAX_S * 1e3)
        if ticket.deadline_s is not None:
            limit_ms = min(limit_ms, (ticket.deadline_s - began_s) * 1e3 / 2)  # the other half is for this zone
        workers = len(self._membership.sharers)
        terms = Terms(ticket.items, ticket.bytes, limit_ms, ticket.min_accuracy)
        offer = choose(offers, self._sights, self._there, terms, self._transfer_j_per_mb, began_s, workers)
        if offer is None:
            return None
        request.went_away = True
        there, parts = self._there[request.family, offer.zone], self._marked(request, offer, limit_ms)
        there.sent(ticket.items)
        took_ms, outcome, found = math.nan, "repeated", None
        try:
            wait_s = there.patience_ms(limit_ms) / 1e3
            answer = await self._call(offer.zone, "ModelInfer", parts, wait_s, request.trace)
            took_ms, found = (self._clock.monotonic_s() - began_s) * 1e3, self._read(request, offer.zone, parts, answer)
            outcome, there.answer_bytes = "answered", len(answer)
        except grpc.aio.AioRpcError as error:
            took_ms = self._failed(offer, error, LATE * limit_ms)
            if isinstance(error, NotTaken) or error.code() in NOT_EXECUTED:
                outcome = "returned"
        except (DecodeError, ValueError, InvalidInput) as error:
            self._hold(offer, f"its answer cannot be used: {error}")
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # else the channel was closed
                outcome = "left"  # by its client
                raise
        finally:
            there.ended(took_ms, self._clock.monotonic_s())
            self._counts[request.family, offer.zone, outcome] += 1
        return found

    def _failed(self, offer: RequestOffer, error: grpc.aio.AioRpcError, late_ms: float) -> float:
        """Learn from a request without an answer; the latency that counts for it. NaN: none does."""
        code, there = error.code(), self._there[offer.family, offer.zone]
        if code is STATUS.UNAVAILABLE:
            self._lose(offer.zone, error)
        elif code is STATUS.DEADLINE_EXCEEDED:
            return late_ms  # above this request's objective, not above one that leaves more time
        elif code in REFUSED or (code is STATUS.INVALID_ARGUMENT and not there.answers):  # older: it has no mark
            self._hold(offer, f"{code.name} {error.details()}")
        elif code is not STATUS.INVALID_ARGUMENT:  # this zone will say that, too
            return math.inf  # one of many: it may be this request alone that fails there
        return math.nan

    def _marked(self, request: Request, offer: RequestOffer, limit_ms: float) -> Parts:
        """A request for another zone: what was asked of this dispatcher, what the family has here, a mark."""
        slo_ms = limit_ms - self._sights[offer.zone].round_trip_ms
        return (
            *request.payload,
            kserve_wire.bool_parameter(FORWARDED, True),
            kserve_wire.double_parameter(SLO_MS, slo_ms),
            kserve_wire.double_parameter(MIN_ACCURACY, offer.min_accuracy),
            kserve_wire.bool_parameter(RECEIPT, request.parameters.receipt),
        )

    def _read(self, request: Request, zone: str, sent: Parts, answer: bytes) -> tuple[bytes, bytes, str, str]:
        """Raises DecodeError, ValueError, InvalidInput: it is not an answer, or its receipt cannot be."""
        message = pb.ModelInferResponse.FromString(answer)
        if not message.outputs or len(message.outputs) != len(message.raw_output_contents):
            raise ValueError("it has no outputs")
        told, suffix = message.parameters, kserve_wire.string_parameter(ZONE, zone)
        if request.parameters.receipt:
            joules, mg = (told[name].double_param if name in told else 0.0 for name in (ENERGY, CARBON))
            check_receipt(joules, mg / MG_PER_G, "correct that zone")
            size = sum(map(len, sent)) + len(answer)
            for name, value in zip(
                (MOVED_J, MOVED_G), moved(size, self._transfer_j_per_mb, joules, mg / MG_PER_G), strict=True
            ):
                suffix += kserve_wire.double_parameter(name, value)
        return answer, suffix, told["trefoil_variant"].string_param, zone

    def _hold(self, offer: RequestOffer, why: str) -> None:
        """Keep a family's requests here for a while."""
        self._there[offer.family, offer.zone].held_until_s = self._clock.monotonic_s() + HELD_S
        LOG.warning("a zone does not answer requests", zone=offer.zone, family=offer.family, why=why)

    def _lose(self, zone: str, error: grpc.aio.AioRpcError) -> None:
        sight, code = self._sights[zone], error.code().name
        if code != sight.trouble:
            LOG.warning("a zone does not answer", zone=zone, why=f"{code} {error.details()}")
        sight.lost(code)
