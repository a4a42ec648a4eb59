"""What an answer is estimated to have cost: rates that the controller publishes, joined with the carbon of now.

Data: `ReceiptRates` (joules per request and item of every slice and variant) and the last `CarbonReading` of the series
that the rates name. Formulation: energy_j = request_j + item_j x items + token_j x tokens, active energy only;
carbon_mg = energy x intensity x PUE. Every answer is priced into the load windows; the receipt itself is written for
for every request. Unknown values are left out, never 0: no rate, no energy; no reading, no carbon.
`trefoil_receipt_basis` and `trefoil_receipt_method` say what a number rests on. A pure brain: values in, bytes out.
Deviations: none.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from dispatcher.transport.core import kserve_wire
from trefoil.core.carbon import STALE_INTERVALS, CarbonReading, Quality
from trefoil.core.common import Basis
from trefoil.core.energy import Receipt, ReceiptRate, ReceiptRates
from trefoil.core.fleet import SliceKey
from trefoil.core.units import MG_PER_G, grams

ENERGY: Final = "trefoil_energy_j_estimate"
CARBON: Final = "trefoil_carbon_mg_estimate"
SLICE: Final = "trefoil_slice"
TOKENS: Final = "trefoil_tokens_out"
TOKENS_IN: Final = "trefoil_tokens_in"
TTFT, TPOT = "trefoil_ttft_ms", "trefoil_tpot_ms"
BUDGET_RUNG: Final = "trefoil_budget_rung"
BASIS: Final = "trefoil_receipt_basis"
METHOD: Final = "trefoil_receipt_method"
WRITTEN_MAX: Final = 4096  # receipts whose bytes are remembered
STALE_S: Final = 60.0  # past this age rates are carried on, and receipts say so

Key = tuple[SliceKey, str, str]  # slice, family, variant


class Receipts:
    """Receipt rates and carbon reading in force. `set_rates` and `check_age` are called off the hot path, twice a
    second at most."""

    def __init__(self, stale_s: float = STALE_S) -> None:
        self._stale_s = stale_s
        self._published: ReceiptRates | None = None
        self._rates: dict[Key, ReceiptRate] = {}
        self._reading: CarbonReading | None = None
        self._stale_reasons: tuple[str, ...] = ()
        self._written: dict[tuple[SliceKey, str, str, int, int], bytes] = {}

    def set_rates(self, rates: ReceiptRates | None, reading: CarbonReading | None) -> None:
        """Price by these from now on; None keeps what there was: an emptied Redis makes nothing unknown."""
        if rates is not None and rates != self._published:
            self._published = rates
            self._rates = {(rate.slice, rate.family, rate.variant): rate for rate in rates.rates}
            self._written.clear()
        joins = self._published is not None and reading is not None and reading.series == self._published.series
        if joins and reading != self._reading:
            self._reading = reading
            self._written.clear()

    @property
    def stale_reasons(self) -> tuple[str, ...]:
        """Which of rates and reading are old, in words."""
        return self._stale_reasons

    def check_age(self, now_s: float) -> None:
        """Check whether rates or carbon have become old [UTC s]; receipts say so from now on."""
        old = []
        if self._published is not None and now_s - self._published.observed_at_s > self._stale_s:
            old.append("the rates are old and carried on")
        reading = self._reading
        if reading is not None:
            interval_s = reading.ends_at_s - reading.starts_at_s
            if 0 < STALE_INTERVALS * interval_s < now_s - reading.observed_at_s:
                old.append("the carbon reading is old and carried on")
        if tuple(old) != self._stale_reasons:
            self._stale_reasons = tuple(old)
            self._written.clear()

    def rate(self, slice_: SliceKey, family: str, variant: str) -> ReceiptRate | None:
        """Energy rate of an answer on a slice; None: not known."""
        return self._rates.get((slice_, family, variant))

    def price(self, slice_: SliceKey, family: str, variant: str, items: int, tokens: int = 0) -> Receipt | None:
        """The receipt of an answer; None: its energy is not known. `quality` UNSPECIFIED: its carbon is not."""
        rate, rates, reading = self.rate(slice_, family, variant), self._published, self._reading
        if rate is None or rates is None:
            return None
        energy_j = rate.energy_j(items, tokens)
        if reading is None:
            return Receipt(energy_j, basis=rate.basis)
        carbon_mg = grams(energy_j, reading.intensity_g_per_kwh, rates.pue) * MG_PER_G
        return Receipt(energy_j, carbon_mg, rate.basis, reading.quality)

    def suffix_of_stages(self, places: Sequence[tuple[SliceKey, str]], family: str, items: int) -> bytes:
        """Parameters of a receipt for an answer of several stages, by the slice and variant of each: their sum. Where
        the energy of one is not known, nothing is said of the whole."""
        priced = [self.price(slice_, family, variant, items) for slice_, variant in places]
        whole = priced[-1]
        if whole is not None:
            known = [one for one in priced if one is not None]
            energy_j, carbon_mg = sum(one.energy_j for one in known), sum(one.carbon_mg for one in known)
            whole = replace(whole, energy_j=energy_j, carbon_mg=carbon_mg) if len(known) == len(priced) else None
        return self._write(whole, (*places[-1][:1], family, places[-1][1], items, 0))

    def suffix(self, slice_: SliceKey, family: str, variant: str, items: int, tokens: int = 0) -> bytes:
        """The response parameters of a receipt, to be appended to an answer. `tokens` of a stream that has ended."""
        key = (slice_, family, variant, items, tokens)
        written = self._written.get(key)
        if written is None:
            if len(self._written) >= WRITTEN_MAX:
                self._written.clear()
            written = self._written[key] = self._write(self.price(*key), key)
        return written

    def _write(self, receipt: Receipt | None, key: tuple[SliceKey, str, str, int, int]) -> bytes:
        data = kserve_wire.string_parameter(SLICE, key[0].name)
        if key[4]:
            data += kserve_wire.int64_parameter(TOKENS, key[4])
        basis = receipt.basis if receipt is not None else Basis.NONE
        data += kserve_wire.string_parameter(BASIS, basis.name.lower())
        data += kserve_wire.string_parameter(METHOD, self._method(receipt, key))
        if receipt is not None:
            data += kserve_wire.double_parameter(ENERGY, receipt.energy_j)
            if receipt.quality != Quality.UNSPECIFIED:
                data += kserve_wire.double_parameter(CARBON, receipt.carbon_mg)
        return data

    def _method(self, receipt: Receipt | None, key: tuple[SliceKey, str, str, int, int]) -> str:
        if self._published is None:
            return "no rates have been published yet"
        rate = self._rates.get(key[:3])
        if receipt is None or rate is None:
            return "the energy of this slice is not measured, or too little of it yet"
        parts = ["active energy only"]
        if rate.window_s:
            parts.append(f"metered over estimated {rate.ratio:g}, memory {rate.window_s:g} s")
        else:
            parts.append("the profile alone, nothing metered yet")
        if self._reading is None:
            parts.append("no carbon reading")
        else:
            reading = self._reading
            source = "simulated" if reading.simulated else reading.quality.name.lower()
            parts.append(f"{reading.intensity_g_per_kwh:g} g/kWh ({source}), PUE {self._published.pue:g}")
        return "; ".join((*parts, *self._stale_reasons))


def stream_suffix(ttft_ms: float | None, tpot_ms: float | None, tokens_in: int) -> bytes:
    """Parameters of a receipt that tell what the tokens of a stream took; what is not known is left out."""
    data = kserve_wire.int64_parameter(TOKENS_IN, tokens_in) if tokens_in else b""
    for name, value in ((TTFT, ttft_ms), (TPOT, tpot_ms)):
        data += kserve_wire.double_parameter(name, value) if value is not None else b""
    return data
