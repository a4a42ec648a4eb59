"""What a client may ask of us on a request: parameters `trefoil_*`, which never reach Triton.

`trefoil_class` (text) counts a request apart; names that begin with "(" are Trefoil's own. `trefoil_min_accuracy`
(0..1) is a floor that every router keeps: such a request goes to a variant that is accurate enough, waits for one that
is planned, or is refused: accuracy_floors.py. `trefoil_slo_ms` (> 0) is what "within SLO" means for this request
instead of its family's. It moves no request among slices, because shares bind and order is that of arrival. A time
after which an answer is of no use is a deadline, and is kept as one. Another zone gets a request only if it answers
within that SLO (zone_choice.py). `trefoil_forwarded` (true) marks a request of another zone's dispatcher, which is
answered here. An unknown key is refused: a misspelt floor must not pass for a kept one.
"""

import math
from dataclasses import dataclass
from typing import Any, Final

from trefoil.core.demand import OWN_NAMES
from trefoil.core.errors import InvalidInput, one_of

PREFIX: Final = "trefoil_"
CLASS, MIN_ACCURACY, RECEIPT, SLO_MS = "trefoil_class", "trefoil_min_accuracy", "trefoil_receipt", "trefoil_slo_ms"
FORWARDED: Final = "trefoil_forwarded"
KNOWN: Final = frozenset((CLASS, MIN_ACCURACY, RECEIPT, SLO_MS, FORWARDED))
FLAGS: Final = {"true": True, "1": True, "false": False, "0": False}
CLASS_CHARACTERS_MAX: Final = 64
SLO_MS_MIN: Final = math.ulp(0.0)


@dataclass(frozen=True, slots=True)
class RequestParameters:
    """Parameters `trefoil_*` of one request. 0.0 and "" = not asked."""

    slo_class: str = ""
    min_accuracy: float = 0.0
    slo_ms: float = 0.0
    receipt: bool = False
    forwarded: bool = False


NO_PARAMETERS: Final = RequestParameters()


def extract(parameters: Any) -> RequestParameters:
    """Read our keys from a request's `parameters` map (name -> InferParameter) and remove them.

    Raises:
        InvalidInput: an unknown key, or a value that its key cannot have.
    """
    ours = {name: parameters[name] for name in parameters if name.startswith(PREFIX)}
    if not ours:
        return NO_PARAMETERS
    if not ours.keys() <= KNOWN:
        unknown = sorted(ours.keys() - KNOWN)
        remedy = one_of(sorted(KNOWN), unknown[0])
        raise InvalidInput(f"unknown request parameter {', '.join(unknown)}", remedy=remedy)
    found = RequestParameters(
        slo_class=_text(CLASS, ours[CLASS]) if CLASS in ours else "",
        min_accuracy=_number(MIN_ACCURACY, ours[MIN_ACCURACY], 0.0, 1.0) if MIN_ACCURACY in ours else 0.0,
        slo_ms=_number(SLO_MS, ours[SLO_MS], SLO_MS_MIN, math.inf) if SLO_MS in ours else 0.0,
        receipt=_flag(RECEIPT, ours[RECEIPT]) if RECEIPT in ours else False,
        forwarded=_flag(FORWARDED, ours[FORWARDED]) if FORWARDED in ours else False,
    )
    if len(ours) == len(parameters):
        parameters.clear()
    else:
        for name in ours:
            del parameters[name]
    return found


def _text(name: str, parameter: Any) -> str:
    if parameter.WhichOneof("parameter_choice") != "string_param":
        raise InvalidInput("is text", field=name, value=_value(parameter), remedy="send a string parameter")
    text = str(parameter.string_param)
    if len(text) > CLASS_CHARACTERS_MAX or not text.isprintable():
        remedy = f"at most {CLASS_CHARACTERS_MAX} printable characters"
        raise InvalidInput("is too long or not printable", field=name, value=text[:CLASS_CHARACTERS_MAX], remedy=remedy)
    if text.startswith(OWN_NAMES):
        raise InvalidInput("is a name of Trefoil's own", field=name, value=text, remedy=f"begin without '{OWN_NAMES}'")
    return text


def _flag(name: str, parameter: Any) -> bool:
    """Clients that cannot send a bool send text or an integer."""
    raw = _value(parameter)
    if isinstance(raw, bool):
        return raw
    flag = FLAGS.get(str(raw).lower())
    if flag is None:
        raise InvalidInput("is true or false", field=name, value=raw, remedy="send a bool parameter")
    return flag


def _number(name: str, parameter: Any, low: float, high: float) -> float:
    """Clients that cannot send a double (perf_analyzer) send text or an integer."""
    raw = _value(parameter)
    try:
        number = math.nan if isinstance(raw, bool) or raw is None else float(raw)
    except ValueError:
        number = math.nan
    if not (low <= number <= high and math.isfinite(number)):
        remedy = "a number > 0" if math.isinf(high) else f"a number in {low:g}..{high:g}"
        raise InvalidInput("is out of range or not a number", field=name, value=raw, remedy=remedy)
    return number


def _value(parameter: Any) -> Any:
    choice = parameter.WhichOneof("parameter_choice")
    return getattr(parameter, choice) if choice else None
