"""Picture of a system for the live page: what its templates show, from an overview. Pure."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from trefoil.core.fleet import DeviceState, DeviceStatus, SliceState, SliceStatus
from trefoil.core.objective import Objective
from trefoil.core.units import format_duration
from trefoil.overview.jobs import grams_by_rule, hours_ahead, name_of, planned_queue, saved_text
from trefoil.overview.known import saving_unknown
from trefoil.overview.served import TOKEN_OBJECTIVES, Promises, promises
from trefoil.overview.troubles import known_trouble_lines, nodes_of
from trefoil.runtime import codec

DEVICES_SHOWN: Final = 64
JOBS_SHOWN: Final = 10
COLOURS: Final = 6
PARTS: Final = 8
"""Steps of the width of a slice's box."""


def picture(found: Mapping[str, Any], now_s: float) -> dict[str, Any]:
    """Values of the page's templates, by name."""
    nodes = nodes_of(found)
    devices = [device for node in nodes for device in node.devices]
    colours = _colours(devices)
    revision = found["revision"] or {"epoch": 0, "number": 0}
    return {
        "cluster": found["cluster"],
        "at": _clock_time(now_s),
        "simulated": any(node.simulated for node in nodes),
        "troubles": known_trouble_lines(found),
        "zones": _zones(found, now_s),
        "families": _families(found),
        "window_s": round(found["served"]["window_s"]),
        "saving": _saving(found["saving"]),
        "devices": [_device(device, colours) for device in devices[:DEVICES_SHOWN]],
        "devices_hidden": max(0, len(devices) - DEVICES_SHOWN),
        "jobs": _jobs(found, now_s),
        "plan": f"{revision['epoch']}.{revision['number']}",
        "policy": found["policy"],
        "mode": ", ".join([found["mode"], *(word for word in ("frozen", "pinned", "exploring") if found[word])]),
        "decisions": [_decision(one) for one in reversed(found["decisions"])],
    }


def _zones(found: Mapping[str, Any], now_s: float) -> list[dict[str, Any]]:
    """Carbon of each zone: now, and the median forecast of the intervals to come, as bars of 0 to 100."""
    forecasts = {one["series"]["zone"]: one["bands"] for one in found["carbon_forecast"]}
    zones = []
    for reading in found["carbon"]:
        zone, now = reading["series"]["zone"], reading["intensity_g_per_kwh"]
        bands = forecasts.get(zone, ())
        ahead = [band["p50_g_per_kwh"] for band in bands]
        highest = max([now, *ahead]) or 1.0
        zones.append(
            {
                "zone": zone,
                "now": f"{now:.0f}",
                "source": "simulated" if reading["simulated"] else reading["provider"],
                "bars": [round(100 * value / highest, 1) for value in (now, *ahead)],
                "low": f"{min(ahead, default=now):.0f}",
                "high": f"{max(ahead, default=now):.0f}",
                "span": format_duration(bands[-1]["ends_at_s"] - now_s) if bands else "",
            }
        )
    return zones


def _jobs(found: Mapping[str, Any], now_s: float) -> dict[str, Any] | None:
    """Queue of planned jobs, and their hours over the carbon forecast, as bars of 0 to 100; None: no job is planned."""
    queue = planned_queue(found["jobs"], now_s)
    if not queue:
        return None
    hours, sums = hours_ahead(queue, found["carbon_forecast"]), grams_by_rule(queue)
    highest = max((one["p50_g_per_kwh"] for one in hours), default=0.0) or 1.0
    return {
        "count": len(queue),
        "queue": [
            {
                "name": name_of(one), "by": f"{datetime.fromtimestamp(one['complete_by_s'], UTC):%m-%d %H:%M}",
                "items": f"{one['items_left']:,}", "prospect": one["reason"], "late": not one["in_time"],
            }
            for one in queue[:JOBS_SHOWN]
        ],
        "hidden": max(0, len(queue) - JOBS_SHOWN),
        "hours": [(round(100 * one["p50_g_per_kwh"] / highest, 1), one["items"] > 0) for one in hours],
        "grams": f"{sums['grams']:.3g}",
        "saves": saved_text(sums["grams"], sums),
    }  # fmt: skip


def _families(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    objectives = {one["family"]: codec.from_plain(Objective, one) for one in found["objectives"]}
    rows = [row for row in found["served"]["by_class"] if not row["slo_class"]]
    return [_family(row, promises(row, objectives.get(row["family"]))) for row in rows]


def _family(row: Mapping[str, Any], promised: Promises) -> dict[str, Any]:
    return {
        "name": row["family"],
        "rate": _shown(row["rate_per_s"], "{:.1f}"),
        "p95": _shown(row["latency_ms_p95"], "{:.0f}"),
        "slo": f"{row['slo_ms']:g}",
        "in_slo": _shown(row["slo_attainment"], "{:.1%}"),
        "asked": f"{promised.asked:.1%}" if promised.asked else "",
        "late": promised.late,
        "accuracy": _shown(row["accuracy"], "{:.4f}"),
        "floor": f"{promised.floor:.4f}" if promised.floor else "",
        "inaccurate": promised.inaccurate,
        "tokens": [_token_time(name, row["tokens"], promised) for name in TOKEN_OBJECTIVES] if row["tokens"] else [],
    }


def _token_time(name: str, tokens: Mapping[str, Any], promised: Promises) -> dict[str, Any]:
    limit_ms = tokens[f"{name}_ms"]
    return {
        "name": name.upper(),
        "p95": _shown(tokens[f"{name}_ms_p95"], "{:.1f}"),
        "slo": f"{limit_ms:g}" if limit_ms else "",
        "in_slo": _shown(tokens[f"{name}_attainment"], "{:.1%}"),
        "asked": f"{tokens[f'{name}_quantile']:.1%}",
        "late": name in promised.slow,
    }


def _saving(saving: Mapping[str, Any]) -> dict[str, Any]:
    pct = saving["saving_pct"]
    return {
        "grams": _shown(saving["grams"], "{:,.2f}"),
        "base": "" if pct is None else f"{saving['base_grams']:,.2f}",
        "pct": "" if pct is None else f"{abs(pct):.1f} % {'less' if pct >= 0 else 'more'}",
        "worse": pct is not None and pct < 0,
        "why": saving_unknown(saving) if pct is None else "",
        "since": _clock_time(saving["since_s"]),
        "requests": f"{saving['requests']:,}",
    }


def _device(device: DeviceStatus, colours: Mapping[str, int]) -> dict[str, Any]:
    asleep = device.state in (DeviceState.ASLEEP, DeviceState.FALLING_ASLEEP)
    standing = [one for one in device.slices if one.key.slice_type and one.state is not SliceState.GONE]
    whole = device.type.largest.memory_slices if device.type.slice_types else 0
    boxes = [_slice(one, whole, colours) for one in sorted(standing, key=lambda one: one.key.start)]
    return {
        "name": device.device,
        "type": device.type.name,
        "state": device.state.name.lower().replace("_", " "),
        "asleep": asleep,
        "lost": not device.usable,
        "clock": f"{device.clock_mhz} MHz" if device.clock_mhz else "",
        "power": f"{device.power_w:.0f} W",
        "slices": boxes,
        "free": max(0, PARTS - sum(box["parts"] for box in boxes)),
    }


def _slice(one: SliceStatus, whole: int, colours: Mapping[str, int]) -> dict[str, Any]:
    variants = "+".join(hosted.variant for hosted in one.hosted) or "empty"
    serves = one.state in (SliceState.READY, SliceState.SWAPPING)
    parts = round(PARTS * one.key.size / whole) if whole else PARTS
    return {
        "type": one.key.slice_type,
        "variants": variants,
        "state": "" if serves else one.state.name.lower(),
        "parts": min(PARTS, max(1, parts)),
        "colour": colours.get(variants, 0),
    }


def _colours(devices: Iterable[DeviceStatus]) -> dict[str, int]:
    """Number of a colour for each variant, in the order of their names."""
    names = {"+".join(hosted.variant for hosted in one.hosted) for device in devices for one in device.slices}
    return {name: number % COLOURS for number, name in enumerate(sorted(names - {""}))}


def _decision(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "at": _clock_time(row["at_s"]),
        "trigger": row["trigger"],
        "why": row["why"].partition(";")[0].removeprefix(f"{row['trigger']}: "),
        "plan": row["plan"],
        "came": row["came_of_it"],
    }


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _clock_time(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%H:%M:%S")
