"""The committed family `digits`: its files agree with each other, and its profile is what its script writes."""

import csv
import importlib.util
import tomllib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from trefoil.core.device_types import device_type
from trefoil.core.power import density

MODELS = Path(__file__).resolve().parents[2] / "model_repository"
FAMILY = MODELS / "digits"


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return module(FAMILY / "make_profile.py")


def committed() -> tuple[list[str], list[dict[str, str]]]:
    lines = (FAMILY / "profile.csv").read_text().splitlines()
    header = [line for line in lines if line.startswith("#")]
    return header, list(csv.DictReader(lines[len(header) :]))


def variants() -> dict[str, dict[str, float]]:
    return {v["name"]: v for v in tomllib.loads((FAMILY / "family.toml").read_text())["variants"]}


def test_the_committed_profile_is_what_its_script_writes_and_says_that_it_is_synthetic(script):
    header, rows = committed()
    assert [list(row.values()) for row in rows] == script.rows(equal_joules=False)
    assert tuple(rows[0]) == tuple(script.COLUMNS)
    assert header[0] == "# basis: synthetic"
    assert [line.split(":")[0] for line in header] == ["# basis", "# source", "# machine", "# date", "# commit"]


@pytest.mark.parametrize(("family", "slo"), [("digits", (75.0, 95.0)), ("resnets", (750.0, 99.0))])
def test_the_committed_contract_and_family_file_are_what_training_writes(family, slo, tmp_path):
    common, kept, folder = module(MODELS / "_training" / "common.py"), MODELS / family, tmp_path / family
    folder.mkdir()
    tables = [
        common.variant_table(
            kept,
            one["name"],
            one["version"],
            source=one["accuracy_source"],
            **{name: one[name] for name in ("accuracy", "memory_mib", "macs", "licence")},
        )
        for one in tomllib.loads((kept / "family.toml").read_text())["variants"]
    ]
    common.write_family_of_digits(folder, *slo, tables)
    for name in ("config.pbtxt", "family.toml"):
        assert (folder / name).read_text() == (kept / name).read_text()


def test_energy_time_and_throughput_of_a_row_agree():
    expected = {"digits-xs": 0.97, "digits-s": 0.98, "digits-m": 0.99, "digits-l": 1.0}
    for row in committed()[1]:
        mean_s = int(row["batch"]) / float(row["throughput_per_s"])
        energy_j = float(row["energy_active_j_per_batch"])
        found = density(device_type(row["device_type"]), row["slice_type"], int(row["clock_mhz"]), mean_s, energy_j)
        assert found == pytest.approx(expected[row["variant"]], rel=1e-4)
        assert float(row["latency_ms_p50"]) == pytest.approx(mean_s * 1e3, rel=2e-3)
        assert float(row["latency_ms_p50"]) < float(row["latency_ms_p95"]) < float(row["latency_ms_p99"])


def test_each_step_of_accuracy_costs_more_joules_than_the_one_before():
    """A convex frontier on every slice type: no variant is beaten by a mix of its neighbours."""
    accuracy = {name: v["accuracy"] for name, v in variants().items()}
    order = sorted(accuracy, key=accuracy.__getitem__)
    for place in {(row["device_type"], row["slice_type"]) for row in committed()[1]}:
        energy_j = {
            row["variant"]: float(row["energy_active_j_per_batch"])
            for row in committed()[1]
            if (row["device_type"], row["slice_type"]) == place and row["batch"] == "1"
        }
        slopes = np.diff([energy_j[v] for v in order]) / np.diff([accuracy[v] for v in order])
        assert np.all(np.diff(slopes) > 0), place


def test_the_control_profile_costs_the_same_for_every_variant(script):
    table = [dict(zip(script.COLUMNS, row, strict=True)) for row in script.rows(equal_joules=True)]
    points: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for row in table:
        rest = tuple(value for name, value in row.items() if name != "variant")
        points.setdefault((row["device_type"], row["slice_type"], row["batch"]), set()).add(rest)
    assert all(len(same) == 1 for same in points.values())


def test_a_whole_gpu_is_as_fast_as_slices_of_as_many_streaming_multiprocessors(script):
    """The T4's 40 SMs at 1590 MHz are between 42 and 56 SMs of an A100 at 1410 MHz; smaller GPUs are slower."""
    single_ms = {
        (row["device_type"], row["slice_type"]): float(row["latency_ms_p50"])
        for row in committed()[1]
        if row["variant"] == "digits-l" and row["batch"] == "1"
    }
    t4 = single_ms["Tesla T4", "whole"]
    assert single_ms["A100-SXM4-40GB", "4g.20gb"] < t4 < single_ms["A100-SXM4-40GB", "3g.20gb"]
    assert single_ms["Tesla V100-SXM2-32GB", "whole"] < t4 < single_ms["Tesla P4", "whole"]


def test_the_images_that_loads_send_are_others_than_those_that_set_the_accuracies():
    seen: set[bytes] = set()
    for name, count in (("validation.npz", 299), ("heldout.npz", 300)):
        with np.load(FAMILY / name) as data:
            images, labels = data["images"], data["labels"]
        assert images.shape == (count, 8, 8)
        assert images.dtype == np.uint8
        assert images.max() == 16
        assert np.bincount(labels).min() >= 28
        assert np.bincount(labels).max() <= 31
        these = {image.tobytes() for image in images}
        assert len(these) == count
        assert not seen & these
        seen |= these
    assert all(v["accuracy_source"].startswith("299 validation images") for v in variants().values())


def test_the_readme_states_the_accuracies_of_family_toml():
    text = (FAMILY / "README.md").read_text()
    for name, variant in variants().items():
        assert f"| {name} | {variant['version']} | {variant['accuracy']:.4f} | " in text
        assert f" | {variant['macs']:,} |" in text
