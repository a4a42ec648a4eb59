"""The load generator against the real Triton: real images, real answers, the accuracy of the real model."""

import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.triton_process import MODELS, TritonProcess, hosted
from trefoil.cli.load.arrivals import RateProfile
from trefoil.cli.load.generator import LoadSpec, run_load

pytestmark = pytest.mark.integration


@pytest.fixture
def triton(tmp_path: Path) -> Iterator[TritonProcess]:
    process = TritonProcess(tmp_path, 1)
    yield process
    process.close()


async def test_one_full_pass_measures_the_accuracy_of_the_variant(triton):
    server = triton.client()
    await server.wait_ready([hosted(1)], 60)
    family = tomllib.loads((MODELS / "digits" / "family.toml").read_text())
    spec = LoadSpec(RateProfile.constant(300, 4), MODELS / "digits" / "heldout.npz", deadline_s=30)
    result = await run_load(spec, triton.launch.grpc_target)
    summary = result.summary(slo_ms=1000)
    assert summary.failed == 0
    assert summary.requests == pytest.approx(1200, abs=150)
    # Two passes and a rest: what the rest adds is within its own sampling error.
    assert summary.accuracy == pytest.approx(family["variants"][0]["accuracy"], abs=0.02)
    assert summary.variant_shares == {"digits/1": 1.0}  # straight to Triton nobody names the variant
    permuted = await run_load(replace(spec, permute_labels=True), triton.launch.grpc_target)
    assert permuted.summary(1000).accuracy == pytest.approx(0.10, abs=0.05)
    assert permuted.digest == result.digest
    await server.close()
