"""`trefoil family check` on the real Triton: variants that answer, a model that Triton refuses, no Triton."""

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support import engine_family
from tests.support.triton_process import ENVIRONMENT, MODELS
from trefoil.cli.main import app

pytestmark = pytest.mark.integration


def check(repository: Path, monkeypatch: pytest.MonkeyPatch, environment: Path = ENVIRONMENT) -> tuple[int, str, str]:
    monkeypatch.setenv("TREFOIL_TRITON_ENVIRONMENT", str(environment))
    found = CliRunner().invoke(app, ["family", "check", "digits", "--repository", str(repository)])
    return found.exit_code, found.stdout, found.stderr


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """The shipped digits, of two variants."""
    shutil.copytree(MODELS / "_shared", tmp_path / "_shared")
    shutil.copytree(MODELS / "digits", tmp_path / "digits", ignore=shutil.ignore_patterns("*.npz", "3", "4"))
    return tmp_path


def test_each_variant_is_loaded_and_asked_once(repository, monkeypatch):
    code, out, err = check(repository, monkeypatch)
    assert "2 of 4 variants answer on Triton" in out
    assert code == 1, "two have no files"
    assert [f"digits: Triton loads {name} and is asked once" in err for name in ("digits-xs", "digits-s")] == [True] * 2


def test_a_model_that_triton_refuses_is_named_in_its_own_words(repository, monkeypatch):
    config = repository / "digits" / "config.pbtxt"
    config.write_text(config.read_text().replace(" dims: [ 10 ]", ""))
    code, out, _ = check(repository, monkeypatch)
    assert (code, "0 of 4 variants answer on Triton" in out) == (1, True)
    assert "version 1 (digits-xs) does not answer on Triton: " in out
    assert "model output 'PROBABILITIES' must specify 'dims'" in out


def test_without_a_triton_it_says_that_no_model_was_run(repository, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    _, out, err = check(repository, monkeypatch, tmp_path / "none")
    assert "2 of 4 variants compared with the contract, not run" in out
    assert "no model is run here, contracts are compared with graphs alone: " in err


def chat(models: Path, monkeypatch: pytest.MonkeyPatch, triton: Path) -> tuple[int, str]:
    monkeypatch.setenv("TREFOIL_TRITON_ENVIRONMENT", str(triton))
    found = CliRunner().invoke(app, ["family", "check", "chat", "--repository", str(models)])
    return found.exit_code, found.stdout


def test_a_language_model_can_be_served_where_its_backend_is(tmp_path, monkeypatch):
    folder = engine_family.write_family(tmp_path / "models")
    triton = engine_family.environment(tmp_path)
    code, out = chat(tmp_path / "models", monkeypatch, triton)
    assert (code, out.splitlines()[0]) == (0, "chat: 2 of 2 variants answer on Triton; 40 profile rows")
    code, out = chat(tmp_path / "models", monkeypatch, ENVIRONMENT)
    assert (code, "chat: 0 of 2 variants answer on Triton" in out) == (1, True)
    assert "has no backend vllm. Remedy: take a Triton that has it" in out
    (folder / "2" / "model.json").write_text('{"model": "m", "max_modl_len": 8}')
    code, out = chat(tmp_path / "models", monkeypatch, triton)
    assert (code, "chat: 1 of 2 variants answer on Triton" in out) == (1, True)
    assert out.rstrip().endswith("AsyncEngineArgs.__init__() got an unexpected keyword argument 'max_modl_len'")
