"""`trefoil lengths`: the predictor of answers' lengths that queue `ssjf` goes by."""

from pathlib import Path
from typing import Annotated

import typer

from trefoil.cli.guarded import Guarded
from trefoil.cli.options import folder_to_write
from trefoil.cli.output import AsJson, grid, respond, slow

app = typer.Typer(cls=Guarded, no_args_is_help=True, help="Lengths of generated answers, predicted.")


@app.callback()
def lengths() -> None:
    """A group, though of one command."""


@app.command("train")
@slow
def train(
    logs: Annotated[list[Path], typer.Argument(help='JSON lines: "prompt", "tokens" or "answer", "family".')],
    family: Annotated[str, typer.Option(help="Family of lines that name none.")] = "",
    out: Annotated[
        Path, typer.Option(help="Folder for the dispatcher's setting lengths_folder.", callback=folder_to_write)
    ] = Path("out/lengths"),
    as_json: AsJson = False,
) -> None:
    """Train one predictor for all families of a log of prompts and answers. Seconds to minutes on one core."""
    from trefoil.profiler.length_training import read_log, table
    from trefoil.profiler.length_training import train as run_training

    card = run_training([one for log in logs for one in read_log(log, family)], out)
    shown = grid("", ("family", "prompts kept back", "classes right", "rank correlation"), table(card))
    use = f"{out}: trained on {card['trained']:,} prompts. Use it with dispatcher.lengths_folder={out}"
    respond(as_json, card, shown, use)
