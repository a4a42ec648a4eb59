"""What is kept of every decision: its record on disk and in Redis, how often what was its cause, its metrics."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping

import structlog

from controller import publish
from controller.authority import Authority
from controller.decide import ADVISED, NEW, Verdict
from controller.disk import Disk
from controller.settings import ControllerSettings
from controller.thinker import Thought
from controller.triggers import Trigger
from trefoil.core.brains import PlanView
from trefoil.core.common import Revision
from trefoil.core.plan import DecisionRecord, Plan
from trefoil.core.policies import Policy
from trefoil.runtime import codec
from trefoil.runtime.fenced import Append
from trefoil.runtime.state import Keys
from trefoil.runtime.telemetry import Metrics


class Records:
    """Numbers decisions within an epoch; ids and seeds never come twice."""

    def __init__(
        self,
        settings: ControllerSettings,
        policy: Policy,
        keys: Keys,
        authority: Authority,
        disk: Disk,
        metrics: Metrics,
        budgets: Callable[[], Mapping[str, object]],
    ) -> None:
        self._settings, self._policy, self._keys, self._authority = settings, policy, keys, authority
        self._disk, self._metrics, self._budgets = disk, metrics, budgets
        self._log = structlog.get_logger()
        counts = disk.load_plain("counts")
        self.causes: Counter[str] = Counter(counts.get("replans", {}))
        self.reconfigurations: Counter[str] = Counter(counts.get("reconfigurations", {}))
        self._epoch, self._count = 0, 0
        self.last: DecisionRecord | None = None

    def open(self, epoch: int) -> None:
        """Number under a new epoch."""
        ids = [i.split(".")[1] for i in self._disk.decision_ids() if i.startswith(f"{epoch}.")]
        self._epoch, self._count = epoch, max((int(i) for i in ids), default=0)

    def next_seed(self) -> int:
        """Of a new decision; `id` is its id from now on."""
        self._count += 1
        return self._settings.seed * 1_000_003 + self._count

    @property
    def id(self) -> str:
        """Of the decision that is being taken."""
        return f"{self._epoch}.{self._count:06d}"

    def count(self, cause: str, moves: bool, replans: bool = True) -> str:
        """Count a plan that is put in force; returns its effect. A candidate moves things and is no replan."""
        if replans:
            self.causes[cause] += 1
            self._metrics.inc("trefoil_replans_total", cause=cause)
        if moves:
            self.reconfigurations[cause] += 1
            self._metrics.inc("trefoil_reconfigurations_total", cause=cause)
        return "reconfigure" if moves else "reroute"

    def _preset(self) -> dict[str, str]:
        parts = {k: dict(v) for k, v in self._settings.parts.items() if k == "planner" and v}
        given = {"preset": self._settings.preset, "parts": json.dumps(parts, sort_keys=True) if parts else ""}
        return {name: value for name, value in given.items() if value}

    async def write(
        self,
        view: PlanView,
        trigger: Trigger,
        thought: Thought,
        verdict: Verdict,
        effect: str,
        plan: Plan | None,
        versions: Mapping[str, str] | None = None,
    ) -> None:
        """Keep a decision that led to `plan`. `versions` are added to those that every record has.

        Raises:
            errors.StateUnavailable: Redis is down; the disk has the record.
            errors.Fenced: the role was lost.
        """
        planner = self._settings.planner or self._policy.planner
        record = DecisionRecord(
            id=self.id,
            revision=plan.revision if plan is not None else Revision(),
            trigger=trigger.cause,
            policy=self._policy.name,
            view_json=codec.to_json(view),
            seed=thought.seed,
            why=verdict.why,
            versions={
                **publish.versions(planner, verdict, effect),
                **self._preset(),
                **thought.versions,
                **(versions or {}),
            },
            at_s=view.now_s,
            solve_ms=thought.solve_ms,
            wall_limit_hit=thought.wall_limit_hit,
        )
        self.last, made = record, thought.step.plan
        await asyncio.to_thread(self._disk.save_decision, record, made)
        self._disk.save("budgets", self._budgets())
        self._disk.save("counts", {"replans": self.causes, "reconfigurations": self.reconfigurations})
        outcome = NEW if verdict.outcome == ADVISED else verdict.outcome
        self._metrics.inc("trefoil_decisions_total", trigger=record.trigger, outcome=outcome)
        self._metrics.observe("trefoil_solve_duration_seconds", record.solve_ms / 1e3, planner=self._policy.planner)
        self._log.info(
            "decision", id=record.id, trigger=record.trigger, outcome=verdict.outcome,
            effect=effect, rung=verdict.rung, solve_ms=round(record.solve_ms, 1), why=verdict.why,
        )  # fmt: skip
        await self._authority.write([Append(self._keys.decisions(), record, self._settings.decisions_max)])
