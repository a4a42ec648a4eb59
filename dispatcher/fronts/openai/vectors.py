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


def written(raw: bytes, size: int, as_base64: bool) -> bytes:
    """JSON of OpenAI's `data`: one object for each vector, of so many FP32; in base64 its bytes.

    Raises:
        TrefoilError: a number is not finite, which JSON does not have.
    """
    vectors: Sequence[object]
    if as_base64:
        step = 4 * size
        vectors = [base64.b64encode(raw[at : at + step]).decode() for at in range(0, len(raw), step)]
    else:
        numbers = np.frombuffer(raw, "<f4").reshape(-1, size)
        if not np.isfinite(numbers).all():
            remedy = 'see the model; or encoding_format "base64"'
            raise TrefoilError("an embedding of the model is not finite", remedy=remedy)
        vectors = numbers.tolist()
    return codec.dumps([{"object": "embedding", "index": at, "embedding": each} for at, each in enumerate(vectors)])
