"""Tritons in pods of a Kubernetes cluster: one per slice, on the agent's node, with that slice's device alone.

A pod is found by its label, so it outlives the agent and is adopted by the next one. The kubelet never restarts its
container: the agent starts another pod, and it alone knows whether the slice still exists. Pods belong to the agent's
DaemonSet: an upgrade of the agent leaves them running, uninstalling the chart deletes them.
"""

import math
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import structlog

from power_agent.runtimes.base import RunningTriton
from power_agent.runtimes.confinement import make_readable
from power_agent.runtimes.docker import KILLED_S, LAST_LINES, MIB
from power_agent.runtimes.docker_engine import TritonImage
from power_agent.runtimes.kubernetes_api import ApiServer, Pod, PodWatch
from power_agent.runtimes.kubernetes_pod import (
    AGENT,
    CONTAINER,
    INSTANCE_LABEL,
    PodPlace,
    agent_label,
    annotation,
    container_state,
    has_ended,
    pod_name,
    refusal,
    running_triton,
    secret_word,
    slice_pod,
)
from power_agent.settings import PowerAgentSettings
from power_agent.triton.installation import TritonInstall
from power_agent.triton.slice_launch import SliceLaunch
from trefoil.core.errors import StartError, TrefoilError, Unavailable
from trefoil.runtime.files import replace_file, rotate_log

CONFLICT: Final = 409
NOT_FOUND: Final = 404
GRACE_MIN_S: Final = 1  # 0 would delete the pod's object and leave its processes
SECRETS: Final = "pods"  # folder of the state directory


class KubernetesRuntime:
    """Runtime of Tritons in pods, as the agent's settings say. Thread-safe."""

    name = "kubernetes"

    def __init__(self, api: ApiServer, settings: PowerAgentSettings) -> None:
        self._api, self._settings = api, settings
        self._watch = PodWatch(api, f"{AGENT}={agent_label(settings)}")
        self._place: PodPlace | None = None
        self._lock = threading.Lock()
        self._log = structlog.get_logger()

    def install(self) -> TritonInstall:
        """Triton installation of the image, as paths in a pod."""
        settings = self._settings
        image = TritonImage(settings.kubernetes_image, "", settings.kubernetes_backends)
        return image.install(sees_gpus=settings.node_socket is None)

    def close(self) -> None:
        """Stop watching."""
        self._watch.close()
        self._api.close()

    def start(self, tag: str, launch: SliceLaunch, log_path: Path) -> RunningTriton:
        """See Runtime. Another command under a live tag is refused. Returns when the container runs, or has ended.

        Raises:
            StartError: the cluster refuses the pod, its image cannot be had, or the tag runs something else.
            Unavailable: no API server, or the pod does not start in time; then it may start later.
        """
        secret = self._secret(tag)
        pod = slice_pod(self._settings, self._find_place(), tag, launch, log_path, secret)
        found = self._find(tag)
        if found is not None and has_ended(found):
            self._remove(found)
            found = None
        if found is None:
            make_readable(launch.repository)
            if word := secret_word(launch):
                replace_file(secret, word, sync=False)
                secret.parent.chmod(0o700)  # the kubelet is root; in the pod, where it is mounted, Triton reads it
            found = self._create(pod)
        if annotation(found, "command") != annotation(pod, "command"):
            raise StartError(
                f"pod {found['metadata']['name']} runs another command under that tag",
                field="tag",
                value=tag,
                remedy="stop it first",
            )
        return self._until_started(found)

    def list(self) -> Sequence[RunningTriton]:
        """See Runtime. Every pod with this agent's label, and those deleted since this agent began."""
        pods, gone = self._watch.pods()
        found = {annotation(pod, "tag"): running_triton(pod, deleted=True) for pod in gone.values()}
        found |= {annotation(pod, "tag"): running_triton(pod) for pod in pods.values()}
        return tuple(found.values())

    def stop(self, tag: str, kill_after_s: float) -> None:
        """See Runtime; no-op when unknown. The kubelet deletes a pod when all its processes are gone.

        Raises:
            Unavailable: no API server, or the kubelet does not end the pod.
        """
        found = self._find(tag)
        if found is None or has_ended(found):
            return
        self._keep_log(found)
        self._delete(found, max(GRACE_MIN_S, math.ceil(kill_after_s)))

    def forget(self, tag: str) -> None:
        """See Runtime; a live one is refused.

        Raises:
            StartError: it is alive.
            Unavailable: no API server.
        """
        found = self._find(tag)
        if found is not None:
            if not has_ended(found):
                name = found["metadata"]["name"]
                raise StartError(f"pod {name} is alive", field="tag", value=tag, remedy="stop it first")
            self._remove(found)
        for uid, pod in self._watch.pods()[1].items():
            if annotation(pod, "tag") == tag:
                self._watch.forget(uid)
        self._secret(tag).unlink(missing_ok=True)

    def missing(self, *, gpus: bool) -> Mapping[str, str]:
        """See Runtime. Nothing that a pod lacks can be seen from outside: `trefoil node doctor` looks at the node."""
        return {}

    # --- what is asked of the cluster --------------------------------------------------------------------------------

    def _find_place(self) -> PodPlace:
        """Node, owner and release of this agent's own pod.

        Raises:
            StartError: there is no such pod, or it belongs to nothing that outlives it.
            Unavailable: no API server.
        """
        with self._lock:
            if self._place is None:
                name = self._settings.kubernetes_pod
                pod = self._api.call(f"looking at pod {name}", "GET", f"{self._api.pods_path}/{name}").json()
                owners = [one for one in pod["metadata"].get("ownerReferences") or () if one.get("controller")]
                if not owners:
                    raise StartError(
                        "no DaemonSet owns this pod, so nothing would delete its slices' pods when it is uninstalled",
                        field="kubernetes_pod",
                        value=name,
                        remedy="run the agent by the chart deploy/helm/trefoil",
                    )
                owner = {key: owners[0][key] for key in ("apiVersion", "kind", "name", "uid")}
                instance = (pod["metadata"].get("labels") or {}).get(INSTANCE_LABEL, "")
                self._place = PodPlace(pod["spec"]["nodeName"], owner, instance)
            return self._place

    def _find(self, tag: str) -> Pod | None:
        pods, _ = self._watch.pods()
        return next((pod for pod in pods.values() if annotation(pod, "tag") == tag), None)

    def _create(self, pod: Pod) -> Pod:
        """Create a pod; one of its name that the view does not show yet is that of an earlier try.

        Raises:
            StartError: the cluster refuses it, or a pod of others has its name.
            Unavailable: no API server, or the pod of its name does not end.
        """
        name = pod["metadata"]["name"]
        while True:
            answer = self._api.call(f"creating pod {name}", "POST", self._api.pods_path, body=pod, accept=(CONFLICT,))
            if answer.status_code != CONFLICT:
                return dict(answer.json())
            answer = self._api.call(
                f"looking at pod {name}", "GET", f"{self._api.pods_path}/{name}", accept=(NOT_FOUND,)
            )
            if answer.status_code == NOT_FOUND:
                continue
            found: Pod = answer.json()
            if (found["metadata"].get("labels") or {}).get(AGENT) != pod["metadata"]["labels"][AGENT]:
                raise StartError(
                    "a pod of others has a slice's name", field="pod", value=name, remedy=f"kubectl delete pod {name}"
                )
            if not found["metadata"].get("deletionTimestamp") and not has_ended(found):
                return found
            self._delete(found, GRACE_MIN_S)

    def _until_started(self, pod: Pod) -> RunningTriton:
        """Wait until the container of a pod runs or has ended.

        Raises:
            StartError: it cannot start; its pod is deleted.
            Unavailable: it has not started in time.
        """
        uid, name, timeout_s = pod["metadata"]["uid"], pod["metadata"]["name"], self._settings.kubernetes_start_s

        def settled(pods: Mapping[str, Pod]) -> Pod | None:
            seen = pods.get(uid)
            if seen is None:
                return self._watch.last_state(uid)
            running = "running" in container_state(seen) and (seen.get("status") or {}).get("podIP")
            return seen if running or has_ended(seen) or refusal(seen) else None

        seen = self._watch.wait(settled, timeout_s)
        if seen is None:
            self._watch.pods()  # says why, where the server does not answer
            raise Unavailable(
                f"pod {name} does not run after {timeout_s:g} s",
                field="kubernetes_start_s",
                remedy=f"kubectl describe pod {name}",
            )
        if (refused := refusal(seen)) is not None:
            self._delete(seen, GRACE_MIN_S)
            self._watch.forget(uid)
            why, remedy = refused
            raise StartError(f"pod {name} does not start: {why}", remedy=remedy)
        return running_triton(seen, deleted=self._watch.last_state(uid) is not None)

    def _delete(self, pod: Pod, grace_s: int) -> None:
        """Delete a pod, and wait until the kubelet reports that all of it is gone.

        Raises:
            Unavailable: no API server, or the kubelet does not end it.
        """
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        self._api.call(
            f"deleting pod {name}",
            "DELETE",
            f"{self._api.pods_path}/{name}",
            body={"gracePeriodSeconds": grace_s, "preconditions": {"uid": uid}},
            accept=(NOT_FOUND, CONFLICT),
        )
        if not self._watch.wait(lambda pods: uid not in pods or None, grace_s + KILLED_S):
            self._watch.pods()
            raise Unavailable(
                f"the kubelet has not ended pod {name} within {grace_s + KILLED_S:g} s",
                remedy="see `kubectl describe node`, and on the node `journalctl -u kubelet`",
            )

    def _remove(self, pod: Pod) -> None:
        """Remove a pod that has ended, and keep its last words."""
        self._keep_log(pod)
        self._delete(pod, GRACE_MIN_S)
        self._watch.forget(pod["metadata"]["uid"])

    def _keep_log(self, pod: Pod) -> None:
        """Append the last lines of a pod's log to the slice's log: they go with the pod."""
        name, log_path = pod["metadata"]["name"], Path(annotation(pod, "log"))
        params: dict[str, str | int] = {"container": CONTAINER, "tailLines": LAST_LINES}
        try:
            path = f"{self._api.pods_path}/{name}/log"
            said = self._api.call(f"reading the log of {name}", "GET", path, params=params).content
            log_path.parent.mkdir(parents=True, exist_ok=True)
            with log_path.open("ab") as file:
                file.write(said)
            rotate_log(log_path, self._settings.triton_log_mib * MIB)
        except (TrefoilError, OSError) as error:
            self._log.warning("the log of a pod is lost", pod=name, why=str(error))

    def _secret(self, tag: str) -> Path:
        return (self._settings.state_dir / SECRETS / pod_name(self._settings, tag)).absolute()
