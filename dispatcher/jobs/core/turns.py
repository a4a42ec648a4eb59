"""Order in which jobs take idle slices. Pure.

Source: ours. Data: jobs, the slice seconds of each, which of them wait whatever is idle, the weights of tenants, the
time. Result: their order.
Formulation: the highest priority first, then the earliest deadline (EDF meets every deadline that can be met). A job
that is overdue shows that deadlines of its family cannot all be met. Its tenant then has an account, and all tenants
without such a job have one together, in which EDF goes on. Of equal priority the account with the least slice seconds /
weight is next. So a tenant's overdue jobs delay those of others by its own share at most. An account lasts while a job
of it can run; one that begins has the least of its family.
Deviations: a batch counts when it ends.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping

from dispatcher.jobs.core.job import Job

Account = tuple[str, str | None]  # family, tenant; None: of all that have no overdue job


class JobTurns:
    """Turns of the jobs of one worker. `weight_of`: share of a tenant against others'."""

    def __init__(self, weight_of: Callable[[str], float]) -> None:
        self._weight_of = weight_of
        self._used_s: dict[Account, float] = {}  # slice seconds / weight
        self._counted_s: dict[str, float] = {}  # of each job, by its name

    def order(self, slice_s: Mapping[Job, float], waiting: Collection[Job], calendar_s: float) -> list[Job]:
        """Jobs in their turn. `slice_s`: time of slices that each has had; `calendar_s`: time of deadlines [UTC s]."""
        able = [job for job in slice_s if job not in waiting]
        overdue = {(job.family, job.tenant) for job in able if job.complete_by_s <= calendar_s}
        accounts: dict[Job, Account] = {
            job: (job.family, job.tenant if (job.family, job.tenant) in overdue else None) for job in slice_s
        }
        tenants: dict[Account, set[str]] = defaultdict(set)
        for job in able:
            tenants[accounts[job]].add(job.tenant)
        before = self._used_s
        self._used_s = {key: before.get(key, _least(before, key[0])) for key in tenants}
        for job, used_s in slice_s.items():
            if (key := accounts[job]) in tenants:
                weight = sum(map(self._weight_of, tenants[key]))
                since_s = used_s - self._counted_s.get(job.id, used_s)
                self._used_s[key] += max(0.0, since_s) / weight  # less than before: the job runs from its start
        self._counted_s = {job.id: used_s for job, used_s in slice_s.items()}
        ahead_s = {key: used_s - _least(self._used_s, key[0]) for key, used_s in self._used_s.items()}
        return sorted(slice_s, key=lambda job: (-job.priority, ahead_s.get(accounts[job], 0.0), job.turn))


def _least(used_s: Mapping[Account, float], family: str) -> float:
    return min((each for (name, _), each in used_s.items() if name == family), default=0.0)
