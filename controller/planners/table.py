"""Table of planners: what `Policy.planner` names, beside module:Class."""

from typing import Final

from controller.planners.base import BasePlanner, MigSettings
from controller.planners.blover import blover
from controller.planners.clover import CloverPlanner
from controller.planners.clover.settings import CloverSettings
from controller.planners.co2opt import Co2OptPlanner
from controller.planners.exact import ExactPlanner
from controller.planners.gpu_allocation import AllocationSettings
from controller.planners.infadapter.cpu_slices import InfAdapterSettings
from controller.planners.infadapter.fixed_size import fixed_size
from controller.planners.infadapter.ms_plus import MsPlusPlanner
from controller.planners.infadapter.planner import InfAdapterPlanner
from controller.planners.infadapter.vpa_plus import VpaPlusPlanner, VpaSettings
from controller.planners.muserve.planner import AlpaServePlanner, AlpaServeSettings, muserve
from controller.planners.oracle import OraclePlanner
from controller.planners.paired import PairedPlanner, PairedSettings, highperf, lowenergy
from controller.planners.planner_settings import ExactSettings
from controller.planners.static_mix import StaticMixPlanner
from controller.planners.wattwiser import (
    UniformSettings,
    WattWiserPlanner,
    WattWiserSettings,
    packed_uniform,
    sharing_aware,
    uniform,
)
from trefoil.core.brains import Planner
from trefoil.core.parts import Kind, Part, Parts, Traits

MEASURES: Final = Traits(measures=True)
SHARES: Final = Traits(tick_grace_s=0.0, shares=True)
TICKS: Final = Traits(tick_grace_s=0.0)

PLANNERS: Final[Parts[Planner]] = {
    part.name: part
    for part in (
        Part(Kind.PLANNER, "base", BasePlanner, settings=MigSettings, colour="#8b93a1"),
        Part(Kind.PLANNER, "co2opt", Co2OptPlanner, settings=MigSettings),
        Part(Kind.PLANNER, "static_mix", StaticMixPlanner, settings=ExactSettings, colour="#d9822b"),
        Part(Kind.PLANNER, "exact", ExactPlanner, settings=ExactSettings, colour="#2f9e6e"),
        Part(Kind.PLANNER, "clover", CloverPlanner, settings=CloverSettings, traits=MEASURES),
        Part(Kind.PLANNER, "blover", blover, settings=CloverSettings, traits=MEASURES),
        Part(Kind.PLANNER, "oracle", OraclePlanner, settings=CloverSettings, traits=MEASURES),
        Part(Kind.PLANNER, "wattwiser", WattWiserPlanner, settings=WattWiserSettings, traits=SHARES),
        Part(Kind.PLANNER, "sharing_aware", sharing_aware, settings=AllocationSettings, traits=SHARES),
        Part(Kind.PLANNER, "packed_uniform", packed_uniform, settings=AllocationSettings, traits=SHARES),
        Part(Kind.PLANNER, "paired", PairedPlanner, settings=PairedSettings, traits=Traits(shares=True)),
        Part(Kind.PLANNER, "highperf", highperf, settings=PairedSettings, traits=Traits(shares=True)),
        Part(Kind.PLANNER, "lowenergy", lowenergy, settings=PairedSettings, traits=Traits(shares=True)),
        Part(Kind.PLANNER, "alpaserve", AlpaServePlanner, settings=AlpaServeSettings, traits=Traits(shares=True)),
        Part(Kind.PLANNER, "muserve", muserve, settings=AlpaServeSettings, traits=Traits(shares=True)),
        Part(Kind.PLANNER, "infadapter", InfAdapterPlanner, settings=InfAdapterSettings, traits=TICKS),
        Part(Kind.PLANNER, "ms_plus", MsPlusPlanner, settings=InfAdapterSettings, traits=TICKS),
        Part(Kind.PLANNER, "vpa_plus", VpaPlusPlanner, settings=VpaSettings, traits=TICKS),
        Part(Kind.PLANNER, "fixed_size", fixed_size, settings=VpaSettings, traits=TICKS),
        Part(Kind.PLANNER, "uniform", uniform, settings=UniformSettings, traits=SHARES),
    )
}
