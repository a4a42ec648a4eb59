"""Client of a running carbon feed for `trefoil carbon`, and how zones, times and rungs are read and written."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Final, TypeVar

import grpc
import typer

from protos.carbon_feed.v1 import carbon_feed_pb2 as pb
from protos.carbon_feed.v1 import carbon_feed_pb2_grpc as pb_grpc
from trefoil.cli.options import ServiceAddress
from trefoil.cli.system_client import RPC_TIMEOUT_S, open_service
from trefoil.core.carbon import CarbonReading, Rung, Series
from trefoil.core.errors import NotFound, SettingError, Unavailable, one_of
from trefoil.runtime import codec, rpc

T = TypeVar("T")
PAGE: Final = 5_000  # intervals that are asked for at a time
SPAN: Final = re.compile(r"(\d+(?:\.\d+)?)(s|min|h|d)")
UNIT_S: Final = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}

ZoneArgument = Annotated[
    str, typer.Argument(metavar="[ZONE]", help="Zone, by any name of the registry; default: the only one that is read.")
]


@dataclass(frozen=True, slots=True)
class FeedClient:
    """Client of a connected carbon feed."""

    address: str
    stub: Any

    async def call(self, method: str, request: Any) -> Any:
        """Call one RPC with a deadline; its errors come back as what they were.

        Raises:
            Unavailable: no feed answers there, or it has nothing to say yet.
        """
        try:
            return await rpc.call(getattr(self.stub, method), request, RPC_TIMEOUT_S)
        except Unavailable as error:
            raise self._explain_unavailable(error) from error

    async def stream(self, method: str, request: Any) -> AsyncIterator[Any]:
        """Stream the answers of an RPC, each as it comes."""
        try:
            async for answer in getattr(self.stub, method)(request):
                yield answer
        except grpc.aio.AioRpcError as error:
            failure = rpc.error_of(error)
            failure.__cause__ = error
            raise (self._explain_unavailable(failure) if isinstance(failure, Unavailable) else failure) from error

    async def zones(self) -> list[Any]:
        """Zones that the feed reads."""
        return list((await self.call("ListZones", pb.ListZonesRequest(polled_only=True))).zones)

    async def series(self, names: Sequence[str]) -> list[Series]:
        """Series that it reads under these names (ours, older, a provider's, a cloud region); all of them for none.

        Raises:
            NotFound: a zone that this feed does not read.
        """
        read = await self.zones()
        chosen = [_find_zone(read, name) for name in names] if names else read
        return [codec.from_proto(zone.series) for zone in chosen]

    async def only_series(self, name: str) -> Series:
        """Series of the zone of this name, or of the only one.

        Raises:
            NotFound: a zone that this feed does not read.
            SettingError: several zones and no name.
        """
        found = await self.series([name] if name else [])
        if len(found) != 1:
            known = ", ".join(sorted(series.zone for series in found))
            raise SettingError(f"this feed reads {len(found)} zones", field="ZONE", remedy=f"name one of: {known}")
        return found[0]

    async def history(
        self, zone: str, from_s: float, to_s: float, as_of_s: float = 0.0, revisions: bool = False
    ) -> list[CarbonReading]:
        """History of [from, to) [UTC seconds; 0 = without limit], all pages as of one moment."""
        request = pb.GetHistoryRequest(zone=zone, limit=PAGE, revisions=revisions)
        for field, at_s in (("from_at", from_s), ("to_at", to_s), ("as_of_at", as_of_s)):
            if at_s:
                getattr(request, field).FromMicroseconds(round(at_s * 1e6))
        found: list[CarbonReading] = []
        while True:
            answer = await self.call("GetHistory", request)
            found += [codec.from_proto(reading) for reading in answer.readings]
            if not answer.HasField("next_from_at"):
                return found
            request.from_at.CopyFrom(answer.next_from_at)
            request.as_of_at.CopyFrom(answer.as_of_at)

    def _explain_unavailable(self, error: Exception) -> Exception:
        """A feed that does not answer is said to be so; one that answers has said itself what it lacks."""
        cause = error.__cause__
        if not isinstance(cause, grpc.aio.AioRpcError):
            return error
        if rpc.ERROR_TRAILER in dict(cause.trailing_metadata() or ()):
            return error
        return Unavailable(
            f"no carbon feed answers ({cause.details()})",
            field="--target",
            value=self.address,
            remedy="start it, or name the right host:port; over TLS give --ca and TREFOIL_TOKEN",
        )


def with_feed(where: ServiceAddress, work: Callable[[FeedClient], Awaitable[T]]) -> T:
    """Connect to a feed, await one piece of work, and disconnect."""

    async def attached() -> T:
        async with open_service("carbon_feed", *where) as (address, channel):
            return await work(FeedClient(address, pb_grpc.CarbonFeedStub(channel)))

    return asyncio.run(attached())


def zone_names(zone: Any) -> tuple[str, ...]:
    """Names by which a zone of the registry is found."""
    regions = (cloud.partition("/")[2] for cloud in zone.clouds)
    return tuple(n for n in (zone.id, *zone.aliases, zone.electricity_maps, zone.watttime, *zone.clouds, *regions) if n)


def _find_zone(read: Sequence[Any], name: str) -> Any:
    exact = [zone for zone in read if zone.id == name]
    found = exact or [zone for zone in read if name.lower() in (known.lower() for known in zone_names(zone))]
    if not found:
        remedy = one_of(sorted(zone.id for zone in read), name)
        raise NotFound("this feed does not read it", field="zone", value=name, remedy=remedy)
    return found[0]


def parse_moment(text: str, option: str, now_s: float, *, ahead: bool = False) -> float:
    """UTC seconds of an ISO 8601 time (UTC unless it says otherwise), or of so long ago: `90min`, `24h`, `7d`. `ahead`:
    so long from now.

    Raises:
        SettingError: neither, or not within the years 1970 to 9999.
    """
    if not text:
        return 0.0
    remedy = f"write 2026-11-20T12:00Z, or how long {'it may take' if ahead else 'ago'}: 90min, 24h, 7d"
    try:
        if span := SPAN.fullmatch(text):
            at = datetime.fromtimestamp(now_s + (1 if ahead else -1) * float(span[1]) * UNIT_S[span[2]], UTC)
        else:
            at = datetime.fromisoformat(text)
        at_s = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError, OSError) as error:
        raise SettingError("not a time", field=option, value=text, remedy=remedy) from error
    if at_s < 0:
        raise SettingError("before 1970", field=option, value=text, remedy=remedy)
    return at_s


def rung_name(rung: int) -> str:
    """Number and name of a rung (`2 carried`); a number alone where this version has no name for it."""
    return f"{rung} {Rung(rung).name.lower()}" if rung in Rung.__members__.values() else str(rung)


def series_kind(series: Series) -> str:
    """Method and factors of a series: `average, lifecycle`."""
    return f"{series.method.name.lower()}, {series.factors.name.lower()}"
