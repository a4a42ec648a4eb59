"""What `trefoil --help` and `trefoil status` may import, and that help is true to commands it does not import."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
import typer

from tests.support.commands import commands
from trefoil.cli.main import COMMANDS, app
from trefoil.cli.run.state_directory import SERVICES, Launch, StatePaths
from trefoil.runtime.proc import Identity

PROGRAM: Final = {"annotated_doc", "shellingham", "trefoil", "typer"}
CLIENT: Final = {
    *("annotated_types", "pydantic", "pydantic_core", "typing_extensions", "typing_inspection"),
    *("google", "grpc", "grpc_health", "grpc_reflection", "protos"),
    *("cython_runtime", "grpc_tools"),  # by grpc
    "rich",
}
LISTED: Final = """
import json, sys
before = set(sys.modules)
from trefoil.cli.main import app
app(sys.argv[1:], standalone_mode=False)
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def imported(*words: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", LISTED, *words], capture_output=True, text=True, check=True)
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def packages(modules: list[str]) -> set[str]:
    """Packages of these modules, without the standard library and single extension modules of packages."""
    return {name.partition(".")[0] for name in modules if name[0] != "_"} - sys.stdlib_module_names


def test_help_of_the_program_imports_no_command() -> None:
    modules = imported("--help")
    assert packages(modules) <= PROGRAM
    own = {name for name in modules if name.startswith("trefoil.")}
    assert own == {f"trefoil.{name}" for name in ("cli", "cli.guarded", "cli.main", "core", "core.errors")}


def test_status_imports_a_client_and_tables_alone(tmp_path: Path) -> None:
    """No numpy, structlog, prometheus_client, redis: each costs a tenth of a second of CPU. No service listens."""
    launch = Launch(
        launch_id="test", cluster="test", state_dir=str(tmp_path), supervisor=Identity.of_pid(os.getpid()),
        redis_url="redis://127.0.0.1:1/0", addresses=dict.fromkeys([*SERVICES, "inference"], "127.0.0.1:1"),
        metrics={}, node_socket="", family="digits", node="node0", zone="demo", triton_ports=(1, 2), started_at_s=0.0,
    )  # fmt: skip
    StatePaths(tmp_path).write_launch(launch)
    modules = imported("status", "--state-dir", str(tmp_path))
    assert packages(modules) <= PROGRAM | CLIENT
    assert "trefoil.cli.system_client" in modules


@pytest.mark.parametrize("width", [45, 200])
def test_help_of_the_program_says_what_commands_say_of_themselves(width: int) -> None:
    whole = dict(commands())
    shown = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert list(shown) == list(COMMANDS)
    for name, one in shown.items():
        if not one.hidden:
            assert one.get_short_help_str(width) == whole[name].get_short_help_str(width)
