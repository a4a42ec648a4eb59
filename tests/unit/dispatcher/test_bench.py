"""The benchmark's arithmetic: what it sends, and how it judges."""

import pytest
from tritonclient.grpc import service_pb2 as pb

from benchmarks.dispatcher import (
    RAW,
    SHAPES,
    Found,
    cpu_rows,
    framed,
    limit_rows,
    markdown,
    message,
    speed_rows,
    verdicts,
)
from benchmarks.dispatcher_peers import node, plan
from benchmarks.dispatcher_router import routers
from dispatcher.routing import request_parameters
from dispatcher.routing.core.routing_table import build_table, check_plan
from trefoil.core.common import Revision


def found(ours_us: float, added_ms: float = 0.3, two_us: float = 110.0) -> dict[str, Found]:
    def one(us: float, added: float, per_s: float) -> Found:
        cpu_us = {shape.name: [us] for shape in SHAPES}
        return Found(cpu_us, [100.0], {"small": [1000.0]}, [1.0], [2.0], [added], [per_s], [us])

    return {
        "direct": Found(p50_ms=[0.4]),
        RAW: one(500.0, 0.6, 2000.0),
        "dispatcher": one(ours_us, added_ms, 5000.0),
        "dispatcher, 2 workers": Found(scale_us=[two_us]),
    }


def test_what_is_sent_is_a_framed_request_with_knobs_that_are_taken():
    shape = next(shape for shape in SHAPES if shape.knobs)
    data = framed(message(shape))
    assert data[0] == 0
    assert int.from_bytes(data[1:5]) == len(data) - 5
    request = pb.ModelInferRequest.FromString(data[5:])
    asked = request_parameters.extract(request.parameters)
    assert (asked.receipt, asked.min_accuracy, asked.slo_ms) == (True, 0.5, 200.0)
    assert not request.parameters


def test_what_dispatchers_route_by_can_be_routed_by():
    check_plan(plan(), Revision())
    table = build_table(plan(), [node("127.0.0.1:1", 1.0)])
    assert {len(route.targets) for route in table.routes.values()} == {4}


def test_every_limit_is_a_ratio_of_one_run():
    assert all(each.passed for each in verdicts(found(150.0), {"weighted": 2.0}))
    missed = {each.what: each.value for each in verdicts(found(230.0), {"weighted": 2.0}) if not each.passed}
    assert missed == pytest.approx({"CPU of small / raw's": 0.46})
    slow = verdicts(found(150.0, added_ms=0.5, two_us=130.0), {"weighted": 21.0})
    assert [row[0] for row in limit_rows(slow) if "MISSED" in row[-1]] == [
        "CPU of small at 400/s a worker, 2 workers / 1",
        "added p50 at 400/s / raw's",
        "router weighted",
    ]


def test_tables_hold_every_peer():
    tables = markdown(cpu_rows(found(150.0))), markdown(speed_rows(found(150.0)))
    for rows in tables:
        assert all(f"| {name} | " in rows for name in found(150.0))


def test_every_router_decides_within_its_limit():
    assert all(us <= 20.0 for us in routers(3).values())
