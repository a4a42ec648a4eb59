"""Jobs and slots for tests: hours of one carbon each, devices that are awake and devices asleep."""

from trefoil.core.carbon import CarbonBand
from trefoil.core.jobs.planned import DevicePool, ItemCost, PendingJob, Slot

HOUR = 3600.0
COST = ItemCost("digits", device_s=0.1, active_j=10.0, accuracy=0.9)


def hour(number, carbon, awake=1.0, asleep=0.0, zone="here", sure=1.0, cost=COST, woken=0.0, wake_j=0.0):
    """Slot of an hour: free devices that are awake, and devices that 30 W of idle power wake."""
    pools = [DevicePool("awake", awake * HOUR, awake * sure * HOUR, (cost,))]
    if asleep:
        pools.append(DevicePool("asleep", asleep * HOUR, asleep * sure * HOUR, (cost,), 30.0, wake_j, woken))
    band = CarbonBand(number * HOUR, (number + 1) * HOUR, carbon * 0.8, carbon, carbon * 1.2)
    return Slot(zone, band, tuple(pools))


def job(name="a", hours=1.0, by=24.0, **other):
    """Job of so many device hours, to be complete by an hour."""
    items = round(hours * HOUR / COST.device_s)
    return PendingJob(name, **{"family": "digits", "items_left": items, "complete_by_s": by * HOUR, **other})


def hours_of(plan, name=None):
    """Device hours of a plan by (zone, hour, pool), of one job or of all."""
    found = {}
    for one in plan.portions:
        if name in (None, one.job_id):
            key = (one.zone, round(one.starts_at_s / HOUR), one.pool)
            found[key] = found.get(key, 0.0) + one.items * COST.device_s / HOUR
    return {key: round(value, 6) for key, value in found.items()}
