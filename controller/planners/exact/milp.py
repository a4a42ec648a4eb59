"""Mixed-integer program (HiGHS) and the one place that calls the solver: one thread, fixed seed, bounded nodes."""

import math
import time
from dataclasses import dataclass, field
from typing import Final

import highspy
import numpy as np

INFINITY: Final = highspy.kHighsInf
SOLVED: Final = frozenset({highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kSolutionLimit})
# HiGHS 1.15's probing in presolve takes a few of our programs for infeasible that are not (a test holds one); without
# it they solve as fast as with it.
PROBING: Final = 1 << 15
NODES_FEW: Final = 10
CPU_LIMIT_S: Final = 30.0  # a safety net, far above any bounded solve; reaching it keeps the last plan
LONGER: Final = 4.0  # on a busy machine HiGHS, which counts wall time, gets so many times as much again


class CpuLimitHit(Exception):
    """The safety net was reached: the result would not replay, so there is none."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one solve. Nodes bound the work, so that a decision replays."""

    nodes: int = 4000
    gap: float = 1e-4


@dataclass(frozen=True, slots=True)
class Result:
    """Values by variable, the objective, and the proven relative gap of this model.

    `bound`: nothing lies below it. `reduced`: of a program without integers, what one more of each variable costs.
    """

    values: tuple[float, ...]
    objective: float
    gap: float
    bound: float
    reduced: tuple[float, ...] = ()


@dataclass(slots=True)
class Program:
    """min cost * x, lower <= x <= upper, low <= rows * x <= high, some x integer."""

    cost: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    index: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)

    def variable(self, cost: float, lower: float, upper: float, integer: bool = False) -> int:
        """Add a variable; the answer is its index."""
        assert lower <= upper, (lower, upper)
        self.cost.append(cost)
        self.lower.append(lower)
        self.upper.append(upper)
        self.integer.append(integer)
        return len(self.cost) - 1

    def row(self, terms: list[tuple[int, float]], low: float = -INFINITY, high: float = INFINITY) -> int:
        """Add a constraint; the answer is its index."""
        for index, value in terms:
            self.index.append(index)
            self.value.append(value)
        self.starts.append(len(self.index))
        self.low.append(low)
        self.high.append(high)
        return len(self.low) - 1

    def relax_counts(self) -> None:
        """Let counts be fractions; choices between two (0 or 1) stay whole."""
        self.integer = [flag and upper <= 1 for flag, upper in zip(self.integer, self.upper, strict=True)]

    def solve(self, limits: Limits) -> Result | None:
        """Solve; None when no point satisfies the constraints.

        Raises:
            CpuLimitHit: the safety net was reached.
        """
        wall_s = CPU_LIMIT_S
        while True:
            began_s = time.thread_time()
            solver = self._solver(limits, wall_s)
            solver.run()
            status = solver.getModelStatus()
            if status != highspy.HighsModelStatus.kTimeLimit:
                break
            if time.thread_time() - began_s >= CPU_LIMIT_S:
                raise CpuLimitHit(f"{len(self.cost)} variables, {len(self.low)} rows, {CPU_LIMIT_S:.0f} s of CPU")
            wall_s *= LONGER
        info = solver.getInfo()
        if status not in SOLVED or not math.isfinite(info.objective_function_value):
            return None
        if info.primal_solution_status != 2:  # 2 = feasible point: a node limit can end without one
            return None
        objective, found = float(info.objective_function_value), solver.getSolution()
        if not any(self.integer):
            return Result(tuple(found.col_value), objective, 0.0, objective, tuple(found.col_dual))
        gap = max(0.0, float(info.mip_gap)) if math.isfinite(info.mip_gap) else math.inf
        return Result(tuple(found.col_value), objective, gap, min(objective, float(info.mip_dual_bound)))

    def _solver(self, limits: Limits, wall_s: float) -> highspy.Highs:
        """Solver with this program; the same bounds give the same answer."""
        solver = highspy.Highs()
        for option, setting in (
            ("output_flag", False),
            ("threads", 1),
            ("parallel", "off"),
            ("random_seed", 0),
            ("time_limit", wall_s),
            ("mip_max_nodes", limits.nodes),
            ("mip_rel_gap", limits.gap),
            # A third of a medium program's time: trying branches out before its few nodes, and keeping cuts.
            ("mip_pscost_minreliable", 0 if limits.nodes <= NODES_FEW else 8),
            ("mip_pool_soft_limit", 500 if limits.nodes <= NODES_FEW else 10_000),
            # A third of the time of a small program, and the same plans without them (7 rates at 10 GPUs).
            ("mip_heuristic_run_feasibility_jump", False),
            ("mip_heuristic_run_rins", False),
            ("mip_heuristic_run_rens", False),
            ("mip_allow_restart", False),
            ("presolve_rule_off", PROBING),
            ("mip_feasibility_tolerance", 1e-7),
            ("primal_feasibility_tolerance", 1e-8),
        ):
            solver.setOptionValue(option, setting)
        solver.passModel(self._model())
        return solver

    def _model(self) -> highspy.HighsLp:
        model = highspy.HighsLp()
        model.num_col_ = len(self.cost)
        model.num_row_ = len(self.low)
        model.col_cost_ = np.array(self.cost)
        model.col_lower_ = np.array(self.lower)
        model.col_upper_ = np.array(self.upper)
        model.row_lower_ = np.array(self.low)
        model.row_upper_ = np.array(self.high)
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.array(self.starts)
        model.a_matrix_.index_ = np.array(self.index)
        model.a_matrix_.value_ = np.array(self.value)
        model.integrality_ = [
            highspy.HighsVarType.kInteger if flag else highspy.HighsVarType.kContinuous for flag in self.integer
        ]
        return model
