"""Several objectives and the fleet's watt cap, set together: all or none; kept over a restart; refused with reason."""

from dataclasses import replace

from protos.controller.v1 import controller_pb2 as pb
from tests.support.virtual.planner import FAMILY
from tests.support.virtual.system import System, history
from trefoil.core.errors import TrefoilError
from trefoil.core.objective import ObjectiveMode
from trefoil.runtime import codec


def sets(
    system: System, seen: dict, name: str, *changes: dict, number: int = 0, max_watts: float | None = None
) -> None:
    """Ask the controller for objectives that differ so from the stored one; what it answers, or why not, is seen."""
    stored = system.controller.service._loop.core.objectives[FAMILY]
    wanted = [
        pb.ObjectiveChange(objective=codec.to_proto(replace(stored, **change)), expected_number=number)
        for change in changes
    ]
    asks(system, seen, name, "SetObjectives", pb.SetObjectivesRequest(objectives=wanted, max_watts=max_watts))


def asks(system: System, seen: dict, name: str, method: str, request: object) -> None:
    """What a method of the controller answers, or the error that refuses it, is seen."""
    place = system.controller

    async def ask() -> None:
        try:
            seen[name] = await getattr(place.service, method)(request, None)
        except TrefoilError as error:
            seen[name] = str(error)

    place.process.start(system.loop, ask())


def in_force(system: System) -> tuple:
    core = system.controller.service._loop.core
    return dict(core.objectives), core.max_watts


def test_one_that_cannot_be_accepted_leaves_all_as_they_are():
    seen = {}

    def faults(system: System) -> None:
        def wrong() -> None:
            seen["before"] = in_force(system)
            sets(system, seen, "unknown", {"slo_ms": 300.0}, {"family": "cats"}, max_watts=700.0)
            sets(system, seen, "twice", {"slo_ms": 300.0}, {"slo_ms": 310.0})
            sets(system, seen, "late", {"slo_ms": 300.0}, number=7)
            sets(system, seen, "nothing")
            asks(system, seen, "empty", "SetObjectives", pb.SetObjectivesRequest(objectives=[pb.ObjectiveChange()]))
            sets(system, seen, "watts", max_watts=float("-1"))

        system.loop.call_later(6.0, wrong)
        system.loop.call_later(8.0, lambda: seen.update(after=in_force(system)))
        system.loop.call_later(9.0, lambda: sets(system, seen, "right", {"slo_ms": 300.0}, number=1, max_watts=5000.0))

    broken, system = history(3, faults)
    assert not broken
    assert "family cats: family = 'cats': no such family in the model repository" in seen["unknown"]
    assert "given twice" in seen["twice"]
    assert "has number 1, not 7" in seen["late"]
    assert "max_watts" in seen["nothing"]
    assert seen["empty"] == "objectives.objective: missing. Remedy: give each change one"
    assert "max_watts = -1.0" in seen["watts"]
    assert seen["after"] == seen["before"]
    answer = seen["right"]
    assert (answer.objectives[0].slo_ms, answer.objectives[0].number, answer.max_watts) == (300.0, 2, 5000.0)
    objectives, max_watts = in_force(system)
    assert (objectives[FAMILY].slo_ms, max_watts) == (300.0, 5000.0)


def test_objectives_of_one_family_are_answered_alone_and_an_unknown_family_is_refused():
    seen = {}

    def faults(system: System) -> None:
        def read() -> None:
            for family in ("", FAMILY, "ghost"):
                asks(system, seen, family, "GetObjectives", pb.GetObjectivesRequest(family=family))

        system.loop.call_later(6.0, read)

    broken, _ = history(3, faults)
    assert not broken
    assert [each.family for each in seen[FAMILY].objectives] == [FAMILY]
    assert seen[FAMILY] == seen[""]
    assert seen["ghost"].startswith("no objective for family 'ghost'. Remedy: ")


def test_a_plan_above_the_cap_is_refused_what_runs_stays_and_the_cap_outlives_the_controller():
    seen = {}

    def faults(system: System) -> None:
        def plan() -> object:
            return system.controller.service._loop.core.current

        async def explained() -> None:
            seen["why"] = (await system.controller.service.Explain(pb.ExplainRequest(), None)).advice
            seen["kept"] = plan()

        async def shown() -> None:
            seen["shown"] = await system.controller.service.GetObjectives(pb.GetObjectivesRequest(), None)

        def start(coroutine) -> None:
            system.controller.process.start(system.loop, coroutine)

        system.loop.call_later(6.0, lambda: seen.update(before=plan()))
        system.loop.call_later(6.1, lambda: sets(system, seen, "low", max_watts=10.0))
        system.loop.call_later(9.0, lambda: start(explained()))
        system.loop.call_later(9.5, system.controller.kill)
        system.loop.call_later(10.0, system.controller.start)
        system.loop.call_later(14.0, lambda: start(shown()))
        system.loop.call_later(15.0, lambda: sets(system, seen, "none", max_watts=0.0))

    broken, system = history(5, faults)
    assert not broken
    assert seen["low"].degraded.startswith("fleet.max_watts = 10.0: the plan takes ")
    assert "fleet.max_watts = 10.0: the plan takes " in seen["why"]
    assert "the last good plan stays" in seen["why"]
    assert seen["kept"].nodes == seen["before"].nodes
    assert seen["shown"].max_watts == 10.0
    assert [each.family for each in seen["shown"].objectives] == [FAMILY]
    assert seen["shown"].objectives[0].mode == ObjectiveMode.INSTANT
    assert seen["none"].degraded == ""
    assert in_force(system)[1] == 0.0
