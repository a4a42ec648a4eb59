"""The least that a Python proxy can do: grpc.aio, raw bytes in, raw bytes out, no decision. What ours is compared with.

Run: `python -m benchmarks.raw_proxy <listen> <upstream>`; ended by SIGTERM.
"""

import asyncio
import signal
import sys
from typing import Any, Final

import grpc

SERVICE: Final = "inference.GRPCInferenceService"
OPTIONS: Final = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_retries", 0),
)


async def serve(listen: str, upstream: str) -> None:
    """Until SIGTERM."""
    channel = grpc.aio.insecure_channel(upstream, options=OPTIONS)
    forward = channel.unary_unary(f"/{SERVICE}/ModelInfer")

    async def infer(data: bytes, context: Any) -> bytes:
        return await forward(data, timeout=context.time_remaining())

    server = grpc.aio.server(options=OPTIONS)
    handlers = {"ModelInfer": grpc.unary_unary_rpc_method_handler(infer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    server.add_insecure_port(listen)
    await server.start()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    await ended.wait()
    await server.stop(0)
    await channel.close()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2]))
