"""A live provider that is never waited for: asked in the background, at most one question at a time, and not too often.

Whether it may be asked is `carbon_feed.core.polling`'s business. Between answers the last one holds: of an
observation what the answer says of now (the ladder judges one that has ended). A failure does not take back what was
said: while the interval that the last answer was given for still holds, and the answer is younger than the hard TTL,
it is served on and asked for again in the background; after that the failure is what this provider says. `peek` is
`read` of one that must not ask: somebody else holds the zone.
"""

import asyncio
import json
import math
from collections.abc import Callable, Coroutine
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from carbon_feed.core.feed import Observation
from carbon_feed.core.polling import NEVER, Polling, PollRules, Spent
from carbon_feed.core.validate import Cause, Refusal
from carbon_feed.providers.base import LiveProvider, ProviderFailure
from trefoil.core import errors
from trefoil.core.carbon import ZoneHealth

FIRST_ANSWER: Final = Refusal(Cause.UNAVAILABLE, "the first answer is awaited")

T = TypeVar("T")


class Polled:
    """`read` returns at once."""

    def __init__(self, provider: LiveProvider, rules: PollRules | str, kept: Path | None = None) -> None:
        """`rules` as text: none but the provider's own pace, with that seed. `kept`: the file that outlives us."""
        self.name, self.speedup, self.licence, self.poll_s = (
            provider.name,
            provider.speedup,
            provider.licence,
            provider.poll_s,
        )
        self.provider = provider
        self.polling = Polling(rules if isinstance(rules, PollRules) else PollRules(provider.poll_s, seed=rules))
        self.refusal: Refusal | None = None
        """What came of the last regular question; None = an answer."""
        self.outcomes = 0
        """Regular questions that are over."""
        self._kept = kept
        self._now_s = 0.0
        self._said: Observation | None = None
        self._said_at_s = NEVER
        self._task: asyncio.Task[None] | None = None
        self._one = asyncio.Lock()
        provider.metered(self._spend)

    @property
    def asked(self) -> int:
        """Questions so far, of both kinds."""
        return self.polling.asked

    @property
    def next_s(self) -> float:
        """When it is asked again."""
        return self.polling.next_s(self._now_s)

    @property
    def awaited(self) -> bool:
        """Nothing was ever said yet, and a question is under way."""
        return self._said is None and self.refusal is None and self._task is not None

    def recall(self, now_s: float) -> None:
        """Know what was asked by an earlier process of this disk."""
        self._now_s = now_s
        spent = read_spent(self._kept)
        self.polling.resume(spent, now_s, spent.epoch)

    def lead(self, now_s: float, epoch: int) -> None:
        """From now on it is ours to ask, under this epoch."""
        self._now_s = now_s
        if not self.polling.in_flight:
            self.polling.resume(read_spent(self._kept), now_s, epoch)
            write_spent(self._kept, self.polling.spent)

    async def read(self, now_s: float) -> Observation:
        self._now_s = now_s
        if self._task is not None and self._task.done():
            self._task.result()  # a bug in an adapter is heard, and not served as an outage
            self._task = None
        if self._task is None and not self._one.locked() and self.polling.due(now_s):
            self.polling.begin(now_s)
            self._task = asyncio.create_task(self._ask(now_s), name=f"ask {self.name}")
        return self.peek(now_s)

    def peek(self, now_s: float) -> Observation:
        """What it has said of now, without a question.

        Raises:
            ProviderFailure: nothing, or nothing that still holds.
        """
        said, refusal = self._said, self.refusal
        if said is not None and (refusal is None or self._holds_on(said, now_s)):
            return self.provider.held(now_s) or said
        found = refusal or (FIRST_ANSWER if self.awaited else self._unasked(now_s))
        raise ProviderFailure(found.cause, found.message, retry_after_s=0.0)

    def history(self, now_s: float, count_max: int) -> tuple[Observation, ...]:
        return self.provider.history(now_s, count_max)

    def held(self, now_s: float) -> Observation | None:
        return self.provider.held(now_s)

    async def forecast(self, now_s: float, horizon_s: float) -> tuple[Observation, ...]:
        return await self._extra(lambda: self.provider.forecast(now_s, horizon_s))

    async def past(self, begin_s: float, end_s: float) -> tuple[Observation, ...]:
        return await self._extra(lambda: self.provider.past(begin_s, end_s))

    def metered(self, spend: Callable[[], None]) -> None:
        """Nobody but this class meters a provider that is polled."""
        raise AssertionError("a polled provider is metered already")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        await self.provider.close()

    async def answered(self) -> None:
        """Wait for the question that is under way, if there is one."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def stand(self, health: ZoneHealth, now_s: float, asking: bool) -> ZoneHealth:
        """Fill in how the questions stand; who only follows asks none."""
        spent, rules = self.polling.asked_today(now_s), self.polling.rules
        health = replace(health, asked_today=spent, quota_per_day=rules.quota_per_day)
        if not asking:
            return health
        next_s = self.polling.next_s(now_s)
        return replace(
            health,
            soft_stale=self._said is None or self.refusal is not None or now_s >= self._said_at_s + self.poll_s,
            breaker=self.polling.breaker(now_s).value,
            next_ask_at_s=next_s if math.isfinite(next_s) else now_s,
            last_error_cause=self.refusal.cause.value if self.refusal is not None else "",
        )

    def _unasked(self, now_s: float) -> Refusal:
        wait_s = self.polling.next_s(now_s) - now_s
        when = f", and may not be for another {wait_s:.0f} s" if 0 < wait_s < math.inf else ""
        return Refusal(Cause.UNAVAILABLE, f"was not asked yet{when}")

    def _holds_on(self, said: Observation, now_s: float) -> bool:
        young = now_s - self._said_at_s <= self.polling.rules.hard_ttl_s
        return young and said.starts_at_s <= now_s < said.ends_at_s

    async def _ask(self, now_s: float) -> None:
        async with self._one:
            try:
                said = await self.provider.read(now_s)
            except ProviderFailure as failure:
                self._refused(failure.refusal, now_s)
            except errors.SettingError as error:  # a key file that was taken away while we ran
                self._refused(Refusal(Cause.SECRET, str(error)), now_s)
            else:
                self._said, self._said_at_s, self.refusal = said, now_s, None
                self.outcomes += 1
                known_after = self.provider.held(said.ends_at_s) is not said
                self.polling.answered(now_s, math.inf if known_after else said.ends_at_s)
            write_spent(self._kept, self.polling.spent)

    def _refused(self, refusal: Refusal, now_s: float) -> None:
        self.refusal = refusal
        self.outcomes += 1
        self.polling.refused(now_s, refusal.retry_after_s)

    async def _extra(self, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Ask for more than what holds now, after whoever is asking.

        Raises:
            ProviderFailure: it does not answer, or may not be asked now.
        """
        await self.answered()
        async with self._one:
            refusal = self.polling.refused_extra(self._now_s)
            if refusal is not None:
                raise ProviderFailure(refusal.cause, refusal.message, retry_after_s=refusal.retry_after_s)
            self.polling.begin(self._now_s, extra=True)
            retry_after_s = 0.0
            try:
                return await ask()
            except ProviderFailure as failure:
                retry_after_s = failure.refusal.retry_after_s
                raise
            finally:
                self.polling.extra_ended(self._now_s, retry_after_s)
                write_spent(self._kept, self.polling.spent)

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
        write_spent(self._kept, self.polling.spent)


def read_spent(path: Path | None) -> Spent:
    """What the disk knows; nothing when it knows nothing, or not in our words."""
    try:
        parsed = json.loads(path.read_text(encoding="utf-8")) if path is not None else {}
    except (OSError, ValueError):  # a file that somebody cut off costs at most one day's quota
        return Spent()
    names = {field.name for field in fields(Spent)}
    if not isinstance(parsed, dict) or not names >= set(parsed):
        return Spent()
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in parsed.values()):
        return Spent()
    return Spent(**parsed)


def write_spent(path: Path | None, spent: Spent) -> None:
    """Whole or not at all; a full disk does not stop the feed."""
    if path is None:
        return
    known = {name: value for name, value in asdict(spent).items() if math.isfinite(value)}
    beside = path.with_suffix(".new")
    try:
        beside.write_text(json.dumps(known), encoding="utf-8")
        beside.replace(path)
    except OSError:  # the quota is kept in memory as well: only a restart forgets it
        return
