"""MIG on an A100: 19 maximal configurations, 14 multisets (MIG user guide; CLOVER Fig. 1)."""

import pytest

from trefoil.core.device_types import A100_40GB, configurations, device_type, placements, placements_of, slice_type
from trefoil.core.errors import NotFound


def test_every_multiset_has_a_placement_and_none_overlaps():
    assert sum(len(placements_of(A100_40GB, c)) for c in configurations(A100_40GB)) == 19
    for placement in placements(A100_40GB):
        taken = [m for _, start, size in placement for m in range(start, start + size)]
        assert len(taken) == len(set(taken))
        assert max(taken) < 8


def test_two_fours_never_fit_and_a_three_takes_four_memory_slices():
    """3g occupies half the memory: why 3g+3g fills the GPU with 6 of 7 compute slices."""
    assert slice_type(A100_40GB, "3g.20gb").memory_slices == 4
    assert all(dict(c.slices).get("4g.20gb", 0) <= 1 for c in configurations(A100_40GB))


def test_unknown_names_are_answered_with_the_known_ones():
    with pytest.raises(NotFound, match="A100-SXM4-40GB"):
        device_type("B300")
    with pytest.raises(NotFound, match=r"1g\.5gb"):
        slice_type(A100_40GB, "8g")
