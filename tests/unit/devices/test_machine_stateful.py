"""Random lives of a whole machine: others, losses, resets and restarts at any time. What must hold then, holds."""

import ctypes
import math

import pynvml
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from power_agent.devices.errors import NodeRefused
from power_agent.devices.nvml_shim import install_simulated_driver, uninstall_simulated
from trefoil.simulated_node.interference import Interference
from trefoil.simulated_node.machine import Load, Machine

DEVICES = ("A100-SXM4-40GB", "H100-SXM5-80GB", "Tesla V100-SXM2-32GB", "Tesla P4")
INDEX = st.integers(0, len(DEVICES) - 1)


class MachineLife(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.machine = Machine(devices=DEVICES, seed=5, noise_ratio=0.02, stale_listing=True, settle_s=(0.005, 0.05))
        install_simulated_driver(self.machine.send)
        pynvml.nvmlInit()
        self.pid = 0
        self.counter_mj = [0] * len(DEVICES)
        self.restarted = [False] * len(DEVICES)

    def teardown(self):
        uninstall_simulated()

    def attempt(self, verb, *args):
        try:
            return getattr(Interference(self.machine), verb)(*args)
        except NodeRefused:
            return None

    @rule(index=INDEX, data=st.data(), compute=st.booleans())
    def create(self, index, data, compute):
        profiles = self.machine.driver.gpus[index].model.profiles
        if profiles:
            profile = data.draw(st.sampled_from(profiles))
            self.attempt("create_gi", index, profile.name, data.draw(st.sampled_from(profile.starts)), compute)

    @rule(index=INDEX, start=st.integers(0, 7), compute_only=st.booleans())
    def destroy(self, index, start, compute_only):
        self.attempt("destroy", index, start, compute_only)

    @rule(index=INDEX, data=st.data())
    def attach(self, index, data):
        gpu = self.machine.driver.gpus[index]
        uuids = [compute.mig_uuid for compute in gpu.computes()] or ([] if gpu.mig_current else [gpu.uuid])
        if uuids:
            self.pid += 1
            self.machine.attach(self.pid, data.draw(st.sampled_from(uuids)), serving=data.draw(st.booleans()))

    @rule(data=st.data())
    def exit_one(self, data):
        pids = [pid for gpu in self.machine.driver.gpus for pid in gpu.processes]
        if pids:
            self.machine.detach(data.draw(st.sampled_from(pids)))

    @rule(index=INDEX, low=st.integers(100, 2000), high=st.integers(100, 2000))
    def lock(self, index, low, high):
        self.attempt("lock_clocks", index, low, high)

    @rule(index=INDEX, watts=st.floats(40, 750))
    def limit(self, index, watts):
        self.attempt("set_power_limit", index, watts)

    @rule(index=INDEX, start=st.none() | st.integers(0, 7), release=st.booleans())
    def hidden_client(self, index, start, release):
        self.attempt(*(("release_handles", index) if release else ("leak_handle", index, start)))

    @rule(index=INDEX, enabled=st.booleans())
    def mig_mode(self, index, enabled):
        self.attempt("set_mig_mode", index, enabled)

    @rule(index=INDEX, mhz=st.sampled_from([0, 600]), watts=st.sampled_from([0.0, 50.0, 400.0]))
    def board(self, index, mhz, watts):
        self.attempt("overheat", index, mhz)
        self.attempt("foreign_load", index, watts)

    @rule(index=INDEX, lose=st.booleans())
    def lose_or_reset(self, index, lose):
        self.attempt("lose" if lose else "reset", index)
        self.restarted[index] = True

    @rule(persistence=st.booleans())
    def reload(self, persistence):
        for index in range(len(DEVICES)):
            Interference(self.machine).set_persistence(index, persistence)
        self.machine.reload()
        self.restarted = [True] * len(DEVICES)
        assert all(not gpu.instances and not gpu.processes for gpu in self.machine.driver.gpus)
        assert persistence or all(gpu.locked_mhz is None for gpu in self.machine.driver.gpus)

    @rule(dt_s=st.floats(0.001, 3.0), busy=st.floats(0, 1))
    def pass_time(self, dt_s, busy):
        gpus = self.machine.driver.gpus
        uuids = {p.compute.mig_uuid if p.compute else gpu.uuid for gpu in gpus for p in gpu.processes.values()}
        self.machine.advance(dt_s, [Load(uuid, busy * dt_s) for uuid in sorted(uuids)])

    @invariant()
    def every_joule_is_booked_once(self):
        for device in self.machine.truth()["devices"]:
            split_j = device["active_j"] + device["idle_j"] + device["unallocated_j"]
            assert abs(split_j - device["counter_j"]) <= 1e-9 * max(1.0, device["counter_j"])

    @invariant()
    def the_counter_falls_only_at_a_restart(self):
        for gpu in self.machine.driver.gpus:
            assert gpu.energy_mj >= (0 if self.restarted[gpu.index] else self.counter_mj[gpu.index])
            self.counter_mj[gpu.index], self.restarted[gpu.index] = gpu.energy_mj, False

    @invariant()
    def clocks_and_power_stay_within_what_holds_them(self):
        for gpu in self.machine.driver.gpus:
            if gpu.model.lockable:
                assert gpu.clock_at_mhz(math.inf) in gpu.model.clocks_mhz
            low_w, _, high_w = gpu.model.power_limit_w
            assert low_w <= gpu.power_limit_w <= high_w
            assert 0 < gpu.power_w < high_w * 1.01

    @invariant()
    def a_new_session_lists_what_exists_and_a_lost_gpu_nothing(self):
        pynvml.nvmlInit()
        for gpu in self.machine.driver.gpus:
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(gpu.index)
            except pynvml.NVMLError_GpuIsLost:
                assert gpu.lost
                continue
            assert not gpu.lost
            listed = set()
            for profile in gpu.model.profiles if gpu.mig_current else ():
                found = (pynvml.c_nvmlGpuInstance_t * profile.instances_max)()
                count = ctypes.c_uint(profile.instances_max)
                pynvml.nvmlDeviceGetGpuInstances(handle, profile.id, found, ctypes.byref(count))
                listed |= {pynvml.nvmlGpuInstanceGetInfo(instance).id for instance in found[: count.value]}
            assert listed == set(gpu.instances)
            assert gpu.mig_current or not gpu.instances
            for compute in gpu.computes():
                mig = pynvml.nvmlDeviceGetHandleByUUID(compute.mig_uuid)
                assert pynvml.nvmlDeviceGetGpuInstanceId(mig) == compute.gi.id


TestMachineLife = MachineLife.TestCase
TestMachineLife.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
