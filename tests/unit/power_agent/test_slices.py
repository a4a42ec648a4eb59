"""Legal moves only; what is counted when; when a slice may be stopped; when it must prove itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from power_agent.slices.slice_state import Slice
from power_agent.triton.client import VersionCounters
from power_agent.watch.slice_health import ejected_slices, probe_reason
from tests.support.plans import key
from trefoil.core.common import Revision
from trefoil.core.demand import SliceLoad, TableAck
from trefoil.core.fleet import FAILED_LAST, LEGAL_MOVES, Hosted, SliceState

KEY = key("3g.20gb", 0)


def make(state: SliceState = SliceState.PENDING) -> tuple[Slice, list[tuple[SliceState, SliceState]]]:
    moves: list[tuple[SliceState, SliceState]] = []
    part = Slice(KEY, 1, state, 0.0, lambda s, before: moves.append((before, s.state)))
    return part, moves


@given(path=st.lists(st.sampled_from([s for s in SliceState if s]), max_size=12))
def test_exactly_the_legal_moves_are_made(path):
    part, moves = make()
    for state in path:
        before = part.state
        if state in LEGAL_MOVES[before]:
            part.move(state, "because", 5.0)
            assert (part.state, part.why, part.since_s, moves[-1]) == (state, "because", 5.0, (before, state))
        else:
            with pytest.raises(AssertionError, match=f"{before.name} > {state.name}"):
                part.move(state, "because", 5.0)
            assert part.state == before


def test_the_first_cause_of_a_failure_stays():
    part, moves = make(SliceState.STARTING)
    part.fail("first", 1.0)
    part.fail("second", 2.0)
    assert (part.why, part.since_s, len(moves)) == ("first", 1.0, 1)


def test_a_slice_that_is_mended_still_says_why_it_failed_until_it_serves():
    part, _ = make(SliceState.STARTING)
    part.fail("Triton exited with 1", 1.0)
    assert part.status().why == "Triton exited with 1"
    part.move(SliceState.PENDING, "planned", 2.0)
    assert part.status().why == f"planned; {FAILED_LAST}Triton exited with 1"
    part.move(SliceState.STARTING, "planned", 3.0)
    assert part.status().why.endswith("Triton exited with 1")
    part.move(SliceState.READY, "", 4.0)
    assert part.status().why == ""


def test_a_drain_counts_for_one_life_only():
    part, _ = make(SliceState.DRAINING)
    part.drained = True
    part.move(SliceState.FAILED, "died", 1.0)
    assert not part.drained


def counters(version: int = 4, successes: int = 0, busy_s: float = 0.0, failures: int = 0) -> VersionCounters:
    return VersionCounters("toy", version, successes, failures, successes, int(busy_s * 1e9))


def variant_of(family: str, version: int) -> str:
    return f"v{version}"


@pytest.mark.parametrize("successes", [2, 3])
def test_warm_up_after_a_version_was_loaded_again_is_what_its_new_counters_show(successes):
    """As many successes as before the crash, after less work: the counters began again all the same."""
    part, _ = make(SliceState.READY)
    part.record_counters((counters(successes=2, busy_s=5.0),), 1.0)
    part.record_overhead((counters(successes=successes, busy_s=0.5),))
    assert (part.overhead_s, part.overhead_requests) == (pytest.approx(0.5), successes)


def test_failing_calls_are_noticed_until_one_succeeds():
    part, _ = make(SliceState.READY)
    part.record_counters((counters(successes=5),), 1.0)
    assert (part.failing, part.last_success_s) == (False, 1.0)
    part.record_counters((counters(successes=5, failures=2),), 2.0)
    assert (part.failing, part.last_success_s) == (True, 1.0)
    part.record_counters((counters(successes=6, failures=2),), 3.0)
    assert (part.failing, part.last_success_s) == (False, 3.0)


def test_counters_of_an_unloaded_version_are_handed_over_once():
    part, _ = make(SliceState.READY)
    part.hosted = (Hosted("toy", "v1", 1, 0, 1, 1, 8),)
    part.record_counters((counters(4, 10, 1.0), counters(1, 2, 0.1)), 1.0)
    first = part.take_reading(0.4, variant_of)
    assert {w.variant for w in first.work} == {"v4", "v1"}
    part.record_counters((counters(1, 3, 0.2),), 2.0)
    assert {w.variant for w in part.take_reading(0.4, variant_of).work} == {"v1"}


def test_time_in_flight_is_the_work_of_what_triton_does_not_time_and_begins_anew_with_each_load():
    part, _ = make(SliceState.READY)
    part.hosted = (Hosted("toy", "v1", 1, 0, 1, 1, 8), Hosted("other", "v2", 2, 0, 1, 1, 8))
    busy = []
    for serving, families in ((1, {"toy"}), (1, {"toy"}), (1, set()), (4, {"toy"}), (1, {"toy"})):
        part.hosted = (Hosted("toy", f"v{serving}", serving, 0, 1, 1, 8), part.hosted[1])
        part.record_in_flight(families, 0.5)
        part.record_counters((counters(serving, 1, 0.001),), 1.0)
        busy.append({w.variant: w.busy_s for w in part.take_reading(0.4, variant_of).work}[f"v{serving}"])
    assert busy == pytest.approx([0.501, 1.001, 1.001, 0.501, 0.501])


def test_a_reading_without_fresh_counters_says_nothing_about_work():
    part, _ = make(SliceState.READY)
    part.hosted = (Hosted("toy", "v4", 4, 0, 1, 1, 8),)
    part.record_counters((counters(successes=1),), 1.0)
    assert part.take_reading(0.4, variant_of).work
    assert part.take_reading(0.4, variant_of).work == ()


def test_all_that_was_done_since_the_last_reading_may_be_warm_up():
    part, _ = make(SliceState.STARTING)
    part.hosted = (Hosted("toy", "v4", 4, 0, 1, 1, 8),)
    part.record_counters((counters(successes=1, busy_s=0.1),), 1.0)
    part.take_reading(0.4, variant_of)
    part.record_counters((counters(successes=2, busy_s=0.3),), 2.0)  # the meter has asked Triton, but not read yet
    part.record_overhead((counters(successes=3, busy_s=0.4),))
    part.record_counters((counters(successes=3, busy_s=0.4),), 2.0)
    part.move(SliceState.READY, "", 2.0)
    reading = part.take_reading(0.4, variant_of)
    assert reading.overhead_s == pytest.approx(0.3)
    assert reading.overhead_requests == 2
    assert part.take_reading(0.4, variant_of).overhead_requests == 0


def test_warm_up_waits_for_the_reading_that_holds_it_and_goes_with_its_process():
    part, _ = make(SliceState.READY)
    part.hosted = (Hosted("toy", "v4", 4, 0, 1, 1, 8),)
    part.overhead_requests += 1
    part.take_reading(0.4, variant_of)  # Triton did not answer
    part.record_counters((counters(successes=4),), 1.0)
    assert part.take_reading(0.4, variant_of).overhead_requests == 1
    part.overhead_requests += 1
    part.on_process_ended()
    assert part.overhead_requests == 0


def test_what_a_triton_counts_before_it_serves_is_warm_up_before_it_is_noted_as_such():
    part, _ = make(SliceState.STARTING)
    part.hosted = (Hosted("toy", "v4", 4, 0, 1, 1, 8),)
    part.record_counters((counters(successes=2, busy_s=0.4),), 1.0)  # the meter reads between a probe and its note
    reading = part.take_reading(0.4, variant_of)
    assert reading.overhead_requests == reading.work[0].requests == 2


def test_a_reading_says_whether_its_process_was_adopted():
    part, _ = make(SliceState.READY)
    part.adopted = True
    assert part.take_reading(0.4, variant_of).adopted
    part.on_process_ended()
    assert not part.take_reading(0.4, variant_of).adopted


def ack(load: SliceLoad) -> TableAck:
    return TableAck("d", 0, Revision(2, 7, 3), (load,), 100.0)


def test_only_live_workers_eject():
    bad = SliceLoad(KEY, ejected=True)
    assert ejected_slices((ack(bad),), 104.0) == {KEY}
    assert ejected_slices((ack(bad),), 106.0) == frozenset()
    assert ejected_slices((ack(SliceLoad(KEY)),), 100.0) == frozenset()


def test_a_slice_proves_itself_when_somebody_doubts_it_or_it_was_quiet():
    assert probe_reason(False, False, 3.0, 8.0) == ""
    assert "ejected" in probe_reason(True, False, 0.0, 8.0)
    assert "fail" in probe_reason(False, True, 0.0, 8.0)
    assert probe_reason(False, False, 8.04, 8.0) == "no success for 8.0 s"
