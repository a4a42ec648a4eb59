"""What a Triton repository does to whoever imports or serves it: refused in one line, nothing copied, nothing left."""

import io
import os
import stat
from contextlib import contextmanager

import pytest

from tests.support.hostile_repository import ATTACKS, MODEL, NAMES, SECRET, leaves_nothing, make
from tests.unit.cli.test_family import done, imported, refused, run
from trefoil.cli.family import import_family
from trefoil.core.errors import CatalogError
from trefoil.runtime.given.repository_names import opened
from trefoil.runtime.model_files import contract
from trefoil.runtime.repository import load_family

FAMILY = """name = "toy"
metric = "accuracy"
[classes.""]
percentile = 95.0
latency_ms = 50.0
[[variants]]
name = "small"
version = 1
accuracy = 0.7
accuracy_source = "a test"
memory_mib = 100
load_s = 1.0
macs = 0
licence = "none"
"""


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_repository_is_refused_by_name_and_leaves_nothing(attack, tmp_path):
    repository, secret = make(tmp_path)
    strike, names = ATTACKS[attack]
    strike(repository / MODEL, secret)
    result = imported(repository)
    refused(result, names)
    assert SECRET not in result.output
    assert len(result.output.strip().splitlines()) == 1
    assert leaves_nothing(tmp_path) == []


@pytest.mark.parametrize("name", NAMES)
def test_names_are_no_paths(name, tmp_path):
    repository, _ = make(tmp_path)
    refused(imported(repository, as_=f"{name}=small"), "--as")
    refused(imported(repository, as_=f"toy=small,{name}", accuracies=("--accuracy", "small=0.7")))
    refused(run("assume", "--repository", repository, "--", name), "family")
    assert leaves_nothing(tmp_path) == []


def test_links_inside_of_a_repository_are_followed(tmp_path):
    repository, _ = make(tmp_path)
    there = repository / MODEL / "1" / "model.onnx"
    there.rename(repository / "shared.onnx")
    there.symlink_to("../../shared.onnx")
    done(imported(repository, "--json"))
    copied = tmp_path / "ours" / "toy" / "2" / "model.onnx"
    assert not copied.is_symlink()
    assert copied.read_bytes() == (repository / "shared.onnx").read_bytes()


@pytest.mark.parametrize("flag", [["--link"], []])
def test_what_is_imported_is_the_file_that_was_judged(flag, tmp_path, monkeypatch):
    """It is swapped for a link to a secret once it is judged."""
    repository, secret = make(tmp_path)
    there = repository / MODEL / "1" / "w.bin"
    there.write_bytes(b"weights")

    @contextmanager
    def swapped(path, *bounds):
        with opened(path, *bounds) as file:
            if path.name == there.name:
                there.rename(tmp_path / "weights")
                there.symlink_to(secret)
            yield file

    monkeypatch.setattr(import_family, "opened", swapped)
    done(imported(repository, "--json", *flag))
    (found,) = (tmp_path / "ours").rglob("w.bin")
    assert there.is_symlink()
    assert not found.is_symlink()
    assert found.read_bytes() == b"weights"


def test_of_a_file_that_grows_while_it_is_copied_as_much_is_copied_as_was_judged(tmp_path, monkeypatch):
    repository, _ = make(tmp_path)
    there = repository / MODEL / "1" / "w.bin"
    there.write_bytes(bytes(100))

    class Growing(io.FileIO):
        def read(self, size=-1):
            assert there.stat().st_size < 2**24, "it has no end"
            with there.open("ab") as more:
                more.write(bytes(2**20))
            return super().read(size)

    @contextmanager
    def growing(path, *bounds):
        with opened(path, *bounds) as file:
            yield Growing(os.dup(file.fileno())) if path.name == there.name else file

    monkeypatch.setattr(import_family, "opened", growing)
    done(imported(repository, "--json"))
    (found,) = (tmp_path / "ours").rglob("w.bin")
    assert found.stat().st_size == 100


def test_a_copy_may_be_read_by_no_more_than_its_source_and_runs_as_nobody(tmp_path):
    repository, _ = make(tmp_path)
    for mode, wanted in ((0o600, 0o600), (0o6755, 0o644), (0o640, 0o640)):
        (repository / MODEL / "1" / "model.onnx").chmod(mode)
        done(imported(repository, "--json", as_=f"toy{mode}=small,large"))
        copied = tmp_path / "ours" / f"toy{mode}" / "2" / "model.onnx"
        assert stat.S_IMODE(copied.stat().st_mode) == wanted


def test_what_a_killed_import_has_left_is_removed_by_the_next(tmp_path):
    repository, _ = make(tmp_path)
    dead, alive = (tmp_path / "ours" / f".import-{pid}-x" for pid in (2**22 + 1, os.getpid()))
    for left in (dead, alive):
        (left / "toy").mkdir(parents=True)
    done(imported(repository, "--json"))
    assert not dead.exists()
    assert alive.exists(), "another import is under way"


def test_more_than_the_disk_has_room_for_is_not_begun(tmp_path):
    repository, _ = make(tmp_path)
    with (repository / MODEL / "1" / "weights.bin").open("wb") as file:
        file.truncate(2**38 - 1)
    refused(imported(repository), "bytes", "are copied")
    assert leaves_nothing(tmp_path) == []


# --- a repository that is served --------------------------------------------------------------------------------------


def served(tmp_path, text=FAMILY):
    repository, secret = make(tmp_path)
    (repository / "small").rename(repository / "toy")
    config = (repository / "toy" / "config.pbtxt").read_text().replace("small", "toy")
    (repository / "toy" / "config.pbtxt").write_text(
        f'name: "toy"\n{config}' if 'name: "toy"' not in config else config
    )
    (repository / "toy" / "family.toml").write_text(text)
    return repository, secret


BOMBS = {
    "deep": "x = " + "[" * 100_000,
    "many digits": "x = " + "9" * 5000,
    "large": "# " + "x" * 2**19,
    "dotted": ".".join("a" * 100_000) + " = 1",
    "memory": FAMILY.replace("memory_mib = 100", "memory_mib = 99999999999999999999"),
    "macs": FAMILY.replace("macs = 0", f"macs = {2**62}"),
    "version": FAMILY.replace("version = 1", f"version = {2**40}"),
    "name": FAMILY.replace('name = "small"', 'name = "../../x"'),
    "slo": FAMILY.replace("latency_ms = 50.0", "latency_ms = 1e300"),
    "licence": FAMILY.replace('"none"', f'"{"x" * 10_000}"'),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_family_file_is_bounded_and_in_range(bomb, tmp_path):
    repository, _ = served(tmp_path, BOMBS[bomb])
    with pytest.raises(CatalogError, match=r"family.toml.*Remedy: "):
        load_family(repository / "toy")


@pytest.mark.parametrize("name", ["family.toml", "config.pbtxt", "profile.csv"])
@pytest.mark.parametrize("kind", ["link", "FIFO", "device", "sparse"])
def test_texts_of_a_family_are_plain_files_of_its_repository(name, kind, tmp_path):
    repository, secret = served(tmp_path)
    path = repository / "toy" / name
    path.unlink(missing_ok=True)
    if kind == "sparse":
        path.touch()
        os.truncate(path, 2**40)
    else:
        os.mkfifo(path) if kind == "FIFO" else path.symlink_to(secret if kind == "link" else "/dev/zero")
    with pytest.raises(CatalogError, match=f"{name}.*Remedy: ") as error:
        (contract(repository, "toy") if name == "config.pbtxt" else load_family(repository / "toy"))
    assert SECRET not in str(error.value)


FORBIDDEN = {
    "operators of its own": 'model_operations { op_library_filename: "x.so" }',
    "another library": 'runtime: "x.so"',
    "an agent of Triton": 'model_repository_agents { agents { name: "x" } }',
    "a file to warm up with": 'model_warmup { name: "x" batch_size: 1 }',
    "an environment": 'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "/tmp/x.tar.gz" } }',
    "an engine's cache": 'optimization { execution_accelerators { gpu_execution_accelerator { name: "tensorrt" '
    'parameters { key: "trt_engine_cache_path" value: "../x" } } } }',
    "labels elsewhere": 'output { name: "z" data_type: TYPE_FP32 dims: 1 label_filename: "../../secret" }',
    "a file elsewhere": 'default_model_filename: "../../../secret"',
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_a_contract_makes_triton_read_nothing_else(what, tmp_path):
    repository, _ = served(tmp_path)
    contract(repository, "toy")
    path = repository / "toy" / "config.pbtxt"
    path.write_text(path.read_text() + FORBIDDEN[what])
    with pytest.raises(CatalogError, match=r"config.pbtxt.*Remedy: "):
        contract(repository, "toy")
