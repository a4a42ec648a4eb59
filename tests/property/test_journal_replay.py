"""Whatever a crash makes of a journal, its successor reads it, and knows everything that was durable."""

import asyncio
import tempfile
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from power_agent.durability.journal import Journal
from power_agent.durability.journal_state import Cordon, JournalState, Override, SliceRecord, replay
from tests.support.plans import key, plan_of, planned
from trefoil.core.common import Revision
from trefoil.core.fleet import SliceKey, SliceState, Step
from trefoil.core.plan_check import sealed

LOAD = "boot/driver"
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # each operation syncs
KEYS = (key("1g.5gb", 0), key("3g.20gb", 4), SliceKey("node0/cpu", "cpu:4", 0, 4))
NODE_PLAN = plan_of(planned("3g.20gb", 4)).nodes[0]
KINDS = ("accept", "lease", "generation", "remember", "forget", "begin", "end", "cordon", "release", "override",
         "restored", "compact", "sync")  # fmt: skip
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(1, 9), st.sampled_from(KEYS)), min_size=1, max_size=25
)


@dataclass(frozen=True)
class Durable:
    """Up to this size of the file everything in the state is on the disk."""

    size: int
    state: JournalState


def act(journal: Journal, kind: str, number: int, part: SliceKey) -> None:
    """One thing that an agent may write."""
    step = Step(part, "create_gi", "begun")
    if kind == "accept":
        asyncio.run(journal.accept_plan(sealed(NODE_PLAN, Revision(number, number))))
    elif kind == "lease":
        journal.raise_lease_epoch(number)
    elif kind == "generation":
        journal.next_generation()
    elif kind == "remember":
        journal.remember_slice(SliceRecord(part, number, SliceState.READY, f"{part.name}.g{number}"))
    elif kind == "forget":
        journal.forget_slice(part)
    elif kind == "begin":
        asyncio.run(journal.begin_step(step))
    elif kind == "end":
        journal.end_step(replace(step, state="done"))
    elif kind == "cordon":
        asyncio.run(journal.set_cordon(Cordon(part.device, "repair \t\n\N{SNOWMAN}", float(number))))
    elif kind == "release":
        asyncio.run(journal.release_cordon(part.device))
    elif kind == "override":
        journal.begin_override(Override(part.device, "clock", 210.0, 100.0 * number))
    elif kind == "restored":
        journal.end_override(part.device, "clock")
    elif kind == "compact":
        journal._compact()
    elif kind == "sync":
        asyncio.run(journal.sync())


def history(folder: Path, operations: list[tuple[str, int, SliceKey]]) -> tuple[bytes, list[Durable], JournalState]:
    """The file after these operations, and what was durable at which size of it."""
    journal, path = Journal(folder, "boot", "driver"), folder / "journal.jsonl"
    journal.open()
    points = [Durable(path.stat().st_size, deepcopy(journal.state))]
    for kind, number, part in operations:
        act(journal, kind, number, part)
        if kind == "compact":
            points.clear()  # the file before is gone, as a whole
        points.append(Durable(path.stat().st_size, deepcopy(journal.state)))
    journal.close()
    return path.read_bytes(), points, journal.state


def same(one: JournalState, other: JournalState) -> bool:
    """Equal but for the count of damaged lines."""
    return replace(one, damaged=0) == replace(other, damaged=0)


@settings(max_examples=150, deadline=None)
@given(OPERATIONS, st.floats(0, 1))
def test_a_journal_cut_at_any_byte_knows_all_that_was_whole(operations, where):
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        data, points, state = history(Path(folder), operations)
        assert same(replay(data, LOAD), state)
        first = points[0].size  # a compacted file appears as a whole: it is never cut inside
        cut = first + round(where * (len(data) - first))
        found = replay(data[:cut], LOAD)
        known = max((point for point in points if point.size <= cut), key=lambda point: point.size)
        later = [point for point in points if point.size == known.size]
        # a line that lacks only its checksum or its end is whole: then the next point is known too
        following = [point for point in points if point.size > cut][:1]
        assert any(same(found, point.state) for point in (*later, *following))
        assert found.damaged <= 1


@settings(max_examples=25, deadline=None)
@given(OPERATIONS)
def test_every_byte_of_a_journal_may_be_the_last_one(operations):
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        data, points, _ = history(Path(folder), operations[:6])
        durable = {point.size: point.state for point in points}
        for cut in range(len(data)):
            state = replay(data[:cut], LOAD)
            for size, known in durable.items():
                if size <= cut:
                    assert state.highest_epoch >= known.highest_epoch
                    assert state.generation >= known.generation
                    assert state.lease_epoch >= known.lease_epoch


@settings(max_examples=150, deadline=None)
@given(OPERATIONS, st.lists(st.tuples(st.floats(0, 1), st.binary(max_size=40)), max_size=4))
def test_garbage_inside_a_journal_costs_the_lines_it_hits_and_no_start(operations, wounds):
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        data, _, _ = history(Path(folder), operations)
        for where, junk in wounds:
            at = round(where * len(data))
            data = data[:at] + junk + data[at + len(junk) :]
        replay(data, LOAD)
        path = Path(folder) / "journal.jsonl"
        path.write_bytes(data)
        journal = Journal(Path(folder), "boot", "driver")
        found = journal.open()
        journal.close()
        assert same(replay(path.read_bytes(), LOAD), found)


@settings(max_examples=100, deadline=None)
@given(OPERATIONS)
def test_another_driver_load_voids_instances_and_another_boot_all_processes(operations):
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        data, _, state = history(Path(folder), operations)
    on_cpu = {key: part for key, part in state.slices.items() if key.device == "node0/cpu"}
    reloaded, rebooted = replay(data, "boot/other"), replay(data, "other/driver")
    assert (reloaded.slices, rebooted.slices) == (on_cpu, {})
    for found in (reloaded, rebooted):
        assert (found.plan, found.highest_epoch, found.generation) == (
            state.plan,
            state.highest_epoch,
            state.generation,
        )
        assert (found.cordons, found.overrides) == (state.cordons, state.overrides)
