"""Engines of language models that others wrote, adopted and asked: `make e2e-llm`.

vLLM on CPU, Transformers' server and llama.cpp's serve one tiny model. Each is asked alone, then adopted by two
commands (`trefoil family engine`, `trefoil up`) and asked through the dispatcher by OpenAI's package, tritonclient and
curl: the same text, finish reason and tokens at temperature 0. vLLM and llama.cpp ask for an API key, call a tool, and
embed texts. Bad requests get one error each, and the next one its answer. Then streams at once, of which none may fail;
clients that leave, whose places must be free within a second; the sum of the joules of tokens against the simulated
node's counter; and the engine is killed amid streams. By default llama.cpp's server cuts a stream off when it gets
another request: that must reach the client as an error. Prints a line for each check, and ends with exit code 1 if one
does not hold.
"""

import argparse
import asyncio
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import openai
from openai import AsyncOpenAI, OpenAI

from tests.support.llm_client import Answer, by_curl, by_openai, by_triton
from tests.support.llm_engines import CLOCK, CONTEXT, EMBEDDING, KINDS, ROOT, STREAMS, Engine, make_model
from tests.support.system import TREFOIL, RunningSystem, booked, until
from trefoil.cli.run.commands import UP_CONFIG
from trefoil.core.demand import TableAck

FAMILY: Final = "chat"
BOARD: Final = "L4"
PROMPTS: Final = 50
TOKENS: Final = 12
AT_ONCE: Final = {"vllm": STREAMS, "transformers": STREAMS, "llama": 1}
FREE_WITHIN_S: Final = 1.0
COUNTER_ERROR_MAX: Final = 0.01
BOOKED_WITHIN_S: Final = 120.0
VECTOR_ERROR_MAX: Final = 1e-3
"""Of a number of a vector: batches of other sizes round otherwise."""
LONG: Final = CONTEXT - 40
"""Tokens of a long answer."""
KEY: Final = "sk-of-the-engine"
WAY: Final = {"type": "object", "properties": {"to": {"type": "string", "enum": ["north", "south"]}}}
TOOL: Final[Any] = {
    "tools": [{"type": "function", "function": {"name": "way", "parameters": {**WAY, "required": ["to"]}}}],
    "tool_choice": {"type": "function", "function": {"name": "way"}},
}
IMAGE: Final = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]}]
BAD: Final[dict[str, dict[str, Any]]] = {
    "n": {"n": 2}, "logprobs": {"logprobs": True}, "response_format": {"response_format": {"type": "json_object"}},
    "stream_options": {"stream_options": {"include_usage": True}}, "max_tokens": {"max_tokens": 0},
    "temperature": {"temperature": -1}, "tool_choice": {"tool_choice": "required"}, "messages": {"messages": []},
    "messages[0].content": {"messages": IMAGE}, "messages[0].role": {"messages": [{"role": "wizard", "content": "x"}]},
}  # fmt: skip
"""Bodies that are refused, by the field that the error names."""
OWN: Final[dict[str, dict[str, Any]]] = {
    "temperature": {"temperature": -1}, "top_p": {"top_p": 7}, "max_tokens": {"max_tokens": -5},
    "logprobs": {"logprobs": "many"}, "stop": {"stop": 5}, "response_format": {"response_format": {"type": "poem"}},
}  # fmt: skip
"""Sampling parameters that tritonclient sends unread: the engine's to judge."""


class Checks:
    """What was checked, and what did not hold."""

    def __init__(self) -> None:
        self.failed = 0

    def __call__(self, holds: bool, text: str) -> None:
        """Print a check."""
        self.failed += not holds
        print(f"  {'ok  ' if holds else 'FAIL'} {text}", flush=True)


def prompt(number: int) -> str:
    return f"question {number % PROMPTS}: which way is the sea"


def length(number: int) -> int:
    """Most tokens of an answer; the same for equal prompts."""
    return 2 + random.Random(number % PROMPTS).randrange(2 * TOKENS)


def alone(engine: Engine) -> dict[int, Answer]:
    """Answers of an engine that is asked alone, one after the other."""
    ask = by_openai(engine.address, engine.model, key=engine.key)
    return {n: ask(prompt(n), True, {"max_tokens": length(n), "temperature": 0}) for n in range(PROMPTS)}


class Adopted(RunningSystem):
    """A system that adopted an engine: made by two commands."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine
        self.models = self.state_dir / "models"

    def measure(self, *more: str) -> subprocess.CompletedProcess[str]:
        """Run the first of both commands."""
        at_once = AT_ONCE[self.engine.kind]
        words = ["family", "engine", f"tiny={self.engine.address}#{self.engine.model}", "--as", FAMILY]
        words += ["--embeddings"] if self.engine.embeds else ["--tokens-mean", str(TOKENS)]
        words += ["--accuracy", "tiny=0.5", "--slo-latency-ms", "60000", "--repository", str(self.models)]
        words += ["--device-type", BOARD, "--streams", "1,8" if at_once > 1 else "1", "--seconds", "1"]
        command = [str(TREFOIL), *words, *more]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    def adopt(self, check: Checks) -> None:
        """Adopt it, with its key where it asks for one."""
        began_s, keys = CLOCK.monotonic_s(), list[str]()
        if self.engine.key:
            done = self.measure()
            said = " ".join(done.stderr.split())
            check(done.returncode != 0 and "key_file" in said, f"without its key: {said[:150]}")
            file = self.state_dir / "key"
            file.write_text(self.engine.key)
            file.chmod(0o600)
            keys = ["--key-file", f"tiny={file}"]
        done = self.measure(*keys)
        if done.returncode:
            raise RuntimeError(f"trefoil family engine: {done.stderr}{done.stdout}")
        config = self.state_dir / "up.toml"
        engines = done.stdout[done.stdout.index("[[power_agent.engines]]") :]
        config.write_text((ROOT / UP_CONFIG).read_text() + "\n" + engines)
        sets = {
            "family.name": FAMILY, "family.repository": self.models, "slo.latency_ms": 60_000, "policy": "base",
            "fleet.devices": f'["{BOARD}"]', "demand_initial_per_s": 0.1,
        }  # fmt: skip
        words = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
        self.started = self.ask("up", "--port-offset", str(self.port_offset), "--config", str(config), *words)
        self.wait_for_rollout()
        told = [line.strip() for line in done.stdout.splitlines() if line.startswith("  tiny")]
        check(True, f"adopted by two commands in {CLOCK.monotonic_s() - began_s:.0f} s; {'; '.join(told)}")

    @property
    def api(self) -> str:
        return f"http://{self.launch.addresses['rest']}/v1"

    def slice(self) -> dict[str, Any]:
        """The engine's slice, by `trefoil status`."""
        [node] = self.look("status")["nodes"]
        [found] = node["devices"][0]["slices"]
        return dict(found)


async def stream(client: AsyncOpenAI, model: str, number: int, most: int) -> Answer:
    """A stream of at most that many tokens; an error ends it."""
    pieces, reason = list[str](), None
    try:
        asked = {"model": model, "prompt": prompt(number), "max_tokens": most, "temperature": 0}
        async for event in await client.completions.create(**asked, stream=True):
            for choice in event.choices:
                pieces.append(choice.text)
                reason = choice.finish_reason or reason
    except openai.APIError as error:
        return Answer(tuple(pieces), reason, status=0, error=error.message)
    return Answer(tuple(pieces), reason)


def ask_by_each_client(system: Adopted, expected: dict[int, Answer], check: Checks) -> None:
    """The same answers as alone, by every client, as streams and whole."""
    engine = system.engine
    asks = {
        "openai": by_openai(system.api, FAMILY),
        "tritonclient": by_triton(system.inference, FAMILY),
        "curl": by_curl(system.api, FAMILY),
    }
    for name, ask in asks.items():
        wrong = list[str]()
        for number in range(10):
            for streamed in (True, False):
                asked = prompt(number), streamed, {"max_tokens": length(number), "temperature": 0}
                answer, alone_ = ask(*asked), expected[number]
                same = (answer.text, answer.reason) == (alone_.text, alone_.reason) and not answer.error
                counted = None in (answer.tokens, alone_.tokens) or answer.tokens == alone_.tokens
                if not same or not counted:
                    wrong.append(f"{number}: {answer} for {alone_}")
        check(not wrong, f"{name}: 20 answers, streamed and whole, are the engine's own {wrong[:1] or ''}")
    limit = {"max_tokens": 12, "temperature": 0}
    whole = by_openai(engine.address, engine.model, chat=True, key=engine.key)(prompt(0), True, limit)
    chat = by_openai(system.api, FAMILY, chat=True)
    answer = chat(prompt(0), True, limit)
    check((answer.text, answer.reason) == (whole.text, whole.reason), f"a chat is the engine's own: {answer.text!r}")
    stop = whole.text[9:12]
    answer = chat(prompt(0), True, {**limit, "stop": stop})
    wanted = whole.text[: whole.text.index(stop)], "stop"
    check((answer.text, answer.reason) == wanted, f"ended by stop {stop!r}: {answer.text!r} {answer.error}")


def call_tool(system: Adopted, check: Checks) -> None:
    """The call of a tool that the engine has to make, whole and as a stream."""
    engine = system.engine
    if engine.kind == "transformers":  # it ignores `tool_choice`, and random weights choose none
        return
    asked: Any = {"messages": [{"role": "user", "content": prompt(0)}], "temperature": 0, "max_tokens": 60, **TOOL}

    def call(client: OpenAI, model: str, *, streamed: bool) -> tuple[str, str, str]:
        if streamed:
            with client.chat.completions.stream(model=model, **asked) as stream:
                choice = stream.get_final_completion().choices[0]
        else:
            choice = client.chat.completions.create(model=model, **asked).choices[0]
        [made] = choice.message.tool_calls or [None]
        return (made.function.name, made.function.arguments, choice.finish_reason) if made else ("", "", "no call")

    with (
        OpenAI(base_url=engine.address, api_key=engine.key, max_retries=0, timeout=300.0) as direct,
        OpenAI(base_url=system.api, api_key="none", max_retries=0, timeout=300.0) as client,
    ):
        own = call(direct, engine.model, streamed=False)
        found = [call(client, FAMILY, streamed=streamed) for streamed in (False, True)]
    check(own[0] == "way" and found == [own, own], f"a tool is called as by the engine: {own} {found}")


def ask_badly(system: Adopted, expected: dict[int, Answer], check: Checks) -> None:
    """Bad requests: one error each, and the next good one has its answer."""
    good = {"max_tokens": length(0), "temperature": 0}
    ask, wrong = by_openai(system.api, FAMILY), list[str]()
    with OpenAI(base_url=system.api, api_key="none", max_retries=0, timeout=300.0) as client:
        for field, change in BAD.items():
            body = {"model": FAMILY, "messages": [{"role": "user", "content": "x"}], **change}
            try:
                client.post("/chat/completions", body=body, cast_to=object)
                wrong.append(f"{field}: answered")
            except openai.APIStatusError as error:
                said = error.body if isinstance(error.body, dict) else {}
                wrong += [] if (error.status_code, said.get("param")) == (400, field) else [f"{field}: {error}"]
    check(not wrong, f"{len(BAD)} bad bodies are refused by the field's name {wrong}")
    told = {
        name: by_triton(system.inference, FAMILY)(prompt(0), True, {"max_tokens": 8, **sampling}).error or "answered"
        for name, sampling in OWN.items()
    }
    check(True, "; ".join(f"{name}: {said[:70]}" for name, said in told.items()))
    answer = ask("which way is the sea " * CONTEXT, True, good)
    check(bool(answer.error), f"a prompt beyond the context: {answer.status} {answer.error[:120]}")
    after = ask(prompt(0), True, good)
    check(after.text == expected[0].text, f"and the next answer is whole {after.error}")


async def load(system: Adopted, expected: dict[int, Answer], count: int, check: Checks) -> int:
    """So many streams at once as have places, and as many that wait; returns their tokens."""
    gate, began_s = asyncio.Semaphore(2 * AT_ONCE[system.engine.kind]), CLOCK.monotonic_s()
    async with AsyncOpenAI(base_url=system.api, api_key="none", max_retries=0, timeout=600.0) as client:

        async def one(number: int) -> Answer:
            async with gate:
                return await stream(client, FAMILY, number, length(number))

        answers = await asyncio.gather(*map(one, range(count)))
    took_s = CLOCK.monotonic_s() - began_s
    failed = [answer for answer in answers if answer.error]
    other = [n for n, answer in enumerate(answers) if answer.text != expected[n % PROMPTS].text and not answer.error]
    tokens = sum(len(answer.pieces) for answer in answers)
    told = f"{count} streams, {len(failed)} failed, {len(other)} other than alone: {tokens} events in {took_s:.0f} s"
    check(not failed and not other, f"{told} {[answer.error for answer in failed][:1] or other[:3] or ''}")
    return tokens


async def leave(system: Adopted, longest: int, check: Checks) -> None:
    """All places are taken by streams whose clients leave: how soon the next one gets its first token."""
    places = AT_ONCE[system.engine.kind]
    async with AsyncOpenAI(base_url=system.api, api_key="none", max_retries=0, timeout=600.0) as client:
        asked = {"model": FAMILY, "prompt": prompt(longest), "temperature": 0, "stream": True}
        streams = [await client.completions.create(**asked, max_tokens=LONG) for _ in range(places)]
        for each in streams:
            await anext(aiter(each))
        left_s = CLOCK.monotonic_s()
        for each in streams:
            await each.close()
        async for _ in await client.completions.create(**asked, max_tokens=1):
            break
        free_s = CLOCK.monotonic_s() - left_s
    check(
        free_s < FREE_WITHIN_S, f"{places} clients left amid {LONG} tokens: the next had its token after {free_s:.2f} s"
    )
    running = await asyncio.to_thread(system.engine.running)
    check(not running, f"requests that run at the engine now: {'it does not say' if running is None else running}")


async def joules(system: Adopted, tokens: int, check: Checks) -> None:
    """Joules that are booked to tokens, and in which nothing computed, against the node's counter."""
    async with system.client() as client:
        sums, counter_j = await until(
            lambda: booked(client, tokens), BOOKED_WITHIN_S, "not all tokens are booked within"
        )
    of_tokens_j = sum(j for name, j in sums.items() if name.startswith("variant_joules:") and name != "variant_joules:")
    whole_j = of_tokens_j + sums.get("variant_joules:", 0.0)
    told = f"{of_tokens_j:.0f} J of {sums['tokens']:.0f} tokens and {whole_j - of_tokens_j:.0f} J idle"
    told += f", counter {counter_j:.0f} J"
    check(abs(whole_j / counter_j - 1) <= COUNTER_ERROR_MAX and of_tokens_j > 0, f"{told} (simulated board)")


async def die(system: Adopted, longest: int, check: Checks) -> None:
    """The engine is killed amid streams."""
    engine, places = system.engine, AT_ONCE[system.engine.kind]
    async with AsyncOpenAI(
        base_url=engine.address, api_key=engine.key or "none", max_retries=0, timeout=600.0
    ) as client:
        whole = (await stream(client, engine.model, longest, LONG)).text
    async with AsyncOpenAI(base_url=system.api, api_key="none", max_retries=0, timeout=600.0) as client:
        tasks = [asyncio.create_task(stream(client, FAMILY, longest, LONG)) for _ in range(places)]
        await until(lambda: _in_flight(system, places), 60.0, "not all streams run within")
        engine.kill()
        answers = await asyncio.gather(*tasks)
    check(
        all(answer.error for answer in answers),
        f"{places} streams of a killed engine end with: {answers[0].error[:90]}",
    )
    check(
        all(whole.startswith(answer.text) for answer in answers),
        "what they had is how the answer begins: no token twice",
    )
    failed = await until(lambda: _failed(system), 60.0, "status shows no failure within")
    check(True, f"status: {failed['state']}, {failed['why'][:110]}")
    await until(lambda: _in_flight(system, 0), 10.0, "requests are still in flight after")
    check(True, "nothing is in flight")


async def _in_flight(system: Adopted, places: int) -> bool:
    async with system.client() as client:
        acks = await client.state.scan(client.state.keys.ack_prefix(), TableAck)
    running = sum(load.in_flight for ack in acks.values() for load in ack.slices)
    return running >= places if places else not running


async def _failed(system: Adopted) -> dict[str, Any] | None:
    found = await asyncio.to_thread(system.slice)
    return found if found["state"] == "FAILED" else None


async def cut(system: Adopted, longest: int, check: Checks) -> None:
    """llama.cpp's server gets a request from elsewhere while a stream runs."""
    async with (
        AsyncOpenAI(base_url=system.api, api_key="none", max_retries=0, timeout=600.0) as client,
        AsyncOpenAI(base_url=system.engine.address, api_key=KEY, max_retries=0, timeout=600.0) as direct,
    ):
        running = asyncio.create_task(stream(client, FAMILY, longest, LONG))
        await until(lambda: _in_flight(system, 1), 60.0, "the stream does not run within")
        await stream(direct, system.engine.model, 0, 2)
        answer = await running
        check(
            "aborted the answer" in answer.error,
            f"cut off by another client after {len(answer.pieces)} events: {answer.error[:100]}",
        )
        again = await stream(client, FAMILY, 0, 2)
        check(not again.error, f"the next stream is whole {again.error}")


async def ask_adopted(system: Adopted, expected: dict[int, Answer], longest: int, streams: int, check: Checks) -> None:
    """All that is asked of one adopted engine; it is dead afterwards."""
    await asyncio.to_thread(ask_by_each_client, system, expected, check)
    await asyncio.to_thread(call_tool, system, check)
    await asyncio.to_thread(ask_badly, system, expected, check)
    tokens = await load(system, expected, streams, check)
    await leave(system, longest, check)
    await joules(system, tokens, check)
    await die(system, longest, check)


def _long(engine: Engine, number: int) -> Answer:
    ask = by_openai(engine.address, engine.model, key=engine.key)
    return ask(prompt(number), True, {"max_tokens": LONG, "temperature": 0})


@contextmanager
def running(kind: str, models: Path, **how: bool) -> Iterator[Engine]:
    """An engine that answers, until the block ends."""
    engine = Engine(kind, models, key=KEY, **how)
    try:
        print(f"{', '.join((kind, *how))}: first answer after {engine.wait_ready():.0f} s", flush=True)
        yield engine
    finally:
        engine.kill()


def embed(kind: str, models: Path, check: Checks) -> None:
    """Embeddings of an engine, adopted and alone."""
    with running(kind, models, embeds=True) as engine, closing(Adopted(engine)) as system:
        system.adopt(check)
        texts = [f"{prompt(n)} {n}" for n in range(2 * PROMPTS)]
        with (
            OpenAI(base_url=engine.address, api_key=KEY, max_retries=0, timeout=300.0) as direct,
            OpenAI(base_url=system.api, api_key="none", max_retries=0, timeout=300.0) as client,
        ):
            own = [direct.embeddings.create(model=engine.model, input=text) for text in texts]
            found = client.embeddings.create(model=FAMILY, input=texts)
            vectors = np.array([each.embedding for each in found.data])
            apart = np.abs(vectors - np.array([each.data[0].embedding for each in own])).max()
            told = f"{vectors.shape[0]} vectors of {vectors.shape[1]} numbers are the engine's within {apart:.1e}"
            check(vectors.std() > 0 and apart < VECTOR_ERROR_MAX, told)
            tokens = sum(each.usage.prompt_tokens for each in own)
            check(found.usage.prompt_tokens == tokens, f"{found.usage.prompt_tokens} tokens of texts, {tokens} alone")
            try:
                cut = client.embeddings.create(model=FAMILY, input="a", dimensions=7)
                check(len(cut.data[0].embedding) == 7, "cut to 7 dimensions")
            except openai.APIStatusError as error:
                check(True, f"7 dimensions: {error.message[:150]}")


def try_engine(kind: str, models: Path, streams: int, check: Checks) -> int:
    """Try everything with one engine; returns the prompt with the longest answer."""
    with running(kind, models) as engine:
        expected = alone(engine)
        ends = Counter(answer.reason for answer in expected.values())
        print(f"  asked alone: {PROMPTS} answers, {dict(ends)}", flush=True)
        with closing(Adopted(engine)) as system:
            system.adopt(check)
            longest = max(expected, key=lambda number: len(_long(engine, number).pieces))
            asyncio.run(ask_adopted(system, expected, longest, streams, check))
    return longest


def try_interrupts(models: Path, longest: int, check: Checks) -> None:
    """Try llama.cpp's server with its default: a new request ends the stream that runs."""
    with running("llama", models, interrupts=True) as engine, closing(Adopted(engine)) as system:
        system.adopt(check)
        asyncio.run(cut(system, longest, check))


def main() -> int:
    """Try engines; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--engines", default=",".join(KINDS), help="of: %(default)s")
    parser.add_argument("--streams", type=int, default=1000, help="of each engine")
    given = parser.parse_args()
    check, models = Checks(), make_model(ROOT / "out" / "engines")
    for kind in given.engines.split(","):
        longest = try_engine(kind, models, given.streams, check)
        if kind == "llama":
            try_interrupts(models, longest, check)
        if kind in EMBEDDING:
            embed(kind, models, check)
    print(f"{check.failed} checks failed")
    return 1 if check.failed else 0


if __name__ == "__main__":
    sys.exit(main())
