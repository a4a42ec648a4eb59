"""Poll scheduling: when a live provider may be asked (back-off, quota, breaker), without clock or network.

Two kinds of questions: the regular one for what holds now, and extra ones (a forecast, the past). One question at a
time, of either kind. Each request of a question counts, a login too.
Regular: `poll_s` after an answer (its soft TTL) or sooner where the caller says that the answer ends. After n failures
in a row: poll_s * min(0.1 * 2^(n-1), 4). Both are drawn out by up to a tenth, another one for each cluster and
question.
Retry-After, whichever question it came with, holds for all of them.
Quota: at most `quota_per_day` requests in a UTC day. What is left is spread over what is left of the day:
gap >= (midnight - now) / left. Extra questions get at most a quarter of it, in step with the day.
Breaker: from `breaker_failures` failures in a row on, it is open until the next regular question is due. That question
is the probe (half open). Until it is answered, nothing else is asked.
Kept over a restart: `PollUsage`. A successor counts what its predecessor may have spent by these rules.
"""

import math
import zlib
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from carbon_feed.core.validation import Cause, Refusal
from trefoil.core.units import DAY_S

JITTER_RATIO: Final = 0.1
RETRY_RATIO: Final = 0.1  # of poll_s: after the first failure
FIRST_RATIO: Final = 0.2  # of poll_s: the soonest that an answer is asked for again when its interval ends
BACK_OFF_MAX_RATIO: Final = 4.0
EXTRA_SHARE: Final = 0.25  # of the quota
NEVER: Final = float("-inf")


class Breaker(StrEnum):
    """State of a circuit breaker: whether questions go out at all."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class PollLimits:
    """Limits of polling one provider for one zone."""

    poll_s: float
    quota_per_day: int = 0
    """Requests in a UTC day; 0 = no limit."""
    hard_ttl_s: float = 1800.0
    """How old an answer may be while asking again fails, at most until the interval that it was given for ends."""
    breaker_failures: int = 5
    seed: str = ""
    """Of the jitter: cluster, zone and provider."""


@dataclass(frozen=True, slots=True)
class PollUsage:
    """Requests spent and when to ask next: what outlives the process."""

    day: int = 0
    """UTC days since 1970."""
    asked: int = 0
    extra: int = 0
    """Of these for forecasts and the past."""
    next_s: float = NEVER
    not_before_s: float = NEVER
    epoch: int = 0
    """Under which the zone was held for it."""


class Polling:
    """Polling state of one provider of one zone. In order: `due` or `extra_refusal`, `begin`, `spend`s, an end."""

    def __init__(self, rules: PollLimits, usage: PollUsage | None = None) -> None:
        self.rules = rules
        self.usage = usage or PollUsage()
        self.asked = 0
        """Questions of this process, of both kinds."""
        self.requests = 0
        """Requests of this process; a question may take several."""
        self.failures = 0
        """In a row, of the regular question."""
        self._in_flight = False
        self._extra = False

    def resume(self, usage: PollUsage, now_s: float, epoch: int) -> None:
        """Resume from the usage on disk; a holder of an epoch in between counts as having spent its full quota."""
        assert not self._in_flight
        known = max(usage, self.usage, key=lambda one: (one.day, one.asked))
        predecessor = epoch > max(usage.epoch, self.usage.epoch) + 1
        next_s = max(usage.next_s, self.usage.next_s) if self.rules.quota_per_day else NEVER
        wait_s = max(usage.not_before_s, self.usage.not_before_s)
        self.usage = replace(known, epoch=epoch, next_s=next_s, not_before_s=wait_s)
        self._start_day(now_s)
        if predecessor and self.rules.quota_per_day:
            may_have = math.ceil(self.rules.quota_per_day * (now_s % DAY_S) / DAY_S)
            self.usage = replace(self.usage, asked=max(self.usage.asked, may_have))
            self.usage = replace(self.usage, next_s=max(self.usage.next_s, self._spread_quota(now_s, now_s)))

    @property
    def in_flight(self) -> bool:
        """Whether a question is under way."""
        return self._in_flight

    def asked_today(self, now_s: float) -> int:
        """Requests since midnight UTC."""
        self._start_day(now_s)
        return self.usage.asked

    def requests_left(self, now_s: float) -> int | None:
        """Requests left until midnight UTC; None = no limit."""
        if not self.rules.quota_per_day:
            return None
        self._start_day(now_s)
        return max(0, self.rules.quota_per_day - self.usage.asked)

    def next_s(self, now_s: float) -> float:
        """UTC seconds at which the regular question is due."""
        if self.requests_left(now_s) == 0:
            return (now_s // DAY_S + 1) * DAY_S
        return max(
            self._unless_clock_set_back(self.usage.next_s, now_s),
            self._unless_clock_set_back(self.usage.not_before_s, now_s),
        )

    def due(self, now_s: float) -> bool:
        """Whether the regular question may go out now."""
        return not self._in_flight and self.requests_left(now_s) != 0 and now_s >= self.next_s(now_s)

    def breaker(self, now_s: float) -> Breaker:
        """State of the circuit breaker now."""
        if self.failures < self.rules.breaker_failures:
            return Breaker.CLOSED
        probing = self._in_flight and not self._extra
        return Breaker.HALF_OPEN if probing or now_s >= self.next_s(now_s) else Breaker.OPEN

    def extra_refusal(self, now_s: float) -> Refusal | None:
        """Refusal of an extra question (forecast, past) now; None = it may go out."""
        if self._in_flight:
            return Refusal(Cause.UNAVAILABLE, "another request is under way")
        if self.breaker(now_s) is not Breaker.CLOSED:
            return Refusal(Cause.UNAVAILABLE, f"{self.failures} requests in a row failed: only a probe is sent")
        wait_s = self._unless_clock_set_back(self.usage.not_before_s, now_s) - now_s
        if wait_s > 0:
            return Refusal(Cause.RATE_LIMITED, f"the provider asks to wait for another {wait_s:.0f} s", wait_s)
        left = self.requests_left(now_s)
        if left is not None:
            share = EXTRA_SHARE * self.rules.quota_per_day * (now_s % DAY_S) / DAY_S
            if left == 0 or self.usage.extra > share:
                return Refusal(
                    Cause.QUOTA, f"{self.usage.asked} of {self.rules.quota_per_day} requests of today are spent"
                )
        return None

    def begin(self, now_s: float, extra: bool = False) -> None:
        """Begin a question, regular or extra."""
        assert self.extra_refusal(now_s) is None if extra else self.due(now_s)
        self._in_flight, self._extra = True, extra
        self.asked += 1

    def spend(self, now_s: float) -> bool:
        """Spend one request of the question under way; False: the quota is used up, do not send it."""
        assert self._in_flight
        self._start_day(now_s)
        if self.requests_left(now_s) == 0:
            return False
        self.requests += 1
        more = 1 if self._extra else 0
        self.usage = replace(self.usage, asked=self.usage.asked + 1, extra=self.usage.extra + more)
        return True

    def answered(self, now_s: float, ends_at_s: float = math.inf) -> None:
        """End the regular question with an answer; `ends_at_s`: when the answer stops to say what holds."""
        self._end()
        self.failures = 0
        poll_s = self.rules.poll_s
        jitter_s = JITTER_RATIO * poll_s * self._jitter()
        again_s = now_s + poll_s + jitter_s
        again_s = min(again_s, max(ends_at_s + jitter_s / 10, now_s + FIRST_RATIO * poll_s))
        self.usage = replace(self.usage, next_s=self._spread_quota(now_s, again_s))

    def refused(self, now_s: float, retry_after_s: float = 0.0) -> None:
        """End the regular question with a failure, and back off."""
        self._end()
        self.failures += 1
        wait_s = back_off_s(self.rules.poll_s, self.failures) * (1 + JITTER_RATIO * self._jitter())
        self.usage = replace(self.usage, next_s=self._spread_quota(now_s, now_s + wait_s))
        self._wait(now_s, retry_after_s)

    def extra_ended(self, now_s: float, retry_after_s: float = 0.0) -> None:
        """End an extra question, whatever its outcome."""
        self._end()
        self._wait(now_s, retry_after_s)

    def clock_stepped(self, step_s: float) -> None:
        """Note a step of the wall clock: what was to be waited for is over when it would have been, or sooner."""
        usage = self.usage
        self.usage = replace(usage, next_s=usage.next_s + min(0.0, step_s), not_before_s=usage.not_before_s + step_s)

    def _end(self) -> None:
        assert self._in_flight
        self._in_flight = False

    def _wait(self, now_s: float, retry_after_s: float) -> None:
        if retry_after_s > 0:
            until_s = max(self._unless_clock_set_back(self.usage.not_before_s, now_s), now_s + retry_after_s)
            self.usage = replace(self.usage, not_before_s=until_s)

    def _spread_quota(self, now_s: float, again_s: float) -> float:
        left = self.requests_left(now_s)
        if left is None:
            return again_s
        midnight_s = (now_s // DAY_S + 1) * DAY_S
        return max(again_s, min(midnight_s, now_s + (midnight_s - now_s) / max(1, left)))

    def _start_day(self, now_s: float) -> None:
        """A new UTC day has the whole quota. A clock that was set back by less than a day does not bring one."""
        day = int(now_s // DAY_S)
        if day > self.usage.day or day < self.usage.day - 1:
            self.usage = replace(self.usage, day=day, asked=0, extra=0)

    def _unless_clock_set_back(self, at_s: float, now_s: float) -> float:
        """A time to wait for; one that no rule gives means that the clock was set back."""
        return at_s if at_s - now_s <= DAY_S + (BACK_OFF_MAX_RATIO + 1) * self.rules.poll_s else NEVER

    def _jitter(self) -> float:
        """0..1, another one for each cluster, provider and question: not all feeds of the world ask at once."""
        return zlib.crc32(f"{self.rules.seed} {self.asked}".encode()) / 2**32


def back_off_s(every_s: float, failures: int) -> float:
    """Back-off [s] after so many failures in a row of what is asked every so often."""
    return every_s * min(RETRY_RATIO * 2.0 ** min(failures - 1, 16), BACK_OFF_MAX_RATIO)
