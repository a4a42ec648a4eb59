"""Items of a job over two zones: whatever dies, is late or comes twice, each has exactly one result, and its own.

The home zone is played with its states, its journal and its file of parcels; the peer with the jobs that it has. Drawn
steps lose messages, processes and files, in any order; then all is well, and the job has to end.
"""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatcher.jobs.core.parcels import (
    AWAY,
    FREE,
    HERE,
    ItemStates,
    Parcel,
    check_answer,
    kept,
    restored,
)
from dispatcher.request.core.zone_choice import moved
from trefoil.core.errors import InvalidInput

ITEMS = 24
STEPS = (
    "read", "run", "flush", "pack", "submit", "submit in vain", "peer runs", "fetch", "fetch", "take back",
    "end parcel", "home restarts", "home restarts without its file", "home restarts with an old file",
    "peer forgets", "unread",
)  # fmt: skip


class World:
    """A job with its home and a peer."""

    def __init__(self) -> None:
        self.journal: dict[int, str] = {}  # what is on disk: item -> answer
        self.unwritten: dict[int, str] = {}
        self.file = self.old_file = "[]"
        self.there: dict[str, tuple[Parcel, set[int]]] = {}  # by parcel: its items that have answers there
        self.begin()

    def begin(self) -> None:
        done = bytearray(int(item in self.journal) for item in range(ITEMS))
        self.unwritten = {}
        self.states = ItemStates(done, restored(json.loads(self.file), ITEMS))
        self.here: list[int] = []

    def write_parcels(self) -> None:
        self.old_file, self.file = self.file, json.dumps(kept(self.states.parcels))

    def keep(self, item: int, answer: str) -> None:
        assert item not in self.journal, f"{item} is answered twice"
        assert item not in self.unwritten, f"{item} is answered twice"
        self.unwritten[item] = answer

    def flush(self) -> None:
        self.journal |= self.unwritten
        self.unwritten = {}

    def step(self, name: str, draw: int) -> None:
        parcels = self.states.parcels
        parcel = parcels[draw % len(parcels)] if parcels else None
        match name:
            case "read":
                self.here += self.states.claim(1 + draw % 5)
            case "unread":
                self.states.release(self.here)
                self.here = []
            case "run" if self.here:
                item = self.here.pop(draw % len(self.here))
                self.states.end(item)
                self.keep(item, f"home {item}")
            case "flush":
                self.flush()
            case "pack":
                made = self.states.pack("FAR", 1 + draw % 7, "a", 0.0)
                if made is not None:
                    self.states.shorten(made, 1 + draw % made.count)
                    self.write_parcels()
            case "submit" | "submit in vain" if parcel is not None:
                self.there.setdefault(parcel.id, (parcel, set()))
                parcel.sent = name == "submit"
            case "peer runs" if self.there:
                given, answered = list(self.there.values())[draw % len(self.there)]
                answered.add(draw % given.count)
            case "fetch" if parcel is not None and parcel.id in self.there:
                for index in sorted(self.there[parcel.id][1]):
                    if self.states.deliver(parcel, parcel.first + index):
                        self.keep(parcel.first + index, f"peer {parcel.first + index}")
            case "take back" if parcel is not None:
                self.states.take_back(parcel)
                self.write_parcels()
            case "end parcel" if parcel is not None:
                self.flush()
                self.states.forget(parcel)
                self.there.pop(parcel.id, None)
                self.write_parcels()
            case "home restarts":
                self.begin()
            case "home restarts without its file":
                self.file = "[]"
                self.begin()
            case "home restarts with an old file":
                self.file = self.old_file
                self.begin()
            case "peer forgets" if self.there:
                self.there.pop(list(self.there)[draw % len(self.there)])

    def check(self) -> None:
        away = [item for item in range(ITEMS) if self.states.of(item) == AWAY]
        assert self.states.away == len(away)
        for item in away:
            assert any(parcel.first <= item < parcel.end and not parcel.back for parcel in self.states.parcels)
        assert all(self.states.of(item) != FREE for item in range(self.states.next))
        assert sorted(self.here) == [item for item in range(ITEMS) if self.states.of(item) == HERE]


@settings(max_examples=150)
@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 1000)), max_size=60))
def test_each_item_has_one_result_whatever_dies(steps):
    world = World()
    for name, draw in steps:
        world.step(name, draw)
        world.check()
    while world.states.parcels:  # all is well again: parcels end, and the rest is run at home
        for name in ("submit", "peer runs", "fetch", "end parcel"):
            world.step(name, 0)
    while len(world.journal) < ITEMS:
        for name in ("read", "run", "flush"):
            world.step(name, 0)
        world.check()
    assert all(answer.endswith(f" {item}") for item, answer in world.journal.items())


def test_parcels_are_taken_from_the_end_and_only_from_what_nobody_has():
    states = ItemStates(bytearray(10))
    assert states.claim(4) == [0, 1, 2, 3]
    first = states.pack("FAR", 4, "a", 9.0)
    assert (first.first, first.end, states.away) == (6, 10, 4)
    assert states.pack("FAR", 100, "a", 9.0).first == 4
    assert states.pack("FAR", 1, "a", 9.0) is None
    states.take_back(first)
    assert states.claim(100) == [6, 7, 8, 9]
    assert not states.deliver(first, 7), "it is run here by now"


@pytest.mark.parametrize(
    "tree",
    [
        [{"id": "p", "zone": "FAR", "first": 3, "count": 9, "complete_by_s": 1.0, "back": False}],
        [{"id": "p", "zone": "FAR", "first": -1, "count": 2, "complete_by_s": 1.0, "back": False}],
        [{"id": "", "zone": "FAR", "first": 1, "count": 2, "complete_by_s": 1.0, "back": False}],
        [{"id": "p", "zone": "FAR"}],
        [{"id": "p", "zone": "FAR", "first": 1, "count": 2, "complete_by_s": 1.0, "back": 7}],
    ],
)
def test_a_file_of_parts_that_cannot_be_is_not_used(tree):
    with pytest.raises((TypeError, ValueError)):
        restored(tree, 10)


@pytest.mark.parametrize(
    ("index", "joules", "carbon_g", "says"),
    [
        (5, 1.0, 0.1, "results.item = 5: the parcel has 5 items"),
        (0, -1.0, 0.1, "receipt.energy_j = -1"),
        (0, float("nan"), 0.1, "receipt.energy_j = nan"),
        (0, 1e9, 0.1, "receipt.energy_j"),
        (0, 1.0, float("nan"), "receipt.carbon_g = nan: 1 J emit at most"),
        (0, 1.0, 1.0, "receipt.carbon_g = 1"),
    ],
)
def test_answers_that_cannot_be_are_refused(index, joules, carbon_g, says):
    with pytest.raises(InvalidInput, match=says) as refused:
        check_answer(Parcel("p", "FAR", 0, 5, 0.0), index, joules, carbon_g)
    assert "its items run here" in str(refused.value)


def test_moving_costs_joules_at_the_carbon_of_the_answer():
    assert moved(2e6, 216.0, 10.0, 0.5) == (432.0, pytest.approx(21.6))
    assert moved(2e6, 216.0, 0.0, 0.0) == (432.0, 0.0), "no receipt, no carbon"
