"""Every command: a helpful --help, JSON with --json, and one line with exit code 2 when it cannot."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import controller
from tests.support.commands import commands
from tests.support.running_system import Running, document, run
from trefoil.cli.main import app


def test_help_of_every_command_says_what_it_does_and_offers_json() -> None:
    for path, command in commands():
        if hasattr(command, "commands") or command.hidden:
            continue
        result = CliRunner().invoke(app, [*path.split(), "--help"])
        assert result.exit_code == 0, path
        assert "--json" in result.stdout or "JSON lines" in result.stdout, path
        about = result.stdout.split("\n\n")[1].strip()
        assert len(about.split()) >= 5, f"{path}: a sentence, not a name"


def test_a_family_is_loaded_onto_a_device(running: Running, tmp_path: Path) -> None:
    wanted = {"family": "digits", "devices": {"node0/gpu1": 2}, "degraded": ""}
    assert document(tmp_path, "family", "load", "digits", "node0/gpu1") == wanted
    said = run(tmp_path, "family", "load", "digits", "node0/gpu1")
    assert "digits may use node0/gpu1 (shared by 2)" in said.stdout


def test_a_family_is_stopped_and_started(running: Running, tmp_path: Path) -> None:
    wanted = {"family": "digits", "stopped": True, "held": "frozen", "degraded": ""}
    assert document(tmp_path, "family", "stop", "digits") == wanted
    said = run(tmp_path, "family", "stop", "digits").stdout
    assert said.splitlines() == ["digits is out of service", "the plan in force stays for now: frozen"]
    wanted = {"family": "digits", "stopped": False, "held": "", "degraded": "too slow for it"}
    assert document(tmp_path, "family", "start", "digits") == wanted
    said = run(tmp_path, "family", "start", "digits").stdout
    assert said.splitlines() == ["digits is in service", "the fleet cannot meet its objective: too slow for it"]


@pytest.mark.parametrize(("name", "arguments"), [
    ("profile", ["nosuch"]), ("sensitivity", ["nosuch.onnx"]), ("generate", ["hello", "--state-dir", "nosuch"]),
])  # fmt: skip
def test_a_verb_of_families_works_for_now_under_its_old_words_and_names_the_new_ones(
    name: str, arguments: list[str]
) -> None:
    new = CliRunner().invoke(app, ["family", name, *arguments])
    old = CliRunner().invoke(app, [name, *arguments])
    said, rest = old.stderr.split("\n", 1)
    assert said == f"`trefoil {name}` is `trefoil family {name}` from now on; the next release drops the old words"
    assert (old.exit_code, old.stdout, rest) == (new.exit_code, new.stdout, new.stderr)
    assert new.exit_code in (1, 2)
    assert f" {name} " not in CliRunner().invoke(app, ["--help"]).stdout.partition("Commands:")[2]
    assert f" {name} " in CliRunner().invoke(app, ["family", "--help"]).stdout.partition("Commands:")[2]


@pytest.mark.parametrize(
    ("arguments", "named", "remedy"),
    [
        (["family", "profile", "digts"], "no such family in", "did you mean digits?"),
        (["simulate", "nosuch.toml"], "nosuch.toml", "clover_fleet, cpus, digits"),
        (["reproduce", "clover", "--family", "nosuch"], "--family = 'nosuch'", "efficientnet"),
        (["family", "list", "--repository", "nosuch"], "nosuch'", "name the right folder"),
        (["family", "check", "nosuch"], "no such family in", "digits"),
        (
            ["family", "import", "nosuch", "--as", "new=a,b", "--slo-latency-ms", "10"],
            "no accuracy of a",
            "--accuracies",
        ),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_what_needs_no_running_system_says_in_one_line_what_is_wrong(
    arguments: list[str], named: str, remedy: str
) -> None:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 2
    assert result.stderr.startswith("trefoil: ")
    assert named in result.stderr
    assert remedy in result.stderr.partition("Remedy: ")[2]
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("scale", ["inf", "nan", "1e300"])
def test_a_load_is_not_multiplied_without_end(scale: str, tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("second,requests\n0,0\n1,2\n")
    trace = ["--trace", str(tmp_path / "trace.csv"), "--trace-scale", scale]
    result = CliRunner().invoke(app, ["load", "--address", "127.0.0.1:1", *trace])
    assert result.exit_code == 2
    assert "--trace-scale" in result.stderr


@pytest.mark.parametrize(
    "command",
    [
        ["status"],
        ["plan"],
        ["objective", "show"],
        ["mode", "act"],
        ["freeze"],
        ["rollback"],
        ["replan"],
        ["rollout"],
        ["state", "dump"],
        ["load"],
    ],
    ids=" ".join,
)
def test_without_a_running_system_one_line_says_so(tmp_path: Path, command: list[str]) -> None:
    result = run(tmp_path, *command)
    assert result.exit_code == 2
    assert result.stderr.startswith("trefoil: state_dir")
    assert "trefoil up" in result.stderr
    assert result.stderr.count("\n") == 1


def test_down_without_a_system_is_no_error(tmp_path: Path) -> None:
    assert document(tmp_path, "down") == {"stopped": False, "said": []}


def test_pin_off_unpins(tmp_path: Path, running: Running) -> None:
    assert document(tmp_path, "pin", "--off")["pinned"] is False
    assert not running.asked[-1][1].HasField("plan")


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "not JSON"), ("[" * 200_000, "nested too deeply"), ('{"plan": {"nonsense": 1}}', "nonsense")],
    ids=["torn", "deep", "strange"],
)
def test_a_malformed_plan_file_is_refused(tmp_path: Path, running: Running, text: str, said: str) -> None:
    file = tmp_path / "plan.json"
    file.write_text(text)
    result = run(tmp_path, "pin", str(file))
    assert result.exit_code == 2
    assert said in result.stderr
    assert running.asked == []


def test_replan_says_what_came_of_it(tmp_path: Path, running: Running) -> None:
    found = document(tmp_path, "replan", "--cause", "carbon", "--why", "rehearsal")
    assert (running.asked[-1][1].cause, found["outcome"], found["decision"]) == ("carbon", "unchanged", "1.000007")
    assert "why: asked for: rehearsal" in run(tmp_path, "replan", "--why", "rehearsal").stdout


def test_demo_refuses_a_bad_scenario(tmp_path: Path) -> None:
    config = tmp_path / "demo.toml"
    config.write_text("policies = ['base']\n")
    result = CliRunner().invoke(app, ["demo", "--config", str(config), "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "exact" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("words", "found"), [
    (["mode", "observe"], {"mode": "observe"}), (["mode", "advise"], {"mode": "advise"}),
    (["mode", "act"], {"mode": "act"}),
    (["freeze"], {"frozen": True}), (["freeze", "--off"], {"frozen": False}),
    (["rollback"], {"why": "back to 1.2"}),
])  # fmt: skip
def test_what_a_command_changes_is_its_answer(tmp_path: Path, running: Running, words: list[str], found: Any) -> None:
    assert document(tmp_path, *words).items() >= found.items()
    said = run(tmp_path, *words).stdout
    assert all(f"{name}: {value}" in said for name, value in found.items())


@pytest.mark.parametrize(("words", "named"), [
    (["mode", "panic"], "observe, advise, act"),
    (["load", "--profile", "0:26;10"], "--profile"), (["load", "--batch", "a"], "--batch"),
    (["load", "--images", "/nowhere.npz"], "nowhere.npz"), (["load", "--trace", "/nowhere.csv"], "nowhere.csv"),
    (["load", "--address", "127.0.0.1:1"], "--address"),
    (["replay"], "decisions"), (["up", "--set", "polcy=exact"], "polcy"),
    (["up", "--policy", "magic", "--port-offset", "20000"], "magic"),
])  # fmt: skip
def test_what_is_wrong_is_named(tmp_path: Path, running: Running, words: list[str], named: str) -> None:
    result = run(tmp_path, *words)
    assert result.exit_code == 2
    assert named in result.stderr
    assert not (tmp_path / "lock").exists()


@pytest.mark.parametrize("python_path", ["", ":", ":/opt", "/opt::"])
def test_a_package_of_the_current_folder_is_never_run_for_ours(tmp_path: Path, python_path: str) -> None:
    for name in ("controller", "protos", "trefoil_other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise SystemExit('the {name} of the folder was run')")
    service = "import controller, protos; print(controller.__file__)"
    program = (
        f"import trefoil.cli, subprocess, sys; {service}; subprocess.run([sys.executable, '-P', '-c', {service!r}])"
    )
    environment = {**os.environ, "PYTHONPATH": python_path}
    run = [sys.executable, "-P", "-c", program]
    done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines() == [str(controller.__file__)] * 2, done.stderr
