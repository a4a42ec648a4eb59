"""Mixed-integer program (HiGHS) and the one place that calls the solver: one thread, fixed seed, bounded nodes."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import highspy
import numpy as np
from numpy.typing import NDArray

from trefoil.core.errors import TrefoilError

INFINITY: Final = highspy.kHighsInf
SOLVED: Final = frozenset({highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kSolutionLimit})
# No point satisfies the constraints. `kModelEmpty`: there is no variable that could.
NO_POINT: Final = frozenset(
    {
        highspy.HighsModelStatus.kInfeasible,
        highspy.HighsModelStatus.kUnboundedOrInfeasible,
        highspy.HighsModelStatus.kModelEmpty,
    }
)
ANSWERS: Final = NO_POINT | {highspy.HighsModelStatus.kOptimal}  # of a linear program
# HiGHS 1.15's probing in presolve takes a few of our programs for infeasible that are not (a test holds one); without
# it they solve as fast as with it.
PROBING: Final = 1 << 15
FEASIBLE: Final = 2  # status of a point that satisfies all constraints
NODES_FEW: Final = 10
CPU_LIMIT_S: Final = 30.0  # a safety net, far above any bounded solve; reaching it keeps the last plan


class CpuLimitHit(TrefoilError):
    """The safety net was reached: the result would not replay, so there is none."""


class NothingFound(TrefoilError):
    """The solver ended without a point, its nodes spent or by a fault: whether there is one is not known."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one solve. Nodes bound the work, so that a decision replays."""

    nodes: int = 4000
    gap: float = 1e-4


@dataclass(frozen=True, slots=True)
class Result:
    """Values by variable, the objective, and the proven relative gap of this model.

    `bound`: nothing is below it. `reduced`: of a program without integers, what one more of each variable costs.
    """

    values: tuple[float, ...]
    objective: float
    gap: float
    bound: float
    reduced: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """Optimum of a linear program: its values by variable, what one more of each costs, the dual prices of its rows."""

    objective: float
    values: NDArray[np.float64]
    reduced: NDArray[np.float64]
    dual: NDArray[np.float64]


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

    def fixed(self, whole: Mapping[int, float]) -> Result | None:
        """Solve with every integer variable at its value, which is 0 for those not named; None: there is no point."""
        kept = self.lower, self.upper, self.integer
        self.lower, self.upper, self.integer = list(self.lower), list(self.upper), [False] * len(self.integer)
        for variable, flag in enumerate(kept[2]):
            if flag:
                self.lower[variable] = self.upper[variable] = whole.get(variable, 0.0)
        found = self.solve(Limits())
        self.lower, self.upper, self.integer = kept
        return found

    def solve(self, limits: Limits, start: Sequence[float] = ()) -> Result | None:
        """Solve, from a feasible point where one is given; None when no point satisfies the constraints.

        Raises:
            NothingFound: the solver ended before the first point.
            CpuLimitHit: the safety net was reached.
        """
        solver, began_s = self.solver(limits), time.thread_time()
        if start:
            known = highspy.HighsSolution()
            known.col_value = list(start)
            solver.setSolution(known)
        _limit_cpu(solver, began_s)
        solver.run()
        status = solver.getModelStatus()
        if status == highspy.HighsModelStatus.kInterrupt:
            raise CpuLimitHit(f"{len(self.cost)} variables, {len(self.low)} rows, {CPU_LIMIT_S:.0f} s of CPU")
        info = solver.getInfo()
        if status in NO_POINT:
            return None
        if status not in SOLVED or info.primal_solution_status != FEASIBLE:
            size = f"{len(self.cost)} variables, {len(self.low)} rows, {limits.nodes} nodes"
            raise NothingFound(f"{size}: HiGHS says {status.name}")
        objective, found = float(info.objective_function_value), solver.getSolution()
        if not any(self.integer):
            return Result(tuple(found.col_value), objective, 0.0, objective, tuple(found.col_dual))
        gap = max(0.0, float(info.mip_gap)) if math.isfinite(info.mip_gap) else math.inf
        return Result(tuple(found.col_value), objective, gap, min(objective, float(info.mip_dual_bound)))

    def solver(self, limits: Limits) -> highspy.Highs:
        """HiGHS with this program; the same bounds give the same answer."""
        solver = highspy.Highs()
        for option, setting in (
            ("output_flag", False),
            ("threads", 1),
            ("parallel", "off"),
            ("random_seed", 0),
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


def _limit_cpu(solver: highspy.Highs, began_s: float) -> None:
    """Let a solve end at the safety net, whichever part of HiGHS it is in: branches, simplex or interior point."""

    def check(at: highspy.HighsCallbackEvent) -> None:
        at.interrupt(time.thread_time() - began_s >= CPU_LIMIT_S)

    for part in (solver.cbMipInterrupt, solver.cbSimplexInterrupt, solver.cbIpmInterrupt):
        part.subscribe(check)


class GrowingProgram:
    """A linear program that gets more columns and other bounds, and is solved again from where it stood.

    Its user bounds the work; the limit of CPU time is the same safety net as that of `Program`.
    """

    def __init__(self, program: Program) -> None:
        self.variables = len(program.cost)
        self._began_s = time.thread_time()
        self._solver = program.solver(Limits())
        for option, setting in (("solver", "simplex"), ("presolve", "off")):  # a warm start needs the program as it is
            self._solver.setOptionValue(option, setting)
        _limit_cpu(self._solver, self._began_s)

    def add(self, cost: float, terms: dict[int, float]) -> int:
        """Add a variable of at least 0 with its coefficients by row; the answer is its index."""
        rows, values = np.array(list(terms), dtype=np.int32), np.array(list(terms.values()))
        self._solver.addCol(cost, 0.0, INFINITY, len(terms), rows, values)
        self.variables += 1
        return self.variables - 1

    def bound(self, variables: Sequence[int], lower: Sequence[float], upper: Sequence[float]) -> None:
        """Change the bounds of some variables."""
        if len(variables):
            at = np.array(variables, dtype=np.int32)
            self._solver.changeColsBounds(len(at), at, np.array(lower, dtype=float), np.array(upper, dtype=float))

    def solve(self) -> Point | None:
        """Solve; None when no point satisfies the constraints.

        Raises:
            CpuLimitHit: all solves together reached the safety net.
            NothingFound: the solver ended without an answer.
        """
        self._run()
        if self._solver.getModelStatus() not in ANSWERS:  # the basis that it began from can be to blame
            self._solver.clearSolver()
            self._run()
        status = self._solver.getModelStatus()
        if status in NO_POINT:
            return None
        if status != highspy.HighsModelStatus.kOptimal:
            raise NothingFound(f"{self.variables} variables: HiGHS says {status.name}")
        return self._point()

    def whole(self, variables: Sequence[int], limits: Limits, start: NDArray[np.float64] | None = None) -> Point | None:
        """Solve with these variables whole, as they are from then on, from a point where one is given; None: no point
        was found.

        Raises:
            CpuLimitHit: see `solve`.
        """
        at = np.array(variables, dtype=np.int32)
        self._solver.changeColsIntegrality(len(at), at, np.full(len(at), highspy.HighsVarType.kInteger.value, np.uint8))
        for option, setting in (
            ("presolve", "choose"),
            ("solver", "choose"),
            ("mip_max_nodes", limits.nodes),
            ("mip_rel_gap", limits.gap),
        ):
            self._solver.setOptionValue(option, setting)
        if start is not None:
            known = highspy.HighsSolution()
            known.col_value = list(start)
            self._solver.setSolution(known)
        self._run()
        return self._point() if self._solver.getInfo().primal_solution_status == FEASIBLE else None

    def _run(self) -> None:
        self._solver.run()
        if time.thread_time() - self._began_s >= CPU_LIMIT_S:
            raise CpuLimitHit(f"{self.variables} variables, {CPU_LIMIT_S:.0f} s of CPU")

    def _point(self) -> Point:
        found, objective = self._solver.getSolution(), self._solver.getInfo().objective_function_value
        return Point(float(objective), np.array(found.col_value), np.array(found.col_dual), np.array(found.row_dual))
