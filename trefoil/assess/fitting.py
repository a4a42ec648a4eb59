"""Fits to what was found: watts of idle devices, joules of an execution, and who has drawn what.

Formulation: the joules of a device in a bin are idle watts x covered seconds + sum over models of joules per execution
x executions. The fit is by least squares over all bins and devices of a board; no result is below 0. Idle watts are
fitted only where no device was seen idle and the load varies. A device's joules are then split: what is above idle by
the fitted joules, idle by the time that each model computes. The split adds up to what was counted.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Final

import numpy as np

from trefoil.assess.finding import Found, FoundDevice
from trefoil.assess.series import Floats
from trefoil.core.units import J_PER_KWH

NO_MODEL: Final = "(no model)"
TABLE: Final = "the board's table"
VARIES: Final = 0.1  # coefficient of variation of a load from which idle watts can be fitted
UNKNOWN_SIGMA: Final = 0.3
SIGMA_MIN: Final = 0.02


@dataclass(frozen=True, slots=True)
class BoardFit:
    """Fit of one board: idle watts with what they rest on, joules of an execution by model, their relative error."""

    idle_w: float
    idle_basis: str
    joules: Mapping[str, float]
    sigma: Mapping[str, float]


@dataclass(slots=True)
class ModelCost:
    """Cost of a model, or of devices without one: joules, of which idle, and grams."""

    joules: float = 0.0
    idle_j: float = 0.0
    grams: float = 0.0
    requests: float = 0.0


@dataclass(frozen=True, slots=True)
class FleetCosts:
    """Costs by model; by bin joules of the fleet and intensity [g/kWh]."""

    by_model: Mapping[str, ModelCost]
    joules: Floats
    intensity: Floats
    fits: Mapping[str, BoardFit] = field(default_factory=dict)

    @property
    def whole(self) -> ModelCost:
        """Cost of all together."""
        every = [astuple(one) for one in self.by_model.values()]
        return ModelCost(*(sum(column) for column in zip(*every, strict=True)))


def fit_boards(found: Found, table_idle_w: Mapping[str, float]) -> dict[str, BoardFit]:
    """Fit of each board, by its name. `table_idle_w`: idle watts where neither a sample nor a fit says them."""
    every = found.devices.values()
    return {board: _fit(found, [d for d in every if d.board == board], w) for board, w in table_idle_w.items()}


def _fit(found: Found, devices: Sequence[FoundDevice], table_w: float) -> BoardFit:
    models = sorted({model.name for device in devices for model, _ in found.on(device.name)})
    seen = [one.idle_w for one in devices if one.idle_w is not None]
    seen += [one.mean_w for one in devices if not found.on(one.name) and one.covered_s.sum()]
    rows = []
    for device in devices:
        counts = dict.fromkeys(models, np.zeros_like(device.joules))
        for model, replica in found.on(device.name):
            counts[model.name] = counts[model.name] + model.executions(replica) / len(replica.devices)
        known = device.covered_s > 0.5 * found.bin_s
        rows.append(np.column_stack([device.joules, device.covered_s, *counts.values()])[known])
    y, seconds, x = (part := np.vstack(rows))[:, 0], part[:, 1], part[:, 2:]
    rate = x.sum(axis=1) / np.maximum(seconds, 1e-9)
    mean_w = float(y.sum() / max(seconds.sum(), 1e-9))
    if seen:
        idle_w, basis = float(np.median(seen)), "seen idle"
    elif rate.size > len(models) + 2 and rate.std() > VARIES * rate.mean() > 0:
        solved, _ = _least_squares(part[:, 1:], y)
        idle_w, basis, mean_w = float(solved[0]), "fitted", float((y / seconds).min())
    else:
        idle_w, basis = table_w, TABLE
    idle_w = min(idle_w, mean_w)
    each, errors = _least_squares(x, y - idle_w * seconds)
    least = UNKNOWN_SIGMA if basis == TABLE else SIGMA_MIN
    with np.errstate(divide="ignore", invalid="ignore"):
        sigma = np.nan_to_num(np.clip(errors / each, least, 2 * UNKNOWN_SIGMA), nan=UNKNOWN_SIGMA)
    return BoardFit(idle_w, basis, *(dict(zip(models, values.tolist(), strict=True)) for values in (each, sigma)))


def _least_squares(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Least squares of y = x b with b >= 0, and standard errors: what would be below 0 is 0, one after the other."""
    used = [n for n in range(x.shape[1]) if x[:, n].any()]
    found, errors = np.zeros(x.shape[1]), np.full(x.shape[1], np.inf)
    while used:
        own = x[:, used]
        solved, _, rank, _ = np.linalg.lstsq(own, y, rcond=None)
        if solved.min() < 0:
            used.pop(int(np.argmin(solved)))
            continue
        found[used] = solved
        if y.size > rank == len(used):
            variance = float(((y - own @ solved) ** 2).sum()) / (y.size - rank)
            errors[used] = np.sqrt(np.maximum(0.0, variance * np.diag(np.linalg.inv(own.T @ own))))
        break
    return found, errors


def costs(found: Found, fits: Mapping[str, BoardFit], intensity: Floats, pue: float) -> FleetCosts:
    """Costs of each model while devices are covered. `intensity`: g/kWh by bin. Joules add up to what was counted."""
    by_model, total = defaultdict[str, ModelCost](ModelCost), np.zeros(found.edges_s.size - 1)
    for model in found.models.values():
        by_model[model.name].requests = model.count("requests").sum()
    for device in found.devices.values():
        fit, hosted = fits[device.board], found.on(device.name)
        total += device.joules
        idle = np.minimum(device.joules, fit.idle_w * device.covered_s)
        nothing = [np.zeros_like(idle)] * (not hosted)
        busy = np.array([m.busy_s(r) / len(r.devices) for m, r in hosted] + nothing)
        drawn = np.array([fit.joules[m.name] * m.executions(r) / len(r.devices) for m, r in hosted] + nothing)
        active = (device.joules - idle) * _shares(drawn if drawn.any() else busy)
        kept = idle * _shares(np.repeat(busy.sum(axis=1, keepdims=True), idle.size, axis=1))
        for name, above, below in zip([m.name for m, _ in hosted] or [NO_MODEL], active, kept, strict=True):
            cost = by_model[name]
            cost.joules += float((above + below).sum())
            cost.idle_j += float(below.sum())
            cost.grams += float((above + below) @ intensity) / J_PER_KWH * pue
    return FleetCosts(dict(by_model), total, intensity, fits)


def _shares(weights: Floats) -> Floats:
    """Shares of rows by bin, shape (rows, bins); where none weighs anything, those of all bins, else equal ones."""
    total, whole = weights.sum(axis=0), weights.sum(axis=1, keepdims=True)
    otherwise = whole / whole.sum() if whole.sum() else np.full_like(whole, 1.0 / len(whole))
    return np.asarray(np.where(total > 0, weights / np.maximum(total, 1e-300), otherwise))
