"""Totals of the books: energy, grams and requests of each family and hour, and their sums."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from trefoil.core.demand import PROBE_TENANT

RECEIPT_HOURS: Final = 2
REQUESTS_MIN: Final = 200
"""Requests of clients from which on a saving, or receipts against the meter, is shown as a figure."""


def totals_by_family(report: Any) -> dict[str, list[dict[str, float]]]:
    """Totals of each family in its hours, oldest first, of a GetReportResponse."""
    found: dict[str, list[dict[str, float]]] = {}
    for hour in report.hours:
        found.setdefault(hour.family, []).append(dict(hour.sums))
    return found


def own_requests(hour: Mapping[str, float]) -> float:
    """Requests of an hour's totals that clients sent: not the probes of Trefoil itself."""
    return hour.get("requests", 0.0) - hour.get(f"tenant_requests:{PROBE_TENANT}", 0.0)


def receipt_check(totals: Mapping[str, Sequence[Mapping[str, float]]]) -> list[dict[str, Any]]:
    """Energy by family as receipts sum it and as it was metered [J], in the hour under way and the one before.

    `residual`: receipts over metered, less 1; None where clients were answered nothing, or nothing was metered.
    """
    found = []
    for family, hours in totals.items():
        recent = hours[-RECEIPT_HOURS:]
        answered = sum(map(own_requests, recent))
        receipt_j, active_j = (
            sum(hour.get(name, 0.0) for hour in recent) for name in ("receipt_joules", "active_joules")
        )
        residual = receipt_j / active_j - 1 if active_j and answered else None
        one = {"receipt_j": receipt_j, "active_j": active_j, "residual": residual}
        found.append({"family": family, "answered": round(answered), **one})
    return found


def saving_since_start(totals: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """What all families took since the launch, and what modelled BASE would have for the same answers in the same time.

    Only of the time that was metered. `saving_pct` of grams; None where one of the two is not known.
    """
    sums = dict.fromkeys(("requests", "unmeasured_s", "base_unknown_s"), 0.0)
    for hours in totals.values():
        for hour in hours:
            for name, value in hour.items():
                sums[name] = sums.get(name, 0.0) + value
    names = ("joules", "grams", "base_joules", "base_grams")
    modelled = not sums["base_unknown_s"]
    found = {n: sums[n] if n in sums and (modelled or not n.startswith("base")) else None for n in names}
    grams, base = found["grams"], found["base_grams"]
    saving_pct = 100 * (1 - grams / base) if grams is not None and base else None
    counts = {"requests": round(sums["requests"]), "unmeasured_s": sums["unmeasured_s"]}
    return counts | found | {"saving_pct": saving_pct}
