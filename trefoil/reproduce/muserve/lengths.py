"""Lengths of generated answers, and what a predictor says of them: drawn, by its measured confusion matrix.

Source: mu-Serve section 3.3 and Fig. 3. LMSYS-Chat-1M, whose lengths the paper has, is not public here. So lengths are
    the generated tokens of Azure's two LLM traces, or those of the family `pydoc` on prompts never trained on. Or they
    are those of three tasks in one (tasks.json, by `make task-lengths`), with what `trefoil lengths train` predicts of
    each.
Predictor: of a request of true class i it says j with the share of the confusion matrix that was measured on those
    prompts (model_repository/pydoc/lengths/card.json). Classes are cut at the same percentiles of whatever lengths.
    Of the tasks each request has its own prediction, and of those that repeat a prompt, as hot inputs do, the length
    is known. With the semantic cache, as large a share as it had hits there has the most alike prompt's class instead.
    Two are not predictors: "right classes" knows them, "paper's accuracy" is a normal error that leaves 0.43 of them.
"""

import csv
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trefoil.core.errors import NotFound
from trefoil.reproduce.experiment import data_folder
from trefoil.reproduce.runs import REPOSITORY

AZURE: Final = {"azure_conv": "azure_llm_2023_conv_requests.csv", "azure_code": "azure_llm_2023_code_requests.csv"}
FAMILY: Final = "pydoc"
TASKS: Final = "tasks"
PERCENTILES: Final = (25, 50, 75, 99)
CLASSES: Final = len(PERCENTILES) + 1
TASKS_CARD: Final = Path(__file__).with_name("tasks.json")
CARD: Final = REPOSITORY / FAMILY / "lengths" / "card.json"
PREDICTORS: Final[Mapping[str, str]] = {
    "ssjf": "ordinal_mse", "multi": "ordinal_mse", "ordinal L1": "ordinal_l1", "classes": "classes", "binary": "binary",
    "regression": "regression_mse", "regression L1": "regression_l1",
}  # fmt: skip
"""Predictors by the method that goes by them; `ssjf` alone has the semantic cache."""
NOISE: Final = 1.12
"""Deviation of scores at which 0.43 of the classes are right, as in Table 2 (L1 0.68 to its 0.76, MSE 0.95 to 0.99)."""


@cache
def card() -> Mapping[str, Any]:
    """What the family's predictors measured.

    Raises:
        NotFound: they were not trained.
    """
    if not CARD.exists():
        raise NotFound(
            "the predictors' scores are not here", field="card", value=str(CARD), remedy="make pydoc-lengths"
        )
    found: Mapping[str, Any] = json.loads(CARD.read_text(encoding="utf-8"))
    return found


def card_digest() -> str:
    """Digest of that and of the tasks', for the keys of runs that go by them."""
    found = b"".join(path.read_bytes() for path in (CARD, TASKS_CARD) if path.exists())
    return hashlib.sha256(found).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class Drawn:
    """Requests: tokens, lengths over their mean, true classes, and what predictions are drawn by."""

    tokens: NDArray[np.float64]
    sizes: NDArray[np.float64]
    classes: NDArray[np.int64]
    seed: int
    told: NDArray[np.int64] | None = None  # class that was predicted of each, where it is known of each

    def predicted(self, method: str, encoder: str = "minilm", cached: bool = True) -> NDArray[np.int64]:
        """Class that a method's predictor says of each."""
        if method in ("oracle", "right classes"):
            return self.classes
        if method == "paper's accuracy":
            noise = np.random.default_rng((self.seed, 11)).normal(0.0, NOISE, len(self.classes))
            return np.clip(np.rint(self.classes + noise), 0, len(PERCENTILES)).astype(np.int64)
        if self.told is not None:
            return self.told
        rng = np.random.default_rng((self.seed, 7))
        chances, hits = rng.random(len(self.classes)), rng.random(len(self.classes))
        row = card()[encoder][PREDICTORS[method]]
        said = _drawn(row["confusion"], self.classes, chances)
        if method == "ssjf" and cached:
            found = card()[encoder]["ordinal_mse"]["cache"]
            by_cache = _drawn(found["confusion"], self.classes, chances)
            said = np.where(hits < found["hit_rate"], by_cache, said)
        return said


def _drawn(confusion: Any, true: NDArray[np.int64], chances: NDArray[np.float64]) -> NDArray[np.int64]:
    counts = np.asarray(confusion, float)
    shares = (counts + 1e-12) / (counts + 1e-12).sum(1, keepdims=True)
    edges = np.cumsum(shares, 1)[true]
    said: NDArray[np.int64] = np.minimum((chances[:, None] > edges).sum(1), len(counts) - 1)
    return said


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths that answers are drawn from, in tokens, ascending."""

    name: str
    tokens: NDArray[np.float64]
    predicted: NDArray[np.float64] | None = None  # of each, in tokens

    @staticmethod
    @cache
    def of(name: str) -> "Lengths":
        """Lengths of a name: azure_conv, azure_code, pydoc, tasks.

        Raises:
            NotFound: they are not here.
        """
        if name == TASKS:
            held = np.array(json.loads(TASKS_CARD.read_text(encoding="utf-8"))["families"][TASKS]["held"], float)
            order = np.argsort(held[:, 0], kind="stable")
            return Lengths(name, held[order, 0], held[order, 1])
        if name == FAMILY:
            return Lengths(name, np.sort(np.asarray(card()["data"]["lengths_held"], float)))
        folder = data_folder()
        path = folder / "requests" / AZURE[name] if folder is not None and name in AZURE else None
        if path is None or not path.exists():
            remedy = f"one of {', '.join((*AZURE, FAMILY, TASKS))}; Azure's need TREFOIL_DATA"
            raise NotFound("these lengths are not here", field="lengths", value=name, remedy=remedy)
        with path.open(encoding="utf-8") as file:
            return Lengths(name, np.sort(np.array([float(row["generated_tokens"]) for row in csv.DictReader(file)])))

    def borders(self, classes: int = CLASSES) -> NDArray[np.float64]:
        """Where classes begin, beyond the first: the paper's five, or another number of equal ones."""
        shares = PERCENTILES if classes == CLASSES else np.linspace(0, 100, classes + 1)[1:-1]
        return np.percentile(self.tokens, shares)

    def draw(self, count: int, seed: int, classes: int = CLASSES, repeated: float = 0.0) -> Drawn:
        """Draw lengths; the same for every method of a seed. `repeated`: share of requests whose length is known."""
        at = np.random.default_rng((seed, 3)).choice(len(self.tokens), count)
        tokens, borders, told = self.tokens[at], self.borders(classes), None
        true = np.searchsorted(borders, tokens, side="right")
        if self.predicted is not None:
            known = np.random.default_rng((seed, 5)).random(count) < repeated
            told = np.where(known, true, np.searchsorted(borders, self.predicted[at], side="right"))
        return Drawn(tokens, tokens / float(self.tokens.mean()), true, seed, told)
