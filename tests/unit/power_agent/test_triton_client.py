"""The client of one Triton whose connection is closed under a call, and of one that says what cannot be."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import psutil
import pytest
from tritonclient.grpc import service_pb2 as pb

from power_agent.triton.client import TritonClient, TritonUnready
from tests.support.certificates import Authority
from tests.support.fake_triton import SERVICE
from trefoil.runtime.clock import WallClock
from trefoil.runtime.security.tls import Tls


async def silent_server() -> tuple[grpc.aio.Server, str, asyncio.Event]:
    """A Triton that takes calls and answers none."""
    asked = asyncio.Event()

    async def never(request: Any, context: Any) -> Any:
        asked.set()
        await asyncio.Event().wait()

    method = grpc.unary_unary_rpc_method_handler(
        never,
        request_deserializer=pb.ModelStatisticsRequest.FromString,
        response_serializer=pb.ModelStatisticsResponse.SerializeToString,
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"ModelStatistics": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}", asked


async def test_closing_the_connection_fails_the_calls_on_it_and_cancels_nobody(tmp_path):
    server, target, asked = await silent_server()
    client = TritonClient(target, "http://127.0.0.1:1/metrics", tmp_path, WallClock())
    try:
        asking = asyncio.create_task(client.statistics())
        await asyncio.wait_for(asked.wait(), 10)
        await client.close()
        with pytest.raises(TritonUnready, match="connection was closed during ModelStatistics"):
            await asking
        with pytest.raises(TritonUnready, match="connection was closed"):
            await client.statistics()  # and what comes too late
    finally:
        await server.stop(0)


async def test_cancelling_the_caller_stays_a_cancellation(tmp_path):
    server, target, asked = await silent_server()
    client = TritonClient(target, "http://127.0.0.1:1/metrics", tmp_path, WallClock())
    try:
        asking = asyncio.create_task(client.statistics())
        await asyncio.wait_for(asked.wait(), 10)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await client.statistics()
    finally:
        await client.close()
        await server.stop(0)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.02)


async def test_a_renewed_certificate_is_a_new_connection_and_the_old_one_goes_with_its_last_call(tmp_path):
    asked, answer = asyncio.Event(), asyncio.Event()

    async def statistics(request: Any, context: Any) -> Any:
        asked.set()
        await answer.wait()
        return pb.ModelStatisticsResponse()

    async def metadata(request: Any, context: Any) -> Any:
        return pb.ServerMetadataResponse(version="2")

    authority = Authority(tmp_path)
    pair, own = authority.service("node0"), authority.server("tritons.node0")
    server = grpc.aio.server()
    handlers = {
        "ModelStatistics": grpc.unary_unary_rpc_method_handler(
            statistics, pb.ModelStatisticsRequest.FromString, pb.ModelStatisticsResponse.SerializeToString
        ),
        "ServerMetadata": grpc.unary_unary_rpc_method_handler(
            metadata, pb.ServerMetadataRequest.FromString, pb.ServerMetadataResponse.SerializeToString
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_secure_port(
        "127.0.0.1:0", grpc.ssl_server_credentials([own.read()], authority.certificate.read_bytes(), True)
    )

    def connections() -> int:
        opened = psutil.Process().net_connections("tcp")
        return sum(
            one.status == psutil.CONN_ESTABLISHED and bool(one.raddr) and one.raddr.port == port for one in opened
        )

    await server.start()
    tls = Tls(pair.certificate, pair.key, authority.certificate)
    client = TritonClient(
        f"127.0.0.1:{port}", "", tmp_path, WallClock(), call_timeout_s=60, tls=tls, name="tritons.node0"
    )
    try:
        asking = asyncio.create_task(client.statistics())
        await asyncio.wait_for(asked.wait(), 60)
        for _ in range(3):
            before = tls.now
            authority.service("node0").copy_to(pair)
            await until(lambda before=before: tls.now is not before)
            assert await client.version() == "2"
        await until(lambda: connections() == 2)  # the first, and the last
        answer.set()
        await asking
        await until(lambda: connections() == 1)
        assert await client.version() == "2"
    finally:
        await client.close()
        await server.stop(0)


async def test_a_model_whose_contract_is_lost_is_not_known_to_start_processes(tmp_path):
    client = TritonClient("127.0.0.1:1", "http://127.0.0.1:1/metrics", tmp_path, WallClock())
    assert not client.has_processes("toy")
    await client.close()


class Told(TritonClient):
    """A client that is told these statistics, and this page of metrics."""

    told, page = pb.ModelStatisticsResponse(), ""

    async def _ask(self, method: str, request: Any) -> Any:
        return self.told

    async def _metrics(self) -> str:
        return self.page


def told(folder: Any, version: str = "1", page: str = "") -> Told:
    client = Told("127.0.0.1:1", "http://127.0.0.1:1/metrics", folder, WallClock())
    client.told, client.page = pb.ModelStatisticsResponse(), page
    client.told.model_stats.add(name="toy", version=version)
    return client


@pytest.mark.parametrize("version", ["", "two", "²", "9" * 5000])
async def test_a_version_that_is_no_number_is_a_triton_that_is_not_ready(tmp_path, version):
    client = told(tmp_path, version)
    with pytest.raises(TritonUnready, match=r"127\.0\.0\.1:1: its statistics cannot be read: .{1,300}$"):
        await client.statistics()
    await client.close()


TIME = 'trefoil_decode_seconds_total{model="toy",version="1",instance="0",loaded="1"} '
WAITING = 'nv_inference_pending_request_count{model="toy"} '


@pytest.mark.parametrize("line", [TIME + "inf", TIME + "nan", TIME, TIME.replace("version", "of"), TIME[:30]])
async def test_decode_times_that_are_none_are_a_triton_that_is_not_ready(tmp_path, line):
    client = told(tmp_path, page=line)
    client._decodes["toy"] = True
    with pytest.raises(TritonUnready, match=r"http://127\.0\.0\.1:1/metrics cannot be read"):
        await client.statistics()
    await client.close()


@pytest.mark.parametrize("line", [WAITING + "inf", WAITING + "nan", WAITING + "many", WAITING[:35]])
async def test_waiting_requests_that_are_no_number_are_a_triton_that_is_not_ready(tmp_path, line):
    client = told(tmp_path, page=line)
    with pytest.raises(TritonUnready, match=r"http://127\.0\.0\.1:1/metrics cannot be read"):
        await client.pending()
    await client.close()


async def test_counters_are_read_of_a_model_whose_contract_is_lost(tmp_path):
    client = told(tmp_path)
    assert [(one.family, one.version) for one in await client.statistics()] == [("toy", 1)]
    await client.close()
