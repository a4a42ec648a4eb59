"""Train the predictor of answers' lengths of `ssjf` on a log: weights.npy, lengths.json, card.json.

Data: JSON lines {"prompt", "tokens" or "answer", "family"}. An answer without `tokens` counts words and punctuation.
Split: one in HELD prompts, by the CRC-32 of its text, is kept from training: equal prompts stay on one side.
Fit: ridge regression on the n-grams of dispatcher/lengths/core/ngrams.py, for all families at once, by conjugate
    gradients. Classes begin at the 25th, 50th, 75th and 99th percentile of a family's trained lengths (mu-Serve 3.3).
Card: of what was held accuracy, rank correlation and confusion of classes by family, and lengths with predictions.
"""

import hashlib
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from dispatcher.lengths.core.ngrams import BUCKETS, NgramRidge, features, words
from trefoil.core.errors import InvalidInput, NotFound

PERCENTILES: Final = (25, 50, 75, 99)
HELD: Final = 5
EACH_MIN: Final = 100  # prompts of a family, without which its percentiles say nothing
PENALTY: Final = 30.0
STEPS: Final = 100
RESIDUAL: Final = 1e-4
THRESHOLD: Final = 0.98  # of the semantic cache: below it a prompt is another one
PROMPT_CHARS_MAX: Final = 4096  # that a dispatcher asks about
TOKENS_MAX: Final = 10**7  # of one answer: more is a mistake of the log


@dataclass(frozen=True, slots=True)
class Answered:
    """A prompt and how many tokens its answer had."""

    family: str
    prompt: str
    tokens: int

    @property
    def held(self) -> bool:
        """Whether it is kept from training."""
        return crc32(self.prompt.encode()) % HELD == 0


def read_log(path: Path, family: str) -> list[Answered]:
    """Answers of a log; `family`: of lines that name none.

    Raises:
        NotFound: there is no such file. InvalidInput: a line is not one of a log; names it.
    """
    if not path.is_file():
        raise NotFound("is not a file", field="LOG", value=str(path), remedy="name a file of JSON lines")
    with path.open("rb") as file:
        return [_answered(path, number, line, family) for number, line in enumerate(file, 1) if line.strip()]


def _answered(path: Path, number: int, line: bytes, family: str) -> Answered:
    try:
        row = json.loads(line.decode())
        prompt, of = row["prompt"], row.get("family", family)
        tokens = row["tokens"] if "tokens" in row else len(words(row["answer"]))
        if not (isinstance(prompt, str) and isinstance(of, str) and isinstance(tokens, int)) or not of:
            raise ValueError("prompt and family are texts, tokens is a whole number")
        if not 0 <= tokens <= TOKENS_MAX:
            raise ValueError(f"tokens must be 0 to {TOKENS_MAX:,}")
        (prompt + of).encode()  # half of a surrogate pair is not text
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        remedy = 'write {"prompt": "...", "tokens": 12, "family": "..."} a line, or "answer" for "tokens"; --family'
        shown = line.strip()[:80].decode(errors="backslashreplace")
        raise InvalidInput(
            f"{path} line {number} is not an answer: {error}", field="line", value=shown, remedy=remedy
        ) from None
    return Answered(of, prompt[:PROMPT_CHARS_MAX], max(1, tokens))


def train(log: Sequence[Answered], out: Path) -> dict[str, Any]:
    """Train, write the folder that `lengths_folder` of a dispatcher names, and return the card.

    Raises:
        InvalidInput: too few prompts of a family.
    """
    by_family = {family: [one for one in log if one.family == family] for family in sorted({o.family for o in log})}
    for family, own in by_family.items():
        if (held := sum(one.held for one in own)) < EACH_MIN // HELD or len(own) - held < EACH_MIN:
            raise InvalidInput(
                f"too few prompts of {family}", field="prompts", value=len(own), remedy=f"log {2 * EACH_MIN} or more"
            )
    if not by_family:
        raise InvalidInput("the log is empty", field="prompts", value=0, remedy=f"log {2 * EACH_MIN} or more")
    weights = fitted([one for one in log if not one.held])
    borders = {
        family: np.percentile([one.tokens for one in own if not one.held], PERCENTILES).tolist()
        for family, own in by_family.items()
    }
    ridge = NgramRidge(weights)
    card = {
        "trained": sum(not one.held for one in log),
        "families": {f: _scores([o for o in own if o.held], ridge, borders[f]) for f, own in by_family.items()},
    }
    out.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    np.save(buffer, weights)
    (out / "weights.npy").write_bytes(buffer.getvalue())
    sha256 = {"weights.npy": hashlib.sha256(buffer.getvalue()).hexdigest()}
    stated = {"families": borders, "threshold": THRESHOLD, "sha256": sha256}
    (out / "lengths.json").write_text(json.dumps(stated, indent=1) + "\n", encoding="utf-8")
    (out / "card.json").write_text(json.dumps(card) + "\n", encoding="utf-8")
    return card


def fitted(log: Sequence[Answered]) -> NDArray[np.float32]:
    """Weights [BUCKETS] of the n-grams and, last, the mean of log tokens."""
    rows = [features(one.prompt) for one in log]
    counts = [len(index) for index, _ in rows]
    index, values = np.concatenate([i for i, _ in rows]), np.concatenate([v for _, v in rows])
    row = np.repeat(np.arange(len(rows)), counts)
    log_tokens = np.log([one.tokens for one in log])
    mean = float(log_tokens.mean())

    def transposed(vector: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.bincount(index, values * vector[row], BUCKETS).astype(np.float64)

    def squared(weights: NDArray[np.float64]) -> NDArray[np.float64]:
        image = np.bincount(row, values * weights[index], len(rows)).astype(np.float64)
        return transposed(image) + PENALTY * weights

    weights, residual = np.zeros(BUCKETS), transposed(log_tokens - mean)
    direction, power = residual.copy(), float(residual @ residual)
    enough = RESIDUAL**2 * power
    for _ in range(STEPS):
        if power <= enough:
            break
        image = squared(direction)
        step = power / float(direction @ image)
        weights, residual = weights + step * direction, residual - step * image
        before, power = power, float(residual @ residual)
        direction = residual + power / before * direction
    return np.append(weights, mean).astype(np.float32)


def _scores(held: Sequence[Answered], ridge: NgramRidge, borders: Sequence[float]) -> dict[str, Any]:
    tokens = np.array([one.tokens for one in held], float)
    predicted = np.array([ridge.predicted(one.prompt)[1] for one in held])
    return {**scores(tokens, predicted, borders), "held": [[int(a), round(b, 2)] for a, b in _pairs(tokens, predicted)]}


def scores(tokens: NDArray[np.float64], predicted: NDArray[np.float64], borders: Sequence[float]) -> dict[str, Any]:
    """Accuracy and confusion of the classes, rank correlation of the lengths."""
    true, found = (np.searchsorted(borders, each, side="right") for each in (tokens, predicted))
    confusion = np.zeros((len(borders) + 1,) * 2, int)
    np.add.at(confusion, (true, found), 1)
    ranks = np.corrcoef(_ranks(tokens), _ranks(predicted))[0, 1] if len(set(predicted.tolist())) > 1 else 0.0
    return {
        "accuracy": float(np.mean(true == found)),
        "rank_correlation": 0.0 if math.isnan(ranks) else float(ranks),
        "confusion": confusion.tolist(),
    }


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ranks; equal values have the mean of theirs."""
    _, at, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2.0)[at]


def _pairs(tokens: NDArray[np.float64], predicted: NDArray[np.float64]) -> Iterator[tuple[float, float]]:
    return zip(tokens.tolist(), predicted.tolist(), strict=True)


def table(card: Mapping[str, Any]) -> list[list[str]]:
    """Rows of a card: family, held prompts, accuracy, rank correlation."""
    return [
        [family, str(len(one["held"])), f"{one['accuracy']:.2f}", f"{one['rank_correlation']:.2f}"]
        for family, one in card["families"].items()
    ]
