"""Redis as JSON: every key of a cluster, decoded by what stands under it (docs/state.md)."""

from collections.abc import Mapping
from typing import Any, Final

from trefoil.cli.attached import as_json
from trefoil.core.carbon import CarbonForecast, CarbonRatio, CarbonReading, CarbonScores
from trefoil.core.common import Lease
from trefoil.core.demand import LoadForecast, LoadWindow, ScaleSignal, TableAck
from trefoil.core.energy import EnergySample
from trefoil.core.fleet import NodeStatus
from trefoil.core.objective import Objective
from trefoil.core.plan import DecisionRecord, NodePlan, Plan, Rollout
from trefoil.runtime.state import State

# Longest prefix first; what is listed in neither table is shown as text.
VALUES: Final[Mapping[str, type]] = {
    "carbon:now:": CarbonReading,
    "carbon:forecast:": CarbonForecast,
    "carbon:ratio:": CarbonRatio,
    "carbon:scores:": CarbonScores,
    "lease:": Lease,
    "objective:": Objective,
    "plan:node:": NodePlan,
    "plan": Plan,
    "rollout": Rollout,
    "node:": NodeStatus,
    "ack:": TableAck,
    "forecast:load:": LoadForecast,
    "signal:scale:": ScaleSignal,
}
STREAMS: Final[Mapping[str, type]] = {
    "carbon:history:": CarbonReading,
    "decisions": DecisionRecord,
    "demand:": LoadWindow,
    "energy:": EnergySample,
    "load:": LoadWindow,
}


async def dump(state: State, prefix: str, last: int) -> dict[str, Any]:
    """All keys that begin so, sorted; of streams the newest entries."""
    found: dict[str, Any] = {}
    for key in await state.names(state.keys.prefix + prefix):
        short = key.removeprefix(state.keys.prefix)
        value_kind, stream_kind = _kind(VALUES, short), _kind(STREAMS, short)
        if value_kind is not None:
            value: Any = await state.get(key, value_kind)
            found[short] = None if value is None else as_json(value)
        elif stream_kind is not None:
            entries: list[tuple[str, Any]] = await state.tail(key, stream_kind, last)
            found[short] = [as_json(entry) for _, entry in entries]
        else:
            found[short] = await state.raw(key, last)
    return found


def _kind(table: Mapping[str, type], key: str) -> type | None:
    for prefix, kind in table.items():
        if key == prefix or (prefix.endswith(":") and key.startswith(prefix)):
            return kind
    return None
