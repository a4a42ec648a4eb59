"""How much longer operators take at half the clock: mu-Serve's sensitivity scores, measured or modelled by a roofline.

Source: mu-Serve section 3.1: the increase of an operator's time, normalised, from the default to half the default
    clock, over the decrease of the clock, normalised too. So 0 is an operator that no clock touches and 2 one that
    follows it; below 1 mu-Serve calls an operator insensitive (section 4.4).
Data: FLOPs and bytes of each operator in a pass (graph_costs.py). Of the board: its SMs and clocks (device types), FP32
    cores an SM and memory bandwidth (assumed.py).
Formulation: T(r) = max(LAUNCH_MS, flops / (2 cores f r), bytes / bandwidth) at the share r of the highest clock f.
    For the law T(f) = T0 (1 - s + s f0/f) an operator's s is half its score, and a model's is its operators', by time.
Measured: the times of operator_times.py, where a GPU's clock may be set.
Assumed of what is modelled: operators reach both ceilings, in FP32; they run one at a time; memory has a separate
    clock, which stays.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from trefoil.core.device_types import NO_MIG
from trefoil.core.errors import SettingError, one_of
from trefoil.core.fleet import DeviceType
from trefoil.core.units import MS_PER_S
from trefoil.profiler.assumed import FP32_PER_SM, GB_PER_S, HALF, OperatorCost

LAUNCH_MS: Final = 0.005  # of a kernel, from the CPU: an assumption, of the size that CUDA's launches are known for
INSENSITIVE: Final = 1.0  # scores below: mu-Serve section 4.4
MODELLED: Final = "modelled by a roofline, not measured"


@dataclass(frozen=True, slots=True)
class Board:
    """Ceilings of a GPU at its highest clock."""

    flops_per_s: float
    bytes_per_s: float
    launch_ms: float = LAUNCH_MS

    def time_ms(self, cost: OperatorCost, clock: float = 1.0) -> float:
        """Time of an operator at a share of the highest clock [ms]; what only changes a shape takes none."""
        if not cost.bytes:
            return 0.0
        compute_s, memory_s = cost.flops / (self.flops_per_s * clock), cost.bytes / self.bytes_per_s
        return max(self.launch_ms, MS_PER_S * compute_s, MS_PER_S * memory_s)


@dataclass(frozen=True, slots=True)
class OperatorScore:
    """Score of an operator, and its time at the highest clock. `source`: origin of both; `samples`: number of answered
    requests."""

    name: str
    operator: str
    flops: float
    bytes: float
    time_ms: float
    score: float
    source: str = MODELLED
    shape: tuple[int, ...] = ()
    """Of its first output, the items first."""
    samples: int = 0


@dataclass(frozen=True, slots=True)
class OperatorTimes:
    """Time of an operator at the higher and at the lower clock [ms], and how many requests were answered in all."""

    full_ms: float
    half_ms: float
    samples: int


def board_of(device: DeviceType) -> Board:
    """Ceilings of a device type.

    Raises:
        SettingError: its bandwidth and cores are not known.
    """
    name = device.name.removesuffix(NO_MIG)
    if name not in FP32_PER_SM or not device.clocks_mhz:
        raise SettingError(
            "no bandwidth and FP32 cores are known of it", field="--device", value=device.name,
            remedy=one_of(sorted(FP32_PER_SM), name),
        )  # fmt: skip
    sms = max(shape.sm_count for shape in device.slice_types)
    return Board(2.0 * FP32_PER_SM[name] * sms * 1e6 * max(device.clocks_mhz), GB_PER_S[name] * 1e9)


def score(time_ms: float, half_ms: float, clock: float = HALF) -> float:
    """Normalised dLatency/dFrequency from the default to a lower clock, a share of it: half."""
    return (half_ms - time_ms) / time_ms / (1 - clock) if time_ms else 0.0


def modelled_scores(operators: Iterable[OperatorCost], board: Board) -> list[OperatorScore]:
    """Scores of operators by the roofline of a board."""
    found = []
    for cost in operators:
        time_ms, half_ms = board.time_ms(cost), board.time_ms(cost, HALF)
        found.append(OperatorScore(*cost[:4], time_ms, score(time_ms, half_ms), shape=tuple(cost.shape)))
    return found


def measured_scores(
    modelled: Iterable[OperatorScore],
    times: Mapping[str, OperatorTimes],
    whys: Mapping[str, str],
    clock: float,
    source: str,
) -> list[OperatorScore]:
    """Scores by times that were measured, of operators by name; others stay modelled and say why. `clock`: the lower
    clock as a share of the higher one."""
    found = []
    for one in modelled:
        if (took := times.get(one.name)) is not None:
            scored = score(took.full_ms, took.half_ms, clock)
            one = replace(one, time_ms=took.full_ms, score=scored, source=source, samples=took.samples)
        elif one.name in whys:
            one = replace(one, source=f"{MODELLED}: {whys[one.name]}")
        found.append(one)
    return found


def s_of(scores: Sequence[OperatorScore]) -> float:
    """The s of several operators one after the other: half their scores, by time."""
    total_ms = sum(one.time_ms for one in scores)
    return HALF * sum(one.time_ms * one.score for one in scores) / total_ms if total_ms else 0.0


def summary(scores: Sequence[OperatorScore]) -> dict[str, Any]:
    """Of a whole graph: its time, its s, and how much of it is insensitive, by number and by time."""
    total_ms = sum(one.time_ms for one in scores)
    low = [one for one in scores if one.score < INSENSITIVE]
    return {
        "operators": len(scores),
        "time_ms": total_ms,
        "s": s_of(scores),
        "insensitive_share": len(low) / len(scores) if scores else 0.0,
        "insensitive_time_share": sum(one.time_ms for one in low) / total_ms if total_ms else 0.0,
    }
