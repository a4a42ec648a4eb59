"""Every number of every settings class, file and admin message: an extreme value is refused by name, or in range."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import pytest
from google.protobuf.message import Message
from pydantic import BaseModel, ValidationError

from carbon_feed.settings import CarbonFeedSettings
from controller.loop.core.objectives import accept_objective
from controller.planners.planner_settings import PlannerSettings
from controller.settings import ControllerSettings
from dispatcher.settings import DispatcherSettings
from power_agent.settings import PowerAgentSettings
from protos.carbon_feed.v1 import carbon_feed_pb2
from protos.controller.v1 import controller_pb2
from protos.dispatcher.v1 import dispatcher_pb2
from protos.power_agent.v1 import power_agent_pb2
from tests.support.plans import CATALOG
from tests.unit.controller.views import OBJECTIVE
from trefoil.cli.run.scenario import System
from trefoil.core.device_types import ClockRange
from trefoil.core.errors import InvalidInput, SettingError
from trefoil.core.outside.ranges import Ranged, complaint, range_of
from trefoil.runtime import repository
from trefoil.runtime.security.scopes import check_request
from trefoil.simulated_node.settings import NodeSettings
from trefoil.simulator.scenario.policy_check import TABLES
from trefoil.simulator.scenario.schema import Scenario

LARGE: Final = (10**400, -(16**5000))  # integers that are not a float, and that Python does not print
EXTREME: Final = (1e300, 1e-300, -1e300, 2**63 - 1, 2**62, *LARGE, math.nan, math.inf, -math.inf)
ROOTS: Final = (
    ControllerSettings, DispatcherSettings, PowerAgentSettings, CarbonFeedSettings, NodeSettings, System, Scenario,
    repository._Family, repository._Row, ClockRange,
    *(part.settings for table in TABLES.values() for part in table.values()),
)  # fmt: skip
MESSAGES: Final = (controller_pb2, dispatcher_pb2, power_agent_pb2, carbon_feed_pb2)


def models(annotation: Any, seen: set[type]) -> Iterator[type[Ranged]]:
    """Settings models that can stand in an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel) and annotation not in seen:
        seen.add(annotation)
        yield annotation
        for field in annotation.model_fields.values():
            yield from models(field.annotation, seen)
    for inner in getattr(annotation, "__args__", ()):
        yield from models(inner, seen)


SETTINGS: Final = [model for seen in [set()] for root in ROOTS for model in models(root, seen)]


def takes(model: type[BaseModel], name: str, value: object) -> bool:
    """Whether a model takes a value for a field, whatever else it misses."""
    try:
        model.model_validate({name: value})
    except SettingError as error:
        return not error.field.startswith(name)
    except ValidationError as error:
        return not any(each["loc"][:1] == (name,) for each in error.errors())
    return True


def numbers_in(annotation: Any) -> bool:
    """Whether a field holds a number, a list or a table of them."""
    return annotation in (int, float) or any(numbers_in(inner) for inner in getattr(annotation, "__args__", ()))


def shaped(annotation: Any, value: float) -> object:
    """A number as the field has it: alone, in a list, or in a table."""
    text = str(annotation)
    return {"any": value} if "dict[" in text else [value] if "tuple[" in text else value


@pytest.mark.parametrize("model", SETTINGS, ids=lambda model: model.__name__)
def test_settings_take_no_number_out_of_its_range(model: type[BaseModel]) -> None:
    assert issubclass(model, Ranged)
    for name, field in model.model_fields.items():
        if not numbers_in(field.annotation):
            continue
        for value in EXTREME:
            given = shaped(field.annotation, value)
            infinite = value not in LARGE and not math.isfinite(value)
            if infinite and model.__name__ == "TraceSettings":
                continue  # it takes one for a time that is not known
            if "dict[str, float | int | str | bool]" in str(field.annotation):
                continue  # settings of parts, which the part's own model judges
            wrong = infinite or complaint(name, value) != ""
            assert takes(model, name, given) is False or not wrong, (model.__name__, name, value)


def requests() -> Iterator[type[Message]]:
    for module in MESSAGES:
        for name in module.DESCRIPTOR.message_types_by_name:
            if name.endswith("Request"):
                yield getattr(module, name)


def spoilt(message: Message, value: float, depth: int = 0) -> Iterator[tuple[str, Message]]:
    """The message with one number spoilt, for each of its numbers, those of its parts too."""
    for field in message.DESCRIPTOR.fields:
        made = type(message)()
        if field.message_type is None and field.cpp_type in (field.CPPTYPE_DOUBLE, field.CPPTYPE_FLOAT):
            if field.is_repeated:
                getattr(made, field.name).append(value)
            else:
                setattr(made, field.name, value)
            yield field.name, made
        elif field.message_type is not None and field.message_type.GetOptions().map_entry:
            inner = field.message_type.fields_by_name["value"]
            if inner.message_type is None and inner.cpp_type == inner.CPPTYPE_DOUBLE:
                getattr(made, field.name)["any"] = value
                yield field.name, made
        elif field.message_type is not None and depth < 6 and not field.message_type.full_name.startswith("google."):
            empty = getattr(made, field.name).add() if field.is_repeated else getattr(made, field.name)
            for name, part in spoilt(empty, value, depth + 1):
                whole = type(message)()
                target = getattr(whole, field.name).add() if field.is_repeated else getattr(whole, field.name)
                target.CopyFrom(part)
                yield name, whole


@pytest.mark.parametrize("request_", list(requests()), ids=lambda each: each.DESCRIPTOR.full_name)
def test_no_admin_message_carries_a_number_out_of_its_range(request_: type[Message]) -> None:
    tiny = () if "plan" in request_.DESCRIPTOR.fields_by_name else (1e-300,)
    for value in (1e300, *tiny, -1e300, math.nan, math.inf, -math.inf):
        for name, message in spoilt(request_(), value):
            with pytest.raises(InvalidInput, match=name):
                check_request(message)


def test_a_plan_may_be_pinned_with_figures_that_rounding_left() -> None:
    request = controller_pb2.PinRequest()
    request.plan.optimality_gap = 1.628405126571282e-16
    route = request.plan.routes.add()
    route.targets.add().weight = 1e-17
    check_request(request)


OBJECTIVES: Final = {
    "slo_ms": (1e300, 1e-300, -5.0, math.nan, math.inf),
    "slo_quantile": (1e-12, 1 - 1e-12, 1e300, -0.5, math.nan),
    "pue": (1e300, 1e-300, 0.5, -1.0, math.nan, math.inf),
    "window_s": (1e-300, 1e300, -1.0, 1e9, math.nan),
    "replicas_min": (2**32 - 1, 2**31, 20_000),
    "spread_min": (2**32 - 1, 20_000),
    "lambda_weight": (-1e-300, 1e300, math.nan),
    "min_accuracy": (-1e-300, 1e300, math.nan),
    "hard_min_accuracy": (-1e-300, 1e300, math.nan),
    "base_intensity_g_per_kwh": (1e300, -1.0, 1e-300, math.inf),
    "base_j_per_request": (1e300, -1.0, 1e-300, math.nan),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_absurd_objectives_are_refused_by_field_value_and_remedy(name: str) -> None:
    for value in OBJECTIVES[name]:
        with pytest.raises(InvalidInput, match=rf"{name} = .*Remedy: "):
            accept_objective(replace(OBJECTIVE, **{name: value}), {}, CATALOG, PlannerSettings())


@pytest.mark.parametrize("value", [1e300, -1e300, 1e-300, math.nan, math.inf])
def test_absurd_constants_are_refused_also_those_of_an_own_planner(value: float) -> None:
    with pytest.raises(InvalidInput, match=r"params\.mine = .*Remedy: "):
        accept_objective(replace(OBJECTIVE, params={"mine": value}), {}, CATALOG, None)


def test_every_range_holds_zero_and_says_why() -> None:
    for name in ("window_s", "pue", "slo_ms", "anything_else"):
        assert complaint(name, 0) == complaint(name, True) == complaint(name, "text") == ""
        assert range_of(name).why in complaint(name, 1e300)
