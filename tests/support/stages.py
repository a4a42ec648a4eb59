"""A family that ships, whole and as two stages: a repository of both, and a Triton for each."""

from pathlib import Path

from typer.testing import CliRunner

from tests.support.triton_process import MODELS, TritonProcess
from trefoil.cli.demo.own_repository import copy_family
from trefoil.cli.family.split_family import split_family
from trefoil.cli.main import app
from trefoil.core.fleet import Hosted
from trefoil.runtime.repository import link_shared

FAMILY, VARIANT, VERSION, STAGES = "digits", "digits-l", 4, 2
FEATURES = "pooled"
DEVICE, ITEMS = "A100-SXM4-40GB", 4096  # of fewer items no operator feels the clock


def split_repository(folder: Path) -> Path:
    """A repository with the family and its stages' models, as `trefoil family sensitivity --stages` writes them."""
    repository = folder / "models"
    repository.mkdir()
    link_shared(MODELS, repository)
    (repository / FAMILY).symlink_to(MODELS / FAMILY)
    graph = repository / FAMILY / str(VERSION) / "model.onnx"
    asked = ["family", "sensitivity", str(graph), "--batch", "8", "--stages", str(STAGES), "--operators"]
    result = CliRunner().invoke(app, [*asked, "--repository", str(repository), "--out", str(folder / "out")])
    assert result.exit_code == 0, result.output
    return repository


def staged(stage: int) -> Hosted:
    """A stage as a plan hosts it."""
    return Hosted(FAMILY, VARIANT, VERSION, stage, STAGES, 1, 8)


def whole() -> Hosted:
    """The family as a plan hosts it."""
    return Hosted(FAMILY, VARIANT, VERSION, 0, 1, 1, 8)


def triton(folder: Path, repository: Path, name: str, hosted: Hosted) -> TritonProcess:
    """A Triton that serves it."""
    (folder / name).mkdir()
    return TritonProcess(folder / name, VERSION, source=repository, serving=hosted)


def planned_repository(folder: Path) -> Path:
    """A repository whose family is split beside the whole, with profile rows of its stages, as a demo makes it."""
    repository = folder / "models"
    repository.mkdir()
    link_shared(MODELS, repository)
    copy_family(MODELS / FAMILY, repository / FAMILY, batching=False)
    split_family(repository / FAMILY, STAGES, DEVICE, ITEMS)
    return repository
