"""Metrics of the node's own Tritons, each sample with its slice, family and variant, for the agent's metrics page.

They are asked for when the page is, all at once and for at most `ASK_S`, in the thread that makes the page: the agent's
loop never waits for them. One that hangs, or says what cannot be read, is left out, and `trefoil_triton_up` is 0.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from prometheus_client.metrics_core import Metric as Samples
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from power_agent.slices.node_state import Node
from power_agent.triton.client import metrics_page
from trefoil.core.errors import NotFound

ASK_S: Final = 1.0
SAMPLES_MAX: Final = 2000  # of one Triton: models may add separate metrics
PREFIX: Final = "nv_"  # what else a page holds is a model's, and could pass for ours
UP: Final = "trefoil_triton_up"


class TritonMetrics(Collector):
    """Collector of what the running Tritons of a node say of themselves."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._lock = threading.Lock()  # one page at a time: so long a hung Triton is asked once
        self._shown: set[str] = set()

    def collect(self) -> Iterator[Samples]:
        """Ask all Tritons that run now; slices without one are not up."""
        with self._lock:
            urls = {
                part.key.name: part.launch.metrics_url if part.running and part.launch is not None else ""
                for part in tuple(self._node.slices.values())
            }
            pages = asyncio.run(_read_pages({name: url for name, url in urls.items() if url}))
            families: dict[str, Samples] = {}
            for name in urls:
                try:
                    found = read_samples(pages.get(name, ""), name, self._node.variant_of)
                except (ValueError, NotFound):  # shown as not up
                    found = []
                self._node.metrics.set(UP, bool(found), slice=name)
                for family, sample in found:
                    empty = Samples(family.name, family.documentation, family.type)
                    families.setdefault(family.name, empty).samples.append(sample)
            for name in self._shown - urls.keys():
                self._node.metrics.drop(UP, name)
            self._shown = set(urls)
        yield from families.values()


async def _read_pages(urls: Mapping[str, str]) -> Mapping[str, str]:
    """Pages by slice, of those that answer in time."""
    tasks = {asyncio.create_task(metrics_page(url)): name for name, url in urls.items()}
    if not tasks:
        return {}
    done, late = await asyncio.wait(tasks, timeout=ASK_S)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    failed = {task for task in done if isinstance(task.exception(), OSError | ValueError)}
    return {tasks[task]: task.result() for task in done - failed}


def read_samples(page: str, name: str, variant_of: Callable[[str, int], str]) -> Sequence[tuple[Samples, Sample]]:
    """Samples of a page that are Triton's, each with its family, and labelled by slice, family and variant.

    Raises:
        ValueError: no metrics page, or more than `SAMPLES_MAX` of them.
        NotFound: the family is unknown.
    """
    found = []
    # Triton's counters keep Triton's names: as counters they would be given the ending _total.
    text = "\n".join(
        line for line in page.splitlines() if not (line.startswith("# TYPE") and line.endswith(" counter"))
    )
    for family in text_string_to_metric_families(text):
        if not family.name.startswith(PREFIX):
            continue
        for sample in family.samples:
            model, version = sample.labels.get("model", ""), sample.labels.get("version", "")
            variant = variant_of(model, int(version)) if model and version else ""
            labels = {**sample.labels, "slice": name, "family": model, "variant": variant}
            found.append((family, Sample(sample.name, labels, sample.value)))
            if len(found) > SAMPLES_MAX:
                raise ValueError(f"more than {SAMPLES_MAX} samples")
    return found
