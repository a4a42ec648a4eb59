"""A second host joins a Compose deployment with the same file: `make e2e-join`, or `python -m benchmarks.compose_join`.
As root, on Linux.

Two network namespaces are two hosts, each with a Docker engine of its own. The first brings docker-compose.yml up,
whole; the second its node and agent alone, by the commands of docs/howto/compose.md: `secrets export`, `trefoil deploy
env --profile node`, `secrets import`, `--profile node up`. An unmodified tritonclient asks the first host all the time.
Then examples/admin.py calls every admin service, the second host's agent among them, and the second host is drained and
leaves. Prints what was asked and what was seen; exit code 1 where one does not hold. --images, --keep: as
`benchmarks.cluster`.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Final

from benchmarks.cluster_engines import Engines, play_on_engines
from benchmarks.compose_engine import Compose, Containers, find_compose
from benchmarks.compose_engine import Engine as Answering
from benchmarks.hosts import Broken, Load, load_text, need
from trefoil.runtime.clock import WallClock

CLOCK: Final = WallClock()
ROOT: Final = Path(__file__).resolve().parents[1]
TREFOIL: Final = Path(sys.executable).parent / "trefoil"
FIRST, SECOND, NODE = "first", "second", "gpu8"
FRONT: Final = 8001
RATE_PER_S: Final = 20.0
SETTLE_ANSWERS: Final = 200
STEPS: Final = ("objective", "plan", "report", "freeze", "pin", "rollback", "drain", "clocks", "carbon")
OTHERS_COME_IN: Final = {
    "TREFOIL_REDIS_BIND": "0.0.0.0",
    "TREFOIL_NODE_BIND": "0.0.0.0",
    "TREFOIL_BIND": "0.0.0.0",
    "TREFOIL_TRITON_PORTS": "8200-8231",
}


class Deployments(Engines):
    """Both hosts, and clients beside them."""

    poll_s = 0.5

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "join", CLOCK)
        self.compose: dict[str, Containers] = {}

    async def start(self, archive: Path, compose: Compose) -> None:
        """Start both engines, with the images."""
        await self.start_engines((FIRST, SECOND), archive)
        for name, engine in self.engines.items():
            answering = Answering(engine.url, engine.client, os.environ.get("PATH", os.defpath), "")
            self.compose[name] = Containers(answering, compose, "trefoil", engine.host.folder)
            self.compose[name].env["TREFOIL_TAG"] = "e2e"

    def address(self, name: str) -> str:
        """Address of a host."""
        return self.engines[name].host.address

    async def drain(self, name: str, *words: str) -> None:
        """Take a host's node out of service, or put it back."""
        command = ("exec", "-T", "agent", "trefoil", "node", "drain", "--target", "localhost:8103")
        await asyncio.to_thread(self.compose[name].compose, *command, *words)


class Clients(Load):
    """The clients, a separate process."""

    def __init__(self, site: Deployments) -> None:
        argv = [sys.executable, "-m", "benchmarks.hosts_load", "--target", f"{site.address(FIRST)}:{FRONT}"]
        self._process = site.machines.start_outside("load", [*argv, "--wait-for-ready", "--rate", str(RATE_PER_S)])

    async def more(self, site: Deployments) -> dict[str, Any]:
        """Sums after some more answers.

        Raises:
            Broken: a request failed.
        """
        await self.until(site, self.sums()["answered"] + SETTLE_ANSWERS)  # type: ignore[arg-type]
        sums = self.sums()
        need(not sums["failed"], f"failed: {sums['failed']}")
        return sums

    async def by_node(self, site: Deployments) -> dict[str, int]:
        """Answers by node from now on, 0 failed."""
        before = Counter(self.sums()["slices"])
        now = Counter((await self.more(site))["slices"])
        found: Counter[str] = Counter()
        for name, count in (now - before).items():
            found[name.partition("-")[0]] += count
        return dict(sorted(found.items()))


async def first_up(site: Deployments) -> str:
    """The first host is up, whole, and lets others in."""
    containers = site.compose[FIRST]
    containers.env |= {**OTHERS_COME_IN, "TREFOIL_ADVERTISE_HOST": site.address(FIRST)}
    await asyncio.to_thread(containers.compose, "up", "-d")
    await healthy(site, containers)
    return f"{len(containers.services())} services healthy"


async def healthy(site: Deployments, containers: Containers) -> None:
    """Wait until every service is healthy."""

    async def all_healthy() -> bool:
        return all(containers.health(service) == "healthy" for service in containers.services())

    await site.until("every service is healthy", all_healthy)


async def second_joins(site: Deployments, load: Clients) -> str:
    """The second host joins by the commands of docs/howto/compose.md."""
    began_s = CLOCK.monotonic_s()
    first, second = site.compose[FIRST], site.compose[SECOND]
    host = site.engines[SECOND].host
    export = ("run", "--rm", "-T", "--no-deps", "secrets", "export", NODE, host.address, site.address(FIRST))
    archive = await asyncio.to_thread(first.compose_bytes, *export)
    env_file = host.folder / ".env"
    asked = ["--profile", "node", "--node", NODE, "--advertise-host", host.address, "--output", str(env_file)]
    asked += ["--redis-url", f"rediss://{site.address(FIRST)}:6379", "--set", "TREFOIL_TAG=e2e"]
    argv = (*host.inside, str(TREFOIL), "deploy", "env", *asked)
    done = await asyncio.to_thread(
        subprocess.run, argv, cwd=ROOT, env=second.env, capture_output=True, text=True, check=False
    )
    need(done.returncode == 0, f"trefoil deploy env ended with {done.returncode}: {done.stdout}{done.stderr}")
    second.env_file = env_file
    await asyncio.to_thread(second.compose, "run", "--rm", "-T", "secrets", "import", given=archive)
    await asyncio.to_thread(second.compose, "--profile", "node", "up", "-d")
    need(second.services() == ["agent", "node", "node_network"], f"the second host runs {second.services()}")
    await healthy(site, second)

    async def seen() -> bool:
        told = await asyncio.to_thread(first.compose, "exec", "-T", "controller", "trefoil", "status", "--json")
        return f'"{NODE}/gpu0"' in told

    await site.until(f"the controller sees {NODE}", seen)
    took_s = CLOCK.monotonic_s() - began_s
    await load.more(site)
    return f"node and agent of {NODE} run there, and the controller sees its GPUs after {took_s:.0f} s; 0 failed"


async def work_moves(site: Deployments, load: Clients) -> str:
    """The first host's node is drained: the second one does its work."""
    await site.drain(FIRST, "--patience", "200", "--wait", "300")
    shares = await load.by_node(site)
    need(list(shares) == [NODE], f"answers by node: {shares}")
    await site.drain(FIRST, "--release")
    return f"answers by node {shares}, 0 failed"


async def admin(site: Deployments, load: Clients) -> str:
    """examples/admin.py calls every admin service, of the second host too, with the stubs that are committed."""
    words = ["--controller", "controller:8102", "--feed", "carbon_feed:8101", "--agent", f"{site.address(SECOND)}:8103"]
    for flag, file in {
        "tls-ca": "ca.crt",
        "tls-certificate": "tls.crt",
        "tls-key": "tls.key",
        "token-file": "token",
    }.items():
        words += [f"--{flag}", f"/run/trefoil/{file}"]
    mounts = ["--volume", f"{ROOT / 'examples'}:/examples:ro", "--volume", "trefoil_secrets:/run/trefoil:ro"]
    argv = [
        "run",
        "--rm",
        "--network",
        "trefoil_default",
        *mounts,
        "trefoil:e2e",
        "python",
        "/examples/admin.py",
        *words,
    ]
    told = await asyncio.to_thread(site.engines[FIRST].docker, *argv)
    said = {name: found for line in told.splitlines() for name, found in json.loads(line).items()}
    need(tuple(said) == STEPS, f"its steps were {list(said)}")
    device = said["clocks"]["device"]
    need(device.startswith(f"{NODE}/"), f"clocks were held at {device}")
    await load.more(site)
    return f"{', '.join(said)}; clocks of {device} held at {said['clocks']['mhz']} MHz; 0 failed"


async def second_leaves(site: Deployments, load: Clients) -> str:
    """The second host is drained, its containers go, and the first one serves alone."""
    second = site.compose[SECOND]
    await site.drain(SECOND, "--patience", "200", "--wait", "300")
    await asyncio.to_thread(second.compose, "down", "-v")
    left = second.left()
    need(not left, f"left on the second host: {left}")
    shares = await load.by_node(site)
    need(NODE not in shares, f"{NODE} still answers: {shares}")
    return f"nothing is left there; answers by node {shares}, 0 failed"


async def play(folder: Path, arguments: argparse.Namespace) -> bool:
    """Play all, and print what each showed."""
    began_s, load = CLOCK.monotonic_s(), None

    def say(event: str, asked: str, seen: str) -> None:
        print(f"{CLOCK.monotonic_s() - began_s:6.1f} s  {event:<14} asked: {asked}\n{'':24}seen:  {seen}", flush=True)

    site = Deployments(folder)
    try:
        await site.start(arguments.images, find_compose(""))
        say("up", "the first host is up, whole", await first_up(site))
        load = Clients(site)
        await load.more(site)
        say("join", "node and agent of a second host take part", await second_joins(site, load))
        say("move", "the first node is drained; the second host's Tritons answer", await work_moves(site, load))
        say("admin", "every admin service, of that agent too, by stubs alone", await admin(site, load))
        say("leave", "drained, down -v; 0 failed", await second_leaves(site, load))
        say("all that time", "0 failed", load_text(await load.stop()))
    except Broken as error:
        print(f"BROKEN: {error}")
        for name, containers in site.compose.items():
            (folder / f"{name}.log").write_text(containers.compose("logs", "--no-color"))
        return False
    finally:
        await site.close()
    print("all of it holds")
    return True


def main() -> int:
    """Build the images, and play it in a network namespace of its own."""
    return play_on_engines("compose_join", argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]), play)


if __name__ == "__main__":
    sys.exit(main())
