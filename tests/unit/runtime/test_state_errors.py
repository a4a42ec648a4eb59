"""Values that their writers cannot have written are as good as lost, whoever has put them at the key."""

from dataclasses import replace

import pytest

from trefoil.core.carbon import CarbonForecast, CarbonRatio, CarbonReading, Factors, Method, Series
from trefoil.core.energy import ReceiptRate, ReceiptRates
from trefoil.core.errors import StateUnreadable
from trefoil.core.fleet import DeviceStatus, NodeStatus, SliceKey, SliceStatus
from trefoil.core.objective import Objective
from trefoil.runtime import codec
from trefoil.runtime.keys import Keys
from trefoil.runtime.state_errors import decode_value

KEYS = Keys("default")
SERIES = Series("demo", Method.AVERAGE, Factors.LIFECYCLE)
SLICE = SliceStatus(SliceKey("node0/gpu0", "7g.40gb", 0, 8))
NODE = NodeStatus("node0", devices=(DeviceStatus("node0/gpu0", slices=(SLICE,)),), observed_at_s=1.75e9)
READING = CarbonReading(SERIES, 1.75e9, 1.75e9 + 300, 0.0, observed_at_s=1.75e9)
RATES = ReceiptRates((ReceiptRate(SLICE.key, "digits", "small", 0.5),), 1.75e9, SERIES, 1.2)
OBJECTIVE = Objective("digits", slo_ms=400.0, slo_quantile=0.95)
SOUND = {
    KEYS.node("node0"): NODE,
    KEYS.carbon_now(SERIES): READING,
    KEYS.carbon_forecast(SERIES): CarbonForecast(SERIES, "model", 1.75e9),
    KEYS.carbon_ratio(SERIES): CarbonRatio(SERIES, 300.0, 1.1, "", 9, 1.75e9),
    KEYS.receipts(): RATES,
    KEYS.objective("digits"): OBJECTIVE,
}


@pytest.mark.parametrize("key", SOUND)
def test_a_sound_value_is_read(key):
    assert decode_value(KEYS, key, type(SOUND[key]), codec.encode(SOUND[key])) == SOUND[key]


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        (KEYS.node("node7"), replace(NODE, node="node7"), "device 'node0/gpu0' is none of node7"),
        (
            KEYS.node("node0"),
            replace(NODE, devices=(replace(NODE.devices[0], device="node0/gpu1"),)),
            "a slice of 'node0/gpu0' on node0/gpu1",
        ),
        (KEYS.node("node0"), replace(NODE, highest_epoch_seen=10**13), "epoch"),
        (KEYS.carbon_now(SERIES), replace(READING, intensity_g_per_kwh=1e300), "intensity_g_per_kwh"),
        (KEYS.carbon_now(SERIES), replace(READING, intensity_g_per_kwh=-1.0), "-1"),
        (KEYS.carbon_now(SERIES), replace(READING, ends_at_s=2e11), "ends_at_s"),
        (KEYS.carbon_now(SERIES), replace(READING, rung=1000), "rung 1000"),
        (KEYS.receipts(), replace(RATES, rates=(replace(RATES.rates[0], request_j=1e300),)), "request_j"),
        (KEYS.receipts(), replace(RATES, pue=1e9), "pue"),
        (KEYS.objective("digits"), replace(OBJECTIVE, slo_ms=1e300), "slo_ms"),
    ],
)
def test_what_cannot_be_is_named(key, value, says):
    with pytest.raises(StateUnreadable, match=says):
        decode_value(KEYS, key, type(value), codec.encode(value))
