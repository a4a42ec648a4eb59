"""Asks the process that predicts lengths, and does without it: a request waits WAIT_S at most.

While an answer is late no other request waits for the process, nor is it asked: requests go first come, first served
until it has caught up. One that is silent for SILENT_S is killed; one that ends is started again, ever more slowly. All
of it is said in `trouble`, which the status and the rung `lengths` show.
"""

import asyncio
import itertools
import json
import math
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import structlog
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from trefoil.core.brains import Ticket
from trefoil.runtime.clock import Clock

LOG = structlog.get_logger()
WAIT_S: Final = 0.05  # that a request waits for its predicted length, before it is queued without one
SILENT_S: Final = 20.0
PAUSE_FIRST_S, PAUSE_MAX_S = 0.5, 30.0
CHECK_S: Final = 0.2
END_S: Final = 1.0
PROMPT_CHARS_MAX: Final = 4096  # the network reads 128 tokens
UNLEARNED_MAX: Final = 1024  # true lengths that the process has not read
COUNT_BYTES: Final = 4  # before each element of a BYTES tensor


class Lengths:
    """Predictions of one worker's requests; a part of the service. Belongs to one event loop.

    `wanted` tells whether any queue reads lengths: the process runs only then, from the first request on that asks.
    """

    def __init__(self, folder: Path, clock: Clock, wanted: Callable[[], bool], wait_s: float = WAIT_S) -> None:
        self.total = Counter[str]()  # by outcome: predicted, cached, late, absent, invalid
        self._folder, self._wait_s, self._clock, self._wanted = folder, wait_s, clock, wanted
        self._process: asyncio.subprocess.Process | None = None
        self._families: frozenset[str] = frozenset()  # that it predicts; none: it is not ready
        self._ids = itertools.count(1)
        self._asked: dict[int, tuple[asyncio.Future[dict[str, Any]], float]] = {}
        self._unlearned = 0
        self._why = "the predictor has not started"
        self._needed = False

    @property
    def trouble(self) -> str:
        """Why requests are served first come, first served though a queue reads lengths; "": they are not."""
        if not (self._why and self._needed and self._wanted()):
            return ""
        return f"{self._why}: requests are served first come, first served"

    async def scored(self, ticket: Ticket, payload: bytes) -> Ticket:
        """Ticket with the predicted class of its answer's length; as it is, if there is none in time."""
        self._needed = True
        if not self._families or self._process is None:
            self.total["absent"] += 1
            return ticket
        if ticket.family not in self._families or not (prompt := prompt_of(payload)):
            return ticket
        now_s = self._clock.monotonic_s()
        if any(now_s - asked_s > self._wait_s for _, asked_s in self._asked.values()):
            self.total["late"] += 1
            return ticket
        id_, future = next(self._ids), asyncio.get_running_loop().create_future()
        self._asked[id_] = future, now_s
        self._tell({"id": id_, "family": ticket.family, "prompt": prompt})
        try:
            async with asyncio.timeout(self._wait_s):
                answer = await asyncio.shield(future)
        except TimeoutError:
            self.total["late"] += 1
            self._why = f"the predictor has not answered within {self._wait_s * 1e3:.0f} ms"
            return ticket
        return self._taken(ticket, answer)

    def learn(self, ticket: Ticket, payload: bytes, tokens: int) -> None:
        """Tell the true length of an answer that has ended."""
        behind = self._unlearned >= UNLEARNED_MAX or self._asked
        known = ticket.family in self._families and self._process is not None
        if not known or behind or not (prompt := prompt_of(payload)):
            return
        self._tell({"family": ticket.family, "prompt": prompt, "tokens": tokens})
        self._unlearned += 1

    def _taken(self, ticket: Ticket, answer: dict[str, Any]) -> Ticket:
        score = answer.get("score")
        if not is_number(score):
            if answer:  # else the process has ended, which says so itself
                self._why = f"the predictor answers {score!r}"
            self.total["invalid" if answer else "absent"] += 1
            return ticket
        self._why = ""
        self.total["cached" if answer.get("cached") else "predicted"] += 1
        return replace(ticket, length_score=float(answer["score"]))

    def _tell(self, message: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")

    # --- the process --------------------------------------------------------------------------------------------------

    async def init(self) -> None:
        """Nothing is needed before a queue reads lengths."""

    async def run(self) -> None:
        """Keep the process running while a queue reads lengths."""
        pause_s = PAUSE_FIRST_S
        while True:
            while not (self._needed and self._wanted()):
                await self._clock.sleep(CHECK_S)
            began_s = self._clock.monotonic_s()
            await self._live()
            LOG.warning("length predictor", why=self._why)
            if self._clock.monotonic_s() - began_s > PAUSE_MAX_S:
                pause_s = PAUSE_FIRST_S
            await self._clock.sleep(pause_s)
            pause_s = min(PAUSE_MAX_S, 2 * pause_s)

    async def shutdown(self) -> None:
        """End the process."""
        await self._end()

    async def _live(self) -> None:
        """One life of the process."""
        arguments = (sys.executable, "-P", "-m", "dispatcher.lengths.process", str(self._folder))
        pipe = asyncio.subprocess.PIPE
        try:
            self._process = await asyncio.create_subprocess_exec(
                *arguments, stdin=pipe, stdout=pipe, start_new_session=True
            )
        except OSError as error:
            self._why = f"the predictor cannot be started ({error})"
            return
        watch = asyncio.create_task(self._watch(), name="silent length predictor")
        try:
            assert self._process.stdout is not None
            async for line in self._process.stdout:
                self._hear(json.loads(line))
        except ValueError as error:
            self._why = f"the predictor's answer is not read ({error})"
        finally:
            watch.cancel()
            await self._end()

    def _hear(self, said: dict[str, Any]) -> None:
        if "refused" in said:
            self._why = f"the predictor does not start: {said['refused']}"
        elif "families" in said:
            self._families, self._why = frozenset(said["families"]), ""
            LOG.info("length predictor", families=sorted(self._families), folder=str(self._folder))
        elif (asked := self._asked.pop(said.get("id", 0), None)) is not None:
            self._unlearned = 0  # it reads in order
            if not asked[0].done():
                asked[0].set_result(said)
            if not self._asked and is_number(said.get("score")):
                self._why = ""  # it has caught up

    async def _watch(self) -> None:
        """Kill a process that is silent."""
        while True:
            await self._clock.sleep(CHECK_S)
            oldest_s = min((asked_s for _, asked_s in self._asked.values()), default=math.inf)
            if self._clock.monotonic_s() - oldest_s > SILENT_S and self._process is not None:
                self._why = f"the predictor was silent for {SILENT_S:.0f} s and was killed"
                self._process.kill()
                return

    async def _end(self) -> None:
        process, self._process, self._families, self._unlearned = self._process, None, frozenset(), 0
        for future, _ in self._asked.values():
            if not future.done():
                future.set_result({})
        self._asked.clear()
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(END_S):
                code = await process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                process.kill()
            code = await process.wait()
        if not self._why:
            self._why = f"the predictor has ended with {code}"


def is_number(score: Any) -> bool:
    """Whether a score is one that can be gone by."""
    return isinstance(score, float | int) and math.isfinite(score)


def prompt_of(payload: bytes) -> str:
    """Prompt of a ModelInferRequest: the first element of its first BYTES input; "": it has none that is text."""
    try:
        message = pb.ModelInferRequest.FromString(payload)
        for at, tensor in enumerate(message.inputs):
            if tensor.datatype != "BYTES":
                continue
            if tensor.contents.bytes_contents:
                data = tensor.contents.bytes_contents[0]
            else:
                raw = message.raw_input_contents[at]
                data = raw[COUNT_BYTES : COUNT_BYTES + int.from_bytes(raw[:COUNT_BYTES], "little")]
            return str(data.decode()[:PROMPT_CHARS_MAX])
    except (DecodeError, UnicodeDecodeError, IndexError):
        pass  # its slice answers what is wrong with it
    return ""
