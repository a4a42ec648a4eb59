"""What meters say of a load: energy of all devices while it was played, grams at the carbon intensity of then."""

from dataclasses import dataclass
from typing import Final

from trefoil.cli.load.result import LoadResult
from trefoil.cli.system_client import SystemClient
from trefoil.core.accounting import by_family, reading_at
from trefoil.core.carbon import CarbonReading
from trefoil.core.energy import EnergyMethod, EnergySample
from trefoil.core.units import MS_PER_S, grams
from trefoil.runtime.clock import WallClock

LATE_MAX_S: Final = 10.0  # a busy agent's last sample may be that much later
POLL_S: Final = 0.5
BEFORE_S: Final = 5.0  # of the oldest sample that is looked at: clocks of hosts differ
READINGS: Final = 500


@dataclass(frozen=True, slots=True)
class Metered:
    """What a family took while a load was played on it, idle and sleep of all devices included, by answered request.

    Requests of others meanwhile are in the energy, and not in the count.
    """

    joules_per_request: float
    grams_per_request: float
    seconds: float


async def metered_load(system: SystemClient, family: str, result: LoadResult) -> Metered | None:
    """Wait for the meters' last samples; None where a device was not metered, or nothing was answered."""
    ends_s = max((r.intended_s + r.latency_ms / MS_PER_S for r in result.records), default=0.0)
    starts_at_s, seconds = result.started_at_s, max(ends_s, result.duration_s)
    samples = await _samples(system, starts_at_s, starts_at_s + seconds)
    now = next((one for one in await system.carbon() if one.series.zone == system.launch.zone), None)
    unmetered = any(s.method in (EnergyMethod.NONE, EnergyMethod.UNSPECIFIED) for s in samples)
    if not samples or unmetered or now is None or not result.answered:
        return None
    history = await system.state.tail(system.state.keys.carbon_history(now.series), CarbonReading, READINGS)
    readings = (*(one for _, one in history), now)
    pue = (await system.objective(family)).pue
    families = (system.launch.family, *system.launch.more_families)
    joules = co2 = 0.0
    for sample in samples:
        over_s = min(sample.ends_at_s, starts_at_s + seconds) - max(sample.starts_at_s, starts_at_s)
        share = over_s / (sample.ends_at_s - sample.starts_at_s)
        took_j = share * by_family(sample, families).get(family, 0.0)
        at = reading_at(readings, (sample.starts_at_s + sample.ends_at_s) / 2)
        joules += took_j
        co2 += grams(took_j, at.intensity_g_per_kwh, pue)
    return Metered(joules / result.answered, co2 / result.answered, seconds)


async def _samples(system: SystemClient, starts_at_s: float, ends_at_s: float) -> list[EnergySample]:
    """Samples that overlap this time, of every device, once all have come; none where a device's do not."""
    clock = WallClock()
    give_up_s = clock.monotonic_s() + LATE_MAX_S
    devices = {device.device for node in await system.nodes() for device in node.devices}
    found: dict[str, list[EnergySample]] = {}
    while True:
        found = {}
        for node in await system.nodes():
            after = f"{int((starts_at_s - BEFORE_S) * MS_PER_S)}-0"
            while page := await system.state.stream(system.state.keys.energy(node.node), EnergySample, after):
                after = page[-1][0]
                for _, sample in page:
                    found.setdefault(sample.device, []).append(sample)
        if devices and all(found.get(d) and found[d][-1].ends_at_s >= ends_at_s for d in devices):
            every = (sample for samples in found.values() for sample in samples)
            return [s for s in every if s.ends_at_s > starts_at_s and s.starts_at_s < ends_at_s]
        if clock.monotonic_s() > give_up_s:
            return []
        await clock.sleep(POLL_S)
