"""The systemd unit: as little privilege as the agent can do with, and nothing that would end its Tritons."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trefoil.runtime.service import SHUTDOWN_S

UNIT = Path(__file__).parents[3] / "deploy" / "systemd" / "power-agent.service"
NEWER_KEYS = ("DelegateSubgroup",)  # systemd 254; an older one ignores it, see docs/howto/gpu-node.md
HARDENED = (
    "NoNewPrivileges ProtectHome PrivateTmp ProtectClock ProtectHostname ProtectKernelLogs ProtectKernelModules "
    "ProtectKernelTunables RestrictRealtime RestrictSUIDSGID LockPersonality"
)


@pytest.fixture
def unit():
    pairs = [line.split("=", 1) for line in UNIT.read_text().splitlines() if "=" in line and line[0] != "#"]
    return {name: [value for key, value in pairs if key == name] for name, _ in pairs}


@pytest.fixture
def systemd_analyze():
    found = shutil.which("systemd-analyze")
    if found is None:
        pytest.skip("no systemd-analyze on this machine")
    return found


def test_the_agent_has_what_it_needs_and_only_the_devices_of_the_driver(unit):
    """Six capabilities: MIG and clocks, separate users for Tritons, device nodes of new instances (mknod)."""
    names = [f"CAP_{name}" for name in ("SYS_ADMIN", "SETUID", "SETGID", "SETPCAP", "KILL", "MKNOD")]
    assert unit["CapabilityBoundingSet"] == [" ".join(names)]
    assert unit["RestrictNamespaces"] == ["mnt"]
    assert all(value.endswith(" rwm") for value in unit["DeviceAllow"])
    assert "@mount" in unit["SystemCallFilter"][0]
    assert unit["DevicePolicy"] == ["closed"]
    assert all(value.startswith("char-nvidia") for value in unit["DeviceAllow"])
    assert {name: unit[name] for name in HARDENED.split()} == {name: ["yes"] for name in HARDENED.split()}
    assert unit["ProtectSystem"] == ["strict"]


def test_stopping_the_agent_leaves_its_tritons_and_gives_it_time_to_reset_clocks(unit):
    assert unit["KillMode"] == ["process"]
    assert float(unit["TimeoutStopSec"][0]) > 2 * SHUTDOWN_S


def test_cuda_finds_its_module_and_device_at_boot(unit):
    """The unit may load no modules, and gets no class of devices that comes after it."""
    assert "nvidia-uvm" in (UNIT.parents[1] / "modules-load.d" / "trefoil-nvidia.conf").read_text().splitlines()
    assert "systemd-modules-load.service" in unit["After"][0].split()
    assert unit["ExecStartPre"][0] == "-+/usr/bin/nvidia-modprobe -u -c=0"


def test_it_starts_the_module_that_exists(unit):
    assert "-m power_agent --config" in unit["ExecStart"][0]


def test_systemd_accepts_it(systemd_analyze, tmp_path):
    copy = tmp_path / UNIT.name
    text = re.sub(r"ExecStart=\S+", f"ExecStart={sys.executable}", UNIT.read_text())
    copy.write_text(re.sub(r"WorkingDirectory=.*", "WorkingDirectory=/", text))
    done = subprocess.run([systemd_analyze, "verify", str(copy)], capture_output=True, text=True, timeout=60)
    complaints = [line for line in done.stderr.splitlines() if UNIT.name in line]
    assert not [line for line in complaints if not any(f"Unknown key '{key}'" in line for key in NEWER_KEYS)]
