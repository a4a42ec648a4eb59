"""What processes in virtual time have instead of a disk, metrics and gRPC."""

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from controller.role.disk_store import DiskStore
from dispatcher.service.state_sync import TableFile
from tests.support.virtual.loop import PROCESS
from tests.support.virtual.nodes import Node
from trefoil.core import errors
from trefoil.core.fleet import NodeStatus
from trefoil.core.plan import DecisionRecord, NodePlan, Plan
from trefoil.runtime import codec
from trefoil.runtime.clock import Clock

RPC_S = 0.01
CONTROLLER_HOLDS = (  # dataclasses, which do not change
    "objectives", "by_command", "tenant_budgets", "plans", "published", "commanded",
)  # fmt: skip


class Files(dict[str, Any]):
    """A disk: what is on it outlives the processes that write to it."""

    refuses: Callable[[], bool] = staticmethod(lambda: False)
    """Whether the next write fails: the disk is full, read-only, or broken at times."""


class MemoryDisk(DiskStore):
    """`controller.role.disk_store.DiskStore` without files. A killed process writes nothing more."""

    def __init__(self, files: Files, decisions_max: int) -> None:
        self._files, self._max = files, decisions_max
        self._process = PROCESS.get()
        self._why, self._later = "", {}
        self.uncopied = {}  # one disk is all that controllers have here

    @property
    def trouble(self) -> str:
        return self._why

    def save_together(self, values: Mapping[str, Any]) -> None:
        if self._process is not None and self._process.dead:
            return
        self._require_room()
        for name, obj in values.items():
            self._files[name] = obj if name in CONTROLLER_HOLDS else json.dumps(obj)
            self._later.pop(name, None)

    def save_later(self, name: str, obj: Any) -> None:
        self._later[name] = obj
        with contextlib.suppress(errors.DiskUnavailable):
            self.save(name, obj)

    def copy_all(self) -> None:
        pass

    def check(self) -> None:
        self._require_room()
        self.save_together(dict(self._later))
        self._why = ""

    def _require_room(self) -> None:
        if self._files.refuses():
            self._why = self._why or "the disk is full"
            raise errors.DiskUnavailable(self._why)

    def set_aside(self) -> list[str]:
        return []

    def load(self, name: str, cls: type[Any]) -> Any:
        found = self._files.get(name)
        return codec.from_json(cls, found) if isinstance(found, str) else found

    def load_all(self, name: str, cls: type[Any]) -> tuple[Any, ...]:
        return tuple(self._files.get(name, ()))

    def load_plain(self, name: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = json.loads(self._files.get(name, "{}"))
        return found

    def save_decision(self, record: DecisionRecord, plan: Plan | None) -> None:
        self._require_room()
        kept = self._files.setdefault("decisions", {})
        kept[record.id] = (record, plan)
        for old in list(kept)[: max(0, len(kept) - self._max)]:
            del kept[old]

    def decision(self, name: str) -> tuple[DecisionRecord, Plan | None] | None:
        found: tuple[DecisionRecord, Plan | None] | None = self._files.get("decisions", {}).get(name)
        return found

    def decision_ids(self) -> list[str]:
        return sorted(self._files.get("decisions", {}))


class ProcessDisk(DiskStore):
    """The store on real files. A killed process writes nothing more."""

    def __init__(self, root: Path, decisions_max: int) -> None:
        super().__init__(root, decisions_max)
        self._process = PROCESS.get()

    def _replace(self, texts: Mapping[str, str]) -> None:
        if self._process is None or not self._process.dead:
            super()._replace(texts)

    def _forget(self, name: str) -> None:
        if self._process is None or not self._process.dead:
            super()._forget(name)


class ProcessTable(TableFile):
    """The table's real file. A killed process writes nothing more."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._process = PROCESS.get()

    def save(self, plan: Plan, nodes: tuple[NodeStatus, ...]) -> None:
        if self._process is None or not self._process.dead:
            super().save(plan, nodes)


class Silent:
    """Metrics that nobody reads."""

    simulated = True

    def inc(self, name: str, amount: float = 1.0, **labels: str) -> None: ...
    def set(self, name: str, value: float, **labels: str) -> None: ...
    def observe(self, name: str, value: float, **labels: str) -> None: ...
    def set_one_of(self, name: str, label: str, chosen: str, choices: tuple[str, ...], **labels: str) -> None: ...
    def drop(self, name: str, *values: str) -> None: ...
    def window(self, window: Any) -> None: ...


class NodeAgents:
    """`controller.rollout.agent_clients.AgentClients` without gRPC: the agents of nodes in this process."""

    unreached: Mapping[str, str] = {}

    def __init__(self, nodes: Mapping[str, Node], clock: Clock, timeout_s: float, tries: int) -> None:
        self._nodes, self._clock, self._timeout_s, self._tries = nodes, clock, timeout_s, tries
        self._process = PROCESS.get()

    async def apply(self, status: NodeStatus, plan: NodePlan) -> bool:
        node = await self._reach(status, self._tries)
        if node is None:
            raise errors.Unavailable(f"the agent of {status.node} does not answer", remedy="start the power agent")
        return node.apply(plan)

    async def fresh(self, nodes: Mapping[str, NodeStatus]) -> dict[str, NodeStatus]:
        found = {name: await self._reach(status, 1) for name, status in sorted(nodes.items())}
        return {name: node.status() for name, node in found.items() if node is not None}

    async def close(self) -> None: ...

    async def _reach(self, status: NodeStatus, tries: int) -> Node | None:
        node = self._nodes.get(status.node)
        node = node if node is not None and node.answers and node.agent_target == status.agent_target else None
        await self._clock.sleep(RPC_S if node is not None else self._timeout_s * tries)
        return node


async def never() -> None:
    """Until cancelled."""
    await asyncio.get_running_loop().create_future()
