"""Patience with a Triton that loads: no setting fits a family of megabytes and one of many gigabytes. Pure."""

from collections.abc import Iterable
from typing import Final

from trefoil.core.catalog import Catalog
from trefoil.core.fleet import Hosted

LOAD_SLACK_RATIO: Final = 3.0  # a cold disk, and others that start at the same time


def load_timeout_s(hosted: Iterable[Hosted], catalog: Catalog, least_s: float) -> float:
    """Time to give these variants until they answer [s]: a multiple of what family.toml says they take (`load_s`), and
    never less than `least_s`."""
    seconds = {
        (family.name, variant.name): variant.load_s for family in catalog.families for variant in family.variants
    }
    return max(least_s, LOAD_SLACK_RATIO * sum(seconds.get((one.family, one.variant), 0.0) for one in hosted))
