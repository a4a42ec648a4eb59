"""Run a simulated GPU node: `python -m power_agent.simulated --node N --socket S`."""

import asyncio
import sys
from collections.abc import Sequence

from power_agent.simulated.node_server import NodeServer
from power_agent.simulated.settings import parse
from trefoil.core import errors
from trefoil.runtime.clock import WallClock
from trefoil.runtime.given.catalog_files import CatalogFiles
from trefoil.runtime.telemetry import setup_logging


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
