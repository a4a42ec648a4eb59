"""Exported graphs of families for tests, made on demand by the project's own scripts and kept for the next run.

A machine that has never run this creates the environment of `make export-efficientnet` first (about 0.3 GB to download)
and exports four graphs a family (EfficientNet 0.5 GB, 1.7 GB of memory; ALBERT 1.2 GB, 3.7 GB of memory). What is kept
is named by a hash of the scripts and locks.
"""

import fcntl
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

from tests.support.triton_process import MODELS, ROOT

CACHES = (Path("/var/cache/trefoil-tests"), Path.home() / ".cache" / "trefoil-tests")
MADE_OF = (
    MODELS / "_training" / "common.py",
    ROOT / "requirements" / "export.txt",
    ROOT / "requirements" / "export-torch.in",
)
MAKE_S, EXPORT_S = 900, 1500


def exported(family: str) -> Path:
    """Folder with 1/ to 4/ model.onnx of a family, by seeded random weights."""
    script = MODELS / "_training" / f"export_{family}.py"
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in (script, *MADE_OF))).hexdigest()[:16]
    cache = next((one for one in CACHES if _writable(one)), None)
    assert cache is not None, f"none of {CACHES} can be written: the graphs have to be kept somewhere"
    kept = cache / f"{family}-{digest}"
    with (cache / "export.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.is_dir():
            for outdated in cache.glob(f"{family}-*"):
                _run(["rm", "-r", str(outdated)], 60)
            _run(["make", ".venv-export/.ready"], MAKE_S)
            with tempfile.TemporaryDirectory(dir=cache, prefix="exporting-") as folder:
                fresh = Path(folder) / "fresh"
                python = str(ROOT / ".venv-export" / "bin" / "python")
                _run([python, str(script), "--random-weights", "--out", str(fresh)], EXPORT_S)
                fresh.rename(kept)
    return kept


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _run(command: list[str], timeout_s: float) -> None:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(command, cwd=ROOT, env=plain, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, (
        f"{' '.join(command)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}"
    )
