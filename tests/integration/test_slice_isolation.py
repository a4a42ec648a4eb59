"""Model code in a slice's container answers and never asks: tried on a separate machine, with a real engine."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from power_agent.runtimes.slice_network import RULES

pytestmark = [pytest.mark.integration, pytest.mark.slow]
TOOLS = ("unshare", "ip", "nft")


@pytest.mark.parametrize(
    "flag", [pytest.param("--userland-proxy=true", marks=pytest.mark.gate), "--userland-proxy=false"]
)
def test_from_a_slice_nothing_is_reached_while_this_host_reaches_it(flag):
    lacks = [tool for tool in TOOLS if shutil.which(tool) is None]
    if lacks or os.geteuid() != 0:
        pytest.skip(f"needs root and {', '.join(TOOLS)}; missing: {', '.join(lacks) or 'root'}")
    command = ["unshare", "--net", "--mount", sys.executable, "-m", "tests.support.slice_isolation", flag]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["from this host"] == {
        "a, by loopback": True,
        "a, by its address": False,
        "b, by loopback": True,
        "b, by its address": True,
    }
    assert found["networks"] == 1  # the next agent took the one that was there
    assert not any(found["reached"].values()), found["reached"]
    assert found["missing"] == {}
    without = found["without rules"]
    assert without["reached"]["agent, by the host's address"], "this test could not fail"
    assert without["missing"]["isolate"].startswith("not isolated: model code reaches this host at 172.")
    assert without["missing"]["isolate"].endswith(f"modprobe br_netfilter; nft -f {RULES}")
