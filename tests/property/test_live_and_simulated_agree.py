"""The live shell and the simulated one carry the same cores: for equal events they are asked for the same.

A simulation is run with a live twin beside it: a second core and second rollouts, on the asyncio shells in
controller/loop, which see what the simulation sees at the same times. What moves the world is the simulation's; Redis,
disk, agents and clock of the twin answer at once. Every call of the cores' ports is noted, and the two lists have to be
equal.
"""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from controller.accounting.accountant import Accountant
from controller.accounting.budgets import BudgetRungs
from controller.accounting.core.receipts import Receipts
from controller.explore.core.exploration_state import ExplorationTotals
from controller.explore.core.ports import PlannerAnswer
from controller.loop.control_loop import ControlLoop
from controller.loop.core.control import ControlCore
from controller.loop.core.decision import ControlState
from controller.loop.core.ports import TakenDecision
from controller.loop.core.saved_state import SavedState
from controller.loop.core_ports import Signals
from controller.loop.decision_records import DecisionRecords
from controller.loop.live_ports import LiveControlPorts
from controller.loop.planner_runner import PlannerRunner
from controller.loop.rollout_runner import LiveRolloutPorts, RolloutRunner
from controller.planners.policy_parts import planner_of
from controller.planners.table import PLANNERS
from controller.role.disk_store import DiskStore
from controller.rollout.core.executor import RolloutExecutor
from trefoil.core.demand import SliceLoad, TableAck
from trefoil.core.objective import ActMode
from trefoil.core.plan import Plan
from trefoil.runtime.security.plan_keys import PlanKeys
from trefoil.runtime.telemetry import Metrics
from trefoil.simulator.books.ledger import SimulatedMeter
from trefoil.simulator.scenario.inputs import prepare
from trefoil.simulator.scenario.schema import (
    Arrivals,
    Carbon,
    FamilyObjective,
    Node,
    Noise,
    Scenario,
    Served,
)
from trefoil.simulator.simulation import EPOCH, EPSILON_S, Simulation

REPOSITORY = Path(__file__).resolve().parents[2] / "model_repository"
A100 = "A100-SXM4-40GB"
POLICIES = ("base", "static_mix", "exact", "clover", "blover", "wattwiser")


class Noted(list):
    """Calls of a core's ports, without what a clock or a disk has put into them."""

    def of(self, ports):
        return NotedPorts(ports, self)


class NotedPorts:
    """Ports whose calls are noted."""

    def __init__(self, ports, calls: Noted) -> None:
        self._ports, self._calls = ports, calls

    def __getattr__(self, name):
        method = getattr(self._ports, name)

        def call(*args, **kwargs):
            self._calls.append((name, *map(masked, args), *((key, masked(one)) for key, one in kwargs.items())))
            return method(*args, **kwargs)

        return call


def masked(argument) -> str:
    """An argument as text: what thinking took, what memory it began with and whose view is asked are the shell's."""
    if isinstance(argument, TakenDecision):
        argument = replace(argument, answer=PlannerAnswer(argument.answer.step, argument.answer.seed))
    return "" if callable(argument) else repr(argument)


class Twin:
    """The live shell beside a simulation: its own cores, planner, runners and loop."""

    def __init__(self, shell: "Twinned", folder: Path) -> None:
        self.shell, self.loop = shell, asyncio.new_event_loop()
        self.control, self.rolled, self.waiting, self._go = Noted(), Noted(), False, False
        config, seen = shell.settings, shell.observation
        metrics, disk, signals = Metrics("controller"), DiskStore(folder, 10_000), Signals()
        row = shell.core.policy
        planner_runner = PlannerRunner(planner_of("", shell.scenario.planned_row), row.planner, disk, self, 1e6)
        self.meter = SimulatedMeter(shell.ledger, shell.hardware, config.measure_s)
        common, keys = (disk, metrics, signals), seen_keys()
        rolls = LiveRolloutPorts(*common, 0.1, keys, PlanKeys("default"), self, self, self, self)
        self.rollouts = RolloutExecutor(config.rollout, seen, self.meter, self, self.rolled.of(rolls))
        self.actor = RolloutRunner(self.rollouts, rolls)
        records = DecisionRecords(config, row, keys, self, disk, metrics, seen.windows.dump_budgets)
        ports = LiveControlPorts(*common, keys, self, seen, planner_runner, records, self.actor)
        objectives = dict(shell.inputs.objectives)
        kept = SavedState(objectives, [], ControlState(ActMode.ACT), ExplorationTotals())
        grace_s = PLANNERS[row.planner].traits.tick_grace_s
        live, noted = planner_runner.live, self.control.of(ports)
        self.core = ControlCore(config, row, grace_s, live, seen, self.meter, self.rollouts, self, kept, noted)
        accountant = Accountant(config, self, self, seen, Receipts(seen.catalog), disk, metrics, self)
        rungs = BudgetRungs(keys, accountant, self, PlanKeys("default"), metrics, self)
        self.live = ControlLoop(self.core, ports, config, self, self, self, accountant, rungs, disk, signals, self)
        self.run(self.core.enter_epoch(EPOCH))

    def run(self, what) -> None:
        """Play a step to its end, then what it has set going as far as it goes."""
        self.loop.run_until_complete(what)
        self.settle()

    def settle(self) -> None:
        for _ in range(200):
            self.loop.run_until_complete(asyncio.sleep(0))

    def step(self) -> None:
        self.run(self.core.step())

    def go_on(self) -> None:
        """What a rollout waits for may have come."""
        self._go = self.waiting
        self.settle()

    def close(self) -> None:
        self.actor.rollouts.supersede()
        self.run(self.actor.settle())
        self.loop.close()

    # --- what stands for Redis, agents and the clock ------------------------------------------------------------------

    @property
    def observation(self):
        return self.shell.observation

    @property
    def keys(self):
        return seen_keys()

    def now_s(self) -> float:
        return self.shell.now_s

    monotonic_s = now_s

    async def sleep(self, seconds: float) -> None:
        self.waiting = True
        while not self._go and not self.rollouts._superseded:
            await asyncio.sleep(0)
        self.waiting = self._go = False

    async def refresh_nodes(self) -> None:
        self.shell._observe()

    def note_nodes(self, found) -> None:
        self.observation.inputs.nodes |= {node.node: node for node in found}

    async def write(self, writes) -> None:
        """One dispatcher, which drains for as long as the simulation's does."""
        for plan in (w.obj for w in writes if isinstance(getattr(w, "obj", None), Plan)):
            gone = sorted({t.slice for route in plan.routes for t in route.targets if t.draining})
            if gone and self.shell.rollouts.published.revision != plan.revision:
                now_s = self.now_s() + EPSILON_S
                self.shell._drained_s = now_s + self.shell.hardware.drained_s(gone)
                loads = tuple(SliceLoad(key, in_flight=1) for key in gone)
                self.observation.inputs.acks = (TableAck("simulated", 0, plan.revision, loads),)

    async def apply(self, status, plan) -> bool:
        return True

    async def fresh(self, nodes):
        return self.shell.hardware.nodes()


def seen_keys():
    from trefoil.runtime.keys import Keys

    return Keys("simulated")


class Twinned(Simulation):
    """A simulation whose every step its live twin takes first."""

    def __init__(self, inputs, folder: Path) -> None:
        self.twin: Twin | None = None
        self.control, self.rolled = Noted(), Noted()
        self._begins = False
        super().__init__(inputs)
        self.twin = Twin(self, folder)
        step = self.core.step

        def stepped():
            self.twin.step()
            return step()

        self.core.step = stepped
        note = self.meter.note
        self.meter.note = lambda now_s: (note(now_s), self.twin.meter.note(now_s))

    def _start_cores(self, *kept) -> None:
        super()._start_cores(*kept)
        self.core.ports = self.core.explorer.ports = self.control.of(self)
        self.rollouts.ports = self.rolled.of(self)

    async def roll(self, *asked) -> None:
        self._begins = True
        await super().roll(*asked)
        self._begins = False

    def _continue_rollout(self) -> None:
        if not self._begins and self._rolling is not None:
            self.twin.go_on()
        super()._continue_rollout()


def asked(policy: str, rate: float, slo_ms: float, noise: float, seed: int, mode: str, folder: Path):
    """What live and simulated shell were asked for: by control, and by rollouts, which live interleave with it."""
    wanted = FamilyObjective(
        type=mode,
        slo={"latency_ms": slo_ms},
        accuracy={"below_best_pct": 2.0, "hard_below_best_pct": 10.0},
        lambda_weight=0.1,
        base_intensity_g_per_kwh=250.0,
    )
    served = Served(name="digits", repository=REPOSITORY, arrivals=Arrivals(rate_per_s=rate), objective=wanted)
    scenario = Scenario(
        duration_s=80.0,
        warmup_s=20.0,
        seed=seed,
        nodes=(Node(devices=(A100, A100)),),
        families=(served,),
        carbon=Carbon(speedup=480.0),
        noise=Noise(latency=noise, energy=noise),
        policy=policy,
    )
    shell = Twinned(prepare(scenario), folder)
    assert shell.twin is not None
    shell.run(shell.end_s)
    live = list(shell.twin.control), list(shell.twin.rolled)
    shell.twin.close()
    return live, (list(shell.control), list(shell.rolled))


@given(
    policy=st.sampled_from(POLICIES),
    rate=st.floats(15.0, 90.0),
    slo_ms=st.floats(60.0, 150.0),
    noise=st.sampled_from([0.0, 0.05, 0.3]),
    seed=st.integers(0, 2**31),
    mode=st.sampled_from(["instant", "budget", "lambda"]),
)
@settings(max_examples=2, deadline=None, phases=[Phase.explicit, Phase.generate])
@example("exact", 40.0, 75.0, 0.05, 1, "budget")
@example("clover", 40.0, 75.0, 0.05, 1, "lambda")
@example("wattwiser", 40.0, 75.0, 0.05, 1, "budget")
@pytest.mark.slow
def test_both_shells_are_asked_for_the_same(tmp_path_factory, policy, rate, slo_ms, noise, seed, mode) -> None:
    live, simulated = asked(policy, rate, slo_ms, noise, seed, mode, tmp_path_factory.mktemp("twin"))
    kinds = {name for part in simulated for name, *_ in part}
    assert {
        "show",
        "think",
        "record",
        "roll",
        "find_path",
        "publish",
        "command",
        "refresh_statuses",
    } <= kinds
    for one, other in zip(live, simulated, strict=True):
        for number, (call, same) in enumerate(zip(one, other, strict=False)):
            assert call == same, f"call {number}"
        assert len(one) == len(other)
