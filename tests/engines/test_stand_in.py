"""The stand-in for Triton's vLLM backend against the real vLLM, by one client; and Trefoil's OpenAI API over it."""

import asyncio
import json
from collections.abc import Iterator

import pytest

from tests.support import engine_family
from tests.support.dispatching import dispatching, until
from tests.support.llm_client import ALLOWED, REFUSED, by_openai, by_triton, differences, observe
from tests.support.llm_engines import ROOT, Engine, judge, make_model
from tests.support.special_world import World
from tests.support.triton_process import TritonProcess
from tests.support.vllm_backend import language
from tests.unit.dispatcher.worlds import key, node
from trefoil.core.common import Revision
from trefoil.core.fleet import SliceState, SliceStatus
from trefoil.core.plan import Route, RouteTarget

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]
HOSTED = engine_family.hosted(1)
CASTS = [
    {"max_tokens": "8"}, {"max_tokens": None}, {"max_tokens": "many"}, {"seed": None}, {"seed": "7"}, {"n": "2"},
    {"temperature": None}, {"temperature": "0.5"}, {"top_k": 1.5}, {"ignore_eos": "no"}, {"stop": None},
    {"stop": {"a": 1}}, {"stop": ["a", 5]}, {"logprobs": -2}, {"logprobs": -1}, {"logprobs": True},
    {"tempreature": 0}, {"best_of": 2}, {"lora_name": "x"}, {"repetition_penalty": 1e999}, {"min_p": -0.1},
    {"prompt_logprobs": 1}, {"bad_words": ["a"]}, {"logit_bias": {"5": 1.0}}, {"detokenize": False, "stop": "a"},
]  # fmt: skip


@pytest.fixture(scope="module")
def vllm() -> Iterator[dict]:
    """What the real vLLM answers."""
    engine = Engine("vllm", make_model(ROOT / "out" / "engines"))
    try:
        engine.wait_ready()
        yield observe(by_openai(engine.address, engine.model))
    finally:
        engine.kill()


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory) -> Iterator[TritonProcess]:
    folder = tmp_path_factory.mktemp("stand-in")
    engine_family.write_family(folder / "models")
    made = TritonProcess(folder, 1, source=folder / "models", serving=HOSTED, triton=engine_family.installation(folder))
    yield made
    made.close()


def test_the_client_sees_what_vllm_is_known_for(vllm):
    assert {vllm[f"{name}, {way}"] for name in REFUSED for way in ("stream", "whole")} == {"refused"}
    assert vllm["natural end"] == ("stop", True, "length"), "the end token counts and has no text"
    assert vllm["stop, stream"] == ("stop", True, True)


async def test_the_stand_in_answers_as_vllm(vllm, stand_in):
    await stand_in.ready([HOSTED], 60.0)
    ask = by_triton(stand_in.launch.grpc_target, HOSTED.family)
    found = differences(vllm, await asyncio.to_thread(observe, ask))
    assert found == {}, found


async def test_trefoils_api_over_the_stand_in_answers_as_vllm(vllm, stand_in, state, tmp_path):
    await stand_in.ready([HOSTED], 60.0)
    status = SliceStatus(
        key=key(9), generation=1, mig_uuid="MIG-9", state=SliceState.READY, hosted=(HOSTED,),
        grpc_target=stand_in.launch.grpc_target, since_s=1.0, revision=Revision(1, 1, 0), credits=8,
    )  # fmt: skip
    route = Route(
        HOSTED.family,
        "weighted",
        "fifo",
        (RouteTarget(key(9), HOSTED.variant, 0, 1.0, 8, False, "", 0.6, 1),),
        5000,
        0,
        {},
    )
    async with dispatching(state, tmp_path, rest_address="127.0.0.1:0", window_s=3600.0) as running:
        world = World(running, state, [])
        await world.publish(node([status]), [route])
        await until(lambda: running.contracts.known(HOSTED.family))
        ask = by_openai(f"http://{running.rest_address}/v1", HOSTED.family)
        found = differences(vllm, await asyncio.to_thread(observe, ask))
    # No parameter of the API here: stop sequences are always left out.
    assert {name.partition(",")[0]: told for name, (_, told) in found.items()} == {"stop kept": "refused"}, found


def test_sampling_parameters_are_judged_as_the_backend_and_vllm_do():
    cases = [*ALLOWED.values(), *REFUSED.values(), *CASTS]
    told = dict(zip(map(json.dumps, cases), judge(cases), strict=True))
    assert sum(told.values()) > 10, "vLLM runs"
    ours = {text: language.judged(json.loads(text)) is not None for text in told}
    assert {text for text in told if ours[text] != told[text]} == {json.dumps({"lora_name": "x"})}
