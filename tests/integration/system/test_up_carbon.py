"""Carbon of live providers behind `trefoil up`: recorded NESO, Electricity Maps, WattTime; and this machine as node.

The launcher checks, writes and starts Redis and the feed of a system for each provider: what the others of its services
do with a reading is the same for all of them. NESO also stands behind a whole `trefoil up`, on CPU slices of this
machine, so that nothing of that system is simulated.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from protos.carbon_feed.v1 import carbon_feed_pb2 as pb
from protos.carbon_feed.v1 import carbon_feed_pb2_grpc as pb_grpc
from tests.support.carbon_answers import EM_DOC, WT_LOGIN, em_series, iso, neso, watttime
from tests.support.carbon_server import CarbonServer, Reply
from tests.support.ports import free_offset
from tests.support.system import RunningSystem, until
from trefoil.cli.run import processes, services
from trefoil.cli.run.launcher import Launcher
from trefoil.cli.run.scenario import System, load_system
from trefoil.cli.run.state_directory import Launch
from trefoil.cli.system_client import launch_token
from trefoil.core.carbon import CarbonReading, Factors, Method, Rung, Series
from trefoil.core.errors import TrefoilError
from trefoil.runtime import codec, rpc
from trefoil.runtime.clock import WallClock

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[3]
SECRET = "s3cret-of-the-site"
ON_A_CORE = ROOT / "deploy" / "config" / "pin-cpu.json"


@pytest.fixture
async def recorded() -> AsyncIterator[CarbonServer]:
    """All three providers at one address, with answers of today."""
    made, now_s = CarbonServer(), WallClock().now_s()
    half_hour_s = now_s // 60 * 60 - 300  # no interval ends during a test
    made.reply("/intensity", Reply(neso(now_s=now_s, start_s=half_hour_s)))
    made.reply("/v4/", Reply(em_series(now_s=now_s)))
    made.reply("/v4/carbon-intensity/latest", Reply({**EM_DOC, "datetime": iso(now_s // 3600 * 3600)}))
    made.reply("/login", Reply(WT_LOGIN))
    made.reply("/v3/", Reply(watttime(now_s=now_s)))
    await made.start()
    yield made
    await made.stop()


PROVIDERS: Mapping[str, tuple[dict[str, str], Series, float]] = {
    "neso": ({}, Series("GB", Method.AVERAGE, Factors.DIRECT), 266.0),
    "electricity_maps": (
        {"zone": "FR", "electricity_maps.token": "env:SITE_KEY"},
        Series("FR", Method.AVERAGE, Factors.LIFECYCLE),
        67.0,
    ),
    "watttime": (
        {
            "zone": "US-CAL-CISO",
            "method": "marginal",
            "watttime.username": "env:SITE_KEY",
            "watttime.password": "file:{key}",
        },
        Series("US-CAL-CISO", Method.MARGINAL, Factors.DIRECT),
        870 * 453.59237 / 1000,
    ),
}


@pytest.mark.gate
@pytest.mark.parametrize("provider", PROVIDERS)
async def test_a_recorded_provider_is_read_behind_up_and_its_key_is_seen_nowhere(
    provider: str, recorded: CarbonServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text(SECRET)
    (tmp_path / "key").chmod(0o600)
    monkeypatch.setenv("SITE_KEY", SECRET)
    given, series, intensity = PROVIDERS[provider]
    table = {"provider": provider, f"{provider}.base_url": recorded.url, **given}
    overrides: dict[str, Any] = {f"carbon_feed.{k}": v.format(key=tmp_path / "key") for k, v in table.items()}
    system = load_system(ROOT / "deploy" / "config" / "up.toml", System, overrides | {"port_offset": free_offset()})
    every = services.service_table
    monkeypatch.setattr(
        services,
        "service_table",
        lambda *all_: {n: s for n, s in every(*all_).items() if n in ("redis", "carbon_feed")},
    )
    async with Launcher(system, tmp_path / "state") as one:
        assert one.launch is not None
        reading = await normal_reading(one.launch)
        assert (reading.series, reading.provider, reading.simulated) == (series, provider, False)
        assert reading.intensity_g_per_kwh == pytest.approx(intensity)
        commands = command_lines(one.launch.launch_id)
        assert any("carbon_feed" in command for command in commands)
        written = [
            path.read_text() for folder in ("config", "logs", "run") for path in one.paths.state_dir.glob(f"{folder}/*")
        ]
        assert not [text for text in (*commands, *written) if SECRET in text]
        planned_by = services.controller_settings(system, one.launch, one.paths)["carbon"]
    assert planned_by == {
        "zone": series.zone,
        "method": series.method.name.lower(),
        "factors": series.factors.name.lower(),
    }
    assert recorded.asked


def command_lines(launch_id: str) -> list[str]:
    """What the process list shows of a launch."""
    return [Path(f"/proc/{one.pid}/cmdline").read_text() for one in processes.descendants(launch_id)]


async def normal_reading(launch: Launch) -> CarbonReading:
    """The reading, once it is the provider's own."""
    async with asyncio.timeout(60), rpc.channel(launch.addresses["carbon_feed"], token=launch_token(launch)) as channel:
        stub = pb_grpc.CarbonFeedStub(channel)
        while True:
            request = pb.GetManyRequest(zones=[launch.zone])
            for found in (await stub.GetMany(request, timeout=10, wait_for_ready=True)).readings:
                reading: CarbonReading = codec.from_proto(found)
                if reading.rung == Rung.NORMAL:
                    return reading
            await asyncio.sleep(0.05)


async def test_up_on_this_machine_with_carbon_of_a_provider_answers_and_nothing_is_simulated(
    recorded: CarbonServer,
) -> None:
    system = RunningSystem(
        {
            "fleet.kind": "real",
            "power_agent.cpu": "serve",
            "carbon_feed.provider": "neso",
            "carbon_feed.neso.base_url": recorded.url,
        }
    )
    try:
        starting = asyncio.create_task(asyncio.to_thread(system.up))
        await pin_when_there(system)
        await starting  # it waits for the first answer
        assert system.started["first_answer_s"] > 0
        status = await asyncio.to_thread(system.ask, "status")
        (node,) = status["nodes"]
        assert (node["node"], node["zone"], node["simulated"]) == ("node0", "GB", False)
        (device,) = (device for device in node["devices"] if device["device"] == "node0/cpu")
        assert [part["state"] for part in device["slices"]] == ["READY"]
        (reading,) = status["carbon"]
        assert (reading["provider"], reading["simulated"], reading["intensity_g_per_kwh"]) == ("neso", False, 266.0)
        explained = await asyncio.to_thread(system.ask, "plan")
        assert "266 g/kWh in GB" in explained["why"]
        launch_id = system.launch.launch_id
        assert any("tritonserver" in command for command in command_lines(launch_id))
        await asyncio.to_thread(system.ask, "down")
        assert not processes.descendants(launch_id), "its Tritons go with it"
    finally:
        await asyncio.to_thread(system.close)


async def pin_when_there(system: RunningSystem) -> None:
    """Planners leave CPUs alone: an operator puts a plan on them, as soon as the node reports them."""

    async def reported() -> bool:
        try:
            async with system.client() as client:
                return bool(await client.nodes()) and bool(await client.plan())
        except TrefoilError:
            return False

    await until(reported, 120, "no node reports within")
    pinned = await asyncio.to_thread(system.ask, "pin", str(ON_A_CORE))
    assert pinned["pinned"] is True
