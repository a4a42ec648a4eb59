"""What the doctor says of a machine: what works, what does not, and the command that fixes it. It changes nothing."""

import json
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from power_agent.doctor import examination
from power_agent.doctor.findings import Finding, Verdict, of_reason
from power_agent.doctor.host import check_cgroups, check_containers, check_device_files, check_ports
from power_agent.settings import PowerAgentSettings
from tests.support.ports import free_ports
from tests.support.simulated_driver import A100_40GB, P4, make_driver, pynvml_on
from trefoil.cli.main import app
from trefoil.core.errors import Unavailable

UNREACHABLE = "redis://:secret-word@127.0.0.1:1/0"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine's /dev, /proc and /sys as far as the doctor looks at them."""
    for folder in ("dev", "proc", "sys/bus/pci/devices", "sys/fs/cgroup"):
        (tmp_path / folder).mkdir(parents=True)
    return tmp_path


def settings(tmp_path: Path, **more: object) -> PowerAgentSettings:
    admin, metrics, base = free_ports(3)
    return PowerAgentSettings(
        **{
            "state_dir": tmp_path / "state", "redis_url": UNREACHABLE, "admin_address": f"127.0.0.1:{admin}",
            "metrics_address": f"127.0.0.1:{metrics}", "triton_port_base": base, "powercap_root": tmp_path / "none",
        }
        | more
    )  # fmt: skip


def examined(driver, tmp_path: Path, root: Path, monkeypatch) -> tuple[dict[str, Finding], dict]:
    monkeypatch.setattr(examination, "mig_device", lambda *_: "")
    monkeypatch.setattr(examination, "effective_root", lambda *_: "")
    with pynvml_on(driver):
        found = examination.examine(settings(tmp_path), root)
    return {one.subject: one for one in found.findings}, found.document()


def test_a_machine_without_a_gpu_is_told_what_else_there_is(tmp_path):
    ran = CliRunner().invoke(app, ["node", "doctor", "--json", "--set", f"state_dir={tmp_path}/s"])
    document = json.loads(ran.output)
    by = {one["subject"]: one for one in document["findings"]}
    assert (ran.exit_code, document["healthy"]) == (1, False)
    assert by["driver"]["verdict"] == "does not"
    assert by["driver"]["seen"] == "no NVIDIA GPU on this machine's PCI bus"
    assert by["MIG"]["verdict"] == "unknown"
    assert all(one["remedy"] for one in document["findings"] if one["verdict"] == "does not")


def test_the_environment_of_an_agent_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("TREFOIL_POWER_AGENT_NODE", "gpu-a")
    ran = CliRunner().invoke(app, ["node", "doctor", "--json", "--set", f"state_dir={tmp_path}/s"])
    assert json.loads(ran.output)["settings"]["node"] == "gpu-a"


def test_each_gpu_is_judged_by_what_the_agent_would_do_with_it(tmp_path, root, monkeypatch):
    driver = make_driver(A100_40GB, A100_40GB, P4)
    driver.gpus[0].persistence = False
    driver.gpus[1].mig_current = driver.gpus[1].mig_pending = False
    found, document = examined(driver, tmp_path, root, monkeypatch)
    assert found["persistence gpu0"].verdict == Verdict.BROKEN
    assert found["persistence gpu0"].remedy.startswith(f"nvidia-smi -i {driver.gpus[0].uuid} -pm 1")
    assert found["persistence gpu1"].verdict == found["MIG gpu0"].verdict == Verdict.WORKS
    assert found["MIG gpu1"].verdict == Verdict.BROKEN
    assert f"nvidia-smi -i {driver.gpus[1].uuid} -mig 1" in found["MIG gpu1"].remedy
    assert (found["limit gpu0"].verdict, found["limit gpu0"].seen) == (Verdict.WORKS, "400 W of 100-400 W")
    assert found["MIG gpu2"].verdict == Verdict.WORKS, "what its generation cannot do is nothing to mend"
    assert "secret-word" not in json.dumps(document, default=str)
    assert len(document["hardware"]["devices"]) == 3
    assert found["time"].verdict == Verdict.UNKNOWN
    assert found["nvidia-uvm"].remedy.startswith("nvidia-modprobe -u")


def test_what_is_there_already_needs_no_remedy(root, tmp_path):
    (root / "dev/nvidia-uvm").touch()
    (root / "sys/fs/cgroup/cgroup.controllers").write_text("cpuset cpu io memory\n")
    (one,) = check_device_files(root)
    assert (one.verdict, one.remedy) == (Verdict.WORKS, "")
    assert check_cgroups(settings(tmp_path, cpu="serve"), root).verdict == Verdict.WORKS
    (root / "sys/fs/cgroup/cgroup.controllers").write_text("memory\n")
    lacking = check_cgroups(settings(tmp_path, cpu="serve"), root)
    assert (lacking.verdict, "cpu, cpuset" in lacking.seen) == (Verdict.BROKEN, True)
    assert lacking.remedy.startswith("echo '+cpu +cpuset' >")


def test_an_engine_without_the_toolkit_names_the_commands_that_install_it(root, tmp_path):
    docker = settings(tmp_path, runtime="docker", docker_image="triton:1")

    def away():
        raise Unavailable("no engine answers", remedy="start it")

    engine, toolkit = check_containers(docker, away, root, 1)
    assert (engine.verdict, engine.remedy) == (Verdict.BROKEN, "start it")
    assert toolkit.verdict == Verdict.UNKNOWN
    engine, toolkit = check_containers(docker, lambda: {"ServerVersion": "28", "LiveRestoreEnabled": True}, root, 1)
    assert engine.verdict == Verdict.WORKS
    assert (toolkit.verdict, "nvidia-ctk runtime configure" in toolkit.remedy) == (Verdict.BROKEN, True)
    _, toolkit = check_containers(docker, lambda: {"Runtimes": {"nvidia": {}}}, root, 1)
    assert toolkit.verdict == Verdict.WORKS
    by_cdi = settings(tmp_path, runtime="docker", docker_image="triton:1", docker_gpu="cdi")
    _, toolkit = check_containers(by_cdi, lambda: {"ServerVersion": "24", "Runtimes": {"nvidia": {}}}, root, 1)
    assert (toolkit.verdict, "hands out no CDI devices" in toolkit.seen) == (Verdict.BROKEN, True)
    newer = {"ServerVersion": "28.3", "CDISpecDirs": ["/etc/cdi"]}
    (root / "etc/cdi").mkdir(parents=True)
    (root / "etc/cdi/nvidia.yaml").write_text("kind: amd.com/gpu\n")
    _, toolkit = check_containers(by_cdi, lambda: newer, root, 1)
    assert toolkit.verdict == Verdict.BROKEN
    (root / "etc/cdi/nvidia.yaml").write_text("kind: nvidia.com/gpu\n")
    _, toolkit = check_containers(by_cdi, lambda: newer, root, 1)
    assert toolkit.verdict == Verdict.WORKS


def test_a_port_that_somebody_else_has_is_named_with_how_to_find_them(tmp_path, monkeypatch):
    wanted = settings(tmp_path)
    with socket.socket() as other:
        other.bind(("127.0.0.1", int(wanted.admin_address.rpartition(":")[2])))
        other.listen()
        found = {one.subject: one for one in check_ports(wanted, 0)}
    assert found["admin port"].verdict == Verdict.BROKEN
    assert found["admin port"].remedy.startswith("ss -ltnp 'sport = :")
    assert found["metrics port"].verdict == Verdict.WORKS


@pytest.mark.parametrize(
    ("why", "verdict", "remedy"),
    [
        ("", Verdict.WORKS, ""),
        ("it is off. Remedy: turn it on", Verdict.BROKEN, "turn it on"),
        ("a T4 cannot. Remedy: none needed, it is one slice", Verdict.WORKS, ""),
    ],
)
def test_a_reason_is_a_finding(why, verdict, remedy):
    found = of_reason("MIG", why, "on")
    assert (found.verdict, found.remedy) == (verdict, remedy)
