"""Patience with a driver: it passes with time, or never."""

import asyncio
import threading
import time

import pytest

from power_agent.devices.driver_calls import DriverCalls
from power_agent.devices.errors import DeviceBusy, DeviceError, DeviceLost, NoPermission, NoRoom
from power_agent.devices.inventory import ObservedSlice
from power_agent.devices.session import Session
from power_agent.slices.mig import MigInstances
from tests.support.plans import key
from trefoil.core.fleet import SliceKey
from trefoil.runtime.clock import ManualClock, WallClock

KEY = key("3g.20gb", 4)


class Driver:
    """An inventory that refuses the first calls."""

    def __init__(self, *refusals: DeviceError) -> None:
        self.session = Session()
        self.refusals = list(refusals)
        self.calls = 0

    def _call(self) -> None:
        self.calls += 1
        if self.refusals:
            raise self.refusals.pop(0)

    def create_gpu_instance(self, device: str, slice_type: str, start: int) -> ObservedSlice:
        self._call()
        return ObservedSlice(SliceKey(device, slice_type, start, 4), 1, None, "", 19968, 42)

    def pids(self, uuid: str) -> tuple[int, ...]:
        try:
            self._call()
        except DeviceBusy as error:
            return error.holders
        return ()

    def close(self) -> None:
        pass

    def destroy_gpu_instance(self, key: SliceKey) -> None:
        self._call()

    def destroy_compute_instances(self, key: SliceKey) -> None:
        self._call()


async def outcome(driver: Driver, verb: str, *more: str, retries_max: int = 3) -> tuple[object, float]:
    """Result or error of one verb, and how long it waited."""
    clock = ManualClock()
    calls = DriverCalls(driver)  # type: ignore[arg-type]
    mig = MigInstances(calls, driver, clock, retries_max, 0.1)  # type: ignore[arg-type]
    task = asyncio.create_task(getattr(mig, verb)(KEY, *more))
    while not task.done():
        await asyncio.sleep(0.001)  # the driver's thread runs in real time
        await clock.advance(0.05)
    await calls.close()
    return task.exception() or task.result(), clock.monotonic_s()


def busy(*pids: int) -> DeviceBusy:
    return DeviceBusy("in use", code=19, holders=pids)


async def test_in_use_is_waited_for_with_growing_pauses():
    driver = Driver(busy(7), busy(7), busy(7))
    result, waited_s = await outcome(driver, "destroy_ci")
    assert result is None
    assert driver.calls == 4
    assert waited_s >= 0.1 + 0.2 + 0.4


async def test_patience_ends_and_the_error_names_the_holders():
    driver = Driver(*(busy(7, 8) for _ in range(9)))
    result, _ = await outcome(driver, "destroy_gi")
    assert isinstance(result, DeviceBusy)
    assert result.holders == (7, 8)
    assert driver.calls == 4


async def test_a_destruction_that_did_not_happen_is_tried_again():
    driver = Driver(DeviceError("reported destroyed, but still listed"))
    assert (await outcome(driver, "destroy_gi"))[0] is None
    assert driver.calls == 2


@pytest.mark.parametrize("error", [NoPermission("root is needed", code=4), DeviceError("unknown", code=999)])
async def test_other_refusals_are_final(error):
    driver = Driver(error)
    assert (await outcome(driver, "create_gi"))[0] is error
    assert driver.calls == 1


async def test_a_place_that_is_just_being_freed_is_waited_for():
    driver = Driver(NoRoom("held", code=23))
    result, _ = await outcome(driver, "create_gi")
    assert isinstance(result, ObservedSlice)
    assert result.key == KEY


class Hanging(Driver):
    """A driver whose first GPU does not return until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def gpu_instances(self, device: str) -> tuple[ObservedSlice, ...]:
        if device.endswith("gpu0"):
            assert self.go_on.wait(20)
        return ()


async def test_a_call_that_hangs_stops_its_own_device_only_and_counts_as_its_loss_until_it_returns():
    driver = Hanging()
    calls = DriverCalls(driver, call_timeout_s=1.0)  # type: ignore[arg-type]
    mig = MigInstances(calls, driver, WallClock(), 0, 0.1)  # type: ignore[arg-type]
    first = asyncio.create_task(mig.list("node0/gpu0"))
    await asyncio.sleep(0)
    assert await mig.list("node0/gpu1") == ()
    with pytest.raises(DeviceLost, match=r"gpu0: a call has not returned for 1 s"):
        await first
    started_s = WallClock().monotonic_s()
    with pytest.raises(DeviceLost):
        await mig.list("node0/gpu0")
    assert WallClock().monotonic_s() - started_s < 0.9, "nothing more is asked of it"
    driver.go_on.set()
    async with asyncio.timeout(60):
        while True:
            try:
                assert await mig.list("node0/gpu0") == ()
                break
            except DeviceLost:
                await asyncio.sleep(0.01)
    await calls.close()


async def test_calls_to_one_device_are_made_one_after_the_other():
    running = [0]

    def call() -> int:
        running[0] += 1
        time.sleep(0.01)
        at_once, running[0] = running[0], running[0] - 1
        return at_once

    calls = DriverCalls(Driver())  # type: ignore[arg-type]
    assert await asyncio.gather(*(calls.call("node0/gpu0", call) for _ in range(5))) == [1] * 5
    await calls.close()


async def test_a_bug_in_a_call_reaches_whoever_waits_and_the_worker_lives():
    calls = DriverCalls(Driver())  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        await calls.call("node0/gpu0", lambda: 1 // 0)
    assert await calls.call("node0/gpu0", lambda: 7) == 7
    await calls.close()


async def test_a_gpu_that_others_compute_on_does_not_serve_as_a_whole():
    driver = Driver(*(busy(7, 8) for _ in range(9)))
    result, _ = await outcome(driver, "check_unused", "GPU-1")
    assert isinstance(result, DeviceBusy)
    assert "processes 7, 8 compute on it. Remedy: stop them, or take the GPU out of service" in str(result)
    result, _ = await outcome(Driver(busy(7)), "check_unused", "GPU-1")
    assert result is None, "who has just ended may be listed for a moment"
