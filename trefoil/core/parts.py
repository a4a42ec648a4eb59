"""Parts of a policy, and what is stated of each once: how it is made, what can be set, its traits.

A part is a brain behind a name: a planner, router, queue, governor or forecaster. Its service keeps a table of parts by
name; shells read a part's traits and never its name. `module:Class` names a user's own brain: a class with the methods
of its kind, built from what its constructor names. Its class attributes may state what a table would state of it
(`settings`, `traits`, `label`, `colour`). What they leave out has the defaults of `Part`.
"""

import importlib
import inspect
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from types import MemberDescriptorType, ModuleType
from typing import Any, ClassVar, Final, Generic, Self, TypeVar, cast

from pydantic import ConfigDict, ValidationError

from trefoil.core.brains import LivePlanner, Planner
from trefoil.core.errors import SettingError, one_of
from trefoil.core.outside.ranges import Ranged

Brain = TypeVar("Brain", covariant=True)
Value = float | int | str | bool
IMPORT_MAX_S: Final = 30.0
"""Of a user's module: less than `trefoil up` waits for its services."""


class Kind(StrEnum):
    """Kind of part: a column of a policy."""

    PLANNER = "planner"
    FORECASTER = "forecaster"
    ROUTER = "router"
    QUEUE = "queue"
    GOVERNOR = "governor"


METHODS: Final[Mapping[Kind, tuple[str, ...]]] = {
    Kind.PLANNER: ("plan",),
    Kind.FORECASTER: ("forecast",),
    Kind.ROUTER: (
        "on_table", "on_carbon", "on_arrival", "on_credit", "on_done", "on_cancel", "on_pinned", "next_s",
    ),
    Kind.QUEUE: ("limit", "check", "push", "pop", "pop_first", "first", "remove", "depth", "lanes", "tickets"),
    Kind.GOVERNOR: ("step",),
}  # fmt: skip
"""What a brain of each kind must be able to do: the protocols of trefoil/core/brains.py."""

LIVE: Final = ("asks", "ask", "tell", "memory", "recall")
"""What a planner that measures can do beside."""


def can_measure(planner: Planner | type) -> bool:
    """Whether a planner, or its class, has what one has that measures candidates on the running system."""
    return all(callable(getattr(planner, name, None)) for name in LIVE)


def as_live_planner(planner: Planner) -> LivePlanner | None:
    """Planner as one that can measure candidates on the running system; None when it cannot."""
    return cast(LivePlanner, planner) if can_measure(planner) else None


class PartSettings(Ranged):
    """Settings of a part, typed base: frozen, and an unknown name is refused."""

    model_config = ConfigDict(validate_default=True)
    REMOVED: ClassVar[Mapping[str, str]] = {}
    """Remedies for settings that were renamed or removed, by their old names."""
    FLEET: ClassVar[frozenset[str]] = frozenset()
    """Settings of a planner that hold for the whole fleet: an objective's `params` cannot set them."""

    @classmethod
    def made_of(cls, values: Mapping[str, Value], kind: str = "", part: str = "") -> Self:
        """Settings with these values over the defaults; `kind` and `part` are named in errors.

        Raises:
            SettingError: an unknown name, or a value of another type or out of bounds.
        """
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            complaint = error.errors(include_url=False)[0]
            name = ".".join(str(part) for part in complaint["loc"])
            unknown = complaint["type"] == "extra_forbidden"
            known = one_of(sorted(cls.model_fields), name, none="leave it out: it has no settings")
            named = f"{kind} {part}" if part else "the policy's planner"
            raise SettingError(
                f"{part or named} has no such setting" if unknown else complaint["msg"],
                field=f"{kind} setting {name}".strip(),
                value=complaint.get("input"),
                remedy=cls.REMOVED.get(name, known) if unknown else f"`trefoil policy` shows the settings of {named}",
            ) from error

    def over(self, values: Mapping[str, Value]) -> Self:
        """These settings with some values over them; raises as `made_of`."""
        return self.made_of({**self.model_dump(), **values})


@dataclass(frozen=True, slots=True)
class Traits:
    """Traits that a shell must know of a part before it runs it. Each is read of the kinds that it names."""

    order: str = ""
    """Queue: whose turn is next ("arrival": the longest waiting of a priority)."""
    lengths: bool = False
    """Queue: it reads the predicted length of a request's answer, which must be predicted."""
    work_conserving: bool = True
    """Router: no slice with a free credit stands idle while a request waits that may go there."""
    flow: str = ""
    """Router: the law by which it splits a flow, for simulations without single requests: "shares" (each class gets its
    weight), "pool" (all slices are one pool); "" when there is none."""
    group: bool = False
    """Router: one instance may route several families, in one worker."""
    measures: bool = False
    """Planner: it may ask for candidates to be measured on the running system."""
    shares: bool = False
    """Planner: several families may live on one slice, so that a simulation serves them in one loop."""
    latency: bool = False
    """Governor: it reads the latency of its stages, which must be counted."""
    tick_grace_s: float = 2.0
    """Planner: how long after the time that it asked for another trigger may still be the cause."""


@dataclass(frozen=True, slots=True)
class Part(Generic[Brain]):
    """Specification of one brain. An objective's `params` go over a planner's settings for its family.

    `make` takes what its kind is made of, or as much of it as it names: planner (settings, refuses), forecaster
    (settings), router (family, queue), queue (name), governor (settings).
    """

    kind: Kind
    name: str
    make: Callable[..., Brain]
    settings: type[PartSettings] = PartSettings
    traits: Traits = Traits()
    label: str = ""
    """What people read in tables and reports; "": its name."""
    colour: str = ""
    """Of its lines in charts, as #rrggbb; "": one by its name."""

    def made(self, **given: Any) -> Brain:
        """Make one instance, of what its constructor names of what is given.

        Raises:
            SettingError: the constructor wants something else.
        """
        signature = _signature(self.make)
        named = {name: value for name, value in given.items() if name in signature.parameters}
        try:
            signature.bind(**named)
        except TypeError as error:
            raise SettingError(
                f"cannot be made of {', '.join(given)} ({error})",
                field=self.kind.value,
                value=self.name,
                remedy="name only these in its constructor, and give others defaults",
            ) from error
        return self.make(**named)

    def settings_of(self, values: Mapping[str, Value]) -> PartSettings:
        """Settings of the part with these values over its defaults.

        Raises:
            SettingError: an unknown name, or a value of another type or out of bounds.
        """
        return self.settings.made_of(values, self.kind, self.name)


Parts = Mapping[str, Part[Brain]]


@lru_cache(maxsize=128)  # each device, of each run, makes a governor
def _signature(make: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(make)


_OWN: Final[dict[tuple[Kind, str], Part[Any] | None]] = {}
"""Parts of one's own that this process may use, by kind and module:Class; None: named, for other services to load."""


def find(kind: Kind, name: str, table: Parts[Brain]) -> Part[Brain]:
    """Find the part of a name: in the table, or one's own that `load_part` has loaded. Imports nothing.

    Raises:
        SettingError: naming field, value and what there is.
    """
    part = table.get(name) or _OWN.get((kind, name))
    if part is None:
        raise _unknown(kind, name, table, f"module:Class that own_parts.{kind} of this service's settings names")
    return part


def load_part(kind: Kind, name: str, table: Parts[Brain]) -> Part[Brain]:
    """Find the part of a name that stands in this process's own settings or flags; module:Class is imported.

    Raises:
        SettingError: naming field, value and what there is, or why it cannot be loaded.
    """
    if name not in table and ":" not in name:
        raise _unknown(kind, name, table, "module:Class")
    if name not in table and _OWN.get((kind, name)) is None:
        _OWN[kind, name] = load_own_part(kind, name)
    return find(kind, name, table)


def load_own_parts(own: Mapping[str, Sequence[str]], tables: Mapping[Kind, Parts[Any]], *, named: bool = False) -> None:
    """Load the parts of one's own that a service's settings name by kind (`own_parts`).

    Args:
        named: a kind without a table is of parts that other services load; only their names are noted.

    Raises:
        SettingError: a kind that this service has not, or a part that cannot be loaded.
    """
    kinds = tuple(Kind) if named else tuple(tables)
    for kind_name, names in own.items():
        if kind_name not in kinds:
            remedy = f"one of {', '.join(kinds)}"
            raise SettingError("no such kind of part here", field="own_parts", value=kind_name, remedy=remedy)
        for name in names:
            if ":" not in name:
                remedy = "write e.g. mine.parts:Greedy; what ships needs no permission"
                raise SettingError("not module:Class", field=f"own_parts.{kind_name}", value=name, remedy=remedy)
            kind = Kind(kind_name)
            if kind in tables:
                load_part(kind, name, tables[kind])
            else:
                _OWN.setdefault((kind, name), None)


def check_name(kind: Kind, name: str, shipped: Collection[str]) -> None:
    """Check that a name stands for a part that ships, or for one of `own_parts`. Imports nothing.

    Raises:
        SettingError: naming field, value and what there is.
    """
    if name not in shipped and (kind, name) not in _OWN:
        raise _unknown(kind, name, shipped, f"module:Class that own_parts.{kind} of this service's settings names")


def _unknown(kind: Kind, name: str, known: Collection[str], own: str) -> SettingError:
    return SettingError(f"no such {kind}", field=kind.value, value=name, remedy=one_of(sorted(known), name, also=own))


def load_own_part(kind: Kind, path: str) -> Part[Any]:
    """Part of a user's own brain, module:Class.

    Raises:
        SettingError: naming what is missing.
    """
    made = load_attribute(kind.value, path)
    if not isinstance(made, type):
        raise SettingError("is not a class", field=kind.value, value=path, remedy="name a class of that module")
    missing = [name for name in METHODS[kind] if not callable(getattr(made, name, None))]
    if missing:
        raise SettingError(
            f"has no method {', '.join(missing)}", field=kind.value, value=path, remedy="see trefoil/core/brains.py"
        )
    measures = kind == Kind.PLANNER and can_measure(made)
    stated: dict[str, Any] = {"traits": Traits(measures=measures)} | _attributes(made, kind, path)
    return Part(kind, path, made, **stated)


ATTRIBUTES: Final[Mapping[str, type]] = {"settings": type, "traits": Traits, "label": str, "colour": str}


def _attributes(made: type, kind: Kind, path: str) -> dict[str, Any]:
    """What a class says of itself. A field of its instances that is called so says nothing, but for its settings' type.

    Raises:
        SettingError: something of another type than a table would say.
    """
    if kind == Kind.PLANNER and (hasattr(made, "constants") or "constants" in _signature(made).parameters):
        remedy = "make `settings` a subclass of PlannerSettings with them (controller/planners/planner_settings.py)"
        raise SettingError("has constants, which are settings now", field=kind.value, value=path, remedy=remedy)
    found = {name: value for name, value in vars(made).items() if name in ATTRIBUTES}
    found = {name: value for name, value in found.items() if not isinstance(value, MemberDescriptorType)}
    if isinstance(found.get("settings"), PartSettings):
        found["settings"] = type(found["settings"])
    for name, value in found.items():
        right = isinstance(value, ATTRIBUTES[name])
        if not right or (name == "settings" and not issubclass(value, PartSettings)):
            wanted = "a subclass of PartSettings" if name == "settings" else f"a {ATTRIBUTES[name].__name__}"
            remedy = f"make it {wanted} (trefoil/core/parts.py), or call it otherwise"
            raise SettingError(f"its {name} is none that a part can have", field=kind.value, value=path, remedy=remedy)
    return found


@contextmanager
def _at_most(limit_s: float) -> Iterator[None]:
    """Bound the time of what may block forever, in the main thread, which alone gets signals; raises TimeoutError."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise TimeoutError(f"it has not ended after {limit_s:g} s")

    handler = signal.signal(signal.SIGALRM, end)
    before = signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)
        signal.signal(signal.SIGALRM, handler)


def load_attribute(field_name: str, path: str) -> Any:
    """Load what module:name stands for.

    Raises:
        SettingError: it cannot be imported within IMPORT_MAX_S, or is not there.
    """
    module_name, colon, attribute = path.partition(":")
    if not colon or not module_name or not attribute:
        raise SettingError("not module:Class", field=field_name, value=path, remedy="write e.g. mine.parts:Greedy")
    try:
        with _at_most(IMPORT_MAX_S):
            module: ModuleType = importlib.import_module(module_name)
            found = getattr(module, attribute, None)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module of an operator's own may do anything, also exit
        said = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise SettingError(
            f"cannot be imported ({said})",
            field=field_name,
            value=path,
            remedy="install or fix it, or set PYTHONPATH",
        ) from error
    if found is None:
        raise SettingError(
            f"{module_name} has no {attribute}", field=field_name, value=path, remedy="name a class of that module"
        )
    return found
