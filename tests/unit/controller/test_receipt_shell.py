"""What becomes of rates: published when they move, booked by the hour, compared with what was metered."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from controller.accounting.accountant import Accountant
from controller.accounting.core.receipts import Receipts
from controller.accounting.receipt_publisher import ReceiptPublisher
from controller.forecasters.last_max import LastMax
from controller.observe.core.observation import Observation
from controller.observe.reader import ObservationReader
from controller.role.disk_store import DiskStore
from controller.role.leadership import Leadership
from controller.settings import ControllerSettings
from tests.support.stores import state_on
from tests.support.virtual.redis import Server
from tests.unit.controller.test_receipts import CATALOG, KEYS, TYPE, node, sample
from tests.unit.controller.test_served import KNOWN, OBJECTIVE
from trefoil.core.catalog import Catalog
from trefoil.core.demand import LoadCell, LoadKey, LoadWindow
from trefoil.core.device_types import DEVICE_TYPES
from trefoil.core.energy import EnergyMethod, EnergySample, ReceiptRates
from trefoil.core.fleet import SliceKey
from trefoil.runtime.clock import ManualClock
from trefoil.runtime.telemetry import Metrics

NOW_S = 1_795_000_200.0
HOUR = "2026111811"


class World:
    """A controller's accounting on a store in memory, one second at a time. `before`: whose clock and store it has."""

    def __init__(
        self, folder: Path, catalog: Catalog = CATALOG, now_s: float = NOW_S, before: "World | None" = None
    ) -> None:
        self.clock = ManualClock(now_s) if before is None else before.clock
        self.server = Server(self.clock) if before is None else before.server
        self.state = state_on(self.server, "default", self.clock)
        self.settings = settings = ControllerSettings()
        receipts, predictor = Receipts(catalog), LastMax()
        now_s = self.clock.now_s()
        self.seen = Observation(settings, self.state.keys, catalog, predictor, now_s, receipts.window)
        self.reader = ObservationReader(self.seen, self.state, settings.carbon, self.clock)
        self.metrics, disk = Metrics("controller"), DiskStore(folder, 10)
        self.authority = Leadership(self.state, disk, self.clock, self.metrics, list)
        self.accountant = Accountant(
            settings, self.state, self.authority, self.seen, receipts, disk, self.metrics, self.clock
        )
        self.series = ReceiptPublisher(settings, self.state.keys, receipts, self.authority, self.clock)
        self.told: list[ReceiptRates] = []
        self.count = round(now_s - NOW_S) if before is None else before.count  # of windows and samples
        self._agent = None

    async def start(self) -> None:
        await self.authority._step()
        self._agent = await self.state.acquire("agent:n", "test", ttl_s=3600.0)
        await self.state.put(self._agent, self.state.keys.node("n"), node({KEYS[0]: "s"}))

    async def second(
        self, j_each: float, answered: int = 10, receipt_j: float = 0.0, lent: Sequence[str] = (), **metered
    ) -> None:
        """Answers and energy of one second, then one look."""
        await self.clock.advance(1.0)
        await self.authority._step()
        self.count += 1
        now_s, key = self.clock.now_s(), KEYS[0]
        cell = LoadCell(
            LoadKey("digits", "s", key), answered=answered, items=answered, receipt_j=receipt_j, receipts=answered
        )
        window = LoadWindow("d", 0, self.count, now_s - 1, now_s, cells=(cell,))
        await self.state.append_unfenced(self.state.keys.load("d", 0), window)
        energy = sample(
            SliceKey(key.device, key.slice_type, key.start, key.size), "s", answered * j_each, now_s, **metered
        )
        energy = replace(energy, seq=round(NOW_S) + self.count)
        await self.state.append(self._agent, self.state.keys.energy("n"), energy, 1000)
        await self.reader.refresh()
        assert self.seen.inputs.down == ""
        await self.accountant.refresh(["digits"], lent)
        await self.series.publish(None)
        told = await self.state.get(self.state.keys.receipts(), ReceiptRates)
        if told is not None and (not self.told or told != self.told[-1]):
            self.told.append(told)

    def metric(self, name: str, label: str = "digits") -> float | None:
        for family in self.metrics.collect():
            for each in family.samples:
                if each.name == name and label in each.labels.values():
                    return float(each.value)
        return None


@pytest.fixture
async def world(tmp_path):
    made = World(tmp_path)
    await made.start()
    return made


async def test_rates_are_published_when_they_move_and_again_before_they_are_old(world):
    for _ in range(12):
        await world.second(0.6)
    assert world.told[-1].rates[0].ratio == pytest.approx(1.2)
    assert (world.told[-1].pue, world.told[-1].series) == (1.2, world.settings.carbon.series)
    count = len(world.told)
    for _ in range(10):
        await world.second(0.6)
    assert len(world.told) == count, "nothing moved"
    for _ in range(10):
        await world.second(0.6)
    assert len(world.told) == count + 1, "they are repeated"
    for _ in range(10):
        await world.second(1.2)
    assert len(world.told) >= count + 2, "the slice draws twice as much"


async def test_a_new_epoch_publishes_at_once_what_was_overwritten_meanwhile(world):
    for _ in range(12):
        await world.second(0.6)
    await world.state.release(world.authority._lease)
    world.server.spoil(world.state.keys.receipts(), b"")
    count = len(world.told)
    await world.second(0.6)
    assert len(world.told) == count + 1


async def test_the_residual_is_booked_by_the_hour_and_shown(world):
    for _ in range(30):
        await world.second(0.6, receipt_j=5.7)
    assert world.metric("trefoil_receipt_residual_ratio") == pytest.approx(-0.05)
    assert world.metric("trefoil_active_joules_total") == pytest.approx(180.0)
    assert world.metric("trefoil_receipt_joules_total") == pytest.approx(171.0)
    await world.accountant.flush()
    (key,) = await world.state.names(world.state.keys.totals_prefix())
    totals = await world.state.totals(key)
    assert (totals["active_joules"], totals["receipt_joules"]) == (pytest.approx(180.0), pytest.approx(171.0))


async def test_time_that_was_not_metered_is_counted_by_node_from_0_on(world):
    await world.second(0.6)
    assert world.metric("trefoil_energy_unknown_seconds_total", "n") == 0
    await world.clock.advance(9.0)
    await world.second(0.6)
    await world.second(0.6)  # a gap is believed once its stream continues
    assert world.metric("trefoil_energy_unknown_seconds_total", "n") == pytest.approx(9.0)


async def test_where_nothing_is_metered_there_is_neither_a_rate_nor_a_residual(world):
    for _ in range(8):
        await world.second(0.0, method=EnergyMethod.NONE)
    assert world.told[-1].rates == ()
    assert world.metric("trefoil_receipt_residual_ratio") is None


async def test_base_is_booked_beside_what_was_metered_for_the_same_time_and_answers(tmp_path):
    world = World(tmp_path, KNOWN)
    await world.start()
    for _ in range(30):
        await world.second(0.6)
    await world.accountant.flush()
    totals = await world.state.totals(world.state.keys.totals("digits", HOUR))
    idle_j = 30 * DEVICE_TYPES[TYPE].idle_w
    assert totals["base_joules"] == pytest.approx(idle_j + 3.0 * 300, rel=0.02)
    assert totals["base_grams"] / totals["base_joules"] == pytest.approx(400 * 1.2 / 3.6e6)
    assert "base_unknown_s" not in totals
    window_s, (whole, *_) = world.accountant.served({"digits": OBJECTIVE}, world.clock.now_s())
    assert (window_s, whole.answered) == (pytest.approx(30.0), 300)
    assert whole.rate_per_s == 0.0, "these windows say only what was answered"
    assert whole.joules_per_request == pytest.approx(0.6)


async def test_where_base_has_no_profile_its_time_is_unknown(world):
    for _ in range(7):
        await world.second(0.6)
    await world.accountant.flush()
    (key,) = await world.state.names(world.state.keys.totals_prefix())
    totals = await world.state.totals(key)
    assert totals["base_unknown_s"] == pytest.approx(7.0)
    assert not totals.get("base_joules")


async def test_samples_that_are_sent_again_after_redis_and_controller_are_new_count_once(world, tmp_path):
    for _ in range(6):
        await world.second(0.6)
    await world.accountant.flush()
    assert world.accountant.unallocated_j == 0.0
    after = World(tmp_path, now_s=world.clock.now_s())  # another Redis, the same disk
    await after.start()
    stream = await world.state.stream(world.state.keys.energy("n"), EnergySample)
    for _, booked in stream:
        sent_again = replace(booked, unallocated_j=7.0, counter_j=13.0)
        await after.state.append(after._agent, after.state.keys.energy("n"), sent_again, 1000)
    await after.reader.refresh()
    await after.authority._step()
    await after.accountant.refresh(["digits"])
    await after.second(0.6)
    await after.accountant.flush()
    totals = await after.state.totals(after.state.keys.totals("digits", HOUR))
    assert totals["joules"] == pytest.approx(7 * 6.0), "what was booked before is not booked again"
