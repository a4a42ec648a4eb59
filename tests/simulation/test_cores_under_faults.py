"""The cores on the simulated shell, struck by drawn faults: what is promised holds whatever happens around them.

SEEDS=first:last plays others than the suite does. `python -m tests.support.cores 0:10000 2` does the same for thousands
of them, and says how many it plays a minute. Bytes, asyncio and clocks: test_whole_system.py.
"""

import os

import pytest

from controller.observe.core.observation import Observation
from tests.simulation.test_whole_system_finds import CASES, put_back
from tests.support.cores.faults import KINDS, MOMENTS, drawn, strike
from tests.support.cores.system import CoreSystem, history
from tests.support.virtual.promises import told

FIRST, LAST = (int(part) for part in os.environ.get("SEEDS", "0:100").split(":"))
BLOCK = 25


@pytest.mark.parametrize("first", range(FIRST, LAST, BLOCK))
def test_drawn_faults_break_no_promise(first):
    for seed in range(first, min(first + BLOCK, LAST)):
        found, system = history(seed, drawn)
        assert not found, f"seed {seed}: {told(found, system.lines)}"
        assert sum(system.faults.values()) >= 2
        assert system.ledger.total["digits"].answered > 40


@pytest.mark.parametrize("kind", KINDS)
def test_each_fault_alone_breaks_no_promise(kind):
    found, system = history(77, lambda system: system.after(9.0, strike, system, kind, system.rng.random(4)))
    assert not found, told(found, system.lines)


def test_a_seed_is_one_history_whatever_was_played_before():
    def of(seed: int) -> tuple[list[str], float]:
        _, system = history(seed, drawn)
        return list(system.lines), system.ledger.total["digits"].answered

    first = [of(seed) for seed in (5, 8)]
    assert [of(seed) for seed in (8, 5)] == first[::-1]


def test_faults_strike_in_the_moments_that_they_wait_for():
    struck = {
        line.split("MOMENT ")[1] for seed in range(25) for line in history(seed, drawn)[1].lines if "MOMENT" in line
    }
    assert struck == set(MOMENTS)


def nobody_is_known(system: CoreSystem) -> None:
    """A slice that is to go stands still under requests; Redis is emptied, and a controller comes that has read no
    acknowledgement."""
    system.after(9.5, strike, system, "all slices stopped", [0.9])
    system.after(10.0, strike, system, "replanned", [])

    def look() -> None:
        if not MOMENTS["a slice drains"](system):
            system.after(0.05, look)
            return
        system.kill()
        system.redis.empty()
        system.acks_from_s = system.now_s + 2.0
        system.start()

    system.after(10.0, look)


# What was mended, as in test_whole_system_finds.py; how the faults come, in which seeds; and what is said then.
FOUND = [
    (CASES[0], drawn, (11, 18), "under 2 requests"),
    (CASES[1], nobody_is_known, (1, 2), "is stopped by"),
    (CASES[2], drawn, (1179, 1347), "no decision was recorded since"),
    (CASES[3], drawn, (160, 186), "the operator released the controller"),
    (
        (
            "a controller that knows no node yet finds a way from nothing",
            Observation,
            "awaits_nodes",
            "return not self._nodes_seen",
            "return False",
        ),
        drawn,
        (952, 2549),
        "below the rollout's floor",
    ),
]


@pytest.mark.long
@pytest.mark.parametrize(("mended", "faults", "seeds", "says"), FOUND, ids=[one[0][0] for one in FOUND])
def test_a_mended_fault_that_is_put_back_is_found(mended, faults, seeds, says):
    for seed in seeds:
        found, system = history(seed, faults)
        assert not found, f"without the fault, seed {seed}: {told(found, system.lines)}"
    with put_back(*mended[1:5]):
        told_of = [text for seed in seeds for text in history(seed, faults)[0]]
    assert any(says in text for text in told_of), told_of
