"""Whose turn is next, for shares that must bind: proportionate fairness, earliest deadline first.

Formulation: class k with share w_k and lag l_k (what it is owed, in requests). At each turn l_k += w_k for all; among
    the classes with l_k > 0 the one whose lag would reach 1 first, argmin (1 - l_k) / w_k, takes it: l_k -= 1. The
    m-th turn of a class from now is therefore released at turn floor((m - l_k) / w_k) and due at (m + 1 - l_k) / w_k:
    two heaps give the order, at a cost that hardly grows with the number of classes.
Source: Baruah et al., Algorithmica 1996; WF2Q, Bennett and Zhang, INFOCOM 1996.
"""

import heapq
from collections.abc import Sequence
from typing import Final

EPSILON: Final = 1e-9  # sums of binary fractions: a lag of 1e-16 is none
GRID: Final = (
    2.0**24
)  # deadlines are equal if they agree to so small a part of a turn: the class named first goes first


def turns(shares: Sequence[float], lags: Sequence[float], count: int) -> list[int]:
    """The classes (by position) of the next `count` turns. Shares are positive and sum to 1, lags sum to 0."""
    classes = len(shares)
    if classes == 1:
        return [0] * count
    periods = [1.0 / share for share in shares]
    next_ = [0] * classes  # how many turns of each class are dealt
    # Both heaps hold whole numbers, time * classes + class: they compare faster than tuples.
    released = [int((EPSILON - lags[k]) * periods[k]) * classes + k for k in range(classes)]
    heapq.heapify(released)
    due: list[int] = []
    order = []
    for turn in range(count):
        while released and (released[0] < (turn + 1) * classes or not due):
            k = heapq.heappop(released) % classes
            heapq.heappush(due, int((next_[k] + 1 - lags[k]) * periods[k] * GRID + 0.5) * classes + k)
        k = due[0] % classes
        order.append(k)
        number = next_[k] = next_[k] + 1
        release = int((number - lags[k] + EPSILON) * periods[k])
        if release <= turn + 1:
            heapq.heapreplace(due, int((number + 1 - lags[k]) * periods[k] * GRID + 0.5) * classes + k)
        else:
            heapq.heappop(due)
            heapq.heappush(released, release * classes + k)
    return order
