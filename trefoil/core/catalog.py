"""Catalogue of what can be served: families, their variants, and what each operating point costs."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

from trefoil.core.common import ProfileRow
from trefoil.core.cpus.rows import CpuRows
from trefoil.core.device_types import profile_type
from trefoil.core.errors import CatalogError, NotFound, ProfileMissing, one_of
from trefoil.core.fleet import Hosted, family_of, stage_model
from trefoil.core.objective import TokenSlo

PARTS_MAX: Final = 4
"""Restricted catalogues that are kept: of what is planned, and of that with what lent devices hold, now and before."""


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
    """Family: variants that agree on inputs and outputs. `classes` maps an slo_class to (slo_ms, slo_quantile),
    `token_classes` those with objectives of tokens to these.

    `tokens_mean`: of a generative family, tokens of the answer that its profile's rows are of; 0 of any other.
    `batching`: Triton joins requests that wait to batches (`dynamic_batching` of its config.pbtxt).
    """

    name: str
    metric: str
    variants: tuple[Variant, ...]
    classes: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    generative: bool = False
    sequence: bool = False
    tokens_mean: float = 0.0
    batching: bool = False
    token_classes: Mapping[str, TokenSlo] = field(default_factory=dict)

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


@dataclass(frozen=True)
class Catalog:
    """Catalogue of families and of their profile rows. Each index of them is built when it is first read, and kept."""

    families: tuple[Family, ...]
    rows: tuple[ProfileRow, ...]

    @cached_property
    def profiled_types(self) -> frozenset[str]:
        """Device types with a profile row, by their `profile_type`."""
        return frozenset(profile_type(row.device_type) for row in self.rows)

    @cached_property
    def profiled_families(self) -> frozenset[str]:
        """Families with a profile row."""
        return frozenset(row.family for row in self.rows)

    @cached_property
    def accuracies(self) -> Mapping[str, Mapping[str, float]]:
        """Accuracy of each variant, by family and variant."""
        return {family.name: {v.name: v.accuracy for v in family.variants} for family in self.families}

    @cached_property
    def stages(self) -> Mapping[tuple[str, str], int]:
        """Stages that a variant is profiled in, by (family, variant); variants that are profiled whole are left out."""
        found: dict[tuple[str, str], int] = {}
        for row in self.rows:
            if row.stage:
                found[row.family, row.variant] = max(row.stage, found.get((row.family, row.variant), 1))
        return found

    @cached_property
    def by_model(self) -> "Catalog":
        """This catalogue plus one family for each stage of a split variant, named as the stage's model in Triton, with
        the stage's memory and rows."""
        known = {family.name: family for family in self.families}
        own, more = defaultdict[str, dict[str, Variant]](dict), list[ProfileRow]()
        for row in self.rows:
            if row.stage and row.family in known:
                model, variant = (
                    stage_model(row.family, row.stage - 1, self.stages[row.family, row.variant]),
                    row.variant,
                )
                before = own[model].get(variant) or replace(known[row.family].variant(variant), memory_mib=0)
                own[model][variant] = replace(before, memory_mib=max(before.memory_mib, row.memory_mib))
                more.append(replace(row, family=model, stage=0))
        if not more:
            return self
        split = (replace(known[family_of(m)], name=m, variants=tuple(each.values())) for m, each in own.items())
        return Catalog((*self.families, *split), (*self.rows, *more))

    @cached_property
    def fastest_rows(self) -> Mapping[tuple[str, str, str, str], ProfileRow]:
        """Row of batch 1 at the highest profiled clock, alone and whole, by (device type, slice type, family,
        variant)."""
        found: dict[tuple[str, str, str, str], ProfileRow] = {}
        for row in self.rows:
            if row.batch != 1 or row.cohosted or row.stage:
                continue
            key = (row.device_type, row.slice_type, row.family, row.variant)
            if key not in found or found[key].clock_mhz < row.clock_mhz:
                found[key] = row
        return found

    @cached_property
    def rows_by_batch(self) -> Mapping[tuple[object, ...], tuple[ProfileRow, ...]]:
        """Rows by batch, ascending, by (device type, slice type, family, variant, stage, clock [MHz], cohosted)."""
        found = defaultdict[tuple[object, ...], list[ProfileRow]](list)
        for row in sorted(self.rows, key=lambda row: row.batch):
            key = (row.device_type, row.slice_type, row.family, row.variant, row.stage, row.clock_mhz, row.cohosted)
            found[key].append(row)
        return {key: tuple(rows) for key, rows in found.items()}

    @cached_property
    def cpu_rows(self) -> CpuRows:
        """Rows of CPU slices of any size."""
        return CpuRows(self.rows)

    @cached_property
    def _without(self) -> dict[frozenset[str], "Catalog"]:
        return {}

    def without(self, versions: frozenset[str]) -> "Catalog":
        """Catalogue without some variants, given as `family/version`; a family that has no other stays whole.

        The last answer is kept: planners compute much from a catalogue, and keep it by the catalogue's identity.
        """
        if versions not in self._without:
            self._without.clear()
            self._without[versions] = self._made_without(versions)
        return self._without[versions]

    def _made_without(self, versions: frozenset[str]) -> "Catalog":
        families, gone = [], set()
        for family in self.families:
            left = tuple(v for v in family.variants if f"{family.name}/{v.version}" not in versions)
            gone |= {(family.name, v.name) for v in family.variants if left and v not in left}
            families.append(replace(family, variants=left) if left and left != family.variants else family)
        return Catalog(tuple(families), tuple(row for row in self.rows if (row.family, row.variant) not in gone))

    def family(self, name: str) -> Family:
        """Family of a name.

        Raises:
            NotFound: naming those that exist.
        """
        for family in self.families:
            if family.name == name:
                return family
        raise NotFound(f"no family {name!r} in the catalogue", remedy=one_of((f.name for f in self.families), name))

    @cached_property
    def _parts(self) -> dict[frozenset[str], "Catalog"]:
        return {}

    def restrict(self, families: Collection[str]) -> "Catalog":
        """Catalogue of these families alone; names that it does not know are left out. The last answers are kept, as
        those of `without` are."""
        wanted = frozenset(families)
        if wanted not in self._parts:
            if len(self._parts) >= PARTS_MAX:
                self._parts.clear()
            own = tuple(f for f in self.families if f.name in wanted)
            self._parts[wanted] = Catalog(own, tuple(r for r in self.rows if r.family in wanted))
        return self._parts[wanted]

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


def memory_mib(catalog: Catalog, hosted: Hosted) -> int:
    """Memory that what is hosted takes: of a stage that is profiled its own, else the variant's.

    Raises:
        NotFound: no such family or variant.
    """
    whole = catalog.family(hosted.family).variant(hosted.variant).memory_mib
    if hosted.stages <= 1 or catalog.stages.get((hosted.family, hosted.variant)) != hosted.stages:
        return whole
    return catalog.by_model.family(hosted.model).variant(hosted.variant).memory_mib


def profile_basis(rows: Iterable[ProfileRow], family: str) -> str:
    """What the profile rows of a family rest on: `measured (trefoil family profile on ...)`; "none" without rows."""
    given = {row.provenance for row in rows if row.family == family and row.provenance is not None}
    return "; ".join(sorted(f"{one.basis.name.lower()} ({one.source})" for one in given)) or "none"
