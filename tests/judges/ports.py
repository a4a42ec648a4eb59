"""Calls that the controller's cores make, and bytes that services write, in histories in virtual time with faults.

A call is recorded with its time, its process, its arguments, and its answer or error.
"""

import contextlib
import hashlib
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final
from unittest import mock

from controller import __main__ as main
from controller.loop.core.ports import ControlPorts
from controller.rollout.core.ports import RolloutPorts
from tests.judges.commands import folder
from tests.support.virtual import system as virtual
from tests.support.virtual.doubles import MemoryDisk, NodeAgents, ProcessDisk, ProcessTable
from tests.support.virtual.faults import drawn
from tests.support.virtual.loop import PROCESS, virtual_loop
from tests.support.virtual.redis import Server
from trefoil.core.errors import TrefoilError

CHARACTERS_MAX: Final = 160  # of a recorded value; a longer one is cut and gets its digest
CLOVER: Final = {"policy": "clover", "planner": ""}  # measures candidates: exploration
HISTORIES: Final[Mapping[str, tuple[int, Any, float, Mapping[str, Any]]]] = {
    "no fault": (3, None, 40.0, {}),
    "drawn faults 5": (5, drawn, 40.0, {}),
    "drawn faults 11": (11, drawn, 40.0, {}),
    "exploration": (3, None, 120.0, CLOVER),
}
WRITES: Final = (
    *((Server, method) for method in ("set", "delete", "expire", "append", "set_totals")),
    *((MemoryDisk, method) for method in ("save_together", "save_decision")),
    (ProcessDisk, "_replace"),
    (ProcessTable, "save"),
    (NodeAgents, "apply"),
)
Note = Callable[[str, Mapping[str, Any]], list[str]]

RECORDED: Final[Mapping[str, tuple[str, Callable[..., Mapping[str, Any]]]]] = {
    "show": ("use_view", lambda view, **_: {"view": view}),
    "think": ("call_planner", dict),
    "tell": ("tell_planner", dict),
    "save_memory": ("save_planner_memory", dict),
    "save_plans": ("save", lambda plans: {"values": {"plans": plans}}),
    "record": ("record_decision", lambda taken: {each.name: getattr(taken, each.name) for each in fields(taken)}),
    "roll": ("start_rollout", lambda plan, why, **_: {"plan": plan, "why": why}),
    "command": ("command_node", dict),
    "evaluated": ("candidate_evaluated", lambda trigger, evaluation: {"trigger": trigger, "text": str(evaluation)}),
    "wake": ("wake_loop", dict),
    "ended": ("wake_loop", dict),
    "log": ("log", lambda event, warning, fields=None: {
        "event": event, "fields": fields or {}, "level": "warning" if warning else "info"
    }),
    "count": ("add_metric", lambda metric, amount, labels=None: {
        "name": metric, "amount": amount, "labels": labels or {}, "gauge": False
    }),
    "gauge": ("add_metric", lambda metric, value: {"name": metric, "amount": value, "labels": {}, "gauge": True}),
    "duration": ("time_metric", lambda metric, seconds: {"name": metric, "seconds": seconds}),
}  # fmt: skip
"""Of ports that were recorded under another name, or with other arguments: both as they were recorded."""
NOT_RECORDED: Final = frozenset({"compute"})  # asks nothing of what is around the core


def ports() -> Iterator[tuple[str, Any]]:
    """Every call of each history, in order, and the ends of its requests."""
    for name, history in HISTORIES.items():
        yield name, played(*history)


def played(seed: int, faults: Any, end_s: float, settings: Mapping[str, Any]) -> dict[str, Any]:
    """One history. Disks are real where they have no faults."""
    calls: list[list[str]] = []
    with virtual_loop() as loop, folder() as tmp, mock.patch.dict(virtual.SETTINGS, settings):
        system = virtual.System(loop, seed, None if faults else Path(tmp))

        def note(call: str, arguments: Mapping[str, Any]) -> list[str]:
            process = PROCESS.get()
            record = [f"{loop.time():.6f} s, {process.name if process else ''}: {call}"]
            record += [f"{name} = {text_of(value)}" for name, value in arguments.items()]
            if process is not None:  # else the harness writes, in place of agents and feed
                calls.append(record)
            return record

        control, rollout = main.LiveControlPorts, main.LiveRolloutPorts
        replaced = {(cls, method): noting(cls, method, note) for cls, method in WRITES}
        replaced[main, "LiveControlPorts"] = lambda *args: Proxy(control(*args), ControlPorts, note)
        replaced[main, "LiveRolloutPorts"] = lambda *args: Proxy(rollout(*args), RolloutPorts, note)
        replaced[os, "getpid"] = lambda: 1  # names the holder of a lease
        with virtual.installed(system, real_bytes=True), contextlib.ExitStack() as stack:
            for (owner, attribute), value in replaced.items():
                stack.enter_context(mock.patch.object(owner, attribute, value))
            system.play(faults or (lambda _: None), end_s)
    return {"calls": calls, "requests": [request.ends for request in system.requests]}


def text_of(value: Any) -> str:
    """Value without names of classes; a long one is cut, with its digest."""
    text = re.sub(r"\b[A-Z]\w*(?=[.(])", "", repr(value))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return text if len(text) <= CHARACTERS_MAX else f"{text[:CHARACTERS_MAX]}... sha256 {digest}"


def noting(cls: type, method: str, note: Note) -> Any:
    """A method that notes its arguments, then does what it did."""
    real = getattr(cls, method)

    def noted(self: Any, *args: Any) -> Any:
        note(f"{cls.__name__}.{method}", {str(number): value for number, value in enumerate(args)})
        return real(self, *args)

    return noted


class Proxy:
    """Notes calls of ports, their answers and errors. Attributes that are not a port pass."""

    def __init__(self, real: Any, protocol: type, note: Note) -> None:
        self._real, self._protocol, self._note = real, protocol, note

    def __getattr__(self, name: str) -> Any:
        real, declared = getattr(self._real, name), getattr(self._protocol, name, None)
        if declared is None or name in NOT_RECORDED:
            return real

        @contextlib.contextmanager
        def noted(args: Sequence[Any], named: Mapping[str, Any]) -> Iterator[list[str]]:
            bound = inspect.signature(declared).bind(self, *args, **named)
            bound.apply_defaults()
            call, recorded = RECORDED.get(name, (name, dict))
            del bound.arguments["self"]
            record = self._note(call, recorded(**bound.arguments))
            try:
                yield record
            except TrefoilError as error:
                record.append(f"raised {type(error).__name__}: {error}")
                raise

        def called(*args: Any, **named: Any) -> Any:
            with noted(args, named) as record:
                answer = real(*args, **named)
                record.append(f"answer = {text_of(answer)}")
            return answer

        async def awaited(*args: Any, **named: Any) -> Any:
            with noted(args, named) as record:
                answer = await real(*args, **named)
                record.append(f"answer = {text_of(answer)}")
            return answer

        return awaited if inspect.iscoroutinefunction(declared) else called
