"""What a device's clocks and power limit ought to be, and what to do about it now.

Both outlive the process that sets them, and a locked range has no getter: so each has a reason that can end (a lease, a
plan), and whatever has none goes back to the default. A range comes from the live lease, else from the plan, else there
is none; a device asleep has none either, because its watts at rest are those of free clocks. Changing them stalls
kernels and takes a lock of the whole driver: only on change, and at most once a second per device.

Data: the plan's wishes, the lease, what was last set and whether the driver surely took it. Decision: one action, with
its reason. Time is monotonic seconds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Generic, TypeVar

from trefoil.core.fleet import ClockLease, DeviceState
from trefoil.core.plan import PlannedDevice

ACTUATION_GAP_S: Final = 1.0
TRIES: Final = 3  # so many failures in a row are tried again at once; then it is reported, and tried slowly
SLOW_RETRY_S: Final = 30.0
LIMIT_TOLERANCE_W: Final = 0.5
HOLDS_BACK: Final = frozenset(
    {"software_power_cap", "hardware_slowdown", "software_thermal", "hardware_thermal", "power_brake"}
)
LOCKED: Final = "locked_or_application_clocks"
IDLE: Final = "idle"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ClockRange:
    """A range of SM clocks, both supported."""

    min_mhz: int
    max_mhz: int

    def __str__(self) -> str:
        return f"{self.min_mhz}-{self.max_mhz} MHz"


@dataclass(frozen=True, slots=True)
class Ability:
    """What one device can do. `limits_w`: (lowest, highest) that the driver takes; the texts say why it cannot."""

    device: str
    type: str
    supported_mhz: tuple[int, ...] = ()  # ascending
    limits_w: tuple[float, float] | None = None
    cannot_lock: str = ""
    cannot_limit: str = ""

    @property
    def full(self) -> ClockRange:
        """All that the device can run at: the same as no lock."""
        return ClockRange(self.supported_mhz[0], self.supported_mhz[-1])


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A range that somebody holds. `expires_s` is monotonic and decides; `expires_at_s` is for people."""

    holder: str
    epoch: int
    range: ClockRange
    expires_s: float
    expires_at_s: float

    def message(self, device: str) -> ClockLease:
        """As it is answered and published."""
        return ClockLease(device, self.range.min_mhz, self.range.max_mhz, self.holder, self.epoch, self.expires_at_s)


@dataclass(frozen=True, slots=True)
class Failure(Generic[T]):
    """A value that the driver did not take `count` times in a row."""

    value: T | None
    count: int
    retry_s: float
    why: str


@dataclass(frozen=True, slots=True)
class Lever(Generic[T]):
    """One thing that can be set on a device. `value` None: the default.

    `sure` is False while nobody knows what the driver has: a call was cut off or failed, a predecessor was killed, the
    driver was loaded again.
    """

    value: T | None = None
    sure: bool = True
    failure: Failure[T] | None = None

    def taken(self, value: T | None) -> "Lever[T]":
        """The driver took it."""
        return Lever(value)

    def failed(self, value: T | None, why: str, now_s: float) -> "Lever[T]":
        """The driver did not, or not surely, take it."""
        before = self.failure.count if self.failure is not None and self.failure.value == value else 0
        pause_s = ACTUATION_GAP_S if before + 1 < TRIES else SLOW_RETRY_S
        return replace(self, sure=False, failure=Failure(value, before + 1, now_s + pause_s, why))


@dataclass(frozen=True, slots=True)
class View:
    """All that the decision for one device looks at. `leaving`: the agent is about to end, and all reasons with it."""

    ability: Ability
    state: DeviceState
    planned: ClockRange | None = None
    planned_w: float | None = None
    lease: HeldLease | None = None
    clock: Lever[ClockRange] = Lever()
    limit: Lever[float] = Lever()
    actuated_s: float = float("-inf")
    leaving: bool = False


class Verb(StrEnum):
    """What can be done to a device."""

    LOCK = "lock"
    RESET = "reset"
    LIMIT = "limit"
    UNLIMIT = "unlimit"
    NOTHING = "nothing"  # until something changes, or until `until_s`


@dataclass(frozen=True, slots=True)
class Action:
    """What to do now. `until_s`: ask again then at the latest (NOTHING only; inf = not before something changes)."""

    verb: Verb
    why: str
    range: ClockRange | None = None
    limit_w: float | None = None
    until_s: float = float("inf")


# --- what ought to be -------------------------------------------------------------------------------------------------


def snapped(supported_mhz: Sequence[int], mhz: int) -> int:
    """The highest supported clock that is not above `mhz`, as drivers do; the lowest one where there is none."""
    return max((clock for clock in supported_mhz if clock <= mhz), default=supported_mhz[0])


def planned_range(planned: PlannedDevice, supported_mhz: Sequence[int]) -> ClockRange | None:
    """The plan's range; None for the default. Only one end given: the other is the end of the supported clocks.

    A range with min above the lowest clock keeps an idle GPU fast, and its idle power high: plans leave it 0.
    """
    if not supported_mhz or not (planned.clock_min_mhz or planned.clock_max_mhz):
        return None
    low = snapped(supported_mhz, planned.clock_min_mhz or supported_mhz[0])
    high = snapped(supported_mhz, planned.clock_max_mhz or supported_mhz[-1])
    return ClockRange(low, high)


def wanted_range(view: View, now_s: float) -> tuple[ClockRange | None, str]:
    """The range that has a reason now, and the reason. None: the default."""
    if view.leaving:
        return None, "the agent ends"
    if view.state == DeviceState.ASLEEP:
        return None, "the device sleeps"
    if view.lease is not None and now_s < view.lease.expires_s:
        wanted, why = view.lease.range, f"lease of {view.lease.holder}, epoch {view.lease.epoch}"
    elif view.planned is not None:
        wanted, why = view.planned, "planned"
    else:
        return None, "no lease and no plan asks for a range"
    return (None if wanted == view.ability.full else wanted), why


def wanted_limit(view: View) -> tuple[float | None, str]:
    """The power limit that has a reason now [W], and the reason. None: the default."""
    if view.leaving:
        return None, "the agent ends"
    if view.planned_w is None:
        return None, "no plan asks for a power limit"
    return view.planned_w, "planned"


def settled(view: View, now_s: float) -> bool:
    """Whether the device surely is as it ought to be; a lost one counts, because nothing can be done."""
    return view.state == DeviceState.LOST or (
        _there(view.clock, wanted_range(view, now_s)[0]) and _there(view.limit, wanted_limit(view)[0])
    )


def _there(lever: Lever[T], wanted: T | None) -> bool:
    return lever.sure and lever.value == wanted


# --- what to do -------------------------------------------------------------------------------------------------------


def decide(view: View, now_s: float) -> Action:
    """The next action for one device."""
    if view.state == DeviceState.LOST:
        return Action(Verb.NOTHING, "the device is lost: nothing is called on it")
    clock, clock_why = wanted_range(view, now_s)
    limit_w, limit_why = wanted_limit(view)
    wakes = []
    if not _there(view.clock, clock):
        at_s = _not_before(view, view.clock, clock)
        if at_s <= now_s:
            return Action(Verb.RESET if clock is None else Verb.LOCK, clock_why, range=clock)
        wakes.append(at_s)
    if not _there(view.limit, limit_w):
        at_s = _not_before(view, view.limit, limit_w)
        if at_s <= now_s:
            return Action(Verb.UNLIMIT if limit_w is None else Verb.LIMIT, limit_why, limit_w=limit_w)
        wakes.append(at_s)
    why = "waits: at most one change a second, and longer after failures" if wakes else "as it ought to be"
    if view.lease is not None and now_s < view.lease.expires_s:
        wakes.append(view.lease.expires_s)
    return Action(Verb.NOTHING, why, until_s=min(wakes, default=float("inf")))


def _not_before(view: View, lever: Lever[T], wanted: T | None) -> float:
    """When the lever may be moved. Another value than the one that failed need not wait for that one's retry."""
    earliest_s = view.actuated_s + ACTUATION_GAP_S
    if view.leaving or lever.failure is None or lever.failure.value != wanted:
        return earliest_s
    return max(earliest_s, lever.failure.retry_s)


# --- whether it came out so -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reading:
    """What the driver says: SM clock (0: it does not say), clock event reasons, limit that is set (None: likewise)."""

    clock_mhz: int
    reasons: tuple[str, ...] = ()
    limit_w: float | None = None


def _not_honoured(locked: ClockRange, reading: Reading) -> str:
    held_back = sorted(HOLDS_BACK.intersection(reading.reasons))
    if held_back:
        return f"clock range {locked} is not honoured: {', '.join(held_back)}"
    if reading.clock_mhz > locked.max_mhz:
        return f"clock range {locked} is exceeded: somebody else reset or locked the clocks"
    if 0 < reading.clock_mhz < locked.min_mhz and IDLE not in reading.reasons:
        return f"clock range {locked} is not reached, for no reason that the driver names: somebody else may lock it"
    return ""


def drift(view: View, reading: Reading) -> tuple[str, ...]:
    """What differs from what was set, in words that stay the same while the reason does. Reported, never fought."""
    found = []
    if view.clock.sure and view.clock.value is not None:
        found.append(_not_honoured(view.clock.value, reading))
    elif view.clock.sure and LOCKED in reading.reasons:
        found.append("clocks are locked, and not by this agent")
    limit_w = view.limit.value
    differs = limit_w is not None and reading.limit_w is not None
    if differs and view.limit.sure and abs((reading.limit_w or 0.0) - (limit_w or 0.0)) > LIMIT_TOLERANCE_W:
        found.append(f"power limit {limit_w:g} W was set, {reading.limit_w:g} W is found: somebody else changed it")
    found += complaints(view)
    return tuple(text for text in found if text)


def complaints(view: View) -> list[str]:
    """Settings that the driver has refused several times."""
    levers: Mapping[str, Failure[ClockRange] | Failure[float] | None] = {
        "clocks": view.clock.failure,
        "power limit": view.limit.failure,
    }
    return [
        f"{name} cannot be {'reset' if failure.value is None else f'set to {_text(failure.value)}'}: {failure.why}"
        for name, failure in levers.items()
        if failure is not None and failure.count >= TRIES
    ]


def _text(value: ClockRange | float) -> str:
    return str(value) if isinstance(value, ClockRange) else f"{value:g} W"
