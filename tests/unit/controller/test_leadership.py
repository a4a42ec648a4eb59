"""Who has stood by while another controller led starts again before it takes the role: its memory is of before."""

import asyncio

import pytest

from controller.__main__ import ControlComponent
from controller.role.disk_store import DiskStore
from controller.role.kept_files import KeptFiles
from controller.role.leadership import NO_KEYS, Leadership
from tests.support.stores import state_on
from tests.support.virtual.redis import Server
from trefoil.core.common import Lease, Revision
from trefoil.core.demand import TableAck
from trefoil.core.errors import RoleFree
from trefoil.runtime import codec
from trefoil.runtime.clock import ManualClock, WallClock
from trefoil.runtime.security.plan_keys import PlanKeys
from trefoil.runtime.state import LEASE_TTL_S
from trefoil.runtime.telemetry import Metrics


class Host:
    """Redis and a folder, and controllers on them that are told apart by name."""

    def __init__(self, folder, monkeypatch):
        self.clock, self.folder, self._patch = ManualClock(1000.0), folder, monkeypatch
        self.server = Server(self.clock)

    def controller(self, name: str, highest_seen: int = 0, folder: str = "", keys: PlanKeys = NO_KEYS) -> Leadership:
        self._patch.setattr("controller.role.leadership.socket.gethostname", lambda: name)
        store = DiskStore(self.folder / folder, 10)
        state = state_on(self.server, "default", self.clock)
        return Leadership(state, store, self.clock, Metrics("controller"), lambda: [highest_seen], keys)

    async def passes(self, seconds: float, *alive: Leadership) -> None:
        for _ in range(round(seconds)):
            await self.clock.advance(1.0)
            for one in alive:
                await one._step()


@pytest.fixture
def host(tmp_path, monkeypatch):
    return Host(tmp_path, monkeypatch)


async def test_a_standby_starts_anew_once_the_role_is_free(host):
    first, standby = host.controller("a"), host.controller("b", folder="elsewhere")
    await first._step()
    await host.passes(10.0, first, standby)
    assert first.epoch
    await first.release()
    with pytest.raises(RoleFree, match="another controller has led"):
        await standby._step()
    again = host.controller("b", folder="elsewhere")
    await again._step()
    assert again.epoch > 1


async def test_another_signing_key_starts_the_leader_anew_and_a_second_key_does_not(host, tmp_path):
    file = tmp_path / "plan.key"
    file.touch(0o600)
    file.write_text("0" * 32)
    leader = host.controller("a", keys=PlanKeys.read("default", file))
    for text in ("0" * 32, f"{'0' * 32}\n{'1' * 32}"):
        file.write_text(text)
        await leader._step()
    assert leader.epoch == 1
    file.write_text(f"{'1' * 32}\n{'0' * 32}")
    with pytest.raises(RoleFree, match="another key of plan_key_file signs: all plans are signed again"):
        await leader._step()


async def test_after_a_dead_one_the_role_is_taken_at_once(host):
    await host.controller("a")._step()  # and is never heard of again
    after = host.controller("b")
    await host.passes(LEASE_TTL_S + 1.0, after)
    assert after.epoch


@pytest.mark.parametrize("folder", ["", "elsewhere"])
async def test_one_that_was_stopped_and_overtaken_starts_anew_even_if_redis_has_forgotten_the_other(host, folder):
    seen = [0]
    stopped = host.controller("a")
    stopped._epochs_seen = lambda: seen
    await stopped._step()
    await host.passes(LEASE_TTL_S + 1.0)
    other = host.controller("b", folder=folder, highest_seen=stopped._known_epoch)
    await other._step()
    seen[0] = other.epoch  # as agents tell
    assert other.epoch > stopped._known_epoch
    host.server.flush()
    with pytest.raises(RoleFree):
        await host.passes(1.0, stopped)


async def test_one_that_only_redis_has_forgotten_takes_the_role_again(host):
    alone = host.controller("a")
    await alone._step()
    before = alone.epoch
    host.server.flush()
    await host.passes(2.0, alone)
    assert alone.epoch > before


@pytest.mark.parametrize("forged", [10**12, 10**12 - 1, 2_000_000])
async def test_a_forged_epoch_uses_up_none_of_those_there_are(host, forged):
    """In Redis, in what a node is said to have seen, and as what an agent obeys."""
    host.server.spoil("trefoil:default:epoch:controller", b"%d" % forged)
    alone = host.controller("a", highest_seen=forged)
    await alone._step()
    assert alone.epoch == 1
    host.server.spoil("trefoil:default:epoch:controller", b"%d" % forged)
    await host.passes(2.0, alone)
    assert alone.epoch == 2
    await alone.cede_to(forged)
    await host.passes(1.0, alone)
    assert alone.epoch == 3


@pytest.mark.parametrize(
    ("obeyed", "taken"), [([4], 5), ([4, 10**11], 5), ([10**12], 1), ([0], 1), ([999_999], 1_000_000)]
)
async def test_its_epoch_is_above_what_workers_acknowledge_as_far_as_that_can_be_true(host, obeyed, taken):
    """Its disk, the agents' and Redis were lost; a false value does not hide a true one."""
    alone = host.controller("a")
    for worker, epoch in enumerate(obeyed):
        ack = TableAck("d", worker, Revision(epoch, 3))
        await alone._state.put_unfenced(alone._state.keys.ack("d", worker), ack)
    await alone._step()
    assert alone.epoch == taken


@pytest.mark.parametrize("name", ["epoch", "led"])
@pytest.mark.parametrize("forged", [5_000_003, 10**11, 10**12])
@pytest.mark.parametrize("reader", [3, 0])
async def test_an_epoch_on_its_disk_that_is_far_beyond_all_others_is_not_led_under(host, name, forged, reader):
    """Agents refuse it: they take no epoch so far beyond what they know. Known by readers, else by Redis."""
    host.server.spoil("trefoil:default:epoch:controller", b"3")
    (host.folder / f"{name}.json").write_text(f'{{"epoch": {forged}}}')
    alone = host.controller("a", highest_seen=reader)
    await alone._step()
    assert alone.epoch == 4
    host.server.flush()
    await host.passes(2.0, alone)
    assert alone.epoch == 5, "and goes on from it"
    assert host.controller("a", highest_seen=reader)._kept_epoch() == 5


@pytest.mark.parametrize(("sound", "spoilt"), [("epoch", "led"), ("led", "epoch")])
async def test_a_spoilt_file_takes_no_epoch_with_it_that_the_other_one_knows(host, sound, spoilt):
    """Under which nothing was written yet, so that no reader knows it; what Redis counts is spoilt too."""
    host.server.spoil("trefoil:default:epoch:controller", b"999999999999")
    (host.folder / f"{sound}.json").write_text('{"epoch": 7}')
    (host.folder / f"{spoilt}.json").write_text('{"epoch": 4294967295}')
    alone = host.controller("a", highest_seen=3)
    await alone._step()
    assert alone.epoch == 8


async def test_an_epoch_above_a_believed_report_is_exceeded_although_no_reader_obeyed_it(host):
    """A false acknowledgement stood, and its leader died before it had sent a plan."""
    host.server.spoil("trefoil:default:epoch:controller", b"1000002")
    (host.folder / "epoch.json").write_text('{"epoch": 1000002}')
    alone = host.controller("a", highest_seen=1)
    await alone._step()
    assert alone.epoch == 1_000_003


@pytest.mark.parametrize(("kept", "taken"), [(4_999_999, 5_000_000), (5_000_000, 1), (10**12, 1)])
async def test_where_nothing_else_is_known_an_epoch_on_its_disk_counts_as_far_as_leases_were_counted(host, kept, taken):
    """A system that starts with an empty Redis: agents tell of theirs later, and would refuse one far beyond it."""
    (host.folder / "epoch.json").write_text(f'{{"epoch": {kept}}}')
    alone = host.controller("a")
    await alone._step()
    assert alone.epoch == taken


async def test_no_acknowledgement_takes_the_role_from_who_leads(host):
    alone = host.controller("a")
    await alone._step()
    await alone._state.put_unfenced(alone._state.keys.ack("d", 0), TableAck("d", 0, Revision(7, 1)))
    await host.passes(4.0, alone)
    assert alone.epoch == 1


async def test_an_epoch_that_was_given_back_at_once_is_taken_by_nobody_again(host, monkeypatch):
    async def overtaken(_files, _epoch):
        return True

    with monkeypatch.context() as patch:
        patch.setattr(KeptFiles, "overtaken", overtaken)
        with pytest.raises(RoleFree):
            await host.controller("a")._step()
    host.server.flush()
    again = host.controller("a")
    await again._step()
    assert again.epoch == 2


@pytest.mark.parametrize("ttl_ms", [0, 61_000])
async def test_a_lease_that_stands_longer_than_any_holds_up_nobody_who_has_led(host, ttl_ms):
    key = host.controller("any")._state.keys.lease("controller")
    leader = host.controller("a")
    await leader._step()
    host.server.set(key, codec.encode(Lease("controller", "nobody:1", 1, host.clock.now_s() + 4.0)), 4000)
    await leader._step()
    assert not leader.epoch
    host.server.set(key, codec.encode(Lease("controller", "nobody:1", 2, host.clock.now_s() + 4.0)), ttl_ms)
    with pytest.raises(RoleFree):
        await leader._step()
    again = host.controller("a")
    await again._step()
    assert again.epoch == 2


class Parts:
    """A keeper of the lease, a loop and a watch of files that end as they are told."""

    clock = WallClock()

    def __init__(self, **ends):
        self._ends = ends

    async def maintain(self):
        raise self._ends["lease"]

    async def run(self, clock=None):
        if "loop" in self._ends:
            raise self._ends["loop"]
        await asyncio.Event().wait()


async def test_a_controller_ends_by_the_free_role_itself_and_hides_no_bug_behind_it():
    free, bug = RoleFree("free"), ValueError("bug")
    alone, both = Parts(lease=free), Parts(lease=free, loop=bug)
    with pytest.raises(RoleFree):
        await ControlComponent(alone, None, alone, None, None, alone, alone, alone).run()
    with pytest.raises(ExceptionGroup) as ended:
        await ControlComponent(both, None, both, None, None, Parts(), Parts(), Parts()).run()
    assert set(ended.value.exceptions) == {free, bug}
