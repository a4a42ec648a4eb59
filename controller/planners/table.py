"""Table of planners: what `Policy.planner` names, beside module:Class."""

from typing import Final

from controller.planners.base import BasePlanner
from controller.planners.blover import blover
from controller.planners.clover import CONSTANTS as CLOVER
from controller.planners.clover import CloverPlanner
from controller.planners.co2opt import Co2OptPlanner
from controller.planners.exact import CONSTANTS as EXACT
from controller.planners.exact import ExactPlanner
from controller.planners.infadapter.cpu_slices import CONSTANTS as SLICES
from controller.planners.infadapter.fixed_size import fixed_size
from controller.planners.infadapter.ms_plus import MsPlusPlanner
from controller.planners.infadapter.planner import InfAdapterPlanner
from controller.planners.infadapter.vpa_plus import CONSTANTS as VPA
from controller.planners.infadapter.vpa_plus import VpaPlusPlanner
from controller.planners.muserve.planner import CONSTANTS as ALPASERVE
from controller.planners.muserve.planner import AlpaServePlanner, muserve
from controller.planners.oracle import OraclePlanner
from controller.planners.paired import CONSTANTS as PAIRED
from controller.planners.paired import PairedPlanner, highperf, lowenergy
from controller.planners.plan_assembly import DEFAULTS
from controller.planners.static_mix import StaticMixPlanner
from controller.planners.wattwiser import CONSTANTS as WATTWISER
from controller.planners.wattwiser import WattWiserPlanner, packed_uniform, sharing_aware, uniform
from trefoil.core.brains import Planner
from trefoil.core.parts import Kind, Part, Parts, Traits

MEASURES: Final = Traits(measures=True)
SHARES: Final = Traits(tick_grace_s=0.0, shares=True)
TICKS: Final = Traits(tick_grace_s=0.0)

PLANNERS: Final[Parts[Planner]] = {
    part.name: part
    for part in (
        Part(Kind.PLANNER, "base", BasePlanner, DEFAULTS, colour="#8b93a1"),
        Part(Kind.PLANNER, "co2opt", Co2OptPlanner, DEFAULTS),
        Part(Kind.PLANNER, "static_mix", StaticMixPlanner, EXACT, colour="#d9822b"),
        Part(Kind.PLANNER, "exact", ExactPlanner, EXACT, colour="#2f9e6e"),
        Part(Kind.PLANNER, "clover", CloverPlanner, CLOVER, traits=MEASURES),
        Part(Kind.PLANNER, "blover", blover, CLOVER, traits=MEASURES),
        Part(Kind.PLANNER, "oracle", OraclePlanner, CLOVER, traits=MEASURES),
        Part(Kind.PLANNER, "wattwiser", WattWiserPlanner, {**WATTWISER, "literal": 0.0}, traits=SHARES),
        Part(Kind.PLANNER, "sharing_aware", sharing_aware, WATTWISER, traits=SHARES),
        Part(Kind.PLANNER, "packed_uniform", packed_uniform, WATTWISER, traits=SHARES),
        Part(Kind.PLANNER, "paired", PairedPlanner, PAIRED, traits=Traits(shares=True)),
        Part(Kind.PLANNER, "highperf", highperf, PAIRED, traits=Traits(shares=True)),
        Part(Kind.PLANNER, "lowenergy", lowenergy, PAIRED, traits=Traits(shares=True)),
        Part(Kind.PLANNER, "alpaserve", AlpaServePlanner, ALPASERVE, traits=Traits(shares=True)),
        Part(Kind.PLANNER, "muserve", muserve, ALPASERVE, traits=Traits(shares=True)),
        Part(Kind.PLANNER, "infadapter", InfAdapterPlanner, SLICES, traits=TICKS),
        Part(Kind.PLANNER, "ms_plus", MsPlusPlanner, SLICES, traits=TICKS),
        Part(Kind.PLANNER, "vpa_plus", VpaPlusPlanner, VPA, traits=TICKS),
        Part(Kind.PLANNER, "fixed_size", fixed_size, VPA, traits=TICKS),
        Part(Kind.PLANNER, "uniform", uniform, {**WATTWISER, "gpus_shared": 0.0}, traits=SHARES),
    )
}
