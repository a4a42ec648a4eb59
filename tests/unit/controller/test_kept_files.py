"""What a controller keeps on its disk is in Redis for the next one, wherever that runs; what others put there counts
for nothing."""

import json
from dataclasses import replace

import pytest

from controller.role.disk_store import DiskStore
from controller.role.kept_files import KeptFiles
from controller.role.leadership import COPY_S, Leadership
from tests.support.stores import state_on
from tests.support.virtual.redis import Server
from trefoil.core.common import KeptFile, Revision
from trefoil.core.errors import RoleFree
from trefoil.runtime.clock import ManualClock
from trefoil.runtime.security.plan_keys import PlanKeys
from trefoil.runtime.state import LEASE_TTL_S
from trefoil.runtime.telemetry import Metrics

FREE = {"mode": "ACT", "frozen": False, "pinned": False}
FROZEN = FREE | {"frozen": True}
KEYS = PlanKeys("default", ["k" * 32])


class Controller:
    """Leadership on a separate disk."""

    def __init__(self, server: Server, clock: ManualClock, folder, keys: PlanKeys = KEYS) -> None:
        self.state, self.keys = state_on(server, "default", clock), keys
        self.disk = DiskStore(folder, 10)
        self.role = Leadership(self.state, self.disk, clock, Metrics("controller"), list, keys)
        self.role._holder = folder.name

    async def take_over(self) -> None:
        await KeptFiles(self.disk, self.state, self.keys).take_over()


@pytest.fixture
def begin(tmp_path):
    clock = ManualClock(1000.0)
    server = Server(clock)

    def make(name: str, keys: PlanKeys = KEYS) -> Controller:
        return Controller(server, clock, tmp_path / name, keys)

    make.clock, make.server = clock, server
    return make


async def leads(one: Controller, **files: object) -> None:
    await one.role._step()
    assert one.role.epoch
    for name, value in files.items():
        one.disk.save(name, value)
    await one.role.copy_files()


async def test_an_empty_disk_takes_over_everything_but_what_is_of_the_others_disk(begin):
    first = begin("first")
    first.disk.save("counts", {"replans": {"before it led": 1}})
    await leads(first, control=FROZEN, accounting={"ids": {}, "hours": {}, "told": {}})
    second = begin("second")
    await second.take_over()
    assert second.disk.load_plain("control") == FROZEN
    assert second.disk.load_plain("counts") == {"replans": {"before it led": 1}}
    assert (second.disk.load_plain("accounting"), second.disk.load_plain("epoch")) == ({}, {})


async def test_a_disk_that_was_led_under_later_keeps_what_it_has(begin):
    first = begin("first")
    await leads(first, control=FROZEN)
    first.disk.save("control", FREE)  # and ended before it was in Redis: nobody was answered
    again = begin("first")
    await again.take_over()
    assert again.disk.load_plain("control") == FREE


async def test_what_a_later_one_has_not_is_forgotten(begin):
    first = begin("first")
    await leads(first, control=FROZEN, planner_memory={"planner": "old", "memory": {}})
    begin.server.flush()
    begin("second").disk.save("epoch", {"epoch": 5})
    second = begin("second")
    await leads(second, control=FREE)
    await first.take_over()
    assert first.disk.load_plain("control") == FREE
    assert first.disk.load_plain("planner_memory") == {}


async def test_who_takes_the_role_on_what_is_not_the_newest_gives_it_back_and_starts_anew(begin):
    first, second = begin("first"), begin("second")
    await leads(first, control=FREE)
    await second.take_over()
    again = begin("second")  # has read this
    first.disk.save("control", FROZEN)
    await first.role.copy_files()
    await first.role.release()
    with pytest.raises(RoleFree):
        await again.role._step()
    assert not again.role.epoch
    await again.take_over()
    newest = begin("second")
    await newest.role._step()
    assert newest.role.epoch
    assert newest.disk.load_plain("control") == FROZEN


async def test_a_standby_has_it_on_its_disk_when_redis_is_emptied_and_the_leader_is_gone(begin):
    first, standby = begin("first"), begin("standby")
    await leads(first, control=FROZEN)
    for _ in range(round(COPY_S) + 3):
        await begin.clock.advance(1.0)
        await first.role._step()
        await standby.role._step()
    begin.server.flush()
    await begin.clock.advance(LEASE_TTL_S)
    again = begin("standby")
    await again.take_over()
    await again.role._step()
    assert again.role.epoch > first.disk.load_plain("epoch")["epoch"]
    assert again.disk.load_plain("control") == FROZEN


@pytest.mark.parametrize("forged", ["unsigned", "other key", "changed", "path"])
async def test_what_no_controller_has_signed_is_not_taken_over(begin, forged):
    first, second = begin("first"), begin("second")
    await leads(first, control=FROZEN)
    signed = KEYS.sign_file(KeptFile("control", Revision(9, 1), json.dumps(FREE)))
    file = {
        "unsigned": replace(signed, signature=""),
        "other key": PlanKeys("default", ["o" * 32]).sign_file(replace(signed, signature="")),
        "changed": replace(signed, json=json.dumps(FREE | {"pinned": True})),
        "path": KEYS.sign_file(KeptFile("../control", Revision(9, 1), "{}")),
    }[forged]
    lease = first.role._lease
    await first.state.put(lease, first.state.keys.kept(file.name), file)
    await second.take_over()
    assert second.disk.load_plain("control") == ({} if forged != "path" else FROZEN)


@pytest.mark.parametrize("ahead", [1, 1_000_000])
async def test_without_signatures_a_file_of_an_epoch_that_nobody_has_led_under_is_not_taken_over(begin, ahead):
    unsigned = PlanKeys("default")
    first = begin("first", unsigned)
    await leads(first, control=FROZEN, counts={"replans": {"load": 1}})
    file = KeptFile("control", Revision(first.role.epoch + ahead, 1), json.dumps(FREE))
    await first.state.put(first.role._lease, first.state.keys.kept("control"), file)
    again = begin("first", unsigned)
    await again.take_over()
    assert again.disk.load_plain("control") == FROZEN
    await first.role.release()
    await again.role._step()
    assert again.role.epoch == first.disk.load_plain("led")["epoch"]
    assert again.disk.load_plain("counts") == {"replans": {"load": 1}}


async def test_a_file_that_was_lost_comes_back_from_the_copy_in_redis_and_status_says_so(begin):
    first = begin("first")
    await leads(first, control=FROZEN, counts={"replans": {"load": 1}})
    (first.disk._path("control")).write_text('{"frozen": "yes"}')
    again = begin("first")
    again.disk.check_shapes()
    assert again.disk.load_plain("control") == {}
    assert "lost, unless Redis has a copy" in again.disk.set_aside()[0]
    await again.take_over()
    assert again.disk.load_plain("control") == FROZEN
    (line,) = again.disk.set_aside()
    assert line.startswith("control.json could not be understood and stands aside as control.json.bad: restored")
    (again.disk._root / "control.json.bad").unlink()
    assert again.disk.set_aside() == []


async def test_what_was_lost_while_redis_was_away_comes_back_before_the_role_is_taken(begin):
    first = begin("first")
    await leads(first, control=FROZEN)
    await first.role.release()
    (first.disk._path("control")).write_text("[]")
    again = begin("first")
    again.disk.check_shapes()
    again.disk.save("control", FREE)  # begun without Redis
    with pytest.raises(RoleFree):
        await again.role._step()
    await again.take_over()
    newest = begin("first")
    await newest.role._step()
    assert newest.role.epoch
    assert newest.disk.load_plain("control") == FROZEN


async def test_what_nobody_has_a_copy_of_is_forgotten_with_a_word(begin):
    one = begin("one")
    await leads(one)
    (one.disk._path("control")).write_text("[]")
    again = begin("one")
    again.disk.check_shapes()
    await one.role.release()
    begin.server.flush()
    await again.take_over()
    await again.role._step()
    assert again.role.epoch
    (line,) = again.disk.set_aside()
    assert "what it held is forgotten" in line


@pytest.mark.parametrize("text", ["[]", "not JSON", '{"frozen": 1}', '{"version": 99}'])
async def test_a_copy_that_is_no_such_file_is_not_taken_over_and_the_disk_keeps_its_own(begin, text):
    first, second = begin("first"), begin("second")
    second.disk.save("control", FREE)
    await leads(first, control=FROZEN, counts={"replans": {"load": 1}})
    file = KEYS.sign_file(KeptFile("control", Revision(first.role.epoch, 9), text))
    await first.state.put(first.role._lease, first.state.keys.kept("control"), file)
    await second.take_over()
    assert second.disk.load_plain("control") == FREE
    assert second.disk.load_plain("counts") == {"replans": {"load": 1}}
