"""Dump of what the controller keeps in Redis, and its restore into a Redis that has none of it.

A dump is lines of JSON: a header, one line for each key with its values in base64, and an end with the SHA-256 of all
lines before it. It holds what no service makes again: the copies of the controller's files (`kept:*`: objectives, mode,
plans, budgets, counts), its epoch, decisions, demand and books; and the histories of feeds and agents.
"""

import hashlib
import json
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from redis import exceptions

import trefoil
from controller.role.kept_files import ROLE
from controller.role.state_shapes import SHAPES
from controller.settings import ControllerSettings
from trefoil.core.common import KeptFile
from trefoil.core.errors import SettingError, TrefoilError, system_error
from trefoil.runtime import codec, config, state_errors
from trefoil.runtime.files import NotPlain, open_plain
from trefoil.runtime.keys import Keys
from trefoil.runtime.redis_client import make_client
from trefoil.runtime.security.plan_keys import PlanKeys
from trefoil.runtime.state_files import STRANGE, of_shape

FORMAT: Final = 1
TIMEOUT_S: Final = 30.0
EPOCH: Final = f"epoch:{ROLE}"
KINDS: Final[Mapping[str, str]] = {
    EPOCH: "string", "kept:": "string", "accounted": "hash", "totals:": "hash", "decisions": "stream",
    "demand:": "stream", "energy:minutes:": "stream", "carbon:history:": "stream",
}  # fmt: skip
"""Type of what is dumped, by key or prefix (docs/state.md)."""
HISTORIES: Final = ("energy:minutes:", "carbon:history:")
"""Of agents and feeds: where they have begun again, they stay as they are."""


@dataclass(frozen=True, slots=True)
class Where:
    """Where state is: a Redis and a cluster; the keys of its plans, if they are known."""

    redis_url: str
    cluster: str
    plan_keys: PlanKeys

    @classmethod
    def by_config(cls, path: Path) -> "Where":
        """Where the controller with this settings file keeps it; raises SettingError."""
        settings = config.load(ControllerSettings, path, "TREFOIL_CONTROLLER_")
        keys = PlanKeys.read(settings.cluster, settings.plan_key_file)
        return cls(settings.redis_url.get_secret_value(), settings.cluster, keys)


@dataclass(frozen=True, slots=True)
class Entry:
    """Key without the cluster's prefix, milliseconds that it stands (-1: forever), and what Redis answered of it."""

    key: str
    ttl_ms: int
    value: Any


async def dump_state(where: Where, now_s: float) -> tuple[str, int]:
    """Text of a dump, and how many keys it holds.

    Raises:
        SettingError: this cluster has no state of a controller.
        StateUnavailable: Redis does not answer, or another type of value stands somewhere.
    """
    prefix = Keys(where.cluster).prefix
    async with _client(where.redis_url) as client:
        names = [name.decode() async for name in client.scan_iter(match=f"{_literal(prefix)}*", count=1000)]
        keys = sorted(key for name in names if _kind(key := name.removeprefix(prefix)))
        if EPOCH not in keys:
            raise SettingError(
                "has no state of a controller", field="cluster", value=where.cluster,
                remedy="name the settings of a controller that has led",
            )  # fmt: skip
        async with client.pipeline(transaction=True) as pipeline:  # of one moment
            for key in keys:
                read = {"string": pipeline.get, "hash": pipeline.hgetall, "stream": pipeline.xrange}[_kind(key)]
                read(prefix + key)
                pipeline.pttl(prefix + key)
            found = await pipeline.execute()
    head = {"trefoil_state": FORMAT, "version": trefoil.__version__, "cluster": where.cluster, "at_s": now_s}
    entries = zip(keys, found[1::2], map(_plain, found[::2]), strict=True)
    rows = [head, *({"key": key, "ttl_ms": left, "value": value} for key, left, value in entries if value)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    end = {"keys": len(rows) - 1, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    return text + json.dumps(end) + "\n", len(rows) - 1


def read_dump(path: Path, where: Where) -> list[Entry]:
    """Read a dump for a cluster.

    Raises:
        SettingError: it is none, is cut or damaged, of a newer version, of another cluster, or not signed by its keys.
    """
    try:
        with open_plain(path, 2**63) as file:
            data = file.read()
    except (OSError, NotPlain) as error:
        remedy = "name a file of `trefoil state dump --output`"
        raise system_error(SettingError, error, "be read", path, field="FILE", remedy=remedy) from error
    head, *lines = data.splitlines(keepends=True) or [b""]
    begun = _parsed(head)
    if not isinstance(begun.get("trefoil_state"), int):
        raise _refused(path, "is not a dump of Trefoil's state", "name a file of `trefoil state dump --output`")
    if begun["trefoil_state"] > FORMAT:
        raise _refused(
            path, f"is of a newer Trefoil, {begun.get('version')} (format {begun['trefoil_state']}, this one reads "
            f"{FORMAT})", "restore it by that version",
        )  # fmt: skip
    end = _parsed(lines[-1]) if lines else {}
    if end != {"keys": len(lines) - 1, "sha256": hashlib.sha256(data[: -len(lines[-1])]).hexdigest() if lines else ""}:
        raise _refused(path, "is cut or damaged: its last line does not fit the others", "take another dump")
    if begun.get("cluster") != where.cluster:
        remedy = f"name the settings of a controller with cluster = {begun.get('cluster')!r}"
        raise _refused(path, f"is of cluster {begun.get('cluster')!r}, not of {where.cluster!r}", remedy)
    entries = []
    for number, line in enumerate(lines[:-1], 2):
        try:
            row = codec.parse_json(line)
            entries.append(Entry(row["key"], int(row["ttl_ms"]), _bytes(row["value"])))
            _check(entries[-1], where.plan_keys)
        except (*STRANGE, TrefoilError) as error:
            raise _refused(path, f"line {number} is none of a dump: {error}", "take another dump") from error
    return entries


async def restore_state(entries: Sequence[Entry], where: Where) -> list[str]:
    """Write a dump, all or nothing; returns the histories that have begun again, which stay.

    Raises:
        SettingError: state of a controller stands there already, or one leads.
        StateUnavailable: Redis does not answer.
    """
    keys = Keys(where.cluster)
    async with _client(where.redis_url) as client, client.pipeline(transaction=True) as pipeline:
        names = [keys.prefix + entry.key for entry in entries]
        await pipeline.watch(*names, keys.lease(ROLE))
        standing = {key for key in {*names, keys.lease(ROLE)} if await pipeline.exists(key)}
        begun = {key for key in standing if key.removeprefix(keys.prefix).startswith(HISTORIES)}
        if found := sorted(standing - begun):
            raise _standing(found[0])
        pipeline.multi()
        for name, entry in zip(names, entries, strict=True):
            if name not in begun:
                _put(pipeline, name, entry)
        try:
            await pipeline.execute()
        except exceptions.WatchError as error:
            raise _standing("another process wrote meanwhile, and it") from error
    return sorted(begun)


def _put(pipeline: Any, name: str, entry: Entry) -> None:
    match _kind(entry.key):
        case "string":
            pipeline.set(name, entry.value)
        case "hash":
            pipeline.hset(name, mapping=entry.value)
        case _:
            for entry_id, fields in entry.value:
                pipeline.xadd(name, fields, id=entry_id)
    if entry.ttl_ms > 0:
        pipeline.pexpire(name, entry.ttl_ms)


def _check(entry: Entry, plan_keys: PlanKeys) -> None:
    """Check that an entry is what its key holds; raises one of STRANGE, or TrefoilError."""
    kind = _kind(entry.key)
    value: Any = entry.value
    if type(value).__name__ != {"string": "bytes", "hash": "dict", "stream": "list"}.get(kind):
        raise ValueError(f"{entry.key:.80} is not dumped so")
    if entry.key == EPOCH:
        if not state_errors.parse_epoch(value):
            raise ValueError(f"{entry.key} is not an epoch")
    elif entry.key.startswith("kept:"):
        file = plan_keys.verify_file(codec.decode(KeptFile, value))
        if entry.key != f"kept:{file.name}":
            raise ValueError(f"{entry.key:.80} holds {file.name:.80}")
        of_shape(SHAPES[file.name], codec.parse_json(file.json))


def _kind(key: str) -> str:
    """Type of a key that is dumped; "" of the others."""
    return next((kind for name, kind in KINDS.items() if key == name or (name[-1] == ":" and key.startswith(name))), "")


def _literal(prefix: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else "\\\\" if c == "\\" else c for c in prefix)


def _plain(value: Any) -> Any:
    """JSON of what Redis answered: bytes as base64, a hash as an object, a stream as pairs of id and object."""
    match value:
        case bytes():
            return b64encode(value).decode()
        case dict():
            return {name.decode(): _plain(one) for name, one in value.items()}
        case list():
            return [[entry_id.decode(), _plain(fields)] for entry_id, fields in value]
    return None


def _bytes(value: Any) -> Any:
    """What `_plain` was made of; raises one of STRANGE."""
    match value:
        case str():
            return b64decode(value, validate=True)
        case dict():
            return {name: _bytes(one) for name, one in value.items()}
    return [(entry_id, _bytes(fields)) for entry_id, fields in value]


def _parsed(line: bytes) -> Mapping[str, Any]:
    try:
        found = codec.parse_json(line)
    except STRANGE:
        return {}
    return found if isinstance(found, dict) else {}


def _refused(path: Path, why: str, remedy: str) -> SettingError:
    return SettingError(f"{why}; nothing is restored", field="FILE", value=str(path), remedy=remedy)


def _standing(what: str) -> SettingError:
    remedy = "stop the controllers; restore into an empty Redis, before they start, with their state_dir empty"
    return SettingError(f"{what} stands there already; nothing is restored", field="redis_url", remedy=remedy)


@asynccontextmanager
async def _client(url: str) -> AsyncIterator[Any]:
    client = make_client(url, TIMEOUT_S)
    try:
        with _translated():
            yield client
    finally:
        await client.aclose()


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (exceptions.RedisError, TimeoutError, OSError) as error:
        raise state_errors.translate(error, TIMEOUT_S) from error
