"""What the kubernetes runtime asks of a cluster, word for word, and what it makes of all that a cluster may answer."""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import AsyncMock, MagicMock

import pytest

from power_agent.runtimes import kubernetes, kubernetes_api
from power_agent.runtimes.base import RunningTriton
from power_agent.runtimes.factory import build_runtime
from power_agent.runtimes.kubernetes import KubernetesRuntime
from power_agent.runtimes.kubernetes_api import ApiServer
from power_agent.runtimes.kubernetes_pod import PodPlace, pod_name, slice_pod
from power_agent.settings import PowerAgentSettings
from power_agent.slices.core.proof import Running, restricted_key
from power_agent.slices.slice_state import Slice
from power_agent.triton.slice_launch import SliceLaunch
from power_agent.watch.slice_health import SliceHealth
from tests.support.fake_kubernetes import NODE, PODS, FakeKubernetes, Fault
from tests.support.runtime_contract import Kit, listens, only, until
from trefoil.core.errors import SettingError, StartError, Unavailable
from trefoil.core.fleet import SliceKey, SliceState
from trefoil.runtime.clock import ManualClock

MIG = "MIG-4f9f4a3a-41ff-5b5c-8d0a-6b2f3f7d1c55"
KEY = "2b2d00c0ffee"
TAG = "gpu-a-gpu0-3g.20gb-4.g7"
LOG = Path(os.devnull)  # of pods whose last words nobody reads
OWNER = {"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "trefoil-gpu", "uid": "ds"}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKubernetes]:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # is for the Internet
    monkeypatch.setattr(kubernetes_api, "PAUSE_S", 0.05)
    monkeypatch.setattr(kubernetes_api, "PAUSES_S", (0.01, 0.02))
    one = FakeKubernetes(tmp_path / "cluster")
    yield one
    one.close()


@pytest.fixture
def settings(tmp_path: Path) -> PowerAgentSettings:
    return PowerAgentSettings(
        cluster="prod", node=NODE, runtime="kubernetes", kubernetes_image="triton:1", kubernetes_pod="trefoil-gpu-x",
        kubernetes_models="models", kubernetes_service_account="slices", state_dir=tmp_path / "state",
    )  # fmt: skip


@pytest.fixture
def again(cluster: FakeKubernetes, settings: PowerAgentSettings) -> Iterator[Callable[[], KubernetesRuntime]]:
    """Makes runtimes, as successive agents would."""
    made = []

    def make() -> KubernetesRuntime:
        made.append(KubernetesRuntime(ApiServer(cluster.url, cluster.account), settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def runtime(again: Callable[[], KubernetesRuntime]) -> KubernetesRuntime:
    return again()


@pytest.fixture
def launch(again: Callable[[], KubernetesRuntime], tmp_path: Path) -> SliceLaunch:
    """A stand-in for a Triton with a key, on a GPU."""
    made = Kit(again, sys.executable, tmp_path, MIG).launch()
    return replace(made, key=KEY, argv=(*made.argv, f"--grpc-restricted-protocol=trace:agent={KEY}"))


def test_a_slice_of_a_gpu_becomes_exactly_this_pod(settings, tmp_path):
    folder, models, secret = tmp_path / "slice", tmp_path / "models", tmp_path / "secret"
    folder.mkdir()
    launch = SliceLaunch(
        argv=("/opt/tritonserver/bin/tritonserver", "--id=$(x)", f"--grpc-restricted-protocol=trace:agent={KEY}"),
        env={"PATH": "/host/bin", "CUDA_VISIBLE_DEVICES": MIG, "OMP_NUM_THREADS": "1"},
        cwd=folder, repository=folder, grpc_target="127.0.0.1:8200", metrics_url="http://127.0.0.1:8201/metrics",
        published_target="10.0.0.7:8200", published_metrics_url="", shm_prefix="trefoil-x-", source=models,
        ports={8200: "0.0.0.0", 8201: "0.0.0.0"}, files=(tmp_path / "triton.key",), key=KEY, gpu_uuid=MIG,
    )  # fmt: skip
    pod = slice_pod(settings, PodPlace(NODE, OWNER, "trefoil"), TAG, launch, Path("/logs/a.log"), secret)
    assert KEY not in json.dumps(pod)
    metadata, spec = pod["metadata"], pod["spec"]
    assert re.fullmatch(r"slice-gpu-a-gpu0-3g-20gb-4-g7-[0-9a-f]{10}", metadata["name"])
    assert metadata["ownerReferences"] == [OWNER]
    assert len(metadata["labels"].pop("trefoil.dev/agent")) == 32
    assert metadata["labels"] == {"app.kubernetes.io/name": "trefoil-slice", "app.kubernetes.io/instance": "trefoil"}
    assert len(metadata["annotations"].pop("trefoil.dev/command")) == 16
    assert metadata["annotations"] == {
        "trefoil.dev/tag": TAG, "trefoil.dev/owner": "prod/gpu-a", "trefoil.dev/log": "/logs/a.log"
    }  # fmt: skip
    [container] = spec.pop("containers")
    volumes = {one.pop("name"): one for one in spec.pop("volumes")}
    assert spec == {
        "nodeName": NODE,
        "runtimeClassName": "nvidia",
        "restartPolicy": "Never",
        "serviceAccountName": "slices",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "dnsPolicy": "None",
        "dnsConfig": {"nameservers": ["127.0.0.1"]},
        "tolerations": [{"operator": "Exists"}],
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": 65534, "runAsGroup": 65534, "seccompProfile": {"type": "RuntimeDefault"}
        },
    }  # fmt: skip
    mounts = {one.pop("mountPath"): one for one in container.pop("volumeMounts")}
    assert container == {
        "name": "triton",
        "image": "triton:1",
        "imagePullPolicy": "IfNotPresent",
        "args": [
            "/bin/sh", "-c", 'exec "$$@" "$$(cat "$$0")"', str(secret), "/opt/tritonserver/bin/tritonserver",
            "--id=$$(x)",
        ],
        "env": [
            {"name": "CUDA_VISIBLE_DEVICES", "value": MIG},
            {"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "compute,utility"},
            {"name": "NVIDIA_VISIBLE_DEVICES", "value": MIG},
            {"name": "OMP_NUM_THREADS", "value": "1"},
        ],
        "workingDir": str(folder),
        "ports": [{"containerPort": 8200}, {"containerPort": 8201}],
        "resources": {"requests": {"cpu": "500m", "memory": "2Gi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}
        },
    }  # fmt: skip
    shown = {path: (volumes[mount["name"]], mount.get("readOnly", False)) for path, mount in mounts.items()}
    assert shown == {
        str(models): ({"persistentVolumeClaim": {"claimName": "models", "readOnly": True}}, True),
        str(folder): ({"hostPath": {"path": str(folder), "type": "Directory"}}, True),
        str(tmp_path / "triton.key"): ({"hostPath": {"path": str(tmp_path / "triton.key"), "type": "File"}}, True),
        str(secret): ({"hostPath": {"path": str(secret), "type": "File"}}, True),
        "/tmp": ({"emptyDir": {"medium": "Memory", "sizeLimit": "256Mi"}}, False),
        "/dev/shm": ({"emptyDir": {"medium": "Memory", "sizeLimit": "256Mi"}}, False),
    }
    on_node = settings.model_copy(update={"kubernetes_models": "/srv/models"})
    pod = slice_pod(on_node, PodPlace(NODE, OWNER, ""), TAG, replace(launch, gpu_uuid=""), Path("/logs/a.log"), secret)
    assert {"name": "models", "hostPath": {"path": "/srv/models", "type": "Directory"}} in pod["spec"]["volumes"]
    assert "runtimeClassName" not in pod["spec"]
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"} in pod["spec"]["containers"][0]["env"]
    update = {"kubernetes_runtime_class": "", "kubernetes_priority_class": "batch"}
    own = settings.model_copy(update=update)
    pod = slice_pod(own, PodPlace(NODE, OWNER, ""), TAG, launch, Path("/logs/a.log"), secret)
    assert "runtimeClassName" not in pod["spec"]
    assert pod["spec"]["priorityClassName"] == "batch"


def test_an_agent_that_comes_back_knows_a_triton_by_its_pod_with_the_key_that_no_manifest_holds(
    again, cluster, settings, launch
):
    started = again().start(TAG, launch, LOG)
    until(lambda: listens(launch))
    assert KEY not in json.dumps(cluster.created)
    assert cluster.created[0]["metadata"]["ownerReferences"] == [OWNER]
    assert cluster.created[0]["spec"]["nodeName"] == NODE
    secret = settings.state_dir / "pods" / pod_name(settings, TAG)
    assert (secret.parent.stat().st_mode & 0o777, KEY in secret.read_text()) == (0o700, True)
    found = only(again())
    assert found == started
    assert (found.owner, found.gpu_uuid, found.host) == ("prod/gpu-a", MIG, "127.0.0.1")
    assert found.argv == launch.argv
    assert restricted_key(found.argv) == KEY
    assert Running(found.tag, found.owner, found.argv, found.gpu_uuid).option("grpc-restricted-protocol")
    runtime = again()
    runtime.stop(TAG, 1.0)
    runtime.forget(TAG)
    assert (runtime.list(), cluster.pods(), secret.exists()) == ((), [], False)


def test_names_of_pods_are_names_and_no_two_tags_share_one(settings):
    tags = [f"{'gpu-a' * 60}-gpu0-{n}g.5gb-{n}.g1" for n in range(1, 8)] + ["a_b.g1", "a-b.g1", "A-b.g1"]
    names = [pod_name(settings, tag) for tag in tags]
    assert len(set(names)) == len(tags)
    assert all(re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", name) for name in names)


def test_last_lines_of_a_pod_stay_when_it_goes(runtime, cluster, launch, tmp_path):
    log = tmp_path / "logs" / "a.log"
    name = runtime.start(TAG, launch, log).id
    until(lambda: listens(launch))
    (cluster.folder / f"{name}.log").write_text("E1129 model failed\n")
    runtime.stop(TAG, 1.0)
    assert log.read_text() == "E1129 model failed\n"


# --- faults -----------------------------------------------------------------------------------------------------------


def test_an_image_that_cannot_be_pulled_is_refused_with_the_registrys_words_and_leaves_no_pod(runtime, cluster, launch):
    cluster.image_fault = "pull access denied for triton"
    refused = r"does not start: ErrImagePull: pull access denied for triton. Remedy: see that this node can pull"
    with pytest.raises(StartError, match=refused):
        runtime.start(TAG, launch, LOG)
    assert (cluster.pods(), runtime.list()) == ([], ())
    cluster.image_fault = ""
    assert runtime.start(TAG, launch, LOG).alive


def test_a_node_without_room_is_named(runtime, cluster, launch):
    cluster.admission_fault = "OutOfmemory"
    with pytest.raises(StartError, match=r"OutOfmemory: no room. Remedy: make room on this node"):
        runtime.start(TAG, launch, LOG)
    assert cluster.pods() == []


@pytest.mark.parametrize(
    ("status", "said", "remedy"),
    [
        (403, 'admission webhook "policy.example" denied the request: no hostPath', "exempt this namespace from that"),
        (403, 'pods "x" is forbidden: violates PodSecurity "baseline:latest": hostPath', "label the namespace"),
        (403, 'pods is forbidden: User "system:serviceaccount:t:a" cannot create', "give the agent's ServiceAccount"),
        (403, 'pods "x" is forbidden: exceeded quota: gpu', "raise that ResourceQuota"),
        (403, 'pod rejected: RuntimeClass "nvidia" not found', "create that RuntimeClass"),
        (422, 'Pod "x" is invalid: spec.something', "see what the message names"),
    ],
)  # fmt: skip
def test_a_refusal_is_passed_on_at_once_with_its_remedy(runtime, cluster, launch, status, said, remedy):
    cluster.faults.append(Fault("POST", PODS, status, said, times=9))
    with pytest.raises(StartError) as caught:
        runtime.start(TAG, launch, LOG)
    assert f"creating pod {pod_name(runtime._settings, TAG)}: the Kubernetes API server refuses ({status})" in str(
        caught.value
    )
    assert said in str(caught.value)
    assert f"Remedy: {remedy}" in str(caught.value)
    assert cluster.faults[0].times == 8
    assert runtime.list() == ()


def test_a_busy_server_is_asked_again_when_it_says(runtime, cluster, launch):
    runtime.list()
    cluster.faults.append(Fault("POST", PODS, 429, "too many requests", times=2, retry_after="0"))
    assert runtime.start(TAG, launch, LOG).alive
    assert len(cluster.created) == 1
    cluster.faults.append(Fault("DELETE", PODS, 429, "too many requests", times=3, retry_after="0"))
    with pytest.raises(Unavailable, match=r"deleting pod .* answers 429: too many requests. Remedy: none: it is asked"):
        runtime.stop(TAG, 1.0)
    assert only(runtime).alive


def test_a_server_that_fails_is_unavailable_and_a_pod_that_it_made_all_the_same_is_the_one(runtime, cluster, launch):
    cluster.faults.append(Fault("POST", PODS, 500, "etcdserver: request timed out", after=True))
    started = runtime.start(TAG, launch, LOG)
    assert started.alive
    assert (len(cluster.created), only(runtime)) == (1, started)
    cluster.faults.append(Fault("POST", PODS, 500, 'failed calling webhook "w": timed out', times=9))
    with pytest.raises(Unavailable, match=r"answers 500: failed calling webhook.*Remedy: start that webhook's service"):
        runtime.start("b.g1", replace(launch, key=""), LOG)


def test_a_pod_of_others_with_a_slices_name_is_not_touched(runtime, cluster, settings, launch):
    name = pod_name(settings, TAG)
    cluster._create(
        {"metadata": {"name": name}, "spec": {"containers": [{"env": [], "args": ["true"], "workingDir": "/"}]}}
    )
    with pytest.raises(
        StartError, match=rf"pod = '{name}': a pod of others has a slice's name. Remedy: kubectl delete"
    ):
        runtime.start(TAG, launch, LOG)
    assert cluster.pods() == [name]


def test_after_410_pods_are_listed_again_and_nothing_is_missed(runtime, cluster, launch):
    runtime.start(TAG, launch, LOG)
    lists = cluster.calls.count(f"GET {PODS}")
    cluster.expire()
    cluster.evict(cluster.pods()[0])
    until(lambda: not only(runtime).alive)
    assert cluster.calls.count(f"GET {PODS}") == lists + 1


def test_a_watch_that_is_cut_or_silent_goes_on_from_where_it_was(runtime, cluster, launch, monkeypatch):
    monkeypatch.setattr(kubernetes_api, "WATCH_S", 60)
    monkeypatch.setattr(kubernetes_api, "WATCH_GRACE_S", -59.9)
    runtime.start(TAG, launch, LOG)
    watches = cluster.calls.count(f"GET watch {PODS}")
    until(lambda: cluster.calls.count(f"GET watch {PODS}") >= watches + 2)
    assert only(runtime).alive
    cluster.evict(cluster.pods()[0])
    until(lambda: not only(runtime).alive)
    assert cluster.calls.count(f"GET {PODS}") == 1


def test_while_the_server_does_not_tell_that_is_said_and_afterwards_all_is_known(runtime, cluster, launch):
    started = runtime.start(TAG, launch, LOG)
    cluster.faults.append(Fault("GET", "watch", 500, "etcdserver: no leader", times=1))
    cluster.faults.append(Fault("GET", PODS, 503, "shutting down", times=9))
    cluster.expire()

    def trouble() -> str:
        try:
            runtime.list()
        except Unavailable as error:
            return str(error)
        return ""

    assert "listing pods: the Kubernetes API server answers 503: shutting down" in until(trouble)
    cluster.faults.clear()
    until(lambda: not trouble())
    assert runtime.list() == (started,)


def test_an_evicted_pod_has_ended_with_the_kubelets_reason(runtime, cluster, launch):
    started = runtime.start(TAG, launch, LOG)
    cluster.evict(started.id)
    until(lambda: not only(runtime).alive)
    assert only(runtime).why == "Evicted: The node was low on resource: memory."
    assert runtime.start(TAG, launch, LOG).incarnation != started.incarnation


def test_pods_of_a_node_that_is_gone_have_ended_and_say_why(runtime, cluster, launch):
    runtime.start(TAG, launch, LOG)
    cluster.lose_node()
    until(lambda: not only(runtime).alive)
    assert only(runtime).why == "DeletionByPodGC: PodGC: node no longer exists"
    runtime.forget(TAG)
    assert runtime.list() == ()


def test_a_kubelet_that_ends_no_pod_is_named_and_the_pod_counts_as_alive(runtime, cluster, launch, monkeypatch):
    runtime.start(TAG, launch, LOG)
    cluster.kubelet_hangs = True
    monkeypatch.setattr(kubernetes, "KILLED_S", 0.1)
    with pytest.raises(Unavailable, match=r"the kubelet has not ended pod slice-.* within 1.1 s. Remedy: see `kubectl"):
        runtime.stop(TAG, 0.5)
    assert only(runtime).alive


def test_a_renewed_token_is_taken_and_one_that_is_refused_is_named(runtime, cluster, launch):
    assert runtime.list() == ()
    cluster.token = "token-2"
    with pytest.raises(Unavailable, match=r"answers 401: Unauthorized. Remedy: see that the agent's ServiceAccount"):
        runtime.start(TAG, launch, LOG)
    (cluster.account / "token").write_text("token-2")

    def started() -> bool:
        try:
            return runtime.start(TAG, launch, LOG).alive
        except Unavailable:  # the watch, too, was refused meanwhile
            return False

    until(started)


def test_an_agent_that_nothing_owns_starts_no_pods(runtime, cluster, launch):
    cluster._pods["trefoil-gpu-x"]["metadata"]["ownerReferences"] = []
    with pytest.raises(StartError, match=r"kubernetes_pod = 'trefoil-gpu-x': no DaemonSet owns this pod"):
        runtime.start(TAG, launch, LOG)


@pytest.mark.parametrize(
    ("changed", "refusal"),
    [
        ({"kubernetes_image": ""}, r"kubernetes_image = '': missing. Remedy: set it to an image with a tritonserver"),
        ({"kubernetes_pod": ""}, r"kubernetes_pod = '': missing. Remedy: set it to this agent's pod"),
        ({"cpu": "serve"}, r"cpu = 'serve': a pod cannot be pinned.*Remedy: set runtime to process, or cpu to meter"),
    ],
)
def test_settings_that_make_no_pods_are_refused(settings, changed, refusal):
    with pytest.raises(SettingError, match=refusal):
        build_runtime(settings.model_copy(update=changed), None)


def test_outside_of_a_pod_that_is_said(settings, cluster, tmp_path, monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(SettingError, match=r"no KUBERNETES_SERVICE_HOST.*Remedy: run the agent by the chart"):
        ApiServer("", cluster.account).call("looking", "GET", PODS)
    with pytest.raises(SettingError, match=r"cannot be read.*Remedy: set automountServiceAccountToken"):
        ApiServer(cluster.url, tmp_path / "none").call("looking", "GET", PODS)
    cluster.close()
    with pytest.raises(Unavailable, match=r"no Kubernetes API server answers at http://127.*running slices continue"):
        ApiServer(cluster.url, cluster.account).call("looking", "GET", PODS)


@pytest.mark.parametrize(("host", "shown"), [("10.1.2.3", "10.1.2.3"), ("fd00::7", "[fd00::7]")])
def test_a_triton_with_an_address_of_its_own_is_asked_and_published_there(launch, host, shown):
    given = replace(launch, grpc_target="127.0.0.1:8200", metrics_url="http://127.0.0.1:8201/metrics")
    moved = given.at(host)
    assert moved.grpc_target == moved.published_target == f"{shown}:8200"
    assert (moved.metrics_url, moved.published_metrics_url) == (f"http://{shown}:8201/metrics", "")
    assert replace(given, published_metrics_url="x").at(host).published_metrics_url == f"http://{shown}:8201/metrics"
    assert given.at("") is given


async def test_a_slice_whose_pod_was_evicted_says_so():
    key = SliceKey("gpu-a/gpu0", "3g.20gb", 4, 4)
    part = Slice(key, 7, SliceState.READY, 1.0, lambda *_: None, "")
    part.running, part.incarnation = True, "1"
    ended = RunningTriton(part.tag, "slice-x", "1", False, -9, 1.0, why="Evicted: low on memory")
    nothing = MagicMock()
    executor = MagicMock(
        processes=AsyncMock(return_value={part.tag: ended}), triton_words=AsyncMock(return_value=""),
        process_ended=AsyncMock(),
    )  # fmt: skip
    node = MagicMock(slices={key: part}, clock=ManualClock())
    await SliceHealth(node, nothing, executor)._check_processes()
    assert (part.state, part.status().why) == (SliceState.FAILED, "Triton exited with -9 (Evicted: low on memory)")
