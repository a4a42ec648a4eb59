"""Fence of a dispatcher: the plan that it has obeyed excludes older ones, until the leader proves that it is void.

Source: DESIGN section 9.1 (trust), ADR 29.
Data: the revision of a plan in Redis, the one obeyed, and what Redis says of the controllers' lease at the same look.
Decision: obey it, refuse it, or obey it although an epoch that the lease does not know was obeyed before.
Formulation: a plan of epoch e may be obeyed where e <= E, the highest epoch that the lease was taken under. One that is
    older than the one obeyed is refused, because Redis may have been restored. The fence is void once a controller has
    led under E = e for BEATEN_S of sight: then what was obeyed is not of this lease, or was forged (plans unsigned).
    A fence that routes nothing, or is unsigned and known from the disk alone, is void at first sight of such a leader:
    nothing is lost with the one, and the other may be forged.
    Where plans are signed, one of the same epoch never beats: the leader has signed both.
Deviations: none.
"""

from dataclasses import dataclass
from typing import Final

from trefoil.core.common import Revision
from trefoil.core.errors import Fenced, StaleRevision

FIELD: Final = "plan in Redis"
BEATEN_S: Final = 4.0
"""Longer than a leader takes to repair overwritten values (state.REPAIR_S and one renewal)."""


@dataclass(frozen=True, slots=True)
class Leader:
    """Leader as Redis shows it: `epoch`, the highest that the role was taken under; `led`, that of the lease that is
    held now. 0: there is none."""

    epoch: int = 0
    led: int = 0


class PlanFence:
    """Fence of one reader. `signed`: only signed plans come here."""

    def __init__(self, signed: bool) -> None:
        self._signed = signed
        self._epoch, self._since_s = 0, 0.0  # the leader whose older plans are looked at, and since when

    def forget(self) -> None:
        """Forget what was seen of the leader: Redis was out of sight, or its plan is obeyed."""
        self._epoch = 0

    def check(self, plan: Revision, obeyed: Revision, leader: Leader, now_s: float, *, routes: bool = True) -> bool:
        """Check that a plan may be obeyed; True: although it is older than the one obeyed. `routes`: whether the one
        obeyed routes anything, and cannot be forged.

        Raises:
            Fenced: its epoch is none that a controller has led under.
            StaleRevision: it is older than the one obeyed, and nothing proves yet that it is the leader's.
        """
        if plan.epoch > leader.epoch:
            self.forget()
        check_epoch(FIELD, plan, leader.epoch)
        if plan >= obeyed:
            self.forget()
            return False
        leads = leader.led == leader.epoch == plan.epoch and not (self._signed and obeyed.epoch == plan.epoch)
        if not leads or leader.led != self._epoch:
            self._epoch, self._since_s = (leader.led if leads else 0), now_s
        if self._epoch and now_s - self._since_s >= (BEATEN_S if routes else 0.0):
            self.forget()
            return True
        raise StaleRevision(
            f"older than {obeyed}, which was obeyed", field=FIELD, value=str(plan),
            remedy="none, if a controller leads: it is obeyed once it has led for some seconds; else start one",
        )  # fmt: skip


def check_epoch(field: str, written: Revision, epoch: int) -> None:
    """Check that what stands in Redis may be of a controller; `epoch`: the highest that controllers led under.

    Raises:
        Fenced: its epoch is none that a controller has led under.
    """
    if written.epoch > epoch:
        known = f"controllers lead under {epoch}" if epoch else "Redis names no epoch of controllers"
        raise Fenced(
            f"no controller leads under its epoch, {known}", field=field, value=str(written),
            remedy="none, if a controller leads: it writes its own again within seconds; else start one",
        )  # fmt: skip
