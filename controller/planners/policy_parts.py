"""Planner and forecaster of a policy: those of its row, or other ones by name or as module:Class.

A planner says what runs where and how much goes there. The row names router, queue and governor; `apply_policy_parts`
writes them onto any plan that the planner answers. Request classes bring their latency objectives from the
catalogue."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

from numpy.random import Generator

from controller.forecasters.table import FORECASTERS
from controller.planners.table import PLANNERS
from controller.rollout.core.rollout_inputs import rollout_refusal
from controller.settings import ControllerSettings
from trefoil.core.brains import Candidate, Decision, Forecaster, LivePlanner, Measurement, Planner, PlanView
from trefoil.core.catalog import Catalog
from trefoil.core.common import IdentityKey
from trefoil.core.errors import SettingError, one_of
from trefoil.core.parts import Kind, PartSettings, as_live_planner, load_own_parts, load_part
from trefoil.core.plan import NodePlan, Plan, Route
from trefoil.core.plan_check import sealed
from trefoil.core.policies import PRESETS, Policy, chosen, policy, preset_settings


def planner_of(override: str, row: Policy) -> Planner:
    """Planner of a policy's row (or `override`), whose plans bear the row's router, queue and governor.

    Raises:
        SettingError: a planner that is not there or cannot be made, or a setting that it has not.
    """
    row = chosen(row, {Kind.PLANNER: override}, {})
    part = load_part(Kind.PLANNER, row.planner, PLANNERS)
    settings = part.settings_of(row.settings.get(Kind.PLANNER, {}))
    return with_policy_parts(part.made(settings=settings, refuses=policy_refusal(rollout_refusal, row)), row)


def forecaster_of(row: Policy, **given: Any) -> Forecaster:
    """Forecaster of a policy's row.

    Args:
        given: what else a shell has for it, as `open_network`, `monotonic_s` or `truth`; it takes what it names.

    Raises:
        SettingError: a forecaster that is not there or cannot be made, or a setting that it has not.
    """
    part = load_part(Kind.FORECASTER, row.forecaster, FORECASTERS)
    return part.made(settings=part.settings_of(row.settings.get(Kind.FORECASTER, {})), **given)


def presets_of(row: Policy) -> tuple[str, ...]:
    """Presets whose settings a policy's planner has."""
    known = load_part(Kind.PLANNER, row.planner, PLANNERS).settings.model_fields.keys()
    return tuple(preset for preset in sorted(PRESETS) if preset_settings(row.planner, preset).keys() <= known)


def with_preset(row: Policy, preset: str) -> Policy:
    """Policy's row with the settings of a preset; "": as it is.

    Raises:
        SettingError: no preset of its planner; names those that there are.
    """
    if not preset:
        return row
    if preset not in (known := presets_of(row)):
        remedy = one_of(known, preset)
        raise SettingError(f"no preset of planner {row.planner}", field="preset", value=preset, remedy=remedy)
    return chosen(row, {}, {Kind.PLANNER: preset_settings(row.planner, preset)})


def shares_slices(row: Policy) -> bool:
    """Whether a policy may plan several families onto one slice."""
    part = load_part(Kind.PLANNER, row.planner, PLANNERS)
    return part.traits.shares or float(row.settings.get(Kind.PLANNER, {}).get("families_per_slice", 1)) > 1


def row_of(settings: ControllerSettings) -> Policy:
    """Policy's row as the controller's settings make it.

    Raises:
        NotFound, SettingError: no such policy.
    """
    row = chosen(policy(settings.policy), {Kind.PLANNER: settings.planner, Kind.FORECASTER: settings.forecaster}, {})
    row = chosen(with_preset(row, settings.preset), {}, settings.parts)  # the preset is of the planner that runs
    others = (Kind.ROUTER, Kind.QUEUE, Kind.GOVERNOR)
    load_own_parts({kind: [row.part(kind)] for kind in others if ":" in row.part(kind)}, {}, named=True)
    return row if settings.causes is None else replace(row, triggers=settings.causes)


def planner_settings(row: Policy) -> PartSettings | None:
    """Settings of a policy's planner, over which an objective's `params` go; None: an own planner that names none, and
    checks `params` itself.
    """
    part = load_part(Kind.PLANNER, row.planner, PLANNERS)
    own = part.name not in PLANNERS and part.settings is PartSettings
    return None if own else part.settings_of(row.settings.get(Kind.PLANNER, {}))


Refusal = Callable[[PlanView, Plan], str]


@dataclass(frozen=True, slots=True)
class PolicyPlanner:
    """Planner whose plans bear the router, queue and governor of its policy's row."""

    planner: Planner
    row: Policy

    def plan(self, view: PlanView, rng: Generator) -> Decision:
        """Plan as the planner decides, with the parts of the row."""
        return _decision(self.planner.plan(view, rng), view, self.row)


class PolicyLivePlanner:
    """Planner that measures, whose plans bear the parts of its row; it gets its candidate unchanged."""

    def __init__(self, planner: LivePlanner, row: Policy) -> None:
        self.planner, self.row = planner, row
        self._last_candidate: tuple[Candidate, Candidate] | None = (
            None  # with the row's parts, and as the planner made it
        )

    def plan(self, view: PlanView, rng: Generator) -> Decision:
        """Plan as the planner decides, with the parts of the row."""
        return _decision(self.planner.plan(view, rng), view, self.row)

    def asks(self, view: PlanView) -> bool:
        """Whether the planner wants to measure on the system."""
        return self.planner.asks(view)

    def ask(self, view: PlanView, rng: Generator) -> Candidate | Decision:
        """Ask the planner for its next candidate, or its decision, with the parts of the row."""
        step = self.planner.ask(view, rng)
        if not isinstance(step, Candidate):
            return _decision(step, view, self.row)
        found = replace(step, plan=apply_policy_parts(step.plan, view.catalog, self.row))
        self._last_candidate = found, step
        return found

    def tell(self, candidate: Candidate, measurement: Measurement) -> None:
        """Tell the planner what measuring its candidate gave."""
        known = self._last_candidate is not None and self._last_candidate[0] is candidate
        self.planner.tell(self._last_candidate[1] if self._last_candidate and known else candidate, measurement)

    def memory(self) -> Mapping[str, Any]:
        """Memory of the planner, as JSON."""
        return self.planner.memory()

    def recall(self, memory: Mapping[str, Any]) -> None:
        """Recall a memory and continue from it."""
        self.planner.recall(memory)


def with_policy_parts(planner: Planner, row: Policy) -> Planner:
    """Planner whose plans bear the row's parts; one that measures still does."""
    live = as_live_planner(planner)
    return PolicyPlanner(planner, row) if live is None else PolicyLivePlanner(live, row)


def policy_refusal(refuses: Refusal, row: Policy) -> Refusal:
    """Rollout check that sees plans as they will be, with the parts of the row."""
    return lambda view, plan: refuses(view, apply_policy_parts(plan, view.catalog, row))


def _decision(decision: Decision, view: PlanView, row: Policy) -> Decision:
    """Decision with the parts of the row.

    Raises:
        SettingError: a user's planner has answered something else.
    """
    if not isinstance(cast(object, decision), Decision):
        found = "nothing" if decision is None else f"a {type(decision).__name__}"
        remedy = "return a Decision (trefoil/core/brains.py)"
        raise SettingError(f"returned {found}", field=f"planner {row.planner}", remedy=remedy)
    return (
        decision
        if decision.plan is None
        else replace(decision, plan=apply_policy_parts(decision.plan, view.catalog, row))
    )


def apply_policy_parts(plan: Plan, catalog: Catalog, row: Policy) -> Plan:
    """Plan with router and queue of the row on every route, and its governor on every device that is planned."""
    params = tuple(sorted((name, float(value)) for name, value in row.settings.get(Kind.ROUTER, {}).items()))
    return _with_parts(IdentityKey(plan), IdentityKey(catalog), row.router, row.queue, row.governor, params)


@lru_cache(maxsize=16)  # of a plan that is checked by the planner and then decided on
def _with_parts(
    plan: IdentityKey[Plan],
    catalog: IdentityKey[Catalog],
    router: str,
    queue: str,
    governor: str,
    params: tuple[tuple[str, float], ...],
) -> Plan:
    nodes = tuple(_node(node, governor) for node in plan.value.nodes)
    routes = tuple(_route(route, catalog.value, router, queue, dict(params)) for route in plan.value.routes)
    return replace(plan.value, nodes=nodes, routes=routes)


@lru_cache(maxsize=4096)  # most nodes are planned as they were
def _node(node: NodePlan, governor: str) -> NodePlan:
    governed = tuple(replace(device, governor=governor) for device in node.devices)
    return sealed(replace(node, devices=governed), node.revision)


def _route(route: Route, catalog: Catalog, router: str, queue: str, params: Mapping[str, float]) -> Route:
    known = next((family for family in catalog.families if family.name == route.family), None)
    slo_ms = {name: latency_ms for name, (latency_ms, _) in known.classes.items() if name} if known else {}
    tokens = {name: slo for name, slo in known.token_classes.items() if name} if known else {}
    params = {**route.params, **params}
    return replace(route, router=router, queue=queue, class_slo_ms=slo_ms, class_token_slo=tokens, params=params)
