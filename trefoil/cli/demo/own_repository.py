"""A demo's own model repository: families under separate names, and Triton that forms batches."""

import os
import re
import shutil
from pathlib import Path
from typing import Final

from trefoil.cli.family.split_family import split_family
from trefoil.cli.run.scenario import DemoScenario
from trefoil.runtime.repository import family_folder, link_shared

BATCHING: Final = "dynamic_batching { }\n"


def with_own_repository(scenario: DemoScenario, folder: Path) -> DemoScenario:
    """The scenario over a repository written to `folder`; as it is where its families are served as they stand."""
    copied = {scenario.family.name: scenario.family.name}
    copied |= {each.name: each.copy_of or each.name for each in scenario.more_families}
    same = all(name == original for name, original in copied.items())
    if same and not scenario.dynamic_batching and not scenario.stages:
        return scenario
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    repository = scenario.family.repository
    link_shared(repository, folder)
    for name, original in copied.items():
        copy_family(family_folder(repository, original), folder / name, batching=scenario.dynamic_batching)
    for name, stages in scenario.stages.items():
        split_family(folder / name, stages, scenario.fleet.devices[0], scenario.stages_items)
    family = scenario.family.model_copy(update={"repository": folder.resolve()})
    return scenario.model_copy(update={"family": family})


def copy_family(source: Path, target: Path, *, batching: bool) -> None:
    """Copy a family: texts name it by its new folder, weights and images are hard links where the disk allows."""
    target.mkdir()
    for file in sorted(source.iterdir()):
        if file.is_dir():
            shutil.copytree(file, target / file.name, copy_function=_link)
            continue
        if file.suffix not in (".toml", ".csv", ".pbtxt"):
            _link(file, target / file.name)
            continue
        text = re.sub(rf"\b{re.escape(source.name)}\b", target.name, file.read_text(encoding="utf-8"))
        text += BATCHING if batching and file.suffix == ".pbtxt" else ""
        (target / file.name).write_text(text, encoding="utf-8")


def _link(source: Path | str, target: Path | str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or another user's file
        shutil.copyfile(source, target)
