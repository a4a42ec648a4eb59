"""A stray value in a stream, well-formed and absurd: it is set aside by name, and its writer's next values count."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from controller.accounting.accountant import Accountant
from controller.role.disk_store import DiskStore
from tests.unit.controller.test_receipt_shell import HOUR, KEYS, World
from tests.unit.controller.test_receipts import sample
from trefoil.core.demand import LoadCell, LoadKey, LoadWindow, ScaleSignal, TableAck
from trefoil.core.device_types import reported_type
from trefoil.core.energy import EnergySample
from trefoil.core.fleet import DeviceStatus, NodeStatus
from trefoil.core.latency import Histogram, build_histogram
from trefoil.core.outside.plausible import power_fault, sample_fault, window_fault
from trefoil.core.outside.stream_order import FOLDED_MAX, HELD_MAX, StreamOrder
from trefoil.runtime.fenced import SetFields, Write
from trefoil.runtime.state import SIGNAL_TTL_S

KEY, TYPE = KEYS[0], "A100-SXM4-40GB"
CELL = LoadCell(LoadKey("digits", "s", KEY), arrived=5, answered=5, items=5, latency=build_histogram([9.0] * 5))


def window(seq: int, starts_s: float, ends_s: float, *cells: LoadCell) -> LoadWindow:
    return LoadWindow("d", 0, seq, starts_s, ends_s, cells=cells)


@pytest.fixture
async def world(tmp_path):
    made = World(tmp_path)
    await made.start()
    return made


def order(step: int = 1) -> tuple[StreamOrder[LoadWindow], list[LoadWindow]]:
    aside: list[LoadWindow] = []
    return StreamOrder(lambda value, _why: aside.append(value), step), aside


@given(
    st.integers(0, 2**63), st.floats(-1e9, 1e9), st.floats(0, 1e6), st.integers(1, 8), st.integers(2, 9)
)  # fmt: skip
def test_no_single_stray_is_counted_or_makes_a_true_window_be_left_out(seq, starts_s, length_s, at, count):
    stray = window(seq, starts_s, starts_s + length_s, CELL)
    true = [window(n, 100.0 + n, 101.0 + n) for n in range(1, count + 9)]
    if stray.seq in (at, at + 1) and abs(stray.starts_at_s - (100.0 + at)) <= 2.0:
        return  # it says what its writer says
    found, aside = order()
    taken = [one for value in (*true[:at], stray, *true[at:]) for one in found.take("w", value, proven=True)]
    assert taken == true
    assert stray in aside or (stray.seq <= at and stray.ends_at_s <= true[at - 1].ends_at_s)


@given(
    st.integers(1, FOLDED_MAX),
    st.lists(st.integers(0, 2**62), max_size=20),
    st.integers(1, 3),
)
@example(50, [7] * 10, 1)
def test_strays_between_true_values_cost_few_of_them_even_after_one_that_was_taken(step, strays, every):
    found, _ = order(FOLDED_MAX)
    true = [window(n, 100.0 + n, 101.0 + n) for n in range(1, 8 + every * len(strays))]
    lie = window(1 + step, 102.0, 103.5, CELL)  # continues the first
    put = iter(window(seq, 1e4 * n, 1e4 * n + 1.0, CELL) for n, seq in enumerate(strays, 1))  # none continues another
    values = [true[0], lie]
    for n, value in enumerate(true[1:]):
        values += [value] if n % every else [one for one in (next(put, None), value) if one is not None]
    taken = [one for value in values for one in found.take("w", value, proven=True)]
    assert len([one for one in true if one not in taken]) <= 2
    assert taken[-3:] == true[-3:]


def test_a_gap_is_believed_once_its_stream_goes_on_and_a_repeat_counts_once():
    found, aside = order()
    one, two, late, later = window(1, 1, 2), window(2, 2, 3), window(9, 20, 21), window(10, 21, 22)
    assert found.take("w", one, proven=True) == (one,)
    assert found.take("w", one) == ()
    assert found.take("w", two) == (two,)
    assert found.take("w", late) == found.take("w", late) == ()
    assert found.holds
    assert found.take("w", later) == (late, later)
    assert not aside
    assert not found.holds


@pytest.mark.parametrize("proven", [False, True])
def test_a_first_value_that_is_stray_gives_way_to_the_live_writer(proven):
    found, aside = order()
    stray, true = window(2**62, 5, 6), [window(n, 5.0 + n, 6.0 + n) for n in range(7, 10)]
    assert found.take("w", stray, proven=proven) == ((stray,) if proven else ())
    assert [one for value in true for one in found.take("w", value)] == true
    assert aside == ([] if proven else [stray])


def test_one_value_of_a_writer_that_does_not_exist_is_never_taken():
    found, aside = order()
    assert [found.take("w", one) for one in [window(1, 1, 2)] * 3] == [(), (), ()]
    assert not aside


def test_folded_samples_continue_and_what_is_held_can_be_released():
    found, _ = order(FOLDED_MAX)
    one, folded, gap = window(1, 1, 2), window(5, 2, 6), window(6, 60, 61)
    assert found.take("w", one, proven=True) + found.take("w", folded) == (one, folded)
    assert found.take("w", gap) == ()
    assert found.release() == (gap,)
    assert found.last["w"] == (6, 61)


def test_of_several_values_that_no_successor_proves_the_newest_few_wait_and_none_is_released():
    found, aside = order()
    strays = [window(10 * n, 100.0 * n, 100.0 * n + 1) for n in range(1, HELD_MAX + 3)]
    assert [found.take("w", one) for one in strays] == [()] * len(strays)
    assert aside == strays[:-HELD_MAX]
    assert found.release() == ()
    assert aside == strays
    assert not found.holds


HISTOGRAMS = {
    "more than answered": build_histogram([9.0] * 6),
    "other buckets": Histogram(1, (600,), (5,), 9.0, 9.0),
    "a count without a bucket": Histogram(1, (), (5,), 9.0, 9.0),
    "negative": Histogram(1, (1,), (5,), -1.0, 9.0),
    "years": Histogram(1, (1,), (5,), 1.0, 1e12),
}
CELLS = {
    "arrived": {"arrived": 2**63},
    "answered": {"answered": 10**9},
    "failed": {"failed_by_code": {"INTERNAL": 2**62}},
    "items": {"items": 2**63},
    "passed items": {"passed_items": 2**63},
    "tokens": {"tokens_out": 2**63},
    "within the SLO": {"within_slo": 6},
    "receipts": {"receipts": 6},
    "joules": {"receipt_j": 1e300},
    "negative joules": {"receipt_j": -1.0},
    "unanswered": {"unanswered": 2**62},
    "unanswered work": {"unanswered_work": 1e300},
    "unanswered joules": {"unanswered_j": 1e300},
    "negative work": {"unanswered_items": -1.0},
    "by second": {"arrived_per_s": (6,)},
} | {name: {"latency": each} for name, each in HISTOGRAMS.items()}


@pytest.mark.parametrize("name", CELLS)
def test_counts_that_cannot_be_are_named(name):
    assert window_fault(window(1, 10, 10.5, CELL)) == ""
    assert window_fault(window(1, 10, 10.5, CELL, replace(CELL, **CELLS[name])))


def test_a_seq_that_nobody_has_counted_to_is_named():
    assert window_fault(window(2**62, 10, 10.5))
    assert sample_fault(replace(sample(KEY, "s", 6.0, 100.0), seq=2**62))


SAMPLES = {
    "another node": {"device": "m/gpu0"},
    "no sum": {"counter_j": 9.0},
    "negative": {"idle_j": -1.0, "counter_j": 5.0},
    "no meter": {"method": 4},
}


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_that_contradict_themselves_are_named(name):
    one = sample(KEY, "s", 6.0, 100.0)
    assert sample_fault(one) == ""
    assert sample_fault(replace(one, **SAMPLES[name]))


@pytest.mark.parametrize("kind", ["A100-SXM4-40GB", "T4", "cpu:64", "unknown:B200:180GiB:1000W", "never heard of"])
def test_no_device_draws_more_than_its_type_in_its_time(kind):
    one = replace(sample(KEY, "s", 0.0, 100.0), counter_j=60.0)
    assert power_fault(one, reported_type(kind)) == ""
    assert "draws" in power_fault(replace(one, counter_j=1e9), reported_type(kind))


def test_a_device_may_draw_its_most_with_a_margin():
    kind = reported_type(TYPE)
    one = sample(KEY, "s", 0.0, 100.0)
    assert power_fault(replace(one, counter_j=1.2 * kind.max_w), kind) == ""
    assert power_fault(replace(one, counter_j=2 * kind.max_w), kind)


async def spoil(world: World, value: LoadWindow | EnergySample) -> None:
    """Append a value to the stream that it belongs to, as anybody who reaches Redis can."""
    if isinstance(value, LoadWindow):
        await world.state.append_unfenced(world.state.keys.load("d", 0), value)
    else:
        await world.state.append(world._agent, world.state.keys.energy("n"), value, 1000)


STRAYS = {
    "seq": lambda now: window(2**40, now, now + 0.5, CELL),
    "seq beyond count": lambda now: window(2**62, now, now + 0.5, CELL),
    "seq a little ahead": lambda now: window(9, now, now + 0.5, CELL),
    "from the future": lambda now: window(9, now + 900, now + 901, CELL),
    "from the past": lambda now: window(9, now - 9e5, now - 9e5 + 1, CELL),
    "of the begin of time": lambda _now: window(9, 1.0, 2.0, CELL),
    "next, ending in the future": lambda now: window(6, now, now + 900, CELL),
    "load of a continent": lambda now: window(6, now, now + 0.5, replace(CELL, arrived=2**60)),
    "joules": lambda now: replace(sample(KEY, "s", 1e9, now + 1)),
    "joules of a day": lambda now: replace(sample(KEY, "s", 1e7, now), starts_at_s=now - 86_000.0),
    "sample's seq": lambda now: replace(sample(KEY, "s", 5.0, now + 1), seq=2**40),
    "sample from the future": lambda now: replace(sample(KEY, "s", 5.0, now + 900), seq=round(now) + 1),
    "sample that lasts into the future": lambda now: replace(
        sample(KEY, "s", 5.0, now + 900), seq=round(now) + 1, starts_at_s=now
    ),
    "a device that is not there": lambda now: replace(sample(KEY, "s", 5.0, now), device="n/gpu77"),
}


@pytest.mark.parametrize("name", STRAYS)
async def test_a_stray_value_changes_no_total_and_blocks_nothing(world, name):
    for number in range(13):
        if number == 5:
            await spoil(world, STRAYS[name](world.clock.now_s()))
        await world.state.put_unfenced(world.state.keys.ack("d", 0), TableAck("d", observed_at_s=world.clock.now_s()))
        await world.second(0.6)
    await world.accountant.flush()
    totals = await world.state.totals(world.state.keys.totals("digits", HOUR))
    assert totals["joules"] == pytest.approx(13 * 6.0)
    assert totals["requests"] == 13 * 10
    assert world.seen.windows.live(world.clock.now_s())
    assert sum(world.seen.windows.arrivals("digits", world.clock.now_s())) == 0


LONG = {
    "joules of a day": lambda now: replace(sample(KEY, "s", 1e7, now), starts_at_s=now - 86_000.0),
    "joules of an hour long past": lambda now: replace(sample(KEY, "s", 1e6, now - 2e5), starts_at_s=now - 2e5 - 3600),
    "requests of a day": lambda now: window(0, now - 86_000.0, now, replace(CELL, arrived=10**9)),
}


@pytest.mark.parametrize("at", [0, 13], ids=["first", "last"])
@pytest.mark.parametrize("name", LONG)
async def test_a_long_interval_without_a_neighbour_changes_no_total(world, name, at):
    """Where nothing stands before it, or nothing comes after it: its node has ended."""
    for number in range(13):
        if number == at:
            await spoil(world, LONG[name](world.clock.now_s()))
        await world.state.put_unfenced(world.state.keys.ack("d", 0), TableAck("d", observed_at_s=world.clock.now_s()))
        await world.second(0.6)
    if at == 13:
        for number in range(20):
            await world.clock.advance(1.0)
            await world.authority._step()
            if number == 4:
                await spoil(world, LONG[name](world.clock.now_s()))
            await world.reader.refresh()
            await world.accountant.refresh(["digits"])
    await world.accountant.flush()
    totals = await world.state.totals(world.state.keys.totals("digits", HOUR))
    assert totals["joules"] == pytest.approx(13 * 6.0)
    assert totals["requests"] == 13 * 10
    assert await world.state.names(world.state.keys.totals_prefix()) == [world.state.keys.totals("digits", HOUR)]


async def goes_on(world: World, folder: Path, lies: list[Write]) -> float:
    """Joules that the books have in the end, where these stood in Redis when another process on that disk began."""
    for _ in range(6):
        await world.second(0.6)
    await world.accountant.flush()
    await world.state.write(world.authority._lease, lies)
    known = (world.settings, world.state, world.authority, world.seen, world.accountant.receipts)
    world.accountant = Accountant(*known, DiskStore(folder, 10), world.metrics, world.clock)
    for _ in range(3):
        await world.second(0.6)
    await world.accountant.flush()
    return (await world.state.totals(world.state.keys.totals("digits", HOUR)))["joules"]


@pytest.mark.parametrize("at", ["1-0", f"{10**13}-0", f"{10**17}-0"])
async def test_strays_in_the_books_of_redis_are_not_gone_on_from_where_the_disk_knows(world, tmp_path, at):
    keys = world.state.keys
    lies = [SetFields(keys.totals("digits", HOUR), {"joules": 1e12}), SetFields(keys.accounted(), {"n": at})]
    assert await goes_on(world, tmp_path, lies) == pytest.approx(9 * 6.0)


async def test_an_end_beyond_that_of_its_stream_books_nothing_twice(world, tmp_path):
    lies = [SetFields(world.state.keys.accounted(), {"n": f"{10**13}-0"})]
    assert await goes_on(world, tmp_path / "empty", lies) == pytest.approx(9 * 6.0, abs=6.1)


async def test_what_was_set_aside_is_said_once_by_key_with_its_count(world):
    for _ in range(3):
        await world.second(0.6)
    for more in (1, 2):
        stray = replace(sample(KEY, "s", 1e9, world.clock.now_s() + more), seq=round(world.clock.now_s()) + 50 * more)
        await spoil(world, stray)
        await world.second(0.6)
    (line,) = world.seen.inputs.set_aside.lines(world.clock.now_s())
    where = f"{world.state.keys.energy('n')} {KEY.device}"
    assert line.startswith(f"{where}: 2 set aside, the last because of 1e+09 J in 1 s")
    assert world.seen.inputs.set_aside.take_counts() == {"sample": 2, "value": 0, "window": 0}
    assert world.seen.inputs.set_aside.take_counts() == {"sample": 0, "value": 0, "window": 0}
    assert world.seen.inputs.set_aside.lines(world.clock.now_s() + 601) == []


async def test_a_window_of_a_worker_that_does_not_exist_is_no_demand(world):
    await world.second(0.6)
    now_s = world.clock.now_s()
    stray = LoadWindow("nobody", 7, 1, now_s - 0.5, now_s, cells=(replace(CELL, arrived=10**5, answered=0, items=0),))
    await world.state.append_unfenced(world.state.keys.load("nobody", 7), stray)
    for _ in range(5):
        await world.second(0.6)
    assert max(world.seen.windows.arrivals("digits", world.clock.now_s())) < 10**5


async def test_what_is_not_read_is_said_by_key(world):
    key = world.state.keys.node("n9")
    await world.state.put(world._agent, key, NodeStatus("n9", devices=(DeviceStatus("n/gpu0"),)))
    await world.second(0.6)
    (line,) = world.seen.inputs.set_aside.lines(world.clock.now_s())
    assert line == f"{key}: 1 set aside, the last because of device 'n/gpu0' is none of n9"
    assert world.seen.inputs.set_aside.take_counts() == {"sample": 0, "value": 1, "window": 0}


@pytest.mark.parametrize(("ttl_s", "counts"), [(None, 0), (60.0, 0), (SIGNAL_TTL_S, 1)])
async def test_a_signal_that_no_agent_renews_wants_nothing(world, ttl_s, counts):
    signal = ScaleSignal("n", KEY.device, ("digits",), "at the top", world.clock.now_s())
    await world.state.put(world._agent, world.state.keys.scale_signal(KEY.device), signal, ttl_s)
    await world.second(0.6)
    assert len(world.seen.inputs.scale_signals) == counts
