"""Is the saving real? Three controls that must find none, on the demo's own machinery.

    equal_joules     every variant costs what the best one costs: exact_miad may save nothing against static_miad,
                     which has the same clocks and governor, and no carbon
    permuted_labels  answers are checked against shuffled labels: the measured accuracy must fall to chance (which is
                     below the floor, so that this demo ends with 1)
    meter_off        nothing measures energy: joules and grams must be unknown (null), never 0 or an estimate

Run: `make honesty` (about ten minutes; `--only NAME` for one). Prints a table, writes out/bench/honesty.json, and exits
with 1 when a control fails. Each control is a `trefoil demo` in a separate process; its report stays beside.
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
OUT: Final = ROOT / "out" / "bench"
SAVING_PCT_MAX: Final = 2.0
CHANCE: Final = 0.10  # ten classes, almost equally frequent
CHANCE_ERROR_MAX: Final = 0.04  # four standard deviations of 900 draws
PAIR: Final = ("static_miad", "exact_miad")  # the demo's own subject, and its opponent


@dataclass(frozen=True, slots=True)
class Control:
    """One demo that must show nothing. `judge` returns (the figure, whether it is as it must be)."""

    name: str
    must: str
    quick: bool
    settings: Mapping[str, str]
    judge: Callable[[Mapping[str, Any]], tuple[str, bool]]


@dataclass(frozen=True, slots=True)
class Finding:
    """What a control showed."""

    name: str
    must: str
    figure: str
    passed: bool
    command: str
    report: str
    commit: str
    seed: int
    machine: str


def judge_saving(report: Mapping[str, Any]) -> tuple[str, bool]:
    """The demo's subject against its opponent, in grams per answered request."""
    saving_pct = report["saving_pct"][PAIR[0]]
    if saving_pct is None:
        return report["no_saving"][PAIR[0]], False
    grams = ", ".join(f"{name} {1e3 * report[name]['grams_per_request']:.4f} mg" for name in PAIR)
    return f"saving {saving_pct:+.2f} % ({grams})", abs(saving_pct) < SAVING_PCT_MAX


def judge_accuracy(report: Mapping[str, Any]) -> tuple[str, bool]:
    """Accuracy of every run."""
    found = {name: report[name]["accuracy"] for name in PAIR}
    figure = ", ".join(f"{name} {100 * value:.1f} %" for name, value in found.items())
    return figure, all(abs(value - CHANCE) <= CHANCE_ERROR_MAX for value in found.values())


def judge_unknown(report: Mapping[str, Any]) -> tuple[str, bool]:
    """Everything that is derived from energy."""
    found = [
        report[name][field] for name in PAIR for field in ("joules_per_request", "grams_per_request", "idle_share")
    ]
    found += list(report["saving_pct"].values())
    answered = sum(report[name]["answered"] for name in PAIR)
    return f"{found.count(None)} of {len(found)} are null, {answered} answered", set(found) == {None} and answered > 0


def controls(folder: Path) -> tuple[Control, ...]:
    """All of them; writes the profile of equal joules."""
    profile = folder / "equal_joules.csv"
    script = ROOT / "model_repository" / "digits" / "make_profile.py"
    subprocess.run([sys.executable, str(script), "--equal-joules", "--output", str(profile)], check=True)
    return (
        Control(
            "equal_joules",
            f"|saving| < {SAVING_PCT_MAX:g} %",
            quick=False,
            settings={"family.profile_override": str(profile)},
            judge=judge_saving,
        ),
        Control(
            "permuted_labels",
            f"accuracy {100 * CHANCE:.0f} +- {100 * CHANCE_ERROR_MAX:.0f} %",
            quick=True,
            settings={"load.permute_labels": "true"},
            judge=judge_accuracy,
        ),
        Control("meter_off", "joules and grams null", quick=True, settings={"meter": "none"}, judge=judge_unknown),
    )


def play(control: Control, folder: Path, more: Sequence[str]) -> Finding:
    """Run its demo and judge the report.

    Raises:
        subprocess.CalledProcessError: the demo itself failed; what it said stands above.
    """
    out = folder / "honesty" / control.name
    sets = [word for key, value in control.settings.items() for word in ("--set", f"{key}={value}")]
    words = ["demo", *["--quick"] * control.quick, "--out", str(out), "--set", f"policies={json.dumps(PAIR)}"]
    argv = [str(Path(sys.executable).parent / "trefoil"), *words, *sets, *more]
    code = subprocess.run(argv, check=False, cwd=ROOT).returncode
    report = json.loads((out / "report.json").read_text())
    if code != int(report["missed_floor"][PAIR[1]] or report["missed_slo"][PAIR[1]]):
        raise subprocess.CalledProcessError(code, argv)
    figure, passed = control.judge(report)
    command = shlex.join(["trefoil", *argv[1:]]).replace(f"{ROOT}/", "")
    where = str((out / "report.json").relative_to(ROOT)) if out.is_relative_to(ROOT) else str(out / "report.json")
    return Finding(
        control.name, control.must, figure, passed, command, where, report["commit"], report["seed"], report["machine"]
    )


def main() -> int:
    """Play the controls, print the table, write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("equal_joules", "permuted_labels", "meter_off"), help="one control")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of honesty.json")
    parser.add_argument("--demo", action="append", default=[], metavar="WORD", help="passed on to `trefoil demo`")
    arguments = parser.parse_args()
    folder: Path = arguments.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    chosen = [control for control in controls(folder) if arguments.only in (None, control.name)]
    findings = [play(control, folder, arguments.demo) for control in chosen]
    print(f"\n{'control':<18}{'must be':<24}{'':<6}found")
    for finding in findings:
        print(f"{finding.name:<18}{finding.must:<24}{'ok' if finding.passed else 'FAIL':<6}{finding.figure}")
    path = folder / "honesty.json"
    known = json.loads(path.read_text()) if arguments.only and path.exists() else {}  # the other controls' rows stay
    known |= {finding.name: asdict(finding) for finding in findings}
    path.write_text(json.dumps(known, indent=1) + "\n")
    print(f"written: {path}")
    return 0 if all(finding.passed for finding in findings) else 1


if __name__ == "__main__":
    sys.exit(main())
