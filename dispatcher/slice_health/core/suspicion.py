"""Suspicions: answers that raise a doubt about a place, and what a probe of it proves.

Source: ADR 28. Triton's texts: server 2.51 (python_be.cc).
Data: statuses of answers, streaks and silence (outliers.py), results of probes.
Decision: which places to probe, and whether a probe's result ejects the place.
Formulation: a place is probed at most once every PROBE_EVERY_S for one kind of suspicion, however many answers suspect
    it, and serves on meanwhile. A probe fails by what the channel sees, by a model that is not ready, or by an
    inference. An inference fails by a timeout (STUCK, or LATE where that was the suspicion), or by Triton's words for a
    dead python stub (DEAD_STUB). It also fails by an error like those that made a streak (SICK). Any other status of
    the probe shows a model that answers. A good answer since the suspicion outweighs a probe that failed by an
    inference: the place works for others.
Deviations: the text of a probe's answer is read, though texts prove nothing: the probe's input is ours, no client
    chose it, and what it proves holds for that model alone.
"""

import re
from dataclasses import dataclass
from typing import Final

from dispatcher.slice_health.core.ejection import Failure, Place

PROBE_EVERY_S: Final = 0.5
FAULTS: Final = frozenset({"INTERNAL", "UNKNOWN", "DATA_LOSS", "UNAVAILABLE"})
DOUBTFUL: Final = FAULTS | {"NOT_FOUND"}
"""Statuses of answers that a slice in trouble may give, and a model that is well, too."""

_OVERLOAD: Final = re.compile(r"exceeds maximum queue size|request timeout expired", re.IGNORECASE)
_DEAD_STUB: Final = re.compile(r"stub process .*not healthy|failed to obtain the health mutex", re.IGNORECASE)


def is_overload(details: str) -> bool:
    """Whether a text is Triton's for a request that its own queue refused."""
    return bool(_OVERLOAD.search(details))


def is_dead_stub(details: str) -> bool:
    """Whether a text is Triton's for a python stub that is gone."""
    return bool(_DEAD_STUB.search(details))


def probe_failure(suspected: Failure | None, code: str, details: str) -> Failure | None:
    """What the status of a probe's inference proves; None: the model answers. `suspected`: the streak before it."""
    if code == "DEADLINE_EXCEEDED":
        return Failure.LATE if suspected is Failure.LATE else Failure.STUCK
    if code == "INTERNAL" and is_dead_stub(details):
        return Failure.DEAD_STUB
    if suspected is Failure.SICK and code in FAULTS and not is_overload(details):
        return Failure.SICK
    return None


@dataclass(slots=True)
class Suspicion:
    """Suspicion about a place. `failure`: the streak that made it, None = a single answer. `answered`: whether the
    place has given a good answer since."""

    failure: Failure | None
    why: str
    answered: bool = False


class Suspicions:
    """Suspected places of one worker. Times are the caller's monotonic clock."""

    def __init__(self) -> None:
        self._waiting: dict[Place, Suspicion] = {}
        self._probed: dict[Place, Suspicion] = {}
        self._probed_at_s: dict[tuple[Place, Failure | None], float] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting or self._probed)

    def suspect(self, place: Place, failure: Failure | None, why: str) -> None:
        """Note a suspicion; a streak replaces a single answer."""
        known = self._waiting.get(place)
        if known is None or known.failure is None:
            self._waiting[place] = Suspicion(failure, why)
        else:
            known.answered = False

    def on_good_answer(self, place: Place) -> None:
        """Note that a place has answered a request well."""
        for suspicions in (self._waiting, self._probed):
            if place in suspicions:
                suspicions[place].answered = True

    def due(self, now_s: float) -> dict[Place, Suspicion]:
        """Places to probe now. `close` follows for each."""
        self._probed_at_s = {probed: at_s for probed, at_s in self._probed_at_s.items() if now_s - at_s < PROBE_EVERY_S}
        due = {
            place: suspicion
            for place, suspicion in self._waiting.items()
            if (place, suspicion.failure) not in self._probed_at_s and place not in self._probed
        }
        for place, suspicion in due.items():
            del self._waiting[place]
            self._probed[place] = suspicion
            self._probed_at_s[place, suspicion.failure] = now_s
        return due

    def close(self, place: Place) -> None:
        """Note that the probe of a place has ended."""
        self._probed.pop(place, None)

    def forget(self, place: Place) -> None:
        """Forget what waits about a place that is out."""
        self._waiting.pop(place, None)
