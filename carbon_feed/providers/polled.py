"""Polled provider, which is never waited for: asked in the background, one question at a time, and not too often.

Whether it may be asked is `carbon_feed.core.polling`'s business. Between answers the last one holds: of an
observation what the answer says of now (the ladder judges one that has ended). A failure does not take back the last
answer. While the interval of the last answer holds, and the answer is younger than the hard TTL, this provider still
serves it. It asks again in the background. After that time it reports the failure. `peek` is `read` of one that must
not call it: another process holds the zone.
"""

import asyncio
import json
import math
from collections.abc import Callable, Coroutine
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog

from carbon_feed.core.observation import Observation
from carbon_feed.core.polling import NEVER, Polling, PollLimits, PollUsage
from carbon_feed.core.validation import Cause, Refusal
from carbon_feed.providers.base import LiveProvider, ProviderFailure
from trefoil.core import errors
from trefoil.core.carbon import ZoneHealth
from trefoil.runtime import codec
from trefoil.runtime.files import FileTrouble, replace_file
from trefoil.runtime.state_files import as_epoch, read_state

FIRST_ANSWER: Final = Refusal(Cause.UNAVAILABLE, "waiting for the first answer")

T = TypeVar("T")


class PolledProvider:
    """Provider that is polled in the background: `read` returns at once."""

    def __init__(self, provider: LiveProvider, rules: PollLimits | str, usage_file: Path | None = None) -> None:
        """`rules` as text: none but the provider's own pace, with that seed. `usage_file` outlives the process."""
        self.name, self.speedup, self.licence, self.poll_s = (
            provider.name,
            provider.speedup,
            provider.licence,
            provider.poll_s,
        )
        self.provider = provider
        self.polling = Polling(rules if isinstance(rules, PollLimits) else PollLimits(provider.poll_s, seed=rules))
        self.refusal: Refusal | None = None
        """What came of the last regular question; None = an answer."""
        self.outcomes = 0
        """Regular questions that are over."""
        self._usage_file = usage_file
        self._trouble = FileTrouble("usage", "a restart would forget how much of the provider's quota is spent")
        self._now_s = 0.0
        self._answer: Observation | None = None
        self._answered_at_s = NEVER
        self._task: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        provider.metered(self._spend)

    @property
    def left_out(self) -> int:
        """Rows without a value in the provider's answers so far."""
        return self.provider.left_out

    @property
    def awaits_first_answer(self) -> bool:
        """Whether nothing was ever answered yet, and a question is under way."""
        return self._answer is None and self.refusal is None and self._task is not None

    def restore_usage(self, now_s: float) -> None:
        """Restore from disk what an earlier process has spent."""
        self._now_s = now_s
        usage = load_usage(self._usage_file)
        self.polling.resume(usage, now_s, usage.epoch)

    def start_leading(self, now_s: float, epoch: int) -> None:
        """Begin to ask, under this epoch of the zone's lease."""
        self._now_s = now_s
        if not self.polling.in_flight:
            self.polling.resume(load_usage(self._usage_file), now_s, epoch)
            self._save_usage()

    def clock_stepped(self, step_s: float) -> None:
        """Note a step of the wall clock: ages and waits do not change."""
        self._answered_at_s += step_s
        self.polling.clock_stepped(step_s)

    async def read(self, now_s: float) -> Observation:
        self._now_s = now_s
        if self._task is not None and self._task.done():
            self._task.result()  # a broken invariant is heard, and not served as an outage
            self._task = None
        if self._task is None and not self._lock.locked() and self.polling.due(now_s):
            self.polling.begin(now_s)
            self._task = asyncio.create_task(self._question(now_s), name=f"ask {self.name}")
        return self.peek(now_s)

    def peek(self, now_s: float) -> Observation:
        """Observation of now in the last answer, without a question.

        Raises:
            ProviderFailure: nothing, or nothing that still holds.
        """
        answer, refusal = self._answer, self.refusal
        if answer is not None and (refusal is None or self._is_still_valid(answer, now_s)):
            return self.provider.held(now_s) or answer
        found = refusal or (FIRST_ANSWER if self.awaits_first_answer else self._not_asked_yet(now_s))
        raise ProviderFailure(found.cause, found.message, retry_after_s=0.0)

    def history(self, now_s: float, count_max: int) -> tuple[Observation, ...]:
        return self.provider.history(now_s, count_max)

    def held(self, now_s: float) -> Observation | None:
        return self.provider.held(now_s)

    async def forecast(self, now_s: float, horizon_s: float) -> tuple[Observation, ...]:
        return await self._ask_extra(lambda: self.provider.forecast(now_s, horizon_s))

    async def past(self, begin_s: float, end_s: float) -> tuple[Observation, ...]:
        return await self._ask_extra(lambda: self.provider.past(begin_s, end_s))

    def metered(self, spend: Callable[[], None]) -> None:
        """Refused: only this class meters a polled provider."""
        raise AssertionError("a polled provider is metered already")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        await self.provider.close()

    async def wait_answered(self) -> None:
        """Wait for the question that is under way, if there is one."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def fill_health(self, health: ZoneHealth, now_s: float, asking: bool) -> ZoneHealth:
        """Fill in staleness, quota, breaker and last error; a follower makes no call."""
        usage, rules = self.polling.asked_today(now_s), self.polling.rules
        health = replace(health, asked_today=usage, quota_per_day=rules.quota_per_day)
        if not asking:
            return health
        next_s = self.polling.next_s(now_s)
        return replace(
            health,
            soft_stale=self._answer is None or self.refusal is not None or now_s >= self._answered_at_s + self.poll_s,
            breaker=self.polling.breaker(now_s).value,
            next_ask_at_s=next_s if math.isfinite(next_s) else now_s,
            last_error_cause=self.refusal.cause.value if self.refusal is not None else "",
        )

    def _not_asked_yet(self, now_s: float) -> Refusal:
        wait_s = self.polling.next_s(now_s) - now_s
        when = f", and may not be for another {wait_s:.0f} s" if 0 < wait_s < math.inf else ""
        return Refusal(Cause.UNAVAILABLE, f"was not called yet{when}")

    def _is_still_valid(self, answer: Observation, now_s: float) -> bool:
        young = now_s - self._answered_at_s <= self.polling.rules.hard_ttl_s
        return young and answer.starts_at_s <= now_s < answer.ends_at_s

    async def _question(self, now_s: float) -> None:
        async with self._lock:
            try:
                answer = await self._without_crash(self.provider.read(now_s))
            except ProviderFailure as failure:
                self._refused(failure.refusal, now_s)
            except errors.SettingError as error:  # a key file that was taken away while we ran
                self._refused(Refusal(Cause.SECRET, str(error)), now_s)
            else:
                self._answer, self._answered_at_s, self.refusal = answer, now_s, None
                self.outcomes += 1
                known_after = self.provider.held(answer.ends_at_s) is not answer
                self.polling.answered(now_s, math.inf if known_after else answer.ends_at_s)
            self._save_usage()

    async def _without_crash(self, asked: Coroutine[Any, Any, T]) -> T:
        """Await an adapter. An error that it does not expect is logged whole, and costs this answer alone."""
        try:
            return await asked
        except (errors.TrefoilError, AssertionError):
            raise
        except Exception as error:
            structlog.get_logger().exception("the provider's answer cannot be read", provider=self.name)
            raise ProviderFailure(Cause.UNAVAILABLE, f"{self.name} cannot be read ({type(error).__name__})") from error

    def _refused(self, refusal: Refusal, now_s: float) -> None:
        self.refusal = refusal
        self.outcomes += 1
        self.polling.refused(now_s, refusal.retry_after_s)

    async def _ask_extra(self, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Request more than the current value, after the request under way.

        Raises:
            ProviderFailure: it does not answer, or may not be asked now.
        """
        await self.wait_answered()
        async with self._lock:
            refusal = self.polling.extra_refusal(self._now_s)
            if refusal is not None:
                raise ProviderFailure(refusal.cause, refusal.message, retry_after_s=refusal.retry_after_s)
            self.polling.begin(self._now_s, extra=True)
            retry_after_s = 0.0
            try:
                return await self._without_crash(ask())
            except ProviderFailure as failure:
                retry_after_s = failure.refusal.retry_after_s
                raise
            finally:
                self.polling.extra_ended(self._now_s, retry_after_s)
                self._save_usage()

    def _spend(self) -> None:
        """One request is about to be sent.

        Raises:
            ProviderFailure: the quota is used up.
        """
        if not self.polling.spend(self._now_s):
            rules = self.polling.rules
            raise ProviderFailure(
                Cause.QUOTA,
                f"all {rules.quota_per_day} requests of today are spent",
                remedy="raise quota_per_day if the account allows for it, or poll_s",
            )
        self._save_usage()

    def _save_usage(self) -> None:
        """Save what was spent, whole or not at all."""
        if self._usage_file is None:
            return
        known = {name: value for name, value in asdict(self.polling.usage).items() if math.isfinite(value)}
        try:
            replace_file(self._usage_file, json.dumps(known))
        except OSError as error:
            self._trouble.begin(self._usage_file, error)
        else:
            self._trouble.end()


def load_usage(path: Path | None) -> PollUsage:
    """Load usage from disk; none when the file is absent, cannot be read or was set aside: that costs at most one day's
    quota.
    """
    try:
        return (read_state(path, _usage) if path is not None else None) or PollUsage()
    except OSError:
        return PollUsage()


def _usage(tree: Any) -> PollUsage:
    usage: PollUsage = codec.from_plain(PollUsage, tree)
    for count in (usage.day, usage.asked, usage.extra, usage.epoch):
        as_epoch(count)
    if math.inf in (usage.next_s, usage.not_before_s):
        raise ValueError("a time that never comes")
    return usage
