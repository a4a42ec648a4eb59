"""MIAD: the clock doubles when a stage comes near its SLO, and falls by a step when all have the slack for it.

Source: muServe, Algorithm 3 (Qiu et al., ATC'24): slack 0.05, an iteration a second.
Data: per stage its SLO, how much of its time follows the clock, and latency and number of the newest answers. These are
    answers of the last `remembers_s`, moved from the clocks that they had to the clock of now by the law of
    trefoil/core/power.py. Also the planned range, whether the last lock holds, and the age of the newest load window.
Decision: a clock of the range. It begins at the top, and is there again when the plan changes and when no window has
    come for `windows_max_s`. It is there, too, while what is locked is not honoured (or a lease stands before it).
Formulation: slack = (SLO - latency) / SLO. UP if any stage has less than `slack`: twice the clock. Else DOWN by
    `step_mhz` if what that adds to the latency, over the SLO, is less than slack - `slack`.
    With `statistic` "slo" the quantile is the objective's: UP as well while fewer answers of the last minute were in
    time than promised, and no DOWN before it is `ERRORS` standard errors more.
Deviations, off with `literal`: as printed, one stage that may go DOWN is enough; here all of them must (the tightest
    decides). As printed, a step adds weight x latency x STEP / frequency; here what `power.stretch` says, which is more
    at low clocks. In both cases a stage with fewer than `samples_min` answers holds, without any it has no say. DOWN
    ends at a clock that the device has, at most a step lower. A second UP in a row at the top asks for capacity
    (section 3.4).
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from enum import Enum, auto
from typing import Final, Literal

from pydantic import Field

from trefoil.core.brains import ClockDecision, GovernedStage, GovernorView
from trefoil.core.parts import PartSettings
from trefoil.core.power import stretch

STEP_MHZ: Final = 100
"""The paper prints no STEP; 100 MHz is the one step that it names (Fig. 2): 14 s from top to bottom of an A100."""


ERRORS: Final = 1.0


class MiadSettings(PartSettings):
    """Settings of MIAD."""

    step_mhz: int = Field(default=STEP_MHZ, gt=0)
    """STEP."""
    slack: float = Field(default=0.05, ge=0, lt=1)
    """Share of the SLO that is to be left."""
    interval_s: float = Field(default=1.0, gt=0)
    """From one step to the next."""
    samples_min: int = Field(default=1, ge=1)
    """Answers that a latency has to be made of."""
    remembers_s: float = Field(default=120.0, gt=0, le=600)
    """Answers of so long count where fewer than 40 are newer."""
    statistic: Literal["mean", "p95", "slo"] = "mean"
    """Of the latencies; slo: the objective's quantile, and the share in time of the last minute has to keep it."""
    windows_max_s: float = Field(default=2.0, gt=0)
    """Without a load window for so long the clock goes to the top."""
    literal: bool = False
    """As printed."""
    lever: Literal["clock", "power_limit"] = "clock"
    """What is moved: the clock, or a power limit that stands for it. Always the limit where the plan gives one, or the
    device takes no lock."""


class _Wish(Enum):
    UP = auto()
    DOWN = auto()
    SAME = auto()


class Miad:
    """Governor of one device by its stages' slack; it remembers its clock and when the next step is due."""

    def __init__(self, settings: MiadSettings) -> None:
        self._settings = settings
        self.remembers_s, self.lever = settings.remembers_s, settings.lever
        self._clock_mhz = 0
        self._due_s = -math.inf
        self._governed: tuple[object, ...] = ()
        self._was_up = self._scale_out = False

    def step(self, view: GovernorView) -> ClockDecision:
        """Decide the clock until the next step."""
        low_mhz, high_mhz = view.range_mhz if view.range_mhz[1] else (view.supported_mhz[0], view.supported_mhz[-1])
        governed = (low_mhz, high_mhz, tuple((stage.family, stage.stage) for stage in view.stages))
        changed, self._governed = governed != self._governed, governed
        if why := self._unfit(view, changed):
            self._clock_mhz, self._was_up, self._scale_out = high_mhz, False, False
        elif view.now_s < self._due_s:
            return self._decision("between two steps")
        else:
            why = self._adapt(view, low_mhz, high_mhz)
        self._due_s = view.now_s + self._settings.interval_s
        return self._decision(why)

    def _unfit(self, view: GovernorView, changed: bool) -> str:
        """Why the top is the only clock to be trusted; "" where it is not."""
        if changed:
            return "the plan is new: from the top"
        if not view.honoured:
            return "what is locked is not in force: the top"
        if view.windows_age_s > self._settings.windows_max_s:
            return f"no load window for {view.windows_age_s:.1f} s: the top"
        return ""

    def _adapt(self, view: GovernorView, low_mhz: int, high_mhz: int) -> str:
        before_mhz, highest_mhz = self._clock_mhz, view.supported_mhz[-1]
        lower = bisect_left(view.supported_mhz, before_mhz - self._settings.step_mhz)
        lower_mhz = max(low_mhz, min(view.supported_mhz[lower], before_mhz))
        wishes = [(self._wish(stage, highest_mhz, lower_mhz), stage) for stage in view.stages if stage.samples]
        wish, stage = _joint(wishes, literal=self._settings.literal)
        said = f"{stage.family} at {self._latency_ms(stage):.1f} of {stage.slo_ms:g} ms" if stage else "no requests"
        self._scale_out = wish == _Wish.UP and self._was_up and before_mhz == high_mhz
        self._was_up = wish == _Wish.UP
        if wish == _Wish.UP:
            doubled_mhz = view.supported_mhz[bisect_right(view.supported_mhz, 2 * before_mhz) - 1]
            self._clock_mhz = min(high_mhz, doubled_mhz)
        elif wish == _Wish.DOWN:
            self._clock_mhz = lower_mhz
        return f"{wish.name}: {said}, {before_mhz} to {self._clock_mhz} MHz"

    def _wish(self, stage: GovernedStage, highest_mhz: int, lower_mhz: int) -> _Wish:
        settings, latency_ms, at_mhz = self._settings, self._latency_ms(stage), self._clock_mhz
        if stage.samples < settings.samples_min or not stage.slo_ms:
            return _Wish.SAME
        slack = (stage.slo_ms - latency_ms) / stage.slo_ms
        if slack < settings.slack or self._missed(stage, 0.0):
            return _Wish.UP
        if self._missed(stage, ERRORS):
            return _Wish.SAME
        weight = stage.sensitivity_weight
        if settings.literal:
            added_ms = weight * latency_ms * settings.step_mhz / at_mhz
        else:
            longer = stretch(highest_mhz, lower_mhz, weight) / stretch(highest_mhz, at_mhz, weight)
            added_ms = latency_ms * (longer - 1.0)
        return _Wish.DOWN if added_ms / stage.slo_ms < slack - settings.slack else _Wish.SAME

    def _missed(self, stage: GovernedStage, errors: float) -> bool:
        """Whether the last minute's share in time is below the objective's quantile, and so many standard errors."""
        if self._settings.statistic != "slo" or not stage.attained_of:
            return False
        quantile = stage.slo_quantile
        error = math.sqrt(quantile * (1.0 - quantile) / stage.attained_of)
        return stage.attained < quantile + errors * error

    def _latency_ms(self, stage: GovernedStage) -> float:
        if self._settings.statistic == "slo":
            return stage.latency_ms_slo
        return stage.latency_ms_p95 if self._settings.statistic == "p95" else stage.latency_ms

    def _decision(self, why: str) -> ClockDecision:
        return ClockDecision(self._clock_mhz, why, self._due_s, self._scale_out)


def _joint(wishes: Sequence[tuple[_Wish, GovernedStage]], *, literal: bool) -> tuple[_Wish, GovernedStage | None]:
    """What comes of all wishes, and the first stage that had it so."""
    for wish in (_Wish.UP, _Wish.DOWN, _Wish.SAME) if literal else (_Wish.UP, _Wish.SAME, _Wish.DOWN):
        for one, stage in wishes:
            if one == wish:
                return wish, stage
    return _Wish.SAME, None
