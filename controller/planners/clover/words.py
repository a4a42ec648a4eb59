"""Why a configuration was chosen, in one line per family."""

from collections.abc import Mapping

from controller.planners.clover.anneal import Search
from controller.planners.clover.objective import Goal, Outcome
from controller.planners.clover.pods import Pod
from controller.planners.clover.space import Setup


def layout(setup: Setup) -> str:
    """`4xb3 on 1g.5gb + 3xb1 on 2g.10gb`."""
    return " + ".join(f"{n}x{variant} on {shape}" for (variant, _, shape), n in setup.graph.weights)


def said(pod: Pod, search: Search, goal: Goal, setup: Setup, known: Mapping[str, Outcome]) -> str:
    """What was found, after how much looking, and why it stopped."""
    outcome = known[setup.key]
    carbon, accuracy = goal.gains(outcome)
    each = f" per device ({pod.space.devices} devices)" if pod.space.standardised else ""
    return (
        f"{pod.family}: {layout(setup)}{each}: f {goal.value(outcome):.3f} at lambda {goal.weight:g} and "
        f"{goal.intensity:.0f} g/kWh (carbon {carbon:+.1f} % less than BASE, accuracy {accuracy:+.2f} %), "
        f"{outcome.joules:.2f} J a request, p95 {outcome.p95_ms:.0f} ms; {search.evaluated} evaluations, "
        f"{search.measured} measured, {search.violating} against the objective; stopped: {search.stopped}"
    )
