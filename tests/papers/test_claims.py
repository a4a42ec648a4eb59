"""Claims of the papers: what claims.toml states is what the kept results say."""

import json
from pathlib import Path

import pytest

from benchmarks.results import KEPT
from trefoil.core.errors import SettingError
from trefoil.reproduce import claims
from trefoil.reproduce.claims import Claim, Claims

PAPERS = {"clover", "carbondis", "muserve", "infadapter", "wattwiser"}
SAVED = {
    "name": "saved", "where": "Fig. 9", "says": "grams saved", "published": {"low": 70, "high": 80, "unit": "%"},
    "neutral": 0, "within": 5, "condition": "48 h", "command": "trefoil reproduce clover", "path": ("saved",),
    "verdict": "holds",
}  # fmt: skip
CAUSE = {"says": "because", "command": "trefoil reproduce clover --quick", "path": ("off",)}


def test_every_file_of_claims_is_of_a_paper():
    assert set(claims.files()) <= PAPERS


@pytest.mark.parametrize("paper", sorted(claims.files()))
def test_verdicts_that_are_stated_are_those_of_the_kept_results(paper):
    read = claims.read(claims.files()[paper])
    found = claims.kept(read, KEPT)
    stated = {claim.name: claim.verdict for claim in read.claims}
    assert stated == {claim.name: claims.verdict_of(claim, found) for claim in read.claims}
    assert "hold" in claims.table(read, found)  # every path leads to figures, those of causes too


@pytest.mark.parametrize(
    ("value", "verdict"),
    [
        (75, "holds"), (65, "holds"), (85, "holds"), (64.9, "direction holds"), (85.1, "direction holds"),
        (0, "differs"), (-5, "differs"), ([10, 75, 90], "holds"), ({"all": [1, 2, 3], "mean": 75}, "direction holds"),
    ],
)  # fmt: skip
def test_a_number_is_judged_by_its_median(value, verdict):
    assert claims.verdict_of(Claim.model_validate(SAVED), {"saved": value}) == verdict


def test_paths_into_several_results_begin_with_the_name_of_one(tmp_path):
    for name, value in (("a", 75), ("b", 5)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"saved": value}))
    two = [Claim.model_validate(SAVED | {"name": one, "path": (one, "saved")}) for one in ("a", "b")]
    found = claims.kept(Claims(paper="A", results=("a.json", "b.json"), claims=tuple(two)), tmp_path)
    assert [claims.verdict_of(one, found) for one in two] == ["holds", "direction holds"]


def test_what_has_no_number_is_judged_by_true_or_false():
    said = Claim.model_validate(SAVED | {"published": "CLOVER is ahead", "neutral": None})
    assert claims.verdict_of(said, {"saved": True}) == "holds"
    assert claims.verdict_of(said, {"saved": False}) == "differs"
    with pytest.raises(TypeError, match="true or false"):
        claims.verdict_of(said, {"saved": 3})


def test_what_was_not_played_is_judged_as_soon_as_results_hold_it():
    waiting = Claim.model_validate(SAVED | {"verdict": "not played", "cause": {"says": "hours"}})
    assert claims.verdict_of(waiting, {}) == "not played"
    assert claims.verdict_of(waiting, {"saved": 75}) == "holds"
    with pytest.raises(KeyError):
        claims.verdict_of(Claim.model_validate(SAVED), {})
    assert "| not played | hours |" in claims.table(Claims(paper="A", results="a.json", claims=(waiting,)), {})


@pytest.mark.parametrize("value", ["75", [], None, [1, "2"]])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(TypeError, match="expected numbers"):
        claims.verdict_of(Claim.model_validate(SAVED), {"saved": value})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"verdict": "differs"}, "without its cause"),
        ({"verdict": "differs", "cause": {"says": "because"}}, "without its cause"),
        ({"verdict": "not played", "path": ()}, "says why"),
        ({"path": ()}, "no path"),
        ({"published": {"low": 80, "high": 70, "unit": "%"}}, "exchange them"),
        ({"neutral": 75}, "must lie outside"),
        ({"within": float("nan")}, "finite"),
        ({"verdikt": "holds"}, "verdikt"),
        ({"verdict": "maybe"}, "maybe"),
    ],
)
def test_a_claim_that_cannot_be_judged_is_refused(tmp_path: Path, changes, why):
    path = tmp_path / "claims.toml"
    path.write_text(as_toml(SAVED | changes))
    with pytest.raises(SettingError, match=why):
        claims.read(path)


def test_two_claims_of_one_name_are_refused(tmp_path: Path):
    path = tmp_path / "claims.toml"
    path.write_text(as_toml(SAVED) + as_toml(SAVED).partition("\n\n")[2])
    with pytest.raises(SettingError, match="claims of one name: saved"):
        claims.read(path)


def test_the_table_shows_ours_with_its_spread_and_the_cause_turned_off():
    read = Claims.model_validate(
        {"paper": "A", "results": "a.json", "claims": [SAVED | {"verdict": "differs", "cause": CAUSE}]}
    )
    text = claims.table(read, {"saved": [-2.0, -1.0, 0.0], "off": 74.0})
    assert "| Fig. 9 | grams saved: 48 h | 70 to 80 % | -1 [-2, 0] % | differs | because: 74 %" in text
    assert text.endswith("0 of 1 hold, or hold in direction.")


def as_toml(claim: dict) -> str:
    def value(of) -> str:
        if isinstance(of, dict):
            return "{ " + ", ".join(f"{key} = {value(one)}" for key, one in of.items()) + " }"
        return str(of) if isinstance(of, float) else json.dumps(of)

    lines = [f"{key} = {value(of)}" for key, of in claim.items()]
    return "\n".join(['paper = "A"', 'results = "a.json"', "", "", "[[claims]]", *lines, ""])
