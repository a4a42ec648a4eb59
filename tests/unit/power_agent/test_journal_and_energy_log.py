"""Journal and energy log: what a killed agent wrote is what its successor knows, to the last whole line."""

import dataclasses

import pytest

from power_agent.durability.journal import Journal
from power_agent.durability.journal_state import SliceRecord
from power_agent.energy.core.meter import MeterState
from power_agent.energy.energy_log import EnergyLog
from power_agent.slices.core.attribution import CounterMark
from tests.support.plans import key, plan_of, planned
from trefoil.core.common import Revision
from trefoil.core.energy import EnergyMethod, EnergySample
from trefoil.core.fleet import DeviceState, SliceState, Step
from trefoil.core.plan_check import sealed

KEY = key("3g.20gb", 4)
MEMORY = SliceRecord(KEY, 3, SliceState.READY, f"{KEY.name}.g3", planned("3g.20gb", 4).hosted, Revision(4, 2, 1), 2)
PLAN = sealed(plan_of(planned("3g.20gb", 4)).nodes[0], Revision(4, 2, 1))


def reopened(folder, boot: str = "boot", driver: str = "driver") -> Journal:
    journal = Journal(folder, boot, driver)
    journal.open()
    return journal


async def written(folder) -> None:
    journal = reopened(folder)
    await journal.accept_plan(PLAN)
    journal.raise_lease_epoch(9)
    assert [journal.next_generation() for _ in range(3)] == [1, 2, 3]
    journal.remember_slice(MEMORY)
    await journal.begin_step(Step(KEY, "create_gi", "begun"))
    journal.end_step(Step(KEY, "create_gi", "done", 12.0))
    await journal.begin_step(Step(KEY, "create_ci", "begun"))
    journal.close()


async def test_a_successor_knows_everything_and_which_step_was_cut_off(tmp_path):
    await written(tmp_path)
    journal = reopened(tmp_path)
    state = journal.state
    assert (state.plan, state.highest_epoch, state.lease_epoch, state.generation) == (PLAN, 4, 9, 3)
    assert state.slices == {KEY: MEMORY}
    assert [step.verb for step in state.unfinished.values()] == ["create_ci"]
    journal.forget_slice(KEY)
    journal.close()
    assert reopened(tmp_path).state.slices == {}


@pytest.mark.parametrize(("boot", "driver"), [("other", "driver"), ("boot", "other")])
async def test_instances_do_not_outlive_boot_or_driver_but_plan_and_epochs_do(tmp_path, boot, driver):
    await written(tmp_path)
    state = reopened(tmp_path, boot, driver).state
    assert (state.slices, state.unfinished) == ({}, {})
    assert (state.plan, state.highest_epoch, state.generation) == (PLAN, 4, 3)


async def test_a_torn_last_line_never_counted(tmp_path):
    await written(tmp_path)
    path = tmp_path / "journal.jsonl"
    whole = path.read_bytes()
    for cut in range(1, 60):
        path.write_bytes(whole[:-cut])
        journal = reopened(tmp_path)
        assert journal.state.slices == {KEY: MEMORY}
        journal.close()


def sample(seq: int) -> EnergySample:
    return EnergySample(
        "node0", "node0/gpu0", seq, seq - 1.0, float(seq), 55.0, EnergyMethod.NVML_COUNTER, idle_j=55.0,
        state=DeviceState.AWAKE,
    )  # fmt: skip


def state(seq: int) -> MeterState:
    marks = (CounterMark(KEY, 3, "17-1.0", "toy", "toy-l", seq * 0.5, seq),)
    return MeterState("node0/gpu0", seq, float(seq), float(seq), "boot/driver", seq * 55.0, 0, True, 1410, marks)


def write(folder, first: int, last: int, lines_max: int = 10) -> EnergyLog:
    energy_log = EnergyLog(folder, lines_max)
    energy_log.open()
    for seq in range(first, last + 1):
        energy_log.append([sample(seq)], {"node0/gpu0": state(seq)})
    energy_log.close()
    return energy_log


@pytest.mark.parametrize("last", [1, 4, 5, 6, 10, 11, 23, 40])
def test_a_successor_has_the_newest_state_and_the_last_samples(tmp_path, last):
    write(tmp_path, 1, last)
    energy_log = EnergyLog(tmp_path, 10)
    energy_log.open()
    assert energy_log.states == {"node0/gpu0": state(last)}
    seqs = [one.seq for one in energy_log.ring]
    assert seqs == list(range(seqs[0], last + 1))
    assert len(seqs) >= min(last, 6)
    energy_log.close()
    write(tmp_path, last + 1, last + 3)
    energy_log.open()
    assert energy_log.states == {"node0/gpu0": state(last + 3)}
    energy_log.close()


def test_a_torn_line_loses_only_itself(tmp_path):
    write(tmp_path, 1, 3)
    path = tmp_path / "energy.0.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    energy_log = write(tmp_path, 3, 4)
    assert [one.seq for one in energy_log.ring] == [1, 2, 3, 4]
    again = EnergyLog(tmp_path, 10)
    again.open()
    assert [one.seq for one in again.ring] == [1, 2, 3, 4]
    assert again.states == {"node0/gpu0": state(4)}
    again.close()


def test_the_ring_is_bounded(tmp_path):
    energy_log = write(tmp_path, 1, 200)
    assert len(energy_log.ring) <= 10
    assert sum(len(path.read_text().splitlines()) for path in tmp_path.iterdir()) <= 11


def test_samples_that_are_equal_come_back_equal(tmp_path):
    odd = dataclasses.replace(sample(1), counter_j=0.1 + 0.2, idle_j=0.1 + 0.2, clock_mhz_mean=1410.5)
    energy_log = EnergyLog(tmp_path, 10)
    energy_log.open()
    energy_log.append([odd], {"node0/gpu0": state(1)})
    energy_log.close()
    energy_log = EnergyLog(tmp_path, 10)
    energy_log.open()
    assert list(energy_log.ring) == [odd]
    energy_log.close()
