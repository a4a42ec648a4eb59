import asyncio
import contextlib
import math
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos.carbon_feed.v1 import carbon_feed_pb2 as pb
from protos.carbon_feed.v1 import carbon_feed_pb2_grpc as pb_grpc
from tests.support.unswept import NO_SWEEPS
from trefoil.core import errors
from trefoil.runtime import rpc, service
from trefoil.runtime.clock import WallClock
from trefoil.runtime.config import ServiceSettings
from trefoil.runtime.security.tls import Tls
from trefoil.runtime.telemetry import Metrics

KEYS = Path(__file__).parents[2] / "support"
NAME = "trefoil.carbon_feed.v1.CarbonFeed"
ERRORS = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, errors.TrefoilError)]


class Servicer(pb_grpc.CarbonFeedServicer):
    """Raises what its zone names."""

    def __init__(self):
        self.cancelled = asyncio.Event()

    async def GetRatio(self, request, context):
        if request.zone == "bug":
            raise ZeroDivisionError("oops")
        if request.zone == "abort":
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, "own status")
        if request.zone:
            raise getattr(errors, request.zone)("told to", remedy="do not")
        return pb.GetRatioResponse()

    async def WatchIntensity(self, request, context):
        if request.zone == "forever":
            try:
                yield pb.WatchIntensityResponse()  # a client may leave before this continues
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
        yield pb.WatchIntensityResponse()
        if request.zone:
            raise getattr(errors, request.zone)("told to")


@pytest.fixture
def metrics():
    return Metrics("carbon_feed")


@pytest.fixture
def servicer():
    return Servicer()


@pytest.fixture
async def server(metrics, servicer):
    settings = ServiceSettings(admin_address="127.0.0.1:0")
    entries = [(pb_grpc.add_CarbonFeedServicer_to_server, servicer, NAME)]
    running = rpc.make_server(settings, entries, metrics=metrics)
    await running.start()
    yield running
    await running.stop(0)


@pytest.fixture
async def channel(server):
    async with rpc.channel(f"127.0.0.1:{server.port}") as open_channel:
        yield open_channel


async def test_answers(channel):
    stub = pb_grpc.CarbonFeedStub(channel)
    assert await rpc.call(stub.GetRatio, pb.GetRatioRequest(), 5) == pb.GetRatioResponse()
    assert len([r async for r in stub.WatchIntensity(pb.WatchIntensityRequest(), timeout=5)]) == 1


@pytest.mark.parametrize("cls", ERRORS, ids=lambda cls: cls.__name__)
async def test_operating_errors_cross_the_wire(channel, cls):
    stub = pb_grpc.CarbonFeedStub(channel)
    with pytest.raises(errors.TrefoilError, match=r"^told to. Remedy: do not$") as caught:
        await rpc.call(stub.GetRatio, pb.GetRatioRequest(zone=cls.__name__), 5)
    assert type(caught.value) is cls
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        [r async for r in stub.WatchIntensity(pb.WatchIntensityRequest(zone=cls.__name__), timeout=5)]
    assert failed.value.code() is rpc.status_of(cls("x"))
    assert type(rpc.error_of(failed.value)) is cls


def test_the_status_table():
    codes = grpc.StatusCode
    for error, code in (
        (errors.SettingError("x"), codes.INVALID_ARGUMENT),
        (errors.StaleRevision("x"), codes.FAILED_PRECONDITION),
        (errors.Infeasible("x"), codes.FAILED_PRECONDITION),
        (errors.NotFound("x"), codes.NOT_FOUND),
        (errors.StateUnavailable("x"), codes.UNAVAILABLE),
        (errors.TrefoilError("x"), codes.INTERNAL),
    ):
        assert rpc.status_of(error) is code


async def test_a_bug_is_internal_and_an_own_status_passes(channel, metrics):
    stub = pb_grpc.CarbonFeedStub(channel)
    for zone, code in (("bug", grpc.StatusCode.INTERNAL), ("abort", grpc.StatusCode.OUT_OF_RANGE)):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.GetRatio(pb.GetRatioRequest(zone=zone), timeout=5)
        assert failed.value.code() is code
        counted = f'trefoil_rpc_requests_total{{code="{code.name}",method="/{NAME}/GetRatio"'
        async with asyncio.timeout(5):
            while counted not in metrics.text():  # a handler's own abort is told before it is counted
                await asyncio.sleep(0)


async def test_what_no_service_can_use_is_refused_before_it_sees_it(channel):
    stub = pb_grpc.CarbonFeedStub(channel)
    for asked, words in (
        (pb.GetForecastRequest(horizon_s=math.nan), r"horizon_s = nan: is not a number\. Remedy"),
        (
            pb.GetHistoryRequest(from_at={"seconds": 2**62}),
            r"from_at = '46.* s and 0 ns': is not a time",
        ),
        (pb.GetManyRequest(zones=["x"] * 60_000), r"zones: the request has more than 50000 parts"),
        (pb.GetRatioRequest(zone="z" * 20_000), r"zone = 'z+'\.\.\. \(20000 characters\): is longer than 16384"),
    ):
        method = getattr(stub, type(asked).__name__.removesuffix("Request"))
        with pytest.raises(errors.InvalidInput, match=words):
            await rpc.call(method, asked, 5)


async def test_no_more_streams_are_open_than_a_server_may_have(metrics, servicer):
    entries = [(pb_grpc.add_CarbonFeedServicer_to_server, servicer, NAME)]
    server = rpc.make_server(ServiceSettings(admin_address="127.0.0.1:0"), entries, metrics=metrics, streams_max=2)
    await server.start()
    async with rpc.channel(f"127.0.0.1:{server.port}") as channel:
        stub = pb_grpc.CarbonFeedStub(channel)
        watching = [stub.WatchIntensity(pb.WatchIntensityRequest(zone="forever")) for _ in range(2)]
        for call in watching:
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError, match="2 streams are open here") as refused:
            await anext(aiter(stub.WatchIntensity(pb.WatchIntensityRequest())))
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        watching[0].cancel()
        await asyncio.wait_for(servicer.cancelled.wait(), 30)
        async with asyncio.timeout(30):
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    if await anext(aiter(stub.WatchIntensity(pb.WatchIntensityRequest()))):
                        break
    await server.stop(0)


async def test_a_watcher_that_leaves_ends_its_handler(channel, servicer):
    call = pb_grpc.CarbonFeedStub(channel).WatchIntensity(pb.WatchIntensityRequest(zone="forever"))
    await call.read()
    call.cancel()
    await asyncio.wait_for(servicer.cancelled.wait(), 60)


async def test_a_server_that_is_slow_to_accept_is_waited_for(server):
    """A busy machine answers late; that is not a server that is away."""
    accepted: list[asyncio.StreamWriter] = []

    async def copy(reader, writer):
        while data := await reader.read(2**16):
            writer.write(data)

    async def late(reader, writer):
        accepted.append(writer)
        await asyncio.sleep(0.5)
        there, back = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.gather(copy(reader, back), copy(there, writer))

    relay = await asyncio.start_server(late, "127.0.0.1", 0)
    async with rpc.channel(f"127.0.0.1:{relay.sockets[0].getsockname()[1]}") as channel:
        stub, begun_s = pb_grpc.CarbonFeedStub(channel), time.monotonic()
        assert await rpc.call(stub.GetRatio, pb.GetRatioRequest(), 30) == pb.GetRatioResponse()
        took_s = time.monotonic() - begun_s
    assert len(accepted) == 1 or took_s > 2.0, "one attempt has 2 s; 0.5 s of them are the relay's"
    relay.close()


async def test_nobody_there_is_unavailable():
    async with rpc.channel("127.0.0.1:1") as dead:
        with pytest.raises(errors.Unavailable):
            await rpc.call(pb_grpc.CarbonFeedStub(dead).GetRatio, pb.GetRatioRequest(), 5)


async def test_a_cancelled_waiter_does_not_break_the_stop(server):
    waiter = asyncio.create_task(server.wait_for_termination())
    await asyncio.sleep(0)
    waiter.cancel()
    await asyncio.wait((waiter,))
    await asyncio.wait_for(server.stop(0), 5)


STOPPED_BY_SEVERAL = """
import asyncio
from trefoil.runtime import rpc
from trefoil.runtime.config import ServiceSettings

async def main():
    for turn in range(400):
        server = rpc.make_server(ServiceSettings(admin_address="127.0.0.1:0"), [])
        await server.start()

        async def stop(number):
            for _ in range(number * (turn % 8)):
                await asyncio.sleep(0)
            await server.stop(0.0)

        await asyncio.gather(*map(stop, range(3)))

asyncio.run(main())
"""


def test_several_may_stop_a_server_at_once():
    """In a separate process: grpc.aio's own `stop` ends it with signal 11 here."""
    ended = subprocess.run([sys.executable, "-c", STOPPED_BY_SEVERAL], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")


async def test_a_shorter_grace_counts_for_those_who_stop_with_a_longer_one(server, channel, servicer):
    call = pb_grpc.CarbonFeedStub(channel).WatchIntensity(pb.WatchIntensityRequest(zone="forever"))
    await call.read()
    patient = asyncio.create_task(server.stop(600))
    await asyncio.wait((patient,), timeout=0.05)
    assert not patient.done()
    assert not servicer.cancelled.is_set()
    await asyncio.wait_for(server.stop(0), 30)
    await asyncio.wait_for(patient, 30)
    assert servicer.cancelled.is_set()


async def test_a_server_part_lives_and_ends(unused_tcp_port, monkeypatch):
    monkeypatch.setattr(service, "gc", NO_SWEEPS)
    settings = ServiceSettings(admin_address=f"127.0.0.1:{unused_tcp_port}")
    part = service.ServerComponent(lambda: rpc.make_server(settings, []))
    stop = asyncio.Event()
    running = asyncio.create_task(service.run([part], WallClock(), stop))
    async with rpc.channel(settings.admin_address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        await health.Check(health_pb2.HealthCheckRequest(), timeout=5, wait_for_ready=True)
    stop.set()
    await asyncio.wait_for(running, 5)
    rpc.check_port(settings.admin_address)


async def test_health_and_reflection(server, channel):
    health = health_pb2_grpc.HealthStub(channel)
    for name in ("", NAME):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    await server.serving(NAME, False)
    answer = await health.Check(health_pb2.HealthCheckRequest(service=NAME), timeout=5)
    assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
    requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    async for listed in reflection.ServerReflectionInfo(requests, timeout=5):
        assert NAME in {service.name for service in listed.list_services_response.service}


async def test_token_is_demanded_except_for_health():
    entries = [(pb_grpc.add_CarbonFeedServicer_to_server, Servicer(), NAME)]
    server = rpc.make_server(ServiceSettings(token="right"), entries)
    await server.start()
    for token, accepted in (("right", True), ("wrong", False), (None, False)):
        async with rpc.channel(f"127.0.0.1:{server.port}", token=token) as channel:
            stub = pb_grpc.CarbonFeedStub(channel)
            calls = (
                lambda stub=stub: rpc.call(stub.GetRatio, pb.GetRatioRequest(), 5),
                lambda stub=stub: anext(aiter(stub.WatchIntensity(pb.WatchIntensityRequest(), timeout=5))),
            )
            for call in calls:
                if accepted:
                    await call()
                else:
                    with pytest.raises((errors.TrefoilError, grpc.aio.AioRpcError), match="UNAUTHENTICATED"):
                        await call()
            health = health_pb2_grpc.HealthStub(channel)
            await health.Check(health_pb2.HealthCheckRequest(), timeout=5)
    await server.stop(0)


async def test_a_taken_port_is_one_clear_line(server):
    address = f"127.0.0.1:{server.port}"
    with pytest.raises(
        errors.PortInUse, match=f"^address = '{address}': cannot listen .Address already in use.*: stop"
    ):
        rpc.make_server(ServiceSettings(admin_address=address), [])
    with pytest.raises(errors.StartError, match="Remedy: use an address of this host"):
        rpc.check_port("192.0.2.1:80")


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:0", "[::1]:0", "unix:/tmp/x.sock", "127.8.8.8:0"])
def test_loopback_needs_nothing(address):
    rpc.check_listener(ServiceSettings(), address)


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "10.0.0.1:0", "node7:8000"])
def test_other_listeners_need_tls_and_token_or_insecure(address, tmp_path):
    for settings in (ServiceSettings(), ServiceSettings(token="t")):
        with pytest.raises(errors.SettingError, match=r"needs TLS and a token.*--insecure"):
            rpc.check_listener(settings, address)
    rpc.check_listener(ServiceSettings(insecure=True), address)
    rpc.check_listener(ServiceSettings(), address, read_only=True)
    pem = tmp_path / "x.pem"
    rpc.check_listener(ServiceSettings(tls_certificate=pem, tls_key=pem, token="t"), address)
    with pytest.raises(errors.SettingError, match="only one of the two"):
        ServiceSettings(tls_certificate=pem, token="t")


async def test_unreadable_certificates_are_named(tmp_path):
    pem = tmp_path / "x.pem"
    with pytest.raises(errors.SettingError, match="readable PEM"):
        rpc.make_server(ServiceSettings(tls_certificate=pem, tls_key=pem, token="t"), [], address="127.0.0.1:0")


async def test_tls_and_token():
    pems = {"tls_certificate": KEYS / "localhost.crt", "tls_key": KEYS / "localhost.key"}
    entries = [(pb_grpc.add_CarbonFeedServicer_to_server, Servicer(), NAME)]
    server = rpc.make_server(ServiceSettings(token="t", **pems), entries, address="0.0.0.0:0")
    await server.start()
    tls = Tls(None, None, pems["tls_certificate"])
    async with rpc.channel(f"localhost:{server.port}", tls=tls, token="t") as channel:
        await rpc.call(pb_grpc.CarbonFeedStub(channel).GetRatio, pb.GetRatioRequest(), 5)
    async with rpc.channel(f"localhost:{server.port}", token="t") as plain:
        with pytest.raises(errors.Unavailable):
            await rpc.call(pb_grpc.CarbonFeedStub(plain).GetRatio, pb.GetRatioRequest(), 5)
    await server.stop(0)


@pytest.mark.parametrize(
    "address",
    [
        "8000",
        "localhost:",
        ":80",
        "localhost:http",
        "localhost:70000",
        "localhost:²",
        pytest.param("localhost:" + 5000 * "1", id="long"),
    ],
)
def test_malformed_addresses_are_named(address):
    with pytest.raises(errors.SettingError, match="not host:port"):
        rpc.split_address(address)
