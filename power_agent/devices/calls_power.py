"""Symbols for power, energy, clocks and sensors, of physical GPUs only (see calls.py)."""

from typing import Any, Final

from power_agent.devices.driver import Driver, Nvml, NvmlFault

CLOCK_KINDS: Final = 4
CLOCK_MEMORY: Final = 2
TEMPERATURE_AT_REST_C: Final = 30.0
TEMPERATURE_C_PER_W: Final = 0.11
ADA_ARCHITECTURE: Final = 8
FIELD_ENERGY, FIELD_ENERGY_SINCE_LOAD = 83, 191
FIELD_POWER_AVERAGE, FIELD_POWER_INSTANT, FIELD_POWER_LIMIT = 185, 186, 190
IDLE, LOCKED, POWER_CAP, THERMAL = 0x1, 0x2, 0x4, 0x20  # clock event reasons


def milli(value: float) -> int:
    """Watts to milliwatts, as NVML has them."""
    return round(value * 1e3)


def settled_c(power_w: float) -> float:
    """Where the temperature goes at that power."""
    return TEMPERATURE_AT_REST_C + TEMPERATURE_C_PER_W * power_w


def temperature(driver: Driver, handle: int, *_sensor: int) -> list[Any]:
    gpu = driver.gpu(handle)
    return [round(settled_c(gpu.power_w) if gpu.temperature_c is None else gpu.temperature_c)]


def utilization(driver: Driver, handle: int) -> list[Any]:
    """NOT_SUPPORTED while MIG is on."""
    gpu = driver.gpu(handle)
    if gpu.mig_current:
        raise NvmlFault(Nvml.NOT_SUPPORTED)
    return [{"gpu": round(100 * gpu.utilization), "memory": round(35 * gpu.utilization)}]


# --- energy and power ---


def energy(driver: Driver, handle: int) -> list[Any]:
    gpu = driver.gpu(handle)
    if not gpu.model.energy_counter:
        raise NvmlFault(Nvml.NOT_SUPPORTED)
    return [gpu.energy_mj]


def power_limit_bounds(driver: Driver, handle: int) -> list[Any]:
    low_w, _, high_w = driver.gpu(handle).model.power_limit_w
    return [milli(low_w), milli(high_w)]


def set_power_limit(driver: Driver, handle: int, limit_mw: int) -> list[Any]:
    driver.set_power_limit(driver.gpu(handle), limit_mw / 1e3)
    return []


def _or(watts: float | None, otherwise_w: float) -> float:
    return otherwise_w if watts is None else watts


def field_values(driver: Driver, handle: int, field_ids: list[int]) -> list[Any]:
    """Each with a return code of its own. The 1 s average came after GA100."""
    gpu = driver.gpu(handle)
    known = {FIELD_POWER_INSTANT: milli(_or(gpu.instant_w, gpu.power_w)), FIELD_POWER_LIMIT: milli(gpu.power_limit_w)}
    if gpu.model.energy_counter:
        known |= {FIELD_ENERGY: gpu.energy_mj, FIELD_ENERGY_SINCE_LOAD: gpu.energy_mj}
    if gpu.model.architecture >= ADA_ARCHITECTURE:
        known[FIELD_POWER_AVERAGE] = milli(_or(gpu.average_w, gpu.power_w))
    missing = {"nvmlReturn": int(Nvml.NOT_SUPPORTED), "value": 0}
    return [[{"nvmlReturn": 0, "value": known[i]} if i in known else missing for i in field_ids]]


# --- clocks ---


def clock_info(driver: Driver, handle: int, kind: int) -> list[Any]:
    gpu = driver.gpu(handle)
    if kind >= CLOCK_KINDS:
        raise NvmlFault(Nvml.INVALID_ARGUMENT)
    if kind != CLOCK_MEMORY:
        return [gpu.clock_at_mhz(driver.now_s)]
    return [gpu.locked_memory_mhz[1] if gpu.locked_memory_mhz else gpu.model.memory_clocks_mhz[0]]


def max_clock_info(driver: Driver, handle: int, kind: int) -> list[Any]:
    gpu = driver.gpu(handle)
    if kind >= CLOCK_KINDS:
        raise NvmlFault(Nvml.INVALID_ARGUMENT)
    return [gpu.model.memory_clocks_mhz[0] if kind == CLOCK_MEMORY else gpu.model.clock_max_mhz]


def graphics_clocks(driver: Driver, handle: int, memory_mhz: int) -> list[Any]:
    model = driver.gpu(handle).model
    if memory_mhz not in model.memory_clocks_mhz:
        raise NvmlFault(Nvml.NOT_FOUND)
    return [list(reversed(model.clocks_mhz))]


def event_reasons(driver: Driver, handle: int) -> list[Any]:
    gpu = driver.gpu(handle)
    bits = {
        IDLE: not gpu.processes,
        LOCKED: gpu.lock_mhz(driver.now_s) is not None,
        POWER_CAP: gpu.capped or gpu.throttle_mhz is not None,
        THERMAL: gpu.thermal_mhz is not None,
    }
    return [sum(bit for bit, holds in bits.items() if holds)]


def lock_clocks(driver: Driver, handle: int, low_mhz: int, high_mhz: int) -> list[Any]:
    driver.lock_clocks(driver.gpu(handle), low_mhz, high_mhz)
    return []


def reset_clocks(driver: Driver, handle: int) -> list[Any]:
    driver.reset_clocks(driver.gpu(handle))
    return []


def lock_memory_clocks(driver: Driver, handle: int, low_mhz: int, high_mhz: int) -> list[Any]:
    driver.lock_memory_clocks(driver.gpu(handle), low_mhz, high_mhz)
    return []


def reset_memory_clocks(driver: Driver, handle: int) -> list[Any]:
    gpu = driver.gpu(handle)
    if not gpu.model.memory_lockable:
        raise NvmlFault(Nvml.NOT_SUPPORTED)
    gpu.locked_memory_mhz = None
    return []
