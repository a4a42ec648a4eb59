"""`trefoil simulate`: one document, exit code 2 and one line for whatever a scenario cannot mean."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trefoil.cli.main import app

ROOT = Path(__file__).resolve().parents[3]
DIGITS = ROOT / "benchmarks" / "scenarios" / "digits.toml"


@pytest.fixture(autouse=True)
def _here(monkeypatch):
    monkeypatch.chdir(ROOT)


def run(*arguments: str) -> tuple[int, str, str]:
    found = CliRunner().invoke(app, ["simulate", str(DIGITS), *arguments])
    return found.exit_code, found.stdout, found.stderr


def test_json_is_one_document_and_the_same_bytes(tmp_path):
    short = ("--set", "duration_s=60", "--set", "policy=base", "--seed", "7", "--json")
    code, first, _ = run(*short, "--out", str(tmp_path))
    assert code == 0
    assert json.loads(first)["summary"]["seed"] == 7
    assert run(*short)[1] == first
    assert (tmp_path / "result.json").read_text() == first
    assert (tmp_path / "series.csv").read_text().startswith("at_s,intensity_g_per_kwh,power_w")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ('nodes=[{zone = "mars"}]', ("mars", "demo")),
        ("families.0.name=1", ("model_repository/1/family.toml", "Remedy")),
        ("families.1.name=digits", ("families: has 1 entry, and no '1'", "write families.0")),
        ('carbon.zones.demo.trace="EMPTY"', ("empty.csv", "Remedy")),
        ("policy=clever", ("clever", "exact")),
        ("noise.colour=1", ("noise.colour", "unknown setting")),
        ("carbon.zones.demo.constant=3", ("unknown setting", "did you mean constant_g_per_kwh?")),
    ],
)
def test_what_cannot_be_meant_is_one_line_with_field_value_and_remedy(tmp_path, change, words):
    empty = tmp_path / "empty.csv"
    empty.write_text("")
    code, out, err = run("--set", change.replace('"EMPTY"', str(empty)))
    assert code == 2
    assert out == ""
    assert len(err.strip().splitlines()) == 1
    assert all(word in err for word in words), err
