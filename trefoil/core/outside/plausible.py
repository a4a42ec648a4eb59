"""Whether a value from Redis can be what its writer measured: functions return what contradicts it, "" for nothing.

Redis is a blackboard: a stray value may stand there, well-formed and absurd. Bounds are far beyond what a dispatcher
worker or a device can do, so that no true value is set aside. They are low enough that a false value moves no plan for
long.
"""

from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from datetime import MAXYEAR, UTC, datetime
from functools import cache
from typing import Any, Final

from trefoil.core.accounting import CONSERVATION_TOLERANCE, active_j
from trefoil.core.demand import LoadCell, LoadWindow
from trefoil.core.energy import EnergyMethod, EnergySample, ReceiptRates
from trefoil.core.fleet import DeviceKind, DeviceType, NodeStatus
from trefoil.core.latency import BUCKETS, Histogram
from trefoil.core.outside.addresses import target_fault
from trefoil.core.outside.ranges import complaint, range_of
from trefoil.core.plan_check import CREDITS_MAX
from trefoil.core.units import J_PER_KWH

HOUR: Final = "%Y%m%d%H"
"""Name of an hour of the books, in UTC."""
EPOCH_MAX: Final = 10**12
"""Highest epoch that any role can have been taken under."""
EPOCHS_AHEAD_MAX: Final = 1_000_000
"""A role's epoch is one more at each taking: a reader takes no epoch that is further beyond what it knows itself."""
LED_AHEAD_MAX: Final = 10 * EPOCHS_AHEAD_MAX
"""How far a leader's epoch may be beyond what an agent has obeyed: it exceeds its disk, reports and Redis in turn."""
REQUESTS_MAX_PER_S: Final = 1e6
"""Requests of one window: 400 times what one dispatcher worker carries."""
UNITS_MAX_PER_S: Final = 1e9
"""Items or tokens of one window: a thousand a request."""
CELLS_MAX: Final = 100_000
"""Cells of one window: families x variants x slices x classes x tenants that were asked for in it."""
LATENCY_MAX_MS: Final = 7 * 86_400e3
"""Longest latency of an answer: a week."""
RECEIPT_MAX_J: Final = 1e7
"""Joules of one answer: a GPU of 2 kW for more than an hour."""
LARGE_ITEMS: Final = 32
LARGE_TOKENS: Final = 4096
"""Items and tokens of a large answer: by the rate of its receipt it costs at most RECEIPT_MAX_J."""
POWER_MARGIN: Final = 1.25
"""A device draws more than its type's `max_w` for a moment: power limits are held in the mean."""
COUNTER_LAG_S: Final = 0.2
"""By which an energy counter may be late: NVML's is renewed every 20 to 100 ms."""
UNKNOWN_MAX_W: Final = 2_000.0
"""Most that a device of an unknown type is taken to draw: a B200 draws 1,000 W."""
DEVICE_MAX_W: Final = 20_000.0
"""Most that any one device is taken to draw, whatever its type's name says."""
SUM_MAX: Final = 1e18
"""Largest sum of an hour: carbon ages [J s] of ten thousand devices are 1e16."""
SEQ_MAX: Final = 1e12
"""Highest number of a window or sample: five a second since 1970 are 1e10."""


def is_sum(name: str, value: float) -> bool:
    """Whether a number can be the sum of that name in the books of an hour. Grams are negative at negative marginal
    intensities, nothing else is."""
    return (value >= 0.0 or "grams" in name) and abs(value) <= SUM_MAX


def are_grams(grams: float, joules: float) -> bool:
    """Whether joules can have caused these grams, at any intensity and PUE that there are; rounding is allowed for."""
    return abs(grams) <= 1e-6 + abs(joules) * range_of("_g_per_kwh").high * range_of("pue").high / J_PER_KWH


def hour_starts_s(hour: str) -> float | None:
    """Begin of an hour of the accounts [UTC s], by its name; None: that is not a hour's."""
    try:
        starts = datetime.strptime(hour, HOUR).replace(tzinfo=UTC)
    except ValueError:
        return None
    return starts.timestamp() if starts.strftime(HOUR) == hour and starts.year < MAXYEAR else None


def numbers_fault(value: Any, *, leaving: Collection[str] = ()) -> str:
    """What contradicts the numbers of a value, at any depth: the ranges of their units. `leaving`: fields that are not
    looked at."""
    cls: Any = type(value)
    for name in _field_names(cls):
        found = getattr(value, name)
        kind = type(found)
        if not found or kind is str or kind is bool or kind is DeviceType or name in leaving:
            continue  # a type's numbers are not the message's
        held = found if isinstance(found, tuple) else found.values() if isinstance(found, Mapping) else (found,)
        for one in held:
            why = numbers_fault(one) if is_dataclass(one) else complaint(name, one, computed=True)
            if not why and name.endswith("_at_s") and one < 0.0:
                why = "is before 1970"
            if why:
                return why if is_dataclass(one) else f"{name} = {one!r} {why}"
    return ""


@cache
def _field_names(cls: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(cls))


def window_fault(window: LoadWindow) -> str:
    """What contradicts a load window: counts that no worker reaches, or that do not add up."""
    if window.seq > SEQ_MAX:
        return f"seq {window.seq}"
    if len(window.cells) > CELLS_MAX:
        return f"{len(window.cells)} cells"
    length_s = max(1.0, window.ends_at_s - window.starts_at_s)
    return next(filter(None, (_cell_fault(cell, length_s) for cell in window.cells)), "")


def _cell_fault(cell: LoadCell, length_s: float) -> str:
    failed = sum(cell.failed_by_code.values())
    lost = max(cell.unanswered, cell.unanswered_work)
    counts = (("arrived", cell.arrived), ("answered", cell.answered), ("failed", failed), ("unanswered", lost))
    for name, count in counts:
        if count > REQUESTS_MAX_PER_S * length_s:
            return f"{count} {name} in {length_s:g} s"
    if min(cell.unanswered_work, cell.unanswered_items, cell.unanswered_tokens, cell.unanswered_j) < 0.0:
        return "negative work without an answer"
    items, tokens = cell.items + cell.passed_items + cell.unanswered_items, cell.tokens_out + cell.unanswered_tokens
    for name, count in (("items", items), ("tokens", tokens), ("prompt tokens", cell.streams.tokens_in)):
        if count > UNITS_MAX_PER_S * length_s:
            return f"{count} {name} in {length_s:g} s"
    if sum(cell.arrived_per_s) > cell.arrived:
        return f"{sum(cell.arrived_per_s)} arrivals by second of {cell.arrived}"
    for name, count in (("within the SLO", cell.within_slo), ("receipts", cell.receipts)):
        if count > cell.answered:
            return f"{count} {name} of {cell.answered} answered"
    done = cell.answered + cell.passed.total + lost + tokens
    if not (cell.receipt_j >= 0.0 and cell.receipt_j + cell.unanswered_j <= RECEIPT_MAX_J * max(1, done)):
        return f"receipts of {cell.receipt_j:g} J, {cell.unanswered_j:g} J without an answer"
    for name, found in (("latency", cell.latency), ("queue", cell.queue)):
        if found.total > cell.answered:
            return f"{name} of {found.total} answers, and {cell.answered} answered"
    if why := _streams_fault(cell, cell.answered + failed):
        return why
    histograms = (cell.latency, cell.queue, cell.service, cell.passed, cell.streams.ttft, cell.streams.tpot)
    return next(filter(None, map(_histogram_fault, histograms)), "")


def _streams_fault(cell: LoadCell, ended: int) -> str:
    found = cell.streams
    counts = (
        ("with a first token", found.ttft.total, ended),
        ("with later tokens", found.tpot.total, found.ttft.total),
        ("with a TTFT asked", found.ttft_asked, ended),
        ("within the TTFT", found.ttft_within, found.ttft_asked),
        ("with a TPOT asked", found.tpot_asked, found.tpot.total),
        ("within the TPOT", found.tpot_within, found.tpot_asked),
    )
    return next((f"{count} streams {name}, of {most}" for name, count, most in counts if count > most), "")


def _histogram_fault(found: Histogram) -> str:
    if len(found.index) != len(found.count) or any(not 0 <= index < BUCKETS for index in found.index):
        return f"a histogram with {len(found.count)} counts at {found.index[-1:]} of {BUCKETS} buckets"
    if not 0.0 <= found.max_ms <= LATENCY_MAX_MS or not 0.0 <= found.sum_ms <= LATENCY_MAX_MS * max(1, found.total):
        return f"a histogram whose longest is {found.max_ms:g} ms, of {found.sum_ms:g} ms in all"
    return ""


def sample_fault(sample: EnergySample) -> str:
    """What contradicts an energy sample by itself: a device of another node, or joules that do not add up."""
    if sample.seq > SEQ_MAX:
        return f"seq {sample.seq}"
    if not sample.device.startswith(f"{sample.node}/"):
        return f"device {sample.device!r} is none of {sample.node}"
    hosted = [(part, hosted) for part in sample.slices for hosted in part.hosted]
    parts = (sample.counter_j, sample.idle_j, sample.unallocated_j, *(part.active_j for part in sample.slices))
    if min(*parts, *(one.active_j for _, one in hosted), *(one.compute_s for _, one in hosted), 0.0) < 0.0:
        return "negative joules or seconds"
    total = active_j(sample) + sample.idle_j + sample.unallocated_j
    tolerance_j = CONSERVATION_TOLERANCE * max(1.0, sample.counter_j)
    if abs(total - sample.counter_j) > 2 * tolerance_j:  # times as protobuf has them
        return f"{sample.counter_j:g} J by the counter, {total:g} J in its parts"
    for part in sample.slices:
        if sum(one.active_j for one in part.hosted) > part.active_j + 2 * tolerance_j:
            return f"models of {part.key.name} drew more than the slice's {part.active_j:g} J"
    if sample.method in (EnergyMethod.NONE, EnergyMethod.UNSPECIFIED) and sample.counter_j > 0.0:
        return f"{sample.counter_j:g} J without a meter"
    return ""


def power_fault(sample: EnergySample, kind: DeviceType) -> str:
    """What contradicts a sample's joules: more than a device of that type can draw in that time."""
    max_w = UNKNOWN_MAX_W if kind.unknown else kind.max_w
    if kind.kind == DeviceKind.CPU:  # its max_w is an estimate by core
        max_w = max(max_w, UNKNOWN_MAX_W)
    max_w = POWER_MARGIN * min(DEVICE_MAX_W, max_w)
    limit_j = max_w * (sample.ends_at_s - sample.starts_at_s + COUNTER_LAG_S)
    if sample.counter_j <= limit_j:
        return ""
    length_s = sample.ends_at_s - sample.starts_at_s
    return f"{sample.counter_j:g} J in {length_s:g} s: a {kind.name or 'device of unknown type'} draws {limit_j:.0f} J"


def rates_fault(found: ReceiptRates) -> str:
    """What contradicts rates of receipts: numbers out of range, or an answer that costs more than any does."""
    if why := numbers_fault(found):
        return why
    for rate in found.rates:
        parts = rate.request_j, rate.item_j, rate.token_j
        if min(parts) < 0.0 or not rate.energy_j(LARGE_ITEMS, LARGE_TOKENS) <= RECEIPT_MAX_J:
            return f"{rate.request_j:g} J a request, {rate.item_j:g} J an item, {rate.token_j:g} J a token"
    return ""


def node_fault(status: NodeStatus) -> str:
    """What contradicts a node's status: devices or slices of another node or device, numbers that no device has, and
    addresses that are none."""
    for device in status.devices:
        if not device.device.startswith(f"{status.node}/"):
            return f"device {device.device!r} is none of {status.node}"
        places = (*(part.key for part in device.slices), *device.foreign)
        if elsewhere := [key.device for key in places if key.device != device.device]:
            return f"a slice of {elsewhere[0]!r} on {device.device}"
        if faults := [f"{part.key.name}: {why}" for part in device.slices if (why := target_fault(part.grpc_target))]:
            return faults[0]
        credits = max((part.credits for part in device.slices), default=0)
        if credits > CREDITS_MAX or not 0.0 <= device.power_w <= DEVICE_MAX_W:
            return f"{device.device} draws {device.power_w:g} W, and {credits} credits are on one of its slices"
        if why := numbers_fault(device, leaving=("slices", "foreign")):
            return f"{device.device}: {why}"
    return ""
