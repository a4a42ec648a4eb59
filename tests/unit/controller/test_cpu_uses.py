"""What is taken for the CPU use of a slice: the counter of its control group, else how long its instances computed."""

import pytest

from controller.observe.core.cpu_uses import SAMPLE_S, CpuUses
from trefoil.core.energy import HostedEnergy, SliceEnergy
from trefoil.core.fleet import SliceKey

HALF = SliceKey("node0/cpu", "quota:1.5", 0, 15)
ONE, TWO = HostedEnergy("f", "one", compute_s=30.0), HostedEnergy("f", "two", compute_s=10.0)


@pytest.mark.parametrize(
    ("told", "cores"),
    [
        (SliceEnergy(HALF, hosted=(ONE,), cpu_s=45.0), {"one": 0.75}),  # beside computing it speaks gRPC
        (SliceEnergy(HALF, hosted=(ONE,)), {"one": 0.375}),  # two instances of 1.5 cores: 0.75 of a core each
        (SliceEnergy(HALF, hosted=(ONE, TWO), cpu_s=60.0), {"one": 0.75, "two": 0.25}),
        (SliceEnergy(HALF, hosted=(HostedEnergy("f", "one"),), cpu_s=6.0), {"one": 0.1}),  # it answered nothing
        (SliceEnergy(SliceKey("node0/gpu0", "1g.5gb", 0, 1), hosted=(ONE,), cpu_s=45.0), {}),
    ],
)
def test_the_counter_comes_first_and_variants_share_it_by_what_they_computed(told, cores):
    uses = CpuUses()
    uses.add_slice(told, 100.0, 100.0 + SAMPLE_S)
    assert {use.variant: pytest.approx(use.cores) for use in uses.uses(100.0 + SAMPLE_S)} == cores
