"""What is kept of every decision: its record on disk and in Redis, how often what was its cause, its metrics."""

import asyncio
import json
from collections.abc import Callable, Mapping
from types import MappingProxyType

import structlog

from controller import publish
from controller.authority import Authority
from controller.core.decide import ADVISED, NEW
from controller.core.effects import Recorded
from controller.disk import Disk
from controller.settings import ControllerSettings
from trefoil.core.common import Revision
from trefoil.core.plan import DecisionRecord
from trefoil.core.policies import Policy
from trefoil.runtime import codec
from trefoil.runtime.fenced import Append
from trefoil.runtime.state import Keys
from trefoil.runtime.telemetry import Metrics


def record_of(
    kept: Recorded, planner: str, policy: str, given: Mapping[str, str] = MappingProxyType({})
) -> DecisionRecord:
    """All that is needed to take a decision again. `given`: what was set of the planner, by name."""
    return DecisionRecord(
        id=kept.id,
        revision=kept.plan.revision if kept.plan is not None else Revision(),
        trigger=kept.trigger.cause,
        policy=policy,
        view_json=codec.to_json(kept.view),
        seed=kept.thought.seed,
        why=kept.verdict.why,
        versions={
            **publish.versions(planner, kept.verdict, kept.effect),
            **given,
            **kept.thought.versions,
            **kept.versions,
        },
        at_s=kept.view.now_s,
        solve_ms=kept.thought.solve_ms,
        wall_limit_hit=kept.thought.wall_limit_hit,
    )


class Records:
    """Writes them."""

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
        self.last: DecisionRecord | None = None

    def newest(self, epoch: int) -> int:
        """The highest number of a decision that is kept of this epoch; 0: there is none."""
        ids = [i.split(".")[1] for i in self._disk.decision_ids() if i.startswith(f"{epoch}.")]
        return max((int(i) for i in ids), default=0)

    def _given(self) -> dict[str, str]:
        parts = {k: dict(v) for k, v in self._settings.parts.items() if k == "planner" and v}
        given = {"preset": self._settings.preset, "parts": json.dumps(parts, sort_keys=True) if parts else ""}
        return {name: value for name, value in given.items() if value}

    async def write(self, kept: Recorded) -> None:
        """Keep a decision.

        Raises:
            errors.StateUnavailable: Redis is down; the disk has the record.
            errors.Fenced: the role was lost.
        """
        planner = self._settings.planner or self._policy.planner
        record = self.last = record_of(kept, planner, self._policy.name, self._given())
        await asyncio.to_thread(self._disk.save_decision, record, kept.thought.step.plan)
        self._disk.save("budgets", self._budgets())
        self._disk.save("counts", {"replans": kept.causes, "reconfigurations": kept.reconfigurations})
        verdict = kept.verdict
        outcome = NEW if verdict.outcome == ADVISED else verdict.outcome
        self._metrics.inc("trefoil_decisions_total", trigger=record.trigger, outcome=outcome)
        self._metrics.observe("trefoil_solve_duration_seconds", record.solve_ms / 1e3, planner=self._policy.planner)
        self._log.info(
            "decision", id=record.id, trigger=record.trigger, outcome=verdict.outcome,
            effect=kept.effect, rung=verdict.rung, solve_ms=round(record.solve_ms, 1), why=verdict.why,
        )  # fmt: skip
        await self._authority.write([Append(self._keys.decisions(), record, self._settings.decisions_max)])
