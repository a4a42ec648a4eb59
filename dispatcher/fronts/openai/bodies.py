"""Bodies of OpenAI's completions, chat completions and embeddings, checked. Pure.

Source: OpenAI's API reference (create completion, create chat completion, create embeddings), and vLLM's further
sampling parameters. Each key is used, or accepted since its value changes nothing, or refused by name.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dispatcher.fronts.rest import json_text
from trefoil.core.errors import VALUE_CHARS_MAX, InvalidInput, one_of

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
ENDPOINTS: Final = (CHAT, COMPLETIONS, EMBEDDINGS)
COMPLETION_TOKENS: Final = 16
"""`max_tokens` of a completion that names none: OpenAI's own default."""
MESSAGES_MAX: Final = 1024
KEYS_MAX: Final = 256
"""Of a body."""
TEXTS_MAX: Final = 2048
"""Texts of one request for embeddings: OpenAI's own bound."""
ENCODINGS: Final = ("float", "base64")
STOPS_MAX: Final = 4
STOP_CHARS_MAX: Final = 256
ROLES: Final = ("system", "developer", "user", "assistant", "tool")
INT32_MAX: Final = 2**31 - 1
DIGITS_MAX: Final = 20
"""Of a header's integer: 64 bits have no more."""
NUMBERS: Final[Mapping[str, tuple[type, float, float]]] = {
    "temperature": (float, 0, 2), "top_p": (float, 1e-6, 1), "min_p": (float, 0, 1), "top_k": (int, -1, INT32_MAX),
    "presence_penalty": (float, -2, 2), "frequency_penalty": (float, -2, 2), "repetition_penalty": (float, 1e-6, 10),
    "seed": (int, -(2**63), 2**63 - 1), "min_tokens": (int, 0, INT32_MAX),
}  # fmt: skip
"""Sampling parameters: kind, least, most."""
LIMITS: Final = ("max_completion_tokens", "max_tokens")
UNUSED: Final[Mapping[str, tuple[Any, ...]]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "suffix": ("",), "logprobs": (False, 0), "top_logprobs": (0,),
    "logit_bias": ({},), "functions": ([],), "function_call": ("none", "auto"), "response_format": ({"type": "text"},),
    "modalities": (["text"],), "audio": (), "prediction": (), "reasoning_effort": (), "verbosity": (),
    "web_search_options": (), "store": (False,),
}  # fmt: skip
"""What no family here has, and the values that do not ask for it."""
IGNORED: Final = frozenset(("user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"))
OURS: Final = "trefoil_"
TRITONS: Final = ("priority", "timeout")
TOOLS, TOOL_CHOICE = "tools", "tool_choice"
TOOLS_MAX: Final = 128
VALUES_MAX: Final = 2**14
"""JSON values in all tools and calls of a request: a worker handles each of them as an object, on its loop."""
CHOICES: Final = ("none", "auto", "required")
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ABOUT_TOOLS: Final = (TOOLS, TOOL_CHOICE, "parallel_tool_calls")
_SHARED: Final = frozenset(("model", "stream", "stream_options", "stop", "ignore_eos", *NUMBERS, *LIMITS, *UNUSED))
_EMBEDDINGS: Final = frozenset(("model", "input", "encoding_format", "dimensions"))
_MESSAGE: Final = frozenset(("role", "content", "name", "refusal", "annotations", "tool_calls", "tool_call_id"))


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for text. `messages` of a chat, else `prompt`. `sampling`: parameters that were given.
    `parameters`: for the request, by their names (`trefoil_*`, priority, timeout). `tools`: keys about tools."""

    model: str
    prompt: str
    messages: tuple[Mapping[str, Any], ...]
    stream: bool
    include_usage: bool
    max_tokens: int | None
    stops: tuple[str, ...]
    sampling: Mapping[str, Any]
    parameters: Mapping[str, Any]
    tools: Mapping[str, Any]

    @property
    def about_tools(self) -> str:
        """Field that only a model with tools can take; empty: there is none."""
        calls = (f"messages[{at}].tool_calls" for at, each in enumerate(self.messages) if "tool_calls" in each)
        return TOOLS if self.tools else next(calls, "")


@dataclass(frozen=True, slots=True)
class AskedVectors:
    """A request for the embeddings of texts. `dimensions`: None = as many as the family has."""

    model: str
    texts: tuple[str, ...]
    as_base64: bool
    dimensions: int | None
    parameters: Mapping[str, Any]


def read_text(body: bytes, headers: Mapping[str, str], endpoint: str) -> Asked | AskedVectors:
    """Read the bytes of a body; raises like `json_text.parse` and `read`."""
    return read(json_text.parse(body), headers, endpoint)


def read(given: Mapping[str, Any], headers: Mapping[str, str], endpoint: str) -> Asked | AskedVectors:
    """Read a body for one of ENDPOINTS; `headers` Trefoil-* are request parameters, which the body overrides.

    Raises:
        InvalidInput: naming the field.
    """
    if len(given) > KEYS_MAX:
        raise InvalidInput(f"a body has {len(given)} keys", remedy=f"send at most {KEYS_MAX}")
    given = {name: value for name, value in given.items() if value is not None}
    chat = endpoint == CHAT
    own = _EMBEDDINGS if endpoint == EMBEDDINGS else _SHARED | ({"messages", *_ABOUT_TOOLS} if chat else {"prompt"})
    known = own | IGNORED | set(TRITONS)
    for name in given:
        if name not in known and not name.startswith(OURS):
            short = name[:VALUE_CHARS_MAX]
            raise InvalidInput("is not a parameter of this API here", field=short, remedy=one_of(sorted(known), short))
    if endpoint == EMBEDDINGS:
        return _vectors(given, headers)
    for name in UNUSED.keys() & given.keys():
        if not any(type(given[name]) is type(value) and given[name] == value for value in UNUSED[name]):
            allowed = ", ".join(repr(value) for value in UNUSED[name])
            remedy = f"leave it out{allowed and f', or send {allowed}'}"
            raise InvalidInput("no family here has that", field=name, value=given[name], remedy=remedy)
    stream = _flag(given, "stream")
    asked = Asked(
        model=_text(given, "model"),
        prompt="" if chat else _prompt(given),
        messages=_messages(given) if chat else (),
        stream=stream,
        include_usage=_include_usage(given, stream),
        max_tokens=_max_tokens(given, chat),
        stops=_stops(given),
        sampling=_sampling(given),
        parameters=_parameters(given, headers),
        tools=_tools(given),
    )
    count = _count([asked.tools, *(each.get("tool_calls") for each in asked.messages)])
    if asked.about_tools and count > VALUES_MAX:
        why, remedy = f"tools and calls have {count} values", f"send at most {VALUES_MAX}"
        raise InvalidInput(why, field=asked.about_tools, remedy=remedy)
    return asked


def _count(value: Any) -> int:
    """JSON values within one, at any depth."""
    count, rest = 0, [value]
    while rest:
        each = rest.pop()
        rest += each.values() if type(each) is dict else each if type(each) is list else ()
        count += 1
    return count


def _tools(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keys about tools, for an engine that has them; none where the body names no tool."""
    tools, choice = given.get(TOOLS, []), given.get(TOOL_CHOICE, "auto")
    if type(tools) is not list or len(tools) > TOOLS_MAX:
        raise _wrong(TOOLS, tools, "is not a list of tools", f"send up to {TOOLS_MAX} functions")
    names = [_tool(f"{TOOLS}[{at}]", tool) for at, tool in enumerate(tools)]
    named = choice.get("function") if type(choice) is dict and choice.get("type") == "function" else None
    wanted = named.get("name") if type(named) is dict else choice
    if wanted not in (CHOICES if named is None else names) or (choice == "required" and not tools):
        remedy = 'send "none", "auto", "required", or {"type": "function", "function": {"name": one of the tools}}'
        raise _wrong(TOOL_CHOICE, choice, "chooses no tool of this request", remedy)
    found = {name: given[name] for name in _ABOUT_TOOLS[:2] if name in given}
    if "parallel_tool_calls" in given:
        found["parallel_tool_calls"] = _flag(given, "parallel_tool_calls")
    return found if tools else {}


def _tool(field: str, tool: Any) -> str:
    """Name of a tool's function."""
    function = tool.get("function") if type(tool) is dict and tool.get("type") == "function" else None
    name, schema = (function.get("name"), function.get("parameters", {})) if type(function) is dict else (None, None)
    if type(name) is not str or not _NAME.fullmatch(name) or type(schema) is not dict:
        remedy = 'send {"type": "function", "function": {"name": "...", "parameters": {JSON schema}}}'
        raise _wrong(field, tool, "is not a function", remedy)
    return name


def _vectors(given: Mapping[str, Any], headers: Mapping[str, str]) -> AskedVectors:
    form = given.get("encoding_format", "float")
    if form not in ENCODINGS:
        raise _wrong("encoding_format", form, "is not a known encoding", one_of(ENCODINGS))
    size = _number(given, "dimensions", int, 1, INT32_MAX) if "dimensions" in given else None
    return AskedVectors(_text(given, "model"), _texts(given), form == "base64", size, _parameters(given, headers))


def _texts(given: Mapping[str, Any]) -> tuple[str, ...]:
    value = given.get("input", "missing")
    texts = [value] if type(value) is str and "input" in given else value
    if type(texts) is list and len(texts) > TEXTS_MAX:
        raise _wrong("input", len(texts), "are too many texts", f"send at most {TEXTS_MAX}")
    if type(texts) is not list or not texts or not all(type(text) is str and text for text in texts):
        remedy = f"send a string, or a list of 1 to {TEXTS_MAX}, none of them empty; token ids are not taken"
        raise _wrong("input", value, "is not text", remedy)
    return tuple(texts)


def _wrong(field: str, value: Any, why: str, remedy: str) -> InvalidInput:
    return InvalidInput(why, field=field, value=value, remedy=remedy)


def _text(given: Mapping[str, Any], name: str) -> str:
    value = given.get(name)
    if type(value) is not str or not value:
        raise _wrong(name, "missing" if value is None else value, "is not text", "send a string that is not empty")
    return value


def _flag(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if type(value) is not bool:
        raise _wrong(name, value, "is not a boolean", "send true or false")
    return value


def _include_usage(given: Mapping[str, Any], stream: bool) -> bool:
    options = given.get("stream_options", {})
    if type(options) is not dict or options.keys() - {"include_usage", "include_obfuscation"}:
        raise _wrong("stream_options", options, "is not known", 'send {"include_usage": true}')
    if options and not stream:
        raise _wrong("stream_options", options, "needs stream = true", "leave it out, or stream")
    return _flag({name: value for name, value in options.items() if value is not None}, "include_usage")


def _number(given: Mapping[str, Any], name: str, kind: type, least: float, most: float) -> Any:
    value = given[name]
    fits = type(value) is int or (kind is float and type(value) is float)
    if not fits or not least <= value <= most:
        what = "a number" if kind is float else "an integer"
        raise _wrong(name, value, "is out of range, or of another type", f"send {what} in {least:g}..{most:g}")
    return value


def _max_tokens(given: Mapping[str, Any], chat: bool) -> int | None:
    named = [name for name in LIMITS if name in given]
    if len(named) > 1:
        remedy = "send max_completion_tokens alone"
        raise _wrong("max_tokens", given["max_tokens"], "max_completion_tokens is given too", remedy)
    if named:
        return int(_number(given, named[0], int, 1, INT32_MAX))
    return None if chat else COMPLETION_TOKENS


def _stops(given: Mapping[str, Any]) -> tuple[str, ...]:
    value = given.get("stop", [])
    stops = [value] if type(value) is str else value
    if (
        type(stops) is not list
        or len(stops) > STOPS_MAX
        or not all(type(stop) is str and 0 < len(stop) <= STOP_CHARS_MAX for stop in stops)
    ):
        remedy = f"send a string, or up to {STOPS_MAX}, each of 1 to {STOP_CHARS_MAX} characters"
        raise _wrong("stop", value, "is not a stop sequence", remedy)
    return tuple(stops)


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: _number(given, name, *NUMBERS[name]) for name in NUMBERS if name in given}
    return found | {name: _flag(given, name) for name in ("ignore_eos",) if name in given}


def _prompt(given: Mapping[str, Any]) -> str:
    value = given.get("prompt", "missing" if "prompt" not in given else None)
    texts = value if type(value) is list else [value]
    if "prompt" not in given or len(texts) != 1 or type(texts[0]) is not str:
        raise _wrong("prompt", value, "is not one text", "send one string; token ids and several prompts are not taken")
    return str(texts[0])


def _messages(given: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    value = given.get("messages", [])
    if type(value) is not list or not value:
        raise _wrong("messages", value, "has no message", 'send [{"role": "user", "content": "..."}]')
    if len(value) > MESSAGES_MAX:
        raise _wrong("messages", len(value), "are too many", f"send at most {MESSAGES_MAX}")
    return tuple(_message(f"messages[{at}]", one) for at, one in enumerate(value))


def _message(field: str, value: Any) -> Mapping[str, Any]:
    if type(value) is not dict:
        raise _wrong(field, value, "is not an object", 'send {"role": "user", "content": "..."}')
    found = {name: one for name, one in value.items() if one is not None}
    role = found.get("role")
    if role not in ROLES:
        raise _wrong(f"{field}.role", role or "missing", "is not a role", one_of(ROLES))
    for name in found:
        if name not in _MESSAGE:
            raise _wrong(f"{field}.{name[:VALUE_CHARS_MAX]}", found[name], "no family here has that", "leave it out")
    calls = _calls(f"{field}.tool_calls", found["tool_calls"]) if "tool_calls" in found else {}
    content = None if calls and "content" not in found else _content(field, found.get("content"))
    made = {"role": "system" if role == "developer" else role, "content": content, **calls}
    return made | {name: _text(found, name) for name in ("name", "tool_call_id") if name in found}


def _calls(field: str, value: Any) -> dict[str, Any]:
    """Calls of tools of an earlier answer, as it had them."""
    for call in value if type(value) is list and value else [None]:
        function = call.get("function") if type(call) is dict else None
        texts = [function.get("name"), function.get("arguments")] if type(function) is dict else [None]
        if type(call) is not dict or not all(type(text) is str for text in (*texts, call.get("id"))):
            remedy = 'send [{"id": "...", "type": "function", "function": {"name": "...", "arguments": "{...}"}}]'
            raise _wrong(field, value, "are not calls of tools", remedy)
    return {"tool_calls": value}


def _content(field: str, value: Any) -> str:
    """Text of a message, that of its parts together."""
    parts: Sequence[Any] = [{"type": "text", "text": value}] if type(value) is str else value
    texts = []
    for part in parts if type(parts) is list else [parts]:
        if type(part) is not dict or part.get("type") != "text" or type(part.get("text")) is not str:
            shown = "missing" if value is None else value
            remedy = 'send a string, or [{"type": "text", "text": "..."}]'
            raise _wrong(f"{field}.content", shown, "is not text", remedy)
        texts.append(part["text"])
    return "".join(texts)


def _whole(value: str) -> int | str:
    """Number of a header, for which JSON has a separate type; what is none is refused with other parameters."""
    return int(value) if len(value) <= DIGITS_MAX and value.isascii() and value.isdecimal() else value


def _parameters(given: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for header, value in headers.items():
        if header.startswith("trefoil-"):
            name = header.replace("-", "_")
            plain = name.removeprefix(OURS)
            found[plain if plain in TRITONS else name] = _whole(value) if plain in TRITONS else value
    found |= {name: value for name, value in given.items() if name.startswith(OURS) or name in TRITONS}
    for name, value in found.items():
        if type(value) in (dict, list):
            raise _wrong(name[:VALUE_CHARS_MAX], value, "has invalid type", "send a number, true, false or a string")
    return found
