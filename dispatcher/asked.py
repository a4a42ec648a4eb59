"""ExplainRequest: reads parameters as a front reads them, asks the brain (explain.py), and puts the answer on the wire.

It answers for the worker that it reaches: each has its own queue, credits and turns.
"""

from collections.abc import Mapping
from typing import Any, Final

from tritonclient.grpc import service_pb2 as pb

from dispatcher import knobs
from dispatcher.contracts import unknown_model
from dispatcher.core.explain import explain
from dispatcher.hub import Hub
from dispatcher.knobs import Knobs
from protos.dispatcher.v1 import dispatcher_pb2
from trefoil.core.brains import Ticket
from trefoil.core.errors import InvalidInput
from trefoil.runtime import codec

PRIORITY: Final = "priority"


def answer(hub: Hub, request: Any) -> Any:
    """ExplainRequestResponse.

    Raises:
        NotFound: nobody serves the family.
        InvalidInput: a parameter that a request could not have.
    """
    family, table = request.family, hub.table
    if family not in table.routes:
        raise unknown_model(family)
    asked, priority = _read(request.params)
    ticket = Ticket(
        id=0, family=family, slo_class=asked.slo_class, tenant="", items=1, bytes=0,
        arrived_s=hub.clock.monotonic_s(), deadline_s=None, min_accuracy=asked.min_accuracy, priority=priority,
        sequence_id="", sequence_start=False, sequence_end=False, length_score=None, slo_ms=hub.slo_ms(family, asked),
    )  # fmt: skip
    standing = hub.pumps[family].standing(ticket, table.planned[family], table.missing.get(family, {}))
    found = explain(standing, ticket)
    return dispatcher_pb2.ExplainRequestResponse(
        table=codec.to_proto(table.revision),
        router=found.router,
        waiting=standing.waiting,
        why=found.why,
        targets=[
            dispatcher_pb2.ScoredTarget(
                target=codec.to_proto(each.target), eligible=each.eligible, score=each.score, in_flight=each.in_flight,
                why=each.why,
            )
            for each in found.targets
        ],
    )  # fmt: skip


def _read(params: Mapping[str, str]) -> tuple[Knobs, int]:
    message = pb.ModelInferRequest()
    for name, value in params.items():
        if name != PRIORITY and not name.startswith(knobs.PREFIX):
            remedy = f"one of {', '.join((*knobs.KNOWN, PRIORITY))}"
            raise InvalidInput("says nothing about where a request goes", field=name, value=value, remedy=remedy)
        if name != PRIORITY:
            message.parameters[name].string_param = value
    text = params.get(PRIORITY, "0")
    if not text.isdigit():
        raise InvalidInput("is not a whole number", field=PRIORITY, value=text, remedy="1 = highest, 0 = the default")
    return knobs.take(message.parameters), int(text)
