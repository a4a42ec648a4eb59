"""What a slice's Triton may use: its ports and its threads."""

from dataclasses import replace
from pathlib import Path

import pytest

from power_agent.triton.slice_launch import SliceSpec, grpc_port
from trefoil.core.device_types import A100_80GB, T4, device_type, slice_type
from trefoil.core.errors import SettingError
from trefoil.core.fleet import DeviceType, Hosted, SliceKey

BASE = 8200


def keys(device: str, kind: DeviceType) -> list[SliceKey]:
    return [SliceKey(device, s.name, start, s.memory_slices) for s in kind.slice_types for start in s.starts]


def test_ports_are_those_of_the_documentation():
    assert grpc_port(BASE, SliceKey("node0/gpu0", "7g.40gb", 0, 8)) == 8200
    assert grpc_port(BASE, SliceKey("node0/gpu1", "1g.5gb", 6, 1)) == 8228
    assert grpc_port(BASE, SliceKey("a.gpu-b/gpu3", "whole", 0, 1)) == 8248
    assert grpc_port(BASE, SliceKey("node0/cpu", "quota:0.5", 7, 5)) == 8470
    assert grpc_port(BASE, SliceKey("node0/cpu", "cpu:2", 3, 2)) == 8516


def test_slices_that_may_exist_at_once_never_share_a_port():
    """Two slices of one port are in the same place, so that one of them has to be gone before the other starts."""
    found: dict[int, list[SliceKey]] = {}
    for index in range(16):
        for key in keys(f"node0/gpu{index}", T4 if index % 2 else A100_80GB):
            found.setdefault(grpc_port(BASE, key), []).append(key)
    cpus = device_type("cpu:16")
    quotas = [SliceKey("node0/cpu", f"quota:{tenths / 10}", start, tenths) for tenths in (1, 5) for start in range(156)]
    for key in keys("node0/cpu", cpus) + quotas:
        found.setdefault(grpc_port(BASE, key), []).append(key)
    for sharing in found.values():
        assert len({key.device for key in sharing}) == 1
        kinds = {key.slice_type.partition(":")[0] == "quota" for key in sharing}
        same_cut = [key for key in sharing if not key.slice_type.startswith("quota")] if len(kinds) > 1 else sharing
        assert all(one.overlaps(other) for one in same_cut for other in same_cut)
    assert not {port + 1 for port in found} & set(found)  # metrics


def test_a_port_that_does_not_exist_is_refused():
    with pytest.raises(SettingError, match=r"triton_port_base = 65000: no port is left.*Remedy: lower it"):
        grpc_port(65000, SliceKey("node0/cpu", "cpu:1", 100, 1))
    with pytest.raises(SettingError, match="at most 16 GPUs"):
        grpc_port(BASE, SliceKey("node0/gpu16", "whole", 0, 1))


def test_every_slice_type_of_cpus_has_a_port():
    cpus = device_type("cpu:64")
    for name, start in (("cpu:64", 0), ("quota:0.1", 639), ("cpu:1", 63)):
        key = SliceKey("node0/cpu", name, start, slice_type(cpus, name).memory_slices)
        assert BASE + 256 <= grpc_port(BASE, key) < 10_000


def hosted(instances: int) -> Hosted:
    return Hosted("digits", "digits-s", 2, 0, 1, instances, 8)


@pytest.mark.parametrize(
    ("cores", "quota", "instances", "threads"),
    [
        (None, None, (1,), 1),
        ((4, 5, 6, 7), None, (1,), 4),
        ((4, 5, 6, 7), None, (2,), 2),
        ((4, 5, 6, 7), None, (2, 1), 1),
        ((4, 5), None, (4,), 1),
        (None, 0.1, (1,), 1),
        (None, 2.5, (1,), 3),
        (None, 2.5, (0,), 3),
    ],
)
def test_the_cores_of_a_slice_are_shared_out_between_instances(cores, quota, instances, threads):
    spec = SliceSpec("x", Path("/x"), Path("/y"), [hosted(count) for count in instances], 1, 2, "")
    assert replace(spec, cpu_cores=cores, cpu_quota=quota).threads == threads
