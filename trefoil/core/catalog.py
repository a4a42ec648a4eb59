"""Catalogue of what can be served: families, their variants, and what each operating point costs."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from trefoil.core.common import IdentityKey, Provenance
from trefoil.core.errors import CatalogError, NotFound, ProfileMissing, one_of
from trefoil.core.fleet import Hosted, family_of, stage_model


@dataclass(frozen=True, slots=True)
class Variant:
    """Variant: one model of a family; `version` is its integer at the Triton edge, fixed for life."""

    name: str
    version: int
    accuracy: float
    accuracy_source: str
    memory_mib: int
    load_s: float
    macs: int
    licence: str


@dataclass(frozen=True, slots=True)
class Family:
    """Family: variants that agree on inputs and outputs. `classes` maps an slo_class to (slo_ms, slo_quantile).

    `tokens_mean`: of a generative family, tokens of the answer that its profile's rows are of; 0 of any other.
    """

    name: str
    metric: str
    variants: tuple[Variant, ...]
    classes: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    generative: bool = False
    sequence: bool = False
    tokens_mean: float = 0.0

    def variant(self, name: str) -> Variant:
        """Variant of a name.

        Raises:
            NotFound: naming those that exist.
        """
        for variant in self.variants:
            if variant.name == name:
                return variant
        raise NotFound(
            f"family {self.name} has no variant {name}", remedy=one_of((v.name for v in self.variants), name)
        )

    def by_accuracy(self) -> tuple[Variant, ...]:
        """Variants by accuracy, cheapest first; never by version."""
        return tuple(sorted(self.variants, key=lambda v: (v.accuracy, v.name)))

    @property
    def best(self) -> Variant:
        """Variant of the highest accuracy: BASE's."""
        return self.by_accuracy()[-1]


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """Profile of one operating point. Latency is of a whole executed batch; energy per batch excludes idle power.

    `clock_sensitivity`: the part of its time that follows the clock (`power.stretch`); 1: all of it.
    """

    device_type: str
    slice_type: str
    family: str
    variant: str
    stage: int
    batch: int
    clock_mhz: int
    cohosted: tuple[str, ...]
    latency_ms_p50: float
    latency_ms_p95: float
    latency_ms_p99: float
    throughput_per_s: float
    energy_active_j_per_batch: float
    power_w: float
    memory_mib: int
    provenance: Provenance | None = None
    clock_sensitivity: float = 1.0


@dataclass(frozen=True, slots=True)
class Catalog:
    """Catalogue of families and of their profile rows."""

    families: tuple[Family, ...]
    rows: tuple[ProfileRow, ...]

    def family(self, name: str) -> Family:
        """Family of a name.

        Raises:
            NotFound: naming those that exist.
        """
        for family in self.families:
            if family.name == name:
                return family
        raise NotFound(f"no family {name!r} in the catalogue", remedy=one_of((f.name for f in self.families), name))

    def restrict(self, families: Collection[str]) -> "Catalog":
        """Catalogue of these families alone; names that it does not know are left out."""
        return Catalog(
            tuple(f for f in self.families if f.name in families), tuple(r for r in self.rows if r.family in families)
        )

    def lookup(
        self,
        device_type: str,
        slice_type: str,
        family: str,
        variant: str,
        clock_mhz: int,
        cohosted: tuple[str, ...] = (),
        batch: int = 1,
        stage: int = 0,
    ) -> ProfileRow:
        """Row of an operating point.

        Raises:
            ProfileMissing: naming all keys.
        """
        for row in self.rows:
            if (row.device_type, row.slice_type, row.family, row.variant) == (
                device_type,
                slice_type,
                family,
                variant,
            ) and (
                row.clock_mhz,
                row.cohosted,
                row.batch,
                row.stage,
            ) == (clock_mhz, cohosted, batch, stage):
                return row
        raise ProfileMissing(
            f"no profile row for device_type={device_type} slice_type={slice_type} family={family} variant={variant} "
            f"clock_mhz={clock_mhz} cohosted={cohosted} batch={batch} stage={stage}",
            remedy=f"profile this operating point and add it to model_repository/{family}/profile.csv",
        )


def check_in_use(before: Catalog, after: Catalog, families: Collection[str]) -> None:
    """Check that a catalogue still has each variant of these families, under its version.

    Raises:
        CatalogError: naming family and variant.
    """
    known = {family.name: {v.name: v.version for v in family.variants} for family in after.families}
    for family in before.families if families else ():
        for variant in family.variants if family.name in families else ():
            if known.get(family.name, {}).get(variant.name) != variant.version:
                raise CatalogError(
                    f"family {family.name} is in use, and this variant of it is gone or has another version",
                    field="variants", value=variant.name, remedy=f"put it back, or `trefoil family stop {family.name}`",
                )  # fmt: skip


def stages_of(catalog: Catalog, family: str, variant: str) -> int:
    """Number of stages that a variant is profiled in, each a model of its own; 1: it is whole only."""
    return _stages(IdentityKey(catalog.rows)).get((family, variant), 1)


def by_model(catalog: Catalog) -> Catalog:
    """The same catalogue with a family more for each stage of those that are split, called as its model in Triton is:
    its variants need the memory, and have the rows, of that stage."""
    return _by_model(IdentityKey(catalog.families), IdentityKey(catalog.rows))


def memory_mib(catalog: Catalog, hosted: Hosted) -> int:
    """Memory that what is hosted takes: of a stage that is profiled its own, else the variant's.

    Raises:
        NotFound: no such family or variant.
    """
    whole = catalog.family(hosted.family).variant(hosted.variant).memory_mib
    if hosted.stages <= 1 or stages_of(catalog, hosted.family, hosted.variant) != hosted.stages:
        return whole
    return by_model(catalog).family(hosted.model).variant(hosted.variant).memory_mib


@lru_cache(maxsize=16)
def _stages(rows: IdentityKey[tuple[ProfileRow, ...]]) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    for row in rows.value:
        if row.stage:
            found[row.family, row.variant] = max(row.stage, found.get((row.family, row.variant), 1))
    return found


@lru_cache(maxsize=16)
def _by_model(families: IdentityKey[tuple[Family, ...]], rows: IdentityKey[tuple[ProfileRow, ...]]) -> Catalog:
    stages, known = _stages(rows), {family.name: family for family in families.value}
    own, more = defaultdict[str, dict[str, Variant]](dict), list[ProfileRow]()
    for row in rows.value:
        if row.stage and row.family in known:
            model, variant = stage_model(row.family, row.stage - 1, stages[row.family, row.variant]), row.variant
            before = own[model].get(variant) or replace(known[row.family].variant(variant), memory_mib=0)
            own[model][variant] = replace(before, memory_mib=max(before.memory_mib, row.memory_mib))
            more.append(replace(row, family=model, stage=0))
    if not more:
        return Catalog(families.value, rows.value)
    split = (replace(known[family_of(m)], name=m, variants=tuple(each.values())) for m, each in own.items())
    return Catalog((*families.value, *split), (*rows.value, *more))


def profile_basis(rows: Iterable[ProfileRow], family: str) -> str:
    """What the profile rows of a family rest on: `measured (trefoil family profile on ...)`; "none" without rows."""
    given = {row.provenance for row in rows if row.family == family and row.provenance is not None}
    return "; ".join(sorted(f"{one.basis.name.lower()} ({one.source})" for one in given)) or "none"
