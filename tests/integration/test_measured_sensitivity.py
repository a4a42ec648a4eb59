"""`trefoil family sensitivity --agent`: operators timed on a real Triton whose simulated GPU keeps its clock's pace."""

import json
import shutil
from pathlib import Path

import pytest

from tests.support.agent_cluster import AgentCluster
from tests.support.commands import trefoil
from tests.support.triton_process import MODELS
from trefoil.profiler.operator_times import PLACES
from trefoil.runtime.repository import link_shared

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.long]
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of an operator's time that follow the clock, by the place it is timed in
PASS_MS, OUTSIDE_MS = 2.0, 5.0  # of eight copies, and of what is around them: far above what the graphs take here
PASSES = 4096


def repository(folder: Path) -> Path:
    """Digits-xs alone, with a profile that says how long each of its operators takes, and what the clock does to it."""
    made = folder / "models"
    family = made / "digits"
    family.mkdir(parents=True)
    link_shared(MODELS, made)
    shutil.copyfile(MODELS / "digits" / "config.pbtxt", family / "config.pbtxt")
    shutil.copytree(MODELS / "digits" / "1", family / "1")  # files are below their repository
    head, *parts = (MODELS / "digits" / "family.toml").read_text().split("[[variants]]")
    (family / "family.toml").write_text("[[variants]]".join([head, *(part for part in parts if '"digits-xs"' in part)]))
    lines = (MODELS / "digits" / "profile.csv").read_text().splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("device_type"))
    rows = [f"{line}," for line in lines[at + 1 :] if ",digits-xs," in line]
    for place in range(PLACES):
        for batch in (1, PASSES):
            ms = OUTSIDE_MS + PASS_MS * batch
            times = f"{ms},{ms * 1.0001},{ms * 1.0002},{1e3 * batch / ms}"
            share = SHARES[place % len(SHARES)]
            rows.append(f"A100-SXM4-40GB,7g.40gb,digits-xs,{place + 1},{batch},1410,,{times},{ms / 10},100,16,{share}")
    head = [*lines[:at], "# clock_sensitivity: made up by this test", f"{lines[at]},clock_sensitivity"]
    (family / "profile.csv").write_text("\n".join([*head, *rows]) + "\n")
    return made


@pytest.mark.timeout(400)
async def test_measured_scores_are_those_of_the_law_by_which_the_simulated_gpu_slows_down(tmp_path):
    models = repository(tmp_path)
    graph, out = str(models / "digits" / "1" / "model.onnx"), str(tmp_path / "out")
    async with AgentCluster(quiet_probe_s=60, ready_timeout_s=60, model_repository=models) as one:
        code, printed, error = await trefoil(
            "family", "sensitivity", graph, "--agent", one.target, "--window", "1", "--out", out, "--json"
        )
        assert code == 0, error
        node = await one.node()
    scores = json.loads(printed)["scores"]
    print(
        *(f"{s['operator']}: {s['time_ms']:.4f} ms, {s['score']:.3f}, {s['samples']}, {s['source']}" for s in scores),
        sep="\n",
    )
    timed = [score for score in scores if score["bytes"]]
    assert [score["operator"] for score in timed] == ["Cast", "Mul", "AveragePool", "Gemm", "Softmax", "Mean"]
    where = "measured on node0/gpu0, a SIMULATED A100-SXM4-40GB, slice 7g.40gb, at 1410 and 705 MHz"
    for place, score in enumerate(timed):
        assert score["source"] == where
        assert score["time_ms"] == pytest.approx(PASS_MS / 8, rel=0.1)
        assert score["score"] == pytest.approx(2 * SHARES[place % len(SHARES)], abs=0.2)
    assert all(score["source"].startswith("modelled") for score in scores if not score["bytes"])
    assert all(device.clock_lease is None and not device.slices for device in node.devices)
    assert sorted(path.name for path in models.iterdir() if "@" in path.name) == []
