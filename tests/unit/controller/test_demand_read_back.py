"""Arrivals per second are written down once each, and a controller that starts reads back what its forecaster needs."""

from pathlib import Path

import pytest

from controller.loop.demand_publisher import DemandPublisher
from controller.observe import reader
from controller.observe.core.observation import Observation
from controller.observe.reader import ObservationReader
from controller.role.disk_store import DiskStore
from controller.role.leadership import Leadership
from controller.settings import ControllerSettings
from tests.support.planning import digits
from tests.support.stores import state_on
from tests.support.virtual.redis import Server
from trefoil.core.demand import LoadCell, LoadForecast, LoadKey, LoadWindow
from trefoil.runtime.clock import ManualClock
from trefoil.runtime.telemetry import Metrics

NOW_S = 1_795_000_000.0
LOOKS_BACK_S = 120.0


class Noting:
    """Forecaster that notes what it is given."""

    history_s = LOOKS_BACK_S

    def __init__(self) -> None:
        self.seen: tuple[float, ...] = ()

    def forecast(self, family, arrivals, bin_s, now_s, lead_s):
        assert bin_s == 1.0
        self.seen = tuple(arrivals)
        return LoadForecast(family, "noting", now_s, lead_s, fallback_reason="" if arrivals else "no data")


class Controller:
    """One process after the other, on one Redis and one disk; `ahead_s`: by how much its clock is ahead of Redis'."""

    def __init__(self, server: Server, time: ManualClock, folder: Path, ahead_s: float = 0.0) -> None:
        self.time, self.clock = time, ManualClock(time.now_s() + ahead_s)
        self.state = state_on(server, "default", self.clock)
        settings, self.noting = ControllerSettings(), Noting()
        self.observation = Observation(settings, self.state.keys, digits(), self.noting, self.clock.now_s())
        self.reader = ObservationReader(self.observation, self.state, settings.carbon, self.clock)
        disk, metrics = DiskStore(folder, 10), Metrics("controller")
        self.role = Leadership(self.state, disk, self.clock, metrics, list)
        self.publisher = DemandPublisher(self.state.keys, self.reader, self.role, self.clock)
        self.refreshes = 0

    async def run(self, seconds: int, worker: str, per_half_second: int = 4, ends: bool = True) -> None:
        """Half a second after the other: one window of a worker, and one tick."""
        for _ in range(2 * seconds):
            await self.clock.advance(0.5)
            await self.time.advance(0.5)
            now_s = self.clock.now_s()
            cell = LoadCell(LoadKey("digits"), arrived=per_half_second)
            window = LoadWindow(worker, 0, int(2 * now_s), now_s - 0.5, now_s, cells=(cell,))
            await self.state.append_unfenced(self.state.keys.load(worker, 0), window)
            await self.role._step()
            await self.reader.refresh()
            assert not self.observation.inputs.down
            self.observation.demand(["digits"], {}, now_s)
            await self.publisher.publish()
        if ends:
            await self.role.release()

    async def forget_worker(self, worker: str) -> None:
        await self.state.delete_unfenced(self.state.keys.load(worker, 0))

    async def written(self) -> list[LoadWindow]:
        key = self.state.keys.demand("digits")
        return [window for _, window in await self.state.tail(key, LoadWindow, 10_000)]


@pytest.fixture
def world(tmp_path):
    time = ManualClock(NOW_S)
    server = Server(time)
    return lambda **more: Controller(server, time, tmp_path, **more)


async def test_a_restarted_controller_forecasts_from_before_it_started(world, monkeypatch):
    monkeypatch.setattr(reader, "PAGE", 25)  # a day is read in pages as well
    first = world()
    await first.run(80, "d1")
    assert len(first.noting.seen) >= 79
    await first.forget_worker("d1")
    second = world()
    await second.run(3, "d2", per_half_second=6)
    assert len(second.noting.seen) >= 80
    assert set(second.noting.seen[:78]) == {8.0}
    assert second.noting.seen[-1] == 12.0


async def test_each_second_is_written_down_once_also_when_controllers_take_turns(world):
    for worker in ("d1", "d2", "d3"):
        await world().run(12, worker)
    found = await world().written()
    seconds = [window.starts_at_s for window in found]
    assert seconds == sorted(set(seconds))
    assert len(seconds) >= 34, "what a controller missed while nobody led is in the streams of the workers"
    assert {window.cells[0].arrived for window in found} == {8}


async def test_a_hole_of_some_minutes_makes_history_begin_anew(world):
    first = world()
    await first.run(20, "d1")
    await first.forget_worker("d1")
    await first.time.advance(90.0)
    second = world()
    await second.run(5, "d2")
    assert len(second.noting.seen) <= 5


async def test_stamps_of_a_controller_whose_clock_was_another_are_read_in_our_time(world):
    first = world(ahead_s=3600.0)
    await first.run(30, "d1")
    await first.forget_worker("d1")
    second = world()
    await second.run(5, "d2")
    assert len(second.noting.seen) >= 30


@pytest.mark.parametrize("ahead_s", [0.0, 1.0, 700.0, 1e9, -700.0, -1e9])
@pytest.mark.parametrize("last", [False, True])
async def test_a_stray_second_is_no_history_and_stops_no_writing(world, ahead_s, last):
    first = world()
    await first.run(20, "d1", ends=False)
    second = round(first.clock.now_s()) + ahead_s + 3.0
    cell = LoadCell(LoadKey("digits"), arrived=900_000, arrived_per_s=(900_000,))
    stray = LoadWindow(starts_at_s=second, ends_at_s=second + 1.0, cells=(cell,))
    await first.state.append(first.role._lease, first.state.keys.demand("digits"), stray, 1000)
    await first.run(0 if last else 10, "d1")
    await first.forget_worker("d1")
    again = world()
    await again.run(4, "d2")
    assert len(again.noting.seen) >= (20 if last else 30)
    assert set(again.noting.seen[:-4]) == {8.0}
    assert sum(window.cells[0].arrived == 8 for window in await again.written()) >= (22 if last else 32)
