"""The family.toml of an import: what the user stated of each variant, and what was assumed where nothing was said."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from trefoil.core.errors import CatalogError, SettingError

LOAD_S: Final = 5.0  # assumption: a swap of a model of some hundred megabytes
WORKSPACE: Final = 2.0  # assumption: a batch needs as much memory as the weights
WORKSPACE_MIB_MIN: Final = 128
MIB: Final = 2**20


@dataclass(slots=True)
class Stated:
    """What a person says of a family to be imported. Mappings are by model name."""

    family: str
    accuracies: Mapping[str, float]
    accuracy_source: str
    slo_ms: float
    slo_quantile: float = 0.95
    metric: str = "accuracy"
    task: str = ""
    licence: str = "not stated at import"
    memory_mib: Mapping[str, float] = field(default_factory=dict)
    load_s: Mapping[str, float] = field(default_factory=dict)
    macs: Mapping[str, float] = field(default_factory=dict)
    sizes_bytes: dict[str, int] = field(default_factory=dict)  # of the files, found at import


def numbers(given: Sequence[str] | None, flag: str) -> dict[str, float]:
    """`--flag model=number` of each model.

    Raises:
        SettingError: no such form, or no number.
    """
    found = {}
    for one in given or ():
        name, equals, value = one.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            equals = ""
        if not equals or not name:
            raise SettingError(
                "not of the form MODEL=NUMBER", field=flag, value=one, remedy=f"write {flag} resnet18=0.7"
            )
    return found


def accuracies(models: Sequence[str], given: Mapping[str, float], file: Path | None) -> dict[str, float]:
    """The accuracy of every model, from flags first, then from a TOML or JSON file of name = number.

    Raises:
        SettingError: one is missing, unknown, or no fraction; it is named.
    """
    found = dict(_from_file(file) if file else {}) | dict(given)
    for name in models:
        if name not in found:
            raise SettingError(
                f"no accuracy of {name}",
                field="--accuracy",
                value=sorted(found) or "none given",
                remedy=f"add --accuracy {name}=0.7, or a file with --accuracies",
            )
        if not 0 <= found[name] <= 1:
            remedy = f"write {found[name] / 100:g}" if 1 < found[name] <= 100 else "write a number from 0 to 1"
            raise SettingError(
                f"accuracy of {name} is no fraction", field="--accuracy", value=found[name], remedy=remedy
            )
    if unknown := sorted(set(given) - set(models)):
        raise SettingError(
            "no such model is imported", field="--accuracy", value=unknown[0], remedy=f"of {list(models)}"
        )
    return {name: found[name] for name in models}


def _from_file(path: Path) -> dict[str, float]:
    try:
        text_ = path.read_text(encoding="utf-8")
        tree = json.loads(text_) if path.suffix == ".json" else tomllib.loads(text_)
        return {str(name): float(value) for name, value in tree.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        remedy = "a TOML file with lines like resnet18 = 0.69758, or the same in JSON"
        raise SettingError(f"cannot be read: {error}", field="--accuracies", value=str(path), remedy=remedy) from error


def text(stated: Stated, models: Sequence[str], repository: Path) -> str:
    """The file.

    Raises:
        CatalogError: two models have one name.
    """
    if len(set(models)) < len(models):
        raise CatalogError("a model stands twice", field="--as", value=list(models), remedy="name each once")
    lines = [
        f"# Written by `trefoil family import` from {_quoted(repository.name)}. Assumed where nothing was stated:",
        f"# memory_mib twice the model's files, with at least {WORKSPACE_MIB_MIN} for a batch; load_s {LOAD_S:g}.",
        "# macs = 0 means unknown.",
        f"name = {_quoted(stated.family)}",
        f"metric = {_quoted(stated.metric)}",
        f"task = {_quoted(stated.task)}",
        "generative = false",
        "sequence_batching = false",
        "",
        '[classes.""]',
        f"slo_ms = {stated.slo_ms:g}",
        f"slo_quantile = {stated.slo_quantile:g}",
    ]
    for version, name in enumerate(models, 1):
        weights_mib = stated.sizes_bytes.get(name, 0) / MIB
        memory_mib = stated.memory_mib.get(name, weights_mib + max(weights_mib * (WORKSPACE - 1), WORKSPACE_MIB_MIN))
        lines += [
            "",
            "[[variants]]",
            f"name = {_quoted(name)}",
            f"version = {version}",
            f"accuracy = {float(stated.accuracies[name])!r}",
            f"accuracy_source = {_quoted(stated.accuracy_source)}",
            f"memory_mib = {max(1, round(memory_mib))}",
            f"load_s = {stated.load_s.get(name, LOAD_S):g}",
            f"macs = {round(stated.macs.get(name, 0))}",
            f"licence = {_quoted(stated.licence)}",
        ]
    return "\n".join(lines) + "\n"


def _quoted(value: str) -> str:
    """A TOML basic string: JSON's escapes are a part of TOML's."""
    return json.dumps(value, ensure_ascii=False)
