"""Scores as people and programs read them: pooled by day, a mean of nothing is a dash."""

from trefoil.cli.carbon.scores import by_day, by_part, csv_rows, scores_document, table_rows
from trefoil.core.carbon import CarbonScore, CarbonScores
from trefoil.core.units import HOUR_S


def scores(count: int, step_s: float, samples: int = 10) -> tuple[CarbonScore, ...]:
    """The error grows by 1 g a lead."""
    return tuple(
        CarbonScore((i + 1) * step_s, samples, float(i + 1), 0.5, 0.1, samples, 0.8, samples) for i in range(count)
    )


def test_leads_are_pooled_by_day():
    days = by_day(scores(96, HOUR_S))
    assert [day for day, _ in days] == [1, 2, 3, 4]
    assert [score.mae_g_per_kwh for _, score in days] == [12.5, 36.5, 60.5, 84.5]
    assert [score.samples for _, score in days] == [240] * 4


def test_a_replay_in_a_hurry_is_told_in_parts():
    parts = by_part(scores(96, 4.0))
    assert [name for name, _ in parts] == ["to 96 s", "to 192 s", "to 288 s", "to 384 s"]
    assert by_day(scores(96, 4.0)) == []


def test_nothing_settled_is_a_dash_and_null_never_a_zero():
    told = CarbonScores(model="blend", scores=scores(2, HOUR_S, samples=0), forecasts=1)
    assert table_rows([told]) == [["blend", "1 forecast, none settled", "-", "-", "-", "-", "0"]]
    assert scores_document(told)["days"] == []
    assert {row["mae_g_per_kwh"] for row in csv_rows([(told.model, told.scores)], "measured")} == {None}
    assert by_part(()) == []
