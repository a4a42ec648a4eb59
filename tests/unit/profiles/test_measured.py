"""What `trefoil family profile` makes of its windows: meters, files, refusals. Real Tritons: tests/integration."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from power_agent.triton.slice_launch import SliceSpec
from protos.power_agent.v1 import power_agent_pb2
from trefoil.core.common import Basis
from trefoil.core.device_types import cpu_quota, cpu_range, device_type, slice_type
from trefoil.core.energy import EnergyMethod, EnergySample
from trefoil.core.errors import CatalogError, NotFound, SettingError
from trefoil.profiler.energy_meter import EnergyLog, MeteredEnergy, active_j_per_batch, energy_between
from trefoil.profiler.places import NodePlace
from trefoil.profiler.profile_csv import (
    ProfilePoint,
    ProfileProvenance,
    estimated_j,
    profile_text,
    raise_to_monotone,
    selected_variants,
    write_profile,
)
from trefoil.profiler.session import MeasuredSlice, ProfileSpec, Session
from trefoil.runtime import codec
from trefoil.runtime.clock import ManualClock
from trefoil.runtime.repository import load_family

FOLDER = Path(__file__).resolve().parents[3] / "model_repository" / "digits"
ORIGIN = ProfileProvenance("a test", "2026-11-21", "abc1234", simulated=False)
FAMILY, _ = load_family(FOLDER)
POINT = ProfilePoint("cpu:2", "cpu:1", "digits-xs", 1, 0, (1.0, 2.0, 3.0), 900.0, 0.01, 16, 500)


def every_variant(*points: ProfilePoint) -> list[ProfilePoint]:
    return [replace(point, variant=variant.name) for variant in FAMILY.variants for point in points]


@pytest.mark.parametrize(
    ("kind", "shape", "asked", "hosted", "threads"),
    [
        ("cpu:16", "cpu:1", 0, 1, 1), ("cpu:16", "cpu:16", 0, 16, 1), ("cpu:16", "quota:1.5", 0, 2, 1),
        ("cpu:16", "cpu:16", 1, 1, 16), ("cpu:16", "cpu:16", 4, 4, 4), ("A100-SXM4-40GB", "2g.10gb", 0, 1, 1),
    ],
)  # fmt: skip
def test_what_is_measured_is_hosted_as_plans_host_it(kind, shape, asked, hosted, threads):
    board = device_type(kind)
    place = NodePlace("n/device", board, slice_type(board, shape), 0, asked)
    (part,) = place.hosting("digits", FAMILY.variants[0], 8).slices
    assert [one.instances for one in part.hosted] == [hosted]
    of = SliceSpec("s", FOLDER, FOLDER, part.hosted, 1, 2, "", cpu_range(shape, 0), cpu_quota(shape))
    assert of.threads == threads


def test_points_at_power_limits_have_a_column_of_their_own(tmp_path):
    free = ProfilePoint("A100-SXM4-40GB", "7g.40gb", "x", 1, 1410, (10.0, 11.0, 12.0), 100.0, 2.0, 16, 500)
    limited = replace(free, clock_mhz=-150, latency_ms=(13.0, 14.0, 15.0), energy_active_j=1.5)
    path = tmp_path / "profile.csv"
    path.write_text(profile_text(every_variant(free, limited), ORIGIN, estimate_energy=False))
    assert write_profile(tmp_path / "made.csv", FOLDER, path.read_text()) == 2 * len(FAMILY.variants)
    _, rows = load_family(FOLDER, path)
    assert {(row.clock_mhz, row.latency_ms_p50, row.clock_sensitivity) for row in rows} == {
        (1410, 10.0, 1.0),
        (-150, 13.0, 1.0),
    }
    assert "limit_watts" not in profile_text(every_variant(free), ORIGIN, estimate_energy=False)
    unmetered = replace(limited, energy_active_j=None)
    assert estimated_j(unmetered) <= (150.0 - 55.0 * 0.85) * 13e-3, "no more than the limit leaves"
    assert estimated_j(unmetered) < estimated_j(replace(unmetered, clock_mhz=1410))


def sample(starts_at_s: float, joules: float, method: EnergyMethod = EnergyMethod.NVML_COUNTER) -> EnergySample:
    return EnergySample(
        device="n/gpu0", starts_at_s=starts_at_s, ends_at_s=starts_at_s + 1, counter_j=joules, method=method
    )


def test_only_whole_samples_of_this_device_inside_the_window_count() -> None:
    samples = [sample(float(s), 10.0 * s) for s in range(8)]
    samples.append(replace(sample(3.0, 1000.0), device="n/gpu1"))
    found = energy_between(samples, "n/gpu0", 2.5, 6.2)
    assert found == MeteredEnergy(10.0 * (3 + 4 + 5), 3.0, False)
    assert found is not None
    assert found.watts == 40.0


class BusyAgent:
    """Tells 40 W in samples of so many seconds, so late."""

    def __init__(self, clock: ManualClock, length_s: float, late_s: float) -> None:
        self.clock, self.length_s, self.late_s = clock, length_s, late_s

    async def WatchEnergy(self, _request):
        await self.clock.sleep(self.late_s)
        at_s = 0.0
        while True:
            await self.clock.sleep(self.length_s)
            told = replace(sample(at_s, 40.0 * self.length_s), ends_at_s=at_s + self.length_s)
            yield power_agent_pb2.WatchEnergyResponse(sample=codec.to_proto(told))
            at_s += self.length_s


@pytest.mark.parametrize(("length_s", "late_s"), [(1.0, 0.0), (1.4, 0.0), (1.0, 3.0), (3.0, 2.0)])
async def test_a_busy_agent_s_long_and_late_samples_are_waited_for(length_s, late_s) -> None:
    clock = ManualClock()
    log = EnergyLog(BusyAgent(clock, length_s, late_s))
    spec = ProfileSpec(FAMILY, FOLDER, ("digits-xs",), (1,), (), 0.5)
    session = Session(spec, clock, log, print, [])
    await asyncio.sleep(0)
    await clock.advance(late_s + length_s + 0.3)
    measured = asyncio.create_task(
        session.measure_with_energy(MeasuredSlice("n/gpu0", "A100", "1g.5gb", 0), session.idle_window)
    )
    for _ in range(600):
        await clock.advance(0.1)
    window, energy = await asyncio.wait_for(measured, 5)
    await log.close()
    assert energy is not None
    assert energy.watts == pytest.approx(40.0)
    assert 2.0 <= energy.seconds <= window.ends_at_s - window.starts_at_s


def test_no_meter_and_too_short_a_window_are_unknown_not_zero() -> None:
    samples = [sample(float(s), 10.0) for s in range(8)]
    assert energy_between(samples, "n/gpu0", 2.0, 3.9) is None
    assert energy_between([], "n/gpu0", 0.0, 10.0) is None
    assert energy_between([sample(float(s), 0.0, EnergyMethod.NONE) for s in range(8)], "n/gpu0", 0.0, 8.0) is None
    assert active_j_per_batch(None, MeteredEnergy(10.0, 2.0, False), 5.0) is None
    assert active_j_per_batch(
        MeteredEnergy(100.0, 2.0, False), MeteredEnergy(300.0, 2.0, False), 20.0
    ) == pytest.approx(5.0)


def test_the_file_is_read_back_with_its_provenance(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "profile.csv"
    second = replace(POINT, batch=2, latency_ms=(1.5, 2.5, 3.5), energy_active_j=0.015)
    text = profile_text(every_variant(POINT, second), ORIGIN, estimate_energy=False)
    assert write_profile(out, FOLDER, text) == 8
    _, rows = load_family(FOLDER, out)
    assert rows[0].device_type == "cpu:2"
    assert rows[0].energy_active_j_per_batch == 0.01
    assert rows[0].power_w == pytest.approx(10.0)
    provenance = rows[0].provenance
    assert provenance is not None
    assert provenance.basis == Basis.MEASURED


def test_points_at_two_clocks_get_the_sensitivity_that_fits_them_and_others_an_empty_cell(tmp_path: Path) -> None:
    gpu = replace(POINT, device_type="A100-SXM4-40GB", slice_type="7g.40gb", clock_mhz=1410)
    slow = replace(gpu, clock_mhz=705, latency_ms=(1.3, 2.6, 3.9))
    text = profile_text([gpu, slow, POINT], ORIGIN, estimate_energy=False)
    out = tmp_path / "profile.csv"
    write_profile(out, FOLDER, text, [POINT.variant])
    rows = load_family(FOLDER, out, [POINT.variant])[1]
    assert {row.clock_mhz: row.clock_sensitivity for row in rows} == {
        1410: pytest.approx(0.3), 705: pytest.approx(0.6 / 1.3, abs=1e-4), 0: 1.0,
    }  # fmt: skip
    assert "clock_sensitivity" not in profile_text([POINT], ORIGIN, estimate_energy=False)


def test_some_variants_may_be_profiled_alone_and_the_rest_is_missed_when_the_file_is_used(tmp_path: Path) -> None:
    out, text = tmp_path / "profile.csv", profile_text([POINT], ORIGIN, estimate_energy=False)
    assert write_profile(out, FOLDER, text, [POINT.variant]) == 1
    with pytest.raises(CatalogError, match="no row"):
        load_family(FOLDER, out)


def test_without_a_meter_joules_are_refused_or_called_modelled() -> None:
    points = every_variant(replace(POINT, energy_active_j=None))
    with pytest.raises(SettingError, match="--estimate-energy"):
        profile_text(points, ORIGIN, estimate_energy=False)
    text = profile_text(points, ORIGIN, estimate_energy=True)
    assert text.startswith("# basis: modelled\n")
    assert "no meter" in text.splitlines()[1]
    assert estimated_j(points[0]) == pytest.approx((10.0 - 3.0) / 2 * 1e-3)  # cpu:2, half of its span, one ms


def test_simulated_joules_are_synthetic() -> None:
    text = profile_text(every_variant(POINT), replace(ORIGIN, simulated=True), estimate_energy=False)
    assert text.startswith("# basis: synthetic\n")


def test_noise_that_makes_a_larger_batch_cheaper_is_raised_and_counted() -> None:
    low = replace(POINT, batch=2, latency_ms=(0.9, 2.5, 2.6), energy_active_j=0.005)
    rows, raised = raise_to_monotone([low, POINT])
    assert raised == 1
    assert rows[1].latency_ms == (1.0, 2.5, 3.0)
    assert rows[1].energy_active_j == 0.01
    assert "1 points raised" in profile_text([POINT, low], ORIGIN, estimate_energy=False)


def test_a_file_that_would_be_refused_is_not_kept(tmp_path: Path) -> None:
    out = tmp_path / "profile.csv"
    with pytest.raises(CatalogError, match="profile this variant"):
        write_profile(out, FOLDER, profile_text([POINT], ORIGIN, estimate_energy=False))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("field", "values"),
    [("batches", (0,)), ("batches", ()), ("rates", (2.0,)), ("window_s", 0.0)],
)
def test_what_cannot_be_measured_is_refused(field: str, values: object) -> None:
    spec = ProfileSpec(FAMILY, FOLDER, ("digits-xs",), (1,), (0.5,), 1.0)
    with pytest.raises(SettingError, match="Remedy"):
        replace(spec, **{field: values})  # type: ignore[arg-type]


def test_unknown_variants_are_named() -> None:
    assert selected_variants(FAMILY, []) == [variant.name for variant in FAMILY.variants]
    with pytest.raises(NotFound, match="digits-xxl"):
        selected_variants(FAMILY, ["digits-xxl"])
