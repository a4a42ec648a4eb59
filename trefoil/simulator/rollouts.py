"""A rollout in simulated time: the steps of controller/rollout, each for as long as it takes.

Does what controller/act does live: publish the routes of a step, wait until every dispatcher has them and what leaves
is idle, command the devices, wait until what was started serves. A newer plan takes over between any two of these.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from controller.rollout import Way
from trefoil.core.fleet import SliceKey
from trefoil.core.plan import Plan, Route
from trefoil.simulator.plant import Plant


class Phase(Enum):
    """What the rollout waits for."""

    NEXT = auto()
    DRAIN = auto()
    READY = auto()
    DONE = auto()


@dataclass(slots=True)
class Rolling:
    """One rollout under way."""

    target: Plan
    way: Way
    publish: Callable[[tuple[Route, ...]], None]
    drained_s: Callable[[Iterable[SliceKey]], float]
    started_s: float
    ready_timeout_s: float = 90.0
    index: int = 0
    phase: Phase = Phase.NEXT
    due_s: float = math.inf
    halted: str = field(default="")

    @property
    def done(self) -> bool:
        """Whether the last step is over."""
        return self.phase == Phase.DONE

    def advance(self, plant: Plant, now_s: float) -> None:
        """Take every step that can be taken now."""
        while self.phase != Phase.DONE:
            if self.phase == Phase.NEXT:
                if self.index == len(self.way.steps):
                    self.halted, self.phase = self.way.waits, Phase.DONE
                    return
                self._begin(plant, now_s)
            elif self.phase == Phase.DRAIN:
                if now_s < self.due_s:
                    return
                self._command(plant, now_s)
            elif not plant.ready(self.way.steps[self.index].ready):
                if now_s >= self.due_s:
                    self.halted, self.phase = "slices are not READY in time", Phase.DONE
                return
            else:
                self._next()

    def next_s(self) -> float:
        """When something is due that the plant does not announce."""
        return math.inf if self.done else self.due_s

    def _begin(self, plant: Plant, now_s: float) -> None:
        step = self.way.steps[self.index]
        self.publish(step.routes)
        if step.drained:
            plant.drain(step.drained, now_s)
            self.phase, self.due_s = Phase.DRAIN, now_s + self.drained_s(step.drained)
        else:
            self._command(plant, now_s)

    def _command(self, plant: Plant, now_s: float) -> None:
        step = self.way.steps[self.index]
        plant.command(step.devices, now_s)
        if step.ready:
            self.phase, self.due_s = Phase.READY, now_s + self.ready_timeout_s
        else:
            self._next()

    def _next(self) -> None:
        self.index += 1
        self.phase, self.due_s = Phase.NEXT, math.inf
