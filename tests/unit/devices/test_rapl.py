"""CPU package energy by powercap files: wraps, restarts, and what cannot be known."""

import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from power_agent.devices import rapl
from power_agent.devices.rapl import RaplCounter, RaplUnavailable
from tests.support.powercap import RANGE_UJ, Powercap
from trefoil.runtime.clock import ManualClock


class Reading(NamedTuple):
    joules: float
    identity: str


def read(counter):
    return Reading(counter.energy_j(), counter.identity)


@pytest.fixture
def clock():
    return ManualClock(1_000_000.0)


def test_a_wrap_goes_on_counting(tmp_path, clock):
    tree = Powercap(tmp_path, start_uj=RANGE_UJ - 1_000_000)
    counter = RaplCounter(tmp_path, clock, "boot")
    read(counter)
    clock.move(1.0)
    tree.draw(50.0)
    assert tree.true_uj[0] > RANGE_UJ
    assert read(counter).joules == pytest.approx(50.0)


def test_a_counter_that_starts_again_is_not_taken_for_a_wrap(tmp_path, clock):
    tree = Powercap(tmp_path, start_uj=RANGE_UJ // 2)
    counter = RaplCounter(tmp_path, clock, "boot")
    before = read(counter)
    clock.move(1.0)
    tree.true_uj[0] = 0
    tree.show()
    after = read(counter)
    assert after.joules == 0
    assert after.identity != before.identity


def test_a_pause_that_may_hide_wraps_starts_anew(tmp_path, clock):
    tree = Powercap(tmp_path)
    counter = RaplCounter(tmp_path, clock, "boot")
    assert counter.gap_max_s == pytest.approx(262.1, abs=0.1)
    before = read(counter)
    clock.move(263.0)
    tree.draw(10.0)
    assert read(counter).identity != before.identity


def test_a_successor_goes_on_where_the_last_reading_was_kept(tmp_path, clock):
    tree, memory = Powercap(tmp_path / "powercap"), tmp_path / "state" / "rapl.json"
    first = RaplCounter(tree.root, clock, "boot", memory)
    before = read(first)
    for _ in range(3):  # not kept: less than 30 s since the last time
        clock.move(5.0)
        tree.draw(100.0)
        last = read(first)
    clock.move(20.0)
    tree.draw(900.0)
    after = read(RaplCounter(tree.root, clock, "boot", memory))
    assert (last.joules, after.joules) == (pytest.approx(300.0), pytest.approx(1200.0))
    assert after.identity == before.identity
    assert read(RaplCounter(tree.root, clock, "another boot", memory)).identity != before.identity


def test_a_memory_that_is_damaged_is_passed_over(tmp_path, clock):
    tree, memory = Powercap(tmp_path / "powercap"), tmp_path / "rapl.json"
    memory.write_text("{")
    assert read(RaplCounter(tree.root, clock, "boot", memory)).joules == 0


def test_no_package_and_no_permission_say_what_to_do(tmp_path, clock, monkeypatch):
    with pytest.raises(RaplUnavailable, match="virtual machines have no RAPL"):
        RaplCounter(tmp_path / "absent", clock, "boot")

    def refuse(zone):
        raise PermissionError(13, "Permission denied")

    tree = Powercap(tmp_path / "powercap")
    monkeypatch.setattr(rapl, "read_zone", refuse)
    with pytest.raises(RaplUnavailable, match=r"Permission denied.*run as root"):
        RaplCounter(tree.root, clock, "boot")


@settings(max_examples=20, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.floats(0.2, 60.0), st.floats(0.0, 900.0), st.floats(0.0, 900.0), st.booleans()), max_size=12
    ),
    start_uj=st.integers(0, 65_532_610_987),
)
def test_whatever_happens_the_count_is_the_truth_or_begins_anew(steps, start_uj):
    """Never negative, never falling; pauses up to a wrap lose nothing, also across a restart of the agent."""
    with tempfile.TemporaryDirectory() as folder:
        clock, memory = ManualClock(), Path(folder) / "rapl.json"
        tree = Powercap(Path(folder) / "powercap", 2, range_uj=65_532_610_987, start_uj=start_uj)
        counter = RaplCounter(tree.root, clock, "boot", memory)
        first = read(counter)
        drawn_j = 0.0
        for pause_s, watts_0, watts_1, restart in steps:
            clock.move(pause_s)
            tree.draw(watts_0 * pause_s, watts_1 * pause_s)
            drawn_j += (watts_0 + watts_1) * pause_s
            if restart:
                counter.save()
                counter = RaplCounter(tree.root, clock, "boot", memory)
            reading = read(counter)
            assert reading.identity == first.identity
            assert reading.joules == pytest.approx(drawn_j, abs=1e-4)
