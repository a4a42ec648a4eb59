"""Table of policies. A row is added when its parts work; unknown names are refused by naming these.

A user's row is named module:ROW. Its columns name parts of the tables, or a user's parts as module:Class.
Sources: base, co2opt, clover, blover, oracle: CLOVER. static_mix, static_miad, exact, exact_miad: docs/policies.md.
wattwiser, sharing_aware, packed_uniform, uniform: WattWiser; their planner asks to be run each second (`tick`).
carbondis, dybatch, random, highperf, lowenergy: CARBONDIS; least_grams: docs/policies.md.
alpaserve, alpaserve_sched, alpaserve_scaling, muserve: mu-Serve; *_no_sched: without its scheduler (A.3).
infadapter, ms_plus, vpa_plus, fixed_size: InfAdapter; their planners ask to be run every 30 s (`tick`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from trefoil.core.errors import NotFound, SettingError, one_of
from trefoil.core.parts import Kind, Value, load_attribute
from trefoil.core.plan import governs


@dataclass(frozen=True, slots=True)
class Policy:
    """Policy: which parts decide, and settings of them, by kind.

    `misses`: why it may miss its SLO at loads that it says it carries, and where its paper says so; "": it keeps it
    (tests/contract/test_policies_keep_their_load.py).
    """

    name: str
    planner: str
    forecaster: str = "last_max"
    triggers: tuple[str, ...] = ("start", "objective", "loss")
    router: str = "weighted"
    queue: str = "fifo"
    governor: str = "fixed"
    settings: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)
    misses: str = ""

    def part(self, kind: Kind) -> str:
        """Name of its part of a kind."""
        name: str = getattr(self, kind.value)
        return name

    @property
    def carbon_blind(self) -> bool:
        """Whether it never looks at carbon."""
        return "carbon" not in self.triggers and self.router != "carbondis"

    @property
    def moves_clocks(self) -> bool:
        """Whether GPUs may run below their highest clock."""
        planned = self.settings.get(Kind.PLANNER, {}).get("clocks", "highest")
        return governs(self.governor) or planned != "highest"

    @property
    def levers(self) -> tuple[str, ...]:
        """Levers that are known of it: variants, clocks."""
        return ("variants",) * (self.planner in MIXING) + ("clocks",) * self.moves_clocks


MIXING: Final = frozenset({"static_mix", "exact", "clover", "blover", "oracle", "infadapter", "ms_plus"})
"""Planners that choose among the variants of a family as they go."""
SHIPPED: Final[Mapping[Kind, frozenset[str]]] = {
    Kind.ROUTER: frozenset({"weighted", "fifo", "least_loaded", "carbondis", "dybatch", "random", "least_grams"}),
    Kind.QUEUE: frozenset({"fifo", "ssjf"}),
    Kind.GOVERNOR: frozenset({"", "fixed", "miad"}),
}
"""Names of the shipped parts that plans name ("": the agent's default), for services that have not their tables."""
LOAD: Final = ("start", "load", "slo", "scale", "objective", "loss")
CARBON: Final = ("start", "carbon", "load", "slo", "scale", "objective", "loss")
MEASURED: Final = ("start", "carbon", "load", "slo", "accuracy", "objective", "loss")
BY_P95: Final[Mapping[str, Mapping[str, Value]]] = {Kind.GOVERNOR: {"statistic": "p95", "slack": 0.5}}
"""Of `miad`, as it is reproduced: the mean, as published, says nothing of a tail, and at a slack of 0.05 queues have
grown before it sees them (docs/energy.md)."""
GOVERNED: Final[Mapping[str, Mapping[str, Value]]] = {
    Kind.PLANNER: {"clocks": "governed"},
    Kind.GOVERNOR: {"statistic": "slo", "slack": 0.0},  # the planner fills slices up to the SLO
}
SCALED: Final = ("start", "load", "scale", "objective", "loss")
BY_MEAN: Final = "lets requests wait until mean times say late (CARBONDIS, Algorithm 1, line 8)"

POLICIES: Final[Mapping[str, Policy]] = {
    row.name: row
    for row in (
        Policy("base", "base"),
        Policy("co2opt", "co2opt"),
        Policy("static_mix", "static_mix", triggers=LOAD),
        Policy("static_miad", "static_mix", triggers=LOAD, governor="miad", settings=GOVERNED),
        Policy("exact", "exact", triggers=CARBON),
        Policy("exact_miad", "exact", triggers=CARBON, governor="miad", settings=GOVERNED),
        Policy("clover", "clover", triggers=MEASURED, router="fifo"),
        Policy("blover", "blover", triggers=MEASURED, router="fifo"),
        Policy("oracle", "oracle", triggers=MEASURED, router="fifo"),
        Policy("wattwiser", "wattwiser"),
        Policy("sharing_aware", "sharing_aware"),
        Policy("packed_uniform", "packed_uniform"),
        Policy("uniform", "uniform"),
        Policy("carbondis", "paired", router="carbondis", misses=BY_MEAN),
        Policy("dybatch", "paired", router="dybatch"),
        Policy("random", "paired", router="random"),
        Policy("least_grams", "paired", router="least_grams", misses="lets requests wait until mean times say late"),
        Policy("highperf", "highperf", router="fifo"),
        Policy("lowenergy", "lowenergy", router="fifo"),
        Policy("alpaserve", "alpaserve", triggers=LOAD),
        Policy("alpaserve_sched", "alpaserve", triggers=LOAD, queue="ssjf"),
        Policy("alpaserve_scaling", "alpaserve", triggers=SCALED, queue="ssjf", governor="miad", settings=BY_P95),
        Policy("alpaserve_scaling_no_sched", "alpaserve", triggers=SCALED, governor="miad", settings=BY_P95),
        Policy("muserve", "muserve", triggers=SCALED, queue="ssjf", governor="miad", settings=BY_P95),
        Policy("muserve_no_sched", "muserve", triggers=SCALED, governor="miad", settings=BY_P95),
        Policy("infadapter", "infadapter", forecaster="lstm"),
        Policy("ms_plus", "ms_plus", forecaster="lstm"),
        Policy("vpa_plus", "vpa_plus"),
        Policy("fixed_size", "fixed_size"),
    )
}

PRESETS: Final[Mapping[str, Mapping[str, Value]]] = {
    "paper": {},  # the defaults: CLOVER's text, with Eq. 6 fixed
    "literal": {"literal": True},  # CLOVER's Eq. 6, WattWiser's Algorithm 2 as printed
    "shared_gpus": {"gpus_shared": 1},  # uniform on GPUs of which neighbours share one, as wattwiser has them
    "shared_left": {"share_left": True},  # wattwiser: of a shared GPU a family may count on what the others leave
    "shared_slices": {"families_per_slice": 2},  # exact: two families on a slice, where that saves
    "guided": {"neighbours": "guided", "warm": True},  # ours: by a fitted law, rounds from the best graph
    "artifact": {  # CLOVER's public code
        "literal": True,
        "lambda_weight": 0.1,
        "base_intensity_g_per_kwh": 250.0,
        "first_accepted": True,
        "carbon_base_g_per_kwh": 250.0,  # its 5 % are of a fixed base: for the shell's triggers, not for the planner
        "limit_s": 0.0,
        "measured_max": 10,
        "requests_min": 1000,
        "rate_tolerance": 1e9,
    },
}
"""Settings of the planner that go over its policy's own (`--preset`): for clover, blover, oracle; `literal` for
wattwiser too, `shared_gpus`, `shared_left` and `shared_slices` for those that they name."""


INFADAPTER_CODE: Final[Mapping[str, Value]] = {
    "resize_loads": True,
    "cores_min": 2.0,
    "intercept_truncated": True,
    "skipped_max": 4,
}
PLANNER_PRESETS: Final[Mapping[tuple[str, str], Mapping[str, Value]]] = {
    (planner, "artifact"): INFADAPTER_CODE for planner in ("infadapter", "ms_plus", "vpa_plus", "fixed_size")
}
"""Presets by planner and name, before those of all."""


def preset_settings(planner: str, preset: str) -> Mapping[str, Value]:
    """Settings of a planner in a preset that there is; `paper` is the defaults of each."""
    return PLANNER_PRESETS.get((planner, preset), PRESETS[preset])


def split_preset(name: str) -> tuple[str, str]:
    """Policy and preset of POLICY@PRESET, as comparisons name their rows; "": no preset."""
    row, _, preset = name.partition("@")
    return row, preset


def policy(name: str) -> Policy:
    """Policy of a name; one of a user's own is called as it was named, module:ROW.

    Raises:
        NotFound: naming the rows that exist.
        SettingError: a user's row that does not exist, or is not a row.
    """
    if name in POLICIES:
        return POLICIES[name]
    if ":" not in name:
        remedy = one_of(sorted(POLICIES), name, also="module:ROW")
        raise NotFound(f"unknown policy {name!r}", field="policy", value=name, remedy=remedy)
    row = load_attribute("policy", name)
    if not isinstance(row, Policy):
        remedy = "name a Policy (trefoil/core/policies.py) of that module"
        raise SettingError("is not a row of a policy", field="policy", value=name, remedy=remedy)
    return replace(row, name=name)


def chosen(row: Policy, parts: Mapping[str, str], settings: Mapping[str, Mapping[str, Value]]) -> Policy:
    """Policy with other parts, by kind ("": its own), and with other settings of its parts.

    What the row sets of a part that is replaced goes with it.
    """
    named: dict[str, Any] = {kind: name for kind, name in parts.items() if name and name != row.part(Kind(kind))}
    kept = {kind: values for kind, values in row.settings.items() if kind not in named}
    merged = {kind: {**kept.get(kind, {}), **settings.get(kind, {})} for kind in {**kept, **settings}}
    return replace(row, **named, settings=merged)
