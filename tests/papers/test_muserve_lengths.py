"""mu-Serve's length predictor by hand: classes at percentiles, ordinal losses, what is drawn by a confusion matrix."""

import importlib.util
import json

import numpy as np
import pytest

from dispatcher.queues.ssjf import AGING, length_class
from trefoil.core.errors import NotFound
from trefoil.profiler import length_training
from trefoil.reproduce.muserve import lengths
from trefoil.reproduce.muserve.experiment import turn_s
from trefoil.reproduce.muserve.lengths import TASKS_CARD, Lengths
from trefoil.reproduce.muserve.scheduler import SchedulerSpec
from trefoil.reproduce.runs import REPOSITORY

SPEC = importlib.util.spec_from_file_location("ordinal", REPOSITORY / "_training" / "ordinal.py")
ordinal = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(ordinal)

PERFECT = np.eye(5, dtype=int).tolist()
BLIND = np.full((5, 5), 7).tolist()


@pytest.fixture
def card(tmp_path, monkeypatch):
    """A card of predictors: `ordinal_mse` without an error, `classes` by lot, a cache that always hits and is right."""

    def row(confusion):
        numbers = {"accuracy": 0.0, "f1": 0.0, "l1": 0.0, "mse": 0.0, "rank_correlation": 0.0}
        return {**numbers, "confusion": confusion, "cache": {"confusion": PERFECT, "hit_rate": 1.0}}

    losses = {name: row(BLIND) for name in lengths.PREDICTORS.values()} | {"ordinal_mse": row(PERFECT)}
    path = tmp_path / "card.json"
    held = np.random.default_rng(1).integers(1, 200, 500).tolist()
    found = {"data": {"lengths_held": held}, "controls": {}, "minilm": losses, "tiny": losses}
    path.write_text(json.dumps(found))
    monkeypatch.setattr(lengths, "CARD", path)
    for each in (lengths.card, Lengths.of):
        each.cache_clear()
    yield path
    for each in (lengths.card, Lengths.of):
        each.cache_clear()


def test_classes_begin_at_the_percentiles_and_scores_are_rounded_to_the_nearest():
    borders = ordinal.borders_of(np.arange(1, 101))
    assert borders == pytest.approx([25.75, 50.5, 75.25, 99.01])
    assert ordinal.classes_of(np.array([1, 25, 26, 50, 51, 75, 76, 99, 100]), borders).tolist() == [
        0, 0, 1, 1, 2, 2, 3, 3, 4,
    ]  # fmt: skip
    assert ordinal.classes_of(np.array([20.0]), np.array([10.0, 20.0, 30.0, 40.0])).tolist() == [2]  # [p50, p75)
    scores = np.array([-1.0, 0.4, 0.6, 2.2, 3.7, 9.0])
    assert ordinal.rounded(scores).tolist() == [0, 0, 1, 2, 4, 4] == [length_class(float(each)) for each in scores]


def test_ordinal_losses_by_hand():
    out, wanted = np.array([0.5, 3.0, 2.0, 4.5]), np.array([0.0, 1.0, 2.0, 4.0])
    assert ordinal.squared(out, wanted) == pytest.approx((0.25 + 4.0 + 0.0 + 0.25) / 4)
    assert ordinal.absolute(out, wanted) == pytest.approx((0.5 + 2.0 + 0.0 + 0.5) / 4)
    near, far = np.array([1.0]), np.array([4.0])  # a class that is far off costs more than one beside: it is ordinal
    assert ordinal.squared(near, np.array([0.0])) * 16 == ordinal.squared(far, np.array([0.0]))


def test_errors_are_those_of_the_confusion_matrix(card):
    drawn = Lengths.of("pydoc").draw(20_000, 1)
    assert (drawn.predicted("oracle") == drawn.classes).all()
    assert (drawn.predicted("multi") == drawn.classes).all()
    by_lot = drawn.predicted("classes")
    assert np.bincount(by_lot, minlength=5) / 20_000 == pytest.approx([0.2] * 5, abs=0.02)
    assert (np.bincount(drawn.classes, minlength=5) / 20_000)[:3] == pytest.approx([0.25] * 3, abs=0.03)
    told = json.loads(card.read_text())
    told["minilm"]["ordinal_mse"]["cache"] |= {"hit_rate": 0.25, "confusion": BLIND}
    card.write_text(json.dumps(told))
    lengths.card.cache_clear()
    wrong = np.mean(drawn.predicted("ssjf") != drawn.classes)
    assert wrong == pytest.approx(0.25 * 0.8, abs=0.02)
    assert (drawn.predicted("ssjf", cached=False) == drawn.classes).all()


def test_shorter_first_is_faster_in_the_mean_and_all_methods_meet_the_same_work(card):
    runs = {m: SchedulerSpec(m, 1, load=0.9, lengths="pydoc", jobs=1500).play() for m in ("fifo", "ssjf", "oracle")}
    assert runs["oracle"]["jct_s"] < runs["ssjf"]["jct_s"] < 0.9 * runs["fifo"]["jct_s"]
    by_lot = [SchedulerSpec("classes", seed, lengths="pydoc", jobs=1500).play()["jct_s"] for seed in (1, 2, 3)]
    fifo = [SchedulerSpec("fifo", seed, lengths="pydoc", jobs=1500).play()["jct_s"] for seed in (1, 2, 3)]
    assert np.mean(by_lot) == pytest.approx(np.mean(fifo), rel=0.05)  # blind, it is worth nothing
    aged = SchedulerSpec("ssjf", 1, load=0.9, lengths="pydoc", jobs=1500, aging=0.0).play()
    assert aged["jct_s"] == runs["fifo"]["jct_s"]


def test_what_is_not_here_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(lengths, "CARD", tmp_path / "none.json")
    lengths.card.cache_clear()
    with pytest.raises(NotFound, match="make pydoc-lengths"):
        lengths.card()
    with pytest.raises(NotFound, match="one of azure_conv, azure_code, pydoc"):
        Lengths.of("lmsys")


def test_of_tasks_whose_lengths_prompts_tell_the_queue_takes_as_much_off_as_in_the_paper_of_predictors_like_its():
    """Section 2.3: p95 over p50 up to 20.5; Table 2: accuracy 0.43; section 4.3: 38.6 to 41.3 %, with a cache."""
    stated = json.loads(TASKS_CARD.read_text())["families"]["tasks"]
    tokens, predicted = np.array(stated["held"]).T
    assert np.quantile(tokens, 0.95) / np.median(tokens) > 10
    assert stated["accuracy"] > 0.55
    assert stated["rank_correlation"] > 0.75
    assert length_training.scores(tokens, predicted, Lengths.of("tasks").borders())["accuracy"] > 0.55

    def mean_s(method: str, **changes) -> float:
        specs = [SchedulerSpec(method, seed, 0.8, lengths="tasks", **changes) for seed in (1, 2)]
        return float(np.mean([spec.play()["jct_s"] for spec in specs]))

    fifo, ssjf, hot = mean_s("fifo"), mean_s("ssjf"), mean_s("ssjf", repeated=0.5)
    assert 0.62 < ssjf / fifo < 0.75
    assert hot < 0.95 * ssjf, "a length that is known is not a prediction"
    assert mean_s("oracle") < mean_s("right classes") < hot
    assert mean_s("ssjf", classes=2) > 1.05 * ssjf, "section 3.3: two classes are too coarse"


def test_turns_age_by_the_mean_service_time_as_live():
    assert turn_s(5.0, 2.0, 3.0, AGING) == 5.0 + 3 * 2.0 * AGING
    assert turn_s(5.0, 2.0, None, AGING) == 5.0 + 2 * 2.0 * AGING
    short, long = (
        SchedulerSpec("ssjf", 1, lengths="tasks", token_s=0.02 * scale, const_s=0.1 * scale).play()["jct_s"]
        for scale in (1, 100)
    )
    assert long == pytest.approx(100 * short, rel=1e-6), "of longer jobs the order is the same"
