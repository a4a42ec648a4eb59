"""A family that is split: a route for each stage, one worker for all of them, requests of answers, joules summed."""

from dataclasses import replace

import pytest
from tritonclient.grpc import service_pb2 as pb

from dispatcher.request import stages
from dispatcher.routing.core import routing_table
from dispatcher.routing.core.receipts import ENERGY, METHOD, Receipts
from dispatcher.service.accounting import LoadCounters
from dispatcher.transport.core import kserve_wire
from power_agent.clocks.core.slice_latencies import ClockPeriod, SliceLatencies
from tests.unit.dispatcher.worlds import key, node, plan, route, status, target
from trefoil.core.catalog import Catalog
from trefoil.core.common import Basis, Revision
from trefoil.core.energy import ReceiptRate, ReceiptRates
from trefoil.core.errors import PlanError
from trefoil.core.fleet import DeviceState, Hosted, SliceStatus, family_of, split_model, stage_model
from trefoil.core.plan import PlannedDevice, PlannedSlice, RouteTarget

FIRST, LAST = "digits@1of2", "digits@2of2"


def staged(n: int, stage: int, weight: float = 1.0) -> RouteTarget:
    return replace(target(n, weight=weight), stage=stage)


def hosting(n: int, stage: int) -> SliceStatus:
    return replace(status(n, f"host:{9000 + n}"), hosted=(Hosted("digits", "digits-l", 4, stage, 2, 1, 8),))


SPLIT = route([staged(0, 0), staged(1, 1, 0.5), staged(2, 1, 0.5)])


def test_names_of_stages_tell_the_family_and_the_place():
    assert [stage_model("digits", n, 2) for n in range(2)] == [FIRST, LAST]
    assert stage_model("digits", 0, 1) == stage_model("digits", 0, 0) == "digits"
    assert (split_model(LAST), split_model("digits"), family_of(LAST)) == (("digits", 1, 2), ("digits", 0, 1), "digits")


def test_each_stage_has_a_route_and_weights_of_its_own():
    routing_table.check_plan(plan([SPLIT]), Revision())
    built = routing_table.build_table(plan([SPLIT]), [node([hosting(0, 0), hosting(1, 1), hosting(2, 1)])])
    assert built.chains == {"digits": (FIRST, LAST)}
    assert [[(t.slice, t.weight, t.credits) for t in built.live(model)] for model in (FIRST, LAST)] == [
        [(key(0), 1.0, 2)], [(key(1), 0.5, 2), (key(2), 0.5, 2)],
    ]  # fmt: skip
    assert built.served("digits")
    assert not built.served(FIRST)


def test_a_family_is_served_only_as_long_as_each_stage_is():
    lost = routing_table.build_table(plan([SPLIT]), [node([hosting(0, 0), hosting(1, 0)])])
    assert lost.live(FIRST)
    assert not lost.served("digits")
    assert "node0-gpu0-1g.5gb-1 it does not host digits@2of2" in lost.why_not("digits")


def test_one_worker_has_all_stages():
    workers = [(f"d{n}", n) for n in range(5)]
    for me in workers:
        built = routing_table.build_table(plan([SPLIT]), [node([hosting(n, n > 0) for n in range(3)])], {}, workers, me)
        assert built.served_by[FIRST] == built.served_by[LAST]
        assert len(built.served_by[FIRST]) == 1
        assert bool(built.live(FIRST)) == bool(built.live(LAST)) == (me == built.served_by[FIRST][0])


def test_stages_of_different_variants_and_a_stage_without_targets_are_refused():
    across = route([staged(0, 0), replace(staged(1, 1), variant="digits-xs")])
    with pytest.raises(
        PlanError, match=r"routes\[digits\].variant = \['digits-l', 'digits-xs'\]: stages of one family"
    ):
        routing_table.check_plan(plan([across]), Revision())
    with pytest.raises(PlanError, match=r"a stage has no target"):
        routing_table.check_plan(plan([route([staged(0, 0), staged(1, 2)])]), Revision())


def test_a_slice_may_do_two_stages_and_no_stage_twice():
    routing_table.check_plan(plan([route([staged(0, 0), staged(0, 1)])]), Revision())
    with pytest.raises(PlanError, match="targeted twice"):
        routing_table.check_plan(plan([route([staged(0, 0), staged(1, 1, 0.5), staged(1, 1, 0.5)])]), Revision())


def test_what_a_stage_answers_is_what_the_next_is_asked():
    asked = pb.ModelInferRequest(model_name="digits", id="mine")
    asked.inputs.add(name="IMAGE", datatype="UINT8", shape=[1, 2])
    asked.outputs.add(name="PROBABILITIES")
    asked.parameters["priority"].int64_param = 3
    asked.raw_input_contents.append(b"ab")
    first, kept = stages.first_request(asked.SerializeToString(), FIRST)
    sent = pb.ModelInferRequest.FromString(first)
    assert (sent.model_name, sent.id, list(sent.outputs), list(sent.raw_input_contents)) == (FIRST, "mine", [], [b"ab"])
    answer = pb.ModelInferResponse(model_name=FIRST, model_version="4", raw_output_contents=[b"12345678"])
    answer.outputs.add(name="features", datatype="FP32", shape=[1, 2])
    told = answer.SerializeToString()
    for last in (False, True):
        following = pb.ModelInferRequest.FromString(stages.next_request(kept, told, LAST, last=last))
        assert (following.model_name, following.id, following.parameters["priority"].int64_param) == (LAST, "mine", 3)
        assert [(i.name, i.datatype, list(i.shape)) for i in following.inputs] == [("features", "FP32", [1, 2])]
        assert list(following.raw_input_contents) == [b"12345678"]
        assert [o.name for o in following.outputs] == (["PROBABILITIES"] if last else [])


def test_a_receipt_of_stages_is_their_sum_or_says_nothing():
    receipts = Receipts(stale_s=60.0)
    rates = [ReceiptRate(key(n), "digits", "digits-l", 1.0 + n, 0.5, basis=Basis.MEASURED) for n in range(2)]
    receipts.set_rates(ReceiptRates(rates=tuple(rates)), None)

    def told(*slices: int) -> dict[str, object]:
        data = receipts.suffix_of_stages([(key(n), "digits-l") for n in slices], "digits", 4)
        found = pb.ModelInferResponse.FromString(data).parameters
        return {name: each.double_param or each.string_param for name, each in found.items()}

    assert told(0, 1)[ENERGY] == pytest.approx((1 + 4 * 0.5) + (2 + 4 * 0.5))
    assert ENERGY not in told(0, 2)
    assert ENERGY not in told(2, 1)
    assert "is not measured" in str(told(2, 1)[METHOD])
    named = pb.ModelInferResponse.FromString(kserve_wire.stages_suffix("digits", ("a", "b")))
    assert (named.model_name, named.parameters["trefoil_stage_slices"].string_param) == ("digits", "a, b")


def test_an_answer_counts_once_and_each_governor_sees_the_whole_latency():
    load = LoadCounters("d1", 0, 100.0, 8)
    load.arrived("digits", "", 100.0)
    load.answered("digits", "digits-l", key(1), "", 2, 50.0, 5.0, 100.0, 100.1, earlier_ms=20.0)
    load.passed("digits", "digits-l", key(0), "", 2, 50.0, 20.0, 0.25)
    window = load.close_window(100.5, Revision())
    cells = {cell.key.slice: cell for cell in window.cells}
    assert sum(cell.answered for cell in window.cells) == sum(cell.arrived for cell in window.cells) == 1
    assert (cells[key(0)].service.sum_ms, cells[key(1)].service.sum_ms) == (20.0, 25.0)
    assert (cells[key(0)].receipt_j, cells[key(0)].passed_items, cells[key(0)].latency.total) == (0.25, 2, 0)
    assert load.totals["digits"].service_ns == 45_000_000

    seen = SliceLatencies(Catalog((), ()))
    seen.slo_ms = {"digits": 100.0}
    seen.add_window(window, 10.0)
    parts = tuple(PlannedSlice(key(n), (Hosted("digits", "digits-l", 4, n, 2, 1, 8),), 2) for n in range(2))
    device = PlannedDevice("node0/gpu0", DeviceState.AWAKE, parts)
    stages = seen.stages(device, "A100-SXM4-40GB", [ClockPeriod(0.0, 1410)], 10.0)
    assert [(s.stage, s.samples, s.latency_ms) for s in stages] == [(0, 1, 50.0), (1, 1, 50.0)]
