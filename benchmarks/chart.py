"""The Helm chart without a cluster: `make e2e-chart`, or `python -m benchmarks.chart`.

Lints it, renders seven sets of values, and validates each strictly against the schemas of Kubernetes 1.30 to the newest
that kubernetes-validate knows; wrong values have to be refused. Then, as root and with Podman, dnsmasq and the images
of deploy/images/build.sh, the rendered trial is played (`chart_kubelet`): an unmodified tritonclient asks 100 times a
second through HAProxy while dispatchers, the leading controller and a node are replaced as a rollout replaces them.
Exit code 1 where something does not hold. `--render` leaves the second part out. What only a cluster shows:
docs/howto/kubernetes.md.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import SecretStr

from benchmarks.chart_kubelet import Kubelet, run
from benchmarks.hosts import Broken, load_text, need
from carbon_feed.settings import CarbonFeedSettings
from controller.settings import ControllerSettings
from power_agent.runtimes.kubernetes_pod import PodPlace, slice_pod
from power_agent.settings import PowerAgentSettings
from power_agent.triton.slice_launch import SliceLaunch
from trefoil.runtime.clock import WallClock
from trefoil.runtime.config import Settings, load
from trefoil.simulated_node.settings import NodeSettings

CLOCK: Final = WallClock()
ROOT: Final = Path(__file__).resolve().parents[1]
CHART: Final = ROOT / "deploy" / "helm" / "trefoil"
RATE_PER_S: Final = 100
ANSWERED_MIN: Final = 10_000
NAMESPACE: Final = "default"
VERSIONS: Final = ("1.30", "1.31", "1.32", "1.33", "1.34", "")  # "": the newest
EXTRA: Final = tuple(
    one
    for part in ("controller", "carbonFeed", "dispatcher", "agent")
    for one in (
        f"extraSecrets.{part}[0].name=key-of-{part}", f"extraSecrets.{part}[0].mountPath=/run/key",
        f"extraEnv.{part}[0].name=KEY_OF", f"extraEnv.{part}[0].value={part}",
    )
)  # fmt: skip
SETS: Final[dict[str, tuple[str, ...]]] = {
    "simulated trial": (),
    "GPU nodes": (
        "simulated.replicas=0", "gpu.image=trefoil-gpu:1", "gpu.nodes={a,b}", "persistence.enabled=true",
        "gpu.runtimeClassName=", "priorityClassName.control=important", *EXTRA, "podAnnotations.of=us",
        "haproxy.annotations.lb=internal", "affinity.nodeAffinity.preferredDuringSchedulingIgnoredDuringExecution=null",
    ),
    "a pod for each slice": (
        "simulated.replicas=0", "gpu.runtime=kubernetes", "gpu.sliceImage=tritonserver:24.08-py3", "gpu.nodes={a,b}",
        "models.hostPath=/srv/models", "imagePullSecrets[0].name=registry", "gpu.tolerations[0].operator=Exists",
        "priorityClassName.slice=batch", "gpu.runtimeClassName=",
    ),
    "Redis of one's own": ("redis.url=rediss://redis.example:6379/0",),
    "cert-manager": (
        "secrets=cert-manager", "prometheus.serviceMonitor=true", "prometheus.rules=true", "prometheus.redis=true",
        "prometheus.labels.release=monitoring", f"gpu.nodes={{{'n' * 63}.example}}", "simulated.replicas=0",
        "gpu.image=trefoil-gpu:1",
    ),
    "given secrets, dashboards": ("secrets=given", "prometheus.dashboards=true", "networkPolicies.enabled=false"),
    "a Gateway instead of HAProxy": (
        "haproxy.enabled=false", "grpcRoute.enabled=true", "grpcRoute.gateway=infra/public",
    ),
}  # fmt: skip
GPUS: Final = "gpu.nodes={a},simulated.replicas=0"
REFUSED: Final = {
    "controller.replicas=0": "controller/replicas",
    "mode=dry-run": "mode",
    "redis.url=redis.example:6379": "redis/url",
    "gpu.nodes={A_B}": "gpu/nodes",
    "gpu.nodes={a}": "simulated.replicas = 1",
    GPUS: "gpu.image",
    "gpu.runtime=docker": "gpu/runtime",
    f"{GPUS},gpu.runtime=kubernetes": "models: empty",
    f"{GPUS},gpu.runtime=kubernetes,models.claim=m": "gpu.sliceImage",
    "grpcRoute.enabled=true": "grpcRoute.gateway",
    "settigns.controller=x": "settigns",
    "nodeSelector.gpu=true": "nodeSelector/gpu",
    "podAnnotations.of=true": "podAnnotations/of",
    "grpcRoute.gateway=a/b/c": "grpcRoute/gateway",
    "grpcRoute.gateway=infra/": "grpcRoute/gateway",
    "dispatcher.terminationGracePeriodSeconds=27": "must be >= 28",
    "settings.dispatcher=drain_s = 20.5": "must be >= 40.5",
    "extraSecrets.agent[0].name=x": "extraSecrets/agent/0",
}


SECRET: Final = "redis://a-secret-of-32-letters-or-more:6379/0"
OWN: Final[dict[str, tuple[type[Settings], str, dict[str, Any]]]] = {
    "carbon_feed": (CarbonFeedSettings, 'zone = "GB"\nprovider = "neso"', {"zone": "GB", "provider": "neso"}),
    "controller": (ControllerSettings, 'carbon.zone = "GB"', {"carbon.zone": "GB"}),
    "power_agent": (PowerAgentSettings, 'zone = "GB"', {"zone": "GB"}),
    "node": (NodeSettings, 'devices = ["H100-SXM5-80GB"]', {"devices": ("H100-SXM5-80GB",)}),
}
"""Service -> its settings, a text for `settings`, and what the service then reads."""


def rendered(helm: str, values: Sequence[str]) -> list[Any]:
    """Manifests of the chart with these values."""
    given = [word for value in values for word in ("--set", value)]
    text = run(helm, "template", "trefoil", str(CHART), "--namespace", NAMESPACE, *given)
    return [each for each in yaml.safe_load_all(text) if each]


def check_rendering(helm: str, validate: str) -> list[str]:
    """Lint, render and validate; what was seen."""
    lint = run(helm, "lint", "--strict", str(CHART))
    seen = [lint.strip().splitlines()[-1]]
    with tempfile.TemporaryDirectory() as folder:
        for name, values in SETS.items():
            manifests = rendered(helm, values)
            own = [
                each
                for each in manifests
                if "." not in each["apiVersion"].partition("/")[0] or ".k8s.io" in each["apiVersion"]
            ]
            own = [each for each in own if not each["apiVersion"].startswith("gateway.")]
            own += [_slice_pod(each) for each in own if each["kind"] == "DaemonSet" and "kubernetes" in str(values)]
            file = Path(folder) / "manifests.yaml"
            file.write_text(yaml.safe_dump_all(own))
            for version in VERSIONS:
                run(validate, "--strict", "--quiet", *(["-k", version] if version else []), str(file))
            wide = [each for each in own if each["kind"] in ("StatefulSet", "Deployment") and not _restricted(each)]
            need(not wide, f"{name}: not restricted: {[each['metadata']['name'] for each in wide]}")
            seen.append(f"{name}: {len(manifests)} objects, {len(own)} valid in {len(VERSIONS)} versions of Kubernetes")
    seen += [check_settings(helm), check_parts(helm)]
    wrong = [*(("t", value, told) for value, told in REFUSED.items()), *((name, "", name) for name in ("a.b", "1a"))]
    for release, value, told in wrong:
        given = ["--set", value] if value else []
        done = subprocess.run([helm, "template", release, str(CHART), *given], capture_output=True, text=True)
        need(
            done.returncode != 0 and told in done.stderr,
            f"{release} --set {value}: not refused by {told}: {done.stderr[-500:]}",
        )
    return [*seen, f"{len(wrong)} wrong values refused, each by its name"]


def check_settings(helm: str) -> str:
    """Read the settings of each service as its pods do: `settings` win over the values, and these over the defaults."""
    values = ("zone=FR", "carbonProvider=constant", "simulated.gpus={A30}")
    of_values = {"zone": "FR", "provider": "constant", "carbon.zone": "FR", "devices": ("A30",)}
    texts = tuple(f"settings.{part}={text}" for part, (_, text, _) in OWN.items())
    gpus = ("gpu.nodes={a}", "gpu.image=trefoil-gpu:1")
    for own in (False, True):
        manifests = rendered(helm, (*values, *(texts if own else ())))
        manifests += rendered(helm, (*values, *gpus, "simulated.replicas=0", *(texts if own else ())))
        with tempfile.TemporaryDirectory() as folder:
            for config in (each for each in manifests if each["kind"] == "ConfigMap"):
                place = Path(folder) / str(config["metadata"]["name"])
                place.mkdir(exist_ok=True)
                for name, text in (config["data"] or {}).items():
                    (place / name).write_text(re.sub("/run/trefoil[a-z-]*", folder, text))
            for secret in ("redis_url", "token", "plan.key", "routes.key"):
                (Path(folder) / secret).touch(0o600)
                (Path(folder) / secret).write_text(SECRET)
            for name, container in _services(manifests):
                _check_read(Path(folder), name, container, of_values, own)
    return "settings win over values, and values over defaults"


def check_parts(helm: str) -> str:
    """Values that pods and monitors have to show."""
    pods: dict[str, Any] = {}
    for name in ("simulated trial", "GPU nodes"):
        for each in rendered(helm, (*SETS[name], *EXTRA, "priorityClassName.control=important")):
            if each["kind"] in ("StatefulSet", "Deployment", "DaemonSet"):
                pods[each["metadata"]["name"].removeprefix("trefoil-")] = each["spec"]["template"]["spec"]
    parts = {"controller": "controller", "carbon-feed": "carbonFeed", "dispatcher": "dispatcher", "node": "agent"}
    for pod, part in (parts | {"gpu": "agent"}).items():
        container = pods[pod]["containers"][-1]
        volume = next(one["name"] for one in container["volumeMounts"] if one["mountPath"] == "/run/key")
        secret = next(one["secret"]["secretName"] for one in pods[pod]["volumes"] if one["name"] == volume)
        need(secret == f"key-of-{part}", f"{pod}: extraSecrets: {secret}")
        need({"name": "KEY_OF", "value": part} in container["env"], f"{pod}: extraEnv")
    priorities = {name: pod.get("priorityClassName") for name, pod in pods.items()}
    need(priorities.pop("gpu") == "system-node-critical" and set(priorities.values()) == {"important"}, str(priorities))
    need("runtimeClassName" not in pods["gpu"], "gpu.runtimeClassName: empty")
    monitored = rendered(helm, SETS["cert-manager"])
    monitors = [each["metadata"]["labels"] for each in monitored if each["apiVersion"] == "monitoring.coreos.com/v1"]
    need(len(monitors) > 2 and all(one["release"] == "monitoring" for one in monitors), "prometheus.labels")
    long = [each for each in monitored if len(each["spec"].get("commonName", "") if "spec" in each else "") > 64]
    need(not long, "a certificate's common name has more than 64 bytes")
    return "extra secrets and variables, priority classes and labels are where they belong"


def _services(manifests: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Containers that read a settings file, each with the file's name."""
    for each in manifests:
        if each["kind"] in ("StatefulSet", "Deployment", "DaemonSet"):
            for container in each["spec"]["template"]["spec"]["containers"]:
                for name in re.findall(r"/etc/trefoil/(\w+)\.toml", " ".join(container["command"])):
                    yield name, container


def _check_read(folder: Path, name: str, container: Any, of_values: Mapping[str, Any], own: bool) -> None:
    """Check what a container's service reads of the values, or of texts of its own."""
    service = name.removesuffix("_gpu")
    if service not in OWN:
        return
    cls, _, told = OWN[service]
    environ = {one["name"]: one["value"] for one in container.get("env", ()) if "$(" not in one.get("value", "$(")}
    environ = {key: value for key, value in environ.items() if not key.endswith("_FILE")}
    environ["TREFOIL_OVERRIDES"] = str(folder / "trefoil-settings")
    merged = load(cls, folder / "trefoil" / f"{name}.toml", f"TREFOIL_{service.upper()}_", environ=environ)
    of_file = getattr(merged, "redis_url", SecretStr(SECRET)).get_secret_value()
    need(of_file == SECRET, f"{name}: its file has no redis_url_file")
    for key, value in told.items():
        found, expected = attrgetter(key)(merged), value if own else of_values[key]
        need(found == expected, f"{name}: {key} = {found!r}, not {expected!r}")


def _slice_pod(agents: Mapping[str, Any]) -> dict[str, Any]:
    """Pod that an agent of this DaemonSet makes for a slice, by the variables that it gets."""
    variables = agents["spec"]["template"]["spec"]["containers"][0]["env"]
    given = {one["name"]: one["value"] for one in variables if "$(" not in one.get("value", "$(")}
    settings = load(PowerAgentSettings, None, "TREFOIL_POWER_AGENT_", environ=given, overrides={"node": "a"})
    need(settings.runtime == "kubernetes" and settings.state_dir == Path("/var/lib/trefoil"), f"settings: {given}")
    folder, files = settings.state_dir / "slices" / "x", (settings.state_dir / "tls" / "x" / "triton.key",)
    launch = SliceLaunch(
        argv=("tritonserver", "--grpc-restricted-protocol=trace:agent=k"), env={"CUDA_VISIBLE_DEVICES": "MIG-x"},
        cwd=folder, repository=folder, grpc_target="127.0.0.1:8200", metrics_url="http://127.0.0.1:8201/metrics",
        published_target="10.0.0.7:8200", published_metrics_url="", shm_prefix="x", source=Path("/models"),
        ports={8200: "0.0.0.0", 8201: "0.0.0.0"}, files=files, key="agent=k", gpu_uuid="MIG-x",
    )  # fmt: skip
    owner = {"apiVersion": agents["apiVersion"], "kind": agents["kind"], "name": agents["metadata"]["name"], "uid": "u"}
    log, secret = settings.state_dir / "logs" / "x.log", settings.state_dir / "pods" / "x"
    pod = slice_pod(settings, PodPlace("a", owner, "trefoil"), "a-gpu0-3g.20gb-4.g1", launch, log, secret)
    need(pod["spec"]["priorityClassName"] == "batch" and "runtimeClassName" not in pod["spec"], f"slice: {pod['spec']}")
    return pod


def _restricted(workload: Mapping[str, Any]) -> bool:
    """Whether its pods pass the restricted standard of Pod Security."""
    spec = workload["spec"]["template"]["spec"]
    pod = spec["securityContext"]
    containers = [each["securityContext"] for each in (*spec["containers"], *spec.get("initContainers", ()))]
    allowed = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    return bool(
        pod["runAsNonRoot"] and pod["seccompProfile"]["type"] == "RuntimeDefault"
        and all(each == allowed for each in containers)
        and not any("hostPath" in each for each in spec["volumes"])
    )  # fmt: skip


class Load:
    """Clients in a separate process."""

    def __init__(self, target: str) -> None:
        argv = [sys.executable, "-m", "benchmarks.hosts_load", "--target", target, "--rate", str(RATE_PER_S)]
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the load
        self._process = subprocess.Popen(argv, cwd=ROOT, stdout=self._file, env=os.environ | {"no_proxy": "*"})

    def sums(self) -> Any:
        """All that was sent and answered until now."""
        self._file.seek(0)
        lines = [line for line in self._file.read().decode().splitlines() if line.startswith('{"sent"')]
        return json.loads(lines[-1]) if lines else {"sent": 0, "answered": 0, "failed": {}}

    def until(self, answered: int) -> None:
        """Wait until so many are answered."""
        last, since_s = 0, CLOCK.monotonic_s()
        while (now := self.sums()["answered"]) < answered:
            if now > last:
                last, since_s = now, CLOCK.monotonic_s()
            need(CLOCK.monotonic_s() - since_s < 120, f"no answer any more: {self.sums()}")
            CLOCK.block(0.5)

    def stop(self) -> Any:
        """End it when the last request is answered; all sums."""
        self._process.send_signal(signal.SIGTERM)
        need(self._process.wait() == 0, "the load failed")
        return self.sums()


def play(helm: str) -> Iterator[str]:
    """Play the trial; yields a line for each event when it has ended."""
    manifests = rendered(helm, ("simulated.replicas=2", "dispatcher.maxReplicas=2"))
    with tempfile.TemporaryDirectory() as folder, Kubelet(Path(folder), manifests, NAMESPACE) as kubelet:
        Path(folder).chmod(0o755)
        began_s = CLOCK.monotonic_s()
        names = [name for name in kubelet.workloads if not name.endswith("-haproxy")]
        pods = [
            kubelet.create(name, n) for name in names for n in range(kubelet.workloads[name]["spec"].get("replicas", 1))
        ]
        proxy = kubelet.create("trefoil-haproxy")
        load = Load(f"{proxy.ip}:8001")
        for pod in (*pods, proxy):
            kubelet.wait(pod)
        load.until(1)
        yield f"{len(pods) + 1} pods ready, first answer through HAProxy after {CLOCK.monotonic_s() - began_s:.0f} s"
        early = load.stop()  # what came before it served
        load = Load(f"{proxy.ip}:8001")
        load.until(500)
        for event, name in (
            ("a dispatcher", "trefoil-dispatcher"), ("a dispatcher", "trefoil-dispatcher"),
            ("a controller", "trefoil-controller"), ("a controller", "trefoil-controller"), ("a node", "trefoil-node"),
        ):  # fmt: skip
            yield _replaced(kubelet, load, event, name)
        load.until(ANSWERED_MIN)
        sums = load.stop()
        yield f"{load_text(sums)} ({sum(early['failed'].values())} before the first plan)"
        need(not sums["failed"], f"failed: {sums['failed']}")
        need(sums["correct"] / sums["answered"] > 0.9, f"right: {sums['correct']} of {sums['answered']}")
        yield kubelet.exec("trefoil-controller-0", "controller", "trefoil", "status").strip().splitlines()[0]


def _replaced(kubelet: Kubelet, load: Load, event: str, workload: str) -> str:
    """Replace the oldest pod of a workload as its update does, under load; what was seen."""
    manifest = kubelet.workloads[workload]
    old = next(pod for name, pod in kubelet.pods.items() if name.rpartition("-")[0] == workload)
    number = int(old.name.rpartition("-")[2])
    answered, failed = load.sums()["answered"], sum(load.sums()["failed"].values())
    began_s = CLOCK.monotonic_s()
    if manifest["kind"] == "Deployment":  # the new one serves before the old one ends
        kubelet.wait(kubelet.create(workload, number + 10))
        kubelet.delete(old)
    else:
        kubelet.delete(old)
        kubelet.wait(kubelet.create(workload, number))
    load.until(load.sums()["answered"] + 500)
    sums, took_s = load.sums(), CLOCK.monotonic_s() - began_s
    lost = sum(sums["failed"].values()) - failed
    return f"{event} replaced ({old.name}): {took_s:.0f} s, {lost} of {sums['answered'] - answered} failed"


def main() -> int:
    """Check the chart, and print what was seen."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--render", action="store_true", help="only lint, render and validate")
    arguments = parser.parse_args()
    tools = {name: shutil.which(name) for name in ("helm", "kubernetes-validate")}
    tools |= {} if arguments.render else {name: shutil.which(name) for name in ("podman", "dnsmasq")}
    if missing := [name for name, path in tools.items() if path is None]:
        print(
            f"error: PATH has no {', '.join(missing)}. Remedy: docs/howto/kubernetes.md, last section", file=sys.stderr
        )
        return 2
    try:
        for line in check_rendering(str(tools["helm"]), str(tools["kubernetes-validate"])):
            print(line, flush=True)
        for line in () if arguments.render else play(str(tools["helm"])):
            print(line, flush=True)
    except Broken as error:
        print(f"broken: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
