"""`trefoil setup triton`: make the Python environment of the Tritons, which must not see ours (its numpy is older).

From the hashed lock files that ship, by uv where there is one, else by venv and pip.
"""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import typer

from trefoil.cli.output import AsJson, Guarded, console, print_json
from trefoil.core.errors import SettingError, StartError
from trefoil.installation import SHIPPED, TRITON_VARIABLE, triton_environment

LOCKS: Final = (("triton.txt", ()), ("triton-server.txt", ("--no-deps",)))
"""Lock files, and how each is installed: the server's own dependencies are those of a client library."""
READY: Final = ".ready"

app = typer.Typer(cls=Guarded, no_args_is_help=True, help="What a system needs beside this package.")


@app.command()
def triton(as_json: AsJson = False) -> None:
    """Make the Triton environment; one that is there already and as the lock files say stays as it is."""
    folder = triton_environment()
    made = _stamp() != _read(folder / READY)
    if made:
        _refuse_foreign(folder)
        if not as_json:
            console().print(f"making {folder}: a download of some 100 MB", soft_wrap=True)
        _make(folder)
    if as_json:
        print_json({"triton_environment": str(folder), "made": made})
    else:
        console().print(f"{folder} is {'ready' if made else 'there already'}", soft_wrap=True)


def _stamp() -> str:
    """What an environment is made of: Python and lock files."""
    locks = b"".join((SHIPPED / "requirements" / name).read_bytes() for name, _ in LOCKS)
    return f"Python {sys.version_info.major}.{sys.version_info.minor}, {hashlib.sha256(locks).hexdigest()}\n"


def _read(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def _refuse_foreign(folder: Path) -> None:
    """What is not an environment is not cleared away."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "pyvenv.cfg").is_file():
        remedy = "name a folder that is empty or not there yet"
        raise SettingError("holds something else", field=TRITON_VARIABLE, value=str(folder), remedy=remedy)


def _make(folder: Path) -> None:
    python = folder / "bin" / "python"
    uv = shutil.which("uv", path=Path(sys.executable).parent) or shutil.which("uv")
    if uv is None:
        _run(sys.executable, "-P", "-m", "venv", "--clear", folder)
        install: list[str | Path] = [python, "-m", "pip", "install", "--disable-pip-version-check"]
    else:
        _run(uv, "venv", "--quiet", "--clear", "--python", sys.executable, folder)
        install = [uv, "pip", "install", "--compile-bytecode", "--python", python]
    for name, options in LOCKS:
        _run(*install, "--quiet", "--require-hashes", *options, "-r", SHIPPED / "requirements" / name)
    (folder / READY).write_text(_stamp())


def _run(*argv: str | Path) -> None:
    """Run one step; what it complains about stands on stderr before our own line.

    Raises:
        StartError: it failed.
    """
    code = subprocess.run([str(part) for part in argv], stdout=subprocess.DEVNULL).returncode
    if code:
        step = " ".join(str(part) for part in argv)
        raise StartError(
            f"exit code {code} of `{step}`", remedy="mend what it says, and run `trefoil setup triton` again"
        )
