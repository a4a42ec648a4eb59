"""An agent whose disk is full, read-only or failing: nothing new is begun, no joule is lost, all continues by
itself."""

import itertools
from dataclasses import replace

import pytest
import structlog

from power_agent.durability.journal import Journal, JournalError
from power_agent.durability.journal_state import Cordon
from tests.support.failing_disk import ERRORS, FailingDisk, fill, small_disk
from tests.unit.power_agent.test_journal import KEY, MEMORY, PLAN, STEP, successor
from tests.unit.power_agent.test_metering import GPU0, GPU1, WATTS, Bench
from trefoil.core.fleet import SliceState

NEWER = replace(PLAN, revision=replace(PLAN.revision, number=3))
CORDON = Cordon(KEY.device, "repair")


async def plan(journal):
    await journal.accept_plan(NEWER)


async def cordon(journal):
    await journal.set_cordon(replace(CORDON, why="another"))


async def release(journal):
    await journal.release_cordon(KEY.device)


@pytest.mark.parametrize("act", [plan, cordon, release])
@pytest.mark.parametrize("code", ERRORS)
async def test_what_is_refused_is_not_found_by_a_successor_wherever_the_disk_fails(tmp_path, monkeypatch, act, code):
    disk, refusals = FailingDisk(monkeypatch, code), 0
    for at in itertools.count():
        folder = tmp_path / str(at)
        journal = Journal(folder, "boot", "driver")
        journal.open()
        await journal.accept_plan(PLAN)
        await journal.set_cordon(CORDON)
        before = (journal.state.plan, dict(journal.state.cordons))
        disk.fail(at, 2)
        refused = False
        try:
            await act(journal)
        except JournalError:
            refused = True
            refusals += 1
            assert (journal.state.plan, journal.state.cordons) == before
        disk.mend()
        assert journal.catch_up() == ""
        kept = (journal.state.plan, dict(journal.state.cordons))
        journal.close()
        found = successor(folder)
        assert ((found.plan, found.cordons), found.damaged) == (kept, 0)
        if not refused and disk.calls <= at:
            break
    assert refusals >= 2  # written, synced


def test_an_agent_that_starts_on_a_full_disk_knows_everything_and_catches_up_when_there_is_room(tmp_path):
    with small_disk(tmp_path / "disk") as folder:
        first = Journal(folder, "boot", "driver")
        first.open()
        first.remember_slice(MEMORY)
        first.close()
        ballast = fill(folder)
        with structlog.testing.capture_logs() as log:
            journal = Journal(folder, "boot", "driver")
            assert journal.open().slices == {KEY: MEMORY}
            for number in range(20):
                journal.remember_slice(replace(MEMORY, state=SliceState.DRAINING, tag=f"t{number}"))
                assert "No space left on device" in journal.catch_up()
        assert [line["event"] for line in log] == ["disk"], "said once"
        ballast.unlink()
        assert journal.catch_up() == ""
        journal.close()
        assert successor(folder).slices[KEY].tag == "t19"


async def test_an_agent_starts_on_a_read_only_disk_and_begins_nothing(tmp_path, monkeypatch):
    first = Journal(tmp_path, "boot", "driver")
    first.open()
    first.remember_slice(MEMORY)
    first.close()
    opened = type(tmp_path).open

    def refused(path, mode="r", *rest, **more):
        if "w" in mode:
            raise OSError(30, "Read-only file system")
        return opened(path, mode, *rest, **more)

    monkeypatch.setattr(type(tmp_path), "open", refused)
    disk = FailingDisk(monkeypatch, 30)
    disk.fail()
    journal = Journal(tmp_path, "boot", "driver")
    assert journal.open().slices == {KEY: MEMORY}
    with pytest.raises(JournalError, match="Read-only file system"):
        await journal.begin_step(STEP)
    disk.mend()
    await journal.begin_step(STEP)
    journal.close()


@pytest.mark.parametrize("restarts_at", [None, 150, 260])
async def test_no_joule_is_lost_or_told_twice_however_long_the_disk_refuses(tmp_path, monkeypatch, restarts_at):
    """400 s, of which the disk refuses 200: what waits is bounded, and all of it is told in the end."""
    bench, disk = Bench(tmp_path), FailingDisk(monkeypatch)
    await bench.read()
    starts_s = bench.clock.now_s()
    for second in range(400):
        if second == 100:
            disk.fail()
            told = len(bench.published)
        if second == restarts_at:
            bench.energy_log.close()
            bench.start()
        if second == 300:
            assert len(bench.published) == told, "what is not on disk is not told: a successor would tell it again"
            disk.mend()
        await bench.read()
        assert len(bench.energy_log._waiting) <= 50
    for device in (GPU0, GPU1):
        samples = [sample for sample in bench.published if sample.device == device]
        assert [s.starts_at_s for s in samples[1:]] == pytest.approx([s.ends_at_s for s in samples[:-1]])
        assert samples[0].starts_at_s == pytest.approx(starts_s)
        assert sum(s.counter_j for s in samples) == pytest.approx(400 * WATTS[device])
        assert [s.seq for s in samples] == sorted({s.seq for s in samples})
