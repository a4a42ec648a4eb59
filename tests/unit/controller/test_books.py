"""What is booked is neither lost nor booked again, whichever of disk, Redis and clock the next controller finds."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from controller.accounting.core.budgets import spent
from controller.role.disk_store import DiskStore
from controller.role.kept_files import KeptFiles
from controller.role.leadership import NO_KEYS
from controller.role.state_shapes import KeptBooks, KeptSpend
from tests.unit.controller.test_receipt_shell import HOUR, KEYS, World
from tests.unit.controller.test_receipts import sample
from trefoil.core.demand import LoadCell, LoadKey, LoadWindow
from trefoil.core.energy import EnergySample
from trefoil.core.errors import InvalidInput
from trefoil.core.objective import Budget
from trefoil.runtime.fenced import Delete, SetFields, Write
from trefoil.runtime.state import LOADS_MAX

HOURS = {HOUR: 0, "2026111812": 3600, "2026111813": 7200, "2026111814": 10_800}


@pytest.fixture
async def world(tmp_path):
    made = World(tmp_path / "disk")
    await made.start()
    return made


async def seconds(world: World, count: int) -> None:
    world._agent = await world.state.acquire("agent:n", "test", ttl_s=3600.0)
    for _ in range(count):
        await world.second(0.6)
    await world.accountant.flush()


async def stored(world: World, name: str = "joules") -> dict[str, float]:
    """What Redis has of each hour."""
    keys = world.state.keys
    found = {hour: await world.state.totals(keys.totals("digits", hour)) for hour in HOURS}
    return {hour: sums[name] for hour, sums in found.items() if name in sums}


async def started_again(before: World, folder: Path, writes: Sequence[Write] = ()) -> World:
    """Another process on that disk and the store that was, in which this was changed meanwhile."""
    await before.authority._step()
    before.authority._disk.save("counts", {})
    await before.state.write(before.authority._lease, writes)
    await before.authority.release()
    await KeptFiles(DiskStore(folder, 10), before.state, NO_KEYS).take_over()
    after = World(folder, before=before)
    await after.authority._step()
    return after


@pytest.mark.parametrize("disk", ["disk", "another"])
@pytest.mark.parametrize("back_hours", [1, 3])
async def test_hours_that_come_again_are_gone_on_with_and_said(world, tmp_path, disk, back_hours):
    for _ in range(4):
        await seconds(world, 5)
        await world.clock.advance(3595.0)
    booked = await stored(world)
    assert booked == dict.fromkeys(HOURS, pytest.approx(30.0))
    world.clock.jump(-3600.0 * (back_hours + 1))
    after = await started_again(world, tmp_path / disk)
    await seconds(after, 5)
    now = list(HOURS)[3 - back_hours]
    assert await stored(after) == booked | {now: pytest.approx(60.0)}
    spent = {hour: each["digits"][""][0] for hour, each in after.accountant.spent().items()}
    assert spent[now] == pytest.approx(60.0)
    assert f"hour {now} (UTC), and hours up to 2026111814 are booked" in after.accountant.clock_fault()
    await after.clock.advance(3600.0 * back_hours)
    await seconds(after, 5)
    assert await stored(after) == booked | {now: pytest.approx(60.0), "2026111814": pytest.approx(60.0)}
    assert after.accountant.clock_fault() == ""


async def test_an_hour_that_begins_is_not_gone_on_with_from_a_stray(world):
    await seconds(world, 5)
    stray = SetFields(world.state.keys.totals("digits", "2026111812"), {"joules": 1e12})
    await world.state.write(world.authority._lease, [stray])
    await world.clock.advance(3595.0)
    await seconds(world, 5)
    assert (await stored(world))["2026111812"] == pytest.approx(30.0)
    assert world.accountant.clock_fault() == ""


@pytest.mark.parametrize("hour", ["20261118110", "202611181x", "2026111199", "zzz", "9999123123"])
async def test_totals_of_no_hour_are_not_read(world, tmp_path, hour):
    await seconds(world, 5)
    stray = SetFields(world.state.keys.totals("digits", hour), {"joules": 1e12, "requests": 1.0})
    await world.clock.advance(3 * 3600.0)
    after = await started_again(world, tmp_path / "another", [stray, Delete(world.state.keys.accounted())])
    await seconds(after, 5)
    budget = Budget("", "digits", time_zone="Pacific/Kiritimati", grams_per_day=1.0)
    assert spent(budget, after.accountant.spent(), after.clock.now_s())[0] == pytest.approx(60.0, abs=7.0)
    assert after.accountant.clock_fault() == ""


async def test_where_nothing_says_how_far_streams_are_booked_they_are_left_out_and_named(world, tmp_path):
    await seconds(world, 6)
    accounted = world.state.keys.accounted()
    after = await started_again(world, tmp_path / "empty", [Delete(accounted)])
    await seconds(after, 5)
    assert await stored(after) == {HOUR: pytest.approx(10 * 6.0)}, "the second before the next one began is left out"
    assert await stored(after, "requests") == {HOUR: 100.0}
    (line,) = after.seen.inputs.set_aside.lines(after.clock.now_s())
    assert accounted in line


async def test_a_disk_that_others_led_after_proves_nothing(world, tmp_path):
    await seconds(world, 6)
    other = await started_again(world, tmp_path / "other")
    await seconds(other, 6)
    after = await started_again(other, tmp_path / "disk", [Delete(world.state.keys.accounted())])
    await seconds(after, 5)
    assert await stored(after) == {HOUR: pytest.approx(16 * 6.0)}
    assert len(after.seen.inputs.set_aside.lines(after.clock.now_s())) == 1


async def test_what_was_booked_before_redis_was_emptied_stands_there_again(world, tmp_path):
    await seconds(world, 6)
    names = [*await world.state.names(world.state.keys.totals_prefix()), world.state.keys.accounted()]
    after = await started_again(world, tmp_path / "disk", [Delete(name) for name in names])
    await seconds(after, 5)
    assert await stored(after) == {HOUR: pytest.approx(11 * 6.0)}


async def test_samples_that_are_sent_again_into_a_lost_stream_are_booked_once(world, tmp_path):
    await seconds(world, 6)
    key = world.state.keys.energy("n")
    sent = [sample for _, sample in await world.state.stream(key, EnergySample)]
    await world.clock.advance(4.0)
    after = await started_again(world, tmp_path / "another", [Delete(key)])
    after._agent = await after.state.acquire("agent:n", "test", ttl_s=3600.0)
    for one in sent:
        await after.state.append(after._agent, key, one, 1000)
    await seconds(after, 5)
    assert await stored(after) == {HOUR: pytest.approx(11 * 6.0)}


LIES = {
    "after a gap": lambda now: replace(sample(KEYS[0], "s", 2e4, now), starts_at_s=now - 50.0, seq=2**40),
    "before the next": lambda now: replace(sample(KEYS[0], "s", 2e4, now), starts_at_s=now - 50.0),
    "of days": lambda now: replace(sample(KEYS[0], "s", 1e7, now), starts_at_s=now - 86_000.0),
    "seq alone": lambda now: replace(sample(KEYS[0], "s", 300.0, now), seq=7),
}


@pytest.mark.parametrize("name", LIES)
async def test_the_first_sample_after_a_take_over_has_to_continue_what_is_booked(world, tmp_path, name):
    await seconds(world, 6)
    lie = LIES[name](world.clock.now_s())
    await world.state.append(world._agent, world.state.keys.energy("n"), lie, 1000)
    after = await started_again(world, tmp_path / "another")
    await seconds(after, 12)
    assert await stored(after) == {HOUR: pytest.approx(18 * 6.0)}
    assert after.accountant.unknown_s == 0.0


async def test_windows_of_a_full_stream_are_booked_once(world, tmp_path):
    await seconds(world, 5)
    key, now_s = world.state.keys.load("d", 0), world.clock.now_s()
    cells = (LoadCell(LoadKey("digits", "s", KEYS[0]), answered=1, items=1),)
    count = LOADS_MAX - 20
    for n in range(1, count + 1):
        window = LoadWindow("d", 0, world.count + n, now_s + (n - 1) / 2, now_s + n / 2, cells=cells)
        await world.state.append_unfenced(key, window)
    world.count += count
    await world.clock.advance(count / 2)
    await seconds(world, 5)
    booked = await stored(world, "requests")
    after = await started_again(world, tmp_path / "disk")
    await seconds(after, 5)
    assert booked == {HOUR: 100.0 + count}
    assert await stored(after, "requests") == {HOUR: booked[HOUR] + 40.0}, "the first second is left out"


@pytest.mark.parametrize("grams", [-3.0, 3.0])
def test_books_of_negative_intensities_are_read_back(grams):
    assert KeptBooks({}, {HOUR: {"digits": {"joules": 7e3, "grams": grams}}}, {})


@pytest.mark.parametrize("kept", [lambda hours: KeptBooks({}, hours, {}), KeptSpend])
def test_a_file_of_no_hour_is_refused(kept):
    kept({HOUR: {}})
    with pytest.raises(InvalidInput, match="2026111199"):
        kept({"2026111199": {}})


@pytest.mark.parametrize("lie", ["lowered", "missing"])
async def test_what_minutes_have_is_not_booked_again_where_accounted_says_less(world, tmp_path, lie):
    """Where the disk is lost too; what no minute has yet is booked again: at most a minute, and what waited."""
    await seconds(world, 62)
    keys, entries = world.state.keys, await world.state.stream(world.state.keys.energy("n"), EnergySample)
    lies = {
        "lowered": [SetFields(keys.accounted(), {"n": entries[9][0]})],
        "missing": [Delete(keys.accounted()), SetFields(keys.accounted(), {"m": entries[-1][0]})],
    }
    after = await started_again(world, tmp_path / "empty", lies[lie])
    await seconds(after, 5)
    assert await stored(after) == {HOUR: pytest.approx((62 + 2 + 5) * 6.0)}
    (line,) = after.seen.inputs.set_aside.lines(after.clock.now_s())
    assert keys.accounted() in line


async def test_a_stray_minute_hides_no_sample(world, tmp_path):
    await seconds(world, 62)
    keys, now_s = world.state.keys, world.clock.now_s()
    for starts_s, ends_s in (
        (now_s - 3600.0, now_s - 1.0),
        (now_s - 30.0, now_s + 900.0),
        (now_s + 1e6, now_s + 1e6 + 60),
    ):
        stray = replace(sample(KEYS[0], "s", 60.0, ends_s), starts_at_s=starts_s, seq=2**30)
        await world.state.append(world.authority._lease, keys.energy_minutes("n"), stray, 1000)
    after = await started_again(world, tmp_path / "empty")
    await seconds(after, 5)
    assert await stored(after) == {HOUR: pytest.approx(67 * 6.0)}


@pytest.mark.parametrize("hour", ["2026111812", "2027111811", "9998123123"])
async def test_an_hour_to_come_that_no_controller_wrote_is_named_and_not_the_clock(world, tmp_path, hour):
    await seconds(world, 5)
    name = world.state.keys.totals("digits", hour)
    world.server.set_totals(name, {b"joules": b"1e12", b"grams": b"1e9"})
    after = await started_again(world, tmp_path / "empty")
    await seconds(after, 5)
    assert after.accountant.clock_fault() == ""
    (line,) = after.seen.inputs.set_aside.lines(after.clock.now_s())
    assert line.startswith(f"{name}: 1 set aside, the last because of an hour that has not begun")
    assert hour not in after.accountant.spent()


async def test_names_that_no_controller_booked_do_not_stay_in_an_hour(world):
    await seconds(world, 5)
    world.server.set_totals(world.state.keys.totals("digits", HOUR), {b"requests:ghost": b"1e9", b"joules": b"7"})
    await seconds(world, 5)
    assert await stored(world) == {HOUR: pytest.approx(60.0)}
    assert await stored(world, "requests:ghost") == {}


@pytest.mark.parametrize(
    ("joules", "grams", "why"),
    [(1e3, 0.1, ""), (1e3, -0.1, ""), (1e3, -3600.0, "grams"), (0.0, 1.0, "grams"), (1e3, 1e17, "grams")],
)
def test_kept_books_have_no_more_grams_than_their_joules_can_cause(joules, grams, why):
    hours = {"2026111812": {"digits": {"joules": joules, "grams": grams}}}
    costs = {"2026111812": {"digits": {"t": (joules, grams)}}}
    if not why:
        KeptBooks({}, hours, {})
        KeptSpend(costs)
        return
    with pytest.raises(InvalidInput, match=rf"hours = .*{why}"):
        KeptBooks({}, hours, {})
    with pytest.raises(InvalidInput, match="hours = 'a cost'"):
        KeptSpend(costs)
