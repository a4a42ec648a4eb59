"""What stands in for a cluster in `make e2e-chart`: rendered workloads as Podman's pods.

Podman 4.3 plays pods, but no Service, probe, hook, projected volume or downward API. Those are done here as Kubernetes
documents them: a name server has the Services and the StatefulSets' pods; volumes are folders of this host with the
modes and the group asked for; probes are asked over HTTP; a pod that is deleted runs its preStop hooks before SIGTERM.
Nothing schedules, restarts or evicts: what is played is what the manifests tell containers.
"""

import base64
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import yaml

from benchmarks.hosts import need
from trefoil.runtime.clock import WallClock

CLOCK: Final = WallClock()
NETWORK: Final = "trefoil-chart"
SUBNET: Final = "10.89.77"
DOMAIN: Final = "cluster.local"
READY_S: Final = 240.0
KEPT: Final = ("image", "command", "args", "resources", "securityContext")  # of a container, as they stand


def run(*argv: str, given: str = "", check: bool = True) -> str:
    """Run a command; what it prints."""
    done = subprocess.run(argv, input=given, capture_output=True, text=True)
    need(done.returncode == 0 or not check, f"{' '.join(argv)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


@dataclass(slots=True)
class Pod:
    """One pod: `dns` is its own name in the cluster, if it has one."""

    name: str
    ip: str
    template: Mapping[str, Any]
    dns: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def containers(self) -> Sequence[Mapping[str, Any]]:
        """Containers of the template, without those that run before."""
        found: Sequence[Mapping[str, Any]] = self.template["spec"]["containers"]
        return found


class Kubelet:
    """Pods of one release in one namespace, on this host. A context: everything is gone after it."""

    def __init__(self, folder: Path, manifests: Sequence[Mapping[str, Any]], namespace: str) -> None:
        self._folder, self._namespace = folder, namespace
        self._files: dict[tuple[str, str], dict[str, bytes]] = {}
        self.workloads: dict[str, Mapping[str, Any]] = {}
        self.services: dict[str, Mapping[str, Any]] = {}
        self.pods: dict[str, Pod] = {}
        self._ips: Iterator[str] = (f"{SUBNET}.{n}" for n in range(10, 250))
        self._names: subprocess.Popen[bytes] | None = None
        for each in manifests:
            kind, name = each["kind"], each["metadata"]["name"]
            if kind in ("Secret", "ConfigMap"):
                plain = {key: text.encode() for key, text in (each.get("stringData") or {}).items()}
                decode = base64.b64decode if kind == "Secret" else str.encode
                self._files[kind, name] = plain | {key: decode(text) for key, text in (each.get("data") or {}).items()}
            elif kind in ("StatefulSet", "Deployment", "DaemonSet"):
                self.workloads[name] = each
            elif kind == "Service":
                self.services[name] = each

    def __enter__(self) -> "Kubelet":
        # Podman's own limits are more than a host may allow; crun takes no hybrid cgroups.
        config = "[containers]\ndefault_ulimits = []\n" + (
            '[engine]\nruntime = "runc"\n' if shutil.which("runc") else ""
        )
        (self._folder / "containers.conf").write_text(config)
        os.environ["CONTAINERS_CONF"] = str(self._folder / "containers.conf")
        run("podman", "network", "create", "--subnet", f"{SUBNET}.0/24", "--disable-dns", NETWORK)
        hosts = self._folder / "hosts"
        hosts.touch()
        argv = [
            "dnsmasq",
            "--keep-in-foreground",
            "--no-hosts",
            "--no-resolv",
            f"--addn-hosts={hosts}",
            "--local-ttl=0",
        ]
        argv += ["--bind-dynamic", f"--listen-address={SUBNET}.1", "--user=root", "--pid-file="]
        self._names = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.pods):
            run("podman", "pod", "rm", "-f", "-t", "0", name, check=False)
        if self._names is not None:
            self._names.kill()
            self._names.wait()
        run("podman", "network", "rm", "-f", NETWORK, check=False)

    def create(self, workload: str, number: int = 0) -> Pod:
        """Start a pod of a workload; returns before it is ready."""
        manifest = self.workloads[workload]
        template = manifest["spec"]["template"]
        stateful = manifest["kind"] == "StatefulSet"
        name = f"{workload}-{number}"
        old = self.pods.get(name)
        dns = f"{name}.{manifest['spec']['serviceName']}.{self._suffix}" if stateful else ""
        pod = Pod(name, old.ip if old else next(self._ips), template, dns, template["metadata"]["labels"])
        self.pods[name] = pod
        file = self._folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(self._played(pod)))
        run("podman", "kube", "play", "--network", NETWORK, "--ip", pod.ip, str(file))
        self._publish()
        return pod

    def wait(self, pod: Pod) -> None:
        """Wait until a pod is ready, by its probes."""
        began_s = CLOCK.monotonic_s()
        for container in pod.containers:
            probe = container.get("readinessProbe") or container.get("startupProbe") or {}
            while not self._passes(pod, container, probe):
                took_s = CLOCK.monotonic_s() - began_s
                need(took_s < READY_S, f"{pod.name} is not ready after {took_s:.0f} s: {self.logs(pod)}")
                CLOCK.block(0.3)

    def delete(self, pod: Pod) -> None:
        """End a pod as Kubernetes does: hooks, SIGTERM, and SIGKILL when its grace is over."""
        grace_s = pod.template["spec"].get("terminationGracePeriodSeconds", 30)
        began_s = CLOCK.monotonic_s()

        def end(container: Mapping[str, Any]) -> None:
            name = f"{pod.name}-{container['name']}"
            hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
            if hook:
                run("timeout", str(grace_s), "podman", "exec", name, *hook, check=False)
            left_s = max(2, int(grace_s - (CLOCK.monotonic_s() - began_s)))
            run("podman", "stop", "-t", str(left_s), name, check=False)

        with ThreadPoolExecutor() as pool:
            list(pool.map(end, pod.containers))
        del self.pods[pod.name]
        self._publish()
        run("podman", "pod", "rm", "-f", pod.name)

    def exec(self, pod: str, container: str, *words: str) -> str:
        """Run something in a container; what it prints."""
        return run("podman", "exec", f"{pod}-{container}", *words)

    def logs(self, pod: Pod) -> str:
        """The last lines that its containers have said."""
        said = [
            subprocess.run(
                ["podman", "logs", "--tail", "8", f"{pod.name}-{each['name']}"], capture_output=True, text=True
            )
            for each in (*pod.template["spec"].get("initContainers", ()), *pod.containers)
        ]
        return "\n".join(each.stdout + each.stderr for each in said)[-4000:]

    @property
    def _suffix(self) -> str:
        return f"{self._namespace}.svc.{DOMAIN}"

    def _publish(self) -> None:
        """Tell the name server who is where."""
        lines = [f"{pod.ip} {pod.dns}" for pod in self.pods.values() if pod.dns]
        for name, service in self.services.items():
            wanted = service["spec"].get("selector", {}).items()
            lines += [f"{pod.ip} {name}.{self._suffix}" for pod in self.pods.values() if wanted <= pod.labels.items()]
        (self._folder / "hosts").write_text("".join(f"{line}\n" for line in lines))
        if self._names is not None:
            self._names.send_signal(signal.SIGHUP)

    def _passes(self, pod: Pod, container: Mapping[str, Any], probe: Mapping[str, Any]) -> bool:
        asked = probe.get("httpGet")
        if asked:
            try:
                url = f"http://{pod.ip}:{asked['port']}{asked['path']}"
                return httpx.get(url, timeout=5.0, trust_env=False).status_code < 400
            except httpx.HTTPError:
                return False
        command = probe.get("exec", {}).get("command")
        argv = ["podman", "exec", f"{pod.name}-{container['name']}", *(command or ["true"])]
        return subprocess.run(argv, capture_output=True).returncode == 0

    # What Podman is given

    def _played(self, pod: Pod) -> dict[str, Any]:
        spec = pod.template["spec"]
        where = self._folder / pod.name
        shutil.rmtree(where, ignore_errors=True)
        group = spec["securityContext"].get("fsGroup", 0)
        volumes = [self._volume(where, volume, group) for volume in spec["volumes"]]
        (where / "resolv.conf").write_text(
            f"nameserver {SUBNET}.1\nsearch {self._suffix} svc.{DOMAIN} {DOMAIN}\noptions ndots:5\n"
        )
        volumes.append({"name": "resolv", "hostPath": {"path": str(where / "resolv.conf"), "type": "File"}})
        play = {"containers": [self._container(pod, each) for each in spec["containers"]]}
        if spec.get("initContainers"):
            play["initContainers"] = [self._container(pod, each) for each in spec["initContainers"]]
        metadata = {"name": pod.name, "labels": dict(pod.labels)}
        return {
            "apiVersion": "v1", "kind": "Pod", "metadata": metadata,
            "spec": {**play, "volumes": volumes, "hostname": pod.name, "restartPolicy": "Never"},
        }  # fmt: skip

    def _container(self, pod: Pod, container: Mapping[str, Any]) -> dict[str, Any]:
        told: dict[str, str] = {}
        for each in container.get("env", ()):
            fields = {"metadata.name": pod.name, "status.podIP": pod.ip, "spec.nodeName": pod.name}
            path = each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            told[each["name"]] = fields[path] if path else _expanded(each["value"], told)
        made = {key: container[key] for key in KEPT if key in container}
        made["command"] = [_expanded(word, told) for word in container["command"]]
        made["securityContext"] = {**pod.template["spec"]["securityContext"], **container["securityContext"]}
        for name in ("fsGroup", "seccompProfile"):
            made["securityContext"].pop(name, None)
        mounts = [
            {key: each[key] for key in ("name", "mountPath", "readOnly") if key in each}
            for each in container["volumeMounts"]
        ]
        return {
            **made, "name": container["name"], "imagePullPolicy": "Never",
            "env": [{"name": name, "value": value} for name, value in told.items()],
            "volumeMounts": [*mounts, {"name": "resolv", "mountPath": "/etc/resolv.conf", "readOnly": True}],
        }  # fmt: skip

    def _volume(self, where: Path, volume: Mapping[str, Any], group: int) -> dict[str, Any]:
        folder = where / volume["name"]
        folder.mkdir(parents=True)
        sources = volume.get("projected", volume)
        mode = sources.get("defaultMode") or (volume.get("configMap") or volume.get("secret") or {}).get("defaultMode")
        for source in sources.get("sources", [volume]):
            if found := source.get("secret"):
                self._write(folder, self._files["Secret", found.get("secretName") or found["name"]], found, mode)
            elif found := source.get("configMap"):
                self._write(folder, self._files["ConfigMap", found["name"]], found, mode)
        for path in (folder, *folder.rglob("*")):
            os.chown(path, 0, group)
        folder.chmod(0o2775)
        return {"name": volume["name"], "hostPath": {"path": str(folder), "type": "Directory"}}

    @staticmethod
    def _write(folder: Path, files: Mapping[str, bytes], told: Mapping[str, Any], mode: int | None) -> None:
        items = {each["key"]: each["path"] for each in told.get("items", ())} or dict(zip(files, files, strict=True))
        for key, path in items.items():
            file = folder / path
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(files[key])
            file.chmod(mode or 0o644)


def _expanded(text: str, told: Mapping[str, str]) -> str:
    for name, value in told.items():
        text = text.replace(f"$({name})", value)
    return text
