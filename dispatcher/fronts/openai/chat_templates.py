"""Chat templates: Jinja as Hugging Face's tokenizers write it, rendered in a sandbox that is bounded in time and size.

Runs in a separate process (`rest/codec_process.py`), since a family's file is not trusted. Source of the dialect:
transformers' `apply_chat_template` (trim_blocks, lstrip_blocks, loop controls, raise_exception, tojson).
"""

import json
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final

from trefoil.core.errors import InvalidInput, TrefoilError

CPU_S: Final = 0.5
"""Processor time of one rendering."""
CHARS_MAX: Final = 8 * 2**20
_FIELD: Final = "chat_template"
_REMEDY: Final = "correct chat_template.jinja in the family's folder, or that parameter of its config.pbtxt"


class _TooLong(Exception):
    """Rendering that has used its processor time."""


class _Refused(Exception):
    """Messages that a template refuses."""


def render(template: str, messages: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> str:
    """Render the prompt of a chat. `names`: further variables, such as bos_token. Main thread only.

    Raises:
        InvalidInput: the template refuses these messages.
        TrefoilError: the template cannot be used, or exceeds its bounds.
    """
    import jinja2

    parts, size = list[str](), 0
    try:
        with _processor_time(CPU_S):
            made = _compiled(template)
            for part in made.generate(messages=list(messages), add_generation_prompt=True, **names):
                parts.append(part)
                size += len(part)
                if size > CHARS_MAX:
                    raise TrefoilError(f"makes more than {CHARS_MAX} characters", field=_FIELD, remedy=_REMEDY)
    except _Refused as refused:
        raise InvalidInput(
            f"the chat template refuses them: {refused}", field="messages", remedy="send what the model was trained on"
        ) from None
    except _TooLong:
        raise TrefoilError(f"takes more than {CPU_S:g} s of processor time", field=_FIELD, remedy=_REMEDY) from None
    except MemoryError:
        raise TrefoilError("takes too much memory", field=_FIELD, remedy=_REMEDY) from None
    except (jinja2.TemplateError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise TrefoilError(f"{type(error).__name__}: {error}", field=_FIELD, remedy=_REMEDY) from None
    return "".join(parts)


@lru_cache(maxsize=64)
def _compiled(template: str) -> Any:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _raise_exception
    return made.from_string(template)


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: Any) -> None:
    raise _Refused(str(message))


@contextmanager
def _processor_time(limit_s: float) -> Iterator[None]:
    def expire(*_: object) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGVTALRM, expire)
    signal.setitimer(signal.ITIMER_VIRTUAL, limit_s, 0.1)  # again, where what it cut short continues
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)
