"""What stands in Redis and cannot be what its writer wrote is as good as lost: other owners, numbers out of range."""

from dataclasses import replace
from typing import Any, Final

import pytest

from trefoil.core.carbon import CarbonBand, CarbonForecast, CarbonRatio, CarbonReading, Factors, Method, Series
from trefoil.core.demand import LoadCell, LoadForecast, LoadKey, LoadWindow, ScaleSignal
from trefoil.core.device_types import A100_40GB
from trefoil.core.energy import ReceiptRate, ReceiptRates
from trefoil.core.errors import StateUnreadable
from trefoil.core.fleet import DeviceStatus, NodeStatus, SliceKey, SliceStatus
from trefoil.core.objective import Objective
from trefoil.runtime import codec
from trefoil.runtime.keys import Keys
from trefoil.runtime.state_errors import decode_value

KEYS, NOW_S = Keys("test"), 1_795_000_000.0
SERIES = Series("gb", Method.AVERAGE, Factors.DIRECT)
MARGINAL = Series("gb", Method.MARGINAL, Factors.DIRECT)
PART = SliceStatus(SliceKey("n/gpu0", "3g.20gb", 0, 4), credits=4, grpc_target="127.0.0.1:1")
DEVICE = DeviceStatus("n/gpu0", A100_40GB, slices=(PART,), clock_mhz=1410, power_w=300.0, power_limit_w=400.0)
CELL = LoadCell(LoadKey("digits"), arrived=9, arrived_per_s=(9,))

GOOD: Final[dict[str, tuple[str, Any]]] = {
    "reading": (KEYS.carbon_now(SERIES), CarbonReading(SERIES, NOW_S, NOW_S + 1800.0, 400.0, observed_at_s=NOW_S)),
    "forecast": (
        KEYS.carbon_forecast(SERIES),
        CarbonForecast(SERIES, "m", NOW_S, (CarbonBand(NOW_S, NOW_S + 1800.0, 100.0, 200.0, 300.0),)),
    ),
    "marginal reading": (KEYS.carbon_now(MARGINAL), CarbonReading(MARGINAL, NOW_S, NOW_S + 300.0, -1500.0)),
    "marginal forecast": (
        KEYS.carbon_forecast(MARGINAL),
        CarbonForecast(MARGINAL, "m", NOW_S, (CarbonBand(NOW_S, NOW_S + 300.0, -1500.0, -20.0, 300.0),)),
    ),
    "ratio": (KEYS.carbon_ratio(SERIES), CarbonRatio(SERIES, 300.0, 0.8, observed_at_s=NOW_S)),
    "node": (KEYS.node("n"), NodeStatus("n", devices=(DEVICE,), observed_at_s=NOW_S)),
    "signal": (KEYS.scale_signal("n/gpu0"), ScaleSignal("n", "n/gpu0", ("digits",), "top", NOW_S)),
    "objective": (KEYS.objective("digits"), Objective("digits", slo_ms=75.0, slo_quantile=0.95, params={"a": 1.0})),
    "load forecast": (KEYS.forecast_load("digits"), LoadForecast("digits", "last_max", NOW_S, 30.0, 8.0, 9.0, 9.0)),
    "receipts": (
        KEYS.receipts(),
        ReceiptRates((ReceiptRate(request_j=20.0, item_j=1.0, ratio=1.1, token_j=0.1),), NOW_S, SERIES, 1.2),
    ),
    "demand": (KEYS.demand("digits"), LoadWindow(starts_at_s=NOW_S, ends_at_s=NOW_S + 1.0, cells=(CELL,))),
}


ADDRESSES: Final = (
    "", "gpu_7.site:8200", "[::1]:1", "[fe80::1%eth0]:65535", "triton://127.0.0.1:8001/chat/1#org/m", "http://h/v1#org/m",
    "https://[::1]:8/v1?embed#m",
)  # fmt: skip
NO_ADDRESSES: Final = (
    "nobody", "h:", "h:-1", "h:0", "h:65536", "h:99999999", "::1:80", "h:80:90", "[::1:80", "a\x00b:80", "h/x:80",
    "triton://nobody", "triton://h:1/chat/1", "triton://h:1/chat/x#m", "triton://h/chat/1#m", "triton://h:1/a/b/1#m",
    "http://", "http://[::1", "http://h:99999999", "http://h:port", "ftp://h/v1#m", "://", "unix:/x",
)  # fmt: skip


def at(target: str) -> dict[str, Any]:
    return device(slices=(replace(PART, grpc_target=target),))


def device(**changed: Any) -> dict[str, Any]:
    return {"devices": (replace(DEVICE, **changed),)}


SPOILT: Final[dict[str, tuple[dict[str, Any], ...]]] = {
    "reading": (
        {"intensity_g_per_kwh": 1e9}, {"intensity_g_per_kwh": 1501.0}, {"intensity_g_per_kwh": -1.0},
        {"ends_at_s": NOW_S - 1.0}, {"ends_at_s": NOW_S + 1e9}, {"observed_at_s": 1e12}, {"series": Series("fr")},
        {"observed_at_s": -1.0}, {"starts_at_s": -9.0, "ends_at_s": 9.0}, {"fetched_at_s": -1e11},
    ),
    "forecast": (
        {"issued_at_s": -1e11}, {"bands": (CarbonBand(-60.0, NOW_S, 1.0, 2.0, 3.0),)},
        {"bands": (CarbonBand(NOW_S, NOW_S + 60.0, 100.0, 200.0, 1e9),)},
        {"bands": (CarbonBand(NOW_S, NOW_S + 60.0, -100.0, 200.0, 300.0),)},
        {"issued_at_s": 1e12},
    ),
    "marginal reading": ({"intensity_g_per_kwh": -1501.0}, {"series": SERIES}),
    "marginal forecast": ({"bands": (CarbonBand(NOW_S, NOW_S + 60.0, -1501.0, 200.0, 300.0),)}, {"series": SERIES}),
    "ratio": ({"cir": 1e300}, {"aci_g_per_kwh": 1e9}, {"observed_at_s": 1e12}),
    "node": (
        {"node": "m"}, device(device="m/gpu0"), device(device="n"), device(power_w=1e9), device(power_w=-1.0),
        device(clock_mhz=10**9), device(power_limit_w=1e300), device(slices=(replace(PART, credits=2**31),)),
        device(slices=(replace(PART, key=replace(PART.key, device="m/gpu0")),)),
        device(foreign=(replace(PART.key, device="n/gpu1"),)), {"highest_epoch_seen": 2**62},
        *map(at, NO_ADDRESSES),
    ),
    "signal": ({"device": "n/gpu1"}, {"node": "m"}),
    "objective": ({"slo_ms": 1e300}, {"params": {"a": 1e300}}, {"pue": 99.0}, {"replicas_min": 2**31}),
    "load forecast": ({"max_per_s": 1e300}, {"issued_at_s": 1e12}),
    "receipts": (
        {"rates": (ReceiptRate(request_j=1e9),)}, {"rates": (ReceiptRate(token_j=1e5),)}, {"pue": 1e3},
        {"rates": (ReceiptRate(item_j=-1.0),)},
    ),
    "demand": ({"cells": (replace(CELL, arrived=2**60),)}, {"ends_at_s": NOW_S - 1.0}, {"starts_at_s": 0.0}),
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_only_what_a_writer_can_have_written_is_read(name: str) -> None:
    key, good = GOOD[name]
    assert decode_value(KEYS, key, type(good), codec.encode(good)) == good
    for changed in SPOILT[name]:
        data = codec.encode(replace(good, **changed))
        with pytest.raises(StateUnreadable):
            print(changed, decode_value(KEYS, key, type(good), data))


@pytest.mark.parametrize("target", ADDRESSES)
def test_every_address_that_an_agent_publishes_is_read(target: str) -> None:
    key, good = GOOD["node"]
    node = replace(good, **at(target))
    assert decode_value(KEYS, key, NodeStatus, codec.encode(node)) == node
