"""Clients and operators that send nonsense, too much, too little or too slowly: one attack a process, until SIGTERM.

`python -m benchmarks.hostile <attack> <addresses as JSON>`. It prints one line of JSON at its end: calls, their codes,
the slowest that got a status, and how long this process itself stood still. Calls are timed one by one; what is done
to a connection that nobody reads has no status and is not counted.
"""

import asyncio
import contextlib
import gzip
import itertools
import json
import math
import resource
import signal
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from tritonclient.grpc import service_pb2

from benchmarks.echo_family import FAMILY
from protos.carbon_feed.v1 import carbon_feed_pb2, carbon_feed_pb2_grpc
from protos.controller.v1 import controller_pb2, controller_pb2_grpc
from protos.dispatcher.v1 import dispatcher_pb2, dispatcher_pb2_grpc
from protos.power_agent.v1 import power_agent_pb2, power_agent_pb2_grpc
from trefoil.cli.system_client import control_token
from trefoil.runtime.clock import WallClock

INFER: Final = "/inference.GRPCInferenceService/ModelInfer"
STREAM: Final = "/inference.GRPCInferenceService/ModelStreamInfer"
TIMEOUT_S: Final = 10.0
WORK_S: Final = 0.005
CLOCK: Final = WallClock()
OPTIONS: Final = (("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1))
BIG: Final = 2**63 - 1
LONG: Final = "n" * 2_000_000

Addresses = Mapping[str, str]


@dataclass(slots=True)
class Tally:
    """What an attack's calls met, without the time in which this process's own loop stood still: `stood_still_s`.

    `slowed`: how much longer a little work took than its CPU time, because others use the machine.
    """

    calls: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    slowest: str = ""
    stood_still_s: float = 0.0
    slowed: float = 1.0
    done: asyncio.Event = field(default_factory=asyncio.Event)

    async def time(self, what: str, call: Awaitable[Any]) -> str:
        """Await a call; its code."""
        started_s, still_s = CLOCK.monotonic_s(), self.stood_still_s
        try:
            code = str(await call or "OK") if asyncio.iscoroutine(call) else await _ok(call)
        except grpc.aio.AioRpcError as error:
            code = error.code().name
        except (OSError, asyncio.IncompleteReadError) as error:
            code = type(error).__name__
        took_s = CLOCK.monotonic_s() - started_s - (self.stood_still_s - still_s)
        self.calls += 1
        self.codes[code] += 1
        if took_s > self.slowest_s:
            self.slowest_s, self.slowest = took_s, f"{what}: {code}"
        return code

    async def watch_itself(self) -> None:
        """Measure how long this process stands still, and how busy the machine is."""
        for n in itertools.count():
            if n % 50 == 0:
                wall_s, cpu_s = time.perf_counter(), time.process_time()
                while time.process_time() - cpu_s < WORK_S:
                    pass
                self.slowed += ((time.perf_counter() - wall_s) / WORK_S - self.slowed) / (n // 50 + 1)
            before_s = CLOCK.monotonic_s()
            await CLOCK.sleep(0.01)
            self.stood_still_s += max(0.0, CLOCK.monotonic_s() - before_s - 0.02)

    def report(self) -> str:
        """One line of JSON."""
        return json.dumps({name: getattr(self, name) for name in Tally.__slots__ if name != "done"})


async def _ok(call: Awaitable[Any]) -> str:
    await call
    return "OK"


# --- inference over gRPC ----------------------------------------------------------------------------------------------


def request(shape: tuple[int, ...] = (1, 2), raw: bytes = bytes(16), tensors: int = 1, **more: Any) -> Any:
    """A ModelInferRequest, as wrong as it is asked for."""
    message = service_pb2.ModelInferRequest(model_name=more.get("model", FAMILY), id=more.get("id", "x"))
    for _ in range(tensors):
        message.inputs.add(name=more.get("name", "PAYLOAD"), datatype=more.get("datatype", "INT64"), shape=shape)
        message.raw_input_contents.append(raw)
    for key, value in more.get("parameters", {}).items():
        kind = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}[type(value)]
        setattr(message.parameters[key], kind, value)
    return message


def nonsense() -> dict[str, bytes]:
    """Requests that make no sense, by what is wrong with them."""
    disagree = request()
    disagree.inputs[0].contents.int64_contents.append(1)
    typed = request()
    typed.ClearField("raw_input_contents")
    typed.inputs[0].contents.bytes_contents.append(b"x")
    messages = {
        "sizes near 2^63": request((BIG, 2)), "a product beyond 2^63": request((2**62, 4)),
        "an empty product of 2^63": request((BIG, 0), b""), "negative sizes": request((-1, -2)),
        "no item": request((0, 2), b""), "no shape": request(()), "no input": request(tensors=0),
        "too few bytes": request(raw=b"x"), "contents twice": disagree, "contents of another type": typed,
        "lengths that lie": request((1, 2), b"\xff\xff\xff\x7f" * 4, datatype="BYTES"),
        "an unknown datatype": request(datatype="INT65"), "the same name thrice": request(tensors=3),
        "100,000 inputs": request(raw=b"", tensors=100_000), "a long id": request(id=LONG),
        "a long name": request(name=LONG), "a long model": request(model=LONG),
        "a long datatype": request(datatype=LONG),
        "100,000 parameters": request(parameters={f"p{n}": n for n in range(100_000)}),
        "an unknown knob": request(parameters={f"trefoil_{LONG}": 1}),
        "a long sequence": request(parameters={"sequence_id": LONG, "sequence_start": True}),
        "timeout 2^63": request(parameters={"timeout": BIG}), "a negative timeout": request(parameters={"timeout": -1}),
        "a negative priority": request(parameters={"priority": -(2**63)}),
    }  # fmt: skip
    for knob in ("trefoil_slo_ms", "trefoil_min_accuracy"):
        for value in (math.nan, math.inf, -1.0, "nan", "1e999", LONG):
            messages[f"{knob} {str(value)[:6]}"] = request(parameters={knob: value})
    made = {name: message.SerializeToString() for name, message in messages.items()}
    made |= {"garbage": b"\xff" * 999, "no UTF-8": b"\x0a\x02\xff\xff", "groups in groups": b"\x0b" * 100_000}
    return made


async def send_nonsense(at: Addresses, tally: Tally) -> None:
    """Everything of `nonsense`, again and again, alone and on streams."""
    bodies = nonsense()
    async with grpc.aio.insecure_channel(at["inference"], options=OPTIONS) as channel:
        call, stream = channel.unary_unary(INFER), channel.stream_stream(STREAM)
        for name, data in itertools.cycle(bodies.items()):
            await tally.time(name, call(data, timeout=TIMEOUT_S))
            await tally.time(f"{name} (stream)", _streamed(stream, data))
            await CLOCK.sleep(0.02)


async def _streamed(stream: Any, data: bytes) -> str:
    call = stream(timeout=TIMEOUT_S)
    await call.write(data)
    await call.done_writing()
    return "OK" if await call.read() is not grpc.aio.EOF else (await call.code()).name


async def cancel(at: Addresses, tally: Tally) -> None:
    """Ask 500 times a second, and leave before the answer."""
    data = request().SerializeToString()
    async with grpc.aio.insecure_channel(at["inference"], options=OPTIONS) as channel:
        infer = channel.unary_unary(INFER)
        for n in itertools.count():
            call = infer(data, timeout=TIMEOUT_S)
            asyncio.get_running_loop().call_later((n % 8) * 0.001, call.cancel)
            tally.calls += 1
            await CLOCK.sleep(0.002)


async def hurry(at: Addresses, tally: Tally) -> None:
    """Ask 500 times a second with a deadline of 1 ms."""
    data = request().SerializeToString()
    async with grpc.aio.insecure_channel(at["inference"], options=OPTIONS) as channel, asyncio.TaskGroup() as group:
        infer = channel.unary_unary(INFER)
        while True:
            group.create_task(tally.time("1 ms", infer(data, timeout=0.001)))
            await CLOCK.sleep(0.002)


# --- connections ------------------------------------------------------------------------------------------------------

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
CONNECTIONS: Final = 1500


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """An HTTP/2 frame."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def headers(stream: int, *more: tuple[str, str]) -> bytes:
    """HEADERS of a call of ModelInfer; each field is written out, none is indexed."""
    fields = ((":method", "POST"), (":scheme", "http"), (":path", INFER), (":authority", "x"), ("te", "trailers"))
    block = b"".join(
        b"\x00" + b"".join(bytes((len(text),)) + text.encode() for text in each)
        for each in (*fields, ("content-type", "application/grpc"), *more)
    )
    return frame(HEADERS, 0x4, stream, block)


async def opened(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection."""
    host, port = address.rsplit(":", 1)
    return await asyncio.open_connection(host, int(port), limit=2**20)


async def idle(at: Addresses, tally: Tally) -> None:
    """Hold 1,500 connections on each front that never ask, and meanwhile ask over new ones."""
    held = []
    begins = (b"", PREFACE + frame(SETTINGS, 0, 0), b"GET /v2 HTTP/1.1\r\nX: ")
    fronts = [at[name] for name in ("inference", "rest") if name in at]
    for address, n in itertools.product(fronts, range(CONNECTIONS)):
        host, port = address.rsplit(":", 1)
        connection = socket.socket()
        connection.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            connection.connect((host, int(port)))
        held.append((connection, begins[2 if address == at.get("rest") and n % 2 else n % 2]))
    await CLOCK.sleep(0.3)
    for connection, first in held:
        with contextlib.suppress(OSError):
            connection.send(first)
    data = request().SerializeToString()
    while True:
        async with grpc.aio.insecure_channel(at["inference"], options=OPTIONS) as channel:
            await tally.time("a new gRPC client", channel.unary_unary(INFER)(data, timeout=TIMEOUT_S))
        if "rest" in at:
            await tally.time("a new REST client", http(at["rest"], "GET", f"/v2/models/{FAMILY}"))
        await CLOCK.sleep(0.05)


async def flood(at: Addresses, tally: Tally) -> None:
    """Streams that are reset as soon as they are opened, pings and settings, on ten connections."""
    body = small()

    async def reset(writer: asyncio.StreamWriter) -> None:
        for stream in itertools.count(1, 2):
            writer.write(headers(stream) + frame(DATA, 1, stream, body) + frame(RST, 0, stream, bytes(4)))
            await _often(writer)

    async def ping(writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(frame(PING, 0, 0, bytes(8)) * 8)
            await _often(writer)

    async def settings(writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 65_535) * 8) * 8)
            await _often(writer)

    async def again(how: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> None:
        while True:
            reader, writer = await opened(at["inference"])
            writer.write(PREFACE + frame(SETTINGS, 0, 0))
            reading = asyncio.create_task(_read_all(reader))
            with contextlib.suppress(OSError):
                await how(writer)
            reading.cancel()
            writer.close()
            tally.codes["cut off"] += 1

    await asyncio.gather(*(again(how) for how in (reset, reset, reset, reset, ping, ping, ping, settings, settings)))


async def _often(writer: asyncio.StreamWriter) -> None:
    await writer.drain()
    if writer.is_closing():
        raise ConnectionResetError
    await CLOCK.sleep(0.002)


async def _read_all(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        while await reader.read(65_536):
            pass


async def slow(address: str, data: bytes, pause_s: float) -> None:
    """Write a byte a moment, again and again."""
    while True:
        with contextlib.suppress(OSError):
            _, writer = await opened(address)
            for at_byte in range(len(data)):
                writer.write(data[at_byte : at_byte + 1])
                await CLOCK.sleep(pause_s)
            writer.close()


async def deaf(address: str, requests: int) -> None:
    """Ask so many times, and read nothing of what comes back."""
    with contextlib.suppress(OSError):
        _, writer = await opened(address)
        writer.write(PREFACE + frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 0)))
        for n in range(1, 2 * requests, 2):
            writer.write(headers(n) + frame(DATA, 1, n, small()))
        await asyncio.Event().wait()


def small() -> bytes:
    """A request as gRPC sends it."""
    message = request().SerializeToString()
    return b"\x00" + len(message).to_bytes(4, "big") + message


def whole() -> bytes:
    """All that a client with one request sends."""
    return PREFACE + frame(SETTINGS, 0, 0) + headers(1) + frame(DATA, 1, 1, small())


async def dribble(at: Addresses, _: Tally) -> None:
    """Write a byte a moment, or read nothing of what was asked for; 100 connections of each kind."""
    post = f"POST /v2/models/{FAMILY}/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n{{".encode()
    many = [slow(at["inference"], whole(), 0.1) for _ in range(100)]
    many += [deaf(at["inference"], 2) for _ in range(100)]
    if "rest" in at:
        many += [slow(at["rest"], post, 0.1) for _ in range(100)]
    await asyncio.gather(*many)


async def bombs(at: Addresses, tally: Tally) -> None:
    """Send half a megabyte that would become 128, over gRPC and REST."""
    packed = gzip.compress(bytes(2**30 // 8), 1)
    message = b"\x01" + len(packed).to_bytes(4, "big") + packed
    while True:
        await tally.time("gzip over gRPC", _bomb(at["inference"], message))
        if "rest" in at:
            for encoding in ("gzip", "deflate"):
                body = packed if encoding == "gzip" else b"\x78\x01" + packed[10:]
                infer = http(at["rest"], "POST", f"/v2/models/{FAMILY}/infer", body, **{"Content-Encoding": encoding})
                await tally.time(f"{encoding} over REST", infer)
        await CLOCK.sleep(0.2)


async def _bomb(address: str, message: bytes) -> str:
    """One call by hand; gRPC's own client would compress the gigabyte each time."""
    reader, writer = await opened(address)
    try:
        writer.write(PREFACE + frame(SETTINGS, 0, 0) + headers(1, ("grpc-encoding", "gzip")))
        room, initial, sent = {0: 65_535, 1: 65_535}, 65_535, 0  # of the connection and of the stream
        while True:
            while sent < len(message) and min(room.values()) > 0:
                part = message[sent : sent + min(*room.values(), 16_384)]
                sent += len(part)
                room = {stream: left - len(part) for stream, left in room.items()}
                writer.write(frame(DATA, int(sent == len(message)), 1, part))
            await writer.drain()
            head = await asyncio.wait_for(reader.readexactly(9), TIMEOUT_S)
            payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
            if head[3] == WINDOW_UPDATE:
                room[int.from_bytes(head[5:9], "big")] += int.from_bytes(payload, "big")
            elif head[3] == SETTINGS and not head[4] & 1:
                given = dict(struct.iter_unpack(">HI", payload))
                room[1] += given.get(4, initial) - initial
                initial = given.get(4, initial)
                writer.write(frame(SETTINGS, 1, 0))
            elif head[3] == PING and not head[4] & 1:
                writer.write(frame(PING, 1, 0, payload))
            elif head[3] == HEADERS:
                return "a status"
            elif head[3] in (RST, GOAWAY):
                return "reset"
    finally:
        writer.close()


# --- REST -------------------------------------------------------------------------------------------------------------


async def http(address: str, method: str, path: str, body: bytes = b"", **fields: str) -> str:
    """One request over HTTP; its status."""
    reader, writer = await opened(address)
    try:
        lines = (f"{method} {path} HTTP/1.1", "Host: x", "Connection: close", f"Content-Length: {len(body)}")
        more = (f"{name}: {value}" for name, value in fields.items())
        writer.write("\r\n".join((*lines, *more, "", "")).encode("latin-1") + body)
        first = await asyncio.wait_for(reader.readline(), TIMEOUT_S)
        return first.split()[1].decode() if first else "no status"
    finally:
        writer.close()


def json_nonsense() -> Iterator[tuple[str, bytes]]:
    """Bodies of /infer that make no sense."""
    tensor: dict[str, Any] = {"name": "PAYLOAD", "shape": [1, 2], "datatype": "INT64", "data": [1, 2]}
    for name, changed in (
        ("sizes near 2^63", {"shape": [BIG, 2]}), ("a product beyond 2^63", {"shape": [2**62, 4]}),
        ("negative sizes", {"shape": [-1, -2]}), ("no Unicode", {"name": "\ud800"}), ("a long name", {"name": LONG}),
        ("huge numbers", {"data": [10**4000, 1]}), ("nothing", {"data": []}),
    ):  # fmt: skip
        yield name, json.dumps({"inputs": [tensor | changed]}).encode()
    for name, more in (
        ("NaN in a knob", {"parameters": {"trefoil_slo_ms": math.nan}}), ("a long id", {"id": LONG}),
        ("100,000 parameters", {"parameters": {f"p{n}": n for n in range(100_000)}}),
        ("100,000 outputs", {"outputs": [{"name": f"o{n}"} for n in range(100_000)]}),
    ):  # fmt: skip
        yield name, json.dumps({"inputs": [tensor]} | more).encode()
    yield "deep lists", b'{"inputs":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}"
    yield "deep objects", b'{"a":' * 500_000
    yield "many lists", b'{"inputs":[' + b"[]," * 1_300_000 + b"1]}"
    yield "many numbers", b'{"inputs":[' + b"1," * 2_000_000 + b"1]}"
    yield "60 MB", b'{"inputs":[' + b"[]," * 20_000_000 + b"1]}"
    yield "garbage", b"\xff\0" * 999


async def send_json(at: Addresses, tally: Tally) -> None:
    """Everything of `json_nonsense`, again and again."""
    if "rest" not in at:
        return
    bodies = tuple(json_nonsense())
    for name, body in itertools.cycle(bodies):
        await tally.time(name, http(at["rest"], "POST", f"/v2/models/{FAMILY}/infer", body))
        await tally.time("the index", http(at["rest"], "POST", "/v2/repository/index", body[:200_000]))
        await CLOCK.sleep(0.02)


# --- operators --------------------------------------------------------------------------------------------------------

STUBS: Final = {
    "controller": controller_pb2_grpc.ControllerStub, "power_agent": power_agent_pb2_grpc.PowerAgentStub,
    "carbon_feed": carbon_feed_pb2_grpc.CarbonFeedStub, "dispatcher": dispatcher_pb2_grpc.DispatcherStub,
}  # fmt: skip


def commands(plan: Any) -> Iterator[tuple[str, str, Any]]:
    """Commands that make no sense: (service, method, request). `plan` is the one in force."""

    def pin(change: Callable[[Any], Any]) -> Any:
        made = controller_pb2.PinRequest(plan=plan)
        change(made.plan)
        return made

    spoil: tuple[Callable[[Any], Any], ...] = (
        lambda p: p.Clear(), lambda p: p.ClearField("routes"), lambda p: p.ClearField("nodes"),
        lambda p: p.nodes.extend(list(p.nodes)), lambda p: p.routes.extend(list(p.routes)),
        lambda p: setattr(p.nodes[0], "node", "nowhere"), lambda p: setattr(p.routes[0], "family", "ghost"),
        lambda p: setattr(p.routes[0].targets[0], "weight", math.nan),
        lambda p: setattr(p.routes[0].targets[0], "weight", -1.0),
        lambda p: setattr(p.routes[0].targets[0], "credits", 2**32 - 1),
        lambda p: setattr(p.routes[0].targets[0].slice, "slice_type", "x" * 100_000),
        lambda p: setattr(p.nodes[0].devices[0].slices[0].hosted[0], "stages", 2**32 - 1),
        lambda p: setattr(p.nodes[0].devices[0].slices[0].hosted[0], "instances", 2**32 - 1),
        lambda p: setattr(p.nodes[0].devices[0], "power_limit_w", math.inf),
        lambda p: setattr(p.created_at, "seconds", BIG),
        lambda p: p.nodes.MergeFrom([type(p.nodes[0])()] * 500_000),
        lambda p: p.nodes[0].devices.MergeFrom([p.nodes[0].devices[0]] * 2000),
    )  # fmt: skip
    for change in spoil:
        yield "controller", "Pin", pin(change)
    for value in (math.nan, math.inf, -1.0, 1e308):
        objective = {"family": FAMILY, "mode": 2, "slo_ms": value, "slo_quantile": value, "min_accuracy": value}
        yield "controller", "SetObjectives", controller_pb2.SetObjectivesRequest(objectives=[{"objective": objective}])
        yield "power_agent", "Drain", power_agent_pb2.DrainRequest(device="node0/gpu0", epoch=BIG, patience_s=value)
        lease = {"device": "node0/gpu0", "holder": "x", "max_mhz": 2**32 - 1, "epoch": 0}
        yield "power_agent", "SetClocks", power_agent_pb2.SetClocksRequest(lease=lease, ttl_s=value)
        yield "carbon_feed", "GetForecast", carbon_feed_pb2.GetForecastRequest(zone="demo", horizon_s=value)
    yield "controller", "SetMode", controller_pb2.SetModeRequest(mode=99)
    yield "controller", "Replan", controller_pb2.ReplanRequest(cause="x" * 10_000)
    yield "controller", "GetDecision", controller_pb2.GetDecisionRequest(id="../" * 1000)
    yield "power_agent", "Apply", power_agent_pb2.ApplyRequest(plan={"node": "x", "revision": {"epoch": 2**64 - 1}})
    yield "carbon_feed", "GetMany", carbon_feed_pb2.GetManyRequest(zones=["x"] * 40_000)
    ask = dispatcher_pb2.ExplainRequestRequest(family=FAMILY, params={"priority": "9" * 10_000})
    yield "dispatcher", "ExplainRequest", ask
    yield "dispatcher", "Drain", dispatcher_pb2.DrainRequest(why="x" * 1_000_000)


async def operate(at: Addresses, tally: Tally) -> None:
    """Send every command that makes no sense, and open 1,000 streams on each service that nobody reads."""
    async with contextlib.AsyncExitStack() as stack:
        channels = {name: grpc.aio.insecure_channel(at[name], options=OPTIONS) for name in STUBS}
        for channel in channels.values():
            await stack.enter_async_context(channel)
        stubs = {name: made(channels[name]) for name, made in STUBS.items()}
        mine = {"metadata": (("authorization", f"Bearer {control_token()}"),)}
        plan = (await stubs["controller"].GetPlan(controller_pb2.GetPlanRequest(), **mine)).plan
        watches = (
            stubs["controller"].WatchPlan(controller_pb2.WatchPlanRequest(), **mine),
            stubs["power_agent"].WatchNode(power_agent_pb2.WatchNodeRequest(), **mine),
            stubs["dispatcher"].WatchLoad(dispatcher_pb2.WatchLoadRequest(), **mine),
            stubs["carbon_feed"].WatchIntensity(carbon_feed_pb2.WatchIntensityRequest(zone="demo"), **mine),
        )
        held = list(watches)
        for _ in range(999):
            held.append(stubs["controller"].WatchPlan(controller_pb2.WatchPlanRequest(), **mine))
            held.append(stubs["power_agent"].WatchNode(power_agent_pb2.WatchNodeRequest(), **mine))
            held.append(stubs["dispatcher"].WatchLoad(dispatcher_pb2.WatchLoadRequest(), **mine))
            held.append(stubs["carbon_feed"].WatchIntensity(carbon_feed_pb2.WatchIntensityRequest(zone="demo"), **mine))
        given = tuple(commands(plan))
        for service, method, asked in itertools.cycle(given):
            call = getattr(stubs[service], method)(asked, timeout=TIMEOUT_S, **mine)
            await tally.time(f"{service} {method}", call)
            await CLOCK.sleep(0.01)


ATTACKS: Final[Mapping[str, Callable[[Addresses, Tally], Awaitable[None]]]] = {
    "nonsense": send_nonsense, "cancel": cancel, "hurry": hurry, "idle": idle, "flood": flood, "dribble": dribble,
    "bombs": bombs, "json": send_json, "operate": operate,
}  # fmt: skip


async def main(attack: str, at: Addresses) -> None:
    """Run an attack until SIGTERM; print what it met."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    tally = Tally()
    running = asyncio.ensure_future(ATTACKS[attack](at, tally))
    watching = asyncio.create_task(tally.watch_itself())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, tally.done.set)
    stop = asyncio.create_task(tally.done.wait())
    print("begins", flush=True)
    await asyncio.wait((running, stop), return_when=asyncio.FIRST_COMPLETED)
    print(tally.report(), flush=True)
    for task in (running, watching, stop):
        task.cancel()
    await asyncio.gather(running, watching, stop, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
