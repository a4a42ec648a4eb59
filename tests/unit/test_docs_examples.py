"""Settings files and scenarios that the documentation shows are ones that load."""

import re
from pathlib import Path

import pytest

from carbon_feed.settings import CarbonFeedSettings
from controller.settings import ControllerSettings
from dispatcher.settings import DispatcherSettings
from power_agent.settings import PowerAgentSettings
from trefoil.cli.run.scenario import System
from trefoil.runtime.config import load
from trefoil.simulator import Scenario

CLASSES = {
    "carbon_feed": CarbonFeedSettings,
    "controller": ControllerSettings,
    "dispatcher": DispatcherSettings,
    "mine": Scenario,
    "power-agent": PowerAgentSettings,
    "up": System,
}
DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS / name for name in ("adopt.md", "first-node.md")]
SHOWN = {
    Path(name).stem: text
    for page in PAGES
    for text, name in re.findall(r"```toml\n(# (\S+\.toml)\n.*?)```", page.read_text(), re.S)
}


@pytest.mark.parametrize("name", ["mine", "up"])
def test_a_file_that_is_shown_loads(name, tmp_path):
    (tmp_path / f"{name}.toml").write_text(SHOWN[name])
    assert load(CLASSES[name], tmp_path / f"{name}.toml")


COMMON, *FILES = re.findall(r"```toml\n(.*?)```", (DOCS / "howto" / "several-hosts.md").read_text(), re.S)
SECRETS = {"redis_url": "rediss://:x@control:6379/0", "token": "t" * 32, "plan.key": "ab" * 32, "routes.key": "cd" * 32}


@pytest.mark.parametrize("text", FILES)
def test_a_file_of_several_hosts_loads_after_the_common_lines(text, tmp_path):
    for name, secret in SECRETS.items():
        (tmp_path / name).write_text(secret)
        (tmp_path / name).chmod(0o600)
    name = re.findall(r"/etc/trefoil/([\w-]+)\.toml", text)[0]
    (tmp_path / f"{name}.toml").write_text((COMMON + text).replace("/etc/trefoil", str(tmp_path)))
    assert load(CLASSES[name], tmp_path / f"{name}.toml").cluster == "site1"
