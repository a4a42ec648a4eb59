"""Pod of a slice: its manifest, and what its status says. Pure, but for the file with the words that are secret.

The key of a Triton is an option of its command. In a manifest everybody who may read pods would see it, so a shell adds
it from a file of the node.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from power_agent.runtimes.base import RunningTriton
from power_agent.runtimes.docker import HOST_ONLY, NOBODY, TMP_MIB, exit_code
from power_agent.runtimes.kubernetes_api import Pod
from power_agent.settings import PowerAgentSettings
from power_agent.triton.slice_launch import SHARED_MEMORY, SliceLaunch

PREFIX: Final = "trefoil.dev/"  # of labels and annotations
NAME_LABEL: Final = "app.kubernetes.io/name"
INSTANCE_LABEL: Final = "app.kubernetes.io/instance"
NAME: Final = "trefoil-slice"
AGENT: Final = f"{PREFIX}agent"
CONTAINER: Final = "triton"
NAME_MAX: Final = 63
WITH_SECRET: Final = ("/bin/sh", "-c", 'exec "$@" "$(cat "$0")"')
"""Beginning of a command; then the file with its last word, and the other words."""
CANNOT_RUN: Final = frozenset({"StartError", "ContainerCannotRun"})
"""Reasons of containers whose program was not started."""
_PULL: Final = "see that this node can pull kubernetes_image; pull secrets are those of the pod's ServiceAccount"
REFUSED: Final = {
    "ErrImagePull": _PULL,
    "ImagePullBackOff": _PULL,
    "InvalidImageName": "correct kubernetes_image",
    "ErrImageNeverPull": "load the image onto this node",
    "ImageInspectError": "see the container runtime's log on this node",
    "CreateContainerConfigError": "see what the message names",
    "CreateContainerError": "see the container runtime's log on this node",
    "RunContainerError": "see the container runtime's log on this node",
}
"""Reasons of containers that wait for what does not come by itself -> remedy."""
OF_COURSE: Final = frozenset({"", "Error", "Completed"})
"""Reasons of an end that its exit code tells already."""


@dataclass(frozen=True, slots=True)
class PodPlace:
    """Where the pods of an agent belong, as its own pod tells."""

    node: str
    owner: Mapping[str, Any]  # the DaemonSet: with it they go, not with one pod of it
    instance: str  # release of the chart


def agent_label(settings: PowerAgentSettings) -> str:
    """Value of the label by which an agent finds its pods: names may be longer than a label."""
    return hashlib.sha256(f"{settings.cluster}/{settings.node}".encode()).hexdigest()[:32]


def pod_name(settings: PowerAgentSettings, tag: str) -> str:
    """Name of the pod of a tag: the same for each start, so that two starts at once make one pod."""
    digest = hashlib.sha256(f"{settings.cluster}/{settings.node}/{tag}".encode()).hexdigest()[:10]
    readable = re.sub(r"[^a-z0-9]+", "-", f"slice-{tag}".lower())
    return f"{readable[: NAME_MAX - len(digest) - 1].strip('-')}-{digest}"


def secret_word(launch: SliceLaunch) -> str:
    """Word of a command that holds its key; "" for none."""
    return next((word for word in launch.argv if launch.key and launch.key in word), "")


def slice_pod(
    settings: PowerAgentSettings, place: PodPlace, tag: str, launch: SliceLaunch, log_path: Path, secret: Path
) -> dict[str, Any]:
    """Manifest of the pod of a slice; `secret`: the file of its secret word, where the command has one."""
    mounts = list(_mounts(settings, launch, [*launch.files, *([secret] if secret_word(launch) else [])]))
    uid, gid = map(int, NOBODY.split(":"))
    runtime_class = settings.kubernetes_runtime_class
    spec = {
        "nodeName": place.node,
        **({"runtimeClassName": runtime_class} if runtime_class and _gpu(settings, launch) else {}),
        **({"priorityClassName": priority} if (priority := settings.kubernetes_priority_class) else {}),
        "restartPolicy": "Never",
        "serviceAccountName": settings.kubernetes_service_account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "dnsPolicy": "None",  # names would be a way out
        "dnsConfig": {"nameservers": ["127.0.0.1"]},
        "tolerations": [{"operator": "Exists"}],  # the agent drains, not a taint
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": uid,
            "runAsGroup": gid,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [{**_container(settings, launch, secret), "volumeMounts": [mount for mount, _ in mounts]}],
        "volumes": list({volume["name"]: volume for _, volume in mounts}.values()),
    }
    digest = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": pod_name(settings, tag),
            "labels": {
                NAME_LABEL: NAME,
                **({INSTANCE_LABEL: place.instance} if place.instance else {}),
                AGENT: agent_label(settings),
            },
            "annotations": {
                f"{PREFIX}tag": tag,
                f"{PREFIX}owner": f"{settings.cluster}/{settings.node}",
                f"{PREFIX}command": digest,
                f"{PREFIX}log": str(log_path),
            },
            "ownerReferences": [place.owner],
        },
        "spec": spec,
    }


def _container(settings: PowerAgentSettings, launch: SliceLaunch, secret: Path) -> dict[str, Any]:
    """Container of a pod, but for what it mounts."""
    argv: Sequence[str] = launch.argv
    if word := secret_word(launch):
        argv = (*WITH_SECRET, str(secret), *(one for one in launch.argv if one != word))
    environment = {name: value for name, value in launch.env.items() if name not in HOST_ONLY}
    gpu = _gpu(settings, launch)
    environment |= {"NVIDIA_VISIBLE_DEVICES": gpu or "void"}
    environment |= {"NVIDIA_DRIVER_CAPABILITIES": "compute,utility"} if gpu else {}
    return {
        "name": CONTAINER,
        "image": settings.kubernetes_image,
        "imagePullPolicy": "IfNotPresent",
        "args": [escaped(one) for one in argv],
        "env": [{"name": name, "value": escaped(value)} for name, value in sorted(environment.items())],
        "workingDir": str(launch.cwd.resolve()),
        "ports": [{"containerPort": port} for port in launch.ports],
        "resources": settings.kubernetes_resources,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }


def _gpu(settings: PowerAgentSettings, launch: SliceLaunch) -> str:
    """UUID of the device that a pod gets; "" for none, and where it is simulated."""
    return launch.gpu_uuid if settings.node_socket is None else ""


def _mounts(
    settings: PowerAgentSettings, launch: SliceLaunch, files: Sequence[Path]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Mounts and their volumes; what a slice reads lies at the same path in the agent, in the pod and on the node."""
    models = settings.kubernetes_models or str(launch.source)
    if models.startswith("/"):
        volume: dict[str, Any] = {"hostPath": {"path": models, "type": "Directory"}}
    else:
        volume = {"persistentVolumeClaim": {"claimName": models, "readOnly": True}}
    for path in dict.fromkeys((launch.source, launch.source.resolve())):
        yield _read_only(path, "models"), {"name": "models", **volume}
    for n, path in enumerate(dict.fromkeys((launch.repository.resolve(), *files))):
        kind = "File" if path in files else "Directory"
        name = f"own-{n}"
        yield _read_only(path, name), {"name": name, "hostPath": {"path": str(path), "type": kind}}
    for path, name, size_mib in (
        (Path("/tmp"), "tmp", TMP_MIB),
        (SHARED_MEMORY, "shm", settings.kubernetes_shm_mib),
    ):
        volume = {"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": f"{size_mib}Mi"}}
        yield {"name": name, "mountPath": str(path)}, volume


def _read_only(path: Path, name: str) -> dict[str, Any]:
    return {"name": name, "mountPath": str(path), "readOnly": True}


def escaped(word: str) -> str:
    """Word of a command or variable, of which the kubelet expands nothing."""
    return word.replace("$", "$$")


# --- what a pod says --------------------------------------------------------------------------------------------------


def annotation(pod: Pod, name: str) -> str:
    """Annotation of ours; "" where it has none."""
    return str((pod["metadata"].get("annotations") or {}).get(f"{PREFIX}{name}", ""))


def container_state(pod: Pod) -> Mapping[str, Any]:
    """State of its container: {"waiting": ...}, {"running": ...}, {"terminated": ...}, or empty."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or [{}]
    return dict(statuses[0].get("state") or {})


def has_ended(pod: Pod) -> bool:
    """Whether its container has ended, or will never start."""
    phase = (pod.get("status") or {}).get("phase")
    return "terminated" in container_state(pod) or phase in ("Failed", "Succeeded")


def refusal(pod: Pod) -> tuple[str, str] | None:
    """Why the container does not start, and the remedy; None: it started, or still may."""
    state, status = container_state(pod), pod.get("status") or {}
    waiting, ended = state.get("waiting") or {}, state.get("terminated") or {}
    if remedy := REFUSED.get(waiting.get("reason", "")):
        return f"{waiting['reason']}: {waiting.get('message', '')}", remedy
    if ended.get("reason") in CANNOT_RUN:
        return f"{ended['reason']}: {ended.get('message', '')}", "take an image with that program and its libraries"
    if status.get("phase") == "Failed" and not ended:
        remedy = "make room on this node, or lower kubernetes_resources; kubectl describe node tells what it has"
        return f"{status.get('reason', 'Failed')}: {status.get('message', '')}", remedy
    return None


def why_ended(pod: Pod) -> str:
    """What the cluster reports of the end of a pod beyond the exit code; "" for nothing."""
    status, ended = pod.get("status") or {}, container_state(pod).get("terminated") or {}
    conditions = status.get("conditions") or ()
    disruptions = [one for one in conditions if one["type"] == "DisruptionTarget" and one["status"] == "True"]
    for found in (status, *disruptions, ended):
        if (reason := str(found.get("reason") or "")) not in OF_COURSE:
            return f"{reason}: {found['message']}" if found.get("message") else reason
    return ""


def running_triton(pod: Pod, *, deleted: bool = False) -> RunningTriton:
    """State of a Triton by its pod."""
    metadata, spec, state = pod["metadata"], pod["spec"], container_state(pod)
    container = spec["containers"][0]
    ended = state.get("terminated") or {}
    alive = not deleted and not has_ended(pod)
    started = (state.get("running") or ended).get("startedAt") or metadata["creationTimestamp"]
    environment = {one["name"]: one.get("value", "") for one in container.get("env") or ()}
    why = "" if alive else why_ended(pod)
    return RunningTriton(
        tag=annotation(pod, "tag"),
        id=str(metadata["name"]),
        incarnation=str(metadata["uid"]),
        alive=alive,
        exit_code=exit_code(int(ended["exitCode"])) if ended and not alive else None,
        started_at_s=datetime.fromisoformat(started).timestamp(),
        owner=annotation(pod, "owner"),
        argv=command(container.get("args") or ()),
        gpu_uuid=environment.get("CUDA_VISIBLE_DEVICES", "").replace("$$", "$"),
        host=str((pod.get("status") or {}).get("podIP") or "") if alive else "",
        why=why or ("its pod was deleted" if deleted and not ended else ""),
    )


def command(args: Sequence[str]) -> tuple[str, ...]:
    """Command of a container as it was given, its secret word put back from the file."""
    words = [word.replace("$$", "$") for word in args]
    if tuple(words[:3]) != WITH_SECRET or len(words) < 4:
        return tuple(words)
    secret = Path(words[3])
    return (*words[4:], *((secret.read_text(),) if secret.is_file() else ()))
