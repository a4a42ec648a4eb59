"""The wheel's dependencies: `main.in`, one list for the build and the lock, without what builds the wheel itself."""

import tomllib
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface


class MainRequirements(MetadataHookInterface):
    def update(self, metadata: dict) -> None:
        builders = tomllib.loads(Path(self.root, "pyproject.toml").read_text())["build-system"]["requires"]
        lines = (Path(__file__).parent / "main.in").read_text().splitlines()
        wanted = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        metadata["dependencies"] = [line for line in wanted if line not in builders]
