"""What `make test STALLS=1` stops, and what it leaves alone."""

import subprocess
import time

import psutil
import pytest

from tests.support.stalls import go_on, stop


@pytest.fixture
def family():
    parent = subprocess.Popen(["sh", "-c", "sleep 600 & sleep 600 & wait"])
    found = psutil.Process(parent.pid)
    while len(found.children()) < 2:
        pass
    yield found, found.children()
    for process in (*found.children(), found):
        process.kill()
    parent.wait()


def become(wanted: dict[psutil.Process, bool]) -> None:
    """Wait until those stand still that should, and the others do not: signals take a moment."""
    while {process: process.status() == psutil.STATUS_STOPPED for process in wanted} != wanted:
        time.sleep(0.01)


def test_all_below_one_stop_and_go_on(family):
    parent, children = family
    stopped = stop(parent)
    assert set(stopped) == set(children)
    become({parent: False} | dict.fromkeys(children, True))
    go_on(stopped)
    become(dict.fromkeys(children, False))


def test_who_was_stopped_already_stays_so(family):
    parent, (one, other) = family
    one.suspend()
    become({one: True})
    go_on(stop(parent))
    become({one: True, other: False})
