"""A wall clock that steps by an hour costs nobody anything, in virtual time: nobody is called stale, dead or silent, no
role is lost, no joule twice; requests and decisions go on. Also where a process starts after the step, on a calendar
that no other process has."""

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from tests.support.virtual.faults import replanned
from tests.support.virtual.promises import told
from tests.support.virtual.system import PLACES, System, history
from trefoil.core.energy import EnergySample

STEP_AT_S, ASKED_S = 9.0, 0.5
HEARD_S = 5.0  # within which windows of a worker that has started come
EVERYBODY = ("everybody", PLACES)
ONE_EACH = tuple((place, (place,)) for place in PLACES)
FLUSH_SHARE = 0.05  # by which two histories differ whose last totals were written a second apart
EXPIRED_S = 2.0  # after which all is there again whose time to live Redis' own clock has jumped over


class Watch:
    """What a history shows of those who take each other for lost."""

    def __init__(self, system: System, places: Sequence[str], step_s: float, then: Callable[[System], None]) -> None:
        self.system, self.then = system, then
        self.lost: list[tuple[float, str]] = []
        self.samples: dict[str, list[EnergySample]] = defaultdict(list)
        self.decided_s: list[float] = []
        self._rungs: dict[str, float] = {}
        system.every(0.25, 6.0, self._look)
        system.loop.call_later(STEP_AT_S, system.step_clocks, places, step_s)
        system.loop.call_later(STEP_AT_S + 1.0, then, system)
        system.loop.call_later(STEP_AT_S + ASKED_S, replanned, system, None)
        system.loop.call_later(STEP_AT_S + 8.0, replanned, system, None)
        written = system.server.on_write

        def on_write(kind, key, *rest):
            if key == system.keys.decisions():
                self.decided_s.append(system.loop.time() - 1000.0)
            written(kind, key, *rest)

        system.server.on_write = on_write
        system.loop.call_later(5.0, self._listen)

    def _listen(self) -> None:
        receipts = self.system.controller.service._loop._accountant.receipts
        sample = receipts.sample

        def heard(one: EnergySample) -> None:
            self.samples[one.device].append(one)
            sample(one)

        receipts.sample = heard

    def _look(self) -> None:
        system, now_s = self.system, self.system.loop.time() - 1000.0
        service = system.controller.service
        if service is not None and system.controller.process is not None:
            observation = service._loop.observation
            if stale := observation.fleet(system.controller.clock.now_s()).stale:
                self.lost.append((now_s, f"the controller calls {stale} stale"))
            if observation.inputs.nodes and not observation.windows.live(system.controller.clock.now_s()):
                self.lost.append((now_s, "the controller hears no dispatcher"))
            of_late = observation.windows.begun_since(system.controller.clock.now_s() - HEARD_S)
            heard = {(window.dispatcher, window.worker) for window in of_late}
            silent = [one.name for one in system.workers if one.local is not None and one.local.id not in heard]
            if silent and now_s > STEP_AT_S + 2 * HEARD_S:
                self.lost.append((now_s, f"the controller does not hear {silent}"))
        for worker in system.workers:
            if worker.local is None:
                continue
            sharers = worker.local.routing.membership.sharers
            if len(sharers) < sum(one.local is not None for one in system.workers):
                self.lost.append((now_s, f"{worker.name} takes another one for dead"))
            for rung in worker.local.active_rungs:
                self._rungs.setdefault(f"{worker.name} {rung}", now_s)
                if now_s - self._rungs[f"{worker.name} {rung}"] > 1.0:
                    self.lost.append((now_s, f"{worker.name} stands on rung {rung} for more than a second"))
            for gone in [
                k for k in self._rungs if k.startswith(worker.name) and k[11:] not in worker.local.active_rungs
            ]:
                del self._rungs[gone]

    def check_samples(self) -> None:
        """Each reading of a meter was booked once, beside its neighbour, with what it can have been."""
        assert len(self.samples) == 4
        for samples in self.samples.values():
            assert [one.seq for one in samples] == list(range(samples[0].seq, samples[-1].seq + 1))
            assert len(samples) > 30
            assert all(0.0 < one.counter_j < 200.0 for one in samples)
            assert all(abs(after.starts_at_s - before.ends_at_s) < 1.2 for before, after in pairwise(samples))


def play(places: Sequence[str], step_s: float, then: Callable[[System], None]) -> tuple[Watch, System]:
    """A history with one step, and what is done a second after it."""
    watches: list[Watch] = []
    found, system = history(3, lambda system: watches.append(Watch(system, places, step_s, then)))
    assert not found, told(found, system.log)
    assert {end for request in system.requests for end in request.ends} == {"OK"}, told([], system.log)
    return watches[0], system


def booked_j(system: System) -> float:
    """All that was ever written to totals, of whatever hour."""
    names = system.server.names(system.keys.totals_prefix())
    return sum(float(system.server.value(name)[b"joules"]) for name in names)


@functools.cache
def unstepped_j(then: Callable[[System], None]) -> float:
    """What is booked where no clock is stepped."""
    return booked_j(play((), 0.0, then)[1])


def nothing(_: System) -> None:
    """Nobody starts again."""


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
@pytest.mark.parametrize(
    ("who", "places"), [EVERYBODY, *(pytest.param(*one, marks=pytest.mark.long) for one in ONE_EACH)]
)
def test_a_step_takes_nothing_from_anybody(who, places, step_s):
    watch, system = play(places, step_s, nothing)
    ends_s = STEP_AT_S + EXPIRED_S if "redis" in places and step_s > 0 else 0.0
    lost = [what for at_s, what in watch.lost if at_s > ends_s]
    assert not lost, told([f"{at_s:.2f} s: {what}" for at_s, what in watch.lost], system.log)
    assert system.promises._granted == 1, "no role was lost"
    assert any(0.0 <= at_s - STEP_AT_S <= 5.0 for at_s in watch.decided_s), watch.decided_s
    watch.check_samples()
    assert booked_j(system) == pytest.approx(unstepped_j(nothing), rel=FLUSH_SHARE)


def restart_controller(system: System) -> None:
    system.controller.kill()
    system.controller.start()


def restart_agent(system: System) -> None:
    system.nodes["node0"].restart()


def restart_worker(system: System) -> None:
    system.workers[0].kill()
    system.workers[0].start()


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
@pytest.mark.parametrize("again", [restart_controller, restart_agent, restart_worker])
def test_who_starts_after_the_step_knows_the_others_by_sight(again, step_s):
    watch, system = play(PLACES[:-1], step_s, again)
    assert not watch.lost, told([f"{at_s:.2f} s: {what}" for at_s, what in watch.lost], system.log)
    assert any(0.0 <= at_s - STEP_AT_S - 8.0 <= 5.0 for at_s in watch.decided_s), watch.decided_s
    if again is restart_agent:
        watch.check_samples()
    assert booked_j(system) == pytest.approx(unstepped_j(again), rel=FLUSH_SHARE)
