"""Whole systems in virtual time, each from a seed: what is promised holds whatever happens to them.

SEEDS=first:last plays others than the suite does, e.g. SEEDS=1000:3000 pytest tests/simulation/test_whole_system.py.
"""

import os

import pytest

from tests.support.virtual.faults import ALL_KINDS, MOMENTS, drawn, drawn_together, strike
from tests.support.virtual.promises import told
from tests.support.virtual.system import System, history

FIRST, LAST = (int(part) for part in os.environ.get("SEEDS", "0:20").split(":"))
BLOCK = 10


@pytest.mark.parametrize("faults", [drawn, drawn_together])
@pytest.mark.parametrize("first", range(FIRST, LAST, BLOCK))
def test_drawn_faults_break_no_promise(first, faults):
    for seed in range(first, min(first + BLOCK, LAST)):
        found, system = history(seed, faults)
        assert not found, f"seed {seed}: {told(found, system.log)}"
        assert sum(system.faults.values()) >= 2
        assert len(system.requests) > 40


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_each_fault_alone_breaks_no_promise(kind):
    def once(system: System) -> None:
        system.loop.call_later(9.0, strike, system, kind, system.rng.random(4))

    found, system = history(77, once)
    assert not found, told(found, system.log)


def test_faults_strike_in_the_moments_that_they_wait_for():
    struck = set().union(*(history(seed, drawn_together)[1].faults for seed in (0, 2, 7, 16)))
    assert struck >= set(MOMENTS)


def test_a_seed_is_one_history():
    first, second = history(5, drawn), history(5, drawn)
    assert list(first[1].log) == list(second[1].log)
    assert [r.ends for r in first[1].requests] == [r.ends for r in second[1].requests]


def test_without_faults_every_request_is_answered():
    found, system = history(3, lambda _: None)
    assert not found, told(found, system.log)
    assert {end for request in system.requests for end in request.ends} == {"OK"}
