"""Runs a batch of OpenAI's API: each item is a line of its input file, each result a line of its output or error file.

A slice gets as many lines at once as half of its credits, so that streams run together and a request finds a place.
As soon as a request is on their slice, or waits for one, the streams of the lines are cancelled; they are run again
later. So no line begins on a slice that a request is expected to need before its end.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import grpc

from dispatcher.fronts.openai.completions import Completions, openai_refusal
from dispatcher.fronts.rest import codec
from dispatcher.fronts.rest.calls import HttpError
from dispatcher.jobs.batching import SHARED, Head, Item
from dispatcher.jobs.core.journal import Result
from dispatcher.jobs.idle_slices import Size
from dispatcher.jobs.job_run import JobRun
from dispatcher.request.admission import StatusError
from dispatcher.request.idle import NotIdle
from dispatcher.routing.request_parameters import RECEIPT
from protos.dispatcher.v1 import jobs_pb2
from trefoil.core.errors import TrefoilError
from trefoil.core.fleet import SliceKey
from trefoil.core.plan import RouteTarget
from trefoil.runtime.rpc import status_of

ROOM_S: Final = 0.05
"""Time in which lines make room."""
PREEMPTED_MAX: Final = 0.7
"""Most requests that may be expected on a slice while lines are on it: half of them end then."""
LINES: Final = Head(None, 1, (), b"line")
Error = HttpError | StatusError | TrefoilError


@dataclass(slots=True)
class LineItem(Item):
    """A line. `refusal`: why it was not answered when it was run last."""

    custom_id: str = ""
    refusal: Error | None = None


class LineRun(JobRun):
    """One batch while this worker owns it."""

    def __init__(self, completions: Completions, *job: Any) -> None:
        super().__init__(*job)
        self._completions = completions
        self._lines: dict[asyncio.Task[None], tuple[SliceKey, LineItem]] = {}
        self._preempted: set[asyncio.Task[None]] = set()

    def make_room(self) -> None:
        routing = self._local.routing
        for task, (slice_, _) in self._lines.items():
            families = routing.families_of(slice_)
            if not all(routing.queues[each].only_jobs(slice_) for each in families):
                self._preempt(task)

    async def settle(self) -> bool:
        for task in self._lines:  # an answer may take minutes, for which the owner would wait
            self._preempt(task)
        return await super().settle()

    def _preempt(self, task: "asyncio.Task[None]") -> None:
        if task not in self._preempted:
            self._preempted.add(task)
            task.cancel()

    def _read(self, number: int, data: bytes) -> Item:
        return LineItem(number, len(data), (data,), LINES, alone=False)

    def _affordable(self, targets: list[RouteTarget]) -> list[RouteTarget]:
        line_s = self._local.costs.expected_s(self.job.family, 1)
        return [each for each in targets if self._idle.delayed(each, line_s) <= PREEMPTED_MAX]

    def _sizes(self, target: RouteTarget) -> list[Size]:
        """However long its streams are, a request waits no longer than until they are cancelled."""
        return [(2**power, ROOM_S) for power in range(max(1, target.credits // 2).bit_length())]

    async def _send(self, batch: list[Item], target: RouteTarget) -> None:
        async with asyncio.TaskGroup() as group:
            for item in batch:
                assert isinstance(item, LineItem)
                task = group.create_task(self._line(item, target), name=f"line of {self.job.id}")
                self._lines[task] = target.slice, item
                task.add_done_callback(self._line_ended)

    def _line_ended(self, task: "asyncio.Task[None]") -> None:
        _, item = self._lines.pop(task)
        if task.cancelled() and task in self._preempted:
            self._ready.appendleft(item)
        self._preempted.discard(task)

    async def _line(self, item: LineItem, target: RouteTarget) -> None:
        caller = self._caller(target)
        try:
            item.custom_id, asked = await self._completions.read_line(item.raws[0], caller.flow[0])
            if isinstance(asked, TrefoilError):
                raise asked
            asked = replace(asked, parameters={**asked.parameters, RECEIPT: True})
            body, receipt = await self._completions.whole(asked, caller)
            self._written(item, 200, body, receipt)
            self._count("answered", 1)
        except NotIdle:
            self._ready.appendleft(item)
        except (HttpError, StatusError, TrefoilError) as error:
            self._refuse(item, error)

    def _refuse(self, item: LineItem, error: Error) -> None:
        """Run a line again later, or end it with its error."""
        if isinstance(error, HttpError):
            code = grpc.StatusCode.NOT_FOUND
        else:
            code = error.code if isinstance(error, StatusError) else status_of(error)
        item.refusal = error
        self._failed([item], StatusError(code, str(error)))

    def _error(self, number: int, refused: StatusError, item: Item | None = None) -> None:
        line = item if isinstance(item, LineItem) else LineItem(number, 0, (), LINES, alone=True)
        reply = openai_refusal(line.refusal or refused)
        self._written(line, reply.status, reply.body, {}, f"{refused.code.name}: {refused.details}")
        self._count("failed", 1)

    def _written(self, item: LineItem, status: int, body: bytes, receipt: Mapping[str, Any], error: str = "") -> None:
        """Add the result of a line. `body`: JSON."""
        id_ = f"{self.job.id.replace('batch_', 'batch_req_', 1)}_{item.number}"
        head = {"id": id_, "custom_id": item.custom_id, "response": {"status_code": status, "request_id": id_}}
        line = b'%b,"body":%b},"error":null}' % (codec.dumps(head).removesuffix(b"}}"), body)
        failed = status != 200
        result = jobs_pb2.ItemResult(item=item.number, response=line, code="FAILED" if failed else "")
        joules, mg = (float(receipt.get(name) or 0.0) for name in SHARED)
        found = Result(item.number, result.SerializeToString(), failed, joules, mg / 1e3, len(line) + 1, error)
        self._add(found, item.size)
