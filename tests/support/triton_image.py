"""A stand-in for NVIDIA's image: the CPU tritonserver of `make setup`, where that image keeps its own.

Composed of files of this machine (tritonserver, its Python environment, the standard library, and the shared libraries
that the loader names for them), so that it needs neither a registry nor a distribution's mirror, and takes seconds.
"""

import io
import json
import os
import re
import subprocess
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from tests.support.triton_process import ENVIRONMENT, install

LEFT_OUT = re.compile(r"(__pycache__|tests?|site-packages|dist-packages|config-.*|idlelib|lib2to3|tkinter|ensurepip)")
TRITON_SIDE = ("pytriton", "nvidia_pytriton")  # of the environment's packages: they go elsewhere
LIBRARY = re.compile(r"^\s*(?:\S+ => )?(/\S+) \(0x", re.M)
ROOT_LINKS = ("bin", "sbin", "lib", "lib64")  # symbolic links into usr on a merged distribution
ASK = """import json, os, sys, sysconfig
name = "python%d.%d" % sys.version_info[:2]
print(json.dumps([os.path.realpath(sys.executable), sysconfig.get_path("stdlib"), name]))
"""
TEXTS = {
    "etc/passwd": "root:x:0:0::/:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "opt/env/pyvenv.cfg": "home = /usr/local/bin\ninclude-system-site-packages = false\n",
}


def changes() -> list[str]:
    """What a Dockerfile would say of it."""
    found = [
        "ENV PATH=/opt/env/bin:/usr/local/bin:/usr/bin:/bin",
        "ENV NVIDIA_VISIBLE_DEVICES=all",  # as NVIDIA's images say
    ]
    if not install().libpython_loads:
        found.append(f"ENV LD_LIBRARY_PATH={install().libpython_folder}")
    return found


def pack(archive: Path) -> None:
    """Write the image's file system as a tar."""
    asked = subprocess.run([ENVIRONMENT / "bin" / "python3", "-c", ASK], capture_output=True, text=True, check=True)
    binary, stdlib, python = json.loads(asked.stdout)
    packages = (ENVIRONMENT / "lib" / python / "site-packages").resolve()
    triton = install().binary.resolve().parent.parent
    files: dict[str, Path] = {"usr/local/bin/python3": Path(binary), "bin/bash": Path("/bin/bash")}
    files |= _tree(Path(stdlib), f"usr/local/lib/{python}")
    for package in packages.iterdir():
        if not package.name.startswith(TRITON_SIDE):
            files |= _tree(package, f"opt/env/lib/{python}/site-packages/{package.name}")
    for part in ("bin", "backends", "caches"):
        files |= _tree(triton / part, f"opt/tritonserver/{part}")
    # Where the run path of its binaries leads from there: $ORIGIN/../../../nvidia_pytriton.libs.
    files |= _tree(packages / "nvidia_pytriton.libs", "nvidia_pytriton.libs")
    files |= _libraries(files.values(), packages)
    files["etc/ld.so.cache"] = Path("/etc/ld.so.cache")
    links = {name: os.readlink(f"/{name}").lstrip("/") for name in ROOT_LINKS if os.path.islink(f"/{name}")}
    files = {_through(links, name): path for name, path in files.items()}
    links |= {
        _through(links, "bin/sh"): "bash",
        "opt/env/bin/python3": "/usr/local/bin/python3",
        f"usr/local/bin/{python}": "python3",
    }
    with tarfile.open(archive, "w") as tar:
        for folder in sorted({str(up) for name in (*files, *TEXTS, *links) for up in _above(name)} | {"tmp", "proc"}):
            _add(tar, folder, tarfile.DIRTYPE)
        for name, target in links.items():
            _add(tar, name, tarfile.SYMTYPE, target)
        for name, text in TEXTS.items():
            _add(tar, name, tarfile.REGTYPE, data=text.encode())
        for name, path in files.items():
            _add(tar, name, tarfile.REGTYPE, data=path.read_bytes(), executable=os.access(path, os.X_OK))


def _tree(root: Path, name: str) -> dict[str, Path]:
    if root.is_file():
        return {name: root}
    return {f"{name}/{path.relative_to(root)}": path for path in _walk(root)}


def _walk(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if LEFT_OUT.fullmatch(path.name) or path.suffix == ".a":
            continue
        if path.is_dir():
            yield from _walk(path)
        elif path.is_file():
            yield path


def _libraries(files: Iterable[Path], packages: Path) -> dict[str, Path]:
    """What the loader takes from this machine, at the same paths; what is in the environment is in already."""
    elves = [path for path in files if (".so" in path.name or os.access(path, os.X_OK)) and _is_elf(path)]
    environment = dict(os.environ)
    if not install().libpython_loads:
        environment["LD_LIBRARY_PATH"] = install().libpython_folder
    said = subprocess.run(["ldd", *map(str, elves)], capture_output=True, text=True, env=environment).stdout
    found = {Path(os.path.normpath(path)) for path in LIBRARY.findall(said)}
    return {str(path).lstrip("/"): path for path in found if packages not in path.parents}


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _through(links: dict[str, str], name: str) -> str:
    first, _, rest = name.partition("/")
    return f"{links[first]}/{rest}" if first in links else name


def _above(name: str) -> list[PurePosixPath]:
    return [up for up in PurePosixPath(name).parents if str(up) != "."]


def _add(
    tar: tarfile.TarFile, name: str, kind: bytes, target: str = "", *, data: bytes = b"", executable: bool = True
) -> None:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.size = kind, target, len(data)
    member.mode = 0o1777 if name == "tmp" else 0o755 if executable and not data.startswith(b"root:") else 0o644
    tar.addfile(member, io.BytesIO(data))
