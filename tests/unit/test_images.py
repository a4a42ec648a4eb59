"""deploy/images: versions of the Debian packages that images install."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "deploy/images"
LINES = (IMAGES / "packages.txt").read_text().splitlines()
STUB = """#!/bin/sh
case ${0##*/} in
dpkg) echo amd64 ;;
dpkg-query) echo "$INSTALLED" ;;
*) echo "${0##*/} $*" >> "$CALLS" ;;
esac
"""


def test_every_package_that_images_install_has_one_version():
    pins = dict(line.removeprefix("bookworm/amd64 ").split("=") for line in LINES)
    assert all(re.fullmatch(r"bookworm/amd64 [a-z0-9.+-]+=[A-Za-z0-9.+:~-]+", line) for line in LINES)
    assert len(pins) == len(LINES)
    named = re.findall(r"/opt/images/install\.sh ([a-z0-9 -]+)", (ROOT / "deploy/Dockerfile").read_text())
    tags = re.search(r"<<'TAGS'\n(.*)TAGS", (IMAGES / "build.sh").read_text(), re.DOTALL)
    assert tags
    named += [line.split(maxsplit=2)[2] for line in tags[1].splitlines()]
    assert pins.keys() >= {name for words in named for name in words.split()} >= {"python3", "haproxy"}
    assert "libpython3.11" in pins


@pytest.fixture
def install(tmp_path):
    """The script with programs that note their calls, and folders here in place of the image's."""
    (tmp_path / "bin").mkdir()
    for name in ("dpkg", "dpkg-query", "apt-get", "find"):
        (tmp_path / "bin" / name).write_text(STUB)
        (tmp_path / "bin" / name).chmod(0o755)
    text = (IMAGES / "install.sh").read_text().replace("/etc/os-release", str(tmp_path / "os-release"))
    text = text.replace("/etc/apt/preferences.d", str(tmp_path)).replace(
        "rm -rf", "cp $preferences $preferences.was; :"
    )
    (tmp_path / "install.sh").write_text(text)
    (tmp_path / "packages.txt").write_text("bookworm/amd64 openssl=3.0.20-1\nbookworm/arm64 openssl=3.0.19-1\n")

    def run(codename="bookworm", installed="3.0.20-1", **environment):
        (tmp_path / "os-release").write_text(f"VERSION_CODENAME={codename}\n")
        more = {
            "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
            "CALLS": str(tmp_path / "calls"),
            "INSTALLED": installed,
        }
        argv = ["sh", str(tmp_path / "install.sh"), "openssl"]
        return subprocess.run(argv, env=os.environ | more | environment, capture_output=True, text=True)

    return run


def test_packages_are_installed_in_their_versions_or_the_build_ends(install, tmp_path):
    assert install().returncode == 0
    preferences = (tmp_path / "pinned.was").read_text()
    assert preferences == "Package: openssl\nPin: version 3.0.20-1\nPin-Priority: 1001\n\n"
    assert "install -y -qq --no-install-recommends openssl" in (tmp_path / "calls").read_text()
    other = install(installed="3.0.21-1")
    assert (other.returncode, other.stderr) == (
        2,
        "error: openssl = '3.0.21-1': not 3.0.20-1, as packages.txt has it. Remedy: renew packages.txt by "
        "deploy/images/pin.sh, or build with PINNED=0\n",
    )
    assert install(installed="").returncode == 0, "known to dpkg, and not installed"
    for free in (install(installed="3.0.21-1", PINNED="0"), install("noble", "3.0.13-0ubuntu3")):
        assert (free.returncode, free.stderr) == (0, "")
        assert (tmp_path / "pinned.was").read_text() == ""
