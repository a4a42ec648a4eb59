"""The real Triton of one slice, started by the test itself (in the product the node process starts it)."""

import contextlib
import json
import os
import signal
import struct
import subprocess
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import psutil

from power_agent.triton.access import TritonFiles
from power_agent.triton.client import TritonClient
from power_agent.triton.installation import TritonInstall, find_triton, prepare_triton
from power_agent.triton.slice_launch import SliceLaunch, SliceSpec, clean_shared_memory, prepare_slice
from tests.support.ports import free_ports
from trefoil.core.fleet import Hosted
from trefoil.runtime.clock import WallClock

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "model_repository"
ENVIRONMENT = ROOT / ".venv-triton"
VERSIONS = (1, 2, 3, 4)
NAMES = ("digits-xs", "digits-s", "digits-m", "digits-l")

EXPECT = """
import json, sys
import numpy, onnxruntime
images = numpy.load(sys.argv[1])["images"]
answers = {}
for version in (1, 2, 3, 4):
    session = onnxruntime.InferenceSession(f"{sys.argv[2]}/{version}/model.onnx", providers=["CPUExecutionProvider"])
    answers[str(version)] = session.run(["PROBABILITIES"], {"IMAGE": images})[0]
numpy.savez(sys.argv[3], **answers)
print(json.dumps({"numpy": numpy.__version__, "onnxruntime": onnxruntime.__version__}))
"""


def hosted(version: int) -> Hosted:
    return Hosted("digits", NAMES[version - 1], version, 0, 1, 1, 8)


@cache
def install() -> TritonInstall:
    """The installation of `make setup`, prepared once."""
    found = find_triton(None, ENVIRONMENT)
    prepare_triton(found)
    return found


@cache
def heldout(file: str = "heldout.npz") -> tuple[np.ndarray, np.ndarray]:
    with np.load(MODELS / "digits" / file) as data:
        return data["images"], data["labels"]


def expected(folder: Path, file: str = "heldout.npz") -> dict[int, np.ndarray]:
    """Probabilities of every version on the held-out images, by onnxruntime itself in Triton's environment."""
    output = folder / "expected.npz"
    images, family = MODELS / "digits" / file, MODELS / "digits"
    done = subprocess.run(
        [str(ENVIRONMENT / "bin" / "python3"), "-c", EXPECT, str(images), str(family), str(output)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["numpy"].startswith("1."), "Triton's environment needs numpy < 2"
    with np.load(output) as data:
        return {version: data[str(version)] for version in VERSIONS}


class TritonProcess:
    """Starts at once and is killed by `close`, whatever happened in between."""

    def __init__(
        self,
        folder: Path,
        version: int,
        *,
        source: Path = MODELS,
        pace: Path | None = None,
        gpu: str = "",
        serving: Hosted | None = None,
        more: Sequence[Hosted] = (),
        key: str = "",
        tls: TritonFiles | None = None,
        triton: TritonInstall | None = None,
    ) -> None:
        grpc_port, metrics_port = free_ports(2)
        spec = SliceSpec(
            "test", folder / "slice", source, [serving or hosted(version), *more], grpc_port, metrics_port, gpu
        )
        spec = replace(spec, key=key, tls=tls)
        self.launch: SliceLaunch = prepare_slice(triton or install(), spec)
        self.log = folder / f"triton-{grpc_port}.log"
        env = dict(self.launch.env) | ({"TREFOIL_PACE_FILE": str(pace)} if pace else {})
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.launch.argv,
                env=env,
                cwd=self.launch.cwd,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    async def ready(self, served: Sequence[Hosted], timeout_s: float) -> None:
        """Wait until it serves these models."""
        client = self.client()
        await client.wait_ready(served, timeout_s)
        await client.close()

    def client(self, **options) -> TritonClient:
        where = (self.launch.grpc_target, self.launch.metrics_url, self.launch.repository)
        return TritonClient(*where, WallClock(), call_timeout_s=10.0, **options)

    def stubs(self) -> list[psutil.Process]:
        found = []
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # that of an unloaded version, which ends just now
                found += [child] if "stub" in child.name() else []
        return found

    def kill_stubs(self) -> None:
        for stub in self.stubs():
            with contextlib.suppress(psutil.NoSuchProcess):
                stub.kill()

    def close(self) -> None:
        stubs = self.stubs() if self.process.poll() is None else []
        # The whole session: a stub that was started while its server died would stay forever.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        psutil.wait_procs(stubs, timeout=5)
        clean_shared_memory(self.launch.shm_prefix)


class PaceFile:
    """Writes the driver's half of a pace file and reads the model's, by the documented layout and nothing else."""

    ENTRY, SLOT = struct.Struct("<IIIIddd"), struct.Struct("<IIQQQQQQIf")
    FIELDS = (
        "version",
        "family_crc32",
        "busy_ns",
        "batches",
        "items",
        "overruns",
        "overrun_ns",
        "started_ns",
        "instance",
        "activity",
    )

    def __init__(
        self, path: Path, entries: list[tuple[int, int, float, float]], seed: int = 7, family: str = "digits"
    ) -> None:
        """`entries`: (version, batch, mean ms, cv) of the family."""
        self.path, self.family = path, family
        path.write_bytes(bytes(4160 + 40 * 8))
        self.write(entries, seed)

    def write(self, entries: list[tuple[int, int, float, float]], seed: int = 7, sequence: int = 2) -> None:
        data = bytearray(self.path.read_bytes())
        struct.pack_into("<8sQIIIIQ", data, 0, b"TRFPACE2", sequence, 1410, 1, len(entries), 0, seed)
        for i, (version, batch, mean_ms, cv) in enumerate(entries):
            self.ENTRY.pack_into(
                data, 4160 + 40 * i, zlib.crc32(self.family.encode()), version, batch, 0, mean_ms, cv, 1.0
            )
        with self.path.open("r+b") as file:
            file.write(data[:64])
            file.seek(4160)
            file.write(data[4160:])

    def read(self, version: int) -> dict[str, int]:
        """What the one instance of a version booked; zeros where none has run."""
        slots = self.SLOT.iter_unpack(self.path.read_bytes()[64:4160])
        values = next((slot for slot in slots if slot[0] == version), (0,) * len(self.FIELDS))
        return dict(zip(self.FIELDS, values, strict=True))
