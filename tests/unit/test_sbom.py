"""requirements/sbom.py: every pinned package with its hashes, as CycloneDX, and same bytes for same files."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements" / "services.txt"


def bill(*argv: str) -> bytes:
    script = str(ROOT / "requirements" / "sbom.py")
    return subprocess.run([sys.executable, script, str(LOCK), *argv], capture_output=True, check=True).stdout


def test_the_bill_has_each_package_of_the_lock_with_all_its_hashes():
    found = json.loads(bill())
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.5")
    versions = {one["name"]: one["version"] for one in found["components"]}
    pinned = re.findall(r"^([A-Za-z0-9._-]+)(?:\[.*\])?==(\S+)", LOCK.read_text(), re.MULTILINE)
    assert versions == {name.lower().replace("_", "-").replace(".", "-"): version for name, version in pinned}
    hashes = [one["hashes"][0]["content"] for part in found["components"] for one in part["externalReferences"]]
    assert sorted(hashes) == sorted(re.findall(r"sha256:([0-9a-f]{64})", LOCK.read_text()))
    assert bill() == bill()


@pytest.mark.skipif(shutil.which("dpkg-query") is None, reason="no Debian or Ubuntu")
def test_the_bill_of_an_image_has_the_packages_of_its_base():
    names = {one["purl"].split("/")[0] for one in json.loads(bill("--dpkg"))["components"]}
    assert {"pkg:pypi", "pkg:deb"} <= names
