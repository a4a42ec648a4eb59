"""When a client that is gone had no time left."""

import pytest

from dispatcher.request.admission import overdue


@pytest.mark.parametrize(
    ("timeout_s", "left_at_s", "late"),
    [
        (0.3, 0.31, True),
        (0.3, 0.2999, True),  # the way here took the rest
        (0.3, 0.29, False),
        (1.5, 1.4925, True),  # 1,491 ms were sent as 1,500
        (1.5, 1.4, False),
        (60.0, 59.5, True),
        (60.0, 59.0, False),
    ],
)
def test_a_client_whose_time_is_up_leaves_before_our_clock_says_so(timeout_s, left_at_s, late):
    assert overdue(100.0 + timeout_s, 100.0, 100.0 + left_at_s) is late


def test_who_waits_for_ever_is_never_late():
    assert not overdue(None, 100.0, 1e9)
