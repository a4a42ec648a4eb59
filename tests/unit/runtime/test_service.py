import asyncio
import os
import re
import signal
import time
from functools import partial

import httpx
import pytest

from dispatcher.service.metrics import ExpositionComponent
from tests.support.unswept import NO_SWEEPS
from trefoil.core import errors
from trefoil.runtime import service
from trefoil.runtime.clock import ManualClock, WallClock
from trefoil.runtime.telemetry import Metrics

DEADLINE_S = 60.0  # what waits for it has failed, however busy this machine is


@pytest.fixture(autouse=True)
def unswept(monkeypatch):
    """A service searches its own process for garbage, not that of all tests."""
    monkeypatch.setattr(service, "gc", NO_SWEEPS)


class Recorder:
    """A part that writes down what happens to it."""

    def __init__(self, name, journal, fail_init=None, fail_run=None, finite=False, hang=False):
        self.name, self.journal = name, journal
        self.fail_init, self.fail_run, self.finite, self.hang = fail_init, fail_run, finite, hang
        self.running = asyncio.Event()

    async def init(self):
        if self.fail_init:
            raise self.fail_init
        self.journal.append(f"init {self.name}")

    async def run(self):
        self.journal.append(f"run {self.name}")
        self.running.set()
        if self.fail_run:
            raise self.fail_run
        if self.finite:
            return
        try:
            await asyncio.Event().wait()
        finally:
            self.journal.append(f"end {self.name}")

    async def shutdown(self):
        self.journal.append(f"shutdown {self.name}")
        if self.hang:
            await asyncio.Event().wait()


async def test_parts_start_in_order_and_stop_in_reverse():
    journal = []
    stop = asyncio.Event()
    parts = [Recorder(name, journal) for name in "ab"]
    task = asyncio.create_task(service.run(parts, WallClock(), stop))
    await parts[1].running.wait()
    stop.set()
    await task
    assert journal == ["init a", "init b", "run a", "run b", "end b", "shutdown b", "end a", "shutdown a"]


async def test_a_failed_init_unwinds_the_ones_before():
    journal = []
    parts = [
        Recorder("a", journal),
        Recorder("b", journal, fail_init=errors.PortInUse("taken")),
        Recorder("c", journal),
    ]
    with pytest.raises(errors.PortInUse):
        await service.run(parts, WallClock())
    assert "shutdown a" in journal
    assert not [entry for entry in journal if entry.endswith(("b", "c"))]


async def test_a_part_that_fails_ends_the_process_with_its_error():
    journal = []
    parts = [Recorder("a", journal), Recorder("b", journal, fail_run=errors.Unavailable("gone"))]
    with pytest.raises(errors.Unavailable):
        await asyncio.wait_for(service.run(parts, WallClock()), DEADLINE_S)
    assert journal[-3:] == ["shutdown b", "end a", "shutdown a"]


async def test_a_part_that_has_nothing_more_to_do_does_not_end_the_others():
    journal = []
    parts = [Recorder("a", journal), Recorder("b", journal, finite=True)]
    task = asyncio.create_task(service.run(parts, WallClock()))
    await parts[1].running.wait()
    await asyncio.sleep(0.01)
    assert not task.done()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(task, DEADLINE_S)
    assert journal[-1] == "shutdown a"


async def test_it_ends_when_all_parts_are_done():
    journal = []
    await asyncio.wait_for(service.run([Recorder("a", journal, finite=True)], WallClock()), DEADLINE_S)
    assert journal == ["init a", "run a", "shutdown a"]


async def test_a_part_that_hangs_in_shutdown_does_not_keep_the_others(monkeypatch):
    monkeypatch.setattr(service, "SHUTDOWN_S", 0.05)
    journal = []
    stop = asyncio.Event()
    parts = [Recorder("a", journal), Recorder("b", journal, hang=True)]
    task = asyncio.create_task(service.run(parts, WallClock(), stop))
    await parts[1].running.wait()
    stop.set()
    await asyncio.wait_for(task, DEADLINE_S)
    assert journal[-1] == "shutdown a"


async def test_a_signal_during_init_stops_the_start():
    class Slow(Recorder):
        async def init(self):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()

    journal = []
    await asyncio.wait_for(service.run([Recorder("a", journal), Slow("b", journal)], WallClock()), DEADLINE_S)
    assert journal[-1] == "shutdown a"
    assert not [entry for entry in journal if entry.endswith("b")]


async def test_a_second_signal_makes_a_part_that_drains_hurry():
    class Draining(Recorder):
        patience_s = 60.0
        quick = None

        async def shutdown(self):
            self.quick = asyncio.Event()
            os.kill(os.getpid(), signal.SIGTERM)
            await self.quick.wait()
            await super().shutdown()

        def hurry(self):
            self.quick.set()

    journal = []
    parts = [Recorder("a", journal), Draining("b", journal)]
    task = asyncio.create_task(service.run(parts, WallClock()))
    await parts[1].running.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(task, DEADLINE_S)
    assert journal[-3:] == ["shutdown b", "end a", "shutdown a"]


async def test_a_part_that_drains_has_the_time_that_it_asks_for(monkeypatch):
    monkeypatch.setattr(service, "SHUTDOWN_S", 0.05)

    class Draining(Recorder):
        patience_s = 5.0

        async def shutdown(self):
            await asyncio.sleep(0.3)
            await super().shutdown()

        def hurry(self):
            pass

    journal, stop = [], asyncio.Event()
    parts = [Draining("a", journal)]
    task = asyncio.create_task(service.run(parts, WallClock(), stop))
    await parts[0].running.wait()
    stop.set()
    await asyncio.wait_for(task, DEADLINE_S)
    assert journal[-1] == "shutdown a"


def test_main_maps_errors_to_exit_codes(capsys):
    def broken(argv):
        raise errors.SettingError("wrong", field="zone", value=3, remedy="use GB")

    assert service.main(broken, []) == 2
    assert capsys.readouterr().err == "error: zone = 3: wrong. Remedy: use GB\n"
    assert service.main(lambda _: [Recorder("a", [], finite=True)], []) == 0
    with pytest.raises(ZeroDivisionError):
        service.main(lambda _: [Recorder("a", [], fail_run=ZeroDivisionError())], [])


async def test_a_process_whose_network_was_taken_away_ends():
    """As the agent of a container whose network was another one's, which has been restarted."""
    names = {"lo", "eth0"}
    clock = ManualClock()
    part = service.NetworkComponent(clock, lambda: list(enumerate(names)))
    running = asyncio.create_task(part.run())
    await clock.advance(60.0)
    names.discard("eth0")
    await clock.advance(1.5)
    names.add("eth0")
    await clock.advance(60.0)
    assert not running.done(), "an interruption that passes ends nothing"
    names.discard("eth0")
    await clock.advance(3.0)
    with pytest.raises(errors.StartError, match=r"network: for 2 s this process has had no network but loopback\. "):
        await running


async def test_where_there_is_only_loopback_no_network_is_missed():
    clock = ManualClock()
    running = asyncio.create_task(service.NetworkComponent(clock, lambda: [(1, "lo")]).run())
    await clock.advance(60.0)
    assert not running.done()
    running.cancel()


def page_of_one(address, not_ready):
    return service.MetricsComponent(Metrics("dispatcher"), address, WallClock(), not_ready)


def page_of_many_workers(address, not_ready):
    return ExpositionComponent(address, partial(asyncio.sleep, 0, b"trefoil_build_info 1\n"), not_ready)


@pytest.mark.parametrize("make", [page_of_one, page_of_many_workers])
async def test_probes_of_the_metrics_port_tell_alive_from_ready_and_why(make, unused_tcp_port):
    why = "the service is starting"
    page = make(f"127.0.0.1:{unused_tcp_port}", lambda: why)
    await page.init()
    running = asyncio.create_task(page.run())
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{unused_tcp_port}", trust_env=False) as client:

        async def asked(path):
            answer = await client.get(path)
            return answer.status_code, answer.text.strip()

        assert await asked("/healthz") == (200, "ok")
        for path in ("/readyz", "/readyz/"):
            assert await asked(path) == (503, "the service is starting")
            answer = await client.head(path)
            assert (answer.status_code, answer.content) == (503, b"")
        for path in ("/ready", "/livez", "/readyz/x"):
            assert (await asked(path))[0] == 404
        why = ""
        assert await asked("/readyz?verbose=1") == (200, "ok")
        for path in ("/metrics", "/"):
            code, text = await asked(path)
            assert code == 200
            assert "trefoil_build_info" in text
            answer = await client.head(path)
            assert (answer.status_code, answer.content) == (200, b"")
    running.cancel()
    await page.shutdown()


async def test_an_event_loop_that_stands_still_is_neither_alive_nor_ready(unused_tcp_port, monkeypatch):
    monkeypatch.setattr(service, "STILL_S", 0.2)
    page = service.MetricsComponent(Metrics("controller"), f"127.0.0.1:{unused_tcp_port}", WallClock(), str)
    await page.init()
    running = asyncio.create_task(page.run())
    await asyncio.sleep(0)
    for path in ("/healthz", "/readyz"):
        time.sleep(0.3)  # the standstill
        # From here too the loop does not turn: the page answers from a separate thread.
        answer = httpx.get(f"http://127.0.0.1:{unused_tcp_port}{path}", trust_env=False)
        assert answer.status_code == 503
        assert re.fullmatch(r"its event loop has stood still for \d+ s\n", answer.text)
    running.cancel()
    await page.shutdown()


async def test_a_server_is_not_ready_before_it_starts_and_once_it_stops():
    class Server:
        start = stop = wait_for_termination = staticmethod(lambda *_: asyncio.sleep(0))

    server = service.ServerComponent(Server)
    assert server.not_ready() == "the service is starting"
    await server.init()
    assert not server.not_ready()
    await server.shutdown()
    assert server.not_ready() == "the service is stopping"
