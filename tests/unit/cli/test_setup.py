"""Python of the Tritons' environment: this one where their numpy has a wheel for it, else an older one."""

import sys
from pathlib import Path

import pytest

from trefoil.cli import setup
from trefoil.core.errors import StartError


def stands_in(folder: Path, name: str, *, version: str) -> None:
    """An executable that says its version; one of no version fails, as a shim does whose Python is not installed."""
    path = folder / name
    path.write_text(f"#!/bin/sh\necho {version}\n" if version else "#!/bin/sh\nexit 127\n")
    path.chmod(0o755)


def test_a_python_that_numpy_has_a_wheel_for_is_taken_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 12, 1, "final", 0))
    assert setup._python() == (sys.executable, "3.12")


@pytest.fixture
def newer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Python that is too new, and a PATH of its own."""
    monkeypatch.setattr(sys, "version_info", (3, 13, 0, "final", 0))
    monkeypatch.setenv("PATH", f"{tmp_path}")
    return tmp_path


def test_an_older_one_of_the_path_is_taken_if_it_runs(newer: Path) -> None:
    stands_in(newer, "python3.12", version="")
    stands_in(newer, "python3.11", version="3.11")
    assert setup._python() == (str(newer / "python3.11"), "3.11")
    stands_in(newer, "python3.12", version="3.12")
    assert setup._python() == (str(newer / "python3.12"), "3.12")


def test_without_any_the_remedy_is_named(newer: Path) -> None:
    with pytest.raises(StartError, match=r"numpy has no wheel for a newer one.*Remedy: install python3\.12"):
        setup._python()
