"""One configured value: on-site generation, a contract, or a zone without measurements. Its readings are marked
static."""

from carbon_feed.core.observation import Observation
from carbon_feed.core.trace_playback import Bin, Playback
from carbon_feed.providers.base import Provider
from carbon_feed.settings import CarbonFeedSettings
from trefoil.core.carbon import Quality


class ConstantProvider:
    """Provider of one value in equal intervals since the start, so that its readings do not grow stale."""

    name = "constant"
    speedup = 1.0

    def __init__(self, intensity_g_per_kwh: float, interval_s: float, source: str, created_at_s: float) -> None:
        self._source = source
        self._playback = Playback((), (intensity_g_per_kwh,), interval_s, created_at_s, created_at_s)

    async def read(self, now_s: float) -> Observation:
        held = self._playback.at(now_s)
        assert held is not None, "a looping playback never ends"
        return self._observation(held)

    def history(self, now_s: float, count_max: int) -> tuple[Observation, ...]:
        return tuple(self._observation(held) for held in self._playback.history(now_s, count_max))

    def _observation(self, held: Bin) -> Observation:
        return Observation(
            starts_at_s=held.starts_at_s,
            ends_at_s=held.ends_at_s,
            intensity_g_per_kwh=held.intensity_g_per_kwh,
            quality=Quality.STATIC,
            provider=self.name,
            api_version="",
            estimation_method=self._source,
            observed_at_s=held.starts_at_s,
            simulated=False,
            record=held.record,
        )


def make_constant(settings: CarbonFeedSettings, now_s: float) -> Provider:
    """Make the provider of `[constant]`."""
    constant = settings.constant
    return ConstantProvider(constant.intensity_g_per_kwh, constant.interval_s, constant.source, now_s)
