"""Every admin service of Trefoil from your own program: the committed stubs (`protos/`) and grpcio, nothing else.

    PYTHONPATH=. python examples/admin.py --controller 127.0.0.1:8102 --agent 127.0.0.1:8103 --feed 127.0.0.1:8101 \\
        --token-file .trefoil/default/run/token

Prints one JSON line a step. It changes what it names and puts each of it back: the objective, the plan (frozen, pinned,
rolled back), one device's service and clocks. Of the objective only the number stays higher.
"""

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc

from protos.carbon_feed.v1 import carbon_feed_pb2, carbon_feed_pb2_grpc
from protos.controller.v1 import controller_pb2 as controller
from protos.controller.v1 import controller_pb2_grpc
from protos.power_agent.v1 import power_agent_pb2 as agent
from protos.power_agent.v1 import power_agent_pb2_grpc
from protos.types.v1 import plan_pb2

TIMEOUT_S = 60.0
NO_PROXY = (("grpc.enable_http_proxy", 0),)


class Services:
    """Controller, power agent and carbon feed of one system."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self.controller = controller_pb2_grpc.ControllerStub(self._channel(given.controller))
        self.agent = power_agent_pb2_grpc.PowerAgentStub(self._channel(given.agent))
        self.feed = carbon_feed_pb2_grpc.CarbonFeedStub(self._channel(given.feed))

    def _channel(self, address: str) -> grpc.Channel:
        given = self._given
        if given.tls_ca is None:
            return grpc.insecure_channel(address, NO_PROXY)
        pair = [path.read_bytes() if path else None for path in (given.tls_key, given.tls_certificate)]
        return grpc.secure_channel(address, grpc.ssl_channel_credentials(given.tls_ca.read_bytes(), *pair), NO_PROXY)

    def ask(self, method: Callable[..., Any], request: Any) -> Any:
        """The answer to one call, which carries the token."""
        token = self._given.token_file.read_text().strip() if self._given.token_file else ""
        metadata = [("authorization", f"Bearer {token}")] if token else None
        return method(request, timeout=TIMEOUT_S, metadata=metadata)

    def settled(self) -> controller.GetPlanResponse:
        """The plan in force, once its rollout has ended."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while True:
            found = self.ask(self.controller.GetPlan, controller.GetPlanRequest())
            if found.HasField("plan") and found.rollout.state in ENDED:
                return found
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the rollout has not ended within {TIMEOUT_S:g} s: {found.rollout.why}")
            time.sleep(0.2)


ENDED = (
    plan_pb2.ROLLOUT_STATE_DONE,
    plan_pb2.ROLLOUT_STATE_HALTED,
    plan_pb2.ROLLOUT_STATE_ROLLED_BACK,
    plan_pb2.ROLLOUT_STATE_SUPERSEDED,
)


def text(revision: Any) -> str:
    """A revision for people."""
    return f"{revision.epoch}.{revision.number}"


def changed(services: Services, wanted: Any, expected_number: int) -> Any:
    """Set an objective and return it as stored. The controller refuses it if the stored one has another number."""
    change = controller.ObjectiveChange(objective=wanted, expected_number=expected_number)
    request = controller.SetObjectivesRequest(objectives=[change])
    return services.ask(services.controller.SetObjectives, request).objectives[0]


def objective(services: Services) -> dict[str, Any]:
    """Loosen the SLO of the first family by a millisecond, unless somebody else changed it since, and put it back."""
    before = services.ask(services.controller.GetObjectives, controller.GetObjectivesRequest()).objectives[0]
    wanted = type(before)()
    wanted.CopyFrom(before)
    wanted.slo_ms += 1
    stored = changed(services, wanted, before.number)
    again = changed(services, before, stored.number)
    return {"family": before.family, "slo_ms": [before.slo_ms, stored.slo_ms, again.slo_ms], "number": again.number}


def plan(services: Services) -> dict[str, Any]:
    """The plan in force and why."""
    found = services.settled()
    family = found.plan.routes[0].family
    why = services.ask(services.controller.Explain, controller.ExplainRequest(family=family)).why
    devices = [device.device for node in found.plan.nodes for device in node.devices]
    return {"revision": text(found.plan.revision), "policy": found.plan.policy, "devices": devices, "why": why}


def report(services: Services) -> dict[str, Any]:
    """What the last day took, by family."""
    request = controller.GetReportRequest()
    request.since.FromSeconds(int(time.time()) - 86_400)
    found: dict[str, dict[str, float]] = {}
    for hour in services.ask(services.controller.GetReport, request).hours:
        sums = found.setdefault(hour.family, {})
        for name in ("requests", "joules", "grams"):
            if name in hour.sums:
                sums[name] = sums.get(name, 0.0) + hour.sums[name]
    return found


def freeze(services: Services) -> dict[str, Any]:
    """Keep the plan as it is, and let go again."""
    frozen = services.ask(services.controller.Freeze, controller.FreezeRequest(frozen=True)).frozen
    thawed = services.ask(services.controller.Freeze, controller.FreezeRequest(frozen=False)).frozen
    return {"frozen": [frozen, thawed]}


def pin(services: Services) -> dict[str, Any]:
    """Pin the plan in force, and unpin it."""
    pinned = services.ask(services.controller.Pin, controller.PinRequest(plan=services.settled().plan)).revision
    held = services.settled().pinned
    services.ask(services.controller.Pin, controller.PinRequest())
    return {"pinned": [held, services.settled().pinned], "revision": text(pinned)}


def rollback(services: Services) -> dict[str, Any]:
    """Go back to the plan before, which also freezes; then let the controller decide again."""
    found = services.ask(services.controller.Rollback, controller.RollbackRequest())
    frozen = services.settled().frozen
    services.ask(services.controller.Freeze, controller.FreezeRequest(frozen=False))
    return {"revision": text(found.revision), "frozen": frozen, "why": found.why}


def drain(services: Services) -> dict[str, Any]:
    """Take the last device out of service, and put it back at once: its work need not move."""
    node = services.ask(services.agent.GetNode, agent.GetNodeRequest()).node
    device, epoch = node.devices[-1].device, node.highest_epoch_seen
    request = agent.DrainRequest(device=device, epoch=epoch, why="examples/admin.py", patience_s=600.0)
    cordons = [_cordon(services.ask(services.agent.Drain, request).node, device)]
    request = agent.DrainRequest(device=device, epoch=epoch, release=True)
    cordons.append(_cordon(services.ask(services.agent.Drain, request).node, device))
    return {"device": device, "cordon": cordons}


def _cordon(node: Any, device: str) -> str:
    return next(one.cordon for one in node.devices if one.device == device)


def clocks(services: Services) -> dict[str, Any]:
    """Hold a device's clock for a minute, and let go of it."""
    node = services.ask(services.agent.GetNode, agent.GetNodeRequest()).node
    device, epoch = node.devices[0].device, node.highest_epoch_seen
    request = agent.SetClocksRequest(ttl_s=60.0)
    request.lease.device, request.lease.holder, request.lease.epoch = device, "examples/admin.py", epoch
    request.lease.max_mhz = 1005
    held = services.ask(services.agent.SetClocks, request).lease
    release = agent.ReleaseClocksRequest(device=device, holder="examples/admin.py", epoch=epoch)
    services.ask(services.agent.ReleaseClocks, release)
    return {"device": device, "mhz": [held.min_mhz, held.max_mhz]}


def carbon(services: Services) -> dict[str, Any]:
    """Carbon now, of every zone that the feed reads, and how well its providers are."""
    readings = services.ask(services.feed.GetMany, carbon_feed_pb2.GetManyRequest()).readings
    health = services.ask(services.feed.GetZoneHealth, carbon_feed_pb2.GetZoneHealthRequest()).zones
    now = {reading.series.zone: reading.intensity_g_per_kwh for reading in readings}
    return {"g_per_kwh": now, "zones": len(health)}


STEPS = (objective, plan, report, freeze, pin, rollback, drain, clocks, carbon)


def steps(services: Services) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every step and its outcome."""
    for step in STEPS:
        yield step.__name__, step(services)


def main() -> None:
    """Run every step."""
    parser = argparse.ArgumentParser(description="Ask every admin service of a Trefoil system.")
    for name, port in (("--controller", 8102), ("--agent", 8103), ("--feed", 8101)):
        parser.add_argument(name, default=f"127.0.0.1:{port}", metavar="HOST:PORT")
    for name in ("--token-file", "--tls-ca", "--tls-certificate", "--tls-key"):
        parser.add_argument(name, type=Path, metavar="FILE")
    with contextlib.suppress(BrokenPipeError):
        for name, found in steps(Services(parser.parse_args())):
            print(json.dumps({name: found}), flush=True)


if __name__ == "__main__":
    main()
