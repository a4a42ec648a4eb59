"""Load generator: open loop, no retries, every answer checked against its label.

Open loop: a request leaves at its intended time whatever happened to those before it, as the requests of independent
users do. Arrivals and images are decided before the first is sent (trefoil/cli/load/arrivals.py).
Records and numbers are in trefoil/cli/load/result.py.

    spec = LoadSpec(RateProfile.constant(26, 60), images=Path("model_repository/digits/heldout.npz"))
    result = await run_load(spec, "127.0.0.1:8001")
    result.summary(slo_ms=75).slo_attainment
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np
from tritonclient.grpc import service_pb2

from trefoil import direct
from trefoil.cli.load.arrivals import ArrivalTrace, NormalSizes, RateProfile, Schedule, schedule
from trefoil.cli.load.inputs import LoadInputs, labelled_inputs
from trefoil.cli.load.result import BAD_ANSWER, NOT_SENT, OK, LoadResult, Progress, Record, quantile
from trefoil.core.errors import InvalidInput, Unavailable
from trefoil.core.units import ms
from trefoil.runtime.clock import Clock, WallClock

INFER: Final = "/inference.GRPCInferenceService/ModelInfer"
VARIANT_PARAMETER: Final = "trefoil_variant"
SLICE_PARAMETER: Final = "trefoil_slice"  # of answers to requests that ask for a receipt
LEAD_S: Final = 0.05  # between the decision to start and intended time 0
STOP_POLL_S: Final = 0.25  # longest sleep between two looks at `stop`
PROGRESS_S: Final = 0.5
WINDOW_S: Final = 5.0
DEADLINE_MIN_S: Final = 1e-3  # a request that is sent too late is still sent, and misses its deadline


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """Specification of a load. Two runs of equal specifications send the same images at the same times."""

    arrivals: RateProfile | ArrivalTrace
    images: Path | LoadInputs  # npz with `images` and `labels`, e.g. model_repository/digits/heldout.npz
    family: str = "digits"
    input_name: str = "IMAGE"
    output_name: str = "PROBABILITIES"
    seed: int = 1
    batch_sizes: tuple[int, ...] | NormalSizes = (1,)
    deadline_s: float = 5.0  # from the intended time
    permute_labels: bool = False  # control: accuracy must fall to chance
    parameters: Mapping[str, str | float] = field(default_factory=dict)  # trefoil_class, trefoil_min_accuracy, ...
    in_flight_max: int = 2000  # beyond it a request is recorded as NOT_SENT; the generator never waits
    connect_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        for name in ("deadline_s", "in_flight_max", "connect_timeout_s"):
            if not getattr(self, name) > 0:
                raise InvalidInput("must be above 0", field=name, value=getattr(self, name))


OnProgress = Callable[[Progress], None]


async def run_load(
    spec: LoadSpec,
    target: str,
    on_progress: OnProgress | None = None,
    *,
    clock: Clock | None = None,
    stop: asyncio.Event | None = None,
    lead_s: float = LEAD_S,
) -> LoadResult:
    """Play the load against a KServe v2 endpoint and return what happened, after the last answer.

    `on_progress` is called every half second on the event loop. Setting `stop` ends the load early: what was sent is
    waited for and returned. The load begins `lead_s` after all is ready for it.

    Raises:
        InvalidInput: images, trace or a setting cannot be used; nothing was sent.
        Unavailable: nothing listens at `target`; nothing was sent.
    """
    inputs = spec.images
    if isinstance(inputs, Path):
        inputs = labelled_inputs(inputs, spec.input_name, spec.output_name)
    if spec.permute_labels:
        inputs = inputs.permuted(spec.seed)
    plan = schedule(spec.arrivals, len(inputs), spec.batch_sizes if inputs.batched else (1,), spec.seed)
    options = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]
    options += [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    async with direct.channel(target, options=options) as channel:
        await _wait_connected(channel, target, spec.connect_timeout_s)
        infer = channel.unary_unary(INFER, response_deserializer=service_pb2.ModelInferResponse.FromString)
        run = _LoadRun(spec, plan, inputs, infer, clock or WallClock(), stop or asyncio.Event(), lead_s)
        async with _reporting(run, on_progress):
            await run.send_all()
    return run.result()


async def _wait_connected(channel: grpc.aio.Channel, target: str, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await channel.channel_ready()
    except TimeoutError:
        raise Unavailable(
            f"nothing answers within {timeout_s:g} s", field="target", value=target,
            remedy="start the system (`trefoil up`) or name its inference address",
        ) from None  # fmt: skip


@contextlib.asynccontextmanager
async def _reporting(run: "_LoadRun", on_progress: OnProgress | None) -> Any:
    """Report while the block runs, and once more at its end."""
    if on_progress is None:
        yield
        return

    async def report() -> None:
        while True:
            await run.clock.sleep(PROGRESS_S)
            on_progress(run.progress())

    reporter = asyncio.create_task(report())
    try:
        yield
        on_progress(run.progress())
    finally:
        reporter.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reporter  # what the callback raised is raised here


class _LoadRun:
    """One load in progress."""

    def __init__(
        self,
        spec: LoadSpec,
        plan: Schedule,
        inputs: LoadInputs,
        infer: Any,
        clock: Clock,
        stop: asyncio.Event,
        lead_s: float,
    ) -> None:
        self._spec, self._plan, self._inputs, self._infer, self._stop = spec, plan, inputs, infer, stop
        self.clock, self._lead_s = clock, lead_s
        self._classes = int(inputs.labels.max()) + 1 if inputs.labels is not None else 0
        self._records: list[Record | None] = [None] * len(plan.times_s)
        self._sent = self._answered = self._failed = 0
        self._window: deque[tuple[float, Record]] = deque()
        self._start_s = self._started_at_s = 0.0

    async def send_all(self) -> None:
        """Send everything at its time; return after the last answer. A cancellation cancels what is in flight."""
        self._start_s = self.clock.monotonic_s() + self._lead_s
        self._started_at_s = self.clock.now_s() + self._lead_s
        async with asyncio.TaskGroup() as requests:  # waits for all; each is bounded by its deadline
            for index, at_s in enumerate(self._plan.times_s.tolist()):
                await self._sleep_until(self._start_s + at_s)
                if self._stop.is_set():
                    return
                full = self._sent - self._answered - self._failed >= self._spec.in_flight_max
                self._sent = index + 1
                if full:
                    self._record(index, self.clock.monotonic_s(), NOT_SENT)
                else:
                    requests.create_task(self._request(index))
            await self._sleep_until(self._start_s + self._plan.duration_s)

    async def _sleep_until(self, due_s: float) -> None:
        left_s = due_s - self.clock.monotonic_s()
        if left_s <= 0:
            await asyncio.sleep(0)  # behind: let answers in all the same
        while left_s > 0 and not self._stop.is_set():
            await self.clock.sleep(min(left_s, STOP_POLL_S))
            left_s = due_s - self.clock.monotonic_s()

    async def _request(self, index: int) -> None:
        sent_s = self.clock.monotonic_s()
        left_s = self._start_s + float(self._plan.times_s[index]) + self._spec.deadline_s - sent_s
        try:
            reply = await self._infer(self._message(index), timeout=max(left_s, DEADLINE_MIN_S))
        except grpc.aio.AioRpcError as error:
            self._record(index, sent_s, error.code().name)
            return
        correct = self._count_correct(index, reply)
        if correct is None:
            self._record(index, sent_s, BAD_ANSWER)
        else:
            told = {name: value.string_param for name, value in reply.parameters.items()}
            variant = told.get(VARIANT_PARAMETER) or f"{reply.model_name}/{reply.model_version}"
            self._record(index, sent_s, OK, correct, variant, told.get(SLICE_PARAMETER, ""))

    def _message(self, index: int) -> bytes:
        items = self._plan.items(index)
        request = service_pb2.ModelInferRequest(model_name=self._spec.family, id=self._id(index))
        for tensor in self._inputs.tensors:
            values = tensor.values[items] if self._inputs.batched else tensor.values[items[0]]
            request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=values.shape)
            request.raw_input_contents.append(values.tobytes())
        for name, value in self._spec.parameters.items():
            if isinstance(value, str):
                request.parameters[name].string_param = value
            else:
                request.parameters[name].double_param = value
        return bytes(request.SerializeToString())

    def _id(self, index: int) -> str:
        return f"{self._spec.seed}-{index}"

    def _count_correct(self, index: int, reply: Any) -> int | None:
        """Number of right items, 0 if unknown; None if this does not answer the request."""
        if self._inputs.labels is None:
            return 0 if reply.id == self._id(index) and reply.outputs else None
        labels = self._inputs.labels[self._plan.items(index)]
        outputs = zip(reply.outputs, reply.raw_output_contents, strict=False)
        raw = next((raw for output, raw in outputs if output.name == self._inputs.output), b"")
        if reply.id != self._id(index) or len(raw) == 0 or len(raw) % (4 * len(labels)):
            return None
        scores = np.frombuffer(raw, "<f4").reshape(len(labels), -1)
        if scores.shape[1] < self._classes or not np.isfinite(scores).all():
            return None
        return int(np.count_nonzero(scores.argmax(axis=1) == labels))

    def _record(
        self, index: int, sent_s: float, code: str, correct: int = 0, variant: str = "", slice_: str = ""
    ) -> None:
        now_s, intended_s = self.clock.monotonic_s(), float(self._plan.times_s[index])
        record = Record(
            intended_s=intended_s,
            sent_late_ms=max(0.0, ms(sent_s - self._start_s - intended_s)),
            latency_ms=ms(now_s - self._start_s - intended_s),
            code=code,
            items=len(self._plan.items(index)),
            correct=correct,
            variant=variant,
            slice=slice_,
        )
        self._records[index] = record
        self._answered += code == OK
        self._failed += code != OK
        self._window.append((now_s, record))
        while self._window[0][0] < now_s - WINDOW_S:
            self._window.popleft()

    def progress(self) -> Progress:
        """Progress of the load now."""
        now_s = self.clock.monotonic_s()
        elapsed_s = now_s - self._start_s
        recent = [r for at_s, r in self._window if at_s >= now_s - WINDOW_S and r.code == OK]
        items = sum(r.items for r in recent)
        return Progress(
            elapsed_s=elapsed_s,
            duration_s=self._plan.duration_s,
            requests=self._sent,
            answered=self._answered,
            failed=self._failed,
            in_flight=self._sent - self._answered - self._failed,
            answered_per_s=len(recent) / max(min(elapsed_s, WINDOW_S), PROGRESS_S),
            latency_ms_p95=quantile(np.array([r.latency_ms for r in recent]), 0.95),
            accuracy=sum(r.correct for r in recent) / items if items and self._inputs.labels is not None else None,
        )

    def result(self) -> LoadResult:
        """Result of everything that was due."""
        records = tuple(r for r in self._records[: self._sent] if r is not None)
        assert len(records) == self._sent, "a request that was sent has no record"
        stopped = self._sent < len(self._records)
        duration_s = records[-1].intended_s if stopped and records else self._plan.duration_s
        labelled = self._inputs.labels is not None
        seed, digest = self._spec.seed, self._plan.digest
        return LoadResult(records, self._started_at_s, duration_s, seed, digest, stopped, labelled)
