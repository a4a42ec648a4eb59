"""Open-loop load on the family `echo`: each answer is checked against its request, each request is accounted for.

Plain gRPC over several connections, because that is how clients that do not know of each other come: retries off, a
Poisson process decided by a seed, a request leaves at its time whatever happened to those before it.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
import numpy as np
from tritonclient.grpc import service_pb2

from benchmarks.echo_family import Requests, wrong
from trefoil.runtime.clock import WallClock

INFER: Final = "/inference.GRPCInferenceService/ModelInfer"
OK: Final = "OK"
WRONG: Final = "WRONG ANSWER"
PASSING_S: Final = 1.0
OPTIONS: Final = (
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
)


@dataclass(frozen=True, slots=True)
class Record:
    """One request. Times are of the monotonic clock."""

    nonce: int
    sent_s: float
    done_s: float
    code: str
    details: str = ""

    @property
    def latency_s(self) -> float:
        return self.done_s - self.sent_s

    def served(self, within_s: float) -> bool:
        """Whether it was answered rightly, and in that time."""
        return self.code == OK and self.latency_s <= within_s


@dataclass(slots=True)
class EchoLoad:
    """`run` sends `requests` requests at `rate_per_s`; `stop` ends it early."""

    target: str
    rate_per_s: float
    requests: int
    seed: int
    deadline_s: float
    connections: int = 8
    keep: bool = True  # the records of answered requests too
    passing: bool = False  # the last connection is another one every PASSING_S
    records: list[Record] = field(default_factory=list)
    sent: int = 0
    done: int = 0
    failed: int = 0
    late_s_max: float = 0.0
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    _clock: WallClock = field(default_factory=WallClock)

    @property
    def in_flight(self) -> int:
        return self.sent - self.done

    async def run(self) -> None:
        """Returns after the last answer. Nonces are 1, 2, 3, ..."""
        requests = Requests(self.seed)
        channels = [await self._connect() for _ in range(self.connections)]
        calls = [channel.unary_unary(INFER) for channel in channels]
        passing = asyncio.create_task(self._pass(channels, calls)) if self.passing else None
        try:
            async with asyncio.TaskGroup() as group:
                start_s = self._clock.monotonic_s()
                for nonce, (after_s, n) in enumerate(self._arrivals(), 1):
                    await self._until(start_s + after_s)
                    if self.stop.is_set():
                        break
                    self.sent += 1
                    group.create_task(self._request(calls, n, requests, nonce))
        finally:
            if passing is not None:
                passing.cancel()
                await asyncio.gather(passing, return_exceptions=True)
            for channel in channels:
                await channel.close()

    async def _connect(self) -> Any:
        channel = grpc.aio.insecure_channel(self.target, options=OPTIONS)
        await asyncio.wait_for(channel.channel_ready(), 10.0)
        return channel

    async def _pass(self, channels: list[Any], calls: list[Any]) -> None:
        """Clients come and go: the last connection is replaced; what is under way on it may end."""
        while True:
            await self._clock.sleep(PASSING_S)
            old, channels[-1] = channels[-1], await self._connect()
            calls[-1] = channels[-1].unary_unary(INFER)
            await old.close(self.deadline_s)

    def _arrivals(self) -> Iterator[tuple[float, int]]:
        """(seconds after the start, connection), a block at a time."""
        chance = np.random.Generator(np.random.PCG64(self.seed))
        at_s, left = 0.0, self.requests
        while left > 0:
            size = min(left, 4096)
            times = at_s + np.cumsum(chance.exponential(1.0 / self.rate_per_s, size))
            yield from zip(times.tolist(), chance.integers(0, self.connections, size).tolist(), strict=True)
            at_s, left = float(times[-1]), left - size

    async def _until(self, due_s: float) -> None:
        left_s = due_s - self._clock.monotonic_s()
        self.late_s_max = max(self.late_s_max, -left_s)
        await asyncio.sleep(max(0.0, left_s))

    async def _request(self, calls: list[Any], n: int, requests: Requests, nonce: int) -> None:
        payload = requests.payload(nonce)
        sent_s = self._clock.monotonic_s()
        try:
            answer = await calls[n](requests.message(nonce, payload), timeout=self.deadline_s)
        except grpc.aio.AioRpcError as error:
            code, details = error.code().name, error.details() or ""
        else:
            details = wrong(service_pb2.ModelInferResponse.FromString(answer), nonce, payload)
            code = WRONG if details else OK
        self.done += 1
        self.failed += code != OK
        if self.keep or code != OK:
            self.records.append(Record(nonce, sent_s, self._clock.monotonic_s(), code, details))
