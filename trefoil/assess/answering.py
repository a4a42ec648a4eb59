"""What each lever would save: scenarios of the found load, played by the simulator under several seeds.

Each seed draws other arrivals and another truth, by the errors of the fit (`noise`), so that the spread of the seeds is
that of load and fit; with MIG also by the law's. A saving is that of `trefoil compare`: at equal accuracy, none where
an SLO or a floor is missed.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from trefoil.assess.scenario import PlayedFleet
from trefoil.comparison.comparison import Case, Row
from trefoil.comparison.runs import Job, PlannedCase, play, pricing
from trefoil.core.errors import TrefoilError
from trefoil.simulator.scenario.inputs import prepare
from trefoil.simulator.scenario.schema import Scenario

TODAY: Final = "today"
WORDS: Final[Mapping[str, str]] = {
    "sleep": "sleep: devices that the load does not need are put to sleep",
    "variants": "variants: cheaper variants above the accuracy floor",
    "clocks": "clocks: lower SM clocks within the SLO",
    "mig": "MIG: devices are cut to what models need",
    "placing": "placing: load goes where it costs least",
    "together": "all together, by carbon",
}
RISKS: Final[Mapping[str, str]] = {
    "sleep": "a sleeping device serves again after seconds; one device may hold the only replica",
    "variants": "answers differ: check the accuracies on your own data",
    "clocks": "each request takes longer; a locked clock holds for the whole board",
    "mig": "cutting a device ends what runs on it for seconds, and memory is divided",
    "placing": "load that moves warms other caches",
    "together": "the sum of the above",
}


@dataclass(frozen=True, slots=True)
class LeverAnswer:
    """Answer of one lever: its saving [%] with lowest and highest, grams of the whole time; or why there is none."""

    lever: str
    saving_pct: float = math.nan
    low_pct: float = math.nan
    high_pct: float = math.nan
    plain_pct: float = math.nan
    p95_ms: float = math.nan
    slo_attainment: float = math.nan
    accuracy: float = math.nan
    why_none: str = ""
    risk: str = ""

    @property
    def known(self) -> bool:
        """Whether a saving may be stated."""
        return math.isfinite(self.saving_pct)


@dataclass(frozen=True, slots=True)
class LeverAnswers:
    """Answers of all levers; what the simulator makes of today, to be set beside what was counted."""

    answers: tuple[LeverAnswer, ...]
    today_w: float
    today_p95_ms: float
    seeds: int
    simulated_h: float
    missed: tuple[str, ...]


def answer(
    scenarios: Mapping[str, Scenario],
    left_out: Mapping[str, str],
    seeds: int,
    jobs: int,
    say: Callable[[str], None] = lambda _text: None,
) -> LeverAnswers:
    """Play all scenarios, and say what each lever saves against `today`.

    Raises:
        TrefoilError: today's fleet, or every lever, cannot be played.
    """
    left, played = dict(left_out), dict[str, Scenario]()
    for name, one in scenarios.items():
        try:
            prepare(one)
            played[name] = one
        except TrefoilError as error:
            if name == TODAY:
                raise
            left[name] = str(error)
    row_jobs = {
        name: [
            Job(name, one.model_copy(update={"seed": one.seed + n}).model_dump_json(), name != TODAY)
            for n in range(seeds)
        ]
        for name, one in played.items()
    }
    priced = pricing(played["variants"], seeds) if "variants" in played else ()
    (case,) = play([PlannedCase({}, row_jobs, priced, left)], jobs, say)
    today = case.row(TODAY)
    answers = [_answer(case, row, today) for row in case.rows if row is not today]
    answers += [LeverAnswer(name, why_none=why) for name, why in case.left_out.items()]
    order = {name: n for n, name in enumerate(WORDS)}
    return LeverAnswers(
        tuple(sorted(answers, key=lambda one: order.get(one.lever, len(order)))),
        today.mean("power_w"),
        today.mean("p95_ms"),
        seeds,
        played[TODAY].span_s / 3600.0,
        today.missed,
    )


def _answer(case: Case, row: Row, today: Row) -> LeverAnswer:
    told: dict[str, Any] = {name: row.mean(name) for name in ("p95_ms", "slo_attainment", "accuracy")}
    saving, risk = case.saving(row, today), RISKS.get(row.name, "")
    assert saving is not None
    if saving.pct is None or saving.plain_pct is None:
        return LeverAnswer(row.name, why_none=saving.why, risk=risk, **told)
    low, high = min(saving.by_seed), max(saving.by_seed)
    return LeverAnswer(row.name, saving.pct["mean"], low, high, saving.plain_pct["mean"], risk=risk, **told)


def risks(fleet: PlayedFleet, answers: LeverAnswers) -> list[str]:
    """What the answers rest on that may not hold, a line each."""
    found = []
    if law := [one.family.name for one in fleet.families if one.folder is None]:
        found.append(f"{', '.join(law)}: other slices and boards are by a law; measure them: trefoil family profile")
    if joined := [one.family.name for one in fleet.families if one.joins]:
        found.append(f"{', '.join(joined)}: requests that are joined while they run are simulated as whole batches")
    if fleet.left_out:
        found.append(f"not simulated, as one server spans several devices: {', '.join(fleet.left_out)}")
    if answers.missed:
        found.append(
            f"today's fleet misses its {' and '.join(answers.missed)} in the simulator: check SLO and accuracy"
        )
    return found
