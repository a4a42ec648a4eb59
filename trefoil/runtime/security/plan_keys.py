"""Signatures of what stands in Redis and is obeyed: plans, node plans, and the files that a controller leaves the next.

HMAC-SHA256 under keys that stand in files, and not in Redis. The plan key, of controllers and agents, signs node plans
and files. The routes key is derived from it and signs plans, plans of jobs and rungs of budgets. Dispatchers hold the
routes key alone, from which the plan key cannot be computed. So a dispatcher cannot sign what an agent or a controller
obeys. A signature covers cluster, kind, name, revision and all other content.

`python -m trefoil.runtime.security.plan_keys PLAN-KEY-FILE` prints the file of routes keys.
"""

import hmac
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from trefoil.core.common import KeptFile
from trefoil.core.errors import PlanError, SettingError
from trefoil.core.jobs.planned import PlannedJobs
from trefoil.core.objective import TenantRungs
from trefoil.core.plan import NodePlan, Plan
from trefoil.runtime import codec, rpc
from trefoil.runtime.security.reread import Reread
from trefoil.runtime.security.secret_files import read_secret_lines

FIELD: Final = "plan_key_file"
ROUTES: Final = "routes:"
"""What a line with a routes key begins with."""
KEYS_MAX: Final = 2
KEY_CHARS_MIN: Final = 32
_NAME_CHARS: Final = 8


class PlanKeys:
    """Keys of one cluster's plans: the first signs, each verifies. Without any, plans stay unsigned. Keys of a `file`
    follow its changes."""

    def __init__(self, cluster: str, keys: Sequence[str] = (), file: Reread[Sequence[str]] | None = None) -> None:
        self._cluster, self._given, self.file = cluster, keys, file

    @classmethod
    def read(cls, cluster: str, path: Path | None, *, routes: bool = False) -> "PlanKeys":
        """Read the keys of a file, one a line; None: no keys. `routes`: those of routes are enough.

        Raises:
            SettingError: it cannot be read, others may read it, it holds no keys, or those of routes alone.
        """
        if path is None:
            return cls(cluster)
        return cls(cluster, file=Reread(FIELD, partial(_read_keys, path, routes), lambda: (path,)))

    @property
    def signing(self) -> str:
        """Name of the key that signs; "" without keys."""
        return next(iter(self._routes_keys), "")

    @property
    def _lines(self) -> Sequence[str]:
        return self._given if self.file is None else self.file.now

    @property
    def _keys(self) -> dict[str, str]:
        return _named(key for key in self._lines if not key.startswith(ROUTES))

    @property
    def _routes_keys(self) -> dict[str, str]:
        return _named(map(routes_key, self._lines))

    def __bool__(self) -> bool:
        return bool(self._routes_keys)

    def require(self, redis_url: str, insecure: bool) -> None:
        """Require keys where other machines can write to Redis, unless the setting `insecure` allows it.

        Raises:
            PlanError: the writer of plans there is unknown.
        """
        if not (self or insecure or _only_local(redis_url)):
            why = "other machines write to this Redis, and plans in it are not signed"
            raise PlanError(why, field=FIELD, remedy=f"set {FIELD} for controller, agents and dispatchers")

    def sign_routes(self, plan: Plan) -> Plan:
        """Sign a plan with the first routes key; without keys it is returned unchanged."""
        return replace(plan, signature=_signature(self._routes_keys, self._routes_text(plan)))

    def verify_routes(self, plan: Plan) -> Plan:
        """Verify a plan's signature, where there are keys; returns the plan without it. Raises as `verify`."""
        bare, mend = replace(plan, signature=""), "the last plan that was obeyed stays in force"
        named = ("plan in Redis", str(plan.revision), mend)
        _verify(self._routes_keys, self._routes_text(bare), plan.signature, named)
        return bare

    def sign_rungs(self, told: TenantRungs) -> TenantRungs:
        """Sign rungs of budgets with the first routes key; without keys they are returned unchanged."""
        return replace(told, signature=_signature(self._routes_keys, self._rungs_text(told)))

    def verify_rungs(self, told: TenantRungs) -> None:
        """Verify the signature of rungs, where there are keys. Raises as `verify`."""
        mend = "the last rungs hold for a minute, then every tenant is served"
        named = ("tenant_rungs in Redis", str(told.epoch), mend)
        _verify(self._routes_keys, self._rungs_text(told), told.signature, named)

    def sign_jobs(self, plan: PlannedJobs) -> PlannedJobs:
        """Sign a plan of jobs with the first routes key; without keys it is returned unchanged."""
        return replace(plan, signature=_signature(self._routes_keys, self._jobs_text(plan)))

    def verify_jobs(self, plan: PlannedJobs) -> None:
        """Verify the signature of a plan of jobs, where there are keys. Raises as `verify`."""
        named = ("jobs:plan in Redis", str(plan.revision), "jobs follow the last plan for minutes, then run at once")
        _verify(self._routes_keys, self._jobs_text(plan), plan.signature, named)

    def sign(self, plan: NodePlan) -> NodePlan:
        """Sign a plan with the first key; without keys it stays as it is."""
        return replace(plan, signature=_signature(self._keys, self._plan_text(plan)))

    def verify(self, plan: NodePlan) -> NodePlan:
        """Verify a plan's signature, where there are keys; returns the plan without it.

        Raises:
            PlanError: it is not signed, by another key, or says something else than what was signed.
        """
        bare = replace(plan, signature="")
        mend = "the plan that runs stays until the controller sends the next"
        named = (f"plan of {plan.node} in Redis", str(plan.revision), mend)
        _verify(self._keys, self._plan_text(bare), plan.signature, named)
        return bare

    def sign_file(self, file: KeptFile) -> KeptFile:
        """Sign a controller's file with the first key; without keys it stays as it is."""
        return replace(file, signature=_signature(self._keys, self._file_text(file)))

    def verify_file(self, file: KeptFile) -> KeptFile:
        """Verify the signature of a controller's file, where there are keys; returns the file without it.

        Raises:
            PlanError: as `verify`.
        """
        bare, mend = replace(file, signature=""), "this controller goes on from its own disk"
        named = (f"kept:{file.name} in Redis", str(file.written), mend)
        _verify(self._keys, self._file_text(bare), file.signature, named)
        return bare

    def _plan_text(self, plan: NodePlan) -> str:
        """Text that is signed: JSON has no line breaks, so that the last line is the plan, and no cluster's name."""
        return f"trefoil node plan\n{self._cluster}\n{codec.to_json(replace(plan, signature=''))}"

    def _file_text(self, file: KeptFile) -> str:
        return f"trefoil kept file\n{self._cluster}\n{codec.to_json(replace(file, signature=''))}"

    def _rungs_text(self, told: TenantRungs) -> str:
        return f"trefoil tenant rungs\n{self._cluster}\n{codec.encode(replace(told, signature='')).hex()}"

    def _jobs_text(self, plan: PlannedJobs) -> str:
        return f"trefoil planned jobs\n{self._cluster}\n{codec.encode(replace(plan, signature='')).hex()}"

    def _routes_text(self, plan: Plan) -> str:
        """Of the message, not of JSON: half the time for 7,000 slices, and times as Redis holds them."""
        return f"trefoil plan\n{self._cluster}\n{codec.encode(replace(plan, signature='')).hex()}"


def routes_key(key: str) -> str:
    """Key that signs plans, derived from a plan key; a routes key is returned unchanged."""
    return key if key.startswith(ROUTES) else f"{ROUTES}{_digest(key, 'trefoil routes key')}"


def _read_keys(path: Path, routes: bool) -> Sequence[str]:
    keys = read_secret_lines(path, FIELD, KEYS_MAX)
    if min(map(len, keys)) < KEY_CHARS_MIN:
        raise SettingError(
            f"holds a key of less than {KEY_CHARS_MIN} characters", field=FIELD, value=str(path),
            remedy=f"make one: openssl rand -hex 32 > {path}",
        )  # fmt: skip
    if not routes and any(key.startswith(ROUTES) for key in keys):
        remedy = "give controllers and agents the plan key itself"
        raise SettingError("holds a routes key, which dispatchers use", field=FIELD, value=str(path), remedy=remedy)
    return keys


def _named(keys: Iterable[str]) -> dict[str, str]:
    return {_digest(key, "trefoil plan key")[:_NAME_CHARS]: key for key in keys}


def _signature(keys: Mapping[str, str], text: str) -> str:
    return next((f"{name}:{_digest(key, text)}" for name, key in keys.items()), "")


def _verify(keys: Mapping[str, str], text: str, signature: str, named: tuple[str, str, str]) -> None:
    """`named`: field, value, and what holds until it is fixed."""
    if not keys:
        return
    field, value, mend = named
    name, _, digest = signature.partition(":")
    if not name:
        remedy = f"set {FIELD} for the controller too; {mend}"
        raise PlanError("not signed, and only what is signed is taken here", field=field, remedy=remedy)
    key = keys.get(name)
    if key is None:
        here, remedy = " or ".join(keys), f"give all services the keys of one {FIELD}; {mend}"
        raise PlanError(f"signed with a key that is not {here}, this service's", field=field, value=name, remedy=remedy)
    if not hmac.compare_digest(digest.encode(), _digest(key, text).encode()):
        remedy = f"find out who else may write to Redis, and change its password; {mend}"
        raise PlanError("is not what the controller signed", field=field, value=value, remedy=remedy)


def _digest(key: str, text: str) -> str:
    return hmac.digest(key.encode(), text.encode(), "sha256").hex()


def _only_local(redis_url: str) -> bool:
    """Whether only processes of this machine reach Redis. Sentinels may name a primary anywhere."""
    url = urlsplit(redis_url)
    if url.scheme.endswith("+sentinel"):
        return False
    host = url.hostname or "localhost"
    return url.scheme == "unix" or rpc.is_loopback(f"[{host}]:0" if ":" in host else f"{host}:0")


def main(argv: Sequence[str]) -> int:
    """Print the routes keys of a file of plan keys; returns the exit code."""
    if len(argv) != 1:
        print(f"error: {' '.join(argv)!r}: not one file of plan keys. Remedy: name it", file=sys.stderr)
        return 2
    try:
        keys = read_secret_lines(Path(argv[0]), FIELD, KEYS_MAX)
    except SettingError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(map(routes_key, keys)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
