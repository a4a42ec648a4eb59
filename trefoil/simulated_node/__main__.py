"""Run a simulated GPU node: `python -m trefoil.simulated_node --node N --socket S`."""

import asyncio
import sys
from collections.abc import Sequence

from trefoil.core import errors
from trefoil.runtime.clock import WallClock
from trefoil.runtime.given.catalog_files import CatalogFiles
from trefoil.runtime.telemetry import setup_logging
from trefoil.simulated_node.node_server import NodeServer
from trefoil.simulated_node.settings import parse


def main(argv: Sequence[str]) -> int:
    """Run the node; exit code 2 when the settings are refused."""
    try:
        settings = parse(argv)
        setup_logging("node", settings.log_level, settings.log_json)
        files = CatalogFiles(settings.model_repository, settings.profile_overrides)
        asyncio.run(NodeServer(settings, files, WallClock()).run())
    except errors.TrefoilError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
