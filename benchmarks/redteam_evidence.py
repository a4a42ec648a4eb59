"""Red team: what a model, a client or a storm of cancels can make of a slice's health.

Each check has its own two Tritons behind a dispatcher in this process. The model `moody` answers with the status, text
and delay that its request asks for, and notes each nonce that it executes; `scores` is another model on the same
slices. Clients of both send checked requests meanwhile. Limits: none of theirs fails, no request is executed twice, no
slice is ejected that is not dead; a dead one is found by a probe.
"""

import asyncio
import itertools
import json
import random
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np
import psutil
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from benchmarks.chaos_rows import Trouble
from benchmarks.echo_family import Requests
from benchmarks.echo_load import OPTIONS
from benchmarks.echo_system import EchoSystem
from benchmarks.redteam import Check, Outcome
from tests.support.redis_server import RedisServer
from tests.support.special_models import STATUSES, SpecialTriton
from tests.support.special_world import World, serving
from trefoil.core.fleet import SliceKey
from trefoil.runtime.clock import WallClock
from trefoil.runtime.state import State

CLOCK: Final = WallClock()
MODELS: Final = ("moody", "moods", "scores")
TEXTS: Final = (
    "Stub process 'moody_0_0' is not healthy.", "Failed to obtain the health mutex.", "Socket closed", "Server exiting",
    "failed to connect to all addresses", "Server not ready", "Exceeds maximum queue size", "Request timeout expired",
    "Request for unknown model: 'moody' has no available versions", "connection reset by peer", "", "x" * 50_000,
    "x" * 100_000, "é" * 30_000, "Request for unknown model: 'moody' is not found",
)  # fmt: skip
OTHERS_PER_S: Final = 20.0
DIRECT_S: Final = 2.0
LASTS_S: Final = 8.0
LATE_S: Final = 0.4  # p99 of others beyond their usual one, on a machine that others use
FOUND_MAX_S: Final = 5.0  # until a dead stub is out: Triton itself takes 1 s to answer each request to it


def moody(nonce: int, model: str = "moody", code: int = 0, ms: int = 0, text: str = "") -> pb.ModelInferRequest:
    """A request that says how it is to be answered."""
    made = pb.ModelInferRequest(model_name=model, id=str(nonce))
    for name, value in (("CODE", code), ("MS", ms), ("NONCE", nonce)):
        made.inputs.add(name=name, datatype="INT32", shape=[1, 1])
        made.raw_input_contents.append(value.to_bytes(4, "little"))
    made.inputs.add(name="TEXT", datatype="BYTES", shape=[1, 1])
    made.raw_input_contents.append(len(text.encode()).to_bytes(4, "little") + text.encode())
    return made


def scores(_: int) -> pb.ModelInferRequest:
    """A request for another model on the same slices."""
    made = pb.ModelInferRequest(model_name="scores")
    made.inputs.add(name="SCORES", datatype="FP32", shape=[1, 4])
    made.raw_input_contents.append(np.ones(4, np.float32).tobytes())
    return made


class Attack:
    """Two Tritons behind a dispatcher, and what came of a load on them."""

    def __init__(self, world: World, stub: Any) -> None:
        self.world, self.stub = world, stub
        self.nonces = itertools.count(1)
        self.bad = 0  # requests of the attacker
        self.codes: Counter[str] = Counter()  # of others
        self.details: list[str] = []
        self.latency_s: list[float] = []
        self._stop = asyncio.Event()
        self._others: list[asyncio.Task[None]] = []

    @property
    def health(self) -> Any:
        """Health of the slices as the dispatcher has it."""
        return self.world.local.health

    def others(
        self, *makes: Callable[[int], Any], timeout_s: float | None = None, rate_per_s: float = OTHERS_PER_S
    ) -> None:
        """Begin to send requests of others."""
        self._others += [asyncio.create_task(self._send(make, rate_per_s, timeout_s)) for make in makes]

    async def _send(self, make: Callable[[int], Any], rate_per_s: float, timeout_s: float | None) -> None:
        chance, under_way = random.Random(rate_per_s), set[asyncio.Task[None]]()
        while not self._stop.is_set():
            under_way.add(asyncio.create_task(self._ask(make(next(self.nonces)), timeout_s)))
            await asyncio.sleep(chance.expovariate(rate_per_s))
        await asyncio.gather(*under_way)

    async def _ask(self, request: Any, timeout_s: float | None) -> None:
        began_s = CLOCK.monotonic_s()
        try:
            await self.stub.ModelInfer(request, timeout=timeout_s)
            self.codes["OK"] += 1
        except grpc.aio.AioRpcError as error:
            self.codes[error.code().name] += 1
            self.details.append(f"{request.model_name}: {error.code().name} {(error.details() or '')[:120]}")
        self.latency_s.append(CLOCK.monotonic_s() - began_s)

    def p99_s(self) -> float:
        """Of the others' requests so far, which are forgotten."""
        seen, self.latency_s = sorted(self.latency_s), []
        return seen[int(0.99 * len(seen))] if seen else 0.0

    async def outcome(
        self, *broken: str, may_fail: int = 0, dead: bool = False, figures: tuple[str, ...] = ()
    ) -> Outcome:
        """End the others' load and judge. `dead`: a slice was killed, and may be out."""
        self._stop.set()
        await asyncio.gather(*self._others)
        failed = sum(self.codes.values()) - self.codes["OK"]
        tries = sum(self.codes.values())
        found = [each for each in broken if each]
        if failed > may_fail:
            found.append(f"{failed} of {tries} of others failed: {self.details[:3]}")
        executed = sum((triton.executions() for triton in self.world.slices), Counter[int]())
        del executed[0]
        if twice := [nonce for nonce, count in executed.items() if count > 1]:
            found.append(f"{len(twice)} requests were executed more than once")
        silent = [] if dead else [place for place in self.health.ejections.reasons() if not await self._answers(*place)]
        if sum(self.health.ejected_total.values()) > len(silent) and not dead:
            found.append(f"ejected {dict(self.health.ejected_total)}, of which {silent} answer nothing indeed")
        said = (
            f"{slice_.name} answers nothing for {model or 'any model'}, asked directly either"
            for slice_, model in silent
        )
        return Outcome(tries, failed, broken=tuple(found), figures=(f"{self.bad} bad", *said, *figures))

    async def _answers(self, slice_: SliceKey, model: str) -> bool:
        """Whether a Triton answers for a model, asked without a dispatcher."""
        request = scores(0) if model == "scores" else moody(0, model or "moody", 0, 0)
        async with grpc.aio.insecure_channel(self.world.slices[slice_.start].target) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            try:
                async for _ in stub.ModelStreamInfer(_one(request), timeout=DIRECT_S):
                    return True
            except grpc.aio.AioRpcError:
                pass
        return False


@asynccontextmanager
async def attacked(folder: Path, slices: int = 2, credits: int = 4) -> AsyncIterator[Attack]:
    """The Tritons and the dispatcher, with every model warm."""
    redis = RedisServer()
    state = State.connect(redis.url, "evidence", timeout_s=30.0)
    tritons = [SpecialTriton(folder, number, 3, MODELS) for number in range(slices)]
    try:
        await asyncio.gather(*(triton.ready(120.0) for triton in tritons))
        async with (
            serving(state, folder / "state", tritons, credits, rest_address="127.0.0.1:0") as world,
            grpc.aio.insecure_channel(world.address, options=OPTIONS) as channel,
        ):
            attack = Attack(world, service_pb2_grpc.GRPCInferenceServiceStub(channel))
            for make in (moody, scores):
                await asyncio.gather(*(attack._ask(make(next(attack.nonces)), None) for _ in range(20)))
            attack.codes.clear()
            attack.latency_s.clear()
            yield attack
    finally:
        for triton in tritons:
            triton.close()
        await state.close()
        redis.close()


# One client's requests are answered with statuses


async def unary(attack: Attack, request: Any) -> None:
    """Over gRPC."""
    with _refused():
        await attack.stub.ModelInfer(request)


async def stream(attack: Attack, request: Any) -> None:
    """As the message of a stream."""

    async for answer in attack.stub.ModelStreamInfer(_one(request)):
        if not answer.error_message and answer.infer_response.outputs:
            raise AssertionError(f"an error was lost: {answer}")


async def _one(request: Any) -> AsyncIterator[Any]:
    yield request


async def rest(attack: Attack, request: Any) -> None:
    """Over HTTP."""
    names = [(each.name, each.datatype) for each in request.inputs]
    values = [int.from_bytes(raw, "little") for raw in request.raw_input_contents[:3]]
    data = [*values, request.raw_input_contents[3][4:].decode()]
    inputs = [
        {"name": name, "datatype": kind, "shape": [1, 1], "data": [value]}
        for (name, kind), value in zip(names, data, strict=True)
    ]
    url = f"http://{attack.world.running.rest_address}/v2/models/{request.model_name}/infer"
    asked = urllib.request.Request(url, json.dumps({"inputs": inputs}).encode(), {"Content-Type": "application/json"})

    def ask() -> None:
        with _refused(), urllib.request.urlopen(asked, timeout=30) as answer:
            answer.read()

    await asyncio.to_thread(ask)


class _refused:
    """Requires that a request ends with an error, which is its client's."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: Any, _: Any) -> bool:
        if kind is None:
            raise AssertionError("an error was lost")
        return isinstance(error, grpc.aio.AioRpcError | urllib.error.HTTPError)


async def statuses(how: Callable[[Attack, Any], Awaitable[None]], model: str, folder: Path) -> Outcome:
    """Every status in every text that Triton has for slices in trouble, 10 and more a second, for LASTS_S at least."""
    answers = tuple(itertools.product(range(1, len(STATUSES)), TEXTS))
    async with attacked(folder) as attack:
        attack.others(scores, moody)
        end_s = CLOCK.monotonic_s() + LASTS_S
        for code, text in itertools.cycle(answers):
            await how(attack, moody(next(attack.nonces), model, code, 0, text))
            attack.bad += 1
            if attack.bad >= len(answers) and CLOCK.monotonic_s() >= end_s:
                break
        return await attack.outcome()


async def burst(folder: Path) -> Outcome:
    """Bad answers alone, many at once: streaks of them, in a family that has good clients as well, and one slice."""
    async with attacked(folder, slices=1) as attack:
        attack.others(scores, moody)
        for _ in range(40):
            code, text = STATUSES.index("UNAVAILABLE"), TEXTS[0]
            calls = [unary(attack, moody(next(attack.nonces), "moody", code, 0, text)) for _ in range(10)]
            await asyncio.gather(*calls)
            attack.bad += len(calls)
        return await attack.outcome()


# Storms


async def storm(folder: Path, ms: int, leave_s: float, deadline: bool = False, model: str = "moody") -> Outcome:
    """100 requests a second whose clients leave, or whose deadlines pass, before the answer. Of the decoupled
    model `moods` they are streams."""
    async with attacked(folder) as attack:
        attack.others(scores, moody)
        await asyncio.sleep(LASTS_S / 2)
        usual_s = attack.p99_s()
        end_s = CLOCK.monotonic_s() + LASTS_S
        calls = []
        while CLOCK.monotonic_s() < end_s:
            request, timeout_s = moody(next(attack.nonces), model, 0, ms), leave_s if deadline else None
            stub, streams = attack.stub, model == "moods"
            call = (stub.ModelStreamInfer if streams else stub.ModelInfer)(
                _one(request) if streams else request, timeout=timeout_s
            )
            if not deadline:
                asyncio.get_running_loop().call_later(leave_s, call.cancel)
            calls.append(call)
            attack.bad += 1
            await asyncio.sleep(0.01)
        await asyncio.gather(*(call.code() for call in calls), return_exceptions=True)
        p99_s = attack.p99_s()
        slow = f"p99 of others {p99_s * 1e3:.0f} ms, {usual_s * 1e3:.0f} before" if p99_s > usual_s + LATE_S else ""
        return await attack.outcome(slow, figures=(f"p99 {usual_s * 1e3:.0f} -> {p99_s * 1e3:.0f} ms",))


async def sleepers(folder: Path) -> Outcome:
    """A model sleeps for seconds, on one slice; another model on it serves, and the sleeper's client is answered."""
    async with attacked(folder, slices=1) as attack:
        attack.others(scores)
        for _ in range(2):
            await attack._ask(moody(next(attack.nonces), "moody", 0, 4000), None)
            attack.bad += 1
        return await attack.outcome()


async def between(folder: Path) -> Outcome:
    """Short requests with a deadline between long ones, on an idle slice, after a cold call."""
    async with attacked(folder, slices=1, credits=1) as attack:
        for _ in range(15):
            await attack._ask(moody(next(attack.nonces), "moody", 0, 600), None)
            for _ in range(3):
                await attack._ask(moody(next(attack.nonces), "moody", 0, 5), 0.5)
        return await attack.outcome()


# True deaths


async def dead_stub(folder: Path) -> Outcome:
    """The python stub of one model of one slice is killed. Others of that model fail while a probe is on its way."""
    async with attacked(folder, credits=2) as attack:
        attack.others(scores)
        victims = Attack(attack.world, attack.stub)
        victims.nonces = attack.nonces
        victims.others(moody)
        await asyncio.sleep(1.0)
        key: SliceKey = attack.world.slices[0].status().key
        for process in psutil.Process(attack.world.slices[0].process.pid).children(recursive=True):
            if "/moody/" in " ".join(process.cmdline()):
                process.kill()
        began_s = CLOCK.monotonic_s()
        while not attack.health.ejections.out(key, "moody") and CLOCK.monotonic_s() < began_s + 20:
            await asyncio.sleep(0.02)
        found_s = CLOCK.monotonic_s() - began_s
        await asyncio.sleep(2.0)
        whole = "the whole slice was ejected" if attack.health.ejections.out(key) else ""
        late = f"found after {found_s:.1f} s" if found_s > FOUND_MAX_S else ""
        hurt = await victims.outcome(dead=True, may_fail=8)
        lost = (f"of the model itself {hurt.failed} failed", f"found after {found_s:.1f} s")
        return await attack.outcome(whole, late, *hurt.broken, dead=True, figures=lost)


def checks() -> list[Check]:
    """Attacks on slices' health."""
    of_streams = partial(storm, ms=15, leave_s=0.01, model="moods")
    return [
        Check("evidence: statuses and texts, unary", partial(statuses, unary, "moody")),
        Check("evidence: statuses and texts, stream", partial(statuses, stream, "moody")),
        Check("evidence: statuses and texts, decoupled", partial(statuses, stream, "moods")),
        Check("evidence: statuses and texts, REST", partial(statuses, rest, "moody")),
        Check("evidence: 400 bad answers at once, one slice", burst),
        Check("evidence: cancels, 100/s, of 5 ms", partial(storm, ms=5, leave_s=0.003)),
        Check("evidence: cancels, 100/s, of 15 ms", partial(storm, ms=15, leave_s=0.01)),
        Check("evidence: cancels, 100/s, of streams of 15 ms", of_streams),
        Check("evidence: deadlines, 100/s, of streams of 15 ms", partial(of_streams, deadline=True)),
        Check("evidence: deadlines, 100/s, of 15 ms", partial(storm, ms=15, leave_s=0.01, deadline=True)),
        Check("evidence: a model sleeps", sleepers),
        Check("evidence: short between long, with a deadline", between),
        Check("evidence: a python stub is killed", dead_stub),
    ]


def troubles() -> list[Trouble]:
    """Storms on the shared system."""
    return [Trouble("evidence: cancels, 100/s, on the whole system", _cancels, LASTS_S)]


@asynccontextmanager
async def _cancels(system: EchoSystem) -> AsyncIterator[None]:
    before = system.log("dispatcher").count("slice ejected")
    sending = asyncio.create_task(_cancel_all(system.target))
    try:
        yield
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
    ejected = system.log("dispatcher").count("slice ejected") - before
    assert not ejected, f"{ejected} slices were ejected"


async def _cancel_all(target: str) -> None:
    requests = Requests(7)
    async with grpc.aio.insecure_channel(target, options=OPTIONS) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        for nonce in itertools.count(1 << 44):
            call = infer(requests.message(nonce, requests.payload(nonce)))
            await asyncio.sleep(0.003)
            call.cancel()
            await asyncio.sleep(0.007)
