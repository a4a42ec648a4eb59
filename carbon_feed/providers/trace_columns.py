"""Columns of a trace of carbon intensity, and its unit: by the header, or by settings that do not contradict it."""

import datetime
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
TIME_NAMES: Final = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"date.?time",
        r"date",
        r"time.?stamp",
        r"(?<![a-z])times?(?![a-z])",
        r"(?<![a-z])hours?(?![a-z])",
        r"time|hour",
    )
)
"""Names of columns of times, the surest first."""
NO_TIME_NAME: Final = re.compile(
    r"updat|creat|modif|generated|retriev|publish|ingest|time.?zone|weekday"
    r"|(hour|minute|day|time).?of.?(the.?)?(day|week|month)",
    re.IGNORECASE,
)
END_NAME: Final = re.compile(
    r"(?<![a-z])(end(ing|s)?|until|to)(?![a-z])|(?<![a-z])end.?(time|date|hour)", re.IGNORECASE
)
FACTOR_NAMES: Final[Mapping[IntEnum, re.Pattern[str]]] = {
    Factors.DIRECT: re.compile(r"(?<![a-z])direct", re.IGNORECASE),
    Factors.LIFECYCLE: re.compile(r"(?<![a-z])lca(?![a-z])|life.?cycle", re.IGNORECASE),
}
METHOD_NAMES: Final[Mapping[IntEnum, re.Pattern[str]]] = {
    Method.AVERAGE: re.compile(r"(?<![a-z])aoer(?![a-z])|average.?(co2|carbon|intensity|emission)", re.IGNORECASE),
    Method.MARGINAL: re.compile(r"(?<![a-z])moer(?![a-z])|marginal", re.IGNORECASE),
}
ESTIMATED_NAME: Final = re.compile(r"estimated", re.IGNORECASE)
UTC_NAME: Final = re.compile(
    r"(?i:(?<![a-z])(?:utc|gmt)|(?:utc|gmt)(?![a-z])|(?<![a-z])(?:z|zulu)(?![a-z]))|(?<![A-Z])(?:UTC|GMT)(?![A-Z])"
)
OFFSET_NAME: Final = re.compile(
    r"(?:(?:utc|gmt)[\s_]*([-+\u2212\u2013])[\s_]*(1[0-4]|0?\d)(?::?([0-5]\d))?"
    r"|(?<!\d)([-+\u2212\u2013])(1[0-4]|0\d):([0-5]\d))(?!\d)",
    re.IGNORECASE,
)
ETC_NAME: Final = re.compile(r"etc/(?:gmt|utc)[-+]\d+", re.IGNORECASE)
"""Zones whose sign is that of POSIX: Etc/GMT+8 is UTC-8."""
LOCAL_WORDS: Final = frozenset(
    words_of(
        "acdt acst adt aedt aest akdt akst art ast awst brt bst cdt cest cet clt cpt cst ct eat edt eest eet ept est et"
        " hkt hst ict ist jst kst mdt mpt msk mst mt ndt npt nst nzdt nzst pdt pht pkt ppt pst pt sast sgt trt wat west"
        " wet wib alaska central eastern hawaii mountain pacific prevailing"
        " africa america asia atlantic australia brazil canada chile europe israel japan mexico singapore turkey"
    )
)
LOCAL_NAME: Final = re.compile(r"local|(?<![a-z])(antarctica|arctic|indian|us)/[a-z]", re.IGNORECASE)
UTC_NAMES: Final = ("UTC", "Etc/UTC", "GMT")
WATTTIME: Final = {"moer": "lb/MWh", "aoer": "lb/MWh"}
"""Columns of WattTime's files, whose unit stands in its documentation."""


@dataclass(frozen=True, slots=True)
class TraceColumns:
    """Places of the columns that are read (`estimated` -1: none), unit of the values, zone that the times name."""

    time: int
    value: int
    estimated: int
    unit: str
    zone: datetime.tzinfo | None

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
    zone = _check_zone(where, names[time], options.timezone)
    marks = [name for name in names if ESTIMATED_NAME.search(name)]
    estimated = -1
    if marks or options.estimated_column:
        estimated = _column(where, names, options.estimated_column, "trace.estimated_column", marks)
    return TraceColumns(time, value, estimated, _unit(where, names[value], options.unit, comment_unit), zone)


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


def _check_zone(where: str, name: str, timezone: str) -> datetime.tzinfo | None:
    """Offset from UTC that the name of the column says; None: none.

    Raises:
        errors.TraceError: a setting contradicts the name, or the name says local times and nothing their zone.
    """
    offset, local = _offset(name), _is_local(name)
    named = offset or (datetime.UTC if _is_utc(name) and not local else None)
    if named is not None and timezone and (named != datetime.UTC or timezone not in UTC_NAMES):
        raise errors.TraceError(
            f"{where}: column {name!r} is in {named} by its name", field="trace.timezone", value=timezone,
            remedy="leave it out, or set trace.time_column to the local times",
        )  # fmt: skip
    if offset is None and local and not timezone:
        raise errors.TraceError(
            f"{where}: column {name!r} holds local times of an unknown zone", field="trace.timezone",
            remedy="set it to an IANA name, e.g. America/Los_Angeles, or set trace.time_column to times in UTC",
        )  # fmt: skip
    return offset


def _offset(name: str) -> datetime.tzinfo | None:
    """Offset from UTC in a name: `time (UTC+1)`, `Datetime (GMT-8)`, `time (-05:00)`."""
    found = OFFSET_NAME.search(ETC_NAME.sub("", unicodedata.normalize("NFKC", name)))
    if found is None:
        return None
    sign, hours, minutes = found.groups()[:3] if found[1] else found.groups()[3:]
    minutes_east = (int(hours) * 60 + int(minutes or 0)) * (1 if sign == "+" else -1)
    return datetime.timezone(datetime.timedelta(minutes=minutes_east)) if minutes_east else datetime.UTC


def _is_utc(name: str) -> bool:
    return UTC_NAME.search(ETC_NAME.sub("", name)) is not None


def _is_local(name: str) -> bool:
    words = set(words_of(name))
    return bool(words & LOCAL_WORDS or LOCAL_NAME.search(name) or ETC_NAME.search(name))


def _time_names(names: Sequence[str]) -> list[str]:
    """Columns of times of the best rank: starts before ends, UTC before local times, dates before hours."""
    ranks = {
        name: (END_NAME.search(name) is not None, _zone_rank(name), place)
        for name in names
        for place in [next((i for i, pattern in enumerate(TIME_NAMES) if pattern.search(name)), None)]
        if place is not None and not NO_TIME_NAME.search(name)
    }
    return [name for name, rank in ranks.items() if rank == min(ranks.values())]


def _zone_rank(name: str) -> int:
    if _offset(name) not in (None, datetime.UTC):
        return 1
    return 3 if _is_local(name) else 0 if _is_utc(name) else 2


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
