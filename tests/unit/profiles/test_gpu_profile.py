"""benchmarks/gpu_profile.py without a GPU: meter on a fake NVML, windows on a fake clock, a rehearsal on the CPU."""

import csv
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def gpu_profile() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCHMARKS))  # it imports its sibling, as it does when it is run
    spec = importlib.util.spec_from_file_location("gpu_profile", BENCHMARKS / "gpu_profile.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_profile"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(BENCHMARKS))


class FakeNvml:
    """A GPU that draws 100 W, its counter in steps of a tenth of a second."""

    class NVMLError(Exception):
        pass

    def __init__(self, counter: bool = True, power: bool = True) -> None:
        self.now_s, self.watts, self.counter, self.power, self.offset_j = 0.0, 100.0, counter, power, 0.0
        self.reasons = 1

    def clock(self) -> float:
        return self.now_s

    def pause(self, seconds: float) -> None:
        self.now_s += seconds

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: object) -> float:
        if not self.counter:
            raise self.NVMLError
        return 1e3 * (self.watts * int(self.now_s * 10) / 10 + self.offset_j)

    def nvmlDeviceGetPowerUsage(self, handle: object) -> float:
        if not self.power:
            raise self.NVMLError
        return 1e3 * self.watts

    def nvmlDeviceGetClockInfo(self, handle: object, kind: int) -> int:
        return 1410 if self.now_s < 3 else 1200

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: object) -> int:
        return self.reasons


@pytest.mark.parametrize(
    ("counter", "power", "method"), [(True, True, "counter"), (False, True, "power"), (False, False, "none")]
)
def test_energy_comes_from_the_counter_else_from_power_else_it_is_unknown(
    gpu_profile: ModuleType, counter: bool, power: bool, method: str
) -> None:
    nvml = FakeNvml(counter, power)
    meter = gpu_profile.Meter(nvml, object(), nvml.clock)
    for _ in range(40):
        nvml.pause(0.1)
        meter.sample()
    energy = meter.window()
    assert energy.method == method
    assert energy.clock_mhz == (1200, 1410)
    assert energy.throttle == 0  # the reason "idle" is none
    if method == "none":
        assert energy.joules is None
        assert energy.watts is None
    else:
        assert energy.watts == pytest.approx(100.0, rel=0.03)
    nvml.reasons = 5
    nvml.pause(2.5)
    assert meter.window().throttle == 4


def test_a_window_too_short_for_the_counter_or_over_its_reset_gives_no_joules(gpu_profile: ModuleType) -> None:
    nvml = FakeNvml()
    meter = gpu_profile.Meter(nvml, object(), nvml.clock)
    nvml.pause(1.0)
    assert meter.window().joules is None
    nvml.pause(3.0)
    nvml.offset_j = -1000.0
    assert meter.window().joules is None
    nvml.pause(3.0)
    assert meter.window().joules == pytest.approx(300.0)


def test_without_nvml_there_is_no_meter(gpu_profile: ModuleType) -> None:
    assert gpu_profile.Meter(None, None).method == "none"


def test_saturation_and_even_gaps(gpu_profile: ModuleType) -> None:
    """A batch of 50 ms: 20 a second at most; at half of that none waits, at more each waits longer than the last."""
    nvml = FakeNvml()
    meter = gpu_profile.Meter(nvml, object(), nvml.clock)
    latency, seconds, full = gpu_profile.serve(lambda: nvml.pause(0.05), meter, 4.0, 0.0, nvml.clock, nvml.pause)
    assert len(latency) / seconds == pytest.approx(20.0, rel=0.02)
    assert latency == pytest.approx([50.0] * len(latency))
    latency, seconds, half = gpu_profile.serve(lambda: nvml.pause(0.05), meter, 4.0, 0.1, nvml.clock, nvml.pause)
    assert len(latency) / seconds == pytest.approx(10.0, rel=0.05)
    assert latency == pytest.approx([50.0] * len(latency))
    late, _, _ = gpu_profile.serve(lambda: nvml.pause(0.2), meter, 2.0, 0.1, nvml.clock, nvml.pause)
    assert late[-1] > late[0] + 500  # counted from when it should have begun
    idle = gpu_profile.Energy(120.0, 4.0, "counter", (1410, 1410), 0)
    line = gpu_profile.row("resnet50", 8, 1.0, 20.0, [50.0] * 80, 4.0, full, idle)
    assert float(line["energy_active_j_per_batch"]) == pytest.approx(70.0 * full.seconds / 80, rel=0.05)
    nobody = gpu_profile.Energy(None, 4.0, "none", (0, 0), 0)
    assert gpu_profile.row("resnet50", 8, 1.0, 20.0, [50.0], 4.0, nobody, nobody)["energy_j"] == ""
    assert half.seconds == pytest.approx(4.0, rel=0.05)


def test_quantiles_and_integral(gpu_profile: ModuleType) -> None:
    assert gpu_profile.quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert gpu_profile.quantile([1.0, 2.0], 0.95) == pytest.approx(1.95)
    assert gpu_profile.integral([(0.0, 10.0), (2.0, 30.0)]) == 40.0
    assert gpu_profile.integral([(0.0, 10.0)]) is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--models", "vgg16"], "choose from"),
        (["--batches", "0"], "from 1"),
        (["--batches", "many"], "numbers"),
        (["--rates", "1.5"], "between 0 and 1"),
        (["--window", "0.5"], "at least 2.0 s"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    gpu_profile: ModuleType, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    with pytest.raises(SystemExit):
        gpu_profile.parse(arguments)
    assert said in capsys.readouterr().err


def test_the_defaults_are_the_whole_list(gpu_profile: ModuleType) -> None:
    options = gpu_profile.parse([])
    assert len(options.models) == 11
    assert options.batches == [1, 2, 4, 8, 16, 32, 64]
    assert options.window >= gpu_profile.WINDOW_MIN_S


def test_a_rehearsal_on_the_cpu_writes_a_file_that_says_so(tmp_path: Path) -> None:
    export = BENCHMARKS.parent / ".venv-export"  # which another lane may be filling
    candidates = [sys.executable, *([str(export / "bin" / "python")] if (export / ".ready").exists() else [])]
    with_torch = [
        python
        for python in candidates
        if subprocess.run([python, "-c", "import torch"], capture_output=True).returncode == 0
    ]
    if not with_torch:
        pytest.skip("torch is not installed here")
    out = tmp_path / "gpu.csv"
    command = [with_torch[0], str(BENCHMARKS / "gpu_profile.py"), "--dry-run", "--device", "cpu", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    lines = out.read_text().splitlines()
    assert lines[0].startswith("# basis: rehearsal")
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    assert [(row["batch"], row["rate_share"]) for row in rows] == [("1", "1"), ("1", "0.5"), ("2", "1"), ("2", "0.5")]
    assert all(float(row["latency_ms_p50"]) > 0 and row["energy_j"] == "" for row in rows)
