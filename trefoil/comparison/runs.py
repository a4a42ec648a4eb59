"""Runs of a comparison: scenarios of every policy, combination of values and seed, checked first, then side by side."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np

from controller.planners.clover.objective import delta_accuracy, delta_carbon, weighted
from controller.planners.exact.aim import BASE_INTENSITY
from controller.planners.policy_parts import planner_settings, with_preset
from trefoil.comparison.comparison import Case, Comparison, Row, Run
from trefoil.comparison.saving import MARGIN, OBLIVIOUS, PRICE_STEP, price_g
from trefoil.core.errors import InvalidInput, SettingError, TrefoilError
from trefoil.core.policies import POLICIES as TABLE
from trefoil.core.policies import preset_settings, split_preset
from trefoil.core.units import HOUR_S, grams
from trefoil.reproduce.runs import StudyRun, played, run_all
from trefoil.runtime.config import changed
from trefoil.simulator.scenario.inputs import Provided, arrivals_of, prepare, traces_read
from trefoil.simulator.scenario.schema import Scenario

POLICIES: Final = ("base", "static_mix", "exact")
ALL: Final = "all"
"""Every policy of the table that applies: those that cannot be started, or answer no request, are left out, with the
reason."""
FORECASTS: Final = ("none", "persistence", "climatology", "blend", "perfect")
FLOOR_STEP: Final = 0.001  # of the floors that price accuracy between forecasts, whose accuracies differ little
PERFECT_MIN_PCT: Final = 0.05  # saving of a perfect forecast: shares of less are noise
RULES: Final = ("at_once", "evenly", "wait_awhile", "carbon_scaler", "planned")
OWN: Final = {"policy": "--policies", "seed": "--seeds", "jobs_rule": "--rules"}
"""Settings that a comparison gives itself, by the option for them."""
CLOSING: Final = {"[": "]", "{": "}"}


@dataclass(frozen=True, slots=True)
class Job:
    """Job of one run. Equal scenarios are one job: it is played once. `optional`: it may turn out not to apply."""

    row: str
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
        return f"{values['name']} {self.row} seed {values['seed']}"

    @property
    def work(self) -> float:
        """How much there is to play: planners that solve take longest, and begin first."""
        return float(self.row not in ("base", "co2opt"))

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
class Weighed:
    """What CLOVER's objective f (Eq. 1 to 3) of a run is made of, but for the run of `base` under its seed."""

    lambda_weight: float
    base_intensity_g_per_kwh: float
    pue: float

    def objective(self, run: Run, base: Run) -> float | None:
        """Objective f of a whole run [%]; None where one of the two answered nothing, or `base` took no joules."""
        if not (run.summary["answered"] and base.summary["answered"] and base.summary["joules_per_request"] > 0):
            return None
        base_g = grams(base.summary["joules_per_request"], self.base_intensity_g_per_kwh, self.pue)
        carbon = delta_carbon(run.summary["grams_per_request"], base_g)
        return weighted(self.lambda_weight, carbon, delta_accuracy(run.summary["accuracy"], base.summary["accuracy"]))


@dataclass(frozen=True, slots=True)
class PlannedCase:
    """One case to be played: by row its jobs, a seed each; and the pairs of jobs that price accuracy."""

    values: Mapping[str, str]
    jobs: Mapping[str, Sequence[Job]]
    priced: Sequence[tuple[Job, Job]]
    left_out: Mapping[str, str]
    traces: tuple[str, ...] = ()
    weighed: "Weighed | None" = None

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
    setting: str = "policy",
) -> Comparison:
    """Compare policies at equal load. Everything is read and checked before the first run starts.

    Args:
        scenario: a scenario, its file, or the name of one that ships.
        policies: names of the table, or module:ROW, each with @PRESET where one is meant, or ("all",); the others are
            compared with the first that applies.
        values: values of settings by dotted key; each combination of them is a case.
        seeds: how many, from the scenario's own on.
        jobs: runs side by side; 0: one per core.
        say: called for each finished run.
        setting: in which rows differ, a key of `comparison.COMPARED`; `policies` are its values.

    Raises:
        errors.TrefoilError: names field, value and remedy.
    """
    every = tuple(policies) == (ALL,)
    policies = tuple(TABLE) if every else tuple(policies)
    _check(policies, values or {}, seeds, setting)
    varied = {key: tuple(given) for key, given in (values or {}).items()}
    combinations = [dict(zip(varied, chosen, strict=True)) for chosen in product(*varied.values())]
    planned = [_plan(scenario, (setting, policies), chosen, varied, seeds, every) for chosen in combinations]
    cases = play(planned, jobs, say)
    played_ = tuple(row.name for row in cases[0].rows)
    if any(tuple(row.name for row in case.rows) != played_ for case in cases):
        remedy = "name those that apply to all of them"
        raise SettingError("others apply to other values of --set", field="--policies", value=ALL, remedy=remedy)
    first = Scenario.model_validate_json(planned[0].jobs[played_[0]][0].scenario)
    numbers = tuple(range(first.seed, first.seed + seeds))
    return Comparison(first.name, first.span_s, played_, numbers, cases, setting)


def play(planned: Sequence[PlannedCase], jobs: int, say: Callable[[str], None]) -> tuple[Case, ...]:
    """Play all jobs of these cases side by side.

    Raises:
        errors.TrefoilError: fewer than two rows of a case apply.
    """
    wanted = [job for case in planned for job in case]
    say(f"{len(set(wanted))} runs in simulated time")
    found = run_all(wanted, None, jobs, say)
    return tuple(_case(case, found) for case in planned)


def compare_forecasts(scenario: Scenario, say: Callable[[str], None]) -> tuple[Comparison, tuple[str, ...]]:
    """Compare no carbon forecast, the feed's own models and a perfect forecast; and notes: what share of a perfect
    forecast's saving each has, and what the models lack here.

    Raises:
        errors.TrefoilError: names field, value and remedy.
    """
    found = compare(scenario, FORECASTS, say=say, setting="carbon.forecast")
    (case,) = found.cases
    savings = {row.name: saving.pct["mean"] for row in case.rows if (saving := case.saving(row)) and saving.pct}
    perfect, notes = savings.pop(FORECASTS[-1], 0.0), list[str]()
    if perfect > PERFECT_MIN_PCT:
        shares = ", ".join(f"{name} {pct / perfect:.0%}" for name, pct in savings.items())
        notes.append(f"of a perfect forecast's saving: {shares}")
    for name in dict.fromkeys(node.zone for node in scenario.nodes):
        zone = scenario.carbon.zones[name]
        if zone.constant_g_per_kwh is not None:
            notes.append(f"zone {name} is constant: there is nothing to forecast")
        elif not zone.offset_h:
            notes.append(
                f"zone {name} has no lead-in (carbon.zones.{name}.offset_h = 0): the feed's models know only what the "
                f"run has seen so far; begin later in a longer trace, e.g. --set carbon.zones.{name}.offset_h=336"
            )
    return found, tuple(notes)


def compare_rules(
    scenario: Scenario,
    rules: Sequence[str],
    values: Mapping[str, Sequence[Any]],
    seeds: int = 1,
    jobs: int = 0,
    say: Callable[[str], None] = lambda _text: None,
) -> Comparison:
    """Compare rules of jobs under the scenario's policy; ("all",): all of them, `at_once` first.

    Raises:
        errors.TrefoilError: names field, value and remedy.
    """
    if not scenario.jobs:
        remedy = "add [[jobs]] to the scenario, or take one that has them: jobs"
        raise SettingError("the scenario has no jobs", field="--rules", value=",".join(rules), remedy=remedy)
    return compare(scenario, RULES if tuple(rules) == (ALL,) else rules, values, seeds, jobs, say, "jobs_rule")


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


def _check(policies: Sequence[str], values: Mapping[str, Sequence[Any]], seeds: int, setting: str) -> None:
    if len(policies) < 2 or len(set(policies)) < len(policies):
        example = ",".join(POLICIES if setting == "policy" else RULES)
        raise SettingError(
            "nothing to compare", field=OWN.get(setting, setting), value=",".join(policies),
            remedy=f"name two or more, each once, e.g. {example}",
        )  # fmt: skip
    if seeds < 1:
        raise SettingError("no runs", field="--seeds", value=seeds, remedy="1 or more")
    for key, given in values.items():
        if key in OWN and key in (setting, "policy", "seed"):
            raise SettingError("is given by the comparison", field=key, remedy=f"say it with {OWN[key]}")
        if not given:
            raise SettingError("no values", field=key, remedy="give one or more")


def _plan(
    scenario: Path | str | Scenario,
    rows: tuple[str, Sequence[str]],
    chosen: Mapping[str, Any],
    varied: Mapping[str, tuple[Any, ...]],
    seeds: int,
    every: bool,
) -> PlannedCase:
    """Jobs of one case, of which each row's first scenario has been read and checked whole. `rows`: setting, values."""
    loaded = {name: _row_scenario(scenario, chosen, rows[0], name) for name in rows[1]}
    left_out = take_unplayable(loaded, "" if every else None)
    jobs = {name: jobs_of(name, one, seeds, optional=every) for name, one in loaded.items()}
    shown = {key: str(value) for key, value in chosen.items() if len(varied[key]) > 1}
    if rows[0] == "policy":
        priced = pricing(_scenario(scenario, {**chosen, "policy": OBLIVIOUS}), seeds)
    else:  # by the policy that all rows have
        name, first = next(iter(loaded.items()))
        dear = _with_higher_floors(first)
        priced = tuple((_job(name, first, n), _job(name, dear, n)) for n in range(seeds))
    weighed = _weighed(loaded) if rows[0] == "policy" else None
    return PlannedCase(shown, jobs, priced, left_out, traces_read(next(iter(loaded.values()))), weighed)


def take_unplayable(loaded: dict[str, Scenario], needed: str | None = "") -> dict[str, str]:
    """Take scenarios that cannot be played out of `loaded`; says why, by name. The last one is never taken, nor the one
    that is `needed` (None: each is): then it raises.

    Raises:
        errors.TrefoilError: names field, value and remedy.
    """
    left_out = dict[str, str]()
    for name, one in tuple(loaded.items()):
        try:
            prepare(one)
        except TrefoilError as error:
            if needed in (None, name) or len(loaded) == 1:
                raise
            left_out[name] = str(error)
            del loaded[name]
    return left_out


def jobs_of(row: str, scenario: Scenario, seeds: int, *, optional: bool) -> tuple[Job, ...]:
    """Jobs of a row, a seed each."""
    return tuple(_job(row, scenario, n, optional) for n in range(seeds))


def _row_scenario(scenario: Path | str | Scenario, chosen: Mapping[str, Any], setting: str, name: str) -> Scenario:
    """Scenario of a row; settings of a preset go over the scenario's, and `chosen` over the preset's."""
    if setting != "policy":
        return _scenario(scenario, {**chosen, setting: name})
    row, preset = split_preset(name)
    found = _scenario(scenario, {**chosen, "policy": row})
    if not preset:
        return found
    with_preset(found.policy_row(), preset)
    given = {
        f"parts.planner.{key}": value for key, value in preset_settings(found.policy_row().planner, preset).items()
    }
    return _scenario(scenario, {**given, **chosen, "policy": row})


def _weighed(loaded: Mapping[str, Scenario]) -> Weighed | None:
    """Parts of f, where `base` and a policy that has f are compared for one family: by the weight of the first one."""
    for one in loaded.values():
        weight = getattr(planner_settings(one.policy_row()), "lambda_weight", None)
        if weight is None or "base" not in loaded or len(one.families) > 1:
            continue
        objective = one.families[0].objective
        weight = objective.lambda_weight if objective.type == "lambda" else one.params.get("lambda_weight", weight)
        return Weighed(weight, objective.base_intensity_g_per_kwh or BASE_INTENSITY, one.control.pue)
    return None


def pricing(mix: Scenario, seeds: int) -> tuple[tuple[Job, Job], ...]:
    """Pairs of jobs whose difference is the price of accuracy; none for what has no one floor, or not this planner."""
    margin = mix.params.get(MARGIN, 0.0) + PRICE_STEP
    dear = changed(mix, {f"params.{MARGIN}": margin})
    if len(mix.families) > 1 or mix.families[0].objective.type == "lambda":
        return ()
    try:
        prepare(dear)
    except InvalidInput:  # settings of another planner, or none at all: then accuracy has no price, which is said
        return ()
    return tuple((_job(OBLIVIOUS, mix, n), _job(OBLIVIOUS, dear, n)) for n in range(seeds))


def _with_higher_floors(scenario: Scenario) -> Scenario:
    """Scenario whose accuracy floors are `FLOOR_STEP` higher."""
    families = []
    for served in scenario.families:
        accuracy = served.objective.accuracy
        change = {"floor": min(1.0, accuracy.floor + FLOOR_STEP)}
        if not accuracy.floor and accuracy.below_best_pct is not None:
            change = {"below_best_pct": max(0.0, accuracy.below_best_pct - 100 * FLOOR_STEP)}
        wanted = served.objective.model_copy(update={"accuracy": accuracy.model_copy(update=change)})
        families.append(served.model_copy(update={"objective": wanted}))
    return scenario.model_copy(update={"families": tuple(families)})


def _scenario(given: Path | str | Scenario, overrides: Mapping[str, Any]) -> Scenario:
    return changed(given, overrides) if isinstance(given, Scenario) else Scenario.load(given, overrides)


def _job(row: str, scenario: Scenario, n: int, optional: bool = False) -> Job:
    return Job(row, scenario.model_copy(update={"seed": scenario.seed + n}).model_dump_json(), optional)


def _case(planned: PlannedCase, found: Mapping[Job, StudyRun]) -> Case:
    left_out, rows_ = dict(planned.left_out), list[Row]()
    for name, jobs in planned.jobs.items():
        runs = [found[job] for job in jobs]
        refused = [run["refused"] for run in runs if "refused" in run.summary]
        if refused or (jobs[0].optional and not all(run["answered"] for run in runs)):
            why = next((str(one["why"]) for one in runs[0].decisions if one.get("why")), "")
            left_out[name] = refused[0] if refused else f"it answers no request here{f' ({why})' if why else ''}"
        else:
            rows_.append(Row(name, tuple(_run(job, found[job]) for job in jobs)))
    if len(rows_) < 2:
        why = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise SettingError(f"fewer than two policies apply ({why})", field="--policies", value=ALL)
    rows, weighed = tuple(rows_), planned.weighed
    if weighed is not None and (base := next((row for row in rows if row.name == "base"), None)) is not None:
        rows = tuple(_with_objective(row, base, weighed) for row in rows)
    pairs = [(_run(cheap, found[cheap]).outcome, _run(dear, found[dear]).outcome) for cheap, dear in planned.priced]
    dearer = planned.priced[0][0].row if planned.priced else ""
    how = f"static_mix with a floor {PRICE_STEP:g} higher, rough beyond that"
    if dearer != OBLIVIOUS:
        how = f"{dearer} with a floor {FLOOR_STEP:g} higher"
    weight = weighed.lambda_weight if weighed is not None else 0.0
    return Case(planned.values, rows, price_g(pairs), left_out, planned.traces, how, weight)


def _with_objective(row: Row, base: Row, weighed: Weighed) -> Row:
    pairs = zip(row.runs, base.runs, strict=True)
    return Row(
        row.name, tuple(replace(a, summary={**a.summary, "objective": weighed.objective(a, b)}) for a, b in pairs)
    )


def _run(job: Job, found: StudyRun) -> Run:
    summary = {name: value for name, value in found.summary.items() if name != "arrivals"}
    return Run(job.row, summary["seed"], found.summary["arrivals"], summary)
