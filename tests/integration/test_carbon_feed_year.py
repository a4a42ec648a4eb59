"""A fast replay through the real feed and Redis leaves nothing out; the whole year is `make bench-carbon`."""

import pytest

from benchmarks.carbon_feed_year import measure

pytestmark = pytest.mark.integration


async def test_every_half_hour_of_two_weeks_is_recorded_once_with_its_own_value():
    found = await measure(14, 1.5, print, limit_s=60.0)
    assert found.recorded == found.half_hours == found.served == 14 * 48
    assert found.wrong == 0
    assert found.wall_s < found.limit_s
