import contextlib
import inspect
import json
import os
import re
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest

from trefoil.core.errors import PortInUse
from trefoil.runtime import telemetry
from trefoil.runtime.telemetry import ALL, METRICS, Metrics

ROOT = Path(__file__).parents[3]
UNITS = ("_total", "_seconds", "_ratio", "_joules", "_watts", "_hertz", "_celsius", "_bytes", "_grams")


def test_the_document_is_current():
    page = ROOT / "docs" / "metrics.md"
    assert page.read_text() == telemetry.markdown(), "run: python -m trefoil.runtime.telemetry > docs/metrics.md"


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_declarations_follow_the_conventions(metric):
    assert re.fullmatch(r"trefoil_[a-z_]+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert not re.search(r"_(ms|kwh|mhz|mj|percent|kb)(_|$)", metric.name.removesuffix("_per_kwh"))
    assert bool(metric.buckets) == (metric.kind == "histogram")
    assert metric.help.endswith(".")
    assert set(metric.services) <= set(ALL)
    if metric.kind == "histogram":
        assert metric.name.endswith(UNITS)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_what_is_declared_is_written_by_each_of_its_services(metric):
    """A page built on a metric that nobody writes shows a calm that is not there."""
    runtime = "".join(
        (ROOT / "trefoil" / "runtime" / f"{name}.py").read_text()
        for name in ("files", "rpc", "service", "state", "state_files")
    )
    common = runtime + inspect.getsource(Metrics)
    for service in metric.services:
        own = "".join(path.read_text() for path in (ROOT / service).rglob("*.py"))
        assert f'"{metric.name}"' in own + common


def test_names_are_unique():
    assert len({metric.name for metric in METRICS}) == len(METRICS)


@pytest.mark.parametrize("service", ALL)
def test_every_sample_says_whether_it_is_simulated(service):
    metrics = Metrics(service)
    assert 'simulated="false"' in metrics.text()
    metrics.simulated = True
    lines = [line for line in metrics.text().splitlines() if not line.startswith("#")]
    assert lines
    assert all('simulated="true"' in line for line in lines)


def test_counting():
    metrics = Metrics("dispatcher")
    metrics.inc("trefoil_requests_total", family="digits", code="OK")
    metrics.bind("trefoil_requests_total", family="digits", code="OK").inc(2)
    metrics.observe("trefoil_request_duration_seconds", 0.02, family="digits")
    metrics.set("trefoil_in_flight_requests", 3, slice="a")
    metrics.set("trefoil_in_flight_requests", 4, slice="b")
    metrics.drop("trefoil_in_flight_requests", "a")
    text = metrics.text()
    assert 'trefoil_requests_total{code="OK",family="digits",simulated="false"} 3.0' in text
    assert 'trefoil_request_duration_seconds_count{family="digits",simulated="false"} 1.0' in text
    assert re.findall(r'trefoil_in_flight_requests{.*slice="(.)"', text) == ["b"]


def test_state_gauges_are_one_hot():
    metrics = Metrics("controller")
    metrics.set_one_of("trefoil_act_mode", "mode", "act", ("observe", "advise", "act"))
    assert re.findall(r'trefoil_act_mode{mode="(\w+)".*} 1.0', metrics.text()) == ["act"]


def test_a_service_has_its_own_metrics_only():
    with pytest.raises(KeyError):
        Metrics("carbon_feed").inc("trefoil_requests_total", family="digits", code="OK")


def test_served_over_http_and_the_port_is_given_back(unused_tcp_port):
    metrics = Metrics("controller")
    close = metrics.serve("127.0.0.1", unused_tcp_port)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{unused_tcp_port}/metrics") as response:
            assert b"trefoil_build_info" in response.read()
        with pytest.raises(PortInUse, match=str(unused_tcp_port)):
            metrics.serve("127.0.0.1", unused_tcp_port)
    finally:
        close()
    metrics.serve("127.0.0.1", unused_tcp_port)()


def test_logs_are_json_without_a_terminal(capfd):
    telemetry.setup_logging("controller", "info")
    import structlog

    structlog.get_logger().info("decided", plan=3)
    structlog.get_logger().debug("not shown")
    (line,) = capfd.readouterr().err.splitlines()
    logged = json.loads(line)
    assert logged.pop("timestamp").endswith("Z")
    assert logged == {"service": "controller", "event": "decided", "plan": 3, "level": "info"}
    structlog.reset_defaults()


def test_a_log_on_a_full_disk_loses_lines_and_ends_no_process_and_says_how_many_were_lost(tmp_path):
    """A real process whose stderr is /dev/full, then a file: its logs by both libraries, a warning, its exit."""
    code = """
import logging, os, sys, warnings
import structlog
from trefoil.runtime.telemetry import setup_logging
setup_logging("controller", "info")
log = structlog.get_logger()
for number in range(3):
    log.warning("structured", number=number)
    logging.getLogger("grpc").error("plain %d", number)
warnings.warn("heard")
os.dup2(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), 2)
log.info("there is room again")
print("went on")
"""
    kept = tmp_path / "log"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code, str(kept)], stderr=full, stdout=subprocess.PIPE, text=True, check=True
        )
    assert done.stdout == "went on\n"
    lost, line = map(json.loads, kept.read_text().splitlines()[:2])
    assert (lost["count"], line["event"]) == (6, "there is room again")


def test_half_a_line_on_a_disk_that_filled_is_ended_before_the_next(tmp_path, monkeypatch):
    """The first line finds room for 4 bytes, the second for none, the third for all."""
    rooms, kept, write = [4, 0, 0], tmp_path / "log", os.write

    def scarce(file, data):
        room = rooms.pop(0) if rooms else len(data)
        if not room:
            raise OSError(28, "No space left on device")
        return write(file, data[:room])

    with kept.open("wb") as file:
        stream = telemetry.LogStream(file.fileno())
        monkeypatch.setattr(telemetry.os, "write", scarce)
        for text in ("first line\n", "second line\n", "third line\n"):
            stream.write(text)
    first, lost, third = kept.read_text().splitlines()
    assert (first, json.loads(lost)["count"], third) == ("firs", 2, "third line")


def test_observing_many_times_at_once_is_observing_many_times():
    one, many = Metrics("dispatcher"), Metrics("dispatcher")
    name, values = "trefoil_request_duration_seconds", [(2**-11, 3), (0.001, 1), (2**-5, 5), (2.0**30, 1)]
    for value, count in values:
        many.observe_times(many.bind(name, family="digits"), value, count)
        for _ in range(count):
            one.observe(name, value, family="digits")
    pages = ([line for line in each.text().splitlines() if f"{name}_" in line] for each in (one, many))
    seen, at_once = ([line for line in page if "_created" not in line] for page in pages)
    assert len(seen) > 30
    assert seen == at_once


@pytest.mark.parametrize(
    "headers", ["", "Connection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 40\r\n", "Connection: keep-alive\r\n"]
)
def test_a_page_answers_one_request_of_a_connection_and_reads_no_further(unused_tcp_port, headers):
    close = Metrics("dispatcher").serve("127.0.0.1", unused_tcp_port)
    asked = f"GET /metrics HTTP/1.1\r\nHost: x\r\n{headers}\r\n".encode()
    with socket.create_connection(("127.0.0.1", unused_tcp_port), 60) as client:
        client.sendall(asked + b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        answered = b"".join(iter(lambda: client.recv(2**16), b""))
    close()
    assert answered.count(b"HTTP/1.0 200 OK") == 1


def test_clients_that_say_nothing_take_no_more_threads_than_the_page_has_for_all(unused_tcp_port, monkeypatch, capfd):
    monkeypatch.setattr(telemetry, "SILENT_S", 1.0)
    close = Metrics("dispatcher").serve("127.0.0.1", unused_tcp_port)
    before, address = threading.active_count(), ("127.0.0.1", unused_tcp_port)
    with contextlib.ExitStack() as stack:
        silent = []
        for number in range(telemetry.CLIENTS_MAX + 8):
            silent.append(stack.enter_context(socket.create_connection(address, 60)))
            silent[-1].sendall(b"GET /met" if number % 2 else b"")
            assert threading.active_count() <= before + telemetry.CLIENTS_MAX + 2
        with urllib.request.urlopen(f"http://127.0.0.1:{unused_tcp_port}/metrics", timeout=60) as page:
            assert b"trefoil_build_info" in page.read()
        assert [client.recv(1) for client in silent] == [b""] * len(silent), "each is closed by the server"
    close()
    assert capfd.readouterr().err == ""
