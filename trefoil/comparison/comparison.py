"""What policies, or forecasts, came to at equal load, and what may be said of their savings: values, no I/O.

A saving is grams per answered request against the first row that was named, in the mean of all seeds. It is at equal
accuracy (`saving.py`): the first policy's grams are replaced by what it would have needed at this policy's accuracy.
The price of accuracy is what `static_mix` (between forecasts: their policy) pays for it in the same scenario.
`trefoil/core/objective.py` states, for the means of the seeds, when there is a saving. The headline is against the best
carbon-blind policy that has no lever which the subject lacks.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Final

from trefoil.comparison.saving import RunOutcome, no_percent, saving_pct, summary
from trefoil.core.demand import TokenTimes
from trefoil.core.objective import WORK_TOLERANCE, FamilyOutcome, TokenSlo, no_saving
from trefoil.core.policies import policy, split_preset

PANELS: Final = (
    ("grams_per_request", 1e3, "mg / request"),
    ("slo_attainment", 1.0, "in SLO"),
    ("accuracy", 1.0, "accuracy"),
)
MISSED_COLOUR: Final = "#d64545"
COMPARED: Final = {
    "policy": ("policy", "policies"),
    "carbon.forecast": ("forecast", "forecasts"),
    "jobs_rule": ("rule", "rules"),
}
"""Settings in which rows may differ, and what to call their values."""
AVERAGED: Final = ("grams_per_request", "joules_per_request", "p95_ms", "slo_attainment", "accuracy")
OF_TOKENS: Final = ("grams_per_1000_tokens", "ttft_attainment", "tpot_attainment")
"""Of families with objectives of tokens."""
EXPLORED: Final = ("objective", "evaluations", "exploration_s")
"""Of policies with CLOVER's objective f, or that measure candidates: f [%], how many, and for how long."""

JOBS: Final = ("jobs.grams", "jobs.interactive_grams", "jobs.done", "jobs.late")
"""Of scenarios with jobs: grams of their items and all others, how many are done, and how many late."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run: the simulator's summary as JSON values, and a digest of the arrivals that it met."""

    name: str
    seed: int
    arrivals: str
    summary: Mapping[str, Any]

    @property
    def outcome(self) -> RunOutcome:
        """Outcome, as far as savings are made of it."""
        s = self.summary
        return RunOutcome(s["grams_per_request"], s["joules_per_request"], s["accuracy"], s["slo_attainment"])


@dataclass(frozen=True, slots=True)
class Row:
    """Runs of one policy (or of one forecast) in one case, a seed each."""

    name: str
    runs: tuple[Run, ...]

    def spread(self, name: str, family: str = "") -> dict[str, float]:
        """Mean, deviation, lowest and highest of a number of the summary over the seeds, or of one family's.

        NaN where a seed has none.
        """
        found = [self.value(run, name, family) for run in self.runs]
        return summary([math.nan if value is None else float(value) for value in found])

    def value(self, run: Run, name: str, family: str = "") -> Any:
        """A number of a run's summary, or of one family's; None: it has none. Tokens are those of an only family."""
        if name not in OF_TOKENS:
            return value_of(self._of(run, family), name)
        family = family or (self.families[0] if len(self.families) == 1 else "")
        asked = self._of(run, family) if family else {}
        return {**(asked.get("tokens") or {}), **asked}.get(name)

    def mean(self, name: str, family: str = "") -> float:
        """Mean of a number over the seeds."""
        return self.spread(name, family)["mean"]

    @property
    def families(self) -> tuple[str, ...]:
        """Names of the families."""
        return tuple(self.runs[0].summary["families"])

    @property
    def outcomes(self) -> tuple[FamilyOutcome, ...]:
        """Outcome of each family, in the mean of the seeds."""
        return tuple(map(self._outcome, self.families))

    def _outcome(self, family: str) -> FamilyOutcome:
        asked = self._of(self.runs[0], family)
        attainment, accuracy = (self._known_mean(name, family) for name in ("slo_attainment", "accuracy"))
        arrived, answered = (self.mean(name, family) for name in ("arrived", "answered"))
        slow: tuple[str, ...] = ()
        if asked.get("token_slo"):
            times = [self._of(run, family)["tokens"] for run in self.runs]
            ttft, tpot = (_known_mean([one[f"{of}_attainment"] for one in times]) for of in ("ttft", "tpot"))
            slow = TokenTimes(ttft_attainment=ttft, tpot_attainment=tpot).slow(TokenSlo(**asked["token_slo"]))
        found = attainment, asked["floor"], accuracy, arrived, answered, slow
        return FamilyOutcome(family, asked["slo_quantile"], *found)

    def _known_mean(self, name: str, family: str) -> float | None:
        """Mean of a family's number over the seeds that have it; None where none has it."""
        return _known_mean([self._of(run, family)[name] for run in self.runs])

    @property
    def missed(self) -> tuple[str, ...]:
        """What it misses in the mean of the seeds, of any family: "SLO", "floor"; or "deadlines", of any job."""
        late, poor = (any(getattr(one, what) for one in self.outcomes) for what in ("slo_missed", "floor_missed"))
        return ("SLO",) * late + ("floor",) * poor + ("deadlines",) * (self.jobs("late") > 0)

    def jobs(self, name: str) -> float:
        """Mean of a number of its jobs over the seeds; 0 where there are none."""
        return self.mean(f"jobs.{name}") if "jobs" in self.runs[0].summary else 0.0

    def missed_seeds(self, what: str) -> list[int]:
        """Seeds under which the "SLO" or the "floor" was missed."""
        return [run.seed for run in self.runs if run.summary[f"{what.lower()}_missed"]]

    @staticmethod
    def _of(run: Run, family: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = run.summary["families"][family] if family else run.summary
        return found


def value_of(numbers: Mapping[str, Any], name: str) -> Any:
    """Number of a summary by its name, or by the name of its part and its own: `jobs.late`."""
    part, _, own = name.rpartition(".")
    return numbers[part][own] if part else numbers[name]


def _known_mean(values: Iterable[float | None]) -> float | None:
    known = [float(value) for value in values if value is not None]
    return fmean(known) if known else None


@dataclass(frozen=True, slots=True)
class Saving:
    """Saving against another policy [%], over the seeds: `pct` at equal accuracy, `plain_pct` as it ran; `by_seed`.

    None: there is none to be stated, and `why` says why. `against_missed`: what the other policy itself misses.
    """

    pct: Mapping[str, float] | None
    plain_pct: Mapping[str, float] | None
    accuracy_difference: float
    attainment_difference: float
    why: str = ""
    against_missed: tuple[str, ...] = ()
    by_seed: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Case:
    """One combination of values: the rows of all policies. `price_g`: grams per request and unit of accuracy.

    `left_out`: policies of the table that do not apply, with why, where all of them were asked for. `traces`: what the
    traces of requests were read as. `priced_by`: which runs give the price. `lambda_weight`: of CLOVER's objective f.
    """

    values: Mapping[str, str]
    rows: tuple[Row, ...]
    price_g: float | None
    left_out: Mapping[str, str] = field(default_factory=dict)
    traces: tuple[str, ...] = ()
    priced_by: str = ""
    lambda_weight: float = 0.0

    @property
    def averaged(self) -> tuple[str, ...]:
        """Numbers that are averaged over seeds: those of all policies, those of tokens where a family has objectives of
        them, and of `EXPLORED` those that a run here has."""
        runs = [run for row in self.rows for run in row.runs]
        explored = (name for name in EXPLORED if any(run.summary.get(name) for run in runs))
        timed = any(one.get("token_slo") for run in runs for one in run.summary["families"].values())
        jobs = any("jobs" in run.summary for run in runs)
        return (*AVERAGED, *(OF_TOKENS * timed), *explored, *(JOBS * jobs))

    @property
    def label(self) -> str:
        """Label: what differs between cases, by the ends of the settings' names."""
        return ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in self.values.items())

    @property
    def arrivals(self) -> dict[int, str]:
        """Digest of the arrivals by seed, which every policy met."""
        found = {run.seed: run.arrivals for run in self.rows[0].runs}
        assert all(found[run.seed] == run.arrivals for row in self.rows for run in row.runs), "unequal load"
        return found

    def row(self, name: str) -> Row:
        """Row of a name."""
        return next(row for row in self.rows if row.name == name)

    def saving(self, row: Row, against: Row | None = None) -> Saving | None:
        """Saving of a policy against another one, else the first; None for that one itself."""
        first = against or self.rows[0]
        if row is first:
            return None
        accuracy = row.mean("accuracy") - first.mean("accuracy")
        attainment = row.mean("slo_attainment") - first.mean("slo_attainment")
        why = no_saving(row.outcomes, first.outcomes, priced=self.price_g is not None) or _unequal_jobs(row, first)
        if why:
            return Saving(None, None, accuracy, attainment, why, first.missed)
        pairs = [(ours.outcome, theirs.outcome) for ours, theirs in zip(row.runs, first.runs, strict=True)]
        price_g = self.price_g or 0.0
        if why := next(filter(None, (no_percent(*pair, price_g) for pair in pairs)), ""):
            return Saving(None, None, accuracy, attainment, why, first.missed)
        equal = tuple([pct for pair in pairs if (pct := saving_pct(*pair, price_g)) is not None])
        plain = [pct for pair in pairs if (pct := saving_pct(*pair, 0.0)) is not None]
        return Saving(summary(equal), summary(plain), accuracy, attainment, "", first.missed, equal)

    def opponent(self, subject: Row) -> Row | None:
        """The best carbon-blind policy that has no lever which the subject lacks: the fewest grams at its accuracy, of
        those that missed nothing. None: none of them was played, or the subject is carbon-blind itself.
        """
        ours, *_ = known = [policy(split_preset(row.name)[0]) for row in (subject, *self.rows)]
        fair = [
            row
            for row, theirs in zip(self.rows, known[1:], strict=True)
            if theirs.carbon_blind and theirs.moves_clocks <= ours.moves_clocks and not row.missed
        ]
        if ours.carbon_blind or not fair:
            return None
        price_g, accuracy = self.price_g or 0.0, subject.mean("accuracy")
        return min(fair, key=lambda row: row.mean("grams_per_request") + price_g * (accuracy - row.mean("accuracy")))


def _unequal_jobs(row: Row, first: Row) -> str:
    """Why the jobs of a row have saved nothing: they are late, or did other work; "" where neither is so."""
    if late := row.jobs("late"):
        return f"{late:g} of {row.jobs('jobs'):g} jobs are late"
    mine, other = row.jobs("answered"), first.jobs("answered")
    if abs(mine - other) > WORK_TOLERANCE * other:
        return f"unequal work: {mine:,.0f} items of jobs answered against {other:,.0f}"
    return ""


def subject_of(names: Iterable[str]) -> str:
    """Name of the row that a headline is about: `exact_miad`, else `exact`, where it is played, else the last one."""
    found = list(names)
    known = {split_preset(name)[0]: name for name in reversed(found)}
    return next((known[row] for row in ("exact_miad", "exact") if row in known), found[-1])


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison of policies, the first of which the others are compared with, or of values of another setting.

    Written by `trefoil.comparison.report`; from Python see `trefoil.compare`.
    """

    scenario: str
    duration_s: float
    names: tuple[str, ...]
    seeds: tuple[int, ...]
    cases: tuple[Case, ...]
    setting: str = "policy"

    def to_json(self) -> dict[str, Any]:
        """JSON values: every case with its load, rows, runs and savings."""
        return {
            "basis": "simulated",
            "scenario": self.scenario,
            "duration_s": self.duration_s,
            COMPARED[self.setting][1]: list(self.names),
            "against": self.names[0],
            "seeds": list(self.seeds),
            "cases": [self._case_json(case) for case in self.cases],
        }

    def _case_json(self, case: Case) -> dict[str, Any]:
        return {
            "set": dict(case.values),
            "arrivals": {str(seed): digest for seed, digest in case.arrivals.items()},
            "left_out": dict(case.left_out),
            "traces": list(case.traces),
            "price_mg_per_accuracy": None if case.price_g is None else 1e3 * case.price_g,
            "lambda_weight": case.lambda_weight,
            "headline": self._headline_json(case),
            "rows": [
                {
                    COMPARED[self.setting][0]: row.name,
                    "missed": list(row.missed),
                    "missed_slo_seeds": row.missed_seeds("SLO"),
                    "missed_floor_seeds": row.missed_seeds("floor"),
                    **{name: row.spread(name) for name in case.averaged},
                    "saving": self._saving_json(case.saving(row)),
                    "runs": [{"seed": run.seed, "arrivals": run.arrivals, **run.summary} for run in row.runs],
                }
                for row in case.rows
            ],
        }

    def headline(self, case: Case) -> tuple[Row, Row] | None:
        """Subject and opponent of a case's headline; None where there is none."""
        if self.setting != "policy":
            return None
        subject = case.row(subject_of(self.names))
        opponent = case.opponent(subject)
        return None if opponent is None else (subject, opponent)

    def _headline_json(self, case: Case) -> dict[str, Any] | None:
        if (found := self.headline(case)) is None:
            return None
        subject, opponent = found
        saving = self._saving_json(case.saving(subject, opponent))
        return {"policy": subject.name, "against": opponent.name, "saving": saving}

    @staticmethod
    def _saving_json(found: Saving | None) -> dict[str, Any] | None:
        if found is None:
            return None
        return {
            "pct": found.pct,
            "uncorrected_pct": found.plain_pct,
            "accuracy_difference": found.accuracy_difference,
            "attainment_difference": found.attainment_difference,
            "none_because": found.why,
            "against_missed": list(found.against_missed),
        }

    def records(self) -> list[dict[str, Any]]:
        """Rows of a table, one a run: its values, policy, seed, load and numbers; a saving where it may be stated."""
        return [
            {
                **case.values,
                COMPARED[self.setting][0]: row.name,
                "seed": run.seed,
                "arrivals": run.arrivals,
                "arrived": run.summary["arrived"],
                "answered": run.summary["answered"],
                **{name: row.value(run, name) for name in case.averaged},
                "slo_missed": run.summary["slo_missed"],
                "floor_missed": run.summary["floor_missed"],
                **self._savings_of(case, row, run),
                "basis": "simulated",
            }
            for case in self.cases
            for row in case.rows
            for run in row.runs
        ]

    @staticmethod
    def _savings_of(case: Case, row: Row, run: Run) -> dict[str, float | None]:
        """Savings of one run, at equal accuracy and as it ran, where its row has one and the rule allows them."""
        found, theirs = case.saving(row), next(one for one in case.rows[0].runs if one.seed == run.seed)
        alone = (Row(one.name, (one,)).outcomes for one in (run, theirs))
        prices = {"saving_pct": case.price_g or 0.0, "saving_uncorrected_pct": 0.0}
        if found is None or found.pct is None or no_saving(*alone, priced=case.price_g is not None):
            return dict.fromkeys(prices)
        return {name: saving_pct(run.outcome, theirs.outcome, price_g) for name, price_g in prices.items()}

    def frame(self) -> Any:
        """pandas DataFrame, one row a run: the values, policy, seed, numbers (units end their names), saving [%].

        Raises:
            StartError: pandas is not installed.
        """
        from trefoil.simulator.report.frames import data_frame

        rows = self.records()
        return data_frame({name: [row[name] for row in rows] for name in rows[0]})

    def plot(self) -> Any:
        """matplotlib Figure: mg per request, share in SLO and accuracy of each policy in each case, with their
        deviation over the seeds. A red cross misses its SLO or floor.
        """
        from matplotlib.figure import Figure

        lines = [(case, row) for case in self.cases for row in case.rows]
        figure = Figure(figsize=(10.0, 1.2 + 0.27 * len(lines)), layout="constrained")
        panels = figure.subplots(1, len(PANELS), sharey=True)
        for axes, (name, scale, label) in zip(panels, PANELS, strict=True):
            for at, (_, row) in enumerate(lines):
                spread = row.spread(name)
                marker, colour = ("x", MISSED_COLOUR) if row.missed else ("o", "C0")
                mean, deviation = scale * spread["mean"], scale * spread["deviation"]
                axes.errorbar(mean, at, xerr=deviation, ls="", marker=marker, color=colour, capsize=3)
            axes.set_xlabel(label)
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        panels[0].set_xlim(left=0)
        panels[0].set_yticks(range(len(lines)), [" ".join((row.name, case.label)).strip() for case, row in lines])
        panels[0].invert_yaxis()
        return figure
