"""Activity from a dcgm-exporter's page: what is read of it, and when it is not believed."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from power_agent.devices.dcgm import Dcgm, parse_metrics
from tests.support.simulated_driver import create_slice, inventory_on, make_driver
from trefoil.core.energy import AttributionMethod
from trefoil.core.fleet import SliceKey
from trefoil.runtime.clock import ManualClock

GPU = "node0/gpu0"
LABELS = (
    'gpu="0",UUID="{uuid}",pci_bus_id="00000000:07:00.0",device="nvidia0",modelName="NVIDIA A100-SXM4-40GB",'
    'GPU_I_PROFILE="{profile}",GPU_I_ID="{gi}",Hostname="node0",DCGM_FI_DRIVER_VERSION="535.161.08"'
)


def page(uuid, values, metric="DCGM_FI_PROF_GR_ENGINE_ACTIVE", watts=71.2):
    """As dcgm-exporter writes it: comments, one line per instance, metrics of the whole GPU repeated for each."""
    lines = [
        "# HELP DCGM_FI_DEV_POWER_USAGE Power draw (in W).",
        "# TYPE DCGM_FI_DEV_POWER_USAGE gauge",
        *(f"DCGM_FI_DEV_POWER_USAGE{{{LABELS.format(uuid=uuid, profile=p, gi=g)}}} {watts}" for p, g, _ in values),
        f"# HELP {metric} Ratio of time the graphics engine is active.",
        f"# TYPE {metric} gauge",
        *(f"{metric}{{{LABELS.format(uuid=uuid, profile=p, gi=g)}}} {v:f}" for p, g, v in values),
    ]
    return "\n".join(lines) + "\n"


class Exporter:
    """A web server whose page a test sets."""

    def __init__(self):
        outer = self
        self.text, self.status = "", 200

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                body = outer.text.encode()
                self.send_response(outer.status)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/metrics"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def exporter():
    served = Exporter()
    yield served
    served.close()


@pytest.fixture
def driver():
    return make_driver()


@pytest.fixture
def inventory(driver):
    with inventory_on(driver) as opened:
        yield opened


@pytest.fixture
def clock():
    return ManualClock()


def test_an_instance_is_known_by_its_gpu_and_number():
    found = parse_metrics(page("GPU-1", [("1g.5gb", 7, 0.25), ("1g.5gb", 8, 1.0)]) + "\n")
    assert found == {("GPU-1", 7): 0.25, ("GPU-1", 8): 1.0}


def test_engine_activity_is_scaled_to_the_instance_and_sm_activity_is_preferred():
    engine = page("GPU-1", [("3g.20gb", 2, 0.2), ("2g.10gb", 3, 0.75)])
    assert parse_metrics(engine) == {("GPU-1", 2): pytest.approx(0.6), ("GPU-1", 3): 1.0}
    both = engine + page("GPU-1", [("3g.20gb", 2, 1.294)], "DCGM_FI_PROF_SM_ACTIVE")
    assert parse_metrics(both) == {("GPU-1", 2): 1.0, ("GPU-1", 3): 1.0}


def test_a_gpu_without_mig_has_no_instance():
    text = 'DCGM_FI_PROF_SM_ACTIVE{gpu="1",UUID="GPU-2",device="nvidia1",Hostname="n"} 0.5\n'
    assert parse_metrics("# TYPE DCGM_FI_PROF_SM_ACTIVE gauge\n" + text) == {("GPU-2", None): 0.5}


def test_slices_get_their_activity_once_dcgm_can_have_seen_them(exporter, inventory, clock):
    made = create_slice(inventory, GPU, "2g.10gb", 2)
    exporter.text = page(inventory.uuid(GPU), [("2g.10gb", made.gi_id, 0.25)])
    dcgm = Dcgm(exporter.url, inventory, clock)
    assert dcgm.method == AttributionMethod.DCGM
    assert "nothing fetched" in dcgm.unavailable_reason
    dcgm.fetch()
    assert dcgm.unavailable_reason == ""
    assert dcgm.activity(GPU, {made.key: 1}) == {}  # DCGM may still speak of a predecessor with this id
    clock.move(13.0)
    exporter.text = page(inventory.uuid(GPU), [("2g.10gb", made.gi_id, 0.3)])
    dcgm.fetch()
    assert dcgm.activity(GPU, {made.key: 1}) == {made.key: pytest.approx(0.6)}
    assert dcgm.activity(GPU, {made.key: 2}) == {}  # created again


def test_a_page_that_stands_still_is_stale_and_says_how_to_mend_it(exporter, inventory, clock):
    made = create_slice(inventory, GPU, "2g.10gb", 2)
    values = [("2g.10gb", made.gi_id, 0.25)]
    dcgm = Dcgm(exporter.url, inventory, clock)
    dcgm.activity(GPU, {made.key: 1})
    clock.move(13.0)
    exporter.text = page(inventory.uuid(GPU), values)
    dcgm.fetch()
    assert dcgm.activity(GPU, {made.key: 1})
    clock.move(4.0)
    dcgm.fetch()
    assert dcgm.activity(GPU, {made.key: 1}) == {}
    assert "--collect-interval 1000" in dcgm.unavailable_reason
    exporter.text = page(inventory.uuid(GPU), values, watts=71.3)
    dcgm.fetch()
    assert dcgm.activity(GPU, {made.key: 1})
    assert dcgm.unavailable_reason == ""


@pytest.mark.parametrize(
    ("text", "status", "trouble"),
    [
        ("", 200, "add one to the exporter's collectors"),
        ("up 1\n", 200, "add one to the exporter's collectors"),
        ("<html>no metrics</html>\n", 200, "is the exporter running"),
        ("up 1\n", 503, "503"),
    ],
)
def test_whatever_is_wrong_is_said_and_nothing_is_made_up(exporter, inventory, clock, text, status, trouble):
    exporter.text, exporter.status = text, status
    dcgm = Dcgm(exporter.url, inventory, clock)
    dcgm.fetch()
    assert trouble in dcgm.unavailable_reason
    assert dcgm.activity(GPU, {SliceKey(GPU, "2g.10gb", 2, 2): 1}) == {}


def test_nobody_listens(exporter, inventory, clock):
    dcgm = Dcgm(exporter.url, inventory, clock)
    exporter.close()
    dcgm.fetch()
    assert "refused" in dcgm.unavailable_reason
    assert dcgm.activity(GPU, {}) == {}


def test_it_fetches_by_itself(exporter, inventory, clock):
    exporter.text = page("GPU-1", [("1g.5gb", 7, 0.25)])
    dcgm = Dcgm(exporter.url, inventory, clock)
    dcgm.start()
    waited = threading.Event()
    for _ in range(200):
        if not dcgm.unavailable_reason:
            break
        waited.wait(0.02)
    assert dcgm.unavailable_reason == ""
    dcgm.close()
