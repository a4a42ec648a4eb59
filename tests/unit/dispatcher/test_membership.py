"""Who shares credits: none is ever used twice, a plan's mix holds at each worker, and every family is reached."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatcher.routing.core import credit_shares, membership, routing_table
from dispatcher.routing.core.credit_shares import UNEVEN, Part
from dispatcher.routing.core.membership import AGREE_MAX_S, LOST_S, RESTART_STEP, Membership, WorkerId
from tests.unit.dispatcher.worlds import node, plan, route, status, target
from trefoil.core.common import Revision
from trefoil.core.demand import TableAck
from trefoil.core.plan import RouteTarget

WORKERS = st.sets(st.tuples(st.sampled_from(["d1", "d2", "d3"]), st.integers(0, 3)), min_size=1, max_size=8)
CREDITS = st.lists(st.integers(1, 5), min_size=1, max_size=6)
"""Of slices 0, 1, ...: those with an even number are of one class, the others of another."""


def targets(credits: list[int]) -> list[RouteTarget]:
    variants = ("digits-xs", "digits-l")
    return [target(n, variants[n % 2], 0.1 * (1 + n % 2), count) for n, count in enumerate(credits)]


class Cluster:
    """Workers that read and write acknowledgements one step at a time. Dead ones hold nothing, and cannot tell."""

    def __init__(self, plans: list[list[int]]) -> None:
        self.plans = [credit_shares.credit_classes(targets(credits)) for credits in plans]
        self.acks: dict[WorkerId, TableAck] = {}
        self.live: dict[WorkerId, Membership] = {}
        self.tables: dict[WorkerId, int] = {}
        self.parts: dict[WorkerId, Part] = {}
        self.dead: set[WorkerId] = set()
        self.now_s = 0.0
        self._numbers, self._stamps = itertools.count(), itertools.count(1)

    def join(self, _: WorkerId | None = None) -> None:
        number = next(self._numbers)
        worker = (f"d{number % 2}", number // 2)
        self.live[worker], self.tables[worker], self.parts[worker] = Membership(worker), 0, {}
        self.read(worker)  # as a worker does before it serves
        self.tell(worker)

    def build(self, worker: WorkerId) -> None:
        """What a worker does whenever it has heard something."""
        mine, number = self.live[worker], self.tables[worker]
        dealt = self.plans[number]
        right = credit_shares.entitled_credits(
            dealt, credit_shares.serving_workers("digits", mine.sharers, dealt), worker
        )
        agreed = mine.agrees(Revision(1, number), self.now_s)
        self.parts[worker] = credit_shares.usable_credits(right, self.parts[worker], agreed)

    def tell(self, worker: WorkerId) -> None:
        mine = self.live[worker]
        table_ = Revision(1, self.tables[worker])
        stamp_s = float(next(self._stamps))
        self.acks[worker] = TableAck(*worker, table_, (), stamp_s, leaving=mine.leaving, counts=mine.sharer_names)

    def read(self, worker: WorkerId) -> None:
        self.live[worker].update(self.acks.values(), self.now_s)
        self.build(worker)

    def plan(self, worker: WorkerId) -> None:
        self.tables[worker] = min(self.tables[worker] + 1, len(self.plans) - 1)
        self.build(worker)

    def leave(self, worker: WorkerId) -> None:
        self.live[worker].set_leaving(True)
        self.build(worker)

    def die(self, worker: WorkerId) -> None:
        del self.live[worker], self.parts[worker]
        self.dead.add(worker)

    def notice(self, worker: WorkerId) -> None:
        for dead in self.dead:
            self.live[worker].mark_dead(dead, self.now_s)
        self.build(worker)

    def bury(self, _: WorkerId) -> None:
        for dead in self.dead:
            self.acks.pop(dead, None)

    def play(self, steps: list[tuple[str, int]]) -> None:
        """All steps; after each, no credit is used by two workers, whoever knows of whatever."""
        for _ in range(3):
            self.join()
        self.settle(0)
        for step, choice in steps:
            if self.live or step == "join":
                workers = sorted(self.live)
                getattr(self, step)(workers[choice % len(workers)] if workers else None)
            assert not self.twice(), (step, self.parts)

    def twice(self) -> list[object]:
        used = Counter((s, n) for held in self.parts.values() for s, credits in held.items() for n in credits)
        return [credit for credit, count in used.items() if count > 1]

    def settle(self, plan: int = -1) -> None:
        """Everybody tells and reads until nothing is new: rounds to hear of all, to hear all renew it, and to agree."""
        self.bury(("", 0))
        for worker in list(self.live) * 4:
            self.notice(worker)
            self.tables[worker] = plan % len(self.plans)
            self.tell(worker)
            self.read(worker)
            self.tell(worker)


STEPS = st.lists(
    st.tuples(st.sampled_from(["join", "tell", "read", "plan", "leave", "die", "notice", "bury"]), st.integers(0, 7)),
    max_size=80,
)


@settings(max_examples=300)
@given(steps=STEPS, plans=st.lists(CREDITS, min_size=1, max_size=3))
def test_no_credit_is_ever_used_twice_whoever_comes_goes_or_reads_late(steps, plans):
    cluster = Cluster(plans)
    cluster.play(steps)
    if cluster.live:
        cluster.settle()
        assert not cluster.twice()
        used = sum(len(credits) for held in cluster.parts.values() for credits in held.values())
        assert used == sum(plans[-1]), "and once all have heard all, none is left over"


@given(steps=STEPS, credits=CREDITS)
def test_every_family_with_a_live_slice_is_reached_from_every_worker(steps, credits):
    cluster = Cluster([credits])
    cluster.play(steps)
    if not cluster.live:
        cluster.join()
    cluster.settle()
    written = plan([route(targets(credits))])
    statuses = [node([status(t.slice.start, variant=t.variant) for t in targets(credits)])]
    tables = {
        worker: routing_table.build_table(written, statuses, {}, mine.sharers, worker)
        for worker, mine in cluster.live.items()
    }
    serving = {worker for worker, built in tables.items() if built.live("digits")}
    planned: Counter[str] = Counter()
    for each in targets(credits):
        planned[each.variant] += each.weight / sum(t.weight for t in targets(credits))
    for worker, built in tables.items():
        assert built.served("digits")
        assert built.held["digits"] == cluster.parts[worker]
        reached = {worker} if worker in serving else set(built.elsewhere["digits"])
        assert reached <= serving, "one hop is enough"
    for worker in serving:
        mix: Counter[str] = Counter()
        for each in tables[worker].live("digits"):
            mix[each.variant] += each.weight
        assert mix == pytest.approx(planned), "the plan's mix holds at each"


@given(credits=CREDITS, workers=WORKERS)
def test_parts_are_all_there_is_and_nearly_equal_in_each_class(credits, workers):
    dealt = credit_shares.credit_classes(targets(credits))
    among = credit_shares.serving_workers("digits", sorted(workers), dealt)
    parts = {worker: credit_shares.entitled_credits(dealt, among, worker) for worker in workers}
    assert {worker for worker, part in parts.items() if part} == set(among)
    for group in dealt:
        total = sum(t.credits for t in group)
        mine = [sum(len(parts[worker].get(t.slice, ())) for t in group) for worker in among]
        assert sum(mine) == total
        assert max(mine) - min(mine) <= 1
        assert min(mine) >= 1
        assert len(among) == 1 or max(mine) * len(among) <= UNEVEN * total


def test_credits_for_all_are_divided_on_every_slice_and_single_ones_go_whole():
    workers = [("d1", n) for n in range(4)]
    many = credit_shares.credit_classes([target(n, credits=4) for n in range(3)])
    for worker in workers:
        assert all(len(credits) == 1 for credits in credit_shares.entitled_credits(many, workers, worker).values())
    single = credit_shares.credit_classes([target(n, credits=1) for n in range(7)])
    assert sorted(len(credit_shares.entitled_credits(single, workers, worker)) for worker in workers) == [1, 2, 2, 2]
    assert len(credit_shares.serving_workers("digits", workers, single)) == 4
    few = credit_shares.credit_classes([target(0, credits=1), target(1, "digits-s", credits=8)])
    assert len(credit_shares.serving_workers("digits", workers, few)) == 1, (
        "whoever has no slice of a class cannot keep its share"
    )


def test_a_place_keeps_what_it_had_when_its_worker_is_started_again():
    workers = [("d1", 0), ("d1", 1), ("d1", 2)]
    again = [("d1", 0), ("d1", 1 + 3 * RESTART_STEP), ("d1", 2)]
    for family in ("digits", "emotion", "frames", "words"):
        chosen, later = (membership.worker_place(membership.rank_workers(family, each)[0]) for each in (workers, again))
        assert chosen == later
        assert membership.worker_place(membership.sequence_owner(family, workers, "d1")) == membership.worker_place(
            membership.sequence_owner(family, again, "d1")
        )


def test_sequences_have_an_owner_in_each_dispatcher_that_serves_the_family():
    workers = [("d1", 0), ("d1", 1), ("d2", 0), ("d2", 1)]
    served_by = membership.rank_workers("digits", workers)
    assert membership.sequence_owner("digits", served_by, "d1")[0] == "d1"
    assert membership.sequence_owner("digits", served_by, "d2")[0] == "d2"
    assert membership.sequence_owner("digits", [("d1", 0)], "d2") == ("d1", 0), "none here: the one that there is"


def ack(worker: WorkerId, *counts: WorkerId, leaving: bool = False, address: str = "unix:/x") -> TableAck:
    return TableAck(
        *worker, peer_target=address, leaving=leaving, counts=tuple(membership.worker_name(w) for w in counts)
    )


def hear(mine: Membership, now_s: float, *acks: TableAck) -> bool:
    """Acknowledgements that were renewed since the look before."""
    mine.update([replace(one, observed_at_s=now_s - 0.1) for one in acks], now_s - 0.1)
    return mine.update([replace(one, observed_at_s=now_s) for one in acks], now_s)


def test_a_worker_that_refuses_connections_is_out_at_once_and_its_acknowledgement_does_not_bring_it_back():
    mine, other = Membership(("d1", 0)), ("d1", 1)
    assert hear(mine, 1.0, ack(other, ("d1", 0)))
    assert mine.sharers == (("d1", 0), other)
    assert mine.mark_dead(other, 2.0)
    assert mine.sharers == (("d1", 0),)
    assert not hear(mine, 3.0, ack(other, ("d1", 0))), "what it said before it died"
    assert hear(mine, 20.0, ack(other, ("d1", 0))), "it still says so: it lives after all"


def test_an_emptied_redis_is_no_proof_of_death_while_the_connection_stands():
    mine, other = Membership(("d1", 0)), ("d1", 1)
    hear(mine, 1.0, ack(other, ("d1", 0)))
    mine.mark_connected(other)
    assert not mine.update([], 2.0)
    assert other in mine.sharers
    mine.mark_disconnected(other)
    assert mine.update([], 3.0)
    assert mine.sharers == (("d1", 0),)


@pytest.mark.parametrize("connected", [False, True])
@pytest.mark.parametrize("worker", [("a", 0), ("d1", 1), ("d1", RESTART_STEP), ("d1", 9 * RESTART_STEP + 1)])
@pytest.mark.parametrize("stamp_s", [0.0, 1.0, 1e11])
def test_an_acknowledgement_that_nobody_renews_never_shares_and_ends_nobody(worker, connected, stamp_s):
    mine, other, table_ = Membership(("d1", 0)), ("d1", 1001), Revision(1, 7)
    stray = replace(ack(worker, leaving=False), observed_at_s=stamp_s)
    if connected:
        mine.mark_connected(worker)  # something listens at the address that it names
    for second in range(1, 20):
        lives = replace(ack(other, ("d1", 0), other), table=table_, observed_at_s=float(second))
        mine.update([stray, lives], float(second))
        assert mine.sharers == ((("d1", 0), other) if second > 1 else (("d1", 0),))
        assert mine.agrees(table_, float(second)) == (second > 2), "it is awaited once"


def test_a_worker_that_starts_waits_until_what_stands_there_is_renewed_but_not_for_ever():
    mine, other, table_ = Membership(("d2", 0)), ("d1", 0), Revision(1, 7)
    mine.update([ack(other, other)], 1.0)
    assert mine.sharers == (("d2", 0),)
    assert not mine.agrees(table_, 1.0), "or both would use all credits"
    assert mine.agrees(table_, 1.0 + AGREE_MAX_S)
    renewed = replace(ack(other, other), observed_at_s=2.0)
    assert mine.update([renewed], 2.2)
    assert mine.sharers == (other, ("d2", 0))
    assert mine.update([renewed], 2.3 + LOST_S), "and not again"
    assert mine.sharers == (("d2", 0),)


def test_the_next_life_of_a_worker_ends_the_one_before():
    mine = Membership(("d1", 0))
    hear(mine, 1.0, ack(("d1", 1)), ack(("d1", 1 + RESTART_STEP)))
    assert mine.sharers == (("d1", 0), ("d1", 1 + RESTART_STEP))
    reborn = Membership(("d1", RESTART_STEP))
    hear(reborn, 1.0, ack(("d1", 0)))
    assert reborn.sharers == (("d1", RESTART_STEP),), "our own life before this one"


@pytest.mark.parametrize("all_leave", [False, True])
def test_who_leaves_takes_no_share_while_anybody_stays(all_leave):
    mine, other = Membership(("d1", 0)), ("d2", 0)
    hear(mine, 1.0, ack(other, ("d1", 0), leaving=all_leave))
    mine.set_leaving(True)
    assert mine.sharers == ((("d1", 0), other) if all_leave else (other,))


def test_agreement_is_awaited_but_not_for_ever():
    mine, other, table_ = Membership(("d1", 1)), ("d1", 0), Revision(1, 7)
    assert mine.agrees(table_, 0.0), "alone"
    hear(mine, 1.0, ack(other))
    assert not mine.agrees(table_, 1.0), "it does not count us"
    hear(mine, 1.1, ack(other, ("d1", 1), ("d1", 0)))
    assert not mine.agrees(table_, 1.1), "it routes by another table"
    hear(mine, 1.2, replace(ack(other, ("d1", 1), ("d1", 0)), table=table_))
    assert mine.agrees(table_, 1.2)
    late = Membership(("d1", 2))
    hear(late, 1.0, ack(other))
    assert not late.agrees(table_, 1.0)
    assert late.agrees(table_, 1.0 + AGREE_MAX_S)
    hear(late, 3.0, ack(other), ack(("d1", 3)))
    assert not late.agrees(table_, 3.0), "something new is awaited anew"
