"""What may be said of a saving, and how values of a comparison are written."""

from dataclasses import replace

import pytest

from trefoil.comparison.comparison import Case, Comparison, Row, Run, subject_of
from trefoil.comparison.report import case_cells, columns
from trefoil.comparison.report import headline as headline_text
from trefoil.comparison.runs import Weighed, split_values
from trefoil.core.errors import SettingError
from trefoil.core.objective import FamilyOutcome, no_saving

PRICE_G = 0.01
ARRIVED = 1000


def row(policy: str, *runs: tuple[float, float, float], floor: float = 0.97, answered: int = ARRIVED) -> Row:
    """Runs of (grams, accuracy, attainment), a seed each, of one family whose SLO is the 95th percentile."""
    return Row(policy, tuple(_run(policy, seed, *numbers, floor, answered) for seed, numbers in enumerate(runs)))


def _run(policy: str, seed: int, grams: float, accuracy: float, attainment: float, floor: float, answered: int) -> Run:
    late, poor = attainment < 0.95, accuracy < floor - 5e-4
    numbers = {
        "grams_per_request": grams, "joules_per_request": 1.0, "p95_ms": 50.0, "slo_attainment": attainment,
        "accuracy": accuracy, "slo_missed": late, "floor_missed": poor, "arrived": ARRIVED,
        "answered": answered,
    }  # fmt: skip
    family = {**numbers, "slo_ms": 75.0, "slo_quantile": 0.95, "floor": floor}
    return Run(policy, seed, f"load{seed}", {**numbers, "families": {"digits": family}})


def case(*rows: Row, price_g: float | None = PRICE_G) -> Case:
    return Case({}, rows, price_g)


FIRST = row("base", (1.0e-3, 0.99, 1.0))
LATE = "digits misses its SLO (57.90% in time, 95.00% asked)"
POOR = "digits is below its accuracy floor (0.9600, 0.9700 asked)"


def test_a_saving_is_at_equal_accuracy_with_what_it_was_beside():
    one = case(FIRST, row("exact", (0.5e-3, 0.98, 0.97)))
    found = one.saving(one.rows[1])
    assert found is not None
    assert found.pct is not None
    assert found.plain_pct is not None
    assert found.plain_pct["mean"] == pytest.approx(50.0)
    assert found.pct["mean"] == pytest.approx(100 * (1 - 0.5 / 0.9))
    assert (found.accuracy_difference, found.attainment_difference) == pytest.approx((-0.01, -0.03))
    assert one.saving(one.rows[0]) is None


@pytest.mark.parametrize(
    ("numbers", "price_g", "why"),
    [
        ((0.5e-3, 0.99, 0.579), PRICE_G, LATE),
        ((0.5e-3, 0.96, 1.0), PRICE_G, POOR),
        ((0.5e-3, 0.96, 0.579), PRICE_G, f"{LATE} and {POOR}"),
        ((0.5e-3, 0.98, 1.0), None, "accuracy of digits differs by -0.0100 and has no price here"),
    ],
)
def test_who_is_late_or_poor_or_not_comparable_has_saved_nothing(numbers, price_g, why):
    one = case(FIRST, row("exact", numbers), price_g=price_g)
    found = one.saving(one.rows[1])
    assert found is not None
    assert (found.pct, found.why) == (None, why)
    assert case_cells(one)[1][-1] == f"none: {why}"


def test_equal_accuracy_needs_no_price():
    one = case(FIRST, row("exact", (0.5e-3, 0.9901, 1.0)), price_g=None)
    found = one.saving(one.rows[1])
    assert found is not None
    assert found.pct == found.plain_pct


def test_what_is_missed_stands_before_the_saving_also_of_the_first_policy():
    late = row("base", (1.0e-3, 0.99, 0.9), (1.0e-3, 0.99, 0.99))
    one = case(late, row("exact", (0.5e-3, 0.99, 0.97), (0.6e-3, 0.99, 0.94)))
    first, second = case_cells(one)
    assert first[-2:] == ("SLO (1 of 2 seeds)", "")
    assert second[-2] == "SLO not in the mean (1 of 2 seeds)"
    assert second[-1].startswith("base misses its SLO; +45.0 ± 7.1 %")


@pytest.mark.parametrize(
    ("answered", "why"),
    [
        (994, ""),  # chance: of 6 unanswered requests 2.4 more or less
        (950, "unequal work: 950 requests of digits answered against 1,000"),
    ],
)
def test_who_answers_fewer_requests_has_saved_nothing(answered, why):
    one = case(FIRST, row("exact", (0.5e-3, 0.99, 0.95), answered=answered))
    found = one.saving(one.rows[1])
    assert found is not None
    assert (found.why, found.pct is None) == (why, bool(why))
    (record,) = Comparison("x", 60.0, ("base", "exact"), (0,), (one,)).records()[1:]
    assert (record["saving_pct"] is None) == bool(why)


@pytest.mark.parametrize(
    ("theirs", "ours", "price_g", "why"),
    [
        ((0.0, 0.99, 1.0), (0.5e-3, 0.99, 1.0), PRICE_G, "0 mg/request is nothing to save a share of"),
        ((-1e-3, 0.99, 1.0), (0.5e-3, 0.99, 1.0), PRICE_G, "-1 mg/request is nothing to save a share of"),
        ((1e-4, 0.99, 1.0), (0.5e-4, 0.98, 1.0), 0.01, "0.1 mg/request is nothing to save a share of"),
        ((float("nan"), 0.99, 1.0), (float("nan"), 0.99, 1.0), PRICE_G, "grams are not metered here"),
    ],
    ids=["no carbon", "negative marginal intensity", "at our accuracy none", "not metered"],
)
def test_of_no_grams_no_share_is_saved(theirs, ours, price_g, why):
    one = case(row("base", theirs), row("exact", ours), price_g=price_g)
    found = one.saving(one.rows[1])
    assert found is not None
    assert (found.pct, found.plain_pct, found.why) == (None, None, why)
    assert case_cells(one)[1][-1] == f"none: {why}"
    (record,) = Comparison("x", 60.0, ("base", "exact"), (0,), (one,)).records()[1:]
    assert record["saving_pct"] is None


@pytest.mark.parametrize(
    ("base", "other"),
    [
        ({"answered": 0, "joules_per_request": 0.0, "accuracy": 0.0}, {}),
        ({"joules_per_request": 0.0}, {}),
        ({"joules_per_request": float("nan")}, {}),
        ({}, {"answered": 0, "grams_per_request": 0.0, "accuracy": 0.0}),
    ],
    ids=["base answered nothing", "no joules", "not metered", "it answered nothing"],
)
def test_a_pair_that_has_no_objective_leaves_the_comparison_whole(base, other):
    first, second = (one.runs[0] for one in (FIRST, row("clover", (0.5e-3, 0.99, 1.0))))
    weighed = Weighed(0.5, 250.0, 1.2)
    assert weighed.objective(second, first) is not None
    changed = (replace(one, summary={**one.summary, **own}) for one, own in ((second, other), (first, base)))
    assert weighed.objective(*changed) is None


def test_a_row_without_an_objective_under_one_seed_shows_none():
    runs = row("clover", (0.5e-3, 0.99, 1.0), (0.5e-3, 0.99, 1.0)).runs
    rows = tuple(
        Row(name, tuple(replace(run, summary={**run.summary, "objective": f}) for run, f in zip(runs, fs, strict=True)))
        for name, fs in (("base", (10.0, 12.0)), ("clover", (None, 3.0)))
    )
    assert [cells[6] for cells in case_cells(case(*rows))] == ["11.0 ± 1.4", "-"]


NAN = float("nan")


def outcome(attainment: float | None, accuracy: float | None, arrived: int = 900, answered: int = 900) -> FamilyOutcome:
    return FamilyOutcome("digits", 0.95, attainment, 0.97, accuracy, arrived, answered)


@pytest.mark.parametrize(
    ("ours", "theirs", "why"),
    [
        (outcome(NAN, 0.99), outcome(1.0, 0.99), "digits misses its SLO (nan% in time, 95.00% asked)"),
        (outcome(None, 0.99), outcome(1.0, 0.99), "none of 900 requests of digits ended"),
        (outcome(1.0, NAN), outcome(1.0, 0.99), "digits is below its accuracy floor (nan, 0.9700 asked)"),
        (outcome(1.0, 0.99), outcome(1.0, NAN), "accuracy of digits is not known"),
        (outcome(1.0, None), outcome(1.0, 0.99), "accuracy of digits is not known"),
        (outcome(None, None, 0, 0), outcome(None, None, 0, 0), ""),
    ],
    ids=["NaN in time", "none ended", "NaN accuracy", "theirs NaN", "no accuracy", "nobody asked"],
)
def test_what_is_not_known_is_not_believed_and_who_nobody_asked_forbids_nothing(ours, theirs, why):
    beside = replace(outcome(1.0, 0.99), name="twin")
    assert no_saving([ours, beside], [theirs, beside], priced=True) == why


def test_a_family_that_nobody_asked_leaves_the_others_their_saving():
    idle = {"arrived": 0, "answered": 0, "slo_attainment": None, "accuracy": None}
    rows = []
    for one in (FIRST, row("exact", (0.5e-3, 0.99, 1.0))):
        (run,) = one.runs
        families = {"digits": run.summary["families"]["digits"]}
        families["twin"] = {**families["digits"], **idle, "slo_missed": False, "floor_missed": False}
        rows.append(Row(one.name, (replace(run, summary={**run.summary, "families": families}),)))
    found = case(*rows).saving(rows[1])
    assert found is not None
    assert (found.why, rows[1].missed) == ("", ())
    assert found.pct is not None
    assert case_cells(case(*rows))[2][4:6] == ("- (95)", "- (0.9700)")


BLIND = row("static_mix", (0.7e-3, 0.98, 1.0))
CLOCKS = row("static_miad", (0.6e-3, 0.98, 1.0))


@pytest.mark.parametrize(
    ("rows", "against"),
    [
        ((FIRST, BLIND, CLOCKS, row("exact_miad", (0.5e-3, 0.98, 1.0))), "static_miad"),
        ((FIRST, BLIND, CLOCKS, row("exact", (0.5e-3, 0.98, 1.0))), "static_mix"),
        ((FIRST, row("static_miad", (0.1e-3, 0.98, 0.5)), row("exact_miad", (0.5e-3, 0.98, 1.0))), "base"),
        ((FIRST, row("wattwiser", (0.4e-3, 0.98, 1.0)), CLOCKS, row("exact_miad", (0.5e-3, 0.98, 1.0))), "wattwiser"),
        ((FIRST, BLIND), None),
        ((row("clover", (0.5e-3, 0.98, 1.0)), row("exact", (0.5e-3, 0.98, 1.0))), None),
    ],
    ids=["same levers", "no clocks", "who missed", "whatever it is", "blind itself", "no blind one"],
)
def test_the_headline_is_against_the_best_carbon_blind_policy_with_the_same_levers(rows, against):
    found = Comparison("x", 60.0, tuple(row.name for row in rows), (0,), (case(*rows),))
    headline = found.to_json()["cases"][0]["headline"]
    assert (headline and headline["against"]) == against
    assert headline_text(found, found.cases[0]).startswith(f"{rows[-1].name} against {against}" if against else "")


@pytest.mark.parametrize(
    ("opponent", "subject", "levers"),
    [
        (CLOCKS, "exact_miad", " with its levers"),
        (BLIND, "exact", " with its levers"),
        (BLIND, "exact_miad", ", without its clocks"),
        (FIRST, "exact_miad", ", without its variants and clocks"),
        (FIRST, "exact", ", without its variants"),
        (FIRST, "carbondis", ""),
    ],
)
def test_the_headline_says_which_levers_its_opponent_lacks(opponent, subject, levers):
    rows = (opponent, row(subject, (0.5e-3, 0.98, 1.0)))
    found = Comparison("x", 60.0, tuple(row.name for row in rows), (0,), (case(*rows),))
    text = headline_text(found, found.cases[0])
    assert text.startswith(f"{subject} against {opponent.name}, the best carbon-blind policy here{levers}: ")


@pytest.mark.parametrize(
    ("names", "subject"),
    [
        (("static_miad", "exact_miad@shared_slices", "base"), "exact_miad@shared_slices"),
        (("exact@shared_slices", "exact", "base"), "exact@shared_slices"),
        (("exact", "exact_miad", "base"), "exact_miad"),
        (("base", "clover@paper"), "clover@paper"),
    ],
)
def test_the_headline_is_about_our_policy_also_with_a_preset(names, subject):
    assert subject_of(names) == subject


def test_unequal_load_is_no_comparison():
    other = row("exact", (0.5e-3, 0.99, 1.0))
    moved = Row("exact", (Run("exact", 0, "another", other.runs[0].summary),))
    with pytest.raises(AssertionError, match="unequal load"):
        _ = case(FIRST, moved).arrivals


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("40,80", ("40", "80")),
        ("[[0.0, 10.0]],[[0.0, 20.0]]", ("[[0.0, 10.0]]", "[[0.0, 20.0]]")),
        ('{a = 1, b = "x,y"}', ('{a = 1, b = "x,y"}',)),
        ('"a,b",c', ("a,b", "c")),
    ],
)
def test_commas_part_values_but_inside_brackets_and_quotes(text, values):
    assert split_values(text) == values


@pytest.mark.parametrize("text", ["", "1,,2", "[1,2", '"a,b'])
def test_values_that_are_none_are_refused(text):
    with pytest.raises(SettingError, match=r"no values between commas\. Remedy: write a,b,c"):
        split_values(text)


def timed(*shares: float, name: str = "exact") -> Row:
    """Runs whose streams met TPOT so often; 0.1 g for 1,000 tokens."""
    one = row(name, *((0.001, 0.98, 0.98),) * len(shares))
    slo = {"ttft_ms": 0.0, "ttft_quantile": 0.0, "tpot_ms": 40.0, "tpot_quantile": 0.95}
    runs = []
    for run, share in zip(one.runs, shares, strict=True):
        tokens = {"ttft_ms_p95": 60.0, "ttft_attainment": None, "tpot_ms_p95": 38.0, "tpot_attainment": share}
        own = {"token_slo": slo, "tokens": tokens, "grams_per_1000_tokens": 0.1}
        family = {**run.summary["families"]["digits"], **own}
        runs.append(replace(run, summary={**run.summary, "families": {"digits": family}}))
    return Row(one.name, tuple(runs))


def test_a_comparison_of_streams_shows_grams_of_tokens_and_who_kept_their_times():
    found = case(timed(0.97, name="base"), timed(0.90))
    document = Comparison("llm", 1.0, ("base", "exact"), (0,), (found,))
    shown = dict(zip(columns(document, found), case_cells(found)[1], strict=True))
    timed_columns = "in TTFT, % (asked)", "in TPOT, % (asked)"
    assert [shown[name] for name in ("g/1,000 tokens", *timed_columns)] == ["0.1000", "-", "90.00 (95)"]
    assert "misses its TPOT" in shown["saving against base at equal accuracy"]
    assert [record["grams_per_1000_tokens"] for record in document.records()] == [0.1, 0.1]
    assert document.records()[1]["tpot_attainment"] == 0.9
    plain = case(FIRST, row("exact", (0.5e-3, 0.98, 0.97)))
    assert not set(timed_columns) & set(columns(document, plain))


def test_a_policy_whose_streams_are_late_in_the_mean_of_the_seeds_misses_its_slo():
    assert timed(0.97, 0.94).missed == ()
    assert timed(0.97, 0.90).missed == ("SLO",)
    assert "TPOT (93.50% in time, 95.00% asked)" in timed(0.97, 0.90).outcomes[0].misses[0]
