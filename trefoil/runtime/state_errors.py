"""Judge of what Redis answers instead of a result, and of what stands at a key instead of its value.

Every failure of a call to Redis becomes `StateUnavailable`. A value that its writer cannot have written is as good as
lost: readers continue without it, and its writer writes it again. Such a value is of another type, not a message, too
large, of another's name, or from before 1970.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from redis import exceptions

from trefoil.core import carbon, common, demand, energy, errors, fleet, objective, plan
from trefoil.core.jobs import planned
from trefoil.core.outside.plausible import (
    EPOCH_MAX,
    EPOCHS_AHEAD_MAX,
    is_sum,
    node_fault,
    numbers_fault,
    rates_fault,
    sample_fault,
    window_fault,
)
from trefoil.core.outside.ranges import YEAR_S
from trefoil.runtime import codec
from trefoil.runtime.keys import Keys

VALUE_MAX_BYTES: Final = 32 * 2**20
"""Longest value that is read: a plan of 60,000 GPUs."""
INTERVAL_MAX_S: Final = 86_400.0
"""Longest interval of one load window or energy sample: a machine that slept for a day."""
RUNGS: Final = frozenset(map(int, carbon.Rung))
REMEDIES: Final[Mapping[str, str]] = {
    "OOM": "give Redis more memory, or delete what is not of this cluster",
    "MISCONF": "make room on the disk of Redis, or correct its `dir`",
    "READONLY": "connect to the primary, or make this one the primary",
    "NOREPLICAS": "start its replicas, or set min-replicas-to-write to 0",
    "BUSY": "wait for the script that holds it, or SCRIPT KILL it",
    "LOADING": "wait until it has read its file",
    "MASTERDOWN": "start its primary",
    "NOPERM": "allow this user EVALSHA, SCRIPT LOAD and every other command on the keys of the cluster",
    "NOAUTH": "write the password into redis_url",
    "WRONGPASS": "correct the password in redis_url",
    "NOSCRIPT": "none: the script is loaded again by the next call",
    "CROSSSLOT": "use a Redis that is not a cluster: one script writes several keys",
    "CLUSTERDOWN": "use a Redis that is not a cluster",
}
WRONGTYPE: Final = "WRONGTYPE"
_CODE: Final = re.compile(rf"\b({'|'.join((*REMEDIES, WRONGTYPE))})\b")


def code_of(error: BaseException) -> str:
    """Code of an answer such as OOM, also where a script's error wraps it (Redis 6); "" for none that is known."""
    found = _CODE.search(str(error))
    return found[1] if found else ""


def is_spoilt(error: BaseException) -> bool:
    """Whether Redis refused because something else stands at the key, or a stream's ids are used up."""
    used_up = ("last possible ID", "equal or smaller than the target")
    return code_of(error) == WRONGTYPE or any(words in str(error) for words in used_up)


def translate(error: Exception, timeout_s: float) -> errors.StateUnavailable:
    """Translate what a call to Redis has failed by."""
    code = code_of(error)
    # While connecting, redis-py wraps the refusal of a password into a plain ConnectionError.
    if code in ("NOAUTH", "WRONGPASS") or re.search("password|authentication", str(error), re.IGNORECASE):
        return errors.StateUnavailable(
            f"Redis refuses the password ({error})", remedy="correct the password in redis_url"
        )
    if code or isinstance(error, exceptions.ResponseError):
        return errors.StateUnavailable(
            f"Redis refuses ({error})", remedy=REMEDIES.get(code, "read what it says, and correct the Redis server")
        )
    return errors.StateUnavailable(
        f"Redis does not answer within {timeout_s:g} s ({error or type(error).__name__})",
        remedy="start Redis, or correct redis_url; until then the last values stay in use",
    )


def unreadable(key: str, why: str) -> errors.StateUnreadable:
    """Make the error of a key whose value cannot be read."""
    remedy = "its writer repairs it; delete it if no service writes it any more"
    return errors.StateUnreadable(why, field=key, remedy=remedy)


def decode_value(keys: Keys, key: str, cls: type, data: bytes) -> Any:
    """Decode what stands at a key.

    Raises:
        errors.StateUnreadable: it is not what the key's writer writes.
    """
    if len(data) > VALUE_MAX_BYTES:
        raise unreadable(key, f"longer than {VALUE_MAX_BYTES} bytes")
    try:
        found: Any = codec.decode(cls, data)
    except errors.InvalidInput as error:
        raise unreadable(key, str(error)) from error
    why = _OBJECTIONS[cls](keys, key, found) if cls in _OBJECTIONS else ""
    if why:
        raise unreadable(key, why)
    return found


def parse_epoch(data: bytes) -> int:
    """Parse the value of an epoch's key; 0 for an impossible one."""
    digits = len(data) <= len(str(EPOCH_MAX)) and data.isdigit()
    return int(data) if digits and int(data) <= EPOCH_MAX else 0


def parse_sum(name: str, text: str) -> float | None:
    """Parse a field of the books of an hour; None: it can be no sum."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if is_sum(name, value) else None


def believed_epoch(told: int, known: int, ahead_max: int = EPOCHS_AHEAD_MAX) -> int:
    """Reported epoch, as far as it can be true; 0 for one that would use up the remaining epochs."""
    return told if told <= known + ahead_max else 0


def next_epoch(stored: bytes, *known: int) -> int:
    """Epoch of who takes a role: above what Redis has stored, and all that he knows himself."""
    highest = max(each for each in (0, *known) if each <= EPOCH_MAX)
    return max(highest, believed_epoch(parse_epoch(stored), highest)) + 1


def _is_at(*names: str) -> Callable[[str], str]:
    return lambda key: "" if key in names else f"it belongs to {names[0]}"


def _interval(starts_s: float, ends_s: float) -> str:
    if starts_s <= 0.0 or not 0.0 <= ends_s - starts_s <= INTERVAL_MAX_S:
        return f"an interval from {starts_s:g} to {ends_s:g} s"
    return ""


def _revision(revision: common.Revision) -> str:
    return "" if 0 <= revision.epoch <= EPOCH_MAX else f"epoch {revision.epoch}"


def _reading(keys: Keys, key: str, found: carbon.CarbonReading) -> str:
    elsewhere = _is_at(keys.carbon_now(found.series), keys.carbon_history(found.series))(key)
    why = elsewhere or numbers_fault(found)
    negative = found.intensity_g_per_kwh < 0.0 and found.series.method is not carbon.Method.MARGINAL
    if not why and (negative or not 0.0 <= found.ends_at_s - found.starts_at_s <= YEAR_S):
        why = f"{found.intensity_g_per_kwh:g} g/kWh from {found.starts_at_s:g} to {found.ends_at_s:g} s"
    return why or ("" if found.rung in RUNGS else f"rung {found.rung}")


def _forecast(keys: Keys, key: str, found: carbon.CarbonForecast) -> str:
    lowest = min((band.p10_g_per_kwh for band in found.bands), default=0.0)
    if lowest < 0.0 and found.series.method is not carbon.Method.MARGINAL:
        return f"{lowest:g} g/kWh"
    return _is_at(keys.carbon_forecast(found.series))(key) or numbers_fault(found)


def _window(keys: Keys, key: str, found: demand.LoadWindow) -> str:
    of_worker = key.startswith(keys.load_prefix())
    elsewhere = _is_at(keys.load(found.dispatcher, found.worker))(key) if of_worker else ""
    return elsewhere or _interval(found.starts_at_s, found.ends_at_s) or window_fault(found)


def _sample(keys: Keys, key: str, found: energy.EnergySample) -> str:
    return (
        _is_at(keys.energy(found.node), keys.energy_minutes(found.node))(key)
        or _interval(found.starts_at_s, found.ends_at_s)
        or sample_fault(found)
    )


# By class: why a value cannot be what its writer has written at this key; "" where it can.
_OBJECTIONS: Final[Mapping[type, Callable[[Keys, str, Any], str]]] = {
    common.Lease: lambda keys, key, found: _is_at(keys.lease(found.name))(key),
    fleet.NodeStatus: lambda keys, key, found: (
        _is_at(keys.node(found.node))(key) or _revision(common.Revision(found.highest_epoch_seen)) or node_fault(found)
    ),
    plan.Plan: lambda _keys, _key, found: _revision(found.revision),
    plan.NodePlan: lambda keys, key, found: _is_at(keys.plan_node(found.node))(key) or _revision(found.revision),
    objective.Objective: lambda keys, key, found: _is_at(keys.objective(found.family))(key) or numbers_fault(found),
    objective.TenantRungs: lambda _keys, _key, found: numbers_fault(found),
    demand.TableAck: lambda keys, key, found: _is_at(keys.ack(found.dispatcher, found.worker))(key),
    demand.LoadWindow: _window,
    demand.LoadForecast: lambda keys, key, found: _is_at(keys.forecast_load(found.family))(key) or numbers_fault(found),
    demand.ScaleSignal: lambda keys, key, found: (
        _is_at(keys.scale_signal(found.device))(key)
        or ("" if found.device.startswith(f"{found.node}/") else f"device {found.device!r} is none of {found.node}")
    ),
    planned.OpenJobs: lambda keys, key, found: _is_at(keys.jobs_open(found.folder))(key),
    planned.PlannedJobs: lambda _keys, _key, found: _revision(found.revision) or numbers_fault(found),
    energy.ReceiptRates: lambda _keys, _key, found: rates_fault(found),
    energy.EnergySample: _sample,
    carbon.CarbonReading: _reading,
    carbon.CarbonForecast: _forecast,
    carbon.CarbonRatio: lambda keys, key, found: (
        _is_at(keys.carbon_ratio(found.series), keys.carbon_ratio(found.series, found.window))(key)
        or numbers_fault(found)
    ),
    carbon.CarbonScores: lambda keys, key, found: _is_at(
        keys.carbon_scores(found.series), keys.carbon_scores(found.series, found.model)
    )(key),
}
