"""Clock control of one device: the range that it ought to have, what to do about it now, leases and refusals. Pure.

A locked range outlives the process that sets it and has no getter: so each has a reason that can end (a lease, a plan),
and whatever has none goes back to the default. A range comes from the live lease, else from the plan, else there is
none; a device asleep has none either, because its watts at rest are those of free clocks. Changing it stalls kernels
and takes a lock of the whole driver: only on change, and at most once a second per device.

A lease belongs to a holder and an epoch. The same holder renews it; a newer epoch takes it over, because its holder
has been elected after the other; an older one is refused whatever lives, so that a controller that has been replaced
cannot come back through its clocks.

Data: the planned range, the lease, what was last locked and whether the driver surely took it. Decision: one action,
with its reason. Time is monotonic seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from trefoil.core.errors import Fenced, InvalidInput, PlanError, StaleRevision
from trefoil.core.fleet import ClockLease, DeviceState
from trefoil.core.plan import PlannedDevice

ACTUATION_GAP_S: Final = 1.0
TRIES: Final = 3  # so many failures in a row are tried again at once; then it is reported, and tried slowly
SLOW_RETRY_S: Final = 30.0
HOLDS_BACK: Final = frozenset(
    {"software_power_cap", "hardware_slowdown", "software_thermal", "hardware_thermal", "power_brake"}
)
LOCKED: Final = "locked_or_application_clocks"
IDLE: Final = "idle"


@dataclass(frozen=True, slots=True)
class ClockRange:
    """A range of SM clocks, both supported."""

    min_mhz: int
    max_mhz: int

    def __str__(self) -> str:
        return f"{self.min_mhz}-{self.max_mhz} MHz"


@dataclass(frozen=True, slots=True)
class Ability:
    """Clock abilities of one device; `cannot_lock` says why it has none."""

    device: str
    type: str
    supported_mhz: tuple[int, ...] = ()  # ascending
    cannot_lock: str = ""

    @property
    def full(self) -> ClockRange:
        """Range of all supported clocks: the same as no lock."""
        return ClockRange(self.supported_mhz[0], self.supported_mhz[-1])


@dataclass(frozen=True, slots=True)
class HeldLease:
    """Clock lease that somebody holds. `expires_s` is monotonic and decides; `expires_at_s` is for people."""

    holder: str
    epoch: int
    range: ClockRange
    expires_s: float
    expires_at_s: float

    def message(self, device: str) -> ClockLease:
        """ClockLease as it is answered and published."""
        return ClockLease(device, self.range.min_mhz, self.range.max_mhz, self.holder, self.epoch, self.expires_at_s)


@dataclass(frozen=True, slots=True)
class LockFailure:
    """A range (None: the default) that the driver did not take `count` times in a row."""

    range: ClockRange | None
    count: int
    retry_s: float
    why: str


@dataclass(frozen=True, slots=True)
class ClockLock:
    """The range that was last locked; None: the default.

    `certain` is False while nobody knows what the driver has: a call was cut off or failed, a predecessor was killed,
    the driver was loaded again.
    """

    range: ClockRange | None = None
    certain: bool = True
    failure: LockFailure | None = None

    def failed(self, wanted: ClockRange | None, why: str, now_s: float) -> "ClockLock":
        """Lock after the driver did not, or not surely, take a range: when it is tried again."""
        before = self.failure.count if self.failure is not None and self.failure.range == wanted else 0
        pause_s = ACTUATION_GAP_S if before + 1 < TRIES else SLOW_RETRY_S
        return replace(self, certain=False, failure=LockFailure(wanted, before + 1, now_s + pause_s, why))


@dataclass(frozen=True, slots=True)
class ClockView:
    """All that the decision for one device looks at. `leaving`: the agent is about to end, and all reasons with it."""

    ability: Ability
    state: DeviceState
    planned: ClockRange | None = None
    lease: HeldLease | None = None
    lock: ClockLock = ClockLock()
    actuated_s: float = float("-inf")
    leaving: bool = False


class ClockVerb(StrEnum):
    """What can be done to a device's clocks."""

    LOCK = "lock"
    RESET = "reset"
    NOTHING = "nothing"  # until something changes, or until `until_s`


@dataclass(frozen=True, slots=True)
class ClockAction:
    """What to do now. `until_s`: ask again then at the latest (NOTHING only; inf = not before something changes)."""

    verb: ClockVerb
    why: str
    range: ClockRange | None = None
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


def wanted_range(view: ClockView, now_s: float) -> tuple[ClockRange | None, str]:
    """Clock range that has a reason now, and the reason. None: the default."""
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


def is_settled(view: ClockView, now_s: float) -> bool:
    """Whether the device surely has the range that it ought to; a lost one counts, because nothing can be done."""
    return view.state == DeviceState.LOST or _in_force(view.lock, wanted_range(view, now_s)[0])


def _in_force(lock: ClockLock, wanted: ClockRange | None) -> bool:
    return lock.certain and lock.range == wanted


# --- what to do -------------------------------------------------------------------------------------------------------


def decide(view: ClockView, now_s: float) -> ClockAction:
    """Next action for one device."""
    if view.state == DeviceState.LOST:
        return ClockAction(ClockVerb.NOTHING, "the device is lost: nothing is called on it")
    wanted, why = wanted_range(view, now_s)
    wakes_s = []
    if not _in_force(view.lock, wanted):
        at_s = _not_before_s(view, wanted)
        if at_s <= now_s:
            return ClockAction(ClockVerb.RESET if wanted is None else ClockVerb.LOCK, why, range=wanted)
        wakes_s.append(at_s)
    why = "waits: at most one change a second, and longer after failures" if wakes_s else "as it ought to be"
    if view.lease is not None and now_s < view.lease.expires_s:
        wakes_s.append(view.lease.expires_s)
    return ClockAction(ClockVerb.NOTHING, why, until_s=min(wakes_s, default=float("inf")))


def _not_before_s(view: ClockView, wanted: ClockRange | None) -> float:
    """When the clocks may be changed. Another range than the one that failed need not wait for that one's retry."""
    earliest_s, failure = view.actuated_s + ACTUATION_GAP_S, view.lock.failure
    if view.leaving or failure is None or failure.range != wanted:
        return earliest_s
    return max(earliest_s, failure.retry_s)


# --- whether it came out so -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClockReading:
    """What the driver says: SM clock, clock event reasons, default application clock (clocks: 0 = it does not say)."""

    clock_mhz: int
    reasons: tuple[str, ...] = ()
    default_mhz: int = 0

    @property
    def at_default(self) -> bool:
        """Whether the board's default application clock explains the reason LOCKED: at it, or held lower by a cap."""
        held_back = self.clock_mhz < self.default_mhz and HOLDS_BACK.intersection(self.reasons)
        return bool(self.default_mhz) and bool(self.clock_mhz == self.default_mhz or held_back)


def _not_honoured(locked: ClockRange, reading: ClockReading) -> str:
    held_back = sorted(HOLDS_BACK.intersection(reading.reasons))
    if held_back:
        return f"clock range {locked} is not honoured: {', '.join(held_back)}"
    if reading.clock_mhz > locked.max_mhz:
        return f"clock range {locked} is exceeded: somebody else reset or locked the clocks"
    if 0 < reading.clock_mhz < locked.min_mhz and IDLE not in reading.reasons:
        return f"clock range {locked} is not reached, for no reason that the driver names: somebody else may lock it"
    return ""


def drift(view: ClockView, reading: ClockReading) -> tuple[str, ...]:
    """What differs from what was set, in words that stay the same while the reason does. Reported, never fought."""
    found = []
    if view.lock.certain and view.lock.range is not None:
        found.append(_not_honoured(view.lock.range, reading))
    elif view.lock.certain and LOCKED in reading.reasons and not reading.at_default:
        found.append("clocks are locked, and not by this agent")
    return tuple(text for text in (*found, *repeated_failure(view.lock)) if text)


def repeated_failure(lock: ClockLock) -> tuple[str, ...]:
    """Report of a range that the driver has refused several times; empty for none."""
    failure = lock.failure
    if failure is None or failure.count < TRIES:
        return ()
    return (f"clocks cannot be {'reset' if failure.range is None else f'set to {failure.range}'}: {failure.why}",)


# --- refusals and leases ----------------------------------------------------------------------------------------------


def refuse_power_limit(planned: PlannedDevice) -> None:
    """Refuse any power limit: the agent controls clocks only.

    Raises:
        PlanError: naming field, value and remedy.
    """
    if planned.power_limit_w:
        raise PlanError(
            "the agent sets no power limits",
            field=f"device {planned.device}.power_limit_w",
            value=planned.power_limit_w,
            remedy="plan 0; clock_max_mhz lowers what the device draws, or an operator sets a limit by nvidia-smi -pl",
        )


def refuse_clocks(planned: PlannedDevice, ability: Ability) -> None:
    """Refuse clocks that this device cannot have, before anything is touched.

    Raises:
        PlanError: naming field, value and remedy.
    """
    here, wanted_mhz = f"device {planned.device}", (planned.clock_min_mhz, planned.clock_max_mhz)
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
    """A reason and what to do; one that was probed brings a remedy of its own."""
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
    """Clock lease that a request makes or renews; `held` is the one before, alive or not.

    Args:
        highest_epoch: the highest that this node has seen.
        now_s: monotonic; at_s: the same moment in UTC seconds.

    Raises:
        InvalidInput: a range, holder or time to live that cannot be.
        StaleRevision: an epoch older than one seen; names both.
        Fenced: somebody else holds it under the same epoch.
    """
    here = f"lease {ability.device}"
    if ability.cannot_lock:
        why, remedy = _remedy(ability.cannot_lock, "lease other devices")
        raise InvalidInput(why, field=f"{here}.device", value=ability.device, remedy=remedy)
    if not requested.holder:
        raise InvalidInput("empty", field=f"{here}.holder", value=requested.holder, remedy="say who holds it")
    if not 0.0 < ttl_s <= ttl_max_s:
        remedy = f"above 0 and at most {ttl_max_s:g} s; renew it before it ends"
        raise InvalidInput("not a time to live", field=f"{here}.ttl_s", value=ttl_s, remedy=remedy)
    full, low, high = ability.full, requested.min_mhz or ability.full.min_mhz, requested.max_mhz
    if not full.min_mhz <= low <= high <= full.max_mhz:
        remedy = f"min <= max inside {full}; min 0 = the lowest"
        raise InvalidInput("not a clock range", field=f"{here}.mhz", value=(requested.min_mhz, high), remedy=remedy)
    check_lease_epoch(requested.device, requested.holder, requested.epoch, held, highest_epoch, now_s)
    granted = ClockRange(snap_down(ability.supported_mhz, low), snap_down(ability.supported_mhz, high))
    return HeldLease(requested.holder, requested.epoch, granted, now_s + ttl_s, at_s + ttl_s)


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
