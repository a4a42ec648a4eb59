"""An engine that already runs and speaks OpenAI's API, behind a dispatcher: OpenAI's package, gRPC, its faults."""

import dataclasses
from collections.abc import AsyncIterator

import pytest
from openai import AsyncOpenAI

from tests.support import openai_engine
from tests.support.dispatching import DispatcherSystem, dispatching, until
from tests.support.openai_engine import MODEL, Engine
from tests.unit.dispatcher.worlds import key, node, status
from trefoil.core.fleet import Hosted
from trefoil.core.plan import Route, RouteTarget

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]
CHAT = "chat"
HELLO = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "which way is the sea"}]


@dataclasses.dataclass
class Adopted:
    """A dispatcher with one engine behind it, or several."""

    system: DispatcherSystem
    client: AsyncOpenAI

    async def stream(self, prompt: str, **more) -> tuple[list[str], list]:
        """Texts and events of a streamed completion, up to an error that it ends with."""
        more = {"max_tokens": 6, **more}
        events = [e async for e in await self.client.completions.create(model=CHAT, prompt=prompt, stream=True, **more)]
        return [e.choices[0].text for e in events if e.choices and e.choices[0].text], events


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with openai_engine.serving() as made:
        yield made


async def publish(system: DispatcherSystem, *addresses: str, credits: int = 8) -> None:
    hosted = Hosted(CHAT, "tiny", 1, 0, 1, 1, credits)
    slices = [
        dataclasses.replace(status(n), hosted=(hosted,), grpc_target=f"{address}#{MODEL}")
        for n, address in enumerate(addresses)
    ]
    targets = [RouteTarget(key(n), "tiny", 0, 1 / len(slices), credits, False, "", 0.6, 1) for n in range(len(slices))]
    await system.publish(node(slices), [Route(CHAT, "weighted", "fifo", tuple(targets), 100, 0, {})])
    await until(lambda: system.running.contracts.known(CHAT))


@pytest.fixture
async def adopted(state, tmp_path, engine) -> AsyncIterator[Adopted]:
    async with dispatching(state, tmp_path, rest_address="127.0.0.1:0") as running:
        system = DispatcherSystem(running, state, [])
        await publish(system, engine.address)
        base = f"http://{running.rest_address}/v1"
        async with AsyncOpenAI(base_url=base, api_key="none", max_retries=0, timeout=60.0) as client:
            yield Adopted(system, client)


def load(adopted: Adopted):
    return adopted.system.local.routing.in_flight()


async def test_completions_and_chats_are_the_engines_own_with_its_usage(adopted, engine):
    assert [one.id async for one in adopted.client.models.list()] == [CHAT]
    answer = await adopted.client.completions.create(
        model=CHAT, prompt="hello", max_tokens=3, temperature=0, extra_body={"trefoil_receipt": True}
    )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("w0 w1 w2 ", "length")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 3)
    assert answer.system_fingerprint == "tiny"
    assert answer.trefoil["trefoil_tokens_out"] == 3
    assert engine.bodies[-1] | {"stream_options": 0} == {
        "model": MODEL, "prompt": "hello", "max_tokens": 3, "temperature": 0, "stream": True, "stream_options": 0
    }  # fmt: skip
    chat = await adopted.client.chat.completions.create(model=CHAT, messages=HELLO)
    assert chat.choices[0].message.content == "w0 w1 w2 w3 w4 w5 w6 w7 "
    assert engine.bodies[-1]["messages"] == HELLO, "the engine has the template"
    assert "max_tokens" not in engine.bodies[-1]
    plain = await adopted.client.completions.create(model=CHAT, prompt="!plain", max_tokens=4)
    assert (plain.usage.completion_tokens, "completion_tokens" in plain.usage.trefoil_estimated) == (4, True)
