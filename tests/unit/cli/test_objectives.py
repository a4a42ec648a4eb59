"""`trefoil objective` and `budget`: what they send, show and refuse."""

from pathlib import Path

import pytest

from tests.support.running_system import Running, document, run
from trefoil.core.objective import Budget, Objective, ObjectiveMode
from trefoil.runtime import codec


def test_budgets_are_set_and_shown_with_what_is_spent(tmp_path: Path, running: Running) -> None:
    found = document(tmp_path, "budget", "set", "--tenant", "acme", "--grams-per-day", "500")["budget"]
    assert codec.from_proto(running.asked[-1][1].budget) == Budget("acme", grams_per_day=500.0, time_zone="UTC")
    assert (found["tenant"], found["used"], found["rung"]) == ("acme", 0.0, "within")
    assert "check the names" in run(tmp_path, "budget", "set", "--tenant", "acme", "--grams-per-day", "5").stdout
    assert "as in the settings" in run(tmp_path, "budget", "set", "--tenant", "acme", "--reset").stdout
    rows = document(tmp_path, "budget", "list")["budgets"]
    assert [(row["tenant"], row["family"], row["used"]) for row in rows] == [("acme", "", 1.01), ("", "digits", None)]
    text = run(tmp_path, "budget", "list").stdout
    assert [word for word in ("505 of 500", "refused", "not metered") if word not in text] == []
    assert document(tmp_path, "budget", "show", "--family", "digits")["budgets"] == rows[1:]
    assert document(tmp_path, "budget", "clear", "--tenant", "acme") == {"cleared": {"tenant": "acme", "family": ""}}
    said = run(tmp_path, "status").stdout
    assert "requests are refused: budget of acme, 500 g a day: 101% spent, refused" in said
    assert "budget of all tenants on digits, 2000000 J a day: nothing was metered, within" in said


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (("set", "--tenant", "acme", "--grams-per-day", "0"), "--grams-per-day = 0.0: must be above 0"),
        (("set", "--tenant", "acme", "--grams-per-day", "-5"), "--grams-per-day = -5.0: must be above 0"),
        (("set", "--tenant", "acme", "--joules-per-day", "nan"), "--joules-per-day = nan: must be above 0"),
        (("set", "--tenant", "acme", "--grams-per-day", "5", "--reset"), "--reset: goes back to the settings"),
        (("show", "--tenant", "acne"), "did you mean acme?"),
    ],
)
def test_a_budget_that_cannot_be_is_refused_before_it_is_sent(
    tmp_path: Path, running: Running, given: tuple[str, ...], named: str
) -> None:
    result = run(tmp_path, "budget", *given)
    assert result.exit_code == 2
    assert named in result.stderr
    assert [method for method, _ in running.asked if method == "SetBudget"] == []


def test_objective_set_changes_only_what_is_given(tmp_path: Path, running: Running) -> None:
    found = document(tmp_path, "objective", "set", "--accuracy-floor", "0.98", "--slo-percentile", "99")
    sent: Objective = codec.from_proto(running.changed().objective)
    assert (sent.min_accuracy, sent.slo_quantile, sent.slo_ms) == (0.98, 0.99, 75)
    assert running.changed().expected_number == 4
    assert not running.asked[-1][1].HasField("max_watts")
    assert found["degraded"] == "watt_cap: too few watts"
    assert (
        "cannot meet it: watt_cap: too few watts" in run(tmp_path, "objective", "set", "--slo-latency-ms", "2").stdout
    )


def test_objective_set_brings_a_family_into_service_by_its_floor(tmp_path: Path, running: Running) -> None:
    refused = run(tmp_path, "objective", "set", "--family", "new", "--slo-latency-ms", "70")
    assert refused.exit_code == 2
    assert [method for method, _ in running.asked] == ["GetObjectives"]
    run(tmp_path, "objective", "set", "--family", "new", "--accuracy-floor", "0.9")
    assert running.changed().expected_number == 0
    wanted = codec.from_proto(running.changed().objective)
    assert wanted == Objective("new", ObjectiveMode.BUDGET, min_accuracy=0.9)


def test_objective_set_chooses_type_and_window(tmp_path: Path, running: Running) -> None:
    document(tmp_path, "objective", "set", "--type", "budget", "--window-s", "3600")
    sent: Objective = codec.from_proto(running.changed().objective)
    assert (sent.mode, sent.window_s, sent.min_accuracy) == (ObjectiveMode.BUDGET, 3600.0, 0.97)
    document(tmp_path, "objective", "set", "--type", "instant")
    assert running.changed().objective.mode == ObjectiveMode.INSTANT
    document(tmp_path, "objective", "set", "--type", "lambda")  # as much weight as it had, or the controller's default
    assert running.changed().objective.mode == ObjectiveMode.LAMBDA


def test_objective_show_says_what_each_floor_binds_and_the_cap(tmp_path: Path, running: Running) -> None:
    said = run(tmp_path, "objective", "show").stdout
    assert "cats: p95 <= 75 ms; accuracy >= 0.9700 at every instant (number 2)" in said
    assert "digits: p95 <= 75 ms; accuracy >= 0.9700 in the mean of 24 h, not at every instant (never < 0.9000)" in said
    assert "fleet: 900 W at most" in said
    told = run(tmp_path, "status").stdout
    assert "accuracy >= 0.9700 in the mean of 24 h, not at every instant" in told
    assert "fleet: 900 W at most" in told
    found = document(tmp_path, "objective", "show", "--family", "digits")
    assert [each["family"] for each in found["objectives"]] == ["digits"]
    assert found["max_watts"] == 900.0
    assert "one of: cats, digits" in run(tmp_path, "objective", "show", "--family", "dogs").stderr


def test_the_cap_of_the_fleet_is_set_taken_away_and_shown(tmp_path: Path, running: Running) -> None:
    said = run(tmp_path, "objective", "fleet", "--max-watts", "700").stdout
    assert "fleet: 700 W at most" in said
    assert "the fleet cannot meet it: watt_cap: too few watts" in said
    assert document(tmp_path, "objective", "fleet", "--no-max-watts")["max_watts"] is None
    assert (running.asked[-1][0], running.asked[-1][1].max_watts) == ("SetObjectives", 0.0)
    assert running.asked[-1][1].HasField("max_watts")
    assert document(tmp_path, "objective", "fleet") == {"max_watts": 900.0}


def test_objectives_of_a_file_are_sent_together(tmp_path: Path, running: Running) -> None:
    file = tmp_path / "objectives.toml"
    file.write_text(
        "[fleet]\nmax_watts = 650\n[families.digits]\naccuracy.floor = 0.98\n"
        '[families.cats]\ntype = "budget"\nwindow_s = 7200\nslo.percentile = 99\nparams = {credits = 3}\n'
    )
    found = document(tmp_path, "objective", "set", "--file", str(file))
    method, request = running.asked[-1]
    assert [method for method, _ in running.asked] == ["GetObjectives", "SetObjectives"]
    assert (method, request.max_watts, len(request.objectives)) == ("SetObjectives", 650.0, 2)
    digits, cats = (codec.from_proto(each.objective) for each in request.objectives)
    assert (digits.min_accuracy, digits.slo_ms) == (0.98, 75)
    assert (cats.mode, cats.window_s, cats.slo_quantile, cats.params) == (
        ObjectiveMode.BUDGET,
        7200,
        0.99,
        {"credits": 3},
    )
    assert [each.expected_number for each in request.objectives] == [4, 2]
    assert [each["family"] for each in found["objectives"]] == ["digits", "cats"]


@pytest.mark.parametrize(("text", "words"), [
    ("[families.digits]\nslo.latency_ms = -3", ("objectives.toml", "families.digits.slo.latency_ms = -3")),
    ("[families.digits]\nslo_ms = 3", ("objectives.toml", "families.digits.slo_ms", "set slo.latency_ms")),
    ("[families.dogs]\nslo.latency_ms = 3", ("objectives.toml", "families.dogs", "one of: cats, digits")),
    ("[families.digits]\ntype = 'instant'\nwindow_s = 9", ("objectives.toml", "family digits", "window_s", "budget")),
    ("[families.digits]\naccuracy.floor = 0.98\n[families.cats]\nslo.latency_ms = 1",
     ("objectives.toml", "family cats: slo_ms")),
    ("", ("objectives.toml", "says nothing")),
])  # fmt: skip
def test_a_file_of_objectives_that_is_wrong_somewhere_changes_nothing(
    tmp_path: Path, running: Running, text: str, words: tuple[str, ...]
) -> None:
    file = tmp_path / "objectives.toml"
    file.write_text(text)
    result = run(tmp_path, "objective", "set", "--file", str(file))
    assert result.exit_code == 2
    assert all(word in result.stderr for word in words), result.stderr
    assert result.stderr.count("\n") == 1
    only_the_controller_knows = words[-1] == "family cats: slo_ms"
    assert ("SetObjectives" in {method for method, _ in running.asked}) == only_the_controller_knows


def test_objectives_of_tokens_are_set_changed_and_taken_back(tmp_path: Path, running: Running) -> None:
    file = tmp_path / "objectives.toml"
    changes = (
        (("--slo-ttft-ms", "400", "--slo-tpot-ms", "30"), (400.0, 0.0, 30.0, 0.0)),
        (("--slo-tpot-percentile", "90"), (0.0, 0.0, 0.0, 0.9)),
        (("--no-slo-tokens",), (0.0, 0.0, 0.0, 0.0)),
        (("--file", str(file)), (250.0, 0.99, 0.0, 0.0)),
    )
    file.write_text("[families.digits]\nslo.ttft_ms = 250\nslo.ttft_percentile = 99\n")
    for flags, wanted in changes:
        document(tmp_path, "objective", "set", *flags)
        sent: Objective = codec.from_proto(running.changed().objective)
        assert (sent.ttft_ms, sent.ttft_quantile, sent.tpot_ms, sent.tpot_quantile) == pytest.approx(wanted)
        assert sent.slo_ms == 75


def test_lambda_selects_lambda_mode(tmp_path: Path, running: Running) -> None:
    document(tmp_path, "objective", "set", "--lambda", "0.1")
    sent: Objective = codec.from_proto(running.changed().objective)
    assert (sent.mode, sent.lambda_weight) == (ObjectiveMode.LAMBDA, 0.1)


@pytest.mark.parametrize("flags", [[], ["--lambda", "0.1", "--accuracy-floor", "0.9"], ["--accuracy-floor", "1.5"],
    ["--type", "hourly"], ["--type", "instant", "--window-s", "60"], ["--type", "budget", "--lambda", "0.1"],
    ["--slo-latency-ms", "60", "--file", "objectives.toml"], ["--slo-ttft-ms", "0"], ["--slo-tpot-ms", "nan"],
    ["--slo-ttft-ms", "60", "--no-slo-tokens"], ["--slo-tpot-percentile", "100"],
])  # fmt: skip
def test_objective_set_refuses_what_means_nothing(tmp_path: Path, running: Running, flags: list[str]) -> None:
    result = run(tmp_path, "objective", "set", *flags)
    assert result.exit_code == 2
    assert not [method for method, _ in running.asked if method == "SetObjectives"]


def test_a_hard_floor_never_lies_above_the_floor(tmp_path: Path, running: Running) -> None:
    document(tmp_path, "objective", "set", "--accuracy-floor", "0.8")
    sent: Objective = codec.from_proto(running.changed().objective)
    assert sent.hard_min_accuracy == 0.8


def test_reset_goes_back_to_the_settings(tmp_path: Path, running: Running) -> None:
    run(tmp_path, "objective", "set", "--family", "digits", "--reset")
    change = running.changed()
    assert (change.objective.family, change.objective.slo_ms, change.reset) == ("digits", 0.0, True)
    run(tmp_path, "objective", "fleet", "--reset")
    method, request = running.asked[-1]
    assert (method, request.reset_max_watts, request.HasField("max_watts")) == ("SetObjectives", True, False)
    assert document(tmp_path, "mode", "--reset") == {"mode": "advise"}
    assert (running.asked[-1][1].mode, running.asked[-1][1].reset) == (0, True)


@pytest.mark.parametrize(
    "words",
    [
        ["objective", "set", "--reset", "--slo-latency-ms", "90"],
        ["objective", "set", "--reset", "--file", "objectives.toml"],
        ["objective", "fleet", "--reset", "--max-watts", "900"],
        ["objective", "fleet", "--reset", "--no-max-watts"],
        ["mode", "act", "--reset"],
        ["mode"],
    ],
    ids=" ".join,
)
def test_a_reset_and_a_value_are_refused_together(tmp_path: Path, running: Running, words: list[str]) -> None:
    result = run(tmp_path, *words)
    assert result.exit_code == 2
    assert "--reset" in result.stderr
    assert running.asked == []


def test_objective_set_takes_constants_of_the_policy_and_takes_them_back(tmp_path: Path, running: Running) -> None:
    told = document(tmp_path, "objective", "set", "--param", "credits=3", "--param", "accuracy_margin=0.05")
    assert told["objective"]["params"] == {"credits": 3.0, "accuracy_margin": 0.05}
    told = document(tmp_path, "objective", "set", "--param", "accuracy_margin=0", "--slo-latency-ms", "80")
    assert told["objective"]["params"] == {}
    wrong = run(tmp_path, "objective", "set", "--param", "accuracy_margin=much")
    assert wrong.exit_code == 2
    assert "accuracy_margin" in wrong.output
