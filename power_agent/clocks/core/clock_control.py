"""Levers of one device, its clocks and its power limit: wanted value, next action, leases. Pure.

A lever's setting outlives the process that set it, and locked clocks have no getter. So each value has a reason that
can end (a lease, a plan). A lever without a reason returns to its default: free clocks, and the limit found before this
agent set one, which no limit exceeds. The value is the live lease's, else the plan's, else the default. A device asleep
has the default, because its watts at rest are those of free clocks. A change stalls kernels and locks the whole driver:
levers are written only on change, at most once a second each.

A lease of a device names a clock range, a power limit or both; the plan decides what it does not name. It belongs to a
holder and an epoch. Its holder renews it. A newer epoch takes it over, because its holder was elected later. An older
epoch is always refused, so that a replaced controller cannot come back through its clocks.

Data: the planned value, the lease, the last setting and whether the driver certainly took it. Decision: one action,
with its reason. Time is monotonic seconds.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from trefoil.core.device_types import reported_type
from trefoil.core.errors import Fenced, InvalidInput, PlanError, StaleRevision
from trefoil.core.fleet import ClockLease, DeviceState
from trefoil.core.plan import PlannedDevice

ACTUATION_GAP_S: Final = 1.0
TRIES: Final = 3  # so many failures in a row are tried again at once; then it is reported, and tried slowly
SLOW_RETRY_S: Final = 30.0
LIMIT_TOLERANCE_W: Final = 0.5  # boards round what they are given
POWER_CAP: Final = "software_power_cap"
HOLDS_BACK: Final = frozenset({POWER_CAP, "hardware_slowdown", "software_thermal", "hardware_thermal", "power_brake"})
LOCKED: Final = "locked_or_application_clocks"
IDLE: Final = "idle"


class Lever(StrEnum):
    """What can be set on a device; the value is the journal's name of it."""

    CLOCK = "clock"
    POWER_LIMIT = "power_limit"

    @property
    def capability(self) -> str:
        """Capability that a device needs for it (`watch/capabilities.py`)."""
        return "clock_lock" if self is Lever.CLOCK else "power_limit"

    @property
    def step(self) -> str:
        """Verb of the step that moves it."""
        return "lock_clock" if self is Lever.CLOCK else "limit_power"

    @property
    def text(self) -> str:
        """Name of it in reports."""
        return "clocks" if self is Lever.CLOCK else "power limit"


@dataclass(frozen=True, slots=True)
class ClockRange:
    """A range of SM clocks, both supported."""

    min_mhz: int
    max_mhz: int

    def __str__(self) -> str:
        return f"{self.min_mhz}-{self.max_mhz} MHz"


@dataclass(frozen=True, slots=True)
class PowerLimit:
    """A limit of what the whole board draws."""

    watts: float

    def __str__(self) -> str:
        return f"{self.watts:g} W"


LeverValue = ClockRange | PowerLimit


@dataclass(frozen=True, slots=True)
class Ability:
    """What one device can be set to; `cannot_lock` and `cannot_limit` say why clocks or limit cannot be.

    `limits_w`: the least and the greatest limit of the board, or the limit that was found where an operator lowered it.
    """

    device: str
    type: str
    supported_mhz: tuple[int, ...] = ()  # ascending
    cannot_lock: str = ""
    limits_w: tuple[float, float] = (0.0, 0.0)
    cannot_limit: str = "the board takes no power limit"

    @property
    def full(self) -> ClockRange:
        """Range of all supported clocks: the same as no lock."""
        return ClockRange(self.supported_mhz[0], self.supported_mhz[-1])

    def cannot(self, lever: Lever) -> str:
        """Reason why a lever cannot be moved; empty when it can."""
        return self.cannot_lock if lever is Lever.CLOCK else self.cannot_limit

    def lacking(self, lever: Lever, why: str) -> "Ability":
        """Ability without a lever, for this reason."""
        return replace(self, cannot_lock=why) if lever is Lever.CLOCK else replace(self, cannot_limit=why)


@dataclass(frozen=True, slots=True)
class HeldLease:
    """Lease of a holder. `expires_s` is monotonic and decides; `expires_at_s` is for people.

    `range` or `limit` None: left to the plan.
    """

    holder: str
    epoch: int
    range: ClockRange | None
    expires_s: float
    expires_at_s: float
    limit: PowerLimit | None = None

    def of(self, lever: Lever) -> LeverValue | None:
        """Value that it gives a lever."""
        return self.range if lever is Lever.CLOCK else self.limit

    def message(self, device: str) -> ClockLease:
        """ClockLease as it is answered and published."""
        low, high = (self.range.min_mhz, self.range.max_mhz) if self.range is not None else (0, 0)
        watts = self.limit.watts if self.limit is not None else 0.0
        return ClockLease(device, low, high, self.holder, self.epoch, self.expires_at_s, watts)


@dataclass(frozen=True, slots=True)
class LeverFailure:
    """A value (None: the default) that the driver did not take `count` times in a row."""

    value: LeverValue | None
    count: int
    retry_s: float
    why: str


@dataclass(frozen=True, slots=True)
class LeverState:
    """The value that was last set, and when; None: the default.

    `certain` is False while the driver's setting is unknown: a call was cut off or failed, a predecessor was killed,
    the driver was loaded again.
    """

    value: LeverValue | None = None
    certain: bool = True
    failure: LeverFailure | None = None
    actuated_s: float = float("-inf")

    @property
    def at_rest(self) -> bool:
        """Whether this agent has surely nothing set."""
        return self.value is None and self.certain

    def failed(self, wanted: LeverValue | None, why: str, now_s: float) -> "LeverState":
        """State after the driver did not, or not surely, take a value: when it is tried again."""
        before = self.failure.count if self.failure is not None and self.failure.value == wanted else 0
        pause_s = ACTUATION_GAP_S if before + 1 < TRIES else SLOW_RETRY_S
        return replace(self, certain=False, failure=LeverFailure(wanted, before + 1, now_s + pause_s, why))


@dataclass(frozen=True, slots=True)
class LeverView:
    """All that the decision for one lever looks at. `leaving`: the agent is about to end, and all reasons with it.

    `default`: the value that is the same as no value, as far as it is known.
    """

    lever: Lever
    state: DeviceState
    default: LeverValue | None = None
    planned: LeverValue | None = None
    lease: HeldLease | None = None
    held: LeverState = LeverState()
    leaving: bool = False


class LeverVerb(StrEnum):
    """What can be done to a lever."""

    SET = "set"
    RESET = "reset"
    NOTHING = "nothing"  # until something changes, or until `until_s`


@dataclass(frozen=True, slots=True)
class LeverAction:
    """What to do now. `until_s`: ask again then at the latest (NOTHING only; inf = not before something changes)."""

    verb: LeverVerb
    why: str
    lever: Lever = Lever.CLOCK
    value: LeverValue | None = None
    until_s: float = float("inf")


# --- what ought to be -------------------------------------------------------------------------------------------------


def snap_down(supported_mhz: Sequence[int], mhz: int) -> int:
    """Highest supported clock that is not above `mhz`, as drivers do; the lowest one where there is none."""
    return max((clock for clock in supported_mhz if clock <= mhz), default=supported_mhz[0])


def planned_range(planned: PlannedDevice, supported_mhz: Sequence[int]) -> ClockRange | None:
    """Clock range of a plan; None for the default. Only one end given: the other is the end of the supported clocks.

    A range with min above the lowest clock keeps an idle GPU fast, and its idle power high: plans leave it 0.
    """
    if not supported_mhz or not (planned.clock_min_mhz or planned.clock_max_mhz):
        return None
    low = snap_down(supported_mhz, planned.clock_min_mhz or supported_mhz[0])
    high = snap_down(supported_mhz, planned.clock_max_mhz or supported_mhz[-1])
    return ClockRange(low, high)


def planned_limit(planned: PlannedDevice, ability: Ability) -> PowerLimit | None:
    """Power limit of a plan inside what this board may have: plans know its type only. None for the default."""
    if not planned.power_limit_w or ability.cannot_limit:
        return None
    least_w, most_w = ability.limits_w
    return PowerLimit(min(most_w, max(least_w, planned.power_limit_w)))


def wanted_value(view: LeverView, now_s: float) -> tuple[LeverValue | None, str]:
    """Value of a lever that has a reason now, and the reason. None: the default."""
    if view.leaving:
        return None, "the agent ends"
    if view.state == DeviceState.ASLEEP:
        return None, "the device sleeps"
    leased = view.lease.of(view.lever) if view.lease is not None and now_s < view.lease.expires_s else None
    if leased is not None and view.lease is not None:
        wanted, why = leased, f"lease of {view.lease.holder}, epoch {view.lease.epoch}"
    elif view.planned is not None:
        wanted, why = view.planned, "planned"
    else:
        return None, f"no lease and no plan asks for {'a range' if view.lever is Lever.CLOCK else 'a limit'}"
    return (None if wanted == view.default or _above_found(wanted, view.default) else wanted), why


def _above_found(wanted: LeverValue, found: LeverValue | None) -> bool:
    """Whether a limit is above the one that was found, which an operator set: it is a cap of all limits."""
    return isinstance(wanted, PowerLimit) and isinstance(found, PowerLimit) and wanted.watts > found.watts


def is_settled(view: LeverView, now_s: float) -> bool:
    """Whether the lever surely is where it ought to be; that of a lost device counts, because nothing can be done."""
    return view.state == DeviceState.LOST or _in_force(view.held, wanted_value(view, now_s)[0])


def _in_force(held: LeverState, wanted: LeverValue | None) -> bool:
    return held.certain and held.value == wanted


# --- what to do -------------------------------------------------------------------------------------------------------


def decide(views: Iterable[LeverView], now_s: float) -> LeverAction:
    """Next action for one device, of all its levers."""
    actions = [_decide(view, now_s) for view in views]
    return next((one for one in actions if one.verb != LeverVerb.NOTHING), min(actions, key=lambda one: one.until_s))


def _decide(view: LeverView, now_s: float) -> LeverAction:
    if view.state == DeviceState.LOST:
        return LeverAction(LeverVerb.NOTHING, "the device is lost: nothing is called on it")
    wanted, why = wanted_value(view, now_s)
    wakes_s = []
    if not _in_force(view.held, wanted):
        at_s = _not_before_s(view, wanted)
        if at_s <= now_s:
            verb = LeverVerb.RESET if wanted is None else LeverVerb.SET
            return LeverAction(verb, why, view.lever, wanted)
        wakes_s.append(at_s)
    why = "waits: at most one change a second, and longer after failures" if wakes_s else "as wanted"
    if view.lease is not None and now_s < view.lease.expires_s:
        wakes_s.append(view.lease.expires_s)
    return LeverAction(LeverVerb.NOTHING, why, until_s=min(wakes_s, default=float("inf")))


def _not_before_s(view: LeverView, wanted: LeverValue | None) -> float:
    """When the lever may be moved. Another value than the one that failed need not wait for that one's retry."""
    earliest_s, failure = view.held.actuated_s + ACTUATION_GAP_S, view.held.failure
    if view.leaving or failure is None or failure.value != wanted:
        return earliest_s
    return max(earliest_s, failure.retry_s)


# --- whether it came out so -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LeverReading:
    """What the driver says: SM clock, clock event reasons, default application clock (clocks: 0 = it does not say), and
    the limit that was set, by whomever (None: it does not say)."""

    clock_mhz: int
    reasons: tuple[str, ...] = ()
    default_mhz: int = 0
    limit_w: float | None = None

    @property
    def at_default(self) -> bool:
        """Whether the board's default application clock explains the reason LOCKED: at it, or held lower by a cap."""
        held_back = self.clock_mhz < self.default_mhz and HOLDS_BACK.intersection(self.reasons)
        return bool(self.default_mhz) and bool(self.clock_mhz == self.default_mhz or held_back)


def held_back(reasons: Iterable[str], limit: LeverState) -> tuple[str, ...]:
    """Reasons for which a clock is lower than what was set; the cap of a limit that this agent set is none."""
    return tuple(sorted(HOLDS_BACK.intersection(reasons) - ({POWER_CAP} if limit.value is not None else set())))


def _range_drift(locked: ClockRange, reading: LeverReading, limit: LeverState) -> str:
    if because := held_back(reading.reasons, limit):
        return f"clock range {locked} is not honoured: {', '.join(because)}"
    if reading.clock_mhz > locked.max_mhz:
        return f"clock range {locked} is exceeded: another process reset or locked the clocks"
    if 0 < reading.clock_mhz < locked.min_mhz and not {IDLE, POWER_CAP}.intersection(reading.reasons):
        return f"clock range {locked} is not reached, for no reason that the driver names: another process may lock it"
    return ""


def drift(held: Mapping[Lever, LeverState], reading: LeverReading) -> tuple[str, ...]:
    """What differs from what was set, in words that stay the same while the reason does. Reported, never fought."""
    found = []
    clock, limit = held[Lever.CLOCK], held[Lever.POWER_LIMIT]
    if clock.certain and isinstance(clock.value, ClockRange):
        found.append(_range_drift(clock.value, reading, limit))
    elif clock.certain and LOCKED in reading.reasons and not reading.at_default:
        found.append("clocks are locked, and not by this agent")
    if limit.certain and isinstance(limit.value, PowerLimit) and not same_limit(reading.limit_w, limit.value.watts):
        found.append(f"power limit {limit.value} is not in force: another process set {reading.limit_w:g} W")
    return tuple(text for text in (*found, *repeated_failures(held)) if text)


def same_limit(found_w: float | None, limit_w: float) -> bool:
    """Whether the limit that a driver tells is this one; one that it does not tell is not known to differ."""
    return found_w is None or abs(found_w - limit_w) <= LIMIT_TOLERANCE_W


def repeated_failures(held: Mapping[Lever, LeverState]) -> tuple[str, ...]:
    """Reports of values that the driver has refused several times; empty for none."""
    return tuple(
        f"{lever.text} cannot be {'reset' if failure.value is None else f'set to {failure.value}'}: {failure.why}"
        for lever, failure in ((lever, state.failure) for lever, state in held.items())
        if failure is not None and failure.count >= TRIES
    )


# --- refusals and leases ----------------------------------------------------------------------------------------------


def refuse_levers(planned: PlannedDevice, ability: Ability) -> None:
    """Refuse clocks or a power limit that this device cannot have, before anything is touched.

    A limit that boards of its type take is not an error where this board's range is narrower: see `planned_limit`.

    Raises:
        PlanError: naming field, value and remedy.
    """
    here = f"device {planned.device}"
    _refuse_clocks(planned, ability, here)
    if not planned.power_limit_w:
        return
    if ability.cannot_limit:
        why, remedy = _remedy(ability.cannot_limit, "plan 0")
        raise PlanError(why, field=f"{here}.power_limit_w", value=planned.power_limit_w, remedy=remedy)
    kind, (low, high) = reported_type(ability.type), ability.limits_w
    low, high = min(low, kind.power_limit_min_w or low), max(high, kind.power_limit_max_w)
    if not low <= planned.power_limit_w <= high:
        raise PlanError(
            "not a power limit of this board",
            field=f"{here}.power_limit_w",
            value=planned.power_limit_w,
            remedy=f"{low:g} to {high:g} W, or 0 for the board's own",
        )


def _refuse_clocks(planned: PlannedDevice, ability: Ability, here: str) -> None:
    wanted_mhz = (planned.clock_min_mhz, planned.clock_max_mhz)
    if not any(wanted_mhz):
        return
    if ability.cannot_lock:
        why, remedy = _remedy(ability.cannot_lock, "plan 0 and 0")
        raise PlanError(why, field=f"{here}.clock_mhz", value=wanted_mhz, remedy=remedy)
    for mhz in wanted_mhz:
        if mhz and not ability.full.min_mhz <= mhz <= ability.full.max_mhz:
            raise PlanError(
                "not a clock of this device",
                field=f"{here}.clock_mhz",
                value=mhz,
                remedy=f"{ability.full}, or 0 for no limit",
            )
    if planned.clock_max_mhz and planned.clock_min_mhz > planned.clock_max_mhz:
        raise PlanError("the lowest is above the highest", field=f"{here}.clock_mhz", value=wanted_mhz)


def _remedy(why: str, otherwise: str) -> tuple[str, str]:
    """A reason and what to do; one that was probed brings a separate remedy."""
    reason, _, remedy = why.partition(". Remedy: ")
    return reason, f"{remedy}; or {otherwise}" if remedy else otherwise


def grant_lease(
    requested: ClockLease,
    ttl_s: float,
    ability: Ability,
    held: HeldLease | None,
    highest_epoch: int,
    *,
    ttl_max_s: float,
    now_s: float,
    at_s: float,
) -> HeldLease:
    """Lease that a request makes or renews; `held` is the one before, alive or not.

    Args:
        highest_epoch: the highest that this node has seen.
        now_s: monotonic; at_s: the same moment in UTC seconds.

    Raises:
        InvalidInput: a range, limit, holder or time to live that cannot be.
        StaleRevision: an epoch older than one seen; names both.
        Fenced: another holder has it under the same epoch.
    """
    here, watts = f"lease {ability.device}", requested.power_limit_w
    wants_clocks = bool(requested.min_mhz or requested.max_mhz or not watts)
    for lever, wants in ((Lever.CLOCK, wants_clocks), (Lever.POWER_LIMIT, bool(watts))):
        if wants and ability.cannot(lever):
            why, remedy = _remedy(ability.cannot(lever), "lease other devices")
            raise InvalidInput(why, field=f"{here}.device", value=ability.device, remedy=remedy)
    if not requested.holder:
        raise InvalidInput("empty", field=f"{here}.holder", value=requested.holder, remedy="say who holds it")
    if not 0.0 < ttl_s <= ttl_max_s:
        remedy = f"above 0 and at most {ttl_max_s:g} s; renew it before it ends"
        raise InvalidInput("not a time to live", field=f"{here}.ttl_s", value=ttl_s, remedy=remedy)
    granted = _leased_range(requested, ability, here) if wants_clocks else None
    least_w, most_w = ability.limits_w
    if watts and not least_w <= watts <= most_w:
        remedy = f"{least_w:g} to {most_w:g} W, or 0 to leave the limit to the plan"
        raise InvalidInput("not a power limit of this board", field=f"{here}.power_limit_w", value=watts, remedy=remedy)
    check_lease_epoch(requested.device, requested.holder, requested.epoch, held, highest_epoch, now_s)
    limit = PowerLimit(watts) if watts else None
    return HeldLease(requested.holder, requested.epoch, granted, now_s + ttl_s, at_s + ttl_s, limit)


def _leased_range(requested: ClockLease, ability: Ability, here: str) -> ClockRange:
    full, low, high = ability.full, requested.min_mhz or ability.full.min_mhz, requested.max_mhz
    if not full.min_mhz <= low <= high <= full.max_mhz:
        remedy = f"min <= max inside {full}; min 0 = the lowest"
        raise InvalidInput("not a clock range", field=f"{here}.mhz", value=(requested.min_mhz, high), remedy=remedy)
    return ClockRange(snap_down(ability.supported_mhz, low), snap_down(ability.supported_mhz, high))


def check_lease_epoch(
    device: str, holder: str, epoch: int, held: HeldLease | None, highest_epoch: int, now_s: float
) -> None:
    """Check that this holder may make, renew or end the lease of a device.

    Raises:
        StaleRevision: an epoch older than one seen; names both.
        Fenced: another holder's lease of the same epoch lives.
    """
    newest = max(highest_epoch, held.epoch if held is not None else 0)
    if epoch < newest:
        raise StaleRevision(
            f"{device} obeys epoch {newest}; epoch {epoch} of {holder} is older",
            field="epoch",
            value=epoch,
            remedy="read the node's highest_epoch_seen and ask under a newer epoch",
        )
    if held is not None and now_s < held.expires_s and held.holder != holder and held.epoch == epoch:
        raise Fenced(
            f"the clocks of {device} are held by {held.holder} under epoch {epoch}"
            f" for another {held.expires_s - now_s:.1f} s",
            field="holder",
            value=holder,
            remedy="wait until then, let the holder release it, or come with a newer epoch",
        )
