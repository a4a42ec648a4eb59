"""One client for every server of a language model: its answers, and their shape, by which two servers are compared.

Speaks by the unmodified packages `openai` and `tritonclient`, and by curl. As a script it prints both servers' shapes
where they differ: `python -m tests.support.llm_client http://127.0.0.1:8200/v1 tiny http://127.0.0.1:8000/v1 chat`.
"""

import json
import queue
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import openai
import tritonclient.grpc as triton
from openai import OpenAI

PROMPT: Final = "which way is the sea"
TIMEOUT_S: Final = 300.0
FLAGS: Final = (
    "exclude_input_in_output", "return_finish_reason", "return_num_input_tokens", "return_num_output_tokens",
)  # fmt: skip
EXACT: Final = {"temperature": 0, "ignore_eos": True}


@dataclass(frozen=True)
class Answer:
    """What came back: `pieces` is the text of each event, `reason` the last finish reason, `error` an error's words."""

    pieces: tuple[str, ...] = ()
    reason: str | None = None
    tokens: int | None = None
    prompt_tokens: int | None = None
    status: int = 200
    error: str = ""

    @property
    def text(self) -> str:
        return "".join(self.pieces)


Ask = Callable[[str, bool, Mapping[str, Any]], Answer]
"""Asks with a prompt, as a stream or not, with sampling parameters."""


def by_openai(address: str, model: str, chat: bool = False, key: str = "") -> Ask:
    """Asks by OpenAI's package. What it has no argument for goes into `extra_body`."""
    client = OpenAI(base_url=address, api_key=key or "none", max_retries=0, timeout=TIMEOUT_S)

    def ask(prompt: str, stream: bool, sampling: Mapping[str, Any]) -> Answer:
        asked: dict[str, Any] = {"model": model, "stream": stream, "extra_body": dict(sampling)}
        if stream:
            asked["stream_options"] = {"include_usage": True}
        try:
            if chat:
                made = client.chat.completions.create(messages=[{"role": "user", "content": prompt}], **asked)
            else:
                made = client.completions.create(prompt=prompt, **asked)
            return read(made if stream else [made])
        except openai.APIStatusError as error:
            return Answer(status=error.status_code, error=error.message)
        except openai.APIError as error:  # in a stream, or no connection
            return Answer(status=0, error=error.message)

    return ask


def read(events: Any) -> Answer:
    """An answer from OpenAI's objects."""
    pieces, reason, usage = [], None, None
    for event in events:
        usage = event.usage or usage
        for choice in event.choices:
            said = getattr(choice, "delta", None) or getattr(choice, "message", None)
            text = (said.content if said else choice.text) or ""
            if text or said is None or choice.finish_reason:
                pieces.append(text)
            reason = choice.finish_reason or reason
    return Answer(tuple(pieces), reason, usage and usage.completion_tokens, usage and usage.prompt_tokens)


def by_curl(address: str, model: str) -> Ask:
    """Asks by curl, which shows what the package reads over: events end with [DONE]."""

    def ask(prompt: str, stream: bool, sampling: Mapping[str, Any]) -> Answer:
        body = json.dumps({"model": model, "prompt": prompt, "stream": stream, **sampling})
        command = ["curl", "-sS", "-N", f"{address}/completions", "-H", "Content-Type: application/json", "-d", body]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True).stdout
        blocks = [block.removeprefix("data: ") for block in done.replace("\r", "").split("\n\n") if block.strip()]
        if stream and blocks.pop() != "[DONE]":
            return Answer(status=0, error=f"no [DONE] at the end: {done[-300:]}")
        events = [json.loads(block) for block in blocks]
        if "error" in events[-1]:
            return Answer(status=400, error=str(events[-1]["error"]))
        choices = [choice for event in events for choice in event["choices"]]
        reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        return Answer(tuple(choice["text"] for choice in choices), reasons[-1] if reasons else None)

    return ask


def by_triton(target: str, model: str) -> Ask:
    """Asks by tritonclient with the tensors of Triton's vLLM backend."""

    def ask(prompt: str, stream: bool, sampling: Mapping[str, Any]) -> Answer:
        flags = (
            "exclude_input_in_output",
            "return_finish_reason",
            "return_num_input_tokens",
            "return_num_output_tokens",
        )
        inputs = [tensor("text_input", prompt), tensor("sampling_parameters", json.dumps(sampling))]
        inputs += [tensor(name, True) for name in flags] + [tensor("stream", stream)]
        got: queue.Queue[tuple[Any, Any]] = queue.Queue()
        with triton.InferenceServerClient(target) as client:
            client.start_stream(lambda result, error: got.put((result, error)))
            client.async_stream_infer(model, inputs, enable_empty_final_response=True)
            pieces, tokens, answer, final = [], 0, Answer(), False
            while not final:
                result, error = got.get(timeout=TIMEOUT_S)
                if error is not None:
                    return Answer(status=400, error=error.message())
                final = result.get_response().parameters["triton_final_response"].bool_param
                text = result.as_numpy("text_output")
                if text is None:
                    continue
                pieces.append(text.reshape(-1)[0].decode())
                tokens += int(result.as_numpy("num_output_tokens").sum())
                reason = result.as_numpy("finish_reason").reshape(-1)[0].decode()
                prompted = result.as_numpy("num_input_tokens")  # an engine that is adopted tells them at the end
                read = None if prompted is None else int(prompted.reshape(-1)[0])
                answer = Answer(tuple(pieces), None if reason == "None" else reason, tokens, read)
            return answer

    return ask


def tensor(name: str, value: str | bool) -> Any:
    """A tensor of one text or flag."""
    text = isinstance(value, str)
    made = triton.InferInput(name, [1], "BYTES" if text else "BOOL")
    made.set_data_from_numpy(np.array([value.encode() if isinstance(value, str) else value], object if text else bool))
    return made


ALLOWED: Final[dict[str, dict[str, Any]]] = {
    "defaults": {"ignore_eos": True}, "a token": {"max_tokens": 1, **EXACT}, "seven tokens": {"max_tokens": 7, **EXACT},
    "min_tokens": {"min_tokens": 30, "max_tokens": 30, "temperature": 0},
    "hot": {"temperature": 2.0, "ignore_eos": True},
    "all knobs": {
        "max_tokens": 9, "ignore_eos": True, "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 7,
        "presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 1.1,
    },
    "no top_k": {"top_k": -1, **EXACT},
}  # fmt: skip
REFUSED: Final[dict[str, dict[str, Any]]] = {
    name.strip(): {name.split()[0]: value}
    for name, value in {
        "temperature -1": -1, "temperature 2.5": 2.5, "temperature text": "hot", "top_p 0": 0, "top_p 1.5": 1.5,
        "top_k -2": -2, "min_p 2": 2, "presence_penalty 3": 3, "frequency_penalty -3": -3, "repetition_penalty 0": 0,
        "max_tokens 0": 0, "max_tokens -1": -1, "min_tokens -1": -1, "n 0": 0, "seed text": "x", "stop empty": "",
        "stop one empty": ["a", ""], "stop number": 5,
    }.items()
} | {
    "min above max": {"min_tokens": 9, "max_tokens": 4}, "two greedy choices": {"n": 2, "temperature": 0},
}  # fmt: skip
"""Sampling parameters that vLLM refuses."""


def observe(ask: Ask) -> dict[str, Any]:
    """Shape of a server's answers: what does not depend on its model's words. By case and then stream or whole."""
    found: dict[str, Any] = {}
    for name, sampling in {**ALLOWED, **REFUSED}.items():
        for stream in (False, True):
            answer = ask(PROMPT, stream, sampling)
            found[f"{name}, {_way(stream)}"] = "refused" if answer.error else shape(answer, stream)
    for name, prompt in {"no prompt": "", "a long prompt": "word " * 2000}.items():
        answer = ask(prompt, True, {"max_tokens": 2})
        found[name] = "refused" if answer.error else shape(answer, True)
    return found | _stops(ask) | _ends(ask)


def shape(answer: Answer, stream: bool) -> dict[str, Any]:
    """Reason, tokens, whether no text is without a token, and whether the prompt was counted."""
    exact = answer.reason == "length"  # an answer that ended by itself has as many tokens as the model likes
    tokens = answer.tokens if exact else answer.tokens and answer.tokens > 0
    # A server that is busy puts two tokens in one event, and some send the reason alone.
    events = None if not stream or answer.tokens is None else sum(map(bool, answer.pieces)) <= answer.tokens
    return {"reason": answer.reason, "tokens": tokens, "events": events, "prompt": bool(answer.prompt_tokens)}


def _stops(ask: Ask) -> dict[str, Any]:
    """Stop sequences that begin and end amid tokens of this server's answer."""
    texts = [ask(PROMPT, False, {"max_tokens": most, **EXACT}).text for most in range(1, 17)]
    whole, stop = texts[-1], texts[3][len(texts[0]) + 1 : -1]
    at = whole.index(stop)
    ends = next(most for most, text in enumerate(texts, 1) if len(text) >= at + len(stop))
    late = {"max_tokens": 16, **EXACT, "min_tokens": ends + 2}
    unstopped = ask(PROMPT, False, late).text  # the end token is not said before `min_tokens`
    found: dict[str, Any] = {}
    for stream in (False, True):
        cases = {
            "stop": ({"stop": stop}, whole[:at], ends),
            "two stops": ({"stop": ["never said", stop]}, whole[:at], ends),
            "stop kept": ({"stop": [stop], "include_stop_str_in_output": True}, whole[: at + len(stop)], ends),
            "stop before min_tokens": ({**late, "stop": stop}, unstopped, 16),
        }
        for name, (more, text, tokens) in cases.items():
            told = ask(PROMPT, stream, {"max_tokens": 16, **EXACT, **more})
            seen = told.reason, told.text == text, told.tokens in (tokens, None)
            found[f"{name}, {_way(stream)}"] = "refused" if told.error else seen
    return found


def _ends(ask: Ask) -> dict[str, Any]:
    """An answer that ends by itself: the end token counts and has no text; streams and whole answers are equal."""
    for number in range(100):
        both = [ask(f"question {number}", stream, {"max_tokens": 40, "temperature": 0}) for stream in (False, True)]
        if len({(answer.text, answer.reason, answer.tokens) for answer in both}) > 1:
            return {"natural end": f"whole and streamed differ: {both}"}
        if both[1].reason == "stop" and both[1].tokens != 1:
            shorter = ask(f"question {number}", False, {"max_tokens": both[0].tokens - 1, "temperature": 0})
            return {"natural end": (both[1].reason, shorter.text == both[1].text, shorter.reason)}
    return {"natural end": "none in 100 answers"}


def _way(stream: bool) -> str:
    return "stream" if stream else "whole"


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Cases in which two servers' shapes differ."""
    return {name: (one.get(name), other.get(name)) for name in {**one, **other} if one.get(name) != other.get(name)}


if __name__ == "__main__":
    seen = [observe(by_openai(*sys.argv[at : at + 2])) for at in (1, 3) if len(sys.argv) > at]
    for case, found in (differences(*seen) if len(seen) == 2 else seen[0]).items():
        print(f"{case:32} {found}")
