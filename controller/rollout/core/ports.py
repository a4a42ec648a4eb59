"""Ports: what a core asks of what is around it. Live they are asyncio; simulated they answer at once.

A core's step is a coroutine that awaits only ports, so that a simulation runs it without an event loop. What
cannot be done is raised by the port, so that a step that was not recorded leaves nothing behind that says it was. A
port that never waits is a plain method. Here: those of every core, and those of rollouts.
"""

from collections.abc import Mapping
from typing import Protocol

from controller.rollout.core.path import FleetSnapshot, RolloutPath
from trefoil.core.brains import PlanView
from trefoil.core.fleet import NodeStatus, SliceKey
from trefoil.core.plan import NodePlan, Plan, Rollout


class CoreClock(Protocol):
    """Clock that a core goes by."""

    def now_s(self) -> float:
        """UTC [s]."""

    def monotonic_s(self) -> float:
        """Time for what is waited for [s]."""


class CorePorts(Protocol):
    """Ports of every core."""

    def save(self, values: Mapping[str, object]) -> None:
        """Save values on disk by name, all or none. Raises DiskUnavailable; then the core must not act on them."""

    def save_later(self, name: str, value: object) -> None:
        """Save a value on disk under a name, as soon as there is room; a restart before that does without."""

    def log(self, event: str, /, *, warning: bool = False, **fields: object) -> None:
        """Log one line."""

    def count(self, metric: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter."""

    def gauge(self, metric: str, value: float, /) -> None:
        """Set a gauge."""

    def duration(self, metric: str, seconds: float, /) -> None:
        """Add a duration to a histogram [s]."""

    def wake(self) -> None:
        """Wake the loop: the next step at once instead of at the next period."""


class RolloutPorts(CorePorts, Protocol):
    """Ports of a rollout."""

    async def query_agents(self, nodes: Mapping[str, NodeStatus]) -> None:
        """Query node statuses from the agents themselves, not as they were last written."""

    async def refresh_statuses(self) -> None:
        """Refresh statuses of nodes and acknowledgements of dispatchers. Raises StateUnavailable."""

    async def wait(self, until_s: float) -> None:
        """Wait for a change, at the latest until a time of the monotonic clock [s]."""

    async def publish(
        self, *, plan: Plan | None = None, rollout: Rollout | None = None, node: NodePlan | None = None,
        drained: frozenset[SliceKey] = frozenset(),
    ) -> None:  # fmt: skip
        """Write routes, where the rollout stands, and what a node was commanded; all or nothing.

        `drained`: slices that get no new request by this plan, and stop when they are idle.
        Raises Fenced, StateUnavailable.
        """

    async def command(self, status: NodeStatus, plan: NodePlan) -> bool:
        """Command a node to its desired state; returns whether that changes anything.

        Raises Fenced: the agent obeys a newer epoch; Unavailable, InvalidInput.
        """

    def ended(self) -> None:
        """The rollout has ended: the loop need not wait for its next period."""

    def find_path(self, view: PlanView, snapshot: FleetSnapshot, plan: Plan) -> RolloutPath:
        """Find the path from what stands to a plan (`rollout_inputs.best_path`)."""


class NullPorts:
    """Ports of every core that do nothing: for a shell without disk, log and metrics."""

    def save(self, values: Mapping[str, object]) -> None: ...
    def save_later(self, name: str, value: object) -> None: ...
    def log(self, event: str, /, *, warning: bool = False, **fields: object) -> None: ...
    def count(self, metric: str, amount: float = 1.0, **labels: str) -> None: ...
    def gauge(self, metric: str, value: float, /) -> None: ...
    def duration(self, metric: str, seconds: float, /) -> None: ...
    def wake(self) -> None: ...
