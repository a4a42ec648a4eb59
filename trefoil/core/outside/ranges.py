"""Ranges of numbers that come from outside: settings, messages, files. One table, by the unit that ends a name.

Data: the name of a field and its value.
Formulation: 0 is free, since it means "none" or "the default" where a field takes it at all. Any other value lies
between `low` and `high` in size. Signs and tighter bounds are the field's own. A range is so wide that no user who
knows what a field means misses it. It is so narrow that sums, products and quotients of such numbers stay finite and
exact. Deviations: none.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


@dataclass(frozen=True, slots=True)
class Range:
    """Range of the size of a number; `why` says what bounds it."""

    low: float
    high: float
    why: str


YEAR_S: Final = 366 * 86_400.0
FREE: Final = Range(0.0, 2.0**64, "a number that is compared only")
COUNT: Final = Range(1e-12, 1e15, "whole numbers are exact up to there")
BY_NAME: Final[Mapping[str, Range]] = {
    **dict.fromkeys(("seed", "epoch", "number", "expected_number", "seq", "after_seq", "as_of", "generation"), FREE),
    "rate_tolerance": COUNT,  # of a planner: "any rate will do" is written as 1e9
    **dict.fromkeys(
        ("slo_quantile", "ttft_quantile", "tpot_quantile"),
        Range(0.01, 0.999999, "a quantile is measured on some hundreds of answers"),
    ),
    **dict.fromkeys(
        ("percentile", "ttft_percentile", "tpot_percentile"),
        Range(1.0, 99.9999, "a percentile is measured on some hundreds of answers"),
    ),
    "window_s": Range(0.01, YEAR_S, "a window of a year is the longest that any budget is for"),
    "pue": Range(1.0, 10.0, "a site draws at least what its devices do; above 3 none is known"),
    "max_watts": Range(1.0, 1e9, "a watt is less than any device sleeps with, a gigawatt a power station"),
    "grams_per_day": Range(1e-6, 1e12, "a million tonnes are more than all data centres emit in a day"),
    "joules_per_day": Range(1e-3, 1e18, "all data centres draw less than 1e16 joules in a day"),
    "replicas_min": Range(1, 10_000, "slices of the largest fleet that one plan has"),
    "spread_min": Range(1, 10_000, "devices of the largest fleet that one plan has"),
    "message_bytes_max": Range(1, 2**31 - 1, "a protobuf message is shorter than 2 GiB"),
    "tick_s": Range(0.01, 86_400.0, "each tick reads and decides"),
    "ack_s": Range(0.01, 86_400.0, "each acknowledgement is a write"),
}
BY_UNIT: Final[Mapping[str, Range]] = {
    "_g_per_kwh": Range(1e-6, 1500.0, "the dirtiest lignite plants emit 1,200 g/kWh"),
    "_per_day": Range(1, 1e9, "ten thousand a second"),
    "_per_s": Range(1e-9, 1e9, "one in thirty years, or a billion a second"),
    "_poll_s": Range(0.005, YEAR_S, "each poll is a call"),
    "_at_s": Range(0.0, 1e11, "seconds since 1970, for 3,000 years"),
    "_ms": Range(1e-3, 7 * 86_400e3, "a microsecond to a week"),
    **dict.fromkeys(("_ms_p50", "_ms_p95", "_ms_p99"), Range(1e-3, 7 * 86_400e3, "a microsecond to a week")),
    "_s": Range(1e-3, 1e10, "a millisecond to 300 years"),
    "_h": Range(1e-5, 1e7, "a tenth of a second to 1,000 years"),
    "_years": Range(1e-3, 1_000.0, "hours to a millennium"),
    "_mhz": Range(1, 100_000, "no clock is faster than 100 GHz"),
    "_pct": Range(1e-9, 100.0, "percent of a whole"),
    "_mib": Range(1e-3, 2.0**31, "two pebibytes"),
    "_bytes": Range(1, 2.0**50, "a pebibyte"),
    "_bytes_max": Range(1, 2.0**50, "a pebibyte"),
    "_watts": Range(1e-3, 1e9, "a gigawatt is a power station"),
    "_w": Range(1e-3, 1e9, "a gigawatt is a power station"),
    "_j": Range(1e-9, 1e12, "a terajoule is a day of a power station"),
    "_j_per_batch": Range(1e-9, 1e12, "a terajoule is a day of a power station"),
    "_j_per_request": Range(1e-9, 1e12, "a terajoule is a day of a power station"),
    "_ratio": Range(1e-9, 1e6, "a part in a billion to a million times"),
    "_share": Range(1e-9, 1e6, "a part in a billion to a million times"),
}


@lru_cache(maxsize=4096)
def range_of(name: str) -> Range:
    """Range of a field, by its name or the unit that ends it."""
    if name in BY_NAME:
        return BY_NAME[name]
    return next((found for unit, found in BY_UNIT.items() if name.endswith(unit)), COUNT)


def complaint(name: str, value: Any, *, computed: bool = False) -> str:
    """Complaint about the value of a field; "" where it is in range, or no number. `computed`: a figure that may come
    as near to 0 as rounding leaves it."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value == 0:
        return ""
    allowed = range_of(name)
    if (computed or allowed.low <= abs(value)) and abs(value) <= allowed.high:  # NaN is neither
        return ""
    return f"must be 0 or between {allowed.low:g} and {allowed.high:g} ({allowed.why})"


class Ranged(BaseModel):
    """Model whose numbers are in the ranges of their names, those in lists and tables too. Infinities pass where a
    field takes them."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="after")
    @classmethod
    def _in_range(cls, value: Any, info: ValidationInfo) -> Any:
        held = value.values() if isinstance(value, Mapping) else value
        for each in held if isinstance(held, Collection) and not isinstance(held, str) else (held,):
            infinite = isinstance(each, float) and not math.isfinite(each)
            if not infinite and (why := complaint(info.field_name or "", each)):
                raise ValueError(why if each is value else f"{each!r} {why}")
        return value
