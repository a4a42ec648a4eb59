"""Settings of planners: what every planner has, and what those of the exact program have."""

from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import ClassVar, Literal, Self

from pydantic import Field

from trefoil.core.objective import Objective
from trefoil.core.parts import PartSettings


class PlannerSettings(PartSettings):
    """Settings of every planner that ships. An objective's `params` go over them for its family."""

    FLEET: ClassVar[frozenset[str]] = frozenset({"start_s", "rate_floor_per_s", "tick_s", "credits"})
    REMOVED: ClassVar[Mapping[str, str]] = {
        "batches": "leave it out: a family whose config.pbtxt has dynamic_batching is planned with batches",
        "credits_per_batch": "set credits, or leave it out: where batches form, it is two of the largest",
        "slo_over_p95": "leave it out: all planners count on the rate that a slice carries within the SLO",
    }

    overhead_ms: float = Field(default=2.0, ge=0)
    """From a client to the dispatcher and back: taken off the objectives of latency and TTFT."""
    transport_gap_ms: float = Field(default=2.0, ge=0)
    """From the dispatcher to a slice and back: the slice is taken, but does not compute."""
    start_s: float = Field(default=1.0, ge=0)
    """Time to start a slice, in addition to loading its model: the instance and a Triton."""
    rate_floor_per_s: float = Field(default=1.0, ge=0)
    """Load of a family that is assumed while its demand is not known."""
    accuracy_margin: float = Field(default=0.0, ge=-0.1, le=0.1)
    """Planned above the accuracy floor, because what is measured is a sample."""
    reaction_s: float = Field(default=10.0, ge=0)
    """From a decision to the slices that it asks for."""
    tick_s: float = Field(default=60.0, gt=0)
    """Period after which the planner asks to be run again."""
    queue_requests_max: int = Field(default=512, ge=0)
    """Requests of a family that may wait in one dispatcher worker."""
    queue_bytes_max: int = Field(default=64 * 2**20, ge=0)
    """Bytes of a family that may wait in one dispatcher worker."""
    credits: int = Field(default=0, ge=0)
    """Requests of a family in flight on one slice; 0: two of the largest batch where the family forms batches, else by
    the slice's law."""
    items_sd: float = Field(default=0.0, ge=0)
    """Standard deviation of the items of a request, which scatters service times."""

    def of(self, objective: Objective) -> Self:
        """Settings of a family: these, with its objective's `params` over them.

        Raises:
            SettingError: a value that the setting cannot have.
        """
        if not objective.params:
            return self
        return _over(self, tuple(sorted(objective.params.items())))  # type: ignore[return-value]

    def of_all(self, objectives: Iterable[Objective], names: Collection[str] = ()) -> Self:
        """Settings of the whole fleet: these, with the `params` of every objective over them (`names`; () = all).
        Of several families the last one's hold; raises as `of`.
        """
        told = {name: value for one in objectives for name, value in one.params.items() if not names or name in names}
        return _over(self, tuple(sorted(told.items())))  # type: ignore[return-value]


@lru_cache(maxsize=4096)
def _over(settings: PlannerSettings, params: tuple[tuple[str, float], ...]) -> PlannerSettings:
    known = {name: value for name, value in params if name in type(settings).model_fields}
    return settings.over(known) if known else settings


class ExactSettings(PlannerSettings):
    """Settings of `exact` and `static_mix`."""

    FLEET: ClassVar[frozenset[str]] = PlannerSettings.FLEET | {
        "families_per_slice",
        "demand_step",
        "solver_nodes",
        "solver_gap",
        "frontier_gap",
        "frontier_solves",
        "kernel_requests",
    }

    clocks: Literal["highest", "planned", "governed"] = "highest"
    """GPU clocks: the highest, planned, or planned as the least that a governor may choose. Likewise power limits,
    where a profile has them."""
    families_per_slice: int = Field(default=1, ge=1, le=8)
    """Families that may share a slice, where the law of interference allows it."""
    demand_step: float = Field(default=0.0, ge=0)
    """Above 1: demand is rounded up to a power of it, and aims to a grid, for long simulations."""
    solver_nodes: int = Field(default=4000, ge=1)
    """Nodes of the branch-and-bound tree that one program may take."""
    solver_gap: float = Field(default=1e-3, ge=0)
    """Relative gap at which a program is solved."""
    frontier_gap: float = Field(default=5e-3, ge=0)
    """Relative gap of the programs that find the price of accuracy."""
    frontier_solves: int = Field(default=6, ge=1)
    """Most programs that find the price of accuracy."""
    kernel_requests: int = Field(default=5000, ge=100)
    """Requests of the sample that checks the latency objective."""
