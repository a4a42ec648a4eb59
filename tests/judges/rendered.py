"""Settings files and command lines of the services of `trefoil up`; files of Compose and Swarm."""

import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final
from unittest import mock

import yaml

from tests.judges.commands import ROOT, folder, normalised
from tests.unit.cli.test_deploy_env import HERE
from trefoil.cli.demo.own_repository import with_own_repository
from trefoil.cli.deploy.env_file import render, values_of
from trefoil.cli.deploy.machine import Wanted
from trefoil.cli.run import services
from trefoil.cli.run.scenario import DemoScenario, System, load_system
from trefoil.cli.run.state_directory import StatePaths
from trefoil.runtime.clock import WallClock
from trefoil.runtime.config import to_toml
from trefoil.runtime.proc import Identity

CONFIG: Final = ROOT / "deploy" / "config"
SYSTEMS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "up": ("up.toml", {}),
    "up on real GPUs": ("up.toml", {"fleet.kind": "real"}),
    "up from NESO": ("up.toml", {"carbon_feed.provider": "neso", "workers": 2, "port_offset": 1000}),
    **{path.stem: (path.name, {}) for path in sorted(CONFIG.glob("demo*.toml"))},
}
WANTED: Final = {
    "defaults": Wanted(),
    "node": Wanted("node", redis_url="rediss://10.0.0.1:6379"),
    "gpu": Wanted("gpu"),
    "set": Wanted(given={"TREFOIL_TAG": "1.3", "TREFOIL_ZONE": "GB", "TREFOIL_BIND": "0.0.0.0"}),
}
MOUNTED: Final = ("compose", "swarm", "prometheus", "systemd", "nftables")


def up() -> Iterator[tuple[str, Any]]:
    """Launch, and argument list, order of start and settings file of each service."""
    fixed = {"token_urlsafe": lambda n: f"<secret of {n}>", "token_hex": lambda n: "5" * 2 * n}  # drawn at each launch
    for name, (file, overrides) in SYSTEMS.items():
        with folder() as tmp, mock.patch.multiple(secrets, **fixed), mock.patch("os.cpu_count", return_value=8):
            system = load_system(CONFIG / file, System if file == "up.toml" else DemoScenario, overrides)
            system = with_own_repository(system, Path(tmp) / "models") if isinstance(system, DemoScenario) else system
            paths = StatePaths(Path(tmp))
            launch = services.new_launch(system, paths, "<launch>", Identity(1, 1), 0.0)
            yield f"{name}: launch", {key: normalised(repr(value)) for key, value in asdict(launch).items()}
            for service in services.service_table(system, launch, paths, WallClock()).values():
                text = (service.render or to_toml)(service.settings)
                argv = [re.sub(r".*/(redis-server)$", r"\1", normalised(word)) for word in service.argv]
                yield f"{name}: {service.name}", {"argv": argv, "after": service.after, "file": normalised(text)}


def compose() -> Iterator[tuple[str, Any]]:
    """The .env by profile, and docker-compose.yml, parsed."""
    for name, wanted in WANTED.items():
        values = values_of(wanted, replace(HERE, docker_group=999), str(ROOT))
        yield f"{name}: .env", normalised(render(values, HERE))
    yield "docker-compose.yml", yaml.safe_load((ROOT / "docker-compose.yml").read_text())


def swarm() -> Iterator[tuple[str, Any]]:
    """The stack, parsed, and every file that containers and units read."""
    for path in sorted(path for part in MOUNTED for path in (ROOT / "deploy" / part).rglob("*") if path.is_file()):
        if "comes-by-upgrade" not in path.name:  # upgrade.sh writes it on a host
            text = path.read_text()
            yield str(path.relative_to(ROOT)), yaml.safe_load(text) if path.suffix == ".yml" else text
