"""Engines that already run: their streams however they are cut, their device types, what settings and plans refuse."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest

from controller.planners.policy_parts import planner_of
from power_agent.settings import PowerAgentSettings
from tests.support.planning import A100_40GB, digits, objective, row, view
from trefoil import engine_api
from trefoil.core.catalog import Catalog, Family, Variant
from trefoil.core.device_types import device_type, engine_of, engine_slice, engine_type, profile_type, reported_type
from trefoil.core.errors import PlanError, SettingError
from trefoil.core.fleet import DeviceState, DeviceStatus, FleetState, NodeStatus
from trefoil.core.plan_check import check
from trefoil.core.policies import Policy
from trefoil.simulator import Scenario, simulate
from trefoil.simulator.scenario.inputs import Provided
from trefoil.simulator.scenario.schema import Arrivals, Carbon, FamilyObjective, FamilySlo, Node, Served, Zone

L4 = device_type("L4")
STREAM = (
    b': ping\r\n\r\ndata: {"choices": [{"index": 0, "text": "a\xe2\x80\xa8b"}]}\r\n\r\n'
    b'data: {"choices": [{"index": 1, "text": "other"}]}\n\n'
    b'event: x\ndata:{"choices": [{"delta": {"content": "c"}}]}\n\n'
    b'data: {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}], "usage": null}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": -1}}\n\ndata: [DONE]\n\ndata: {broken'
)


async def _parts(text: bytes, size: int) -> AsyncIterator[bytes]:
    for at in range(0, len(text), size):
        yield text[at : at + size]


def pieces(text: bytes, size: int) -> list[engine_api.AnswerPart]:
    async def read() -> list[engine_api.AnswerPart]:
        return [engine_api.piece_of(event) async for event in engine_api.events_of(_parts(text, size))]

    return asyncio.run(read())


@pytest.mark.parametrize("size", [1, 2, 7, 64, 10_000])
def test_events_are_the_same_however_their_bytes_come(size):
    found = pieces(STREAM, size)
    assert "".join(one.text for one in found) == "a\u2028bc", (
        "a line separator is a part of a text; other choices are not"
    )
    assert [one.finish_reason for one in found if one.finish_reason] == ["stop"]
    assert (found[-1].tokens_in, found[-1].tokens_out) == (3, None), "a count below 0 is none"


@pytest.mark.parametrize(
    ("code", "kind"), [(b"400", "refused"), (b"500", "fault"), (b"null", "fault"), (b"[]", "fault")]
)
def test_an_error_in_a_stream_is_of_whom_its_code_says(code, kind):
    with pytest.raises(engine_api.EngineError, match="aborted the answer: no") as caught:
        pieces(b'data: {"error": {"message": "no", "code": %s}}\n' % code, 64)
    assert caught.value.kind == kind


def test_calls_without_a_number_are_counted():
    calls = [{"index": None, "id": "a"}, {"id": "b"}, {"index": 5}]
    found = engine_api.piece_of({"choices": [{"delta": {"tool_calls": calls}}]})
    assert [call["index"] for call in found.calls] == [0, 1, 5]


@pytest.mark.parametrize(
    ("text", "why"),
    [(b"data: [1]\n", "not an object"), (b"data: nope\n", "not JSON: nope"), (b'data: {"choices": 5}\n', "completion"),
     (b'data: {"choices": [{"delta": 3}]}\n', "not a completion"),
     (b'data: {"choices": [{"delta": {"content": ["a"]}}]}\n', "not a completion"),
     (b'data: {"choices": [{"delta": {"tool_calls": [{"index": [1]}]}}]}\n', "not a completion"),
     (b'data: {"choices": [{"delta": {"tool_calls": [{"index": 0, "id": 5}]}}]}\n', "not a completion"),
     (b"data: " + b"[" * 10_000 + b"\n", "not JSON"),
     (b'data: {"choi', "ended within an event"), (b"data: " + b"x" * (1 << 21), "longer than 1048576 bytes")],
)  # fmt: skip
def test_what_is_no_event_is_said(text, why):
    with pytest.raises(engine_api.EngineError, match=why):
        pieces(text, 1 << 16)


@pytest.mark.parametrize("sleeps", [False, True])
@pytest.mark.parametrize("board", ["L4", "A100-SXM4-40GB-nomig", "gpu:RTX 6000:47GiB:300W"])
def test_a_device_with_an_engine_is_a_type_by_its_name(board, sleeps):
    known = device_type(board)
    kind = engine_type(known, "chat", "llama-8b.int4", sleeps)
    assert reported_type(kind.name) == kind
    assert (profile_type(kind.name), engine_of(kind)) == (board, ("chat", "llama-8b.int4"))
    assert kind.sleep_w == (known.sleep_w if sleeps else known.idle_w)
    [shape] = kind.slice_types
    assert (shape.name, shape.memory_mib) == ("engine:chat:llama-8b.int4", known.largest.memory_mib)
    assert engine_of(known) is None


@pytest.mark.parametrize(
    "name", ["ghost:less:engine:a:b", "L4:less:engine:a", "L4:less:engine::", "x:less:engine:a:b:c"]
)
def test_a_name_that_is_no_such_type_is_an_unknown_one_or_has_no_engine(name):
    assert engine_of(reported_type(name)) is None or reported_type(name).unknown


ENGINE = {"family": "chat", "variant": "tiny", "address": "http://gpu7:8000/v1/", "devices": ("gpu0",)}


def test_settings_name_the_engine_of_a_device():
    made = PowerAgentSettings(engines=({**ENGINE, "devices": ("gpu0", "gpu1")},))
    assert made.engine_on("node0/gpu1").address == "http://gpu7:8000/v1"
    assert made.engine_on("node0/gpu2") is None


@pytest.mark.parametrize(
    ("engines", "why"),
    [([ENGINE, {**ENGINE, "family": "qa"}], "gpu0 is claimed by chat/tiny and qa/tiny; leave it to one of them"),
     ([{**ENGINE, "address": "gpu7:8000"}], "gpu7:8000.* not an address of an engine"),
     ([{**ENGINE, "address": "http://u:p@gpu7/v1"}], "not an address of an engine"),
     ([{**ENGINE, "api": "triton"}], "not a Triton address"),
     ([{**ENGINE, "api": "triton", "address": "gpu7:99999"}], "not a Triton address"),
     ([{**ENGINE, "api": "triton", "address": "gpu7:8001", "key_file": "/k"}], "key_file is for OpenAI's API"),
     ([{**ENGINE, "api": "tgi"}], "api"),
     ([{**ENGINE, "devices": ("node0/gpu0",)}], "is not a GPU of this node; write gpu0"),
     ([{**ENGINE, "devices": ()}], "engines.0.devices"),
     ([{**ENGINE, "wake": ("a",)}], "wake and sleep belong together"),
     ([{**ENGINE, "devices": ("gpu0", "gpu1"), "wake": ("a",), "sleep": ("b",)}], "on several devices")],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused_by_name(engines, why):
    with pytest.raises(SettingError, match=why):
        PowerAgentSettings(engines=tuple(engines))


def engine_rows(variant: str, ms: float):
    for batch, factor in ((1, 1.0), (4, 1.3), (16, 2.0)):
        joules = ms * factor * 0.05
        yield replace(
            row("xs", "1g.5gb", ms * factor), device_type="L4", slice_type=engine_slice("chat", variant), family="chat",
            variant=variant, batch=batch, energy_active_j_per_batch=joules, clock_mhz=max(L4.clocks_mhz),
        )  # fmt: skip


def engine_view():
    """Two engines, one of which can sleep, and an A100 for digits."""
    kinds = engine_type(L4, "chat", "small", False), engine_type(L4, "chat", "large", True), A100_40GB
    awake = DeviceState.AWAKE
    devices = tuple(DeviceStatus(f"node0/gpu{n}", k, awake, mig_current=n == 2) for n, k in enumerate(kinds))
    small = Variant("small", 1, 0.6, "stated", 128, 1.0, 0, "")
    variants = small, replace(small, name="large", version=2, accuracy=0.66)
    chat = Family("chat", "accuracy", variants, {"": (2000.0, 0.95)}, generative=True, tokens_mean=8.0)
    rows = (*digits().rows, *engine_rows("small", 100.0), *engine_rows("large", 200.0))
    base = view(devices=FleetState((NodeStatus("node0", zone="test", devices=devices),)))
    wanted = objective(family="chat", slo_ms=2000.0, min_accuracy=0.6), *base.objectives
    demand = replace(base.demand[0], family="chat", rate_per_s=5.0, rate_p90_per_s=6.0), *base.demand
    return replace(base, catalog=Catalog((*digits().families, chat), rows), objectives=wanted, demand=demand)


@pytest.mark.parametrize("name", ["alpaserve", "base", "co2opt", "exact", "infadapter", "muserve", "static_mix"])
def test_planners_leave_a_device_to_its_engine(name):
    one = engine_view()
    found = planner_of("", Policy("engines", name)).plan(one, np.random.default_rng(5))
    check(found.plan, one.fleet, one.catalog, one.demand)
    parts = {part.key.device: part for node in found.plan.nodes for d in node.devices for part in d.slices}
    for gpu, variant in (("node0/gpu0", "small"), ("node0/gpu1", "large")):
        if part := parts.get(gpu):
            assert [h.variant for h in part.hosted] == [variant]
            assert part.credits == 16, "the streams that its profile goes up to"
    assert {"node0/gpu0", "node0/gpu1"} & parts.keys()
    assert {h.family for h in parts["node0/gpu2"].hosted} == {"digits"}


@pytest.mark.parametrize("policy", ["base", "muserve", "exact"])
def test_a_fleet_of_engines_is_played(policy):
    devices = tuple(engine_type(L4, "chat", variant, False).name for variant in ("small", "large", "large"))
    slo = FamilySlo(latency_ms=2000.0, ttft_ms=500.0, tpot_ms=60.0)
    chat = Served(name="chat", arrivals=Arrivals(rate_per_s=8.0), objective=FamilyObjective(slo=slo))
    zones = Carbon(zones={"demo": Zone(constant_g_per_kwh=100.0)})
    played = Scenario(policy=policy, duration_s=20.0, nodes=(Node(devices=devices),), families=(chat,), carbon=zones)
    found = simulate(played, Provided(catalog=engine_view().catalog)).summary.families["chat"]
    assert found.answered == found.arrived > 100
    assert found.tokens.ttft_attainment == found.tokens.tpot_attainment == 1.0
    assert found.grams_per_1000_tokens == pytest.approx(1e3 * found.grams_per_request / 8.0)
    assert found.mix.get("small", 0.0) == 0.0 if policy == "muserve" else found.mix


def test_nothing_else_may_be_planned_on_an_engine():
    one = engine_view()
    plan = planner_of("", Policy("engines", "base")).plan(one, np.random.default_rng(5)).plan
    node = plan.nodes[0]
    [part] = node.devices[0].slices
    other = replace(part, hosted=(replace(part.hosted[0], variant="large", version=2),))
    wrong = replace(node, devices=(replace(node.devices[0], slices=(other,)), *node.devices[1:]))
    with pytest.raises(PlanError, match="an engine serves its own variant alone"):
        check(replace(plan, nodes=(wrong,)), one.fleet, one.catalog, one.demand)


@pytest.mark.parametrize(
    "base",
    ["http://[::1", "http://xn--a", "http://", "http://127.0.0.1:99999999", "http://127.0.0.1:-1", "http://h:port",
     "ftp://h/v1", "http://a\x00b", "http://h/" + "x" * 70_000],
)  # fmt: skip
async def test_what_is_no_address_is_an_engine_out_of_reach_and_no_setting(base):
    client = engine_api.EngineClient()
    for asked in (client.alive, client.probe):
        with pytest.raises(engine_api.EngineError) as caught:
            await asked(engine_api.EngineTarget(base, "m"))
        assert caught.value.kind == "unreachable"
    await client.close()
    with pytest.raises(SettingError, match="is not an address of an engine"):
        engine_api.check_address(base, "engines.address")


def test_a_target_is_read_as_it_is_written():
    for text, parts in (
        ("http://h:8/v1#org/m", ("http://h:8/v1", "org/m", "")), ("http://h/v1?embed#m", ("http://h/v1", "m", "embed")),
    ):  # fmt: skip
        found = engine_api.EngineTarget.parse(text)
        assert (found.base, found.model, found.task) == parts
        assert str(found) == text


@pytest.mark.parametrize(
    ("answer", "why"),
    [(b"{}", "KeyError"), (b"[", "EOF while parsing"), (b'{"data": [{"index": 1, "embedding": [1]}]}', "1 embeddings"),
     (b'{"data": [{"index": 0, "embedding": "x"}]}', "Error"), (b'{"data": [5]}', "Error"),
      (b'{"data": [{"index": 0, "embedding": {"a": 1}}]}', "Error"),
      (b'{"data": [{"index": 0, "embedding": [[1, 2]]}]}', "vectors of tokens, not of a text"),
      (b"null", "TypeError"),
      (b'{"data": [{"index": 0, "embedding": [1%s]}]}' % (b"0" * 400), "OverflowError")],
)  # fmt: skip
def test_what_are_no_embeddings_is_said(answer, why):
    with pytest.raises(engine_api.EngineError, match=f"answers no embeddings: .*{why}"):
        engine_api.vectors_of(answer, 1)
