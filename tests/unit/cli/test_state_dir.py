"""A --state-dir that cannot be one is refused in one line."""

import pytest
from typer.testing import CliRunner

from trefoil.cli.main import app


@pytest.mark.parametrize("under", ["", "below"])
def test_up_names_a_state_dir_that_is_a_file(tmp_path, under):
    (tmp_path / "file").write_text("")
    given = tmp_path / "file" / under
    refused = CliRunner().invoke(app, ["up", "--state-dir", str(given)])
    assert refused.exit_code == 2
    assert f"--state-dir = '{given}': cannot be used (Not a directory)" in refused.output


def test_up_names_a_log_that_is_a_folder(tmp_path):
    (tmp_path / "logs" / "supervisor.log").mkdir(parents=True)
    refused = CliRunner().invoke(app, ["up", "--state-dir", str(tmp_path)])
    assert (refused.exit_code, "cannot be used (Is a directory)" in refused.output) == (2, True)
