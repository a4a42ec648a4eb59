"""When a provider is asked, whatever it answers and however often the process starts again."""

import itertools
import math

from hypothesis import example, given, settings
from hypothesis import strategies as st

from carbon_feed.core.polling import DAY_S, Breaker, Polling, PollLimits

START_S = 1_795_000_000.0

rules = st.builds(
    PollLimits,
    poll_s=st.sampled_from([60.0, 300.0, 900.0]),
    quota_per_day=st.sampled_from([0, 1, 3, 24, 50, 400]),
    breaker_failures=st.integers(1, 6),
    seed=st.sampled_from(["a", "b"]),
)
waits = st.sampled_from([0.0, 0.5, 7.0, 60.0, 300.0, 901.0, 3600.0, 20_000.0, 86_400.0])
steps = st.lists(
    st.one_of(
        st.tuples(st.just("wait"), waits),
        st.tuples(st.just("ask"), st.sampled_from(["answered", "ends soon", "refused", "refused, wait"]), waits),
        st.tuples(st.just("extra"), st.sampled_from([0.0, 120.0, 86_400.0]), st.integers(1, 4)),
        st.tuples(st.just("restart"), st.booleans()),
    ),
    max_size=120,
)


class Played:
    """One poller and what is known of its requests."""

    def __init__(self, wanted: PollLimits) -> None:
        self.rules, self.now_s, self.told_to_wait_s = wanted, START_S, -math.inf
        self.polling = Polling(wanted)
        self.sent: list[float] = []

    def request(self) -> bool:
        if not self.polling.spend(self.now_s):
            return False
        assert self.now_s >= self.told_to_wait_s, "Retry-After"
        self.sent.append(self.now_s)
        return True

    def ask(self, ending: str, wait_s: float) -> None:
        """As the shell does: only when it is due, and nothing else in between."""
        if not self.polling.due(self.now_s):
            return
        self.polling.begin(self.now_s)
        assert not self.polling.due(self.now_s), "one question at a time"
        assert self.polling.extra_refusal(self.now_s) is not None, "of either kind"
        asked_s = self.now_s
        sent = self.request()
        self.now_s += min(wait_s, 10.0)  # the exchange
        if ending == "answered" and sent:
            self.polling.answered(asked_s)
        elif ending == "ends soon" and sent:
            self.polling.answered(asked_s, asked_s + wait_s)
        else:
            retry_s = wait_s if ending == "refused, wait" else 0.0
            self.polling.refused(asked_s, retry_s)
            self.told_to_wait_s = max(self.told_to_wait_s, asked_s + retry_s if retry_s else -math.inf)

    def extra(self, retry_s: float, requests: int) -> None:
        if self.polling.extra_refusal(self.now_s) is not None:
            return
        assert self.polling.breaker(self.now_s) is Breaker.CLOSED
        self.polling.begin(self.now_s, extra=True)
        assert not self.polling.due(self.now_s)
        for _ in range(requests):
            self.request()
        self.polling.extra_ended(self.now_s, retry_s)
        self.told_to_wait_s = max(self.told_to_wait_s, self.now_s + retry_s if retry_s else -math.inf)


@settings(max_examples=150, deadline=None)
@given(rules, steps)
@example(PollLimits(60.0, 3), [("ask", "refused", 0.0), ("wait", 86_400.0)] * 9)
def test_never_above_the_quota_never_two_and_never_too_early(wanted, played):
    one = Played(wanted)
    for step in played:
        match step:
            case ("wait", seconds):
                one.now_s += seconds
            case ("ask", ending, seconds):
                one.ask(ending, seconds)
            case ("extra", retry_s, requests):
                one.extra(retry_s, requests)
            case ("restart", somebody_else):
                kept = one.polling.usage
                one.polling = Polling(wanted)
                one.polling.resume(kept, one.now_s, kept.epoch + (2 if somebody_else else 1))
        assert one.polling.next_s(one.now_s) - one.now_s <= DAY_S + 5 * wanted.poll_s
    by_day: dict[int, int] = {}
    for at_s in one.sent:
        by_day[int(at_s // DAY_S)] = by_day.get(int(at_s // DAY_S), 0) + 1
    if wanted.quota_per_day:
        assert max(by_day.values(), default=0) <= wanted.quota_per_day


@given(st.sampled_from([1, 5, 24, 96, 1000]), st.sampled_from([60.0, 900.0]), st.floats(0.0, 0.99))
def test_a_quota_is_spread_over_what_is_left_of_the_day(quota, poll_s, gone):
    one = Played(PollLimits(poll_s, quota))
    midnight_s = (START_S // DAY_S + 1) * DAY_S
    begin_s = one.now_s = midnight_s - DAY_S * (1 - gone)
    while one.now_s < midnight_s:
        one.ask("ends soon", 0.0)
        one.now_s = max(one.now_s + 1.0, one.polling.next_s(one.now_s))
    wanted = [at_s for at_s in one.sent if at_s < midnight_s]
    assert len(wanted) <= quota
    gaps = [after - before for before, after in itertools.pairwise(wanted)]
    assert min(gaps, default=math.inf) >= min(0.2 * poll_s, (midnight_s - begin_s) / quota) - 1.0
    if len(wanted) == quota:  # it was the quota that limited: the last part of the day is not without answers
        assert midnight_s - wanted[-1] <= 2 * (midnight_s - begin_s) / quota + poll_s * 1.1 + 1.0


def test_whoever_takes_over_counts_what_the_one_before_may_have_spent():
    noon_s = (START_S // DAY_S) * DAY_S + DAY_S / 2
    polling = Polling(PollLimits(300.0, 48))
    polling.resume(polling.usage, noon_s, epoch=7)
    assert polling.requests_left(noon_s) == 24
    assert polling.next_s(noon_s) == noon_s + 1800.0
    polling.resume(polling.usage, noon_s + DAY_S / 2, epoch=8)
    assert polling.requests_left(noon_s + DAY_S / 2) == 48, "a new day"


def test_the_breaker_opens_lets_one_probe_through_and_closes():
    one = Played(PollLimits(300.0, breaker_failures=3))
    for failures in range(1, 4):
        one.now_s = max(one.now_s, one.polling.next_s(one.now_s))
        one.ask("refused", 0.0)
        assert one.polling.failures == failures
    assert one.polling.breaker(one.now_s) is Breaker.OPEN
    assert "only a probe" in one.polling.extra_refusal(one.now_s).message
    one.now_s = one.polling.next_s(one.now_s)
    assert one.polling.breaker(one.now_s) is Breaker.HALF_OPEN
    one.polling.begin(one.now_s)
    assert one.polling.breaker(one.now_s) is Breaker.HALF_OPEN
    one.polling.refused(one.now_s)
    assert one.polling.breaker(one.now_s) is Breaker.OPEN, "the probe failed"
    one.now_s = one.polling.next_s(one.now_s)
    one.ask("answered", 0.0)
    assert one.polling.breaker(one.now_s) is Breaker.CLOSED


def test_extra_questions_get_a_quarter_of_the_quota_in_step_with_the_day():
    one = Played(PollLimits(300.0, 40))
    one.now_s = (START_S // DAY_S) * DAY_S
    for _ in range(24 * 4):
        one.extra(0.0, 1)
        one.now_s += 899.0
    assert len(one.sent) == 10


def test_a_clock_that_was_set_back_does_not_silence_the_poller():
    one = Played(PollLimits(300.0, 24))
    one.ask("refused, wait", 3600.0)
    one.now_s -= 40 * DAY_S
    assert one.polling.due(one.now_s)
