"""What the requests of a chaos run say. Pure: records, faults and notes in; failures with their excuses out.

A failed request is excused when it was in flight on what was hurt: on the slice whose Triton was killed or stopped (by
the dispatcher's own log of the failure), or, when a dispatcher worker was killed, on a connection that broke then.
Recovery of a fault is the time until requests are served again at the usual rate: after it no bin of BIN_S (by the
time of sending) has less than SERVED of its requests answered rightly within SLOW_S.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from benchmarks.chaos_faults import Fault
from benchmarks.echo_load import OK, WRONG, Record

FAILED_MAX: Final = 0.0005
RECOVERY_S_MAX: Final = 2.0
EXECUTIONS_MAX: Final = 1  # of one request: it is retried only if its slice certainly never took it
BIN_S: Final = 0.25
SERVED: Final = 0.99
SLOW_S: Final = 1.0
NOTICE_S: Final = 0.25  # until a connection's end is known to everybody
AFTER_S: Final = 30.0  # a slice that was stopped is given up by its agent: what was in flight on it ends then


@dataclass(frozen=True, slots=True)
class Logged:
    """One failure as the dispatcher logged it. `slice` is empty where the request was on none."""

    slice: str
    code: str
    details: str


@dataclass(slots=True)
class Row:
    """All faults of one kind."""

    faults: int = 0
    failed: int = 0
    failed_max: int = 0  # of one fault
    recovery_s: list[float] = field(default_factory=list)

    @property
    def recovery_s_max(self) -> float:
        return max(self.recovery_s, default=0.0)


@dataclass(slots=True)
class Verdict:
    """`broken` says which limits were, in words."""

    requests: int
    failed: int
    wrong: int
    unexcused: list[str]
    excused: list[str]
    executed_more: int  # requests that were executed more often than allowed
    answered_unexecuted: int
    failed_executed: int
    slow: int  # answered, but too late to count for the recovery
    rows: Mapping[str, Row]
    broken: list[str]


def judge(
    records: Sequence[Record],
    faults: Sequence[Fault],
    logged: Mapping[int, Logged],
    executed: Mapping[int, int],
    slow_s: float = SLOW_S,
) -> Verdict:
    """`logged` by nonce: failures that the dispatcher knows of; `executed`: times by nonce; `slow_s`: an answer after
    that long does not count for the recovery."""
    rows: dict[str, Row] = defaultdict(Row)
    blamed: Counter[int] = Counter()
    unexcused, excused = [], []
    for record in records:
        if record.code == OK:
            continue
        number = _excuse(record, faults, logged.get(record.nonce)) if record.code != WRONG else None
        if number is None:
            unexcused.append(_describe(record, faults, logged.get(record.nonce)))
        else:
            excused.append(_describe(record, faults, logged.get(record.nonce)))
            blamed[number] += 1
    for number, (fault, recovery_s) in enumerate(zip(faults, recoveries(records, faults, slow_s), strict=True)):
        row = rows[fault.kind]
        row.faults += 1
        row.failed += blamed[number]
        row.failed_max = max(row.failed_max, blamed[number])
        row.recovery_s.append(recovery_s)
    ok = {record.nonce for record in records if record.code == OK}
    verdict = Verdict(
        requests=len(records),
        failed=len(records) - len(ok),
        wrong=sum(record.code == WRONG for record in records),
        unexcused=unexcused,
        excused=excused,
        executed_more=sum(times > EXECUTIONS_MAX for times in executed.values()),
        answered_unexecuted=sum(nonce not in executed for nonce in ok),
        failed_executed=sum(r.code != OK and r.nonce in executed for r in records),
        slow=sum(r.code == OK and r.latency_s > slow_s for r in records),
        rows=dict(rows),
        broken=[],
    )
    verdict.broken += _broken(verdict)
    return verdict


def recoveries(records: Iterable[Record], faults: Sequence[Fault], slow_s: float = SLOW_S) -> list[float]:
    """Of each fault [s]: the end of the last bad bin before the next fault."""
    bins: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for record in records:
        counts = bins[int(record.sent_s / BIN_S)]
        counts[0] += 1
        counts[1] += record.served(slow_s)
    bad = sorted(number for number, (sent, served) in bins.items() if served < SERVED * sent and sent - served > 1)
    found = []
    for number, fault in enumerate(faults):
        ends_s = faults[number + 1].at_s if number + 1 < len(faults) else float("inf")
        late = [(n + 1) * BIN_S for n in bad if n * BIN_S > fault.at_s - BIN_S and n * BIN_S < ends_s - BIN_S]
        found.append(max(0.0, late[-1] - fault.at_s) if late else 0.0)
    return found


def _excuse(record: Record, faults: Sequence[Fault], logged: Logged | None) -> int | None:
    """The fault whose victim held the request; the latest of several."""
    for number in reversed(range(len(faults))):
        fault = faults[number]
        in_flight = record.sent_s <= fault.until_s + NOTICE_S and record.done_s >= fault.at_s
        if not in_flight:
            continue
        if fault.slice and logged is not None and logged.slice == fault.slice:
            return number
        if (
            fault.worker
            and logged is None
            and record.code == "UNAVAILABLE"
            and record.done_s <= fault.at_s + 4 * NOTICE_S
        ):
            return number
    return None


def _describe(record: Record, faults: Sequence[Fault], logged: Logged | None) -> str:
    before = [fault for fault in faults if fault.at_s <= record.done_s]
    after = f"{record.done_s - before[-1].at_s:.2f} s after {before[-1].what}" if before else "before any fault"
    where = "unknown to the dispatcher" if logged is None else f"on {logged.slice or 'no slice'}"
    return f"{record.nonce}: {record.code} after {record.latency_s:.2f} s, {after}, {where}: {record.details[:160]}"


def _broken(verdict: Verdict) -> list[str]:
    found = []
    if verdict.unexcused:
        found.append(f"{len(verdict.unexcused)} failed without having been in flight on what was hurt")
    if verdict.failed > FAILED_MAX * verdict.requests:
        found.append(f"{verdict.failed} of {verdict.requests} failed, more than {FAILED_MAX:.2%}")
    if verdict.wrong:
        found.append(f"{verdict.wrong} got another answer than their own")
    if verdict.executed_more:
        found.append(f"{verdict.executed_more} were executed more than {EXECUTIONS_MAX} time")
    if verdict.answered_unexecuted:
        found.append(f"{verdict.answered_unexecuted} were answered without having been executed")
    for kind, row in verdict.rows.items():
        if row.recovery_s_max > RECOVERY_S_MAX:
            found.append(f"{kind}: recovered after {row.recovery_s_max:.2f} s, limit {RECOVERY_S_MAX:g} s")
    return found
