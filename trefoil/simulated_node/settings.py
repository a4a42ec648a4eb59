"""Settings and flags of a simulated node."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from trefoil.core import errors
from trefoil.core.device_types import DRIVERS
from trefoil.runtime import config
from trefoil.simulated_node.calls import CALLS
from trefoil.simulated_node.driver import DRIVER_VERSION
from trefoil.simulated_node.gpu_models import gpu_model


class NodeSettings(config.Settings):
    """Settings of a simulated node."""

    node: str = "node0"
    """Name of the node."""
    socket: Path = Path("node.sock")
    """Unix socket that the agent connects to. Pace files and driver_load_id are kept beside it."""
    devices: tuple[str, ...] = ("A100-SXM4-40GB", "A100-SXM4-40GB")
    """Device types of its GPUs, in order."""
    mig_enabled: bool = True
    """State of MIG mode at boot (on A100 it survives reboots)."""
    model_repository: Path = Path("model_repository")
    """Families whose profiles say how long batches take and what they draw."""
    profile_overrides: dict[str, Path] = Field(default_factory=dict)
    """family -> another profile.csv: another truth than the one that planners may believe."""
    seed: int = 0
    """Of service times and noise."""
    tick_ms: Annotated[float, Field(ge=20.0, le=50.0)] = 40.0
    """Update period of counter and power, as 20-100 ms on hardware."""
    noise_ratio: Annotated[float, Field(ge=0.0, le=0.2)] = 0.01
    """Standard deviation of power from tick to tick."""
    call_latency: bool = True
    """Let changing calls take as long as a driver does."""
    clock_settle: bool = True
    """Clocks follow a lock after 5 to 50 ms."""
    counter_ms: Annotated[float, Field(ge=0.0, le=100.0)] = 0.0
    """Period of the energy counter; 0 = every tick."""
    driver_version: Annotated[str, Field(pattern=r"^\d+(\.\d+)*$")] = DRIVER_VERSION
    """Before 510 a 4g and a 3g instance exclude each other."""
    root: bool = True
    """false: calls that change something are refused with NO_PERMISSION."""
    symbols_missing: tuple[str, ...] = ()
    """C names that this driver lacks, as an old one does."""
    stale_listing: bool = False
    """Instances that other software destroyed stay listed, with dead handles, until the next nvmlInit."""
    fresh_uuids: bool = True
    """A re-created instance gets another MIG UUID; false = as driver R470, which repeated them."""
    triton_log_mib: Annotated[int, Field(ge=1)] = 16
    """Size at which a Triton's log is rotated [MiB]; two files of that size stay of each slice."""
    log_level: str = "info"
    """Least severe lines that are logged."""
    log_json: bool | None = None
    """None: pretty on a terminal, JSON otherwise."""

    @field_validator("devices")
    @classmethod
    def _known_devices(cls, devices: tuple[str, ...]) -> tuple[str, ...]:
        for name in devices:
            try:
                gpu_model(name)
            except errors.NotFound as error:
                raise ValueError(f"no simulated device {name!r}; one of {', '.join(DRIVERS)}") from error
        return devices

    @field_validator("symbols_missing")
    @classmethod
    def _known_symbols(cls, symbols: tuple[str, ...]) -> tuple[str, ...]:
        for name in symbols:
            if name not in CALLS:
                raise ValueError(f"no symbol {name!r}; a C name such as nvmlGpmSampleGet")
        return symbols


def parse(argv: Sequence[str]) -> NodeSettings:
    """Parse the command line: flags over environment over the settings file."""
    parser = argparse.ArgumentParser(prog="python -m trefoil.simulated_node", description=__doc__)
    parser.add_argument("--config", type=Path, metavar="TOML", help="settings file")
    parser.add_argument("--node", help="name of the node")
    parser.add_argument("--socket", help="path of its Unix socket")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting")
    arguments = parser.parse_args(argv)
    named = {name: value for name in ("node", "socket") if (value := getattr(arguments, name)) is not None}
    overrides = {**config.parse_pairs("--set", arguments.set), **named}
    return config.load(NodeSettings, arguments.config, "TREFOIL_NODE_", overrides)
