"""What was served by class, and what BASE would have taken: each class by its own SLO, nothing invented."""

from dataclasses import asdict, replace

import pytest

from controller.accounting.core.modelled_base import model_base
from controller.accounting.core.receipts import JoinedSample
from controller.accounting.core.served import DEFAULT_CLASS, served_by_class
from dispatcher.service.accounting import LoadCounters, StreamEnd
from protos.controller.v1 import controller_pb2 as pb
from tests.unit.controller.test_receipts import CATALOG, KEYS, TYPE
from trefoil.core.catalog import Catalog, Family, Variant
from trefoil.core.common import Basis, ProfileRow, Provenance, Revision
from trefoil.core.device_types import A100_40GB
from trefoil.core.fleet import DeviceType
from trefoil.core.objective import Objective, TokenSlo

VARIANTS = tuple(Variant(n, v, a, "", 16, 1.0, 1, "") for n, v, a in (("s", 1, 0.9), ("l", 2, 0.99)))
FAMILY = Family("digits", "top1", VARIANTS, {"": (50.0, 0.95), "gold": (20.0, 0.95)})
OBJECTIVE = Objective("digits", slo_ms=100.0, slo_quantile=0.95)
LARGEST = ProfileRow(
    TYPE, "7g.40gb", "digits", "l", 0, 1, 1410, (), 10.0, 11.0, 12.0, 100.0, 3.0, 30.0, 16, Provenance(Basis.SYNTHETIC)
)
KNOWN = Catalog((FAMILY,), (*CATALOG.rows, LARGEST))


def test_each_class_is_judged_by_its_own_slo_and_the_family_by_all_of_them():
    book = LoadCounters("d", 0, 0.0, 16)
    for slo_class, slo_ms, latency_ms in (("", 100.0, 60.0), ("", 100.0, 130.0), ("gold", 20.0, 60.0)):
        book.arrived("digits", slo_class, 1.0)
        book.answered("digits", "l", KEYS[0], slo_class, 1, latency_ms, 1.0, slo_ms, 1.0)
    book.failed("digits", "", None, "gold", "UNAVAILABLE", 5.0)
    window = book.close_window(10.0, Revision())
    whole, default, gold = served_by_class([window], OBJECTIVE, KNOWN, 10.0, 30.0, 0.6)
    assert [one.slo_class for one in (whole, default, gold)] == ["", DEFAULT_CLASS, "gold"]
    assert [one.slo_attainment for one in (whole, default, gold)] == [0.25, 0.5, 0.0]
    assert [one.slo_ms for one in (whole, default, gold)] == [100.0, 100.0, 20.0]
    assert [one.rate_per_s for one in (whole, default, gold)] == pytest.approx([0.3, 0.2, 0.1])
    assert gold.latency_ms_p95 == pytest.approx(60.0, rel=0.1)
    assert (whole.joules_per_request, whole.grams_per_request) == (10.0, pytest.approx(0.2))
    assert default.joules_per_request is None, "meters know no classes"


def test_what_waited_for_a_place_is_told_from_what_only_had_its_length_predicted():
    """A predictor takes up to 50 ms, which are not a queue."""
    book = LoadCounters("d", 0, 0.0, 16)
    for queue_ms in (0.1, 20.0, 49.0, 400.0):
        book.answered("digits", "l", KEYS[0], "", 1, queue_ms + 10.0, queue_ms, 100.0, 1.0)
    window = book.close_window(10.0, Revision())
    streams = replace(FAMILY, generative=True, tokens_mean=8.0)
    whole = served_by_class([window], OBJECTIVE, Catalog((streams,), KNOWN.rows), 10.0, 30.0, 0.6)[0]
    assert (whole.waited_share, whole.wait_ms_mean) == (0.25, pytest.approx(469.1 / 4, rel=0.01))
    assert whole.length_cv > 0
    still = served_by_class([], OBJECTIVE, KNOWN, 10.0, None, None)[0]
    assert (still.waited_share, still.wait_ms_mean, still.length_cv) == (None, None, None)


def test_tokens_are_judged_by_the_objectives_of_their_class_and_cost_what_the_family_drew():
    gold = TokenSlo(ttft_ms=20.0, ttft_quantile=0.9)
    family = replace(FAMILY, generative=True, tokens_mean=8.0, token_classes={"gold": gold})
    wanted = replace(OBJECTIVE, ttft_ms=50.0, ttft_quantile=0.95, tpot_ms=5.0, tpot_quantile=0.95)
    book = LoadCounters("d", 0, 0.0, 16)
    for slo_class, slo, ttft_ms in (("", wanted.token_slo, 30.0), ("", wanted.token_slo, 60.0), ("gold", gold, 30.0)):
        book.answered("digits", "l", KEYS[0], slo_class, 1, 90.0, 1.0, 100.0, 1.0)
        book.tokens("digits", "l", KEYS[0], slo_class, 10)
        book.streamed("digits", "l", KEYS[0], slo_class, StreamEnd(ttft_ms, 4.0, 7), slo)
    book.failed("digits", "", None, "", "UNAVAILABLE", 5.0)
    book.streamed("digits", "", None, "", StreamEnd(), wanted.token_slo)
    window = book.close_window(10.0, Revision())
    found = served_by_class([window], wanted, Catalog((family,), KNOWN.rows), 10.0, 30.0, 0.6)
    whole, default, of_gold = (one.tokens for one in found)
    assert (whole.tokens, whole.prompt_tokens) == (30, 21)
    assert (whole.joules_per_token, whole.grams_per_token) == (1.0, pytest.approx(0.02))
    assert [one.ttft_ms for one in (whole, default, of_gold)] == [50.0, 50.0, 20.0]
    assert [one.ttft_attainment for one in (whole, default, of_gold)] == [0.25, pytest.approx(1 / 3), 0.0]
    assert [one.tpot_attainment for one in (whole, default, of_gold)] == [1.0, 1.0, None], "gold has none of it"
    assert of_gold.tpot_ms_p95 == pytest.approx(4.0, rel=0.03)
    assert of_gold.joules_per_token is None, "meters know no classes"
    row = pb.Served(**asdict(found[2]))
    assert row.tokens.HasField("tpot_ms_p95")
    assert not row.tokens.HasField("tpot_attainment")
    assert not pb.Served(**asdict(served_by_class([window], wanted, KNOWN, 10.0, 3.0, 0.1)[0])).HasField("tokens")


def test_what_nobody_answered_is_not_known_and_not_0():
    whole, *classes = served_by_class([], OBJECTIVE, KNOWN, 10.0, None, None)
    assert (whole.rate_per_s, whole.latency_ms_p95, whole.slo_attainment, whole.accuracy) == (0.0, None, None, None)
    assert [one.slo_class for one in classes] == [DEFAULT_CLASS, "gold"]
    plain = Catalog((replace(FAMILY, classes={"": (50.0, 0.95)}),), ())
    assert len(served_by_class([], OBJECTIVE, plain, 10.0, None, None)) == 1, "a family without classes has one row"


def test_base_is_the_largest_variant_on_whole_devices_that_are_all_awake():
    base = model_base(KNOWN, {"n/gpu0": A100_40GB, "n/gpu1": A100_40GB}, ["digits"])
    assert base.unknown == ""
    assert base.idle_j("n/gpu1", 10.0) == 10.0 * A100_40GB.idle_w
    assert base.active_j(JoinedSample("digits", 0.0, 0.0, 0.0, answered=4.0, items=4.0)) == pytest.approx(12.0)
    for part in ("l on 7g.40gb", "synthetic profile", "all 2 devices", "55 W idle"):
        assert part in base.basis


@pytest.mark.parametrize(
    ("devices", "catalog", "why"),
    [
        ({"n/gpu0": A100_40GB}, Catalog((FAMILY,), CATALOG.rows), "no profile of l on 7g.40gb"),
        ({"n/gpu0": DeviceType("Voodoo 2")}, KNOWN, "Voodoo 2"),
        ({}, KNOWN, "no device"),
    ],
    ids=["no profile", "no such type", "no device"],
)
def test_a_base_that_nothing_says_is_unknown(devices, catalog, why):
    base = model_base(catalog, devices, ["digits"])
    assert why in base.unknown
    assert (base.basis, base.idle_w) == ("", {})
