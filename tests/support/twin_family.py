"""A repository of two families that really infer: the digits, and a twin of them by another name."""

from pathlib import Path

from tests.support.triton_process import MODELS
from trefoil.cli.demo.own_repository import copy_family
from trefoil.core.fleet import Hosted

TWIN = "twin"


def two_families(folder: Path, batched: bool = False) -> Path:
    """Write the repository; its twin has the digits' weights, profile and versions. `batched`: Triton forms batches."""
    folder.mkdir(exist_ok=True)
    folder.chmod(0o755)  # Tritons have separate users, who read it
    (folder / "_shared").symlink_to(MODELS / "_shared")
    for family in ("digits", TWIN):
        copy_family(MODELS / "digits", folder / family, batching=batched)
    return folder


def twin(hosted: Hosted) -> Hosted:
    """The twin of what is hosted of the digits."""
    return Hosted(TWIN, hosted.variant.replace("digits", TWIN), hosted.version, hosted.stage, 1, 1, hosted.max_batch)
