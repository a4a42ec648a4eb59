"""The modelled profiles: what ships is what the constants give, and the constants are what the data give."""

import csv
import importlib.util
import json
import os
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

from trefoil.core.common import Basis
from trefoil.core.device_types import A100_40GB, A100_40GB_WHOLE, device_type, slice_type
from trefoil.core.power import SWEEP_IDLE_W, active_w, sm_share
from trefoil.profiler import cost_law
from trefoil.runtime.repository import load_family

ROOT = Path(__file__).resolve().parents[3]
PROFILES = ROOT / "model_repository" / "_profiles"
DATA = Path(os.environ.get("TREFOIL_DATA", ROOT / ".." / "shared" / "data"))
FAMILIES = ("efficientnet", "albert", "yolo")


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, PROFILES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def make() -> ModuleType:
    return script("make_profiles")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_shipped_profile_is_what_the_constants_give(make: ModuleType, name: str) -> None:
    folder = ROOT / "model_repository" / name
    family, rows = load_family(folder)
    shipped = "".join(
        line for line in (folder / "profile.csv").read_text().splitlines(keepends=True) if not line.startswith("#")
    )
    again = list(csv.DictReader(make.table(make.read_model(), family).splitlines()))
    kept = list(csv.DictReader(shipped.splitlines()))
    assert len(again) == len(kept), "run model_repository/_profiles/make_profiles.py"
    for new, old in zip(again, kept, strict=True):
        for column, value in new.items():
            same = (
                pytest.approx(float(value), rel=1e-4) == float(old[column]) if _number(value) else value == old[column]
            )
            assert same, f"{column} of {old}: run model_repository/_profiles/make_profiles.py"
    provenance = rows[0].provenance
    assert provenance is not None
    assert provenance.basis == Basis.MODELLED


def _number(text: str) -> bool:
    return text.replace(".", "", 1).replace("e-", "", 1).isdigit()


@pytest.mark.parametrize("name", FAMILIES)
def test_features_agree_with_the_catalogue(make: ModuleType, name: str) -> None:
    family, _ = load_family(ROOT / "model_repository" / name)
    for variant in family.variants:
        assert make.features()[name][variant.name].macs * 1e9 == pytest.approx(variant.macs, rel=0.01), variant.name


@pytest.mark.parametrize("name", FAMILIES)
def test_points_are_physical(name: str) -> None:
    """Wider slices and higher clocks are never slower; no slice draws more than its share of the board limit."""
    family, rows = load_family(ROOT / "model_repository" / name)
    widths: dict[tuple[str, int, int], list[tuple[int, float]]] = defaultdict(list)
    clocks: dict[tuple[str, str, int], list[tuple[int, float, float]]] = defaultdict(list)
    for row in rows:
        device = device_type(row.device_type)
        shape = slice_type(device, row.slice_type)
        widths[row.variant, row.batch, row.clock_mhz].append((shape.sm_count, row.latency_ms_p50))
        point = (row.clock_mhz, row.latency_ms_p50, row.energy_active_j_per_batch)
        clocks[row.variant, row.slice_type, row.batch].append(point)
        assert row.power_w <= device.max_w * sm_share(device, row.slice_type), row
        assert row.latency_ms_p50 < row.latency_ms_p95 < row.latency_ms_p99
    for points in widths.values():
        assert len(points) == len(A100_40GB.slice_types) + len(A100_40GB_WHOLE.slice_types)
        assert all(narrow[1] >= wide[1] for narrow, wide in pairwise(sorted(points)))
    for slower in clocks.values():
        assert all(a[1] >= b[1] and a[2] <= b[2] for a, b in pairwise(sorted(slower)))
    best = family.best.name
    row = next(r for r in rows if (r.variant, r.slice_type, r.clock_mhz, r.batch) == (best, "7g.40gb", 1410, 8))
    assert 0.2 < row.power_w / active_w(A100_40GB, "7g.40gb", 1410) < 1.6


@pytest.mark.parametrize("name", FAMILIES)
def test_a_gpu_outside_mig_gains_at_most_its_ten_more_sms(name: str) -> None:
    """Whoever is bound by decoding or by launches gains less. Joules fall only where the board limit binds."""
    family, rows = load_family(ROOT / "model_repository" / name)
    points = {(r.device_type, r.variant, r.batch, r.clock_mhz): r for r in rows if r.slice_type in ("whole", "7g.40gb")}
    assert len(points) == 2 * 4 * 6 * len(family.variants)
    for (device, variant, batch, clock_mhz), row in points.items():
        if device == A100_40GB_WHOLE.name:
            in_mig = points[A100_40GB.name, variant, batch, clock_mhz]
            assert 1.0 <= in_mig.latency_ms_p50 / row.latency_ms_p50 < 108 / 98, row
            limited = points[A100_40GB.name, variant, batch, 1410].power_w > 363
            least = 98 / 108 if limited else 1.0
            assert least <= row.energy_active_j_per_batch / in_mig.energy_active_j_per_batch < 108 / 98, row


def test_the_idle_power_of_the_sweep_is_the_calibrations(make: ModuleType) -> None:
    watts, provenance = SWEEP_IDLE_W[A100_40GB.name]
    assert watts == pytest.approx(make.read_model().idle_w, abs=0.05)
    assert provenance.basis == Basis.MODELLED


def test_base_draws_what_was_measured_whatever_eta_is(make: ModuleType) -> None:
    found = json.loads((PROFILES / "constants.json").read_text())
    for eta in (None, 0.0, 1.0):
        model = make.read_model(eta=eta)
        for name, family in model.families.items():
            largest = max(make.features()[name].values(), key=lambda f: f.macs)
            shape = slice_type(A100_40GB, "7g.40gb")
            joules = cost_law.energy_j(model, name, largest, A100_40GB, shape, family.items)
            assert joules == pytest.approx(found["families"][name]["joules_per_request"]["base"], rel=1e-4)


def test_without_host_only_the_pass_is_left(make: ModuleType) -> None:
    with_host, without = make.read_model(), make.read_model(without_host=True)
    of, shape = make.features()["efficientnet"]["efficientnet-b1"], slice_type(A100_40GB, "1g.5gb")
    times = [cost_law.point(m, "efficientnet", of, A100_40GB, shape, 1410, 8).mean_ms for m in (with_host, without)]
    assert times[0] - times[1] == pytest.approx(with_host.families["efficientnet"].host_ms)


def test_the_calibration_reproduces_the_constants(capsys: pytest.CaptureFixture[str]) -> None:
    script("cost_law_fit")  # which it imports from its folder
    calibrate = script("calibrate")
    missing = [n for n in (calibrate.TIMINGS, calibrate.SWEEP) if not (DATA / n).is_file()]
    if missing:
        pytest.skip(f"no {missing} in {DATA}: set TREFOIL_DATA to the evaluation data")
    found = calibrate.rounded(calibrate.calibrate(DATA))
    with capsys.disabled():
        print()
        calibrate.report(found)
    shipped = json.loads((PROFILES / "constants.json").read_text())
    assert found["sources_sha256"] == shipped["sources_sha256"]
    assert found["latency"] == pytest.approx(shipped["latency"], rel=1e-2)
    assert found["idle_w"] == pytest.approx(shipped["idle_w"], rel=1e-2)
    for name, family in shipped["families"].items():
        assert found["families"][name]["law"] == pytest.approx(family["law"], rel=2e-2), name
    for error in found["errors"]["sweep"]:
        if not error["saturated"]:
            assert abs(error["joules_error"]) < 0.05, error
            assert abs(error["p95_error"]) < 0.12, error
    held = [e["held_out_median"] for name, e in found["errors"]["latency"].items() if name != calibrate.NEVER_FITTED]
    assert max(held) < 0.15
