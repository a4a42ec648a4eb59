"""What ships with Trefoil and where one's own lies: settings files, families, scenarios, the Triton environment.

In a checkout its top-level folders are what ships; a wheel carries them in `trefoil/shipped`, where nothing is ever
written (requirements/hatch_shipped.py). A relative path means the working directory first, then what ships.
"""

import os
from pathlib import Path
from typing import Final

from trefoil.core.errors import NotFound, SettingError, one_of

CHECKOUT: Final = Path(__file__).resolve().parents[1]
_IN_WHEEL: Final = Path(__file__).resolve().parent / "shipped"
SHIPPED: Final = _IN_WHEEL if _IN_WHEEL.is_dir() else CHECKOUT
MODELS: Final = Path("model_repository")
"""The repository where none is named: one's own (own_repository), and then what ships."""
SCENARIOS: Final = Path("benchmarks/scenarios")
REPOSITORY_VARIABLE: Final = "TREFOIL_REPOSITORY"
TRITON_VARIABLE: Final = "TREFOIL_TRITON_ENVIRONMENT"


def resolve_path(path: Path) -> Path:
    """Resolve a relative path as the user means it: under the working directory, else as shipped."""
    if not path.exists() and (SHIPPED / path).exists():
        return (SHIPPED / path).resolve()
    return path.resolve()


def own_repository(repository: Path = MODELS) -> Path:
    """Repository that families are imported into: the one named, else TREFOIL_REPOSITORY, else ./model_repository."""
    if repository == MODELS:
        repository = Path(os.environ.get(REPOSITORY_VARIABLE) or MODELS)
    return repository.resolve()


def repositories(repository: Path = MODELS) -> tuple[Path, ...]:
    """Repositories in which families are looked for: the one named, alone; where none is, one's own, then what ships.

    Raises:
        SettingError: TREFOIL_REPOSITORY names no folder.
    """
    if repository != MODELS:
        return (resolve_path(repository),)
    own, shipped = own_repository(), SHIPPED / MODELS
    if os.environ.get(REPOSITORY_VARIABLE) and not own.is_dir():
        remedy = "make it with `trefoil family import`, name another folder, or unset it"
        raise SettingError("no such folder", field=REPOSITORY_VARIABLE, value=str(own), remedy=remedy)
    return (own, shipped) if own.is_dir() and own != shipped else (shipped,)


def find_scenario(given: Path) -> Path:
    """File of a scenario: a path, or the bare name of one that ships.

    Raises:
        NotFound: neither; the message names those that ship.
    """
    for path in (given, SHIPPED / given, SHIPPED / SCENARIOS / f"{given}.toml"):
        if path.is_file():
            return path
    names = sorted(path.stem for path in (SHIPPED / SCENARIOS).glob("*.toml"))
    remedy = one_of(names, str(given), also="a TOML file")
    raise NotFound("no such scenario", field="SCENARIO", value=str(given), remedy=remedy)


def triton_environment(named: Path | None = None) -> Path:
    """Python environment of the Tritons: the one named, else TREFOIL_TRITON_ENVIRONMENT, else the checkout's, else a
    folder of the user's data. `trefoil setup triton` makes it.
    """
    if named is not None:
        return resolve_path(named)
    if given := os.environ.get(TRITON_VARIABLE):
        return Path(given).expanduser().resolve()
    if SHIPPED == CHECKOUT:
        return CHECKOUT / ".venv-triton"
    data = Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser()
    return data / "trefoil" / "triton"
