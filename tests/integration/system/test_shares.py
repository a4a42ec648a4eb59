"""What was served is what was planned, near idle, at medium load, and just below the plan's capacity."""

from collections import Counter

import pytest

from tests.integration.system.conftest import Serving
from tests.support.system import begun_anew, load, plan_in_force, until, windows

pytestmark = pytest.mark.integration

SHARE_ERROR_MAX = 0.01
REQUESTS_MIN = 220  # one request more or less is then half a percent


@pytest.mark.parametrize("load_ratio", [0.20, 0.60, 0.95])
async def test_served_shares_are_the_planned_shares(serving: Serving, load_ratio: float):
    async with serving.system.client() as system:
        plan = await plan_in_force(system)
        (route,) = plan.routes
        rate_per_s = load_ratio * plan.expected[route.family].capacity_per_s
        since_s = await begun_anew(system)
        result = await load(serving.system.inference, rate_per_s, max(10.0, 1.1 * REQUESTS_MIN / rate_per_s))
        summary = result.summary(slo_ms=100.0)

        async def flushed() -> Counter[tuple[str, str]] | None:
            counted: Counter[tuple[str, str]] = Counter()
            for window in await windows(system, since_s):
                for cell in window.cells:
                    if cell.answered:
                        counted[cell.key.variant, cell.key.slice.slice_type] += cell.answered
            return counted if counted.total() >= summary.answered else None

        served = await until(flushed, 60.0, "the last window is not there within")
    assert (summary.failed, summary.requests >= REQUESTS_MIN * 0.9) == (0, True)
    planned: Counter[tuple[str, str]] = Counter()
    by_variant: Counter[str] = Counter()
    for target in route.targets:
        planned[target.variant, target.slice.slice_type] += target.weight
        by_variant[target.variant] += target.weight
    assert set(served) == set(planned)
    for key, share in planned.items():
        print(f"{load_ratio:.0%}: {key}: planned {share:.4f}, served {served[key] / served.total():.4f}")
        assert served[key] / served.total() == pytest.approx(share, abs=SHARE_ERROR_MAX)
    for variant, share in by_variant.items():  # as clients saw it
        assert summary.variant_shares[variant] == pytest.approx(share, abs=SHARE_ERROR_MAX)
    assert served.total() == summary.answered
    print(f"{load_ratio:.0%}: {summary.requests} requests, p95 {summary.latency_ms_p95:.0f} ms")
