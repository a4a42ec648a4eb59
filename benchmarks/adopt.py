"""From a wheel to one's own models, as a new user would: `make e2e-adopt`, or `python -m benchmarks.adopt dist/*.whl`.

A fresh environment and an empty folder outside of the checkout; only the wheel, its pinned dependencies and the
models is taken from here. Two networks that torch exported and the models of a Triton repository become two families;
`up` without a profile is refused and names the remedy; assumed, an unmodified tritonclient is answered; a second family
is profiled on the running system under load, and no request of the others fails; `compare` and the report come last.
Prints a line a step with its wall time, and ends with exit code 1 at the first that does not hold.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tests.support.foreign_models import LINEAR, add, graph
from trefoil.runtime.clock import WallClock

CLOCK: Final = WallClock()
ROOT: Final = Path(__file__).resolve().parents[1]
PORTS: Final = ("--port-offset", "5400")
REFUSED: Final = 2
REFUSED_WITHIN_S: Final = 3.0
LIMITS_S: Final = {"installed": 180.0, "import to first answer": 60.0, "compare of three policies": 10.0}

EXPORT: Final = """
import sys
from pathlib import Path
import torch

torch.manual_seed(1)
for name, width in (("sensor-small", 8), ("sensor-large", 64)):
    layers = [torch.nn.Conv1d(3, width, 5, padding=2), torch.nn.ReLU(), torch.nn.Conv1d(width, width, 5, padding=2)]
    layers += [torch.nn.ReLU(), torch.nn.AdaptiveAvgPool1d(1), torch.nn.Flatten(), torch.nn.Linear(width, 4)]
    folder = Path(sys.argv[1]) / name / "1"
    folder.mkdir(parents=True)
    torch.onnx.export(
        torch.nn.Sequential(*layers).eval(), (torch.zeros(1, 3, 256),), folder / "model.onnx", dynamo=False,
        input_names=["signal"], output_names=["classes"], dynamic_axes={"signal": {0: "n"}, "classes": {0: "n"}},
    )
    config = f'name: "{name}" platform: "onnxruntime_onnx" max_batch_size: 8'
    config += ' input [{name: "signal" data_type: TYPE_FP32 dims: [3, 256]}]'
    (folder.parent / "config.pbtxt").write_text(config + ' output [{name: "classes" data_type: TYPE_FP32 dims: [4]}]')
"""
ASK: Final = """
import sys
import numpy as np
import tritonclient.grpc as triton

client = triton.InferenceServerClient(sys.argv[1])
signal = triton.InferInput("signal", [2, 3, 256], "FP32")
signal.set_data_from_numpy(np.random.default_rng(1).normal(size=(2, 3, 256)).astype(np.float32))
print(client.infer("sensor", [signal]).as_numpy("classes").shape)
"""
UP: Final = """
[family]
name = "sensor"
[slo]
latency_ms = 60.0
[[more_families]]
name = "toy"
latency_ms = 60.0
demand_initial_per_s = 5.0
"""
SCENARIO: Final = """
hours = 0.1
[[nodes]]
devices = ["A100-SXM4-40GB", "A100-SXM4-40GB"]
[[families]]
name = "sensor"
[families.arrivals]
points = [[0, 40], [120, 120], [240, 120], [360, 40]]
[families.objective]
accuracy.below_best_pct = 5.0
"""


class Broken(Exception):
    """A step that does not hold."""


def need(holds: bool, text: str) -> None:
    """What has to hold."""
    if not holds:
        raise Broken(text)


class NewUser:
    """A new user's machine: one folder, one environment with the wheel, commands as they are typed."""

    def __init__(self, folder: Path) -> None:
        self.work, self.bin = folder / "work", folder / "venv" / "bin"
        self.work.mkdir()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("TREFOIL_", "PYTHON"))}
        self.environment = kept | {"XDG_DATA_HOME": str(folder / "data"), "PATH": f"{self.bin}:{os.environ['PATH']}"}
        self.times_s: dict[str, float] = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time a step, and print it."""
        began_s = CLOCK.monotonic_s()
        yield
        self.times_s[name] = CLOCK.monotonic_s() - began_s
        limit_s = LIMITS_S.get(name)
        allowed = f" (at most {limit_s:g} s)" if limit_s else ""
        print(f"{self.times_s[name]:7.1f} s  {name}{allowed}", flush=True)
        need(limit_s is None or self.times_s[name] <= limit_s, f"{name} took longer than {limit_s} s")

    def run(self, *argv: object, code: int = 0) -> str:
        """Run a command in the folder; its output.

        Raises:
            Broken: it ends with another exit code.
        """
        words = [str(word) for word in argv]
        done = subprocess.run(words, cwd=self.work, env=self.environment, capture_output=True, text=True, check=False)
        need(done.returncode == code, f"{' '.join(words)} ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    def trefoil(self, *words: object, code: int = 0) -> str:
        """Run a command of Trefoil."""
        return self.run(self.bin / "trefoil", *words, code=code)

    def ask(self, *words: object) -> Any:
        """Run a command of Trefoil for its JSON."""
        return json.loads(self.trefoil(*words, "--json"))


def install(user: NewUser, wheel: Path) -> None:
    """A fresh environment with the wheel, and the Triton environment by its own command."""
    user.run(sys.executable, "-m", "venv", user.bin.parent)
    pip = (
        ROOT / ".venv" / "bin" / "uv",
        "pip",
        "install",
        "--quiet",
        "--compile-bytecode",
        "--python",
        user.bin / "python",
    )
    user.run(*pip, "--require-hashes", "-r", ROOT / "requirements" / "main.txt")
    user.run(*pip, "--no-deps", wheel)
    need(user.trefoil("--version").strip().split()[-1] in wheel.name, "the wheel says another version")
    user.trefoil("setup", "triton")


def adopt(user: NewUser, torch_python: Path) -> None:
    """Two exported networks and a Triton repository become families, and answer."""
    user.run(torch_python, "-c", EXPORT, user.work / "exported")
    for name, kind in (("small", "linear"), ("large", "mlp")):
        add(user.work / "theirs", name, LINEAR, graph(kind))
    accuracies = ("--accuracy", "sensor-small=0.91", "--accuracy", "sensor-large=0.96")
    as_ = ("--as", "sensor=sensor-small,sensor-large", "--slo-latency-ms", 60)
    (user.work / "up.toml").write_text(UP)
    up = ("up", "--config", "up.toml", *PORTS)
    with user.timed("import to first answer"):
        user.trefoil("family", "import", "exported", *as_, *accuracies)
        stated = ("--slo-latency-ms", 60, "--accuracy", "small=0.7", "--accuracy", "large=0.9")
        user.trefoil("family", "import", "theirs", "--as", "toy=small,large", *stated, "--assume")
        with user.timed("up without a profile is refused"):
            said = user.trefoil(*up, code=REFUSED)
        need("trefoil family assume sensor" in said, f"no remedy: {said}")
        user.trefoil("family", "assume", "sensor")
        user.trefoil("family", "check", "sensor", "toy")
        inference = user.ask(*up)["inference"]
        need("(2, 4)" in user.run(user.bin / "python", "-c", ASK, inference), "no answer of the right shape")
    need(user.times_s["up without a profile is refused"] < REFUSED_WITHIN_S, "the refusal took too long")


def profile_under_load(user: NewUser) -> None:
    """Profile one family on the running system while both are asked."""
    loads = [
        subprocess.Popen(
            [user.bin / "trefoil", "load", "--family", family, "--rate", "10", "--duration", "60", "--json"],
            cwd=user.work, env=user.environment, stdout=subprocess.PIPE, text=True,
        )
        for family in ("sensor", "toy")
    ]  # fmt: skip
    quick = ("--slices", "1g.5gb,7g.40gb", "--batches", "1,8", "--rates", "", "--window", 1)
    with user.timed("profile on the running system"):
        found = user.ask("family", "profile", "sensor", *quick)
    need(found["rows"] == 8, f"{found['rows']} rows for two variants, slices and batches")
    for one in loads:
        out, _ = one.communicate()
        summary = json.loads(out)
        joules = (summary["metered"] or {}).get("joules_per_request")
        counts = f"{summary['answered']} answered, {summary['failed']} failed, {joules} J a request"
        print(f"           load beside it: {counts}", flush=True)
        need(summary["failed"] == 0, f"requests failed: {summary['failed_by_code']}")
        need(summary["answered"] > 400, "too few requests to show anything")


def compare(user: NewUser) -> None:
    """Three policies on a scenario of the own family, and the report of one."""
    (user.work / "mine.toml").write_text(SCENARIO)
    with user.timed("compare of three policies"):
        user.trefoil("compare", "mine.toml", "--policies", "base,static_mix,exact", "--seeds", 2, "--out", "compared")
    user.trefoil("simulate", "mine.toml", "--out", "simulated")
    for page in ("compared/comparison.html", "simulated/report.html"):
        need("synthetic" in (user.work / page).read_text(), f"{page} does not say that the profile is synthetic")


def main() -> int:
    """Play all steps."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--torch-python", type=Path, default=ROOT / ".venv-export" / "bin" / "python")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="trefoil-adopt-"))
    user = NewUser(folder)
    try:
        with user.timed("installed"):
            install(user, arguments.wheel.resolve())
        adopt(user, arguments.torch_python)
        profile_under_load(user)
        print(f"           {user.trefoil('status').splitlines()[0]}")
        compare(user)
        user.trefoil("down")
    except Broken as error:
        print(f"BROKEN: {error}")
        return 1
    finally:
        if (user.bin / "trefoil").exists():
            subprocess.run([user.bin / "trefoil", "down"], cwd=user.work, env=user.environment, capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)
    print("all of it holds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
