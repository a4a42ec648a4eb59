"""Claims of a paper: each figure, table and number in `trefoil/reproduce/<paper>/claims.toml`, judged by kept results.

A claim says where it stands, the paper's own number, the condition, our command and the place in what it left
(`benchmarks/results`). The verdict is `holds` where ours is within `within` of the paper's range. Where ours is on the
paper's side of `neutral`, at which the claim would be false, it is `direction holds`. `differs` names its cause and the
figure with the cause turned off. The fourth verdict is `not played`. `verdict_of` judges again what the file states. A
claim that is not played may have a path already, and has a verdict as soon as results hold it.
"""

import json
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from trefoil.core.errors import SettingError
from trefoil.reproduce.tables import markdown
from trefoil.runtime.config import explain

Verdict = Literal["holds", "direction holds", "differs", "not played"]
HERE: Final = Path(__file__).parent


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Published(_Entry):
    """The paper's own number, or the range that it states or draws."""

    low: float
    high: float
    unit: str

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low {self.low:g} lies above high {self.high:g}; exchange them")
        return self

    def __str__(self) -> str:
        numbers = f"{self.low:g}" if self.low == self.high else f"{self.low:g} to {self.high:g}"
        return f"{numbers} {self.unit}".strip()


class Cause(_Entry):
    """Why ours differs: what was turned off, by which command, and where the figure stands then."""

    says: str
    command: str = ""
    path: tuple[str, ...] = ()


class Claim(_Entry):
    """One claim. `path` leads to a number, a list of numbers (one a seed: its median is judged), statistics over seeds
    (an object with `all`) or, where the paper gives no number (`published` is text), to true or false."""

    name: str
    where: str
    says: str
    published: Published | str
    condition: str
    command: str
    path: tuple[str, ...] = ()
    neutral: float | None = None
    within: float = 0.0
    verdict: Verdict
    cause: Cause | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.verdict == "not played":
            if self.cause is None:
                raise ValueError("not played, and no cause.says why; say it")
        elif not self.path:
            raise ValueError("has no path into the results; give one, or the verdict `not played`")
        if self.verdict == "differs" and (self.cause is None or not self.cause.command or not self.cause.path):
            raise ValueError("differs without its cause; give cause.says, cause.command and cause.path")
        told = self.published
        if isinstance(told, Published) and self.neutral is not None and told.low < self.neutral < told.high:
            raise ValueError(f"neutral {self.neutral:g} lies inside of what was published; it must lie outside")
        return self


class Claims(_Entry):
    """Claims of one paper; `results` is the file below benchmarks/results that they are judged by, or several files:
    then paths begin with the name of one, without its suffix. `headline`: name of the claim on the first page."""

    paper: str
    results: str | tuple[str, ...]
    claims: tuple[Claim, ...]
    headline: str = ""

    @model_validator(mode="after")
    def _named_once(self) -> Self:
        names = [claim.name for claim in self.claims]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"claims of one name: {', '.join(twice)}; give each its own")
        if self.headline not in ("", *names):
            raise ValueError(f"headline {self.headline!r} is not the name of a claim; give one of {', '.join(names)}")
        return self


def kept(claims: Claims, folder: Path) -> dict[str, Any]:
    """Results in a folder that claims are judged by."""
    if isinstance(claims.results, str):
        found: dict[str, Any] = json.loads((folder / claims.results).read_text(encoding="utf-8"))
        return found
    return {Path(name).stem: json.loads((folder / name).read_text(encoding="utf-8")) for name in claims.results}


def files() -> dict[str, Path]:
    """File of claims of each paper, by the paper's folder."""
    return {path.parent.name: path for path in sorted(HERE.glob("*/claims.toml"))}


def read(path: Path) -> Claims:
    """Claims of a file. Raises SettingError (file, field, value, remedy)."""
    try:
        return Claims.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except tomllib.TOMLDecodeError as error:
        raise SettingError("is not valid TOML", field=path.name, value=str(error), remedy="correct that line") from None
    except ValidationError as error:
        raise explain(error, str(path), Claims) from error


def ours(found: Mapping[str, Any], path: Sequence[str]) -> list[float] | bool:
    """What stands at a place of kept results: one number a seed, or true or false.

    Raises KeyError where nothing stands, TypeError where something else does."""
    at: Any = found
    for step in path:
        at = at[step] if isinstance(at, Mapping) else at[int(step)]
    if isinstance(at, bool):
        return at
    values = at["all"] if isinstance(at, Mapping) else at
    values = list(values) if isinstance(values, Sequence) and not isinstance(values, str) else [values]
    if not values or not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        raise TypeError(f"{'.'.join(path)} leads to {at!r:.80}; expected numbers, or true or false")
    return [float(value) for value in values]


def verdict_of(claim: Claim, found: Mapping[str, Any]) -> Verdict:
    """Verdict on a claim by kept results, whatever the file states. Raises as `ours`."""
    if not claim.path:
        return "not played"
    try:
        value = ours(found, claim.path)
    except KeyError:
        if claim.verdict != "not played":
            raise
        return "not played"
    if isinstance(value, bool) or isinstance(claim.published, str):
        if not isinstance(value, bool) or not isinstance(claim.published, str):
            raise TypeError(f"{claim.name}: a published number needs numbers, a published text needs true or false")
        return "holds" if value else "differs"
    median, published = statistics.median(value), claim.published
    if published.low - claim.within <= median <= published.high + claim.within:
        return "holds"
    if claim.neutral is not None and (median - claim.neutral) * (published.low - claim.neutral) > 0:
        return "direction holds"
    return "differs"


def table(claims: Claims, found: Mapping[str, Any]) -> str:
    """Claims of a paper as a table in Markdown, with the share that holds."""
    rows = []
    for claim in claims.claims:
        mine = "" if claim.verdict == "not played" else shown(claim, ours(found, claim.path))
        cause = ""
        if claim.cause is not None:
            off = shown(claim, ours(found, claim.cause.path)) if claim.cause.path else ""
            cause = claim.cause.says + (f": {off} (`{claim.cause.command}`)" if off else "")
        said = f"{claim.says}: {claim.condition}"
        rows.append([claim.where, said, claim.published, mine, claim.verdict, cause, f"`{claim.command}`"])
    kept = sum(claim.verdict in ("holds", "direction holds") for claim in claims.claims)
    text = markdown(
        ["where", "claim", "published", "ours", "verdict", "why, and with the cause turned off", "by"], rows
    )
    return f"{text}\n\n{kept} of {len(rows)} hold, or hold in direction."


def shown(claim: Claim, value: list[float] | bool) -> str:
    """Text of a claim's figure: the median of all seeds with the lowest and the highest, or yes or no."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    unit = claim.published.unit if isinstance(claim.published, Published) else ""
    spread = f" [{min(value):.4g}, {max(value):.4g}]" if len(value) > 1 else ""
    return f"{statistics.median(value):.4g}{spread} {unit}".strip()
