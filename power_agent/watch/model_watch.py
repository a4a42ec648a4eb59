"""Model watch: reads the catalogue again where its files have changed, and reports variants that this node cannot load.

It cannot load a variant of which a file was removed, cut short or replaced. What runs continues: a Triton has its model
in memory. Planners go round what is named here (`NodeStatus.missing`), and use it again when it is gone from there.
What the node has is published too (`NodeStatus.models`): the controller compares it.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Final

from power_agent.slices.node_state import Node
from power_agent.triton.model_digests import ModelDigests
from trefoil.core.fleet import CATALOG, MISSING_MODEL
from trefoil.runtime.given.catalog_files import CatalogFiles

PERIOD_S: Final = 2.0


class ModelWatch:
    """Watch of the model repository's files."""

    def __init__(
        self,
        node: Node,
        files: CatalogFiles,
        digests: ModelDigests,
        in_thread: Callable[[Callable[[], Any]], Awaitable[Any]],
    ) -> None:
        self._node, self._files, self._digests, self._in_thread = node, files, digests, in_thread
        self._reported: set[str] = set()

    async def run(self) -> None:
        """Look every period until cancelled."""
        while True:
            await self.refresh()
            await self._node.clock.sleep(PERIOD_S)

    async def refresh(self) -> None:
        """Look once: each refusal is logged and published when it is news, and so is its end."""
        await self._files.refresh()
        self._node.report_missing(CATALOG, self._files.why)
        refused = await self._in_thread(self._digests.refusals)
        self._node.set_models(self._digests.report())
        now = {f"{MISSING_MODEL}{family}/{version}": why for (family, version), why in refused.items()}
        for name in self._reported - now.keys():
            self._node.report_missing(name, "")
        for name, why in now.items():
            self._node.report_missing(name, why)
        self._reported = set(now)
