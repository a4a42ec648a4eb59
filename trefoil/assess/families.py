"""Families of the found models: variants, accuracies, SLO, and a profile fitted to the found points.

A family that the repository has keeps its own profile, times factors: found over profiled milliseconds and joules of
the served variant; other variants get the factors' mean. Any other model gets rows by a law. Its time goes with
(SMs x clock of the found slice / of the row's) to the power `ALPHA`. The exponent lies between 0, for a model that
leaves most of a GPU idle, and 1, for a model that fills it. An execution's joules stay those that were found.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Final

import numpy as np

from controller.planners.profile_rows import effective_row
from power_agent.devices.nvml_words import device_type_name
from trefoil.assess.finding import Found, FoundDevice, FoundModel
from trefoil.assess.fitting import SIGMA_MIN, UNKNOWN_SIGMA, BoardFit
from trefoil.core.catalog import Catalog, Family, Variant
from trefoil.core.device_types import DEVICE_TYPES, NO_MIG, UNKNOWN_MAX_W, reported_type, slice_type, unknown_board_name
from trefoil.core.errors import SettingError, one_of
from trefoil.core.fleet import DeviceType
from trefoil.core.units import MS_PER_S
from trefoil.installation import MODELS
from trefoil.profiler.cost_law import NORMAL_QUANTILES, Point
from trefoil.profiler.profile_csv import ProfilePoint
from trefoil.runtime.repository import family_folders, load_family

ALPHA: Final = 0.5
CV: Final = 0.05
SLO_FACTOR: Final = 2.0  # of the p95 that was found
MEAN_FACTOR: Final = 4.0  # of the mean, where no series says quantiles
MEMORY_MIB, LOAD_S, LEAST_MS = 2048, 10.0, 0.01
BATCH_SHARE: Final = 0.5  # of a batch's time and joules that does not grow with it, where one batch size was seen


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms that metrics cannot say. `variants`: models that answer the same question, by a family's name."""

    accuracy: Mapping[str, float] = field(default_factory=dict)
    variants: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    slo_ms: Mapping[str, float] = field(default_factory=dict)
    below_best_pct: float = 2.0
    device_type: str = ""
    repository: Path = MODELS
    pue: float = 1.2
    carbon: str = ""  # trace or g/kWh
    zone: str = "grid"


@dataclass(slots=True)
class FittedFamily:
    """Family with what was found of it: which model is which variant, a profile, relative errors, SLO, accuracy floor.
    `joins`: its server joins requests that wait. `folder`: in the repository; None: by the law."""

    family: Family
    models: Sequence[FoundModel]
    slo_ms: float
    served: dict[str, str] = field(default_factory=dict)
    points: list[ProfilePoint] = field(default_factory=list)
    sigma_j: float = SIGMA_MIN
    floor: float = 0.0
    joins: bool = False
    folder: Path | None = None

    @property
    def sigma_ms(self) -> float:
        """Relative error of the mean service time, from its scatter over the bins."""
        errors = [SIGMA_MIN]
        for model in self.models:
            requests, seconds = model.count("requests"), model.count("infer_s")
            each = (seconds if seconds.any() else model.count("request_s"))[requests > 0] / requests[requests > 0]
            errors.append(float(each.std() / each.mean() / each.size**0.5) if each.size > 2 else UNKNOWN_SIGMA)
        return min(UNKNOWN_SIGMA, max(errors))

    @property
    def shown(self) -> list[Variant]:
        """Variants that are served today."""
        return [one for one in self.family.variants if one.name in self.served.values()]


def board_type(device: FoundDevice, terms: Terms) -> DeviceType:
    """Device type of a device; outside MIG that without it; raises SettingError: its board is not said."""
    if not (board := terms.device_type or device.board):
        remedy = f"say it with --device-type: {one_of(sorted(DEVICE_TYPES), none='')}"
        raise SettingError("no series says which board it is (DCGM's modelName)", field=device.name, remedy=remedy)
    name, known = device_type_name(board), device.gauges
    if name not in DEVICE_TYPES:
        if terms.device_type:
            remedy = one_of(sorted(DEVICE_TYPES), name)
            raise SettingError("no such device type", field="--device-type", value=name, remedy=remedy)
        memory_mib = known.get("memory_mib", known.get("used_mib", 0.0) + known.get("free_mib", 0.0))
        max_w = max(device.mean_w, known.get("limit_w") or UNKNOWN_MAX_W)
        name = unknown_board_name(name, round(memory_mib), max_w, [])
    elif not device.slices and name + NO_MIG in DEVICE_TYPES:
        name += NO_MIG
    return reported_type(name)


@dataclass(slots=True)
class Fitting:
    """Fitting of families to what was found. `types`: device type by device; `notes`: what is assumed, a line each."""

    found: Found
    fits: Mapping[str, BoardFit]
    types: Mapping[str, DeviceType]
    terms: Terms
    notes: list[str] = field(default_factory=list)

    def families(self) -> list[FittedFamily]:
        """Families of all models; raises SettingError: the terms name a model that was not found, or one twice."""
        terms, models, folders = self.terms, self.found.models, family_folders(self.terms.repository)
        known = {*models, *(model.plain for model in models.values())}
        grouped = [name for members in terms.variants.values() for name in members]
        slos = {*terms.slo_ms} - {*terms.variants, ""}
        for option, names in (("--variants", grouped), ("--accuracy", terms.accuracy), ("--slo-latency-ms", slos)):
            if unknown := [name for name in names if name not in known]:
                why, remedy = "no such model was asked in that time", one_of(known, unknown[0])
                raise SettingError(why, field=option, value=unknown[0], remedy=remedy)
        groups = {f: [m for m in models.values() if {m.name, m.plain} & {*own}] for f, own in terms.variants.items()}
        taken = Counter(model.name for members in groups.values() for model in members)
        left = [model for model in models.values() if not taken[model.name]]
        if twice := [name for name in taken if taken[name] > 1] + [m.plain for m in left if m.plain in groups]:
            remedy = "name each model once, and a family as no other model"
            raise SettingError("occurs twice", field="--variants", value=twice[0], remedy=remedy)
        groups |= {name: [m for m in left if m.plain == name] for name in sorted({m.plain for m in left})}
        named_as = family_names(groups)
        fitted = []
        for name, own in groups.items():
            kept = self._of_repository(folders[name], own) if name in folders else None
            one = kept or self._by_law(name, named_as[name], own)
            weights = [m.count("requests").sum() for m in own]
            accuracies = [one.family.variant(one.served[m.name]).accuracy for m in own]
            one.sigma_j = max(self._fit(m).sigma[m.name] for m in own)
            one.floor = float(np.average(accuracies, weights=weights)) * (1 - terms.below_best_pct / 100)
            fitted.append(one)
        return fitted

    def _accuracy(self, model: FoundModel) -> float | None:
        """Accuracy of a model as it is stated."""
        return self.terms.accuracy.get(model.name, self.terms.accuracy.get(model.plain))

    def _fit(self, model: FoundModel) -> BoardFit:
        return self.fits[self._place(model)[0].board]

    def _place(self, model: FoundModel) -> tuple[FoundDevice, DeviceType, str, int]:
        """Device, its type, slice type and clock [MHz] on which a model was found first."""
        name, instance = model.replicas[0].devices[0]
        device, kind = self.found.devices[name], self.types[name]
        shape = device.slices.get(instance) or next(iter(device.slices.values()), "")
        if shape not in [one.name for one in kind.slice_types]:
            shape = kind.slice_types[-1].name
        return device, kind, shape, round(device.gauges.get("clock_mhz", max(kind.clocks_mhz, default=0)))

    def _slo_ms(self, models: Sequence[FoundModel], name: str, stated_ms: float = 0.0) -> float:
        """SLO: as given, as the repository states it, or from what was found."""
        terms = self.terms.slo_ms
        keys = (name, *(key for model in models for key in (model.name, model.plain)), "")
        if given := next((terms[key] for key in keys if key in terms), 0.0):
            return given
        what, ms = "as its family.toml says", stated_ms
        if not stated_ms:
            slowest = max(models, key=lambda m: m.latency_ms.get(0.95, MEAN_FACTOR / SLO_FACTOR * m.request_ms))
            ms, what = MEAN_FACTOR * slowest.request_ms, f"{MEAN_FACTOR:g} times its mean, as no series says quantiles"
            if p95 := slowest.latency_ms.get(0.95):
                ms, what = SLO_FACTOR * p95, f"{SLO_FACTOR:g} times its p95"
        self.notes.append(f"SLO of {name}: p95 <= {ms:.3g} ms, {what} (--slo-latency-ms {name}=MS)")
        return float(f"{ms:.3g}")

    def _of_repository(self, folder: Path, models: Sequence[FoundModel]) -> FittedFamily | None:
        """Family as the repository has it; None where a model's version, or its profile here, is not there."""
        family, rows = load_family(folder)
        catalog = Catalog((family,), tuple(row for row in rows if not row.cohosted and not row.stage))
        one, factors = FittedFamily(family, models, 0.0, joins=family.batching, folder=folder), dict[str, list[float]]()
        for model in models:
            variant = next((v for v in family.variants if str(v.version) == model.version), None)
            _, kind, shape, clock_mhz = self._place(model)
            on = (catalog, kind, slice_type(kind, shape), family)
            row = effective_row(*on, variant, model.batch, clock_mhz) if variant else None
            if variant is None or row is None:
                return None
            joules = self._fit(model).joules[model.name]
            e = joules / row.energy_active_j_per_batch if row.energy_active_j_per_batch and joules else 1.0
            one.served[model.name], factors[variant.name] = variant.name, [model.service_ms / row.latency_ms_p50, e]
        mean = np.mean(list(factors.values()), axis=0).tolist()
        for row in catalog.rows:
            latency = (row.latency_ms_p50, row.latency_ms_p95, row.latency_ms_p99)
            point = ProfilePoint(
                row.device_type, row.slice_type, row.variant, row.batch, row.clock_mhz, latency, row.throughput_per_s,
                row.energy_active_j_per_batch, row.memory_mib, samples=0, clock_sensitivity=row.clock_sensitivity,
            )  # fmt: skip
            one.points.append(_scaled(point, *factors.get(row.variant, mean)))
        stated = {one.served[model.name]: self._accuracy(model) for model in models}
        variants = tuple(replace(v, accuracy=stated.get(v.name) or v.accuracy) for v in family.variants)
        one.family = replace(family, variants=variants)
        one.slo_ms = self._slo_ms(models, family.name, family.classes.get("", (0.0, 0.0))[0])
        times = f"times {mean[0]:.3f} in ms, {mean[1]:.3f} in joules"
        self.notes.append(f"{family.name}: the repository's profile, {times}")
        return one

    def _by_law(self, name: str, called: str, models: Sequence[FoundModel]) -> FittedFamily:
        slo_ms, variants = self._slo_ms(models, name), list[Variant]()
        one = FittedFamily(Family(called, "accuracy", ()), models, slo_ms, joins=any(model.joins for model in models))
        keys = [model.name if len(models) > 1 else model.plain for model in models]
        for number, (model, own) in enumerate(zip(models, (family_names(keys)[key] for key in keys), strict=True), 1):
            if (accuracy := self._accuracy(model)) is None:
                self.notes.append(f"accuracy of {model.plain}: 1 assumed (--accuracy {model.plain}=0.76)")
            device, kind, shape, clock_mhz = self._place(model)
            memory_mib = round(device.gauges.get("used_mib", MEMORY_MIB) / len(self.found.on(device.name)))
            known = (accuracy or 1.0, "trefoil assess --accuracy", memory_mib, LOAD_S, 0)
            one.served[model.name] = own
            variants.append(Variant(own, number, *known, "not known"))
            batch, ms = max(1, round(model.batch)), max(model.service_ms, LEAST_MS)
            point = ProfilePoint(
                kind.name, shape, own, batch, clock_mhz, _quantiles_ms(model, ms), batch * MS_PER_S / ms,
                self._fit(model).joules[model.name], memory_mib, samples=0, clock_sensitivity=1.0,
            )  # fmt: skip
            one.points += _by_slices(point, kind, self.types.values())
        one.family = replace(one.family, variants=tuple(variants), classes={"": (slo_ms, 0.95)})
        self.notes.append(f"{name}: no profile of it in the repository; on other slices than the found one by a law")
        return one


def family_names(models: Iterable[str]) -> dict[str, str]:
    """Names that families may have, by model: of `meta-llama/Llama-3-8B` it is `meta-llama-Llama-3-8B`. A name that is
    taken gets a number; a model whose own name may stand keeps it."""
    plain = {model: re.sub(r"[^A-Za-z0-9_-]+", "-", model).strip("-_")[:60] or "model" for model in models}
    found = {model: name for model, name in plain.items() if name == model}
    for model, name in plain.items():
        if model not in found:
            numbered = (f"{name}{f'-{n}' if n > 1 else ''}" for n in count(1))
            found[model] = next(one for one in numbered if one not in found.values())
    return found


def _quantiles_ms(model: FoundModel, ms: float) -> tuple[float, float, float]:
    """Quantiles of the service time: of an engine that decodes together as its requests scatter, else near the mean."""
    found = [Point(ms, CV, 0.0).quantile_ms(name) for name in NORMAL_QUANTILES]
    if model.engine == "vllm" and model.latency_ms and model.request_ms:
        found = [max(LEAST_MS, model.latency_ms[q] * ms / model.request_ms) for q in (0.5, 0.95, 0.99)]
    return found[0], found[1], found[2]


def _scaled(point: ProfilePoint, t: float, e: float) -> ProfilePoint:
    """Point that takes `t` times as long and `e` times the joules."""
    p50, p95, p99 = (t * ms for ms in point.latency_ms)
    rate, joules = point.throughput_per_s / t, e * (point.energy_active_j or 0.0)
    return replace(point, latency_ms=(p50, p95, p99), throughput_per_s=rate, energy_active_j=joules)


def _by_slices(found: ProfilePoint, kind: DeviceType, types: Iterable[DeviceType]) -> Iterable[ProfilePoint]:
    """The found point on every slice of these types, in MIG mode and outside it; of a batch also of one item."""
    here = slice_type(kind, found.slice_type).sm_count * max(kind.clocks_mhz, default=1)
    names = {one.name for one in types}
    for other in map(reported_type, sorted(names | {name.removesuffix(NO_MIG) for name in names})):
        clock_mhz = found.clock_mhz if other.clocks_mhz == kind.clocks_mhz else max(other.clocks_mhz, default=0)
        for shape in other.slice_types:
            ratio = here / (shape.sm_count * max(other.clocks_mhz, default=1))
            there = replace(found, device_type=other.name, slice_type=shape.name, clock_mhz=clock_mhz)
            yield (point := _scaled(there, ratio**ALPHA, 1.0))
            if found.batch > 1:
                share = BATCH_SHARE + (1 - BATCH_SHARE) / found.batch
                rate = point.throughput_per_s / found.batch
                yield _scaled(replace(point, batch=1, throughput_per_s=rate), share, share)
