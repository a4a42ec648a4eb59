"""Settings: frozen pydantic models, `defaults < TOML < environment < flags`; an unknown key fails at start.

Environment names are the prefix plus the field in capitals, `__` between levels: `TREFOIL_CARBON_FEED_ADMIN_ADDRESS`,
`TREFOIL_CARBON_FEED_TRACE__SPEEDUP`. Flags are `--set trace.speedup=60`.
"""

import argparse
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError

from trefoil.core import errors

MASK = "***"


class Settings(BaseModel):
    """Settings model, base of every one. Lists are tuples, so that nothing in it can change."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)


class ServiceSettings(Settings):
    """Settings that every service needs. Services subclass it and give their own default addresses."""

    cluster: str = "default"
    """Prefix of every Redis key; two clusters may share a Redis."""
    redis_url: SecretStr = SecretStr("redis://127.0.0.1:8179/0")
    """May hold a password, therefore secret."""
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
    token: SecretStr | None = None
    """Bearer token that callers of the admin server must present; it opens everything."""
    read_token: SecretStr | None = None
    """Second token, for callers that may only read (Get, Watch, List, Explain, Preview)."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_json: bool | None = None
    """None: pretty on a terminal, JSON otherwise."""


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
    merged: dict[str, Any] = _read_toml(toml_path) if toml_path is not None else {}
    origins: dict[str, str] = {}
    if env_prefix:
        for name, raw in sorted((os.environ if environ is None else environ).items()):
            if name.startswith(env_prefix):
                path = name.removeprefix(env_prefix).lower().split("__")
                _assign(merged, path, _parse(raw), origins, f"environment {name}")
    for key, value in (overrides or {}).items():
        _assign(merged, key.split("."), _parse(value) if isinstance(value, str) else value, origins, f"flag {key}")
    try:
        return cls.model_validate(merged)
    except ValidationError as error:
        field = ".".join(str(part) for part in error.errors()[0]["loc"])
        source = origins.get(field, str(toml_path) if toml_path else cls.__name__)
        raise explain(error, source, cls) from error


def explain(error: ValidationError, source: str, model: type[BaseModel] | None = None) -> errors.SettingError:
    """Explain the first complaint of a pydantic error in one line: field, value, what is wrong, remedy."""
    complaint = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in complaint["loc"])  # "": several fields together, which the message names
    if complaint["type"] == "extra_forbidden":
        known = ", ".join(_known(model, complaint["loc"][:-1]))
        remedy = f"remove it or use one of: {known}" if known else "remove it"
        return errors.SettingError(f"unknown setting (in {source})", field=field, remedy=remedy)
    if complaint["type"] == "missing":
        return errors.SettingError(f"missing (in {source})", field=field, remedy="give it a value")
    value = None if not field else MASK if _is_secret(model, complaint["loc"]) else complaint["input"]
    message = complaint["msg"].removeprefix("Value error, ")
    more = error.error_count() - 1
    suffix = f"; {more} more complaint{'s' if more > 1 else ''} after this one" if more else ""
    return errors.SettingError(
        f"{message} (in {source}{suffix})", field=field, value=value, remedy="correct that value"
    )


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
    parser.add_argument("--config", type=Path, metavar="TOML", help="settings file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="assignments", help="override one setting"
    )
    if "insecure" in cls.model_fields:
        parser.add_argument(
            "--insecure", action="store_true", help="allow a non-loopback listener without TLS and token"
        )
    arguments = parser.parse_args(argv)
    overrides: dict[str, Any] = {}
    for assignment in arguments.assignments:
        key, equals, value = assignment.partition("=")
        if not equals or not key:
            raise errors.SettingError("no '=' in it", field="--set", value=assignment, remedy="write --set key=value")
        overrides[key] = value
    if getattr(arguments, "insecure", False):
        overrides["insecure"] = True
    return load(cls, arguments.config, f"TREFOIL_{service_name.upper().replace('.', '_')}_", overrides)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise errors.SettingError(f"no settings file {path}", remedy="name an existing TOML file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise errors.SettingError(f"{path} cannot be read ({error})", remedy="make it a readable text file") from error
    except tomllib.TOMLDecodeError as error:
        raise errors.SettingError(f"{path} is not valid TOML: {error}", remedy="correct that line") from error


def _parse(raw: str) -> Any:
    """Lists and tables in TOML syntax; everything else stays text, which pydantic converts by the field's type."""
    if raw[:1] in ("[", "{"):
        try:
            return tomllib.loads(f"value = {raw}")["value"]
        except tomllib.TOMLDecodeError:
            return raw
    return raw


def _assign(tree: dict[str, Any], path: Sequence[str], value: Any, origins: dict[str, str], origin: str) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            raise errors.SettingError(
                f"is a value, not a section (in {origin})", field=part, remedy="drop what follows it"
            )
    tree[path[-1]] = value
    origins[".".join(path)] = origin


def _known(model: type[BaseModel] | None, path: Sequence[int | str]) -> list[str]:
    for part in path:
        model = _child(model, part)
    return sorted(model.model_fields) if model else []


def _child(model: type[BaseModel] | None, part: int | str) -> type[BaseModel] | None:
    if isinstance(part, int):  # one of a list, whose model it is
        return model
    field = model.model_fields.get(str(part)) if model else None
    annotation = field.annotation if field else None
    candidates = [annotation, *getattr(annotation, "__args__", ())]
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def _is_secret(model: type[BaseModel] | None, path: Sequence[int | str]) -> bool:
    for part in path[:-1]:
        model = _child(model, part)
    field = model.model_fields.get(str(path[-1])) if model and path else None
    return field is not None and "Secret" in str(field.annotation)


def _mask(value: Any) -> Any:
    if isinstance(value, SecretStr):
        return MASK
    if isinstance(value, Mapping):
        return {str(key): _mask(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mask(item) for item in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)
