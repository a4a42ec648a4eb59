"""TLS of services with real certificates: who is let in, what is refused, and renewal without a restart."""

import asyncio
import contextlib
import math
import re
import ssl

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import SecretStr
from structlog.testing import capture_logs

from controller.rollout.agent_clients import AgentClients
from controller.settings import ControllerSettings
from dispatcher.transport.h2_channel import H2Channel
from protos.power_agent.v1 import power_agent_pb2, power_agent_pb2_grpc
from tests.support.certificates import Authority
from trefoil.cli.system_client import make_channel
from trefoil.core import errors
from trefoil.core.fleet import NodeStatus
from trefoil.core.plan import NodePlan
from trefoil.health import main as ask_health
from trefoil.runtime import codec, rpc
from trefoil.runtime.clock import ManualClock, WallClock
from trefoil.runtime.config import ServiceSettings
from trefoil.runtime.security.tls import Tls
from trefoil.runtime.service import RenewalsComponent
from trefoil.runtime.telemetry import Metrics

NAME = "trefoil.power_agent.v1.PowerAgent"
HEALTH = "/grpc.health.v1.Health/Check"


@pytest.fixture
def ours(tmp_path):
    return Authority(tmp_path, "ours")


@pytest.fixture
def theirs(tmp_path):
    return Authority(tmp_path, "theirs")


class Agent(power_agent_pb2_grpc.PowerAgentServicer):
    """Says which node it is."""

    async def GetNode(self, request, context):
        return power_agent_pb2.GetNodeResponse(node=codec.to_proto(NodeStatus("node0")))


@contextlib.asynccontextmanager
async def serving(authority, pair, **more):
    entries = [(power_agent_pb2_grpc.add_PowerAgentServicer_to_server, Agent(), NAME)]
    settings = ServiceSettings(admin_address="127.0.0.1:0", token="t", **pair.settings(authority), **more)
    server = rpc.make_server(settings, entries)
    await server.start()
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        await server.stop(0)


async def asked(target, tls, name="node0"):
    """Answer to a question that needs a token, over a separate connection."""
    async with rpc.channel(target, tls=tls, name=name, token="t") as channel:
        stub = power_agent_pb2_grpc.PowerAgentStub(channel)
        return (await rpc.call(stub.GetNode, power_agent_pb2.GetNodeRequest(), 5.0)).node.node


def trusting(authority, pair=None):
    return Tls(pair and pair.certificate, pair and pair.key, authority.certificate)


async def test_only_those_who_show_a_certificate_of_the_authority_are_let_in(ours, theirs):
    async with serving(ours, ours.service("node0")) as target:
        assert await asked(target, trusting(ours, ours.service("controller"))) == "node0"
        foreign = theirs.service("controller")
        for tls in (
            trusting(ours),
            Tls(foreign.certificate, foreign.key, ours.certificate, signed=False, serves=False),
            None,
        ):
            with pytest.raises(errors.Unavailable):
                await asked(target, tls)
        for pair in (ours.service("late", hours=-1), ours.server("tritons.node0")):  # models can read a Triton's key
            credentials = grpc.ssl_channel_credentials(ours.certificate.read_bytes(), *pair.read())
            named = [("grpc.ssl_target_name_override", "node0")]
            async with grpc.aio.secure_channel(target, credentials, options=named) as channel:
                with pytest.raises(grpc.aio.AioRpcError, match="failed to connect"):
                    await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5.0)
        with pytest.raises(errors.Untrusted, match=r"the certificate is another authority's.*Remedy: take one that"):
            await asked(target, trusting(theirs, foreign))
        with pytest.raises(errors.Untrusted, match=r"the certificate names another host.*Remedy: take one that names"):
            await asked(target, trusting(ours, ours.service("controller")), "node1")


async def test_only_callers_that_tls_clients_names_may_call(ours):
    async with serving(ours, ours.service("node0"), tls_clients=["controller", "alice"]) as target:
        for name in ("controller", "alice"):
            assert await asked(target, trusting(ours, ours.service(name))) == "node0"
        tls = trusting(ours, ours.service("node7"))
        with pytest.raises(errors.TrefoilError, match=r"names \['node7'.*none of tls_clients\. Remedy: add the name"):
            await asked(target, tls)
        async with rpc.channel(target, tls=tls, name="node0") as channel:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5.0)
    with pytest.raises(errors.SettingError, match=r"tls_clients = .*: set alone\. Remedy: set tls_ca too"):
        ServiceSettings(tls_clients=["controller"])


async def test_the_name_of_an_agent_is_of_the_form_that_is_set(ours):
    tls = trusting(ours, ours.service("controller"))
    async with serving(ours, ours.service("node0.gpus.example")) as target:
        agents = AgentClients(WallClock(), 5.0, 3, SecretStr("t"), tls, name_form="{node}.gpus.example")
        assert (await agents.node(NodeStatus("node0", agent_target=target))).node == "node0"
        assert await agents.node(NodeStatus("node1", agent_target=target)) is None
        assert "DNS:node1.gpus.example" in agents.unreached["node1"]
        await agents.close()


@pytest.mark.parametrize("form", ["agent", "{node}-{node}", "{node}.{zone}", "{node} x"])
def test_a_form_of_names_that_is_not_of_its_node_is_refused(form):
    with pytest.raises(errors.SettingError, match=r"^agent_tls_name = .*: must hold \{node\} once.*Remedy:"):
        ControllerSettings(agent_tls_name=form)


async def test_a_channel_of_the_data_path_holds_the_server_to_its_name(ours):
    async with serving(ours, ours.service("node0")) as target:
        for name, works in (("node0", True), ("node1", False)):
            channel = H2Channel(target, tls=trusting(ours, ours.service("dispatcher")), name=name)
            asking = channel.unary(HEALTH, (health_pb2.HealthCheckRequest().SerializeToString(),), 5.0)
            if works:
                assert (await asking)[0]
            else:
                with pytest.raises(grpc.aio.AioRpcError, match=r"failed to connect.*Hostname"):
                    await asking
            await channel.close()


async def test_a_node_is_obeyed_and_told_the_token_by_its_name_alone(ours):
    """Whoever writes an agent_target into Redis is told nothing unless his certificate names the node."""
    tls = trusting(ours, ours.service("controller"))
    agents = AgentClients(WallClock(), 5.0, 3, "t", tls)
    async with serving(ours, ours.service("node0")) as target:
        assert (await agents.node(NodeStatus("node0", agent_target=target))).node == "node0"
        with capture_logs() as logs:
            assert await agents.node(NodeStatus("node1", agent_target=target)) is None
        said = f"agent of node1 at {target} gets neither plan nor token: .*names another host.*Remedy: .*DNS:node1"
        assert [line for line in logs if line["event"] == "agent does not answer"]
        with pytest.raises(errors.Untrusted, match=said):
            await agents.apply(NodeStatus("node1", agent_target=target), NodePlan())
    await agents.close()
    open_ = AgentClients(WallClock(), 5.0, 3, "t")
    with pytest.raises(errors.Untrusted, match=r"at 192\.0\.2\.1:1 gets neither .*: a token would leave .*tls_ca"):
        await open_.apply(NodeStatus("node0", agent_target="192.0.2.1:1"), NodePlan())
    await open_.close()


@pytest.mark.parametrize("insecure", [False, True])
async def test_no_token_leaves_this_machine_in_clear_text_unless_allowed(insecure):
    allowed = (
        contextlib.nullcontext() if insecure else pytest.raises(errors.SettingError, match=r"clear text.*insecure")
    )
    with allowed:
        async with rpc.channel("gpu7.example:8103", token="t", insecure=insecure):
            pass
    for target in ("127.0.0.1:1", "localhost:1", "unix:/x"):
        async with rpc.channel(target, token="t"):
            pass


def test_certificates_that_cannot_be_used_are_one_line(ours, theirs, tmp_path):
    good, other, late = ours.service("node0"), theirs.service("node0"), ours.service("late", hours=-1)
    half = ours.server("half")
    broken = tmp_path / "broken.pem"
    broken.write_text("nothing")
    for pair, said in (
        ((late.certificate, late.key), r"late\.crt.*certificate has expired.*Remedy: renew it"),
        ((other.certificate, other.key), r"node0\.crt.*unable to get.*Remedy: take one that .*ours.* signed"),
        ((half.certificate, half.key), r"half\.crt.*purpose.*Remedy: take one with the extendedKeyUsage"),
        ((good.certificate, other.key), r"tls_certificate, tls_key = .*mismatch.*a certificate's own key"),
        ((broken, good.key), r"tls_certificate, tls_key = .*broken\.pem.*Remedy: name readable PEM files"),
    ):
        with pytest.raises(errors.SettingError, match=said):
            Tls(*pair, ours.certificate)
    with pytest.raises(errors.SettingError, match=r"tls_ca = '.*broken\.pem': cannot be used"):
        Tls(good.certificate, good.key, broken)
    with pytest.raises(errors.SettingError, match=r"expired.*renew it"):
        Tls(late.certificate, late.key, None)
    with pytest.raises(errors.SettingError, match="only one of the two"):
        ServiceSettings(tls_certificate=good.certificate)
    with pytest.raises(errors.SettingError, match=r"tls_ca = .*: set alone"):
        ServiceSettings(tls_ca=ours.certificate)
    tls = trusting(ours, good)
    tls.check_name("node0")
    with pytest.raises(
        errors.SettingError, match=r"node0\.crt'.* not name node1, but node0, 127.*subjectAltName=DNS:node1"
    ):
        tls.check_name("node1")
    before = tls.now
    ours.service("node1").copy_to(good)
    with capture_logs() as logs:
        assert tls.now is before, "a renewed one has to name it too"
    assert [line["why"].partition(": ")[2][:29] for line in logs] == ["does not name node0, but node1"[:29]]
    assert 0 < tls.now.expires_at_s - WallClock().now_s() < 3601


async def test_a_renewed_certificate_is_taken_without_a_restart_and_half_of_one_is_not(ours):
    pair, caller = ours.service("node0"), ours.service("controller")
    client = trusting(ours, caller)
    async with serving(ours, pair) as target, rpc.channel(target, tls=client, name="node0", token="t") as before:
        stub = power_agent_pb2_grpc.PowerAgentStub(before)
        await stub.GetNode(power_agent_pb2.GetNodeRequest())
        was = await shown(target, client)
        fresh = ours.service("fresh")
        pair.key.write_bytes(fresh.key.read_bytes())  # its certificate is not there yet
        with capture_logs() as logs:
            assert await shown(target, client) == was
        assert [line["why"] for line in logs if "is not used" in line["event"]]
        ours.service("node0")  # written in the place of the first, both files
        assert await shown(target, client) not in (b"", was)
        assert await asked(target, client) == "node0"
        await stub.GetNode(power_agent_pb2.GetNodeRequest())  # a connection outlives the certificate that it began with
        old = client.now
        ours.service("controller")
        assert client.now is not old
        assert await asked(target, client) == "node0"


async def shown(target, tls):
    """Certificate that a server shows."""
    context = tls.client_context()
    context.check_hostname = False
    host, _, port = target.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    found = writer.get_extra_info("ssl_object").getpeercert(True)
    writer.close()
    with contextlib.suppress(OSError, ssl.SSLError):
        await writer.wait_closed()
    context.check_hostname = True
    return found


async def test_the_health_command_shows_a_certificate_where_one_is_demanded(ours, capsys):
    caller = ours.service("probe")
    async with serving(ours, ours.service("any")) as target:
        words = ["--ca", str(ours.certificate), "--timeout", "2"]
        pair = ["--certificate", str(caller.certificate), "--key", str(caller.key)]
        assert await asyncio.to_thread(ask_health, [target, *words]) == 1
        assert await asyncio.to_thread(ask_health, [target, *words, *pair]) == 0
        assert ask_health([target, *words, *pair[:2]]) == 2
    assert "Remedy: give both, and --ca" in capsys.readouterr().err


async def test_certificates_that_end_soon_are_named_until_they_are_renewed(ours):
    tls, told = trusting(ours, ours.service("node0")), []
    clock, metrics = ManualClock(WallClock().now_s()), Metrics("power_agent")
    ends = {"service": tls.end_s, "tritons": lambda: math.inf}
    part = RenewalsComponent(ends, [], clock, metrics, told.append)
    await part.init()
    assert re.fullmatch(r"certificates end: of service at 20\d\d-[^,]*Z\. Remedy: renew them .*", told[0])
    told_s = re.findall(r'trefoil_tls_expiry_timestamp_seconds{.*whose="service".*} (.*)', metrics.text())
    assert [float(each) for each in told_s] == [tls.end_s()]
    ends["service"] = lambda: clock.now_s() + 20 * 86_400.0
    running = asyncio.create_task(part.run())
    await clock.advance(60.0)
    assert told[1:] == [""]
    running.cancel()


async def test_commands_take_their_files_from_the_environment(ours, monkeypatch):
    caller = ours.client("alice")
    monkeypatch.setenv("TREFOIL_TOKEN", "t")

    async def ask(target, ca=None):
        async with make_channel(target, ca) as channel:
            stub = power_agent_pb2_grpc.PowerAgentStub(channel)
            return (await rpc.call(stub.GetNode, power_agent_pb2.GetNodeRequest(), 5.0)).node.node

    with pytest.raises(errors.SettingError, match=r"clear text.*TREFOIL_INSECURE=1"):
        make_channel("gpu7.example:8103")
    monkeypatch.setenv("TREFOIL_INSECURE", "1")
    await make_channel("gpu7.example:8103").close()
    async with serving(ours, ours.service("node0")) as target:
        with pytest.raises(errors.Unavailable):
            await ask(target, ours.certificate)
        monkeypatch.setenv("TREFOIL_TLS_CERTIFICATE", str(caller.certificate))
        with pytest.raises(errors.SettingError, match=r"no authority is named\. Remedy: set TREFOIL_TLS_CA, or"):
            await ask(target)
        monkeypatch.setenv("TREFOIL_TLS_KEY", str(caller.key))
        assert await ask(target, ours.certificate) == "node0"
        monkeypatch.setenv("TREFOIL_TLS_CA", str(ours.certificate))
        assert await ask(target) == "node0"
