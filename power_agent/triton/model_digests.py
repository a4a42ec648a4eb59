"""Digests of model files: what a variant was when it was first seen is what it must be at every later load.

A version is fixed for life. So a file under it that was cut short, replaced or removed is refused by name, and used
again when it is put back. family.toml may state the digest of a variant's model file (`sha256`); of every other file
this agent remembers what it found first. A file is read again only when its change time, size or place is another. A
family without model files is not reported: an attempt to serve it says how to make them.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from trefoil.core.catalog import Catalog
from trefoil.core.errors import CatalogError
from trefoil.core.fleet import MODEL_DIGEST_CHARS
from trefoil.runtime.given.llm_backends import LLM_FILES, VLLM, engine_args
from trefoil.runtime.given.onnx_file import check_external_data
from trefoil.runtime.given.repository_names import FILE_BYTES_MAX, boundary, names_below, opened, parts_of
from trefoil.runtime.model_files import ENGINES, FILES, backend_of, contract, expected_files, judged_versions

Version = tuple[str, int]
"""Family and version."""


class ModelDigests:
    """Digests of the model files of a repository. Blocks while it reads files."""

    def __init__(self, source: Path, catalog: Catalog, stated: Mapping[Version, str]) -> None:
        """stated: SHA-256 of the model file of those versions that family.toml states one for."""
        self._source = source
        self.learn(catalog, stated)
        self._model_file: dict[str, str] = {}  # of each family that has had any
        self._known: dict[Version, dict[str, str]] = {}
        self._backends: dict[str, str] = {}  # of each family; engines are made for one type of GPU: nodes may differ
        self._refused: dict[Version, str] = {}  # for what its files are, whatever their digests
        self._read: dict[Path, tuple[tuple[int, ...], str, str]] = {}  # stamp, digest, why it is refused all the same

    def learn(self, catalog: Catalog, stated: Mapping[Version, str]) -> None:
        """Go by another catalogue from now on."""
        self._stated = stated
        self._versions = {family.name: [v.version for v in family.variants] for family in catalog.families}

    def refusals(self) -> dict[Version, str]:
        """Refusals of all versions that may not be loaded now: which file, and why."""
        whys: dict[Version, str] = {}
        for family, versions in self._versions.items():
            self._learn(family)
            if family in self._model_file or any(name == family for name, _ in self._refused):
                whys |= {(family, version): self._refusal((family, version)) for version in versions}
        return {version: why for version, why in whys.items() if why}

    def check(self, family: str, version: int) -> None:
        """Check a version before it is loaded.

        Raises:
            CatalogError: a file of it is not what it was, or is gone.
        """
        self._learn(family)
        if why := self._refusal((family, version)):
            raise CatalogError(
                why,
                field=f"family {family}: version",
                value=version,
                remedy="put the file back, or give it a new version",
            )

    def backend(self, family: str) -> str:
        """Triton backend of a family; "" while its contract was not read."""
        return self._backends.get(family, "")

    def report(self) -> tuple[str, ...]:
        """Report what this node has, as `family/version: digest`, for the controller to compare; no engines.

        The digest is that of the model file, and where files lie beside it, after a `+` that of all of them.
        """
        found = []
        for (family, version), files in sorted(self._known.items()):
            if self._backends[family] == ENGINES:
                continue
            beside = "".join(f"{n} {made}\n" for n, made in sorted(files.items()) if n != self._model_file[family])
            digests = [files[self._model_file[family]], *([hashlib.sha256(beside.encode()).hexdigest()] * bool(beside))]
            found.append(f"{family}/{version}: {'+'.join(each[:MODEL_DIGEST_CHARS] for each in digests)}")
        return tuple(found)

    def _learn(self, family: str) -> None:
        """Remember what is seen for the first time."""
        try:
            config = contract(self._source, family)
        except CatalogError:  # reported by an attempt to load it
            return
        expected, self._backends[family] = expected_files(config), backend_of(config)
        versions, refused = judged_versions(self._source, config)
        known = {version: why for version, why in self._refused.items() if version[0] != family}
        self._refused = known | {(family, version): why for version, why in refused.items()}
        for version, files in versions.items():
            self._model_file[family] = expected[0]
            if (family, version) not in self._known:
                places = names_below(self._source / family / str(version), files)
                found = {name: self._digest(file, family)[0] for name, file in places.items()}
                stated = self._stated.get((family, version))
                self._known[family, version] = found | ({expected[0]: stated} if stated else {})

    def _refusal(self, version: Version) -> str:
        folder = self._source / version[0] / str(version[1])
        if version in self._refused:
            return self._refused[version]
        if version not in self._known:
            name = self._model_file.get(version[0])
            return f"{folder / name} is missing" if name else ""
        for name, digest in self._known[version].items():
            path = folder / name
            now, why = self._digest(path, version[0])
            if not now or why:
                return why or f"{path} is missing or cannot be read"
            if now != digest:
                return f"{path} has another digest (SHA-256 {now[:12]}) than this version ({digest[:12]})"
        return ""

    def _digest(self, path: Path, family: str) -> tuple[str, str]:
        """SHA-256 of a file, "" when it cannot be read; and why it is refused whatever it is: it names other files."""
        below = boundary(self._source, family)
        try:
            with opened(path, below, FILE_BYTES_MAX) as file:
                stat = os.fstat(file.fileno())
                stamp = (stat.st_ctime_ns, stat.st_size, stat.st_ino, stat.st_dev)
                known = self._read.get(path)
                if known is not None and known[0] == stamp:
                    return known[1:]
                made = hashlib.sha256()
                for part in parts_of(file, stat.st_size):
                    made.update(part)
        except (OSError, CatalogError) as error:
            self._read.pop(path, None)
            return "", "" if isinstance(error, OSError) else str(error)
        self._read[path] = stamp, made.hexdigest(), _strange(path, below, self._backends[family])
        return self._read[path][1:]


def _strange(path: Path, below: Path, backend: str) -> str:
    """Why a file is not loaded: a graph's weights could be outside of its folder, or its backend could not read it."""
    try:
        if path.name == FILES["onnxruntime"]:
            check_external_data(path, below)
        if backend == VLLM and path.name == LLM_FILES[VLLM]:
            engine_args(path, below)
    except (OSError, CatalogError) as error:
        return str(error)
    return ""
