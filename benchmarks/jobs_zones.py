"""Requests and a job over two zones, while the link between them is cut: `make e2e-jobs-zones`. As root, on Linux.

Two network namespaces are two zones, each a whole Trefoil: Redis, carbon feed, controller, dispatcher, power agent, a
simulated GPU and real Tritons. Each zone has its own certificate authority; home gets a client certificate, a read
token and a tenant's token of the far zone. Power is cleaner there, so the planner sends items there. The link is cut
for longer than a peer may be silent, then healed. Each item's answer is compared with onnxruntime's own for the variant
that gave it. Before that, home's requests go to the far zone, where they emit less, while the link is cut for some
seconds. Prints what was seen; exit code 1 where an item is missing, twice or wrong, or a request failed or is wrong.
"""

import asyncio
import hashlib
import os
import secrets
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

from benchmarks.hosts import CLOCK, MODELS, OBJECTIVE, PORT_BASE, ROOT, UID_BASE, UIDS, Broken, need, poll_until
from benchmarks.hosts_machines import OUTSIDE, Authority, Host, Machines, play_in_a_namespace, run, write_settings
from dispatcher.jobs.zones import LOST_S
from tests.support.triton_process import expected, heldout
from tests.unit.dispatcher.worlds import VERSIONS
from trefoil.api.jobs import Jobs, JobStatus
from trefoil.cli.run.services import redis_binary
from trefoil.cli.run.state_directory import write_private
from trefoil.core.errors import TrefoilError
from trefoil.runtime.security.tls import Tls

REDIS, FEED, CONTROLLER, AGENT, DISPATCHER, FRONT = 6379, 8101, 8102, 8103, 8104, 8001
HOME, FAR = "HOME", "FAR"
INTENSITY: Final = {HOME: 400.0, FAR: 50.0}
ITEMS: Final = int(os.environ.get("ITEMS", "12000"))
CUT_S: Final = LOST_S + 15.0
REQUESTS_CUT_S: Final = 8.0
CLIENTS: Final = 4
PATIENCE_S: Final = 600.0  # of one event: two cores that others use, too
DEMAND: Final = {"digits": {"rate_per_s": 20.0}}
Say = Callable[[str], None]


class Site:
    """One zone on one host, with an operator's folder."""

    def __init__(self, machines: Machines, host: Host, folder: Path) -> None:
        self.machines, self.host, self.zone = machines, host, host.name
        self.authority = Authority(folder / f"ca-{host.name}", host.name)
        self.token, self.read_token, self.jobs_token = (secrets.token_hex(32) for _ in range(3))
        self.desk = folder / f"operator-{host.name}"
        self.desk.mkdir()
        self.authority.issue(self.desk, "operator", OUTSIDE, usage="clientAuth")
        self.authority.issue(host.folder, host.name, host.address)
        self.authority.issue(host.folder, f"tritons.{host.name}", host.address, "tritons", "serverAuth")
        shutil.copy(self.authority.certificate, host.folder)
        write_private(host.folder / "token", self.token)
        write_private(host.folder / "read_token", self.read_token)

    def invite(self, other: Host, port: int, token: str) -> dict[str, Any]:
        """What this zone's operator gives to another zone, as its `[[other_zones]]`."""
        folder = other.folder / f"peer-{port}"
        folder.mkdir()
        self.authority.issue(folder, "peer", other.address, usage="clientAuth")
        shutil.copy(self.authority.certificate, folder)
        write_private(folder / "token", token)
        return {
            "zone": self.zone, "address": f"{self.host.address}:{port}", "token_file": folder / "token",
            "tls_certificate": folder / "tls.crt", "tls_key": folder / "tls.key", "tls_ca": folder / "ca.crt",
        }  # fmt: skip

    def start(self, controllers: list[dict[str, Any]], dispatchers: list[dict[str, Any]]) -> None:
        """Start all services; `controllers`, `dispatchers`: other zones as each service has them."""
        host = self.host
        lines = [f"bind {host.address} 127.0.0.1", f"port {REDIS}", f"dir {host.folder}", "appendonly no", 'save ""']
        write_private(host.folder / "redis.conf", "\n".join([*lines, "protected-mode no", "daemonize no", ""]))
        self.machines.start(host, "redis", (str(redis_binary()), str(host.folder / "redis.conf")))
        node = write_settings(host, "node", {"devices": ["A100-SXM4-40GB"], "model_repository": MODELS})
        argv = [sys.executable, "-m", "trefoil.simulated_node", "--node", host.name, "--socket"]
        self.machines.start(host, "node", (*argv, str(host.folder / "node.sock"), "--config", str(node)))
        number = list(INTENSITY).index(self.zone)
        self._service(
            "power_agent", AGENT, node=host.name, zone=self.zone, model_repository=MODELS,
            node_socket=host.folder / "node.sock", triton_environment=ROOT / ".venv-triton",
            advertise_host=host.address, triton_listen=host.address, triton_port_base=PORT_BASE,
            triton_uid_base=UID_BASE + UIDS * number, triton_tls_certificate=host.folder / "tritons.crt",
            triton_tls_key=host.folder / "tritons.key",
        )  # fmt: skip
        constant = {"intensity_g_per_kwh": INTENSITY[self.zone]}
        self._service("carbon_feed", FEED, provider="constant", zone=self.zone, constant=constant)
        self._service(
            "controller", CONTROLLER, policy="exact", mode="act", model_repository=MODELS, node_stale_s=60.0,
            carbon={"zone": self.zone}, causes=[], demand_fixed=DEMAND, objectives=[OBJECTIVE],
            read_token_file=host.folder / "read_token", other_zones=controllers,
        )  # fmt: skip
        tenant = {"name": "home", "roles": ["jobs", "infer"], "token_sha256": _sha256(self.jobs_token)}
        operator = {"name": "operator", "roles": ["admin", "infer"], "token_sha256": _sha256(self.read_token)}
        self._service(
            "dispatcher", DISPATCHER, inference_address=f"{host.address}:{FRONT}", other_zones=dispatchers,
            tenants_file=write_settings(host, "tenants", {"tenant": [tenant, operator]}), node_stale_s=60.0,
        )  # fmt: skip

    def _service(self, name: str, port: int, **settings: Any) -> None:
        host = self.host
        common = {
            "cluster": self.zone, "redis_url": f"redis://127.0.0.1:{REDIS}/0", "state_dir": host.folder / name,
            "admin_address": f"{host.address}:{port}", "metrics_address": "", "token_file": host.folder / "token",
            "tls_ca": host.folder / "ca.crt", "tls_certificate": host.folder / "tls.crt",
            "tls_key": host.folder / "tls.key",
        }  # fmt: skip
        path = write_settings(host, name, common | settings)
        self.machines.start(host, name, (sys.executable, "-m", name, "--config", str(path)))

    def jobs(self) -> Jobs:
        """The operator's client of the dispatcher."""
        tls = Tls(self.desk / "tls.crt", self.desk / "tls.key", self.authority.certificate, serves=False)
        return Jobs.connect(f"{self.host.address}:{DISPATCHER}", token=self.token, tls=tls)

    def front(self) -> triton.InferenceServerClient:
        """The operator's client of the inference port."""
        return triton.InferenceServerClient(
            f"{self.host.address}:{FRONT}", ssl=True, root_certificates=str(self.authority.certificate)
        )

    def check_alive(self) -> None:
        """Raise Broken if a service has ended."""
        for name, process in self.host.processes.items():
            need(process.exit_code is None, f"{name} of {self.zone} ended: {process.last_error()}")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def set_link(host: Host, state: str) -> None:
    """Set the link of a host up or down."""
    run("ip", "link", "set", f"port{host.address.rpartition('.')[2]}", state)


async def job_until(sites: list[Site], jobs: Jobs, what: str, holds: Callable[[JobStatus], bool]) -> JobStatus:
    """Poll the job until something holds of its status."""

    async def check() -> JobStatus | None:
        status = await asyncio.to_thread(jobs.get, "corpus")
        return status if holds(status) or status.ended else None

    def look() -> None:
        for site in sites:
            site.check_alive()

    return await poll_until(what, check, PATIENCE_S, 0.2, look=look)


def shares(status: JobStatus) -> str:
    """Where a job's items are, in words."""
    there = ", ".join(f"{one.answered} by {one.zone}, {one.away} there now" for one in status.zones) or "none elsewhere"
    return f"{status.answered} of {status.items} answered: {there}"


async def submitted(home: Site, jobs: Jobs) -> JobStatus:
    """Submit the job as soon as home serves the family."""
    images, _ = heldout()
    given = {"IMAGE": images[np.arange(ITEMS) % len(images)]}
    by_s = CLOCK.now_s() + 6 * 3600

    async def submit() -> JobStatus:
        def ask() -> JobStatus:
            zones = (HOME, FAR)
            return jobs.submit("digits", given, complete_by_s=by_s, id="corpus", tenant="operator", zones=zones)

        return await asyncio.to_thread(ask)

    return await poll_until("home takes the job", submit, PATIENCE_S, 2.0, look=home.check_alive)


async def far_serves(far: Site) -> None:
    """Wait until the far zone serves the family: it takes a separate job."""
    images, _ = heldout()
    jobs = far.jobs()

    async def submit() -> bool:
        def ask() -> bool:
            given, by_s = {"IMAGE": images[:8]}, CLOCK.now_s() + 600
            jobs.submit("digits", given, complete_by_s=by_s, id="first", tenant="operator")
            return jobs.get("first").ended

        return await asyncio.to_thread(ask)

    try:
        await poll_until("the far zone answers a job", submit, PATIENCE_S, 2.0, look=far.check_alive)
    finally:
        jobs.close()


class Requests:
    """Requests of home's clients: zones of their answers, how many failed and how many are wrong."""

    def __init__(self, home: Site, answers: dict[str, np.ndarray]) -> None:
        self._client, self._headers = home.front(), {"authorization": f"Bearer {home.read_token}"}
        self._answers, self._images = answers, heldout()[0]
        self.zones: Counter[str] = Counter()
        self.failed: list[str] = []
        self.wrong = 0

    async def ask(self, number: int) -> str:
        """Zone of an answer; empty: it failed."""
        at = number % len(self._images)
        image = triton.InferInput("IMAGE", [1, 8, 8], "UINT8")
        image.set_data_from_numpy(self._images[at : at + 1])
        try:
            answer = await self._client.infer("digits", [image], headers=self._headers)
        except InferenceServerException as error:
            self.failed.append(str(error))
            return ""
        told = answer.get_response().parameters
        expected_values = self._answers[told["trefoil_variant"].string_param][at]
        self.wrong += not np.allclose(answer.as_numpy("PROBABILITIES")[0], expected_values, atol=1e-5)
        zone = told["trefoil_zone"].string_param if "trefoil_zone" in told else HOME
        self.zones[zone] += 1
        return zone

    async def until_far(self, sites: list[Site]) -> None:
        """Ask until the far zone answers; what failed by then is forgotten."""

        async def far() -> bool:
            return await self.ask(0) == FAR

        def look() -> None:
            for site in sites:
                site.check_alive()

        await poll_until("the far zone answers a request", far, PATIENCE_S, 0.5, look=look)
        self.failed.clear()
        self.zones.clear()

    async def close(self) -> None:
        """Close the connection."""
        await self._client.close()


async def requests_over_a_cut_link(home: Site, far: Site, answers: dict[str, np.ndarray], say: Say) -> None:
    """Requests while the link is cut and healed. Raises Broken: one failed or is wrong, or one zone answered none."""
    requests, sites = Requests(home, answers), [home, far]
    try:
        await requests.until_far(sites)
        say("the far zone answers home's requests")
        ends_s = CLOCK.monotonic_s() + 3 * REQUESTS_CUT_S

        async def client(number: int) -> None:
            while CLOCK.monotonic_s() < ends_s:
                number += CLIENTS
                await requests.ask(number)

        clients = [asyncio.create_task(client(number)) for number in range(CLIENTS)]
        await CLOCK.sleep(REQUESTS_CUT_S)
        set_link(far.host, "down")
        await CLOCK.sleep(REQUESTS_CUT_S)
        set_link(far.host, "up")
        await asyncio.gather(*clients)
        say(
            f"the link was cut for {REQUESTS_CUT_S:g} s: {dict(requests.zones)} answered, {len(requests.failed)} failed"
        )
        need(not requests.failed, f"{len(requests.failed)} requests failed, e.g. {requests.failed[:1]}")
        need(not requests.wrong, f"{requests.wrong} answers are wrong")
        need(bool(requests.zones[FAR] and requests.zones[HOME]), f"only one zone answered: {dict(requests.zones)}")
        await requests.until_far(sites)
        say("the link is healed: the far zone answers again")
    finally:
        await requests.close()


def check_results(answers: dict[str, np.ndarray], jobs: Jobs) -> tuple[Counter[str], int]:
    """Items by zone, and how many answers are wrong. Raises Broken: one is missing, twice or an error."""
    results = list(jobs.results("corpus"))
    times = Counter(one.item for one in results)
    need(len(times) == ITEMS, f"{ITEMS - len(times)} items have no result")
    need(max(times.values()) == 1, f"{sum(n > 1 for n in times.values())} items have two results")
    errors = [one for one in results if one.answer is None]
    need(not errors, f"{len(errors)} items failed, e.g. {errors[:1]}")
    wrong = 0
    for one in results:
        assert one.answer is not None
        values = answers[one.answer.variant]
        wrong += not np.allclose(one.answer.outputs["PROBABILITIES"][0], values[one.item % len(values)], atol=1e-5)
    return Counter(one.zone or HOME for one in results), wrong


def clear_text_refused(far: Site, home: Site) -> bool:
    """Whether the far zone's dispatcher refuses a certificate of home's authority."""
    tls = Tls(home.desk / "tls.crt", home.desk / "tls.key", home.authority.certificate, serves=False)
    stranger = Jobs.connect(f"{far.host.address}:{DISPATCHER}", token=far.jobs_token, tls=tls)
    try:
        stranger.all()
    except TrefoilError:
        return True
    finally:
        stranger.close()
    return False


async def play(folder: Path) -> bool:
    """Play it; whether all of it held."""
    machines = Machines(folder, f"zones-{os.getpid()}", CLOCK)
    began_s = CLOCK.monotonic_s()

    def say(text: str) -> None:
        print(f"{CLOCK.monotonic_s() - began_s:6.1f} s  {text}", flush=True)

    try:
        home, far = [Site(machines, await machines.add(name), folder) for name in INTENSITY]
        asks = (
            {**far.invite(home.host, CONTROLLER, far.read_token), "families": ["digits"]},
            {
                **far.invite(home.host, DISPATCHER, far.jobs_token),
                "inference_address": f"{far.host.address}:{FRONT}",
            },
        )
        answers = dict(zip(VERSIONS, expected(folder).values(), strict=True))
        far.start([], [])
        home.start([asks[0]], [asks[1]])
        await far_serves(far)
        say("the far zone serves")
        await requests_over_a_cut_link(home, far, answers, say)
        jobs = home.jobs()
        await submitted(home, jobs)
        say(f"a job of {ITEMS} items is submitted at home")
        need(clear_text_refused(far, home), "the far zone takes a certificate of another authority")
        sites = [home, far]
        status = await job_until(sites, jobs, "the far zone answers", lambda one: any(z.answered for z in one.zones))
        say(f"{shares(status)}; prospect: {status.prospect}")
        set_link(far.host, "down")
        say("the link is cut")
        status = await job_until(sites, jobs, "home says so", lambda one: f"zone {FAR}: " in one.why)
        say(f"{shares(status)}; why: {status.why[:120]}")
        await CLOCK.sleep(CUT_S)
        status = await asyncio.to_thread(jobs.get, "corpus")
        say(shares(status))
        need(not status.ended, "the job ended while the link was cut: take more items (ITEMS=...)")
        set_link(far.host, "up")
        say("the link is healed")
        status = await job_until(sites, jobs, "the job ends", lambda one: one.ended)
        say(f"{status.state}: {shares(status)}; {status.joules:.1f} J, {status.grams:.4f} g")
        need((status.state, status.answered) == ("done", ITEMS), f"{status.state}: {status.why}")
        by_zone, wrong = await asyncio.to_thread(check_results, answers, jobs)
        need(not wrong, f"{wrong} answers are wrong")
        need(bool(by_zone[FAR] and by_zone[HOME]), f"only one zone answered: {dict(by_zone)}")
        say(f"every item once and right: {dict(by_zone)}")
        return True
    except (Broken, subprocess.SubprocessError) as error:
        print(f"BROKEN: {error}")
        return False
    finally:
        await machines.close()


def main() -> int:
    """Play it in a network namespace of its own."""
    return play_in_a_namespace("jobs_zones", (__doc__ or "").splitlines()[0], play)


if __name__ == "__main__":
    sys.exit(main())
