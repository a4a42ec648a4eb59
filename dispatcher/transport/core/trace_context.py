"""Trace context of a request: which metadata of a client is passed on to the slice that answers.

Source: W3C Trace Context, level 1. What is not a traceparent is dropped, and its tracestate with it. So is a tracestate
that no header can carry or that is longer than `STATE_CHARS_MAX` (512 must be passed on).
"""

import re
from collections.abc import Iterable
from typing import Any, Final

Trace = tuple[tuple[str, str], ...]
"""Metadata of a call: traceparent, and tracestate where there is one."""
NO_TRACE: Final[Trace] = ()
PARENT: Final = "traceparent"
STATE: Final = "tracestate"
STATE_CHARS_MAX: Final = 4096
_PARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]{0,64})?")
_STATE: Final = re.compile(rf"[ -~]{{1,{STATE_CHARS_MAX}}}")


def trace_of(metadata: Iterable[tuple[str, Any]]) -> Trace:
    """Trace context among metadata, or HTTP headers in lower case; several tracestates are one list."""
    parents, states = [], []
    for key, value in metadata:
        if key == PARENT:
            parents.append(value)
        elif key == STATE:
            states.append(value)
    if len(parents) != 1 or not _PARENT.fullmatch(parents[0]):
        return NO_TRACE
    state = ",".join(states)
    return ((PARENT, parents[0]), (STATE, state)) if _STATE.fullmatch(state) else ((PARENT, parents[0]),)
