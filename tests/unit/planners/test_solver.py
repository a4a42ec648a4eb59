"""Program and solver: the safety net of CPU time, and what a solve without an answer is."""

import highspy
import numpy as np
import pytest

from controller.planners.exact import milp
from controller.planners.exact.milp import CpuLimitHit, GrowingProgram, Limits, NothingFound, Program


def program(integer: bool = False) -> Program:
    """Of 30 variables and rows, which presolve does not solve."""
    made, rng = Program(), np.random.default_rng(1)
    for _ in range(30):
        made.variable(-float(rng.random()), 0.0, 5.0, integer)
    for _ in range(30):
        made.row([(at, float(rng.random())) for at in range(30)], high=7.0)
    return made


@pytest.mark.parametrize("solver", ["simplex", "ipm"])
def test_the_safety_net_ends_linear_programs_too(monkeypatch, solver):
    made = program()
    known = made.solver(Limits())
    known.setOptionValue("solver", solver)
    monkeypatch.setattr(Program, "solver", lambda *_: known)
    monkeypatch.setattr(milp, "CPU_LIMIT_S", 0.0)
    with pytest.raises(CpuLimitHit):
        made.solve(Limits())


def test_the_safety_net_ends_a_growing_program_within_a_solve(monkeypatch):
    growing = GrowingProgram(program())
    monkeypatch.setattr(milp, "CPU_LIMIT_S", 0.0)
    with pytest.raises(CpuLimitHit):
        growing.solve()
    assert growing._solver.getModelStatus() == highspy.HighsModelStatus.kInterrupt


def wanting(most: float, high: float = 1.0) -> Program:
    """One variable up to `high`, in a row that wants 2 of it."""
    made = Program()
    made.row([(made.variable(-1.0, 0.0, high), 1.0)], low=2.0, high=most)
    return made


@pytest.mark.parametrize("solve", [lambda p: p.solve(Limits()), lambda p: GrowingProgram(p).solve()])
def test_only_what_no_point_satisfies_has_no_answer(monkeypatch, solve):
    assert solve(wanting(3.0)) is None
    assert solve(wanting(3.0, high=9.0)).objective == pytest.approx(-3.0)
    with pytest.raises(NothingFound, match="kUnbounded"):
        solve(wanting(milp.INFINITY, high=milp.INFINITY))
    for status in ("kSolveError", "kUnknown", "kIterationLimit", "kMemoryLimit"):
        monkeypatch.setattr(highspy.Highs, "getModelStatus", lambda _, s=status: getattr(highspy.HighsModelStatus, s))
        with pytest.raises(NothingFound, match=status):
            solve(wanting(3.0))
