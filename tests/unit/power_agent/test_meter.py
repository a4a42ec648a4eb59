"""Conservation over any history: what the samples hold is what the counter counted, resets and restarts included."""

import dataclasses
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from power_agent.energy.core.meter import NOISE_J, MeterState, advance, recover
from power_agent.slices.core.attribution import DeviceReading, SliceReading, Work
from tests.support.plans import key
from trefoil.core.accounting import active_j
from trefoil.core.energy import AttributionMethod, EnergyMethod, EnergySample
from trefoil.core.fleet import DeviceState

GPU = "node0/gpu0"
IDLE_W = 55.0
KEYS = (key("4g.20gb", 0), key("3g.20gb", 4))
SHARES = (56 / 98, 42 / 98)


def reading(at_s: float, counter_j: float | None, *slices: SliceReading, **more) -> DeviceReading:
    fields = {
        "device": GPU,
        "at_s": 1e9 + at_s,
        "monotonic_s": 100 + at_s,
        "driver": "boot/1",
        "counter_j": counter_j,
        "baseline_w": IDLE_W,
        "active_w_max": 345.0,
        "power_max_w": 400.0,
        "state": DeviceState.AWAKE,
        "clock_mhz": 1410,
        "serving_s": 1.0,
        "slices": slices,
    }
    return DeviceReading(**{**fields, **more})


def part(index: int, busy_s: float, requests: int = 0, **more) -> SliceReading:
    fields = {
        "key": KEYS[index],
        "generation": 1,
        "incarnation": "a",
        "sm_share": SHARES[index],
        "serving": True,
        "work": (Work("toy", "toy-l", busy_s, requests),),
    }
    return SliceReading(**{**fields, **more})


def meter(*readings: DeviceReading, state: MeterState | None = None) -> tuple[MeterState, list[EnergySample]]:
    state, samples = state or MeterState(GPU), []
    for one in readings:
        state, sample = advance(state, one, "node0", True)
        if sample is not None:
            samples.append(sample)
    return state, samples


@st.composite
def histories(draw):
    """Readings of a device whose counter, slices, Tritons, driver and agent come and go."""
    at_s, counter_j, driver, readings, total_j = 0.0, draw(st.floats(0, 1e9)), 1, [], 0.0
    busy, requests, generation, incarnation = [0.0, 0.0], [0, 0], [1, 1], [1, 1]
    first = True
    for _ in range(draw(st.integers(2, 12))):
        length_s = draw(st.floats(0.01, 30))
        at_s += length_s
        event = draw(st.sampled_from(("none", "none", "reset", "driver", "restart", "swap", "recreate", "no_stats")))
        spent_j = draw(st.floats(0, 400)) * length_s
        if event == "reset" and spent_j >= counter_j - NOISE_J:
            event = "none"  # a counter that has reached its old value again, or nearly, does not show the reset
        if event in ("reset", "driver"):
            counter_j, driver = 0.0, driver + (event == "driver")
        counter_j += spent_j
        total_j += 0.0 if first else spent_j
        slices = []
        for index in range(2):
            if event == "swap":
                busy[index], requests[index], incarnation[index] = 0.0, 0, incarnation[index] + 1
            if event == "recreate":
                busy[index], generation[index] = 0.0, generation[index] + 1
            done_s = draw(st.floats(0, 1)) * length_s
            busy[index] += done_s
            requests[index] += draw(st.integers(0, 50))
            one = part(
                index,
                busy[index],
                requests[index],
                generation=generation[index],
                incarnation=str(incarnation[index]),
                serving=draw(st.booleans()),
                overhead_s=draw(st.sampled_from((0.0, done_s / 2, done_s * 2, -done_s))),
                overhead_requests=draw(st.integers(0, 3)),
            )
            if draw(st.booleans()):
                slices.append(dataclasses.replace(one, work=()) if event == "no_stats" else one)
        # A restarted agent has not watched; a driver that was loaded again meanwhile leaves a gap, which it may.
        serving_s = None if event == "restart" else draw(st.floats(0, 1)) * length_s
        readings.append(
            reading(
                at_s,
                counter_j,
                *slices,
                driver=f"boot/{driver}",
                serving_s=serving_s,
                foreign=draw(st.booleans()),
            )
        )
        first = False
    return readings, total_j


@given(history=histories())
def test_no_joule_is_lost_or_invented_over_any_history(history):
    readings, total_j = history
    _, samples = meter(*readings)
    assert sum(s.counter_j for s in samples) == pytest.approx(total_j, rel=1e-9, abs=1e-3)
    for sample in samples:
        parts = [p.active_j for p in sample.slices]
        assert min([*parts, sample.idle_j, sample.unallocated_j]) >= 0
        assert sum(parts) + sample.idle_j + sample.unallocated_j == pytest.approx(sample.counter_j, rel=1e-6, abs=1e-6)
        for one in sample.slices:
            assert sum(h.active_j for h in one.hosted) == pytest.approx(one.active_j, rel=1e-9, abs=1e-9)
            assert all(h.requests >= 0 and h.compute_s >= 0 for h in one.hosted)


@given(history=histories())
def test_samples_are_numbered_without_a_gap_and_join_in_time(history):
    readings, _ = history
    _, samples = meter(*readings, state=MeterState(GPU, seq=41))
    assert [s.seq for s in samples] == list(range(42, 42 + len(samples)))
    for before, after in pairwise(samples):
        assert after.starts_at_s >= before.ends_at_s


@given(history=histories(), cut=st.integers(1, 11))
def test_a_state_that_went_through_the_disk_continues_the_same(history, cut):
    from trefoil.runtime import codec

    readings, _ = history
    state, samples = meter(*readings[:cut])
    restored = codec.from_json(MeterState, codec.to_json(state))
    assert restored == state
    _, rest = meter(*readings[cut:], state=restored)
    assert samples + rest == meter(*readings)[1]


def test_idle_power_is_the_devices_and_the_rest_goes_by_busy_seconds_and_size():
    _, (sample,) = meter(
        reading(0, 1000, part(0, 10), part(1, 5)), reading(1, 1155, part(0, 10.6), part(1, 5.8), clock_mhz=1400)
    )
    weights = (0.6 * SHARES[0], 0.8 * SHARES[1])
    assert sample.idle_j == pytest.approx(55)
    own = {p.key: p.active_j for p in sample.slices}
    assert own == pytest.approx({k: 100 * w / sum(weights) for k, w in zip(KEYS, weights, strict=True)})
    assert sample.unallocated_j == pytest.approx(0, abs=1e-9)
    assert (sample.clock_mhz_mean, sample.attribution) == (1405, AttributionMethod.TRITON_COMPUTE)


def test_one_busy_slice_gets_the_whole_rest():
    _, (sample,) = meter(reading(0, 0, part(0, 0)), reading(1, 155, part(0, 0.01)))
    assert active_j(sample) == pytest.approx(100)
    assert sample.attribution == AttributionMethod.SOLE


def test_without_a_slice_that_serves_everything_is_unallocated():
    _, (sample,) = meter(reading(0, 0), reading(1, 35, serving_s=0.0))
    assert (sample.idle_j, sample.unallocated_j) == (0, pytest.approx(35))


def test_idle_shrinks_to_the_counter():
    _, (sample,) = meter(reading(0, 0, part(0, 0)), reading(1, 40, part(0, 0.5)))
    assert (sample.idle_j, active_j(sample), sample.unallocated_j) == (pytest.approx(40), 0, 0)


def test_warm_up_serves_nobody():
    before = reading(0, 0, part(0, 0), part(1, 0, serving=False))
    now = reading(1, 155, part(0, 0.5, 9, overhead_s=0.5, overhead_requests=1), part(1, 0.3, serving=False))
    _, (sample,) = meter(before, now)
    assert active_j(sample) == 0
    assert sample.unallocated_j == pytest.approx(100)
    assert {p.key: p.hosted[0].requests for p in sample.slices} == {KEYS[0]: 8, KEYS[1]: 0}


def test_a_foreign_client_pays_for_what_our_work_cannot_have_drawn():
    before, now = reading(0, 0, part(0, 0)), reading(1, 355, part(0, 0.1))
    _, (ours,) = meter(before, now)
    _, (shared,) = meter(before, dataclasses.replace(now, foreign=True))
    assert active_j(ours) == pytest.approx(300)
    assert active_j(shared) == pytest.approx(345 * 0.1 * SHARES[0])
    assert shared.unallocated_j == pytest.approx(300 - active_j(shared))


def test_an_agent_that_comes_back_books_the_whole_gap():
    state, _ = meter(reading(0, 1000, part(0, 10)), reading(1, 1100, part(0, 10.5)))
    _, (gap,) = meter(reading(61, 1100 + 60 * 100, part(0, 40.5), serving_s=None), state=state)
    assert gap.counter_j == pytest.approx(6000)
    assert gap.idle_j == pytest.approx(60 * 55)
    assert (gap.starts_at_s, gap.ends_at_s) == (1e9 + 1, 1e9 + 61)


def test_another_driver_load_while_nobody_watched_leaves_a_gap():
    state, _ = meter(reading(0, 1000, part(0, 10)), reading(1, 1100, part(0, 10.5)))
    after, none = meter(reading(61, 500, driver="boot/2", serving_s=None), state=state)
    assert none == []
    _, (sample,) = meter(reading(62, 600, driver="boot/2"), state=after)
    assert sample.counter_j == pytest.approx(100)


def test_a_reload_that_was_watched_counts_what_the_new_counter_shows():
    _, (sample,) = meter(reading(0, 1000), reading(1, 30, driver="boot/2"))
    assert (sample.counter_j, sample.counter_resets) == (30, 1)


@pytest.mark.parametrize(
    ("shown_j", "covered_s", "driver"),
    [(55 * 20, 20, "1"), (55 * 20, 20, "2"), (0.0, 1, "2"), (300 * 600, 600, "1"), (1e6 + 55 * 600, 600, "1")],
    ids=[
        "a reset",
        "a new driver load",
        "an integral that has just begun",
        "busy since the reset",
        "the counter went on",
    ],
)
def test_time_before_a_reset_is_a_gap_and_no_sample_covers_it(shown_j, covered_s, driver):
    """A GPU is lost for ten minutes in which it serves nothing."""
    state, _ = meter(reading(0, 1e6 - 50), reading(1, 1e6))
    back = reading(601, shown_j, driver=f"boot/{driver}", serving_s=0.0)
    _, (sample, after) = meter(back, reading(602, shown_j + 55, driver=f"boot/{driver}"), state=state)
    assert sample.counter_j == sample.unallocated_j == pytest.approx(shown_j - (1e6 if shown_j > 1e6 else 0))
    assert sample.ends_at_s - sample.starts_at_s == covered_s
    assert sample.ends_at_s == after.starts_at_s == 1e9 + 601
    assert (sample.uncertainty_ratio == 1.0) == bool(sample.counter_resets)
    assert after.uncertainty_ratio < 1.0


def test_a_triton_that_did_not_answer_is_caught_up_with():
    silent = dataclasses.replace(part(0, 0), work=())
    _, samples = meter(
        reading(0, 0, part(0, 1, 10)), reading(1, 100, silent), reading(2, 300, part(0, 2.5, 30)), reading(3, 355)
    )
    assert [sum(h.compute_s for p in s.slices for h in p.hosted) for s in samples] == pytest.approx([0, 1.5, 0])
    assert [sum(h.requests for p in s.slices for h in p.hosted) for s in samples] == [0, 20, 0]


def test_a_process_that_was_replaced_within_one_interval_counts_in_both_lives():
    before = reading(0, 0, part(0, 1.0, 10))
    now = reading(1, 155, part(0, 1.2, 12), part(0, 0.3, 4, incarnation="b"))
    _, (sample,) = meter(before, now)
    assert len(sample.slices) == 1
    assert sample.slices[0].hosted[0].compute_s == pytest.approx(0.5)
    assert sample.slices[0].hosted[0].requests == 6
    assert sample.slices[0].active_j == pytest.approx(100)


def test_a_stopped_meter_says_so_and_still_counts_work():
    _, (sample,) = meter(reading(0, None, part(0, 0)), reading(1, None, part(0, 0.5, 7)))
    assert (sample.method, sample.counter_j, active_j(sample)) == (EnergyMethod.NONE, 0, 0)
    assert sample.slices[0].hosted[0].requests == 7


@pytest.mark.parametrize(
    ("shown_j", "booked_j", "resets"),
    [(39.5, 0.0, 0), (38.5, 38.5, 1)],
    ids=["less than a joule below: a wobble that waits for its mark", "more: a reset that shows what was spent"],
)
def test_a_counter_that_went_back_is_a_wobble_or_a_reset(shown_j, booked_j, resets):
    _, (first, second) = meter(reading(0, 40), reading(1, shown_j), reading(2, 50))
    assert (first.counter_j, second.counter_resets) == (booked_j, resets)
    assert second.counter_j == (50 - shown_j if resets else 50 - 40)


def test_readings_of_another_device_or_from_the_past_are_bugs():
    with pytest.raises(AssertionError):
        advance(MeterState("node0/gpu1"), reading(0, 0), "node0", True)
    state, _ = meter(reading(5, 0))
    with pytest.raises(AssertionError, match="time went back"):
        advance(state, reading(4, 0), "node0", True)


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
def test_a_successor_on_another_calendar_meters_the_time_that_has_passed(step_s):
    state, _ = meter(reading(0, 1000.0), reading(1, 1100.0))
    after = (reading(3, 1400.0, serving_s=None), reading(4, 1500.0))
    stepped = (dataclasses.replace(one, at_s=one.at_s + step_s) for one in after)
    _, [first, second] = meter(*stepped, state=state)
    assert (first.starts_at_s - step_s, first.ends_at_s - step_s, first.counter_j) == (1e9 + 1, 1e9 + 3, 300.0)
    assert (second.starts_at_s, second.ends_at_s, second.counter_j) == (first.ends_at_s, 1e9 + 4 + step_s, 100.0)


# --- the log is lost: the meter continues from the last sample that was published
# ---------------------------------------

LAST = EnergySample(
    node="n", device="n/gpu0", seq=1_000, starts_at_s=999.0, ends_at_s=1000.0, counter_j=90.0, idle_j=60.0,
    clock_mhz_mean=1410.0, counter_resets=2, mark_j=5_000.0, origin="boot/1",
)  # fmt: skip


def test_a_meter_without_its_log_goes_on_from_the_last_published_counter():
    state = recover(None, LAST, 1003.0, 503.0)
    assert state is not None
    assert (state.seq, state.counter_j, state.monotonic_s, state.counter_resets) == (1_000, 5_000.0, 500.0, 2)
    assert (state.recovered, state.serving, state.marks) == (True, True, ())


@pytest.mark.parametrize(
    ("sample", "now_s"),
    [(LAST, 1700.0), (LAST, 990.0), (replace(LAST, origin=""), 1003.0)],
)
def test_a_gap_that_cannot_be_told_stays_one_and_its_numbers_never_come_twice(sample, now_s):
    assert recover(None, sample, now_s, 503.0) == MeterState(LAST.device, seq=1_000)


@pytest.mark.parametrize("seq", [1_000, 1_001])
def test_a_log_that_knows_more_than_was_published_is_gone_on_from(seq):
    assert recover(MeterState(LAST.device, seq=seq), LAST, 1003.0, 503.0) is None


def test_an_older_log_is_not_gone_on_from_or_its_joules_would_count_twice():
    older = MeterState(LAST.device, seq=900, counter_j=4_000.0, monotonic_s=400.0, driver="boot/1")
    state = recover(older, LAST, 1003.0, 503.0)
    assert state is not None
    assert (state.counter_j, state.seq) == (5_000.0, 1_000)


def test_a_sample_that_no_agent_can_have_counted_to_is_not_believed():
    assert recover(None, replace(LAST, seq=2**62), 1003.0, 503.0) is None


def ran(busy_s: float, requests: int, **more) -> SliceReading:
    """The first slice, whose Triton ran before this agent; without counters where they could not be read."""
    return part(0, busy_s, requests, adopted=True, **more)


UNREAD = ran(0, 0, work=())


@pytest.mark.parametrize("state", [MeterState(GPU), recover(None, replace(LAST, device=GPU), 1001.0, 100.0)])
@pytest.mark.parametrize(
    ("seen", "requests"),
    [
        ((ran(50, 500), ran(51, 503)), 3),
        ((UNREAD, ran(50, 500), ran(51, 503)), 3),
        ((UNREAD, UNREAD, UNREAD, ran(50, 500), ran(51, 503)), 3),
        ((None, None, ran(50, 500), ran(51, 503)), 3),
        ((ran(50, 500), UNREAD, UNREAD, ran(51, 503)), 3),
        ((ran(50, 500), UNREAD, ran(0.5, 2)), 2),
        ((UNREAD, ran(0.5, 2), ran(1, 4)), 2),
        ((ran(50, 500), ran(51, 503, work=(*ran(51, 503).work, Work("toy", "toy-s", 0.5, 2)))), 5),
        ((UNREAD, part(0, 0.5, 2, incarnation="b"), part(0, 1, 4, incarnation="b")), 4),
        ((UNREAD, part(0, 0, 0, generation=2, work=()), part(0, 1, 4, generation=2)), 4),
        ((ran(0.5, 2, incarnation="b"), part(0, 1, 4, incarnation="c")), 4),
    ],
    ids=[
        "read at once", "not read at first", "not read three times", "adopted late", "not read later", "loaded again",
        "loaded again before it was read", "another model loaded", "process replaced", "made again", "replaced twice",
    ],
)  # fmt: skip
def test_without_its_log_the_meter_books_what_was_counted_since_it_first_read_a_triton(state, seen, requests):
    others = (part(1, 100 + index, 1000 + index, adopted=True) for index in range(len(seen)))
    parts = [tuple(one for one in pair if one is not None) for pair in zip(seen, others, strict=True)]
    _, samples = meter(*(reading(1 + at, 5_000 + 155 * at, *pair) for at, pair in enumerate(parts)), state=state)
    booked = [(part.key, h.requests) for one in samples for part in one.slices for h in part.hosted]
    assert sum(done for key, done in booked if key == KEYS[0]) == requests
    assert sum(done for key, done in booked if key == KEYS[1]) == len(seen) - 1


def test_an_interval_in_which_a_triton_was_first_read_is_not_quiet_and_its_split_uncertain():
    other = part(1, 9, 9, adopted=True)
    seen = enumerate((UNREAD, ran(50, 500), ran(50, 500)))
    state, samples = meter(*(reading(at, 60 * at, one, other, learn_baseline=True) for at, one in seen))
    assert [one.uncertainty_ratio for one in samples] == [1.0, 0.01]
    assert state.baseline.quiet_s == 1.0


def as_seen_from(readings: list[DeviceReading], at: int) -> list[DeviceReading]:
    """As an agent sees them that starts at one of the readings: what ran before it is adopted."""
    before = {(one.key, one.generation, one.incarnation) for seen in readings[:at] for one in seen.slices}
    return [
        replace(seen, slices=tuple(
            replace(one, adopted=index >= at and (one.key, one.generation, one.incarnation) in before)
            for one in seen.slices
        ))
        for index, seen in enumerate(readings)
    ]  # fmt: skip


NOT_READ_AT_FIRST = (
    [reading(at, 155.0 * at, part(0, at, 10 * at), work) for at, work in enumerate([
        part(1, 0, 0), part(1, 1, 10), part(1, 2, 20, work=()), part(1, 3, 30, work=()), part(1, 4, 40),
    ])], 620.0,
)  # fmt: skip


@given(history=histories(), lost_at=st.integers(0, 11))
@example(history=NOT_READ_AT_FIRST, lost_at=2)
def test_wherever_the_log_is_lost_no_joule_and_no_request_is_booked_twice_or_lost(history, lost_at):
    readings, _ = history
    whole, lossy = MeterState("node0/gpu0"), MeterState("node0/gpu0")
    booked: dict[str, list[EnergySample]] = {"whole": [], "lossy": []}
    for index, (one, by_next) in enumerate(zip(readings, as_seen_from(readings, lost_at), strict=True)):
        if index == lost_at and booked["lossy"]:
            last = booked["lossy"][-1]
            state = recover(None, last, last.ends_at_s, lossy.monotonic_s)
            lossy = state if state is not None else lossy
            assert lossy.recovered
        whole, sample = advance(whole, one, "node0", simulated=True)
        lossy, other = advance(lossy, by_next, "node0", simulated=True)
        booked["whole"] += [sample] if sample is not None else []
        booked["lossy"] += [other] if other is not None else []

    def sums(samples: list[EnergySample]) -> tuple[float, int]:
        requests = sum(h.requests for one in samples for part in one.slices for h in part.hosted)
        return sum(one.counter_j for one in samples), requests

    assert sums(booked["lossy"])[0] == pytest.approx(sums(booked["whole"])[0], rel=1e-9, abs=1e-3)
    assert sums(booked["lossy"])[1] <= sums(booked["whole"])[1]
    assert [s.seq for s in booked["lossy"]] == [s.seq for s in booked["whole"]]
