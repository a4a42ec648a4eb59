"""Rehearsed trouble: what a simulated driver does wrong on request, by symbol and occurrence, so that a run repeats."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from power_agent.devices.errors import NodeRefused
from power_agent.devices.nvml_shim import SYMBOLS
from trefoil.simulated_node.calls import CALLS
from trefoil.simulated_node.gpu_state import Nvml

EFFECTS: Final = ("fail", "fail_after", "pretend", "delay", "lose", "reload")
ANY: Final = "*"
RULES_MAX: Final = 100


@dataclass(slots=True)
class Fault:
    """Applies to calls number `after + 1` to `after + times` of a symbol ("*": any), counted from when it was planned.

    fail: return `code` and do nothing. fail_after: do it, then return `code` (the answer was lost). pretend: return
    success and do nothing (seen with GpuInstanceDestroy on H100). delay: answer `delay_s` late (seen: 10 s for handles
    under load). lose: GPU `index` falls off the bus just before the call. reload: the driver restarts just before it.
    With `probability` below 1 a call that would be hit is spared by chance, and does not count.
    """

    symbol: str
    effect: str
    code: int
    after: int
    times: int
    delay_s: float
    probability: float
    index: int


class FaultPlan:
    """Plan of faults; each call counts against every rule of its symbol. Same seed and calls, same faults.

    What has been seen on hardware, as rules:
        plan("nvmlGpuInstanceDestroy", code=19, times=3)                      IN_USE three times, then done.
        plan("nvmlGpuInstanceDestroy", effect="pretend")                      success, but it stays.
        plan("nvmlGpuInstanceCreateComputeInstance", code=23)                 GPU instance made, compute instance not.
        plan("nvmlDeviceSetGpuLockedClocks", code=999)
        plan("nvmlDeviceGetHandleByUUID", effect="delay", delay_s=10.0)       the answer is 10 s late.
        plan("*", effect="lose", after=7, index=0)                            lost after seven calls.
        plan("*", effect="reload", after=7)
        plan("nvmlGpuInstanceDestroy", code=19, times=100, probability=0.3)   IN_USE by chance.
    A hidden client that holds an instance until it lets go is Interference.leak_handle.
    """

    def __init__(self, seed: int = 0) -> None:
        self._rules: list[Fault] = []
        self._chance = np.random.default_rng(seed)

    def plan(
        self,
        symbol: str,
        effect: str = "fail",
        code: int = 999,
        after: int = 0,
        times: int = 1,
        delay_s: float = 0.0,
        probability: float = 1.0,
        index: int = 0,
    ) -> None:
        """Add a rule to the plan.

        Raises:
            NodeRefused: no such symbol or effect, or too many rules.
        """
        if symbol not in CALLS and symbol != ANY:
            raise NodeRefused(f"no symbol {symbol!r} to fail", remedy="a C name such as nvmlGpuInstanceDestroy, or *")
        if effect not in EFFECTS:
            raise NodeRefused(f"no effect {effect!r}", remedy=f"one of {', '.join(EFFECTS)}")
        if effect == "pretend" and (symbol == ANY or not SYMBOLS[symbol].islower()):
            raise NodeRefused(f"{symbol} cannot pretend: it returns something", remedy="fail, or another symbol")
        if not 0.0 <= probability <= 1.0:
            raise NodeRefused(f"probability {probability:g} is not between 0 and 1", remedy="such as 0.3")
        if len(self._rules) >= RULES_MAX:
            raise NodeRefused(f"{RULES_MAX} faults are planned", remedy="clear them")
        self._rules.append(Fault(symbol, effect, int(Nvml(code)), after, times, delay_s, probability, index))

    def clear(self) -> None:
        """Remove all rules."""
        self._rules.clear()

    def next_fault(self, symbol: str) -> Fault | None:
        """Fault that this call meets, if any; counts the call."""
        met = None
        for rule in self._rules:
            if rule.symbol not in (symbol, ANY):
                continue
            if rule.after > 0:
                rule.after -= 1
            elif rule.times > 0 and met is None and self._is_drawn(rule):
                rule.times -= 1
                met = rule
        self._rules = [rule for rule in self._rules if rule.times > 0]
        return met

    def _is_drawn(self, rule: Fault) -> bool:
        return rule.probability >= 1.0 or float(self._chance.random()) < rule.probability

    def summary(self) -> list[dict[str, Any]]:
        """Rules that still apply, as JSON values."""
        return [{"symbol": rule.symbol, "effect": rule.effect, "times": rule.times} for rule in self._rules]
