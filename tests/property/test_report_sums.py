"""What a report says of parts sums to its whole, and the whole to what meters counted: nothing is lost or made up."""

import math
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.accounting.core.bookings import bookings, embodied_bookings
from protos.controller.v1 import controller_pb2 as pb
from trefoil.cli.operate.report_document import records, report_document
from trefoil.core.accounting import NOBODY, by_family, by_variant
from trefoil.core.carbon import CarbonReading, Factors, Method, Quality, Rung, Series
from trefoil.core.energy import AttributionMethod, EnergyMethod, EnergySample, HostedEnergy, SliceEnergy
from trefoil.core.fleet import SliceKey
from trefoil.core.units import grams

FAMILIES = ("digits", "cats")
SERIES = Series("demo", Method.AVERAGE, Factors.LIFECYCLE)
PUE = 1.2
JOULES = st.floats(0, 1e4).map(lambda joules: round(joules, 3))
HOSTED = st.builds(HostedEnergy, st.sampled_from(FAMILIES), st.sampled_from(("s", "l")), JOULES)


@st.composite
def samples(draw: st.DrawFn) -> EnergySample:
    slices = draw(st.lists(st.lists(HOSTED, max_size=3), max_size=3))
    parts = tuple(
        SliceEnergy(SliceKey("node0/gpu0", "1g.5gb", at, 1), 1, sum(h.active_j for h in hosted), tuple(hosted))
        for at, hosted in enumerate(slices)
    )
    idle, starts_s = draw(JOULES), draw(st.integers(0, 7000))
    return EnergySample(
        "node0", "node0/gpu0", 1, starts_s, starts_s + draw(st.integers(1, 60)),
        idle + sum(part.active_j for part in parts),
        draw(st.sampled_from([EnergyMethod.NVML_COUNTER, EnergyMethod.POWER_INTEGRAL, EnergyMethod.RAPL])),
        draw(st.sampled_from(AttributionMethod)), parts, idle, simulated=draw(st.booleans()),
    )  # fmt: skip


READINGS = st.builds(
    lambda g, quality, rung, at_s: CarbonReading(SERIES, at_s, at_s + 300, g, quality, observed_at_s=at_s, rung=rung),
    st.floats(0, 900), st.sampled_from(list(Quality)[1:]), st.sampled_from(Rung), st.integers(0, 7000),
)  # fmt: skip
TENANTS = st.dictionaries(
    st.sampled_from(("", "a", "b", "c:d")), st.tuples(st.integers(0, 50), JOULES, st.integers(0, 9), JOULES), max_size=4
)


def report_of(booked: dict[tuple[str, int], dict[str, float]]) -> pb.GetReportResponse:
    report = pb.GetReportResponse(embodied_lifetime_years=4.0)
    for (family, hour), sums in sorted(booked.items()):
        report.hours.add(family=family, sums=sums).starts_at.FromSeconds(hour * 3600)
    return report


@given(
    st.lists(st.tuples(samples(), READINGS), max_size=12),
    st.dictionaries(st.tuples(st.sampled_from(FAMILIES), st.integers(0, 1)), TENANTS, max_size=4),
    st.sampled_from([0.0, 26_357.0]),
)
def test_parts_sum_to_the_whole_and_the_whole_to_the_counters(drawn, asked, embodied_g):
    booked: dict[tuple[str, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for sample, reading in drawn:
        hour = int(sample.ends_at_s // 3600)
        for family, name, amount in bookings(sample, reading, FAMILIES, PUE):
            booked[family, hour][name] += amount
        for family, name, amount in embodied_bookings(sample, FAMILIES, embodied_g, 4.0, True):
            booked[family, hour][name] += amount
    for of, tenants in asked.items():
        for tenant, (requests, joules, unanswered, lost_j) in tenants.items():
            booked[of][f"tenant_requests:{tenant}"] += requests
            booked[of][f"tenant_receipt_joules:{tenant}"] += joules
            booked[of]["requests"] += requests
            booked[of][f"tenant_unanswered:{tenant}"] += unanswered
            booked[of][f"tenant_unanswered_joules:{tenant}"] += lost_j if unanswered else 0.0
            booked[of]["unanswered"] += unanswered
            booked[of]["unanswered_joules"] += lost_j if unanswered else 0.0
            booked[of]["requests:s"] += requests
    found = report_document(report_of(booked))
    counted_j = sum(sample.counter_j for sample, _ in drawn)
    counted_g = sum(grams(sample.counter_j, reading.intensity_g_per_kwh, PUE) for sample, reading in drawn)
    answered = sum(requests for tenants in asked.values() for requests, *_ in tenants.values())
    unanswered = sum(each for tenants in asked.values() for _, _, each, _ in tenants.values())
    for scope in ("families", "variants", "tenants"):
        assert sum(one["joules"] or 0.0 for one in found[scope]) == pytest.approx(counted_j, rel=1e-6, abs=1e-6)
        assert sum(one["grams"] or 0.0 for one in found[scope]) == pytest.approx(counted_g, rel=1e-6, abs=1e-6)
        assert sum(one["requests"] for one in found[scope]) == answered
    for scope in ("families", "tenants"):
        assert sum(one.get("unanswered", 0) for one in found[scope]) == unanswered
        for one in found[scope]:
            assert (one.get("unanswered_joules") or 0.0) <= (one["joules"] or 0.0) * (1 + 1e-9) + 1e-9
    total = found["total"]
    assert (total["joules"] is None) == (not drawn)
    if counted_j > 1e-3:
        for shares in (total["quality"][name] for name in ("energy", "meters")):
            assert sum(shares.values()) == pytest.approx(1.0)
        assert total["sci"]["E"]["value"] == pytest.approx(counted_j * PUE / 3.6e6)
    if drawn and embodied_g:
        seconds = sum(sample.ends_at_s - sample.starts_at_s for sample, _ in drawn)
        assert total["sci"]["M"]["value"] == pytest.approx(embodied_g * seconds / (4 * 365.25 * 86_400))
    check_sci(total, answered)
    assert len(records(found)) == 1 + sum(len(found[scope]) for scope in ("families", "variants", "tenants"))


def check_sci(one, answered: int) -> None:
    """SCI is what its terms say, or not known, with a reason; never 0 for want of a term."""
    terms = {name: term["value"] for name, term in one["sci"].items()}
    for term in one["sci"].values():
        assert (term["value"] is None) == bool(term["unknown"])
    needed = [terms["E"], terms["M"], terms["R"], one["grams"]]
    assert (terms["sci"] is None) == any(each is None for each in needed)
    if terms["sci"] is not None:
        emitted = terms["E"] * terms["I"] if terms["I"] is not None else 0.0
        assert terms["sci"] == pytest.approx((emitted + terms["M"]) / answered)


def test_a_gpu_that_is_awake_for_a_job_costs_its_tenant_what_it_draws_idle_and_nothing_is_lost():
    """Two seconds of one GPU: in the first nothing computes, in the second items of a job."""
    reading = CarbonReading(SERIES, 0.0, 300.0, 400.0, Quality.MEASURED, observed_at_s=0.0)
    hosted = (HostedEnergy("digits", "s", 100.0),)
    part = SliceEnergy(SliceKey("node0/gpu0", "1g.5gb", 0, 1), 1, 100.0, hosted)
    idle = EnergySample("node0", "node0/gpu0", 1, 0.0, 1.0, 50.0, EnergyMethod.NVML_COUNTER, idle_j=50.0)
    active = replace(idle, seq=2, starts_at_s=1.0, ends_at_s=2.0, counter_j=150.0, slices=(part,))
    booked: dict[tuple[str, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for sample in (idle, active):
        for family, name, amount in bookings(sample, reading, FAMILIES, PUE):
            booked[family, 0][name] += amount

    def books(**receipts: float) -> dict[tuple[str, str], float]:
        sums = {f"tenant_receipt_joules:{tenant}": joules for tenant, joules in receipts.items()}
        found = report_document(report_of(booked | {("digits", 0): booked["digits", 0] | sums}))["tenants"]
        assert sum(one["joules"] for one in found) == pytest.approx(200.0), "what the counter says"
        assert sum(one["grams"] for one in found) == pytest.approx(grams(200.0, 400.0, PUE))
        return {(one["family"], one["tenant"]): one["joules"] for one in found}

    other = {("cats", NOBODY): 25.0}
    assert books(night=90.0) == other | {("digits", "night"): 175.0}
    assert books(night=90.0, day=30.0) == other | {("digits", "night"): 131.25, ("digits", "day"): 43.75}


@given(samples())
def test_families_are_the_sum_of_their_variants(sample):
    summed: dict[str, float] = defaultdict(float)
    for (family, _), joules in by_variant(sample, FAMILIES).items():
        summed[family] += joules
    assert dict(summed) == pytest.approx(by_family(sample, FAMILIES))
    assert math.fsum(summed.values()) == pytest.approx(sample.counter_j)


def test_what_nobody_metered_or_said_is_not_known_and_says_why():
    found = report_document(report_of({("digits", 0): {"requests": 5.0, "unmeasured_s": 60.0}}))
    [digits] = found["families"]
    assert (digits["joules"], digits["grams"], digits["joules_per_request"]) == (None, None, None)
    assert digits["unknown"] == "nothing was metered"
    assert digits["quality"]["energy"] is None
    partly = {
        "requests": 5.0,
        "joules": 8.0,
        "grams": 1.0,
        "facility_joules": 9.6,
        "gap_s": 30.0,
        "embodied_unknown_s": 9.0,
    }
    report = report_of({("digits", 0): partly})
    report.embodied_unknown.append("L4")
    [digits] = report_document(report)["families"]
    assert (digits["joules"], digits["joules_per_request"]) == (8.0, None)
    assert digits["unknown"] == "30 s of devices were not metered"
    assert digits["sci"]["M"]["unknown"] == "emissions of making L4 are unknown: embodied_g of a device type"
    assert digits["sci"]["sci"]["value"] is None
    [variant] = [one for one in report_document(report)["variants"] if one["variant"] == "(not split)"]
    assert (variant["joules"], variant["requests"]) == (8.0, 5)
