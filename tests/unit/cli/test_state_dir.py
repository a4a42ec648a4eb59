"""A --state-dir that cannot be one is refused in one line."""

import pytest
from typer.testing import CliRunner

from trefoil.cli.main import app
from trefoil.cli.run.state_directory import StatePaths


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


@pytest.mark.parametrize("broken", ["controller", "dispatcher", "redis"])
def test_a_log_that_cannot_be_rotated_keeps_no_other_from_it(tmp_path, broken):
    logs = [StatePaths(tmp_path).log(name) for name in ("controller", "dispatcher", "redis")]
    logs[0].parent.mkdir()
    for log in logs:
        log.write_bytes(b"x" * 2**16)
    (logs[0].parent / f"{broken}.log.1").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        StatePaths(tmp_path).rotate_logs(2**14)
    assert [log.stem for log in logs if log.stat().st_size == 2**16] == [broken]
