"""Energy: what was consumed, and how it was attributed."""

from dataclasses import dataclass
from enum import IntEnum

from trefoil.core.carbon import Quality, Series
from trefoil.core.common import Basis, Revision
from trefoil.core.fleet import DeviceState, SliceKey


class EnergyMethod(IntEnum):
    """Method of reading joules. NONE makes joules and grams null, never 0."""

    UNSPECIFIED = 0
    NVML_COUNTER = 1
    POWER_INTEGRAL = 2
    RAPL = 3
    NONE = 4


class AttributionMethod(IntEnum):
    """Method by which active energy was split between slices."""

    UNSPECIFIED = 0
    SOLE = 1
    DCGM = 2
    GPM = 3
    TRITON_COMPUTE = 4


@dataclass(frozen=True, slots=True)
class HostedEnergy:
    """Active energy of one family and variant on a slice."""

    family: str = ""
    variant: str = ""
    active_j: float = 0.0
    compute_s: float = 0.0
    requests: int = 0


@dataclass(frozen=True, slots=True)
class SliceEnergy:
    """Active energy of one slice and generation. `cpu_s`: CPU seconds by its control group; 0 = nothing counts them."""

    key: SliceKey = SliceKey()
    generation: int = 0
    active_j: float = 0.0
    hosted: tuple[HostedEnergy, ...] = ()
    cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EnergySample:
    """Energy of one device over one interval [J]: counter_j = sum of active_j + idle_j + unallocated_j."""

    node: str = ""
    device: str = ""
    seq: int = 0
    starts_at_s: float = 0.0
    ends_at_s: float = 0.0
    counter_j: float = 0.0
    method: EnergyMethod = EnergyMethod.UNSPECIFIED
    attribution: AttributionMethod = AttributionMethod.UNSPECIFIED
    slices: tuple[SliceEnergy, ...] = ()
    idle_j: float = 0.0
    unallocated_j: float = 0.0
    state: DeviceState = DeviceState.UNSPECIFIED
    clock_mhz_mean: float = 0.0
    counter_resets: int = 0
    simulated: bool = False
    uncertainty_ratio: float = 0.0
    mark_j: float = 0.0  # the device's counter at the end
    origin: str = ""  # what the counter counts since; empty: nothing counts


@dataclass(frozen=True, slots=True)
class Receipt:
    """Receipt of one request: what it is estimated to have cost."""

    energy_j: float = 0.0
    carbon_mg: float = 0.0
    basis: Basis = Basis.UNSPECIFIED
    quality: Quality = Quality.UNSPECIFIED


@dataclass(frozen=True, slots=True)
class ReceiptRate:
    """Rate of an answer of a variant on a slice: request_j + item_j x items + token_j x tokens, active energy only.

    `ratio` is measured over estimated energy and contained in both; `window_s` is what it was found over, 0 = the
    profile alone.
    """

    slice: SliceKey = SliceKey()
    family: str = ""
    variant: str = ""
    request_j: float = 0.0
    item_j: float = 0.0
    ratio: float = 0.0
    basis: Basis = Basis.UNSPECIFIED
    window_s: float = 0.0
    token_j: float = 0.0

    def energy_j(self, items: int, tokens: int = 0) -> float:
        """Active energy of one answer with so many items, of so many tokens [J]."""
        return self.request_j + self.item_j * items + self.token_j * tokens


@dataclass(frozen=True, slots=True)
class ReceiptRates:
    """Rates of all receipts, and what turns joules into grams. Without a rate there is no receipt: unknown is not 0."""

    rates: tuple[ReceiptRate, ...] = ()
    observed_at_s: float = 0.0
    series: Series = Series()
    pue: float = 0.0
    plan: Revision = Revision()
