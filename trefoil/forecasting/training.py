"""Training of `lstm`: windows of traces, and of generated load, given to torch in a separate environment.

Data: traces of requests (trefoil/simulator/scenario/request_trace.py). Counts per second and arrival times stay as
    recorded. Coarser counts become a rate: straight lines between the middles of bins, drawn as Poisson at each of
    `LEVELS`.
    Generated: a slow wave, a random walk, in two of three traces spikes that decay and levels that hold for minutes.
    Counts are Poisson, of a rate with gamma noise. It ranges from none to seconds of nothing between bursts.
Result: windows of 600 s and the largest second of the minute after; the last fifth of each trace validates.
"""

import hashlib
import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from numpy.random import Generator

from controller.forecasters.lstm import HORIZON_S, INPUT_S
from trefoil.core.errors import InvalidInput, SettingError, StartError
from trefoil.simulator.scenario.request_trace import RequestTrace, read_trace

Floats = npt.NDArray[np.float64]

LEVELS: Final = (3.0, 30.0, 150.0)  # mean requests/s that coarse counts are played at
GENERATED: Final = 400
GENERATED_S: Final = 3 * 3600
STRIDE_S: Final = 240
VALIDATED: Final = 0.2  # the last part of each trace
FIT: Final = Path(__file__).with_name("fit.py")


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def counts_per_s(trace: RequestTrace, rng: Generator, mean_per_s: float = 0.0) -> Floats:
    """Arrivals of each second of a trace; wider bins are drawn, at a mean rate where one is given."""
    numbers, bin_s = trace.counted()
    if bin_s == 1.0:
        return numbers
    rates = numbers / bin_s * (mean_per_s / (numbers.mean() / bin_s) if mean_per_s and numbers.any() else 1.0)
    middles = (np.arange(numbers.size) + 0.5) * bin_s
    return np.asarray(rng.poisson(np.interp(np.arange(numbers.size * bin_s) + 0.5, middles, rates)), dtype=np.float64)


def generated_counts(rng: Generator) -> Floats:
    """Arrivals of each second of a generated trace."""
    at_s = np.arange(GENERATED_S, dtype=np.float64)
    wave = rng.uniform(0.0, 0.5) * np.sin(2 * np.pi * (at_s / rng.uniform(1200, 14_400) + rng.random()))
    walk = np.cumsum(rng.normal(0.0, rng.uniform(0.0, 0.01), GENERATED_S))
    spikes, levels = np.zeros(GENERATED_S), np.zeros(GENERATED_S)
    eventful = rng.random() < 2 / 3
    for begins_s in rng.uniform(0, GENERATED_S, rng.poisson(eventful * GENERATED_S / 1200)):
        since_s = at_s - begins_s
        rise, decay_s = np.clip(since_s / rng.uniform(1, 60), 0.0, 1.0), rng.uniform(20, 300)
        spikes += rng.uniform(0.3, 2.5) * rise * np.exp(-np.clip(since_s, 0.0, None) / decay_s)
    rate: Floats = np.exp(rng.uniform(np.log(1.0), np.log(300.0)) + wave + walk - walk.mean()) * (1 + spikes)
    for begins_s in rng.uniform(0, GENERATED_S, rng.poisson(eventful * GENERATED_S / 2700)):
        begun = np.clip((at_s - begins_s) / rng.uniform(1, 60), 0.0, 1.0)
        ended = np.clip((at_s - begins_s - rng.uniform(120, 1200)) / rng.uniform(1, 300), 0.0, 1.0)
        levels += rng.normal(0.0, 0.8) * (begun - ended)
    spread = np.exp(rng.uniform(np.log(0.001), np.log(3.0)))
    noise = rng.gamma(1 / spread, spread, GENERATED_S)
    return np.asarray(rng.poisson(np.clip(rate * np.exp(levels) * noise, 0.0, 1e5)), dtype=np.float64)


def windows_of(counts: Floats, stride_s: int = STRIDE_S) -> tuple[Floats, Floats]:
    """Windows of the input's length, one every `stride_s`, and the largest second of the minute after each."""
    found = np.lib.stride_tricks.sliding_window_view(counts, INPUT_S + HORIZON_S)[::stride_s]
    return found[:, :INPUT_S], found[:, INPUT_S:].max(axis=1)


def train(traces: Sequence[Path], held_out: Sequence[Path], out: Path, *, seed: int, python: Path) -> Mapping[str, Any]:
    """Train a model on traces and generated load, and write it with its card beside it.

    A model that stands there is replaced by one that is accepted, and by no other.

    Args:
        held_out: traces that it will be tested on; none of them may be trained on, under whatever name.
        python: an interpreter with torch.

    Returns:
        The card.

    Raises:
        InvalidInput: a trace is both trained on and held out, or too short.
        SettingError: no such interpreter.
        StartError: training failed, or the model does not beat the last minute's maximum.
        TraceError: a file is not a trace.
    """
    if not python.exists():
        raise SettingError(
            "no such interpreter", field="--python", value=str(python), remedy="make .venv-export/.ready"
        )
    tested = {file_sha256(path): path for path in held_out}
    rng = np.random.default_rng(seed)
    data: list[dict[str, Any]] = []
    parts: list[tuple[Floats, Floats]] = []
    for path in traces:
        digest = file_sha256(path)
        if digest in tested:
            raise InvalidInput(
                f"is the held-out {tested[digest]}", field="TRACES", value=str(path), remedy="train on another trace"
            )
        trace = read_trace(path, whole=True)
        played = [counts_per_s(trace, rng, mean) for mean in (LEVELS if trace.counted()[1] != 1.0 else (0.0,))]
        if min(counts.size for counts in played) < 2 * (INPUT_S + HORIZON_S):
            raise InvalidInput("too short", field="TRACES", value=str(path), remedy="give at least 22 minutes")
        parts += (found := [windows_of(counts) for counts in played])
        data.append({"name": path.name, "sha256": digest, "windows": sum(len(y) for _, y in found)})
    parts += (made := [windows_of(generated_counts(rng)) for _ in range(GENERATED)])
    data.append({"name": "generated", "seed": seed, "traces": GENERATED, "windows": sum(len(y) for _, y in made)})
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".training-", dir=out.parent) as folder:  # beside it: moved, not copied
        weights, stated = Path(folder) / "model.onnx", Path(folder) / "model.json"
        fitted = _fit(parts, weights, seed, python)
        card = {
            "sha256": file_sha256(weights),
            "input_s": INPUT_S,
            "horizon_s": HORIZON_S,
            "seed": seed,
            "data": data,
            "held_out": [{"name": path.name, "sha256": digest} for digest, path in tested.items()],
            **fitted,
        }
        stated.write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
        weights.replace(out)
        stated.replace(out.with_suffix(".json"))
    return card


def _fit(parts: Sequence[tuple[Floats, Floats]], out: Path, seed: int, python: Path) -> dict[str, Any]:
    """Fit in the other environment, beside the windows that it reads; what it reports."""
    last = [np.arange(len(y)) >= len(y) * (1 - VALIDATED) for _, y in parts]
    windows = out.with_name("windows.npz")
    x, y = (np.concatenate([part[i] for part in parts]).astype(np.float32) for i in (0, 1))
    np.savez(windows, x=x, y=y, validates=np.concatenate(last))
    command = [str(python), str(FIT), str(windows), str(out), str(seed)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if ended.returncode or not out.is_file():
        remedy = "read what it said above, and name an interpreter with torch: make .venv-export/.ready"
        raise StartError(
            f"training ended with {ended.returncode} and no model", field="--python", value=str(python), remedy=remedy
        )
    fitted: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    error, trivial = fitted["validation"]["mae_ratio"], fitted["validation"]["mae_ratio_of_last_minute"]
    if not error < trivial:
        raise StartError(
            f"its error of {error:.1%} is no less than {trivial:.1%} of the last minute's maximum; nothing was written",
            field="validation.mae_ratio",
            value=error,
            remedy="train on more or longer traces, or draw others with --seed",
        )
    return fitted
