"""Bill of materials of hashed lock files, as CycloneDX 1.5 JSON: `python requirements/sbom.py LOCK... [--dpkg]`.

Standard library alone, so that images can make theirs. `--dpkg`: also the packages of this Debian or Ubuntu. A package
of a lock has one distribution for each hash, because pip takes any of them.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

ROOT: Final = Path(__file__).resolve().parents[1]
PINNED: Final = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)(?:\[[^\]]*\])?==(?P<version>[^\s;\\]+)", re.MULTILINE)
HASH: Final = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def components(lock: str) -> Iterator[dict[str, Any]]:
    """Components of a lock file's text."""
    found = list(PINNED.finditer(lock))
    for one, after in zip(found, [*found[1:], None], strict=True):
        name = re.sub(r"[-_.]+", "-", one["name"]).lower()
        purl = f"pkg:pypi/{name}@{one['version']}"
        hashes = HASH.findall(lock[one.end() : after.start() if after else len(lock)])
        distributions = [
            {"type": "distribution", "url": purl, "hashes": [{"alg": "SHA-256", "content": content}]}
            for content in hashes
        ]
        yield {
            "type": "library", "bom-ref": purl, "name": name, "version": one["version"], "purl": purl,
            **({"externalReferences": distributions} if distributions else {}),
        }  # fmt: skip


def debian() -> Iterator[dict[str, Any]]:
    """Packages of this system."""
    system = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    distribution = system["ID"].strip('"')
    asked = ["dpkg-query", "-W", "-f", "${Package} ${Version} ${Architecture}\n"]
    for line in subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines():
        name, version, architecture = line.split()
        purl = f"pkg:deb/{distribution}/{name}@{quote(version, safe='~')}?arch={architecture}"
        yield {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def document(locks: Sequence[Path], dpkg: bool = False) -> dict[str, Any]:
    """The whole bill, without a time: same files, same bytes."""
    (version,) = re.findall(r'^__version__.*= "(.+)"$', (ROOT / "trefoil/__init__.py").read_text(), re.MULTILINE)
    rows = [one for lock in locks for one in components(lock.read_text())] + (list(debian()) if dpkg else [])
    own = f"pkg:generic/trefoil@{version}"
    return {
        "bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1,
        "metadata": {
            "component": {"type": "application", "bom-ref": own, "name": "trefoil", "version": version, "purl": own}
        },
        "components": [one for _, one in sorted({one["purl"]: one for one in rows}.items())],
    }  # fmt: skip


def main(argv: Sequence[str]) -> None:
    """Print the bill of the lock files that are named."""
    locks = [Path(each) for each in argv if each != "--dpkg"]
    sys.stdout.write(json.dumps(document(locks, "--dpkg" in argv), indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
