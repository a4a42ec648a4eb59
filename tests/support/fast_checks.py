"""Whether a node is what its plan says: by the driver, the processes and the journal, not by the agent alone."""

from collections.abc import Mapping
from typing import Any

from tests.support.fast_cluster import NODE, FastCluster
from trefoil.core.fleet import SERVING, DeviceState, SliceState
from trefoil.core.plan import NodePlan

Place = tuple[int, str, int]  # GPU, slice type, start
LIMIT_TOLERANCE_W = 0.5


def places(plan: NodePlan) -> dict[Place, list[list[Any]]]:
    """What each planned slice serves: [[family, version]]."""
    return {
        (int(device.device.rpartition("gpu")[2]), part.key.slice_type, part.key.start): [
            [hosted.family, hosted.version] for hosted in part.hosted
        ]
        for device in plan.devices
        for part in device.slices
    }


def identity(there: Mapping[str, Any]) -> dict[Place, tuple[int, int]]:
    """(the driver's generation, pid) of each slice: another value means that it was rebuilt or started again."""
    pids = {row["uuid"]: row["pid"] for row in there["processes"] if row["alive"]}
    cut = {
        (index, one["name"], one["start"]): (one["generation"], pids[one["computes"][0][1]])
        for index, gpu in enumerate(there["gpus"])
        for one in gpu["instances"]
        if one["computes"] and one["computes"][0][1] in pids
    }
    whole = {(i, "whole", 0): (0, pids[gpu["uuid"]]) for i, gpu in enumerate(there["gpus"]) if gpu["uuid"] in pids}
    return cut | whole


def problems(there: Mapping[str, Any], plan: NodePlan) -> list[str]:
    """How the node differs from its plan: instances, compute instances, processes, versions, locks, limits."""
    found: list[str] = []
    wanted = places(plan)
    uuids: dict[str, Place] = {}
    for index, gpu in enumerate(there["gpus"]):
        for one in gpu["instances"]:
            place = (index, one["name"], one["start"])
            if place not in wanted:
                found.append(f"leaked instance {place}")
            if [width for width, _ in one["computes"]] != [one["width"]]:
                found.append(f"compute instances of {place}: {one['computes']}")
            uuids |= {uuid: place for _, uuid in one["computes"]}
        found += _settings(index, gpu, plan)
    listed = {(index, one["name"], one["start"]) for index, gpu in enumerate(there["gpus"]) for one in gpu["instances"]}
    found += [f"missing instance {place}" for place in wanted if place not in listed and place[1] != "whole"]
    alive = [row for row in there["processes"] if row["alive"]]
    uuids |= {gpu["uuid"]: (index, "whole", 0) for index, gpu in enumerate(there["gpus"])}
    ran = [uuids.get(row["uuid"]) for row in alive]
    found += [f"process {row['tag']} runs on no slice" for row, place in zip(alive, ran, strict=True) if place is None]
    for place, hosted in wanted.items():
        served = [row["versions"] for row, at in zip(alive, ran, strict=True) if at == place]
        if served != [hosted]:
            found.append(f"{place} serves {served}, planned is {hosted}")
    found += [f"process {row['tag']} is not planned" for row, at in zip(alive, ran, strict=True) if at not in wanted]
    return found


def _settings(index: int, gpu: Mapping[str, Any], plan: NodePlan) -> list[str]:
    planned = next(device for device in plan.devices if device.device == f"{NODE}/gpu{index}")
    found = []
    locked = (gpu["locked"] or [0, 0])[1]
    if locked != planned.clock_max_mhz and (locked, planned.clock_max_mhz) != (0, gpu["clock_max_mhz"]):
        found.append(f"clocks of GPU {index} are locked at {gpu['locked']}, planned is {planned.clock_max_mhz}")
    limit_w, default_w = gpu["limit_w"]
    if abs(limit_w - default_w) > LIMIT_TOLERANCE_W:
        found.append(f"power limit of GPU {index} is {limit_w:g} W")
    return found


def check(cluster: FastCluster, plan: NodePlan) -> dict[Place, tuple[int, int]]:
    """Everything must be as planned, nothing else may be there, and the agent must say so; returns the identities."""
    # A complaint about clocks or a counter is withdrawn when they are next looked at, a moment after the trouble.
    cluster.until(lambda: not any(device.drift for device in cluster.status().devices), "drift to be over")
    cluster.until(lambda: not _complaints(cluster), "complaints to be withdrawn")
    there = cluster.inspect()
    report = [*problems(there, plan), *_said(cluster, plan), *_remembered(cluster, plan)]
    assert not report, "\n".join([*report, str(there), cluster.tail()])
    return identity(there)


def _complaints(cluster: FastCluster) -> list[str]:
    """What is missing that was there: of devices or the driver, not of what this machine never had."""
    return [text for text in cluster.status().missing if text.startswith(("node", "driver"))]


def _said(cluster: FastCluster, plan: NodePlan) -> list[str]:
    status = cluster.status()
    found = [f"missing: {text}" for text in _complaints(cluster)]
    for device, planned in zip(status.devices, plan.devices, strict=False):
        if device.state != planned.target:
            found.append(f"{device.device} is {device.state.name}, planned is {planned.target.name}")
        if device.drift:
            found.append(f"{device.device} drifts: {device.drift}")
        keys = {part.key: part for part in planned.slices}
        if {part.key for part in device.slices} != set(keys):
            found.append(f"{device.device} says it has {[part.key.name for part in device.slices]}")
        found += [
            f"{part.key.name} is {part.state.name}: {part.why}"
            for part in device.slices
            if part.state not in SERVING or part.state == SliceState.DRAINING
        ]
    return found


def _remembered(cluster: FastCluster, plan: NodePlan) -> list[str]:
    state = cluster.journal_state()
    found = [f"unfinished: {step.slice.name} {step.verb}" for step in state.unfinished.values()]
    keys = {part.key for device in plan.devices for part in device.slices}
    if set(state.slices) != keys:
        found.append(f"the journal holds {sorted(key.name for key in state.slices)}")
    if state.plan != plan:
        found.append("the journal holds another plan")
    locked = {device.device for device in plan.devices if device.clock_max_mhz and device.target == DeviceState.AWAKE}
    left = [name for name in state.overrides if name[1] == "clock" and name[0] not in locked]
    return found + [f"the journal holds overrides {left}"] * bool(left)


def untouched(before: NodePlan, after: NodePlan, *, swaps: bool = True) -> set[Place]:
    """Slices that both plans have (with the same variant, unless `swaps`): whatever happens, they are left alone."""
    one, other = places(before), places(after)
    return {place for place in one.keys() & other.keys() if swaps or one[place] == other[place]}
