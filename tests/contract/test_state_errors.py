"""What each service does about each error of Redis, and about each key that somebody has written over.

One table: every key of `Keys` with its writer, its readers and what they do without it. A key without a row fails.
The services are real and run in virtual time on a Redis in this process (tests/support/virtual); what of it is the
power agent's and the feed's is shown on their own publishing loops.
"""

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import structlog
from redis import exceptions

from carbon_feed.core.observation import Observation
from carbon_feed.reading.loop import ZoneLoop
from carbon_feed.settings import CarbonFeedSettings
from power_agent.publisher import Publisher
from tests.support.stores import START_S, RedisStores, state_on
from tests.support.virtual.faults import ALL_REFUSED, WRITES_REFUSED
from tests.support.virtual.promises import told
from tests.support.virtual.redis import Server, Stream
from tests.support.virtual.system import SERIES, System, history
from trefoil.core import errors
from trefoil.core.carbon import CarbonReading, Quality
from trefoil.core.common import Revision
from trefoil.core.demand import LoadWindow, TableAck
from trefoil.core.energy import EnergyMethod, EnergySample
from trefoil.core.fleet import NodeStatus
from trefoil.core.plan import Plan
from trefoil.runtime import codec, state_errors
from trefoil.runtime.clock import ManualClock
from trefoil.runtime.fenced import Append, Put, SetFields
from trefoil.runtime.keys import Keys
from trefoil.runtime.state import State
from trefoil.runtime.telemetry import Metrics

KEYS: Final = Keys("default")
DOC: Final = Path(__file__).parents[2] / "docs" / "state.md"
FEED, AGENT, CONTROLLER, DISPATCHER = "feed", "agent", "controller", "dispatcher"


@dataclass(frozen=True, slots=True)
class Row:
    """A key: who writes it, who reads it, and what they do while it cannot be read."""

    key: str
    writer: str
    readers: str
    readers_do: str
    writer_does: str = "writes it again at one of the next renewals of the lease"
    documented: str = ""  # as docs/state.md spells it, where that is not the key's own beginning


APPENDS: Final = "deletes what is there, then appends; what it still has in memory is sent again"
ROWS: Final[Mapping[str, Row]] = {
    "epoch": Row(KEYS.epoch("controller"), "every leased role", "its writer, agents (the controller's)", "-",
                 "takes the role again under a higher epoch than it, the disks and the agents ever saw"),
    "lease": Row(KEYS.lease("controller"), "every leased role", "candidates", "take the role: it is nobody's lease",
                 "writes it again when it renews"),
    "writes": Row(KEYS.writes("controller"), "every leased role", "the fencing test", "-", "begins it anew"),
    "carbon_now": Row(KEYS.carbon_now(SERIES), FEED, "controller, dispatchers, CLI", "hold the last reading"),
    "carbon_history": Row(KEYS.carbon_history(SERIES), FEED, "feed, controller", "hold what they have read", APPENDS),
    "carbon_forecast": Row(KEYS.carbon_forecast(SERIES), FEED, "controller", "plans without one and says so"),
    "carbon_ratio": Row(KEYS.carbon_ratio(SERIES), FEED, "dispatchers", "route by none"),
    "carbon_scores": Row(KEYS.carbon_scores(SERIES), FEED, "feeds that follow, CLI", "hold the last ones"),
    "objective": Row(KEYS.objective("digits"), CONTROLLER, "CLI", "show none"),
    "plan": Row(KEYS.plan(), CONTROLLER, "dispatchers, agents", "keep the last good table; hold a drain"),
    "plan_node": Row(KEYS.plan_node("node0"), CONTROLLER, "agents at their start, dispatchers", "keep the last one"),
    "kept": Row(KEYS.kept("plans"), CONTROLLER, "the next controller", "continues from its own disk",
                "writes it again with the next change"),
    "rollout": Row(KEYS.rollout(), CONTROLLER, "CLI", "show none"),
    "decisions": Row(KEYS.decisions(), CONTROLLER, "CLI", "show those of the disk", APPENDS),
    "node": Row(KEYS.node("node0"), AGENT, "controller, dispatchers", "keep the last status until it is stale",
                "writes it every second"),
    "scale_signal": Row(KEYS.scale_signal("node0/gpu0"), AGENT, "controller, CLI", "see none",
                        "writes it every second while it stands"),
    "energy": Row(KEYS.energy("node0"), AGENT, "controller", "books nothing", APPENDS + ", by its `seq`"),
    "energy_minutes": Row(KEYS.energy_minutes("node0"), CONTROLLER, "CLI", "show none", APPENDS,
                          documented="energy:minutes:<node>"),
    "receipts": Row(KEYS.receipts(), CONTROLLER, "dispatchers", "keep the last rates and say `carried`"),
    "load": Row(KEYS.load("dispatcher0.1", 0), DISPATCHER, "controller", "counts nothing of that worker", APPENDS),
    "ack": Row(KEYS.ack("dispatcher0.1", 0), DISPATCHER, "agents, controller, workers",
               "count on the last one for as long as something stands there", "writes it every second"),
    "demand": Row(KEYS.demand("digits"), CONTROLLER, "CLI", "show none", APPENDS),
    "forecast_load": Row(KEYS.forecast_load("digits"), CONTROLLER, "CLI", "show none"),
    "jobs_open": Row(KEYS.jobs_open("f0"), DISPATCHER, "controller", "plans none of that folder's jobs",
                     "writes it every 20 s"),
    "jobs_plan": Row(KEYS.jobs_plan(), CONTROLLER, "dispatchers, CLI",
                     "follow the last one for 5 min, then run jobs at once", "written again, signed, within a minute"),
    "tenant_rungs": Row(KEYS.tenant_rungs(), CONTROLLER, "dispatchers", "obeyed for 60 s", "written again within 20 s"),
    "accounted": Row(KEYS.accounted(), CONTROLLER, "the next controller", "goes on from its disk",
                     "writes all of it every few seconds"),
    "totals": Row(KEYS.totals("digits", "2025061515"), CONTROLLER, "CLI", "show none",
                  "writes all of the sums every few seconds"),
}  # fmt: skip
METHOD: Final = EnergyMethod.NVML_COUNTER
NO_KEYS: Final = {"changed"}  # a channel


def test_every_key_has_a_row_here_and_in_the_document() -> None:
    methods = {
        name for name, _ in inspect.getmembers(Keys, inspect.isfunction) if not name.startswith("_")
    }  # `prefix` is a property
    prefixes = {name for name in methods if name.endswith("_prefix")}
    assert methods - prefixes - NO_KEYS == set(ROWS)
    document = DOC.read_text()
    for name, row in ROWS.items():
        words = row.documented or row.key.removeprefix(KEYS.prefix).split(":")[0]
        assert f"\n- `{words}" in document, name


# --- Errors -----------------------------------------------------------------------------------------------------------

REFUSALS: Final = {state_errors.code_of(Exception(text)) or "ERR": text for text in (*WRITES_REFUSED, *ALL_REFUSED)}


@pytest.mark.parametrize("text", [*WRITES_REFUSED, *ALL_REFUSED], ids=REFUSALS)
@pytest.mark.parametrize("everything", [False, True], ids=["writes", "everything"])
def test_whatever_redis_answers_no_service_ends_and_no_request_fails(text: str, everything: bool) -> None:
    def refused(system: System) -> None:
        name = "refuses" if everything else "refuses_writes"
        system.loop.call_later(9.0, setattr, system.server, name, text)
        system.loop.call_later(15.0, setattr, system.server, name, "")
        system.loop.call_later(15.0, setattr, system, "intensity", 90.0)  # to be decided about

    found, system = history(5, refused)
    assert not found, told(found, system.log)
    assert {end for request in system.requests for end in request.ends} == {"OK"}


async def _each_call(state: State) -> None:
    """Every call of `State` raises `StateUnavailable`."""
    lease = await state.acquire("controller", "somebody")
    assert lease is not None
    server: Server = state._client._server
    calls: dict[str, Callable[[], Any]] = {
        "ping": state.ping,
        "acquire": lambda: state.acquire("feed:GB", "somebody"),
        "renew": lambda: state.renew(lease),
        "holder": lambda: state.holder("controller"),
        "write": lambda: state.write(lease, [Put(KEYS.plan(), Plan(why="x"))]),
        "put_unfenced": lambda: state.put_unfenced(KEYS.ack("d", 0), TableAck("d")),
        "append_unfenced": lambda: state.append_unfenced(KEYS.load("d", 0), LoadWindow("d")),
        "delete_unfenced": lambda: state.delete_unfenced(KEYS.load("d", 0)),
        "get": lambda: state.get(KEYS.plan(), Plan),
        "names": lambda: state.names(KEYS.prefix),
        "scan": lambda: state.scan(KEYS.node_prefix(), NodeStatus),
        "stream": lambda: state.stream(KEYS.decisions(), Plan),
        "tail": lambda: state.tail(KEYS.decisions(), Plan),
        "fields": lambda: state.fields(KEYS.accounted()),
        "totals": lambda: state.totals(KEYS.totals("digits", "h")),
        "raw": lambda: state.raw(KEYS.plan(), 1),
    }
    reading = {"ping", "delete_unfenced", "holder", "get", "names", "scan", "stream", "tail", "fields", "totals", "raw"}
    for text in (*WRITES_REFUSED, *ALL_REFUSED):
        for name, call in calls.items():
            server.refuses = text if name in reading or text in ALL_REFUSED else ""
            server.refuses_writes = text
            with pytest.raises(errors.StateUnavailable, match=r"Redis .*Remedy: \S") as caught:
                await call()
            assert "Redis refuses" in str(caught.value), (name, str(caught.value))
    server.refuses = server.refuses_writes = ""
    await state.release(lease)


async def test_every_call_says_what_redis_answered_and_what_to_do() -> None:
    await _each_call(state_on(Server(ManualClock(START_S)), "default", ManualClock(START_S)))


def test_an_error_of_ours_is_a_bug() -> None:
    assert issubclass(exceptions.DataError, exceptions.RedisError), "which is why it is let through by name"


# --- Keys -------------------------------------------------------------------------------------------------------------

SPOILT: Final[Mapping[str, Any]] = {
    "random bytes": bytes(range(1, 40)),
    "no UTF-8": b"\xff\xfe\xfd",
    "empty": b"",
    "a number": b"123456789012345678901234567890123456789012345678901234567890123456789",
    "a list": [b"of somebody"],
    "a stream": "stream",
    "a hash": {b"field": b"\xff"},
    "deleted": None,
    "another key's value": "other",
    "its former value": "former",
}
AT_ONCE: Final = ("plan", "ack", "node", "energy")  # a writer each; the others take minutes
IN_SYSTEM: Final = [
    name
    for name, row in ROWS.items()
    if row.writer != FEED and name not in ("kept", "scale_signal", "jobs_open", "jobs_plan", "tenant_rungs")
]  # one disk is all that these controllers have, no governor of theirs wants capacity, and nobody submits a job


@pytest.mark.parametrize(
    "name", [name if name in AT_ONCE else pytest.param(name, marks=pytest.mark.long) for name in IN_SYSTEM]
)
def test_a_key_that_somebody_writes_over_ends_nothing_and_is_put_right(name: str) -> None:
    key = ROWS[name].key

    def spoil(system: System, how: str, value: Any) -> None:
        if value == "stream":
            value = Stream()
        elif value == "other":
            value = system.server.get(KEYS.node("node1") if "plan" in name else KEYS.plan())
        elif value == "former":
            value = system.server.former(key)
        system.note(f"SPOILT {key}: {how}")
        system.server.spoil(key, value)
        system.server.publish(KEYS.changed(), key)

    begins_s = 26.0 if name == "energy_minutes" else 14.0

    def all_of_them(system: System) -> None:
        for i, (how, value) in enumerate(SPOILT.items()):
            system.loop.call_later(
                begins_s + 0.8 * i, _if_there, system, key, lambda h=how, v=value: spoil(system, h, v)
            )

    found, system = history(6, all_of_them, real_bytes=True)
    assert not found, told(found, system.log)
    assert {end for request in system.requests for end in request.ends} == {"OK"}
    assert any("SPOILT" in line for line in system.log)


def _if_there(system: System, key: str, spoil: Callable[[], None]) -> None:
    if system.server.value(key) is not None:
        spoil()


@pytest.mark.parametrize("how", SPOILT)
async def test_nothing_that_stands_at_a_key_is_read_as_what_it_is_not(how: str) -> None:
    clock, server = ManualClock(START_S), Server(ManualClock(START_S))
    state = state_on(server, "default", clock)
    lease = await state.acquire("controller", "somebody")
    assert lease is not None
    good = NodeStatus(node="node1", observed_at_s=START_S)
    server.set(KEYS.node("node1"), codec.encode(good))
    other = codec.encode(replace(good, node="node2"))
    value = {"stream": Stream(), "other": other, "former": other}.get(str(SPOILT[how]), SPOILT[how])
    server.spoil(KEYS.node("node0"), value)
    assert await state.get(KEYS.node("node0"), NodeStatus) is None
    assert await state.scan(KEYS.node_prefix(), NodeStatus) == {KEYS.node("node1"): good}, "one bad costs one"
    for key, read in ((KEYS.decisions(), state.stream), (KEYS.energy("node0"), state.tail)):
        server.spoil(key, value)
        assert await read(key, Plan) == []
    server.spoil(KEYS.totals("digits", "h"), value)
    await state.totals(KEYS.totals("digits", "h"))
    writes = [Append(KEYS.decisions(), Plan(why="d"), 10), SetFields(KEYS.totals("digits", "h"), {"joules": 1.0})]
    for _ in range(2):
        with suppress(errors.StateUnreadable):
            await state.write(lease, writes)
    assert [plan.why for _, plan in await state.tail(KEYS.decisions(), Plan)] == ["d"]
    assert (await state.totals(KEYS.totals("digits", "h")))["joules"] == 1.0


@pytest.mark.parametrize(
    ("name", "text", "right"),
    [
        ("joules", "2.5", True), ("grams:normal", "-2.5", True), ("carbon_age_joule_s", "1e16", True),
        ("joules", "-2.5", False), ("requests", "1e300", False), ("grams", "-1e19", False), ("joules", "nan", False),
        ("joules", "inf", False), ("tenant_requests:a", "many", False), ("joules", "", False),
    ],
)  # fmt: skip
async def test_a_field_of_totals_that_is_no_sum_is_left_out_and_its_key_named_once(name, text, right) -> None:
    server = Server(ManualClock(START_S))
    state, key = state_on(server, "default", ManualClock(START_S)), KEYS.totals("digits", "h")
    server.set_totals(key, {b"tokens": b"7", name.encode(): text.encode()})
    with structlog.testing.capture_logs() as log:
        for _ in range(3):
            assert await state.totals(key) == {"tokens": 7.0} | ({name: float(text)} if right else {})
    assert (key in state.unreadable) is not right
    assert len(log) == (not right), "once"
    server.set_totals(key, {name.encode(): b"1"})
    await state.totals(key)
    assert key not in state.unreadable


async def test_a_value_that_has_not_changed_is_not_decoded_again(monkeypatch) -> None:
    server, decoded = Server(ManualClock(START_S)), []
    state, (key, gone) = state_on(server, "default", ManualClock(START_S)), (KEYS.ack("d", 0), KEYS.ack("d", 1))
    acks = [TableAck("d", 0, Revision(1, number), observed_at_s=START_S) for number in (1, 2)]
    real = state_errors.decode_value
    monkeypatch.setattr(state_errors, "decode_value", lambda *a: decoded.append(a[1]) or real(*a))
    server.set(gone, codec.encode(replace(acks[0], worker=1)))
    for data, expected, times in (
        (codec.encode(acks[0]), acks[0], 1), (codec.encode(acks[1]), acks[1], 1), (b"\xff", None, 3),
        (codec.encode(acks[1]), acks[1], 0), (codec.encode(acks[0]), acks[0], 1),
    ):  # fmt: skip
        server.set(key, data)
        decoded.clear()
        assert [await state.get(key, TableAck) for _ in range(3)] == [expected] * 3
        assert decoded == [key] * times
        assert (key in state.unreadable) is (expected is None)
    assert set(await state.scan(KEYS.ack_prefix(), TableAck)) == {key, gone}
    server.delete(gone)
    assert set(await state.scan(KEYS.ack_prefix(), TableAck)) == {key}
    assert state._read.keys() == {key}
    assert await state.get(key, Plan) != acks[0], "of another class it is another value"


async def test_bad_entries_of_a_stream_cost_themselves_only() -> None:
    clock, server = ManualClock(START_S), Server(ManualClock(START_S))
    state = state_on(server, "default", clock)
    key = KEYS.energy("node0")
    good = EnergySample("node0", "node0/gpu0", 1, START_S, START_S + 1.0, 5.0, idle_j=5.0, method=METHOD)
    bad = [b"\xff", codec.encode(EnergySample("node1", "x", 1, START_S, START_S + 1.0)),
           codec.encode(EnergySample("node0", "x", 1, 1.0, START_S))]  # fmt: skip
    for data in (*bad * 700, codec.encode(good), *bad):
        server.append(key, {b"d": data}, 10_000)
    server.append(key, {b"e": b"no field of ours"}, 10_000)
    assert [sample for _, sample in await state.stream(key, EnergySample)] == [good], "past two pages of bad ones"
    assert [sample for _, sample in await state.tail(key, EnergySample, 1)] == [good]
    assert key in state.unreadable


async def test_a_stream_begun_anew_is_read_from_its_start() -> None:
    clock = ManualClock(START_S)
    server = Server(clock)
    state = state_on(server, "default", clock)
    key = KEYS.energy("node0")
    sample = EnergySample("node0", "node0/gpu0", 7, START_S, START_S + 1.0, 5.0, idle_j=5.0, method=METHOD)
    server.append(key, {b"d": codec.encode(sample)}, 10)
    assert [found for _, found in await state.stream(key, EnergySample, "99999999999999-0")] == [sample]


@pytest.mark.integration
async def test_a_real_redis_and_its_scripts_do_the_same(shared_redis) -> None:
    stores = RedisStores(shared_redis)
    try:
        state = await stores.connect()
        client, keys = state._client, state.keys
        lease = await state.acquire("controller", "somebody")
        assert lease is not None
        totals = SetFields(keys.totals("digits", "h"), {"joules": 1.0})
        for key, write in (
            (keys.decisions(), Append(keys.decisions(), Plan(why="d"), 10)),
            (keys.totals("digits", "h"), totals),
        ):
            await client.delete(key)
            await client.rpush(key, b"a list")
            with pytest.raises(errors.StateUnreadable, match=key):
                await state.write(lease, [Put(keys.plan(), Plan(why="not written")), write])
            await state.write(lease, [write])
        assert await state.get(keys.plan(), Plan) is None, "all or nothing"
        await client.delete(keys.decisions())
        await client.xadd(keys.decisions(), {"d": b"x"}, id=f"{2**64 - 1}-{2**64 - 1}")
        with pytest.raises(errors.StateUnreadable):
            await state.append(lease, keys.decisions(), Plan(why="e"), 10)
        await state.append(lease, keys.decisions(), Plan(why="e"), 10)
        await client.delete(keys.load("d", 0))
        await client.rpush(keys.load("d", 0), b"a list")
        window = LoadWindow("d", 0, 1, START_S, START_S + 0.5)
        await state.append_unfenced(keys.load("d", 0), window)
        assert [found for _, found in await state.stream(keys.load("d", 0), LoadWindow)] == [window]
        await client.delete(keys.writes("controller"))
        await client.set(keys.writes("controller"), b"text")
        await state.put(lease, keys.plan(), Plan(why="first"))
        await client.set(keys.plan(), b"x" * (state_errors.VALUE_MAX_BYTES + 1))
        assert await state.get(keys.plan(), Plan) is None
        await client.delete(keys.rollout(), keys.lease("controller"))
        await client.rpush(keys.lease("controller"), b"a list")
        state._held["controller"].repaired_s = float("-inf")
        assert await state.renew(lease)
        assert (await state.get(keys.plan(), Plan)).why == "first", "put right by the renewal"
        for garbage in (b"", b"abc", b"\xff", b"9" * 100, b"99999999999999999999", b"1" + 12 * b"0", b"9" * 12):
            await client.set(keys.epoch("controller"), garbage)
            with pytest.raises(errors.Fenced):
                await state.put(lease, keys.plan(), Plan(why="second"))
            again = await state.acquire("controller", "somebody")
            assert again is not None, "its own lease is nothing to wait for"
            assert again.epoch == lease.epoch + 1
            lease = again
        await client.set(keys.lease("feed:GB"), b"forever")
        assert await state.acquire("feed:GB", "somebody") is not None
    finally:
        await stores.close()


# --- The feed and the agent ------------------------------------------------------------------------------------------


@dataclass
class _Provider:
    """Says the same at all times."""

    name: str = "scripted"
    speedup: float = 1.0

    async def read(self, now_s: float) -> Observation:
        return self.history(now_s, 1)[0]

    def history(self, now_s: float, count_max: int) -> tuple[Observation, ...]:
        start_s = now_s // 60 * 60
        return (Observation(start_s, start_s + 60.0, 200.0, Quality.MEASURED, "scripted", "", "", start_s, True),)


@dataclass
class _Feed:
    """A feed's loop over one zone, in steps."""

    folder: Path
    clock: ManualClock = field(default_factory=lambda: ManualClock(START_S))

    async def start(self) -> None:
        self.server = Server(self.clock)
        self.state = state_on(self.server, "default", self.clock)
        settings = CarbonFeedSettings(state_dir=self.folder)
        provider: Any = _Provider()
        self.loop = ZoneLoop(settings, provider, self.state, self.clock, Metrics("carbon_feed"))
        self.keys = self.state.keys
        await self.loop.init()

    async def ticks(self, seconds: float) -> None:
        for _ in range(round(2 * seconds)):
            self.clock.move(0.5)
            await self.loop.tick()
            assert self.loop.reading is not None
            assert self.loop.reading.intensity_g_per_kwh == 200.0


@pytest.mark.parametrize("name", ["carbon_now", "carbon_history", "epoch", "lease", "writes"])
async def test_a_feed_serves_on_whatever_stands_at_its_keys_and_puts_them_right(name: str, tmp_path: Path) -> None:
    feed = _Feed(tmp_path)
    await feed.start()
    await feed.ticks(3.0)
    role = f"feed:{feed.loop.series.zone}"
    now, past = feed.keys.carbon_now(feed.loop.series), feed.keys.carbon_history(feed.loop.series)
    of_role = {"epoch": feed.keys.epoch(role), "lease": feed.keys.lease(role), "writes": feed.keys.writes(role)}
    key = {"carbon_now": now, "carbon_history": past}.get(name) or of_role[name]
    for value in SPOILT.values():
        feed.server.spoil(key, Stream() if value == "stream" else None if value in ("other", "former") else value)
        await feed.ticks(8.0)
        assert feed.loop.leading
        assert (await feed.state.get(now, CarbonReading)) == feed.loop.reading
        entries = [reading for _, reading in await feed.state.tail(past, CarbonReading)]
        assert entries, "the history is there again"


@pytest.mark.parametrize("text", [*WRITES_REFUSED, *ALL_REFUSED], ids=REFUSALS)
async def test_a_feed_serves_on_whatever_redis_answers(text: str, tmp_path: Path) -> None:
    feed = _Feed(tmp_path)
    await feed.start()
    await feed.ticks(3.0)
    feed.server.refuses = feed.server.refuses_writes = text
    await feed.ticks(20.0)
    health = feed.loop.health(feed.clock.now_s())
    assert not health.redis_answers
    feed.server.refuses = feed.server.refuses_writes = ""
    await feed.ticks(6.0)
    assert feed.loop.leading
    stored = await feed.state.get(feed.keys.carbon_now(feed.loop.series), CarbonReading)
    assert stored == feed.loop.reading


class _Agent:
    """What publishes of an agent, in steps."""

    def __init__(self) -> None:
        self.clock = ManualClock(START_S)
        self.server = Server(self.clock)
        self.state = state_on(self.server, "default", self.clock)
        self.ring: list[EnergySample] = []
        journal = SimpleNamespace(state=SimpleNamespace(lease_epoch=0), raise_lease_epoch=lambda _: None)
        node = SimpleNamespace(
            settings=SimpleNamespace(node="node0", lease_ttl_s=3.0, sample_period_s=1.0),
            clock=self.clock, journal=journal, metrics=Metrics("power_agent"), epoch=0,
            devices={"node0/gpu0": SimpleNamespace(scale_signal=None)},
            changes=SimpleNamespace(notify=lambda: None), note_published=lambda _: None,
            status=lambda: NodeStatus(node="node0", observed_at_s=self.clock.now_s(), applied=Revision(1, 1)),
        )  # fmt: skip
        made: Any = node
        log: Any = SimpleNamespace(ring=self.ring)
        self.publisher = Publisher(made, self.state, log)

    async def seconds(self, count: int) -> None:
        for _ in range(count):
            self.clock.move(1.0)
            now_s = self.clock.now_s()
            sample = EnergySample(
                "node0", "node0/gpu0", len(self.ring) + 1, now_s - 1.0, now_s, 10.0, idle_j=10.0, method=METHOD
            )
            self.ring.append(sample)
            self.publisher.publish([sample])
            await self.publisher.step()

    async def published(self) -> list[int]:
        entries = await self.state.stream(self.state.keys.energy("node0"), EnergySample)
        return [sample.seq for _, sample in entries]


@pytest.mark.parametrize("name", ["node", "energy", "epoch", "lease", "writes"])
async def test_an_agent_loses_no_joule_whatever_stands_at_its_keys(name: str) -> None:
    agent = _Agent()
    await agent.seconds(3)
    keys = agent.state.keys
    key = {"node": keys.node("node0"), "energy": keys.energy("node0"), "epoch": keys.epoch("agent:node0"),
           "lease": keys.lease("agent:node0"), "writes": keys.writes("agent:node0")}[name]  # fmt: skip
    for value in SPOILT.values():
        agent.server.spoil(key, Stream() if value == "stream" else None if value in ("other", "former") else value)
        await agent.seconds(8)
        status = await agent.state.get(keys.node("node0"), NodeStatus)
        assert status is not None
        assert status.observed_at_s == agent.clock.now_s()
        first = len(agent.ring) - 7 if value is None or isinstance(value, str) else 1
        assert set(await agent.published()) >= set(range(first, len(agent.ring) + 1))


@pytest.mark.parametrize("text", [*WRITES_REFUSED, *ALL_REFUSED], ids=REFUSALS)
async def test_an_agent_loses_no_joule_whatever_redis_answers(text: str) -> None:
    agent = _Agent()
    await agent.seconds(3)
    agent.server.refuses = agent.server.refuses_writes = text
    await agent.seconds(20)
    agent.server.refuses = agent.server.refuses_writes = ""
    await agent.seconds(6)
    assert await agent.published() == list(range(1, len(agent.ring) + 1))


@pytest.mark.parametrize("seq", [10, 23, 2**31, 10**12 - 1])
async def test_a_false_sample_keeps_no_true_one_from_being_sent_again(seq: int) -> None:
    agent = _Agent()
    await agent.seconds(3)
    agent.server.refuses = agent.server.refuses_writes = WRITES_REFUSED[0]
    await agent.seconds(20)
    lie = replace(agent.ring[-1], seq=seq, counter_j=9.0, idle_j=9.0)
    agent.server.append(agent.state.keys.energy("node0"), {b"d": codec.encode(lie)}, 1000)
    agent.server.refuses = agent.server.refuses_writes = ""
    await agent.seconds(6)
    assert await agent.publisher.newest() == {"node0/gpu0": agent.ring[-1]}
    true = [sample for _, sample in await agent.state.stream(agent.state.keys.energy("node0"), EnergySample)]
    assert [sample.seq for sample in true if sample.counter_j == 10.0] == list(range(1, len(agent.ring) + 1))


@pytest.mark.parametrize("seq", [4, 5, 2**31])
async def test_an_agent_goes_on_from_no_sample_that_continues_none(seq: int) -> None:
    agent = _Agent()
    await agent.seconds(3)
    last = agent.ring[-1]
    lie = replace(last, seq=seq, starts_at_s=last.ends_at_s - 30.0, mark_j=0.0, origin="nobody")
    agent.server.append(agent.state.keys.energy("node0"), {b"d": codec.encode(lie)}, 1000)
    assert await agent.publisher.newest() == {"node0/gpu0": agent.ring[-1]}


@pytest.mark.parametrize(
    ("data", "epoch"),
    [(b"12", 12), (b"-1", 0), (b"", 0), (b"10000000000000", 0), pytest.param(5000 * b"1", 0, id="long")],
)
def test_an_epoch_that_cannot_be_is_none(data, epoch):
    assert state_errors.parse_epoch(data) == epoch
