"""Triton client: gRPC to the Triton of one slice: readiness by a real inference, swap in place, healing, counters.

`installation.py` finds and prepares the binary, `slice_launch.py` writes a slice's own model repository and
the argv/env that start it. Nothing here starts a process: a runtime does.
"""

import asyncio
import contextlib
import math
import re
import urllib.parse
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import grpc
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

from power_agent.triton.access import HEADER
from power_agent.triton.slice_launch import backend_of_slice, config_json, slice_config, write_config
from trefoil import direct
from trefoil.core.demand import PROBE_ID
from trefoil.core.errors import CatalogError, Unavailable
from trefoil.core.fleet import Hosted
from trefoil.runtime.clock import Clock
from trefoil.runtime.given.llm_backends import ask_one_token, unasked_outputs
from trefoil.runtime.model_files import (
    ZERO_TEXT,
    contract,
    counts_decoding,
    isolate_sequence,
    probe_shape,
    starts_processes,
)
from trefoil.runtime.security.tls import Tls

POLL_S: Final = 0.05
COUNTERS_POLL_S: Final = 0.1  # during a swap: bounds what is lost of the old version's counters
STUB_DEAD_TEXT: Final = "Stub process"  # "Stub process 'digits_0_0' is not healthy."
METRICS_BYTES_MAX: Final = 4 * 2**20
STREAM: Final = "ModelStreamInfer"
DECODE_TIME: Final = "trefoil_decode_seconds_total{"
LABEL: Final = re.compile(r'(\w+)="([^"]*)"')
PENDING_METRIC: Final = "nv_inference_pending_request_count{"
ITEM_BYTES: Final = {
    "TYPE_BOOL": 1, "TYPE_UINT8": 1, "TYPE_INT8": 1, "TYPE_UINT16": 2, "TYPE_INT16": 2, "TYPE_FP16": 2, "TYPE_BF16": 2,
    "TYPE_UINT32": 4, "TYPE_INT32": 4, "TYPE_FP32": 4, "TYPE_UINT64": 8, "TYPE_INT64": 8, "TYPE_FP64": 8,
}  # fmt: skip


class TritonUnready(Unavailable):
    """Triton does not serve what it should; the message says which part of it, and why."""


class StubDead(TritonUnready):
    """The python stub inside this Triton died. Ready flags stay true; only `heal` brings it back."""


class TritonSlow(TritonUnready):
    """No answer within the time given: the model hangs, or executes a call that takes longer."""


class LoadFailed(TritonUnready):
    """Triton refused to load a version; what was loaded before continues serving."""


@dataclass(frozen=True, slots=True)
class VersionCounters:
    """Counters, cumulative, of one loaded version. They restart at 0 whenever the version is loaded again. `family` is
    the model's name in Triton: that of a stage, if it is one."""

    family: str
    version: int
    successes: int
    failures: int
    items: int
    compute_batch_ns: int  # summed over executed batches: joined requests count their batch's time once


CountersSeen = Callable[[tuple[VersionCounters, ...]], None]


class TritonClient:
    """Client of the Triton of one slice. Belongs to one event loop; swap and heal must not overlap each other."""

    def __init__(
        self,
        grpc_target: str,
        metrics_url: str,
        repository: Path,
        clock: Clock,
        *,
        call_timeout_s: float = 5.0,
        key: str = "",
        tls: Tls | None = None,
        name: str = "",
    ) -> None:
        """`key` opens what is the agent's alone; over TLS this Triton's certificate has to name `name`."""
        self._target, self._metrics_url, self._repository, self._clock = grpc_target, metrics_url, repository, clock
        self._timeout_s = call_timeout_s
        self._opened = ((f"triton-grpc-protocol-{HEADER}", key),) if key else ()
        self._tls, self._name = tls, name
        self._calls: dict[grpc.aio.Channel, int] = {}  # under way, by connection
        self._connect()
        self._closed = asyncio.Event()
        self._decodes: dict[str, bool] = {}  # by family, forever: a contract is fixed
        self._contracts: dict[str, model_config_pb2.ModelConfig] = {}

    def _connect(self) -> None:
        # A separate pool: a Triton that was started again on the same port gets a fresh connection at once.
        options: list[tuple[str, Any]] = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]
        options += [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        options += [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 1000)]
        self._made_with = None if self._tls is None else self._tls.now
        if self._tls is not None:
            options.append(("grpc.ssl_target_name_override", self._name))
        channel = direct.channel(self._target, None if self._tls is None else self._tls.channel_credentials(), options)
        self._calls[channel] = 0
        self._channel, self._stub = channel, service_pb2_grpc.GRPCInferenceServiceStub(channel)

    async def _call(self, method: str, request: Any, timeout: float) -> Any:
        """One call. Closing a channel cancels its waiting calls, which looks as if the waiting task were cancelled.

        Raises:
            TritonUnready: the connection was closed, before or meanwhile.
            grpc.aio.AioRpcError: as the call itself.
        """
        if not self._closed.is_set():
            if self._tls is not None and self._tls.now is not self._made_with:
                self._connect()  # by certificates that have been renewed; what is under way continues
            metadata = self._opened if method.startswith("Repository") else ()
            channel = self._channel
            self._calls[channel] += 1
            try:
                call = getattr(self._stub, method)
                if method == STREAM:
                    return await _first_answer(call(timeout=timeout), request)
                return await call(request, timeout=timeout, metadata=metadata)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not self._closed.is_set() or (task is not None and task.cancelling()):
                    raise
            finally:
                self._calls[channel] -= 1
                await self._close_old()
        raise TritonUnready(f"{self._target}: the connection was closed during {method}: this Triton is being ended")

    async def _close_old(self) -> None:
        """Close connections by certificates of before, once no call is under way on them."""
        for channel in [one for one, calls in self._calls.items() if not calls and one is not self._channel]:
            del self._calls[channel]
            await channel.close()

    async def wait_ready(self, hosted: Sequence[Hosted], timeout_s: float) -> None:
        """Wait until each hosted version is loaded and answered one real inference.

        Raises:
            TritonUnready: not within `timeout_s`, or at once when a stub is dead (waiting does not bring it back).
        """
        started_s = self._clock.monotonic_s()
        for one in hosted:
            while True:
                why = await self._not_loaded(one, self._timeout_s)
                left_s = timeout_s - (self._clock.monotonic_s() - started_s)
                if not why:
                    break
                if left_s <= 0:
                    raise TritonUnready(f"{self._target} did not become ready within {timeout_s:g} s: {why}")
                await self._clock.sleep(min(POLL_S, left_s))
            await self.probe(one.model, one.version, max(left_s, POLL_S))

    async def is_ready(self, hosted: Hosted, timeout_s: float) -> bool:
        """Whether Triton says within so long that it has this version; a hung server says nothing."""
        return not await self._not_loaded(hosted, timeout_s)

    async def _not_loaded(self, hosted: Hosted, timeout_s: float) -> str:
        """Why this version is not loaded yet; "" when it is."""
        request = service_pb2.ModelReadyRequest(name=hosted.model, version=str(hosted.version))
        try:
            reply = await self._call("ModelReady", request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return f"ModelReady: {error.code().name} {error.details()}"
        return "" if reply.ready else f"version {hosted.version} of {hosted.model} is not loaded"

    async def probe(self, family: str, version: int, timeout_s: float = 5.0) -> float:
        """Run one real inference on an all-zero input of the family's contract; return its latency in ms.

        Of a family that answers by streams the first answer is enough; the rest is cancelled. On a simulated slice it
        is paced like any other request, behind those that wait.

        Raises:
            StubDead: the python stub is gone.
            TritonSlow: no answer within `timeout_s`.
            TritonUnready: another error, or an answer without the contract's outputs.
        """
        return await self.infer(self._contract(family), version, timeout_s)

    async def infer(self, config: model_config_pb2.ModelConfig, version: int, timeout_s: float) -> float:
        """Do what `probe` does with the model of a configuration; version 0: any."""
        family, started_s = config.name, self._clock.monotonic_s()
        try:
            method = STREAM if config.model_transaction_policy.decoupled else "ModelInfer"
            reply = await self._call(method, probe_request(config, version), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            why = (
                f"{self._target} does not infer with {family} version {version}: {error.code().name} {error.details()}"
            )
            if is_stub_dead(error.code(), error.details()):
                raise StubDead(why) from error
            slow = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            raise (TritonSlow if slow else TritonUnready)(why) from error
        if method == STREAM:
            if told := reply.error_message:
                dead = STUB_DEAD_TEXT in told
                raise (StubDead if dead else TritonUnready)(f"{self._target} does not infer with {family}: {told}")
            reply = reply.infer_response
        if why := wrong_reply(config, version, reply):
            raise TritonUnready(f"{self._target} answers wrongly: {why}")
        return (self._clock.monotonic_s() - started_s) * 1e3

    async def swap(
        self, old: Hosted, new: Hosted, timeout_s: float = 30.0, on_counters: CountersSeen | None = None
    ) -> tuple[VersionCounters, ...]:
        """Replace old by new in place under load; the old version serves until the new one is loaded. Idempotent.

        Returns the last counters seen of what was unloaded, which Triton forgets.
        While both are loaded, requests that name no version go to the higher one. Afterwards config.pbtxt in the
        slice's repository names the new version, so that a restarted Triton loads what runs now.

        Raises:
            LoadFailed: the new version does not load; the old one continues serving.
            TritonUnready: it loaded but does not answer, or Triton is gone.
        """
        assert old.model == new.model, "a swap changes the variant, not the family or its stage"
        config = self._config_of(new)
        async with self._watch_counters(on_counters) as seen:
            await self._load(config, timeout_s)
            if old.version != new.version:
                await self._wait_unloaded(old, timeout_s)
        await self.probe(new.model, new.version, timeout_s)
        write_config(self._repository, config)
        return tuple(c for (f, v), c in seen.items() if (f, v) == (old.model, old.version) and v != new.version)

    async def add(self, hosted: Hosted, timeout_s: float = 30.0) -> None:
        """Load a family whose folder is written, beside what serves. Idempotent.

        Raises:
            LoadFailed: it does not load.
            TritonUnready: it loaded but does not answer, or Triton is gone.
        """
        await self._load(self._config_of(hosted), timeout_s)
        await self.probe(hosted.model, hosted.version, timeout_s)

    async def remove(self, hosted: Hosted, timeout_s: float = 30.0) -> None:
        """Unload a family after its requests in flight. Idempotent.

        Raises:
            TritonUnready: it does not unload, or Triton is gone.
        """
        await self._unload(hosted.model, timeout_s)
        await self._wait_unloaded(hosted, timeout_s)

    async def heal(self, hosted: Hosted, timeout_s: float = 30.0) -> None:
        """Heal: unload and load, the only thing that brings a dead python stub back.

        Raises:
            LoadFailed: the version does not load again.
            TritonUnready: it loaded but does not answer, or Triton is gone.
        """
        await self._unload(hosted.model, timeout_s)
        # Not waited for: Triton holds on to a dead stub for half a minute and loads a new one beside it meanwhile.
        config = self._config_of(hosted)
        await self._load(config, timeout_s)
        await self.probe(hosted.model, hosted.version, timeout_s)
        write_config(self._repository, config)

    def _config_of(self, hosted: Hosted) -> model_config_pb2.ModelConfig:
        own = contract(self._repository, hosted.model)
        return slice_config(own, hosted, backend_of_slice(own), self._repository)

    async def _load(self, config: model_config_pb2.ModelConfig, timeout_s: float) -> None:
        request = service_pb2.RepositoryModelLoadRequest(model_name=config.name)
        request.parameters["config"].string_param = config_json(config)
        try:
            await self._call("RepositoryModelLoad", request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            versions = list(config.version_policy.specific.versions)
            raise LoadFailed(
                f"{self._target} cannot load {config.name} version {versions}: {error.code().name} {error.details()}",
                remedy="read the log of this slice's Triton",
            ) from error

    async def _unload(self, family: str, timeout_s: float) -> None:
        request = service_pb2.RepositoryModelUnloadRequest(model_name=family)
        try:
            await self._call("RepositoryModelUnload", request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise TritonUnready(f"{self._target} cannot unload {family}: {error.details()}") from error

    async def _wait_unloaded(self, hosted: Hosted, timeout_s: float) -> None:
        """Triton unloads in the background, after the requests in flight on that version."""
        deadline_s = self._clock.monotonic_s() + timeout_s
        while await self.loaded(hosted.model, hosted.version):
            if self._clock.monotonic_s() > deadline_s:
                raise TritonUnready(f"{self._target} still holds {hosted.model} version {hosted.version}")
            await self._clock.sleep(POLL_S)

    async def loaded(self, family: str, version: int) -> bool:
        """Whether Triton lists this version as anything but unloaded.

        Raises:
            TritonUnready: Triton does not answer.
        """
        index = await self._ask("RepositoryIndex", service_pb2.RepositoryIndexRequest())
        return any(
            m.name == family and m.version == str(version) and m.state not in ("", "UNAVAILABLE") for m in index.models
        )

    async def statistics(self) -> tuple[VersionCounters, ...]:
        """Counters of every loaded version, in one cheap call; in two where one makes tokens, whose time Triton does
        not count (`_shared/decoder.py`).

        Raises:
            TritonUnready: Triton does not answer, or what it says cannot be read.
        """
        reply = await self._ask("ModelStatistics", service_pb2.ModelStatisticsRequest())
        with self._readable("its statistics"):
            found = tuple(counters(model) for model in reply.model_stats)
        if not any(self._counts_decoding(one.family) for one in found):
            return found
        page = await self._metrics()
        with self._readable(self._metrics_url):
            busy_ns = decode_times(page)
        return tuple(
            replace(one, compute_batch_ns=now) if (now := busy_ns.get((one.family, one.version))) is not None else one
            for one in found
        )

    async def instances(self, model: str, version: int) -> int:
        """Number of instances by which a loaded version serves.

        Raises:
            TritonUnready: Triton does not answer.
        """
        request = service_pb2.ModelConfigRequest(name=model, version=str(version))
        config = (await self._ask("ModelConfig", request)).config
        return max(1, sum(int(group.count) for group in config.instance_group))

    async def config(self, model: str) -> model_config_pb2.ModelConfig:
        """Configuration of a loaded model; raises TritonUnready."""
        return (await self._ask("ModelConfig", service_pb2.ModelConfigRequest(name=model))).config

    def _counts_decoding(self, family: str) -> bool:
        """Whether a family's model counts the time of its tokens; not known to where its contract is lost."""
        if family not in self._decodes:
            try:
                self._decodes[family] = counts_decoding(self._contract(family))
            except CatalogError:  # the check of its files says it; what Triton counts is read all the same
                return False
        return self._decodes[family]

    def has_processes(self, family: str) -> bool:
        """Whether a family's model may start processes of its own; not known to where its contract is lost."""
        try:
            return starts_processes(self._contract(family))
        except CatalogError:  # the check of its files says it before anything is healed
            return False

    def _contract(self, family: str) -> model_config_pb2.ModelConfig:
        """Contract of a family; kept, because it is fixed and the slice's files may be lost while its Triton serves."""
        if family not in self._contracts:
            self._contracts[family] = contract(self._repository, family)
        return self._contracts[family]

    @contextlib.asynccontextmanager
    async def _watch_counters(
        self, on_counters: CountersSeen | None
    ) -> AsyncIterator[dict[tuple[str, int], VersionCounters]]:
        """Poll the counters inside the block: those of an unloaded version are gone with it."""
        seen: dict[tuple[str, int], VersionCounters] = {}

        async def poll() -> None:
            while True:
                # One missed poll costs 0.1 s of counters; the call that the block makes reports a Triton that is gone.
                with contextlib.suppress(TritonUnready):
                    latest = await self.statistics()
                    seen.update({(c.family, c.version): c for c in latest})
                    if on_counters is not None:
                        on_counters(latest)
                await self._clock.sleep(COUNTERS_POLL_S)

        poller = asyncio.create_task(poll())
        try:
            yield seen
        finally:
            poller.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await poller

    async def pending(self) -> int:
        """Number of requests that wait inside this Triton; those executing are finished by any clean stop.

        Raises:
            TritonUnready: the metrics endpoint does not answer.
        """
        page = await self._metrics()
        with self._readable(self._metrics_url):
            return pending_requests(page)

    @contextlib.contextmanager
    def _readable(self, what: str) -> Iterator[None]:
        """Read what a Triton says, which may be anything: its models run in it. Raises TritonUnready."""
        try:
            yield
        except (ValueError, LookupError, ArithmeticError) as error:
            raise TritonUnready(f"{self._target}: {what} cannot be read: {error!r:.200}") from error

    async def _metrics(self) -> str:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await metrics_page(self._metrics_url)
        except (OSError, TimeoutError, ValueError) as error:
            raise TritonUnready(f"{self._metrics_url} does not answer: {error!r}") from error

    async def version(self) -> str:
        """Server version, e.g. 2.51.0.

        Raises:
            TritonUnready: Triton does not answer.
        """
        return str((await self._ask("ServerMetadata", service_pb2.ServerMetadataRequest())).version)

    async def _ask(self, method: str, request: Any) -> Any:
        try:
            return await self._call(method, request, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            why = f"{self._target} does not answer {method}: {error.code().name} {error.details()}"
            raise TritonUnready(why) from error

    async def close(self) -> None:
        """Close the connection; Triton continues."""
        self._closed.set()
        for channel in tuple(self._calls):
            await channel.close()


def is_stub_dead(code: grpc.StatusCode, details: str | None) -> bool:
    """Whether an inference failed because the python stub is gone, not because of the request."""
    return code is grpc.StatusCode.INTERNAL and STUB_DEAD_TEXT in (details or "")


async def _first_answer(call: Any, request: Any) -> Any:
    """The first of a stream's answers; raises AioRpcError."""
    try:
        await call.write(request)
        reply = await call.read()
        if reply is grpc.aio.EOF:
            raise grpc.aio.AioRpcError(await call.code(), *(await call.initial_metadata(),) * 2, "no answer")
        return reply
    finally:
        call.cancel()


def probe_request(config: model_config_pb2.ModelConfig, version: int) -> Any:
    """Probe request: one all-zero item for every input of the contract that is not optional; as a text "0". Version 0:
    any."""
    request = service_pb2.ModelInferRequest(model_name=config.name, model_version=str(version or ""), id=PROBE_ID)
    for tensor in config.input:
        if tensor.optional:
            continue
        name = model_config_pb2.DataType.Name(tensor.data_type)
        shape = probe_shape(config, tensor)
        datatype = name.removeprefix("TYPE_").replace("STRING", "BYTES")
        request.inputs.add(name=tensor.name, datatype=datatype, shape=shape)
        size = ITEM_BYTES.get(name)
        one = bytes(size) if size else ZERO_TEXT
        request.raw_input_contents.append(one * math.prod(shape))
    if config.model_transaction_policy.decoupled:  # so that one that answers nothing is not waited for
        request.parameters["triton_enable_empty_final_response"].bool_param = True
    isolate_sequence(request, config)
    ask_one_token(request, config)
    return request


def wrong_reply(config: model_config_pb2.ModelConfig, version: int, reply: Any) -> str:
    """Reason why a reply to a probe cannot be trusted; "" when it can. A wrong numpy answers 0 bytes, status OK."""
    if version and reply.model_version != str(version):
        return f"version {reply.model_version} answered instead of {version}"
    sizes = {o.name: len(raw) for o, raw in zip(reply.outputs, reply.raw_output_contents, strict=False)}
    for tensor in config.output:
        if tensor.name in unasked_outputs(config):
            continue
        expected = math.prod(max(1, d) for d in tensor.dims)
        expected *= ITEM_BYTES.get(model_config_pb2.DataType.Name(tensor.data_type), 4)
        if sizes.get(tensor.name, 0) < expected:
            return f"output {tensor.name} has {sizes.get(tensor.name, 0)} bytes, expected {expected}"
    return ""


def counters(model: Any) -> VersionCounters:
    """VersionCounters of one entry of ModelStatistics."""
    stats = model.inference_stats
    return VersionCounters(
        family=model.name,
        version=int(model.version),
        successes=stats.success.count,
        failures=stats.fail.count,
        items=model.inference_count,
        compute_batch_ns=sum(b.compute_infer.ns for b in model.batch_stats),
    )


def pending_requests(metrics: str) -> int:
    """Number of pending requests by a metrics page: the gauge's sum over families and versions.

    Raises:
        ValueError: a model is loaded but has no gauge: nothing may be concluded from its absence.
    """
    lines = [line for line in metrics.splitlines() if line.startswith(PENDING_METRIC)]
    if not lines and "nv_inference_request_success{" in metrics:
        raise ValueError("a model is loaded, but nv_inference_pending_request_count is missing")
    return sum(int(float(line.rsplit(" ", 1)[1])) for line in lines)


def decode_times(metrics: str) -> dict[tuple[str, int], int]:
    """Time in which tokens were made [ns] by a metrics page, by family and version: of each instance since it was
    loaded last."""
    newest: dict[tuple[str, int, str], tuple[int, float]] = {}
    for line in metrics.splitlines():
        if line.startswith(DECODE_TIME):
            labels, value = dict(LABEL.findall(line)), float(line.rsplit(" ", 1)[1])
            place = labels["model"], int(labels["version"]), labels["instance"]
            newest[place] = max(newest.get(place, (0, 0.0)), (int(labels["loaded"]), value))
    found: dict[tuple[str, int], int] = {}
    for (family, version, _), (_, seconds) in newest.items():
        found[family, version] = found.get((family, version), 0) + round(seconds * 1e9)
    return found


async def metrics_page(url: str) -> str:
    """Text of a Triton's metrics page.

    Raises:
        OSError, ValueError: there is none, or it is too long.
    """
    where = urllib.parse.urlsplit(url)
    host = where.hostname or ""
    reader, writer = await asyncio.open_connection(host, where.port or 80)
    try:
        writer.write(f"GET {where.path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        answer = await reader.read(METRICS_BYTES_MAX)
        while chunk := await reader.read(METRICS_BYTES_MAX):
            answer += chunk
            if len(answer) > METRICS_BYTES_MAX:
                raise ValueError(f"more than {METRICS_BYTES_MAX} bytes")
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n", 1)[0]:
        raise ValueError(f"status line {head[:60]!r}")
    return body.decode()
