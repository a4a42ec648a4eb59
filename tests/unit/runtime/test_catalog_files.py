"""A model repository that changes while services run: read again, judged, and in force only if it is in order."""

import shutil
from pathlib import Path

import pytest
import structlog

from tests.support.triton_process import MODELS
from trefoil.core.errors import CatalogError
from trefoil.runtime.given.catalog_files import PERIOD_S, CatalogFiles


def add(root: Path, name: str) -> Path:
    """A family like digits, without its model files."""
    (root / name).mkdir(parents=True)
    for file in ("family.toml", "profile.csv"):
        text = (MODELS / "digits" / file).read_text()
        (root / name / file).write_text(text.replace('name = "digits"', f'name = "{name}"'))
    return root / name


@pytest.fixture
def files(tmp_path: Path) -> CatalogFiles:
    add(tmp_path, "digits")
    found = CatalogFiles(tmp_path)
    found.in_use = lambda: ("digits",)
    return found


def names(files: CatalogFiles) -> list[str]:
    return [family.name for family in files.catalog.families]


def rows(files: CatalogFiles, family: str) -> int:
    return sum(row.family == family for row in files.catalog.rows)


async def test_a_contract_by_which_a_family_forms_batches_is_seen(files: CatalogFiles, tmp_path: Path):
    assert not files.catalog.families[0].batching
    (tmp_path / "digits" / "config.pbtxt").write_text("dynamic_batching { }\n")
    await files.refresh()
    assert files.catalog.families[0].batching


async def test_a_family_that_comes_is_seen_and_one_that_goes_is_gone(files: CatalogFiles, tmp_path: Path):
    adopted: list[list[str]] = []
    files.adopt = lambda: adopted.append(names(files))
    before = files.catalog
    await files.refresh()
    assert files.catalog is before
    folder = add(tmp_path, "new")
    for _ in range(3):
        await files.refresh()
    profile = (folder / "profile.csv").read_text()
    (folder / "profile.csv").unlink()
    await files.refresh()
    assert (names(files), rows(files, "new")) == (["digits", "new"], 0)
    (folder / "profile.csv").write_text(profile)
    await files.refresh()
    assert rows(files, "new") == rows(files, "digits") > 0
    shutil.rmtree(folder)
    await files.refresh()
    assert adopted == [["digits", "new"]] * 3 + [["digits"]]
    assert files.why == ""


async def test_a_bad_family_leaves_the_old_catalogue_in_force_and_is_named_once(files: CatalogFiles, tmp_path: Path):
    folder, before = add(tmp_path, "new"), files.catalog
    good = (folder / "family.toml").read_text()
    (folder / "family.toml").write_text(good.replace("name = ", "nam = ", 1))
    with structlog.testing.capture_logs() as log:
        for _ in range(3):
            await files.refresh()
        assert files.catalog is before
        assert str(folder / "family.toml") in files.why
        assert len(log) == 1
        (folder / "family.toml").write_text(good)
        await files.refresh()
    assert (files.why, names(files)) == ("", ["digits", "new"])


@pytest.mark.parametrize("harm", ["folder", "family.toml", "variant", "version", "all"])
async def test_a_family_in_use_loses_no_variant(files: CatalogFiles, tmp_path: Path, harm: str):
    before, path = files.catalog, tmp_path / "digits" / "family.toml"
    add(tmp_path, "other")
    match harm:
        case "folder":
            shutil.rmtree(path.parent)
        case "family.toml":
            path.unlink()
        case "variant":
            path.write_text(path.read_text().replace('"digits-l"', '"digits-x"'))
            profile = path.with_name("profile.csv")
            profile.write_text(profile.read_text().replace("digits-l", "digits-x"))
        case "version":
            path.write_text(path.read_text().replace("version = 4", "version = 9"))
        case _:
            shutil.rmtree(tmp_path)
    await files.refresh()
    assert files.catalog is before
    assert ("family digits is in use" in files.why) == (harm != "all")
    files.in_use = tuple
    await files.refresh()
    assert (files.catalog is before) == (harm == "all"), "stopped, it may go"


async def test_what_an_import_has_not_finished_is_no_family(files: CatalogFiles, tmp_path: Path):
    add(tmp_path, "half").rename(tmp_path / ".import-7-half")
    await files.refresh()
    assert (files.why, names(files)) == ("", ["digits"])
    with pytest.raises(CatalogError):
        CatalogFiles(tmp_path / "nowhere")


async def test_what_is_asked_for_is_looked_for_at_once(files: CatalogFiles, tmp_path: Path):
    add(tmp_path, "new")
    await files.refresh_for(["digits", ("digits", "digits-l")])
    assert names(files) == ["digits"]
    await files.refresh_for([("new", "digits-l")])
    assert names(files) == ["digits", "new"]
    assert PERIOD_S <= 2.0
