"""Whose parts a contract suite holds to account: the whole table, one of ours as a user's own, and yours.

TREFOIL_CONTRACT_OWN="planner=mine.plans:Greedy,governor=mine.clocks:Slow" adds yours, which has to be importable.
"""

import os
from collections.abc import Iterable

from trefoil.core.parts import Kind


def names(kind: Kind, table: Iterable[str], ours: str) -> list[str]:
    """What a suite runs over."""
    given = filter(None, os.environ.get("TREFOIL_CONTRACT_OWN", "").split(","))
    yours = [path for kind_name, _, path in (one.partition("=") for one in given) if kind_name.strip() == kind]
    return [*sorted(table), ours, *yours]
