"""The wheel's dependencies: `main.in` and the `services.in` that it takes in, one list for the build and the lock."""

from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface


class MainRequirements(MetadataHookInterface):
    def update(self, metadata: dict) -> None:
        folder = Path(__file__).parent
        lines = [line for name in ("services.in", "main.in") for line in (folder / name).read_text().splitlines()]
        metadata["dependencies"] = [line for line in lines if line and not line.startswith(("#", "-r "))]
