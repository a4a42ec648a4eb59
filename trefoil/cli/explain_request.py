"""`trefoil explain-request`: where a request would go now, and why; nothing is sent."""

from typing import Annotated, Any

import typer

from trefoil.cli.asking import DEFAULT_STATE_DIR, ask
from trefoil.cli.output import AsJson, StateDir, console, grid, print_json
from trefoil.cli.overrides import pairs
from trefoil.runtime import codec


def explain_request(
    params: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME=VALUE]...",
            help="Parameters of the request, e.g. trefoil_min_accuracy=0.95 trefoil_class=gold priority=1.",
        ),
    ] = None,
    family: Annotated[str, typer.Option(help="Family; default: the one that is served.")] = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
    as_json: AsJson = False,
) -> None:
    """Show to which slice the dispatcher would give a request now, how every other stands, and why."""
    asked = pairs("NAME=VALUE", params)
    answer = ask(state_dir, lambda system: system.explain_request(family or system.launch.family, asked))
    if as_json:
        print_json(document(answer))
        return
    out = console()
    out.print(answer.why, markup=False, soft_wrap=True)
    out.print(f"router {answer.router}, {answer.waiting} waiting, table {answer.table.epoch}.{answer.table.number}")
    rows = [
        (
            one.target.slice.device,
            one.target.slice.slice_type,
            one.target.variant,
            f"{one.target.accuracy:.4f}" if one.target.accuracy else "-",
            f"{100 * one.target.weight:.1f} %",
            f"{one.in_flight}/{one.target.credits}",
            f"{one.score:.2f}" if one.eligible else "-",
            one.why,
        )
        for one in answer.targets
    ]
    columns = ("device", "slice", "variant", "accuracy", "share", "taken", "score", "why")
    out.print(grid("Targets, best first", columns, rows))


def document(answer: Any) -> dict[str, Any]:
    """The answer as plain JSON values; a score is null where the target cannot have the request at once."""
    return {
        "why": answer.why,
        "router": answer.router,
        "waiting": answer.waiting,
        "table": codec.to_plain(codec.from_proto(answer.table)),
        "targets": [
            {
                "target": codec.to_plain(codec.from_proto(one.target)),
                "eligible": one.eligible,
                "score": one.score if one.eligible and one.score != float("inf") else None,
                "in_flight": one.in_flight,
                "why": one.why,
            }
            for one in answer.targets
        ],
    }
