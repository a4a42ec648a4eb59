"""deploy/swarm/trefoil.yml: what its header and docs/howto/swarm.md promise of every service."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SWARM = ROOT / "deploy" / "swarm"
STACK = yaml.safe_load((SWARM / "trefoil.yml").read_text())
SERVICES = STACK["services"]


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_reached_without_ipvs_limited_watched_and_rolled_back(name):
    service = SERVICES[name]
    assert service["deploy"]["endpoint_mode"] == "dnsrr"
    assert service["deploy"]["resources"]["limits"]["memory"]
    assert service["deploy"]["update_config"]["failure_action"] == "rollback"
    assert service["healthcheck"]["test"]
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert all(port["mode"] == "host" for port in service.get("ports", ()))


def test_only_what_nobody_else_uses_starts_beside_its_predecessor():
    """A volume, a port or a node's name has one owner at a time."""
    for name, service in SERVICES.items():
        volumes = [each for each in service.get("volumes", ()) if isinstance(each, str)]
        alone = bool(volumes or service.get("ports") or name == "agent")
        assert service["deploy"]["update_config"]["order"] == ("stop-first" if alone else "start-first"), name


def test_what_a_lost_node_has_not_acknowledged_is_given_up_by_every_server_line():
    """HAProxy 2.6 takes tcp-ut from no default-server, nor for a name without ipv4@: requests hung until the node was
    back."""
    lines = [line.split() for line in (SWARM / "haproxy.cfg").read_text().splitlines()]
    servers = [words for words in lines if words and words[0] in ("server", "server-template")]
    assert len(servers) == 4
    assert all("tcp-ut" in words and any(word.startswith("ipv4@") for word in words) for words in servers)


def test_stopping_takes_less_than_the_swarm_waits():
    settings = tomllib.loads((ROOT / "deploy/compose/dispatcher.toml").read_text())
    drain_s = settings["drain_s"] + settings["stop_grace_s"]
    assert seconds(SERVICES["dispatcher"]["stop_grace_period"]) > 2 * drain_s
    agent = SERVICES["agent"]
    assert seconds(agent["stop_grace_period"]) > 2 * float(agent["environment"]["TREFOIL_DRAIN_S"])


def test_every_config_is_a_file_here_and_every_secret_is_one_that_the_script_makes():
    assert all((SWARM / config["file"]).is_file() for config in STACK["configs"].values())
    script = (SWARM / "secrets.sh").read_text()
    plain = re.search(r"for file in (ca\.crt .*?); do", script)[1].split()
    of_redis = re.search(r"for file in (tls\.crt tls\.key password\.conf.*?); do", script)[1].split()
    of_exporter = re.search(r"for file in (tls\.crt tls\.key passwords\.json); do", script)[1].split()
    made = {*plain, *(f"redis_{name}" for name in of_redis), *(f"exporter_{name}" for name in of_exporter)}
    made |= {"plan.key", "routes.key", "nodes"}
    wanted = {
        re.fullmatch(r"trefoil_(.+)_\$\{TREFOIL_SECRETS:-1\}", each["name"])[1] for each in STACK["secrets"].values()
    }
    assert wanted == made


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "ADDRESS = ''"),
        (["10.0.0.11", "node a"], "NODE = 'node a'"),
    ],
)
def test_secrets_refuse_what_cannot_be_by_field_value_and_remedy(arguments, said):
    done = subprocess.run([SWARM / "secrets.sh", *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Remedy: " in done.stderr
    assert done.stderr.count("\n") == 1
