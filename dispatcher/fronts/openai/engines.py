"""A request for text in the tensors of a family's contract, and its answers as text, tokens and a reason. Pure.

Three APIs (`trefoil/runtime/given/llm_backends.py`): Triton's backends vllm and tensorrtllm, and PROMPT to TOKEN, which
decodes greedily. What an engine has no tensor for is refused, unless its value changes nothing.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, Final

from dispatcher.fronts.openai.bodies import COMPLETION_TOKENS, Asked
from dispatcher.fronts.openai.text import AnswerText
from dispatcher.fronts.rest.generate_codec import decode
from dispatcher.request.contracts import Contract
from dispatcher.request.decoupled import engine_count
from dispatcher.routing.core.receipts import SLICE
from dispatcher.transport.engine_channel import COUNTED, ESTIMATED
from trefoil.core.errors import InvalidInput, TrefoilError
from trefoil.engine_api import Calls
from trefoil.runtime.given.llm_backends import (
    ANSWER,
    MAX_TOKENS,
    OPENAI,
    PROMPT,
    REASON,
    SAMPLING,
    TOKENS_IN,
    TOKENS_OUT,
    TOOL_CALLS,
    VLLM,
    api_of,
)

GREEDY: Final = "trefoil"
DEFAULT_MAX_TOKENS: Final = "default_max_tokens"
"""Parameter of a family: most tokens of a chat that names none."""
TO_THE_END: Final = 2**20
"""`max_tokens` of a chat that names none, for vLLM, which ends an answer where its context does."""
NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "top_p": (1,), "min_p": (0,), "top_k": (-1, 0), "presence_penalty": (0,), "frequency_penalty": (0,),
    "repetition_penalty": (1,), "min_tokens": (0,), "ignore_eos": (False,),
}  # fmt: skip
"""Values of sampling parameters that change nothing."""
REASONS: Final = ("stop", "length", "tool_calls")
BYTES_PER_TOKEN: Final = 4
PROMPT_ESTIMATED: Final = f"prompt_tokens: {BYTES_PER_TOKEN} bytes a token"


def text_api(contract: Contract, model: str) -> str:
    """API of a family; raises InvalidInput if it generates no text."""
    api = api_of(contract.config.config)
    if not api:
        raise InvalidInput("generates no text", field="model", value=model, remedy="GET /v1/models names those that do")
    return api


def check_tools(contract: Contract, asked: Asked) -> None:
    """Check, before a chat template sees messages without content, that a family has the tools that are asked for.
    Raises InvalidInput."""
    if asked.about_tools and contract.config.config.backend != OPENAI:
        remedy = "ask a family of an adopted engine, or leave it out"
        raise InvalidInput(f"{asked.model} has no tools", field=asked.about_tools, remedy=remedy)


def text_inputs(contract: Contract, asked: Asked, prompt: str) -> dict[str, Any]:
    """Inputs of a family that generates text, by name, once `check_tools` has allowed it.

    Raises:
        InvalidInput: it has no parameter that was given.
        TrefoilError: its default is not a number.
    """
    config = contract.config.config
    api, inputs = api_of(config), {tensor.name for tensor in config.input}
    adopted = config.backend == OPENAI
    if api == GREEDY:
        _refuse_sampling(asked, asked.sampling)
        return {"PROMPT": prompt} | ({"MAX_TOKENS": asked.max_tokens} if asked.max_tokens else {})
    to_the_end = 0 if adopted else TO_THE_END if api == VLLM else COMPLETION_TOKENS
    most = asked.max_tokens or _default_max_tokens(config) or to_the_end
    stops = list(asked.stops)
    if api == VLLM:
        # With the stop sequence in the text, it is found here, whatever an engine sends before it has found it. An
        # adopted engine may refuse the second key (Transformers), or ignore the first.
        ends: dict[str, Any] = {"stop": stops} if stops else {}
        ends |= {"include_stop_str_in_output": True} if stops and not adopted else {}
        sampling = ({MAX_TOKENS: most} if most else {}) | {**asked.sampling, **ends}
        if adopted and asked.messages:
            sampling |= {"messages": list(asked.messages), **asked.tools}
        values: dict[str, Any] = {PROMPT: prompt, SAMPLING: json.dumps(sampling, ensure_ascii=False)}
    else:
        _refuse_sampling(asked, asked.sampling.keys() - inputs)
        values = {PROMPT: prompt, MAX_TOKENS: most}
        values |= {name: value for name, value in asked.sampling.items() if name in inputs}
        values |= {"stop_words": stops} if stops and "stop_words" in inputs else {}
    flags = ("exclude_input_in_output", "return_finish_reason", "return_num_input_tokens", "return_num_output_tokens")
    return values | {"stream": contract.decoupled} | {flag: True for flag in flags if flag in inputs}


def _refuse_sampling(asked: Asked, names: Any) -> None:
    greedy = names is asked.sampling
    for name in sorted(names):
        value, neutral = asked.sampling[name], NEUTRAL.get(name, ())
        if greedy and (name == "seed" or (name, value) in (("temperature", 0), ("top_k", 1))):
            continue
        if value not in neutral:
            why = f"{asked.model} decodes greedily" if greedy else f"{asked.model} has no such parameter"
            same = "temperature 0" if greedy and name == "temperature" else ", ".join(map(str, neutral))
            raise InvalidInput(why, field=name, value=value, remedy=f"leave it out{same and f', or send {same}'}")


def _default_max_tokens(config: Any) -> int:
    """Most tokens of a chat by the family's contract; 0 = it does not say."""
    given = config.parameters[DEFAULT_MAX_TOKENS].string_value if DEFAULT_MAX_TOKENS in config.parameters else ""
    if not given:
        return 0
    if not given.isdecimal() or not int(given):
        raise TrefoilError(
            "is not a number of tokens", field=DEFAULT_MAX_TOKENS, value=given,
            remedy="correct that parameter in the family's config.pbtxt",
        )  # fmt: skip
    return int(given)


class TextAnswer:
    """One answer on its way to a client."""

    def __init__(self, asked: Asked, prompt: str) -> None:
        self.variant = ""
        self.receipt: dict[str, Any] = {}
        self._text, self._tools = AnswerText(asked.stops), bool(asked.tools)
        self._most, self._least = asked.max_tokens, asked.sampling.get("min_tokens", 0)
        self._prompt_bytes = len(prompt.encode("utf-8", "replace"))
        self._prompt_tokens: int | None = None
        self._tokens = 0
        self._counted = True  # by the engine
        self._reason = ""

    @property
    def stopped(self) -> bool:
        """Whether a stop sequence was found: nothing follows."""
        return self._text.stopped

    def add(self, response: Any, api: str) -> tuple[str, Calls]:
        """Text and parts of calls of tools that a ModelInferResponse brings."""
        told = decode(response)
        self.variant = told.get("trefoil_variant", self.variant)
        if SLICE in told:
            self.receipt = {name: value for name, value in told.items() if name.startswith("trefoil_")}
        self._counted = self._counted and not told.get(ESTIMATED)
        piece = told.get("TOKEN" if api == GREEDY else ANSWER)
        if piece is None:
            return "", ()
        self._count(response, api)
        self._tokens = told.get(COUNTED, self._tokens)
        reason = _first(told.get(REASON))
        self._reason = reason if reason not in (None, "", "None") else self._reason
        data = str(_first(piece) or "").encode("utf-8", "surrogateescape")
        may_stop = not self._least or self._tokens > self._least  # as vLLM: not up to `min_tokens`
        calls: Calls = json.loads(told[TOOL_CALLS]) if self._tools and told.get(TOOL_CALLS) else ()
        return self._text.add(data, may_stop), calls

    def end(self) -> str:
        """Text that was kept back, once the answer has ended.

        Raises:
            TrefoilError: the engine broke it off.
        """
        if self._reason and self._reason not in REASONS and not self.stopped:
            raise TrefoilError(f"the engine aborted the answer: {self._reason}", remedy="try again")
        return self._text.end()

    @property
    def finish_reason(self) -> str:
        """Reason why the answer ended."""
        if self.stopped or self._reason:
            return "stop" if self.stopped else self._reason
        return "length" if self._most and self._tokens >= self._most else "stop"

    def usage(self) -> dict[str, Any]:
        """Tokens by what the engine says, else estimates that are named."""
        prompt, estimated = self._prompt_tokens, list[str]()
        if prompt is None:
            prompt = math.ceil(self._prompt_bytes / BYTES_PER_TOKEN)
            estimated.append(PROMPT_ESTIMATED)
        if not self._counted:
            estimated.append("completion_tokens: one an answer of the engine")
        found = {"prompt_tokens": prompt, "completion_tokens": self._tokens, "total_tokens": prompt + self._tokens}
        return found | ({"trefoil_estimated": "; ".join(estimated)} if estimated else {})

    def _count(self, response: Any, api: str) -> None:
        count, prompt = engine_count(response, TOKENS_OUT), engine_count(response, TOKENS_IN)
        self._tokens += 1 if count is None else count
        self._counted = self._counted and (count is not None or api == GREEDY)
        self._prompt_tokens = self._prompt_tokens if prompt is None else prompt


def whole_calls(parts: Calls) -> list[dict[str, Any]]:
    """Calls of tools out of their parts: texts of one call, by its index, follow each other."""
    found: dict[Any, dict[str, Any]] = {}
    for part in parts:
        call = found.setdefault(part["index"], {"id": "", "type": "function", "function": {}})
        call["id"] = part.get("id") or call["id"]
        for name, text in (part.get("function") or {}).items():
            call["function"][name] = call["function"].get(name, "") + (text or "")
    return [{**call, "function": {"name": "", "arguments": "", **call["function"]}} for call in found.values()]


def _first(value: Any) -> Any:
    """The first element of an output, which stands without its list where it is the only one."""
    return (value[0] if value else None) if type(value) is list else value
