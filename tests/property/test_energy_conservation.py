"""Thousands of random histories of a device: no joule lost, counted twice or negative, each slice close to the truth.

A history is a string of bytes: which device, what runs on it, and what happens in each interval. What happens to the
device (loads, new slices, dead processes, foreign clients, counters that begin again), to the agent (lost readings,
Tritons that do not answer, stale sensors, restarts) and to the counter (wobbles) is played on the simulated driver's
books (`tests.support.metered`), which integrate every term on their own. Nothing here is computed as a remainder.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.metered import Books, Loaded, MeteredDevice
from trefoil.core import power
from trefoil.core.accounting import CONSERVATION_TOLERANCE
from trefoil.core.device_types import DEVICE_TYPES
from trefoil.core.energy import EnergyMethod

HISTORIES = (2_000, pytest.param(10_000, marks=pytest.mark.long))
PER_EXAMPLE = 20
HISTORY_BYTES = 48
TICK_S, INTERVAL_S_MAX, WOBBLE_S = 0.2, 1.2, 0.002
LAYOUTS = (
    ("A100-SXM4-40GB", (("4g.20gb", 0, 4), ("3g.20gb", 4, 4))),
    ("A100-SXM4-40GB", (("2g.10gb", 0, 2), ("1g.5gb", 2, 1), ("3g.20gb", 4, 4))),
    ("H100-SXM5-80GB", (("3g.40gb", 0, 4), ("3g.40gb", 4, 4))),
    ("Tesla V100-SXM2-32GB", (("whole", 0, 1),)),
    ("Tesla P4", (("whole", 0, 1),)),
    ("A100-SXM4-80GB", ()),
)
EVENTS = (
    "none", "none", "none", "lost", "silent", "stale", "restart", "restart_reload", "reset", "reload", "recreate",
    "kill", "kill_unseen", "wobble", "foreign", "hidden", "warm_up", "clock", "limit", "reloaded",
)  # fmt: skip
# What no meter can see is allowed for, in joules of the driver's books: a batch that ended in another interval, the
# work of a Triton that did not answer or died unseen, and what a foreign client draws between its two bounds.
DENSITY = 0.06  # 5 % between variants, 1 % of sensor noise and of a power that is not quite linear
IDLE = 0.02  # noise of the sensor over one history


@dataclass
class Tally:
    """Over all examples."""

    histories: int = 0
    samples: int = 0
    worst: float = 0.0  # error over what is allowed
    worst_j: float = 0.0
    events: set[str] = field(default_factory=set)


class History:
    """Plays one string of bytes."""

    def __init__(self, script: bytes) -> None:
        self._bytes: Iterator[int] = iter(script)
        name, layout = LAYOUTS[self.next() % len(LAYOUTS)]
        sensor = ("", "", "gpm", "dcgm")[self.next() % 4]
        self.device = MeteredDevice(
            DEVICE_TYPES[name],
            np.random.default_rng(self.next()),
            sensor=sensor,
            attribution=("auto", "auto", "triton", "gpm")[self.next() % 4],
            learn=self.next() % 2 == 1,
        )
        for slice_type, start, size in layout:
            service_s = (0.01, 0.04, 0.1, 0.35)[self.next() % 4]
            self.device.start(slice_type, start, size, service_s, 0.95 + 0.05 * self.ratio(), self.ratio())
        self.device.zero_j = -1e6  # as of a GPU that has run for hours
        self.true = Books()  # what a meter can know of
        self.before = self.device.books()
        self.events: set[str] = set()
        self.allowed_j = 0.0
        self.watched = True
        self.device.run(TICK_S, TICK_S)
        self.device.read()
        self.before = self.device.books()
        self.pending: set[str] = set()  # of intervals whose reading was lost
        self.earlier: set[str] = set()  # of the interval before the last reading

    def next(self) -> int:
        return next(self._bytes, 0)

    def ratio(self) -> float:
        return self.next() / 255

    def play(self) -> None:
        """All of it; ends with a reading that nothing disturbs."""
        for _ in range(2 + self.next() % 5):
            self.interval(EVENTS[self.next() % len(EVENTS)])
        self.interval("none")

    def interval(self, event: str) -> None:
        device, part = self.device, self.pick()
        mips = device.method == EnergyMethod.NVML_COUNTER
        if (event in ("recreate", "kill", "kill_unseen", "reloaded", "silent", "warm_up") and part is None) or (
            event in ("reset", "reload", "wobble") and not mips
        ):
            event = "none"
        if event in ("reset", "reload", "restart_reload") and self.pending:
            event = "none"  # together with a lost reading, part of the time before is nowhere
        if event == "reset" and device.counter_j() < 2 * INTERVAL_S_MAX * device.kind.max_w:
            event = "none"  # a counter that has passed its old value again cannot be seen to have begun again
        if event in ("reset", "reload", "restart_reload") and device.dip_j:
            event = "none"  # what the last reading showed too little is nowhere either
        device.dip_j = 0.0
        self.events.add(event)
        if part is not None:
            part.load = 1.2 * self.ratio()
        self.begin(event, part)
        device.run(INTERVAL_S_MAX - TICK_S * (self.next() % 5), TICK_S)
        self.end(event, part)
        if event == "wobble":  # so soon after a reading, less than the counter wobbles by has been drawn
            device.dip_j = 0.99 * self.ratio()
            device.run(WOBBLE_S, WOBBLE_S)
            self.end(event, part)

    def pick(self) -> Loaded | None:
        choice = self.next()
        return self.device.slices[choice % len(self.device.slices)] if self.device.slices else None

    def begin(self, event: str, part: Loaded | None) -> None:
        device = self.device
        if event in ("reset", "reload"):
            device.reload() if event == "reload" else device.reset()
        elif event == "restart":
            device.new_agent()
            self.watched = False
        elif event == "restart_reload":
            device.new_agent()
            device.reload()
            self.watched = False
        elif event == "recreate":
            assert part is not None
            self.allowed_j += self.batch_j(part)
            device.recreate(part)
        elif event in ("kill", "kill_unseen"):
            assert part is not None
            self.allowed_j += self.batch_j(part)
            device.end_process(part, noticed=event == "kill")
        elif event == "reloaded":  # the model, by the same Triton: its counters begin again
            assert part is not None
            self.allowed_j += self.batch_j(part)
            device.end_process(part, noticed=False)
            part.incarnation -= 1
        elif event in ("foreign", "hidden"):
            device.foreign_w = power.dynamic_w(device.kind) * self.ratio()
        elif event == "warm_up":
            assert part is not None
            part.serving = False
        elif event == "clock" and device.kind.clocks_mhz:
            clocks = device.kind.clocks_mhz
            device.clock_mhz = clocks[self.next() % len(clocks)]
        elif event == "limit" and device.kind.power_limit_min_w:
            low_w, high_w = device.kind.power_limit_min_w, device.kind.power_limit_max_w
            device.limit_w = low_w + (high_w - low_w) * self.ratio()

    def end(self, event: str, part: Loaded | None) -> None:
        device = self.device
        self.pending.add(event)
        if event == "lost":
            return
        now, integral = device.books(), device.method == EnergyMethod.POWER_INTEGRAL
        spent = Books()
        spent.add(now, self.before)
        sample = device.read(
            watched=self.watched,
            foreign="foreign" in self.pending,
            silent=[part] if part is not None and event == "silent" else (),
            stale=event == "stale",
        )
        self.allow(spent)
        if sample is not None:
            self.true.add(now, self.before)
        else:  # nobody saw how the counter began: a gap, said by the times of the samples
            assert not self.watched
        assert (sample is None) == ("restart_reload" in self.pending or (integral and "restart" in self.pending))
        self.before, self.watched, self.pending, self.earlier = now, True, set(), self.pending
        device.foreign_w = 0.0
        if part is not None:
            part.serving = True

    def batch_j(self, part: Loaded) -> float:
        """A batch that Triton has not counted when its process ends."""
        watts = power.active_w(self.device.kind, part.key.slice_type, max(self.device.kind.clocks_mhz, default=0))
        return part.service_s * watts

    def allow(self, spent: Books) -> None:
        """Errors that no meter can avoid, from the books of the interval."""
        active = sum(spent.active_j.values())
        self.allowed_j += DENSITY * active + IDLE * (spent.idle_j + spent.unallocated_j) + 0.01
        self.allowed_j += 2 * sum(self.batch_j(part) for part in self.device.slices)
        if self.pending & {"silent", "kill_unseen", "reloaded"} or self.pending >= {"lost", "warm_up"}:
            self.allowed_j += 2 * active
        if "clock" in self.pending:
            self.allowed_j += power.IDLE_CLOCK_SHARE * (spent.idle_j + spent.unallocated_j)
        if "foreign" in self.pending:  # at the board's limit all draw less, by what nobody counts
            self.allowed_j += 1.1 * active
        if "hidden" in self.pending:  # nobody can tell its joules from those of what serves
            self.allowed_j += spent.unallocated_j + spent.idle_j + 1.1 * active
        if not self.watched and "warm_up" in self.pending | self.earlier:  # what served before and after, served
            self.allowed_j += spent.idle_j + spent.unallocated_j


def check(history: History, tally: Tally) -> None:
    device, samples = history.device, history.device.samples
    for sample in samples:
        parts = [part.active_j for part in sample.slices]
        total = sum(parts) + sample.idle_j + sample.unallocated_j
        assert abs(total - sample.counter_j) <= CONSERVATION_TOLERANCE * max(1.0, sample.counter_j)
        assert min([sample.counter_j, sample.idle_j, sample.unallocated_j, *parts]) >= 0
        assert sample.method == device.method
        places = [(part.key, part.generation) for part in sample.slices]
        assert len(places) == len(set(places))
        for part in sample.slices:
            assert abs(sum(h.active_j for h in part.hosted) - part.active_j) <= 1e-6 * max(1.0, part.active_j)
            assert all(h.active_j >= 0 and h.compute_s >= 0 and h.requests >= 0 for h in part.hosted)
    ours, true = device.metered(), history.true
    # NVML counts whole millijoules; an integral errs by half a step of the power at each end.
    counted_j = 2e-3 * (len(samples) + 1)
    if device.method == EnergyMethod.POWER_INTEGRAL:
        counted_j = TICK_S * device.kind.max_w * (1 + len(samples))
    assert abs(ours.counter_j - true.counter_j) <= counted_j
    allowed_j = history.allowed_j + counted_j
    errors = [ours.idle_j - true.idle_j, ours.unallocated_j - true.unallocated_j]
    errors += [ours.active_j.get(place, 0.0) - joules for place, joules in true.active_j.items()]
    assert set(ours.active_j) <= set(true.active_j), "joules of a slice and generation that never was"
    worst_j = max(abs(error) for error in errors)
    assert worst_j <= allowed_j, (errors, allowed_j, history.events)
    tally.histories += 1
    tally.samples += len(samples)
    tally.events |= history.events
    if not history.events - {"none", "stale", "lost", "wobble"}:
        tally.worst = max(tally.worst, worst_j / max(1.0, true.counter_j))
        tally.worst_j = max(tally.worst_j, worst_j)


@pytest.mark.hypothesis
@pytest.mark.parametrize("histories", HISTORIES)
def test_no_joule_is_lost_or_counted_twice_in_any_of_thousands_of_histories(histories):
    tally = Tally()
    scripts = st.lists(
        st.binary(min_size=HISTORY_BYTES, max_size=HISTORY_BYTES), min_size=PER_EXAMPLE, max_size=PER_EXAMPLE
    )

    @settings(max_examples=histories // PER_EXAMPLE, deadline=None, database=None)
    @given(scripts=scripts)
    def play(scripts: list[bytes]) -> None:
        for script in scripts:
            history = History(script)
            history.play()
            check(history, tally)

    play()
    print(
        f"{tally.histories} histories, {tally.samples} samples; where nothing hid from the meter, the worst error of a "
        f"term was {tally.worst_j:.2f} J or {tally.worst:.2%} of the device's energy"
    )
    assert tally.histories >= histories
    assert tally.events == set(EVENTS)
