"""Options that several commands take: which system or service, `--set KEY=VALUE`, the parts of a policy, a plan in a
file.

A decorator here gives a command options in place of one of its parameters, which gets what they say.
"""

import errno
import functools
import inspect
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer

from trefoil.cli.output import DEFAULT_STATE_DIR, StateDir
from trefoil.core.errors import InvalidInput, SettingError, system_error
from trefoil.core.plan import Plan
from trefoil.runtime import codec
from trefoil.runtime.config import parse_pairs
from trefoil.runtime.files import NotPlain, read_plain
from trefoil.runtime.state_files import BYTES_MAX

Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one setting, e.g. carbon.step_s=60.")
]

Column = Annotated[
    str, typer.Option("--column", help="Column of the trace that counts requests; default: by its header.")
]
TimeColumn = Annotated[str, typer.Option("--time-column", help="Column of its times; default: by its header.")]
TimeUnit = Annotated[
    str, typer.Option("--time-unit", help="Of those times: s, ms, us, ns, min, h, day, date; default: by its header.")
]
BinS = Annotated[float, typer.Option("--bin-s", min=0, help="Seconds that a row counts; 0: by its header.")]

Config = Annotated[Path, typer.Option("--config", help="Settings file.", show_default=True)]
PortOffset = Annotated[
    int, typer.Option("--port-offset", help="Move every port by this: for a second system on this machine.")
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers", min=1, max=64, help="Dispatcher processes behind one port; default: the settings file's."
    ),
]


def file_to_write(param: typer.CallbackParam, value: Path | None) -> Path | None:
    """Value of an option that names a file to write, looked at before the work whose result it gets.

    Raises:
        SettingError: this user cannot write there, a part of the path is a file, or it is a folder.
    """
    return _to_write(param, value, folder=False)


def folder_to_write(param: typer.CallbackParam, value: Path | None) -> Path | None:
    """The same of an option that names a folder, which may be new."""
    return _to_write(param, value, folder=True)


def _to_write(param: typer.CallbackParam, value: Path | None, *, folder: bool) -> Path | None:
    if value is None:
        return None
    target = found = value.absolute()
    try:
        while not found.exists():
            found = found.parent
        if not found.is_dir() and (folder or found != target):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(found))
        if found.is_dir() and not folder and found == target:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(found))
        places = {found, found if found.is_dir() else found.parent}  # some are written beside, and renamed
        if not any(os.access(place, os.W_OK, effective_ids=True) for place in places):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(found))
    except OSError as error:
        remedy = f"name a {'folder' if folder else 'file in a folder'} that you may write to"
        raise system_error(SettingError, error, "be written", value, field=param.opts[0], remedy=remedy) from error
    return value


CONTROLLER_VARIABLE: Final = "TREFOIL_CONTROLLER"


@dataclass(frozen=True, slots=True)
class SystemAddress:
    """Where a command finds a system: its state directory on this machine, or its controllers ("host:port,host:port",
    of which it calls the leader) with their output format. None: by the environment (docs/settings.md)."""

    state_dir: str = DEFAULT_STATE_DIR
    controller: str = ""
    token_file: Path | None = None
    tls_ca: Path | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None


HERE: Final = SystemAddress()


def _system_options(
    state_dir: StateDir = DEFAULT_STATE_DIR,
    controller: Annotated[
        str,
        typer.Option(
            "--controller",
            envvar=CONTROLLER_VARIABLE,
            metavar="HOST:PORT",
            help="Controller of another deployment, or several with commas between. Default: the one in --state-dir.",
        ),
    ] = "",
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="File with its token; default: TREFOIL_TOKEN_FILE's.")
    ] = None,
    tls_ca: Annotated[
        Path | None,
        typer.Option("--tls-ca", "--ca", help="PEM of the authority of its certificate; default: TREFOIL_TLS_CA's."),
    ] = None,
    tls_certificate: Annotated[
        Path | None, typer.Option("--tls-certificate", help="PEM to show it; default: TREFOIL_TLS_CERTIFICATE's.")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option("--tls-key", help="Key of that PEM; default: TREFOIL_TLS_KEY's.")
    ] = None,
) -> SystemAddress:
    if controller and state_dir != DEFAULT_STATE_DIR:
        remedy = f"give one of them, or unset {CONTROLLER_VARIABLE}"
        raise SettingError("--state-dir names a system too", field="--controller", value=controller, remedy=remedy)
    if not controller and (token_file or tls_ca or tls_certificate or tls_key):
        given = "--token-file" if token_file else "--tls-ca, --tls-certificate, --tls-key"
        raise SettingError("a controller elsewhere is not named", field=given, remedy="give --controller too")
    return SystemAddress(state_dir, controller, token_file, tls_ca, tls_certificate, tls_key)


def of_system(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that say which system, behind its own, for its parameter `where`."""
    return _expanded(command, "where", _system_options, last=True)


class ServiceAddress(NamedTuple):
    """Where a command finds one service: at host:port, or in the system that runs in the state directory."""

    target: str = ""
    ca: Path | None = None
    state_dir: str = DEFAULT_STATE_DIR


RUNNING: Final = ServiceAddress()


def of_service(
    service: str, flag: str = "--target", variable: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make what gives a command the options that say which service of this kind, for its parameter `where`. `variable`:
    environment variable that stands for the flag."""

    def address(
        target: Annotated[
            str,
            typer.Option(
                flag,
                envvar=variable,
                metavar="HOST:PORT",
                help=f"host:port of the {service}'s admin port; default: the running system's.",
            ),
        ] = "",
        ca: Annotated[
            Path | None,
            typer.Option("--ca", "--tls-ca", help=f"PEM of the authority that signed the {service}'s certificate."),
        ] = None,
        state_dir: StateDir = DEFAULT_STATE_DIR,
    ) -> ServiceAddress:
        return ServiceAddress(target, ca, state_dir)

    return lambda command: _expanded(command, "where", address)


OF_THE_POLICY: Final[dict[str, str]] = {}
"""Default of `parts`: none is given."""


def of_policy(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each part of a policy, for its parameter `parts`: names of those given, by kind."""
    return _expanded(command, "parts", _part_options)


def _part_options(
    planner: Annotated[str, typer.Option(help="Planner instead of the policy's: a name, or module:Class.")] = "",
    forecaster: Annotated[str, typer.Option(help="Forecaster instead of the policy's: a name, or module:Class.")] = "",
    router: Annotated[
        str, typer.Option(help="Router instead of the policy's: a name, or module:Class of your own.")
    ] = "",
    queue: Annotated[str, typer.Option(help="Queue instead of the policy's: a name, or module:Class.")] = "",
    governor: Annotated[str, typer.Option(help="Governor instead of the policy's: a name, or module:Class.")] = "",
) -> dict[str, str]:
    return non_empty(planner=planner, forecaster=forecaster, router=router, queue=queue, governor=governor)


def _expanded(
    command: Callable[..., None], name: str, read: Callable[..., Any], *, last: bool = False
) -> Callable[..., None]:
    """Command with the parameters of `read` in place of its parameter `name`, or behind all others."""
    own = inspect.signature(command, eval_str=True).parameters
    options = inspect.signature(read, eval_str=True).parameters

    @functools.wraps(command)
    def with_options(**values: Any) -> None:
        found = read(**{option: values.pop(option) for option in options})
        command(**values, **{name: found})

    del with_options.__wrapped__  # typer is to see these parameters, not its own
    at = len(own) if last else list(own).index(name)
    parameters = [*list(own.values())[:at], *options.values(), *list(own.values())[at:]]
    parameters = [one for one in parameters if one.name != name]
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {one.name: one.annotation for one in parameters}
    return with_options


def as_moved(command: Callable[..., None], old: str, new: str) -> Callable[..., None]:
    """A command under the words that it had before: says the new words on stderr, then does its work."""

    @functools.wraps(command)
    def moved(**values: Any) -> None:
        typer.echo(f"`trefoil {old}` is `trefoil {new}` from now on; the next release drops the old words", err=True)
        command(**values)

    return moved


def non_empty(**named: str) -> dict[str, str]:
    """Options that were given a value, by name."""
    return {name: value for name, value in named.items() if value}


def parse_sets(sets: list[str] | None) -> dict[str, Any]:
    """Overrides of settings, by dotted key, from `--set KEY=VALUE`.

    Raises:
        SettingError: one without `=` or without a name.
    """
    return {**parse_pairs("--set", sets or ())}


def parse_number(flag: str, name: str, text: str) -> float:
    """The number in the value of `flag name=value`.

    Raises:
        SettingError: it is none.
    """
    try:
        return float(text)
    except ValueError as error:
        remedy = f"write {flag} {name}=0.05"
        raise SettingError("is not a number", field=f"{flag} {name}", value=text, remedy=remedy) from error


def read_plan(path: Path) -> Plan:
    """Read a plan as `trefoil plan --json` prints it (the whole answer, or its `plan`).

    Raises:
        InvalidInput: naming what is wrong with the file.
    """
    try:
        values = codec.parse_json(read_plain(path, BYTES_MAX))
    except (OSError, NotPlain, InvalidInput) as error:
        remedy = "trefoil plan --json > plan.json"
        raise system_error(InvalidInput, error, "be read", path, field="FILE", remedy=remedy) from error
    if isinstance(values, dict) and isinstance(values.get("plan"), dict):
        values = values["plan"]
    plan: Plan = codec.from_json(Plan, json.dumps(values))
    return plan
