"""Routers by the name that a Route gives them: one table, no registration by import.

`--router module:Class` loads a user's own; it is held to the same contract (tests/contract/test_router_contract.py).
"""

from typing import Final

from dispatcher.routers.fifo import Fifo
from dispatcher.routers.least_loaded import LeastLoaded
from dispatcher.routers.tiers import CarbonDis, CarbonDisSettings, DyBatch, LeastGrams, Random
from dispatcher.routers.weighted import Weighted
from trefoil.core.brains import Router
from trefoil.core.parts import Kind, Part, Parts, Traits

TIERS: Final = Traits(work_conserving=False, group=True)

ROUTERS: Final[Parts[Router]] = {
    # A class of `weighted` keeps its share also while another one has a slice to spare.
    "weighted": Part(Kind.ROUTER, "weighted", Weighted, traits=Traits(work_conserving=False, flow="shares")),
    "fifo": Part(Kind.ROUTER, "fifo", Fifo, traits=Traits(flow="pool")),
    "least_loaded": Part(Kind.ROUTER, "least_loaded", LeastLoaded),
    # A request may wait for its low-end GPU beside a high-end one that is free.
    "carbondis": Part(Kind.ROUTER, "carbondis", CarbonDis, settings=CarbonDisSettings, traits=TIERS),
    "dybatch": Part(Kind.ROUTER, "dybatch", DyBatch, traits=TIERS),
    "random": Part(Kind.ROUTER, "random", Random, traits=TIERS),
    "least_grams": Part(Kind.ROUTER, "least_grams", LeastGrams, traits=TIERS),
}
