"""What `python -m dispatcher` refuses before it starts anything."""

import sys
from types import ModuleType

import pytest

from dispatcher import __main__ as starting
from trefoil.installation import CHECKOUT


@pytest.fixture(autouse=True)
def _starts_nothing(monkeypatch):
    def started(*_):
        raise AssertionError("it starts")

    monkeypatch.setattr(starting, "main", started)
    monkeypatch.setattr(starting, "supervise", started)


@pytest.mark.parametrize("flags", [[], ["--set", "workers=2"], ["--set", "workers=2", "--set", "dispatcher=d1"]])
@pytest.mark.parametrize(
    ("ngh2", "words"), [(None, "ngh2 halted"), (ModuleType("ngh2"), "module 'ngh2' has no attribute")]
)
def test_without_libnghttp2_nothing_starts_and_one_line_says_which_wheel(monkeypatch, capsys, ngh2, words, flags):
    """None: it cannot be imported. An empty module: another version, that lacks what is used of it."""
    monkeypatch.setitem(sys.modules, "ngh2", ngh2)
    monkeypatch.delitem(sys.modules, "dispatcher.transport.h2", raising=False)
    assert starting.entry(flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: libnghttp2 cannot be loaded: ")
    assert words in line
    required = (CHECKOUT / "requirements/services.in").read_text().split()
    (pinned,) = [each for each in required if each.startswith("ngh2")]
    assert f"Remedy: pip install {pinned}; it has wheels for Linux (x86-64, aarch64)" in line


def test_help_needs_no_libnghttp2(monkeypatch):
    monkeypatch.setitem(sys.modules, "ngh2", None)
    with pytest.raises(SystemExit, match="0"):
        starting.entry(["--help"])


@pytest.mark.parametrize("way", ["file", "flag", "environment"])
@pytest.mark.parametrize("value", ["h2", "grpc"])
def test_the_transport_that_could_be_chosen_before_is_refused_with_what_serves_now(
    monkeypatch, capsys, tmp_path, way, value
):
    flags = []
    if way == "file":
        (tmp_path / "dispatcher.toml").write_text(f'transport = "{value}"\n')
        flags = ["--config", str(tmp_path / "dispatcher.toml")]
    elif way == "flag":
        flags = ["--set", f"transport={value}"]
    else:
        monkeypatch.setenv("TREFOIL_DISPATCHER_TRANSPORT", value)
    assert starting.entry(flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: transport: unknown setting (in ")
    assert line.endswith("Remedy: remove it: gRPC is served by libnghttp2 alone")
