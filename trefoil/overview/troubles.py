"""Troubles of a running system, a line each, as its controller knows them."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from trefoil.core.fleet import CATALOG, MISSING_MODEL, NodeStatus, failures
from trefoil.core.objective import BudgetRung
from trefoil.overview.budgets import budget_line
from trefoil.runtime import codec

TROUBLES: Final = (
    "disk: ",
    "plan: ",
    "unproven: ",
    MISSING_MODEL,
    f"{CATALOG}: ",
)  # of what a node lacks, what keeps it from following plans


def nodes_of(found: Mapping[str, Any]) -> list[NodeStatus]:
    """Nodes of an overview."""
    return [codec.from_plain(NodeStatus, node) for node in found["nodes"]]


def known_trouble_lines(found: Mapping[str, Any]) -> list[str]:
    """What does not work by an overview, a line each."""
    lines = [f"{node} is silent: what stands there is of then" for node in found["stale_nodes"]]
    for node in nodes_of(found):
        lines += [f"{node.node} cannot: {one}" for one in node.missing if one.startswith(TROUBLES)]
    lines += failure_lines(nodes_of(found))
    lines += [f"plan refused: {refusal}" for refusal in found["plans_refused"]]
    if found["rollout"] == "halted":
        lines.append(f"the rollout is halted: {found['rollout_why']}")
    if found["carbon_refused"]:
        lines.append(f"carbon is not planned by: {found['carbon_refused']}")
    lines += [f"planned around, {refused}" for refused in found["models_refused"] + found["places_refused"]]
    if found["catalog_refused"]:
        lines.append(f"controller: the model repository as it was read before stays: {found['catalog_refused']}")
    lines += [f"cannot command {unreached}" for unreached in found["agents_unreached"]]
    lines += [f"controller: {line}" for line in found["files_set_aside"]]
    lines += [f"not believed, {line}" for line in found["set_aside"]]
    refused = (row for row in found["budgets"] or () if row["rung"] == BudgetRung.REFUSED.text)
    lines += [f"requests are refused: {budget_line(row)}" for row in refused]
    lines += [f"{loan['device']} is lent to {loan['holder']}" for loan in found["loans"]]
    if found["disk_trouble"]:
        lines.append(f"nothing new is decided: {found['disk_trouble']}")
    return lines


def failure_lines(nodes: Iterable[NodeStatus]) -> list[str]:
    """Slices that have failed, a line for each reason."""
    return [f"{', '.join(names)} failed: {why}" for why, names in failures(nodes).items()]
