"""A command that is refused has done nothing: `trefoil status` says after each what it said before.

Every command of the program stands in one of the two tables below, so that a new one cannot be forgotten.
"""

import json
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.commands import commands
from tests.support.system import RunningSystem, running_system
from tests.support.triton_process import MODELS
from trefoil.cli.main import app

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.gate]

EXIT_REFUSED = 2
SETTLED_S = 4.0  # reports of a node, one a second, that follow the last refusal: what it set off would show in them

# Ways in which each command is refused. In braces: what `ways` fills in.
REFUSED: Mapping[str, tuple[str, ...]] = {
    "up": (
        "--set policy=clever --port-offset {offset}",
        "--policy exact --port-offset {elsewhere}",  # something runs in this state directory
        "--state-dir {tmp}/other --port-offset {offset}",  # something listens there
    ),
    "down": ("--state-dir {tmp}/damaged",),
    "mode": ("sometimes", "", "act --reset"),
    "freeze": ("--on",),
    "pin": (
        "",
        "{tmp}/nowhere.json",
        "{tmp}/elsewhere.json",
        "{tmp}/unknown.json",
        "{tmp}/twice.json",
        "{tmp}/plan.json --off",
    ),
    "rollback": ("",),  # there is no plan before the first
    "replan": ("--cause boredom",),
    "load": ("--family ghost", "--rate 1 --images {tmp}/nowhere.npz", "--batch many", "--trace {tmp}/nowhere.csv"),
    "family generate": ("hello --family ghost", "hello --max-tokens 0"),
    "family profile": (
        "ghost --replace",
        "ghost --replace --agent {agent}",
        "ghost --replace --repository {tmp}/models",  # there, and in no catalogue of those that run
        "ghost --replace --repository {tmp}/models --agent {agent}",
        "digits --replace --slices 9g.99gb",
        "digits --replace --slices 9g.99gb --agent {agent}",
        "digits --replace --agent {agent} --batches 1,64",
        "digits --replace --batches 1,64",
        "digits --replace --variants digits-xxl --agent {agent}",
        "digits --replace --clocks 7 --agent {agent}",
        "digits --replace --device node0/gpu9",
    ),
    "demo": ("--quick --port-offset {offset} --out {tmp}/demo",),
    "objective set": (
        "",
        "--accuracy-floor 0.9999",
        "--family ghost --slo-latency-ms 50",
        "--slo-latency-ms 0",
        "--param accuracy_margin=much",
        "--param luck=7",
        "--lambda 0.5 --accuracy-floor 0.9",
        "--type sometimes",
        "--file {tmp}/nowhere.toml",
        "--file {tmp}/objectives.toml",  # of which the first alone could be set
        "--reset --slo-latency-ms 50",
        "--reset --family ghost",  # the settings have none of it
    ),
    "apply": (
        "-f {tmp}/nowhere.toml",
        "-f {tmp}/declared.toml",  # of which only the second family is wrong
        "-f {tmp}/objectives.toml",  # in the words of `objective set --file`
        "-f {tmp}/mode.toml",
        "-f {tmp}/cap.toml --prune",  # it names no family
    ),
    "budget set": (
        "--grams-per-day 500",
        "--tenant acme",
        "--tenant acme --grams-per-day 0",
        "--tenant acme --grams-per-day 1e300",
        "--tenant acme --grams-per-day 500 --least-accuracy 95",
        "--tenant acme --grams-per-day 500 --time-zone Mars/Olympus",
        "--tenant a/b --grams-per-day 500",
        "--family ghost --grams-per-day 500",
        "--tenant acme --reset",  # the settings have none of it
    ),
    "budget clear": ("--tenant acme",),
    "state restore": (
        "{tmp}/nowhere.dump --config {tmp}/controller.toml",
        "{tmp}/plan.json --config {tmp}/controller.toml",
        "{tmp}/plan.json --config {tmp}/nowhere.toml",
    ),
    "objective fleet": ("--max-watts 0", "--max-watts many", "--max-watts 900 --reset"),
    "node drain": ("node0/gpu9 --why test", "node9/gpu0", "node0/gpu9 --release", "--ca {tmp}/nowhere.pem"),
    "node clocks": (
        "node0/gpu9 --max 900",
        "node0/gpu0 --max 900 --min 1200",
        "node0/gpu0 --max 900 --ttl 1000000",
        "node0/gpu0 --max 0",
        "node0/gpu0 --limit 7",
    ),
    "jobs cancel": ("ghost",),
    "jobs submit": (
        "ghost {digits}/heldout.npz --complete-by 6h",
        "digits {digits}/heldout.npz --complete-by 2020-01-01T00:00Z",
        "digits {digits}/heldout.npz --complete-by soon",
        "digits {digits}/heldout.npz --complete-by 6h --zone ghost",
        "digits {digits}/heldout.npz --complete-by 6h --tenant ghost",
        "digits {digits}/heldout.npz --complete-by 6h --min-accuracy 1.0",
        "digits {tmp}/nowhere.npz --complete-by 6h",
        "digits {digits}/family.toml --complete-by 6h",
    ),
    "node unlock": ("node0/gpu9",),
    "node adopt": ("node0-gpu9-1g.5gb-0",),  # there is no such Triton or instance
    "node reset": ("node0-gpu9-1g.5gb-0", "node0-gpu9-1g.5gb-0 --force"),
    "family load": ("digits node0/gpu0", "ghost node0/gpu0", "digits node0/gpu9"),
    "family unload": ("digits node0/gpu0", "ghost node0/gpu0", "digits node0/gpu9"),
    "family stop": ("ghost",),
    "family start": ("ghost",),
    "family sensitivity": (
        "{digits} --agent {agent}",  # it serves
        "{digits} --agent {agent} --replace --device node0/gpu9",
        "{digits} --agent {agent} --replace --slice 9g.99gb",
        "{digits} --agent {agent} --replace --clock 7",
        "{digits} --agent {agent} --replace --clock 210",  # no clock is half of it
        "{ghost} --agent {agent} --replace --repository {tmp}",  # in no catalogue of those that run
    ),
    "family assume": ("digits --repository {tmp}/models", "ghost --repository {tmp}/models"),
    "family engine": (
        "own=nowhere --as own --tokens-mean 8 --slo-latency-ms 50 --device-type L4 --repository {tmp}/models",
        "own=http://127.0.0.1:9/v1 --as own --tokens-mean 8 --slo-latency-ms 50 --device-type L4 --accuracy own=0.5 "
        "--repository {tmp}/models",
    ),
    "family import": ("{tmp}/nowhere --as own=a,b --slo-latency-ms 50 --repository {tmp}/models",),
}
WITHOUT_SYSTEM = ("demo", "state restore", "family import", "family engine", "family assume")  # no --state-dir
# They change nothing of a running system, refused or not: they show, or work on files.
READING = {
    *("status", "plan", "top", "rollout", "explain-request", "replay", "objective show", "state dump"),
    *("diff", "export"),
    *("budget list", "budget show"),
    *("node show", "node preview", "node energy", "node doctor"),
    *("carbon now", "carbon watch", "carbon forecast", "carbon history", "carbon health", "carbon zones"),
    *("forecast train", "forecast backtest", "lengths train"),
    *("carbon backtest", "simulate", "compare", "policy", "assess"),
    *("reproduce clover", "reproduce wattwiser", "reproduce carbondis", "reproduce infadapter"),
    *("reproduce muserve", "reproduce muserve-scheduler"),
    *("family list", "family check", "setup triton", "report", "deploy env"),
    *("jobs list", "jobs show", "jobs watch", "jobs results"),
}


def test_every_command_stands_in_one_of_the_tables() -> None:
    words = {path for path, one in commands() if not hasattr(one, "commands") and not one.hidden}
    assert words == READING | REFUSED.keys(), "say how a new command is refused, or that it changes nothing"


@pytest.fixture(scope="module")
def system() -> Iterator[RunningSystem]:
    """`base` plans one way, whatever load and carbon do: nothing changes by itself."""
    with running_system({"policy": "base"}) as one:
        yield one


def test_a_refused_command_leaves_the_system_as_it_was(system: RunningSystem, tmp_path: Path) -> None:
    names = ways(system, tmp_path)
    before = standing(system)
    for command, refusals in REFUSED.items():
        for words in refusals:
            argv = [*command.split(), *words.format(**names).split()]
            if "--state-dir" not in argv and command not in WITHOUT_SYSTEM:
                argv += ["--state-dir", str(system.state_dir)]
            done = CliRunner().invoke(app, argv)
            assert done.exit_code == EXIT_REFUSED, (argv, done.output, done.exception)
        assert standing(system) == before, f"one of {refusals} of {command}"
    last_s = time.time()
    give_up_s = time.monotonic() + 60
    while reported_s(system) < last_s + SETTLED_S:
        assert time.monotonic() < give_up_s, "the node reports no more"
    assert standing(system) == before


def test_what_is_exported_differs_in_nothing_and_an_edited_file_in_what_apply_then_changes(
    system: RunningSystem, tmp_path: Path
) -> None:
    def runs(*argv: str, given: str = "") -> tuple[int, str]:
        done = CliRunner().invoke(app, [*argv, "--state-dir", str(system.state_dir)], input=given)
        return done.exit_code, done.output

    file, edited = str(tmp_path / "now.toml"), tmp_path / "edited.toml"
    assert runs("export", "--output", file) == (0, "")
    assert runs("diff", "--file", file, "--prune") == (0, "nothing differs\n")
    text = Path(file).read_text()
    edited.write_text(
        text.replace("max_watts = 0.0", "max_watts = 4000.0").replace('"act"', '"advise"').replace("budgets = []", "")
    )
    with edited.open("a") as budget:
        budget.write('\n[[budgets]]\ntenant = "acme"\ngrams_per_day = 500\n')
    changes = "max_watts: none -> 4000\nmode: act -> advise\nbudget of acme: none -> 500 g a day\n"
    assert runs("diff", "-f", str(edited)) == runs("diff", "-f", "-", given=edited.read_text()) == (1, changes)
    assert runs("diff", "-f", file) == (0, "nothing differs\n"), "diff changes nothing"
    assert runs("apply", "-f", str(edited)) == (0, f"{changes}the plan in force stays for now: mode advise\n")
    assert runs("diff", "-f", str(edited)) == (0, "nothing differs\n")
    assert runs("diff", "-f", file)[0] == 1
    assert runs("apply", "-f", file, "--prune")[0] == 0
    assert runs("diff", "-f", file, "--prune") == (0, "nothing differs\n")


def ways(system: RunningSystem, folder: Path) -> dict[str, str]:
    """What stands for the names in braces, and the files that they name."""
    answer = system.look("plan")
    (folder / "plan.json").write_text(json.dumps(answer))
    text = json.dumps(answer["plan"])
    (folder / "elsewhere.json").write_text(text.replace("node0/gpu1", "node0/gpu7"))
    (folder / "unknown.json").write_text(text.replace("digits-l", "digits-xxl"))
    doubled = json.loads(text)
    doubled["nodes"][0]["devices"] += doubled["nodes"][0]["devices"][:1]
    (folder / "twice.json").write_text(json.dumps(doubled))
    (folder / "objectives.toml").write_text(
        "[families.digits]\nslo.latency_ms = 77\n[families.ghost]\nslo.latency_ms = 50\n"
    )
    (folder / "declared.toml").write_text(
        'mode = "advise"\n[[objectives]]\nfamily = "digits"\nslo.latency_ms = 77\n'
        '[[objectives]]\nfamily = "ghost"\nslo.latency_ms = 50\n'
    )
    (folder / "mode.toml").write_text('mode = "sometimes"\n')
    (folder / "cap.toml").write_text("max_watts = 4000\n")
    (folder / "controller.toml").write_text(f'redis_url = "{system.launch.redis_url}"\ncluster = "default"\n')
    (folder / "damaged" / "run").mkdir(parents=True)
    (folder / "damaged" / "run" / "launch.json").write_text("{")
    ghost = folder / "models" / "ghost"
    shutil.copytree(MODELS / "digits", ghost)
    for file in ("family.toml", "config.pbtxt"):
        (ghost / file).write_text((ghost / file).read_text().replace('"digits"', '"ghost"'))
    return {
        "tmp": str(folder),
        "digits": str(MODELS / "digits" / "1" / "model.onnx"),
        "ghost": str(ghost / "1" / "model.onnx"),
        "offset": str(system.port_offset),
        "elsewhere": str(system.port_offset + 100),
        "agent": system.launch.addresses["power_agent"],
    }


def standing(system: RunningSystem) -> dict[str, Any]:
    """What an operator's command may change: control, plan, objectives, devices and slices, and who runs.

    Left out is what moves by itself: clocks, watts, temperatures, carbon, counters of load and energy, and the health
    of services, which are asked within a second; one that had ended would be failing, and another process.
    """
    found = system.look("status")
    told = {name: found[name] for name in ("failing", "mode", "frozen", "pinned", "exploring", "revision", "rollout")}
    told |= {name: found.get(name) for name in ("loans", "objectives", "disk_trouble")}
    told["nodes"] = [
        {name: node[name] for name in ("node", "zone", "epoch", "applied", "highest_epoch_seen", "missing")}
        | {"devices": [device_standing(device) for device in node["devices"]]}
        for node in found["nodes"]
    ]
    told["objective"] = system.look("objective", "show")
    told["processes"] = {path.name: path.read_text() for path in sorted((system.state_dir / "run").glob("*.json"))}
    return told


def device_standing(device: Mapping[str, Any]) -> dict[str, Any]:
    kept = ("device", "type", "state", "cordon", "clock_lease", "mig_current", "mig_pending", "drift", "slices")
    return {name: device[name] for name in kept}


def reported_s(system: RunningSystem) -> float:
    """When the node last said how it stands."""
    (node,) = system.look("status")["nodes"]
    at_s: float = node["observed_at_s"]
    return at_s
