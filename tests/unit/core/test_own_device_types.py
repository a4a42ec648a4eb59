"""Your own board, as docs/device-types.md shows it: simulated as a fleet, and reported by a simulated driver."""

import re
from pathlib import Path

import pytest

from tests.support.simulated_driver import inventory_on
from trefoil.core.device_types import DEVICE_TYPES, DRIVERS, device_type
from trefoil.core.errors import SettingError
from trefoil.runtime.config import register_own_device_types
from trefoil.simulated_node.machine import Machine
from trefoil.simulator import Scenario, simulate

ROOT = Path(__file__).parents[3]
NAME = "Example E1-24GB"
[EXAMPLE] = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "device-types.md").read_text(), re.S)


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Writes a file of own device types, which this process then reads; they are gone after the test."""
    shipped, drivers = dict(DEVICE_TYPES), dict(DRIVERS)

    def write(text):
        (tmp_path / "boards.toml").write_text(text)
        monkeypatch.setenv("TREFOIL_DEVICE_TYPES", str(tmp_path / "boards.toml"))

    yield write
    for table, before in ((DEVICE_TYPES, shipped), (DRIVERS, drivers)):
        table.clear()
        table.update(before)


def test_an_own_board_serves_in_a_simulated_fleet(own, tmp_path):
    own(EXAMPLE)
    rows = (ROOT / "model_repository" / "digits" / "profile.csv").read_text()
    (tmp_path / "profile.csv").write_text(rows.replace("\nTesla T4,", f"\n{NAME},").replace(",1590,", ",2040,"))
    family = {
        "name": "digits",
        "repository": ROOT / "model_repository",
        "profile": tmp_path / "profile.csv",
        "arrivals": {"rate_per_s": 20.0},
    }
    scenario = Scenario(duration_s=120.0, nodes=[{"devices": [NAME, NAME]}], families=[family])
    summary = simulate(scenario).summary
    assert summary.answered > 2000
    assert 2 * device_type(NAME).sleep_w * 120.0 < summary.joules < 2 * device_type(NAME).max_w * 120.0


def test_a_simulated_driver_reports_an_own_board(own):
    own(EXAMPLE)
    register_own_device_types()
    with inventory_on(Machine(devices=(NAME, "Tesla T4"))) as inventory:
        assert [found.type for found in inventory.list_devices()] == [NAME, "Tesla T4"]
        assert inventory.power_limits("node0/gpu0").max_w == device_type(NAME).power_limit_max_w


@pytest.mark.parametrize(
    ("right", "wrong", "parts"),
    [
        ("idle_w = 16.0", 'idle_w = "low"', (f"{NAME}.idle_w = 'low'", "valid number")),
        ("idle_w = 16.0", "idle_w = 6.0", (f"{NAME}: sleep_w 11.0 <= idle_w 6.0",)),
        ("wake_s = 1.0", "wake_s = 1.0\nwatts = 7", (f"{NAME}.watts = 7", "no such field", "remove it")),
        ("max_w = 72.0\n", "", (f"{NAME}.max_w", "Field required")),
        ("slices.whole", 'slices."1g.5gb"', ("a whole_gpu has one slice",)),
        (NAME, "Tesla T4", ("Tesla T4", "is a device type already", "a name of its own")),
        (NAME, "E1/24GB", ("E1/24GB", "is not a name of a device type")),
        ("[8, 9]", "[8, 9", ("is not valid TOML",)),
    ],
)
def test_a_mistake_is_named_with_file_type_field_and_remedy(own, right, wrong, parts):
    own(EXAMPLE.replace(right, wrong))
    with pytest.raises(SettingError) as refused:
        register_own_device_types()
    for part in (*parts, "boards.toml", "Remedy"):
        assert part in str(refused.value)
    assert NAME not in DEVICE_TYPES
