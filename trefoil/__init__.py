"""Trefoil serves DNN inference for the fewest grams of CO2 per answered request.

From Python: `plan`, `simulate`, `compare`, `Client` (docs/python.md), imported only when they are asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trefoil.api.client import Client
    from trefoil.api.planning import plan
    from trefoil.api.simulating import compare, simulate
    from trefoil.core.errors import TrefoilError

__version__ = "0.2.0.dev0"
__all__ = ["Client", "TrefoilError", "__version__", "compare", "plan", "simulate"]

_HOMES = {
    "Client": "api.client",
    "TrefoilError": "core.errors",
    "compare": "api.simulating",
    "plan": "api.planning",
    "simulate": "api.simulating",
}


def __getattr__(name: str) -> Any:
    """Attribute of the public API, imported only when it is asked for."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
