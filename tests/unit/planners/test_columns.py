"""What a column is worth."""

import pytest

from controller.planners.columns import idle_share
from trefoil.core.device_types import device_type, slice_type


@pytest.mark.parametrize(
    ("device", "shape", "share"),
    [
        ("A100-SXM4-40GB", "3g.20gb", 0.5),
        ("A100-SXM4-40GB", "7g.40gb", 1.0),
        ("A30", "2g.12gb", 0.5),  # it has four memory slices
        ("A30", "4g.24gb", 1.0),
        ("Tesla T4", "whole", 1.0),
        ("cpu:8", "cpu:4", 0.5),
        ("cpu:8", "quota:0.8", 0.1),
    ],
)
def test_a_slice_that_starts_keeps_its_part_of_the_device_from_serving(device, shape, share):
    kind = device_type(device)
    assert idle_share(kind, slice_type(kind, shape)) == pytest.approx(share)
