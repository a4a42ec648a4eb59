"""The semantic cache: never a length whose prompt is below the threshold, never more entries than it may hold."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatcher.lengths.core.semantic_cache import SemanticCache

STEPS = st.lists(
    st.tuples(st.booleans(), st.integers(0, 2**31), st.integers(1, 500), st.floats(0.0, 2.0)), min_size=1, max_size=60
)


def vector(seed: int, spread: float) -> np.ndarray:
    """One of few directions, more or less off it."""
    rng = np.random.default_rng(seed)
    found = np.eye(4)[seed % 4] + spread * rng.normal(size=4)
    return (found / np.linalg.norm(found)).astype(np.float32)


@pytest.mark.hypothesis
@settings(max_examples=200, deadline=None)
@given(steps=STEPS, threshold=st.sampled_from([0.5, 0.8, 0.95]))
def test_what_it_tells_was_learned_of_a_prompt_at_or_above_the_threshold(steps, threshold):
    cache, learned = SemanticCache(4, threshold, entries_max=8), []
    for learns, seed, length, spread in steps:
        asked = vector(seed, spread)
        if learns:
            cache.learn(asked, length)
            learned.append((asked, length))
        elif (told := cache.length(asked)) is not None:
            assert any(float(kept @ asked) >= threshold - 1e-6 and length == told for kept, length in learned)
        assert len(cache) <= 8


def test_the_most_similar_prompt_counts_and_a_newer_length_takes_an_older_ones_place():
    cache = SemanticCache(2)
    cache.learn(np.array([1.0, 0.0], np.float32), 10)
    cache.learn(np.array([0.0, 1.0], np.float32), 20)
    assert cache.length(np.array([0.8, 0.6], np.float32)) == 10
    assert cache.length(np.array([0.6, 0.8], np.float32)) == 20
    assert cache.length(np.array([0.7071, 0.7071], np.float32)) is None
    cache.learn(np.array([1.0, 0.0], np.float32), 30)
    assert (len(cache), cache.length(np.array([1.0, 0.0], np.float32))) == (2, 30)


def test_who_was_not_used_for_longest_gives_its_place_and_no_number_is_kept():
    cache = SemanticCache(3, entries_max=2)
    first, second, third = np.eye(3, dtype=np.float32)
    cache.learn(first, 1)
    cache.learn(second, 2)
    assert cache.length(first) == 1
    cache.learn(third, 3)
    assert [cache.length(each) for each in (first, second, third)] == [1, None, 3]
    cache.learn(np.full(3, np.nan, np.float32), 9)
    assert cache.length(np.full(3, np.nan, np.float32)) is None
