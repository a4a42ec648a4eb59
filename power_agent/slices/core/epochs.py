"""Epochs that a command may come under: an obeyed epoch fences all older ones, so that no caller may invent
an epoch. Pure.
"""

from trefoil.core.errors import Fenced, StaleRevision, Unavailable
from trefoil.core.outside.plausible import EPOCHS_AHEAD_MAX


def refuse_made_up_epoch(epoch: int, highest: int, led: int) -> None:
    """Refuse an epoch above all that was obeyed here (`highest`) and that no controller leads under.

    `led`: the newest controller's in Redis; 0: it does not answer, or knows none. Then the leader is unknown, and one
    step is taken on trust: the next controller is past it by one more.

    Raises:
        Fenced: Redis names a lower one.
        Unavailable: Redis names none.
    """
    if led and epoch > max(highest, led):
        remedy = "acquire the role and send its epoch, or the node's highest_epoch_seen"
        raise Fenced(
            f"no controller leads under it; the leader's epoch is {led}", field="epoch", value=epoch, remedy=remedy
        )
    if not led and epoch > highest + 1:
        raise Unavailable(
            f"beyond {highest}, the highest seen, and Redis does not say who leads", field="epoch", value=epoch,
            remedy="repeat when this node reaches Redis, or send its highest_epoch_seen or the next",
        )  # fmt: skip


def is_void(highest: int, epoch: int, led: int) -> bool:
    """Whether what was obeyed here fences nothing, for a command of the leader. The obeyed epoch is then more than
    EPOCHS_AHEAD_MAX beyond the one that controllers lead under (a journal of another cluster, or spoilt)."""
    return bool(led) and epoch == led and highest > led + EPOCHS_AHEAD_MAX


def refuse_overtaken_epoch(epoch: int, led: int) -> None:
    """Refuse a controller that stood still past its lease, before the one that leads now has sent anything here.

    Raises:
        StaleRevision: controllers lead under a newer epoch.
    """
    if epoch < led:
        raise StaleRevision(
            f"overtaken, controllers lead under {led}", field="epoch", value=epoch,
            remedy="acquire the role again and plan under a newer epoch",
        )  # fmt: skip
