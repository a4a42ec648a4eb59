"""A dispatcher whose disk refuses: it routes by the newest table all the same, and keeps it when there is room."""

import structlog

from dispatcher.service.state_sync import TableFile
from dispatcher.settings import DispatcherSettings
from tests.support.dispatching import Plane, Running
from tests.support.failing_disk import FailingDisk, fill, small_disk
from tests.support.stores import state_on
from tests.support.virtual.redis import Server
from tests.unit.dispatcher.worlds import node, plan, route, status, target
from trefoil.runtime.clock import WallClock


async def test_the_newest_table_serves_and_is_on_disk_when_there_is_room(tmp_path, monkeypatch):
    clock = WallClock()
    state = state_on(Server(clock), "default", clock)
    running, plane = Running(DispatcherSettings(state_dir=tmp_path), state), Plane(state)
    sync, kept = running.loop, TableFile(tmp_path / "dispatcher")
    await plane.node(node([status(0), status(1)]))
    await plane.plan(plan([route([target(0)])], number=1))
    await sync._refresh()
    disk = FailingDisk(monkeypatch)
    disk.fail()
    with structlog.testing.capture_logs() as log:
        for number in (2, 3):
            await plane.plan(plan([route([target(0), target(1)])], number=number))
            await sync._refresh()
            await sync._refresh()
        assert sync._routing.table.revision.number == 3
        assert kept.load()[0].revision.number == 1, "whole, and the last that could be kept"
        assert [line["event"] for line in log if line["log_level"] == "error"] == ["disk"]
        assert 'trefoil_disk_trouble{file="table",simulated="false"} 1.0' in running.metrics.text()
        disk.mend()
        await sync._refresh()
    assert kept.load()[0].revision.number == 3
    assert [path.name for path in kept.path.parent.iterdir()] == ["table.jsonl"]
    await state.close()


def test_a_real_disk_that_is_full_keeps_the_table_of_before(tmp_path):
    with small_disk(tmp_path / "disk") as folder:
        kept, before, after = (
            TableFile(folder),
            plan([route([target(0)])]),
            plan([route([target(n) for n in range(400)])]),
        )
        kept.save(before, (node([status(0)]),))
        ballast = fill(folder)
        try:
            kept.save(after, ())
            saved = True
        except OSError:
            saved = False
        assert (saved, kept.load()[0]) == (False, before)
        ballast.unlink()
        assert [path.name for path in folder.iterdir()] == ["table.jsonl"]
