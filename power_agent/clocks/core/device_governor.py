"""Governor of a device: which clock it wants now, inside the range of the plan.

A governor is made when the plan names it. It is stepped when the plan of its device changes, and at the time that it
asked for. Its clock is the upper end of what is locked: under load a GPU runs there, idle it may fall to the range's
lower end. 0: no limit but the plan's. Leases and sleep go before it (`clock_control.py`).

A governor decides a clock, and a power limit can stand for it (`wishes`): the limit under which the board, however much
computes, runs at that clock by the law of trefoil/core/power.py. What draws less runs faster, never slower. The limit
is moved where the plan gives one, where the device takes no lock, and where the governor's settings want it.

Data: the planned device, what it can do, whether it does, the latency of its slices, the clocks that it had. What was
answered under other slices, or while a lock did not hold, is forgotten. Time is monotonic seconds.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from power_agent.clocks.core.clock_control import (
    Ability,
    ClockRange,
    Lever,
    LeverValue,
    PowerLimit,
    planned_limit,
    planned_range,
    snap_down,
)
from power_agent.clocks.core.slice_latencies import ClockPeriod, SliceLatencies
from power_agent.governors import governor_of
from trefoil.core.brains import ClockDecision, Governor, GovernorView
from trefoil.core.catalog import Catalog
from trefoil.core.device_types import reported_type
from trefoil.core.parts import Value
from trefoil.core.plan import PlannedDevice, PlannedSlice
from trefoil.core.power import clock_under, dynamic_w, limit_leaving

REMEMBERS_S: Final = 10.0
"""Answers of so long a governor sees that does not say it by an attribute `remembers_s` [s]."""
CLOCKS_MAX: Final = 600  # a step takes a second or more, and no governor remembers longer


class DeviceGovernor:
    """Governor of one device, and what it decided last. `override` instead of the one that the plan names."""

    def __init__(self, override: str, settings: Mapping[str, Value], latencies: SliceLatencies | None = None) -> None:
        self._override, self._settings = override, settings
        self._latencies = latencies or SliceLatencies(Catalog((), ()))
        self._clocks: list[ClockPeriod] = []
        self._slices: tuple[PlannedSlice, ...] = ()
        self._name = ""
        self._governor: Governor | None = None
        self._stepped_for: tuple[PlannedDevice, Ability] | None = None
        self.decision: ClockDecision | None = None

    @property
    def next_s(self) -> float:
        """Time of the next step though nothing changes (monotonic)."""
        return self.decision.next_tick_at_s if self.decision is not None else math.inf

    def wishes(
        self, planned: PlannedDevice, ability: Ability, clock_mhz: int, honoured: bool, now_s: float
    ) -> Mapping[Lever, LeverValue | None]:
        """Clock range and power limit that are to be set; None: nothing. Steps the governor if it is time to."""
        given = planned_limit(planned, ability)
        if not self._moves_limit(planned, ability):
            return {
                Lever.CLOCK: self.range(planned, ability, clock_mhz, honoured, now_s),
                Lever.POWER_LIMIT: given,
            }
        kind = reported_type(ability.type)
        least_w, most_w = ability.limits_w[0], given.watts if given is not None else ability.limits_w[1]
        low_mhz, high_mhz = (clock_under(kind, watts, dynamic_w(kind)) for watts in (least_w, most_w))
        reachable = tuple(sorted(mhz for mhz in kind.clocks_mhz if low_mhz <= mhz <= high_mhz))
        free = replace(planned, clock_min_mhz=0, clock_max_mhz=0)
        found = self.range(free, replace(ability, supported_mhz=reachable, cannot_lock=""), clock_mhz, honoured, now_s)
        if found is not None and found.max_mhz < high_mhz:
            given = PowerLimit(float(round(min(most_w, max(least_w, limit_leaving(kind, found.max_mhz))))))
        return {Lever.CLOCK: planned_range(planned, ability.supported_mhz), Lever.POWER_LIMIT: given}

    def _moves_limit(self, planned: PlannedDevice, ability: Ability) -> bool:
        if ability.cannot_limit or not reported_type(ability.type).clocks_mhz:
            return False
        wanted = getattr(self._made(planned), "lever", Lever.CLOCK) == Lever.POWER_LIMIT
        return bool(planned.power_limit_w or ability.cannot_lock or wanted)

    def _made(self, planned: PlannedDevice) -> Governor:
        """The governor that the plan, or the override, names."""
        name = self._override or planned.governor
        if self._governor is None or name != self._name:
            self._governor, self._name = governor_of(name, self._settings), name
        return self._governor

    def range(
        self, planned: PlannedDevice, ability: Ability, clock_mhz: int, honoured: bool, now_s: float
    ) -> ClockRange | None:
        """Clock range that is to be locked; None: nothing. Steps the governor if it is time to."""
        given = planned_range(planned, ability.supported_mhz)
        if ability.cannot_lock or not ability.supported_mhz:
            self._stepped_for = self.decision = None
            return given
        if self._stepped_for != (planned, ability) or now_s >= self.next_s:
            self._step(planned, ability, given, clock_mhz, honoured, now_s)
        assert self.decision is not None
        return limited(given, self.decision.clock_mhz, ability)

    def _step(
        self,
        planned: PlannedDevice,
        ability: Ability,
        given: ClockRange | None,
        clock_mhz: int,
        honoured: bool,
        now_s: float,
    ) -> None:
        governor = self._made(planned)
        if not honoured or planned.slices != self._slices:
            self._clocks, self._slices = [], planned.slices
        remembers_s = getattr(governor, "remembers_s", REMEMBERS_S)
        view = GovernorView(
            now_s=now_s,
            device=planned.device,
            clock_mhz=clock_mhz,
            range_mhz=(given.min_mhz, given.max_mhz) if given else (0, 0),
            supported_mhz=ability.supported_mhz,
            stages=self._latencies.stages(planned, ability.type, self._clocks, remembers_s),
            honoured=honoured,
            windows_age_s=now_s - self._latencies.heard_s,
        )
        self._stepped_for, self.decision = (planned, ability), governor.step(view)
        clock_mhz = self.decision.clock_mhz or ability.supported_mhz[-1]
        if not self._clocks or self._clocks[-1].clock_mhz != clock_mhz:
            self._clocks = [*self._clocks[-CLOCKS_MAX:], ClockPeriod(now_s, clock_mhz)]


def limited(given: ClockRange | None, clock_mhz: int, ability: Ability) -> ClockRange | None:
    """Range of the plan (None: all that the device has) up to a clock; 0: the range as it is."""
    if not clock_mhz:
        return given
    bounds = given or ability.full
    high_mhz = min(bounds.max_mhz, max(bounds.min_mhz, snap_down(ability.supported_mhz, clock_mhz)))
    return ClockRange(bounds.min_mhz, high_mhz)
