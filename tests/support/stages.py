"""A family that ships, whole and as two stages: a repository of both, and a Triton for each."""

from pathlib import Path

from typer.testing import CliRunner

from tests.support.triton_process import MODELS, TritonProcess
from trefoil.cli.main import app
from trefoil.core.fleet import Hosted
from trefoil.runtime.repository import link_shared

FAMILY, VARIANT, VERSION, STAGES = "digits", "digits-l", 4, 2
FEATURES = "pooled"


def split_repository(folder: Path) -> Path:
    """A repository with the family and the models of its stages, as `trefoil sensitivity --stages` writes them."""
    repository = folder / "models"
    repository.mkdir()
    link_shared(MODELS, repository)
    (repository / FAMILY).symlink_to(MODELS / FAMILY)
    graph = repository / FAMILY / str(VERSION) / "model.onnx"
    asked = ["sensitivity", str(graph), "--batch", "8", "--stages", str(STAGES), "--operators"]
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


def with_stage_rows(repository: Path) -> Path:
    """The repository with a profile that knows the stages, each with half of the whole's time and joules."""
    family = repository / FAMILY
    family.unlink()
    family.mkdir()
    for file in (MODELS / FAMILY).iterdir():
        if file.name != "profile.csv":
            (family / file.name).symlink_to(file)
    lines = (MODELS / FAMILY / "profile.csv").read_text().splitlines()
    header = next(line for line in lines if line.startswith("device_type")).split(",")
    for line in [line for line in lines if f",{VARIANT},0," in line]:
        cells = dict(zip(header, line.split(","), strict=True))
        for name in header:
            if name.startswith(("latency", "energy")):
                cells[name] = str(float(cells[name]) / STAGES)
        lines += [",".join({**cells, "stage": str(n + 1)}.values()) for n in range(STAGES)]
    (family / "profile.csv").write_text("\n".join(lines) + "\n")
    return repository
