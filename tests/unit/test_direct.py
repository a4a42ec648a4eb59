"""No way to a loopback or internal address goes by a proxy that the environment names."""

import asyncio
import http.server
import threading
from collections.abc import Iterator

import pytest
import requests
import tritonclient.grpc.aio as triton

from power_agent.runtimes import docker_engine
from power_agent.triton.client import TritonClient, TritonUnready
from tests.support.fake_triton import FakeTriton
from trefoil import direct, health
from trefoil.cli.load.inputs import inputs_of_model
from trefoil.cli.system_client import is_serving
from trefoil.runtime import rpc
from trefoil.runtime.clock import WallClock
from trefoil.runtime.config import ServiceSettings

NOBODY = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def proxies(monkeypatch):
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy"):
        monkeypatch.setenv(name, NOBODY)
        monkeypatch.setenv(name.upper(), NOBODY)
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def page() -> Iterator[str]:
    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"trefoil_up 1")

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/metrics"
    server.shutdown()
    server.server_close()


async def test_services_are_seen_as_up_and_health_checks_them():
    server = rpc.make_server(ServiceSettings(admin_address="127.0.0.1:0"), [])
    await server.start()
    try:
        address = f"127.0.0.1:{server.port}"
        assert await is_serving(address)
        assert await asyncio.to_thread(health.ask, address, "", [None, None, None], 10.0) == ("SERVING", True)
    finally:
        await server.stop()


async def test_tritons_are_reached_by_the_agent_the_load_and_the_clients(tmp_path):
    async with FakeTriton() as slice_:
        client = TritonClient(slice_.target, "http://127.0.0.1:1/metrics", tmp_path, WallClock())
        with pytest.raises(TritonUnready, match="UNIMPLEMENTED"):  # it is reached, and has no such method
            await client.loaded("digits", 1)
        await client.close()
        assert (await inputs_of_model(slice_.target, "digits", None, {})).tensors
        async with triton.InferenceServerClient(slice_.target, channel_args=list(direct.TRITON_CLIENT)) as ours:
            assert (await ours.get_model_metadata("digits")).name == "digits"


def test_pages_are_got(page):
    with direct.open_url(page, 10.0) as answer:
        assert answer.read() == b"trefoil_up 1"


def test_an_engine_by_tcp_is_asked(page, monkeypatch):
    asked = {}

    def answer(session, request, **more):
        asked.update(more["proxies"])
        raise requests.ConnectionError("enough")

    monkeypatch.setattr(requests.Session, "send", answer)
    with pytest.raises(Exception, match="enough"):
        docker_engine.Engine("tcp://127.0.0.1:1").query("ask", lambda api: api.ping())
    assert not asked
