"""Floods of valid requests, and storms of cancels: what they cost other clients, and who pays for what was executed.

Most floods keep more requests waiting than a family's queue holds, so that it is always full. They come from 127.0.0.2:
another host than that of the other clients.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import grpc
from tritonclient.grpc import service_pb2

from benchmarks.chaos_rows import DEADLINE_S, WORKERS
from benchmarks.echo_family import FAMILY, executions
from benchmarks.echo_load import OK, EchoLoad
from benchmarks.echo_system import LAYOUTS, Arrangement, EchoSystem, running
from benchmarks.redteam import Check, Outcome
from benchmarks.redteam_http import request as rest_request
from tests.support.h2_ends import DATA, HEADERS, PREFACE, RST, SETTINGS, WINDOW_UPDATE, frame
from trefoil.cli.run.launcher import Launcher
from trefoil.runtime.clock import WallClock

LASTS_S: Final = 10.0
SETTLED_S: Final = 15.0  # samples, windows and totals come within
OTHERS_PER_S: Final = 25.0
FLOODS_FROM: Final = "127.0.0.2"
OTHERS_FROM: Final = "127.0.0.1"
PAUSE_S: Final = 1.0
"""After a refusal; else refusals would be most of what is done."""
CANCEL_S: Final = 0.04
WINDOW: Final = 2**30
PAYLOAD: Final = (2**41).to_bytes(8, "little") * 2
BOOKED_ERROR_MAX: Final = 0.01
LEAVING: Final = "leaving"
STAYING: Final = "staying"
NONCES: Final = {LEAVING: 2**42, STAYING: 2**43}
TENANT: Final = """[[tenant]]
name = "{}"
token_sha256 = "{}"
"""
READY_S: Final = 60.0
WARM_UP_S: Final = 60.0
"""The profile's joules are assumed: rates follow the meters within a minute."""
STORM_S: Final = 120.0
"""Samples are of a second, cut off at both ends, and rates follow what has changed within a minute: 1 % of it."""
CLOCK: Final = WallClock()
INFER: Final = "/inference.GRPCInferenceService/ModelInfer"


def headers(stream: int, *more: tuple[str, str]) -> bytes:
    """HEADERS of a call of ModelInfer; each field is written out, none is indexed."""
    fields = ((":method", "POST"), (":scheme", "http"), (":path", INFER), (":authority", "x"), ("te", "trailers"))
    block = b"".join(
        b"\x00" + b"".join(bytes((len(text),)) + text.encode() for text in each)
        for each in (*fields, ("content-type", "application/grpc"), *more)
    )
    return frame(HEADERS, 0x4, stream, block)


def request(items: int = 1, payload: bytes = PAYLOAD) -> bytes:
    """A ModelInferRequest of so many items."""
    message = service_pb2.ModelInferRequest(model_name=FAMILY, id="x", raw_input_contents=[payload * items])
    message.inputs.add(name="PAYLOAD", datatype="INT64", shape=[items, 2])
    return message.SerializeToString()


@dataclass(slots=True)
class Tally:
    """How requests of a flood ended, by gRPC's number or HTTP's status; how many were cancelled."""

    ended: Counter[str] = field(default_factory=Counter)
    cancelled: int = 0


Flood = Callable[[EchoSystem, Tally], Coroutine[Any, Any, None]]


def floods() -> dict[str, Flood]:
    """Floods by name."""
    return {
        "1,300 requests wait on one connection": partial(_grpc, connections=1, at_once=1300),
        "of the same host, on one connection": partial(_grpc, connections=1, at_once=1300, source=OTHERS_FROM),
        "200 connections": partial(_grpc, connections=200, at_once=8),
        "deadlines of 50 ms": partial(_grpc, connections=8, at_once=40, more=(("grpc-timeout", "50m"),)),
        "requests of eight items": partial(_grpc, connections=8, at_once=150, items=8),
        "cancels after 40 ms": partial(_grpc, connections=4, at_once=6, cancel_s=CANCEL_S),
        "streams": _streams,
        "REST keep-alive": _rest,
    }


def checks() -> tuple[Check, ...]:
    """Floods, and a storm of cancels, on a system."""
    return (
        Check("floods of valid requests next to other clients", _play_floods),
        Check("cancels: what was executed is booked, to who asked", _play_cancels),
    )


async def _play_floods(folder: Path) -> Outcome:
    requests, failed, broken, figures = 0, 0, [], []
    async with running(folder / "system", Arrangement(), workers=WORKERS) as system:
        for seed, (name, flood) in enumerate(floods().items()):
            tally = Tally()
            others, details = await _others(system, seed, partial(flood, system, tally))
            requests, failed = requests + others, failed + len(details)
            flooded = sum(tally.ended.values()) + tally.cancelled
            figures.append(f"{name}: {len(details)} of {others} failed, flood {dict(tally.ended)}")
            if details:
                broken.append(f"{name}: {len(details)} of {others} failed: {details[0][:120]}")
            if flooded < 100:
                broken.append(f"{name}: the flood was none: {dict(tally.ended)}")
            await CLOCK.sleep(PAUSE_S)
    return Outcome(requests, failed, broken=tuple(broken), figures=tuple(figures))


async def _others(
    system: EchoSystem, seed: int, attack: Callable[[], Coroutine[Any, Any, None]]
) -> tuple[int, list[str]]:
    """Other clients next to an attack: their requests, and how those that failed did."""
    load = EchoLoad(system.target, OTHERS_PER_S, 10_000_000, seed, DEADLINE_S)
    loading = asyncio.create_task(load.run(), name="others")
    attacking = asyncio.create_task(attack(), name="attack")
    await CLOCK.sleep(LASTS_S)
    load.stop.set()
    await loading  # while the attack continues
    attacking.cancel()
    await asyncio.gather(attacking, return_exceptions=True)
    return len(load.records), [f"{each.code} {each.details}" for each in load.records if each.code != OK]


async def _play_cancels(folder: Path) -> Outcome:
    """Two tenants on equal slices, one of which leaves: each is booked what it had executed, answered or not, and pays
    its share of what the meters say."""
    path = folder / "tenants.toml"
    path.write_text("".join(TENANT.format(name, sha256(name.encode()).hexdigest()) for name in NONCES))
    overrides = {"dispatcher": {"front_open": False, "tenants_file": str(path)}}
    equal = Arrangement(layouts=(LAYOUTS[0], LAYOUTS[0]))
    async with running(folder / "system", equal, workers=WORKERS, overrides=overrides, ready=_all_ready) as system:
        tallies = {name: Tally() for name in NONCES}
        await _both(system, tallies, WARM_UP_S, 0.0)
        before = await _settled(system)
        await _both(system, tallies, STORM_S, CANCEL_S)
        after = await _settled(system)
    grown = {name: after[name] - before[name] for name in after}
    metered, executed = grown["active_joules"], {name: grown[f"executed:{name}"] for name in NONCES}
    broken, figures = [], [f"{tallies[LEAVING].cancelled} cancelled"]
    for name in NONCES:
        booked = grown.get(f"tenant_requests:{name}", 0.0) + grown.get(f"tenant_unanswered:{name}", 0.0)
        paid = grown.get(f"tenant_receipt_joules:{name}", 0.0) + grown.get(f"tenant_unanswered_joules:{name}", 0.0)
        owed = metered * executed[name] / sum(executed.values())
        figures.append(f"{name}: {executed[name]:.0f} executed, {booked:.0f} booked, {paid:.0f} J of {owed:.0f} J")
        for what, error in (("booked", booked / executed[name] - 1), ("joules", paid / owed - 1)):
            figures.append(f"{what} {error:+.2%}")
            if abs(error) > BOOKED_ERROR_MAX:
                broken.append(f"{name}: {what} {error:+.2%}")
    refused = tallies[STAYING].ended["refused"]
    broken += [f"{refused} of {STAYING} failed"] if refused else []
    broken += [] if grown.get(f"tenant_unanswered:{LEAVING}") else ["the storm was none"]
    return Outcome(tallies[STAYING].ended["answered"], refused, broken=tuple(broken), figures=tuple(figures))


async def _all_ready(launcher: Launcher, clock: WallClock) -> None:
    """Wait until a tenant is answered: the front is closed to others.

    Raises:
        TimeoutError: not within READY_S.
    """
    assert launcher.launch is not None, "the launcher has started"
    headers_ = (("authorization", f"Bearer {STAYING}"),)
    message = request()
    async with asyncio.timeout(READY_S), grpc.aio.insecure_channel(launcher.launch.addresses["inference"]) as channel:
        infer = channel.unary_unary(INFER)
        while True:
            with suppress(grpc.aio.AioRpcError):
                await infer(message, metadata=headers_)
                return
            await clock.sleep(PAUSE_S)


async def _both(system: EchoSystem, tallies: dict[str, Tally], lasts_s: float, cancel_s: float) -> None:
    """Both tenants ask; the leaving one cancels each request after `cancel_s` (0: none)."""
    tasks = [
        asyncio.create_task(
            _grpc(
                system, tallies[name], connections=connections, at_once=at_once, nonce=nonce,
                more=(("authorization", f"Bearer {name}"),), cancel_s=cancel_s if name == LEAVING else 0.0,
            ),
            name=name,
        )
        for (name, nonce), (connections, at_once) in zip(NONCES.items(), ((4, 4), (4, 1)), strict=True)
    ]  # fmt: skip
    await CLOCK.sleep(lasts_s)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _settled(system: EchoSystem) -> Counter[str]:
    """Sums of the family over all hours, and executions, once nothing is under way and all is written."""
    await CLOCK.sleep(SETTLED_S)
    state, total = system.client.state, Counter[str]()
    for key in await state.names(state.keys.totals_prefix()):
        total.update(await state.totals(key))
    executed = executions(system.repository)
    return total + Counter({f"executed:{name}": executed[nonce] for name, nonce in NONCES.items()})


async def _grpc(
    system: EchoSystem,
    tally: Tally,
    *,
    connections: int,
    at_once: int,
    source: str = FLOODS_FROM,
    more: tuple[tuple[str, str], ...] = (),
    items: int = 1,
    cancel_s: float = 0.0,
    nonce: int = 2**41,
) -> None:
    """So many requests at once on each connection, another one for each that ends."""
    body = request(items, nonce.to_bytes(8, "little") * 2)
    message = b"\x00" + len(body).to_bytes(4, "big") + body
    one = partial(_connection, system, tally, at_once, source, more, message, cancel_s)
    async with asyncio.TaskGroup() as group:
        for _ in range(connections):
            group.create_task(one())


async def _connection(
    system: EchoSystem, tally: Tally, at_once: int, source: str, more: tuple[tuple[str, str], ...], message: bytes,
    cancel_s: float,
) -> None:  # fmt: skip
    while True:
        host, _, port = system.target.rpartition(":")
        with suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection(host, int(port), local_addr=(source, 0))
            try:
                await _ask(reader, writer, tally, at_once, more, message, cancel_s)
            finally:
                writer.close()
        await CLOCK.sleep(PAUSE_S)


async def _ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tally: Tally, at_once: int,
    more: tuple[tuple[str, str], ...], message: bytes, cancel_s: float,
) -> None:  # fmt: skip
    """One connection's requests until it ends."""
    loop = asyncio.get_running_loop()
    writer.write(PREFACE + frame(SETTINGS, 0, 0) + frame(WINDOW_UPDATE, 0, 0, WINDOW.to_bytes(4, "big")))
    sent = 0
    open_: set[int] = set()

    def ask() -> None:
        nonlocal sent
        if writer.is_closing():
            return
        stream = 2 * sent + 1
        sent += 1
        open_.add(stream)
        writer.write(headers(stream, *more) + frame(DATA, 1, stream, message))
        if cancel_s:
            loop.call_later(cancel_s, cancel, stream)

    def cancel(stream: int) -> None:
        if stream in open_ and not writer.is_closing():
            open_.discard(stream)
            tally.cancelled += 1
            writer.write(frame(RST, 0, stream, (8).to_bytes(4, "big")))
            loop.call_later(CANCEL_S, ask)

    for _ in range(at_once):
        ask()
    answered: set[int] = set()
    while True:
        await writer.drain()
        head = await reader.readexactly(9)
        await reader.readexactly(int.from_bytes(head[:3], "big"))
        kind, flags, stream = head[3], head[4], int.from_bytes(head[5:9], "big")
        if kind == SETTINGS and not flags & 1:
            writer.write(frame(SETTINGS, 1, 0))
        if kind == DATA:
            answered.add(stream)
        if stream in open_ and (kind == RST or (kind == HEADERS and flags & 1)):
            open_.discard(stream)
            served = stream in answered
            answered.discard(stream)
            tally.ended["answered" if served else "refused"] += 1
            loop.call_later(0.0 if served else PAUSE_S, ask)


async def _streams(system: EchoSystem, tally: Tally) -> None:
    """Streams on one connection, each with as many requests under way as it may have."""
    channel = grpc.aio.insecure_channel(system.target)
    call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
    message = request()

    async def one() -> None:
        stream, one_write = call(), asyncio.Lock()

        async def write(count: int, after_s: float = 0.0) -> None:
            await CLOCK.sleep(after_s)
            for _ in range(count):
                async with one_write:
                    await stream.write(message)

        writing = asyncio.create_task(write(128))
        async for answer in stream:
            refused = b"is full" in answer
            tally.ended["refused" if refused else "answered"] += 1
            group.create_task(write(1, PAUSE_S if refused else 0.0))
        await writing

    async with asyncio.TaskGroup() as group:
        for _ in range(16):
            group.create_task(one())


async def _rest(system: EchoSystem, tally: Tally) -> None:
    """Connections that stay, each with one request at a time."""
    host, _, port = system.launch.addresses["rest"].rpartition(":")
    asked = rest_request(nonce=2**41)

    async def one() -> None:
        while True:
            with suppress(OSError, asyncio.IncompleteReadError):
                reader, writer = await asyncio.open_connection(host, int(port), local_addr=(FLOODS_FROM, 0))
                while True:
                    writer.write(asked)
                    head = (await reader.readuntil(b"\r\n\r\n")).lower()
                    await reader.readexactly(int(head.partition(b"content-length:")[2].split()[0]))
                    tally.ended[head.split()[1].decode()] += 1
            await CLOCK.sleep(PAUSE_S)

    async with asyncio.TaskGroup() as group:
        for _ in range(600):
            group.create_task(one())
