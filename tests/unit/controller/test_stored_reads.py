"""What the controller answers from Redis: carbon to come, and what the books rest on."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from controller.settings import ControllerSettings
from controller.stored_reads import FORECAST_BANDS, StoredReads
from trefoil.core.carbon import CarbonBand, CarbonForecast, CarbonReading, Factors, Method, Series
from trefoil.runtime.clock import ManualClock
from trefoil.runtime.keys import Keys
from trefoil.runtime.repository import load_catalog

SERIES = Series("demo", Method.AVERAGE, Factors.LIFECYCLE)
REPOSITORY = Path(__file__).parents[3] / "model_repository"


class State:
    """Redis with one reading and its forecast."""

    keys = Keys("test")

    def __init__(self, forecast: CarbonForecast) -> None:
        self._forecast = forecast

    async def scan(self, prefix: str, cls: type, *_: Any) -> dict[str, Any]:
        return {prefix: CarbonReading(SERIES)} if cls is CarbonReading else {}

    async def get(self, key: str, cls: type) -> Any:
        return self._forecast if cls is CarbonForecast and key == self.keys.carbon_forecast(SERIES) else None

    async def names(self, prefix: str) -> list[str]:
        return []


def reads(forecast: CarbonForecast, now_s: float) -> StoredReads:
    observation = SimpleNamespace(
        catalog=load_catalog(REPOSITORY), inputs=SimpleNamespace(nodes={}), fleet=lambda _: SimpleNamespace(stale=())
    )
    return StoredReads(ControllerSettings(), State(forecast), observation, ManualClock(now_s))  # type: ignore[arg-type]


async def test_a_forecast_is_what_has_not_ended_and_is_bounded() -> None:
    bands = tuple(CarbonBand(60.0 * n, 60.0 * n + 60.0, p50_g_per_kwh=n) for n in range(1000))
    [found] = (await reads(CarbonForecast(SERIES, bands=bands), 630.0).fleet()).carbon_forecasts
    assert [band.p50_g_per_kwh for band in found.bands] == list(range(10, 10 + FORECAST_BANDS))


async def test_books_name_the_accuracy_of_every_variant() -> None:
    """A plan's routes name none: a saving judged by them would be below every floor."""
    accuracies = (await reads(CarbonForecast(), 7200.0).report(0.0, 0.0)).accuracies
    families = load_catalog(REPOSITORY).families
    assert set(accuracies) == {f"{family.name}/{one.name}" for family in families for one in family.variants}
    assert accuracies["digits/digits-l"] > 0.98
    assert all(0 < value <= 1 for value in accuracies.values())
