"""Reader of a model repository (family.toml, profile.csv) into a `Catalog`; errors name file and field."""

import csv
import datetime
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

from pydantic import Field, ValidationError, field_validator

from trefoil.core import errors
from trefoil.core.catalog import Catalog, Family, Variant
from trefoil.core.common import Basis, ProfileRow, Provenance
from trefoil.core.device_types import DEVICE_TYPES
from trefoil.core.objective import PERCENTILE, TokenSlo, check_token_slo, token_slo
from trefoil.core.outside.ranges import Ranged
from trefoil.core.power import fitted_sensitivity
from trefoil.installation import MODELS, repositories
from trefoil.runtime.config import explain, parse_toml
from trefoil.runtime.given.repository_names import (
    BATCH_MAX,
    CONFIG_BYTES_MAX,
    FAMILIES_MAX,
    NAME,
    PROFILE_BYTES_MAX,
    TOML_BYTES_MAX,
    VERSION_MAX,
    boundary,
    check_name,
    read_text,
)

FAMILY_FILE: Final = "family.toml"
PROFILE_FILE: Final = "profile.csv"
CONTRACT_FILE: Final = "config.pbtxt"
NO_FIELDS: Final = re.compile(r""" "(?:\\.|[^"\\\n])*+"? | '(?:\\.|[^'\\\n])*+'? | \#.* """, re.VERBOSE)
"""Strings and comments of a contract. It takes what has no end as well, so that no text is looked at twice."""
BATCHING: Final = re.compile(r"\bdynamic_batching\s*+(?::\s*+)?[{<]")
"""Field of a contract, without strings and comments, by which Triton joins requests to batches."""
HEADER_KEYS: Final = ("basis", "source", "machine", "date", "commit")
SENSITIVITY: Final = "clock_sensitivity"
"""A column that a profile may leave out; with it, a header line of this name says where its numbers are from."""
LIMIT: Final = "limit_watts"
"""A column that a profile may leave out: the power limit of the board instead of a clock. Of a `ProfileRow` it is the
clock, below 0."""

FAMILY_VARIANTS_MAX: Final = 256
ROWS_MAX: Final = 200_000
NUMBER_MAX: Final = 1e12  # of milliseconds, requests/s, joules, watts: beyond what any hardware has
WHOLE_MAX: Final = 2**53
Name = Annotated[str, Field(pattern=NAME)]
Text = Annotated[str, Field(min_length=1, max_length=4096)]
Positive = Annotated[float, Field(gt=0, le=NUMBER_MAX)]
NotNegative = Annotated[float, Field(ge=0, le=NUMBER_MAX)]


class _Variant(Ranged):
    name: Name
    version: Annotated[int, Field(ge=1, le=VERSION_MAX)]
    accuracy: Annotated[float, Field(ge=0, le=1)]
    accuracy_source: Text
    memory_mib: Annotated[int, Field(gt=0, le=2**31)]
    load_s: Annotated[float, Field(ge=0, le=86_400)]
    macs: Annotated[int, Field(ge=0, le=WHOLE_MAX)]
    licence: Text
    sha256: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""


class _Class(Ranged):
    REMOVED: ClassVar[Mapping[str, str]] = {
        "slo_ms": "write latency_ms",
        "slo_quantile": "write percentile, 100 times the quantile",
    }

    percentile: Annotated[float, Field(gt=0, lt=100)]
    latency_ms: Positive
    ttft_ms: Positive | None = None
    ttft_percentile: Annotated[float, Field(gt=0, lt=100)] = PERCENTILE
    tpot_ms: Positive | None = None
    tpot_percentile: Annotated[float, Field(gt=0, lt=100)] = PERCENTILE

    @property
    def token_slo(self) -> TokenSlo:
        """Its objectives of tokens."""
        return token_slo(self.ttft_ms, self.ttft_percentile, self.tpot_ms, self.tpot_percentile)


class _Family(Ranged):
    name: Name
    metric: Text
    task: Annotated[str, Field(max_length=4096)] = ""
    generative: bool = False
    tokens_mean: NotNegative = 0.0
    sequence_batching: bool = False
    classes: Annotated[dict[str, _Class], Field(min_length=1, max_length=FAMILY_VARIANTS_MAX)]
    variants: Annotated[tuple[_Variant, ...], Field(min_length=1, max_length=FAMILY_VARIANTS_MAX)]


class _Row(Ranged):
    device_type: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 .:_-]*$")]  # NVML has blanks in some; cpu:8
    slice_type: Text
    variant: Name
    stage: Annotated[int, Field(ge=0, le=1024)]
    batch: Annotated[int, Field(ge=1, le=BATCH_MAX)]
    clock_mhz: Annotated[int, Field(ge=0, le=1_000_000)]
    cohosted: tuple[str, ...]
    latency_ms_p50: Positive
    latency_ms_p95: Positive
    latency_ms_p99: Positive
    throughput_per_s: Positive
    energy_active_j_per_batch: NotNegative
    power_w: NotNegative
    memory_mib: Annotated[int, Field(ge=0, le=2**31)]
    clock_sensitivity: Annotated[float, Field(ge=0, le=1)] | None = None
    limit_watts: Annotated[int, Field(gt=0, le=1_000_000)] | None = None

    @field_validator("clock_sensitivity", "limit_watts", mode="before")
    @classmethod
    def _not_stated(cls, value: object) -> object:
        """An empty cell: not stated."""
        return None if value == "" else value

    @property
    def held_mhz(self) -> int:
        """Clock of it, below 0 its power limit [-W]."""
        return -self.limit_watts if self.limit_watts else self.clock_mhz

    @field_validator("cohosted", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """Names separated by `+`; empty = alone."""
        return tuple(name for name in value.split("+") if name) if isinstance(value, str) else value


COLUMNS: Final = tuple(name for name in _Row.model_fields if name not in (SENSITIVITY, LIMIT))
KEY_COLUMNS: Final = ("device_type", "slice_type", "variant", "stage", "batch", "clock_mhz", "cohosted")


def load_family(
    folder: Path, profile: Path | None = None, variants: Sequence[str] = ()
) -> tuple[Family, tuple[ProfileRow, ...]]:
    """Load one family; `profile` replaces the folder's own profile.csv, and may be of these variants alone.

    Without either it has no rows: planners that measure on the running system can serve it, those that predict cannot.

    Raises:
        errors.CatalogError: names file, field, value and remedy.
    """
    path, below = folder / FAMILY_FILE, boundary(folder.parent, folder.name)
    family = _read_family(path, below)
    if family.name != folder.name:
        raise errors.CatalogError(
            f"{path}: differs from its folder's name {folder.name!r}",
            field="name",
            value=family.name,
            remedy="give both the same name; clients and Triton use it",
        )
    config, own = folder / CONTRACT_FILE, folder / PROFILE_FILE
    if os.path.lexists(config) and BATCHING.search(NO_FIELDS.sub(" ", _read(config, below, CONFIG_BYTES_MAX))):
        family = replace(family, batching=True)
    if profile is None and not os.path.lexists(own):
        return family, ()
    text = _read(profile or own, None if profile else below, PROFILE_BYTES_MAX)
    return family, _parse_profile(profile or own, text, family, variants)


def family_files(root: Path) -> list[Path]:
    """Every family.toml of a repository, but for folders that an import has not finished (`.import-*`)."""
    return [path for path in root.glob(f"*/{FAMILY_FILE}") if not path.parent.name.startswith(".")]


def family_folders(repository: Path = MODELS) -> dict[str, Path]:
    """Folder of every family by name, where `trefoil.installation.repositories` looks; of two of one name the first.

    Raises:
        errors.CatalogError: there is none.
    """
    roots = repositories(repository)
    folders = {path.parent.name: path.parent for root in reversed(roots) for path in family_files(root)}
    if not folders:
        raise _no_families(roots[0])
    return dict(sorted(folders.items()))


def family_folder(repository: Path, family: str) -> Path:
    """Folder of one family, where `trefoil.installation.repositories` looks; in the first of them if there is none.

    Raises:
        errors.CatalogError: the name could be a path.
    """
    check_name(family, "family")
    roots = repositories(repository)
    return next((root / family for root in roots if (root / family / FAMILY_FILE).is_file()), roots[0] / family)


def known_folder(repository: Path, family: str) -> Path:
    """Folder of a family that is there.

    Raises:
        errors.CatalogError: there are no families.
        errors.NotFound: there are others.
    """
    known = family_folders(repository)
    if family not in known:
        where = " or ".join(map(str, repositories(repository)))
        remedy = errors.one_of(known, family)
        raise errors.NotFound(f"no such family in {where}", field="family", value=family, remedy=remedy)
    return known[family]


def link_shared(repository: Path, folder: Path) -> None:
    """Link into `folder` what families of a repository share (`_shared`); what ships is the newest."""
    for root in repositories(repository):
        for shared in root.glob("_*"):
            (folder / shared.name).unlink(missing_ok=True)
            (folder / shared.name).symlink_to(shared.resolve())


def _no_families(root: Path) -> errors.CatalogError:
    remedy = "name the right folder"
    return errors.CatalogError(f"no {FAMILY_FILE} below it", field="model repository", value=str(root), remedy=remedy)


def load_catalog(root: Path, profile_overrides: Mapping[str, Path] | None = None) -> Catalog:
    """Load every folder of `root` that holds a family.toml; `profile_overrides`: family -> another profile.csv.

    Raises:
        errors.CatalogError: names file, field, value and remedy.
    """
    overrides = dict(profile_overrides or {})
    folders = sorted(path.parent for path in family_files(root))
    if not folders:
        raise _no_families(root)
    if len(folders) > FAMILIES_MAX:
        remedy = f"keep at most {FAMILIES_MAX} in one repository"
        raise errors.CatalogError("too many families", field=str(root), value=len(folders), remedy=remedy)
    loaded = [load_family(folder, overrides.pop(folder.name, None)) for folder in folders]
    if overrides:
        remedy = errors.one_of((folder.name for folder in folders), min(overrides))
        raise errors.CatalogError("no such family", field="profile_overrides", value=sorted(overrides), remedy=remedy)
    return Catalog(tuple(family for family, _ in loaded), tuple(chain.from_iterable(rows for _, rows in loaded)))


def stated_digests(root: Path) -> dict[tuple[str, int], str]:
    """Digests, SHA-256, of the model files that the families of a repository state, by family and version.

    Raises:
        errors.CatalogError: names file, field, value and remedy.
    """
    found = [_read_tree(path, boundary(root, path.parent.name)) for path in family_files(root)]
    return {(family.name, v.version): v.sha256 for family in found for v in family.variants if v.sha256}


def _read_tree(path: Path, below: Path) -> _Family:
    try:
        tree = parse_toml(_read(path, below, TOML_BYTES_MAX))
    except (ValueError, RecursionError) as error:
        raise errors.CatalogError(f"{path} is not valid TOML: {error}", remedy="correct that line") from error
    try:
        return _Family.model_validate(tree)
    except ValidationError as error:
        raise explain(error, str(path), _Family, errors.CatalogError) from error


def _read_family(path: Path, below: Path) -> Family:
    read = _read_tree(path, below)
    for field in ("name", "version"):
        values = [getattr(variant, field) for variant in read.variants]
        _assert_unique(values, f"variants.{field}", str(path))
    variants = tuple(Variant(**variant.model_dump(exclude={"sha256"})) for variant in read.variants)
    classes = {name: (entry.latency_ms, entry.percentile / 100) for name, entry in read.classes.items()}
    if read.generative != (read.tokens_mean > 0):
        raise errors.CatalogError(
            f"{path}: of a generative family, and only of one, the mean tokens of an answer are stated",
            field="tokens_mean",
            value=read.tokens_mean,
            remedy="state them" if read.generative else "remove it",
        )
    tokens = {name: entry.token_slo for name, entry in read.classes.items() if entry.token_slo}
    if "" in tokens:
        raise errors.CatalogError(
            f'{path}: class "" has objectives of tokens, which are those of the family\'s objective',
            field="classes",
            value=tokens[""],
            remedy="set slo.ttft_ms, slo.tpot_ms there; here they are of named classes",
        )
    for name, slo in tokens.items():
        try:
            check_token_slo(slo, classes[name][0], generative=read.generative)
        except errors.InvalidInput as error:
            raise errors.CatalogError(f"{path}: class {name!r}: {error}") from error
    return Family(
        read.name, read.metric, variants, classes, read.generative, read.sequence_batching, read.tokens_mean,
        token_classes=tokens,
    )  # fmt: skip


def _parse_profile(path: Path, text: str, family: Family, variants: Sequence[str] = ()) -> tuple[ProfileRow, ...]:
    lines = text.splitlines()
    comments = [line[1:] for line in lines if line.startswith("#")]
    provenance = _provenance(path, comments)
    numbered = [(i, line) for i, line in enumerate(lines, 1) if line.strip() and not line.startswith("#")]
    if not numbered:
        raise errors.CatalogError(f"{path} holds no rows", remedy=f"begin with the columns {','.join(COLUMNS)}")
    if len(numbered) > ROWS_MAX:
        raise errors.CatalogError(f"{path} has {len(numbered)} rows", remedy=f"keep at most {ROWS_MAX}")
    header = [name.strip() for name in numbered[0][1].split(",")]
    columns = (*COLUMNS, *(name for name in (SENSITIVITY, LIMIT) if name in header))
    if sorted(header) != sorted(columns):
        wrong = sorted(set(header) ^ set(columns)) or sorted(name for name in header if header.count(name) > 1)
        raise errors.CatalogError(
            f"{path}: missing, unknown or repeated", field="columns", value=wrong, remedy=f"use {','.join(COLUMNS)}"
        )
    if SENSITIVITY in header and not any(c.partition(":")[0].strip() == SENSITIVITY for c in comments):
        remedy = f"write '# {SENSITIVITY}: measured by ...', or leave the column out"
        raise errors.CatalogError(f"{path}: its source is not named", field=SENSITIVITY, remedy=remedy)
    known = [variant.name for variant in family.variants]
    read: list[_Row] = []
    for (number, _), cells in zip(numbered[1:], _cells(path, [line for _, line in numbered[1:]]), strict=True):
        read.append(_row(f"{path} line {number}", known, header, cells))
    stated = zip(read, _sensitivities(read), strict=True)
    rows = [
        ProfileRow(
            family=family.name,
            provenance=provenance,
            **one.model_dump(exclude={LIMIT}) | {SENSITIVITY: s, "clock_mhz": one.held_mhz},
        )
        for one, s in stated
    ]
    _assert_limits_hold(rows, str(path))
    _assert_unique([tuple(getattr(row, name) for name in KEY_COLUMNS) for row in rows], "operating point", str(path))
    _assert_batches_grow(rows, str(path))
    for variant in variants or known:
        if not any(row.variant == variant for row in rows):
            raise errors.CatalogError(f"{path}: no row", field="variant", value=variant, remedy="profile this variant")
    return tuple(rows)


def _row(where: str, known: list[str], header: list[str], cells: list[str]) -> _Row:
    if len(cells) != len(header):
        raise errors.CatalogError(
            f"{where}: {len(cells)} cells for {len(header)} columns", remedy="write one cell per column"
        )
    try:
        read = _Row.model_validate({name: cell.strip() for name, cell in zip(header, cells, strict=True)})
    except ValidationError as error:
        raise explain(error, where, _Row, errors.CatalogError) from error
    if read.variant not in known:
        raise errors.CatalogError(
            f"{where}: not in {FAMILY_FILE}",
            field="variant",
            value=read.variant,
            remedy=errors.one_of(known, read.variant),
        )
    if read.limit_watts and read.clock_mhz:
        raise errors.CatalogError(
            f"{where}: a point has a clock or a power limit",
            field="clock_mhz",
            value=read.clock_mhz,
            remedy=f"write 0 with {LIMIT} = {read.limit_watts}, or leave {LIMIT} empty",
        )
    for low, high in pairwise(("latency_ms_p50", "latency_ms_p95", "latency_ms_p99")):
        if getattr(read, low) > getattr(read, high):
            raise errors.CatalogError(
                f"{where}: above {high}", field=low, value=getattr(read, low), remedy="order the quantiles"
            )
    return read


def _assert_limits_hold(rows: Sequence[ProfileRow], where: str) -> None:
    """A limit is of the whole board. It is not always set: what the board does without must be known too."""

    def point(row: ProfileRow) -> tuple[str, ...]:
        return row.device_type, row.slice_type, row.variant, str(row.stage), str(row.batch), "+".join(row.cohosted)

    free = {point(row) for row in rows if row.clock_mhz >= 0}
    for row in (row for row in rows if row.clock_mhz < 0):
        kind = DEVICE_TYPES.get(row.device_type)
        if kind is not None and row.slice_type != kind.largest.name:
            raise errors.CatalogError(
                f"{where}: a power limit is of the whole board, and {row.slice_type} of {row.device_type} is a part",
                field=LIMIT,
                value=-row.clock_mhz,
                remedy=f"profile limits on {kind.largest.name}",
            )
        if point(row) not in free:
            raise errors.CatalogError(
                f"{where}: {row.variant} on {row.slice_type} of {row.device_type}, batch {row.batch}, is profiled under"
                " a power limit only",
                field=LIMIT,
                value=-row.clock_mhz,
                remedy=f"profile it without a limit too, and leave {LIMIT} empty there",
            )


def _sensitivities(rows: Sequence[_Row]) -> list[float]:
    """Clock sensitivity of each row: stated, or fitted to its operating point's rows at other clocks, or 1."""
    times: dict[tuple[object, ...], list[tuple[int, float]]] = {}
    for row in rows:
        if not row.limit_watts:
            times.setdefault(_point(row), []).append((row.clock_mhz, row.latency_ms_p50))

    def of(row: _Row) -> float:
        if row.clock_sensitivity is not None:
            return row.clock_sensitivity
        fitted = None if row.limit_watts else fitted_sensitivity(times[_point(row)], row.clock_mhz)
        return 1.0 if fitted is None else fitted

    return [of(row) for row in rows]


def _point(row: _Row) -> tuple[object, ...]:
    """Operating point of a row, whatever its clock."""
    return tuple(getattr(row, name) for name in KEY_COLUMNS if name != "clock_mhz")


def _provenance(path: Path, comments: Iterable[str]) -> Provenance:
    """The header lines `# key: value`; a profile that does not say where it comes from is refused."""
    pairs = (line.partition(":") for line in comments)
    header = {key.strip(): value.strip() for key, colon, value in pairs if colon and key.strip() in HEADER_KEYS}
    missing = [key for key in HEADER_KEYS if not header.get(key)]
    if missing:
        raise errors.CatalogError(
            f"{path}: header line missing", field=", ".join(missing), remedy="write '# basis: measured' and the others"
        )
    bases = {basis.name.lower(): basis for basis in (Basis.MEASURED, Basis.MODELLED, Basis.SYNTHETIC)}
    if header["basis"] not in bases:
        raise errors.CatalogError(
            f"{path}: not a basis", field="basis", value=header["basis"], remedy=errors.one_of(bases, header["basis"])
        )
    try:
        day = datetime.datetime.strptime(header["date"], "%Y-%m-%d").replace(tzinfo=datetime.UTC)
    except ValueError as error:
        raise errors.CatalogError(
            f"{path}: not a date", field="date", value=header["date"], remedy="write YYYY-MM-DD"
        ) from error
    source = f"{header['source']} on {header['machine']}"
    return Provenance(bases[header["basis"]], source, header["commit"], "", day.timestamp())


def _assert_unique(values: list[Any], field: str, where: str) -> None:
    for value, count in Counter(values).items():
        if count > 1:
            raise errors.CatalogError(f"{where}: occurs twice", field=field, value=value, remedy="keep one of them")


def _assert_batches_grow(rows: list[ProfileRow], where: str) -> None:
    """A larger batch of the same point never takes less time or energy: the sign of swapped columns or units."""
    by_point: dict[tuple[Any, ...], list[ProfileRow]] = {}
    for row in rows:
        by_point.setdefault(tuple(getattr(row, name) for name in KEY_COLUMNS if name != "batch"), []).append(row)
    for point in by_point.values():
        for small, large in pairwise(sorted(point, key=lambda row: row.batch)):
            for field in ("latency_ms_p50", "energy_active_j_per_batch"):
                if getattr(large, field) < getattr(small, field):
                    raise errors.CatalogError(
                        f"{where}: {large.slice_type} {large.variant} batch {large.batch} is below batch {small.batch}",
                        field=field,
                        value=getattr(large, field),
                        remedy="check units and columns of these two rows",
                    )


def _cells(path: Path, lines: list[str]) -> list[list[str]]:
    """Cells of each line; a quoted cell ends with its line."""
    try:
        return [next(csv.reader([line])) for line in lines]
    except csv.Error as error:
        raise errors.CatalogError(f"{path} is not a CSV: {error}", remedy="write one cell per column") from error


def _read(path: Path, below: Path | None, bytes_max: int) -> str:
    try:
        return read_text(path, below, bytes_max)
    except (OSError, UnicodeDecodeError) as error:
        remedy = "add it as a text file, or name the right folder"
        raise errors.system_error(errors.CatalogError, error, "be read", path, remedy=remedy) from error
