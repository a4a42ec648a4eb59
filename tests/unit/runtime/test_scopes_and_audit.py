"""Who may command, and what stays on disk of it."""

import json
import stat

import grpc
import pytest

from protos.power_agent.v1 import power_agent_pb2 as pb
from protos.power_agent.v1 import power_agent_pb2_grpc as pb_grpc
from tests.support.failing_disk import FailingDisk
from trefoil.core import errors
from trefoil.runtime import rpc
from trefoil.runtime.clock import ManualClock
from trefoil.runtime.config import ServiceSettings
from trefoil.runtime.connections import CallsUnderWay
from trefoil.runtime.security import scopes
from trefoil.runtime.security.audit import REQUEST_BYTES_MAX, REQUEST_CHARS_MAX, AuditLog

NAME = "trefoil.power_agent.v1.PowerAgent"


class Agent(pb_grpc.PowerAgentServicer):
    async def GetNode(self, request, context):
        return pb.GetNodeResponse()

    async def Drain(self, request, context):
        if request.why == "refused":
            raise errors.StaleRevision("too old", remedy="read the node")
        return pb.DrainResponse()


@pytest.fixture
def audit(tmp_path):
    return AuditLog(tmp_path / "state", ManualClock(1000.0))


def lines(tmp_path, name="audit.jsonl"):
    return [json.loads(line) for line in (tmp_path / "state" / name).read_text().splitlines()]


async def ask(server, token, call):
    async with rpc.channel(f"127.0.0.1:{server.port}", token=token) as channel:
        await call(pb_grpc.PowerAgentStub(channel))


def read(stub):
    return stub.GetNode(pb.GetNodeRequest(), timeout=5)


def command(stub, why=""):
    return stub.Drain(pb.DrainRequest(device="node0/gpu0", why=why), timeout=5)


async def serve(settings, audit):
    entry = (pb_grpc.add_PowerAgentServicer_to_server, Agent(), NAME)
    server = rpc.make_server(settings, [entry], audit=audit)
    await server.start()
    return server


@pytest.mark.parametrize(
    ("token", "of_read", "of_command"),
    [
        ("control", None, None),
        ("read", None, grpc.StatusCode.PERMISSION_DENIED),
        ("wrong", grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAUTHENTICATED),
        (None, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAUTHENTICATED),
    ],
)
async def test_a_read_token_reads_and_only_the_control_token_commands(token, of_read, of_command, audit):
    server = await serve(ServiceSettings(admin_address="127.0.0.1:0", token="control", read_token="read"), audit)
    for call, code in ((read, of_read), (command, of_command)):
        if code is None:
            await ask(server, token, call)
            continue
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ask(server, token, call)
        assert refused.value.code() == code
        assert "Remedy" in refused.value.details()
    await server.stop(0)


def test_a_read_token_alone_is_refused_because_commands_would_be_open():
    with pytest.raises(errors.SettingError, match=r"read_token: set without token\. Remedy: set token"):
        rpc.make_server(ServiceSettings(admin_address="127.0.0.1:0", read_token="read"), [])


@pytest.mark.parametrize("method", ["GetNode", "WatchEnergy", "ListZones", "ExplainRequest", "PreviewPlan"])
def test_what_asks_is_known_by_its_verb_and_everything_else_commands(method):
    assert scopes.asks_only(f"/{NAME}/{method}")


@pytest.mark.parametrize("method", [m.name for m in pb.DESCRIPTOR.services_by_name["PowerAgent"].methods])
def test_each_method_of_the_agent_is_a_question_or_a_command(method):
    commands = {"Apply", "Drain", "SetClocks", "ReleaseClocks", "Adopt", "Reset"}
    assert scopes.asks_only(f"/{NAME}/{method}") == (method not in commands)


async def test_commands_are_noted_before_and_after_with_their_outcome(audit, tmp_path):
    server = await serve(ServiceSettings(admin_address="127.0.0.1:0"), audit)
    await ask(server, None, read)
    await ask(server, None, command)
    with pytest.raises(grpc.aio.AioRpcError):
        await ask(server, None, lambda stub: command(stub, "refused"))
    await server.stop(0)
    asked, answered, asked_again, refused = lines(tmp_path)
    assert asked["method"].endswith("/Drain")
    assert asked["scope"] == "open"
    assert asked["at_s"] == 1000.0
    assert json.loads(asked["request"]) == {"device": "node0/gpu0"}
    assert asked["call"] == answered["call"] != asked_again["call"] == refused["call"]
    assert (answered["code"], refused["code"]) == ("OK", "FAILED_PRECONDITION")
    assert "too old" in refused["why"]
    assert stat.S_IMODE((tmp_path / "state" / "audit.jsonl").stat().st_mode) == 0o600


async def test_a_refusal_is_noted_before_the_caller_is_told(audit, tmp_path):
    class Context:
        def peer(self):
            return "peer"

        async def abort(self, code, why, trailers):
            self.noted_then = lines(tmp_path)
            raise grpc.aio.AbortError

    context, interceptor = Context(), rpc._Interceptor(None, scopes.Tokens(), audit, CallsUnderWay())
    with pytest.raises(grpc.aio.AbortError):
        async with interceptor._observed(context, f"/{NAME}/Drain", "open", pb.DrainRequest()):
            raise errors.StaleRevision("too old")
    assert [entry.get("code") for entry in context.noted_then] == [None, "FAILED_PRECONDITION"]
    assert lines(tmp_path) == context.noted_then, "and once"


async def test_a_denied_command_is_noted_too(audit, tmp_path):
    server = await serve(ServiceSettings(admin_address="127.0.0.1:0", token="control", read_token="read"), audit)
    with pytest.raises(grpc.aio.AioRpcError):
        await ask(server, "read", command)
    await server.stop(0)
    asked, answered = lines(tmp_path)
    assert (asked["scope"], answered["code"]) == ("read", "PERMISSION_DENIED")


def test_the_log_is_bounded_to_two_files_and_one_entry_to_its_limit(tmp_path):
    audit = AuditLog(tmp_path / "state", ManualClock(0.0), bytes_max=3000)
    for _ in range(10):
        audit.record_request("/x/Apply", "peer", "open", pb.DrainRequest(why="y" * 5000))
    audit.close()
    kept = [*lines(tmp_path, "audit.1.jsonl"), *(lines(tmp_path) if (tmp_path / "state/audit.jsonl").exists() else [])]
    assert 1 <= len(kept) < 10
    assert all(len(entry["request"]) < REQUEST_CHARS_MAX + 40 for entry in kept)
    assert sorted(p.name for p in (tmp_path / "state").iterdir()) in (
        ["audit.1.jsonl"],
        ["audit.1.jsonl", "audit.jsonl"],
    )


async def test_a_request_of_any_size_costs_a_line_of_the_log(audit, tmp_path):
    audit.record_request("/x/Drain", "peer", "open", pb.DrainRequest(why="x" * REQUEST_BYTES_MAX))
    audit.record_request("/x/Drain", "peer", "open", pb.DrainRequest(why="x" * REQUEST_CHARS_MAX))
    large, long = lines(tmp_path)
    assert large["request"].endswith("bytes)")
    assert len(long["request"]) < REQUEST_CHARS_MAX + 40


async def test_a_command_that_cannot_be_written_out_is_refused_and_noted(audit, tmp_path):
    server = await serve(ServiceSettings(admin_address="127.0.0.1:0"), audit)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await ask(server, None, lambda stub: stub.Drain(pb.DrainRequest(patience_s=float("nan")), timeout=5))
    await server.stop(0)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    asked, answered = lines(tmp_path)
    assert (asked["request"], answered["code"]) == ("", "INVALID_ARGUMENT")


async def test_a_command_that_cannot_be_noted_is_refused_and_a_question_is_answered(audit, tmp_path, monkeypatch):
    server = await serve(ServiceSettings(admin_address="127.0.0.1:0"), audit)
    disk = FailingDisk(monkeypatch)
    disk.fail()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await ask(server, "", command)
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "no command is carried out that cannot be noted" in refused.value.details()
    await ask(server, "", read)
    disk.mend()
    await ask(server, "", command)
    await server.stop(0)
    asked, answered = lines(tmp_path)
    assert (asked["call"], answered["code"]) == (answered["call"], "OK")
