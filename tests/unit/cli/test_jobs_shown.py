"""What commands say of planned jobs."""

import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from protos.controller.v1 import controller_pb2 as pb
from trefoil.api.jobs import ItemResult, JobStatus
from trefoil.cli import jobs as commands
from trefoil.cli.jobs import _show
from trefoil.cli.main import app
from trefoil.cli.operate.overview import LATE_MAX, jobs_lines
from trefoil.cli.operate.report import _html, records, report_tables
from trefoil.cli.operate.report_document import jobs_document, report_document
from trefoil.cli.output import csv_text, writing
from trefoil.core.carbon import CarbonBand, CarbonForecast
from trefoil.core.common import Revision
from trefoil.core.errors import NotFound
from trefoil.core.jobs.planned import PlannedHour, PlannedJob, PlannedJobs
from trefoil.overview.jobs import hours_ahead, planned_queue, saved_text
from trefoil.runtime import codec

NOW_S = 1000 * 3600.0


def planned(name: str, *items: float, in_time: bool = True) -> dict[str, Any]:
    starts = [NOW_S - 60.0 + number * 3600.0 for number in range(len(items))]
    hours = [
        {"starts_at_s": start, "ends_at_s": start + 3600.0, "items": count, "grams": 1.0, "p50_g_per_kwh": 90.0}
        for start, count in zip(starts, items, strict=True)
    ]
    return {
        "job_id": f"f0/{name}", "in_time": in_time, "hours": hours, "reason": f"{name} is short of time",
        "grams": 1.5, "at_once_grams": 4.0, "evenly_grams": 3.0, "complete_by_s": NOW_S + 36_000.0,
        "items_left": round(sum(items)),
    }  # fmt: skip


def lines(*jobs: dict[str, Any], until_s: float = NOW_S + 86_400) -> list[str]:
    return jobs_lines({"jobs": {"until_s": until_s, "jobs": list(jobs)}}, NOW_S)


def test_the_hour_that_has_begun_and_what_is_saved():
    assert lines(planned("a", 1200, 500), planned("b", 0, 99)) == [
        "jobs: 2 planned, 1,200 items this hour; 3 g, at once 8 g, evenly 6 g; 0 will be late"
    ]


def test_late_jobs_are_named_and_counted_beyond_a_few():
    found = lines(*(planned(f"j{n}", 1, in_time=False) for n in range(LATE_MAX + 2)))
    assert found[0].endswith(f"; {LATE_MAX + 2} will be late")
    assert found[1] == "job j0: j0 is short of time"
    assert found[LATE_MAX + 1 :] == ["... and 2 more: trefoil jobs list"]


def test_without_a_plan_or_after_its_end_nothing_is_said():
    assert jobs_lines({"jobs": None}, NOW_S) == []
    assert lines() == []
    assert lines(planned("a", 1), until_s=NOW_S) == []


@pytest.mark.parametrize(
    ("saved", "text"),
    [(1e-16, "about nothing"), (-1e-16, "about nothing"), (0.0, "about nothing"), (1.0, "1 g (50%)"),
     (-0.5, "-0.5 g (-25%)")],
)  # fmt: skip
def test_what_a_plan_saves_is_rounded_and_never_hidden(saved, text):
    others = {"at_once_grams": 2.0, "evenly_grams": 0.0}
    assert saved_text(2.0 - saved, others) == f"saves {text} against run at once"


def test_jobs_stand_by_their_deadline_and_hours_between_have_the_forecast():
    late, soon = planned("late", 5, 0), planned("soon", 2) | {"complete_by_s": NOW_S + 3600.0}
    assert planned_queue({"until_s": NOW_S + 1, "jobs": [late, soon]}, NOW_S) == [soon, late]
    third = planned("a", 7)
    third["hours"][0] |= {"starts_at_s": NOW_S + 7200.0, "p50_g_per_kwh": 50.0}
    bands = [{"starts_at_s": NOW_S, "ends_at_s": NOW_S + 7200.0, "p50_g_per_kwh": 300.0}]
    found = [(one["items"], one["p50_g_per_kwh"]) for one in hours_ahead([soon, third], [{"bands": bands}])]
    assert found == [(2, 90.0), (0.0, 300.0), (0.0, 300.0), (7, 50.0)]
    assert [one["items"] for one in hours_ahead([soon, third])] == [2, 7], "where no forecast is known"
    assert hours_ahead([]) == []


def test_a_report_has_the_jobs_as_tables_page_and_rows():
    hours = (PlannedHour(NOW_S, NOW_S + 3600.0, 900.0, 1.5, 90.0),)
    job = PlannedJob(
        "f0/night", 900, hours, True, NOW_S + 3600.0, "will finish at 17:00", 1.5, 4.0, 3.0, NOW_S + 7200.0
    )
    plan = PlannedJobs(Revision(1, 1), NOW_S, NOW_S + 86_400.0, (job,))
    forecast = CarbonForecast(bands=(CarbonBand(NOW_S, NOW_S + 3600.0, 80.0, 90.0, 100.0),))
    fleet = pb.GetFleetResponse(jobs=codec.to_proto(plan), carbon_forecasts=[codec.to_proto(forecast)])
    empty = report_document(pb.GetReportResponse())
    found = empty | jobs_document(fleet, NOW_S)
    queue, planned_hours = report_tables(found)[-2:]
    assert (
        queue[0] == "Jobs planned now; the plan saves 2.5 g (62%) against run at once, 1.5 g (50%) against run evenly"
    )
    assert queue[2] == [("night", "1970-02-11T18:00:00Z", "900", "will finish at 17:00", "1.5", "4", "3")]
    assert planned_hours[2] == [("1970-02-11T16:00:00Z", "900", "1.5", "90", "#" * 24)]
    assert "night" in _html(found)
    head, *rows = csv_text(records(found)).splitlines()
    row = dict(zip(head.split(","), rows[-1].split(","), strict=True))
    assert (row["scope"], row["job"], row["grams"], row["at_once_grams"], row["basis"]) == (
        "job", "night", "1.5", "4.0", "planned",
    )  # fmt: skip
    assert jobs_document(pb.GetFleetResponse(), NOW_S) == {}
    columns = csv_text(records(empty)).splitlines()[0].split(",")
    assert "job" not in columns, "without jobs the columns are those of before"


@pytest.mark.parametrize(
    ("state", "ended_at_s", "text"), [("done", 7200.0, "ended 1970-01-01 02:00"), ("waiting", 0.0, " d)")]
)
def test_an_ended_job_has_the_time_of_its_end_and_an_open_one_what_is_left(
    capsys, monkeypatch, state, ended_at_s, text
):
    monkeypatch.setenv("COLUMNS", "300")
    status = JobStatus("a", "digits", state, 5, 5, 0, 2e10, False, "", 1.0, 0.1, "", 0, 0.0, 0.0, ended_at_s, "")
    _show([status], False)
    assert text in capsys.readouterr().out


def test_results_that_end_in_an_error_leave_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def results(name: str, first: int) -> Iterator[ItemResult]:
        yield ItemResult(0, None, "lost", "its slice is gone")
        if name != "whole":
            raise NotFound("no such job", field="id", value=name, remedy="list them")

    monkeypatch.setattr(commands, "_jobs", lambda _where: nullcontext(SimpleNamespace(results=results)))
    out = tmp_path / "results.jsonl"
    out.write_text("of yesterday\n")
    out.chmod(0o600)
    refused = CliRunner().invoke(app, ["jobs", "results", "broken", "--out", str(out)])
    assert (refused.exit_code, out.read_text(), os.listdir(tmp_path)) == (2, "of yesterday\n", [out.name])
    assert CliRunner().invoke(app, ["jobs", "results", "whole", "--out", str(out)]).exit_code == 0
    assert "its slice is gone" in out.read_text()
    assert (os.listdir(tmp_path), out.stat().st_mode & 0o777) == ([out.name], 0o600)


def test_a_device_is_written_and_stays_one() -> None:
    with writing(Path("/dev/null"), "--out") as path:
        path.write_text("nothing")
    assert Path("/dev/null").is_char_device()
