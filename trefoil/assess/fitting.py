"""Fits to what was found: watts of idle devices, joules of an execution, and who has drawn what.

Formulation: the joules of a device in a bin are idle watts x covered seconds + sum over models of joules per execution
x executions, by least squares over all bins and devices of a board; none is below 0. Idle watts are fitted only where
no device was seen idle and the load varies. A device's joules are then split: what is above idle by the fitted joules,
idle by the time that each model computes. The split adds up to what was counted.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from trefoil.assess.finding import Found, FoundDevice
from trefoil.assess.series import Floats
from trefoil.core.units import J_PER_KWH

NO_MODEL: Final = "(no model)"
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

    @property
    def joules_per_request(self) -> float:
        """Joules of a request, idle included; NaN without any."""
        return self.joules / self.requests if self.requests else float("nan")

    @property
    def grams_per_request(self) -> float:
        """Grams of a request, idle included; NaN without any."""
        return self.grams / self.requests if self.requests else float("nan")


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
        every = self.by_model.values()
        return ModelCost(
            *(sum(getattr(one, name) for one in every) for name in ("joules", "idle_j", "grams", "requests"))
        )


def fit_boards(found: Found, table_idle_w: Mapping[str, float]) -> dict[str, BoardFit]:
    """Fit of each board, by its name. `table_idle_w`: idle watts where neither a sample nor a fit says them."""
    boards = defaultdict[str, list[FoundDevice]](list)
    for device in found.devices.values():
        boards[device.board].append(device)
    return {board: _fit(found, devices, table_idle_w.get(board, 0.0)) for board, devices in boards.items()}


def _fit(found: Found, devices: Sequence[FoundDevice], table_w: float) -> BoardFit:
    models = sorted({model.name for device in devices for model, _ in found.on(device.name)})
    seen = [one.idle_w for one in devices if one.idle_w is not None]
    seen += [one.mean_w for one in devices if not found.on(one.name) and one.covered_s.sum()]
    columns, joules, covered = [], [], []
    for device in devices:
        known = device.covered_s > 0.5 * found.bin_s
        counts = {name: np.zeros(known.size) for name in models}
        for model, replica in found.on(device.name):
            counts[model.name] += model.executions(replica) / len(replica.devices)
        columns.append(np.array([counts[name][known] for name in models]).reshape(len(models), -1).T)
        joules.append(device.joules[known])
        covered.append(device.covered_s[known])
    x, y, seconds = np.vstack(columns), np.concatenate(joules), np.concatenate(covered)
    rate = x.sum(axis=1) / np.maximum(seconds, 1e-9) if x.size else np.zeros(0)
    varies = rate.size > len(models) + 2 and rate.mean() > 0 and rate.std() > VARIES * rate.mean()
    if seen:
        idle_w, basis = float(np.median(seen)), "seen idle"
    elif varies:
        solved, _ = _least_squares(np.column_stack((seconds, x)), y)
        idle_w, basis = float(solved[0]), "fitted"
    else:
        idle_w, basis = table_w, "the board's table"
    if seconds.size:
        idle_w = min(idle_w, float((y / seconds).min()) if basis == "fitted" else float(np.mean(y) / np.mean(seconds)))
    each, errors = _least_squares(x, y - idle_w * seconds)
    fitted = {n: float(e) for n, e in zip(models, each, strict=True)}
    sigma = {n: _sigma(float(e), float(s), basis) for n, e, s in zip(models, each, errors, strict=True)}
    return BoardFit(idle_w, basis, fitted, sigma)


def _sigma(value: float, error: float, basis: str) -> float:
    if not value > 0 or not np.isfinite(error):
        return UNKNOWN_SIGMA
    least = SIGMA_MIN if basis != "the board's table" else UNKNOWN_SIGMA
    return float(np.clip(error / value, least, 2 * UNKNOWN_SIGMA))


def _least_squares(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Least squares of y = x b with b >= 0, and standard errors: what would be below 0 is 0, one after the other."""
    used = [n for n in range(x.shape[1]) if x[:, n].any()]
    found, errors = np.zeros(x.shape[1]), np.full(x.shape[1], np.inf)
    while used:
        own = x[:, used]
        solved, _, rank, _ = np.linalg.lstsq(own, y, rcond=None)
        worst = int(np.argmin(solved))
        if solved[worst] < 0:
            used.pop(worst)
            continue
        found[used] = solved
        left = y.size - len(used)
        if left > 0 and rank == len(used):
            variance = float(((y - own @ solved) ** 2).sum()) / left
            errors[used] = np.sqrt(np.maximum(0.0, variance * np.diag(np.linalg.inv(own.T @ own))))
        break
    return found, errors


def costs(found: Found, fits: Mapping[str, BoardFit], intensity: Floats, pue: float) -> FleetCosts:
    """Costs of each model while devices are covered. `intensity`: g/kWh by bin. Joules add up to what was counted."""
    by_model = defaultdict[str, ModelCost](ModelCost)
    for model in found.models.values():
        by_model[model.name].requests = model.total("requests")
    total = np.zeros(found.edges_s.size - 1)
    for device in found.devices.values():
        fit, hosted = fits[device.board], found.on(device.name)
        total += device.joules
        idle = np.minimum(device.joules, fit.idle_w * device.covered_s)
        active = device.joules - idle
        busy = {m.name: np.zeros_like(idle) for m, _ in hosted}
        drawn = {m.name: np.zeros_like(idle) for m, _ in hosted}
        for model, replica in hosted:
            busy[model.name] += model.busy_s(replica) / len(replica.devices)
            drawn[model.name] += fit.joules[model.name] * model.executions(replica) / len(replica.devices)
        drawn = drawn if any(one.any() for one in drawn.values()) else busy
        for name, part in _shares(drawn).items():
            _book(by_model[name], active * part, 0.0 * active, intensity, pue)
        overall = {name: np.full_like(idle, one.sum()) for name, one in busy.items()}
        for name, part in _shares(overall).items():
            _book(by_model[name], idle * part, idle * part, intensity, pue)
    return FleetCosts(dict(by_model), total, intensity, fits)


def _shares(weights: Mapping[str, Floats]) -> dict[str, Floats]:
    """Shares by bin; where none weighs anything, those of all bins, else equal ones; without anybody `NO_MODEL`."""
    if not weights:
        return {NO_MODEL: np.ones(1)}
    total = np.sum(list(weights.values()), axis=0)
    whole = {name: float(one.sum()) for name, one in weights.items()}
    every = sum(whole.values())
    found = {}
    for name, one in weights.items():
        otherwise = np.full_like(total, whole[name] / every if every else 1.0 / len(weights))
        found[name] = np.divide(one, total, out=otherwise, where=total > 0)
    return found


def _book(cost: ModelCost, joules: Floats, idle_j: Floats, intensity: Floats, pue: float) -> None:
    cost.joules += float(joules.sum())
    cost.idle_j += float(idle_j.sum())
    cost.grams += float((joules * intensity).sum()) / J_PER_KWH * pue
