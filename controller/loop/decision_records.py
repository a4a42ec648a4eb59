"""Records of decisions: written to disk and Redis with their metrics, and replayed.

A replay takes the same view, seed, planner and memory of it; the plan's digest must be the same. A step of an
exploration is one decision: the candidate that was asked for, or the plan that ended it. View and seed are in the
record. The controller's disk keeps the plan next to it; the plan is only needed to show a difference."""

import asyncio
import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, TypeVar

import structlog

from controller.loop.core.decision import ADVISED, NEW, Verdict, ask_planner, run_planner
from controller.loop.core.ports import TakenDecision
from controller.loop.planner_runner import UNREADABLE
from controller.settings import ControllerSettings
from trefoil.core import errors
from trefoil.core.brains import Planner, PlanView
from trefoil.core.common import Revision
from trefoil.core.parts import as_live_planner
from trefoil.core.plan import DecisionRecord, Plan, decision_order
from trefoil.core.policies import Policy
from trefoil.runtime import codec
from trefoil.runtime.fenced import Append
from trefoil.runtime.files import NotPlain, read_plain
from trefoil.runtime.state_files import BYTES_MAX

T = TypeVar("T")
PAGE: Final = 100  # records read at once

if TYPE_CHECKING:  # what only the live controller has: a simulation imports this module too
    from controller.role.disk_store import DiskStore
    from controller.role.leadership import Leadership
    from trefoil.runtime.state import Keys, State
    from trefoil.runtime.telemetry import Metrics


def decision_record(
    kept: TakenDecision, planner: str, policy: str, given: Mapping[str, str] = MappingProxyType({})
) -> DecisionRecord:
    """Record of a decision: all that is needed to take it again. `given`: what was set of the planner, by name."""
    return DecisionRecord(
        id=kept.id,
        revision=kept.plan.revision if kept.plan is not None else Revision(),
        trigger=kept.trigger.cause,
        policy=policy,
        view_json=codec.to_json(kept.view),
        seed=kept.answer.seed,
        why=kept.verdict.why,
        versions={
            **versions(planner, kept.verdict, kept.effect),
            **given,
            **kept.answer.versions,
            **kept.versions,
        },
        at_s=kept.view.now_s,
        solve_ms=kept.answer.solve_ms,
        wall_limit_hit=kept.answer.wall_limit_hit,
    )


class DecisionRecords:
    """Writer of decision records: disk, Redis, metrics, counts of causes."""

    def __init__(
        self,
        settings: ControllerSettings,
        policy: Policy,
        keys: "Keys",
        leadership: "Leadership",
        disk: "DiskStore",
        metrics: "Metrics",
        budgets: Callable[[], Mapping[str, object]],
    ) -> None:
        self._settings, self._policy, self._keys, self._leadership = settings, policy, keys, leadership
        self._disk, self._metrics, self._budgets = disk, metrics, budgets
        self._log = structlog.get_logger()
        self.last: DecisionRecord | None = None

    def newest(self, epoch: int) -> int:
        """Highest number of a decision that is kept of this epoch; 0: there is none."""
        ids = [i.split(".")[1] for i in self._disk.decision_ids() if i.startswith(f"{epoch}.")]
        return max((int(i) for i in ids), default=0)

    async def find(self, name: str, state: "State") -> tuple[DecisionRecord, Plan | None] | None:
        """Decision by id, "" = the newest, and the plan that the planner made; None: there is none. Those of another
        controller are only in Redis, without that plan.

        Raises:
            errors.StateUnavailable: it is not on this disk, and Redis does not answer.
        """
        found, last, key = await asyncio.to_thread(self._disk.decision, name), "0", self._keys.decisions()
        if not name:
            return await self._newest(found, state)
        while found is None and (entries := await state.stream(key, DecisionRecord, last, PAGE)):
            last = entries[-1][0]
            found = next(((record, None) for _, record in entries if record.id == name), None)
        return found

    async def _newest(
        self, here: tuple[DecisionRecord, Plan | None] | None, state: "State"
    ) -> tuple[DecisionRecord, Plan | None] | None:
        try:
            records = await state.tail(self._keys.decisions(), DecisionRecord)
        except errors.StateUnavailable as error:
            self._log.info("the newest decision is that of this disk", error=str(error))
            return here
        for _, record in records:
            if here is None or decision_order(here[0].id) < decision_order(record.id):
                return record, None
        return here

    def _given(self) -> dict[str, str]:
        parts = {k: dict(v) for k, v in self._settings.parts.items() if k == "planner" and v}
        given = {"preset": self._settings.preset, "parts": json.dumps(parts, sort_keys=True) if parts else ""}
        return {name: value for name, value in given.items() if value}

    def _save(self, kept: TakenDecision) -> tuple[DecisionRecord, bytes]:
        """Record of a decision, on disk and encoded for Redis, which takes seconds for a large fleet."""
        planner = self._settings.planner or self._policy.planner
        record = decision_record(kept, planner, self._policy.name, self._given())
        self._disk.save_decision(record, kept.answer.step.plan)
        return record, codec.encode(record)

    async def write(self, kept: TakenDecision) -> None:
        """Write the record of a decision to disk, then to Redis.

        Raises:
            errors.DiskUnavailable: the disk does not take the record; nothing was written.
            errors.StateUnavailable: Redis is down; the disk has the record.
            errors.Fenced: the role was lost.
        """
        record, data = await asyncio.to_thread(self._save, kept)
        self.last = record
        self._disk.save_later("budgets", self._budgets())
        self._disk.save_later("counts", {"replans": kept.causes, "reconfigurations": kept.reconfigurations})
        verdict = kept.verdict
        outcome = NEW if verdict.outcome == ADVISED else verdict.outcome
        self._metrics.inc("trefoil_decisions_total", trigger=record.trigger, outcome=outcome)
        self._metrics.observe("trefoil_solve_duration_seconds", record.solve_ms / 1e3, planner=self._policy.planner)
        self._log.info(
            "decision", id=record.id, trigger=record.trigger, outcome=verdict.outcome,
            effect=kept.effect, rung=verdict.rung, solve_ms=round(record.solve_ms, 1), why=verdict.why,
        )  # fmt: skip
        await self._leadership.write([Append(self._keys.decisions(), data, self._settings.decisions_max)])


def versions(planner: str, verdict: Verdict, effect: str) -> dict[str, str]:
    """Versions that a decision rests on and its outcome. `plan`: digest of the planner's plan, for replays.

    `effect`: reconfigure (slices, variants, sleep or clocks change), reroute (shares alone), or the outcome.
    """
    return {
        "trefoil": version("trefoil"),
        "planner": planner,
        "numpy": version("numpy"),
        "highspy": version("highspy"),
        "plan": verdict.digest,
        "outcome": verdict.outcome,
        "effect": effect,
    }


DIFF_LINES_MAX = 60


@dataclass(frozen=True, slots=True)
class Replayed:
    """Result of a replay: whether the decision came out the same; `diff` shows where not, line by line."""

    id: str
    trigger: str
    equal: bool
    recorded: str
    again: str
    why: str
    diff: tuple[str, ...] = ()


def replay(record: DecisionRecord, planner: Planner, made: Plan | None = None) -> Replayed:
    """Replay a decision on its recorded view with the same seed and memory, and compare the plan's digest.

    Raises:
        errors.InvalidInput: the record's view is not one that this version can read.
    """
    recorded = record.versions.get("plan", "")
    if record.wall_limit_hit:
        why = "the live decision ran into the wall limit and kept the last plan: nothing to compare"
        return Replayed(record.id, record.trigger, True, recorded, "", why)
    live, memory = as_live_planner(planner), record.versions.get("memory")
    if live is not None and memory:
        try:
            live.recall(json.loads(memory))
        except UNREADABLE as error:
            remedy = "replay it with the version that wrote it"
            raise errors.InvalidInput(str(error), field="versions.memory", value=memory, remedy=remedy) from error
    call = ask_planner if record.versions.get("call") == "ask" else run_planner
    step = call(codec.from_json(PlanView, record.view_json), planner, record.seed)
    again = step.plan.content_digest if step.plan else ""
    if again == recorded:
        return Replayed(record.id, record.trigger, True, recorded, again, step.why)
    diff = tuple(_diff(made, step.plan)) if made is not None else ()
    return Replayed(record.id, record.trigger, False, recorded, again, step.why, diff)


def stored_decisions(folder: Path) -> Iterator[tuple[DecisionRecord, Plan | None]]:
    """Stored decisions of a controller's `decisions` folder with their plans, oldest first.

    Raises:
        errors.InvalidInput: no such folder, or a file that is not a decision.
    """
    if not folder.is_dir():
        raise errors.InvalidInput(
            "no such folder", field="decisions", value=str(folder), remedy="name <state>/decisions of a controller"
        )
    for path in sorted(p for p in folder.glob("*.json") if not p.name.endswith(".plan.json")):
        beside = path.with_name(path.name.removesuffix(".json") + ".plan.json")
        yield _stored(path, DecisionRecord), _stored(beside, Plan) if beside.exists() else None


def _stored(path: Path, cls: type[T]) -> T:
    try:
        return codec.from_json(cls, read_plain(path, BYTES_MAX).decode())
    except (NotPlain, OSError, UnicodeDecodeError, errors.InvalidInput) as error:
        remedy = "remove that file to replay the others"
        raise errors.system_error(errors.InvalidInput, error, "be read", path, remedy=remedy) from error


def _diff(recorded: Plan, again: Plan | None) -> Iterator[str]:
    """Unified difference of the two plans as JSON."""
    after = _lines(again) if again else []
    found = difflib.unified_diff(_lines(recorded), after, "recorded", "replayed", lineterm="", n=1)
    for count, line in enumerate(found):
        if count == DIFF_LINES_MAX:
            yield "... (more differences)"
            return
        yield line


def _lines(plan: Plan) -> list[str]:
    return json.dumps(codec.to_plain(plan), indent=1, sort_keys=True).splitlines()
