"""Network of a node's slice containers: a separate bridge, from which they answer and never ask.

A packet filter (deploy/nftables/trefoil.nft) drops every connection that a container opens; whatever loads it, whether
it holds is tried from a container: a filter may be flushed, or never have been there.
"""

import hashlib
import os
import shutil
import socket
from collections.abc import Sequence
from typing import Any, Final

import docker
import docker.errors

from power_agent.runtimes.docker_engine import LABEL, Engine, failure_of, object_name, removed_after, wait_for_exit
from trefoil.core.errors import StartError
from trefoil.installation import SHIPPED

RULES: Final = SHIPPED / "deploy" / "nftables" / "trefoil.nft"
BRIDGE: Final = "trefoil"  # how the names of bridges begin; the rules go by it. At most 15 characters in all
OPTIONS: Final = "com.docker.network.bridge."
SYSTEM_PATH: Final = "/usr/sbin:/usr/bin:/sbin:/bin"
NFT_TIMEOUT_S: Final = 10.0
NOWHERE: Final = "127.0.0.1"  # as name server: a container's own loopback, where nothing answers
ANY_PORT: Final = 1  # who is reached and does not listen refuses, which tells as much
PROBE_S: Final = 1.0
PROBE_START_S: Final = 30.0
REACHED: Final = 10  # exit code for the first target, one more for each after it
REACHED_MAX: Final = 100
# Runs in a container; argv: seconds, then host:port of each target. What it prints might be lost, its exit code is not.
PROBE: Final = f"""
import errno, selectors, socket, sys, time
waiting = selectors.DefaultSelector()
for index, target in enumerate(sys.argv[2:]):
    host, _, port = target.rpartition(":")
    one = socket.socket()
    one.setblocking(False)
    if one.connect_ex((host, int(port))) in (0, errno.ECONNREFUSED):
        sys.exit({REACHED} + index)
    waiting.register(one, selectors.EVENT_WRITE, index)
end_s = time.monotonic() + float(sys.argv[1])
while waiting.get_map() and (left_s := end_s - time.monotonic()) > 0:
    for key, _ in waiting.select(left_s):
        if key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in (0, errno.ECONNREFUSED):
            sys.exit({REACHED} + key.data)
        waiting.unregister(key.fileobj)
"""


class SliceNetwork:
    """Network of one agent's slices. `name`: as the engine knows it. Outlives the agent; the next one takes it."""

    def __init__(self, engine: Engine, cluster: str, node: str) -> None:
        self.name = object_name(cluster, node)
        self._engine = engine
        self._labels = {f"{LABEL}cluster": cluster, f"{LABEL}node": node}
        self._looks = {f"{LABEL}cluster": cluster, f"{LABEL}looks": node}
        self._bridge = BRIDGE + hashlib.sha256(f"{cluster}/{node}".encode()).hexdigest()[: 15 - len(BRIDGE)]

    def ensure(self) -> dict[str, Any]:
        """Make the network where it is missing; returns what the engine says of it.

        Raises:
            StartError: the engine refuses, or has another one of that name.
            Unavailable: no engine.
        """
        try:
            found = self._inspect()
        except docker.errors.NotFound:
            options = {"name": self._bridge, "enable_icc": "false", "enable_ip_masquerade": "false"}
            self._engine.call(
                f"making network {self.name}",
                lambda api: api.create_network(
                    self.name,
                    driver="bridge",
                    options={OPTIONS + name: value for name, value in options.items()},
                    labels=self._labels,
                    check_duplicate=True,
                ),
            )
            found = self._inspect()
        if (found.get("Options") or {}).get(f"{OPTIONS}name") != self._bridge:
            raise StartError(
                f"network {self.name} exists, but not as slices need it",
                remedy=f"end what uses it, then `docker network rm {self.name}`: the agent makes its own",
            )
        return found

    def examine(self, image: str, user: str) -> str:
        """Look from a container of that image for what model code could reach; "" when nothing is in its reach.

        Loads the packet filter where it is missing and this process may. Takes one or two seconds.

        Raises:
            Unavailable: no engine.
        """
        try:
            found = self.ensure()
            gateway = str(found["IPAM"]["Config"][0]["Gateway"])
            slices = [str(one["IPv4Address"]).partition("/")[0] for one in found["Containers"].values()]
            reached = self._reached(image, user, gateway, slices)
            if not reached:
                return ""
            why = load_rules()
            reached = reached if why else self._reached(image, user, gateway, slices)
        except StartError as error:
            return f"it is unknown what model code reaches: {error}"
        remedy = f"as root, now and at each boot: modprobe br_netfilter; nft -f {RULES}"
        return reached and f"not isolated: model code reaches {reached}{why and f' ({why})'}. Remedy: {remedy}"

    def _inspect(self) -> dict[str, Any]:
        return dict(self._engine.query("looking at the network", lambda api: api.inspect_network(self.name)))

    def _reached(self, image: str, user: str, gateway: str, slices: Sequence[str]) -> str:
        with socket.socket() as door:
            try:
                door.bind((gateway, 0))
            except OSError as error:
                raise StartError(
                    f"{gateway}, the host's address towards slices, is none of this agent's",
                    remedy="run the agent in the host's network: an agent in a container with --network=host",
                ) from error
            door.listen()
            targets = [f"{gateway}:{door.getsockname()[1]}", *(f"{address}:{ANY_PORT}" for address in slices)]
            code = self._run(image, user, targets[:REACHED_MAX])
        if code and not REACHED <= code < REACHED + len(targets):
            raise StartError(f"the isolation probe in a container ended with {code}", remedy="look at the engine's log")
        if not code:
            return ""
        return f"this host at {gateway}" if code == REACHED else f"other slices, as {targets[code - REACHED]}"

    def _run(self, image: str, user: str, targets: Sequence[str]) -> int:
        def create(api: docker.APIClient) -> str:
            host = api.create_host_config(
                network_mode=self.name,
                dns=[NOWHERE],
                read_only=True,
                cap_drop=["ALL"],
                security_opt=["no-new-privileges:true"],
            )
            made = api.create_container(
                image,
                [str(PROBE_S), *targets],
                entrypoint=["python3", "-I", "-S", "-c", PROBE],
                environment={"NVIDIA_VISIBLE_DEVICES": "void"},
                user=user,
                labels=self._looks,
                host_config=host,
            )
            return str(made["Id"])

        with removed_after(self._engine, self._engine.call("creating what looks around", create)) as container:
            self._engine.call("starting what looks around", lambda api: api.start(container))
            code = self._engine.call("waiting", lambda api: wait_for_exit(api, container, PROBE_START_S))
        if code is None:
            raise StartError(
                f"the isolation probe did not end within {PROBE_START_S:g} s", remedy="reduce the load of this machine"
            )
        return code


def load_rules() -> str:
    """Load the packet filter; returns why it could not be, "" when it is."""
    nft = shutil.which("nft", path=f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}")
    if nft is None:
        return "nftables is not installed"
    why = failure_of([nft, "-f", str(RULES)], NFT_TIMEOUT_S, line=0)
    return why and f"nft: {why}"
