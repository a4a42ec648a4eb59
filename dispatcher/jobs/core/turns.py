"""Order in which jobs take idle slices. Pure.

Source: ours. Data: jobs that run, the slices that each has, the weights of tenants, the time. Result: their order.
Formulation: the highest priority first, then the earliest deadline (EDF meets every deadline that can be met). While a
job is overdue, deadlines cannot all be met. Then tenants of equal priority share slices by weight: the next tenant is
the one with the least slice seconds / weight since then, and its jobs go by deadline. A tenant that comes begins at the
least of those that are here. So jobs that cannot be in time delay those of other tenants by their own share at most.
Deviations: one batch, the time that a slice is taken for.
"""

from collections.abc import Callable, Collection, Iterable, Mapping

from dispatcher.jobs.core.job import Job


class JobTurns:
    """Turns of the jobs of one worker. `weight_of`: share of a tenant against others'."""

    def __init__(self, weight_of: Callable[[str], float]) -> None:
        self._weight_of = weight_of
        self._used_s: dict[str, float] = {}  # slice seconds / weight by tenant, since a job is overdue
        self._at_s = 0.0

    def order(self, busy: Mapping[Job, Collection[object]], calendar_s: float, now_s: float) -> Iterable[Job]:
        """Jobs in their turn. `busy`: slices that each job has had since the last call. `calendar_s`: time of deadlines
        [UTC s]; `now_s`: monotonic time."""
        passed_s, self._at_s = now_s - self._at_s, now_s
        if all(job.complete_by_s > calendar_s for job in busy):
            self._used_s = {}
            return sorted(busy, key=lambda job: job.turn)
        tenants = {job.tenant for job in busy}
        least_s = min((used_s for tenant, used_s in self._used_s.items() if tenant in tenants), default=0.0)
        self._used_s = {tenant: max(least_s, self._used_s.get(tenant, least_s)) for tenant in tenants}
        for job, slices in busy.items():
            self._used_s[job.tenant] += passed_s * len(slices) / self._weight_of(job.tenant)
        return sorted(busy, key=lambda job: (-job.priority, self._used_s[job.tenant], job.turn))
