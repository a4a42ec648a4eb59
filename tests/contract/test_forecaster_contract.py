"""What every forecaster keeps: one suite, run over the whole table and over a user's own.

To hold yours to it: `TREFOIL_CONTRACT_OWN=forecaster=module:Class pytest tests/contract/test_forecaster_contract.py`.
"""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.forecasters.table import FORECASTERS
from controller.observe.forecast_model import open_network
from tests.support.own_parts import own
from trefoil.core.parts import Kind, load_part

NAMES = [*sorted(FORECASTERS), *own("forecaster")]
ARRIVALS = st.lists(st.integers(0, 400).map(float), max_size=60)


def made(name):
    part = load_part(Kind.FORECASTER, name, FORECASTERS)
    return part.made(settings=part.settings_of({}), open_network=open_network, truth=lambda *_: 7.0)


@pytest.mark.parametrize("name", NAMES)
@given(arrivals=ARRIVALS, bin_s=st.sampled_from([0.25, 0.5, 1.0, 300.0]), lead_s=st.floats(0, 600))
@settings(max_examples=40, deadline=None)
def test_a_forecast_is_finite_never_negative_and_depends_on_the_bins_alone(name, arrivals, bin_s, lead_s):
    one, kept = made(name), list(arrivals)
    found = one.forecast("digits", arrivals, bin_s, 1000.0, lead_s)
    assert arrivals == kept, "the bins are not the forecaster's"
    one.forecast("words", [9.0] * 30, bin_s, 1001.0, lead_s)
    assert one.forecast("digits", arrivals, bin_s, 1000.0, lead_s) == found
    assert made(name).forecast("digits", tuple(arrivals), bin_s, 1000.0, lead_s) == found
    assert (found.family, found.issued_at_s, found.horizon_s) == ("digits", 1000.0, lead_s)
    assert found.model
    for rate in (found.mean_per_s, found.p90_per_s, found.max_per_s):
        assert math.isfinite(rate)
        assert rate >= 0
    assert found.p90_per_s >= found.mean_per_s - 1e-9
    assert arrivals or found.fallback_reason, "without data it says so"
