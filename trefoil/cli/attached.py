"""A second command's view of a running system: its Redis, its admin ports, its launch file."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from google.protobuf.message import Message

from protos.controller.v1 import controller_pb2, controller_pb2_grpc
from protos.dispatcher.v1 import dispatcher_pb2, dispatcher_pb2_grpc
from trefoil.cli.layout import Launch, Layout
from trefoil.core.carbon import CarbonReading
from trefoil.core.errors import InvalidInput, NotFound, SettingError
from trefoil.core.fleet import NodeStatus
from trefoil.core.objective import ActMode, Objective, ObjectiveMode
from trefoil.core.plan import Plan
from trefoil.runtime import codec, rpc
from trefoil.runtime.clock import WallClock
from trefoil.runtime.state import State

RPC_TIMEOUT_S: Final = 10.0
RECEIPT_HOURS: Final = 2


class Attached:
    """Open for the length of one command."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.state = State.connect(launch.redis_url, launch.cluster, clock=WallClock())
        self._channel = rpc.channel(launch.addresses["controller"])
        self.controller = controller_pb2_grpc.ControllerStub(self._channel)

    async def close(self) -> None:
        await self._channel.close()
        await self.state.close()

    async def ask(self, method: str, request: Any) -> Any:
        """One RPC to the controller, with a deadline; its errors come back as what they were."""
        return await rpc.call(getattr(self.controller, method), request, RPC_TIMEOUT_S)

    async def plan(self) -> Any:
        """GetPlanResponse: plan, rollout, mode, frozen, pinned."""
        return await self.ask("GetPlan", controller_pb2.GetPlanRequest())

    async def explain(self, family: str) -> Any:
        """ExplainResponse of a family."""
        return await self.ask("Explain", controller_pb2.ExplainRequest(family=family))

    async def explain_request(self, family: str, params: Mapping[str, str]) -> Any:
        """ExplainRequestResponse of the dispatcher: how targets stand for a request with these parameters."""
        async with rpc.channel(self.launch.addresses["dispatcher"]) as channel:
            asked = dispatcher_pb2.ExplainRequestRequest(family=family, params=params)
            return await rpc.call(dispatcher_pb2_grpc.DispatcherStub(channel).ExplainRequest, asked, RPC_TIMEOUT_S)

    async def objective(self, family: str) -> Objective:
        """The objective in force."""
        answer = await self.ask("GetObjective", controller_pb2.GetObjectiveRequest(family=family))
        stored: Objective = codec.from_proto(answer.objective)
        return stored

    async def set_objective(self, objective: Objective) -> tuple[Objective, str]:
        """Store it unless somebody else changed it since; returns it with its new number, and how it is degraded."""
        request = controller_pb2.SetObjectiveRequest(
            objective=codec.to_proto(objective), expected_number=objective.number
        )
        answer = await self.ask("SetObjective", request)
        return codec.from_proto(answer.objective), answer.degraded

    async def nodes(self) -> list[NodeStatus]:
        """What agents publish, by name."""
        found = await self.state.scan(self.state.keys.node_prefix(), NodeStatus)
        return [found[key] for key in sorted(found)]

    async def carbon(self) -> list[CarbonReading]:
        """The last reading of each zone."""
        found = await self.state.scan(self.state.keys.carbon_now_prefix(), CarbonReading)
        return [found[key] for key in sorted(found)]

    async def receipts(self) -> list[dict[str, Any]]:
        """By family what receipts say and what was metered [J], in the hour under way and the one before.

        `residual`: receipts over metered, less 1; None where nothing was metered.
        """
        hours: dict[str, list[str]] = {}
        prefix = self.state.keys.totals_prefix()
        for key in await self.state.names(prefix):
            hours.setdefault(key.removeprefix(prefix).rpartition(":")[0], []).append(key)
        found = []
        for family, keys in sorted(hours.items()):
            totals = [await self.state.totals(key) for key in sorted(keys)[-RECEIPT_HOURS:]]
            told_j = sum(each.get("receipt_joules", 0.0) for each in totals)
            active_j = sum(each.get("active_joules", 0.0) for each in totals)
            residual = told_j / active_j - 1 if active_j else None
            found.append({"family": family, "receipt_j": told_j, "active_j": active_j, "residual": residual})
        return found


@asynccontextmanager
async def attach(state_dir: Path) -> AsyncIterator[Attached]:
    """Connect to the system that runs in a state directory.

    Raises:
        NotFound: none runs there.
    """
    attached = Attached(Layout(state_dir.resolve()).running())
    try:
        yield attached
    finally:
        await attached.close()


def changed_objective(
    now: Objective,
    *,
    min_accuracy: float | None,
    slo_ms: float | None,
    slo_percentile: float | None,
    lambda_weight: float | None,
    params: Mapping[str, float] | None = None,
) -> Objective:
    """The stored objective with what was given on the command line; `lambda_weight` selects lambda mode. `params` are
    the policy's constants; 0 takes one back.

    Raises:
        SettingError: nothing was given, or both a floor and a lambda.
    """
    changes: dict[str, Any] = {}
    if lambda_weight is not None and min_accuracy is not None:
        raise SettingError(
            "lambda mode trades accuracy freely, a floor binds it",
            field="--lambda",
            value=lambda_weight,
            remedy="give either --lambda or --min-accuracy",
        )
    if lambda_weight is not None:
        changes |= {"lambda_weight": lambda_weight, "mode": ObjectiveMode.LAMBDA}
    if min_accuracy is not None:
        changes["min_accuracy"] = min_accuracy
        changes["hard_min_accuracy"] = min(now.hard_min_accuracy, min_accuracy)
        if now.mode is ObjectiveMode.LAMBDA:
            changes["mode"] = ObjectiveMode.BUDGET
    if slo_ms is not None:
        changes["slo_ms"] = slo_ms
    if slo_percentile is not None:
        changes["slo_quantile"] = slo_percentile / 100
    if params:
        changes["params"] = {name: value for name, value in {**now.params, **params}.items() if value}
    if not changes:
        raise SettingError(
            "nothing to change",
            field="objective set",
            remedy="give --min-accuracy, --slo-ms, --slo-percentile, --lambda or --param",
        )
    return replace(now, **changes)


def as_json(value: Any) -> Any:
    """Core objects, messages and containers of them as plain JSON values; `codec.from_json` reads them back."""
    if isinstance(value, dict):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    return codec.to_plain(codec.from_proto(value) if isinstance(value, Message) else value)


def read_plan(path: Path) -> Plan:
    """A plan as `trefoil plan --json` prints it (the whole answer, or its `plan`).

    Raises:
        NotFound, InvalidInput: naming what is wrong with the file.
    """
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise NotFound(
            "no such file", field="FILE", value=str(path), remedy="trefoil plan --json > plan.json"
        ) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(
            f"not JSON ({error})", field="FILE", value=str(path), remedy="trefoil plan --json > plan.json"
        ) from error
    if isinstance(values, dict) and isinstance(values.get("plan"), dict):
        values = values["plan"]
    plan: Plan = codec.from_json(Plan, json.dumps(values))
    return plan


MODES: Final = {"observe": ActMode.OBSERVE, "advise": ActMode.ADVISE, "act": ActMode.ACT}
