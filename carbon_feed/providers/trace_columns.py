"""Columns of a trace of carbon intensity, and its unit: by the header, or by settings that do not contradict it."""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from carbon_feed.settings import TraceReading
from trefoil.core import errors
from trefoil.core.carbon import Factors, Method
from trefoil.core.units import INTENSITY_UNITS, g_per_kwh_per, intensity_unit
from trefoil.runtime.given.table import named_column, words_of

VALUE_NAME: Final = re.compile(r"carbon.?intensity|^intensity|^[am]oer$", re.IGNORECASE)
CARBON_NAME: Final = re.compile(r"co2|carbon(?!.?monoxide)|ghg", re.IGNORECASE)
GAS_NAME: Final = re.compile(
    r"(?<![a-z])(no[x2]?|so[x2]|n2o|ch4|co|pm\d*|hg|nh3|vocs?)(?![a-z\d])"
    r"|carbon.?monoxide|nitr|sul(ph|f)|methane|mercury|particulate",
    re.IGNORECASE,
)
"""Other gases, whose rates have the units of an intensity of carbon."""
AMOUNT_NAME: Final = re.compile(r"generation|production|demand|consumption", re.IGNORECASE)
RATE_NAME: Final = re.compile(r"intensity|emission|factor|rate|based|mix", re.IGNORECASE)
TIME_NAMES: Final = (re.compile(r"date", re.IGNORECASE), re.compile(r"time|hour", re.IGNORECASE))
FACTOR_NAMES: Final[Mapping[IntEnum, re.Pattern[str]]] = {
    Factors.DIRECT: re.compile(r"(?<![a-z])direct", re.IGNORECASE),
    Factors.LIFECYCLE: re.compile(r"(?<![a-z])lca(?![a-z])|life.?cycle", re.IGNORECASE),
}
METHOD_NAMES: Final[Mapping[IntEnum, re.Pattern[str]]] = {
    Method.AVERAGE: re.compile(r"(?<![a-z])aoer(?![a-z])|average.?(co2|carbon|intensity|emission)", re.IGNORECASE),
    Method.MARGINAL: re.compile(r"(?<![a-z])moer(?![a-z])|marginal", re.IGNORECASE),
}
ESTIMATED_NAME: Final = re.compile(r"estimated", re.IGNORECASE)
UTC_WORDS: Final = frozenset(("utc", "gmt", "z"))
LOCAL_WORDS: Final = frozenset(
    "local aedt aest bst cdt cest cet cst edt eet est ist jst mdt mst pdt pst wet".split()  # noqa: SIM905
)
UTC_NAMES: Final = ("UTC", "Etc/UTC", "GMT")
WATTTIME: Final = {"moer": "lb/MWh", "aoer": "lb/MWh"}
"""Columns of WattTime's files, whose unit stands in its documentation."""


@dataclass(frozen=True, slots=True)
class TraceColumns:
    """Places of the columns that are read (`estimated` -1: none), and the unit of the values."""

    time: int
    value: int
    estimated: int
    unit: str

    @property
    def g_per_kwh(self) -> float:
        """Grams per kWh of one unit."""
        return g_per_kwh_per(self.unit)


def choose_columns(
    where: str, names: Sequence[str], options: TraceReading, factors: Factors, method: Method, comment_unit: str
) -> TraceColumns:
    """Choose the columns of a trace. `comment_unit`: of a comment `# unit: ...` at its head.

    Raises:
        errors.TraceError: none or several could be meant, the unit is not known, or a setting contradicts the header.
    """
    time = _column(where, names, options.time_column, "trace.time_column", _time_names(names))
    value = _column(where, names, options.value_column, "trace.value_column", _value_names(names, factors, method))
    _check_series(where, names[value], "factors", factors, FACTOR_NAMES)
    _check_series(where, names[value], "method", method, METHOD_NAMES)
    _check_zone(where, names[time], options.timezone)
    marks = [name for name in names if ESTIMATED_NAME.search(name)]
    estimated = -1
    if marks or options.estimated_column:
        estimated = _column(where, names, options.estimated_column, "trace.estimated_column", marks)
    return TraceColumns(time, value, estimated, _unit(where, names[value], options.unit, comment_unit))


def _unit(where: str, name: str, stated: str, comment: str) -> str:
    """Unit as settings, the column's name and the comment say, which must agree."""
    named = intensity_unit(name) or WATTTIME.get(name.lower(), "")
    said = intensity_unit(comment)
    if comment and not said:
        raise errors.TraceError(
            f"{where}: no unit of carbon intensity in a comment", field="# unit", value=comment, remedy=_remedy()
        )
    wanted = intensity_unit(stated)
    found = wanted or named or said
    if not found:
        raise errors.TraceError(
            f"{where}: the unit of column {name!r} is not known", field="trace.unit", value=stated or None,
            remedy=_remedy(),
        )  # fmt: skip
    for source, other in (("its name", named), ("a comment", said)):
        if other and g_per_kwh_per(other) != g_per_kwh_per(found):
            raise errors.TraceError(
                f"{where}: column {name!r} is in {other} by {source}, and in {found} by "
                f"{'trace.unit' if wanted else 'its name'}", field="trace.unit", value=stated or None,
                remedy="correct one of them",
            )  # fmt: skip
    return found


def _remedy() -> str:
    return f"set trace.unit to one of {', '.join(INTENSITY_UNITS)}, or name it in the column"


def _check_zone(where: str, name: str, timezone: str) -> None:
    words = set(words_of(name))
    if words & UTC_WORDS and timezone not in ("", *UTC_NAMES):
        raise errors.TraceError(
            f"{where}: column {name!r} is in UTC by its name", field="trace.timezone", value=timezone,
            remedy="leave it out, or set trace.time_column to the local times",
        )  # fmt: skip
    if words & LOCAL_WORDS and not timezone:
        raise errors.TraceError(
            f"{where}: column {name!r} holds local times of an unknown zone", field="trace.timezone",
            remedy="set it to an IANA name, e.g. America/Los_Angeles, or set trace.time_column to times in UTC",
        )  # fmt: skip


def _time_names(names: Sequence[str]) -> list[str]:
    """Column of times: one in UTC before others, one of dates before hours, local times last."""
    found = [name for pattern in TIME_NAMES for name in names if pattern.search(name)]

    def rank(name: str) -> int:
        words = set(words_of(name))
        return 0 if words & UTC_WORDS else 2 if words & LOCAL_WORDS else 1

    return sorted(found, key=rank)[:1]


def _check_series(
    where: str, name: str, setting: str, wanted: IntEnum, patterns: Mapping[IntEnum, re.Pattern[str]]
) -> None:
    said = [kind for kind, pattern in patterns.items() if pattern.search(name)]
    if said and wanted and wanted not in said:
        kind = said[0].name.lower()
        raise errors.TraceError(
            f"{where}: column {name!r} is {kind} by its name", field=setting, value=wanted.name.lower(),
            remedy=f"set {setting} to {kind}, or trace.value_column to another column",
        )  # fmt: skip


def _is_of_carbon(name: str) -> bool:
    if CARBON_NAME.search(name):
        return True
    return not GAS_NAME.search(name) and (not AMOUNT_NAME.search(name) or RATE_NAME.search(name) is not None)


def _value_names(names: Sequence[str], factors: Factors, method: Method) -> list[str]:
    names = [name for name in names if _is_of_carbon(unicodedata.normalize("NFKC", name))]
    found = [name for name in names if VALUE_NAME.search(name)] or [name for name in names if intensity_unit(name)]
    for pattern in (FACTOR_NAMES.get(factors), METHOD_NAMES.get(method)):
        preferred = [name for name in found if pattern is not None and pattern.search(name)]
        found = preferred if len(preferred) == 1 else found
    return found


def _column(where: str, names: Sequence[str], wanted: str, setting: str, found: Sequence[str]) -> int:
    if wanted:
        return named_column(where, names, wanted, setting)
    if len(found) != 1:
        what = "several columns could be meant" if found else "no column has a name that tells"
        raise errors.TraceError(f"{where}: {what}", field=setting, value=found or names, remedy=f"set {setting}")
    return names.index(found[0])
