"""`trefoil family generate`: streams a text from a generative family."""

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trefoil.cli.output import DEFAULT_STATE_DIR, AsJson, StateDir, console, respond
from trefoil.cli.system_client import connect_system

if TYPE_CHECKING:
    from trefoil.api.answers import Answer


def generate(
    prompt: Annotated[str, typer.Argument(help='Text to go on from, e.g. "def parse(text):".')],
    family: Annotated[str, typer.Option(help="Generative family to ask.")] = "pydoc",
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens; default: as many as fit.")] = None,
    min_accuracy: Annotated[float, typer.Option(help="Floor of the variant that answers.", min=0.0, max=1.0)] = 0.0,
    address: Annotated[str, typer.Option(help="host:port of another endpoint than the running system's.")] = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
    as_json: AsJson = False,
) -> None:
    """Stream a text from a generative family, and say what it cost."""
    from trefoil.api.client import Client

    with Client(address or asyncio.run(_inference(Path(state_dir)))) as client:
        pieces, answer = [], None
        for piece in client.generate(family, prompt, max_tokens=max_tokens, min_accuracy=min_accuracy):
            pieces.append(piece.text)
            answer = piece.answer
            if not as_json:
                console().out(piece.text, end="")
    if answer is None:
        return
    told = {name: value for name, value in asdict(answer).items() if name != "outputs"}
    respond(as_json, {"prompt": prompt, "text": "".join(pieces)} | told, f"\n{_cost(answer)}")


async def _inference(state_dir: Path) -> str:
    async with connect_system(state_dir) as system:
        return system.launch.addresses["inference"]


def _cost(answer: "Answer") -> str:
    """Tokens, who made them, and what they cost, in a line."""
    made = f"{answer.tokens} tokens by {answer.variant or 'it does not say whom'}"
    if answer.joules is None:
        return f"{made}; energy not known: {answer.method or 'this endpoint gives no receipts'}"
    carbon = "carbon not known" if answer.grams is None else f"{1e3 * answer.grams:.3g} mg"
    return f"{made} on {answer.slice}: {answer.joules:.3g} J, {carbon} ({answer.basis}, estimated)"
