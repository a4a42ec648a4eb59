"""Every refusal of the dispatcher's ports, with real certificates: TLS, mTLS, tokens, roles, limits."""

import asyncio
import contextlib
import http.client
import json
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc.aio as triton
import tritonclient.http as rest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException

from dispatcher.request.core.tenants import digest
from protos.dispatcher.v1 import dispatcher_pb2, dispatcher_pb2_grpc
from tests.support.certificates import Authority, Pair
from tests.support.dispatching import Plane, Running, dispatcher_system, dispatching, image, request
from tests.support.fake_triton import FakeTriton
from tests.support.ports import free_ports
from tests.support.workers import dispatcher
from tests.unit.dispatcher.worlds import node, plan, route, status, target
from trefoil.core.demand import LoadWindow
from trefoil.core.errors import SettingError

pytestmark = pytest.mark.integration
TENANTS = f"""
[[tenant]]
name = "alpha"
token_sha256 = "{digest("alpha-secret")}"

[[tenant]]
name = "slow"
token_sha256 = "{digest("slow-secret")}"
rate_per_s = 0.01
burst = 2

[[tenant]]
name = "heavy"
token_sha256 = "{digest("heavy-secret")}"
bytes_per_s = 1
burst_bytes = 100

[[tenant]]
name = "ops"
token_sha256 = "{digest("ops-secret")}"
roles = ["infer", "admin"]

[[tenant]]
name = "robot"
token_sha256 = "{digest("robot-secret")}"
roles = ["admin"]
"""


@dataclass
class Fronts:
    """A dispatcher with both ports, and whoever may vouch for it."""

    running: Running
    slice: FakeTriton
    authority: Authority

    def channel(self, authority: Authority | None = None, client: Pair | None = None):
        roots = (authority or self.authority).certificate.read_bytes()
        credentials = grpc.ssl_channel_credentials(roots, *(client.read() if client else ()))
        return grpc.aio.secure_channel(self.running.address, credentials)

    def client(self, client: Pair | None = None):
        more = {"private_key": str(client.key), "certificate_chain": str(client.certificate)} if client else {}
        roots = str(self.authority.certificate)
        return triton.InferenceServerClient(self.running.address, ssl=True, root_certificates=roots, **more)

    async def rest(self, method="POST", path="/v2/models/digits/infer", token="", authority=None, client=None):
        """Status, headers and JSON of one request over TLS."""

        def ask():
            context = ssl.create_default_context(cafile=str((authority or self.authority).certificate))
            if client is not None:
                context.load_cert_chain(client.certificate, client.key)
            connection = http.client.HTTPSConnection(self.running.rest_address, context=context, timeout=30)
            with contextlib.closing(connection):
                headers = {"Authorization": f"Bearer {token}"} if token else {}
                connection.request(method, path, BODY if method == "POST" else None, headers)
                answer = connection.getresponse()
                text = answer.read()
                return answer.status, dict(answer.getheaders()), json.loads(text) if text else {}

        return await asyncio.to_thread(ask)


def rest_image():
    tensor = rest.InferInput("IMAGE", [1, 8, 8], "UINT8")
    return tensor.set_data_from_numpy(np.full((1, 8, 8), 4, np.uint8), binary_data=False)


BODY = json.dumps({"inputs": [rest_image()._get_tensor()]}).encode()


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"} if token else {}


@contextlib.asynccontextmanager
async def serving(state, folder: Path, **settings) -> AsyncIterator[Fronts]:
    authority = Authority(folder)
    own = authority.server()
    chosen = {"rest_address": "127.0.0.1:0", "front_tls_certificate": own.certificate, "front_tls_key": own.key}
    async with dispatcher_system(state, folder, FakeTriton(version=1), **chosen | settings) as system:
        yield Fronts(system.running, system.slice, authority)


@pytest.fixture
def tenants(tmp_path) -> Path:
    path = tmp_path / "tenants.toml"
    path.write_text(TENANTS)
    return path


# TLS


async def test_tls_serves_whoever_trusts_its_authority(state, tmp_path):
    async with serving(state, tmp_path) as world:
        async with world.client() as client:
            assert (await client.infer("digits", [image(5)])).as_numpy("PROBABILITIES").argmax() == 5
        code, _, answer = await world.rest()
        assert (code, answer["outputs"][0]["data"][4]) == (200, 1.0)

        def ask():
            options = {"ca_certs": str(world.authority.certificate)}
            with rest.InferenceServerClient(world.running.rest_address, ssl=True, ssl_options=options) as one:
                return one.infer("digits", [rest_image()]).as_numpy("PROBABILITIES").argmax()

        assert await asyncio.to_thread(ask) == 4


async def test_a_plain_client_gets_nothing_from_a_tls_port(state, tmp_path):
    async with serving(state, tmp_path) as world:
        async with triton.InferenceServerClient(world.running.address) as client:
            with pytest.raises(InferenceServerException) as refused:
                await client.infer("digits", [image()], client_timeout=30)
        assert refused.value.status() in ("StatusCode.UNAVAILABLE", "StatusCode.DEADLINE_EXCEEDED")
        reader, writer = await asyncio.open_connection("127.0.0.1", world.running.rest.port)
        writer.write(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert await reader.read() == b""
        writer.close()
        assert not world.slice.requests


async def test_a_client_that_trusts_another_authority_does_not_connect(state, tmp_path):
    other = Authority(tmp_path, "other")
    async with serving(state, tmp_path) as world:
        async with world.channel(other) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await service_pb2_grpc.GRPCInferenceServiceStub(channel).ServerLive(pb.ServerLiveRequest(), timeout=30)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(ssl.SSLCertVerificationError):
            await world.rest("GET", "/v2/health/live", authority=other)


# Client certificates


@pytest.mark.gate
async def test_client_certificates_are_demanded_and_must_be_signed_by_the_named_authority(state, tmp_path):
    clients, strangers = Authority(tmp_path, "clients"), Authority(tmp_path, "strangers")
    known, stranger = clients.client("known"), strangers.client("stranger")
    async with serving(state, tmp_path, front_client_ca=clients.certificate) as world:
        async with world.client(known) as client:
            assert (await client.infer("digits", [image(5)])).as_numpy("PROBABILITIES").argmax() == 5
        assert (await world.rest(client=known))[0] == 200
        for pair in (None, stranger):
            async with world.channel(client=pair) as channel:
                stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await stub.ServerLive(pb.ServerLiveRequest(), timeout=30)
                assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            with pytest.raises((ssl.SSLError, http.client.RemoteDisconnected, ConnectionError)):
                await world.rest("GET", "/v2/health/live", client=pair)
        assert len(world.slice.requests) == 2


# Tokens


@pytest.mark.parametrize("token", ["", "wrong", "ALPHA-SECRET"])
@pytest.mark.gate
async def test_without_a_tenants_token_nothing_but_health_is_answered(state, tmp_path, tenants, token):
    async with serving(state, tmp_path, tenants_file=tenants) as world:
        async with world.client() as client, world.channel() as channel:
            calls = (
                client.infer("digits", [image()], headers=bearer(token)),
                client.is_server_ready(headers=bearer(token)),
                client.get_inference_statistics("digits", headers=bearer(token)),
                client.load_model("digits", headers=bearer(token)),
            )
            for call in calls:
                with pytest.raises(InferenceServerException, match=r"no valid token\. Remedy") as refused:
                    await call
                assert refused.value.status() == "StatusCode.UNAUTHENTICATED"
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            metadata = tuple(bearer(token).items())
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.ModelStreamInfer(iter([pb.ModelInferRequest(model_name="digits")]), metadata=metadata).read()
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            async with asyncio.timeout(60):
                async for health in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
                    if health.status == health_pb2.HealthCheckResponse.SERVING:
                        break
        for method, path in (
            ("POST", "/v2/models/digits/infer"),
            ("GET", "/v2"),
            ("GET", "/v2/models/digits"),
            ("GET", "/v2/models/stats"),
            ("POST", "/v2/repository/index"),
            ("POST", "/v2/repository/models/digits/load"),
            ("GET", "/nothing"),
        ):
            code, headers, answer = await world.rest(method, path, token)
            assert (code, headers["www-authenticate"]) == (401, "Bearer")
            assert "no valid token" in answer["error"]
        for path in ("/v2/health/live", "/v2/health/ready"):
            assert (await world.rest("GET", path))[0] == 200
        assert not world.slice.requests


async def test_a_tenants_requests_are_counted_as_its_own(state, tmp_path, tenants):
    async with serving(state, tmp_path, tenants_file=tenants) as world:
        windows = world.running.loop.subscribe()
        seen: Counter[str] = Counter()

        async def count():
            while seen.total() < 2:
                window: LoadWindow = await windows.get()
                for cell in window.cells:
                    seen[cell.key.tenant] += cell.answered

        counting = asyncio.create_task(count())  # who does not keep up loses windows
        async with world.client() as client:
            await client.infer("digits", [image(5)], headers=bearer("alpha-secret"))
        assert (await world.rest(token="ops-secret"))[0] == 200
        await asyncio.wait_for(counting, 60)
        assert +seen == {"alpha": 1, "ops": 1}


# Limits


async def test_over_its_rate_a_tenant_is_told_when_to_come_back_and_others_are_served(state, tmp_path, tenants):
    async with serving(state, tmp_path, tenants_file=tenants) as world, world.channel() as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        data = request().SerializeToString()
        slow = (("authorization", "Bearer slow-secret"),)
        await infer(data, metadata=slow)
        assert (await world.rest(token="slow-secret"))[0] == 200, "both ports count together"
        with pytest.raises(grpc.aio.AioRpcError, match=r"tenant slow may send 0\.01 requests per second") as refused:
            await infer(data, metadata=slow)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        trailers = dict(refused.value.trailing_metadata())
        assert 90_000 < int(trailers["grpc-retry-pushback-ms"]) <= 100_001
        code, headers, answer = await world.rest(token="slow-secret")
        assert (code, "tenant slow may send" in answer["error"]) == (429, True)
        assert 90 < int(headers["retry-after"]) <= 101
        await infer(data, metadata=(("authorization", "Bearer alpha-secret"),))
        assert len(world.slice.requests) == 3
        assert world.running.local.accounting.load.totals["digits"].failed == 0, "what was turned away is not demand"


async def test_over_its_bytes_a_tenant_is_refused_after_the_request_that_crossed_the_line(state, tmp_path, tenants):
    async with serving(state, tmp_path, tenants_file=tenants) as world, world.client() as client:
        for _ in range(2):
            await client.infer("digits", [image(1)], headers=bearer("heavy-secret"))
        with pytest.raises(InferenceServerException, match="tenant heavy may send 1 bytes per second") as refused:
            await client.infer("digits", [image(1)], headers=bearer("heavy-secret"))
        assert refused.value.status() == "StatusCode.RESOURCE_EXHAUSTED"


async def test_each_message_of_a_stream_counts(state, tmp_path, tenants):
    async with serving(state, tmp_path, tenants_file=tenants) as world, world.channel() as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        message = request()
        answers = stub.ModelStreamInfer(iter([message] * 4), metadata=(("authorization", "Bearer slow-secret"),))
        errors = [answer.error_message async for answer in answers]
        assert [bool(error) for error in errors] == [False, False, True, True]
        assert "tenant slow may send" in errors[2]


async def test_a_compressed_request_counts_as_what_it_becomes(state, tmp_path):
    async with serving(state, tmp_path, message_bytes_max=2**20) as world:
        roots = grpc.ssl_channel_credentials(world.authority.certificate.read_bytes())
        packed = {"compression": grpc.Compression.Gzip, "options": [("grpc.max_send_message_length", -1)]}
        async with grpc.aio.secure_channel(world.running.address, roots, **packed) as channel:
            infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            data = request().SerializeToString()
            await infer(data, timeout=30)
            with pytest.raises(grpc.aio.AioRpcError, match="larger than max") as refused:
                await infer(data + b"\x3a" + bytes((0x80, 0x80, 0x80, 0x08)) + bytes(2**24), timeout=30)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert len(world.slice.requests) == 1


# Roles


async def test_loading_models_needs_the_admin_role_and_is_the_controllers_even_then(state, tmp_path, tenants):
    async with serving(state, tmp_path, tenants_file=tenants) as world, world.client() as client:
        for call in (client.load_model, client.unload_model):
            with pytest.raises(InferenceServerException, match="tenant alpha has no role 'admin'") as refused:
                await call("digits", headers=bearer("alpha-secret"))
            assert refused.value.status() == "StatusCode.PERMISSION_DENIED"
            with pytest.raises(InferenceServerException, match="the controller decides") as refused:
                await call("digits", headers=bearer("ops-secret"))
            assert refused.value.status() == "StatusCode.UNIMPLEMENTED"
        for action in ("load", "unload"):
            path = f"/v2/repository/models/digits/{action}"
            assert (await world.rest("POST", path, "alpha-secret"))[0] == 403
            assert (await world.rest("POST", path, "ops-secret"))[0] == 501


async def test_inference_needs_the_role_for_it(state, tmp_path, tenants):
    async with serving(state, tmp_path, tenants_file=tenants) as world, world.client() as client:
        with pytest.raises(InferenceServerException, match="tenant robot has no role 'infer'") as refused:
            await client.infer("digits", [image()], headers=bearer("robot-secret"))
        assert refused.value.status() == "StatusCode.PERMISSION_DENIED"
        code, _, answer = await world.rest(token="robot-secret")
        assert (code, "no role 'infer'" in answer["error"]) == (403, True)
        assert not world.slice.requests


# Listeners


@pytest.mark.parametrize("more", [{}, {"front_tls": True}, {"tenants": True}])
async def test_ports_that_others_reach_need_tls_and_a_way_to_know_callers(state, tmp_path, tenants, more):
    own = Authority(tmp_path).server()
    settings = {"rest_address": "0.0.0.0:0"}
    settings |= {"front_tls_certificate": own.certificate, "front_tls_key": own.key} if more.get("front_tls") else {}
    settings |= {"tenants_file": tenants} if more.get("tenants") else {}
    with pytest.raises(SettingError, match="needs TLS and a token"):
        async with dispatching(state, tmp_path, **settings):
            raise AssertionError("it listens")


@pytest.mark.parametrize("by", ["tenants_file", "front_client_ca"])
async def test_tls_with_client_certificates_or_tenants_is_protection_enough(state, tmp_path, tenants, by):
    known = {"tenants_file": tenants, "front_client_ca": Authority(tmp_path, "clients").certificate}
    async with serving(state, tmp_path, rest_address="0.0.0.0:0", **{by: known[by]}) as world:
        assert world.running.rest.port


@pytest.mark.parametrize("field", ["front_tls_certificate", "front_tls_key", "front_client_ca"])
async def test_certificates_that_cannot_be_used_stop_the_start(state, tmp_path, field):
    broken = tmp_path / "broken.pem"
    broken.write_text("nothing")
    own = Authority(tmp_path).server()
    settings = {"front_tls_certificate": own.certificate, "front_tls_key": own.key, field: broken}
    with pytest.raises(SettingError, match=r"broken\.pem.*cannot be used.*Remedy"):
        async with dispatching(state, tmp_path, rest_address="127.0.0.1:0", **settings):
            raise AssertionError("it listens")


async def test_both_ports_take_a_renewed_certificate_at_the_next_connection(state, tmp_path):
    async with serving(state, tmp_path) as world:

        def shown() -> list[str]:
            ports = (world.running.address, world.running.rest_address)
            return [ssl.get_server_certificate(("127.0.0.1", int(each.rpartition(":")[2]))) for each in ports]

        async with world.client() as before:
            assert await before.is_server_live()
            was = await asyncio.to_thread(shown)
            world.authority.server()  # written in the place of the first
            now = await asyncio.to_thread(shown)
            assert not set(was) & set(now)
            assert await before.is_server_live(), "a connection outlives the certificate that it began with"
        async with world.client() as after:
            assert await after.is_server_live()


# The process, with its admin port


def process(redis_url: str, state, folder: Path, tenants: Path, workers: int = 1):
    """`python -m dispatcher` with its inference, REST and admin port."""
    more = {"rest_address": f"127.0.0.1:{free_ports(1)[0]}", "tenants_file": str(tenants)}
    return dispatcher(folder, redis_url, state.keys.cluster, workers, "one", **more)


@pytest.mark.gate
async def test_the_admin_port_asks_for_the_admin_role(shared_redis, state, tmp_path, tenants):
    async with process(shared_redis.url, state, tmp_path, tenants) as one:
        async with grpc.aio.insecure_channel(one.admin_address) as channel:
            stub = dispatcher_pb2_grpc.DispatcherStub(channel)

            async def code(token, method, request):
                metadata = tuple(bearer(token).items())
                try:
                    await getattr(stub, method)(request, metadata=metadata, timeout=60, wait_for_ready=True)
                except grpc.aio.AioRpcError as error:
                    return error.code().name
                return "OK"

            table = dispatcher_pb2.GetTableRequest()
            assert await code("ops-secret", "GetTable", table) == "OK"
            assert await code("alpha-secret", "GetTable", table) == "PERMISSION_DENIED"
            assert await code("", "GetTable", table) == "UNAUTHENTICATED"
            drain = dispatcher_pb2.DrainRequest()
            assert await code("alpha-secret", "Drain", drain) == "PERMISSION_DENIED"
            assert await code("wrong", "Drain", drain) == "UNAUTHENTICATED"

        def ask():
            with rest.InferenceServerClient(one.rest_address) as client:
                assert client.is_server_live()
                return client.get_server_metadata(headers=bearer("alpha-secret"))["name"]

        assert await asyncio.to_thread(ask) == "trefoil"
        one.process.terminate()
        code, log = await one.ended()
        assert code == 0, log
        assert "secret" not in log, "tokens are not in the log"


async def test_workers_share_a_tenants_limit(shared_redis, state, tmp_path, tenants):
    tenants.write_text(TENANTS.replace("burst = 2", "burst = 20"))
    async with FakeTriton() as slice_, process(shared_redis.url, state, tmp_path, tenants, workers=2) as one:
        plane = Plane(state)
        await plane.node(node([status(0, slice_.target, variant="digits-xs")]))
        await plane.plan(plan([route([target(0, "digits-xs", credits=8)])]))

        def ask(token):
            connection = http.client.HTTPConnection(one.rest_address, timeout=20)  # a new one: any worker's
            with contextlib.closing(connection):
                connection.request("POST", "/v2/models/digits/infer", BODY, {"Authorization": f"Bearer {token}"})
                return connection.getresponse().status

        async with grpc.aio.insecure_channel(one.admin_address) as channel:
            stub = dispatcher_pb2_grpc.DispatcherStub(channel)
            request, metadata = dispatcher_pb2.GetTableRequest(), tuple(bearer("ops-secret").items())
            async with asyncio.timeout(90):
                ready = 0
                while ready < 2:  # both serve
                    table = await stub.GetTable(request, metadata=metadata, wait_for_ready=True)
                    ready = sum(not worker.why for worker in table.workers)
        # One after the other: the number that they share has no lock, and what one books while the other is between
        # reading and writing is lost.
        codes = [await asyncio.to_thread(ask, "slow-secret") for _ in range(60)]
        assert codes == 20 * [200] + 40 * [429]
