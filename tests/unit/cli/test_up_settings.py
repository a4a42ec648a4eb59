"""What `[carbon_feed]`, `[power_agent]` and `fleet.kind` make of a system: judged by the services' own settings."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from carbon_feed.settings import CarbonFeedSettings
from dispatcher.settings import DispatcherSettings
from power_agent.devices.driver_lock import DriverLock
from power_agent.devices.errors import DriverUnavailable
from power_agent.devices.inventory import Inventory
from power_agent.settings import PowerAgentSettings
from tests.support.ports import free_offset
from trefoil.cli.demo.spread import judged_by_simulation
from trefoil.cli.options import parse_sets
from trefoil.cli.run import services, supervisor
from trefoil.cli.run.launcher import Launcher
from trefoil.cli.run.real_node import check_real_node
from trefoil.cli.run.scenario import DemoScenario, System, load_system
from trefoil.cli.run.shutdown import ShutdownSignals
from trefoil.cli.run.state_directory import StatePaths
from trefoil.core.errors import SettingError, StartError, TrefoilError
from trefoil.runtime import config
from trefoil.runtime.clock import WallClock
from trefoil.runtime.config import to_toml
from trefoil.runtime.proc import Identity

SHIPPED = Path(__file__).parents[3] / "deploy" / "config"
TRITON = Path(".venv-triton")
NOW_S = 1_795_000_000.0


def up(**overrides: Any) -> System:
    """The shipped system with these settings, dots written as `__`."""
    return load_system(SHIPPED / "up.toml", System, {name.replace("__", "."): v for name, v in overrides.items()})


def written(system: System, folder: Path, name: str) -> Path:
    """Settings file of a service, as its launch writes it."""
    paths = StatePaths(folder)
    launch = services.new_launch(system, paths, "l", Identity(1, 1), NOW_S)
    path = folder / f"{name}.toml"
    path.write_text(to_toml(getattr(services, f"{name}_settings")(system, launch, paths)))
    return path


def test_one_setting_names_a_provider_and_the_rest_of_the_system_follows_its_series(tmp_path: Path) -> None:
    system = up(carbon_feed__provider="neso", carbon_feed__neso__poll_s="600")
    feed = config.load(CarbonFeedSettings, written(system, tmp_path, "carbon_feed"))
    assert (feed.provider, feed.zone, feed.factors, feed.neso.poll_s) == ("neso", "GB", "direct", 600.0)
    services.check_carbon(system, NOW_S)
    paths = StatePaths(tmp_path)
    launch = services.new_launch(system, paths, "l", Identity(1, 1), NOW_S)
    planned_by = {"zone": "GB", "method": "average", "factors": "direct"}
    assert services.controller_settings(system, launch, paths)["carbon"] == planned_by
    assert services.power_agent_settings(system, launch, paths)["zone"] == launch.zone == "GB"


def test_a_site_with_power_of_its_own_and_the_settings_of_a_trace_pass_through(tmp_path: Path) -> None:
    site = up(
        carbon_feed__provider="override", carbon_feed__override__base="neso", carbon_feed__override__own_share="0.4"
    )
    feed = config.load(CarbonFeedSettings, written(site, tmp_path, "carbon_feed"))
    assert (feed.zone, feed.override.base, feed.override.own_share) == ("GB", "neso", 0.4)
    services.check_carbon(site, NOW_S)
    replay = up(carbon_feed__trace__at_end="stop")
    feed = config.load(CarbonFeedSettings, written(replay, tmp_path, "carbon_feed"))
    assert (feed.provider, feed.zone, feed.trace.at_end) == ("trace", "demo", "stop")
    assert feed.trace.speedup == replay.carbon.speedup, "only a trace is played faster than it happened"


def test_what_the_documents_say_of_up_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EM_TOKEN", "s3cret")
    for page in ("carbon.md", "first-node.md"):
        text = (SHIPPED.parents[1] / "docs" / page).read_text()
        lines = [line.partition("#")[0].split() for line in text.splitlines() if line.startswith("trefoil up --set")]
        assert lines
        for words in lines:
            sets = [word for word, before in zip(words[1:], words, strict=False) if before == "--set"]
            system = load_system(SHIPPED / "up.toml", System, parse_sets(sets))
            services.check_carbon(system, NOW_S)
            services.agent_settings(system)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"provider": "nesso"}, r"provider = 'nesso'.*\[carbon_feed\]"),
        ({"provider": "neso", "zone": "FR"}, "carbon_feed.zone = 'FR': neso knows Great Britain only"),
        ({"provider": "neso", "factors": "lifecycle"}, "carbon_feed.method, factors.*direct"),
        ({"provider": "electricity_maps", "zone": "FR"}, "carbon_feed.electricity_maps.token: no secret"),
        ({"provider": "electricity_maps", "electricity_maps": {"token": "s3cret"}}, r"'\*\*\*': a secret must not"),
        ({"provider": "watttime", "watttime": {"username": "env:TREFOIL_NOT_SET"}}, "TREFOIL_NOT_SET.*is empty"),
        ({"provider": "override"}, "carbon_feed.override.own_share"),
        ({"redis_url": "redis://elsewhere"}, "carbon_feed.redis_url.*`up` makes that setting itself"),
        ({"neso": {"pol_s": 3}}, "neso.pol_s: unknown setting"),
    ],
)
def test_what_the_feed_would_refuse_is_refused_before_anything_starts(given: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingError, match=named) as refused:
        services.check_carbon(up(carbon_feed=given), NOW_S)
    assert "s3cret" not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_real_node_has_no_simulated_one_and_takes_its_tritons_down_with_it(tmp_path: Path) -> None:
    system = up(fleet__kind="real", power_agent__docker_image="nvcr.io/nvidia/tritonserver:24.08-py3")
    agent = config.load(PowerAgentSettings, written(system, tmp_path, "power_agent"))
    assert (agent.node_socket, agent.runtime_name, agent.stop_slices_on_exit) == (None, "docker", True)
    assert agent.driver_marker == Path("/sys/module/nvidia")
    assert agent.meter == "nvml"
    paths = StatePaths(tmp_path)
    launch = services.new_launch(system, paths, "l", Identity(1, 1), NOW_S)
    table = services.service_table(system, launch, paths, WallClock())
    assert "node" not in table
    assert table["power_agent"].after == ("redis",)
    simulated = config.load(PowerAgentSettings, written(up(), tmp_path, "power_agent"))
    assert simulated.node_socket == paths.node_socket
    for name in ("node", "stop_slices_on_exit", "node_socket", "admin_address"):
        with pytest.raises(SettingError, match=f"power_agent.{name}"):
            services.agent_settings(up(**{f"power_agent__{name}": "x"}))
    with pytest.raises(SettingError, match=r"cpu = 'always'.*\[power_agent\]"):
        services.agent_settings(up(power_agent__cpu="always"))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """GPUs that NVML lists here; None stands for a machine without a driver."""
    found: list[object] = []

    def initialise(_: Inventory) -> None:
        if None in found:
            raise DriverUnavailable("node0: could not initialise NVML: not found", remedy="install the driver")

    monkeypatch.setattr(Inventory, "open", initialise)
    monkeypatch.setattr(Inventory, "list_devices", lambda _: tuple(found))
    return found


async def test_without_a_gpu_up_is_refused_and_nothing_has_started(tmp_path: Path, gpus: list[object]) -> None:
    gpus.append(None)
    said: list[str] = []
    with pytest.raises(StartError, match=r"no GPU serves.*not found.*nvidia-smi -L.*power_agent\.cpu=serve") as refused:
        async with Launcher(up(fleet__kind="real", port_offset=free_offset()), tmp_path / "state", say=said.append):
            pass
    assert "\n" not in str(refused.value)
    assert said == []
    assert not StatePaths(tmp_path / "state").run.exists()


def test_gpus_or_cpus_that_serve_make_a_node_unless_another_agent_has_them(tmp_path: Path, gpus: list[object]) -> None:
    marker = tmp_path / "nvidia"
    marker.touch()
    here: dict[str, Any] = {"triton_environment": TRITON, "driver_marker_path": marker}
    with pytest.raises(StartError, match="NVML lists none"):
        check_real_node(PowerAgentSettings(**here))
    assert check_real_node(PowerAgentSettings(**here, cpu="serve")) == 0
    gpus += [object(), object()]
    assert check_real_node(PowerAgentSettings(**here)) == 2
    with pytest.raises(TrefoilError, match="triton_binary"):
        check_real_node(PowerAgentSettings(**here, triton_binary=tmp_path / "nowhere"))
    with pytest.raises(SettingError, match="docker_image"):
        check_real_node(PowerAgentSettings(**here, runtime="docker"))
    held = DriverLock(marker)
    held.take(None)
    with pytest.raises(StartError, match="another power agent governs these GPUs"):
        check_real_node(PowerAgentSettings(**here))
    held.release()


class Told:
    """What a supervisor says, instead of a pipe."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.is_ready = asyncio.Event()

    def say(self, line: str) -> None:
        self.lines.append(line)

    def ready(self, inference: str, answered_s: float | None) -> None:
        self.lines.append(f"ready {answered_s}")
        self.is_ready.set()

    def error(self, line: str) -> None:
        self.lines.append(f"error {line}")


@pytest.mark.parametrize("kind", ["real", "simulated"])
async def test_a_real_node_that_does_not_answer_yet_stays_up_and_a_simulated_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    async def no_answer(*_: object) -> float:
        raise StartError("no answer within 60 s")

    monkeypatch.setattr(services, "service_table", lambda *_: {})
    monkeypatch.setattr(services, "preflight", lambda *_: None)
    monkeypatch.setattr(supervisor, "first_answer", no_answer)
    told: Any = Told()
    system = up(fleet__kind=kind)
    running = asyncio.create_task(supervisor.supervise(system, tmp_path / "state", ShutdownSignals(), told))
    if kind == "simulated":
        assert await running == 2
        assert told.lines == ["error no answer within 60 s"]
        return
    await asyncio.wait_for(told.is_ready.wait(), 60)
    assert told.lines == ["no answer within 60 s", "ready None"]
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


CPUS = {"fleet.kind": "real", "fleet.devices": '["cpu:2"]'}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"fleet.kind": "real"}, "a demo plays simulated GPUs, or this machine's CPUs"),
        (CPUS, "power_agent.cpu = 'serve'"),
        ({"fleet.devices": '["cpu:2"]'}, "unknown device type 'cpu:2'"),
        ({"carbon_feed.provider": "neso"}, "a demo plays a trace"),
    ],
)
def test_a_demo_plays_simulated_gpus_or_cpus_that_serve_and_a_trace(given: dict[str, str], why: str) -> None:
    with pytest.raises(SettingError, match=why):
        load_system(SHIPPED / "demo.toml", DemoScenario, given)


def test_the_demo_of_cpus_measures_no_slo_and_checks_the_policies_that_it_plays_alone() -> None:
    found = load_system(SHIPPED / "demo-infadapter.toml", DemoScenario)
    assert found.policies_run == found.policies == ("vpa_plus", "ms_plus", "infadapter")
    assert found.load.peak_per_s == 3 * found.load.base_per_s
    assert judged_by_simulation(found) is found


def test_the_dispatcher_is_named_the_key_files_of_the_agents_engines(tmp_path: Path) -> None:
    engine = {"family": "chat", "variant": "a", "address": "http://h:9000/v1/", "devices": ["gpu0"]}
    other = {**engine, "variant": "b", "address": "http://h:9001/v1", "devices": ["gpu1"]}
    system = up(power_agent__engines=[{**engine, "key_file": "/etc/key"}, other])
    made = config.load(DispatcherSettings, written(system, tmp_path, "dispatcher"))
    assert made.engine_key_files == {"http://h:9000/v1": Path("/etc/key")}
    agent = config.load(PowerAgentSettings, written(system, tmp_path, "power_agent"))
    assert [each.key_file for each in agent.engines] == [Path("/etc/key"), None]
    for wrong in ("h:9000", "http://u:secret@h/v1"):
        with pytest.raises(SettingError, match="not an address of an engine") as caught:
            DispatcherSettings(engine_key_files={wrong: "/etc/key"})
        assert "secret" not in str(caught.value)
