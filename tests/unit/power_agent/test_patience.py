"""How long a Triton may take until it answers: as its variants need, not as one setting says for all."""

import dataclasses

from power_agent.slices.core.patience import LOAD_SLACK_RATIO, load_timeout_s
from tests.support.plans import CATALOG
from trefoil.core.fleet import Hosted

FAMILY = CATALOG.families[0]
VARIANT = FAMILY.best
HOSTED = Hosted(FAMILY.name, VARIANT.name, VARIANT.version)


def catalog(load_s: float):
    variants = tuple(dataclasses.replace(one, load_s=load_s) for one in FAMILY.variants)
    return dataclasses.replace(CATALOG, families=(dataclasses.replace(FAMILY, variants=variants),))


def test_a_large_model_gets_the_time_that_it_takes():
    assert load_timeout_s((HOSTED,), catalog(120.0), 30.0) == 120.0 * LOAD_SLACK_RATIO
    assert load_timeout_s((HOSTED, HOSTED), catalog(120.0), 30.0) == 240.0 * LOAD_SLACK_RATIO


def test_a_small_one_gets_what_the_setting_says_and_so_does_one_that_nobody_knows():
    assert load_timeout_s((HOSTED,), catalog(2.5), 30.0) == 30.0
    assert load_timeout_s((Hosted("ghost", "ghost-l", 1),), catalog(120.0), 30.0) == 30.0
