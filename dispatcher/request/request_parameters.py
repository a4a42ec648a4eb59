"""What a client may ask of us on a request: parameters `trefoil_*`, which never reach Triton.

`trefoil_class` (text) counts a request apart. `trefoil_min_accuracy` (0..1) is a floor that every router keeps: such a
request goes to a variant that is accurate enough, waits for one that is planned, or is refused: accuracy_floors.py.
`trefoil_slo_ms` (> 0) is what "within SLO" means for this request instead of its family's; it moves no request, because
shares bind and order is that of arrival: a time after which an answer is of no use is a deadline, and is kept as one.
An unknown key is refused: a misspelt floor must not pass for a kept one.
"""

import math
from dataclasses import dataclass
from typing import Any, Final

from trefoil.core.errors import InvalidInput

PREFIX: Final = "trefoil_"
KNOWN: Final = ("trefoil_class", "trefoil_min_accuracy", "trefoil_receipt", "trefoil_slo_ms")
CLASS_CHARACTERS_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class RequestParameters:
    """Parameters `trefoil_*` of one request. 0.0 and "" = not asked."""

    slo_class: str = ""
    min_accuracy: float = 0.0
    slo_ms: float = 0.0
    receipt: bool = False


NO_PARAMETERS: Final = RequestParameters()


def extract(parameters: Any) -> RequestParameters:
    """Read our keys from a request's `parameters` map (name -> InferParameter) and remove them.

    Raises:
        InvalidInput: an unknown key, or a value that its key cannot have.
    """
    ours = [name for name in parameters if name.startswith(PREFIX)]
    if not ours:
        return NO_PARAMETERS
    unknown = sorted(set(ours) - set(KNOWN))
    if unknown:
        raise InvalidInput(f"unknown request parameter {', '.join(unknown)}", remedy=f"use one of {', '.join(KNOWN)}")
    values = {name: parameters[name] for name in ours}
    found = RequestParameters(
        slo_class=_text("trefoil_class", values.get("trefoil_class")),
        min_accuracy=_number("trefoil_min_accuracy", values.get("trefoil_min_accuracy"), 0.0, 1.0),
        slo_ms=_number("trefoil_slo_ms", values.get("trefoil_slo_ms"), math.ulp(0.0), math.inf),
        receipt=_flag("trefoil_receipt", values.get("trefoil_receipt")),
    )
    for name in ours:
        del parameters[name]
    return found


def _text(name: str, parameter: Any) -> str:
    if parameter is None:
        return ""
    if parameter.WhichOneof("parameter_choice") != "string_param":
        raise InvalidInput("is text", field=name, value=_value(parameter), remedy="send a string parameter")
    text = str(parameter.string_param)
    if len(text) > CLASS_CHARACTERS_MAX or not text.isprintable():
        remedy = f"at most {CLASS_CHARACTERS_MAX} printable characters"
        raise InvalidInput("is too long or not printable", field=name, value=text[:CLASS_CHARACTERS_MAX], remedy=remedy)
    return text


def _flag(name: str, parameter: Any) -> bool:
    """Clients that cannot send a bool send text or an integer."""
    if parameter is None:
        return False
    raw = _value(parameter)
    known = {"true": True, "1": True, "false": False, "0": False}
    if str(raw).lower() not in known:
        raise InvalidInput("is true or false", field=name, value=raw, remedy="send a bool parameter")
    return known[str(raw).lower()]


def _number(name: str, parameter: Any, low: float, high: float) -> float:
    """Clients that cannot send a double (perf_analyzer) send text or an integer."""
    if parameter is None:
        return 0.0
    raw = _value(parameter)
    remedy = "a number > 0" if math.isinf(high) else f"a number in {low:g}..{high:g}"
    try:
        number = math.nan if isinstance(raw, bool) or raw is None else float(raw)
    except ValueError:
        number = math.nan
    if not (low <= number <= high and math.isfinite(number)):
        raise InvalidInput("is out of range or not a number", field=name, value=raw, remedy=remedy)
    return number


def _value(parameter: Any) -> Any:
    choice = parameter.WhichOneof("parameter_choice")
    return getattr(parameter, choice) if choice else None
