"""`trefoil setup triton`: make the Python environment of the Tritons, which must not see ours (its numpy is older).

From the hashed lock files that ship, by uv where there is one that gets them, else by venv and pip.
"""

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import typer

from trefoil.cli.guarded import Guarded
from trefoil.cli.output import AsJson, respond, show
from trefoil.core.errors import SettingError, StartError
from trefoil.installation import SHIPPED, TRITON_VARIABLE, triton_environment

LOCKS: Final = (("triton.txt", ()), ("triton-server.txt", ("--no-deps",)))
"""Lock files, and how each is installed: the server's own dependencies are those of a client library."""
READY: Final = ".ready"
NEWEST: Final = (3, 12)
"""Newest Python with a wheel of the numpy that the Triton environment holds."""
VERSION: Final = "import sys; print('%d.%d' % sys.version_info[:2])"

app = typer.Typer(cls=Guarded, no_args_is_help=True, help="Install what a system needs apart from this package.")


@app.command()
def triton(as_json: AsJson = False) -> None:
    """Make the Triton environment; one that matches the lock files stays unchanged."""
    folder, (python, version) = triton_environment(), _python()
    made = _stamp(version) != _read(folder / READY)
    if made:
        _refuse_foreign(folder)
        if not as_json:
            show(f"making {folder}: a download of some 100 MB")
        _make(folder, python)
        (folder / READY).write_text(_stamp(version))
    state = f"{folder} is {'ready' if made else 'there already'}"
    respond(as_json, {"triton_environment": str(folder), "made": made}, state)


def _python() -> tuple[str, str]:
    """Python of the environment, and its version: this one, or the newest of PATH that is old enough.

    Raises:
        StartError: there is none.
    """
    if sys.version_info[:2] <= NEWEST:
        return sys.executable, f"{sys.version_info[0]}.{sys.version_info[1]}"
    for version in (f"{NEWEST[0]}.{NEWEST[1]}", "3.11"):
        found = shutil.which(f"python{version}")
        if found is not None and _version(found) == version:  # a shim may stand for a Python that is not there
            return found, version
    raise StartError(
        f"no Python of {NEWEST[0]}.{NEWEST[1]} or 3.11 on PATH, and Triton's numpy has no wheel for a newer one",
        field="python", value=sys.executable,
        remedy="install python3.12 beside it, for example by `uv python install 3.12`, and run this again",
    )  # fmt: skip


def _version(python: str) -> str:
    return subprocess.run([python, "-P", "-c", VERSION], capture_output=True, text=True).stdout.strip()


def _stamp(version: str) -> str:
    """What an environment is made of: Python and lock files."""
    locks = b"".join((SHIPPED / "requirements" / name).read_bytes() for name, _ in LOCKS)
    return f"Python {version}, {hashlib.sha256(locks).hexdigest()}\n"


def _read(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def _refuse_foreign(folder: Path) -> None:
    """What is not an environment is not cleared away."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "pyvenv.cfg").is_file():
        remedy = "name a folder that is empty or not there yet"
        raise SettingError("holds something else", field=TRITON_VARIABLE, value=str(folder), remedy=remedy)


def _make(folder: Path, base: str) -> None:
    """By uv, or by pip: the one knows neither pip's settings nor the authority of a proxy that signs TLS."""
    python = str(folder / "bin" / "python")
    uv = shutil.which("uv", path=Path(sys.executable).parent) or shutil.which("uv")
    if uv is not None:
        made = [uv, "venv", "--quiet", "--clear", "--python", base, str(folder)]
        if not any(map(_code, [made, *_installs(uv, "pip", "install", "--compile-bytecode", "--python", python)])):
            return
        typer.echo(f"{uv} failed: pip makes {folder} instead", err=True)
    pip = _installs(python, "-m", "pip", "install", "--disable-pip-version-check")
    for step in ([base, "-P", "-m", "venv", "--clear", str(folder)], *pip):
        if code := _code(step):
            raise StartError(
                f"exit code {code} of `{' '.join(step)}`",
                remedy="fix what it reports, and run `trefoil setup triton` again",
            )


def _installs(*install: str) -> list[list[str]]:
    """Steps that install what the lock files say."""
    return [
        [*install, "--quiet", "--require-hashes", *options, "-r", str(SHIPPED / "requirements" / name)]
        for name, options in LOCKS
    ]


def _code(step: Sequence[str]) -> int:
    """Exit code of one step; what it complains about stands on stderr before our own line."""
    return subprocess.run(step, stdout=subprocess.DEVNULL).returncode
