"""Signatures of what stands in Redis and is obeyed: node plans, and the files that a controller leaves the next one.
HMAC-SHA256 under a key that controllers and agents hold in a file, and Redis does not. Signed are cluster, kind, name,
revision and all that is said, so that nothing passes for something else.
"""

import hmac
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from trefoil.core.common import KeptFile
from trefoil.core.errors import PlanError, SettingError
from trefoil.core.plan import NodePlan
from trefoil.runtime import codec
from trefoil.runtime.config import read_secret_lines

FIELD: Final = "plan_key_file"
KEYS_MAX: Final = 2
KEY_CHARS_MIN: Final = 32
_NAME_CHARS: Final = 8


class PlanKeys:
    """Keys of one cluster's node plans: the first signs, each verifies. Without any, plans stay unsigned."""

    def __init__(self, cluster: str, keys: Sequence[str] = ()) -> None:
        self._cluster = cluster
        self._keys = {_digest(key, "trefoil plan key")[:_NAME_CHARS]: key for key in keys}

    @classmethod
    def read(cls, cluster: str, path: Path | None) -> "PlanKeys":
        """Read the keys of a file, one a line; None: no keys.

        Raises:
            SettingError: it cannot be read, others may read it, or it holds no keys.
        """
        if path is None:
            return cls(cluster)
        keys = read_secret_lines(path, FIELD, KEYS_MAX)
        if min(map(len, keys)) < KEY_CHARS_MIN:
            raise SettingError(
                f"holds a key of less than {KEY_CHARS_MIN} characters", field=FIELD, value=str(path),
                remedy=f"make one: openssl rand -hex 32 > {path}",
            )  # fmt: skip
        return cls(cluster, keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def sign(self, plan: NodePlan) -> NodePlan:
        """Sign a plan with the first key; without keys it stays as it is."""
        return replace(plan, signature=self._signature(self._plan_text(plan)))

    def verify(self, plan: NodePlan) -> NodePlan:
        """Verify a plan's signature, where there are keys; returns the plan without it.

        Raises:
            PlanError: it is not signed, by another key, or says something else than what was signed.
        """
        bare = replace(plan, signature="")
        mend = "the plan that runs stays until the controller sends the next"
        self._verify(self._plan_text(bare), plan.signature, (f"plan of {plan.node} in Redis", str(plan.revision), mend))
        return bare

    def sign_file(self, file: KeptFile) -> KeptFile:
        """Sign a controller's file with the first key; without keys it stays as it is."""
        return replace(file, signature=self._signature(self._file_text(file)))

    def verify_file(self, file: KeptFile) -> KeptFile:
        """Verify the signature of a controller's file, where there are keys; returns the file without it.

        Raises:
            PlanError: as `verify`.
        """
        bare, mend = replace(file, signature=""), "this controller goes on from its own disk"
        self._verify(self._file_text(bare), file.signature, (f"kept:{file.name} in Redis", str(file.written), mend))
        return bare

    def _signature(self, text: str) -> str:
        return next((f"{name}:{_digest(key, text)}" for name, key in self._keys.items()), "")

    def _verify(self, text: str, signature: str, named: tuple[str, str, str]) -> None:
        """`named`: field, value, and what holds until it is mended."""
        if not self._keys:
            return
        field, value, mend = named
        name, _, digest = signature.partition(":")
        if not name:
            remedy = f"set {FIELD} for the controller too; {mend}"
            raise PlanError("not signed, and only what is signed is taken here", field=field, remedy=remedy)
        key = self._keys.get(name)
        if key is None:
            here, remedy = " or ".join(self._keys), f"give controllers and agents the same {FIELD}; {mend}"
            raise PlanError(
                f"signed with a key that is not {here}, this service's", field=field, value=name, remedy=remedy
            )
        if not hmac.compare_digest(digest.encode(), _digest(key, text).encode()):
            remedy = f"find out who else may write to Redis, and change its password; {mend}"
            raise PlanError("is not what the controller signed", field=field, value=value, remedy=remedy)

    def _plan_text(self, plan: NodePlan) -> str:
        """Text that is signed: JSON has no line breaks, so that the last line is the plan, and no cluster's name."""
        return f"trefoil node plan\n{self._cluster}\n{codec.to_json(replace(plan, signature=''))}"

    def _file_text(self, file: KeptFile) -> str:
        return f"trefoil kept file\n{self._cluster}\n{codec.to_json(replace(file, signature=''))}"


def _digest(key: str, text: str) -> str:
    return hmac.digest(key.encode(), text.encode(), "sha256").hex()
