"""Output of commands: JSON for programs, tables for people, one line for errors."""

import csv
import functools
import io
import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final, ParamSpec, TypeVar

import typer
from google.protobuf.message import Message
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

from trefoil.core.errors import SettingError, system_error
from trefoil.core.fleet import DeviceStatus, SliceState
from trefoil.core.plan import Plan
from trefoil.runtime import codec
from trefoil.runtime.clock import WallClock
from trefoil.tables import Grid

P = ParamSpec("P")
R = TypeVar("R")

FIRST_TICK_S: Final = 1.5
TICK_S: Final = 10.0  # between two lines of progress
DEFAULT_STATE_DIR: Final = os.environ.get("TREFOIL_STATE_DIR") or ".trefoil/default"

StateDir = Annotated[
    str, typer.Option("--state-dir", help="Where the running system keeps its things.", show_default=True)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


def console() -> Console:
    """Console on standard output; wide enough for tables when it is not a terminal."""
    out = Console(highlight=False, soft_wrap=False)
    return out if out.is_terminal else Console(highlight=False, width=160)


def print_json(value: Any) -> None:
    """Print one JSON document, in stable order."""
    typer.echo(json.dumps(value, indent=1, ensure_ascii=False, sort_keys=False))


def show(*parts: RenderableType) -> None:
    """Print texts as they are, each a line that is not wrapped, and tables."""
    out = console()
    for part in parts:
        if isinstance(part, str):
            out.print(part, markup=False, soft_wrap=True)
        else:
            out.print(part)


def respond(as_json: bool, document: Any, *parts: RenderableType) -> None:
    """Print the answer of a command: one JSON document, or texts and tables."""
    if as_json:
        print_json(document)
    else:
        show(*parts)


@contextmanager
def ticking(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Print how long work has taken, until the block ends: within 2 s for the first time, then every few seconds.
    Yields what prints other lines of progress, on standard error too; `quiet`: nothing is printed.
    """

    def say(text: str) -> None:
        if not quiet:
            typer.echo(text, err=True)

    clock, ended = WallClock(), threading.Event()
    started_s = clock.monotonic_s()

    def tick() -> None:
        wait_s = FIRST_TICK_S
        while not ended.wait(wait_s):
            say(f"working, {clock.monotonic_s() - started_s:.0f} s so far")
            wait_s = TICK_S

    ticker = threading.Thread(target=tick, name="progress", daemon=True)
    ticker.start()
    try:
        yield say
    finally:
        ended.set()
        ticker.join()


def slow(command: Callable[P, R]) -> Callable[P, R]:
    """Command that prints progress while it works (`ticking`), unless it prints JSON."""

    @functools.wraps(command)
    def ticked(*arguments: P.args, **options: P.kwargs) -> R:
        with ticking(quiet=any(options.get(name) for name in ("as_json", "as_json_"))):
            return command(*arguments, **options)

    return ticked


def held_lines(held: str) -> list[str]:
    """Why the plan in force stays after a change, if it does."""
    return [f"the plan in force stays for now: {held}"] if held else []


def grid(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, markup: bool = False) -> Table:
    """Table of text with a title. `markup`: cells hold rich's markup."""
    table = Grid(title=escape(title), title_justify="left")
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*(row if markup else map(escape, row)))
    return table


def csv_text(rows: Sequence[Mapping[str, Any]], columns: Iterable[str] = ()) -> str:
    """Rows under a header line; None is an empty field. `columns`: where there may be no row."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns or rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


@contextmanager
def writing(path: Path, option: str) -> Iterator[Path]:
    """Where to write a file, in a folder that is made. It takes the place of what was there once all is written; after
    an error it does not. A pipe or a device is written itself.

    Raises:
        SettingError: it cannot be written there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            yield path
            return
        target = path.resolve()
        beside = target.with_name(f".{target.name}.{os.getpid()}.new")
        try:
            yield beside
            if target.exists():  # who could not read it cannot now
                beside.chmod(beside.stat().st_mode & target.stat().st_mode)
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        remedy = "name a file in a folder that you may write to"
        raise system_error(SettingError, error, "be written", path, field=option, remedy=remedy) from error


def as_json(value: Any) -> Any:
    """JSON values of core objects, messages and containers of them; `codec.from_json` reads them back."""
    if isinstance(value, dict):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    return codec.to_plain(codec.from_proto(value) if isinstance(value, Message) else value)


def slices_text(device: DeviceStatus) -> str:
    """Slices of a device and what they serve, as text: `2x 1g.5gb digits-m, 3g.20gb digits-l`."""
    ready = (SliceState.READY, SliceState.SWAPPING)
    parts = [
        f"{slice_.key.slice_type} {'+'.join(h.variant for h in slice_.hosted)}"
        + ("" if slice_.state in ready else f" ({slice_.state.name.lower()})")
        for slice_ in device.slices
        if slice_.key is not None and slice_.state is not SliceState.GONE
    ]
    return count_equal(parts)


def power_text(device: DeviceStatus) -> str:
    """Power of a device and the limit that is in force, as text: `231 of 400 W`."""
    limit = f" of {device.power_limit_w:.0f}" if device.power_limit_w else ""
    return f"{device.power_w:.0f}{limit} W"


def count_equal(parts: Sequence[str]) -> str:
    """Text of these parts, equal ones once with their number; `-` for none."""
    return ", ".join(f"{n}x {part}" if n > 1 else part for part, n in Counter(parts).items()) or "-"


def plan_table(title: str, plan: Plan) -> Table:
    """Table of a plan: device, target state, slices."""
    rows = [
        (
            device.device,
            device.target.name.lower(),
            count_equal([f"{s.key.slice_type} {'+'.join(h.variant for h in s.hosted)}" for s in device.slices]),
        )
        for node in plan.nodes
        for device in node.devices
    ]
    return grid(title, ("device", "target", "slices"), rows)
