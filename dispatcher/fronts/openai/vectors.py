"""Vectors of embeddings as OpenAI has them: cut to a size, as numbers or as base64. Pure."""

import base64
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dispatcher.fronts.rest import codec
from trefoil.core.errors import TrefoilError


def cut(vectors: npt.NDArray[np.float32], size: int) -> npt.NDArray[np.float32]:
    """The first `size` numbers of each vector, of its length 1: as models have it that are trained to be cut."""
    short = vectors[:, :size]
    norms = np.linalg.norm(short, axis=1, keepdims=True)
    return np.asarray(short / np.where(norms > 0, norms, 1), np.float32)


def as_numbers(raw: bytes, size: int) -> bytes:
    """JSON of OpenAI's `data`: one object for each vector, of so many FP32.

    Raises:
        TrefoilError: a number is not finite, which JSON does not have.
    """
    vectors = np.frombuffer(raw, "<f4").reshape(-1, size)
    if not np.isfinite(vectors).all():
        raise TrefoilError(
            "an embedding of the model is not finite", remedy='see the model; or encoding_format "base64"'
        )
    return _data(vectors.tolist())


def as_base64(raw: bytes, size: int) -> bytes:
    """JSON of OpenAI's `data`, each vector as its bytes in base64."""
    step = 4 * size
    return _data([base64.b64encode(raw[at : at + step]).decode() for at in range(0, len(raw), step)])


def _data(vectors: Sequence[object]) -> bytes:
    return codec.dumps([{"object": "embedding", "index": at, "embedding": each} for at, each in enumerate(vectors)])
