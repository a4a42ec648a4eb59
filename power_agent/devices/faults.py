"""Rehearsed trouble: what a simulated driver does wrong on request, by symbol and occurrence, so that a run repeats."""

from dataclasses import dataclass
from typing import Any, Final

from power_agent.devices.calls import CALLS
from power_agent.devices.driver import Nvml
from power_agent.devices.errors import NodeRefused

EFFECTS: Final = ("fail", "pretend", "delay")
RULES_MAX: Final = 100


@dataclass(slots=True)
class Fault:
    """Applies to calls number `after + 1` to `after + times` of a symbol, counted from when it was planned.

    fail: return `code` and do nothing. pretend: return success and do nothing (seen with GpuInstanceDestroy on H100).
    delay: answer `delay_s` late (seen: 10 s for handles under load).
    """

    symbol: str
    effect: str
    code: int
    after: int
    times: int
    delay_s: float


class FaultPlan:
    """All planned faults; each call counts against every rule of its symbol."""

    def __init__(self) -> None:
        self._rules: list[Fault] = []

    def plan(
        self, symbol: str, effect: str = "fail", code: int = 999, after: int = 0, times: int = 1, delay_s: float = 0.0
    ) -> None:
        if symbol not in CALLS:
            raise NodeRefused(f"no symbol {symbol!r} to fail", remedy="a C name such as nvmlGpuInstanceDestroy")
        if effect not in EFFECTS:
            raise NodeRefused(f"no effect {effect!r}", remedy=f"one of {', '.join(EFFECTS)}")
        if len(self._rules) >= RULES_MAX:
            raise NodeRefused(f"{RULES_MAX} faults are planned", remedy="clear them")
        self._rules.append(Fault(symbol, effect, int(Nvml(code)), after, times, delay_s))

    def clear(self) -> None:
        self._rules.clear()

    def hit(self, symbol: str) -> Fault | None:
        """The fault that this call meets, if any."""
        met = None
        for rule in self._rules:
            if rule.symbol != symbol:
                continue
            if rule.after > 0:
                rule.after -= 1
            elif rule.times > 0 and met is None:
                rule.times -= 1
                met = rule
        self._rules = [rule for rule in self._rules if rule.times > 0]
        return met

    def describe(self) -> list[dict[str, Any]]:
        return [{"symbol": rule.symbol, "effect": rule.effect, "times": rule.times} for rule in self._rules]
