"""Settings: frozen pydantic models, `defaults < TOML < environment < flags`; an unknown key fails at start. Where
TREFOIL_OVERRIDES names a folder, its file of the same name goes over the TOML file.

Environment names are the prefix plus the field in capitals, `__` between levels: `TREFOIL_CARBON_FEED_ADMIN_ADDRESS`,
`TREFOIL_CARBON_FEED_TRACE__SPEEDUP`. Flags are `--set trace.speedup=60`; an entry of a list is named by its place, from
0: `--set families.0.arrivals.rate_per_s=40`.
"""

import argparse
import json
import os
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, SecretStr, ValidationError, model_validator
from pydantic_core import ErrorDetails

from trefoil.core import device_types, errors
from trefoil.core.outside.ranges import Ranged
from trefoil.runtime.files import NotPlain, read_plain
from trefoil.runtime.security.secret_files import OVERLAP, Check, FileSecret, only_password_differs

MASK = "***"
TOML_BYTES_MAX = 16 * 2**20  # tens of thousands of tenants
KEY_PARTS_MAX = 32  # of a TOML key: Python's parser takes time by the third power of their number, minutes for 5,000
_KEY_PART = r"""(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*"""
_LONG_KEY = re.compile(rf"(?:^|[\[{{,])[ \t]*(?:{_KEY_PART}){{{KEY_PARTS_MAX}}}", re.MULTILINE | re.ASCII)
DEVICE_TYPES_VARIABLE = "TREFOIL_DEVICE_TYPES"
OVERRIDES_VARIABLE = "TREFOIL_OVERRIDES"
FIXED = "remove it: the program fixes its value"
"""Remedy for a setting that became a constant."""
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")  # TOML 1.0, "Keys"
_FILE = "_file"  # a setting that ends so names the file of the secret that is called as the rest of it


if TYPE_CHECKING:
    _Model = Ranged
else:

    class _Explained(type(Ranged)):
        """Metaclass of settings: what pydantic refuses of a model that is made in Python is our error too.

        Not `__init__`, which pydantic would also call for the models inside one, where it is unknown of which field it
        is. Hidden from the type checker, which would take any arguments then.
        """

        def __call__(cls, *args: Any, **values: Any) -> Any:
            try:
                return super().__call__(*args, **values)
            except ValidationError as error:
                raise explain(error, cls.__name__, cls) from error

    class _Model(Ranged, metaclass=_Explained):
        pass


class Settings(_Model):
    """Settings model, base of every one. Lists are tuples, so that nothing in it can change.

    A secret may stand in a file: where a class has both `token` and `token_file`, `token` follows the file.

    Raises:
        errors.SettingError: a value that cannot be; names field, value and remedy.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)
    REMOVED: ClassVar[Mapping[str, str]] = {}
    """Remedies for settings that were removed, by their names; of a table that is a value now, by its keys' too."""
    SECRET_LINES_MAX: ClassVar[Mapping[str, int]] = {}
    """Lines that the file of a secret may hold, by the secret's name; others hold one."""
    SECRET_CHECKS: ClassVar[Mapping[str, Check]] = {}
    """Checks of a secret whose file changes while the service runs, by the secret's name."""

    @model_validator(mode="before")
    @classmethod
    def _read_secret_files(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        values = dict(given)
        for name in cls.model_fields:
            secret, path = name.removesuffix(_FILE), values.get(name)
            if secret == name or not isinstance(path, str | Path) or not _is_secret(cls, (secret,)):
                continue
            if values.get(secret) is not None:
                remedy = f"give {secret} or {name}, and not both"
                raise errors.SettingError(f"{secret} is given too", field=name, value=str(path), remedy=remedy)
            check, lines_max = cls.SECRET_CHECKS.get(secret), cls.SECRET_LINES_MAX.get(secret, 1)
            values[secret] = FileSecret(Path(values.pop(name)), name, lines_max, check)
        return values


def _names_node(form: str) -> str:
    if form.count("{node}") != 1 or set(form.replace("{node}", "")) & set("{} "):
        raise ValueError("must hold {node} once, so that no node passes for another, e.g. {node}.gpus.example")
    return form


NodeNameForm = Annotated[str, AfterValidator(_names_node)]
"""Form of a name in certificates of nodes; {node} stands for the node's name."""


class ServiceSettings(Settings):
    """Settings that every service needs. Services subclass it and give their own default addresses."""

    SECRET_LINES_MAX = {"token": OVERLAP, "read_token": OVERLAP}  # noqa: RUF012
    SECRET_CHECKS = {"redis_url": only_password_differs}  # noqa: RUF012

    cluster: str = "default"
    """Prefix of every Redis key; two clusters may share a Redis."""
    redis_url: SecretStr = SecretStr("redis://127.0.0.1:8179/0")
    """May hold a password, therefore secret. Over TLS: rediss://...?ssl_ca_certs=PEM&ssl_certfile=PEM&ssl_keyfile=PEM;
    by Sentinel: redis[s]+sentinel://host:port,host2:port2/name-of-the-primary"""
    redis_url_file: Path | None = None
    """Or the file that holds it."""
    state_dir: Path = Path(".trefoil/default")
    """Where the service keeps what must survive it."""
    admin_address: str = "127.0.0.1:0"
    """host:port of the admin gRPC server."""
    metrics_address: str = ""
    """host:port of the Prometheus endpoint; empty = none."""
    insecure: bool = False
    """Allow a non-loopback listener without TLS and token."""
    tls_certificate: Path | None = None
    """PEM chain of the admin server."""
    tls_key: Path | None = None
    """PEM key of the admin server."""
    tls_ca: Path | None = None
    """PEM of the authority of all services' certificates; switches mutual TLS on. None: clear text, and the token alone
    permits a call."""
    tls_clients: tuple[str, ...] = ()
    """Names of which a caller's certificate must have one (subjectAltName) at the admin server; empty = any that tls_ca
    signed. Health and reflection stay open."""
    token: SecretStr | None = None
    """Bearer token that callers of the admin server must present; it opens everything."""
    token_file: Path | None = None
    """Or the file that holds it."""
    read_token: SecretStr | None = None
    """Second token, for callers that may only read (Get, Watch, List, Explain, Preview)."""
    read_token_file: Path | None = None
    """Or the file that holds it."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe lines that are logged."""
    log_json: bool | None = None
    """None: pretty on a terminal, JSON otherwise."""

    @model_validator(mode="after")
    def _whole_tls(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise errors.SettingError("only one of the two is set", field="tls_certificate, tls_key", remedy="set both")
        if self.tls_clients and self.tls_ca is None:
            remedy = "set tls_ca too, or drop it: without tls_ca no caller shows a certificate"
            raise errors.SettingError("set alone", field="tls_clients", value=self.tls_clients, remedy=remedy)
        if self.tls_ca is not None and self.tls_key is None:
            remedy = "set tls_certificate and tls_key too: a service with an authority must show its own certificate"
            raise errors.SettingError("set alone", field="tls_ca", value=str(self.tls_ca), remedy=remedy)
        return self


SettingsT = TypeVar("SettingsT", bound=BaseModel)


def load(
    cls: type[SettingsT],
    toml_path: Path | None = None,
    env_prefix: str = "",
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> SettingsT:
    """Load settings: merge the four layers and validate.

    `env_prefix` ends with an underscore; empty = do not read the environment. Keys of `overrides` may be dotted.

    Raises:
        errors.SettingError: names field, value and remedy.
    """
    register_own_device_types()
    merged: dict[str, Any] = {}
    environment = os.environ if environ is None else environ
    files = [] if toml_path is None else _files(toml_path, environment)
    for path in files:
        merged = merge(merged, read_toml(path))
    source = ", ".join(map(str, files)) or cls.__name__
    origins: dict[str, str] = {}
    if env_prefix:
        for name, raw in sorted(environment.items()):
            if name.startswith(env_prefix):
                keys = name.removeprefix(env_prefix).lower().split("__")
                _assign(cls, merged, keys, _parse(raw), f"environment {name}")
                origins[".".join(keys)] = f"environment {name}"
    return _overridden(cls, merged, overrides or {}, origins, source)


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge trees of settings: tables merge, everything else is replaced."""
    merged = dict(base)
    for key, value in changes.items():
        inner = merged.get(key)
        both = isinstance(inner, Mapping) and isinstance(value, Mapping)
        merged[key] = merge(inner, value) if both and inner is not None else value
    return merged


def changed(settings: SettingsT, overrides: Mapping[str, Any]) -> SettingsT:
    """Change settings by dotted keys, as `load` does, and check them again.

    Raises:
        errors.SettingError: names field, value and remedy.
    """
    return _overridden(type(settings), settings.model_dump(exclude_unset=True), overrides, {}, type(settings).__name__)


def _overridden(
    cls: type[SettingsT], tree: dict[str, Any], overrides: Mapping[str, Any], origins: dict[str, str], source: str
) -> SettingsT:
    for key, value in overrides.items():
        _assign(cls, tree, key.split("."), _parse(value) if isinstance(value, str) else value, f"flag {key}")
        origins[key] = f"flag {key}"
    try:
        return cls.model_validate(tree)
    except ValidationError as error:
        field = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise explain(error, _origin(field, origins, source), cls) from error


def _origin(field: str, origins: Mapping[str, str], source: str) -> str:
    """Where a field's value is from: the last that set it, a part of it, or what it is a part of; "": all places."""
    if not field:
        return ", ".join([source, *origins.values()])
    for key in reversed(list(origins)):
        if key == field or key.startswith(f"{field}.") or field.startswith(f"{key}."):
            return origins[key]
    return source


def register_own_device_types() -> None:
    """Register the device types of the file that TREFOIL_DEVICE_TYPES names, beside those that ship; read once.

    Raises:
        errors.SettingError: names the file, device type, field, value and remedy.
    """
    if path := os.environ.get(DEVICE_TYPES_VARIABLE):
        _register_device_types(path)


@cache
def _register_device_types(path: str) -> None:
    if not Path(path).is_file():
        remedy = "name a TOML file of device types, with its whole path, or unset it"
        raise errors.SettingError("no such file", field=DEVICE_TYPES_VARIABLE, value=path, remedy=remedy)
    device_types.register(device_types.parse_rows(read_toml(Path(path)), path), path)


def explain(
    error: ValidationError,
    source: str,
    model: type[BaseModel] | None = None,
    cls: type[errors.InvalidInput] = errors.SettingError,
) -> errors.InvalidInput:
    """Explain a pydantic error in one line: field, value, what is wrong, remedy; then all else that is wrong."""
    complaints = error.errors(include_url=False)
    above = {complaint["loc"][:depth] for complaint in complaints for depth in range(len(complaint["loc"]))}
    said = [one for one in complaints if one["loc"] not in above]  # a list has too few: wrong ones not counted
    first, *others = sorted(said, key=lambda one: not _removed(one, model))  # an old key says why others are missing
    field = ".".join(str(part) for part in first["loc"])  # "": several fields together, which the message names
    value = None if not field or first["type"] in _WHOLE else _shown_input(first, model)
    also = f"; also {'; '.join(_grouped(others, model))}" if others else ""
    return cls(f"{_said(first)} (in {source}{also})", field=field, value=value, remedy=_remedy(first, model))


_WHOLE = {"missing": "missing", "extra_forbidden": "unknown setting"}  # complaints of a field, not of its value
_LIST, _TABLE = "must be a list, as [1, 2]", "must be a table of settings"
_SAID = {
    **_WHOLE,
    **dict.fromkeys(("list_type", "tuple_type", "set_type", "frozen_set_type"), _LIST),
    **dict.fromkeys(("dict_type", "mapping_type", "model_type", "model_attributes_type", "dataclass_type"), _TABLE),
}
"""What is wrong, by pydantic's type of it, where its own words speak of Python."""
_LISTED_MAX = 30  # fields in one refusal


def _said(complaint: ErrorDetails) -> str:
    return _SAID.get(complaint["type"]) or complaint["msg"].removeprefix("Value error, ")


def _grouped(complaints: Sequence[ErrorDetails], model: type[BaseModel] | None) -> list[str]:
    """Complaints after the first: what each kind of them is about, with the remedy of an old key."""
    by_kind: dict[str, list[str]] = {}
    for complaint in complaints[:_LISTED_MAX]:
        field, removed = ".".join(str(part) for part in complaint["loc"]), _removed(complaint, model)
        by_kind.setdefault(_said(complaint), []).append(f"{field} ({removed})" if removed else field)
    more = len(complaints) - _LISTED_MAX
    return [f"{said}: {', '.join(fields)}" for said, fields in by_kind.items()] + ([f"{more} more"] if more > 0 else [])


def _shown_input(complaint: ErrorDetails, model: type[BaseModel] | None) -> Any:
    return MASK if _is_secret(model, complaint["loc"]) else complaint["input"]


def _remedy(complaint: ErrorDetails, model: type[BaseModel] | None) -> str:
    if complaint["type"] == "missing":
        return "give it a value"
    if complaint["type"] == "extra_forbidden":
        if removed := _removed(complaint, model):
            return removed
        above, name = complaint["loc"][:-1], str(complaint["loc"][-1])
        known = _known(model, above)
        return errors.one_of(known, name, also="remove it") if known else "remove it"
    expected = re.findall(r"'([^']*)'", str(complaint.get("ctx", {}).get("expected", "")))
    near = errors.neighbour(complaint["input"], expected) if isinstance(complaint["input"], str) else ""
    return f"did you mean {near}?" if near else _percent(complaint) or "correct that value"


def _removed(complaint: ErrorDetails, model: type[BaseModel] | None) -> str:
    """Remedy for a key that was removed; "" for another complaint."""
    if complaint["type"] != "extra_forbidden":
        return ""
    above, name = complaint["loc"][:-1], str(complaint["loc"][-1])
    return str(getattr(_model_at(model, above), "REMOVED", {}).get(name, ""))


def _percent(complaint: Mapping[str, Any]) -> str:
    """Remedy for a percentage where a fraction of 1 is meant; "" for another complaint."""
    if complaint["type"] != "less_than_equal" or complaint["ctx"]["le"] != 1:
        return ""
    value = float(complaint["input"])  # it was compared
    return f"write {value / 100:g} for {value:g} %" if 1 < value <= 100 else ""


def masked(settings: BaseModel) -> dict[str, Any]:
    """Settings as JSON types, secrets replaced: what a process prints at start."""
    result: dict[str, Any] = _mask(settings.model_dump(mode="python"))
    return result


def parser_main(cls: type[SettingsT], service_name: str, argv: Sequence[str] | None = None) -> SettingsT:
    """Parse `--config f [--set key=value]... [--insecure]` of `python -m <service_name>` into settings.

    Raises:
        errors.SettingError: a bad file, key or value.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {service_name}", description=(cls.__doc__ or "").split("\n")[0])
    _add_config(parser)
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="assignments", help="override one setting"
    )
    if "insecure" in cls.model_fields:
        parser.add_argument(
            "--insecure", action="store_true", help="allow a non-loopback listener without TLS and token"
        )
    arguments = parser.parse_args(argv)
    overrides: dict[str, Any] = {**parse_pairs("--set", arguments.assignments)}
    if getattr(arguments, "insecure", False):
        overrides["insecure"] = True
    return load(cls, arguments.config, f"TREFOIL_{service_name.upper().replace('.', '_')}_", overrides)


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="TOML", help="settings file")


def settings_source(argv: Sequence[str] | None = None) -> str:
    """Name the settings file of `python -m <service_name>`, and the one that is read over it; "" without one."""
    parser = argparse.ArgumentParser(add_help=False)
    _add_config(parser)
    path: Path | None = parser.parse_known_args(argv)[0].config
    return ", ".join(map(str, _files(path, os.environ))) if path is not None else ""


def _files(path: Path, environment: Mapping[str, str]) -> list[Path]:
    """A settings file, and the one of the folder TREFOIL_OVERRIDES that is read over it."""
    folder = environment.get(OVERRIDES_VARIABLE)
    over = [Path(folder) / path.name] if folder else []
    return [path, *(each for each in over if each.exists())]


def parse_pairs(flag: str, assignments: Sequence[str]) -> dict[str, str]:
    """Parse what a repeated flag was given, KEY=VALUE each, by key.

    Raises:
        errors.SettingError: one without `=` or without a name; a key with two values. Of settings the last one wins.
    """
    found: dict[str, str] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or not key:
            raise errors.SettingError("no '=' in it", field=flag, value=assignment, remedy=f"write {flag} key=value")
        if flag != "--set" and found.get(key, value) != value:
            why = f"has two values, {found[key]} and {value}"
            raise errors.SettingError(why, field=f"{flag} {key}", remedy="leave one out")
        found[key] = value
    return found


def read_toml(path: Path, field: str = "file") -> dict[str, Any]:
    """Read a TOML file, or with `-` standard input; `field`: setting that names it.

    Raises:
        errors.SettingError: it cannot be read, has more than TOML_BYTES_MAX, or is not valid.
    """
    try:
        return parse_toml(_bytes_of(path).decode("utf-8-sig"))
    except (OSError, NotPlain, UnicodeDecodeError) as error:
        remedy = "name a TOML file"
        raise errors.system_error(errors.SettingError, error, "be read", path, field=field, remedy=remedy) from error
    except (ValueError, RecursionError) as error:
        raise errors.SettingError(f"{path} is not valid TOML: {error}", remedy="correct that line") from error


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML, whose time a bad file must not choose.

    Raises:
        ValueError: it is not valid, or has a key of more than `KEY_PARTS_MAX` parts.
        RecursionError: it is too deep.
    """
    if long := _LONG_KEY.search(text):
        line = text.count("\n", 0, long.end()) + 1
        raise ValueError(f"line {line} has a key of more than {KEY_PARTS_MAX} parts")
    return tomllib.loads(text)


def _bytes_of(path: Path) -> bytes:
    if path != Path("-"):
        return read_plain(path, TOML_BYTES_MAX)
    data = sys.stdin.buffer.read(TOML_BYTES_MAX + 1)
    if len(data) > TOML_BYTES_MAX:
        raise NotPlain(f"has more than {TOML_BYTES_MAX} bytes")
    return data


def _parse(raw: str) -> Any:
    """Lists and tables in TOML syntax; everything else stays text, which pydantic converts by the field's type."""
    if raw[:1] in ("[", "{"):
        try:
            return parse_toml(f"value = {raw}")["value"]
        except (ValueError, RecursionError):
            return raw
    return raw


def _assign(model: type[BaseModel], tree: dict[str, Any], path: Sequence[str], value: Any, origin: str) -> None:
    """Put a value into a tree of tables and lists; a list that is not there yet is its field's default."""
    node: Any = tree
    for depth, part in enumerate(path):
        where = ".".join(path[:depth])
        if not isinstance(node, dict | list):
            removed = getattr(model, "REMOVED", {}).get(".".join(path[: depth + 1]))
            raise errors.SettingError(
                f"is a value, not a section (in {origin})", field=where, remedy=removed or "drop what follows it"
            )
        key: Any = _place(node, part, where, origin) if isinstance(node, list) else part
        if depth == len(path) - 1:
            node[key] = value
            return
        below = node[key] if isinstance(node, list) or key in node else _default(model, path[: depth + 1])
        node[key] = list(below) if isinstance(below, tuple) else below
        node = node[key]


def _place(entries: Sequence[Any], part: str, where: str, origin: str) -> int:
    if part.isdecimal() and int(part) < len(entries):
        return int(part)
    length = f"has {len(entries)} entr{'y' if len(entries) == 1 else 'ies'}, and no {part!r} (in {origin})"
    remedy = f"write {where}.0" + (f" to {where}.{len(entries) - 1}" if len(entries) > 1 else "")
    raise errors.SettingError(length, field=where, remedy=remedy if entries else f"give the whole list: {where}=[...]")


def _default(model: type[BaseModel], path: Sequence[str]) -> Any:
    """Value at a path that was not given: the field's list, else an empty section."""
    holder = _model_at(model, path[:-1])
    field = holder.model_fields.get(path[-1]) if holder else None
    given = field.get_default(call_default_factory=True, validated_data={}) if field else None
    if not isinstance(given, list | tuple):
        return {}
    return [one.model_dump(exclude_unset=True) if isinstance(one, BaseModel) else one for one in given]


def _known(model: type[BaseModel] | None, path: Sequence[int | str]) -> list[str]:
    holder = _model_at(model, path)
    return sorted(holder.model_fields) if holder else []


def _model_at(model: type[BaseModel] | None, path: Sequence[int | str]) -> type[BaseModel] | None:
    """Model at a path of fields, places of lists and keys of tables; None: there is none."""
    found: Any = model
    for part in path:
        found = next((below for one in _choices(found) if (below := _below(one, part)) is not None), None)
    return next((one for one in _choices(found) if isinstance(one, type) and issubclass(one, BaseModel)), None)


def _choices(annotation: Any) -> tuple[Any, ...]:
    """Types that a value of an annotation may have."""
    if get_origin(annotation) is Annotated:
        return _choices(get_args(annotation)[0])
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _below(annotation: Any, part: int | str) -> Any:
    """Annotation of a field, of the entries of a list, or of the values of a table."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        field = annotation.model_fields.get(str(part))
        return field.annotation if field else None
    kind, inner = get_origin(annotation), get_args(annotation)
    if kind in (tuple, list) and str(part).isdecimal():
        return inner[0]
    return inner[1] if kind in (dict, Mapping) else None


def _is_secret(model: type[BaseModel] | None, path: Sequence[int | str]) -> bool:
    holder = _model_at(model, path[:-1])
    field = holder.model_fields.get(str(path[-1])) if holder and path else None
    return field is not None and "Secret" in str(field.annotation)


def _mask(value: Any) -> Any:
    if isinstance(value, SecretStr):
        return MASK
    if isinstance(value, Mapping):
        return {str(key): _mask(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mask(item) for item in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def to_toml(values: Mapping[str, Any]) -> str:
    """TOML text of nested tables and lists of tables; None is left out (it means: the default).

    Raises:
        errors.SettingError: a value that TOML has not.
    """
    lines: list[str] = []
    _add_toml(values, "", lines)
    return "\n".join(lines) + "\n"


def _add_toml(values: Mapping[str, Any], path: str, lines: list[str]) -> None:
    """Add the lines of a table: plain values, then tables below their headings."""
    below = {key: value for key, value in values.items() if isinstance(value, Mapping) or _is_tables(value)}
    plain = {key: value for key, value in values.items() if key not in below and value is not None}
    lines += [f"{_toml_key(key)} = {_toml_value(value)}" for key, value in plain.items()]
    for key, value in below.items():
        name = f"{path}{_toml_key(key)}"
        for table in [value] if isinstance(value, Mapping) else value:
            lines += ["", f"[{name}]" if table is value else f"[[{name}]]"]
            _add_toml(table, f"{name}.", lines)


def _is_tables(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(each, Mapping) for each in value)


def _toml_value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float():
            return repr(float(value))  # also of numpy's
        case str() | Path():
            return _toml_string(str(value))
        case Mapping():
            pairs = (f"{_toml_key(k)} = {_toml_value(v)}" for k, v in value.items() if v is not None)
            return f"{{{', '.join(pairs)}}}"
        case list() | tuple():
            return f"[{', '.join(map(_toml_value, value))}]"
    raise errors.SettingError("cannot be written to TOML", field="value", value=value, remedy="give a plain value")


def _toml_key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else _toml_string(name)


def _toml_string(text: str) -> str:
    """A basic string: JSON's escapes are TOML's, but for the one control character that JSON leaves as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")
