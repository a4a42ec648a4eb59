"""Overview of a system as its controller knows it, as JSON values."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from protos.controller.v1 import controller_pb2
from trefoil.core.carbon import CarbonRatio, CarbonReading, current_ratio
from trefoil.core.objective import ActMode, Objective
from trefoil.core.plan import DecisionRecord, Rollout, RolloutState
from trefoil.core.units import DAY_S, HOUR_S
from trefoil.overview.budgets import budget_rows
from trefoil.overview.decisions import decision_rows
from trefoil.overview.reads import ControllerReads
from trefoil.overview.saving import saving_withheld
from trefoil.overview.totals import receipt_check, saving_since_start, totals_by_family
from trefoil.runtime import codec


@dataclass(frozen=True, slots=True)
class ControllerAnswers:
    """Answers of a controller, from which an overview is built. `since_s`: start of the saving; None: the last day.
    `budgets`: None where the controller does not know them."""

    plan: Any
    served: Any
    fleet: Any
    report: Any
    objectives: Sequence[Objective]
    max_watts: float
    budgets: Any
    decisions: Sequence[DecisionRecord] | None
    now_s: float
    since_s: float | None


async def read_answers(
    controller: ControllerReads, now_s: float, since_s: float | None = None, decisions: int = 0
) -> ControllerAnswers:
    """Ask a controller for all that an overview shows, with so many of the newest decisions.

    Raises:
        Unavailable: it does not answer, or Redis does not answer it.
    """
    plan, served, fleet = await controller.plan(), await controller.served(), await controller.fleet()
    report = await controller.report(now_s - DAY_S if since_s is None else since_s)
    wanted, max_watts = await controller.objectives()  # a plan that stayed still names those that it was made for
    newest = await controller.decisions(newest=decisions) if decisions else None
    budgets = await controller.call_if_known("GetBudgets", controller_pb2.GetBudgetsRequest())
    return ControllerAnswers(plan, served, fleet, report, wanted, max_watts, budgets, newest, now_s, since_s)


def overview_of(answers: ControllerAnswers) -> dict[str, Any]:
    """Overview from a controller's answers; pure, so that it may be made in a thread."""
    answer, served, fleet, report = answers.plan, answers.served, answers.fleet, answers.report
    totals = totals_by_family(report)
    ratios: dict[str, CarbonRatio] = {one.series.zone: codec.from_proto(one) for one in fleet.carbon_ratios}
    readings: list[CarbonReading] = [codec.from_proto(one) for one in fleet.carbon]
    rows = [_served_row(one) for one in served.served]
    since_s = answers.since_s
    found = {
        "mode": ActMode(answer.mode).name.lower(),
        "frozen": answer.frozen,
        "pinned": answer.pinned,
        "revision": _plain(answer.plan.revision),
        "policy": answer.plan.policy,
        "why": answer.plan.why,
        "rollout": RolloutState(answer.rollout.state).name.lower(),
        "rollout_why": answer.rollout.why,
        "exploring": answer.plan.exploration and not answer.loans,
        "cluster": fleet.cluster,
        "nodes": [_plain(node) for node in fleet.nodes],
        "stale_nodes": list(fleet.stale_nodes),
        "workers": list(fleet.workers),
        "plans_refused": list(fleet.plans_refused),
        "carbon": [codec.to_plain(reading) for reading in readings],
        "carbon_ratio": [
            {"zone": one.series.zone, "ratio": current_ratio(ratios.get(one.series.zone), one, answers.now_s)}
            for one in readings
        ],
        "carbon_forecast": [_plain(forecast) for forecast in fleet.carbon_forecasts],
        "jobs": _plain(fleet.jobs) if fleet.HasField("jobs") else None,
        "carbon_refused": answer.carbon_refused,
        "disk_trouble": answer.disk_trouble,
        "models_refused": list(answer.models_refused),
        "places_refused": list(answer.places_refused),
        "agents_unreached": list(answer.agents_unreached),
        "files_set_aside": list(answer.files_set_aside),
        "set_aside": list(answer.set_aside),
        "overrides": list(answer.overrides),
        "catalog_refused": answer.catalog_refused,
        "loans": [{"device": one.device, "holder": one.holder} for one in answer.loans],
        "receipts": receipt_check(totals),
        "objectives": [codec.to_plain(objective) for objective in answers.objectives],
        "max_watts": answers.max_watts or None,
        "budgets": None if answers.budgets is None else budget_rows(answers.budgets.budgets),
        "served": {"window_s": served.window_s, "by_class": rows},
        "queues": {route.family: route.queue for route in answer.plan.routes},
        "capacity_per_s": {family: one.capacity_per_s for family, one in answer.plan.expected.items()},
        "saving": {
            "since_s": report.since.seconds if since_s is None else since_s // HOUR_S * HOUR_S,
            "since_start": since_s is not None,
            **_saving(totals, served, rows, answers.objectives, report.accuracies),
        },
    }
    if answers.decisions is not None:
        rollout: Rollout = codec.from_proto(answer.rollout)
        found["decisions"] = decision_rows(answers.decisions, rollout)
    return found


def _plain(message: Any) -> Any:
    return codec.to_plain(codec.from_proto(message))


def _saving(
    totals: Mapping[str, Sequence[Mapping[str, float]]],
    served: Any,
    rows: Sequence[Mapping[str, Any]],
    wanted: Iterable[Objective],
    known: Mapping[str, float],
) -> dict[str, Any]:
    """Saving by these hours, and why it is none to be shown; `known`: accuracies by `family/variant`."""
    accuracies = {(name.partition("/")[0], name.partition("/")[2]): value for name, value in known.items()}
    withheld = saving_withheld(totals, rows, {one.family: one for one in wanted}, accuracies)
    found = {**saving_since_start(totals), "basis": served.base_basis, "unknown": served.base_unknown}
    return found | {"withheld": withheld} | ({"saving_pct": None} if withheld else {})


def saving_unknown(saving: Mapping[str, Any]) -> str:
    """Why the saving of an overview is not a figure."""
    unmetered = "nothing is metered" if saving["grams"] is None else "a part of the time had no model"
    return saving["withheld"] or saving["unknown"] or unmetered


def _served_row(one: Any) -> dict[str, Any]:
    """Values of a `Served` message, and of those in it; what is unset is None."""
    found = {}
    for field in one.DESCRIPTOR.fields:
        value = getattr(one, field.name) if not field.has_presence or one.HasField(field.name) else None
        found[field.name] = _served_row(value) if value is not None and field.message_type is not None else value
    return found
