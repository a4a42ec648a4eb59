"""Where intensities come from. A new provider is one file and one line of PROVIDERS."""

from collections.abc import Callable, Mapping
from typing import Final

from carbon_feed.providers.base import Provider
from carbon_feed.providers.constant import make_constant
from carbon_feed.providers.trace import make_trace
from carbon_feed.settings import CarbonFeedSettings

PROVIDERS: Final[Mapping[str, Callable[[CarbonFeedSettings, float], Provider]]] = {
    "trace": make_trace,
    "constant": make_constant,
}

__all__ = ["PROVIDERS", "Provider"]
