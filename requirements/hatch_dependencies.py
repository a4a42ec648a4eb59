"""The wheel's dependencies are `main.in`: one list, read by the build and by the lock."""

from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface


class MainRequirements(MetadataHookInterface):
    def update(self, metadata: dict) -> None:
        lines = (Path(__file__).parent / "main.in").read_text().splitlines()
        metadata["dependencies"] = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
