"""One package is one meter, however many zones show it; what is not a share is not activity."""

import pytest

from power_agent.devices.dcgm import parse_metrics
from power_agent.devices.rapl import RaplCounter, RaplUnavailable, find_zones
from tests.public_reports.meters import DCGM, RAPL
from trefoil.runtime.clock import ManualClock

START_UJ = 5_000_000_000


def show(root, zones, drawn):
    for folder, name, joules in zones:
        zone = root / folder
        zone.mkdir(exist_ok=True)
        (zone / "name").write_text(f"{name}\n")
        (zone / "max_energy_range_uj").write_text("262143328850\n")
        (zone / "energy_uj").write_text(f"{START_UJ + round(joules * drawn * 1e6)}\n")


@pytest.mark.parametrize("report", RAPL, ids=str)
def test_joules_of_a_package_count_once(report, tmp_path):
    clock = ManualClock(1e6)
    show(tmp_path, report.input, 0)
    counter = RaplCounter(tmp_path, clock, "boot")
    assert counter.energy_j() == 0.0
    clock.move(10.0)
    show(tmp_path, report.input, 1)
    assert counter.energy_j() == pytest.approx(report.expected)


def test_a_zone_that_cannot_be_read_is_replaced_by_its_mirror(tmp_path):
    zones = [("intel-rapl:0", "package-0", 1), ("intel-rapl-mmio:0", "package-0", 1)]
    show(tmp_path, zones, 0)
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("")
    assert [zone.name for zone in find_zones(tmp_path)] == ["intel-rapl-mmio:0"]


@pytest.mark.parametrize("range_uj", ["0", "-1"])
def test_a_zone_without_a_range_is_no_meter_that_stands_at_0(range_uj, tmp_path):
    show(tmp_path, [("intel-rapl:0", "package-0", 1)], 0)
    (tmp_path / "intel-rapl:0" / "max_energy_range_uj").write_text(range_uj)
    with pytest.raises(RaplUnavailable, match=f"max_energy_range_uj is {range_uj}.*Remedy"):
        RaplCounter(tmp_path, ManualClock(1e6), "boot")


@pytest.mark.parametrize("report", DCGM, ids=str)
def test_activity_out_of_range_is_absent(report):
    lines = [f'{name}{{gpu="0",UUID="GPU-1",GPU_I_ID="{i}"}} {value}' for name, i, value in report.input]
    assert parse_metrics("\n".join(lines) + "\n") == {("GPU-1", i): share for i, share in report.expected.items()}
