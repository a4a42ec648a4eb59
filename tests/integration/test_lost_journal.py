"""An agent whose journal is lost, spoilt or another's takes over what runs: no process ends, no instance is touched."""

import itertools
import json
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.power_agent.v1 import power_agent_pb2
from tests.support.agent_cluster import key, node_plan, planned
from tests.support.fast_checks import check, identity
from tests.support.fast_cluster import NODE, FastCluster, Stage
from trefoil.core.energy import EnergySample
from trefoil.core.fleet import SliceKey, SliceState, SliceStatus
from trefoil.core.plan import NodePlan
from trefoil.core.plan_check import sealed
from trefoil.runtime import codec
from trefoil.runtime.keys import Keys

pytestmark = [pytest.mark.integration, pytest.mark.slow]

numbers = itertools.count(1)
LEFT, RIGHT, OTHER = key("4g.20gb", 0), key("3g.20gb", 4), key("3g.20gb", 0, gpu=1)


@pytest.fixture
def cluster(stage) -> Iterator[FastCluster]:
    one = FastCluster(stage)
    try:
        yield one
    finally:
        one.close()


def plan(left: int = 1, right: int = 2, clock_mhz: int = 0) -> NodePlan:
    parts = (planned("4g.20gb", 0, left), planned("3g.20gb", 4, right), planned("3g.20gb", 0, 3, gpu=1))
    whole = node_plan(next(numbers), *parts)
    devices = [replace(device, clock_max_mhz=clock_mhz if device.slices else 0) for device in whole.devices]
    return sealed(replace(whole, devices=tuple(devices), digest=""), whole.revision)


def go(cluster: FastCluster, wanted: NodePlan) -> dict[Any, Any]:
    cluster.apply(wanted)
    cluster.settle(wanted)
    return check(cluster, wanted)


def slices(cluster: FastCluster) -> dict[SliceKey, SliceStatus]:
    return {part.key: part for device in cluster.status().devices for part in device.slices}


def unproven(cluster: FastCluster) -> list[str]:
    return [text for text in cluster.status().missing if text.startswith("unproven: ")]


def health(cluster: FastCluster) -> str:
    with grpc.insecure_channel(cluster.target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(service="unproven"), timeout=30)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


def requests_booked(cluster: FastCluster, stage: Stage) -> int:
    """Requests in all samples that agents have published, two more of each GPU included."""
    with redis.Redis(unix_socket_path=str(stage.redis.socket)) as client:
        stream = Keys(cluster.folder.name).energy(NODE)
        before = client.xlen(stream)
        cluster.until(lambda: client.xlen(stream) > before + 4, "samples")
        samples = [codec.decode(EnergySample, entry[b"d"]) for _, entry in client.xrange(stream)]
    return sum(h.requests for sample in samples for part in sample.slices for h in part.hosted)


def state_dir(cluster: FastCluster) -> Path:
    return cluster.folder / "agent"


def entry(**values: Any) -> bytes:
    text = json.dumps({"load": "x"} | values).encode()
    return b"%s\t%08x\n" % (text, zlib.crc32(text))


def folder_gone(folder: Path) -> None:
    shutil.rmtree(folder)


def folder_moved(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def spoil(content: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        path = folder / "journal.jsonl"
        path.write_bytes(content(path.read_bytes()))

    return do


def unreadable(folder: Path) -> None:
    (folder / "journal.jsonl").unlink()
    (folder / "journal.jsonl").mkdir()


def slices_forgotten(data: bytes) -> bytes:
    return b"".join(line + b"\n" for line in data.splitlines() if b'"slice"' not in line)


def without_devices(data: bytes) -> bytes:
    """The journal with a plan that plans nothing, in place of the one in force."""
    lines = data.splitlines()
    tree = json.loads(next(line for line in reversed(lines) if b'"plan":{' in line).partition(b"\t")[0])
    tree["plan"]["devices"] = []
    kept = [line for line in lines if b'"plan":{' not in line]
    return b"\n".join([*kept, entry(**tree).strip(), b""])


def slice_key(first: SliceKey, second: SliceKey, part: dict[str, Any]) -> Any:
    """Key of one of two slices, whose entry it is not."""
    tree = codec.to_plain(first)
    return tree if part["key"] != tree else codec.to_plain(second)


def one_slice(change: Callable[[dict[str, Any]], None]) -> Callable[[bytes], bytes]:
    """The journal with its last entry of a slice changed, which stays well-formed."""

    def do(data: bytes) -> bytes:
        lines = data.splitlines()
        at = max(number for number, line in enumerate(lines) if b'"slice":{"key"' in line)
        tree = json.loads(lines[at].partition(b"\t")[0])
        name = tree["slice"]["tag"].encode()
        change(tree["slice"])
        kept = [line for line in lines if name not in line]
        return b"\n".join([*kept, entry(**tree).strip(), b""])

    return do


LOSSES = {
    "folder gone": folder_gone,
    "folder moved": folder_moved,
    "journal deleted": lambda folder: (folder / "journal.jsonl").unlink(),
    "journal empty": spoil(lambda _: b""),
    "garbage": spoil(lambda data: bytes(byte ^ 0x5A for byte in data)),
    "half of it": spoil(lambda data: data[: len(data) // 2]),
    "no slices in it": spoil(slices_forgotten),
    "of another node": spoil(lambda data: data + entry(journal={"version": 1, "owner": "default/node9"})),
    "a folder in its place": unreadable,
    "a slice by another name": spoil(one_slice(lambda part: part["key"].update(start=part["key"]["start"] + 100))),
    "a slice with the Triton of another": spoil(one_slice(lambda part: part.update(key=slice_key(OTHER, LEFT, part)))),
    "a slice with a Triton that is none": spoil(one_slice(lambda part: part.update(tag="node0-gpu0-x.g99"))),
    "a plan of another mix": spoil(without_devices),
    "epochs beyond all": spoil(lambda data: data + entry(highest_epoch=2**62) + entry(lease_epoch=2**62)),
    "a generation beyond all": spoil(lambda data: data + entry(generation=10**40)),
}


@pytest.mark.parametrize(
    "loss", [pytest.param(name, marks=pytest.mark.gate if name == "folder gone" else ()) for name in LOSSES]
)
def test_what_runs_is_adopted_without_a_journal_and_no_process_ends(cluster, stage, loss):
    was = go(cluster, plan(clock_mhz=1005))
    generations = {part: status.generation for part, status in slices(cluster).items()}
    assert requests_booked(cluster, stage) == 0
    cluster.kill_agent()
    LOSSES[loss](state_dir(cluster))
    cluster.start_agent()
    now = slices(cluster)
    assert {part: (status.state, status.generation) for part, status in now.items()} == {
        part: (SliceState.READY, generation) for part, generation in generations.items()
    }, cluster.tail()
    assert identity(cluster.inspect()) == was
    assert unproven(cluster) == []
    assert go(cluster, plan(clock_mhz=1005)) == was
    assert requests_booked(cluster, stage) == 0, "no client has sent any"
    swapped = go(cluster, plan(left=2))  # it can be changed, and made room for, as any other; the clock is free again
    assert {place: swapped[place] for place in swapped if place != (0, "4g.20gb", 0)} == {
        place: was[place] for place in was if place != (0, "4g.20gb", 0)
    }
    cluster.kill_agent()
    cluster.start_agent()  # by the new journal
    assert identity(cluster.inspect()) == swapped
    assert min(status.generation for status in slices(cluster).values()) > 0


def test_a_running_agent_whose_state_directory_is_deleted_goes_on_and_its_successor_adopts(cluster):
    was = go(cluster, plan())
    folder_moved(state_dir(cluster))
    cluster.until(lambda: (state_dir(cluster) / "journal.jsonl").exists(), "the journal to be written again")
    repositories = [
        state_dir(cluster) / "slices" / part.name / "digits" / "config.pbtxt" for part in (LEFT, RIGHT, OTHER)
    ]
    cluster.until(lambda: all(path.exists() for path in repositories), "the slices' files")
    assert go(cluster, plan()) == was
    changed = plan(left=2)
    swapped = go(cluster, changed)  # by a new Triton: the old one could load nothing
    assert swapped[0, "4g.20gb", 0][0] == was[0, "4g.20gb", 0][0]
    assert swapped[0, "4g.20gb", 0][1] != was[0, "4g.20gb", 0][1]
    cluster.kill_agent()
    cluster.start_agent()
    cluster.settle(changed)
    assert identity(cluster.inspect()) == swapped
    assert "journal was deleted" in cluster.tail(100_000)


def test_what_is_not_proven_is_left_running_and_named(cluster):
    was = go(cluster, plan())
    there = {row["uuid"]: row["tag"] for row in cluster.inspect()["processes"]}
    tag = next(tag for tag in there.values() if tag.startswith(f"{OTHER.name}.g"))
    cluster.kill_agent()
    cluster.client.call("kill", tag=tag)  # an instance without its Triton
    folder_gone(state_dir(cluster))
    cluster.start_agent()
    now = slices(cluster)
    assert set(now) == {LEFT, RIGHT}
    [why] = unproven(cluster)
    assert f"instance {OTHER.name}" in why
    assert "trefoil node adopt" in why
    left = identity(cluster.inspect())
    assert left == {place: was[place] for place in left}
    assert len(left) == 2
    assert health(cluster) == "NOT_SERVING"
    with pytest.raises(grpc.RpcError, match="no such Triton or instance is here"):
        cluster.stub.Reset(power_agent_pb2.ResetRequest(name=["node0-gpu0-1g.5gb-0"], epoch=1))
    for name in ([OTHER.name], []):  # again: nothing is left to do
        answer = cluster.stub.Reset(power_agent_pb2.ResetRequest(name=name, epoch=1))
        assert unproven(cluster) == []
    assert not any(text.startswith("unproven") for text in answer.node.missing)
    assert health(cluster) == "SERVING"
    assert identity(cluster.inspect()) == left
    go(cluster, plan())


def test_an_operator_takes_over_what_is_not_proven_or_ends_it(cluster):
    was = go(cluster, plan())
    cluster.kill_agent()
    folder_gone(state_dir(cluster))
    cluster.settings(cluster="another")  # the Tritons say that they are of the cluster before
    cluster.start_agent()
    assert slices(cluster) == {}
    [why] = unproven(cluster)
    assert f"started by {cluster.folder.name}/node0" in why
    assert identity(cluster.inspect()) == was
    tags = {row["tag"].partition(".g")[0]: row["tag"] for row in cluster.inspect()["processes"]}
    for _ in range(2):  # idempotent
        cluster.stub.Adopt(power_agent_pb2.AdoptRequest(name=[tags[LEFT.name], RIGHT.name], epoch=0))
    assert {part: status.state for part, status in slices(cluster).items()} == dict.fromkeys(
        (LEFT, RIGHT), SliceState.READY
    )
    [why] = unproven(cluster)
    assert OTHER.name in why
    assert LEFT.name not in why
    cluster.stub.Adopt(power_agent_pb2.AdoptRequest(epoch=0))
    assert unproven(cluster) == []
    assert go(cluster, plan()) == was
    cluster.kill_agent()
    cluster.start_agent()  # by its journal, which knows the operator's word
    assert unproven(cluster) == []
    assert identity(cluster.inspect()) == was
