"""Document of a report: what was drawn and emitted for whom, how well that is known, and the SCI, from the books.

Books are sums by family and hour (docs/monitoring.md). Meters know no tenants: each hour's energy of a family is split
among the tenants by their receipts, or by answers in an hour without receipts. What is not known is None, with a reason
in `unknown`. Parts always sum to their whole. What no part accounts for is a separate part.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from trefoil.core.accounting import named_sums, tenant_receipts, tenant_shares
from trefoil.overview.jobs import RULES, grams_by_rule, hours_ahead, name_of, planned_queue
from trefoil.runtime import codec

Sums = Mapping[str, float]
KWH_J: Final = 3.6e6
QUALITIES: Final = ("measured", "attributed", "estimated")
IDLE, UNSPLIT, NO_TENANT = "(nothing computed)", "(not split)", "(no tenant)"
ROUNDING: Final = 1e-9  # of a whole, by which the sum of its parts may differ

Part = dict[str, Any]


def report_document(report: Any) -> dict[str, Any]:
    """Document of a GetReportResponse: plain JSON values."""
    hours: dict[str, list[Sums]] = {}
    for hour in report.hours:
        hours.setdefault(hour.family, []).append(dict(hour.sums))
    families = {family: _added(sums) for family, sums in hours.items()}
    whole = _added(families.values())
    for name in ("unmeasured_s", "gap_s"):  # of devices, and booked to each family
        whole[name] = max((sums.get(name, 0.0) for sums in families.values()), default=0.0)
    about = report.embodied_lifetime_years, list(report.embodied_unknown)
    return {
        "since": _utc(report.since.seconds),
        "until": _utc(report.until.seconds),
        "hours": len({hour.starts_at.seconds for hour in report.hours}),
        "simulated": report.simulated,
        "total": _costs(whole) | {"quality": _quality(whole), "sci": _sci(whole, *about)},
        "families": [
            {"family": family}
            | _costs(sums)
            | _per_token(sums)
            | {"quality": _quality(sums), "sci": _sci(sums, *about)}
            for family, sums in families.items()
        ],
        "variants": [part for family, sums in families.items() for part in _variants(family, sums)],
        "tenants": [part for family, each in hours.items() for part in _tenants(family, each)],
    }


def jobs_document(fleet: Any, now_s: float) -> dict[str, Any]:
    """Planned jobs of a GetFleetResponse by their deadline, and their hours over the carbon forecast, under `jobs`;
    empty: none is planned."""
    plan = codec.to_plain(codec.from_proto(fleet.jobs)) if fleet.HasField("jobs") else None
    queue = planned_queue(plan, now_s)
    if not queue:
        return {}
    forecasts = [codec.to_plain(codec.from_proto(one)) for one in fleet.carbon_forecasts]
    names = ("items_left", "in_time", "reason", "grams", *RULES)
    jobs = [
        {"job": name_of(one), "complete_by": _utc(one["complete_by_s"])} | {n: one[n] for n in names} for one in queue
    ]
    hours = [{"starts_at": _utc(one.pop("starts_at_s"))} | one for one in hours_ahead(queue, forecasts)]
    return {"jobs": {"queue": jobs, "hours": hours, **grams_by_rule(queue)}}


def records(document: Mapping[str, Any]) -> list[Part]:
    """Rows of a table: the total, each family, variant and tenant."""
    columns: Part = dict.fromkeys(
        (
            "scope",
            "family",
            "variant",
            "tenant",
            "requests",
            "unanswered",
            "tokens",
            "prompt_tokens",
            "ttft_attainment",
            "tpot_attainment",
            "joules",
            "unanswered_joules",
            "grams",
            *(("job", "complete_by", "items_left", "in_time", *RULES) if "jobs" in document else ()),
            "basis",
            "unknown",
        ),
        "",
    )
    basis = {one["family"]: _basis(one["quality"]["simulated"]) for one in document["families"]}
    basis[""] = _basis(document["total"]["quality"]["simulated"])
    rows = [{"scope": "total"} | document["total"]]
    for scope in ("families", "variants", "tenants"):
        rows += [{"scope": {"families": "family"}.get(scope, scope[:-1])} | part for part in document[scope]]
    rows = [row | {"basis": basis[row.get("family", "")]} for row in rows]
    rows += [{"scope": "job", "basis": "planned"} | one for one in document.get("jobs", {}).get("queue", ())]
    return [columns | {name: row[name] for name in columns if name in row} for row in rows]


def _basis(simulated: float | None) -> str:
    """Which devices the joules are of, by the share that simulated ones drew; None: nothing was metered."""
    if simulated is None:
        return ""
    return "measured" if simulated == 0 else "simulated" if simulated > 1 - ROUNDING else "measured, simulated"


def _added(each: Iterable[Sums]) -> dict[str, float]:
    found: dict[str, float] = {}
    for sums in each:
        for name, amount in sums.items():
            found[name] = found.get(name, 0.0) + amount
    return found


def _costs(sums: Sums) -> Part:
    """Joules and grams of the time that was metered, and per answer where all of it was."""
    requests, joules, co2 = round(sums.get("requests", 0.0)), sums.get("joules"), sums.get("grams")
    unmetered_s = sums.get("unmeasured_s", 0.0) + sums.get("gap_s", 0.0)
    why = "nothing was metered" if joules is None else ""
    per = why or ("nothing was answered" if not requests else "")
    per = per or (f"{unmetered_s:,.0f} s of devices were not metered" if unmetered_s else "")
    return {
        "requests": requests,
        "unanswered": round(sums.get("unanswered", 0.0)),
        "joules": joules,
        "unanswered_joules": _unanswered_j(sums),
        "grams": co2,
        "joules_per_request": None if per or joules is None else joules / requests,
        "grams_per_request": None if per or co2 is None else co2 / requests,
        "unknown": why or per,
    }


def _unanswered_j(sums: Sums) -> float | None:
    """Joules of what was executed without an answer: its part of the receipts, of the joules; idle power included."""
    joules, receipts = sums.get("joules"), sum(tenant_receipts(sums).values())
    if joules is None or not receipts:
        return 0.0 if joules is not None and not sums.get("unanswered") else None
    return joules * sums.get("unanswered_joules", 0.0) / receipts


def _per_token(sums: Sums) -> Part:
    """Tokens, where there are any, and joules and grams of each, where all of the time was metered."""
    tokens, joules, co2 = sums.get("tokens", 0.0), sums.get("joules"), sums.get("grams")
    if not tokens:
        return {}
    known = not sums.get("unmeasured_s", 0.0) + sums.get("gap_s", 0.0)
    return {
        "tokens": round(tokens),
        "joules_per_token": joules / tokens if known and joules is not None else None,
        "grams_per_token": co2 / tokens if known and co2 is not None else None,
        "prompt_tokens": round(sums["tokens_in"]) if "tokens_in" in sums else None,
        "ttft_attainment": _attained(sums, "ttft"),
        "tpot_attainment": _attained(sums, "tpot"),
    }


def _attained(sums: Sums, objective: str) -> float | None:
    """Share of streams that met an objective of their tokens; None: none of them had one."""
    asked = sums.get(f"{objective}_asked", 0.0)
    return sums.get(f"{objective}_within", 0.0) / asked if asked else None


def _variants(family: str, sums: Sums) -> list[Part]:
    names = {name.partition(":")[2] for name in sums if name.startswith(("variant_joules:", "requests:"))}
    found = []
    for variant in sorted(names):
        joules, co2 = sums.get(f"variant_joules:{variant}"), sums.get(f"variant_grams:{variant}")
        part = _part(family, variant or IDLE, sums.get(f"requests:{variant}", 0.0), joules, co2)
        drawn = {} if joules is None or co2 is None else {"joules": joules, "grams": co2}
        found.append(part | _per_token({"tokens": sums.get(f"tokens:{variant}", 0.0)} | drawn))
    return [{"family": family, "variant": one.pop("name")} | one for one in _with_rest(family, found, sums)]


def _tenants(family: str, hours: Sequence[Sums]) -> list[Part]:
    found: dict[str, list[float]] = {}
    for sums in hours:
        requests, shares = named_sums(sums, "tenant_requests:"), tenant_shares(sums)
        unanswered, lost = named_sums(sums, "tenant_unanswered:"), named_sums(sums, "tenant_unanswered_joules:")
        receipts_j = sum(tenant_receipts(sums).values())
        for name in {*requests, *shares, *unanswered}:
            part = found.setdefault(name or NO_TENANT, [0.0] * 5)
            part[0] += requests.get(name, 0.0)
            part[1] += sums.get("joules", 0.0) * shares.get(name, 0.0)
            part[2] += sums.get("grams", 0.0) * shares.get(name, 0.0)
            part[3] += unanswered.get(name, 0.0)
            part[4] += sums.get("joules", 0.0) * (lost.get(name, 0.0) / receipts_j if receipts_j > 0 else 0.0)
    whole = _added(hours)
    metered = "joules" in whole
    parts = [
        _part(family, name, requests, joules if metered else None, co2 if metered else None)
        | {"unanswered": round(unanswered), "unanswered_joules": lost_j if metered else None}
        for name, (requests, joules, co2, unanswered, lost_j) in sorted(found.items())
    ]
    return [{"family": family, "tenant": one.pop("name")} | one for one in _with_rest(family, parts, whole)]


def _part(family: str, name: str, requests: float, joules: float | None, co2: float | None) -> Part:
    why = f"no sample says what {name} of {family} drew" if joules is None else ""
    return {"name": name, "requests": round(requests), "joules": joules, "grams": co2, "unknown": why}


def _with_rest(family: str, parts: list[Part], sums: Sums) -> list[Part]:
    """Parts, and what of the whole none of them has: booked by an earlier version."""
    names = ("requests", "joules", "grams")
    rest = {name: sums[name] - sum(part[name] or 0.0 for part in parts) for name in names if name in sums}
    if all(abs(left) <= ROUNDING * max(1.0, sums[name]) for name, left in rest.items()):
        return parts
    return [*parts, _part(family, UNSPLIT, rest.get("requests", 0.0), rest.get("joules"), rest.get("grams"))]


def _quality(sums: Sums) -> dict[str, Any]:
    """How well joules and grams are known: shares of what was metered, seconds of unmetered devices."""
    joules, co2 = sums.get("joules", 0.0), sums.get("grams", 0.0)

    def shares(prefix: str, whole: float) -> dict[str, float]:
        return {name: amount / whole for name, amount in sorted(named_sums(sums, prefix).items())} if whole else {}

    age_j_s = sums.get("carbon_age_joule_s")
    return {
        "energy": dict.fromkeys(QUALITIES, 0.0) | shares("quality_joules:", joules) if joules else None,
        "meters": shares("meter_joules:", joules),
        "simulated": sums.get("simulated_joules", 0.0) / joules if joules else None,
        "carbon": shares("grams:", co2),
        "carbon_rungs": shares("rung_grams:", co2),
        "carbon_age_s": age_j_s / joules if age_j_s is not None and joules else None,
        "unmetered_s": sums.get("unmeasured_s", 0.0),
        "gap_s": sums.get("gap_s", 0.0),
        "unknown": "" if joules else "nothing was metered",
    }


def _sci(sums: Sums, lifetime_years: float, embodied_unknown: Sequence[str]) -> dict[str, Any]:
    """SCI = (E x I + M) per R (ISO/IEC 21031), each term with its source."""
    costs, energy_j, co2 = _costs(sums), sums.get("facility_joules"), sums.get("grams")
    requests = costs["requests"]
    booked = energy_j is not None and energy_j >= sums.get("joules", 0.0) * (1 - ROUNDING)
    energy_kwh = energy_j / KWH_J if booked and energy_j is not None else None
    intensity = co2 / energy_kwh if energy_kwh and co2 is not None else None
    embodied, why_m = sums.get("embodied_grams", 0.0), ""
    if sums.get("embodied_unknown_s", 0.0):
        named = ", ".join(embodied_unknown) or "a device that is gone"
        why_m = f"emissions of making {named} are unknown: embodied_g of a device type"
    elif "embodied_grams" not in sums:
        why_m = "no device was metered"
    why = costs["unknown"] or ("" if booked else "a part was booked by a version that kept no E")
    operational = co2 / requests if not why and co2 is not None else None
    whole = None if operational is None or why_m else operational + embodied / requests
    made = f"embodied_g of each device type x metered time / {lifetime_years:g} years (embodied_lifetime_years)"
    answered = "" if requests else "nothing was answered"
    return {
        "E": _term(energy_kwh, "kWh", "energy meters of the devices x PUE", why),
        "I": _term(
            intensity, "g/kWh", "carbon readings of the time of each sample, weighted by E", why or "nothing was drawn"
        ),
        "M": _term(None if why_m else embodied, "g", made, why_m),
        "R": _term(requests or None, "requests", "answers that dispatchers report", answered),
        "operational": _term(operational, "g/request", "E x I / R", why),
        "sci": _term(whole, "g/request", "(E x I + M) / R", why or why_m),
    }


def _term(value: float | None, unit: str, source: str, why: str) -> dict[str, Any]:
    return {"value": value, "unit": unit, "source": source, "unknown": why if value is None else ""}


def _utc(at_s: float) -> str:
    return datetime.fromtimestamp(int(at_s), UTC).isoformat().replace("+00:00", "Z")
