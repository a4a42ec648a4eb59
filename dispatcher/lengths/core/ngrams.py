"""Length of an answer by the n-grams of its prompt: ridge regression on the logarithm of its tokens.

Source: none of the papers; mu-Serve (section 3.3) asks a fine-tuned BERT. `trefoil lengths train` makes the weights.
Data: of a prompt, its words and punctuation marks, and the pairs of neighbours. Also the number of words and marks, in
    steps of a quarter of a factor of two. Last, the first word with that number in steps of a half.
Formulation: log tokens = mean + sum of weights of the n-grams. An n-gram that occurs n times counts log(1 + n), and all
    counts are scaled to one vector length. N-grams share BUCKETS weights by their CRC-32. The embedding is the same
    vector folded to EMBEDDED numbers.
"""

import math
import re
from collections import Counter
from itertools import pairwise
from typing import Final
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

BUCKETS: Final = 2**14
EMBEDDED: Final = 512
WORDS_MAX: Final = 256
NORM: Final = 8.0
WORD: Final = re.compile(r"\w+|[^\w\s]")


def words(text: str) -> list[str]:
    """Words and punctuation of a text."""
    return WORD.findall(text)


def features(prompt: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Buckets of a prompt's n-grams and the value of each."""
    found = words(prompt.lower())[:WORDS_MAX]
    octaves = math.log2(len(found) + 1)
    grams = [*(f"1 {one}" for one in found), *(f"2 {a} {b}" for a, b in pairwise(found))]
    grams += [f"size {step}" for step in range(int(4 * octaves) + 1)]
    grams.append(f"first {found[0] if found else ''} size {int(2 * octaves)}")
    counts = Counter(crc32(gram.encode()) % BUCKETS for gram in grams)
    values = np.log1p(np.fromiter(counts.values(), np.float64))
    return np.fromiter(counts, np.int64), values * (NORM / np.linalg.norm(values))


class NgramRidge:
    """Weights [BUCKETS] and, last, the mean of log tokens."""

    def __init__(self, weights: NDArray[np.float32]) -> None:
        assert weights.shape == (BUCKETS + 1,)
        self._weights, self._mean = weights[:BUCKETS], float(weights[BUCKETS])

    def predicted(self, prompt: str) -> tuple[NDArray[np.float32], float]:
        """Embedding [EMBEDDED] of length one, and tokens of the answer."""
        index, values = features(prompt)
        embedded = np.zeros(EMBEDDED, np.float32)
        np.add.at(embedded, index % EMBEDDED, values * np.where(index // EMBEDDED % 2, 1.0, -1.0))
        log_tokens = self._mean + float(values @ self._weights[index])
        return embedded / max(float(np.linalg.norm(embedded)), 1e-9), math.exp(min(log_tokens, 30.0))
