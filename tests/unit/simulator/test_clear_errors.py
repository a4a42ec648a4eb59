"""What a person gets wrong is named: field, value, what is missing, and what to do."""

from pathlib import Path
from typing import Any

import pytest

from trefoil.core.errors import TrefoilError
from trefoil.simulator import Scenario, simulate

FAMILY = {"name": "digits", "arrivals": {"rate_per_s": 5.0}}


def refused(**more: Any) -> str:
    with pytest.raises(TrefoilError) as error:
        simulate(Scenario(**{"duration_s": 10.0, "families": [FAMILY], **more}))
    return str(error.value)


def test_an_unknown_zone_is_named_with_those_that_are_known():
    said = refused(nodes=[{"zone": "atlantis"}])
    for part in ("atlantis", "known zones: demo", "[carbon.zones.atlantis]"):
        assert part in said


def test_an_empty_trace_is_named_by_its_file(tmp_path: Path):
    (tmp_path / "empty.csv").write_text("timestamp,intensity\n")
    said = refused(carbon={"zones": {"demo": {"trace": tmp_path / "empty.csv"}}})
    assert "empty.csv" in said
    assert "Remedy" in said


def test_a_profile_without_a_slice_names_variant_slice_and_device(tmp_path: Path):
    lines = Path("model_repository/digits/profile.csv").read_text().splitlines(keepends=True)
    (tmp_path / "profile.csv").write_text("".join(line for line in lines if ",3g.20gb,digits-m," not in line))
    said = refused(families=[{**FAMILY, "profile": tmp_path / "profile.csv"}])
    for part in ("digits-m on 3g.20gb of A100-SXM4-40GB", "Remedy", "families.digits.profile"):
        assert part in said


def test_an_slo_that_no_variant_meets_is_refused_with_what_is_closest():
    said = refused(families=[{**FAMILY, "objective": {"slo": {"latency_ms": 1.0}}}])
    for part in ("digits", "slo.latency_ms", "no variant", "Remedy"):
        assert part in said
