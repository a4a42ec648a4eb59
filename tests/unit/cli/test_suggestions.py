"""A wrong name or number is refused with the one that was meant, and blamed on its place; exports say their basis."""

import csv

import pytest
from typer.testing import CliRunner

from trefoil.cli.main import app
from trefoil.cli.operate.report_document import records
from trefoil.reproduce.plots import write_csv


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("up --set famly.name=x", "famly: unknown setting (in flag famly.name). Remedy: did you mean family?"),
        ("up --port-offset 99999", "moves a port out of 1..65535 (in "),
        ("up --port-offset 99999", "up.toml, flag port_offset). Remedy"),
        ("up --policy EXACT", "policy = 'EXACT': unknown policy. Remedy: did you mean exact?"),
        ("up --policy exakt", "policy = 'exakt': unknown policy. Remedy: did you mean exact?"),
        (
            "simulate digts",
            "SCENARIO = 'digts': no such scenario. Remedy: did you mean digits? Else use one of: clover",
        ),
        ("family check digts", "Remedy: did you mean digits?"),
        ("up --mode akt", "Remedy: did you mean act?"),
        (
            "objective set --accuracy-floor 70",
            "--accuracy-floor = 70.0: is not a fraction of 1. Remedy: write 0.7 for 70 %",
        ),
        ("objective set --min-accuracy 0.7", "--accuracy-floor"),
        ("objective set --slo-ms 70", "--slo-latency-ms"),
        ("objective set --mode lambda", "Remedy: --type lambda"),
        ("objective set --accuracy-floor -1", "write a number from 0 to 1"),
        ("up --set lambda_weight=70", "Remedy: write 0.7 for 70 %"),
    ],
)
def test_what_was_meant_is_named(command, words):
    refused = CliRunner().invoke(app, command.split())
    assert (refused.exit_code, words in refused.output) == (2, True), refused.output


def test_a_settings_file_is_blamed_for_what_stands_in_it(tmp_path):
    (tmp_path / "mine.toml").write_text("famly = 1\n")
    refused = CliRunner().invoke(app, ["up", "--config", str(tmp_path / "mine.toml"), "--set", "family.name=digits"])
    assert f"famly: unknown setting (in {tmp_path}/mine.toml)" in refused.output


def test_rows_of_a_report_say_which_devices_their_joules_are_of():
    def part(simulated, **named):
        return named | {"joules": 1.0, "quality": {"simulated": simulated}}

    families = [part(1.0, family="a"), part(0.0, family="b"), part(None, family="c")]
    variants = [{"family": "a", "variant": "a-s", "joules": 1.0}]
    found = records({"total": part(0.5), "families": families, "variants": variants, "tenants": []})
    assert [row["basis"] for row in found] == ["measured, simulated", "simulated", "measured", "", "simulated"]


@pytest.mark.parametrize(
    ("file", "more", "basis"),
    [
        ("# basis: synthetic\nhour,g_per_kwh\n", "", "simulated"),
        ("hour,g_per_kwh\n", "", "measured"),
        ("hour,g_per_kwh,estimated\n", ",true", "modelled"),
    ],
)
def test_scores_of_a_backtest_say_what_they_rest_on(file, more, basis, tmp_path):
    (tmp_path / "mine.csv").write_text(file + "".join(f"{h},{400 + h % 24}{more}\n" for h in range(24 * 40)))
    words = ["carbon", "backtest", str(tmp_path / "mine.csv"), "--horizon-h", "1", "--model", "persistence"]
    assert CliRunner().invoke(app, [*words, "--out", str(tmp_path / "scores.csv")]).exit_code == 0
    with (tmp_path / "scores.csv").open() as scores:
        assert {row["basis"] for row in csv.DictReader(scores)} == {basis}


def test_figures_of_a_paper_say_that_they_are_simulated(tmp_path):
    write_csv(tmp_path, "fig01", [{"joules": 1.0}, {"joules": 2.0}])
    assert (tmp_path / "fig01.csv").read_text() == "joules,basis\n1.0,simulated\n2.0,simulated\n"
