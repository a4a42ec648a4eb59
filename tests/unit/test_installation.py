"""Where families, scenarios and the Triton environment are looked for, and how that environment is made."""

import os
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from trefoil import installation
from trefoil.cli.main import app
from trefoil.cli.run.scenario import System
from trefoil.cli.run.services import link_families, with_one_repository
from trefoil.cli.run.state_directory import StatePaths
from trefoil.core.errors import NotFound, SettingError
from trefoil.installation import MODELS, find_scenario, own_repository, resolve_path, triton_environment
from trefoil.runtime.repository import family_folder, family_folders, load_catalog

ROOT = Path(__file__).resolve().parents[2]
VARIABLES = ("TREFOIL_REPOSITORY", "TREFOIL_TRITON_ENVIRONMENT", "XDG_DATA_HOME")
DIGITS = (ROOT / "model_repository" / "digits" / "family.toml").read_text()


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory of a user; what ships is this checkout's."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def add_family(repository: Path, name: str) -> Path:
    folder = repository / name
    folder.mkdir(parents=True)
    (folder / "family.toml").write_text(DIGITS.replace('name = "digits"', f'name = "{name}"'))
    return folder


def test_a_relative_path_means_the_working_directory_then_what_ships(work):
    assert resolve_path(Path("deploy/config/up.toml")) == ROOT / "deploy/config/up.toml"
    assert resolve_path(Path("deploy/config/nope.toml")) == work / "deploy/config/nope.toml"
    own = work / "deploy" / "config" / "up.toml"
    own.parent.mkdir(parents=True)
    own.touch()
    assert resolve_path(Path("deploy/config/up.toml")) == own


def test_own_families_stand_before_those_that_ship(work):
    assert family_folder(MODELS, "digits") == ROOT / MODELS / "digits"
    mine, other = add_family(work / MODELS, "mine"), add_family(work / MODELS, "digits")
    found = family_folders()
    assert (found["mine"], found["digits"], found["albert"]) == (mine, other, ROOT / MODELS / "albert")
    assert family_folder(MODELS, "ghost") == work / MODELS / "ghost", "where it would have to be"


def test_a_repository_that_is_named_stands_alone(tmp_path):
    mine = add_family(tmp_path / "theirs", "mine")
    assert family_folders(tmp_path / "theirs") == {"mine": mine}


def test_the_environment_names_ones_own_repository(tmp_path, work, monkeypatch):
    add_family(work / MODELS, "here")
    monkeypatch.setenv("TREFOIL_REPOSITORY", str(tmp_path / "theirs"))
    assert own_repository() == tmp_path / "theirs", "an import makes it"
    with pytest.raises(SettingError, match=r"TREFOIL_REPOSITORY = .*theirs.*no such folder"):
        family_folders()
    add_family(tmp_path / "theirs", "mine")
    assert {"mine", "digits"} <= family_folders().keys()
    assert "here" not in family_folders()


def test_services_read_own_families_and_those_that_ship_in_one_folder(tmp_path, work):
    paths = StatePaths(tmp_path / "state")
    for _ in range(2):  # the second launch finds the links of the first
        repository = with_one_repository(System(), paths).family.repository
    assert repository == tmp_path / "state" / "models"
    assert "digits" in {family.name for family in load_catalog(repository).families}
    mine = add_family(work / MODELS, "mine")
    for _ in range(2):
        link_families(MODELS, repository)
    assert {"mine", "digits"} <= {family.name for family in load_catalog(repository).families}
    assert (repository / "mine").resolve() == mine
    mine.rename(work / "away")
    link_families(MODELS, repository)
    assert not (repository / "mine").is_symlink()
    assert (repository / "_shared" / "model.py").is_file()


def test_a_scenario_is_a_file_or_the_name_of_one_that_ships(work):
    assert find_scenario(Path("digits")) == ROOT / "benchmarks/scenarios/digits.toml"
    (work / "mine.toml").touch()
    assert find_scenario(Path("mine.toml")) == Path("mine.toml")
    with pytest.raises(NotFound, match=r"SCENARIO = 'mine'.*clover_fleet, cpus, digits"):
        find_scenario(Path("mine"))


def test_the_triton_environment_is_the_checkouts_or_the_users(tmp_path, monkeypatch):
    assert triton_environment() == ROOT / ".venv-triton"
    monkeypatch.setattr(installation, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert triton_environment() == tmp_path / ".local/share/trefoil/triton"
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert triton_environment() == tmp_path / "data/trefoil/triton"
    monkeypatch.setenv("TREFOIL_TRITON_ENVIRONMENT", str(tmp_path / "mine"))
    assert triton_environment() == tmp_path / "mine"
    assert triton_environment(tmp_path / "named") == tmp_path / "named"


FAKE_UV = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$1" in venv) mkdir -p "$6" && touch "$6/pyvenv.cfg" ;; esac
exit $UV_CODE
"""


class TestSetupTriton:
    @pytest.fixture(autouse=True)
    def _uv(self, tmp_path, monkeypatch):
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "uv").write_text(FAKE_UV)
        (tmp_path / "bin" / "uv").chmod(0o755)
        (tmp_path / "bin" / "python").symlink_to(sys.executable)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
        monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
        monkeypatch.setenv("UV_CODE", "0")
        monkeypatch.setenv("TREFOIL_TRITON_ENVIRONMENT", str(tmp_path / "triton"))

    def run(self) -> Result:
        return CliRunner().invoke(app, ["setup", "triton"])

    def calls(self, tmp_path: Path) -> list[str]:
        return (tmp_path / "calls").read_text().splitlines()

    def test_it_is_made_of_the_locks_once(self, tmp_path):
        assert self.run().exit_code == 0
        made, *installed = self.calls(tmp_path)
        assert made.startswith("venv")
        assert made.endswith(str(tmp_path / "triton"))
        assert [line.split("requirements/")[1] for line in installed] == ["triton.txt", "triton-server.txt"]
        assert all("--require-hashes" in line for line in installed)
        assert "there already" in self.run().output
        assert len(self.calls(tmp_path)) == 3

    def test_other_locks_make_it_anew(self, tmp_path):
        self.run()
        (tmp_path / "triton" / ".ready").write_text("Python 3.9, 0\n")
        assert "is ready" in self.run().output
        assert len(self.calls(tmp_path)) == 6

    def test_what_fails_is_named_and_tried_again_the_next_time(self, tmp_path, monkeypatch):
        """Of uv first, then of pip, which finds no package here."""
        monkeypatch.setenv("UV_CODE", "3")
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
        found = self.run()
        assert found.exit_code == 2
        assert "uv failed: pip makes" in found.stderr
        assert "exit code 1 of" in found.stderr
        monkeypatch.setenv("UV_CODE", "0")
        assert self.run().exit_code == 0

    def test_a_folder_of_something_else_is_not_cleared(self, tmp_path):
        (tmp_path / "triton").mkdir()
        (tmp_path / "triton" / "thesis.tex").touch()
        found = self.run()
        assert found.exit_code == 2
        assert "TREFOIL_TRITON_ENVIRONMENT" in found.stderr
        assert (tmp_path / "triton" / "thesis.tex").exists()
