"""Random lives of a simulated GPU: whatever is asked in whatever order, the invariants of MIG and of energy hold."""

import math

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from tests.support.simulated_driver import A100_40GB, make_driver, outcome
from trefoil.core.device_types import A100_40GB as A100
from trefoil.simulated_node.energy import DeviceEnergy, PowerDraw, VersionAccount
from trefoil.simulated_node.gpu_state import Nvml

PROFILES = [(profile.id, profile) for profile in A100_40GB.profiles]


class GpuLife(RuleBasedStateMachine):
    instances = Bundle("instances")
    computes = Bundle("computes")

    def __init__(self):
        super().__init__()
        self.driver = make_driver()
        (self.gpu,) = self.driver.gpus
        self.energy = DeviceEnergy(A100, np.random.default_rng(3), 0.02)
        self.account = VersionAccount("digits", "digits-l", 4)
        self.counter_j = 0.0
        self.pid = 0

    @rule(target=instances, profile=st.sampled_from(PROFILES), data=st.data())
    def create(self, profile, data):
        profile_id, kind = profile
        start = data.draw(st.none() | st.sampled_from(kind.starts))
        free = self.driver.free_starts(self.gpu, kind)
        placement = None if start is None else (start, kind.memory_slices)
        made, code = outcome(self.driver.create_gpu_instance, self.gpu, profile_id, placement)
        fits = bool(free) if start is None else start in free
        assert code is (Nvml.SUCCESS if fits else Nvml.INSUFFICIENT_RESOURCES)
        assert made is None or made.start in free
        return made

    @rule(target=computes, instance=instances, data=st.data())
    def split(self, instance, data):
        if instance is None or instance.id not in self.gpu.instances:
            return None
        width = data.draw(st.sampled_from(instance.profile.ci_widths))
        free = self.driver.free_ci_starts(instance, width)
        made, code = outcome(self.driver.create_compute_instance, instance, instance.profile.ci_id(width))
        assert code is (Nvml.SUCCESS if free else Nvml.INSUFFICIENT_RESOURCES)
        return made

    @rule(compute=computes)
    def attach(self, compute):
        if compute is not None and compute in list(self.gpu.computes()):
            self.pid += 1
            self.driver.attach(self.pid, compute, 450)

    @rule()
    def exit_one(self):
        if self.gpu.processes:
            self.driver.detach(next(iter(self.gpu.processes)))

    @rule(compute=consumes(computes))
    def destroy_compute(self, compute):
        if compute is None or compute not in list(self.gpu.computes()):
            return
        held = any(process.compute is compute for process in self.gpu.processes.values())
        _, code = outcome(self.driver.destroy_compute_instance, compute)
        assert code is (Nvml.IN_USE if held else Nvml.SUCCESS)

    @rule(instance=consumes(instances))
    def destroy(self, instance):
        if instance is None or self.gpu.instances.get(instance.id) is not instance:
            return
        held = bool(instance.computes)
        _, code = outcome(self.driver.destroy_gpu_instance, instance)
        assert code is (Nvml.IN_USE if held else Nvml.SUCCESS)

    @rule(dt_s=st.floats(0.001, 0.2), busy=st.floats(0, 1), serving=st.booleans(), foreign_w=st.floats(0, 300))
    def pass_time(self, dt_s, busy, serving, foreign_w):
        occupied = bool(self.gpu.processes)
        draws = [PowerDraw("3g.20gb", busy * dt_s, 1.0, self.account if serving else None)] if occupied else []
        tick = self.energy.step(
            dt_s,
            clock_mhz=self.gpu.clock_at_mhz(math.inf),
            limit_w=self.gpu.power_limit_w,
            occupied=occupied,
            serving=serving and occupied,
            draws=draws,
            foreign_w=foreign_w,
        )
        assert tick.power_w <= self.gpu.power_limit_w + 1e-9

    @invariant()
    def instances_never_overlap_and_fit(self):
        covered = [m for i in self.gpu.instances.values() for m in range(i.start, i.start + i.size)]
        assert len(covered) == len(set(covered))
        assert all(0 <= m < 8 for m in covered)
        assert sum(i.profile.compute_slices for i in self.gpu.instances.values()) <= 7
        for instance in self.gpu.instances.values():
            inside = [s for c in instance.computes.values() for s in range(c.start, c.start + c.width)]
            assert len(inside) == len(set(inside))

    @invariant()
    def ids_and_uuids_are_unique(self):
        uuids = [compute.mig_uuid for compute in self.gpu.computes()]
        assert len(uuids) == len(set(uuids))

    @invariant()
    def energy_is_conserved_and_never_falls(self):
        split_j = self.account.active_j + self.energy.idle_j + self.energy.unallocated_j
        assert abs(split_j - self.energy.counter_j) <= 1e-6 * max(1.0, self.energy.counter_j)
        assert self.energy.counter_j >= self.counter_j
        self.counter_j = self.energy.counter_j


TestGpuLife = GpuLife.TestCase
TestGpuLife.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
