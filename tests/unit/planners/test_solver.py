"""Program and solver: the safety net of CPU time, and what a solve without an answer is."""

import highspy
import numpy as np
import pytest

from controller.planners.exact import milp
from controller.planners.exact.milp import CpuLimitHit, GrowingProgram, Limits, Program


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
