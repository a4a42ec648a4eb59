"""Triton installation: finds a tritonserver on this machine and makes its python backend usable.

Looked at, in order: the setting, the wheel nvidia-pytriton in the environment that `trefoil setup triton` made, PATH
(NVIDIA's image). The wheel is located by its distribution files: importing it would want gevent. Nothing of what is
found is imported.
"""

import filecmp
import importlib.metadata
import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from trefoil.core.errors import BinaryMissing, StartError, system_words
from trefoil.runtime.given.llm_backends import LLM_FILES
from trefoil.runtime.model_files import ENGINES

BACKENDS: Final = ("onnxruntime", "python")  # that can run the ONNX files of a family; the better first
LOOKED_FOR: Final = (*BACKENDS, ENGINES, *LLM_FILES)
STUB: Final = "triton_python_backend_stub"
WHEEL: Final = "nvidia-pytriton"
PROBE_TIMEOUT_S: Final = 30.0
# Asked of the interpreter that Triton's models will run in; it alone knows where its packages and its libpython are.
PROBE: Final = """
import ctypes, importlib.metadata, importlib.util, json, pathlib, sys, sysconfig
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
def loads(name):
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True
python = "%d.%d" % sys.version_info[:2]
library = "libpython%s.so.1.0" % python
folder = pathlib.Path(sysconfig.get_config_var("LIBDIR") or "/nowhere")
print(json.dumps({
    "python_version": python, "numpy_version": version("numpy"), "onnxruntime_version": version("onnxruntime"),
    "libpython": library, "libpython_loads": loads(library),
    "libpython_folder": str(folder) if loads(str(folder / library)) else "",
}))
"""


@dataclass(frozen=True, slots=True)
class TritonInstall:
    """Installation: a tritonserver and the Python environment of its models, as found (prepare_triton judges it)."""

    binary: Path
    backends: Path
    caches: Path
    environment: Path  # prefix whose bin/ goes first on PATH
    python_version: str = ""  # "3.11"; this and what follows of Python: not asked where an image brings its own
    numpy_version: str = ""  # "" = not installed, as below
    onnxruntime_version: str = ""
    libpython: str = ""  # "libpython3.11.so.1.0"
    libpython_loads: bool = True  # by the loader's own path
    libpython_folder: str = ""  # where it is if the loader needs LD_LIBRARY_PATH; "" = nowhere
    offers: tuple[str, ...] = ("python",)  # those of LOOKED_FOR that it has
    backend: str = "python"  # which of them serves
    sees_gpus: bool = True  # False: what it starts gets no device, whatever its slice
    own_network: bool = False  # True: its starter publishes its ports, and it listens on all addresses


def with_backend(install: TritonInstall, wanted: str, *, simulated: bool) -> TritonInstall:
    """Choose the backend that executes models. `auto`: onnxruntime where it is there, except on a simulated node.

    Only the python backend's model.py keeps the pace of a simulated GPU.

    Raises:
        BinaryMissing: that backend is not there.
    """
    offers = tuple(name for name in install.offers if name in BACKENDS)
    chosen = next(iter(offers), "") if wanted == "auto" else wanted
    if wanted == "auto" and simulated:
        chosen = "python"
    if chosen not in offers:
        raise BinaryMissing(
            f"{install.backends} has no backend {chosen} (it has: {', '.join(offers) or 'none'})",
            field="triton_backend",
            value=wanted,
            remedy="take an installation or image with that backend, or set triton_backend=auto",
        )
    return replace(install, backend=chosen, sees_gpus=install.sees_gpus and not simulated)


def find_triton(binary: Path | None, environment: Path | None) -> TritonInstall:
    """Locate a tritonserver and look at its Python environment (one short subprocess).

    Raises:
        BinaryMissing: naming every place that was looked at, and the remedy.
    """
    looked = []
    found = None
    if binary is not None:
        looked.append(f"the setting triton_binary = {binary}")
        found = binary if _runs(binary) else None
    else:
        on_path = shutil.which("tritonserver")
        looked += [f"the wheel {WHEEL} in {environment or 'no environment'}", "tritonserver on PATH"]
        found = _in_wheel(environment) or (Path(on_path) if on_path else None)
    if found is None:
        raise BinaryMissing(
            f"no tritonserver: looked at {', '.join(looked)}",
            remedy="run `trefoil setup triton`, or set triton_binary to an executable tritonserver",
        )
    root = found.resolve().parent.parent
    offers = tuple(name for name in LOOKED_FOR if (root / "backends" / name).is_dir())
    prefix, said = _environment(environment)
    return TritonInstall(found, root / "backends", root / "caches", prefix, offers=offers, **said)


def _runs(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def _in_wheel(environment: Path | None) -> Path | None:
    if environment is None:
        return None
    for folder in sorted(environment.glob("lib/python3.*/site-packages")):
        for wheel in importlib.metadata.distributions(name=WHEEL, path=[str(folder)]):
            for file in wheel.files or []:
                path = Path(str(wheel.locate_file(file)))
                if file.name == "tritonserver" and file.parent.name == "bin" and _runs(path):
                    return path
    return None


def _environment(environment: Path | None) -> tuple[Path, dict[str, Any]]:
    """The environment's prefix and what its interpreter says of itself, by the names of TritonInstall's fields."""
    on_path = shutil.which("python3")
    python = environment / "bin" / "python3" if environment is not None else Path(on_path) if on_path else None
    if python is None or not _runs(python):
        raise BinaryMissing(
            f"no Python for Triton's models: {python or 'python3 on PATH'} does not exist",
            remedy="run `trefoil setup triton`, or set triton_environment to one with numpy<2 and onnxruntime",
        )
    try:
        done = subprocess.run(
            [str(python), "-c", PROBE], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise StartError(
            f"{python} does not run: {system_words(error)}",
            remedy="remove that environment and run `trefoil setup triton`",
        ) from error
    return python.parent.parent, json.loads(done.stdout)


def prepare_triton(install: TritonInstall) -> None:
    """Put the python stub of the environment's Python in place; refuse an environment that cannot serve.

    Idempotent, and safe while other Tritons of the same installation run.

    Raises:
        BinaryMissing: no stub for this Python, or no libpython, naming the package that brings it.
        StartError: wrong numpy or no onnxruntime in the environment, or the installation is not readable and writable.
    """
    if install.backend != "python":
        return
    refuse_environment(install)
    _install_stub(install)


def refuse_environment(install: TritonInstall) -> None:
    """Refuse an environment in which models cannot run: with numpy 2 a stub answers empty outputs, status OK."""
    if not install.libpython_loads and not install.libpython_folder:
        raise BinaryMissing(
            f"{install.libpython} cannot be loaded, and Triton's python backend needs it",
            remedy=f"install libpython{install.python_version} (Debian, Ubuntu: apt-get install "
            f"libpython{install.python_version}; Fedora: python{install.python_version}-libs), "
            "or use a Python that was built with --enable-shared",
        )
    if not install.numpy_version or int(install.numpy_version.split(".")[0]) >= 2:
        raise StartError(
            f"numpy {install.numpy_version or 'is missing'} in {install.environment}: outputs would be empty",
            remedy="run `trefoil setup triton`, or install numpy<2 there",
        )
    if not install.onnxruntime_version:
        raise StartError(
            f"onnxruntime is missing in {install.environment}",
            remedy="run `trefoil setup triton`, or install onnxruntime there",
        )


def _install_stub(install: TritonInstall) -> None:
    target = install.backends / "python" / STUB
    stubs = install.backends.parent / "python_backend_stubs"
    source = stubs / install.python_version / STUB
    if not source.is_file():
        if not stubs.is_dir() and target.is_file():
            return  # NVIDIA's image: its stub is built for its own Python
        versions = sorted(p.name for p in stubs.iterdir()) if stubs.is_dir() else []
        raise BinaryMissing(
            f"no stub for Python {install.python_version} in {stubs} (there are: {', '.join(versions) or 'none'})",
            remedy="install trefoil with a Python of one of these; in a checkout: make PYTHON=python3.11 setup",
        )
    try:
        if os.access(target, os.X_OK | os.R_OK) and filecmp.cmp(source, target, shallow=False):
            return
        stub = source.read_bytes()
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{STUB}.", delete=False) as copy:
            copy.write(stub)
        os.chmod(copy.name, 0o755)
        os.replace(copy.name, target)  # running stubs keep the old file
    except OSError as error:
        raise StartError(
            f"cannot put {target} in place: {system_words(error)} ({error.filename})",
            remedy=f"make {source} readable and {target.parent} writable, or copy the one there, executable",
        ) from error
