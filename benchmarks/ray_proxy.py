"""Ray Serve as a proxy: its gRPC ingress, and one replica that passes bytes on. For an environment with `ray[serve]`.

Run: `PYTHONPATH=benchmarks .venv-ray/bin/python benchmarks/ray_proxy.py <listen> <upstream>`; ended by SIGTERM.
"""

import signal
import sys
import threading
from typing import Any, Final

import grpc
import ray
from ray import serve
from ray.serve.config import gRPCOptions

SERVICE: Final = "inference.GRPCInferenceService"


class Bytes:
    """Answer of a replica, which Ray Serve wants to serialise."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def SerializeToString(self) -> bytes:
        """The bytes."""
        return self._data


def add_service(servicer: Any, server: Any) -> None:
    """Add the one method as generated code does, with bytes for messages."""
    handlers = {"ModelInfer": grpc.unary_unary_rpc_method_handler(servicer.ModelInfer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


@serve.deployment(num_replicas=1, max_ongoing_requests=1000)
class Forward:
    """The replica."""

    def __init__(self, upstream: str) -> None:
        self._forward = grpc.aio.insecure_channel(upstream).unary_unary(f"/{SERVICE}/ModelInfer")

    async def ModelInfer(self, data: bytes) -> Bytes:
        """Pass a request on."""
        return Bytes(await self._forward(data))


if __name__ == "__main__":
    listen, upstream = sys.argv[1:]
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False)
    options = gRPCOptions(port=int(listen.rpartition(":")[2]), grpc_servicer_functions=["ray_proxy.add_service"])
    serve.start(grpc_options=options, http_options={"location": "HeadOnly", "port": 0})
    serve.run(Forward.bind(upstream))
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    ended.wait()
    serve.shutdown()
    ray.shutdown()
