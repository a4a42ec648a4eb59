"""Symbols for watching: event sets (Xid errors) and GPU performance monitoring (see calls.py)."""

from typing import Any

from power_agent.devices.driver import Driver, Gpu, Nvml, NvmlFault
from power_agent.devices.event_sets import XID_EVENT

# --- events ---


def event_set_create(driver: Driver) -> list[Any]:
    handle = driver.token()
    driver.events.create(handle)
    return [handle]


def _current(driver: Driver, handle: int) -> int:
    if driver.is_earlier_load(handle):
        raise NvmlFault(Nvml.UNINITIALIZED)
    return handle


def event_set_free(driver: Driver, event_set: int) -> list[Any]:
    driver.events.free(_current(driver, event_set))
    return []


def register_events(driver: Driver, handle: int, mask: int, event_set: int) -> list[Any]:
    driver.events.register(_current(driver, event_set), driver.gpu(handle).index, mask)
    return []


def supported_events(driver: Driver, handle: int) -> list[Any]:
    driver.gpu(handle)
    return [XID_EVENT]


def event_wait(driver: Driver, event_set: int, _timeout_ms: int) -> list[Any]:
    """TIMEOUT at once where hardware would block: nobody can wait inside a driver model."""
    event = driver.events.take(_current(driver, event_set))
    fields = {"device": event.device, "eventType": event.kind, "eventData": event.data}
    return [{**fields, "gpuInstanceId": event.gi_id, "computeInstanceId": 0xFFFFFFFF}]


# --- performance monitoring ---


def _monitored(driver: Driver, handle: int) -> Gpu:
    gpu = driver.gpu(handle)
    if not gpu.model.gpm:
        raise NvmlFault(Nvml.NOT_SUPPORTED)
    return gpu


def gpm_support(driver: Driver, handle: int) -> list[Any]:
    return [{"isSupportedDevice": int(driver.gpu(handle).model.gpm)}]


def gpm_allocate(driver: Driver) -> list[Any]:
    handle = driver.token()
    driver.gpm.allocate(handle)
    return [handle]


def gpm_free(driver: Driver, sample: int) -> list[Any]:
    driver.gpm.free(_current(driver, sample))
    return []


def gpm_sample(driver: Driver, handle: int, sample: int) -> list[Any]:
    driver.gpm.take(_current(driver, sample), _monitored(driver, handle), None, driver.now_s)
    return []


def gpm_mig_sample(driver: Driver, handle: int, gi_id: int, sample: int) -> list[Any]:
    gpu = _monitored(driver, handle)
    if not gpu.mig_current:
        raise NvmlFault(Nvml.NOT_SUPPORTED)
    if gi_id not in gpu.instances:
        raise NvmlFault(Nvml.NOT_FOUND)
    driver.gpm.take(_current(driver, sample), gpu, gpu.instances[gi_id], driver.now_s)
    return []


def gpm_metrics(driver: Driver, first: int, second: int, wanted: list[int]) -> list[Any]:
    return [driver.gpm.metrics(_current(driver, first), _current(driver, second), wanted)]
