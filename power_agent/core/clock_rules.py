"""Which clocks, limits and leases are refused, before anything is touched. All pure.

A lease belongs to a holder and an epoch. The same holder renews it; a newer epoch takes it over, because its holder
has been elected after the other; an older one is refused whatever lives, so that a controller that has been replaced
cannot come back through its clocks.
"""

from power_agent.core.clocks import Ability, ClockRange, HeldLease, snapped
from trefoil.core.errors import Fenced, InvalidInput, PlanError, StaleRevision
from trefoil.core.fleet import ClockLease
from trefoil.core.plan import PlannedDevice


def refuse_planned(planned: PlannedDevice, ability: Ability) -> None:
    """Refuse clocks and limits that this device cannot have, before anything is touched.

    Raises:
        PlanError: naming field, value and remedy.
    """
    here, asked = f"device {planned.device}", (planned.clock_min_mhz, planned.clock_max_mhz)
    if any(asked):
        if ability.cannot_lock:
            why, remedy = _remedy(ability.cannot_lock, "plan 0 and 0")
            raise PlanError(why, field=f"{here}.clock_mhz", value=asked, remedy=remedy)
        for mhz in asked:
            if mhz and not ability.full.min_mhz <= mhz <= ability.full.max_mhz:
                raise PlanError(
                    "not a clock of this device",
                    field=f"{here}.clock_mhz",
                    value=mhz,
                    remedy=f"{ability.full}, or 0 for no limit",
                )
        if planned.clock_max_mhz and planned.clock_min_mhz > planned.clock_max_mhz:
            raise PlanError("the lowest is above the highest", field=f"{here}.clock_mhz", value=asked)
    if planned.power_limit_w:
        if ability.limits_w is None:
            why, remedy = _remedy(ability.cannot_limit or f"a {ability.type} takes no power limit", "plan 0")
            raise PlanError(why, field=f"{here}.power_limit_w", value=planned.power_limit_w, remedy=remedy)
        low_w, high_w = ability.limits_w
        if not low_w <= planned.power_limit_w <= high_w:
            raise PlanError(
                "not a power limit of this device",
                field=f"{here}.power_limit_w",
                value=planned.power_limit_w,
                remedy=f"{low_w:g} to {high_w:g} W, or 0 for the default",
            )


def _remedy(why: str, otherwise: str) -> tuple[str, str]:
    """A reason and what to do; one that was probed brings a remedy of its own."""
    reason, _, remedy = why.partition(". Remedy: ")
    return reason, f"{remedy}; or {otherwise}" if remedy else otherwise


def grant(
    asked: ClockLease,
    ttl_s: float,
    ability: Ability,
    held: HeldLease | None,
    highest_epoch: int,
    *,
    ttl_max_s: float,
    now_s: float,
    at_s: float,
) -> HeldLease:
    """The lease that `asked` makes or renews; `held` is the one before, alive or not.

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
    if not asked.holder:
        raise InvalidInput("empty", field=f"{here}.holder", value=asked.holder, remedy="say who holds it")
    if not 0.0 < ttl_s <= ttl_max_s:
        remedy = f"above 0 and at most {ttl_max_s:g} s; renew it before it ends"
        raise InvalidInput("not a time to live", field=f"{here}.ttl_s", value=ttl_s, remedy=remedy)
    full, low, high = ability.full, asked.min_mhz or ability.full.min_mhz, asked.max_mhz
    if not full.min_mhz <= low <= high <= full.max_mhz:
        remedy = f"min <= max inside {full}; min 0 = the lowest"
        raise InvalidInput("not a clock range", field=f"{here}.mhz", value=(asked.min_mhz, high), remedy=remedy)
    check_epoch(asked.device, asked.holder, asked.epoch, held, highest_epoch, now_s)
    wanted = ClockRange(snapped(ability.supported_mhz, low), snapped(ability.supported_mhz, high))
    return HeldLease(asked.holder, asked.epoch, wanted, now_s + ttl_s, at_s + ttl_s)


def check_epoch(device: str, holder: str, epoch: int, held: HeldLease | None, highest_epoch: int, now_s: float) -> None:
    """Whether this holder may make, renew or end the lease of a device.

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
