"""Runner of the planner: in a thread, within a wall limit."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Final

import structlog

from controller.explore.core.ports import PlannerAnswer
from controller.loop.core.deciding import RETRY_S
from controller.loop.core.decision import ask_planner, run_planner
from controller.role.disk_store import DiskStore
from trefoil.core import errors
from trefoil.core.brains import Candidate, Decision, Measurement, Planner, PlanView
from trefoil.core.parts import as_live_planner
from trefoil.runtime.clock import Clock

MEMORY: Final = "planner_memory"
UNREADABLE: Final = (errors.TrefoilError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class PlannerRunner:
    """Runner of the planner, in a thread and within a wall limit. Its memory is saved on disk and recalled after a
    restart.
    """

    def __init__(self, planner: Planner, name: str, disk: DiskStore, clock: Clock, timeout_s: float) -> None:
        self.planner, self.live, self.name = planner, as_live_planner(planner), name
        self._disk, self._clock, self._timeout_s = disk, clock, timeout_s
        self._abandoned: asyncio.Future[Candidate | Decision] | None = None
        self._before = ""
        self._log = structlog.get_logger()
        saved = disk.load_plain(MEMORY)
        if self.live is not None and saved.get("planner") == name:
            self._recall(saved.get("memory", {}))

    async def call(self, view: PlanView, seed: int, asks: bool = False) -> PlannerAnswer:
        """Call the planner once. One that takes too long is abandoned: the answer is then to keep what runs."""
        if self._abandoned is not None:
            if not self._abandoned.done():
                return self._limit_hit(view, seed, "the planner is still busy with an abandoned decision")
            self._abandoned = None
            if self._before:  # what it did after it was abandoned is in no record
                self._recall(json.loads(self._before))
        self._before = self._memory()
        started_s = self._clock.monotonic_s()
        future = asyncio.get_running_loop().run_in_executor(
            None, ask_planner if asks else run_planner, view, self.planner, seed
        )
        done, _ = await asyncio.wait((future,), timeout=self._timeout_s)
        solve_ms = (self._clock.monotonic_s() - started_s) * 1e3
        if done:
            return PlannerAnswer(future.result(), seed, solve_ms, False, self._before, asks)
        self._abandoned = future
        return self._limit_hit(
            view, seed, f"the planner took more than solve_timeout_s = {self._timeout_s:g} s", solve_ms
        )

    def tell(self, candidate: Candidate, measurement: Measurement) -> None:
        """Tell a planner that measures the outcome of its candidate, and save what it remembers."""
        assert self.live is not None
        self.live.tell(candidate, measurement)
        self.save()

    def save(self) -> None:
        """Save what the planner remembers now."""
        if self.live is not None:
            self._disk.save_later(MEMORY, {"planner": self.name, "memory": self.live.memory()})

    def _limit_hit(self, view: PlanView, seed: int, why: str, solve_ms: float = 0.0) -> PlannerAnswer:
        return PlannerAnswer(Decision(None, why, view.now_s + RETRY_S, why), seed, solve_ms, True, self._before)

    def _memory(self) -> str:
        if self.live is None:
            return ""
        return json.dumps(self.live.memory(), sort_keys=True, ensure_ascii=False)

    def _recall(self, memory: Mapping[str, Any]) -> None:
        assert self.live is not None
        try:
            self.live.recall(memory)
        except UNREADABLE as error:
            self._log.warning("the planner cannot read its saved memory; it starts empty", error=str(error))
