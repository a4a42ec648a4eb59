"""What keeps workers alive: how fast they are started again, and when that is given up. No real worker is started."""

import asyncio

import pytest

from dispatcher.settings import DispatcherSettings
from dispatcher.workers import supervisor
from dispatcher.workers.supervisor import STABLE_S, Supervisor


class Clock:
    def __init__(self):
        self.now = 0.0

    def monotonic_s(self):
        return self.now


class WorkerId:
    """Lives for so long, and ends with that code."""

    pid = 1

    def __init__(self, clock, lives_s, code):
        self._clock, self._lives_s, self._code = clock, lives_s, code
        self.signals = []
        self.told = asyncio.Event()

    async def wait(self):
        if self._lives_s is None:
            await self.told.wait()
            return 0
        self._clock.now += self._lives_s
        await asyncio.sleep(0)
        return self._code

    def send_signal(self, number):
        self.signals.append(number)
        self.told.set()


@pytest.fixture
def start(monkeypatch):
    """Runs a supervisor whose workers are these, one after the other; returns (exit code, numbers started).

    refused: which starts fail for want of a process."""

    async def run(lives, workers=1, refused=(), **settings):
        clock, started = Clock(), []
        todo = iter(lives)

        async def spawn(*argv, **_):
            started.append(int(next(a for a in argv if a.startswith("worker=")).removeprefix("worker=")))
            if len(started) in refused:
                raise OSError("no process is left")
            return WorkerId(clock, *next(todo, (None, 0)))

        monkeypatch.setattr(supervisor.asyncio, "create_subprocess_exec", spawn)
        monkeypatch.setattr(supervisor, "PAUSE_FIRST_S", 0.001)
        monkeypatch.setattr(supervisor, "PAUSE_MAX_S", 0.002)
        chosen = DispatcherSettings(
            workers=workers,
            inference_address="127.0.0.1:0",
            admin_address="127.0.0.1:0",
            metrics_address="",
            **settings,
        )
        one = Supervisor(chosen, [], clock)
        task = asyncio.create_task(one.run())
        async with asyncio.timeout(60):
            while not task.done():
                await asyncio.sleep(0.002)
                if len(started) - len(refused) > len(lives) and one._workers:
                    one._request_stop()
            return await task, started

    return run


async def test_a_worker_that_dies_is_started_again_under_a_number_of_its_own(start):
    assert await start([(STABLE_S, -9), (STABLE_S, 1)]) == (0, [0, 1000, 2000])


async def test_settings_that_a_worker_refuses_end_all(start):
    assert await start([(1.0, 2)]) == (2, [0])


async def test_workers_that_never_live_are_given_up(start):
    code, started = await start([(1.0, 1)] * 20)
    assert (code, started) == (1, [n * 1000 for n in range(6)])
    code, started = await start([(1.0, -11)] * 20)
    assert code == 1


async def test_a_worker_that_lived_once_is_never_given_up(start):
    code, started = await start([(STABLE_S, -9), *[(0.1, 1)] * 9, (0.1, 2)])
    assert (code, len(started)) == (0, 12)


@pytest.mark.parametrize("code", [1, 2, -9])
async def test_a_worker_that_never_lives_stops_none_that_has_lived_for_long(start, code):
    code, started = await start([(None, 0), *[(1.0, 1)] * 5, *[(1.0, code)] * 20], workers=2)
    assert (code, len(started)) == (0, 27)


async def test_a_worker_for_which_there_is_no_process_is_tried_again(start):
    assert await start([(STABLE_S, -9)] * 3, refused=(2, 3)) == (0, [n * 1000 for n in range(6)])
