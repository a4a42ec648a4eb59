"""A job on real Tritons with the real model, while requests come and the dispatcher that may own it is killed."""

import pytest

from benchmarks.jobs_served import measure

pytestmark = [pytest.mark.integration, pytest.mark.slow]


async def test_each_item_is_answered_once_and_right_though_its_owner_is_killed(tmp_path):
    jobs_dir = tmp_path / "jobs"
    found = await measure(tmp_path, jobs_dir, 1500, 15.0, 0, 0.0, ["kill a dispatcher"], print)
    assert found.faults(judged=False) == []
    assert (found.answered, found.requests_failed) == (1500, 0)
