"""Jobs of an overview, from the plan in Redis: their queue by deadline, planned hours over the carbon forecast, and
grams against running at once and evenly. Pure; for `status`, `report`, `jobs show` and the live page.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from trefoil.core.units import HOUR_S

NOTHING: Final = 0.005  # of the grams: what is saved rounds to 0 %
RULES: Final[Mapping[str, str]] = {"at_once_grams": "run at once", "evenly_grams": "run evenly"}


def planned_queue(plan: Mapping[str, Any] | None, now_s: float) -> list[Mapping[str, Any]]:
    """Planned jobs, the next deadline first; none where there is no plan, or it has ended."""
    if plan is None or now_s >= plan["until_s"]:
        return []
    return sorted(plan["jobs"], key=lambda job: (job["complete_by_s"], job["job_id"]))


def hours_ahead(
    jobs: Sequence[Mapping[str, Any]], forecasts: Sequence[Mapping[str, Any]] = ()
) -> list[dict[str, float]]:
    """Hours from the first to the last that is planned: items and grams of all jobs, and carbon intensity. Hours
    without items have that of the forecast, where one zone is known."""
    hours: dict[float, dict[str, float]] = {}
    for one in (hour for job in jobs for hour in job["hours"]):
        at_s = one["starts_at_s"] // HOUR_S * HOUR_S
        hour = hours.setdefault(at_s, {"starts_at_s": at_s, "items": 0.0, "grams": 0.0, "p50_g_per_kwh": 0.0})
        hour["items"] += one["items"]
        hour["grams"] += one["grams"]
        hour["p50_g_per_kwh"] = one["p50_g_per_kwh"]
    bands = forecasts[0]["bands"] if len(forecasts) == 1 else ()
    first_s, last_s = min(hours, default=0.0), max(hours, default=0.0)
    for at_s in (first_s + n * HOUR_S for n in range(round((last_s - first_s) / HOUR_S))):
        inside = [band for band in bands if band["starts_at_s"] <= at_s + HOUR_S / 2 < band["ends_at_s"]]
        if at_s not in hours and inside:
            carbon = inside[0]["p50_g_per_kwh"]
            hours[at_s] = {"starts_at_s": at_s, "items": 0.0, "grams": 0.0, "p50_g_per_kwh": carbon}
    return [hours[at_s] for at_s in sorted(hours)]


def grams_by_rule(jobs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Grams of jobs by plan, at once and evenly."""
    return {name: sum(job[name] for job in jobs) for name in ("grams", *RULES)}


def saved_text(grams: float, others: Mapping[str, float]) -> str:
    """What a plan of so many grams saves against simple rules; "" where these are not known."""
    against = [
        f"{_saved(others[name] - grams, others[name])} against {rule}"
        for name, rule in RULES.items()
        if others[name] > 0
    ]
    return f"saves {', '.join(against)}" if against else ""


def _saved(grams: float, of: float) -> str:
    """Grams that are saved of so many; in words where they are none to speak of."""
    return "about nothing" if abs(grams) < NOTHING * of else f"{grams:.3g} g ({grams / of:.0%})"


def name_of(job: Mapping[str, Any]) -> str:
    """Name of a planned job, as its client gave it."""
    return str(job["job_id"]).partition("/")[2]
