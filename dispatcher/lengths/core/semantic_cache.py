"""Semantic cache: true lengths of answers by what their prompts mean.

Source: mu-Serve sections 3.3 and 3.5 (embedding, most similar entry, threshold 0.8), GPTCache.
Data: embeddings of length one; of each an answer's length in tokens.
Decision: the length of the most similar prompt, if its cosine is at least the threshold; else none.
Formulation: all cosines at once; beyond `entries_max` whatever was used longest ago gives its place.
Deviations: it is searched exactly, not by FAISS: 4,096 entries of 384 numbers take 0.2 ms.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

ENTRIES_MAX: Final = 4096
THRESHOLD: Final = 0.8
SAME: Final = 1.0 - 1e-6
"""A cosine from which two prompts are one: the newer length takes the older one's place."""


class SemanticCache:
    """Bounded table of embeddings and lengths."""

    def __init__(self, width: int, threshold: float = THRESHOLD, entries_max: int = ENTRIES_MAX) -> None:
        self._vectors: NDArray[np.float32] = np.zeros((entries_max, width), np.float32)
        self._lengths = np.zeros(entries_max, np.int64)
        self._used = np.zeros(entries_max, np.int64)
        self._threshold, self._count, self._turn = threshold, 0, 0

    def __len__(self) -> int:
        return self._count

    def length(self, embedded: NDArray[np.float32]) -> int | None:
        """Length of the most similar prompt [tokens]; None: none is similar enough."""
        at, likeness = self._nearest(embedded)
        if likeness < self._threshold:
            return None
        self._turn += 1
        self._used[at] = self._turn
        return int(self._lengths[at])

    def learn(self, embedded: NDArray[np.float32], length: int) -> None:
        """Keep the true length of a prompt's answer."""
        if not np.isfinite(embedded).all():
            return
        at, likeness = self._nearest(embedded)
        if likeness < SAME:
            at = self._count if self._count < len(self._lengths) else int(self._used.argmin())
            self._count = max(self._count, at + 1)
        self._turn += 1
        self._vectors[at], self._lengths[at], self._used[at] = embedded, length, self._turn

    def _nearest(self, embedded: NDArray[np.float32]) -> tuple[int, float]:
        if not self._count:
            return 0, -1.0
        likeness = self._vectors[: self._count] @ embedded
        at = int(np.argmax(likeness))
        found = float(likeness[at])
        return at, found if np.isfinite(found) else -1.0
