"""Plans keep what they promise: drawn fleets, planned once, served request by request (tests/support/promised.py)."""

import numpy as np
import pytest

from tests.support.promised import BATCHES, Lateness, drawn, outcome

REQUESTS = 15_000  # of all families of an instance
PROMISES = 3_000  # that all instances have in all: classes, families
NUMBER = 300
CASES = {  # policy, settings of its planner, the instances that are played before each change
    "exact": ("exact", {}, range(1, 20)),
    "exact_miad": ("exact_miad", {}, (2, 4, 6, 8, 9, 16)),
    "shared slices": ("exact", {"families_per_slice": 2}, (1, 2, 9, 10)),
}
JUDGED = 0.65  # of the instances; the fleet of the others can have none of the loads drawn


def broken_promises(policy, settings, seeds):
    """Broken promises of a policy's plans."""
    kept = [found for seed in seeds if (found := outcome(drawn(seed), policy, REQUESTS, settings)) is not None]
    assert len(kept) >= JUDGED * len(seeds)
    every = [one for found in kept for one in found.classes if one.counts[:, 0].sum() > 500]
    latest, watts = max(one.share / one.allowed for one in every), sum(found.watts for found in kept)
    print(f"{policy}: {len(kept)} instances, {watts:.0f} W; late over allowed of {len(every)} classes: <= {latest:.2f}")
    return [line for found in kept for line in found.broken(PROMISES)]


@pytest.mark.parametrize("case", CASES)
def test_classes_families_and_floors_are_kept_in_drawn_fleets(case):
    assert broken_promises(*CASES[case]) == []


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", CASES)
def test_classes_families_and_floors_are_kept_in_many_drawn_fleets(case):
    policy, settings, _ = CASES[case]
    assert broken_promises(policy, settings, range(NUMBER)) == []


@pytest.mark.long
def test_a_choice_of_clocks_costs_no_capacity():
    assert outcome(drawn(23), "exact_miad", REQUESTS) is not None


def test_lateness_beyond_its_error_breaks_a_promise():
    def late(of_each):
        return Lateness("any", 0.05, np.array([(100.0, n) for n in of_each]))

    assert late([9.0] * BATCHES).broken(4.0)
    assert not late([5.0] * BATCHES).broken(4.0)
    assert not late([0.0] * (BATCHES - 4) + [90.0] * 4).broken(4.0), "one bad stretch says little of the mean"
