"""Measure the operators of a graph on a node that serves nothing, through its power agent."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trefoil.cli.system_client import command_tls, make_channel, token_at
from trefoil.core.errors import CatalogError, SettingError
from trefoil.core.fleet import NodeStatus, why_missing

if TYPE_CHECKING:
    from trefoil.core.catalog import Variant
    from trefoil.profiler.assumed import OperatorCost
    from trefoil.profiler.places import NodePlace
    from trefoil.profiler.sensitivity import OperatorScore


@dataclass(frozen=True, slots=True)
class OperatorMeasurement:
    """What is to be measured, and where. `device`: a name or a type, "" any; `slice_type` "": the widest; `clock_mhz`
    0: the highest. `repository` is the agent's; `python` has ONNX Runtime."""

    model: Path
    agent: str
    device: str
    slice_type: str
    clock_mhz: int
    window_s: float
    replace: bool
    repository: Path
    state_dir: Path
    python: Path
    say: Callable[[str], None]

    async def scores(self, graph: Any, costs: "Sequence[OperatorCost]") -> "tuple[str, list[OperatorScore]]":
        """Type of the device, and scores of every operator: measured, else by the roofline of that device, with why.

        Raises:
            SettingError, NotFound: no device there can hold a clock. CatalogError: the model is not a family's.
            TrefoilError: it could not be measured.
        """
        from protos.power_agent.v1 import power_agent_pb2_grpc
        from trefoil.profiler.assumed import HALF
        from trefoil.profiler.exclusive_node import ExclusiveNode
        from trefoil.profiler.operator_models import repeated_operators
        from trefoil.profiler.operator_times import HeldClock, OperatorBench
        from trefoil.profiler.places import node_status
        from trefoil.profiler.sensitivity import board_of, measured_scores, modelled_scores
        from trefoil.runtime.clock import WallClock

        variant, clock, token = variant_of(self.model), WallClock(), token_at(self.agent, self.state_dir)
        operators, whys = repeated_operators(graph, costs)
        channel = make_channel(self.agent, token=token)
        try:
            stub = power_agent_pb2_grpc.PowerAgentStub(channel)
            node = await ExclusiveNode.acquire(stub, self.agent, clock, replace_running=self.replace)
            place = self._place(await node_status(stub))
            half_mhz = max((mhz for mhz in place.kind.clocks_mhz if mhz <= HALF * place.clock_mhz), default=0)
            if not half_mhz:
                raise SettingError(
                    "no clock is half of it", field="--clock", value=place.clock_mhz, remedy="a higher one"
                )
            held = HeldClock(stub, place.device, clock, f"trefoil family sensitivity (process {os.getpid()})")
            family, tls = self.model.absolute().parent.parent.name, command_tls() if token is None else None
            free = replace(place, clock_mhz=0)  # planned so: the lease alone holds the clock
            bench = OperatorBench(
                node, free, held, (place.clock_mhz, half_mhz), family, variant, self.repository, clock, self.window_s,
                tls,
            )  # fmt: skip
            times, failed = await bench.run(operators, self.python, self.say)
        finally:
            await channel.close()
        kind = f"{'a SIMULATED ' if node.simulated else ''}{place.kind.name}"
        source = (
            f"measured on {place.device}, {kind}, slice {place.shape.name}, at {place.clock_mhz} and {half_mhz} MHz"
        )
        modelled = modelled_scores(costs, board_of(place.kind))
        scores = measured_scores(modelled, times, whys | failed, half_mhz / place.clock_mhz, source)
        return place.kind.name, scores

    def _place(self, node: NodeStatus) -> "NodePlace":
        """The widest slice of the first device that can hold a clock."""
        from trefoil.profiler.places import places_on

        named = [one for one in node.devices if self.device in ("", one.device, one.type.name)]
        fit = [one for one in named if one.type.clock_lockable and one.type.clocks_mhz]
        whys = [why_missing(node.missing, "clock_lock", one.device) for one in fit]
        if not fit or all(whys):
            raise SettingError(
                f"no clock of it can be held: {whys[0] if fit else 'it has no such GPU'}", field="node",
                value=node.node, remedy="without --agent a roofline says what can be known",
            )  # fmt: skip
        able = [one for one, why in zip(fit, whys, strict=True) if not why]
        places = places_on(
            able, [self.slice_type] if self.slice_type else [], [self.clock_mhz] if self.clock_mhz else []
        )
        first = [one for one in places if one.device == places[0].device]
        return max(first, key=lambda place: place.shape.sm_count)


def variant_of(model: Path) -> "Variant":
    """Variant of a family that a model file belongs to.

    Raises:
        CatalogError: it is not a version of one.
    """
    from trefoil.runtime.repository import load_family

    version = model.absolute().parent
    family, _ = load_family(version.parent)
    found = next((one for one in family.variants if str(one.version) == version.name), None)
    if found is None:
        remedy = "name <family>/<version>/model.onnx of a family that the node knows (trefoil family import)"
        raise CatalogError("is not a version of a family", field="MODEL", value=str(model), remedy=remedy)
    return found
