"""Transcripts of `power_agent.doctor.hardware_report`, of simulated nodes and of hardware, hold each other's shape.

A transcript of hardware is dropped into transcripts/ as it was printed. Where its GPUs are of a type that is simulated,
the tables of that type must say the same. The simulated one is written again by running this file.
"""

import json
from pathlib import Path

import pytest

from power_agent.doctor.hardware_report import hardware_report
from power_agent.watch.capabilities import probe_devices
from tests.support.simulated_driver import inventory_on
from trefoil.core.device_types import DRIVERS
from trefoil.simulated_node.machine import Machine

FOLDER = Path(__file__).parent / "transcripts"
SIMULATED = FOLDER / "simulated.json"
FILES = sorted(FOLDER.glob("*.json"))


def transcript(*types):
    """Of a machine of these types, as the program prints it; two seconds pass between the readings."""
    machine = Machine(devices=types)
    machine.advance(1.0)
    with inventory_on(machine) as inventory:
        can = probe_devices(inventory, inventory.list_devices(), "")
        found = {"simulated": True, **hardware_report(inventory, can, lambda _pause_s: machine.advance(2.0))}
    return json.loads(json.dumps(found))


def refused(value):
    return isinstance(value, dict) and set(value) == {"error", "code"}


def shape(value, path=""):
    """Every path of a transcript; answers that a device may lack, and names that differ, count as one."""
    if path in ("/missing", "/lost", "/devices/capabilities") or refused(value) or value is None:
        return {path}
    if isinstance(value, dict):
        return {part for key, inner in value.items() for part in shape(inner, f"{path}/{key}")}
    if isinstance(value, list):
        return {path} | {part for inner in value for part in shape(inner, path)}
    return {path}


def known(paths):
    """Paths below an answer that one of two transcripts lacks are not a difference."""
    optional = ("/devices/mig/", "/devices/clocks/", "/devices/power/", "/cpu", "/driver_load_id")
    return {path for path in paths if not path.startswith(optional)}


@pytest.fixture(scope="module")
def simulated():
    return transcript(*DRIVERS)


def lasting(found):
    """What does not depend on how long the machine ran, and how hard."""
    devices = [{name: value for name, value in device.items() if name != "counters"} for device in found["devices"]]
    return {**found, "devices": devices}


def test_a_simulated_node_prints_what_it_printed(simulated):
    assert lasting(simulated) == lasting(json.loads(SIMULATED.read_text()))
    for device in simulated["devices"]:
        first, second = device["counters"]
        if first["energy_j"] is not None:
            assert second["energy_j"] - first["energy_j"] == pytest.approx(2.0 * first["power_w"], rel=0.2)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_transcript_has_the_shape_of_the_simulated_one(file, simulated):
    found = json.loads(file.read_text())
    assert known(shape(found)) == known(shape(simulated))
    for device in found["devices"]:
        first, second = device["counters"]
        if first["energy_j"] is not None:
            assert second["energy_j"] >= first["energy_j"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_types_that_are_simulated_are_simulated_as_they_are(file, simulated):
    models = {device["type"]: device for device in simulated["devices"]}
    for device in json.loads(file.read_text())["devices"]:
        model = models.get(device["type"])
        if model is None:
            continue
        assert (device["kind"], device["architecture"]) == (model["kind"], model["architecture"])
        assert (device["counters"][0]["energy_j"] is None) == (model["counters"][0]["energy_j"] is None)
        if not refused(device["clocks"]["supported"]):
            assert device["clocks"]["supported"]["range"] == model["clocks"]["supported"]["range"]
        if not refused(device["power"]["min_default_max_w"]):
            assert device["power"]["min_default_max_w"] == model["power"]["min_default_max_w"]
        if not refused(device["mig"]["profiles"]):
            seen = {profile["name"]: profile for profile in device["mig"]["profiles"]}
            for profile in model["mig"]["profiles"] if seen else ():
                for field in ("constant", "id", "compute_slices", "instances_max", "sm_count", "placements"):
                    assert seen[profile["name"]][field] == profile[field], profile["name"]


if __name__ == "__main__":
    SIMULATED.write_text(json.dumps(transcript(*DRIVERS), indent=1) + "\n")
