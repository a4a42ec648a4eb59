"""NVIDIA's stack on a node of Kubernetes, as the doctor sees it: what else would hand out or change its MIG instances.

Looked at: the node's labels, taints and resources, where this pod may read them; else the kubelet's sockets and the
processes of this machine. Labels are those of NVIDIA GPU Operator, names of sockets and programs those of its parts.
"""

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from power_agent.doctor.findings import Finding, broken, unknown, works
from power_agent.runtimes.kubernetes_pod import PREFIX
from trefoil.core.errors import TrefoilError

KUBELET: Final = "var/lib/kubelet"
TAINT: Final = f"{PREFIX}gpu"
DEPLOY: Final = "nvidia.com/gpu.deploy."  # labels by which GPU Operator places its parts
RESOURCES: Final = ("nvidia.com/gpu", "nvidia.com/mig-")
IN_A_POD: Final = "KUBERNETES_SERVICE_HOST"  # variable of every pod
CONNECT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Rival:
    """Part of NVIDIA's stack: traces that it leaves, and how it is kept off a node.

    `certain`: a node without its labels does not have it.
    """

    subject: str
    labels: tuple[str, ...]
    programs: tuple[str, ...]
    sockets: tuple[str, ...]
    label_off: str
    certain: bool = True


RIVALS: Final = (
    Rival(
        "device plugin",
        (f"{DEPLOY}device-plugin",),
        ("nvidia-device-plugin",),
        ("device-plugins/nvidia-*.sock",),
        f"{DEPLOY}device-plugin=false",
    ),
    Rival(
        "MIG manager",
        (f"{DEPLOY}mig-manager",),
        ("nvidia-mig-manager",),
        (),
        f"{DEPLOY}mig-manager=false nvidia.com/mig.config-",
    ),
    Rival(
        "DRA driver",
        (f"{DEPLOY}dra-driver", "nvidia.com/dra-kubelet-plugin"),
        ("gpu-kubelet-plugin",),
        ("plugins_registry/gpu.nvidia.com*.sock", "plugins/gpu.nvidia.com/*.sock"),
        f"{DEPLOY}dra-driver=false nvidia.com/dra-kubelet-plugin=false",
        certain=False,  # by default it goes to each node with an NVIDIA device
    ),
)


def check_rivals(node: str, read_node: Callable[[], Mapping[str, Any]] | None, root: Path) -> list[Finding]:
    """Check that nothing of NVIDIA's stack manages this node's GPUs beside the agent.

    Args:
        node: its name in the cluster.
        read_node: reads the node from the API server; raises TrefoilError. None: this is not a pod that may.
        root: where /proc and the kubelet's folder are.
    """
    if read_node is None and not (root / KUBELET).is_dir() and IN_A_POD not in os.environ:
        return [works("Kubernetes", "no kubelet on this machine")]
    described: Mapping[str, Any] | None = None
    found = []
    if read_node is not None:
        try:
            described = read_node()
        except TrefoilError as error:
            found.append(unknown("Kubernetes", error.message, error.remedy))
    programs = set(_programs(root))
    return found + [_finding(rival, node, described, programs, root) for rival in RIVALS]


def _finding(rival: Rival, node: str, described: Mapping[str, Any] | None, programs: set[str], root: Path) -> Finding:
    kubelet = root / KUBELET
    paths = [path for pattern in rival.sockets for path in sorted(kubelet.glob(pattern))]
    traces = [f"{path} answers" for path in paths if _answers(path)]
    traces += [f"process {name}" for name in rival.programs if name in programs]
    if described is not None:
        traces += list(_traces(rival, described))
    if traces:
        remedy = (
            f"kubectl label node {node} --overwrite {rival.label_off}; where no GPU Operator reads this: "
            f"kubectl taint node {node} {TAINT}=true:NoSchedule, then delete its pod there"
        )
        return broken(rival.subject, "; ".join(traces), remedy)
    if described is not None and (rival.certain or _tainted(described)):
        return works(rival.subject, f"not on node {node}" + (f": taint {TAINT}" if _tainted(described) else ""))
    if kubelet.is_dir() and os.geteuid() == 0:
        return works(rival.subject, "no process and no socket of it")
    return unknown(rival.subject, "not seen from here", f"kubectl get pods -A --field-selector spec.nodeName={node}")


def _traces(rival: Rival, described: Mapping[str, Any]) -> Iterator[str]:
    labels = described["metadata"].get("labels") or {}
    yield from (f"label {name}=true" for name in rival.labels if labels.get(name) == "true")
    if rival.label_off.startswith(f"{DEPLOY}device-plugin"):
        amounts = (described.get("status") or {}).get("allocatable") or {}
        yield from (f"{name}: {n}" for name, n in amounts.items() if name.startswith(RESOURCES) and n != "0")


def _tainted(described: Mapping[str, Any]) -> bool:
    return any(one["key"] == TAINT for one in (described.get("spec") or {}).get("taints") or ())


def _programs(root: Path) -> Iterator[str]:
    """Names of the programs that run here, those in containers included where this process may see them."""
    for path in (root / "proc").glob("[0-9]*/cmdline"):
        try:
            yield Path(os.fsdecode(path.read_bytes().partition(b"\0")[0])).name
        except OSError:  # it has ended
            continue


def _answers(path: Path) -> bool:
    """Whether a process listens on a socket: one that was killed leaves its file."""
    with socket.socket(socket.AF_UNIX) as door:
        door.settimeout(CONNECT_S)
        try:
            door.connect(str(path))
        except OSError:
            return False
    return True
