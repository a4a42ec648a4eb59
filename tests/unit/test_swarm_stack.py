"""deploy/swarm/trefoil.yml: what its header and docs/howto/swarm.md promise of every service."""

import re
import shutil
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from tests.unit.test_compose_scripts import Secrets
from trefoil.core.common import Revision
from trefoil.core.plan import NodePlan, Plan
from trefoil.runtime.security.plan_keys import PlanKeys

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


def test_of_connections_to_a_lost_node_the_busy_one_ends_last():
    """A request on an idle one that is as dead fails after another tcp-ut: so did 58 of a cut's 118."""
    text = (SWARM / "haproxy.cfg").read_text()
    idle_s, interval_s = (int(each) for each in re.findall(r"srvtcpka-(?:idle|intvl) (\d+)s", text))
    [given_up_ms] = {int(each) for each in re.findall(r"tcp-ut (\d+)ms", text)}
    assert 0.2 + given_up_ms / 1000 >= idle_s + interval_s > given_up_ms / 1000
    assert SERVICES["haproxy"]["sysctls"] == {"net.ipv4.tcp_early_retrans": "0"}


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


DOCKER = """
case "$1 $2" in
"info --format") echo true ;;
"secret ls") [ ! -e "sets/${5#name=}" ] || echo there ;;
"secret create") cp "$4" "sets/$3" && chmod 0600 "sets/$3" ;;
run*) while [ "$1" != sh ]; do [ "$1" != -e ] || export "$2"; shift; done; rm -rf nodes; exec "$@" ;;
esac
"""
"""Engine that keeps secrets in a folder, and runs here what it is to run in a container."""


class SwarmSecrets:
    """deploy/swarm/secrets.sh, with folders of its own in place of volumes and containers."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._inner = folder, Secrets(folder)
        self._inner.program("docker", DOCKER)
        self._inner.program("python", f'exec {sys.executable} "$@"')
        (folder / "sets").mkdir()
        here = str(folder).lstrip("/")
        text = (SWARM / "secrets.sh").read_text().replace("/etc/trefoil/secrets.sh", f"sh {self._inner.script}")
        text = re.sub(r"\btmp/(nodes|export)", rf"{here}/\1", text.replace("run/trefoil", f"{here}/run/trefoil"))
        (folder / "swarm.sh").write_text(text)

    def __call__(self, number: int, rotate: str) -> str:
        """What it says where it refuses; else a set of this number is there."""
        given = {"TREFOIL_SECRETS": f"{number}", "TREFOIL_ROTATE": rotate}
        argv = ["sh", str(self.folder / "swarm.sh"), "10.0.0.11", "node-b"]
        environment = self._inner.environment | given
        done = subprocess.run(argv, cwd=self.folder, env=environment, capture_output=True, text=True)
        assert (f"set {number} of secrets" in done.stdout) == (done.returncode == 0), done.stderr
        return done.stderr if done.returncode else ""

    def keys(self, number: int) -> dict[str, PlanKeys]:
        """Plan keys of a set, by who reads them."""
        sets, node = self.folder / "sets", self.folder / f"node-{number}"
        node.mkdir(exist_ok=True)
        for archive in (sets / f"trefoil_nodes_{number}", node / "node-b.tar"):
            subprocess.run(["tar", "-xf", archive, "-C", node], check=True)
        return {
            "controller": PlanKeys.read("c", sets / f"trefoil_plan.key_{number}"),
            "dispatcher": PlanKeys.read("c", sets / f"trefoil_routes.key_{number}", routes=True),
            "agent": PlanKeys.read("c", node / "plan.key"),
        }


@pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl on PATH")
def test_a_plan_key_is_replaced_in_three_sets_each_of_which_works_with_the_one_before(tmp_path):
    """The Swarm replaces services one after the other: those of two sets talk to each other."""
    swarm, plan, node = SwarmSecrets(tmp_path), Plan(revision=Revision(1, 2, 3)), NodePlan("node-b")
    for number, step in enumerate(("", "plan.key begin", "plan.key switch", "plan.key end"), 1):
        assert swarm(number, step) == ""
    for pair in pairwise(swarm.keys(number) for number in (1, 2, 3, 4)):
        for signing, verifying in (pair, pair[::-1]):
            assert verifying["agent"].verify(signing["controller"].sign(node)) == node
            assert verifying["dispatcher"].verify_routes(signing["controller"].sign_routes(plan)) == plan
    assert swarm.keys(1)["controller"].signing != swarm.keys(4)["controller"].signing
    assert "TREFOIL_SECRETS = '4': that set is there. Remedy: TREFOIL_SECRETS=5" in swarm(4, "plan.key begin")
    assert "the file has 1 lines. Remedy: begin where it has one" in swarm(5, "plan.key switch")
    assert not list(tmp_path.glob("sets/*_5"))
