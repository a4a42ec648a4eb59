"""Model files that change underneath are refused by name, and used again when they are put back."""

import os
import shutil
from pathlib import Path

import pytest
import structlog

from power_agent.durability.journal import Journal
from power_agent.settings import PowerAgentSettings
from power_agent.slices.node_state import Node
from power_agent.triton import model_digests
from power_agent.triton.model_digests import ModelDigests
from power_agent.watch.model_watch import ModelWatch
from tests.support.engine_family import write_family
from trefoil.core.errors import CatalogError
from trefoil.runtime.clock import ManualClock
from trefoil.runtime.given.catalog_files import CatalogFiles
from trefoil.runtime.repository import load_catalog, stated_digests
from trefoil.runtime.telemetry import Metrics

MODELS = Path("model_repository")
CATALOG = load_catalog(MODELS)
SECOND = ("digits", 2)


@pytest.fixture
def models(tmp_path):
    """One family with files."""
    shutil.copytree(MODELS, tmp_path / "models", ignore=shutil.ignore_patterns("resnets", "pydoc"))
    return tmp_path / "models"


def removed(folder: Path) -> None:
    shutil.rmtree(folder)


def emptied(folder: Path) -> None:
    (folder / "model.onnx").unlink()


def cut(folder: Path) -> None:
    os.truncate(folder / "model.onnx", 100)


def changed(folder: Path) -> None:
    """One bit, its size and its time as before."""
    file = folder / "model.onnx"
    data, stat = bytearray(file.read_bytes()), file.stat()
    data[len(data) // 2] ^= 1
    file.unlink()
    file.write_bytes(bytes(data))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("change", [removed, emptied, cut, changed])
@pytest.mark.parametrize("stated", [True, False], ids=["stated", "seen"])
def test_what_is_not_what_it_was_is_refused_until_it_is_put_back(models, change, stated):
    digests = ModelDigests(models, CATALOG, stated_digests(models) if stated else {})
    assert digests.refusals() == {}
    folder, kept = models / "digits" / "2", models / "kept"
    shutil.copytree(folder, kept)
    change(folder)
    found = digests.refusals()
    assert list(found) == [SECOND]
    assert str(folder / "model.onnx") in found[SECOND]
    with pytest.raises(CatalogError, match=r"version = 2: .*model.onnx .*Remedy: put the file back"):
        digests.check(*SECOND)
    digests.check("digits", 1)
    shutil.rmtree(folder, ignore_errors=True)
    kept.rename(folder)
    assert digests.refusals() == {}
    digests.check(*SECOND)


@pytest.mark.parametrize("change", [removed, cut, changed])
def test_a_generative_familys_graph_of_another_hash_is_refused(tmp_path, change):
    shutil.copytree(MODELS / "pydoc", tmp_path / "pydoc")
    digests = ModelDigests(tmp_path, CATALOG, stated_digests(tmp_path))
    assert not [version for version in digests.refusals() if version[0] == "pydoc"]
    change(tmp_path / "pydoc" / "2")
    assert list(digests.refusals()) == [("pydoc", 2)]


@pytest.mark.parametrize("change", [removed, cut, changed])
def test_what_family_toml_states_holds_for_an_agent_that_starts_later_as_well(models, change):
    change(models / "digits" / "2")
    assert list(ModelDigests(models, CATALOG, stated_digests(models)).refusals()) == [SECOND]


def test_of_a_family_without_model_files_nothing_is_said(models):
    for version in (1, 2, 3, 4):
        removed(models / "digits" / str(version))
    digests = ModelDigests(models, CATALOG, stated_digests(models))
    assert digests.refusals() == {}
    digests.check("albert", 1)


def test_a_file_is_read_once_while_it_is_the_same(models, monkeypatch):
    digests, opened = ModelDigests(models, CATALOG, {}), []
    strange = model_digests._strange  # asked once for each reading
    monkeypatch.setattr(model_digests, "_strange", lambda path, *rest: opened.append(path) or strange(path, *rest))
    for _ in range(3):
        assert digests.refusals() == {}
    assert len([path for path in opened if path.name == "model.onnx"]) == 4


def test_what_a_node_has_is_reported_but_for_engines_of_which_each_type_of_gpu_has_its_own(models):
    digests = ModelDigests(models, CATALOG, {})
    digests.refusals()
    told = dict(entry.split(": ") for entry in digests.report())
    stated = {f"{family}/{version}": sha[:16] for (family, version), sha in stated_digests(models).items()}
    assert told == stated
    assert len(told) == 4
    (models / "digits" / "2" / "weights.bin").write_bytes(b"beside")
    again = ModelDigests(models, CATALOG, {})
    again.refusals()
    beside = dict(entry.split(": ") for entry in again.report())["digits/2"]
    assert beside.partition("+")[0] == told["digits/2"]
    assert len(beside) == 33
    config = models / "digits" / "config.pbtxt"
    config.write_text(config.read_text().replace("onnxruntime", "tensorrt"))
    for version in ("1", "2", "3", "4"):
        (models / "digits" / version / "model.plan").write_bytes(b"engine")
    engines = ModelDigests(models, CATALOG, {})
    assert engines.refusals() == {}
    assert engines.report() == ()


async def test_the_node_names_it_once_and_its_end_once(models, tmp_path):
    settings = PowerAgentSettings(node_socket=tmp_path / "node.sock", state_dir=tmp_path, model_repository=models)
    node = Node(settings, ManualClock(1e9), Journal(tmp_path, "b", "1"), CATALOG, Metrics("power_agent"))

    async def at_once(call):
        return call()

    digests = ModelDigests(models, CATALOG, {})
    watch = ModelWatch(node, CatalogFiles(models), digests, at_once)
    folder, kept = models / "digits" / "2", models / "kept"
    await watch.refresh()
    assert len(node.models) == 4
    assert node.models == digests.report()
    with structlog.testing.capture_logs() as log:
        folder.rename(kept)
        for _ in range(3):
            await watch.refresh()
        assert node.missing == (f"model digits/2: {folder / 'model.onnx'} is missing or cannot be read",)
        kept.rename(folder)
        for _ in range(3):
            await watch.refresh()
    assert node.missing == ()
    assert [line["event"] for line in log] == ["missing", "back"]


def no_json(folder: Path) -> None:
    (folder / "model.json").write_text("{")


def led_out(folder: Path) -> None:
    (folder / "weights.bin").symlink_to("/etc/hostname")


def grown(folder: Path) -> None:
    (folder / "weights.bin").write_bytes(b"other weights")


@pytest.mark.parametrize(
    ("change", "why"),
    [(no_json, "model.json"), (led_out, "weights.bin"), (grown, "weights.bin has another digest")],
)
def test_a_language_models_folder_is_hashed_whole_and_other_families_stay_as_they_are(models, change, why):
    folder = write_family(models)
    if change is grown:
        (folder / "2" / "weights.bin").write_bytes(b"weights")
    digests = ModelDigests(models, load_catalog(models), {})
    assert digests.refusals() == {}
    change(folder / "2")
    assert list(digests.refusals()) == [("chat", 2)]
    with pytest.raises(CatalogError, match=why):
        digests.check("chat", 2)
    digests.check("chat", 1)
    digests.check("digits", 2)


def test_a_model_json_that_never_was_json_is_refused_by_its_line(models):
    no_json(write_family(models) / "1")
    with pytest.raises(CatalogError, match=r"model\.json is not JSON: Expecting property name .*: line 1 column 2"):
        ModelDigests(models, load_catalog(models), {}).check("chat", 1)
