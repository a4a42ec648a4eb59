"""A cordon outlives the agent, its patience runs on, and only a controller that is obeyed may set one."""

from pathlib import Path

import pytest

from power_agent.durability.journal import Journal
from power_agent.slices.cordons import UNNAMED, Cordons, devices_named, refuse_old_epoch
from trefoil.core.errors import InvalidInput, NotFound, StaleRevision
from trefoil.runtime.clock import ManualClock

GPU0, GPU1 = "node0/gpu0", "node0/gpu1"


def opened(folder: Path, clock: ManualClock, changes: list[int] | None = None) -> tuple[Journal, Cordons]:
    journal = Journal(folder, "boot", "load")
    journal.open()
    told = changes if changes is not None else []
    cordons = Cordons(clock, journal, lambda: told.append(1))
    cordons.resume()
    return journal, cordons


async def test_patience_passes_then_the_device_has_to_be_empty(tmp_path):
    clock = ManualClock(1000.0)
    changes: list[int] = []
    journal, cordons = opened(tmp_path, clock, changes)
    await cordons.set((GPU0,), "a fan is broken", 60.0)
    assert (cordons.reason(GPU0), cordons.reason(GPU1), cordons.evicted(GPU0)) == ("a fan is broken", "", False)
    clock.move(59.9)
    assert cordons.all_evicted() == frozenset()
    clock.move(0.2)
    assert cordons.all_evicted() == {GPU0}
    await cordons.set((GPU0,), "", 5.0)
    assert (cordons.reason(GPU0), cordons.evicted(GPU0)) == (UNNAMED, False), "asked again: anew"
    await cordons.release((GPU0, GPU1))
    assert (cordons.reason(GPU0), cordons.all_evicted()) == ("", frozenset())
    assert len(changes) == 3
    journal.close()


@pytest.mark.parametrize(("away_s", "evicted"), [(30.0, False), (61.0, True), (-500.0, False)])
async def test_a_successor_goes_on_with_what_is_left_of_the_patience(tmp_path, away_s, evicted):
    clock = ManualClock(1000.0)
    journal, cordons = opened(tmp_path, clock)
    await cordons.set((GPU0,), "a fan is broken", 60.0)
    journal.close()
    clock.jump(away_s)
    later = ManualClock(clock.now_s())
    journal, cordons = opened(tmp_path, later)
    assert (cordons.reason(GPU0), cordons.evicted(GPU0)) == ("a fan is broken", evicted)
    later.move(60.0)
    assert cordons.evicted(GPU0), "never longer than was granted, whatever the clock did meanwhile"
    journal.close()


async def test_what_makes_no_sense_is_refused_and_changes_nothing(tmp_path):
    journal, cordons = opened(tmp_path, ManualClock(1000.0))
    for patience_s in (-1.0, 1e9, float("nan")):
        with pytest.raises(InvalidInput, match=r"patience_s.*Remedy: 0 \(leave now\) to 86400 seconds"):
            await cordons.set((GPU0,), "", patience_s)
    assert not cordons.reason(GPU0)
    assert devices_named("", (GPU0, GPU1)) == (GPU0, GPU1)
    assert devices_named(GPU1, (GPU0, GPU1)) == (GPU1,)
    with pytest.raises(NotFound, match="node0/gpu0, node0/gpu1"):
        devices_named("node0/gpu2", (GPU0, GPU1))
    refuse_old_epoch(5, 5)
    with pytest.raises(StaleRevision, match="epoch = 4: a newer controller, of epoch 5"):
        refuse_old_epoch(4, 5)
    journal.close()
