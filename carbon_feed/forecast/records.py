"""An issued forecast as one line of JSON, and back: what a process that starts again goes on with.

Times in seconds, intensities in g/kWh to a tenth, which is ten times finer than any provider says them.
"""

import json
import math
from typing import Any, Final

import numpy as np

from trefoil.core.carbon import CarbonBand, CarbonForecast, Series
from trefoil.core.common import Basis, Provenance

FORMAT: Final = 1
DECIMALS: Final = 1
SLACK_S: Final = 1e-3
LINES: Final = ("p10_g_per_kwh", "p50_g_per_kwh", "p90_g_per_kwh")


def line_of(forecast: CarbonForecast) -> str:
    """Without a line feed."""
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
        said = forecast.provenance
        document["provenance"] = [said.basis.name, said.source, said.version, said.licence, said.as_of_s]
    return json.dumps(document, separators=(",", ":"), allow_nan=False)


def forecast_of_line(line: str, series: Series) -> CarbonForecast | None:
    """None: not a line of ours (torn by a crash, or of a later format)."""
    try:
        said = json.loads(line)
        if said["format"] != FORMAT:
            return None
        lows, middles, highs = (said[name] for name in LINES)
        spans = _spans(said, len(middles))
        bands = tuple(
            CarbonBand(start, end, float(low), float(middle), float(high))
            for (start, end), low, middle, high in zip(spans, lows, middles, highs, strict=True)
        )
        numbers = (n for b in bands for n in (b.starts_at_s, b.ends_at_s, b.p10_g_per_kwh, b.p50_g_per_kwh))
        if not all(math.isfinite(number) for number in numbers):
            return None
        return CarbonForecast(
            series=series,
            model=str(said["model"]),
            issued_at_s=float(said["issued_at_s"]),
            bands=bands,
            provenance=_provenance(said.get("provenance")),
            fallback_reason=str(said.get("fallback_reason", "")),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
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


def _spans(said: dict[str, Any], count: int) -> list[tuple[float, float]]:
    if "spans_s" in said:
        return [(float(start), float(end)) for start, end in said["spans_s"]]
    start_s, step_s = float(said["starts_at_s"]), float(said["step_s"])
    return [(start_s + i * step_s, start_s + (i + 1) * step_s) for i in range(count)]


def _provenance(said: Any) -> Provenance | None:
    if said is None:
        return None
    basis, source, version, licence, as_of_s = said
    return Provenance(Basis[basis], str(source), str(version), str(licence), float(as_of_s))
