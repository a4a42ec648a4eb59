"""What every governor keeps: one suite, run over the whole table and over a user's own.

To hold yours to it: `TREFOIL_CONTRACT_OWN=governor=module:Class pytest tests/contract/test_governor_contract.py`.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from power_agent.governors import GOVERNORS, governor_of
from tests.support.own_parts import own
from trefoil.core.brains import GovernedStage, GovernorView
from trefoil.core.parts import Kind, load_part

NAMES = [*sorted(GOVERNORS), *own("governor")]
CLOCKS = tuple(range(210, 1411, 15))
STAGES = tuple(GovernedStage("digits", 0, 100.0, ms, 1.0, 1.0, ms, 9) for ms in (20.0, 80.0, 99.0))


@st.composite
def sequences(draw):
    """What one device sees over some time: a plan now and then, its clock, whether it is honoured."""
    now_s, found, ends = 100.0, [], (0, 0)
    for _ in range(draw(st.integers(1, 12))):
        now_s += draw(st.floats(0.1, 30))
        if draw(st.booleans()):
            ends = draw(st.sampled_from([(0, 0), (210, 1410), (210, 900), (600, 900), (900, 900)]))
        stages = draw(st.sampled_from([(), *((stage,) for stage in STAGES)]))
        age_s = draw(st.sampled_from([0.5, float("inf")]))
        clock_mhz = draw(st.sampled_from(CLOCKS))
        found.append(GovernorView(now_s, "node0/gpu0", clock_mhz, ends, CLOCKS, stages, draw(st.booleans()), age_s))
    return found


@pytest.mark.parametrize("name", NAMES)
@given(seen=sequences())
@settings(max_examples=60, deadline=None)
def test_clocks_stay_in_range_have_a_reason_and_depend_on_what_was_seen_alone(name, seen):
    load_part(Kind.GOVERNOR, name, GOVERNORS)
    one, other = governor_of(name, {}), governor_of(name, {})
    for view in seen:
        found = one.step(view)
        assert found == other.step(view)
        low, high = view.range_mhz if view.range_mhz[1] else (view.supported_mhz[0], view.supported_mhz[-1])
        assert found.clock_mhz == 0 or low <= found.clock_mhz <= high
        assert found.why
        assert found.next_tick_at_s > view.now_s
