"""How much a piece of Python does, whatever the machine and whoever is beside it."""

import sys
from types import FrameType
from typing import Any, Self


class Steps:
    """Counts the bytecode instructions of this thread in a `with` block; loops inside C count nothing.

    Times belong to benchmarks: in the gate a slow or shared core must not decide.
    """

    def __init__(self) -> None:
        self.count = 0

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.count += event == "opcode"
        return self._trace

    def __enter__(self) -> Self:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)
