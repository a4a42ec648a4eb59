"""Program and solver: the safety net of CPU time, and what a solve without an answer is."""

from dataclasses import replace

import highspy
import numpy as np
import pytest

from controller.planners.exact import ExactPlanner, milp
from controller.planners.exact.milp import CpuLimitHit, GrowingProgram, Limits, NothingFound, Program
from tests.support.planning import digits, objective, view
from trefoil.core.catalog import Catalog
from trefoil.core.demand import Demand
from trefoil.core.objective import ObjectiveMode


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


def test_a_growing_program_without_an_answer_is_solved_again_from_nothing(monkeypatch):
    answers = [highspy.HighsModelStatus.kUnknown]
    told = highspy.Highs.getModelStatus
    monkeypatch.setattr(highspy.Highs, "getModelStatus", lambda self: answers.pop() if answers else told(self))
    assert GrowingProgram(wanting(3.0, high=9.0)).solve().objective == pytest.approx(-3.0)
    assert not answers


def test_two_families_are_planned_as_one_program_where_the_search_among_mixes_ends_without_an_answer(monkeypatch):
    one = view(
        catalog=twins(),
        wanted=[objective(family=name, mode=ObjectiveMode.INSTANT, slo_ms=75.0) for name in ("a", "b")],
        demand=[Demand(name, "", 10.0, 12.0) for name in ("a", "b")],
    )

    def ended(_self):
        raise NothingFound("kUnknown")

    monkeypatch.setattr(GrowingProgram, "solve", ended)
    decision = ExactPlanner().plan(one, np.random.default_rng(0))
    assert decision.degraded == ""
    assert {route.family for route in decision.plan.routes} == {"a", "b"}


def twins() -> Catalog:
    """Two families alike."""
    known = digits()
    families = tuple(replace(known.families[0], name=name) for name in ("a", "b"))
    return Catalog(families, tuple(replace(row, family=f.name) for f in families for row in known.rows))
