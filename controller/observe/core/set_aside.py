"""Values that were read and are not used, by the key that they stood at: for logs, `status` and a metric."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

SHOWN_S: Final = 600.0
KEYS_MAX: Final = 256
KINDS: Final = ("sample", "value", "window")


@dataclass(slots=True)
class _Of:
    count: int = 0
    why: str = ""
    at_s: float = 0.0


@dataclass(slots=True)
class SetAside:
    """Count of values that were set aside, and the last reason, by key; keys of the last SHOWN_S, at most KEYS_MAX."""

    _found: dict[str, _Of] = field(default_factory=dict)
    _uncounted: Counter[str] = field(default_factory=Counter)

    def note(self, key: str, kind: str, why: str, now_s: float) -> bool:
        """Note a value; returns whether it is the first of its key for a while, to be logged."""
        self._uncounted[kind] += 1
        self._found = {name: of for name, of in self._found.items() if now_s - of.at_s < SHOWN_S}
        first = key not in self._found
        if first and len(self._found) >= KEYS_MAX:
            return False
        of = self._found.setdefault(key, _Of())
        of.count, of.why, of.at_s = of.count + 1, why, now_s
        return first

    def lines(self, now_s: float) -> list[str]:
        """What was set aside of late, a line for each key."""
        found = sorted((key, of) for key, of in self._found.items() if now_s - of.at_s < SHOWN_S)
        return [f"{key}: {of.count} set aside, the last because of {of.why}" for key, of in found]

    def take_counts(self) -> dict[str, int]:
        """Values set aside since the last call, by kind; 0 counts too, so that the metric is there before the first."""
        found, self._uncounted = {kind: self._uncounted[kind] for kind in KINDS}, Counter()
        return found
