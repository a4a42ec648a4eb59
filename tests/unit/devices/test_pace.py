"""Pace files: what the model books is what the driver counts, whatever the moment of reading."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trefoil.core.interference import INTERFERENCE
from trefoil.simulated_node.pace_file import SLOT, SLOTS_AT, PaceEntry, PaceFile, family_crc32

CRC = family_crc32("digits")
MS = 1_000_000


def write_slot(pace, version=4, busy_ns=0, batches=0, items=0, overruns=0, overrun_ns=0, started_ns=0, at=0, crc=CRC):
    with open(pace.path, "r+b") as file:
        file.seek(SLOTS_AT + at * SLOT.size)
        file.write(SLOT.pack(version, crc, busy_ns, batches, items, overruns, overrun_ns, started_ns, 0, 0.0))


@pytest.fixture
def pace(tmp_path):
    file = PaceFile(tmp_path / "pace" / "a.pace", seed=9, entries_max=3)
    file.write_table(1410, [PaceEntry("digits", 4, 1, 25.0, 0.05)])
    yield file
    file.close()


def test_layout_is_the_one_that_models_read(pace):
    raw = pace.path.read_bytes()
    assert len(raw) == 4160 + (3 + 8192) * 40, "with room for families that come later"
    assert raw[:8] == b"TRFPACE2"
    assert struct.unpack_from("<Q", raw, 8) == (2,)  # even: nobody is writing
    assert struct.unpack_from("<III", raw, 16) == (1410, 1, 1)
    assert struct.unpack_from("<Qd", raw, 32) == (9, INTERFERENCE)
    assert raw[64:4160] == bytes(4096)  # slots that nobody has taken
    assert struct.unpack_from("<IIIIddd", raw, 4160) == (CRC, 4, 1, 0, 25.0, 0.05, 1.0)


def test_a_file_is_private_and_gone_after_close(tmp_path):
    file = PaceFile(tmp_path / "b.pace", seed=1, entries_max=1)
    assert file.path.stat().st_mode & 0o777 == 0o600
    file.close()
    assert not file.path.exists()


def test_families_with_the_same_version_and_instances_of_one_are_counted_apart(pace):
    other = family_crc32("yolo")
    for _ in range(2):  # each reading counts what is new, whoever wrote in between
        for at, crc, version, busy_ms in ((0, CRC, 1, 7), (1, other, 1, 30), (2, CRC, 1, 5), (3, other, 17, 2)):
            write_slot(pace, version, busy_ms * MS, batches=1, items=1, at=at, crc=crc)
    found = [(w.family_crc32, w.version, w.busy_s) for w in pace.collect_work(0)]
    assert found == [(CRC, 1, 0.007), (other, 1, 0.030), (CRC, 1, 0.005), (other, 17, 0.002)]
    write_slot(pace, 1, 9 * MS, batches=2, items=2, at=0)
    assert [(w.family_crc32, w.busy_s) for w in pace.collect_work(0)] == [(CRC, 0.002)]


def test_a_batch_in_progress_counts_as_it_runs_and_only_once(pace):
    write_slot(pace, started_ns=1000 * MS)
    assert [w.busy_s for w in pace.collect_work(1010 * MS)] == [0.010]
    assert [w.busy_s for w in pace.collect_work(1020 * MS)] == [0.010]
    write_slot(pace, busy_ns=25 * MS, batches=1, items=3)
    (work,) = pace.collect_work(1040 * MS)
    assert (work.busy_s, work.batches, work.items) == (pytest.approx(0.005), 1, 3)
    assert pace.collect_work(1080 * MS) == []


def test_a_killed_stub_stops_drawing_and_is_not_counted_twice(pace):
    write_slot(pace, started_ns=1 * MS)
    total_s = sum(w.busy_s for t in range(0, 60_000, 40) for w in pace.collect_work(t * MS))
    assert total_s == pytest.approx(2.0)  # then its stub is presumed dead
    write_slot(pace, busy_ns=0, batches=0, started_ns=0)  # the new stub clears what was left
    assert pace.collect_work(60_000 * MS) == []
    write_slot(pace, busy_ns=25 * MS, batches=1, items=1)
    assert [w.busy_s for w in pace.collect_work(60_040 * MS)] == [0.025]


def test_a_slot_taken_anew_counts_from_zero(pace):
    write_slot(pace, busy_ns=500 * MS, batches=20, items=20)
    pace.collect_work(1 * MS)
    write_slot(pace, busy_ns=50 * MS, batches=2, items=2)
    (work,) = pace.collect_work(2 * MS)
    assert (work.busy_s, work.batches) == (0.050, 2)


@given(
    services=st.lists(st.tuples(st.integers(1, 80), st.integers(0, 60), st.integers(1, 8)), min_size=1, max_size=20),
    tick_ms=st.integers(20, 50),
)
def test_whatever_the_ticks_everything_is_counted_once(tmp_path_factory, services, tick_ms):
    pace = PaceFile(tmp_path_factory.mktemp("pace") / "x.pace", seed=1, entries_max=1)
    now, busy, batches, items, counted = 1, 0, 0, 0, []
    events = []
    for service, gap, size in services:
        events += [(now, "start", 0), (now + service, "end", size)]
        now += service + gap
    for t in range(1, now + 2 * tick_ms, tick_ms):
        started = 0
        for at, kind, size in events:
            if at <= t and kind == "start":
                started = at
            elif at <= t:
                busy, batches, items = (busy + at - started, batches + 1, items + size)
                started = 0
        write_slot(pace, busy_ns=busy * MS, batches=batches, items=items, started_ns=started * MS)
        counted += pace.collect_work(t * MS)
        busy = batches = items = 0
    pace.close()
    assert sum(w.busy_s for w in counted) == pytest.approx(sum(s for s, _, _ in services) / 1e3)
    assert sum(w.batches for w in counted) == len(services)
    assert sum(w.items for w in counted) == sum(size for _, _, size in services)
    assert all(0 <= w.busy_s <= tick_ms / 1e3 + 1e-9 for w in counted)
