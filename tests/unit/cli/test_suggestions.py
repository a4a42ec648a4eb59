"""A wrong name or number is refused with the one that was meant, and blamed on where it is from."""

import pytest
from typer.testing import CliRunner

from trefoil.cli.main import app
from trefoil.cli.operate.report_document import records


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("up --set famly.name=x", "famly: unknown setting (in flag famly.name). Remedy: did you mean family?"),
        ("up --policy exakt", "policy = 'exakt': unknown policy. Remedy: did you mean exact?"),
        (
            "simulate digts",
            "SCENARIO = 'digts': no such scenario. Remedy: did you mean digits? Else use one of: clover",
        ),
        ("family check digts", "Remedy: did you mean digits?"),
        ("up --mode akt", "Remedy: did you mean act?"),
        ("objective set --min-accuracy 70", "--min-accuracy = 70.0: is no fraction of 1. Remedy: write 0.7 for 70 %"),
        ("objective set --min-accuracy -1", "write a number from 0 to 1"),
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
