"""Change filter with hysteresis: which of a zone's readings watchers get, without flapping.

Data: reading v [g/kWh], the last announced a, the direction d of the last announced change (0 = none yet). Also change
ratio c, hysteresis h, and floor f = 1 g/kWh under which a share of the value says nothing.
Decision: announce v or keep silent.
Formulation: x = (v - a) / max(a, f). Announce when quality or rung differ from those last announced, whatever v is, and
when c = 0 and anything differs. Else announce when |x| > c, or |x| > c + h where x has the other sign than d. What is
announced becomes a, so that the band lies around it at once and the next change is measured from there.
So a value that swings by less than c + h about a level is announced at most twice, however long it swings. One that
continues in its direction is announced at each further c.
Deviations: CLOVER's 5 % trigger (h = 0) compares with the last announced value too, and fires at each turn.
Stateless: what was announced last comes with the question.
"""

import math
from dataclasses import dataclass
from typing import Final

from trefoil.core.carbon import CarbonReading, rung_name
from trefoil.core.errors import InvalidInput

FLOOR_G_PER_KWH: Final = 1.0
HYSTERESIS_SHARE: Final = 0.5  # of the change ratio, by default


@dataclass(frozen=True, slots=True)
class Announced:
    """Reading announced last. `direction`: +1 up, -1 down, 0 = its value has not changed yet."""

    reading: CarbonReading
    direction: int = 0


@dataclass(frozen=True, slots=True)
class AnnouncementDecision:
    """Decision: what to remember, and why the reading is announced; no reason = keep silent."""

    announced: Announced
    why: str


@dataclass(frozen=True, slots=True)
class ChangeFilter:
    """Filter of one watcher's readings, with hysteresis. `change_ratio` 0 = every reading."""

    change_ratio: float = 0.0
    hysteresis_ratio: float = 0.0

    @classmethod
    def from_ratios(cls, change_ratio: float, hysteresis_ratio: float | None = None) -> "ChangeFilter":
        """Filter with checked limits.

        Raises:
            errors.InvalidInput: a ratio that is not in 0..1.
        """
        given = change_ratio * HYSTERESIS_SHARE if hysteresis_ratio is None else hysteresis_ratio
        for field, value in (("change_ratio", change_ratio), ("hysteresis_ratio", given)):
            if not 0.0 <= value <= 1.0:  # NaN is not either
                raise InvalidInput("not a ratio", field=field, value=value, remedy="give 0..1, e.g. 0.05 for 5 %")
        return cls(change_ratio, given)

    def decide(self, last: Announced | None, reading: CarbonReading) -> AnnouncementDecision:
        """Decide whether to announce a reading, given what was announced last (None: nothing yet)."""
        assert math.isfinite(reading.intensity_g_per_kwh), "readings are validated before they are announced"
        if last is None:
            return AnnouncementDecision(Announced(reading), "first")
        was = last.reading
        change = reading.intensity_g_per_kwh - was.intensity_g_per_kwh
        ratio = change / max(was.intensity_g_per_kwh, FLOOR_G_PER_KWH)
        direction = (change > 0) - (change < 0)
        told = Announced(reading, direction or last.direction)
        if reading.quality != was.quality:
            return AnnouncementDecision(told, f"quality {was.quality.name.lower()} -> {reading.quality.name.lower()}")
        if reading.rung != was.rung:
            return AnnouncementDecision(told, f"rung {rung_name(was.rung)} -> {rung_name(reading.rung)}")
        if self.change_ratio == 0.0:
            return AnnouncementDecision(told, "reading") if reading != was else AnnouncementDecision(last, "")
        turned = direction * last.direction < 0
        if abs(ratio) > self.change_ratio + (self.hysteresis_ratio if turned else 0.0):
            return AnnouncementDecision(told, f"{ratio:+.1%} since the last announcement")
        return AnnouncementDecision(last, "")
