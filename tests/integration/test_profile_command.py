"""`trefoil family profile` on a node of real Tritons on this machine's CPU slices, through its agent and directly."""

import json
import shutil
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.agent_cluster import AgentCluster
from tests.support.commands import trefoil
from tests.support.ports import free_block
from tests.support.triton_process import MODELS
from trefoil.core.common import Basis
from trefoil.core.fleet import SliceState
from trefoil.runtime.repository import load_family

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
PROFILE = ("family", "profile", "digits")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster():
    base = free_block(300)  # CPU slices come after the ports of 16 GPUs
    async with AgentCluster(
        node_socket=None, cpu="serve", triton_port_base=base, quiet_probe_s=1, ready_timeout_s=60
    ) as one:
        yield one


def only(folder: Path, *names: str) -> Path:
    """The digits with some of their variants: a fraction of the time."""
    family = folder / "digits"
    family.mkdir()
    text = (MODELS / "digits" / "family.toml").read_text()
    head, *parts = text.split("[[variants]]")
    kept = [part for part in parts if any(f'"{name}"' in part for name in names)]
    (family / "family.toml").write_text("[[variants]]".join([head, *kept]))
    shutil.copy(MODELS / "digits" / "heldout.npz", family)
    return folder


async def test_a_node_that_serves_is_not_taken(cluster, tmp_path):
    from tests.integration.test_cpu_node import FIRST, run

    await run(cluster, (FIRST, 1))
    code, _, error = await trefoil(*PROFILE, "--agent", cluster.target, "--slices", "cpu:1")
    assert code == 2
    assert "its slices serve" in error
    assert "--replace" in error
    (status,) = (await cluster.slices()).values()
    assert status.state == SliceState.READY
    direct = ["--triton", status.grpc_target, "--device-type", "cpu:2", "--slices", "cpu:1", "--window", "0.2"]
    code, _, error = await trefoil(*PROFILE, *direct)
    assert code == 2
    assert "digits-s" in error  # version 2 is not loaded there
    code, _, error = await trefoil(
        *PROFILE, *direct, "--variants", "digits-xs", "--batches", "1,64", "--out", str(tmp_path / "a.csv")
    )
    assert code == 2
    assert "at most 8 items" in error
    code, _, error = await trefoil(*PROFILE, "--agent", cluster.target, "--replace", "--slices", "9g.99gb")
    assert code == 2
    assert "9g.99gb" in error
    await run(cluster)


async def test_a_cpu_slice_is_profiled_through_its_agent_and_the_file_loads(cluster, tmp_path):
    out = tmp_path / "profile.csv"
    common = [
        "--agent",
        cluster.target,
        "--slices",
        "cpu:1",
        "--repository",
        str(only(tmp_path, "digits-xs", "digits-l")),
    ]
    quick = ["--batches", "1,8", "--rates", "0.5", "--window", "0.4", "--out", str(out), "--json"]
    code, printed, error = await trefoil(*PROFILE, *common, *quick, "--estimate-energy")  # not every machine has RAPL
    assert code == 0, error
    points = json.loads(out.with_suffix(".json").read_text())
    assert len(points) == 4
    no_meter = all(point["energy_active_j"] is None for point in points)
    basis = Basis.MODELLED if no_meter else Basis.MEASURED
    answer = json.loads(printed)
    assert answer["rows"] == 4
    _, rows = load_family(tmp_path / "digits", out)
    assert {(row.variant, row.batch) for row in rows} == {(v, b) for v in ("digits-xs", "digits-l") for b in (1, 8)}
    assert all(row.provenance is not None and row.provenance.basis == basis for row in rows)
    assert all(row.slice_type == "cpu:1" and row.clock_mhz == 0 for row in rows)
    assert all(0.05 < row.latency_ms_p50 < 1000 and row.throughput_per_s > 1 for row in rows)
    for point in answer["points"]:
        (rate,) = point["rates"]
        assert rate["answered_per_s"] > 0
    print(
        "\n".join(f"{p['variant']} b{p['batch']}: {p['latency_ms']} ms, {p['throughput_per_s']:.0f}/s" for p in points)
    )
    assert await cluster.slices() == {}  # the node is left empty


async def test_joules_come_from_the_agents_counters_at_a_clock_and_under_a_power_limit(tmp_path):
    async with AgentCluster(quiet_probe_s=1, ready_timeout_s=60) as one:
        out = tmp_path / "profile.csv"
        where = ["--agent", one.target, "--slices", "7g.40gb", "--repository", str(only(tmp_path, "digits-l"))]
        quick = ["--batches", "1", "--rates", "", "--window", "0.5", "--out", str(out), "--json"]
        code, _, error = await trefoil(*PROFILE, *where, *quick, "--clocks", "1005", "--limits", "120")
    assert code == 0, error
    folder = MODELS / "digits"
    _, rows = load_family(tmp_path / "digits", out)
    limited, clocked = rows
    assert (clocked.clock_mhz, limited.clock_mhz) == (1005, -120)
    assert limited.power_w <= 120.0
    for row in rows:
        assert row.provenance is not None
        assert row.provenance.basis == Basis.SYNTHETIC, "on a simulated GPU"
        _, shipped = load_family(folder)
        wanted = next(r for r in shipped if (r.slice_type, r.variant, r.batch) == ("7g.40gb", row.variant, 1))
        print(
            row.variant, row.latency_ms_p50, row.energy_active_j_per_batch, row.power_w, "at 1410 MHz:", wanted.power_w
        )
        assert row.latency_ms_p50 > 1.1 * wanted.latency_ms_p50
        assert 0.2 * wanted.power_w < row.power_w < 1.2 * wanted.power_w
