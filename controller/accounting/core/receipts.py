"""Receipt rates, what an answer costs: the profile's estimate, corrected by what was metered on the same slice.

Data: energy samples of all devices, load windows of all dispatcher workers, profile rows.
Formulation: rate(k) = profile(k) x ratio(k), for k = (slice, family, variant). profile(k) = request_j + item_j x items,
the line through the smallest and the largest profiled batch at the device's clock. For a generative family profile(k) =
token_j x tokens, where token_j is the joules of one answer over its mean tokens. ratio(k) = metered active joules over
estimated ones, both forgotten exponentially (`MEMORY_S`). Both streams are joined sample by sample. The answers'
windows are cut at the borders of the sample, so that both streams cover the same time. Windows are shifted earlier by
half a service time, when the energy of their answers was drawn. Without this shift, a load that begins would look more
expensive than it is.
A slice with fewer than `ITEMS_MIN` answered items takes the ratio of its kind (device type, slice type, family,
variant), else 1. Where no profile is known the metered joules per item are the rate.
A device that nothing meters has no rates: its energy is unknown, not 0.
Requests executed without an answer (the client had left, or the request failed) count as answers do, in estimates and
receipts.
residual = receipts / metered active energy - 1, over the same samples: not 0 while ratios lag. If receipts of a (slice,
family, variant) asked too little or too much, answers of the next `REPAID_S` make it up. This changes a rate by at most
a tenth. What is carried over is at most a tenth of the joules metered in `MEMORY_S`; the rest is dropped.
Deviations: CONTRACTS section 4 prices at dispatch. Here the answer is priced, because only then the variant is certain.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Final

from controller.explore.core.candidate_measurement import UNMEASURED
from trefoil.core.catalog import Catalog
from trefoil.core.common import Basis, ProfileRow
from trefoil.core.demand import LoadCell, LoadWindow
from trefoil.core.energy import EnergySample, ReceiptRate
from trefoil.core.fleet import DeviceStatus, DeviceType, NodeStatus, SliceKey
from trefoil.core.plan import Plan
from trefoil.core.power import rows_at

MEMORY_S: Final = 60.0
ITEMS_MIN: Final = 20
WORKER_WAIT_S: Final = 3.0  # how long a sample waits for the windows of a worker that has gone silent
SAMPLE_WAIT_S: Final = 600.0  # how long windows wait for samples: an agent sends the last ten minutes again
EARLY_S_MAX: Final = 2.0  # an answer that takes longer is not spread over that time
EARLY_FADES: Final = 0.9  # from window to window
GAP_S: Final = 0.01  # between two samples that follow each other, at most
PIECES_MAX: Final = 4_800  # windows of a device that wait for its samples
RATIO_DIGITS: Final = 4
CARRIED_MAX: Final = 0.1  # of the joules remembered: more would have one client pay what another was not asked
REPAID_S: Final = 20.0  # of load: longer than the round trip of rates, shorter than what they follow

Key = tuple[SliceKey, str, str]  # slice, family, variant
Kind = tuple[str, str, str, str]  # device type, slice type, family, variant


@dataclass(frozen=True, slots=True)
class EnergyLine:
    """Profile estimate of one request [J]: request_j + item_j x items + token_j x tokens."""

    request_j: float = 0.0
    item_j: float = 1.0
    basis: Basis = Basis.NONE
    token_j: float = 0.0

    def by_token(self, tokens_mean: float) -> "EnergyLine":
        """The same of a generative family, whose requests cost by their tokens, `tokens_mean` of them as profiled."""
        return replace(self, request_j=0.0, item_j=0.0, token_j=(self.request_j + self.item_j) / tokens_mean)


NO_PROFILE: Final = EnergyLine()  # its "joules" are items, its ratio joules per item


@dataclass(slots=True)
class MeteredRatio:
    """Ratio of metered over estimated joules, recent answers first."""

    metered_j: float = 0.0
    estimated_j: float = 0.0
    items: float = 0.0
    at_s: float = -math.inf
    carried_j: float = 0.0
    """What receipts have asked too little so far, below 0 too much."""

    def add(self, metered_j: float, estimated_j: float, items: float, at_s: float) -> None:
        """One sample. However long nothing came, what was known keeps a third of its weight: one request that straddles
        two samples must not become the ratio."""
        keep = math.exp(-min(max(0.0, at_s - self.at_s), MEMORY_S) / MEMORY_S)
        self.metered_j = self.metered_j * keep + metered_j
        self.estimated_j = self.estimated_j * keep + estimated_j
        self.items += items
        self.at_s = max(self.at_s, at_s)

    def value(self) -> float | None:
        """Ratio, or None where too little was answered to say."""
        if self.items < ITEMS_MIN or self.estimated_j <= 0 or self.metered_j <= 0:
            return None
        return self.metered_j / self.estimated_j

    def carry(self, residual_j: float) -> None:
        """Carry what the receipts of one sample asked too little; below 0 too much."""
        bound_j = CARRIED_MAX * self.metered_j
        self.carried_j = min(max(self.carried_j + residual_j, -bound_j), bound_j)

    def asked(self) -> float | None:
        """The ratio with what is carried, spread over what is drawn in `REPAID_S`."""
        ratio = self.value()
        if ratio is None:
            return None
        share = self.carried_j / (self.metered_j * min(1.0, REPAID_S / MEMORY_S))
        return ratio * (1.0 + min(max(share, -CARRIED_MAX), CARRIED_MAX))


@dataclass(slots=True)
class _Piece:
    """One slice and variant of one load window; what remains of it after a cut."""

    key: Key
    starts_at_s: float
    ends_at_s: float
    answered: float
    items: float
    receipt_j: float
    tokens: float
    last_share: float = 1.0
    """Of what was done for answers, what was their last stage: those count as answers."""

    def cut(self, at_s: float) -> "_Piece":
        """Take off what lies before `at_s`, evenly spread over the window."""
        length_s = self.ends_at_s - self.starts_at_s
        share = 1.0 if at_s >= self.ends_at_s else max(0.0, (at_s - self.starts_at_s) / length_s)
        border_s = min(max(at_s, self.starts_at_s), self.ends_at_s)
        parts = (amount * share for amount in (self.answered, self.items, self.receipt_j, self.tokens))
        taken = _Piece(self.key, self.starts_at_s, border_s, *parts)
        taken.last_share = self.last_share
        self.starts_at_s = border_s
        self.answered -= taken.answered
        self.items -= taken.items
        self.receipt_j -= taken.receipt_j
        self.tokens -= taken.tokens
        return taken


@dataclass(slots=True)
class _Served:
    """Sums of what one slice and variant did in the time of a sample; `last_`: of last stages alone."""

    answered: float = 0.0
    items: float = 0.0
    receipt_j: float = 0.0
    tokens: float = 0.0
    last_answered: float = 0.0
    last_items: float = 0.0

    @classmethod
    def of(cls, pieces: Iterable[_Piece]) -> "_Served":
        """Sums of these pieces of load windows."""
        served = cls()
        for piece in pieces:
            served.answered += piece.answered
            served.items += piece.items
            served.receipt_j += piece.receipt_j
            served.tokens += piece.tokens
            served.last_answered += piece.answered * piece.last_share
            served.last_items += piece.items * piece.last_share
        return served


@dataclass(slots=True)
class _Device:
    samples: "deque[EnergySample]" = field(default_factory=deque)
    pieces: list[_Piece] = field(default_factory=list)
    early_s: float = 0.0  # by how much answers are booked earlier, at most of late
    metered: bool | None = None  # None: no sample yet
    metered_from_s: float = -math.inf  # samples follow each other from there on: an answer of then that is reported
    metered_to_s: float = -math.inf  # after its sample was joined counts in the next
    simulated: bool = False


@dataclass(frozen=True, slots=True)
class JoinedSample:
    """Energy that a family's slices drew for it in one sample [J], with the answers of the same time and their receipts
    [J]."""

    family: str
    ends_at_s: float
    active_j: float
    receipt_j: float
    answered: float = 0.0
    items: float = 0.0


class Receipts:
    """Receipt rates: samples and windows in, in any order of streams; rates and what was joined out."""

    def __init__(self, catalog: Catalog) -> None:
        self.learn(catalog)
        self._devices: dict[str, _Device] = {}
        self._types: dict[str, DeviceStatus] = {}
        self._reported: dict[tuple[str, int], float] = {}
        self._ratios: dict[Key, MeteredRatio] = {}
        self._kinds: dict[Kind, MeteredRatio] = {}

    def learn(self, catalog: Catalog) -> None:
        """Go by another catalogue from now on."""
        self._rows: dict[Kind, list[ProfileRow]] = {}
        for row in catalog.rows:
            if not row.stage and not row.cohosted:
                kind = (row.device_type, row.slice_type, row.family, row.variant)
                self._rows.setdefault(kind, []).append(row)
        self._tokens_means = {family.name: family.tokens_mean for family in catalog.families}
        self._lines: dict[tuple[Kind, int], EnergyLine] = {}

    def nodes(self, nodes: Iterable[NodeStatus]) -> None:
        """Record the type and clock of every device."""
        for node in nodes:
            self._types |= {status.device: status for status in node.devices}

    def window(self, window: LoadWindow) -> None:
        """Add the answers of one worker. The caller drops repeated windows."""
        worker = (window.dispatcher, window.worker)
        self._reported[worker] = max(self._reported.get(worker, -math.inf), window.ends_at_s)
        for cell in window.cells:
            if cell.key.slice is not None and (
                cell.answered or cell.receipt_j or cell.tokens_out or cell.unanswered_work
            ):
                device = self._account(cell.key.slice.device)
                early_s = _early_s(cell, device.early_s)
                device.early_s = max(early_s, EARLY_FADES * device.early_s)
                device.pieces.append(_piece(cell, cell.key.slice, window, early_s))
                del device.pieces[:-PIECES_MAX]

    def sample(self, sample: EnergySample) -> None:
        """Add the energy of one device; samples of a device come in order. The caller drops repeated ones."""
        device = self._account(sample.device)
        device.metered, device.simulated = sample.method not in UNMEASURED, sample.simulated
        device.samples.append(sample)

    def join(self, now_s: float) -> list[JoinedSample]:
        """Join every sample whose answers have all been reported."""
        newest_s = max(self._reported.values(), default=-math.inf)
        self._reported = {w: s for w, s in self._reported.items() if s > newest_s - SAMPLE_WAIT_S}
        live = [at_s for at_s in self._reported.values() if at_s > newest_s - WORKER_WAIT_S]
        reported_s = min(live, default=-math.inf)
        found: list[JoinedSample] = []
        for device in self._devices.values():
            known_s = max(reported_s, now_s - WORKER_WAIT_S) - device.early_s
            while device.samples and device.samples[0].ends_at_s <= known_s:
                found += self._join(device, device.samples.popleft())
            device.pieces = [piece for piece in device.pieces if piece.ends_at_s > now_s - SAMPLE_WAIT_S]
        return found

    def rates(self, plan: Plan | None) -> tuple[ReceiptRate, ...]:
        """Receipt rates, one for each model that a metered slice hosts, or is about to."""
        found = []
        for key in sorted(self._hosted(plan)):
            device = self._devices.get(key[0].device)
            if device is not None and device.metered:
                rate = self._rate(key, device)
                if rate is not None:
                    found.append(rate)
        return tuple(found)

    def _join(self, device: _Device, sample: EnergySample) -> Iterator[JoinedSample]:
        if sample.starts_at_s > device.metered_to_s + GAP_S:
            device.metered_from_s = sample.starts_at_s
        device.metered_to_s = sample.ends_at_s if sample.method not in UNMEASURED else -math.inf
        for piece in device.pieces:
            piece.cut(device.metered_from_s)  # served while nothing was metered: a gap, which is not interpolated
        taken = [piece.cut(sample.ends_at_s) for piece in device.pieces]
        device.pieces = [piece for piece in device.pieces if piece.ends_at_s > piece.starts_at_s]
        if sample.method in UNMEASURED:
            return
        metered: Counter[Key] = Counter()
        for part in sample.slices:
            for hosted in part.hosted:
                metered[part.key, hosted.family, hosted.variant] += hosted.active_j  # type: ignore[assignment]
        answers: dict[Key, list[_Piece]] = {}
        for piece in taken:
            answers.setdefault(piece.key, []).append(piece)
        found = []
        for key in sorted({*metered, *answers}):  # sums of floats in one order, whatever the hashes are
            active_j, served = metered[key], _Served.of(answers.get(key, ()))
            self._learn(key, active_j, served, sample.ends_at_s)
            done = served.receipt_j, served.last_answered, served.last_items
            found.append(JoinedSample(key[1], sample.ends_at_s, active_j, *done))
        yield from sorted(sum_by_family(found), key=attrgetter("family"))

    def _learn(self, key: Key, metered_j: float, served: _Served, at_s: float) -> None:
        line = self._line(key)
        answered, items, receipt_j = served.answered, served.items, served.receipt_j
        estimated_j = line.request_j * answered + line.item_j * items + line.token_j * served.tokens
        if not metered_j and not estimated_j:
            return
        for ratio in (
            self._ratios.setdefault(key, MeteredRatio()),
            self._kinds.setdefault(self._kind(key), MeteredRatio()),
        ):
            ratio.add(metered_j, estimated_j, items, at_s)
        if receipt_j or not answered:  # answers without receipts: no rate was known, nothing is owed
            self._ratios[key].carry(metered_j - receipt_j)

    def _rate(self, key: Key, device: _Device) -> ReceiptRate | None:
        line = self._line(key)
        own, kind = self._ratios.get(key), self._kinds.get(self._kind(key))
        ratio = own.asked() if own is not None else None
        if ratio is None and kind is not None:
            ratio = kind.value()
        if ratio is None and line is NO_PROFILE:
            return None
        basis = Basis.MEASURED if ratio is not None else line.basis
        return ReceiptRate(
            slice=key[0],
            family=key[1],
            variant=key[2],
            request_j=line.request_j * (ratio or 1.0),
            item_j=line.item_j * (ratio or 1.0),
            token_j=line.token_j * (ratio or 1.0),
            ratio=round(ratio or 1.0, RATIO_DIGITS),
            basis=Basis.SIMULATED if device.simulated else basis,
            window_s=MEMORY_S if ratio is not None else 0.0,
        )

    def _hosted(self, plan: Plan | None) -> set[Key]:
        now = {
            (part.key, hosted.family, hosted.variant)
            for status in self._types.values()
            for part in status.slices
            if part.key is not None
            for hosted in part.hosted
        }
        planned = {
            (part.key, hosted.family, hosted.variant)
            for node in (plan.nodes if plan is not None else ())
            for device in node.devices
            for part in device.slices
            for hosted in part.hosted
        }
        return now | planned

    def _kind(self, key: Key) -> Kind:
        status = self._types.get(key[0].device)
        return (status.type.name if status is not None else "", key[0].slice_type, key[1], key[2])

    def _line(self, key: Key) -> EnergyLine:
        status = self._types.get(key[0].device)
        lease = status.clock_lease if status is not None else None
        held = (lease.max_mhz or -round(lease.power_limit_w)) if lease is not None else 0
        kind = self._kind(key)
        line = self._lines.get((kind, held))
        if line is None:
            board = status.type if status is not None else DeviceType()
            line = energy_line(self._rows.get(kind, ()), board, held)
            if (tokens_mean := self._tokens_means.get(key[1], 0.0)) and line is not NO_PROFILE:
                line = line.by_token(tokens_mean)
            self._lines[kind, held] = line
        return line

    def _account(self, device: str) -> _Device:
        return self._devices.setdefault(device, _Device())


def energy_line(rows: Iterable[ProfileRow], kind: DeviceType, clock_mhz: int = 0) -> EnergyLine:
    """Energy over items, from the rows of one variant on one slice type of a device type, at a clock (0 = the highest
    profiled)."""
    at = rows_at(kind, rows, clock_mhz)
    if not at:
        return NO_PROFILE
    low, high = at[0], at[-1]
    basis = low.provenance.basis if low.provenance is not None else Basis.MODELLED
    if basis == Basis.MEASURED:
        basis = Basis.MODELLED  # of this very slice nothing is measured yet
    item_j = low.energy_active_j_per_batch / low.batch
    if high.batch > low.batch:
        slope = (high.energy_active_j_per_batch - low.energy_active_j_per_batch) / (high.batch - low.batch)
        if 0.0 <= slope <= item_j:
            return EnergyLine(low.energy_active_j_per_batch - slope * low.batch, slope, basis)
    return EnergyLine(0.0, item_j, basis)


def sum_by_family(found: Iterable[JoinedSample]) -> list[JoinedSample]:
    """Sums by family, at the time of its last sample."""
    total: dict[str, JoinedSample] = {}
    for each in found:
        old = total.get(each.family, JoinedSample(each.family, each.ends_at_s, 0.0, 0.0))
        total[each.family] = JoinedSample(
            each.family,
            max(old.ends_at_s, each.ends_at_s),
            old.active_j + each.active_j,
            old.receipt_j + each.receipt_j,
            old.answered + each.answered,
            old.items + each.items,
        )
    return list(total.values())


def rates_changed(before: Mapping[Key, float], rates: Iterable[ReceiptRate], by: float) -> bool:
    """Whether rates differ from those published last: another set, or a ratio that moved by more than a share."""
    now = {(rate.slice, rate.family, rate.variant): rate.ratio for rate in rates}
    return now.keys() != before.keys() or any(abs(now[key] - old) > by * old for key, old in before.items())


def _early_s(cell: LoadCell, of_device_s: float) -> float:
    """Half of the mean service time of its answers, else of its device's. 0 for tokens: each is counted when it
    comes."""
    if cell.tokens_out:
        return 0.0
    if not cell.service.total:
        return of_device_s if cell.unanswered_work else 0.0
    return min(EARLY_S_MAX, cell.service.sum_ms / cell.service.total / 2e3)


def _piece(cell: LoadCell, slice_: SliceKey, window: LoadWindow, early_s: float) -> _Piece:
    done = cell.answered + cell.passed.total + cell.unanswered_work
    return _Piece(
        (slice_, cell.key.family, cell.key.variant), window.starts_at_s - early_s, window.ends_at_s - early_s,
        done, cell.items + cell.passed_items + cell.unanswered_items, cell.receipt_j + cell.unanswered_j,
        cell.tokens_out + cell.unanswered_tokens,
        cell.answered / done if done else 1.0,
    )  # fmt: skip
