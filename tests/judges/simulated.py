"""Results of simulations, plans of every policy on shipped fleets, and recorded decisions that are replayed."""

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from tests.contract import test_planner_contract as contract
from tests.judges.commands import ROOT, folder, ran
from trefoil.core.errors import TrefoilError
from trefoil.core.plan import DecisionRecord
from trefoil.core.policies import POLICIES
from trefoil.runtime import codec
from trefoil.simulator import Scenario, simulate

FOLDER: Final = ROOT / "benchmarks" / "scenarios"
SCENARIOS: Final = sorted(path.stem for path in FOLDER.glob("*.toml"))
DEMOS: Final = sorted(path.name for path in (ROOT / "deploy" / "config").glob("demo*.toml"))
SEEDS: Final = (1, 2)
SHORTER: Final = {
    "clover_fleet": "duration_s=100",
    "digits": "duration_s=300",
    "jobs": "hours=28",
    "year_fluid": "hours=12",
}
"""Whole, these take from 15 s to hours of CPU."""
PLANNED: Final[Mapping[str, Mapping[str, Any]]] = {"jobs": {"hours": 1, "jobs": []}, "year_fluid": {"hours": 1}}
PLANNED_S: Final = {"duration_s": 20.0}
SLOW: Final = {"clover_fleet": ("exact",), "digits": ("exact", "clover", "random"), "year_fluid": ("exact",)}
"""Scenarios on which not every policy decides, and those that do."""
MACHINE: Final = ("trefoil", "numpy", "highspy")  # of a record's versions: what is installed


def results() -> Iterator[tuple[str, Any]]:
    """Result of every shipped scenario, by seed, and of every demo's simulated runs."""
    for name in SCENARIOS:
        shorter = ("--set", SHORTER[name]) if name in SHORTER else ()
        for seed in SEEDS:
            yield ran("simulate", name, "--seed", str(seed), *shorter, "--json")
    for name in DEMOS:
        config = ("--config", f"deploy/config/{name}", "--set", "simulated_seeds=1")
        yield ran("demo", "--simulated", *config, "--json")


def plans() -> Iterator[tuple[str, Any]]:
    """Decisions of policies on shipped scenarios, and of every planner on the views of its contract."""
    for name in SCENARIOS:
        for policy in SLOW.get(name, POLICIES):
            decided = _decided(name, policy)
            yield f"{name} {policy}", decided if isinstance(decided, str) else [_summary(record) for record in decided]
    for planner in contract.NAMES:
        for number, view in enumerate(contract.views(planner)):
            decision = contract.made(planner).plan(view, np.random.default_rng(5))
            digest = decision.plan.content_digest if decision.plan is not None else ""
            yield f"view {number} {planner}", [digest, decision.why, decision.degraded, str(decision.next_tick_at_s)]


@functools.cache
def _decided(scenario: str, policy: str) -> Sequence[DecisionRecord] | str:
    """Records of a simulation's decisions; the refusal of a policy that does not apply."""
    values = {**PLANNED.get(scenario, PLANNED_S), "policy": policy}
    try:
        return simulate(Scenario.load(FOLDER / f"{scenario}.toml", values), keep_records=True).records
    except TrefoilError as error:
        return str(error)


def _summary(record: DecisionRecord) -> Any:
    """A record without the versions of this machine; its view as a digest."""
    versions = {name: value for name, value in record.versions.items() if name not in MACHINE}
    view = hashlib.sha256(record.view_json.encode()).hexdigest()[:16]
    return codec.to_plain(replace(record, view_json=view, versions=versions, solve_ms=0.0))


def replays(recorded: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The first and the last decision of every policy, and the answer of `trefoil replay` to them now."""
    kept = {name: value["kept"] for name, value in recorded.items()} or dict(_kept())
    for name, texts in kept.items():
        with folder() as state:
            decisions = Path(state) / "controller" / "decisions"
            decisions.mkdir(parents=True)
            for number, text in enumerate(texts):
                (decisions / f"{number}.json").write_text(text)
            yield name, {"kept": texts, "answer": ran("replay", "--state-dir", state, "--json")[1]}


def _kept() -> Iterator[tuple[str, list[str]]]:
    for policy in POLICIES:
        for name in ("mig", "mixed", "cpus"):
            decided = _decided(name, policy)
            if not isinstance(decided, str) and any(record.versions.get("plan") for record in decided):
                yield f"{name} {policy}", [codec.to_json(record) for record in (decided[0], decided[-1])]
                break
