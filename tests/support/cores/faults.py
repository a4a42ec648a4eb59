"""Faults that the cores are struck with, drawn from a seed. Load and carbon change by the history's own inputs."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from controller.loop.core.control import ControlCore
from controller.loop.core.decision import ControlState
from controller.loop.core.loans import Loan
from controller.observe.core.triggers import OPERATOR, Trigger
from tests.support.cores.around import stand_still
from tests.support.cores.inputs import FAULTS_S
from tests.support.cores.system import CoreSystem
from tests.support.virtual.faults import LONGEST_S, seconds
from tests.support.virtual.planner import FAMILY
from trefoil.core.fleet import DeviceState, Hosted, SliceKey, SliceState
from trefoil.core.objective import ActMode
from trefoil.core.plan import PlannedDevice, PlannedSlice, RolloutState
from trefoil.runtime.state import LEASE_TTL_S

SCATTERED: Final = 0.4  # of the histories: their faults know nothing of each other
WITHIN_S: Final = 1.2  # of each other the faults of all others strike


def drawn(system: CoreSystem) -> None:
    """Two to five faults; each ends before the quiet time. They strike at drawn times, or soon after one another when
    something is under way that was set going for them.
    """
    rng = np.random.default_rng([system.seed, 11])
    kinds = list(KINDS)
    chosen = [(kinds[int(rng.integers(len(kinds)))], rng.random(4)) for _ in range(int(rng.integers(2, 6)))]
    if rng.random() < SCATTERED:
        for kind, draws in chosen:
            system.after(float(rng.uniform(*FAULTS_S)), strike, system, kind, draws)
        return
    moment = list(MOMENTS)[int(rng.integers(len(MOMENTS)))]
    delays_s = rng.uniform(0.0, WITHIN_S, len(chosen))

    def wait() -> None:
        if system.now_s < FAULTS_S[1] and (system.off or not MOMENTS[moment](system)):
            system.after(0.1, wait)
            return
        system.note(f"MOMENT {moment}")
        for (kind, draws), delay_s in zip(chosen, delays_s, strict=True):
            system.after(float(delay_s), strike, system, kind, draws)

    began_s, draws = float(rng.uniform(FAULTS_S[0], FAULTS_S[1] - 5.0)), rng.random(4)
    if moment == "an operator is heard":
        system.after(began_s, strike, system, "frozen", draws)
    elif moment != "the planner thinks of carbon":  # that comes by itself
        if draws[1] < 0.5:
            system.after(began_s, strike, system, "all slices stopped", draws)
        system.after(began_s + 0.5, strike, system, "replanned", draws)
    system.after(began_s + 0.6, wait)


MOMENTS: dict[str, Callable[[CoreSystem], bool]] = {
    "a slice drains": lambda system: system.promises.state in (RolloutState.WAITING_ACK, RolloutState.WAITING_DRAIN),
    "slices start": lambda system: system.promises.state == RolloutState.WAITING_READY,
    "the planner thinks of carbon": lambda system: (
        system.deciding and system.core.last_trigger is not None and system.core.last_trigger.cause == "carbon"
    ),
    "an operator is heard": lambda system: system.core.pending_trigger is not None,
}


def strike(system: CoreSystem, kind: str, draws: Any) -> None:
    """One fault; `draws` choose whom and for how long."""
    system.note(f"FAULT {kind}")
    system.faults[kind] += 1
    KINDS[kind](system, draws)


def _for(system: CoreSystem, duration_s: float, of: Any, name: str, value: Any, after: Any) -> None:
    """Set an attribute for a time."""
    setattr(of, name, value)
    system.after(duration_s, setattr, of, name, after)


def controller_killed(system: CoreSystem, d: Any) -> None:
    system.kill()
    system.after(seconds(d[1]), system.start)


def controller_stopped(system: CoreSystem, d: Any) -> None:
    """For a time; if that is long, another one takes its place, and for a moment there are both."""
    if system.off or system.ghost is not None:
        return
    replaced, life = d[2] < 0.5, system.life
    system.stand_still(LEASE_TTL_S + 9.0 if replaced else seconds(d[1], 1.0))
    if replaced:

        def take_its_place() -> None:
            if system.life == life:
                system.replace()
                system.after(2.5, system.ghost_goes_on)
                system.after(4.0, system.ghost_ends)

        system.after(LEASE_TTL_S + 0.5, take_its_place)


def dispatcher_lags(system: CoreSystem, d: Any) -> None:
    """It stands still, or does not read: no newer table, no acknowledgement."""
    if system.lagging_since_s is not None:
        return
    since_s = system.lagging_since_s = system.now_s

    def go_on() -> None:
        system.silent_s, system.went_on_s, system.lagging_since_s = system.now_s - since_s, system.now_s, None
        system.adopt()

    system.after(seconds(d[1], 0.5), go_on)


def agent_away(system: CoreSystem, d: Any) -> None:
    """Killed and started again, or stopped for a time: what it obeyed it obeys still."""
    node = f"node{int(d[0] * 2)}"
    agent = system.agents[node]
    agent.answers = False
    system.promises.excuse(LONGEST_S + 4.0)

    def back() -> None:
        agent.answers = True
        system.work(node, system.now_s)

    system.after(seconds(d[1]), back)


def slice_killed(system: CoreSystem, d: Any) -> None:
    """Its Triton dies; its agent starts another one."""
    devices = system.hardware.devices.values()
    found = [(m, one) for m in devices for one in m.slices.values() if one.state == SliceState.READY]
    if found:
        device, one = found[int(d[0] * len(found))]
        system.promises.excuse()
        _starts(system, device, one, 1.0)


def _starts(system: CoreSystem, device: Any, one: Any, in_s: float) -> None:
    system.serve()
    one.state, one.since_s, one.ready_s, one.next_hosted = SliceState.STARTING, system.now_s, system.now_s + in_s, ()
    system.hardware._invalidate(device)
    system._set_routes()


def slice_stopped(system: CoreSystem, d: Any) -> None:
    """It stands still, with the requests that it gets."""
    found = _serving(system)
    if found:
        _stand_still(system, found[int(d[0] * len(found)) :][:1], seconds(d[1]))


def slices_stopped(system: CoreSystem, d: Any) -> None:
    """All of them."""
    _stand_still(system, _serving(system), seconds(d[0], 1.0))


def _serving(system: CoreSystem) -> list[SliceKey]:
    devices = system.hardware.devices.values()
    return [key for m in devices for key, one in m.slices.items() if one.state == SliceState.READY]


def _stand_still(system: CoreSystem, keys: list[SliceKey], duration_s: float) -> None:
    system.serve()
    stand_still(system.engines, keys, system.now_s + duration_s)


def starts_fail(system: CoreSystem, d: Any) -> None:
    """What starts on a node now begins anew again and again, for a time."""
    node, until_s = f"node{int(d[0] * 2)}", system.now_s + seconds(d[1])

    def again() -> None:
        for device in system.hardware.devices.values():
            for one in device.slices.values():
                if device.place.node == node and one.state == SliceState.STARTING and device.state == DeviceState.AWAKE:
                    _starts(system, device, one, 1.0)
        if system.now_s < until_s:
            system.after(0.5, again)

    again()


def device_lost(system: CoreSystem, d: Any) -> None:
    device = list(system.hardware.devices.values())[int(d[0] * len(system.hardware.devices))]
    if device.state == DeviceState.LOST:
        return
    system.promises.excuse()
    system.serve()
    device.state = DeviceState.LOST
    device.slices.clear()
    system.hardware._invalidate(device)
    system._set_routes()

    def found() -> None:
        system.serve()
        device.state = DeviceState.ASLEEP
        system.hardware._invalidate(device)
        system.work(device.place.node, system.now_s)

    system.after(seconds(d[2], 1.0), found)


def device_cordoned(system: CoreSystem, d: Any) -> None:
    name = list(system.hardware.devices)[int(d[0] * len(system.hardware.devices))]
    system.cordons[name] = "taken out of service by a test"
    system.after(seconds(d[2], 1.0), system.cordons.pop, name, "")


def device_lent(system: CoreSystem, d: Any) -> None:
    """Somebody profiles on a device, and is killed before it is given back, or gives it back."""
    name = list(system.hardware.devices)[int(d[0] * len(system.hardware.devices))]
    variants = system.observation.catalog.family(FAMILY).variants
    variant = variants[int(d[1] * len(variants))]
    hosted = Hosted(FAMILY, variant.name, variant.version, 0, 1, 1, 8)
    planned = PlannedDevice(name, DeviceState.AWAKE, (PlannedSlice(SliceKey(name, "7g.40gb", 0, 8), (hosted,), 4),))
    lease_s = seconds(d[3], 1.0)
    loan = Loan(planned, "a profiler", system.clock.monotonic_s() + lease_s)
    system.ask(lambda: system.core.lend(loan, force=bool(d[3] < 0.5)))
    if d[2] < 0.5:
        system.after(lease_s / 2, lambda: system.ask(lambda: _ended(system.core, name)))


async def _ended(core: ControlCore, device: str) -> None:
    core.loans.end(device)
    core.ports.wake()


def disk_full(system: CoreSystem, d: Any) -> None:
    """For a time; or one at which half of all writes fail. The controller may have to start on it."""
    rng = np.random.default_rng(int(d[1] * 1e6))
    refuses = (lambda: True) if d[0] < 0.5 else (lambda: bool(rng.random() < 0.5))
    _for(system, seconds(d[3], 1.0), system, "disk_refuses", refuses, lambda: False)
    if d[2] < 0.3 and not system.off:
        system.kill()
        system.start()


def _reached_again(system: CoreSystem) -> None:
    system.redis.down = False
    system.adopt()


def redis_down(system: CoreSystem, d: Any) -> None:
    """Gone, or it stands still: for a caller the same."""
    system.redis.down = True
    system.after(seconds(d[0]), _reached_again, system)


def redis_emptied(system: CoreSystem, d: Any) -> None:
    """All is lost; what others write comes back within a second."""
    system.redis.empty()
    system.acks_from_s = system.now_s + float(d[1])
    for agent, draw in zip(system.agents.values(), d[2:], strict=True):
        agent.said_s = system.now_s + float(draw)


def redis_restarted(system: CoreSystem, d: Any) -> None:
    redis_down(system, d)
    system.redis.empty()
    system.after(seconds(d[0]), redis_emptied, system, d)


def redis_refuses_writes(system: CoreSystem, d: Any) -> None:
    _for(system, seconds(d[0]), system.redis, "refuses_writes", True, False)


def redis_refuses_some(system: CoreSystem, d: Any) -> None:
    _for(system, seconds(d[0]), system.redis, "refuses_some", True, False)


def redis_mute(system: CoreSystem, d: Any) -> None:
    _for(system, seconds(d[0]) / 3, system.redis, "mute", True, False)


def status_lost(system: CoreSystem, d: Any) -> None:
    """Somebody deletes or spoils what an agent or the dispatcher has written: as good as lost, until it is renewed."""
    node = f"node{int(d[0] * 2)}"
    if d[1] < 0.5:
        system.redis.statuses.pop(node, None)
        system.agents[node].said_s = system.now_s + float(d[2])
    else:
        system.redis.ack, system.acks_from_s = None, system.now_s + float(d[2])


def carbon_silent(system: CoreSystem, d: Any) -> None:
    _for(system, seconds(d[0]), system, "carbon_flows", False, True)


def planner_slow(system: CoreSystem, d: Any) -> None:
    system.slow_until_s = system.now_s + seconds(d[0])


def planner_fails(system: CoreSystem, d: Any) -> None:
    system.fails_until_s = system.now_s + seconds(d[0])


def replanned(system: CoreSystem, d: Any) -> None:
    """By an operator."""
    system.ask(lambda: system.core.replan(Trigger(OPERATOR, "a test")))


def frozen(system: CoreSystem, d: Any) -> None:
    """By an operator, and released a moment later; what he is refused he asks for again."""
    system.ask(lambda: system.core.operate(ControlState(ActMode.ACT, frozen=True)))
    system.after(seconds(d[0]), released, system)


def released(system: CoreSystem) -> None:
    was = system.core.control.frozen

    def over(done: bool) -> None:
        if not done:
            system.after(1.0, released, system)
        elif was:  # who releases what was never frozen starts nothing
            system.promises.released_s = system.now_s

    life = system.life
    system.ask(lambda: system.core.operate(ControlState(ActMode.ACT)), over)
    system.after(3.0, lambda: released(system) if system.life != life else None)


KINDS: dict[str, Callable[[CoreSystem, Any], None]] = {
    "controller killed": controller_killed,
    "controller stopped": controller_stopped,
    "dispatcher lags": dispatcher_lags,
    "agent away": agent_away,
    "slice killed": slice_killed,
    "slice stopped": slice_stopped,
    "all slices stopped": slices_stopped,
    "starts fail": starts_fail,
    "device lost": device_lost,
    "device cordoned": device_cordoned,
    "device lent": device_lent,
    "disk full": disk_full,
    "redis down": redis_down,
    "redis restarted": redis_restarted,
    "redis emptied": redis_emptied,
    "redis refuses writes": redis_refuses_writes,
    "redis refuses some": redis_refuses_some,
    "redis mute": redis_mute,
    "status lost": status_lost,
    "carbon silent": carbon_silent,
    "planner slow": planner_slow,
    "planner fails": planner_fails,
    "replanned": replanned,
    "frozen": frozen,
}
