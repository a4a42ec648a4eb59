"""The client of one Triton whose connection is closed under a call: a slice is stopped while somebody asks it."""

import asyncio
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from power_agent.triton.client import TritonClient, TritonUnready
from tests.support.fake_triton import SERVICE
from trefoil.runtime.clock import WallClock


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
