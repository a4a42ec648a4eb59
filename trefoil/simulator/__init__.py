"""Simulator: the live brains in simulated time, on simulated hardware.

from trefoil.simulator import Scenario, simulate

scenario = Scenario.load("benchmarks/scenarios/digits.toml", {"policy": "base"})
print(simulate(scenario).summary.grams_per_request)
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trefoil.simulator.report.result import Result, Summary
    from trefoil.simulator.run import simulate
    from trefoil.simulator.scenario.inputs import Provided
    from trefoil.simulator.scenario.schema import Scenario

__all__ = ["Provided", "Result", "Scenario", "Summary", "simulate"]

_HOMES = {
    "Provided": "scenario.inputs",
    "Result": "report.result",
    "Scenario": "scenario.schema",
    "Summary": "report.result",
    "simulate": "run",
}


def __getattr__(name: str) -> Any:
    """Attribute, imported only when it is asked for: a command that reads a scenario needs no controller."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
