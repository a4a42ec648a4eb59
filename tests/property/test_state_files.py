"""Whatever stands where a service keeps its state: it starts, or ends with one line that names the file; what cannot be
understood is set aside once, what is of a newer version stays as it is, and nothing is forgotten without a word."""

import copy
import json
import os
import random
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from carbon_feed.core.polling import PollUsage
from carbon_feed.forecast.archive import ForecastArchive
from carbon_feed.history.forecast_files import ForecastFiles
from carbon_feed.providers.polled import load_usage
from carbon_feed.reading.leader_election import load_epoch
from controller.loop.control_loop import load_saved_state
from controller.observe.core.load_windows import LoadWindows
from controller.role.by_command import KeptBudgets
from controller.role.disk_store import LOST, DiskStore
from controller.role.state_shapes import SHAPES
from controller.settings import ControllerSettings
from controller.thresholds import WindowSettings
from dispatcher.service.state_sync import TableFile
from power_agent.devices.rapl import RaplCounter, RaplReading
from power_agent.durability.journal import Journal
from power_agent.energy.energy_log import EnergyLog
from power_agent.runtimes.process import Record, _read_record
from tests.support.plans import plan_of, planned
from trefoil.cli.run.state_directory import Failing, Launch, StatePaths
from trefoil.core.carbon import Factors, Method, Series
from trefoil.core.common import Revision
from trefoil.core.errors import InvalidInput, TrefoilError
from trefoil.core.objective import Budget, Objective
from trefoil.core.plan import NodePlan, Plan
from trefoil.runtime import codec, state_files
from trefoil.runtime.proc import Identity
from trefoil.runtime.state_files import BAD, BAD_KEPT, of_shape, set_aside

PLAN = plan_of(planned("3g.20gb", 4))
BUDGET = {"window_s": 60.0, "buckets": [[1.0, 2.0, 1.5]], "hours": [[3, 4]], "first_hour": None}
KEPT = {
    "epoch": {"epoch": 7},
    "led": {"epoch": 7, "taken_over": [6, 1]},
    "lost": {"plans": LOST},
    "accounting": {
        "ids": {"energy:n": "1-0"},
        "hours": {"2026112717": {"f": {"joules": 1.0}}},
        "told": {"d": [1, 2.0]},
        "epoch": 7,
    },
    "control": {"mode": "ACT", "frozen": True, "pinned": False},
    "fleet_objective": {"max_watts": 400.0},
    "by_command": {"families": ["digits"], "mode": True, "max_watts": True},
    "objectives": [Objective("digits", slo_ms=100.0, number=2)],
    "plans": [PLAN],
    "published": PLAN,
    "commanded": [NodePlan(node="node0")],
    "budgets": {"digits": BUDGET},
    "counts": {"replans": {"load": 3}, "reconfigurations": {"load": 1}},
    "explorations": {
        "explorations": 1,
        "evaluations": 2,
        "refused": 0,
        "broken_off": 0,
        "spent_s": 1.5,
        "spent_j": 2.0,
    },
    "tenant_budgets": KeptBudgets((Budget("acme", grams_per_day=500.0, number=2),), (("acme", ""), ("", "digits"))),
    "spent": {"hours": {"2026111811": {"digits": {"acme": (3500.0, 0.5)}}}},
    "planner_memory": {"planner": "clover", "memory": {"version": 1, "known": {}}},
}
SERIES = Series("GB", method=Method.AVERAGE, factors=Factors.LIFECYCLE)
LAUNCH = Launch(
    "id",
    "c",
    "/s",
    Identity(1, 2),
    "redis://",
    {"a": "b"},
    {"a": "b"},
    "/s/n",
    "digits",
    "node0",
    "GB",
    (8200, 8300),
    1.0,
)
RECORD = Record("tag", "mark", "boot", ("tritonserver",), "gpu", "/log", "shm", groups=("/g",))


def open_controller(folder: Path) -> None:
    """All that a controller reads at its start, and what it makes of it first."""
    store = DiskStore(folder, 10)
    store.check_shapes()
    load_saved_state(store, ControllerSettings(), {o.family: o for o in store.load_all("objectives", Objective)})
    windows = LoadWindows(WindowSettings())
    windows.load_budgets(store.load_plain("budgets"), 1000.0)
    windows.budgets(1000.0) if hasattr(windows, "budgets") else None
    store.set_aside()


def open_journal(folder: Path) -> None:
    journal = Journal(folder, "boot", "load")
    try:
        journal.open()
    finally:
        journal.close()


def open_forecasts(folder: Path) -> None:
    files = ForecastFiles(folder, SERIES)
    for _ in files.load_into(ForecastArchive(SERIES), files.lines(), 1.8e9):
        pass


def write(path: Path, tree) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(codec.to_plain(tree)))


FORECASTS = ForecastFiles(Path(), SERIES).folder.name
# Where the file lies, what stands there (of lines: the first), and what reads it at a start.
FILES = {f"{name}.json": (tree, open_controller) for name, tree in KEPT.items()} | {
    "epoch-GB": (7, lambda f: load_epoch(f / "epoch-GB")),
    "polling-GB.json": (asdict(PollUsage(1, 2, 3, 4.0, 5.0, 6)), lambda f: load_usage(f / "polling-GB.json")),
    f"{FORECASTS}/2026-11-27.jsonl": ({"format": 1, "model": "blend"}, open_forecasts),
    "journal.jsonl": ({"load": "boot/load", "plan": NodePlan(node="node0")}, open_journal),
    "energy.0.jsonl": ({"n": 1, "samples": [], "states": {}}, lambda f: EnergyLog(f, 100).open()),
    "rapl.json": (
        RaplReading("boot", "id", 1.0, 2, {"zone": 3}),
        lambda f: RaplCounter._load_reading(SimpleNamespace(_reading_path=f / "rapl.json")),
    ),
    "runtime/tag.json": (RECORD, lambda f: _read_record(f / "runtime" / "tag.json")),
    "table.jsonl": (PLAN, lambda f: TableFile(f).load()),
    "run/launch.json": (asdict(LAUNCH), lambda f: StatePaths(f).read_launch()),
    "run/controller.json": (
        {"pid": 1, "start_ticks": 2, "started_at_s": 3.0, "failing": Failing(1, "exit code 2", "error", 4.0)},
        lambda f: StatePaths(f).failing(),
    ),
}
SOUND = {("run/controller.json", "null"), ("energy.0.jsonl", "empty"), ("energy.0.jsonl", "spaces")}
NOT_SET_ASIDE = ("run/", "forecasts-", "journal")  # read by a command; read by lines, of which some are strange


def opened(folder: Path, name: str) -> tuple[str, list]:
    """How a start ends: "" or its one line; and what was logged."""
    with structlog.testing.capture_logs() as log:
        try:
            FILES[name][1](folder)
        except TrefoilError as error:
            return str(error), log
    return "", log


@pytest.mark.parametrize("name", FILES)
def test_what_it_has_written_is_read_and_stays(name, tmp_path):
    write(tmp_path / name, FILES[name][0])
    text = (tmp_path / name).read_text()
    why, log = opened(tmp_path, name)
    assert not why
    assert not [line for line in log if line["log_level"] == "warning"]
    assert name == "journal.jsonl" or (tmp_path / name).read_text() == text


def test_every_shape_has_a_file():
    assert KEPT.keys() == SHAPES.keys()


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["inf", "nan", 2**63]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def mutated(tree, value, seed: int):
    """The tree with one drawn node replaced, left out, or added to."""
    draw, tree = random.Random(seed), copy.deepcopy(codec.to_plain(tree))
    places = [(None, None)]

    def walk(node) -> None:
        for key in range(len(node)) if isinstance(node, list) else list(node) if isinstance(node, dict) else ():
            places.append((node, key))
            walk(node[key])

    walk(tree)
    node, key = draw.choice(places)
    if node is None:
        return value
    if isinstance(node, dict) and draw.random() < 0.2:
        del node[key]
    else:
        node[key] = value
    return tree


@given(st.sampled_from(sorted(FILES)), JSON, st.integers(0, 2**32), st.binary(max_size=30) | st.none())
@settings(max_examples=120, deadline=None)
def test_whatever_else_stands_there_a_start_goes_on_or_names_the_file(tmp_path_factory, name, value, seed, raw):
    folder = tmp_path_factory.mktemp("state")
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    data = raw if raw is not None else json.dumps(mutated(FILES[name][0], value, seed)).encode()
    path.write_bytes(data)
    why, log = opened(folder, name)
    if why:
        assert str(path) in why
        assert path.read_bytes() == data
        return
    asides = list(path.parent.glob(f"{path.name}{BAD}*"))
    if asides:
        assert [p.read_bytes() for p in asides] == [data]
        assert [line["as_"] for line in log if "set aside" in line["event"]] == [path.name + BAD]
    why, log = opened(folder, name)
    assert not why
    assert not [line for line in log if "set aside" in line["event"]], "once is enough"


ODD = {
    "empty": lambda p: p.write_bytes(b""),
    "binary": lambda p: p.write_bytes(bytes(range(256))),
    "torn": lambda p: p.write_text('{"epoch": '),
    "a list": lambda p: p.write_text("[]"),
    "a list of nothing": lambda p: p.write_text("[{}]"),
    "null": lambda p: p.write_text("null"),
    "deep": lambda p: p.write_text("[" * 200_000),
    "a key twice": lambda p: p.write_text('{"epoch": 1, "epoch": 2}'),
    "NaN": lambda p: p.write_text('{"epoch": NaN}'),
    "beyond all numbers": lambda p: p.write_text('{"epoch": 1e999}'),
    "half a character": lambda p: p.write_text('{"epoch": "\\ud800"}'),
    "many digits": lambda p: p.write_text('{"epoch": ' + "9" * 10_000 + "}"),
    "sparse": lambda p: (p.write_bytes(b""), os.truncate(p, 2**40)),
    "a folder": lambda p: (p / "inner").mkdir(parents=True),
    "a FIFO": os.mkfifo,
    "a link to a device": lambda p: p.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", FILES)
def test_what_no_service_has_written_is_set_aside_or_named(name, odd, tmp_path):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    ODD[odd](path)
    why, log = opened(tmp_path, name)
    assert not why or str(path) in why
    if not name.startswith(NOT_SET_ASIDE) and (name, odd) not in SOUND:
        assert os.path.lexists(f"{path}{BAD}")
        assert not os.path.lexists(path)
        assert [line["as_"] for line in log if "set aside" in line["event"]] == [path.name + BAD]


@pytest.mark.parametrize(
    "changes", [{"created_at_s": 1e300}, {"optimality_gap": "inf"}, {"revision": {"epoch": 2**64}}]
)
def test_numbers_that_no_message_holds_are_another_shape(changes):
    tree = codec.to_plain(Plan(Revision(3, 1)))
    assert of_shape(Plan, tree) == Plan(Revision(3, 1))
    with pytest.raises(InvalidInput):
        of_shape(Plan, tree | changes)


@pytest.mark.parametrize("name", FILES)
def test_a_newer_version_is_named_and_left_as_it_is(name, tmp_path):
    write(tmp_path / name, {"version": 99})
    why, _ = opened(tmp_path, name)
    if name == "table.jsonl":  # serving continues: Redis has what it holds
        assert not why
        assert json.loads((tmp_path / f"{name}{BAD}").read_text()) == {"version": 99}
        return
    if name.startswith("forecasts-") or name == "run/controller.json":
        return  # lines of another format are passed over; the supervisor writes the other again
    assert str(tmp_path / name) in why
    assert "version 99" in why
    assert "Remedy: " in why
    assert json.loads((tmp_path / name).read_text()) == {"version": 99}


SENT = {"objectives.json": Objective, "plans.json": Plan, "published.json": Plan, "commanded.json": NodePlan}
STRAY = {
    "deep": "[" * 150 + "]" * 150,
    "deeper": "[" * 981 + "]" * 981,  # what parses it may not print it
    "deep object": '{"a":' * 480 + "1" + "}" * 480,
    "no text of UTF-8": '"\\ud800"',
    "beyond 64 bits": str(10**40),
    "no number": '"nan"',
    "a text for a list": '""',
    "an object for a list": "{}",
}


@pytest.mark.parametrize("stray", STRAY)
@pytest.mark.parametrize("name", FILES)
def test_one_stray_value_anywhere_is_set_aside_or_named_and_what_is_kept_can_be_sent(name, stray, tmp_path):
    plain = codec.to_plain(FILES[name][0])
    for seed in range(12):
        folder = tmp_path / str(seed)
        path = folder / name
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(mutated(plain, "@", seed)).replace('"@"', STRAY[stray]))
        why, _ = opened(folder, name)
        assert not why or str(path) in why
    if (cls := SENT.get(name)) is not None:
        for seed in range(12):
            store = DiskStore(tmp_path / str(seed), 10)
            found = store.load(path.stem, cls) if name == "published.json" else store.load_all(path.stem, cls)
            for one in found if isinstance(found, tuple) else filter(None, (found,)):
                assert codec.decode(cls, codec.encode(one)) == one


def test_few_are_kept_and_the_first_ones_for_good(tmp_path):
    path = tmp_path / "plans.json"
    for n in range(BAD_KEPT + 2):
        path.write_text(str(n))
        set_aside(path, "strange")
    kept = {p.name: p.read_text() for p in tmp_path.iterdir()}
    assert kept == {f"plans.json{BAD}": "0", f"plans.json{BAD}.1": "1", f"plans.json{BAD}.2": str(BAD_KEPT + 1)}


def test_an_unreadable_disk_is_no_lost_file(tmp_path, monkeypatch):
    write(tmp_path / "control.json", KEPT["control"])

    def refuse(*_):
        raise OSError(13, "Permission denied")

    monkeypatch.setattr(state_files, "read_plain", refuse)
    why, _ = opened(tmp_path, "control.json")
    assert str(tmp_path / "control.json") in why or "epoch.json" in why
    assert (tmp_path / "control.json").exists()
