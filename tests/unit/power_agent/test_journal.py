"""A journal on a disk that is full, slow or torn: nothing is begun that is not written, nothing is forgotten."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest
import structlog

from power_agent.durability import journal as module
from power_agent.durability.journal import Journal, JournalError
from power_agent.durability.journal_state import Cordon, JournalState, Override, SliceRecord, encode, replay
from tests.support.plans import key, plan_of, planned
from trefoil.core.common import Revision
from trefoil.core.errors import StartError
from trefoil.core.fleet import SliceState, Step
from trefoil.core.plan_check import sealed
from trefoil.runtime import codec

KEY, OTHER = key("3g.20gb", 4), key("1g.5gb", 0)
PLAN = sealed(plan_of(planned("3g.20gb", 4)).nodes[0], Revision(4, 2, 1))
MEMORY = SliceRecord(KEY, 3, SliceState.READY, f"{KEY.name}.g3")
STEP = Step(KEY, "create_gi", "begun")


@pytest.fixture
def journal(tmp_path):
    one = Journal(tmp_path, "boot", "driver")
    one.open()
    yield one
    one.close()


class Disk:
    """What the journal does to its disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = self.halves = False
        self.synced = 0
        self._write, self._fsync, self._open = os.write, os.fsync, Path.open
        monkeypatch.setattr(module.os, "write", self.write)
        monkeypatch.setattr(module.os, "fsync", self.fsync)
        monkeypatch.setattr(Path, "open", lambda path, *rest, **more: self.open(path, *rest, **more))

    def write(self, file: int, data: bytes) -> int:
        if self.halves:
            return self._write(file, data[: len(data) // 2])
        if self.full:
            raise OSError(28, "No space left on device")
        return self._write(file, data)

    def open(self, path: Path, *arguments: str, **more: str):
        if (self.full or self.halves) and path.suffix == ".new":
            raise OSError(28, "No space left on device")
        return self._open(path, *arguments, **more)

    def fsync(self, file: int) -> None:
        self.synced += 1
        self._fsync(file)


def successor(folder: Path) -> JournalState:
    one = Journal(folder, "boot", "driver")
    try:
        return one.open()
    finally:
        one.close()


@pytest.mark.parametrize("how", ["full", "halves"])
async def test_on_a_full_disk_nothing_is_begun_and_what_happened_is_written_later(journal, tmp_path, monkeypatch, how):
    journal.remember_slice(MEMORY)
    disk = Disk(monkeypatch)
    setattr(disk, how, True)
    with pytest.raises(JournalError, match="make room"):
        await journal.begin_step(STEP)
    with pytest.raises(JournalError):
        await journal.accept_plan(PLAN)
    with pytest.raises(JournalError):
        await journal.set_cordon(Cordon(KEY.device, "repair"))
    with pytest.raises(JournalError):
        journal.begin_override(Override(KEY.device, "clock", 210.0, 1005.0))
    state = journal.state
    assert (state.unfinished, state.plan, state.cordons, state.overrides) == ({}, None, {}, {})
    later = replace(MEMORY, state=SliceState.DRAINING)
    journal.remember_slice(later)  # it has happened, room or not
    journal.next_generation()
    journal.raise_lease_epoch(7)
    with pytest.raises(JournalError):
        await journal.sync()
    setattr(disk, how, False)
    await journal.begin_step(STEP)
    journal.close()
    found = successor(tmp_path)
    assert (found.slices, found.generation, found.lease_epoch, found.damaged) == ({KEY: later}, 1, 7, 0)
    assert [step.verb for step in found.unfinished.values()] == ["create_gi"]


async def test_what_must_survive_the_loss_of_power_is_synced_before_the_call_returns(journal, monkeypatch):
    disk = Disk(monkeypatch)
    for act in (
        lambda: journal.accept_plan(PLAN),
        lambda: journal.set_cordon(Cordon(KEY.device, "repair")),
        lambda: journal.release_cordon(KEY.device),
        journal.sync,
    ):
        before = disk.synced
        await act()
        assert disk.synced == before + 1
    before = disk.synced
    journal.raise_lease_epoch(3)
    assert disk.synced == before + 1
    journal.begin_override(Override(KEY.device, "clock", 210.0, 1005.0))
    journal.remember_slice(MEMORY)
    await journal.begin_step(STEP)
    journal.end_step(STEP)
    assert disk.synced == before + 1  # these mean nothing after a boot


async def test_a_compaction_while_a_plan_is_being_synced_keeps_the_plan(journal, tmp_path, monkeypatch):
    released = asyncio.Event()

    async def slow(call, *arguments):
        await released.wait()
        return call(*arguments)

    monkeypatch.setattr(module.asyncio, "to_thread", slow)
    accepting = asyncio.create_task(journal.accept_plan(PLAN))
    await asyncio.sleep(0)
    for number in range(module.LINES_MAX + 10):
        journal.end_step(replace(STEP, took_ms=float(number)))
    assert len((tmp_path / "journal.jsonl").read_bytes().splitlines()) < 100
    released.set()
    await accepting
    journal.close()
    assert successor(tmp_path).plan == PLAN


async def test_a_successor_closes_the_steps_it_found_open(journal, tmp_path):
    await journal.begin_step(STEP)
    await journal.begin_step(Step(OTHER, "load", "begun"))
    journal.close()
    one = Journal(tmp_path, "boot", "driver")
    one.open()
    assert {step.verb for step in one.close_unfinished()} == {"create_gi", "load"}
    one.close()
    assert successor(tmp_path).unfinished == {}


def test_a_newer_agents_entry_and_an_older_ones_line_are_no_obstacle(tmp_path):
    path = tmp_path / "journal.jsonl"
    old = encode({"generation": 5}, "boot/driver").partition(b"\t")[0] + b"\n"  # without a checksum
    path.write_bytes(old + encode({"marvel": {"x": 1}}, "boot/driver") + b"\x00" * 512 + b"\n[1]\n7\n")
    found = successor(tmp_path)
    assert (found.generation, found.damaged) == (5, 3)


@pytest.mark.parametrize("field", ["highest_epoch", "lease_epoch", "generation"])
@pytest.mark.parametrize("value", [2**53, 10**40, -1, 1.5, True, "7"])
def test_a_number_that_no_agent_has_counted_up_to_does_not_count(tmp_path, field, value):
    (tmp_path / "journal.jsonl").write_bytes(encode({field: 7}, "x") + encode({field: value}, "x"))
    journal = Journal(tmp_path, "boot", "load")
    try:
        assert getattr(journal.open(), field) == 7
    finally:
        journal.close()


def test_a_line_whose_checksum_is_wrong_does_not_count(tmp_path):
    line = encode({"generation": 5}, "boot/driver")
    (tmp_path / "journal.jsonl").write_bytes(line.replace(b'"generation":5', b'"generation":9'))
    found = successor(tmp_path)
    assert (found.generation, found.damaged) == (0, 1)


def test_a_plan_of_an_epoch_that_nobody_has_counted_to_is_a_damaged_line():
    plan = codec.to_plain(PLAN) | {"revision": {"epoch": 10**12 + 1, "number": 1}}
    found = replay(encode({"highest_epoch": 4}, "boot/driver") + encode({"plan": plan}, "boot/driver"), "boot/driver")
    assert (found.highest_epoch, found.plan, found.damaged) == (4, None, 1)


async def test_a_fence_that_is_lowered_stays_so_with_the_plan_that_raised_it(journal, tmp_path):
    await journal.accept_plan(replace(PLAN, revision=Revision(5 * 10**11, 9)))
    await journal.lower_fence(3)
    await journal.accept_plan(replace(PLAN, revision=Revision(3, 1)))
    found = replay((tmp_path / "journal.jsonl").read_bytes(), "boot/driver")
    assert (found.highest_epoch, found.plan.revision) == (3, Revision(3, 1))
    assert (journal.state.highest_epoch, journal.state.plan.revision) == (3, Revision(3, 1))
    journal.raise_highest_epoch(5 * 10**11)
    await journal.lower_fence(3)
    assert (journal.state.highest_epoch, journal.state.plan.revision) == (3, Revision(3, 1)), "it is of that epoch"


def test_a_state_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match="cannot be written"):
        Journal(tmp_path / "file", "boot", "driver").open()


# --- a journal that is not this agent's to go by, or that is lost under it --------------------------------------------


def written(folder: Path, owner: str = "prod/node0") -> bytes:
    one = Journal(folder, "boot", "driver", owner=owner)
    one.open()
    one.remember_slice(MEMORY)
    one.close()
    return (folder / "journal.jsonl").read_bytes()


def opened(folder: Path, owner: str = "prod/node0") -> Journal:
    one = Journal(folder, "boot", "driver", owner=owner)
    one.open()
    one.close()
    return one


@pytest.mark.parametrize("owner", ["prod/node0", ""])
def test_a_journal_of_the_same_node_or_of_before_there_were_owners_is_taken(tmp_path, owner):
    written(tmp_path, owner)
    one = opened(tmp_path)
    assert (one.fresh, one.state.slices, one.state.tags) == (False, {KEY: MEMORY}, {MEMORY.tag})
    assert not (tmp_path / "journal.jsonl.bad").exists()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (lambda data: data + encode({"journal": {"version": 1, "owner": "prod/node1"}}, "x"), "agent of prod/node1"),
        (lambda data: data + encode({"journal": {"version": 1, "owner": "test/node0"}}, "x"), "agent of test/node0"),
        (lambda _: b"no journal\n" * 3, "3 lines of it cannot be read"),
        (lambda _: bytes(4096), "1 lines of it cannot be read"),
    ],
)
def test_a_journal_that_is_not_this_agents_is_set_aside_once_and_nothing_of_it_is_believed(tmp_path, content, why):
    spoilt = content(written(tmp_path))
    (tmp_path / "journal.jsonl").write_bytes(spoilt)
    with structlog.testing.capture_logs() as logs:
        one = opened(tmp_path)
    [line] = [line for line in logs if line["event"] == "unreadable state file set aside"]
    assert why in line["why"]
    assert (one.fresh, one.state.slices, one.state.tags) == (True, {}, set())
    assert (tmp_path / "journal.jsonl.bad").read_bytes() == spoilt
    with structlog.testing.capture_logs() as logs:
        assert not opened(tmp_path).fresh
    assert logs == []


def test_a_journal_of_a_later_version_is_refused_by_name_and_left_untouched(tmp_path):
    newer = written(tmp_path) + encode({"journal": {"version": 99, "owner": "prod/node0"}}, "x")
    (tmp_path / "journal.jsonl").write_bytes(newer)
    with pytest.raises(StartError, match=r"journal\.jsonl.*version 99.*start the newer Trefoil, or move the file away"):
        opened(tmp_path)
    assert (tmp_path / "journal.jsonl").read_bytes() == newer


def test_a_journal_that_cannot_be_read_does_not_keep_the_agent_from_starting(tmp_path):
    (tmp_path / "journal.jsonl").mkdir()
    one = opened(tmp_path)
    assert one.fresh
    assert (tmp_path / "journal.jsonl").is_file()


def test_a_header_of_another_shape_is_a_damaged_line(tmp_path):
    for header in ({"version": "x", "owner": ""}, [], 7, {"owner": "prod/node9"}):
        data = written(tmp_path) + encode({"journal": header}, "x")
        assert (found := replay(data, "boot/driver")).damaged == 1
        assert found.slices == {KEY: MEMORY}


async def test_a_journal_that_is_deleted_under_its_agent_is_written_again_whole(tmp_path):
    one = Journal(tmp_path / "state", "boot", "driver")
    one.open()
    one.remember_slice(MEMORY)
    await one.accept_plan(PLAN)
    (tmp_path / "state").rename(tmp_path / "elsewhere")
    with structlog.testing.capture_logs() as logs:
        one.keep_place()
        one.keep_place()
    assert sorted(line["event"] for line in logs) == [
        "journal was deleted under this agent: written again",
        "lock of the state directory was lost: taken again",
    ]
    with pytest.raises(StartError, match="another power agent"):
        Journal(tmp_path / "state", "boot", "driver").open()
    (tmp_path / "state" / "journal.jsonl").unlink()
    await one.begin_step(STEP)  # by what is written before the act, nobody has to look first
    one.close()
    found = successor(tmp_path / "state")
    assert (found.slices, found.plan, list(found.unfinished.values())) == ({KEY: MEMORY}, PLAN, [STEP])


def test_an_agent_whose_state_directory_another_one_has_taken_ends(tmp_path):
    one = Journal(tmp_path / "state", "boot", "driver")
    one.open()
    (tmp_path / "state").rename(tmp_path / "elsewhere")
    other = Journal(tmp_path / "state", "boot", "driver")
    other.open()
    with pytest.raises(StartError, match="another power agent works in"):
        one.keep_place()
    other.close()
    one.close()
