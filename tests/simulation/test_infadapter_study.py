"""InfAdapter's experiment: its loads, arrivals and claims; the study as a whole is long."""

from dataclasses import replace

import numpy as np
import pytest

from trefoil.reproduce.infadapter.experiment import BASE, HISTORY_S, SCHEMES, InfAdapterSpec, bursty, load, steady
from trefoil.reproduce.infadapter.study import NO_HEADROOM, QUICK, accuracy, claims, fig1, fig2, fig6, study


def test_the_made_up_load_has_the_mean_and_maximum_of_the_papers():
    counts = np.array(steady())
    assert (counts.size, counts.max(), counts.min() > 0) == (1500, 206, True)
    assert counts.mean() == pytest.approx(111, abs=0.5)
    minutes = np.array(bursty()).reshape(-1, 60).mean(axis=1)
    assert minutes[:9].max() < 70 < 200 < minutes[11:13].min()


def test_before_time_zero_the_load_runs_backwards():
    times_s = InfAdapterSpec("infadapter", "steady", 1).times_s()
    counts, _ = np.histogram(times_s, np.arange(-HISTORY_S, 1501))
    assert (times_s.min() >= -HISTORY_S, times_s.max() < 1500) == (True, True)
    assert counts.sum() == pytest.approx(sum(load("steady")[0][:HISTORY_S]) + sum(load("steady")[0]), rel=0.01)
    assert counts[HISTORY_S - 60 : HISTORY_S].sum() == pytest.approx(sum(load("steady")[0][:60]), rel=0.06)


def test_repeated_arrivals_are_the_same_in_seconds_of_one_rate_and_poisson_ones_are_not():
    one = InfAdapterSpec("infadapter", "steady", 1, arrivals="repeated")
    counts = one.counts.astype(int)
    first, second = np.flatnonzero(counts == np.bincount(counts).argmax())[:2]
    times_s, n = one.times_s(), counts[first]
    assert times_s.size == counts.sum() + np.resize(counts, HISTORY_S).sum()
    gaps = np.cumsum(np.random.default_rng(42).standard_exponential(n)) / n
    for at in (first, second):
        assert np.isin(np.round(at + gaps, 9), np.round(times_s, 9)).all()
    assert one.times_s().tolist() == replace(one, seed=2).times_s().tolist()
    assert (
        replace(one, arrivals="poisson").times_s().tolist()
        != replace(one, arrivals="poisson", seed=2).times_s().tolist()
    )


def test_figures_of_published_capacities():
    assert fig1()["8 cores"] == {"resnet18": 190, "resnet50": 78, "resnet152": 27}
    assert fig1()["20 cores"]["resnet50"] == pytest.approx(fig1()["8 cores"]["resnet18"], rel=0.06), "the paper's text"
    assert all(one["r2"] > 0.99 for one in fig6().values())
    for cores, by in fig2().items():
        several, single = by["infadapter"], by["ms_plus"]
        assert several["loss_pct"] <= single["loss_pct"] + 1e-9, cores
        assert sum(several["cores"].values()) <= int(cores.split()[0])
    assert fig2()["14 cores"]["ms_plus"]["cores"] == {"resnet50": 8}, "as the paper has it"
    assert all(3.0 < one["most"] < 4.0 for one in accuracy().values()), "section 1: up to 4 %, given the same load"
    assert fig2(0.8)["8 cores"]["infadapter"]["loss_pct"] > fig2()["8 cores"]["infadapter"]["loss_pct"]


def row(violated_s: float, cores: float, loss_pct: float) -> dict[str, dict[str, float]]:
    return {
        "violated_s": {"mean": violated_s}, "cores": {"mean": cores}, "cores_planned": {"mean": 0.9 * cores},
        "loss_pct": {"mean": loss_pct},
    }  # fmt: skip


def test_claims_by_hand():
    rows = {
        "vpa_plus-18": row(40, 8, 8.5), "vpa_plus-50": row(50, 16, 2.0), "vpa_plus-152": row(100, 20, 0.0),
        "infadapter, beta 0.05": row(20, 16, 3.0), "ms_plus, beta 0.05": row(20, 14, 5.0),
        "ms_plus, beta 0.0125": row(20, 18, 3.0),
    }  # fmt: skip
    assert claims(rows) == {
        "infadapter, beta 0.05": {
            "fewer_violations_pct": {"vpa_plus-18": 50, "vpa_plus-50": 60},
            "less_cost_pct": {"vpa_plus-50": 0, "vpa_plus-152": pytest.approx(20)},
            "less_cost_planned_pct": {"vpa_plus-50": 0, "vpa_plus-152": pytest.approx(20)},
            "less_loss": {"vpa_plus-18": 5.5, "vpa_plus-50": -1.0, "vpa_plus-152": -3.0, "ms_plus, beta 0.05": 2.0},
            "less_loss_than_ms_plus": pytest.approx(1.0),
        }
    }


@pytest.mark.long
def test_the_study_prints_what_was_played(tmp_path):
    found = study(replace(QUICK, seconds=120, betas=(0.05,), jobs=1), tmp_path, lambda _text: None)
    for rows in (found["blocks"]["twitter"], found["blocks"]["steady"]):
        assert {name.partition(",")[0] for name in rows} == set(SCHEMES)
        assert len({row["requests"]["mean"] for row in rows.values()}) == 1, "all meet the same arrivals"
        assert all(0 < row["cores"]["mean"] <= 40 for row in rows.values()), (
            "two sizes stand while one replaces another"
        )
        assert all(row["cores_planned"]["mean"] <= 20 for row in rows.values()), "the budget"
        assert rows["vpa_plus-152"]["loss_pct"]["mean"] == 0
    assert set(BASE) >= set(found["claims"]["twitter"]["infadapter, beta 0.05"]["fewer_violations_pct"])
    loss, bare = (found["blocks"][at]["infadapter, beta 0.05"]["loss_pct"]["mean"] for at in ("twitter", NO_HEADROOM))
    assert bare < loss, "without headroom the load leaves cores for accuracy"
    assert list(found["claims"][NO_HEADROOM]) == ["infadapter, beta 0.05"]
    assert {path.stem for path in tmp_path.glob("fig*.png")} == {
        "fig01", "fig02", "fig04", "fig05", "fig06", "fig07", "fig08", "fig08_10",
    }  # fmt: skip
