"""Secrets that change while a service runs: tokens, Redis' password, and files that cannot be used."""

import asyncio
import json
import re
import subprocess

import grpc
import pytest
import redis
from pydantic import SecretStr

from carbon_feed.providers.web import HttpClient
from carbon_feed.settings import WebSettings
from protos.power_agent.v1 import power_agent_pb2, power_agent_pb2_grpc
from tests.support.certificates import Authority
from tests.support.ports import free_ports
from tests.support.redis_server import RedisServer, binary
from trefoil.core.errors import Fenced, SettingError, StateUnavailable
from trefoil.runtime import rpc
from trefoil.runtime.clock import ManualClock
from trefoil.runtime.config import ServiceSettings
from trefoil.runtime.security.secret_files import FileSecret, accepted
from trefoil.runtime.service import RenewalsComponent, renewals
from trefoil.runtime.state import State
from trefoil.runtime.telemetry import Metrics


def write(path, text, mode=0o600):
    """Replace a file as deployments do: the new one under the old name at once."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.chmod(mode)
    new.replace(path)
    return path


class Agent(power_agent_pb2_grpc.PowerAgentServicer):
    async def GetNode(self, request, context):
        return power_agent_pb2.GetNodeResponse()


async def asked(port, token):
    async with rpc.channel(f"127.0.0.1:{port}", token=token) as channel:
        try:
            await power_agent_pb2_grpc.PowerAgentStub(channel).GetNode(power_agent_pb2.GetNodeRequest(), timeout=20)
        except grpc.aio.AioRpcError as error:
            return error.code().name
    return "OK"


async def test_a_token_is_replaced_while_callers_of_both_kinds_call(tmp_path):
    file = write(tmp_path / "token", "old-token")
    settings = ServiceSettings(token_file=file)
    entry = (power_agent_pb2_grpc.add_PowerAgentServicer_to_server, Agent(), "trefoil.power_agent.v1.PowerAgent")
    server = rpc.make_server(settings, [entry])
    await server.start()
    caller = rpc.channel(f"127.0.0.1:{server.port}", token=settings.token)  # a service of the same file
    stub, failed, calls = power_agent_pb2_grpc.PowerAgentStub(caller), [], 0

    async def call():
        nonlocal calls
        while True:
            try:
                await stub.GetNode(power_agent_pb2.GetNodeRequest(), timeout=20)
            except grpc.aio.AioRpcError as error:
                failed.append(error)
            calls += 1

    calling = asyncio.create_task(call())
    seen = []
    for text in ("old-token", "old-token\nnew-token", "new-token\nold-token", "new-token"):
        write(file, text)
        before = calls
        while calls < before + 5:
            await asyncio.sleep(0)
        seen.append([await asked(server.port, token) for token in ("old-token", "new-token", "other")])
    calling.cancel()
    await caller.close()
    await server.stop(0)
    no = "UNAUTHENTICATED"
    assert seen == [["OK", no, no], ["OK", "OK", no], ["OK", "OK", no], [no, "OK", no]]
    assert failed == []


async def test_a_changed_file_that_cannot_be_used_leaves_the_secret_in_force_and_is_reported(tmp_path):
    file = write(tmp_path / "token", "old-token")
    settings = ServiceSettings(token_file=file)
    clock, metrics, told = ManualClock(), Metrics("controller"), []
    part = RenewalsComponent(*renewals(settings, None), clock, metrics, told.append)

    def refused():
        return re.findall(r'trefoil_changed_file_refused{.*field="token_file".*} (.*)', metrics.text())

    await part.init()
    assert (refused(), told) == (["0.0"], [])
    running = asyncio.create_task(part.run())
    for text, mode in (("", 0o600), ("a\nb\nc", 0o600), ("new-token", 0o644)):
        write(file, text, mode)
        await clock.advance(2.0)
        assert settings.token.get_secret_value() == "old-token"
        assert refused() == ["1.0"]
        assert re.fullmatch(r"token_file: the file before its change is in force: token_file = .*Remedy: .*", told[-1])
        assert "new-token" not in told[-1]
    file.unlink()
    await clock.advance(2.0)
    assert "cannot be read" in told[-1]
    write(file, "new-token", 0o644)
    await clock.advance(2.0)
    file.chmod(0o640)
    await clock.advance(2.0)
    assert (settings.token.get_secret_value(), refused(), told[-1]) == ("new-token", ["0.0"], "")
    running.cancel()


@pytest.mark.parametrize(
    "url",
    ["redis://:new@127.0.0.1:2/0", "redis://:new@127.0.0.1:1/1", "rediss://:new@127.0.0.1:1/0", "new", "redis://["],
)
def test_of_redis_only_the_password_changes_without_a_restart(tmp_path, url):
    file = write(tmp_path / "redis_url", "redis://:old@127.0.0.1:1/0")
    settings = ServiceSettings(redis_url_file=file)
    write(file, url)
    assert settings.redis_url == SecretStr("redis://:old@127.0.0.1:1/0")
    assert settings.redis_url.file.trouble.startswith("redis_url: more than the password has changed. Remedy: ")
    write(file, "redis://user:new@127.0.0.1:1/0")
    assert settings.redis_url == SecretStr("redis://user:new@127.0.0.1:1/0")
    assert settings.redis_url.file.trouble == ""


def test_a_secret_of_settings_has_one_value_and_a_token_two_at_most(tmp_path):
    file = write(tmp_path / "secret", "a\nb")
    assert accepted(FileSecret(file, "token_file", 2)) == ["a", "b"]
    assert accepted(SecretStr("a")) == ("a",)
    with pytest.raises(SettingError, match=r"redis_url_file = .*: holds no secret: one line of text"):
        ServiceSettings(redis_url_file=file)
    assert "'a'" not in repr(FileSecret(file, "token_file", 2))


async def test_a_carbon_provider_is_asked_by_the_proxy_of_the_file(tmp_path):
    async def proxy(name):
        async def answer(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            body = json.dumps({"by": name}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1")
        return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    (first, at), (second, elsewhere) = await proxy("first"), await proxy("second")
    file = write(tmp_path / "proxy", at)
    client = HttpClient(WebSettings(proxy_file=file, gap_s=0.0), "p", "http://provider.example")
    assert await client.get("/", now_s=0.0) == {"by": "first"}
    write(file, elsewhere)
    assert await client.get("/", now_s=0.0) == {"by": "second"}
    await client.close()
    for server in (first, second):
        server.close()


async def test_redis_is_known_by_the_name_of_its_certificate(tmp_path):
    ours, [port] = Authority(tmp_path), free_ports(1)
    pair, words = ours.service("redis.example"), ["--port", "0", "--tls-port", str(port), "--save", ""]
    words += ["--tls-ca-cert-file", str(ours.certificate), "--tls-cert-file", str(pair.certificate)]
    process = subprocess.Popen([binary(), *words, "--tls-key-file", str(pair.key), "--dir", str(tmp_path)])
    files = f"ssl_ca_certs={ours.certificate}&ssl_certfile={pair.certificate}&ssl_keyfile={pair.key}"

    async def said(name):
        state = State.connect(f"rediss://127.0.0.1:{port}/0?{files}&tls_name={name}", "c")
        try:
            await state.ping()
        except StateUnavailable as error:
            return str(error)
        finally:
            await state.close()
        return ""

    try:
        async with asyncio.timeout(60):
            while why := await said("redis.example"):
                assert "certificate" not in why
        assert "certificate is not valid for 'other.example'" in await said("other.example")
    finally:
        process.kill()
        process.wait()
    with pytest.raises(SettingError, match=r"redis_url: tls_name without TLS\. Remedy: write rediss://"):
        State.connect("redis://127.0.0.1/0?tls_name=a", "c")


async def test_redis_changes_its_password_while_a_service_writes(tmp_path):
    server = RedisServer()
    admin = redis.Redis(unix_socket_path=str(server.socket))
    admin.acl_setuser("default", reset_passwords=True, passwords=["+old"], enabled=True)
    admin.auth("old")
    url = "unix://default:{}@" + str(server.socket)
    file = write(tmp_path / "redis_url", url.format("old"))
    state = State.connect(ServiceSettings(redis_url_file=file).redis_url, "c")
    failed, written = [], 0

    async def write_on():
        nonlocal written
        lease = await state.acquire("controller", "me", ttl_s=60.0)
        while True:
            try:
                await state.put(lease, state.keys.lease("other"), lease)
            except (StateUnavailable, Fenced) as error:
                failed.append(error)
            written += 1

    def reconnect():
        """Each further command of the service is on a new connection, which shows the password of its file."""
        admin.client_kill_filter(_type="normal", skipme=True)

    async def some_writes():
        before = written
        while written < before + 20:
            await asyncio.sleep(0.001)

    writing = asyncio.create_task(write_on())
    try:
        for step in (
            lambda: admin.acl_setuser("default", passwords=["+new"], enabled=True),
            lambda: write(file, url.format("new")),
            lambda: admin.acl_setuser("default", passwords=["-old"], enabled=True),
        ):
            step()
            await some_writes()
            assert failed == []
        reconnect()  # costs the command that was under way, no more
        await some_writes()
        assert len(failed) <= 1
        assert "password" not in "".join(map(str, failed))
        write(file, url.format("wrong"))
        reconnect()
        async with asyncio.timeout(20):
            while not any("Redis refuses the password" in str(error) for error in failed):
                await asyncio.sleep(0.001)
        write(file, url.format("new"))
        before = len(failed)
        await some_writes()
        assert len(failed) <= before + 1
    finally:
        writing.cancel()
        await state.close()
        admin.close()
        server.close()
