import re
import time
from pathlib import Path

import pytest

from trefoil.core.common import Basis
from trefoil.core.errors import CatalogError
from trefoil.core.objective import TokenSlo
from trefoil.runtime.given.repository_names import CONFIG_BYTES_MAX
from trefoil.runtime.repository import COLUMNS, load_catalog, load_family

ROOT = Path(__file__).parents[3]

FAMILY = """
name = "toy"
metric = "top-1"
[classes.""]
percentile = 95.0
latency_ms = 50.0
[[variants]]
name = "small"
version = 1
accuracy = 0.8
accuracy_source = "held-out"
memory_mib = 10
load_s = 1.5
macs = 100
licence = "MIT"
[[variants]]
name = "large"
version = 2
accuracy = 0.9
accuracy_source = "held-out"
memory_mib = 20
load_s = 2.5
macs = 1000
licence = "MIT"
"""
PROFILE = f"""# basis: synthetic
# source: a test
# machine: none
# date: 2026-11-21
# commit: abc
{",".join(COLUMNS)}
A100-SXM4-40GB,1g.5gb,small,0,1,1410,,10,11,12,100,1.5,35,10
A100-SXM4-40GB,1g.5gb,small,0,2,1410,,16,17,18,120,2.5,35,10
A100-SXM4-40GB,1g.5gb,large,0,1,1410,small+other,20,22,23,50,3.0,35,20
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "family.toml").write_text(FAMILY)
    (tmp_path / "toy" / "profile.csv").write_text(PROFILE)
    return tmp_path / "toy"


@pytest.mark.parametrize(
    ("contract", "joins"),
    [
        ("max_batch_size: 8\ndynamic_batching { }\n", True),
        ("dynamic_batching: {\n  preferred_batch_size: [ 4 ]\n}\n", True),
        ("max_batch_size: 8\n# dynamic_batching { }\n", False),
        ('parameters { key: "dynamic_batching {" value { string_value: "1" } }\n', False),
        ('name: "a" dynamic_batching { }\n', True),
        ("name: 'it\\'s \"a' dynamic_batching : # joins\n{ }\n", True),
        ("dynamic_batching <>\n", True),
        ("parameters { key: '\\'dynamic_batching { }' }\n", False),
        ('name: "#" # "\ndynamic_batching { }\n', True),
        ("no_dynamic_batching { }\n", False),
    ],
)
def test_a_family_forms_batches_where_its_contract_says_so(folder, contract, joins):
    (folder / "config.pbtxt").write_text(contract)
    assert load_family(folder)[0].batching == joins


@pytest.mark.parametrize(
    "part", ["\n", " ", '"', "'", "#", '\\"', "\\'", "dynamic_batching", "dynamic_batching\n", ": "]
)
def test_no_contract_takes_long_to_read(folder, part):
    text = part * (CONFIG_BYTES_MAX // len(part) - 100)
    for before in ("", '"', "dynamic_batching"):
        (folder / "config.pbtxt").write_text(before + text)
        began_s = time.process_time()
        assert not load_family(folder)[0].batching
        assert time.process_time() - began_s < 2.0


def test_loads(folder):
    family, rows = load_family(folder)
    assert family.classes == {"": (50.0, 0.95)}
    assert family.best.name == "large"
    assert [row.cohosted for row in rows] == [(), (), ("small", "other")]
    assert rows[1].batch == 2
    assert rows[0].family == "toy"
    provenance = rows[0].provenance
    assert (provenance.basis, provenance.source, provenance.version) == (Basis.SYNTHETIC, "a test on none", "abc")
    assert provenance.as_of_s == 1795219200.0


def test_a_generative_family_and_no_other_states_its_mean_tokens(folder):
    path, head = folder / "family.toml", 'name = "toy"\n'
    path.write_text(FAMILY.replace(head, head + "generative = true\ntokens_mean = 12.5\n"))
    family, _ = load_family(folder)
    assert (family.generative, family.tokens_mean) == (True, 12.5)
    for given, remedy in (("generative = true\n", "state them"), ("tokens_mean = 12.5\n", "remove it")):
        path.write_text(FAMILY.replace(head, head + given))
        with pytest.raises(CatalogError, match=rf"tokens_mean.*Remedy: {remedy}"):
            load_family(folder)


def test_the_catalogue_of_this_repository_loads():
    catalog = load_catalog(ROOT / "model_repository")
    assert catalog.family("digits").best.accuracy > 0.97
    row = catalog.lookup("A100-SXM4-40GB", "7g.40gb", "digits", catalog.family("digits").best.name, 1410)
    assert row.provenance.basis is Basis.SYNTHETIC


def test_a_profile_can_be_replaced(folder, tmp_path):
    other = tmp_path / "other.csv"
    other.write_text("\ufeff" + PROFILE.replace("synthetic", "measured"))  # as spreadsheets save it
    catalog = load_catalog(tmp_path, {"toy": other})
    assert {row.provenance.basis for row in catalog.rows} == {Basis.MEASURED}
    with pytest.raises(CatalogError, match=r"profile_overrides = \['tyo'\].*one of: toy"):
        load_catalog(tmp_path, {"tyo": other})


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("accuracy = 0.8", "accuracy = 80", r"variants.0.accuracy = 80: .*less than or equal to 1 \(in .*family.toml"),
        ("accuracy = 0.8", "acuracy = 0.8", r"variants.0.acuracy|variants.0.accuracy"),
        ("version = 2", "version = 1", "variants.version = 1: .*occurs twice"),
        ('name = "large"', 'name = "small"', "variants.name = 'small': .*occurs twice"),
        ('name = "toy"', 'name = "tuy"', "name = 'tuy': .*folder's name 'toy'"),
        ("percentile = 95.0", "percentile = 950", "percentile = 950"),
        ("percentile = 95.0\nlatency_ms = 50.0", "slo_ms = 50.0", "slo_ms: unknown setting .*Remedy: write latency_ms"),
        ("load_s = 1.5", "load_s = nan", "load_s = nan: .*finite"),
        ('[classes.""]\npercentile = 95.0\nlatency_ms = 50.0', "classes = {}", "classes = {}"),
        ('metric = "top-1"', "metric = ", "not valid TOML"),
        (
            "[[variants]]",
            "[classes.gold]\npercentile = 95.0\nlatency_ms = 9.0\ntpot_ms = 5.0\n[[variants]]",
            "class 'gold': slo.tpot_ms = 5.0: of a family that streams no tokens",
        ),
        ("latency_ms = 50.0", "latency_ms = 50.0\nttft_ms = 0", r"classes\.+ttft_ms = 0: .*greater than 0"),
        ("latency_ms = 50.0", "latency_ms = 50.0\nttft_ms = 9", "set slo.ttft_ms, slo.tpot_ms there"),
        (
            'metric = "top-1"',
            'metric = "top-1"\ncolour = "red"',
            "colour: unknown setting .*use one of: classes, .*metric",
        ),
    ],
)
def test_a_malformed_family_is_named(folder, old, new, named):
    path = folder / "family.toml"
    assert old in FAMILY
    path.write_text(FAMILY.replace(old, new, 1))
    refused(folder, named, path)


def test_a_class_of_a_generative_family_may_have_objectives_of_tokens(folder):
    gold = "[classes.gold]\npercentile = 99.0\nlatency_ms = 40.0\nttft_ms = 9.0\nttft_percentile = 90.0\n"
    text = FAMILY.replace('metric = "top-1"', 'metric = "top-1"\ngenerative = true\ntokens_mean = 4.0')
    (folder / "family.toml").write_text(text.replace("[[variants]]", gold + "[[variants]]", 1))
    family, _ = load_family(folder)
    assert family.classes["gold"] == (40.0, 0.99)
    assert family.token_classes == {"gold": TokenSlo(9.0, 0.9, 0.0, 0.0)}


def test_a_family_names_all_that_it_lacks_at_once(folder):
    path = folder / "family.toml"
    path.write_text('name = "toy"\n[[variants]]\nname = "small"\nversion = 1\n')
    lacks = ("accuracy", "accuracy_source", "memory_mib", "load_s", "macs", "licence")
    named = ", ".join(("classes", *(f"variants.0.{field}" for field in lacks)))
    refused(folder, f"^metric: missing .in .*; also missing: {named}.. Remedy: give it a value", path)
    path.write_text('name = "toy"\nmetrics = "top-1"\n[[variants]]\nname = "small"\nversion = 0\naccuracy = 7\n')
    wrong = "^metric: missing .*; also missing: classes, .*: variants.0.version; .*: variants.0.accuracy; .*: metrics"
    refused(folder, wrong, path)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        (",10,11,12,", ",10,9,12,", "latency_ms_p50 = 10.0: .*line 7: above latency_ms_p95"),
        (",10,11,12,", ",-10,11,12,", "latency_ms_p50 = '-10': .*greater than 0 .in .*line 7"),
        (",10,11,12,", ",ten,11,12,", "latency_ms_p50 = 'ten': .*line 7"),
        (",1.5,35,10", ",nan,35,10", "energy_active_j_per_batch = 'nan': .*line 7"),
        (",1.5,35,10", ",1.5,35", "line 7: 13 cells for 14 columns"),
        (",2.5,35,10", ",0.5,35,10", "energy_active_j_per_batch = 0.5: .*batch 2 is below batch 1"),
        ("small,0,2", "small,0,1", "operating point.*occurs twice"),
        ("small,0,2", "tiny,0,2", r"variant = 'tiny': .*line 8: not in family.toml.*use one of: small, large"),
        ("batch,", "bach,", r"columns = \['bach', 'batch'\]"),
        ("# commit: abc\n", "", "commit: .*header line missing"),
        ("synthetic", "guessed", "basis = 'guessed': .*measured, modelled, synthetic"),
        ("2026-11-21", "yesterday", "date = 'yesterday': .*YYYY-MM-DD"),
        (PROFILE[PROFILE.index("A100") :], "", "variant = 'small': .*no row"),
        (PROFILE[PROFILE.index("device_type") :], "", "holds no rows"),
    ],
)
def test_a_malformed_profile_is_named(folder, old, new, named):
    path = folder / "profile.csv"
    assert old in PROFILE
    path.write_text(PROFILE.replace(old, new, 1))
    refused(folder, named, path)


def refused(folder, named, path):
    with pytest.raises(CatalogError) as caught:
        load_family(folder)
    assert re.search(named, str(caught.value)), str(caught.value)
    assert str(path) in str(caught.value)
    assert "Remedy: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_absent_files_are_named(folder, tmp_path):
    (folder / "profile.csv").unlink()
    assert load_family(folder)[1] == ()  # not profiled yet: planners that measure can still serve it
    with pytest.raises(CatalogError, match=r"file = .*other\.csv.: cannot be read .No such file"):
        load_family(folder, folder / "other.csv")
    with pytest.raises(CatalogError, match=r"no family\.toml below it"):
        load_catalog(tmp_path / "absent")
    (folder / "profile.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(CatalogError, match="cannot be read"):
        load_family(folder)


def test_how_much_of_a_time_follows_the_clock_is_a_column_with_a_source(folder):
    assert {row.clock_sensitivity for row in load_family(folder)[1]} == {1.0}
    lines = [
        line + end
        for line, end in zip(PROFILE.splitlines(), [""] * 5 + [",clock_sensitivity", ",0.4", ",", ",0"], strict=True)
    ]
    path = folder / "profile.csv"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(CatalogError, match=r"profile.csv: its source is not named. Remedy: write .# clock_sens"):
        load_family(folder)
    path.write_text("\n".join(["# clock_sensitivity: a test", *lines]) + "\n")
    assert [row.clock_sensitivity for row in load_family(folder)[1]] == [0.4, 1.0, 0.0]
    path.write_text("\n".join(["# clock_sensitivity: a test", *lines]).replace(",0.4", ",1.4") + "\n")
    with pytest.raises(CatalogError, match=r"clock_sensitivity = '1.4': Input should be less .*line 8"):
        load_family(folder)


LIMITED = """# basis: synthetic
# source: a test
# machine: none
# date: 2026-11-21
# commit: abc
{columns},limit_watts
A100-SXM4-40GB,7g.40gb,small,0,1,1410,,10,11,12,100,1.5,150,10,
A100-SXM4-40GB,7g.40gb,small,0,1,0,,12,13,14,80,1.2,100,10,150
A100-SXM4-40GB,7g.40gb,large,0,1,1410,,20,22,23,50,3.0,150,20,
A100-SXM4-40GB,7g.40gb,large,0,1,0,,26,27,28,40,2.5,96,20,150
""".format(columns=",".join(COLUMNS))


def test_a_point_may_be_measured_at_a_power_limit_instead_of_a_clock(folder):
    path = folder / "profile.csv"
    path.write_text(LIMITED)
    rows = load_family(folder)[1]
    assert [row.clock_mhz for row in rows] == [1410, -150, 1410, -150]
    assert {row.clock_sensitivity for row in rows} == {1.0}, "a limit is not a clock: nothing is fitted to it"


@pytest.mark.parametrize(
    ("replaced", "says"),
    [
        (("small,0,1,0,", "small,0,1,1200,"), "clock_mhz = 1200: .*line 8: a point has a clock or a power limit"),
        ((",150", ",-150"), "limit_watts = '-150': Input should be greater than 0"),
        ((",150", ",high"), "limit_watts = 'high': Input should be a valid integer"),
        ((",0,1,0,", ",0,2,0,"), "limit_watts = 150: .*, batch 2, is profiled under a power limit only. Remedy"),
        (("7g.40gb", "3g.20gb"), "limit_watts = 150: .*of the whole board.* Remedy: profile limits on 7g.40gb"),
        (("small", "large"), "operating point"),
    ],
)
def test_a_power_limit_that_cannot_be_is_refused(folder, replaced, says):
    lines = LIMITED.splitlines()
    at = next(i for i, text in enumerate(lines) if ",small,0,1,0," in text)
    lines[at] = lines[at].replace(*replaced)
    (folder / "profile.csv").write_text("\n".join(lines) + "\n")
    with pytest.raises(CatalogError, match=says):
        load_family(folder)


def test_without_a_statement_it_is_fitted_to_the_rows_of_an_operating_point_at_other_clocks(folder):
    one = PROFILE.splitlines()[-1]
    half = one.replace(",1410,", ",705,")
    slower = half.split(",")
    slower[7:10] = [str(1.2 * float(cell)) for cell in slower[7:10]]
    (folder / "profile.csv").write_text("\n".join([*PROFILE.splitlines(), ",".join(slower)]) + "\n")
    *others, high, low = load_family(folder)[1]
    assert (high.clock_mhz, low.clock_mhz) == (1410, 705)
    assert high.clock_sensitivity == pytest.approx(0.2)
    assert low.clock_sensitivity == pytest.approx(0.4 / 1.2)
    assert {row.clock_sensitivity for row in others} == {1.0}
