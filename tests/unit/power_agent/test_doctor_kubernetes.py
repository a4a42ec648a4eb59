"""What the doctor says of NVIDIA's own stack on a node of Kubernetes, and how it is kept off."""

import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from power_agent.doctor import examination, kubernetes
from power_agent.doctor.findings import Finding, Verdict
from power_agent.doctor.kubernetes import check_rivals
from power_agent.settings import PowerAgentSettings
from tests.support.fake_kubernetes import NODE, FakeKubernetes
from trefoil.core.errors import Unavailable

OFF = {"nvidia.com/gpu.deploy.device-plugin": "false", "nvidia.com/gpu.deploy.mig-manager": "false"}


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine's root, with a short path: sockets have no longer ones."""
    monkeypatch.setattr(kubernetes.os, "geteuid", lambda: 0)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    folder = Path(tempfile.mkdtemp(prefix="tf-"))
    (folder / "proc").mkdir()
    yield folder
    shutil.rmtree(folder)


def node(labels: dict[str, str], **more: object) -> dict:
    return {"metadata": {"labels": labels}, **more}


def by_subject(found: list[Finding]) -> dict[str, Finding]:
    return {one.subject: one for one in found}


def test_a_machine_without_kubernetes_has_one_line_for_it(root):
    assert [(one.subject, one.verdict) for one in check_rivals(NODE, None, root)] == [("Kubernetes", Verdict.WORKS)]


@pytest.mark.parametrize(
    ("labels", "more", "subject", "seen", "remedy"),
    [
        (
            {"nvidia.com/gpu.deploy.device-plugin": "true"}, {}, "device plugin",
            "label nvidia.com/gpu.deploy.device-plugin=true", "nvidia.com/gpu.deploy.device-plugin=false; where",
        ),
        (
            OFF, {"status": {"allocatable": {"cpu": "8", "nvidia.com/mig-3g.20gb": "2", "nvidia.com/gpu": "0"}}},
            "device plugin", "nvidia.com/mig-3g.20gb: 2", "kubectl taint node gpu-a trefoil.dev/gpu=true:NoSchedule",
        ),
        (
            {"nvidia.com/gpu.deploy.mig-manager": "true"}, {}, "MIG manager",
            "label nvidia.com/gpu.deploy.mig-manager=true",
            "kubectl label node gpu-a --overwrite nvidia.com/gpu.deploy.mig-manager=false nvidia.com/mig.config-",
        ),
        (
            {"nvidia.com/dra-kubelet-plugin": "true"}, {}, "DRA driver", "label nvidia.com/dra-kubelet-plugin=true",
            "nvidia.com/dra-kubelet-plugin=false",
        ),
    ],
)  # fmt: skip
def test_what_the_nodes_labels_and_resources_show_is_named_with_the_command_that_keeps_it_off(
    root, labels, more, subject, seen, remedy
):
    found = by_subject(check_rivals(NODE, lambda: node(labels, **more), root))
    assert (found[subject].verdict, found[subject].seen) == (Verdict.BROKEN, seen)
    assert remedy in found[subject].remedy
    assert [one.subject for one in found.values() if one.verdict == Verdict.BROKEN] == [subject]


def test_a_node_that_is_kept_free_works_and_of_the_dra_driver_only_a_taint_tells(root):
    found = by_subject(check_rivals(NODE, lambda: node(OFF), root))
    assert found["device plugin"].verdict == found["MIG manager"].verdict == Verdict.WORKS
    assert (found["DRA driver"].verdict, "kubectl get pods" in found["DRA driver"].remedy) == (Verdict.UNKNOWN, True)
    tainted = node(OFF, spec={"taints": [{"key": "trefoil.dev/gpu", "effect": "NoSchedule"}]})
    assert {one.verdict for one in check_rivals(NODE, lambda: tainted, root)} == {Verdict.WORKS}


def test_without_the_api_sockets_that_answer_and_processes_tell(root):
    kubelet = root / "var/lib/kubelet"
    for folder in ("device-plugins", "plugins_registry"):
        (kubelet / folder).mkdir(parents=True)
    assert {one.verdict for one in check_rivals(NODE, None, root)} == {Verdict.WORKS}
    stale, path = (
        kubelet / "device-plugins/nvidia-mig-1g.5gb.sock",
        kubelet / "plugins_registry/gpu.nvidia.com-reg.sock",
    )
    with closing(socket.socket(socket.AF_UNIX)) as left, closing(socket.socket(socket.AF_UNIX)) as door:
        left.bind(str(stale))  # its plugin was killed: nothing listens
        door.bind(str(path))
        door.listen()
        (root / "proc/77").mkdir()
        (root / "proc/77/cmdline").write_bytes(b"/usr/bin/nvidia-mig-manager\0--config\0")
        found = by_subject(check_rivals(NODE, None, root))
    assert found["device plugin"].verdict == Verdict.WORKS
    assert (found["MIG manager"].verdict, found["MIG manager"].seen) == (
        Verdict.BROKEN, "process nvidia-mig-manager",
    )  # fmt: skip
    assert (found["DRA driver"].verdict, found["DRA driver"].seen) == (Verdict.BROKEN, f"{path} answers")


def test_where_nothing_can_be_seen_that_is_said_with_the_command_that_shows_it(root, monkeypatch):
    def away():
        raise Unavailable("no API server answers", remedy="fix the network")

    found = by_subject(check_rivals(NODE, away, root))
    assert (found["Kubernetes"].verdict, found["Kubernetes"].remedy) == (Verdict.UNKNOWN, "fix the network")
    assert {one.verdict for one in found.values()} == {Verdict.UNKNOWN}
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")  # a pod without rights, that has not the node's folders
    assert {one.verdict for one in check_rivals(NODE, None, root)} == {Verdict.UNKNOWN}


def test_the_doctor_reads_the_node_with_the_agents_right(tmp_path):
    cluster = FakeKubernetes(tmp_path / "cluster", node=node({"nvidia.com/gpu.deploy.mig-manager": "true"}))
    settings = PowerAgentSettings(
        runtime="kubernetes",
        node=NODE,
        kubernetes_url=cluster.url,
        kubernetes_account=cluster.account,
        state_dir=tmp_path,
        redis_url="redis://127.0.0.1:1/0",
    )
    try:
        found = by_subject(list(examination.examine(settings).findings))
    finally:
        cluster.close()
    assert found["MIG manager"].verdict == Verdict.BROKEN
    assert found["isolation"].verdict == Verdict.UNKNOWN
    assert f"GET /api/v1/nodes/{NODE}" in cluster.calls
