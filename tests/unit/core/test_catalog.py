"""A catalogue's parts: the same part is the same object, since indexes and planners' memos belong to it."""

from dataclasses import replace

from tests.support.planning import digits
from trefoil.core.catalog import PARTS_MAX, Catalog


def test_a_part_that_is_asked_for_again_is_the_same_object_and_few_are_kept():
    known = digits()
    (family,) = known.families
    whole = Catalog((family, replace(family, name="words")), known.rows)
    names = [family.name, "words"]
    one, both = whole.restrict({names[0]}), whole.restrict(names)
    assert whole.restrict([names[0]]) is one, "of what is planned"
    assert whole.restrict(set(names)) is both, "and of that with what lent devices hold, at each tick in turn"
    for number in range(PARTS_MAX):
        whole.restrict({names[0], f"unknown{number}"})
    assert whole.restrict({names[0]}) is not one
