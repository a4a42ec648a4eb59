"""`make chaos ARGS='--redis'` in short: answers of a real Redis and of a stand-in."""

from pathlib import Path

import pytest

from benchmarks.chaos import redis_rows

pytestmark = [pytest.mark.integration, pytest.mark.slow]
WANTED = ("OOM", "READONLY", "LOADING")


@pytest.mark.timeout(400)
async def test_no_answer_of_redis_fails_a_request_or_ends_a_process(tmp_path: Path) -> None:
    rows, error_ratio = await redis_rows(3.0, WANTED.__contains__, tmp_path / "redis", print)
    assert [row.what for row in rows] == list(WANTED)
    for row in rows:
        assert (row.failed, row.ended) == (0, ()), row
        assert row.recovered_s is not None, row
    assert abs(error_ratio) < 0.1, "samples of a second, read within a minute"
