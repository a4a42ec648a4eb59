"""Faults of every kind that a running system is struck with (benchmarks/chaos_faults.py), drawn from a seed."""

import asyncio
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import numpy as np

from protos.controller.v1 import controller_pb2 as pb
from tests.support.virtual.loop import SOLVES_S, Process
from tests.support.virtual.planner import FAMILY
from tests.support.virtual.redis import Stream
from tests.support.virtual.system import CATALOG, FAULTS_S, PLACES, SETTINGS, System
from trefoil.core.common import Revision
from trefoil.core.errors import TrefoilError
from trefoil.core.fleet import DeviceState, Hosted, SliceKey, SliceState
from trefoil.core.plan import Plan, PlannedDevice, PlannedSlice, RolloutState
from trefoil.runtime import codec
from trefoil.runtime.state import LEASE_TTL_S

LONGEST_S = 6.0
WITHIN_S = 1.2  # of each other faults strike that strike together
WRITES_REFUSED = (
    "MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk.",
    "Error running script (call to f_1): @user_script:9: -OOM command not allowed when used memory > 'maxmemory'.",
    "Error running script (call to f_1): @user_script:9: -READONLY You can't write against a read only replica.",
    "NOREPLICAS Not enough good replicas to write.",
)
ALL_REFUSED = (
    "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
    "LOADING Redis is loading the dataset in memory",
    "NOPERM this user has no permissions to run the 'evalsha' command",
    "NOAUTH Authentication required.",
    "NOSCRIPT No matching script. Please use EVAL.",
    "CROSSSLOT Keys in request don't hash to the same slot",
    "CLUSTERDOWN The cluster is down",
    "unknown command 'GETRANGE'",
)


def drawn(system: System) -> None:
    """Two to five faults at drawn times; each ends before the quiet time."""
    rng = np.random.default_rng([system.seed, 11])
    for _ in range(int(rng.integers(2, 6))):
        kind = list(KINDS)[int(rng.integers(len(KINDS)))]
        at_s, draws = float(rng.uniform(*FAULTS_S)), rng.random(4)
        system.loop.call_later(at_s, strike, system, kind, draws)


def drawn_together(system: System) -> None:
    """Two to five faults soon after one another, in the middle of what was set going for them. In a third of the
    histories the planner has candidates measured.
    """
    rng = np.random.default_rng([system.seed, 13])
    if system.seed % 3 == 2:
        system.settings["planner"] = "tests.support.virtual.planner:Exploring"
    kinds, moments = list(ALL_KINDS), list(MOMENTS)
    chosen = [(kinds[int(rng.integers(len(kinds)))], rng.random(4)) for _ in range(int(rng.integers(2, 6)))]
    delays_s = rng.uniform(0.0, WITHIN_S, len(chosen))
    moment, last_s = moments[int(rng.integers(len(moments)))], system.loop.time() + FAULTS_S[1]

    def wait() -> None:
        if system.loop.time() < last_s and not MOMENTS[moment](system):
            system.loop.call_later(0.05, wait)
            return
        system.note(f"MOMENT {moment}")
        system.faults[moment] += 1
        for (kind, draws), delay_s in zip(chosen, delays_s, strict=True):
            system.loop.call_later(float(delay_s), strike, system, kind, draws)

    began_s, draws = float(rng.uniform(FAULTS_S[0], FAULTS_S[1] - 5.0)), rng.random(4)
    if draws[1] < 0.5:
        system.loop.call_later(began_s, strike, system, "all slices stopped", draws)
    first = {"the planner thinks": "carbon jumps", "an operator has released": "frozen"}.get(moment, "replanned")
    system.loop.call_later(began_s + 0.3, strike, system, first, draws)
    system.loop.call_later(began_s + 0.4, wait)


MOMENTS: dict[str, Callable[[System], bool]] = {
    "a slice drains": lambda system: _rolls(system, RolloutState.WAITING_ACK, RolloutState.WAITING_DRAIN),
    "slices start": lambda system: _rolls(system, RolloutState.WAITING_READY),
    "the planner thinks": lambda system: system.loop.busy_until_s > system.loop.time(),
    "an operator has released": lambda system: system.loop.time() - (system.promises.released_s or 0.0) < 0.2,
}


def _rolls(system: System, *states: RolloutState) -> bool:
    rollout = system.promises.rollout
    return rollout is not None and rollout.state in states


def strike(system: System, kind: str, draws: Any) -> None:
    """One fault; `draws` choose whom and for how long."""
    system.note(f"FAULT {kind}")
    system.faults[kind] += 1
    ALL_KINDS[kind](system, draws)


def seconds(draw: float, low_s: float = 0.3) -> float:
    """How long a fault lasts."""
    return low_s + float(draw) * (LONGEST_S - low_s)


def controller_killed(system: System, d: Any) -> None:
    system.controller.kill()
    system.loop.call_later(seconds(d[1]), system.controller.start)


def controller_stopped(system: System, d: Any) -> None:
    """For a time; if that is long, another one takes its place, and for a moment there are both."""
    place, replace = system.controller, d[2] < 0.5
    process, stopped_s = place.process, LEASE_TTL_S + 3.0 if replace else seconds(d[1], 1.0)
    if process is None or not _stop(system, process, stopped_s) or not replace:
        return

    def replaced() -> None:
        if place.process is process and process.stopped:
            system.note("another controller takes its place")
            old = place.replace()
            system.loop.call_later(4.0, old.kill)

    system.loop.call_later(LEASE_TTL_S + 0.5, replaced)


def worker_killed(system: System, d: Any) -> None:
    place = system.workers[int(d[0] * 2)]
    place.kill()
    system.loop.call_later(seconds(d[1]), place.start)


def worker_stopped(system: System, d: Any) -> None:
    process = system.workers[int(d[0] * 2)].process
    if process is not None:
        _stop(system, process, seconds(d[1], 0.5))


def _stop(system: System, process: Process, stopped_s: float) -> bool:
    """SIGSTOP, and SIGCONT after a time; False: it stands still already."""
    if process.stopped:
        return False
    process.stop(system.loop.time())

    def go_on() -> None:
        if not process.dead:
            process.go_on(system.loop)

    system.loop.call_later(stopped_s, go_on)
    return True


def agent_away(system: System, d: Any) -> None:
    """Killed and started again, or stopped for a time: what it obeyed it obeys still."""
    node = system.nodes[f"node{int(d[0] * 2)}"]
    node.answers = False
    system.promises.excuse(LONGEST_S + 4.0)

    system.loop.call_later(seconds(d[1]), node.restart)


def slice_killed(system: System, d: Any) -> None:
    found = [(n, k) for n in system.nodes.values() for k, s in n.slices.items() if s.state == SliceState.READY]
    if found:
        node, key = found[int(d[0] * len(found))]
        system.promises.excuse()
        node.kill_slice(key)


def slice_stopped(system: System, d: Any) -> None:
    found = [k for n in system.nodes.values() for k, s in n.slices.items() if s.state == SliceState.READY]
    if found:
        key = found[int(d[0] * len(found))]
        system.hung.add(key)
        system.loop.call_later(seconds(d[1]), system.hung.discard, key)


def slices_stopped(system: System, d: Any) -> None:
    """All that serve stand still, with the requests that they have and get."""
    found = {k for n in system.nodes.values() for k, s in n.slices.items() if s.state == SliceState.READY}
    system.hung |= found
    system.loop.call_later(seconds(d[0], 1.0), system.hung.difference_update, found)


def planner_slow(system: System, d: Any) -> None:
    """It takes longer than it may."""
    _plans_for(system, SETTINGS["solve_timeout_s"] + 1.0, d)


def planner_fails(system: System, d: Any) -> None:
    _plans_for(system, None, d)


def _plans_for(system: System, takes_s: float | None, d: Any) -> None:
    system.loop.planner_takes_s = takes_s
    system.loop.call_later(seconds(d[0]), setattr, system.loop, "planner_takes_s", SOLVES_S)


def starts_fail(system: System, d: Any) -> None:
    node = system.nodes[f"node{int(d[0] * 2)}"]
    node.starts_fail = True
    system.loop.call_later(seconds(d[1]), setattr, node, "starts_fail", False)


def device_lost(system: System, d: Any) -> None:
    node = system.nodes[f"node{int(d[0] * 2)}"]
    device = list(node.devices)[int(d[1] * len(node.devices))]
    system.promises.excuse()
    node.lose(device)
    system.loop.call_later(seconds(d[2], 1.0), node.find, device)


def device_cordoned(system: System, d: Any) -> None:
    node = system.nodes[f"node{int(d[0] * 2)}"]
    device = list(node.devices)[int(d[1] * len(node.devices))]
    node.cordons[device] = "taken out of service by a test"
    node.work()

    def back() -> None:
        del node.cordons[device]
        node.work()

    if device in node.cordons:
        system.loop.call_later(seconds(d[2], 1.0), lambda: back() if device in node.cordons else None)


def disk_full(system: System, d: Any) -> None:
    """The controller's, for a time; or one at which half of all writes fail. Its process may have to start on it."""
    files, rng = system.controller.files, np.random.default_rng(int(d[1] * 1e6))
    files.refuses = (lambda: True) if d[0] < 0.5 else (lambda: bool(rng.random() < 0.5))
    if d[2] < 0.3:
        system.controller.kill()
        system.controller.start()

    def room() -> None:
        files.refuses = lambda: False

    system.loop.call_later(seconds(d[3], 1.0), room)


def redis_down(system: System, d: Any) -> None:
    system.server.fall()
    system.loop.call_later(seconds(d[0]), system.server.rise)


def redis_restarted(system: System, d: Any) -> None:
    """It keeps nothing."""
    system.server.fall()
    system.server.flush()
    system.loop.call_later(seconds(d[0]), system.server.rise)


def redis_emptied(system: System, d: Any) -> None:
    system.server.flush()


def redis_stopped(system: System, d: Any) -> None:
    system.server.stopped = True
    system.loop.call_later(seconds(d[0]), system.server.go_on)


def redis_slow(system: System, d: Any) -> None:
    system.server.slow_s = 0.15
    system.loop.call_later(seconds(d[0]), setattr, system.server, "slow_s", 0.0)


def redis_mute(system: System, d: Any) -> None:
    system.server.mute = True
    system.loop.call_later(seconds(d[0]) / 3, setattr, system.server, "mute", False)


def redis_refuses_writes(system: System, d: Any) -> None:
    system.server.refuses_writes = WRITES_REFUSED[int(d[1] * len(WRITES_REFUSED))]
    system.loop.call_later(seconds(d[0]), setattr, system.server, "refuses_writes", "")


def redis_refuses(system: System, d: Any) -> None:
    system.server.refuses = ALL_REFUSED[int(d[1] * len(ALL_REFUSED))]
    system.loop.call_later(seconds(d[0]), setattr, system.server, "refuses", "")


def redis_refuses_some(system: System, d: Any) -> None:
    """Now and then, each time with another error."""
    rng = np.random.default_rng([int(draw * 2**31) for draw in d])
    texts = (*WRITES_REFUSED, *ALL_REFUSED)

    def refusal(_number: int) -> str:
        return texts[int(rng.integers(len(texts)))] if rng.random() < 0.3 else ""

    def over() -> None:
        if system.server.refusal is refusal:  # else another one began since, and ends itself
            system.server.refusal = lambda _: ""

    system.server.refusal = refusal
    system.loop.call_later(seconds(d[0]), over)


def key_spoilt(system: System, d: Any) -> None:
    """Somebody writes over one of the keys, or over several in a row."""
    rng = np.random.default_rng([int(draw * 2**31) for draw in d])

    def spoil() -> None:
        names = system.server.names(system.keys.prefix)
        if names and system.redis_takes:
            key = names[int(rng.integers(len(names)))]
            spoilt: list[Any] = [
                rng.bytes(int(rng.integers(1, 40))), b"\xff\xfe", b"9" * 70, b"0", [b"list"], Stream(), {b"a": b"hash"},
                None, system.server.former(key), deepcopy(system.server.value(names[int(rng.integers(len(names)))])),
            ]  # fmt: skip
            value = spoilt[int(rng.integers(len(spoilt)))]
            system.note(f"SPOILT {key}: {value!r:.60}")
            system.server.spoil(key, value)
            system.server.publish(system.keys.changed(), key)

    for _ in range(int(rng.integers(1, 6))):
        system.loop.call_later(float(rng.uniform(0.0, LONGEST_S)), spoil)


def write_over(system: System, key: str, value: Any) -> None:
    """One well-formed value at a key, by somebody who is none of its writers; readers hear of it at once."""
    if system.redis_takes:
        system.note(f"WRITTEN OVER {key}")
        system.server.spoil(key, value if isinstance(value, bytes) else codec.encode(value))
        system.server.publish(system.keys.changed(), key)


def fence_forged(system: System, d: Any) -> None:
    """A plan without routes of an unled epoch, or such an epoch; their leader repairs them."""
    ahead = 1 + int(d[1] * 1000)
    epoch = system.led_epoch() + ahead
    if d[0] < 0.5:
        write_over(system, system.keys.plan(), Plan(Revision(epoch, 1)))
    else:
        write_over(system, system.keys.epoch("controller"), b"%d" % epoch)


def hints_garbled(system: System, d: Any) -> None:
    """What is not a key's name is published, and names of keys that nobody has."""
    for text in (b"\xff\xfe\x00", b"", system.keys.node("nobody").encode(), system.keys.ack("nobody", 7).encode()):
        system.server.publish_bytes(system.keys.changed(), text)


def carbon_jumps(system: System, d: Any) -> None:
    """A replan, and most often a repartition."""
    system.intensity = 50.0 + 450.0 * float(d[0])


def carbon_silent(system: System, d: Any) -> None:
    system.carbon_flows = False
    system.loop.call_later(seconds(d[0]), setattr, system, "carbon_flows", True)


def load_changes(system: System, d: Any) -> None:
    system.rate_per_s = [2.0, 5.0, 9.0, 14.0][int(4 * d[0])]


def replanned(system: System, d: Any) -> None:
    """By an operator."""
    place = system.controller
    if place.service is not None and place.process is not None:
        place.process.start(system.loop, _asked(place.service.Replan, pb.ReplanRequest(why="a test")))


def frozen(system: System, d: Any) -> None:
    """By an operator, and released a moment later; what he is refused he asks for again."""
    place = system.controller
    if place.service is not None and place.process is not None:
        asked = place.process.start(system.loop, _asked(place.service.Freeze, pb.FreezeRequest(frozen=True)))
        asked.add_done_callback(
            lambda task: setattr(system.promises, "frozen", system.promises.frozen or _granted(task))
        )
        system.loop.call_later(seconds(d[0]), lambda: released(system) if _granted(asked) else None)


def released(system: System) -> None:
    place = system.controller

    def over(task: "asyncio.Task[bool]") -> None:
        if not _granted(task):
            system.loop.call_later(1.0, released, system)
        elif system.promises.frozen:  # who releases what another operator has released already starts nothing
            system.promises.frozen, system.promises.released_s = False, system.loop.time()

    if place.service is None or place.process is None or place.process.stopped:
        system.loop.call_later(1.0, released, system)
    else:
        asked = _asked(place.service.Freeze, pb.FreezeRequest(frozen=False))
        place.process.start(system.loop, asked).add_done_callback(over)


def device_lent(system: System, d: Any) -> None:
    """Somebody profiles on a device, and is killed before it is given back, or gives it back."""
    place, node = system.controller, system.nodes[f"node{int(d[0] * 2)}"]
    if place.service is None or place.process is None or place.process.stopped:
        return
    device = sorted(node.devices)[int(d[1] * len(node.devices))]
    variants = CATALOG.family(FAMILY).variants
    variant = variants[int(d[2] * len(variants))]
    hosted = Hosted(FAMILY, variant.name, variant.version, 0, 1, 1, 8)
    part = PlannedSlice(SliceKey(device, "7g.40gb", 0, 8), (hosted,), 4)
    planned = codec.to_proto(PlannedDevice(device, DeviceState.AWAKE, (part,)))
    ask = pb.LendDeviceRequest(holder="a profiler", device=planned, lease_s=seconds(d[3], 1.0), force=d[3] < 0.5)
    place.process.start(system.loop, _asked(place.service.LendDevice, ask))
    if d[2] < 0.5:
        system.loop.call_later(seconds(d[3]) / 2, _given_back, system, device)


def _given_back(system: System, device: str) -> None:
    place = system.controller
    if place.service is not None and place.process is not None and not place.process.stopped:
        ask = pb.ReturnDeviceRequest(device=device, holder="a profiler")
        place.process.start(system.loop, _asked(place.service.ReturnDevice, ask))


def _granted(asked: "asyncio.Task[bool]") -> bool:
    return asked.done() and not asked.cancelled() and asked.result()


async def _asked(method: Callable[[Any, Any], Any], request: Any) -> bool:
    try:
        await method(request, None)
    except TrefoilError:
        return False  # it is not in charge, or cannot now: the operator is told so
    return True


def clock_stepped(system: System, d: Any) -> None:
    """The wall clock of one process, or of Redis, is stepped by an hour, and often set right again."""
    _step_for(system, PLACES[int(d[0] * len(PLACES)) :][:1], d)


def clocks_stepped(system: System, d: Any) -> None:
    """All wall clocks, as where all runs on one machine."""
    _step_for(system, PLACES, d)


def _step_for(system: System, places: Sequence[str], d: Any) -> None:
    step_s = 3600.0 if d[1] < 0.5 else -3600.0
    system.step_clocks(places, step_s)
    if d[2] < 0.5:
        system.loop.call_later(seconds(d[3]), system.step_clocks, places, -step_s)


KINDS: dict[str, Callable[[System, Any], None]] = {
    "controller killed": controller_killed,
    "controller stopped": controller_stopped,
    "worker killed": worker_killed,
    "worker stopped": worker_stopped,
    "agent away": agent_away,
    "slice killed": slice_killed,
    "slice stopped": slice_stopped,
    "starts fail": starts_fail,
    "device lost": device_lost,
    "device cordoned": device_cordoned,
    "device lent": device_lent,
    "redis down": redis_down,
    "redis restarted": redis_restarted,
    "redis emptied": redis_emptied,
    "redis stopped": redis_stopped,
    "redis slow": redis_slow,
    "redis mute": redis_mute,
    "clock stepped": clock_stepped,
    "clocks stepped": clocks_stepped,
    "redis refuses writes": redis_refuses_writes,
    "redis refuses": redis_refuses,
    "redis refuses some": redis_refuses_some,
    "key spoilt": key_spoilt,
    "hints garbled": hints_garbled,
    "fence forged": fence_forged,
    "carbon jumps": carbon_jumps,
    "carbon silent": carbon_silent,
    "load changes": load_changes,
    "replanned": replanned,
    "frozen": frozen,
    "disk full": disk_full,
}
ALL_KINDS: dict[str, Callable[[System, Any], None]] = {
    **KINDS,
    "all slices stopped": slices_stopped,
    "planner slow": planner_slow,
    "planner fails": planner_fails,
}
