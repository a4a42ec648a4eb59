"""`trefoil up` and `trefoil down`: a whole system on this machine."""

import json
import os
import signal
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from trefoil.cli.options import OF_THE_POLICY, Config, PortOffset, Sets, Workers, non_empty, of_policy, parse_sets
from trefoil.cli.output import DEFAULT_STATE_DIR, AsJson, StateDir, respond, show
from trefoil.core.errors import StartError

UP_CONFIG: Final = Path("deploy/config/up.toml")


@of_policy
def up(
    config: Config = UP_CONFIG,
    policy: Annotated[str, typer.Option(help="Policy; default: the settings file's.")] = "",
    mode: Annotated[str, typer.Option(help="observe, advise or act; default: the settings file's.")] = "",
    parts: dict[str, str] = OF_THE_POLICY,
    workers: Workers = None,
    port_offset: PortOffset = 0,
    sets: Sets = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    as_json: AsJson = False,
) -> None:
    """Start Redis, the four services and a node on this machine, simulated or its own, and leave them running."""
    from trefoil.cli.run.scenario import System, load_system
    from trefoil.cli.run.services import check_served
    from trefoil.cli.run.state_directory import StatePaths
    from trefoil.cli.run.supervisor import start_detached
    from trefoil.cli.system_client import page_link
    from trefoil.installation import resolve_path

    overrides = parse_sets(sets) | non_empty(policy=policy, mode=mode) | parts
    overrides |= {"port_offset": port_offset} | ({} if workers is None else {"workers": workers})
    check_served(load_system(resolve_path(config), System, overrides))  # what is known to be wrong is said at once
    child, reading = start_detached(resolve_path(config), Path(state_dir), overrides)
    ready: dict[str, Any] = {}
    failure = ""
    try:
        with os.fdopen(reading) as pipe:
            for line in pipe:
                message = json.loads(line)
                if "say" in message and not as_json:
                    show(message["say"])
                failure = message.get("error", failure)
                ready = message if "ready" in message else ready
    except KeyboardInterrupt:
        typer.echo("interrupted: stopping what was started", err=True)
        os.kill(child.pid, signal.SIGTERM)
        child.wait()
        typer.echo("stopped", err=True)
        raise
    if not ready:
        child.wait()
        raise StartError(failure or f"the supervisor died; read {state_dir}/logs/supervisor.log")
    page = page_link(StatePaths(Path(state_dir).resolve()).running())
    address, answered_s = ready["ready"], ready["answered_s"]
    respond(
        as_json,
        {"inference": address, "first_answer_s": answered_s, "state_dir": state_dir, "page": page},
        f"up, and no slice serves on {address} yet: `trefoil plan` says why"
        if answered_s is None
        else f"serving on {address}: first answer {answered_s:.1f} s after the start",
        *([f"watch it in a browser: {page}"] if page else []),
        "look with `trefoil status`, load it with `trefoil load`, stop it with `trefoil down`",
    )


def down(state_dir: StateDir = DEFAULT_STATE_DIR, as_json: AsJson = False) -> None:
    """Stop what `trefoil up` started; also cleans up what a killed supervisor left."""
    from trefoil.cli.run.supervisor import stop_system

    lines: list[str] = []
    stopped = stop_system(Path(state_dir), lines.append)
    end = "stopped" if stopped else f"nothing runs in {state_dir}"
    respond(as_json, {"stopped": stopped, "said": lines}, *lines, end)
