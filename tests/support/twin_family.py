"""A repository of two families that really infer: the digits, and a twin of them by another name."""

import shutil
from pathlib import Path

from tests.support.triton_process import MODELS
from trefoil.core.fleet import Hosted

TWIN = "twin"


def two_families(folder: Path, batched: bool = False) -> Path:
    """Write the repository; its twin has the digits' weights, profile and versions. `batched`: Triton forms batches."""
    folder.mkdir(exist_ok=True)
    shutil.copytree(MODELS / "_shared", folder / "_shared")
    for family in ("digits", TWIN):
        (folder / family).mkdir()
        for source in sorted((MODELS / "digits").iterdir()):
            if source.is_dir():
                (folder / family / source.name).symlink_to(source)
            elif source.suffix in (".toml", ".csv", ".pbtxt"):
                text = source.read_text(encoding="utf-8").replace("digits", family)
                text += "dynamic_batching { }\n" if batched and source.suffix == ".pbtxt" else ""
                (folder / family / source.name).write_text(text, encoding="utf-8")
    return folder


def twin(hosted: Hosted) -> Hosted:
    """The twin of what is hosted of the digits."""
    return Hosted(TWIN, hosted.variant.replace("digits", TWIN), hosted.version, hosted.stage, 1, 1, hosted.max_batch)
