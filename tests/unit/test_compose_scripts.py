"""deploy/compose: certificates that are renewed, backups that are checked, tags that are rolled out."""

import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import redis
import yaml

from benchmarks.compose_engine import dropped_forwarding
from tests.support.ports import free_ports
from trefoil.core.common import Revision
from trefoil.core.errors import PlanError
from trefoil.core.plan import NodePlan, Plan
from trefoil.runtime.security.plan_keys import PlanKeys

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "deploy/compose"
READ = ("authority", "controller", "dispatcher", "agent", "redis", "haproxy", "grafana", "redis_exporter")
KEPT = ("redis", "controller", "carbon_feed")
RULES = yaml.safe_load((ROOT / "deploy/prometheus/rules/alerts.yml").read_text())["groups"]
SAVED = ("rdb_last_bgsave", "aof_last_write", "aof_last_bgrewrite")
FOLDERS = ["run/trefoil", *(f"run/trefoil-{name}" for name in READ), *(f"var/lib/trefoil-{name}" for name in KEPT)]

pytestmark = pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl on PATH")


def until(check: Callable[[], bool]) -> None:
    """Poll for a minute."""
    until_s = time.monotonic() + 60.0
    while not check():
        assert time.monotonic() < until_s
        time.sleep(0.1)


class Secrets:
    """The script of the service `secrets`, with folders of its own in place of the container's."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.script = folder, folder / "secrets.sh"
        self.environment = os.environ | {"PATH": f"{folder}/bin:{os.environ['PATH']}", "TREFOIL_NODE": "node0"}
        (folder / "bin").mkdir(parents=True)
        self.program("python", "echo routes")  # which derives the key of routes
        for name in FOLDERS:
            (folder / name).mkdir(parents=True)
        self.write(365)

    def program(self, name: str, text: str) -> None:
        """Put a script of this name before all others on PATH."""
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def write(self, days: int) -> None:
        text = (COMPOSE / "secrets.sh").read_text().replace("DAYS=365", f"DAYS={days}")
        text = text.replace("=/run/trefoil", f"={self.folder}/run/trefoil").replace("tar -C /", f"tar -C {self.folder}")
        text = text.replace("unpack / &&", f"unpack {self.folder} &&").replace("check / ;;", f"check {self.folder} ;;")
        text = text.replace("/tmp/export", f"{self.folder}/export")
        self.script.write_text(text.replace("/tmp/backup", f"{self.folder}/unpacked"))

    def __call__(self, *words: str, given: bytes = b"", code: int = 0) -> bytes:
        argv = ["sh", str(self.script), *words]
        done = subprocess.run(argv, env=self.environment, input=given, capture_output=True)
        assert done.returncode == code, done.stderr.decode()
        return done.stdout if code == 0 else done.stderr

    def read(self, name: str) -> str:
        return (self.folder / name).read_text()


PAIRS = [
    "run/trefoil/tls.crt",
    "run/trefoil-redis/tls.crt",
    "run/trefoil-agent/tls.crt",
    "run/trefoil-agent/tritons.crt",
]


def test_certificates_are_renewed_in_their_last_30_days_and_not_before(tmp_path):
    secrets = Secrets(tmp_path)
    secrets("make")
    first = {name: secrets.read(name) for name in [*PAIRS, "run/trefoil/token", "run/trefoil-redis/password"]}
    secrets("make")
    assert {name: secrets.read(name) for name in first} == first
    secrets.write(29)
    for name in PAIRS:
        (tmp_path / name).with_suffix(".names").write_text("others")
    secrets("make")
    short = {name: secrets.read(name) for name in PAIRS}
    assert not set(short.values()) & set(first.values())
    secrets.write(365)
    more = {"TREFOIL_RENEW_S": "3600"}
    renewing = subprocess.Popen(["sh", str(secrets.script), "renew"], env=secrets.environment | more)
    try:
        until(lambda: all(secrets.read(name) != short[name] for name in PAIRS))
        assert renewing.poll() is None, "it goes on looking"
    finally:
        renewing.terminate()
    assert renewing.wait(10) == 0
    assert secrets.read("run/trefoil/token") == first["run/trefoil/token"]


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="no redis-server on PATH: of Debian, with TLS")
def test_redis_takes_a_renewed_certificate_and_a_new_password_without_a_restart(tmp_path):
    secrets, [port] = Secrets(tmp_path), free_ports(1)
    secrets("make")
    own = tmp_path / "run/trefoil-redis"
    for name in ("redis.sh", "redis.conf"):
        text = (COMPOSE / name).read_text().replace("/run/trefoil/", f"{own}/").replace("6379", str(port))
        text = text.replace("/etc/trefoil", str(tmp_path)).replace("/var/lib", f"{tmp_path}/var/lib")
        (tmp_path / name).write_text(text.replace("redis-cli -e", f"redis-cli -e -p {port}"))
    context = ssl.create_default_context(cafile=str(own / "ca.crt"))
    context.load_cert_chain(own / "tls.crt", own / "tls.key")

    def shown() -> str:
        try:
            with (
                socket.create_connection(("127.0.0.1", port)) as plain,
                context.wrap_socket(plain, server_hostname="localhost") as connection,
            ):
                return ssl.DER_cert_to_PEM_cert(connection.getpeercert(binary_form=True) or b"").strip()
        except ConnectionRefusedError:
            return ""

    passwords = [secrets.read("run/trefoil-redis/password").strip()]

    def let_in() -> set[str]:
        """Passwords that Redis accepts, of all that there were."""
        found = set()
        for password in passwords:
            with (
                socket.create_connection(("127.0.0.1", port)) as plain,
                context.wrap_socket(plain, server_hostname="localhost") as connection,
            ):
                connection.sendall(f"AUTH {password}\r\n".encode())
                if connection.recv(100).startswith(b"+OK"):
                    found.add(password)
        return found

    redis = subprocess.Popen(["sh", str(tmp_path / "redis.sh")], env=os.environ | {"TREFOIL_LOOK_S": "0.2"})
    try:
        until(lambda: shown() == (own / "tls.crt").read_text().strip())
        was = shown()
        (own / "tls.names").write_text("others")
        secrets("make")
        until(lambda: shown() == (own / "tls.crt").read_text().strip() != was)
        for step in ("begin", "switch", "end"):
            secrets("rotate", "redis_password", step)
            passwords += secrets.read("run/trefoil-redis/password").split()
            in_url = urlsplit(secrets.read("run/trefoil/redis_url")).password
            assert in_url == secrets.read("run/trefoil-agent/redis_url").split(":")[2].split("@")[0]
            until(lambda: let_in() == set(secrets.read("run/trefoil-redis/password").split()))
            assert in_url == secrets.read("run/trefoil-redis/password").split()[0]
        old, new = dict.fromkeys(passwords)
        assert passwords == [old, old, new, new, old, new]
        assert redis.poll() is None
    finally:
        redis.terminate()
        redis.wait(20)


EXPORTER = shutil.which("prometheus-redis-exporter")


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="no redis-server on PATH: of Debian, with TLS")
@pytest.mark.skipif(EXPORTER is None, reason="no prometheus-redis-exporter on PATH")
def test_the_exporter_reads_redis_metrics_and_its_user_may_do_nothing_else(tmp_path):
    secrets, [port, page] = Secrets(tmp_path), free_ports(2)
    secrets("make")
    own, its = tmp_path / "run/trefoil-redis", tmp_path / "run/trefoil-redis_exporter"
    text = (COMPOSE / "redis.conf").read_text().replace("/run/trefoil/", f"{own}/").replace("6379", str(port))
    text = text.replace("/var/lib", f"{tmp_path}/var/lib").replace("/etc/trefoil.d", str(tmp_path / "none"))
    (tmp_path / "redis.conf").write_text(text)
    passwords = its / "passwords.json"
    passwords.write_text(passwords.read_text().replace("redis:6379", f"127.0.0.1:{port}"))
    command = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["redis_exporter"]["command"]
    said = [word.replace("/run/trefoil/", f"{its}/").replace("redis:6379", f"127.0.0.1:{port}") for word in command]
    processes = [
        subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for argv in (
            ["redis-server", str(tmp_path / "redis.conf")],
            [str(EXPORTER), *said, f"-web.listen-address=127.0.0.1:{page}"],
        )
    ]
    found: dict[str, float] = {}

    def up() -> bool:
        try:
            text = httpx.get(f"http://127.0.0.1:{page}/metrics", trust_env=False).text
        except httpx.TransportError:
            return False
        rows = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("redis_") and "{" not in line]
        found.update({name: float(value) for name, value in rows})
        return found["redis_up"] == 1

    try:
        until(up)
        asked = {name for group in RULES for rule in group["rules"] for name in re.findall(r"redis_\w+", rule["expr"])}
        assert len(asked) > 6
        assert asked <= found.keys()
        assert found["redis_memory_max_bytes"] == 768 * 2**20
        assert min(found[f"redis_{name}_status"] for name in SAVED) == 1
        tls = {"ssl_ca_certs": own / "ca.crt", "ssl_certfile": its / "tls.crt", "ssl_keyfile": its / "tls.key"}
        password = json.loads(passwords.read_text())[f"rediss://127.0.0.1:{port}"]
        with redis.Redis(port=port, ssl=True, username="metrics", password=password, **tls) as client:
            assert client.info("memory")["maxmemory_policy"] == "noeviction"
            for words in (
                "GET a",
                "SET a b",
                "KEYS *",
                "CONFIG GET *",
                "ACL LIST",
                "CLIENT LIST",
                "SLOWLOG GET",
                "EVAL 1 0",
            ):
                with pytest.raises(redis.exceptions.NoPermissionError):
                    client.execute_command(*words.split())
    finally:
        for process in processes:
            process.terminate()
            process.wait(20)


def test_a_backup_is_checked_and_restores_every_file(tmp_path):
    secrets = Secrets(tmp_path / "first")
    secrets("make")
    (tmp_path / "first/var/lib/trefoil-controller/objectives").write_text("mine")
    archive = secrets("backup")
    secrets("check", given=archive)
    other = Secrets(tmp_path / "other")
    other("restore", given=archive)
    for path in (tmp_path / "first").rglob("*"):
        name = path.relative_to(tmp_path / "first")
        if path.is_file() and name.parts[0] in ("run", "var"):
            assert (tmp_path / "other" / name).read_bytes() == path.read_bytes()
            assert (tmp_path / "other" / name).stat().st_mode == path.stat().st_mode
    assert b"there is a deployment already" in other("restore", given=archive, code=2)


def test_a_token_is_replaced_in_three_steps_each_of_which_all_readers_have(tmp_path):
    secrets, read = Secrets(tmp_path), []
    secrets("make")
    for step in ("begin", "switch", "end"):
        secrets("rotate", "token", step)
        read.append(secrets.read("run/trefoil/token").split())
        assert secrets.read("run/trefoil-agent/token") == secrets.read("run/trefoil/token")
    begin, switch, end = read
    assert (len(begin), switch, end) == (2, begin[::-1], begin[1:])
    for words, why in (
        (("token", "switch"), "the file has 1 lines. Remedy: begin"), (("tokens", "begin"), "no such secret"),
        (("token",), "not SECRET STEP"),
    ):  # fmt: skip
        assert why in secrets("rotate", *words, code=2).decode()
    assert secrets.read("run/trefoil/token").split() == end


def test_running_services_follow_the_plan_key_through_its_three_steps(tmp_path):
    """Each reads its own mounted file; what the controller signs, agent and dispatcher accept after each step."""
    secrets = Secrets(tmp_path)
    secrets.program("python", f'exec {sys.executable} "$@"')
    secrets("make")
    run, plan, signed_by = tmp_path / "run", Plan(revision=Revision(1, 2, 3)), []
    controller, agent = (PlanKeys.read("c", run / f"trefoil-{name}/plan.key") for name in ("controller", "agent"))
    dispatcher = PlanKeys.read("c", run / "trefoil-dispatcher/routes.key", routes=True)
    for step in ("", "begin", "switch", "end"):
        if step:
            secrets("rotate", "plan.key", step)
        assert agent.verify(controller.sign(NodePlan("node0"))) == NodePlan("node0")
        assert dispatcher.verify_routes(controller.sign_routes(plan)) == plan
        signed_by.append(controller.signing)
    old, new = dict.fromkeys(signed_by)
    assert signed_by == [old, old, new, new]
    with pytest.raises(PlanError, match="signed with a key that is not"):
        agent.verify(PlanKeys("c", ["ab" * 32]).sign(NodePlan("node0")))


def test_no_other_base_than_debians_is_made_under_a_name_that_cannot_be_pulled(tmp_path):
    (tmp_path / "docker").write_text("#!/bin/sh\nexit 1\n")  # which has no image, and pulls none
    (tmp_path / "docker").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "BASE": "ubuntu:24.04"}
    argv = [ROOT / "deploy/images/build.sh"]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60)
    why = "error: BASE = ubuntu:24.04: cannot be pulled, and only debian:bookworm-slim is made here. Remedy: load it"
    assert (done.returncode, done.stderr.startswith(why)) == (1, True), done.stderr


@pytest.mark.parametrize("spoil", ["cut", "key", "empty"])
def test_a_backup_that_is_not_whole_is_refused(tmp_path, spoil):
    secrets = Secrets(tmp_path / "first")
    secrets("make")
    if spoil == "key":
        key = tmp_path / "first/run/trefoil-authority/ca.key"
        subprocess.run(
            ["openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", key], check=True
        )
    if spoil == "empty":
        (tmp_path / "first/run/trefoil/token").write_text("")
    archive = secrets("backup")
    error = secrets("check", given=archive[: len(archive) // 2] if spoil == "cut" else archive, code=2).decode()
    assert "error: backup = " in error
    assert ". Remedy: " in error


ENGINE = """#!/bin/sh
echo "$*" >> "$LOG"
case "$*" in
*"ps --services"*) printf '%s\\n' $RUNNING ;;
*"ps -q"*) echo id ;;
*"inspect -f"*) case "$(cat "$HEALTH")" in "") echo healthy ;; *) echo starting ;; esac ;;
*"image inspect"*) case "$*" in *missing*) exit 1 ;; esac ;;
*pull*) exit 1 ;;
esac
"""
ALL = "dispatcher_1 dispatcher_2 controller carbon_feed renewal agent node node_network redis haproxy prometheus"


class Upgrade:
    """The script that upgrades, on a checkout and a separate engine that writes down what is asked."""

    def __init__(self, folder: Path, running: str) -> None:
        self.folder, self.running = folder, running
        tags = folder / "deploy/compose/tags"
        shutil.copytree(COMPOSE, tags.parent, ignore=shutil.ignore_patterns("*.comes-by-upgrade.sh"))
        shutil.copy(COMPOSE / "tags/latest.comes-by-upgrade.sh", tags)  # and none that a deployment here has rolled out
        for name in ("docker", "log", "health"):
            (folder / name).write_text(ENGINE if name == "docker" else "")
        (folder / "docker").chmod(0o755)

    def __call__(self, tag: str, code: int = 0) -> str:
        environment = {"PATH": f"{self.folder}:{os.environ['PATH']}", "RUNNING": self.running, "TREFOIL_HEALTHY_S": "2",
                       "LOG": str(self.folder / "log"), "HEALTH": str(self.folder / "health")}  # fmt: skip
        argv = [str(self.folder / "deploy/compose/upgrade.sh"), tag]
        done = subprocess.run(argv, env=environment, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        return done.stderr

    @property
    def asked(self) -> list[str]:
        return [
            line.partition(".env ")[2] for line in (self.folder / "log").read_text().splitlines() if ".env " in line
        ]

    @property
    def marks(self) -> set[str]:
        return {
            path.name.removesuffix(".comes-by-upgrade.sh")
            for path in (self.folder / "deploy/compose/tags").glob("*.sh")
        }


def test_an_upgrade_goes_one_after_the_other_and_leaves_the_tag_for_the_next_up(tmp_path):
    upgrade = Upgrade(tmp_path, ALL)
    (tmp_path / ".env").write_text("TREFOIL_ZONE=GB\nTREFOIL_TAG=1.2\n")
    upgrade("1.3")
    replaced = [line.split("--no-deps ")[1] for line in upgrade.asked if line.startswith("up -d --no-deps")]
    assert replaced == ["dispatcher_1", "dispatcher_2", "controller", "carbon_feed", "renewal", "agent", "node"]
    drained = [line.rpartition("localhost:8103 ")[2] for line in upgrade.asked if "node drain" in line]
    assert drained == ["--patience 5 --wait 120", "--release"]
    assert not any("redis" in line or "haproxy" in line for line in replaced), "they are not of this tag"
    assert (tmp_path / ".env").read_text() == "TREFOIL_ZONE=GB\nTREFOIL_TAG=1.3\n"
    assert upgrade.marks == {"1.3"}, "latest, which a first `up` may start, is refused from now on"
    upgrade("1.4")
    assert upgrade.marks == {"1.4"}, "the tag before is refused by `up`, too"


def test_an_upgrade_stops_at_the_first_that_is_not_healthy(tmp_path):
    upgrade = Upgrade(tmp_path, ALL)
    (tmp_path / "health").write_text("no")
    error = upgrade("1.3", code=2)
    assert "error: dispatcher_1 = '1.3': not healthy after 2 s" in error
    assert [line for line in upgrade.asked if line.startswith("up")] == ["up -d --no-deps dispatcher_1"]
    assert (tmp_path / ".env").read_text() == ""
    assert upgrade.marks == {"latest"}


@pytest.mark.parametrize(
    ("tag", "why"),
    [
        ("missing", "no image trefoil:missing here"),
        ("a b", "no tag of an image"),
        ("latest", "error: TAG = 'latest': a tag that moves"),
        ("Main", "Remedy: name this build: docker tag trefoil:Main trefoil:1.3"),
    ],
)
def test_an_upgrade_to_what_is_no_tag_touches_nothing(tmp_path, tag, why):
    upgrade = Upgrade(tmp_path, ALL)
    assert why in upgrade(tag, code=2)
    assert upgrade.asked == []
    assert upgrade.marks == {"latest"}


def test_the_first_upgrade_starts_everything(tmp_path):
    upgrade = Upgrade(tmp_path, "")
    upgrade("1.3")
    assert [line for line in upgrade.asked if line.startswith("up")] == ["up -d"]
    assert (tmp_path / ".env").read_text() == "TREFOIL_TAG=1.3\n"


@pytest.mark.parametrize(
    ("rules", "dropped_by"),
    [
        ("-P FORWARD ACCEPT\n", ""),
        ("-P FORWARD DROP\n", "-P FORWARD DROP"),
        ("-P FORWARD DROP\n-A FORWARD -j ACCEPT\n", ""),
        ("-P FORWARD DROP\n-A FORWARD -i docker0 -o docker0 -j ACCEPT\n", "-P FORWARD DROP"),
        ("-P FORWARD DROP\n-A FORWARD -j DOCKER-USER\n-A FORWARD -j DOCKER-FORWARD\n", "-P FORWARD DROP"),
        ("-P FORWARD ACCEPT\n-A FORWARD -j REJECT --reject-with icmp-host-prohibited\n", "-A FORWARD -j REJECT"),
        ("-P FORWARD ACCEPT\n-A FORWARD -j ACCEPT\n-A FORWARD -j DROP\n", ""),
        ("", ""),
    ],
)
def test_a_host_that_drops_what_containers_send_is_told_with_the_remedy(rules, dropped_by):
    """By what `iptables -S FORWARD` prints."""
    said = dropped_forwarding(rules)
    assert dropped_by in said
    assert bool(said) == bool(dropped_by)
    assert not said or "Remedy: iptables -P FORWARD ACCEPT" in said
