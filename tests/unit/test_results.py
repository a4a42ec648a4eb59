"""The first page of benchmarks/RESULTS.md: rows that say what they rest on, and which of them are stale."""

import json
import re
import shutil

import pytest

from benchmarks import results


def rows() -> list[list[str]]:
    lines = [line for line in results.summary().splitlines()[2:] if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def studies() -> dict[str, str]:
    """Command, n, run time and commit, by study."""
    lines = [line for line in results.summary().splitlines() if line.startswith("- ")]
    return dict(line.removeprefix("- ").split(": ", 1) for line in lines)


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Kept results of sources "now", which are in force."""
    monkeypatch.setattr(results, "KEPT", shutil.copytree(results.KEPT, tmp_path / "results"))
    monkeypatch.setattr(results, "source_hash", lambda *_: "now")
    for path in results.KEPT.glob("*.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"sources": "now", "took_s": 180.0}))
    return results.KEPT


def test_each_row_says_n_command_run_time_and_commit(kept):
    assert 0 < len(rows()) <= 25
    for what, _, figure, _, _ in rows():
        assert all((what, figure)), what
        assert re.fullmatch(r"`[^`]+`, \d+ \w+, 3 min, [0-9a-f]{8}", studies()[what.split(":")[0]]), what


@pytest.mark.parametrize("study", ["planner", "wattwiser"])
@pytest.mark.parametrize("sources", ["then", None])
def test_a_study_whose_sources_changed_or_are_not_known_is_stale(kept, study, sources):
    path = kept / f"{study}.json"
    found = json.loads(path.read_text()) | {"sources": sources}
    path.write_text(json.dumps({name: value for name, value in found.items() if value is not None}))
    assert [study for study, made in studies().items() if ", stale" in made] == [study]


def test_every_study_names_the_sources_that_it_depends_on():
    assert set(results.SOURCES) == set(results.STUDIES)
    for policy, module in results.SOURCES.values():
        assert results.source_hash(policy, module) != results.source_hash("", "trefoil.no_such_module")


def test_what_is_taken_keeps_its_sources_only_where_it_was_made_by_this_commit(kept, tmp_path, monkeypatch):
    made = json.loads((kept / "planner.json").read_text())
    del made["sources"]
    source = tmp_path / "planner.json"
    source.write_text(json.dumps(made))
    monkeypatch.setitem(results.STUDIES, "planner", (source, results.planner_tables))
    for commit, sources in ((made["commit"], "now"), (f"{made['commit']}-dirty", None), ("0" * 12, None)):
        monkeypatch.setattr(results, "git_commit", lambda commit=commit: commit)
        results.take("planner")
        assert results.kept_of("planner").get("sources") == sources
