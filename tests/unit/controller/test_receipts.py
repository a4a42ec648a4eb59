"""Receipts against metered energy: a simulated hour of both brains, and every way in which energy is not known."""

import math
from dataclasses import replace

import numpy as np
import pytest

from controller.accounting.core.receipts import (
    EnergyLine,
    Receipts,
    energy_line,
    rates_changed,
    sum_by_family,
)
from dispatcher.routing.core.receipts import Receipts as Prices
from dispatcher.service.accounting import LoadCounters
from trefoil.core.carbon import CarbonReading, Quality, Series
from trefoil.core.catalog import Catalog, Family
from trefoil.core.common import Basis, ProfileRow, Provenance, Revision
from trefoil.core.demand import LoadCell, LoadKey, LoadWindow
from trefoil.core.device_types import A100_40GB, reported_type
from trefoil.core.energy import EnergyMethod, EnergySample, HostedEnergy, ReceiptRates, SliceEnergy
from trefoil.core.fleet import DeviceStatus, Hosted, NodeStatus, SliceKey, SliceStatus
from trefoil.core.latency import build_histogram

TYPE = "A100-SXM4-40GB"
PROFILE_J = {"s": (0.3, 0.2), "l": (0.5, 1.5)}  # joules of a request, and of each of its items


def row(variant: str, batch: int) -> ProfileRow:
    request_j, item_j = PROFILE_J[variant]
    return ProfileRow(
        TYPE, "1g.5gb", "digits", variant, 0, batch, 1410, (), 10.0, 11.0, 12.0, 100.0, request_j + item_j * batch,
        30.0, 16, Provenance(Basis.SYNTHETIC),
    )  # fmt: skip


CATALOG = Catalog((), tuple(row(variant, batch) for variant in PROFILE_J for batch in (1, 2, 8)))
KEYS = tuple(SliceKey(f"n/gpu{d}", "1g.5gb", start, 1) for d in range(2) for start in range(3))


def node(hosted: dict[SliceKey, str], kind: str = TYPE) -> NodeStatus:
    def slices(device: str) -> tuple[SliceStatus, ...]:
        return tuple(
            SliceStatus(key=key, hosted=(Hosted("digits", variant, 1),))
            for key, variant in hosted.items()
            if key.device == device
        )

    devices = sorted({key.device for key in hosted})
    return NodeStatus(
        "n", devices=tuple(DeviceStatus(device, reported_type(kind), slices=slices(device)) for device in devices)
    )


def sample(
    key: SliceKey, variant: str, active_j: float, at_s: float, method: EnergyMethod = EnergyMethod.NVML_COUNTER
) -> EnergySample:
    hosted = (HostedEnergy("digits", variant, active_j),)
    return EnergySample(
        "n", key.device, round(at_s), at_s - 1, at_s, active_j, method,
        slices=(SliceEnergy(key, 1, active_j, hosted),),
    )  # fmt: skip


def window(
    key: SliceKey, variant: str, answered: int, at_s: float, items: int = 0, length_s: float = 1.0
) -> LoadWindow:
    cell = LoadCell(LoadKey("digits", variant, key), answered=answered, items=items or answered)
    return LoadWindow("d", 0, round(at_s * 10), at_s - length_s, at_s, cells=(cell,))


class Hour:
    """Six slices that draw up to half as much again as their profile says, differently and drifting; two workers."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.controller = Receipts(CATALOG)
        self.prices = [Prices(60.0), Prices(60.0)]
        self.books = [LoadCounters("d", worker, 0.0, 16) for worker in range(2)]
        self.hosted = {key: "s" if n % 2 else "l" for n, key in enumerate(KEYS)}
        self.truth = {key: float(self.rng.uniform(0.8, 1.5)) for key in KEYS}
        self.drawn: dict[tuple[SliceKey, str], float] = {}
        self.active_j = self.receipt_j = self.asked_j = 0.0
        self.joined: list = []
        self.late: list[LoadWindow] = []

    def serve(self, at_s: float) -> None:
        """Half a second: answers of one to four items, and what they truly drew."""
        rate = 5.0 * (1.2 + math.sin(at_s / 500)) * (0.05 if 1500 < at_s < 1700 else 1.0)
        for key, variant in self.hosted.items():
            bias = self.truth[key] * (1 + 0.2 * math.sin(at_s / 700 + key.start))
            for _ in range(self.rng.poisson(rate / 2)):
                worker, items = int(self.rng.integers(2)), int(self.rng.choice((1, 1, 1, 2, 4)))
                request_j, item_j = PROFILE_J[variant]
                true_j = (request_j + item_j * items) * bias * self.rng.normal(1, 0.1)
                self.active_j += true_j
                self.drawn[key, variant] = self.drawn.get((key, variant), 0.0) + true_j
                self.books[worker].answered("digits", variant, key, "", items, 20.0, 1.0, 75.0, at_s)
                receipt = self.prices[worker].price(key, "digits", variant, items)
                self.asked_j += receipt.energy_j if receipt is not None else 0.0

    def meter(self, at_s: float) -> None:
        for device in sorted({key.device for key in KEYS}):
            slices = tuple(
                SliceEnergy(key, 1, active_j, (HostedEnergy("digits", variant, active_j),))
                for (key, variant), active_j in self.drawn.items()
                if key.device == device
            )
            self.controller.sample(
                EnergySample(
                    "n", device, starts_at_s=at_s - 1, ends_at_s=at_s, method=EnergyMethod.NVML_COUNTER, slices=slices
                )
            )
        self.drawn.clear()

    def tell(self, at_s: float) -> None:
        told = ReceiptRates(self.controller.rates(None), at_s, Series("z"), 1.2, Revision(1, 1))
        for book, prices in zip(self.books, self.prices, strict=True):
            book.settle(prices.rate)
            prices.set_rates(told, None)

    def run(self, seconds: int) -> None:
        self.controller.nodes([node(self.hosted)])
        for half in range(1, 2 * seconds + 1):
            at_s = half / 2
            self.serve(at_s)
            for book, prices in zip(self.books, self.prices, strict=True):
                book.settle(prices.rate)
                closed = book.close_window(at_s, Revision())
                self.receipt_j += sum(cell.receipt_j for cell in closed.cells)
                self.late.append(closed)
            while len(self.late) > 3:  # windows come a second after what was metered
                self.controller.window(self.late.pop(0))
            if half % 2 == 0:
                self.meter(at_s)
                self.joined += self.controller.join(at_s)
            if half % 10 == 0:
                self.tell(at_s)
            if half % 1200 == 600:  # every slice swaps its variant
                self.hosted = {key: "l" if variant == "s" else "s" for key, variant in self.hosted.items()}
                self.controller.nodes([node(self.hosted)])


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_receipts_of_an_hour_add_up_to_the_metered_active_energy(seed):
    hour = Hour(seed)
    hour.run(3600)
    residual = hour.receipt_j / hour.active_j - 1
    print(f"seed {seed}: receipts {hour.receipt_j:.0f} J, active {hour.active_j:.0f} J ({residual:+.2%})")
    assert abs(residual) <= 0.05
    assert hour.asked_j == pytest.approx(hour.receipt_j, rel=1e-9), "what clients are told is what is booked"
    (found,) = sum_by_family(hour.joined)
    assert found.active_j == pytest.approx(hour.active_j, rel=2e-3), "the metric is over the same hour"
    assert found.receipt_j / found.active_j - 1 == pytest.approx(residual, abs=0.005)
    rates = hour.controller.rates(None)
    assert {rate.basis for rate in rates} == {Basis.MEASURED}
    for rate in rates:
        assert rate.ratio == pytest.approx(
            hour.truth[rate.slice] * (1 + 0.2 * math.sin(3600 / 700 + rate.slice.start)), rel=0.12
        )


def test_a_line_goes_through_the_smallest_and_the_largest_batch():
    line = energy_line([row("l", batch) for batch in (1, 2, 8)], A100_40GB)
    assert (line.request_j, line.item_j) == (pytest.approx(0.5), pytest.approx(1.5))
    assert line.basis == Basis.SYNTHETIC
    assert energy_line([row("l", 1)], A100_40GB) == EnergyLine(0.0, 2.0, Basis.SYNTHETIC)
    measured = replace(row("l", 1), provenance=Provenance(Basis.MEASURED))
    assert energy_line([measured], A100_40GB).basis == Basis.MODELLED, "measured elsewhere: of this slice it is a model"
    slower = energy_line([row("l", 1)], A100_40GB, clock_mhz=705)
    assert slower.item_j < 2.0


def with_catalog_facts(key: SliceKey = KEYS[0], variant: str = "s", kind: str = TYPE) -> Receipts:
    receipts = Receipts(CATALOG)
    receipts.nodes([node({key: variant}, kind)])
    return receipts


def feed(
    receipts: Receipts, key: SliceKey, variant: str, seconds: int, per_s: int, j_each: float, from_s: int = 0
) -> None:
    for at_s in range(from_s + 1, from_s + seconds + 1):
        receipts.window(window(key, variant, per_s, at_s))
        receipts.sample(sample(key, variant, per_s * j_each, at_s))
        receipts.join(at_s)


def test_before_anything_was_metered_there_are_no_rates_and_then_the_profile_alone():
    receipts = with_catalog_facts()
    assert receipts.rates(None) == ()
    receipts.sample(sample(KEYS[0], "s", 0.0, 1.0))
    (rate,) = receipts.rates(None)
    assert (rate.request_j, rate.item_j, rate.ratio, rate.window_s) == (
        pytest.approx(0.3),
        pytest.approx(0.2),
        1.0,
        0.0,
    )
    assert rate.basis == Basis.SYNTHETIC


def test_a_device_that_nothing_meters_has_no_rates():
    receipts = with_catalog_facts()
    feed(receipts, KEYS[0], "s", 10, 10, 0.6)
    assert len(receipts.rates(None)) == 1
    receipts.sample(sample(KEYS[0], "s", 0.0, 11.0, EnergyMethod.NONE))
    assert receipts.rates(None) == ()


def test_simulated_energy_is_called_simulated():
    receipts = with_catalog_facts()
    receipts.sample(replace(sample(KEYS[0], "s", 1.0, 1.0), simulated=True))
    assert receipts.rates(None)[0].basis == Basis.SIMULATED


def test_a_fresh_slice_takes_the_ratio_of_its_kind():
    receipts = with_catalog_facts(KEYS[1])
    feed(receipts, KEYS[0], "s", 10, 10, 0.6)  # the profile says 0.5
    receipts.sample(sample(KEYS[1], "s", 0.0, 10.0))
    (rate,) = receipts.rates(None)
    assert (rate.slice, rate.ratio) == (KEYS[1], pytest.approx(1.2, rel=1e-3))


def test_without_a_profile_the_metered_joules_per_item_are_the_rate():
    receipts = with_catalog_facts(kind="a board that nobody profiled")
    receipts.sample(sample(KEYS[0], "s", 0.0, 1.0))
    assert receipts.rates(None) == ()
    feed(receipts, KEYS[0], "s", 10, 10, 0.7, from_s=1)
    (rate,) = receipts.rates(None)
    assert (rate.request_j, rate.item_j) == (0.0, pytest.approx(0.7))


def test_a_generative_family_costs_by_the_token_and_tokens_are_booked_when_they_come():
    family = Family("digits", "m", (), {}, generative=True, tokens_mean=10.0)
    receipts = Receipts(Catalog((family,), CATALOG.rows))
    receipts.nodes([node({KEYS[0]: "s"})])
    receipts.sample(sample(KEYS[0], "s", 0.0, 1.0))
    (alone,) = receipts.rates(None)
    assert (alone.request_j, alone.item_j, alone.token_j) == (0.0, 0.0, pytest.approx(0.05))  # 0.5 J an answer of ten
    for at_s in range(2, 8):  # 40 tokens a second at 0.06 J, of requests that have not ended
        cell = LoadCell(LoadKey("digits", "s", KEYS[0]), tokens_out=40, receipt_j=2.4)
        receipts.window(LoadWindow("d", 0, at_s, at_s - 1.0, float(at_s), cells=(cell,)))
        receipts.sample(sample(KEYS[0], "s", 2.4, float(at_s)))
    joined = sum_by_family(receipts.join(8.0))[0]
    (rate,) = receipts.rates(None)
    assert joined.active_j == pytest.approx(6 * 2.4)
    assert rate.token_j == pytest.approx(0.05), "nothing was answered yet: the profile alone"
    for at_s in range(8, 12):
        cell = LoadCell(LoadKey("digits", "s", KEYS[0]), answered=10, items=10, tokens_out=40)
        receipts.window(LoadWindow("d", 0, at_s, at_s - 1.0, float(at_s), cells=(cell,)))
        receipts.sample(sample(KEYS[0], "s", 2.4, float(at_s)))
    receipts.join(12.0)
    (rate,) = receipts.rates(None)
    assert (rate.token_j, rate.ratio) == (pytest.approx(0.06), pytest.approx(1.2))
    assert rate.energy_j(1, 200) == pytest.approx(12.0)


def test_answers_while_nothing_was_metered_change_no_ratio():
    receipts = with_catalog_facts()
    feed(receipts, KEYS[0], "s", 30, 10, 0.6)
    before = receipts.rates(None)
    for at_s in range(31, 61):
        receipts.window(window(KEYS[0], "s", 10, at_s))
        assert receipts.join(at_s) == []
    feed(receipts, KEYS[0], "s", 10, 10, 0.6, from_s=60)
    assert receipts.rates(None)[0].ratio == pytest.approx(before[0].ratio, rel=1e-3)


def test_one_straddling_request_after_a_quiet_day_does_not_become_the_ratio():
    receipts = with_catalog_facts()
    feed(receipts, KEYS[0], "s", 60, 10, 0.6)
    receipts.window(window(KEYS[0], "x", 0, 86_500.0))
    receipts.sample(sample(KEYS[0], "s", 0.6, 86_500.0))  # its answer comes in the next window
    receipts.join(86_510.0)
    assert receipts.rates(None)[0].ratio == pytest.approx(1.2, rel=0.03), "what it drew is asked of the next"


def test_windows_are_cut_at_the_borders_of_samples():
    receipts = with_catalog_facts()
    receipts.window(window(KEYS[0], "s", 40, 4.0, length_s=4.0))
    receipts.sample(sample(KEYS[0], "s", 5.0, 2.0))  # from 1 to 2: ten of the forty answers
    (joined,) = receipts.join(4.0)
    assert joined.active_j == 5.0
    receipts.sample(sample(KEYS[0], "s", 15.0, 4.0))
    receipts.join(4.0)
    (rate,) = receipts.rates(None)
    assert 1.0 < rate.ratio < 3.0


def test_a_load_that_begins_does_not_look_dearer_than_it_is():
    receipts, service_s, j_each = with_catalog_facts(), 0.4, 0.5
    sent = [n / 20 for n in range(200)]  # from second 0; each draws its energy evenly while it is served
    receipts.sample(sample(KEYS[0], "s", 0.0, 0.0))
    for at_s in range(1, 11):
        ended = sum(at_s - 1 < s + service_s <= at_s for s in sent)
        drawn = sum(max(0.0, min(at_s, s + service_s) - max(at_s - 1, s)) for s in sent) / service_s
        cell = LoadCell(
            LoadKey("digits", "s", KEYS[0]),
            answered=ended,
            items=ended,
            service=build_histogram([service_s * 1e3] * ended),
        )
        receipts.window(LoadWindow("d", 0, at_s, at_s - 1, at_s, cells=(cell,)))
        receipts.sample(sample(KEYS[0], "s", drawn * j_each, at_s))
        receipts.join(at_s)
        for rate in receipts.rates(None):
            assert rate.ratio == pytest.approx(1.0, abs=0.03), f"second {at_s}"


def test_a_worker_that_died_holds_nothing_up():
    receipts = with_catalog_facts()
    receipts.window(replace(window(KEYS[0], "s", 1, 1.0), dispatcher="dead"))
    receipts.window(window(KEYS[0], "s", 10, 10.0))
    receipts.sample(sample(KEYS[0], "s", 5.0, 10.0))
    assert len(receipts.join(10.0)) == 1


def test_rates_move_with_their_set_and_by_a_share():
    receipts = with_catalog_facts()
    feed(receipts, KEYS[0], "s", 30, 10, 0.6)
    rates = receipts.rates(None)
    told = {(rate.slice, rate.family, rate.variant): rate.ratio for rate in rates}
    assert not rates_changed(told, rates, 0.005)
    assert rates_changed(told, (), 0.005)
    assert rates_changed({key: ratio * 1.01 for key, ratio in told.items()}, rates, 0.005)


def test_carbon_joins_only_its_own_series():
    prices = Prices(60.0)
    receipts = with_catalog_facts()
    receipts.sample(sample(KEYS[0], "s", 0.0, 1.0))
    told = ReceiptRates(receipts.rates(None), 1.0, Series("z"), 1.2, Revision(1, 1))
    reading = CarbonReading(Series("z"), 0.0, 60.0, 360.0, Quality.MEASURED, observed_at_s=0.0)
    prices.set_rates(told, replace(reading, series=Series("other")))
    receipt = prices.price(KEYS[0], "digits", "s", 1)
    assert receipt is not None
    assert (receipt.quality, receipt.carbon_mg) == (Quality.UNSPECIFIED, 0.0)
    prices.set_rates(told, reading)
    receipt = prices.price(KEYS[0], "digits", "s", 1)
    assert receipt is not None
    assert receipt.carbon_mg == pytest.approx(0.5 / 3.6e6 * 360.0 * 1.2 * 1e3)


def test_a_storm_of_cancels_is_its_tenants_and_changes_nobody_elses_receipts():
    """One tenant leaves 90 of 100 requests before their answers, which are executed: each pays what it drew, during the
    storm and after it."""
    receipts, prices, book = Receipts(CATALOG), Prices(60.0), LoadCounters("d", 0, 0.0, 16)
    key, true_j = KEYS[0], 7.0
    receipts.nodes([node({key: "s"})])
    paid: dict[tuple[str, str], list[float]] = {}
    rates = []
    for second in range(1, 181):
        storm = 60 < second <= 120
        asked = {"calm": 10, "storm": 100 if storm else 10}
        for tenant, count in asked.items():
            for n in range(count):
                if tenant == "storm" and storm and n % 10:
                    book.unanswered("digits", "s", key, "", (1.0, 1.0, 0.0), tenant)
                else:
                    book.answered("digits", "s", key, "", 1, 20.0, 1.0, 75.0, second, tenant)
        book.settle(prices.rate)
        closed = book.close_window(float(second), Revision())
        phase = "before" if second <= 60 else "storm" if storm else "after"
        for cell in closed.cells:
            sums = paid.setdefault((phase, cell.key.tenant), [0.0, 0.0])
            sums[0] += cell.receipt_j + cell.unanswered_j
            sums[1] += true_j * (cell.answered + cell.unanswered)
        receipts.window(closed)
        receipts.sample(sample(key, "s", true_j * sum(asked.values()), float(second)))
        receipts.join(float(second) + 5)
        prices.set_rates(ReceiptRates(receipts.rates(None), float(second), Series("z"), 1.2, Revision(1, 1)), None)
        rates.append(receipts.rates(None)[0].ratio)
    for phase in ("storm", "after"):
        for tenant in ("calm", "storm"):
            receipt_j, drawn_j = paid[phase, tenant]
            assert receipt_j == pytest.approx(drawn_j, rel=0.01), (phase, tenant)
    assert max(rates[60:]) / min(rates[60:]) == pytest.approx(1.0, abs=0.01)


def played(true_j_at, seconds):
    """Receipts and joules of 20 answers a second that draw what a second says, from the 61st second on."""
    receipts, prices, book = Receipts(CATALOG), Prices(60.0), LoadCounters("d", 0, 0.0, 16)
    key, drawn_j, receipt_j = KEYS[0], 0.0, 0.0
    receipts.nodes([node({key: "s"})])
    for second in range(1, seconds + 1):
        true_j = true_j_at(second)
        book.answered("digits", "s", key, "", 20, 20.0, 1.0, 75.0, second, "")
        book.settle(prices.rate)
        closed = book.close_window(float(second), Revision())
        receipts.window(closed)
        receipts.sample(sample(key, "s", true_j, float(second)))
        receipts.join(float(second) + 5)
        if second % 5 == 0:
            prices.set_rates(ReceiptRates(receipts.rates(None), float(second), Series("z"), 1.2, Revision(1, 1)), None)
        if second > 60:
            drawn_j += true_j
            receipt_j += sum(cell.receipt_j for cell in closed.cells)
    return receipt_j, drawn_j


@pytest.mark.parametrize("share", [0.08, -0.08])
def test_what_receipts_asked_too_little_is_asked_of_the_next(share):
    """From one second on each request draws 8 % more (or less): the rates lag by a minute, the receipts pay it back."""
    receipt_j, drawn_j = played(lambda second: 4.3 * (1 + share * (second > 60)), 300)
    assert receipt_j == pytest.approx(drawn_j, rel=0.002)


def test_receipts_follow_joules_that_rise_all_along():
    """For three minutes each request draws a little more than the one before, as a board that warms up: 15 % in all."""
    receipt_j, drawn_j = played(lambda second: 4.3 * (1 + 0.15 * second / 180), 180)
    assert receipt_j == pytest.approx(drawn_j, rel=0.006)


def test_an_answer_of_a_time_that_was_joined_already_counts_in_the_next_sample():
    """The second window's answers took two seconds each, so that half of it belongs to the sample joined before."""
    receipts, slow = with_catalog_facts(), LoadKey("digits", "s", KEYS[0])
    receipts.window(window(KEYS[0], "s", 10, 1.0))
    receipts.sample(sample(KEYS[0], "s", 5.0, 1.0))
    found = receipts.join(1.0)
    cell = LoadCell(slow, answered=10, items=10, receipt_j=5.0, service=build_histogram([1000.0] * 10))
    receipts.window(LoadWindow("d", 0, 2, 1.0, 2.0, cells=(cell,)))
    receipts.sample(sample(KEYS[0], "s", 5.0, 2.0))
    found += receipts.join(9.0)
    assert sum(joined.answered for joined in found) == pytest.approx(20.0)
    assert sum(joined.receipt_j for joined in found) == pytest.approx(5.0)
    receipts.window(replace(window(KEYS[0], "s", 10, 9.5), seq=3))  # nothing meters from second 2 to 20
    receipts.sample(sample(KEYS[0], "s", 5.0, 21.0))
    assert not any(joined.answered for joined in receipts.join(30.0)), "a gap is not interpolated"


def test_requests_of_before_any_rate_was_known_are_not_paid_by_later_ones():
    receipts = with_catalog_facts()
    feed(receipts, KEYS[0], "s", 30, 10, 0.6)
    (rate,) = receipts.rates(None)
    assert rate.ratio == pytest.approx(1.2)


def test_work_without_an_answer_is_in_the_estimate_but_is_no_answer():
    receipts = Receipts(CATALOG)
    receipts.nodes([node({KEYS[0]: "s"})])
    key = LoadKey("digits", "s", KEYS[0])
    cell = LoadCell(
        key, answered=30, items=30, receipt_j=30.0, unanswered=30, unanswered_work=15.0, unanswered_items=15.0,
        unanswered_j=15.0,
    )  # fmt: skip
    receipts.window(LoadWindow("d", 0, 1, 0.0, 1.0, cells=(cell,)))
    receipts.sample(sample(KEYS[0], "s", 45.0, 1.0))
    [joined] = receipts.join(10.0)
    assert (joined.receipt_j, joined.answered) == (pytest.approx(45.0), pytest.approx(30.0))
    request_j, item_j = PROFILE_J["s"]
    assert receipts.rates(None)[0].ratio == pytest.approx(1.0 / (request_j + item_j), rel=1e-3)
