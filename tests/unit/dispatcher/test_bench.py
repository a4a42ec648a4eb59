"""The benchmark's arithmetic: what it sends, and how it judges on a machine that is not the reference."""

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
from dispatcher.request import request_parameters
from dispatcher.routing.core.routing_table import build_table, check_plan
from trefoil.core.common import Revision


def found(raw_us: float, ours_us: float, added_ms: float = 0.5) -> dict[str, Found]:
    def one(us: float, added: float) -> Found:
        return Found({shape.name: [us] for shape in SHAPES}, {"small": [1000.0]}, [1.0], [2.0], [added])

    return {
        "direct": Found(p50_ms=[0.4]),
        "nginx": Found(missing="no nginx on PATH"),
        RAW: one(raw_us, 0.6),
        "dispatcher, k = 1": one(ours_us, added_ms),
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


@pytest.mark.parametrize(
    ("raw_us", "ours_us", "said"),
    [(290.0, 340.0, "kept"), (500.0, 590.0, "kept on this machine's scale"), (500.0, 700.0, "MISSED")],
)
def test_limits_follow_the_machine(raw_us, ours_us, said):
    judged = verdicts(found(raw_us, ours_us), {"weighted": 2.0})
    assert limit_rows(judged)[1][-1] == said


def test_a_peer_without_its_binary_is_named():
    assert ("nginx: no nginx on PATH", "-", "-", "-", "-", "-") in speed_rows(found(290.0, 340.0))
    assert "| nginx | - |" in markdown(cpu_rows(found(290.0, 340.0)))


def test_every_router_decides_within_its_limit():
    assert all(us <= 20.0 for us in routers(3).values())
