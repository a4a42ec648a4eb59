"""Runs of a comparison: scenarios of every policy, combination of values and seed, checked first, then side by side."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np

from trefoil.comparison.comparison import Case, Comparison, Row, Run
from trefoil.comparison.saving import MARGIN, OBLIVIOUS, PRICE_STEP, price_g
from trefoil.core.errors import InvalidInput, SettingError, TrefoilError
from trefoil.core.policies import POLICIES as TABLE
from trefoil.core.units import HOUR_S
from trefoil.reproduce.runs import StudyRun, played, run_all
from trefoil.runtime.config import changed
from trefoil.simulator.scenario.inputs import Provided, arrivals_of, prepare, traces_read
from trefoil.simulator.scenario.schema import Scenario

POLICIES: Final = ("base", "static_mix", "exact")
ALL: Final = "all"
"""Every policy of the table that applies: those that cannot be started, or answer nobody, are left out, with why."""
OWN: Final = {"policy": "--policies", "policy.name": "--policies", "seed": "--seeds"}
"""Settings that a comparison gives itself, by the option for them."""
CLOSING: Final = {"[": "]", "{": "}"}


@dataclass(frozen=True, slots=True)
class Job:
    """Job of one run. Equal scenarios are one job: it is played once. `optional`: it may turn out not to apply."""

    policy: str
    scenario: str  # as JSON
    optional: bool = False

    @property
    def key(self) -> str:
        """Key of the run."""
        return hashlib.sha256(self.scenario.encode()).hexdigest()[:20]

    @property
    def name(self) -> str:
        """Name in messages."""
        values = json.loads(self.scenario)
        return f"{values['name']} {self.policy} seed {values['seed']}"

    @property
    def work(self) -> float:
        """How much there is to play: planners that solve take longest, and begin first."""
        return float(self.policy not in ("base", "co2opt"))

    def play(self) -> StudyRun:
        """Simulate it, and say which arrivals it met."""
        scenario = Scenario.model_validate_json(self.scenario)
        try:
            found = played(self, scenario, Provided())
        except TrefoilError as error:
            if not self.optional:
                raise
            return StudyRun(self, {"refused": str(error)}, {})
        return replace(found, summary={**found.summary, "arrivals": arrivals_digest(scenario)})


@dataclass(frozen=True, slots=True)
class _Planned:
    """One case to be played: by policy its jobs, a seed each; and the pairs of jobs that price accuracy."""

    values: Mapping[str, str]
    jobs: Mapping[str, tuple[Job, ...]]
    priced: tuple[tuple[Job, Job], ...]
    left_out: Mapping[str, str]

    def __iter__(self) -> Iterator[Job]:
        yield from (job for jobs in self.jobs.values() for job in jobs)
        yield from (job for pair in self.priced for job in pair)


def compare(
    scenario: Path | str | Scenario,
    policies: Sequence[str] = POLICIES,
    values: Mapping[str, Sequence[Any]] | None = None,
    seeds: int = 1,
    jobs: int = 0,
    say: Callable[[str], None] = lambda _text: None,
) -> Comparison:
    """Compare policies at equal load. Everything is read and checked before the first run starts.

    Args:
        scenario: a scenario, its file, or the name of one that ships.
        policies: names of the table, or module:ROW, or ("all",); the others are compared with the first that applies.
        values: values of settings by dotted key; each combination of them is a case.
        seeds: how many, from the scenario's own on.
        jobs: runs side by side; 0: one per core.
        say: is told of each run that is done.

    Raises:
        errors.TrefoilError: names field, value and remedy.
    """
    every = tuple(policies) == (ALL,)
    policies = tuple(TABLE) if every else tuple(policies)
    _check(policies, values or {}, seeds)
    varied = {key: tuple(given) for key, given in (values or {}).items()}
    planned = [_plan(scenario, policies, chosen, varied, seeds, every) for chosen in _combinations(varied)]
    wanted = [job for case in planned for job in case]
    say(f"{len(set(wanted))} runs in simulated time")
    found = run_all(wanted, None, jobs, say)
    cases = tuple(_case(case, found) for case in planned)
    played_ = tuple(row.policy for row in cases[0].rows)
    if any(tuple(row.policy for row in case.rows) != played_ for case in cases):
        remedy = "name those that apply to all of them"
        raise SettingError("others apply to other values of --set", field="--policies", value=ALL, remedy=remedy)
    first = Scenario.model_validate_json(planned[0].jobs[played_[0]][0].scenario)
    return Comparison(first.name, first.span_s, played_, tuple(range(first.seed, first.seed + seeds)), cases)


def split_values(text: str) -> tuple[str, ...]:
    """Values between the commas of `--set KEY=a,b`; a comma inside [...], {...} or double quotes parts nothing.

    Raises:
        SettingError: one of them is empty, or what opens is not closed.
    """
    parts, depth, quoted = [""], [], False
    for character in text:
        quoted ^= character == '"'
        if not quoted and character in CLOSING:
            depth.append(CLOSING[character])
        elif not quoted and depth and character == depth[-1]:
            depth.pop()
        if character == "," and not depth and not quoted:
            parts.append("")
        else:
            parts[-1] += character
    values = tuple(part.strip() for part in parts)
    if depth or quoted or not all(values):
        remedy = 'write a,b,c; a value with commas in brackets or double quotes: [1,2],[3,4] or "x,y"'
        raise SettingError("no values between commas", field="--set", value=text, remedy=remedy)
    return tuple(value[1:-1] if value[0] == value[-1] == '"' and len(value) > 1 else value for value in values)


def arrivals_digest(scenario: Scenario) -> str:
    """Digest of the arrivals of a scenario: of each time, or in fluid of each hour's mean rate."""
    digest = hashlib.sha256()
    for name, source in sorted(arrivals_of(scenario).items()):
        digest.update(name.encode())
        if scenario.fidelity == "request":
            digest.update(np.ascontiguousarray(source.until(scenario.span_s)).tobytes())
        else:
            hours = np.arange(0.0, scenario.span_s, HOUR_S)
            digest.update(np.array([source.mean_per_s(at_s, at_s + HOUR_S) for at_s in hours]).tobytes())
    return digest.hexdigest()[:12]


def _check(policies: Sequence[str], values: Mapping[str, Sequence[Any]], seeds: int) -> None:
    if len(policies) < 2 or len(set(policies)) < len(policies):
        remedy = "name two or more, each once, e.g. base,static_mix,exact"
        raise SettingError("nothing to compare", field="--policies", value=",".join(policies), remedy=remedy)
    if seeds < 1:
        raise SettingError("no runs", field="--seeds", value=seeds, remedy="1 or more")
    for key, given in values.items():
        if key in OWN:
            raise SettingError("is given by the comparison", field=key, remedy=f"say it with {OWN[key]}")
        if not given:
            raise SettingError("no values", field=key, remedy="give one or more")


def _combinations(varied: Mapping[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    return [dict(zip(varied, chosen, strict=True)) for chosen in product(*varied.values())]


def _plan(
    scenario: Path | str | Scenario,
    policies: Sequence[str],
    chosen: Mapping[str, Any],
    varied: Mapping[str, tuple[Any, ...]],
    seeds: int,
    every: bool,
) -> _Planned:
    """Jobs of one case, of which each policy's first scenario has been read and checked whole."""
    loaded = {policy: _scenario(scenario, {**chosen, "policy.name": policy}) for policy in policies}
    left_out = dict[str, str]()
    for policy, one in tuple(loaded.items()):
        try:
            prepare(one)
        except TrefoilError as error:
            if not every or len(loaded) == 1:
                raise  # it is the scenario that cannot be played
            left_out[policy] = str(error)
            del loaded[policy]
    jobs = {policy: tuple(_job(policy, one, n, every) for n in range(seeds)) for policy, one in loaded.items()}
    shown = {key: str(value) for key, value in chosen.items() if len(varied[key]) > 1}
    priced = _pricing(_scenario(scenario, {**chosen, "policy.name": OBLIVIOUS}), seeds)
    return _Planned(shown, jobs, priced, left_out)


def _pricing(mix: Scenario, seeds: int) -> tuple[tuple[Job, Job], ...]:
    """Pairs of jobs whose difference is the price of accuracy; none for what has no one floor, or not this planner."""
    margin = mix.policy.params.get(MARGIN, 0.0) + PRICE_STEP
    dear = changed(mix, {f"policy.params.{MARGIN}": margin})
    if len(mix.families) > 1 or mix.families[0].objective.mode == "lambda":
        return ()
    try:
        prepare(dear)
    except InvalidInput:  # settings of another planner, or none at all: then accuracy has no price, which is said
        return ()
    return tuple((_job(OBLIVIOUS, mix, n), _job(OBLIVIOUS, dear, n)) for n in range(seeds))


def _scenario(given: Path | str | Scenario, overrides: Mapping[str, Any]) -> Scenario:
    return changed(given, overrides) if isinstance(given, Scenario) else Scenario.load(given, overrides)


def _job(policy: str, scenario: Scenario, n: int, optional: bool = False) -> Job:
    return Job(policy, scenario.model_copy(update={"seed": scenario.seed + n}).model_dump_json(), optional)


def _case(planned: _Planned, found: Mapping[Job, StudyRun]) -> Case:
    left_out, rows_ = dict(planned.left_out), list[Row]()
    for policy, jobs in planned.jobs.items():
        runs = [found[job] for job in jobs]
        refused = [run["refused"] for run in runs if "refused" in run.summary]
        if refused or (jobs[0].optional and not all(run["answered"] for run in runs)):
            why = next((str(one["why"]) for one in runs[0].decisions if one.get("why")), "")
            left_out[policy] = refused[0] if refused else f"it answers nobody here{f' ({why})' if why else ''}"
        else:
            rows_.append(Row(policy, tuple(_run(job, found[job]) for job in jobs)))
    if len(rows_) < 2:
        why = "; ".join(f"{policy}: {reason}" for policy, reason in left_out.items())
        raise SettingError(f"fewer than two policies apply ({why})", field="--policies", value=ALL)
    rows = tuple(rows_)
    pairs = [(_run(cheap, found[cheap]).outcome, _run(dear, found[dear]).outcome) for cheap, dear in planned.priced]
    read = traces_read(Scenario.model_validate_json(next(iter(planned)).scenario))
    return Case(planned.values, rows, price_g(pairs), left_out, read)


def _run(job: Job, found: StudyRun) -> Run:
    summary = {name: value for name, value in found.summary.items() if name != "arrivals"}
    return Run(job.policy, summary["seed"], found.summary["arrivals"], summary)
