"""The unmodified perf_analyzer, made ready on demand by `make .venv-perf/.ready` and kept.

Its binary comes from a hashed wheel and needs one library that no wheel has, libb64.so.0d: the machine's own, or that
of the Debian package, unpacked beside it. `python -m tests.support.perf_analyzer FOLDER` does the latter.
"""

import csv
import ctypes
import fcntl
import functools
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements" / "perf-analyzer.txt"
HOME = ROOT / ".venv-perf"
PACKAGE, LIBRARY = "libb64-0d", "libb64.so.0d"
MAKE_S, APT_S = 300, 120


@dataclass(frozen=True)
class Report:
    """What one run printed and wrote: `rows` of its CSV, one for each load."""

    output: str
    rows: list[dict[str, str]]


@dataclass(frozen=True)
class PerfAnalyzer:
    """The binary with what it needs to load."""

    binary: Path
    libraries: str

    def run(self, address: str, model: str, *options: str, timeout_s: float = 60.0) -> Report:
        """Measure a model on that gRPC address; the run has to end well."""
        with tempfile.TemporaryDirectory() as folder:
            table = Path(folder) / "table.csv"
            command = [str(self.binary), "-m", model, "-u", address, "-i", "grpc", "-f", str(table), "-v", *options]
            done = subprocess.run(
                command, env=self.environment, capture_output=True, text=True, timeout=timeout_s, check=False
            )
            output = done.stdout + done.stderr
            assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{output[-4000:]}"
            with table.open(newline="") as file:
                return Report(output, list(csv.DictReader(file)))

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "LD_LIBRARY_PATH": self.libraries}


@functools.cache
def perf_analyzer() -> PerfAnalyzer:
    """Skips where its library can neither be found nor fetched."""
    with LOCK.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test lanes run side by side
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        done = subprocess.run(
            ["make", ".venv-perf/.ready"],
            cwd=ROOT, env=plain, capture_output=True, text=True, timeout=MAKE_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    binary = HOME / "bin" / "perf_analyzer"
    if not binary.exists():
        pytest.skip(f"no wheel of {LOCK.name} brings perf_analyzer to this platform. Remedy: run on Linux x86-64")
    folders = {str(found.parent) for pattern in ("libcudart.so.*", LIBRARY) for found in HOME.rglob(pattern)}
    found = PerfAnalyzer(binary, os.pathsep.join(sorted(folders)))
    told = subprocess.run(["ldd", binary], env=found.environment, capture_output=True, text=True, check=False).stdout
    if missing := [line.split()[0] for line in told.splitlines() if "not found" in line]:
        pytest.skip(f"perf_analyzer lacks {', '.join(missing)}. Remedy: apt-get install {PACKAGE}, or glibc >= 2.34")
    return found


def fetch_library(folder: Path) -> str:
    """Unpack Debian's package into a folder where the machine lacks the library; why not, "" if it is there.

    apt checks the package's signed hash. It needs package lists, which only root can fetch.
    """
    try:
        ctypes.CDLL(LIBRARY)
        return ""
    except OSError:
        folder.mkdir(parents=True, exist_ok=True)
    attempts = [["apt-get", "download", PACKAGE]]
    if os.geteuid() == 0:
        attempts += [["apt-get", "update"], ["apt-get", "download", PACKAGE]]
    why = ""
    for command in attempts:
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=APT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        why = done.stderr.strip()
        if done.returncode == 0 and command[1] == "download":
            (package,) = folder.glob(f"{PACKAGE}_*.deb")
            subprocess.run(["dpkg", "-x", str(package), str(folder)], check=True, timeout=APT_S)
            return ""
    return why


if __name__ == "__main__":
    if failure := fetch_library(Path(sys.argv[1])):
        print(f"{PACKAGE} could not be fetched, so tests with perf_analyzer skip: {failure}", file=sys.stderr)
