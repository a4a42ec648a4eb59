"""Archive of forecasts as they were issued, ours and providers' alike, scored against what is known.

Data: forecast f issued at t with bands [s, e). A band's actual is the mean of the present history over it.
Formulation: lead of a band = the steps of `lead_s` from t to its start, rounded up, at least 1. Per lead: MAE, bias and
MAPE of the 50 % line, and the share of actuals inside the 10..90 % band (`carbon_feed.forecast.scores`).
Bands from a provider's own errors: 10 and 90 % quantile per lead of actual - forecast over its archived forecasts. Its
50 % line stays as issued.
Bounded: `forecasts_max` forecasts of each model, the oldest go first; four days of hours are 3 kB each.
On disk a forecast is one line of JSON: times in seconds, intensities in g/kWh to a tenth.
"""

import bisect
import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from carbon_feed.core.history import History, Integral, check_series
from carbon_feed.forecast.bands import ERRORS_MIN, LEVELS
from carbon_feed.forecast.daily_rows import Values
from carbon_feed.forecast.forecaster import HORIZON_S, STEP_S
from carbon_feed.forecast.incremental import Incremental
from carbon_feed.forecast.scores import ScoreSums
from trefoil.core.carbon import CarbonBand, CarbonForecast, CarbonScores, Series
from trefoil.core.common import Basis, Provenance

FORECASTS_MAX: Final = 24 * 60  # two months of hourly issues
SLACK_LEADS: Final = 1e-6
FORECASTS_BETWEEN_BREAKS: Final = 32  # settled between two places where others may have their turn: some milliseconds
LEADS_BETWEEN_BREAKS: Final = 2
FORMAT: Final = 1
DECIMALS: Final = 1  # ten times finer than any provider says an intensity
SLACK_S: Final = 1e-3
LINES: Final = ("p10_g_per_kwh", "p50_g_per_kwh", "p90_g_per_kwh")


@dataclasses.dataclass(frozen=True, slots=True)
class _CompactForecast:
    """A forecast in a tenth of the memory that its bands would take."""

    header: CarbonForecast
    even: tuple[float, float] | None
    """Start and step, where these tell the spans to the last bit."""
    spans: Values | None
    lines: Values

    @property
    def times(self) -> Values:
        """Starts and ends, as [2, H]."""
        if self.even is not None:
            return _even(*self.even, self.lines.shape[1])
        assert self.spans is not None
        return self.spans

    def rows(self) -> Iterator[tuple[float, ...]]:
        """Start, end, 10, 50 and 90 % of each band."""
        return zip(*self.times.tolist(), *self.lines.tolist(), strict=True)

    def whole(self) -> CarbonForecast:
        return dataclasses.replace(self.header, bands=tuple(CarbonBand(*row) for row in self.rows()))


class ForecastArchive:
    """Archive of issued forecasts of one series, any number of models."""

    def __init__(self, series: Series, forecasts_max: int = FORECASTS_MAX) -> None:
        self.series = series
        self._max = forecasts_max
        self._issued: dict[str, list[_CompactForecast]] = {}

    def __len__(self) -> int:
        return sum(len(kept) for kept in self._issued.values())

    @property
    def models(self) -> tuple[str, ...]:
        """Models of which something is kept."""
        return tuple(self._issued)

    def add(self, forecast: CarbonForecast) -> bool:
        """Keep a forecast; one of the same model and time of issue is kept only once, as it was first issued.

        Raises:
            errors.SeriesMismatch: another zone, method or factors.
        """
        check_series(self.series, forecast.series)
        kept = self._issued.setdefault(forecast.model, [])
        at = bisect.bisect_left(kept, forecast.issued_at_s, key=_issued_at)
        if at < len(kept) and kept[at].header.issued_at_s == forecast.issued_at_s:
            return False
        kept.insert(at, _compact(forecast))
        if len(kept) > self._max:
            del kept[0]
        return True

    def latest(self, model: str, as_of_s: float = math.inf) -> CarbonForecast | None:
        """Newest forecast of a model that was issued by then."""
        kept = self._issued.get(model, [])
        at = bisect.bisect_right(kept, as_of_s, key=_issued_at)
        return kept[at - 1].whole() if at else None

    def scores_incrementally(
        self,
        history: History,
        model: str,
        now_s: float,
        *,
        lead_s: float = STEP_S,
        horizon_s: float = HORIZON_S,
    ) -> Incremental[CarbonScores]:
        """Scores by lead of every band of a model's kept forecasts of which the actual is known.

        With breaks: what becomes known during one is of the next scores.
        """
        check_series(self.series, history.series)
        leads = round(horizon_s / lead_s)
        tally, kept = ScoreSums(leads), tuple(self._issued.get(model, ()))
        actuals = history.integral(begin_s=_begin_s(kept))
        for settled in _scored_batches(kept, actuals):
            at = settled.leads(lead_s)
            wanted = at < leads
            tally.add(settled.lines[:, wanted], settled.actual[wanted], at[wanted])
            yield
        return CarbonScores(
            series=self.series,
            model=model,
            scores=tally.scores(lead_s),
            forecasts=len(kept),
            issued_from_at_s=kept[0].header.issued_at_s if kept else 0.0,
            issued_to_at_s=kept[-1].header.issued_at_s if kept else 0.0,
            observed_at_s=now_s,
        )

    def banded_incrementally(self, forecast: CarbonForecast, history: History) -> Incremental[CarbonForecast]:
        """A provider's points with bands from the errors of its archived forecasts; unchanged while these are too few.

        Its own 50 % line stays as it said it. A lead with too few errors takes the band of the nearest shorter one.
        """
        found: list[Values] = [np.empty(0)]
        places: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
        kept = tuple(self._issued.get(forecast.model, ()))
        for settled in _scored_batches(kept, history.integral(begin_s=_begin_s(kept))):
            found.append(settled.actual - settled.lines[1])
            places.append(settled.leads(STEP_S))
            yield
        errors, at = np.concatenate(found), np.concatenate(places)
        known = ~np.isnan(errors)
        last: tuple[float, float] | None = None
        by_lead: dict[int, tuple[float, float] | None] = {}
        for lead in range(int(at.max(initial=-1)) + 1):
            mine = errors[known & (at == lead)]
            if len(mine) >= ERRORS_MIN:
                low, high = np.quantile(mine, [LEVELS[0], LEVELS[-1]])
                last = (min(0.0, float(low)), max(0.0, float(high)))
            by_lead[lead] = last
            if lead % LEADS_BETWEEN_BREAKS == 0:
                yield
        made = []
        for band in forecast.bands:
            width = by_lead.get(lead_of(band.starts_at_s - forecast.issued_at_s), last)
            if width is None:
                return forecast
            middle = band.p50_g_per_kwh
            made.append(
                dataclasses.replace(band, p10_g_per_kwh=max(0.0, middle + width[0]), p90_g_per_kwh=middle + width[1])
            )
        return dataclasses.replace(forecast, bands=tuple(made))

    def rows(self, history: History) -> Iterator[dict[str, Any]]:
        """Rows for export, one a band, oldest issue first; `actual_g_per_kwh` None while unknown."""
        series, actuals = self.series, history.integral()
        for model, issued in list(self._issued.items()):
            for kept in tuple(issued):
                known = actuals.means(*kept.times).tolist()
                for (start, end, low, middle, high), actual in zip(kept.rows(), known, strict=True):
                    yield {
                        "zone": series.zone,
                        "method": series.method.name.lower(),
                        "factors": series.factors.name.lower(),
                        "model": model,
                        "issued_at_s": kept.header.issued_at_s,
                        "starts_at_s": start,
                        "ends_at_s": end,
                        "p10_g_per_kwh": low,
                        "p50_g_per_kwh": middle,
                        "p90_g_per_kwh": high,
                        "actual_g_per_kwh": None if math.isnan(actual) else actual,
                    }


@dataclasses.dataclass(frozen=True, slots=True)
class _ScoredBatch:
    """All bands of some forecasts in one go."""

    ahead_s: Values
    lines: Values
    actual: Values

    def leads(self, lead_s: float) -> NDArray[np.int64]:
        """0 = the first."""
        found: NDArray[np.int64] = np.maximum(0, np.ceil(self.ahead_s / lead_s - SLACK_LEADS) - 1).astype(np.int64)
        return found


def lead_of(ahead_s: float) -> int:
    """Lead (0 = the first) of a band that starts so long after its issue."""
    return max(0, math.ceil(ahead_s / STEP_S - SLACK_LEADS) - 1)


def _scored_batches(kept: Sequence[_CompactForecast], actuals: Integral) -> Iterator[_ScoredBatch]:
    """A few forecasts at a time."""
    for i in range(0, len(kept), FORECASTS_BETWEEN_BREAKS):
        some = kept[i : i + FORECASTS_BETWEEN_BREAKS]
        starts, ends = np.concatenate([one.times for one in some], axis=1)
        issued = np.repeat([one.header.issued_at_s for one in some], [one.lines.shape[1] for one in some])
        lines = np.concatenate([one.lines for one in some], axis=1)
        lines[:: len(LEVELS) - 1, lines[0] == lines[-1]] = np.nan  # three equal lines are a point, not a band
        yield _ScoredBatch(starts - issued, lines, actuals.means(starts, ends))


def _compact(forecast: CarbonForecast) -> _CompactForecast:
    bands = [(b.starts_at_s, b.ends_at_s, b.p10_g_per_kwh, b.p50_g_per_kwh, b.p90_g_per_kwh) for b in forecast.bands]
    rows = np.array(bands, dtype=np.float64).reshape(-1, 5).T
    spans, lines = rows[:2].copy(), rows[2:].copy()
    header = dataclasses.replace(forecast, bands=())
    if bands and np.array_equal(spans, _even(bands[0][0], bands[0][1] - bands[0][0], len(bands))):
        return _CompactForecast(header, (bands[0][0], bands[0][1] - bands[0][0]), None, lines)
    return _CompactForecast(header, None, spans, lines)


def _even(start_s: float, step_s: float, count: int) -> Values:
    edges = start_s + step_s * np.arange(count + 1, dtype=np.float64)
    return np.stack([edges[:-1], edges[1:]])


def _begin_s(kept: Sequence[_CompactForecast]) -> float:
    """Nothing that these forecasts speak of begins before."""
    return min((float(one.times[0, 0]) for one in kept if one.lines.shape[1]), default=math.inf)


def _issued_at(kept: _CompactForecast) -> float:
    return kept.header.issued_at_s


def line_of(forecast: CarbonForecast) -> str:
    """Line of JSON for a forecast, without a line feed."""
    edges = [b.starts_at_s for b in forecast.bands] + [b.ends_at_s for b in forecast.bands[-1:]]
    document: dict[str, Any] = {
        "format": FORMAT,
        "model": forecast.model,
        "issued_at_s": forecast.issued_at_s,
        **_times(edges, forecast),
        **{name: [round(getattr(b, name), DECIMALS) for b in forecast.bands] for name in LINES},
    }
    if forecast.fallback_reason:
        document["fallback_reason"] = forecast.fallback_reason
    if forecast.provenance is not None:
        origin = forecast.provenance
        document["provenance"] = [origin.basis.name, origin.source, origin.version, origin.licence, origin.as_of_s]
    return json.dumps(document, separators=(",", ":"), allow_nan=False)


def forecast_of_line(line: str, series: Series) -> CarbonForecast | None:
    """Forecast of a line; None: not a line of ours (torn by a crash, or of a later format)."""
    try:
        document = json.loads(line)
        if document["format"] != FORMAT:
            return None
        lows, middles, highs = (document[name] for name in LINES)
        spans = _spans(document, len(middles))
        bands = tuple(
            CarbonBand(start, end, float(low), float(middle), float(high))
            for (start, end), low, middle, high in zip(spans, lows, middles, highs, strict=True)
        )
        numbers = (n for b in bands for n in (b.starts_at_s, b.ends_at_s, b.p10_g_per_kwh, b.p50_g_per_kwh))
        if not all(math.isfinite(number) for number in numbers):
            return None
        return CarbonForecast(
            series=series,
            model=str(document["model"]),
            issued_at_s=float(document["issued_at_s"]),
            bands=bands,
            provenance=_provenance(document.get("provenance")),
            fallback_reason=str(document.get("fallback_reason", "")),
        )
    except (ArithmeticError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _times(edges: list[float], forecast: CarbonForecast) -> dict[str, Any]:
    """Where they are equal, a start and a step say all; a provider's may not be."""
    if len(edges) > 1:
        step_s = edges[1] - edges[0]
        even = np.array(edges[0]) + step_s * np.arange(len(edges))
        whole = all(abs(b.ends_at_s - after) <= SLACK_S for b, after in zip(forecast.bands, edges[1:], strict=True))
        if whole and float(np.abs(even - np.array(edges)).max()) <= SLACK_S:
            return {"starts_at_s": edges[0], "step_s": step_s}
    return {"spans_s": [[b.starts_at_s, b.ends_at_s] for b in forecast.bands]}


def _spans(document: dict[str, Any], count: int) -> list[tuple[float, float]]:
    if "spans_s" in document:
        return [(float(start), float(end)) for start, end in document["spans_s"]]
    start_s, step_s = float(document["starts_at_s"]), float(document["step_s"])
    return [(start_s + i * step_s, start_s + (i + 1) * step_s) for i in range(count)]


def _provenance(document: Any) -> Provenance | None:
    if document is None:
        return None
    basis, source, version, licence, as_of_s = document
    return Provenance(Basis[basis], str(source), str(version), str(licence), float(as_of_s))
