"""deploy/systemd: units that systemd takes, whose programs and settings are this checkout's."""

import configparser
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UNITS = sorted((ROOT / "deploy/systemd").glob("*.service"))
HARDENED = ("NoNewPrivileges=yes", "ProtectSystem=strict", "ProtectHome=yes", "PrivateTmp=yes", "DevicePolicy=closed")
EXPOSURE_MAX = 3.5  # of systemd's own scale, 10 = no protection at all
INSTANCES = {"trefoil@": ("carbon_feed", "controller", "dispatcher")}


class Lines(dict[str, str]):
    """Values of keys that a unit gives more than once: all of them, each on a line."""

    def __setitem__(self, key: str, value: str) -> None:
        super().__setitem__(key, [*self.get(key, []), *value] if isinstance(value, list) else value)


def parsed(path: Path) -> configparser.RawConfigParser:
    unit = configparser.RawConfigParser(dict_type=Lines, strict=False, delimiters=("=",), comment_prefixes=("#", ";"))
    unit.optionxform = str
    unit.read(path)
    return unit


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_takes_each_unit(path, tmp_path):
    if shutil.which("systemd-analyze") is None:
        assert set(parsed(path).sections()) == {"Unit", "Service", "Install"}
        return
    names = [f"{path.stem}{instance}.service" for instance in INSTANCES.get(path.stem, ("",))]
    for name in names:
        copy = tmp_path / name
        # What this machine need not have: the program where it is installed, and others' tools.
        copy.write_text(
            path.read_text().replace("/opt/trefoil/.venv/bin/python", "/bin/true").replace("ExecStartPre=", "#")
        )
        done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True)
        lines = (done.stdout + done.stderr).splitlines()
        ours = [line for line in lines if name in line and "Unknown key 'DelegateSubgroup'" not in line]  # before 254
        assert not ours, ours


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_each_unit_restarts_is_confined_and_imports_nothing_from_its_folder(path):
    text, service = path.read_text(), parsed(path)["Service"]
    assert service["Restart"] in ("always", "on-failure")
    assert parsed(path)["Unit"]["StartLimitIntervalSec"] == "0", "it is never given up"
    assert not set(HARDENED) - set(text.splitlines())
    program, first, flag, module, *_ = service["ExecStart"].split()
    assert (program, first, flag) == ("/opt/trefoil/.venv/bin/python", "-P", "-m")
    for name in INSTANCES[path.stem] if module == "%i" else (module,):
        assert importlib.util.find_spec(name) is not None


def test_the_unit_of_the_whole_system_runs_the_supervisor_in_the_foreground(tmp_path):
    _, *words = parsed(ROOT / "deploy/systemd/trefoil.service")["Service"]["ExecStart"].split()
    words = [word.replace("/etc/trefoil", str(tmp_path)).replace("/var/lib", str(tmp_path)) for word in words]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "up.toml" in json.loads(done.stdout)["error"], done.stderr


def test_the_docs_install_each_unit_by_its_file():
    pages = "\n".join((ROOT / "docs" / name).read_text() for name in ("first-node.md", "howto/several-hosts.md"))
    for path in UNITS:
        assert f"deploy/systemd/{path.name}" in pages, path.name
    assert "[Service]" not in pages, "a unit is shown where it ships as a file"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze on this machine")
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_the_exposure_of_each_service_is_low(path, tmp_path):
    for instance in INSTANCES.get(path.stem, ("",)):
        copy = tmp_path / f"{path.stem}{instance}.service"
        copy.write_text(path.read_text())
        argv = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(copy)]
        done = subprocess.run(argv, capture_output=True, text=True)
        (level,) = re.findall(r"exposure level for \S+: ([\d.]+)", done.stdout) or pytest.skip(done.stderr[:200])
        assert float(level) <= EXPOSURE_MAX
