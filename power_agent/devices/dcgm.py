"""Activity of each GPU instance from the metrics page of a dcgm-exporter that runs on the node anyway.

    DCGM_FI_PROF_SM_ACTIVE{gpu="0",UUID="GPU-...",GPU_I_PROFILE="1g.5gb",GPU_I_ID="7",Hostname="..."} 0.42

The key is the GPU's UUID and the instance id. SM_ACTIVE is preferred: busy multiprocessors of the instance, sometimes
above 1 (github.com/NVIDIA/DCGM issue 152), so values up to 2 are clamped to 1. What is beyond, or below 0, is one of
DCGM's marks for "no value" (9223372036854775794, 140737488355328, ...) and as absent as NaN. GR_ENGINE_ACTIVE is in the
exporter's default list. It counts one busy engine as 1/g of an instance of g compute slices (issue 138), so it is
multiplied by g. Whatever is not fresh is not given: the exporter's own interval is 30 s by default, and its view of
instances lags up to 10 s behind a rebuild (issue 230). `unavailable_reason` says in words why there is nothing; the
meter then falls back.
"""

import http.client
import math
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from power_agent.devices.gpm import GpuInstanceIds
from power_agent.devices.gpus import ACTIVE_MAX
from power_agent.devices.inventory import Inventory
from trefoil import direct
from trefoil.core.energy import AttributionMethod
from trefoil.core.fleet import SliceKey
from trefoil.runtime.clock import Clock
from trefoil.runtime.given.metric_page import page_samples

SM_ACTIVE: Final = "DCGM_FI_PROF_SM_ACTIVE"
ENGINE_ACTIVE: Final = "DCGM_FI_PROF_GR_ENGINE_ACTIVE"
FETCH_S: Final = 0.5
FETCH_TIMEOUT_S: Final = 2.0
FRESH_S: Final = 3.0  # a page that has not changed for so long describes the past
SETTLE_S: Final = 12.0  # DCGM looks for instances every 10 s
PAGE_BYTES_MAX: Final = 16 * 2**20

InstanceKey = tuple[str, int | None]  # (GPU UUID, GPU-instance id; None: the whole GPU)


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """Metrics page of one fetch; `changed_s`: when this content was first seen."""

    changed_s: float = -math.inf
    text: bytes = b""
    activity: Mapping[InstanceKey, float] = field(default_factory=dict)


def parse_metrics(text: str) -> dict[InstanceKey, float]:
    """Activity 0..1 of each instance on a metrics page.

    Raises:
        ValueError: no metrics page.
    """
    found: dict[str, dict[InstanceKey, float]] = {SM_ACTIVE: {}, ENGINE_ACTIVE: {}}
    for sample in page_samples(text, found.__contains__):
        uuid, instance = sample.labels.get("UUID", ""), sample.labels.get("GPU_I_ID", "")
        if not uuid or not 0 <= sample.value <= ACTIVE_MAX or not (instance.isdigit() or not instance):
            continue
        place = (uuid, int(instance) if instance else None)
        width = _width(sample.labels.get("GPU_I_PROFILE", "")) if sample.name == ENGINE_ACTIVE else 1
        value = min(1.0, max(0.0, sample.value * width))
        found[sample.name][place] = max(value, found[sample.name].get(place, 0.0))  # one line per pod on it
    return found[ENGINE_ACTIVE] | found[SM_ACTIVE]


def _width(profile: str) -> int:
    match = re.match(r"(\d)g\.", profile)
    return int(match[1]) if match else 1


class Dcgm:
    """Activity of each slice by DCGM: a thread fetches the page; `activity` only looks at what was fetched."""

    method = AttributionMethod.DCGM

    def __init__(self, url: str, inventory: Inventory, clock: Clock) -> None:
        self._url = url
        self._inventory = inventory
        self._clock = clock
        self._ids = GpuInstanceIds(inventory)
        self._page = MetricsPage()
        self._error = "nothing fetched yet"
        self._first_seen_s: dict[tuple[SliceKey, int], float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dcgm", daemon=True)

    def start(self) -> None:
        """Start the thread that fetches the page."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread that fetches the page; returns at once."""
        self._stop.set()

    @property
    def unavailable_reason(self) -> str:
        """Reason why no activity can be given now, and what to do; empty when it can."""
        if self._error:
            return f"{self._url}: {self._error}"
        if not self._page.activity:
            return f"{self._url}: neither {SM_ACTIVE} nor {ENGINE_ACTIVE} on it; add one to the exporter's collectors"
        age_s = self._clock.monotonic_s() - self._page.changed_s
        if age_s > FRESH_S:
            return f"{self._url}: unchanged for {age_s:.0f} s; run the exporter with --collect-interval 1000"
        return ""

    def activity(self, device: str, generations: Mapping[SliceKey, int]) -> Mapping[SliceKey, float]:
        """Busy share of each slice by the latest page, 0..1; what has no fresh value is absent.

        Raises:
            DeviceError: the driver refuses to list instances.
        """
        now_s = self._clock.monotonic_s()
        places = {(key, generation) for key, generation in generations.items()}
        for place in [p for p in self._first_seen_s if p[0].device == device and p not in places]:
            self._first_seen_s.pop(place)
        for place in places:
            self._first_seen_s.setdefault(place, now_s)
        page = self._page
        if self._error or now_s - page.changed_s > FRESH_S:
            return {}
        uuid = self._inventory.uuid(device)
        found = {}
        for key, gi_id in self._ids.lookup(device, generations).items():
            value = page.activity.get((uuid, gi_id))
            settled = gi_id is None or now_s - self._first_seen_s[key, generations[key]] >= SETTLE_S
            if value is not None and settled:
                found[key] = value
        return found

    def fetch(self) -> None:
        """Fetch the page once; what goes wrong is kept for `unavailable_reason`."""
        try:
            with direct.open_url(self._url, FETCH_TIMEOUT_S) as answer:
                text = answer.read(PAGE_BYTES_MAX + 1)
            if len(text) > PAGE_BYTES_MAX:
                raise ValueError(f"more than {PAGE_BYTES_MAX} bytes")
            if text != self._page.text:
                self._page = MetricsPage(self._clock.monotonic_s(), text, parse_metrics(text.decode()))
            self._error = ""
        except (OSError, urllib.error.URLError, http.client.HTTPException, ValueError) as error:
            self._error = f"{error or type(error).__name__}; is the exporter running?"

    def _run(self) -> None:
        while not self._stop.is_set():
            self.fetch()
            self._stop.wait(FETCH_S)
