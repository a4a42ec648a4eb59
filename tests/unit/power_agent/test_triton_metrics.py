"""Metrics of Tritons on the agent's page: labelled by slice, family and variant, whatever one of them does."""

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from power_agent.slices.triton_metrics import ASK_S, TritonMetrics
from trefoil.core.errors import NotFound
from trefoil.runtime.metrics import TRITON_METRICS
from trefoil.runtime.telemetry import Metrics

HEAD = "# HELP nv_inference_request_success Number of successful inference requests, all batch sizes\n"
GOOD = (
    f"{HEAD}# TYPE nv_inference_request_success counter\n"
    'nv_inference_request_success{{model="digits",version="2"}} {count}\n'
    "# HELP nv_pinned_memory_pool_total_bytes Pinned memory pool total memory size, in bytes\n"
    "# TYPE nv_pinned_memory_pool_total_bytes gauge\n"
    "nv_pinned_memory_pool_total_bytes 268435456\n"
)
PAGES = {
    "/good": GOOD.format(count=7),
    "/other": GOOD.format(count=3),
    "/garbage": "nv_inference_request_success{model=",
    "/unknown": GOOD.format(count=1).replace("digits", "cats"),
    "/false": GOOD.format(count=5) + 'trefoil_device_power_watts{device="node0/gpu0"} 1\n',
    "/flood": "".join(f'nv_custom{{place="{n}"}} 1\n' for n in range(3000)),
}


@pytest.fixture(scope="module")
def tritons():
    let_go = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path == "/hangs":
                let_go.wait(30)
                return
            self.send_response(200 if self.path in PAGES else 404)
            self.end_headers()
            self.wfile.write(PAGES.get(self.path, "").encode())

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    let_go.set()
    server.shutdown()
    server.server_close()
    thread.join()


def variant_of(family: str, version: int) -> str:
    if family != "digits":
        raise NotFound("no such family")
    return f"mlp-{version}"


class Agent:
    """An agent whose slices have Tritons at these paths; "" = none runs there."""

    def __init__(self, root: str, **paths: str) -> None:
        self.metrics = Metrics("power_agent", simulated=True)
        self.slices: dict[str, Any] = {
            name: SimpleNamespace(
                key=SimpleNamespace(name=name), running=bool(path), launch=SimpleNamespace(metrics_url=root + path)
            )
            for name, path in paths.items()
        }
        node: Any = SimpleNamespace(slices=self.slices, metrics=self.metrics, variant_of=variant_of)
        self.metrics.pass_on(TritonMetrics(node))

    def page(self) -> dict[str, list[tuple[dict[str, str], float]]]:
        found: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in text_string_to_metric_families(self.metrics.text()):
            for sample in family.samples:
                found.setdefault(sample.name, []).append((sample.labels, sample.value))
        return found

    def up(self) -> dict[str, float]:
        return {labels["slice"]: value for labels, value in self.page().get("trefoil_triton_up", [])}


def test_each_sample_says_whose_it_is(tritons):
    page = Agent(tritons, a="/good", b="/other").page()
    model = {"model": "digits", "version": "2", "family": "digits", "variant": "mlp-2", "simulated": "true"}
    assert page["nv_inference_request_success"] == [({**model, "slice": "a"}, 7.0), ({**model, "slice": "b"}, 3.0)]
    assert {labels["slice"] for labels, _ in page["nv_pinned_memory_pool_total_bytes"]} == {"a", "b"}


def test_one_that_hangs_costs_a_second_and_no_page(tritons):
    agent = Agent(tritons, hung="/hangs", also="/hangs", a="/good")
    began_s = time.monotonic()
    page = agent.page()
    assert time.monotonic() - began_s < 3 * ASK_S
    assert [value for _, value in page["nv_inference_request_success"]] == [7.0]
    assert {labels["slice"]: value for labels, value in page["trefoil_triton_up"]} == {"hung": 0, "also": 0, "a": 1}


@pytest.mark.parametrize("path", ["/garbage", "/missing", "/unknown", "/flood", ""])
def test_what_cannot_be_read_is_left_out_and_not_up(tritons, path):
    agent = Agent(tritons, bad=path, a="/good")
    assert agent.up() == {"bad": 0, "a": 1}
    assert [labels["slice"] for labels, _ in agent.page()["nv_inference_request_success"]] == ["a"]


def test_a_model_cannot_pass_its_metrics_for_the_agents(tritons):
    assert "trefoil_device_power_watts" not in Agent(tritons, a="/false").page()


def test_a_slice_that_is_gone_is_not_shown(tritons):
    agent = Agent(tritons, a="/good", b="/other")
    assert agent.up() == {"a": 1, "b": 1}
    del agent.slices["a"]
    assert agent.up() == {"b": 1}


def test_only_what_triton_says_is_declared_as_its_own():
    assert all(metric.name.startswith("nv_") for metric in TRITON_METRICS)
