"""Five hundred random plans in a row; every second one is interrupted by a fault of the driver or by a kill.

After each of them the node must be what the plan says, and slices that nothing asked to change must not have been
touched. The agent's clock runs fast, Tritons are fakes; driver, sockets, journal, processes and kills are real.
"""

import random
import signal
import time
from collections import Counter

import grpc
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.support.fast_checks import check, untouched
from tests.support.fast_cluster import AFTER, BEFORE, NODE, FastCluster
from tests.support.random_plans import Planner
from trefoil.core.plan import NodePlan

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1200)]

PLANS = 500
DEVICES = ("A100-SXM4-40GB",) * 4 + ("H100-SXM5-80GB",) * 2 + ("Tesla T4", "Tesla V100-SXM2-32GB")
CALLS = (
    "nvmlDeviceCreateGpuInstanceWithPlacement",
    "nvmlGpuInstanceCreateComputeInstance",
    "nvmlComputeInstanceDestroy",
    "nvmlGpuInstanceDestroy",
    "nvmlDeviceSetGpuLockedClocks",
)
CODES = {"nvmlDeviceSetGpuLockedClocks": (999,)}


class Walk:
    """One plan after the other, with what happens on the way."""

    def __init__(self, cluster: FastCluster) -> None:
        self.cluster = cluster
        self.planner = Planner(0, NODE, DEVICES, clocks=True, change=0.25, asleep=0.4)
        self.here: NodePlan = self.planner.last
        self.identities: dict = {}
        self.counts: Counter[str] = Counter()
        self.number = 0

    def step(self, seed: int) -> None:
        """Go to the next plan; every second time not undisturbed."""
        self._random = random.Random(seed)
        self.planner.reseed(seed)
        number, self.number = self.number, self.number + 1
        target = self.planner.next()
        trouble = (
            self._random.choice((self._fault, self._kill_at_a_write, self._kill_at_a_time)) if number % 2 else None
        )
        if trouble is None:
            self.cluster.arm(0, 0)
            self.cluster.apply(target)
        else:
            trouble(target)
        self.cluster.settle(target)
        self.cluster.client.admin("clear_faults")
        now = check(self.cluster, target)
        for place in untouched(self.here, target):
            assert now[place] == self.identities[place], f"plan {number}: {place} was touched\n{self.cluster.tail()}"
        self.counts["slices left alone"] += len(untouched(self.here, target))
        self.counts["slices made"] += len(now) - len(untouched(self.here, target))
        self.here, self.identities = target, now

    def _fault(self, target: NodePlan) -> None:
        self.cluster.arm(0, 0)
        symbol = self._random.choice(CALLS)
        effects = ["fail", "fail_after", "delay"] + ["pretend"] * (symbol == "nvmlGpuInstanceDestroy")
        code = self._random.choice(CODES.get(symbol, (19, 23, 999)))
        times, after = self._random.randint(1, 4), self._random.randint(0, 4)
        effect = self._random.choice(effects)
        self.cluster.client.admin(
            "fault", symbol=symbol, effect=effect, code=code, times=times, after=after, delay_s=0.05
        )
        self.counts["faults"] += 1
        self.cluster.apply(target)

    def _kill_at_a_write(self, target: NodePlan) -> None:
        self.cluster.arm(self._random.randint(1, 60), self._random.choice((BEFORE, AFTER)))
        accepted = self._apply(target)
        self.cluster.until(lambda: self.cluster.died or (accepted and self._applied(target)), "death or plan")
        self._revive(target, accepted)

    def _kill_at_a_time(self, target: NodePlan) -> None:
        self.cluster.arm(0, 0)
        self.cluster.apply(target)
        time.sleep(self._random.random() * 0.1)
        self.cluster.kill_agent()
        self.counts["kills at a time"] += 1
        self.cluster.start_agent()

    def _revive(self, target: NodePlan, accepted: bool) -> None:
        if not self.cluster.died:
            self.counts["plans too short for their kill"] += 1
            return
        assert self.cluster.reap_agent() == -signal.SIGKILL
        self.counts["kills at a write"] += 1
        self.cluster.arm(0, 0)
        self.cluster.start_agent()
        if not accepted:
            self.cluster.apply(target)  # as the controller would, which had no answer

    def _apply(self, target: NodePlan) -> bool:
        try:
            self.cluster.apply(target)
        except grpc.RpcError:
            assert self.cluster.died, self.cluster.tail()
            return False
        return True

    def _applied(self, target: NodePlan) -> bool:
        try:
            return self.cluster.status().applied == target.revision
        except grpc.RpcError:
            return False  # it has just died


def test_five_hundred_random_plans_with_every_second_one_interrupted(stage):
    started_s = time.monotonic()
    cluster = FastCluster(stage, devices=DEVICES)
    try:
        walk = Walk(cluster)

        @settings(max_examples=PLANS, phases=[Phase.generate], deadline=None, derandomize=True, database=None)
        @given(seed=st.integers(0, 2**64 - 1))
        def one_more_plan(seed: int) -> None:
            walk.step(seed)

        one_more_plan()
        assert walk.number == PLANS
        print(f"{PLANS} plans in {time.monotonic() - started_s:.0f} s on {len(DEVICES)} GPUs: {dict(walk.counts)}")
        interrupted = sum(count for name, count in walk.counts.items() if name.startswith(("faults", "kills")))
        assert interrupted >= 0.9 * PLANS / 2
    finally:
        cluster.close()
