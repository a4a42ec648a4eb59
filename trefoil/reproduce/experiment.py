"""Experiment that schemes are compared in: CLOVER's, or one with a user's families, trace, fleet, load and lambda.

Source: CLOVER (SC 23) section 5.1: three applications, ten A100-40GB on five nodes, three 48 h traces, lambda 0.5.
Deviations, all for the sake of comparing like with like:
load   0.6 of what BASE's ten 7g slices answer, the same for every scheme. The public code measures BASE at a fifth of
       the load of the others. That alone "saves" more than half; the row is printed apart, as the paper's method.
SLO    BASE's own p95 at that load, measured once per application and truth (seed), then fixed.
C_base BASE's joules per request at that load x 250 g/kWh (the artifact's base intensity).
sleep  schemes of the paper know no sleeping GPU; `exact` and `static_mix` do. Both are also shown with all GPUs awake.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from controller.planners.profile_rows import effective_row
from trefoil.core.catalog import Catalog
from trefoil.core.device_types import A100_40GB, device_type
from trefoil.core.errors import ProfileMissing
from trefoil.core.queueing import service_time
from trefoil.core.units import MS_PER_S
from trefoil.reproduce.runs import Spec, StudyRun, family_folder
from trefoil.runtime.repository import load_family

DEVICE: Final = A100_40GB.name
GPUS: Final = 10
LOAD: Final = 0.6  # of BASE's capacity
PAPER_LOAD_RATIO: Final = 0.2  # at which the public code measures BASE
LAMBDA: Final = 0.5
CODE_LAMBDA: Final = 0.1  # the public code's default
FAMILIES: Final = ("yolo", "albert", "efficientnet")
MAIN_TRACE: Final = "ciso-march"
BASE_INTENSITY: Final = 250.0
SLO_HOURS: Final = 4.0
TRACES: Final = {
    "ciso-march": "clover_ciso_2021-03_48h.csv",
    "ciso-september": "clover_ciso_2021-09_48h.csv",
    "eso-march": "clover_eso_2021-03_48h.csv",
}
ITEMS: Final = {"yolo": 8.0, "albert": 1.0, "efficientnet": 8.0}  # images, questions, images of one request
NO_SLO_MS: Final = 60_000.0
CONSTANT_G: Final = 200.0


def data_folder() -> Path | None:
    """Folder of the real traces; None: the synthetic curve has to do."""
    folder = Path(os.environ.get("TREFOIL_DATA", "../shared/data"))
    return folder if (folder / "carbon").is_dir() else None


def trace_of(name: str) -> str:
    """File of a trace of CLOVER's, or of a user's own by its path; "" for the synthetic curve."""
    if name not in TRACES:
        return name
    folder = data_folder()
    path = folder / "carbon" / TRACES[name] if folder else None
    return str(path) if path is not None and path.exists() else ""


@dataclass(frozen=True, slots=True)
class Experiment:
    """Experiment of a study. What is left out is as printed.

    repository   model repository of the families; "" = the one that ships.
    trace        name of `TRACES`, or a CSV file of intensities.
    load         share of what BASE answers.
    policies     only these, next to BASE; empty: all schemes of the study.
    """

    families: tuple[str, ...] = FAMILIES
    repository: str = ""
    trace: str = MAIN_TRACE
    device: str = DEVICE
    gpus: int = GPUS
    load: float = LOAD
    lambda_weight: float = LAMBDA
    policies: tuple[str, ...] = ()

    @property
    def as_printed(self) -> bool:
        """Whether families, fleet, load and schemes are the paper's: figures of its GPU and its sweeps need them."""
        paper = Experiment(self.families, trace=self.trace, lambda_weight=self.lambda_weight)
        return self == paper and set(self.families) <= set(FAMILIES)


def capacity_per_s(family: str, gpus: int = GPUS, of: Experiment = Experiment()) -> float:
    """Capacity of BASE when it never waits [requests/s]: the best variant on one largest slice per GPU, by the profile.

    Raises:
        ProfileMissing: that variant has no row there.
    """
    kind, (found, rows) = device_type(of.device), load_family(family_folder(family, of.repository))
    row = effective_row(Catalog((found,), rows), kind, kind.largest, found, found.best, ITEMS.get(family, 1.0))
    if row is None:
        missing = f"{family}: {found.best.name} has no profile on {kind.largest.name} of a {kind.name}"
        raise ProfileMissing(missing, field="family", value=family, remedy="measure it: trefoil family profile")
    return gpus * MS_PER_S / service_time(row).mean_ms


@dataclass(frozen=True, slots=True)
class Reference:
    """Reference that BASE gives at the load of an experiment: SLO and C_base of everybody else."""

    family: str
    seed: int
    rate_per_s: float
    slo_ms: float
    joules: float
    accuracy: float
    of: Experiment = Experiment()


def reference_spec(family: str, seed: int, of: Experiment = Experiment(), load: float = 0.0) -> Spec:
    """Spec of BASE alone, long enough for a p95, at a constant intensity; `load` 0: the experiment's."""
    load = load or of.load
    return Spec(
        family=family,
        label=f"reference at {load:g}",
        policy="base",
        rate_per_s=round(load * capacity_per_s(family, of.gpus, of), 3),
        slo_ms=NO_SLO_MS,
        seed=seed,
        hours=SLO_HOURS,
        repository=of.repository,
        device=of.device,
        gpus=of.gpus,
        items=ITEMS.get(family, 1.0),
        constant_g_per_kwh=CONSTANT_G,
        exact_quantiles=True,
    )


def reference_of(result: StudyRun, of: Experiment = Experiment()) -> Reference:
    """Reference that BASE's run gives."""
    spec = result.spec
    return Reference(
        spec.family, spec.seed, spec.rate_per_s, result["p95_ms"], result["joules_per_request"], result["accuracy"], of
    )


def spec_of(reference: Reference, label: str, policy: str, hours: float, trace: str, **changes: object) -> Spec:
    """Spec of a scheme at load, SLO, fleet and C_base of the reference."""
    spec = Spec(
        family=reference.family,
        label=label,
        policy=policy,
        rate_per_s=reference.rate_per_s,
        slo_ms=reference.slo_ms,
        seed=reference.seed,
        hours=hours,
        repository=reference.of.repository,
        device=reference.of.device,
        gpus=reference.of.gpus,
        items=ITEMS.get(reference.family, 1.0),
        trace=trace,
        lambda_weight=reference.of.lambda_weight,
        base_j_per_request=reference.joules,
        base_intensity=BASE_INTENSITY,
    )
    return replace(spec, **changes)  # type: ignore[arg-type]
