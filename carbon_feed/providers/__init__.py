"""Providers of carbon intensities. A new provider is one file and one line of PROVIDERS."""

from collections.abc import Callable, Mapping
from typing import Final

from carbon_feed.core.polling import PollLimits
from carbon_feed.providers.base import LiveProvider, Provider, ProviderFailure
from carbon_feed.providers.constant import make_constant
from carbon_feed.providers.electricity_maps import make_electricity_maps
from carbon_feed.providers.neso import make_neso
from carbon_feed.providers.override import make_override
from carbon_feed.providers.polled import PolledProvider
from carbon_feed.providers.trace import make_trace
from carbon_feed.providers.watttime import make_watttime
from carbon_feed.settings import CarbonFeedSettings


def _make_override(settings: CarbonFeedSettings, now_s: float) -> Provider:
    return make_override(PROVIDERS[settings.override.base](settings, now_s), settings.override)


PROVIDERS: Final[Mapping[str, Callable[[CarbonFeedSettings, float], Provider]]] = {
    "trace": make_trace,
    "constant": make_constant,
    "neso": make_neso,
    "electricity_maps": make_electricity_maps,
    "watttime": make_watttime,
    "override": _make_override,
}


LIVE: Final = ("neso", "electricity_maps", "watttime")
"""Providers over a network: they are polled. Local values are read directly."""


def make_providers(settings: CarbonFeedSettings, now_s: float) -> tuple[Provider, ...]:
    """Make a zone's provider and, where one is set, the second of the same method and factors. Live ones are polled.

    Raises:
        errors.SettingError, errors.TraceError: one of them cannot be made.
    """
    names = [settings.provider, *([settings.secondary] if settings.secondary else [])]
    made = []
    for name in names:
        one = PROVIDERS[name](settings, now_s)
        asks = settings.override.base if name == "override" else name
        made.append(_polled(settings, one, asks) if asks in LIVE and isinstance(one, LiveProvider) else one)
    return tuple(made)


def _polled(settings: CarbonFeedSettings, provider: LiveProvider, asks: str) -> PolledProvider:
    rules = PollLimits(
        poll_s=provider.poll_s,
        quota_per_day=getattr(settings, asks).quota_per_day,
        seed=f"{settings.cluster} {settings.zone} {provider.name}",
    )
    return PolledProvider(provider, rules, settings.state_dir / f"polling-{settings.zone}-{provider.name}.json")


__all__ = ["PROVIDERS", "LiveProvider", "PolledProvider", "Provider", "ProviderFailure", "make_providers"]
