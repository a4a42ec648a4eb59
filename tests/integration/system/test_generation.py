"""A generative family on a whole system: typed, streamed by unmodified clients, and accounted to the last joule."""

import asyncio
import json
import queue
import re
import time
from collections.abc import Iterator

import numpy as np
import openai
import pytest
import tritonclient.grpc as triton

from tests.support.generation import FAMILY, NAMES, alone, ask, prompts, request
from tests.support.perf_analyzer import perf_analyzer
from tests.support.system import RunningSystem, running_system, until

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]
COUNTER_ERROR_MAX = 1e-3


@pytest.fixture(scope="module")
def system() -> Iterator[RunningSystem]:
    settings = {"family.name": FAMILY, "slo.latency_ms": 3000.0, "demand_initial_per_s": 6.0}
    with running_system(settings, frozen=True) as one:
        yield one


def wanted(variant: str, prompt: str, most: int | None = None) -> list[bytes]:
    return alone([(prompt, most)], NAMES.index(variant) + 1)[0]


def test_a_text_is_typed_as_it_is_made_with_what_it_cost(system):
    told = system.ask("family", "generate", prompts()[0])
    tokens = wanted(told["variant"], prompts()[0])
    assert told["text"] == b"".join(tokens).decode(errors="replace")
    assert told["tokens"] == len(tokens)
    assert told["joules"] > 0
    assert told["grams"] > 0
    typed = system.run("family", "generate", prompts()[0], "--max-tokens", "3").stdout
    first = b"".join(tokens[:3]).decode(errors="replace")
    assert typed.startswith(first + "\n3 tokens by pydoc-")
    assert "(simulated, estimated)" in typed
    assert "answers by streams" in system.refused("load", "--family", FAMILY)
    assert "PROMPT is empty" in system.refused("family", "generate", "")
    assert "MAX_TOKENS is 9999" in system.refused("family", "generate", "def a():", "--max-tokens", "9999")


def test_unmodified_tritonclient_streams(system):
    come: queue.Queue = queue.Queue()
    client = triton.InferenceServerClient(system.inference)
    client.start_stream(lambda result, error: come.put((result, error)))
    tensor = triton.InferInput("PROMPT", [1, 1], "BYTES")
    tokens, variant, ended = [], "", False
    tensor.set_data_from_numpy(np.array([[prompts()[2].encode()]], dtype=np.object_))
    client.async_stream_infer(FAMILY, [tensor], request_id="one", enable_empty_final_response=True)
    while not ended:
        result, error = come.get(timeout=60)
        assert error is None
        response = result.get_response()
        assert response.id == "one"
        if response.outputs:
            tokens.append(result.as_numpy("TOKEN")[0, 0])
            variant = response.parameters["trefoil_variant"].string_param
        ended = response.parameters["triton_final_response"].bool_param
    client.stop_stream()
    client.close()
    assert tokens == wanted(variant, prompts()[2])


def test_openais_own_package_chats(system):
    with openai.OpenAI(base_url=f"http://{system.launch.addresses['rest']}/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == [FAMILY]
        asked = {"model": FAMILY, "messages": [{"role": "user", "content": prompts()[3]}], "temperature": 0}
        answer = client.chat.completions.create(**asked, extra_headers={"Trefoil-Receipt": "true"})
        tokens = wanted(answer.system_fingerprint, prompts()[3])
        assert answer.choices[0].message.content == b"".join(tokens).decode(errors="replace")
        assert (answer.usage.completion_tokens, answer.trefoil["trefoil_tokens_out"]) == (len(tokens), len(tokens))
        chunks = list(client.chat.completions.create(**asked, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == b"".join(wanted(chunks[-1].system_fingerprint, prompts()[3])).decode(errors="replace")


def test_unmodified_perf_analyzer_streams(system, tmp_path):
    data = tmp_path / "data.json"
    data.write_text(json.dumps({"data": [{"PROMPT": [prompt], "MAX_TOKENS": [8]} for prompt in prompts()[:20]]}))
    stream = ("--streaming", "--async", "--concurrency-range", "4", "--input-data", str(data))
    report = perf_analyzer().run(system.inference, FAMILY, *stream, "--request-count", "40", timeout_s=180.0)
    assert re.search(r"Response Throughput: [1-9]", report.output)
    assert int(re.findall(r"Request count: (\d+)", report.output)[0]) >= 40


async def test_joules_of_all_tokens_are_the_counters_share(system):
    asked = [(prompt, None) for prompt in prompts()[:80]]
    gate = asyncio.Semaphore(12)

    async def one(prompt: str) -> int:
        async with gate:
            return len((await ask(system.inference, request(prompt))).tokens)

    tokens = sum(await asyncio.gather(*(one(prompt) for prompt, _ in asked)))
    assert tokens > 5 * len(asked)
    async with system.client() as client:
        booked, counter_j = await until(lambda: booked(client, tokens), 120.0, "not all tokens are booked within")
    (found,) = system.ask("report")["families"]
    assert found["joules_per_token"] == pytest.approx(found["joules"] / found["tokens"])
    assert (found["prompt_tokens"], found["ttft_attainment"]) == (None, None), "not counted by it, nothing promised"
    (served,) = system.ask("status")["served"]["by_class"]
    assert served["tokens"]["tokens"] > 0
    assert 0.0 < served["tokens"]["tpot_ms_p95"] < served["latency_ms_p95"]
    variants = {name.removeprefix("tokens:"): count for name, count in booked.items() if name.startswith("tokens:")}
    assert sum(variants.values()) == booked["tokens"]
    whole_j = sum(count * (booked[f"variant_joules:{name}"] / count) for name, count in variants.items())
    whole_j += booked.get("variant_joules:", 0.0)  # of the time in which nothing computed
    print(
        f"{booked['tokens']:.0f} tokens at {whole_j / booked['tokens']:.4f} J: {whole_j:.2f} J, meters {counter_j:.2f}"
    )
    assert whole_j == pytest.approx(counter_j, rel=COUNTER_ERROR_MAX)


async def test_receipts_of_tokens_follow_the_meters(system):
    """After the loads of the tests before: receipts over metered active energy of the same seconds."""
    started_s, done, gate = time.monotonic(), 0, asyncio.Semaphore(8)

    async def one(prompt: str) -> None:
        async with gate:
            await ask(system.inference, request(prompt))

    while time.monotonic() < started_s + 25:
        await asyncio.gather(*(one(prompts()[(done + i) % 400]) for i in range(16)))
        done += 16
    (checked,) = [row for row in system.ask("status")["receipts"] if row["family"] == FAMILY]
    print(
        f"receipts {checked['receipt_j']:.0f} J, metered active {checked['active_j']:.0f} J, {checked['residual']:+.1%}"
    )
    assert abs(checked["residual"]) < 0.15
