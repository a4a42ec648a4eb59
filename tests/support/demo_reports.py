"""What a demo wrote, read back."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trefoil.cli.demo.results import (
    DemoFamilySummary,
    DemoSeries,
    DemoSummary,
    Exploration,
    PlanEvent,
    Report,
)
from trefoil.comparison.comparison import Case, Comparison, Row, Run


def read_series(path: Path) -> DemoSeries:
    """Series that a run recorded."""
    values = json.loads(path.read_text())
    return DemoSeries(**{**values, "events": [PlanEvent(**event) for event in values["events"]]})


def read_report(path: Path) -> Report:
    """A report.json."""
    values = json.loads(path.read_text())
    names = list(values["accuracy"])
    runs = {name: _summary(values.pop(name)) for name in names}
    for derived in ("saving_pct", "no_saving", "saving_uncorrected_pct", "accuracy", "missed_floor", "missed_slo"):
        values.pop(derived)
    spread = comparison_of(values["spread"]) if values["spread"] else None
    return Report(**{**values, "gpus": tuple(values["gpus"]), "runs": runs, "spread": spread})


def _summary(values: Mapping[str, Any]) -> DemoSummary:
    explored = values.get("exploration")
    families = {name: DemoFamilySummary(**one) for name, one in values["families"].items()}
    return DemoSummary(**{**values, "exploration": Exploration(**explored) if explored else None, "families": families})


def comparison_of(values: Mapping[str, Any]) -> Comparison:
    """Comparison of policies that `to_json` gave."""
    cases = []
    for one in values["cases"]:
        rows = [Row(row["policy"], tuple(_run(row["policy"], run) for run in row["runs"])) for row in one["rows"]]
        price = one["price_mg_per_accuracy"]
        facts = (None if price is None else price / 1e3, one["left_out"], tuple(one["traces"]))
        cases.append(Case(one["set"], tuple(rows), *facts, lambda_weight=one["lambda_weight"]))
    names, seeds = tuple(values["policies"]), tuple(values["seeds"])
    return Comparison(values["scenario"], values["duration_s"], names, seeds, tuple(cases))


def _run(name: str, run: Mapping[str, Any]) -> Run:
    return Run(name, run["seed"], run["arrivals"], {key: value for key, value in run.items() if key != "arrivals"})
