"""Operator commands against controllers that `trefoil up` did not start: by address, token and certificates."""

import asyncio
import json
import re
import threading
import tomllib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import grpc
import pytest
from click.testing import Result
from typer.testing import CliRunner

from controller.role.leader_answers import LeaderAnswers
from controller.service import FULL_NAME
from controller.settings import ControllerSettings, ObjectiveSettings
from protos.controller.v1 import controller_pb2 as pb
from protos.controller.v1 import controller_pb2_grpc
from tests.support.certificates import Authority
from tests.support.ports import free_ports
from trefoil.cli.main import app
from trefoil.core.fleet import NodeStatus
from trefoil.core.objective import ActMode
from trefoil.core.plan import Plan
from trefoil.runtime import codec, rpc
from trefoil.runtime.security.tls import Tls

STATED = ObjectiveSettings(family="digits", slo={"latency_ms": 75.0}).stated()


class Controller(controller_pb2_grpc.ControllerServicer):
    """Answers what `trefoil status` asks."""

    def __init__(self) -> None:
        self.frozen = False
        self.applied: list[pb.ApplyRequest] = []

    async def Apply(self, request, context):
        self.applied.append(request)
        return pb.ApplyResponse(changes=[pb.FieldChange(field="max_watts", now="0", wanted="100")])

    async def GetPlan(self, request, context):
        return pb.GetPlanResponse(plan=codec.to_proto(Plan()), mode=int(ActMode.ACT), frozen=self.frozen)

    async def GetServed(self, request, context):
        return pb.GetServedResponse(window_s=60.0, base_unknown="no profile")

    async def GetFleet(self, request, context):
        node = codec.to_proto(NodeStatus("node7", zone="GB"))
        return pb.GetFleetResponse(cluster="far", nodes=[node], stale_nodes=["node7"], workers=["d1:0", "d1:1"])

    async def GetObjectives(self, request, context):
        return pb.GetObjectivesResponse(objectives=[codec.to_proto(STATED)])

    async def GetBudgets(self, request, context):
        return pb.GetBudgetsResponse()

    async def GetReport(self, request, context):
        hour = pb.FamilyHour(family="digits", sums={"requests": 10.0, "joules": 20.0, "grams": 1.0})
        return pb.GetReportResponse(hours=[hour], embodied_lifetime_years=4.0)

    async def Freeze(self, request, context):
        self.frozen = request.frozen
        return pb.FreezeResponse(frozen=self.frozen)


def add_some(names, servicer, server) -> None:
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(
            getattr(servicer, name),
            request_deserializer=getattr(pb, f"{name}Request").FromString,
            response_serializer=getattr(pb, f"{name}Response").SerializeToString,
        )
        for name in names
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(FULL_NAME, handlers),))


class Server:
    """A controller in a separate thread."""

    def __init__(
        self, folder: Path, tls: Tls | None = None, leader: str = "", knows: tuple[str, ...] | None = None
    ) -> None:
        """`knows`: its calls, as an older controller has fewer; None: all."""
        token = folder / "server.token"
        token.touch(0o600)
        token.write_text("right\n")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        settings = ControllerSettings(state_dir=folder, admin_address="127.0.0.1:0", token_file=token)
        self.controller = Controller()
        servicer = LeaderAnswers(self.controller, lambda: leader)

        async def start() -> rpc.RpcServer:
            add = controller_pb2_grpc.add_ControllerServicer_to_server if knows is None else partial(add_some, knows)
            entry = add, servicer, FULL_NAME
            server = rpc.make_server(settings, [entry], tls=tls)
            await server.start()
            return server

        self._server = self._wait(start())
        self.port, self.address = self._server.port, f"127.0.0.1:{self._server.port}"

    def _wait(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(20)

    def close(self) -> None:
        self._wait(self._server.stop(0.1))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)


@pytest.fixture
def serve(tmp_path, monkeypatch) -> Iterator:
    for variable in ("TREFOIL_CONTROLLER", "TREFOIL_TOKEN", "TREFOIL_TOKEN_FILE"):
        monkeypatch.delenv(variable, raising=False)
    servers = []

    def begin(**settings) -> Server:
        servers.append(Server(tmp_path, **settings))
        return servers[-1]

    yield begin
    for server in servers:
        server.close()


@pytest.fixture
def token(tmp_path) -> str:
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text("right\n")
    return str(file)


def run(*words: str) -> Result:
    return CliRunner().invoke(app, words, catch_exceptions=False)


def refusal(*words: str) -> str:
    result = run(*words)
    assert result.exit_code == 2, result.output
    [line] = result.stderr.splitlines()
    return str(line)


def test_status_and_top_show_a_system_that_was_started_elsewhere(serve, token):
    where = ("--controller", serve().address, "--token-file", token)
    found = json.loads(run("status", *where, "--json").stdout)
    assert (found["cluster"], found["workers"], found["services"]) == ("far", ["d1:0", "d1:1"], {"controller": True})
    assert found["saving"]["joules"] == 20.0
    shown = run("status", *where).stdout
    assert "2 workers serve" in shown
    assert "node7 is silent" in shown


def test_a_command_is_carried_out_by_address_and_token_of_the_environment(serve, token, monkeypatch):
    monkeypatch.setenv("TREFOIL_CONTROLLER", serve().address)
    monkeypatch.setenv("TREFOIL_TOKEN_FILE", token)
    assert json.loads(run("freeze", "--json").stdout)["frozen"]
    assert json.loads(run("report", "--json").stdout)["total"]["joules"] == 20.0


def test_of_several_controllers_whoever_leads_is_asked(serve, token):
    standby, leader, nobody = serve(leader="host:1"), serve(), f"127.0.0.1:{free_ports(1)[0]}"
    several = f"{nobody},{standby.address},{leader.address}"
    assert run("freeze", "--controller", several, "--token-file", token).exit_code == 0
    said = refusal("freeze", "--controller", f"{nobody},{standby.address}", "--token-file", token)
    assert f"no controller answers ({nobody}: UNAVAILABLE" in said
    assert f"{standby.address}: this controller stands by, host:1 leads" in said


OLDER = ("GetPlan", "GetServed", "GetFleet", "GetObjectives", "GetReport")


def test_a_controller_that_is_older_is_shown_without_what_it_does_not_know(serve, token):
    older, newer = serve(knows=OLDER), serve(leader="host:1")
    where = ("--controller", older.address, "--token-file", token)
    found = json.loads(run("status", *where, "--json").stdout)
    assert (found["cluster"], found["budgets"], found["saving"]["joules"]) == ("far", None, 20.0)
    unknown = "budgets: unknown to this controller, which is older"
    assert unknown in run("status", *where).stdout
    exported = run("export", *where)
    assert unknown in exported.stderr
    assert "budgets" not in tomllib.loads(exported.stdout)
    both = ("--controller", f"{newer.address},{older.address}", "--token-file", token)
    assert json.loads(run("status", *both, "--json").stdout)["budgets"] is None, "the newer one stands by"
    old_standby = ("--controller", f"{older.address},{serve().address}", "--token-file", token)
    assert json.loads(run("budget", "list", *old_standby, "--json").stdout) == {"budgets": []}


@pytest.mark.parametrize("command", ["apply", "diff"])
def test_budgets_that_an_older_controller_does_not_know_are_refused_and_nothing_is_applied(
    serve, token, tmp_path, command
):
    older, newer, file = serve(knows=(*OLDER, "Apply")), serve(), tmp_path / "file.toml"
    where = ("-f", str(file), "--token-file", token, "--controller")
    file.write_text('max_watts = 100.0\n[[budgets]]\ntenant = "acme"\njoules_per_day = 1.0\n')
    said = refusal(command, *where, older.address)
    assert (
        f"{file}: budgets: unknown to this controller, which is older: nothing is changed. Remedy: upgrade it" in said
    )
    assert older.controller.applied == []
    assert "max_watts: 0 -> 100" in run(command, *where, newer.address).stdout
    file.write_text("max_watts = 100.0\n")
    assert "max_watts: 0 -> 100" in run(command, *where, older.address).stdout
    assert [len(one.controller.applied) for one in (older, newer)] == [1, 1]


READS = ("status", "plan --family digits", "plan --since 1h", "report", "rollout", "export", "budget list",
         "budget show --tenant a", "objective show --family digits", "diff -f {file}")  # fmt: skip


def test_each_command_that_reads_says_what_a_controller_does_not_know(serve, token, tmp_path):
    where = ("--controller", serve(knows=()).address, "--token-file", token)
    (tmp_path / "file.toml").write_text("max_watts = 100.0\n")
    for words in READS:
        said = refusal(*words.format(file=tmp_path / "file.toml").split(), *where)
        assert re.search(r"^trefoil: \w+: unknown to the controller at \S+\. Remedy: upgrade it", said), words


def test_what_keeps_a_command_from_a_controller_is_one_line(serve, token, tmp_path):
    authority, port = Authority(tmp_path), free_ports(1)[0]
    pair, other = authority.server("far.example"), Authority(tmp_path, "other")
    secure = serve(tls=Tls(pair.certificate, pair.key, None))
    wrong = tmp_path / "wrong"
    wrong.touch(0o600)
    wrong.write_text("wrong\n")
    ca = ("--tls-ca", str(authority.certificate))

    def said(address: str, *words: str) -> str:
        return refusal("rollout", "--controller", address, *words)

    assert "--controller = 'nohost': not host:port" in said("nohost")
    assert "Connection refused" in said(f"127.0.0.1:{port}", "--token-file", token)
    assert "--token-file: " in (no := said(secure.address, *ca, "--token-file", str(wrong)))
    assert "wants another token" in no
    assert "the certificate names another host" in said(f"localhost:{secure.port}", *ca, "--token-file", token)
    assert "no connection: " in said(secure.address, "--tls-ca", str(other.certificate), "--token-file", token)
    assert "no connection: it speaks clear text" in said(serve().address, *ca, "--token-file", token)
    assert "clear text" in said("far.example:1", "--token-file", token)
    assert "--tls-ca = '/absent.pem': cannot be used (No such file" in said(secure.address, "--tls-ca", "/absent.pem")
    assert "--state-dir names a system too" in said(secure.address, "--state-dir", str(tmp_path))
    assert "--token-file: a controller elsewhere is not named" in refusal("rollout", "--token-file", token)
    assert run("freeze", "--controller", secure.address, *ca, "--token-file", token).exit_code == 0
