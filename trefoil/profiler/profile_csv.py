"""From measured windows to profile.csv: rows, provenance, and what is said when no meter was there."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from trefoil.core.catalog import Family
from trefoil.core.device_types import device_share, device_type, profile_type, reported_type
from trefoil.core.errors import CatalogError, SettingError
from trefoil.core.power import clock_law, clock_under, dynamic_w, fitted_sensitivity, sensitivity_at
from trefoil.core.units import MS_PER_S
from trefoil.runtime.repository import COLUMNS, HEADER_KEYS, LIMIT, SENSITIVITY, load_family

QUANTILES: Final = (0.5, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """Measurement of an operating point under one load: batches per second, latency [ms] (quantiles, then the mean),
    power (None: no meter)."""

    offered_per_s: float
    answered_per_s: float
    failed: int
    latency_ms: tuple[float, float, float, float] | None
    power_w: float | None


@dataclass(frozen=True, slots=True)
class ProfilePoint:
    """Measurement of one operating point. Energy is None without a meter; `simulated`: no hardware counted it.

    `clock_mhz` below 0: the power limit of the board [-W].
    """

    device_type: str
    slice_type: str
    variant: str
    batch: int
    clock_mhz: int
    latency_ms: tuple[float, float, float]
    throughput_per_s: float
    energy_active_j: float | None
    memory_mib: int
    samples: int
    simulated: bool = False
    rates: tuple[LoadPoint, ...] = field(default=())
    instances: int = 1
    clock_sensitivity: float | None = None
    """Part of the time that follows the clock, where a law states it; else it is fitted to points at two clocks."""
    ttft_ms_p50: float | None = None  # of streams: until the first token
    tpot_ms_p50: float | None = None  # ... and between tokens


@dataclass(frozen=True, slots=True)
class ProfileProvenance:
    """Provenance of a profile, for the header of its file. `source`, `basis`: of what was not, or not all, measured."""

    machine: str
    date: str
    commit: str
    simulated: bool
    source: str = ""
    basis: str = ""


def estimated_j(point: ProfilePoint) -> float:
    """Active energy of a batch [J] if the slice draws its whole dynamic share meanwhile (core/power, density 1)."""
    device = device_type(point.device_type)
    watts, clock_mhz = device_share(device, point.slice_type) * dynamic_w(device), point.clock_mhz
    if clock_mhz < 0:
        clock_mhz = clock_under(device, -clock_mhz, watts)
    return watts * clock_law(device, clock_mhz) * point.latency_ms[0] / MS_PER_S


def raise_to_monotone(points: Sequence[ProfilePoint]) -> tuple[list[ProfilePoint], int]:
    """Points whose time and energy never fall with a larger batch (noise that says so is raised), and how many were."""
    raised, found = 0, []
    last: dict[tuple[str, str, str, int], ProfilePoint] = {}
    for point in sorted(points, key=lambda p: (p.device_type, p.slice_type, p.variant, p.clock_mhz, p.batch)):
        key = (point.device_type, point.slice_type, point.variant, point.clock_mhz)
        before, kept = last.get(key), point
        if before is not None:
            p50, p95, p99 = (max(pair) for pair in zip(point.latency_ms, before.latency_ms, strict=True))
            joules = point.energy_active_j
            if joules is not None and before.energy_active_j is not None:
                joules = max(joules, before.energy_active_j)
            kept = replace(point, latency_ms=(p50, p95, p99), energy_active_j=joules)
            raised += kept != point
        last[key] = kept
        found.append(kept)
    return found, raised


def profile_text(points: Sequence[ProfilePoint], provenance: ProfileProvenance, *, estimate_energy: bool) -> str:
    """Text of a profile.csv of these points.

    Raises:
        SettingError: no meter counted joules and none may be estimated.
    """
    rows, raised = raise_to_monotone(points)
    missing = [p for p in rows if p.energy_active_j is None]
    if missing and not estimate_energy:
        raise SettingError(
            f"no joules were counted for {len(missing)} of {len(rows)} operating points", field="energy", value=None,
            remedy="profile through a power agent with a meter, or give --estimate-energy (basis modelled)",
        )  # fmt: skip
    basis = provenance.basis or ("synthetic" if provenance.simulated else "modelled" if missing else "measured")
    source = provenance.source or "trefoil family profile" + (" on simulated slices" if provenance.simulated else "")
    if missing and not provenance.source:
        source += "; latency measured, energy estimated by core/power at density 1: no meter"
    if raised:
        source += f"; {raised} points raised to the next smaller batch"
    values = dict(
        zip(HEADER_KEYS, (basis, source, provenance.machine, provenance.date, provenance.commit), strict=True)
    )
    sensitivities = [_sensitivity(point, rows) for point in rows]
    if any(sensitivities):
        values[SENSITIVITY] = "fitted to times at other clocks, or stated by the law of docs/profiles.md"
    text = io.StringIO()
    text.writelines(f"# {key}: {value}\n" for key, value in values.items())
    writer = csv.writer(text, lineterminator="\n")
    limited = any(point.clock_mhz < 0 for point in rows)
    writer.writerow([*COLUMNS, *([SENSITIVITY] if any(sensitivities) else []), *([LIMIT] if limited else [])])
    for point, sensitivity in zip(rows, sensitivities, strict=True):
        joules = estimated_j(point) if point.energy_active_j is None else point.energy_active_j
        key = [point.device_type, point.slice_type, point.variant, "0", point.batch, max(0, point.clock_mhz), ""]
        latency = [f"{value:.4f}" for value in point.latency_ms]
        power_w = joules / (point.latency_ms[0] / MS_PER_S)
        numbers = [f"{n:.6g}" for n in (point.throughput_per_s, joules, power_w)]
        more = [sensitivity] if any(sensitivities) else []
        if limited:
            more.append(f"{-point.clock_mhz}" if point.clock_mhz < 0 else "")
        writer.writerow([*key, *latency, *numbers, point.memory_mib, *more])
    return text.getvalue()


def _sensitivity(point: ProfilePoint, points: Sequence[ProfilePoint]) -> str:
    """Cell of the clock sensitivity; empty where neither a law nor another clock says it."""
    s = point.clock_sensitivity
    if s is None and point.clock_mhz >= 0:
        key = attrgetter("device_type", "slice_type", "variant", "batch")
        times = [(p.clock_mhz, p.latency_ms[0]) for p in points if key(p) == key(point) and p.clock_mhz >= 0]
        s = fitted_sensitivity(times, point.clock_mhz)
    return "" if s is None else f"{s:.4f}"


def write_profile(path: Path, folder: Path, text: str, variants: Sequence[str] = ()) -> int:
    """Write a profile.csv, of all variants or these, read it back as the system will, and count its rows. A file that
    is refused is not kept.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".draft")
    draft.write_text(text)
    try:
        _, rows = load_family(folder, draft, variants)
    except CatalogError:
        draft.unlink()
        raise
    draft.replace(path)
    return len(rows)


def write_sensitivity(
    path: Path, folder: Path, variant: str, device_type: str, s: Mapping[int, float], source: str
) -> int:
    """Write the clock sensitivity into a profile.csv: of a variant on a device type, by stage (0: the whole), and count
    the rows that have it now. `s` is of the highest clock; rows at others get what the law of core/power makes of it.

    `source`: of what, a last colon, and how it was found. Its line stands for earlier ones of the same.

    Raises:
        CatalogError: no row is of them, or the profile cannot be read.
    """
    load_family(folder, path)
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = [line for line in lines if line.startswith("#")]
    rows = list(csv.DictReader((line for line in lines if not line.startswith("#")), skipinitialspace=True))
    kind = profile_type(device_type)
    own = [
        r for r in rows if (profile_type(r["device_type"]), r["variant"]) == (kind, variant) and int(r["stage"]) in s
    ]
    if not own:
        remedy = f"trefoil family profile {folder.name}"
        raise CatalogError(f"{path} has no row of {variant}", field="device", value=device_type, remedy=remedy)
    clocks_mhz = reported_type(kind).clocks_mhz or [int(row["clock_mhz"]) for row in own]
    for row in own:
        clock_mhz, highest_s = int(row["clock_mhz"]), min(1.0, max(0.0, s[int(row["stage"])]))
        at_s = sensitivity_at(max(clocks_mhz), clock_mhz, highest_s) if clock_mhz else highest_s
        row[SENSITIVITY] = f"{at_s:.4f}"
    others = sum(bool(row.get(SENSITIVITY)) for row in rows) > len(own)
    replaced = f"# {SENSITIVITY}: {source.rpartition(':')[0]}:" if others else f"# {SENSITIVITY}:"
    header = [*(line for line in comments if not line.startswith(replaced)), f"# {SENSITIVITY}: {source}"]
    text = io.StringIO()
    text.writelines(f"{line}\n" for line in header)
    writer = csv.DictWriter(text, list(dict.fromkeys([*rows[0], SENSITIVITY])), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_profile(path, folder, text.getvalue())
    return len(own)


def selected_variants(family: Family, names: Sequence[str]) -> list[str]:
    """Names of the variants to measure; all by default.

    Raises:
        NotFound: naming those that exist.
    """
    return [family.variant(name).name for name in names] or [variant.name for variant in family.variants]


def point_json(point: ProfilePoint) -> dict[str, Any]:
    """JSON values of a point, with its loads."""
    rates = [
        {
            "offered_per_s": r.offered_per_s,
            "answered_per_s": r.answered_per_s,
            "failed": r.failed,
            "latency_ms": r.latency_ms,
            "power_w": r.power_w,
        }
        for r in point.rates
    ]
    return {f.name: getattr(point, f.name) for f in fields(point)} | {"rates": rates}
