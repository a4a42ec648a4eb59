"""`trefoil deploy env`: look at this machine, and write the `.env` of docker-compose.yml, which says what was seen."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer

from trefoil.cli.guarded import Guarded
from trefoil.cli.output import AsJson, respond
from trefoil.core.errors import InvalidInput, SettingError

app = typer.Typer(cls=Guarded, no_args_is_help=True, help="Deployments by Docker Compose (docs/howto/compose.md).")

PROFILES: Final = ("", "node", "gpu")
MODELS: Final = Path("model_repository")


@app.callback()
def deploy() -> None:
    """Keep `env` a separate command."""


@app.command()
def env(
    output: Annotated[Path, typer.Option("--output", "-o", help="Where it is written.")] = Path(".env"),
    profile: Annotated[str, typer.Option(help="node: join another host's Redis; gpu: this machine's GPUs.")] = "",
    models: Annotated[Path, typer.Option(help="Model repository.")] = MODELS,
    node: Annotated[str, typer.Option(help="Name of this node.")] = "node0",
    advertise_host: Annotated[str, typer.Option(help="How others reach this host; default: its address.")] = "",
    redis_url: Annotated[str, typer.Option(help="Redis of the first host: rediss://HOST:PORT.")] = "",
    image: Annotated[str, typer.Option(help="Image with a Triton for --profile gpu; default: NVIDIA's.")] = "",
    sets: Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A variable of it.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Look at this machine and write a commented .env; refuses what could not start, and writes nothing then."""
    from trefoil.cli.deploy.env_file import GIVEN, render, values_of
    from trefoil.cli.deploy.machine import Wanted, check, look
    from trefoil.runtime.files import replace_file

    if profile not in PROFILES:
        raise InvalidInput("no such profile", field="--profile", value=profile, remedy="node, gpu, or leave it out")
    if output.exists() and not force:
        raise InvalidInput("is there already", field="--output", value=str(output), remedy="--force, or another name")
    given = {}
    for assignment in sets or ():
        name, equals, value = assignment.partition("=")
        if not equals or name not in GIVEN:
            known = ", ".join(GIVEN)
            raise SettingError("no such variable", field="--set", value=assignment, remedy=f"NAME=VALUE with {known}")
        given[name] = value
    wanted = Wanted(profile, models, node, advertise_host, redis_url, image, given)
    machine = look(Path.cwd())
    values = values_of(wanted, machine, os.getcwd())
    check(wanted, values, machine)
    replace_file(output, render(values, machine), mode=0o600)
    tag = values["TREFOIL_TAG"]  # one that was not rolled out is refused by `up`
    start = "docker compose up -d" if tag == GIVEN["TREFOIL_TAG"][0] else f"deploy/compose/upgrade.sh {tag}"
    document = {"written": str(output), "values": values, "machine": asdict(machine)}
    respond(as_json, document, f"{output} is written: {start}")
