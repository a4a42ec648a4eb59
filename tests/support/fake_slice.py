"""The Triton of one slice without a Triton: model control, inference, counters and the pending gauge, in a few ms.

It takes the command line of the real one, reads the slice's own repository, and answers all that the agent asks. It
passes the same contract as the real one (tests/contract/test_triton_contract.py).
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
from google.protobuf import json_format
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc import service_pb2 as pb

from tests.support.fake_triton import DEAD_STUB, SERVICE
from trefoil.core.errors import CatalogError
from trefoil.runtime.model_files import contract

COMPUTE_NS: Final = 1_000_000  # of one request, as the counters tell it; nothing really takes that long
METHODS: Final = (
    "ServerReady", "ServerMetadata", "ModelReady", "ModelInfer", "ModelStatistics", "ModelConfig",
    "RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload",
)  # fmt: skip


@dataclass(slots=True)
class Model:
    """One loaded version."""

    config: model_config_pb2.ModelConfig
    successes: int = 0
    failures: int = 0
    last_ms: int = 0


def option(argv: Sequence[str], name: str) -> list[str]:
    """The values of `--name=value`."""
    return [word.partition("=")[2] for word in argv if word.startswith(f"--{name}=")]


class FakeSlice:
    """Start it with the argv of a SliceLaunch."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._repository = Path(option(argv, "model-repository")[0])
        self._families = option(argv, "load-model")
        self._grpc_port, self._metrics_port = (int(option(argv, f"{kind}-port")[0]) for kind in ("grpc", "metrics"))
        protocols, _, pair = (option(argv, "grpc-restricted-protocol") or [""])[0].partition(":")
        self._restricted = ("Repository",) if "model-repository" in protocols.split(",") else ()
        self._header, _, self._key = pair.partition("=")
        self._tls = {name: option(argv, f"grpc-{name}") for name in ("server-cert", "server-key", "root-cert")}
        self.models: dict[tuple[str, int], Model] = {}
        self.stub_dead = False
        self.pending = 0
        self._server: grpc.aio.Server | None = None
        self._metrics: asyncio.Server | None = None

    @property
    def versions(self) -> list[list[Any]]:
        """[family, version] of what is loaded."""
        return [[family, version] for family, version in sorted(self.models)]

    async def start(self) -> None:
        """Load what the repository says and listen.

        Raises:
            CatalogError, RuntimeError: no such model, or the port is taken.
        """
        for family in self._families:
            self._load(contract(self._repository, family))
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                self._guarded(name, getattr(self, f"_{name}")),
                request_deserializer=getattr(pb, f"{name}Request").FromString,
                response_serializer=getattr(pb, f"{name}Response").SerializeToString,
            )
            for name in METHODS
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        address = f"127.0.0.1:{self._grpc_port}"
        if self._tls["server-cert"]:
            key, certificate, ca = (
                Path(self._tls[name][0]).read_bytes() for name in ("server-key", "server-cert", "root-cert")
            )
            server.add_secure_port(address, grpc.ssl_server_credentials([(key, certificate)], ca, True))
        else:
            server.add_insecure_port(address)
        await server.start()
        self._server = server
        self._metrics = await asyncio.start_server(self._serve_metrics, "127.0.0.1", self._metrics_port)

    async def stop(self) -> None:
        """Gone at once; calls in flight fail."""
        if self._metrics is not None:
            self._metrics.close()
        if self._server is not None:
            await self._server.stop(0)
        self._server = self._metrics = None

    def _load(self, config: model_config_pb2.ModelConfig) -> None:
        family, versions = config.name, list(config.version_policy.specific.versions)
        for version in versions:
            if not (self._repository / family / str(version) / "model.onnx").is_file():
                raise CatalogError(f"{family} has no version {version}")
        kept = {key: model for key, model in self.models.items() if key[0] != family or key[1] in versions}
        self.models = kept | {(family, v): Model(config) for v in versions if (family, v) not in kept}
        self.stub_dead = False

    def _guarded(self, method: str, answer: Any) -> Any:
        """Only for those with the key, where its protocol is restricted."""
        if not method.startswith(self._restricted):
            return answer
        header = f"triton-grpc-protocol-{self._header}"

        async def handle(request: Any, context: Any) -> Any:
            if dict(context.invocation_metadata() or ()).get(header) != self._key:
                why = f"This protocol is restricted, expecting header '{header}'"
                await context.abort(grpc.StatusCode.UNAVAILABLE, why)
            return await answer(request, context)

        return handle

    # --- what Triton answers ------------------------------------------------------------------------------------------

    async def _ServerReady(self, request: Any, context: Any) -> Any:
        return pb.ServerReadyResponse(ready=True)

    async def _ServerMetadata(self, request: Any, context: Any) -> Any:
        return pb.ServerMetadataResponse(name="fake", version="0.0.0")

    async def _ModelReady(self, request: Any, context: Any) -> Any:
        ready = any(f == request.name and str(v) == (request.version or str(v)) for f, v in self.models)
        return pb.ModelReadyResponse(ready=ready)

    async def _ModelInfer(self, request: Any, context: Any) -> Any:
        versions = [version for family, version in self.models if family == request.model_name]
        version = int(request.model_version) if request.model_version else max(versions, default=0)
        model = self.models.get((request.model_name, version))
        if model is None:
            why = f"Request for unknown model: '{request.model_name}' version {version} is not at ready state"
            await context.abort(grpc.StatusCode.UNAVAILABLE, why)
        if self.stub_dead:
            model.failures += 1
            await context.abort(*DEAD_STUB)
        model.successes += 1
        model.last_ms = int(time.time() * 1e3)
        items = request.inputs[0].shape[0]
        answer = pb.ModelInferResponse(model_name=request.model_name, model_version=str(version), id=request.id)
        for tensor in model.config.output:
            shape = [items, *(max(1, size) for size in tensor.dims)]
            name = model_config_pb2.DataType.Name(tensor.data_type).removeprefix("TYPE_")
            answer.outputs.add(name=tensor.name, datatype=name, shape=shape)
            count = 1
            for size in shape:
                count *= size
            answer.raw_output_contents.append(bytes(4 * count))
        return answer

    async def _ModelStatistics(self, request: Any, context: Any) -> Any:
        answer = pb.ModelStatisticsResponse()
        for (family, version), model in self.models.items():
            row = answer.model_stats.add(name=family, version=str(version), last_inference=model.last_ms)
            row.inference_count = row.execution_count = model.successes
            row.inference_stats.success.count = model.successes
            row.inference_stats.fail.count = model.failures
            row.inference_stats.compute_infer.ns = model.successes * COMPUTE_NS
            batch = row.batch_stats.add(batch_size=1)
            batch.compute_infer.count, batch.compute_infer.ns = model.successes, model.successes * COMPUTE_NS
        return answer

    async def _ModelConfig(self, request: Any, context: Any) -> Any:
        return pb.ModelConfigResponse(config=self.models[request.name, int(request.version)].config)

    async def _RepositoryIndex(self, request: Any, context: Any) -> Any:
        answer = pb.RepositoryIndexResponse()
        for family, version in self.models:
            answer.models.add(name=family, version=str(version), state="READY")
        return answer

    async def _RepositoryModelLoad(self, request: Any, context: Any) -> Any:
        text = request.parameters["config"].string_param
        try:
            if text:
                self._load(json_format.Parse(text, model_config_pb2.ModelConfig()))
            else:
                self._load(contract(self._repository, request.model_name))
        except CatalogError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"failed to load '{request.model_name}': {error}")
        return pb.RepositoryModelLoadResponse()

    async def _RepositoryModelUnload(self, request: Any, context: Any) -> Any:
        self.models = {key: model for key, model in self.models.items() if key[0] != request.model_name}
        return pb.RepositoryModelUnloadResponse()

    async def _serve_metrics(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:  # whoever asked was killed
            writer.close()
            return
        rows = "".join(
            f'nv_inference_pending_request_count{{model="{family}",version="{version}"}} {self.pending}\n'
            for family, version in self.models
        )
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(rows)}\r\n\r\n{rows}".encode())
        await writer.drain()
        writer.close()
