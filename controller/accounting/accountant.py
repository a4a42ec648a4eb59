"""Accounting of energy and carbon: energy streams joined with readings, by family and hour; receipt rates published.

grams = counter_j / 3.6e6 x intensity at the sample x PUE (CONTRACTS section 4): idle, sleep, warm-up, moves included.
A gap in a stream is recorded as `unknown_s`, never interpolated. A sample without a method adds nothing and turns the
per-request values of its time into None. Totals are whole sums, written together with the position in each stream: a
repeated write, or a new leader, counts nothing twice and leaves nothing out.
"""

import datetime
import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from controller.accounting.core.bookings import bookings, embodied_bookings
from controller.accounting.core.budgets import DAY_HOURS_MAX, HourSpend, hour_spend
from controller.accounting.core.modelled_base import ModelledBase, model_base
from controller.accounting.core.receipts import (
    JoinedSample,
    Receipts,
    sum_by_family,
)
from controller.accounting.core.served import Served, served_by_class
from controller.accounting.proof import booked_minutes, stored_sums
from controller.explore.core import candidate_measurement
from controller.explore.core.candidate_measurement import GAP_S, UNMEASURED
from controller.observe.core.observation import Observation
from controller.observe.reader import AHEAD_S
from controller.role.disk_store import DiskStore
from controller.role.kept_files import LED
from controller.role.leadership import Leadership
from controller.settings import ControllerSettings
from trefoil.core import errors
from trefoil.core.accounting import by_family, fold, per_request, reading_at
from trefoil.core.carbon import CarbonReading
from trefoil.core.catalog import Catalog
from trefoil.core.energy import EnergySample
from trefoil.core.fleet import DeviceType
from trefoil.core.objective import Objective
from trefoil.core.outside.plausible import HOUR, power_fault
from trefoil.core.outside.stream_order import FOLDED_MAX, JOIN_S, StreamOrder
from trefoil.core.units import grams
from trefoil.runtime.clock import Clock
from trefoil.runtime.fenced import Append, SetFields, Write
from trefoil.runtime.state import State, entry_order
from trefoil.runtime.telemetry import Metrics

TOTALS_TTL_S = 90 * 86_400.0
MINUTES_MAX = 90 * 24 * 60 * 8  # 90 days of a node with eight devices
FLUSH_S = 5.0
HOURS_KEPT = 2  # whose totals are written again each time: of whatever happens to them in Redis nothing stays
SAMPLES_MAX = 100_000  # of one exploration: a day of one device
HELD_MAX_S = 5.0  # that totals wait for the successor of a sample which does not continue the one before
RESIDUAL_S = 600.0  # over which trefoil_receipt_residual_ratio compares receipts with metered energy
FOLLOWED_S, FOLLOWED_MAX = 60.0, 10_000  # of a stream, before the entry up to which it is booked
LATE_S = 5.0  # by how much the samples of two devices may be out of order


@dataclass(slots=True)
class _Recent:
    """What a family drew and emitted lately: (ends_at_s, joules, grams), and until when of it is not known."""

    drawn: "deque[tuple[float, float, float]]" = field(default_factory=deque)
    unmeasured_until_s: float = 0.0


@dataclass(slots=True)
class _Span:
    """When a device was lent last [UTC s], as far as that was looked at."""

    since_s: float
    until_s: float
    over: bool = False


@dataclass(slots=True)
class _Booked:
    """How much of growing counts is booked."""

    counts: dict[tuple[str, str], float] = field(default_factory=dict)

    def grown(self, counts: Mapping[tuple[str, str], float]) -> Iterator[tuple[tuple[str, str], float]]:
        """By how much each has grown since the last look; it counts as booked."""
        for key, count in counts.items():
            new = count - self.counts.get(key, 0.0)
            if new > 0:
                self.counts[key] = count
                yield key, new


class Accountant:
    """Accountant of energy and grams: tails every node's energy stream and books it by family and hour."""

    def __init__(
        self,
        settings: ControllerSettings,
        state: State,
        leadership: Leadership,
        observation: Observation,
        receipts: Receipts,
        disk: DiskStore,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self._settings, self._state, self._leadership, self._observation = settings, state, leadership, observation
        self.receipts, self._disk, self._metrics, self._clock = receipts, disk, metrics, clock
        self._joined_samples: deque[JoinedSample] = deque()
        self._ids: dict[str, str] = {}
        self._hours: dict[str, dict[str, dict[str, float]]] = {}  # sums by hour, family and name, as they are written
        self._attempted_ids: dict[str, str] = {}  # of the last write of totals
        self._past: dict[str, HourSpend] = {}  # hours of the last day that are not in `_hours` any more
        self._epoch = 0
        self._recent: dict[str, _Recent] = {}
        self._unwritten: dict[str, dict[str, float]] = {}
        self._minute: dict[str, list[EnergySample]] = {}
        self._folded: deque[tuple[str, EnergySample]] = deque(maxlen=SAMPLES_MAX)
        # Of each device, as its agent said; a node's status proves its devices.
        self._order = StreamOrder[EnergySample](self._set_aside, FOLDED_MAX)
        self._families: Sequence[str] = ()
        self._last: dict[str, EnergySample] = {}  # the last one, in our time
        self._offsets: dict[str, float] = {}  # by which that one's was shifted
        self._answered, self._answered_tenants, self._receipts_tenants = _Booked(), _Booked(), _Booked()
        self._tokens, self._unanswered, self._unanswered_j = _Booked(), _Booked(), _Booked()
        self._streams = _Booked()
        self._base_of: tuple[object, ...] = ()
        self._base_catalog: Catalog | None = None
        self._types: dict[str, DeviceType] = {}  # of devices, also of those that are gone: their samples may come late
        self.base = ModelledBase()
        self._flushed_at_s = clock.now_s()
        self._log = structlog.get_logger()
        self._lent: dict[str, _Span] = {}
        self.unallocated_j = 0.0
        self.unknown_s = 0.0
        self.hold_from_s = math.inf  # samples that end after it are kept in `held`: they are being measured
        self.held: deque[EnergySample] = deque(maxlen=SAMPLES_MAX)

    async def refresh(self, families: Sequence[str], lent: Collection[str] = ()) -> None:
        """Read new samples of all nodes and book them; every few seconds write the totals. Not before this
        controller leads: until then the leader books them. `lent`: devices on which a profile is measured; their joules
        are booked on no family."""
        self._note_lent(lent)
        self._model_base(families)
        if self._leadership.epoch not in (0, self._epoch):
            try:
                await self._take_over(self._leadership.epoch)
            except errors.StateUnavailable:
                return  # the observer says so
        if not self._epoch:
            return
        readings, self._families = self.readings(), families
        for node in sorted(self._observation.inputs.nodes):
            key, offset_s = self._state.keys.energy(node), self._observation.inputs.clock_offsets_s.get(node, 0.0)
            if offset_s is None:
                continue
            try:
                entries = await self._state.stream(key, EnergySample, self._ids.get(key, "0"))
            except errors.StateUnavailable:
                return  # the observer says so; the agents send again what was missed
            for entry_id, sample in entries:
                self._ids[key] = entry_id
                if self._is_possible(sample, offset_s):
                    for one in self._order.take(sample.device, sample, proven=True):
                        self._book(node, one, readings, families, offset_s)
        self._book_answers()
        self._reconcile(readings)
        due_s = FLUSH_S + (HELD_MAX_S if self._order.holds else 0.0)  # what is held is not in the sums yet
        if self._clock.now_s() - self._flushed_at_s >= due_s:
            await self.flush()

    def _note_lent(self, lent: Collection[str]) -> None:
        now_s = self._clock.now_s()
        for device in lent:
            span = self._lent.get(device)
            if span is None or span.over:
                span = self._lent[device] = _Span(now_s, now_s)
            span.until_s = now_s
        for device, span in self._lent.items():  # kept: samples come late
            span.over = device not in lent

    def _is_lent(self, sample: EnergySample) -> bool:
        span = self._lent.get(sample.device)
        return span is not None and sample.ends_at_s > span.since_s and sample.starts_at_s < span.until_s

    def grams_per_request(self, families: Iterable[str], now_s: float) -> dict[str, float | None]:
        """Grams per request over the measuring window; None when energy was not measured or nothing was answered."""
        since_s = now_s - self._settings.measure_s
        return {family: self._grams(family, since_s) for family in families}

    def metered_until_s(self, devices: Sequence[str]) -> float:
        """Time up to which all of these devices have been metered, as far as samples are held."""
        return candidate_measurement.metered_until_s(self.held, devices)

    def cost(self, families: Sequence[str], starts_s: float, ends_s: float, pue: float) -> candidate_measurement.Cost:
        """Cost of an interval over all devices, as far as samples are held."""
        return candidate_measurement.cost(self.held, self.readings(), families, starts_s, ends_s, pue)

    def _grams(self, family: str, since_s: float) -> float | None:
        answered = self._observation.windows.answered_since(family, since_s)
        return per_request(self._drawn_since(family, since_s)[1], answered)

    def _drawn_since(self, family: str, since_s: float) -> tuple[float | None, float | None]:
        """Joules and grams of a family since a time; None where it was not metered all the while."""
        recent = self._recent.get(family)
        if recent is None or recent.unmeasured_until_s > since_s:
            return None, None
        oldest_s = self._clock.now_s() - self._settings.windows.keep_s - 2 * LATE_S
        while recent.drawn and recent.drawn[0][0] < oldest_s:
            recent.drawn.popleft()
        joules = co2 = 0.0
        found = False
        for ends_at_s, drawn_j, emitted_g in reversed(recent.drawn):
            if ends_at_s < since_s - LATE_S:
                break
            if ends_at_s >= since_s:
                joules, co2, found = joules + drawn_j, co2 + emitted_g, True
        return (joules, co2) if found else (None, None)

    def served(self, objectives: Mapping[str, Objective], now_s: float) -> tuple[float, list[Served]]:
        """What was served over the last seconds that are kept, and over how many: every family and its classes.

        Meters report later than dispatchers: joules are of as long a time, up to the last sample.
        """
        windows, catalog = self._observation.windows, self._observation.catalog
        since_s = windows.kept_since(now_s)
        late_s = min(LATE_S, now_s - max((sample.ends_at_s for sample in self._last.values()), default=now_s))
        recent, found = windows.begun_since(since_s), []
        for family, objective in sorted(objectives.items()):
            joules, co2 = self._drawn_since(family, since_s - late_s)
            found += served_by_class(recent, objective, catalog, now_s - since_s, joules, co2)
        if not windows.live(now_s):  # what arrives is not known, and is not 0
            found = [replace(one, rate_per_s=None) for one in found]
        return now_s - since_s, found

    async def _take_over(self, epoch: int) -> None:
        """Continue from this process's or its disk's state. If Redis has later accounts, of another controller,
        continue from those. So too if totals exist without positions in the streams: present samples are then left
        out."""
        told: dict[str, tuple[int, float]] = {}
        if not self._epoch:
            self._past = {hour: dict(each) for hour, each in self._disk.load_plain("spent").get("hours", {}).items()}
        saved = {} if self._epoch else self._disk.load_plain("accounting")
        ours = self._attempted_ids or {str(key): str(entry_id) for key, entry_id in saved.get("ids", {}).items()}
        accounted = await self._accounted(ours)
        proven = bool(self._epoch or accounted) or self._is_newest(saved)
        if any(entry_order(at) > entry_order(ours.get(key, "0")) for key, at in accounted.items()):
            self._hours = await self._stored_sums()
            self._ids = accounted
        elif not proven and await self._state.names(self._state.keys.totals_prefix()):
            self._hours = await self._stored_sums()
            self._ids = await self._ends_of_streams()
        elif not self._epoch:
            self._ids = ours
            self._hours = self._still_kept(saved.get("hours", {}))
            told = {device: (int(seq), float(end_s)) for device, (seq, end_s) in saved.get("told", {}).items()}
        else:
            self._epoch = epoch
            return
        await self._read_past()
        self._order.begin(told)
        if not told:
            await self._follow()
        self._epoch = epoch
        self._unwritten, self._last, self._flushed_at_s = {}, {}, self._clock.now_s()
        self._folded.clear()
        if self._ids or self._hours:  # of what was answered before, the one before has counted nearly all
            windows = self._observation.windows
            self._answered.counts = dict(windows.answered)
            self._answered_tenants.counts = dict(windows.answered_tenants)
            self._tokens.counts = dict(windows.tokens)
            self._streams.counts = dict(windows.streams)
            self._receipts_tenants.counts = dict(windows.receipt_j_tenants)
            self._unanswered.counts = dict(windows.unanswered_tenants)
            self._unanswered_j.counts = dict(windows.unanswered_j_tenants)

    async def _accounted(self, ours: Mapping[str, str]) -> dict[str, str]:
        """Up to which entry of each energy stream is accounted, as Redis says. Beyond a stream's end nothing is: there
        `ours` holds, or what the stream has by now is taken for accounted."""
        keys, found = self._state.keys, dict[str, str]()
        for node, at in (await self._state.fields(keys.accounted())).items():
            key = keys.energy(node)
            newest = await self._state.tail(key, EnergySample)
            if newest and entry_order(at) > entry_order(newest[-1][0]):
                at = ours.get(key, newest[-1][0])
            if entry_order(at) > (0, 0):
                found[key] = at
        return found

    async def _follow(self) -> None:
        """Give the stream order each stream's booked samples of the last FOLLOWED_S, so that the next sample has to
        continue them. Booked is each entry up to the last booked one, and what `energy:minutes` has. A stream that was
        lost and sent again has new entry ids: there, each sample is booked that had ended when the last booked entry
        was written."""
        keys, offsets = self._state.keys, self._observation.inputs.clock_offsets_s
        minutes = await booked_minutes(self._state, self._clock.now_s(), offsets)
        ahead_s = await self._state.clock_offset_s() if self._ids else 0.0
        for key in dict.fromkeys([*self._ids, *(keys.energy(device.partition("/")[0]) for device in minutes)]):
            last_id = self._ids.get(key, "0")
            last, first = entry_order(last_id), await self._state.stream(key, EnergySample, "0", 1)
            sent_again, written_at_s = bool(first) and entry_order(first[0][0]) > last, last[0] / 1e3 + ahead_s
            after = "0" if sent_again else f"{max(0, last[0] - round(1e3 * FOLLOWED_S))}-0"
            for entry_id, sample in await self._state.stream(key, EnergySample, after, FOLLOWED_MAX):
                offset_s, (seq, end_s) = offsets.get(sample.node) or 0.0, minutes.get(sample.device, (0, 0.0))
                ended = sample.ends_at_s + offset_s <= written_at_s
                if ended if sent_again else entry_order(entry_id) <= last:
                    if self._is_possible(sample, offset_s):
                        self._order.take(sample.device, sample, proven=True)
                elif sample.seq <= seq and sample.ends_at_s <= end_s:
                    self._set_aside(
                        sample, f"{entry_id}, which {keys.accounted()} denies and energy:minutes has booked"
                    )
        self._order.release()
        begun = self._order.last
        later = {device: last for device, last in minutes.items() if last[0] > begun.get(device, (0, 0.0))[0]}
        self._order.begin({**begun, **later})

    def _is_newest(self, saved: Mapping[str, Any]) -> bool:
        """Whether no other controller has led since these books were saved, as far as this disk knows."""
        others = self._disk.load_plain(LED).get("taken_over") or (0,)
        return bool(saved) and int(saved.get("epoch", 0)) >= int(others[0])

    async def _ends_of_streams(self) -> dict[str, str]:
        """Newest entry of each energy stream: which of its samples are booked is not known, so all are set aside."""
        keys, found = self._state.keys, dict[str, str]()
        for key in await self._state.names(keys.energy("")):
            newest = () if key.startswith(keys.energy_minutes("")) else await self._state.tail(key, EnergySample)
            for entry_id, sample in newest:
                found[key] = entry_id
                self._set_aside(sample, f"{entry_id} and all before it: no disk and no {keys.accounted()} says how far")
        return found

    async def _stored_sums(self, since: str = "", until: str = "") -> dict[str, dict[str, dict[str, float]]]:
        """Sums in Redis of these hours, as `stored_sums`; by default of the recent ones."""
        now, *_, last = self._recent_hours()
        found, false = await stored_sums(self._state, now, since or last, until)
        for name in false:
            self._note(name, "value", "an hour that has not begun, which no controller has written: delete it")
        return found

    async def _read_past(self) -> None:
        """Hours of the last day that this disk does not know, as Redis has them."""
        *_, oldest = self._recent_hours(DAY_HOURS_MAX)
        for hour, sums in (await self._stored_sums(oldest, self._recent_hours()[-1])).items():
            self._past.setdefault(hour, hour_spend(sums))

    def spent(self) -> dict[str, HourSpend]:
        """Joules and grams of the last day by hour, family and tenant, what is not written yet included."""
        recent = {hour: {family: dict(sums) for family, sums in each.items()} for hour, each in self._hours.items()}
        now = recent.setdefault(self._recent_hours()[0], {})
        for family, deltas in self._unwritten.items():
            sums = now.setdefault(family, {})
            for name, delta in deltas.items():
                sums[name] = sums.get(name, 0.0) + delta
        return self._past | {hour: hour_spend(each) for hour, each in recent.items()}

    def _recent_hours(self, count: int = HOURS_KEPT) -> list[str]:
        times = (self._clock.now_s() - 3600.0 * ago for ago in range(count))
        return [datetime.datetime.fromtimestamp(at_s, datetime.UTC).strftime(HOUR) for at_s in times]

    def _still_kept(self, hours: Mapping[str, dict[str, dict[str, float]]]) -> dict[str, dict[str, dict[str, float]]]:
        """Hours not over for long; one that is to come was booked before the clock was set back, and comes again. What
        tenants have spent in the others is kept for a day."""
        oldest, *_, first = self._recent_hours()[-1:] + self._recent_hours(DAY_HOURS_MAX)
        if over := {hour: hour_spend(sums) for hour, sums in hours.items() if hour < oldest}:
            self._past = {hour: each for hour, each in (self._past | over).items() if hour >= first}
            self._disk.save_later("spent", {"hours": self._past})
        return {hour: sums for hour, sums in hours.items() if hour >= oldest}

    def _newest_hour(self) -> str:
        return max((*self._hours, *self._past), default="")

    def clock_fault(self) -> str:
        """What contradicts the clock of this machine: hours after it are booked; "" for nothing."""
        hour, newest = self._recent_hours()[0], self._newest_hour()
        if newest <= hour:
            return ""
        return (
            f"the clock of this machine: it is in hour {hour} (UTC), and hours up to {newest} are booked. "
            "Remedy: synchronise it, then restart the controller; if it is right, it was ahead before"
        )

    async def flush(self) -> None:
        """Flush what is pending to totals:<family>:<hour>; nothing is lost when that fails."""
        self._flushed_at_s = self._clock.now_s()
        for sample in self._order.release():
            offset_s = self._observation.inputs.clock_offsets_s.get(sample.node, 0.0) or 0.0
            self._book(sample.node, sample, self.readings(), self._families, offset_s)
        if not self._epoch or not (any(self._unwritten.values()) or self._folded):
            return
        keys, hour = self._state.keys, self._recent_hours()[0]
        if hour not in self._hours and self._newest_hour() >= hour:  # the clock went back: it was booked before
            try:
                stored = await self._stored_sums(hour)
            except errors.StateUnavailable as error:
                self._log.info("totals wait", error=str(error))
                return
            self._log.warning("an hour repeats", hour=hour, why=self.clock_fault())
            self._hours[hour] = stored.get(hour, {})
        sums = self._hours.setdefault(hour, {})
        for family, deltas in self._unwritten.items():
            booked = sums.setdefault(family, {})
            for name, delta in deltas.items():
                booked[name] = booked.get(name, 0.0) + delta
        self._unwritten = {}
        writes: list[Write] = [
            SetFields(keys.totals(family, hour), totals, TOTALS_TTL_S, replace=True)
            for hour, families in sorted(self._hours.items())
            for family, totals in sorted(families.items())
        ]
        self._attempted_ids, told = dict(self._ids), dict(self._order.last)
        ids = {key.removeprefix(keys.energy("")): entry_id for key, entry_id in self._ids.items()}
        writes += [Append(keys.energy_minutes(node), sample, MINUTES_MAX) for node, sample in self._folded]
        try:
            await self._leadership.write([*writes, SetFields(keys.accounted(), ids)])
        except (errors.Fenced, errors.StateUnavailable) as error:
            self._log.info("totals wait", error=str(error))
            return
        self._folded.clear()
        self._hours = self._still_kept(self._hours)
        books = {"ids": self._ids, "hours": self._hours, "told": told, "epoch": self._epoch}
        self._disk.save_later("accounting", books)

    def hold(self, from_s: float) -> None:
        """Retain samples from a time on; `inf` lets go of all."""
        self.hold_from_s = from_s
        self.held = deque((s for s in self.held if s.ends_at_s > from_s), SAMPLES_MAX)

    def readings(self) -> tuple[CarbonReading, ...]:
        """Readings of one series, oldest first, the one planned by last."""
        now = self._observation.carbon(self._clock.now_s())
        known = [r for r in self._observation.inputs.carbon_history if r.series == now.series]
        before = [r for r in known if r.observed_at_s <= now.observed_at_s]  # a later one is none of its feed
        return tuple(sorted([*before, now], key=lambda r: r.observed_at_s))

    def _is_possible(self, sample: EnergySample, offset_s: float) -> bool:
        """Whether a sample is of a device that its node has, of no more than it can draw, and over; else set aside."""
        ahead_s = sample.ends_at_s + self._offset_s(sample, offset_s) - self._clock.now_s()
        if sample.device not in self._types:
            why = f"device {sample.device!r}, which its node does not have"
        elif ahead_s > AHEAD_S:
            why = f"a sample that ends {ahead_s:.0f} s from now"
        else:
            why = power_fault(sample, self._types[sample.device])
        if why:
            self._set_aside(sample, why)
        return not why

    def _offset_s(self, sample: EnergySample, offset_s: float) -> float:
        """By which a sample is shifted into our time, given what its node's status says now.

        Around a restart of its agent it may be older or newer than the status that tells the offset of the agent's
        clock: then the offset of the sample before is right, if the two are neighbours by it.
        """
        before, last_s = self._last.get(sample.device), self._offsets.get(sample.device, offset_s)
        if before is not None and last_s != offset_s:
            starts_at_s = sample.starts_at_s - before.ends_at_s
            if abs(starts_at_s + last_s) <= JOIN_S < abs(starts_at_s + offset_s):
                return last_s
        return offset_s

    def _set_aside(self, sample: EnergySample, why: str) -> None:
        self._note(f"{self._state.keys.energy(sample.node)} {sample.device}", "sample", why)

    def _note(self, place: str, kind: str, why: str) -> None:
        if self._observation.inputs.set_aside.note(place, kind, why, self._clock.now_s()):
            self._log.warning("set aside, and not booked", place=place, why=why)

    def _book(
        self,
        node: str,
        sample: EnergySample,
        readings: Sequence[CarbonReading],
        families: Sequence[str],
        offset_s: float,
    ) -> None:
        offset_s, before = self._offset_s(sample, offset_s), self._last.get(sample.device)
        self._offsets[sample.device] = offset_s
        starts_at_s, ends_at_s = sample.starts_at_s + offset_s, sample.ends_at_s + offset_s
        sample = replace(sample, starts_at_s=starts_at_s, ends_at_s=ends_at_s) if offset_s else sample
        gap_s = sample.starts_at_s - before.ends_at_s if before is not None else 0.0
        gap_s = gap_s if gap_s > GAP_S else 0.0
        self.unknown_s += gap_s
        self._metrics.inc("trefoil_energy_unknown_seconds_total", gap_s, node=node)  # 0 as well: it was metered
        for family in families if gap_s else ():
            self._add(family, "gap_s", gap_s)
        self._last[sample.device] = sample
        for part in sample.slices:
            self._observation.cpu.add_slice(part, sample.starts_at_s, sample.ends_at_s)
        self._fold(node, sample)
        if sample.ends_at_s > self.hold_from_s:
            self.held.append(sample)
        if self._is_lent(sample):
            return
        self.receipts.sample(sample)
        metered = sample.method not in UNMEASURED
        embodied_g, lifetime_years = self._types[sample.device].embodied_g, self._settings.embodied_lifetime_years
        for booking in embodied_bookings(sample, families, embodied_g, lifetime_years, metered):
            self._add(*booking)
        if not metered:
            for family in families:
                self._family(family).unmeasured_until_s = sample.ends_at_s
                self._add(family, "unmeasured_s", sample.ends_at_s - sample.starts_at_s)
            return
        self.unallocated_j += sample.unallocated_j
        reading = reading_at(readings, (sample.starts_at_s + sample.ends_at_s) / 2)
        length_s = sample.ends_at_s - sample.starts_at_s
        for family in families:
            if sample.device in self.base.idle_w:
                self._add_base(family, self.base.idle_j(sample.device, length_s) / len(families), reading)
            else:
                self._add(family, "base_unknown_s", length_s)
        for booking in bookings(sample, reading, families, self._settings.pue):
            self._add(*booking)
        for family, joules in by_family(sample, families).items():
            co2 = grams(joules, reading.intensity_g_per_kwh, self._settings.pue)
            self._family(family).drawn.append((sample.ends_at_s, joules, co2))
            self._metrics.inc("trefoil_emissions_grams_total", max(0.0, co2), zone=reading.series.zone)

    def _model_base(self, families: Sequence[str]) -> None:
        """Model BASE again where the fleet or its families have changed."""
        statuses = (d for node in self._observation.inputs.nodes.values() for d in node.devices)
        devices = {status.device: status.type for status in statuses}
        self._types |= devices
        catalog = self._observation.catalog
        if self._base_of != (devices, tuple(families)) or self._base_catalog is not catalog:
            self._base_of, self._base_catalog = (devices, tuple(families)), catalog
            self.base = model_base(catalog, devices, families)

    def _add_base(self, family: str, joules: float, reading: CarbonReading) -> None:
        co2 = grams(joules, reading.intensity_g_per_kwh, self._settings.pue)
        self._add(family, "base_joules", joules)
        self._add(family, "base_grams", co2)
        self._metrics.inc("trefoil_base_emissions_grams_total", max(0.0, co2), zone=reading.series.zone)

    def _reconcile(self, readings: Sequence[CarbonReading]) -> None:
        """Compare what receipts say with what was metered over the same time; book what BASE had taken for it."""
        now_s = self._clock.now_s()
        self.receipts.nodes(self._observation.inputs.nodes.values())
        for joined in sum_by_family(self.receipts.join(now_s)):
            self._joined_samples.append(joined)
            self._add(joined.family, "active_joules", joined.active_j)
            self._add(joined.family, "receipt_joules", joined.receipt_j)
            self._add_base(joined.family, self.base.active_j(joined), reading_at(readings, joined.ends_at_s))
            self._metrics.inc("trefoil_active_joules_total", joined.active_j, family=joined.family)
            self._metrics.inc("trefoil_receipt_joules_total", joined.receipt_j, family=joined.family)
        while self._joined_samples and self._joined_samples[0].ends_at_s < now_s - RESIDUAL_S:
            self._joined_samples.popleft()
        for joined in sum_by_family(self._joined_samples):
            if joined.active_j > 0:
                residual = joined.receipt_j / joined.active_j - 1
                self._metrics.set("trefoil_receipt_residual_ratio", residual, family=joined.family)

    def _book_answers(self) -> None:
        """Requests answered and tokens since the last look, by variant and by tenant, and what their receipts say; and
        what was executed without an answer."""
        windows = self._observation.windows
        for (family, variant), new in self._answered.grown(windows.answered):
            self._add(family, "requests", new)
            self._add(family, f"requests:{variant}", new)
        for (family, variant), new in self._tokens.grown(windows.tokens):
            self._add(family, "tokens", new)
            self._add(family, f"tokens:{variant}", new)
        for (family, name), new in self._streams.grown(windows.streams):
            self._add(family, name, new)
        for (family, tenant), new in self._answered_tenants.grown(windows.answered_tenants):
            self._add(family, f"tenant_requests:{tenant}", new)
        for (family, tenant), joules in self._receipts_tenants.grown(windows.receipt_j_tenants):
            self._add(family, f"tenant_receipt_joules:{tenant}", joules)
        for (family, tenant), new in self._unanswered.grown(windows.unanswered_tenants):
            self._add(family, "unanswered", new)
            self._add(family, f"tenant_unanswered:{tenant}", new)
        for (family, tenant), joules in self._unanswered_j.grown(windows.unanswered_j_tenants):
            self._add(family, "unanswered_joules", joules)
            self._add(family, f"tenant_unanswered_joules:{tenant}", joules)
            self._metrics.inc("trefoil_unanswered_joules_total", joules, family=family)

    def _fold(self, node: str, sample: EnergySample) -> None:
        """Collect a device's samples of one minute and put the whole in line for energy:minutes."""
        minute = self._minute.setdefault(sample.device, [])
        if minute and int(minute[0].starts_at_s // 60) != int(sample.starts_at_s // 60):
            self._folded.append((node, fold(minute)))
            minute.clear()
        minute.append(sample)

    def _add(self, family: str, name: str, amount: float) -> None:
        booked = self._unwritten.setdefault(family, {})
        booked[name] = booked.get(name, 0.0) + amount

    def _family(self, family: str) -> _Recent:
        return self._recent.setdefault(family, _Recent())
