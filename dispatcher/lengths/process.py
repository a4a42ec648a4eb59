"""python -m dispatcher.lengths.process FOLDER: predicts lengths of answers, one prompt after the other.

Protocol: a JSON object a line. Says first {"families": [...]}, or {"refused": why} and ends. {"id", "family", "prompt"}
    is answered by {"id", "score", "cached"}; the score is real-valued, 0 = the shortest class. {"family", "prompt",
    "tokens"} is a true length, and is not answered. Ends with its standard input.
Files of FOLDER: lengths.json (borders of classes by family, threshold of the cache, hashes). Also either weights.npy
    (n-grams, by `trefoil lengths train`), or predictor.onnx (IDS -> EMBEDDED, SCORE) with tokenizer.json (by
    `make pydoc-lengths`).
"""

import hashlib
import io
import json
import sys
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dispatcher.lengths.core.ngrams import BUCKETS, NgramRidge
from dispatcher.lengths.core.semantic_cache import SemanticCache
from trefoil.core.errors import CatalogError
from trefoil.runtime.files import NotPlain, read_plain
from trefoil.runtime.given.onnx_file import check_external_data

GRAPH: Final = ("predictor.onnx", "tokenizer.json")
WEIGHTS: Final = "weights.npy"
FILE_BYTES_MAX: Final = 2**28
REMEMBERED_MAX: Final = 1024  # embeddings of prompts whose true length is still to come
MADE_BY: Final = "Remedy: trefoil lengths train, or make pydoc-lengths"


class PredictorRefused(Exception):
    """The folder's files cannot be used."""


class _Graph:
    """A network and its tokenizer. Its score is the class."""

    def __init__(self, folder: Path, contents: Mapping[str, bytes], tokens_max: int) -> None:
        try:
            import onnxruntime
            from tokenizers import Tokenizer
        except ImportError as error:
            raise PredictorRefused(f"{error}. Remedy: pip install 'trefoil[lengths]'") from error
        if check_external_data(folder / GRAPH[0], folder):
            raise PredictorRefused(f"{GRAPH[0]} keeps weights in other files. {MADE_BY}")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        graph, providers = contents[GRAPH[0]], ["CPUExecutionProvider"]
        self._session = onnxruntime.InferenceSession(graph, options, providers=providers)
        if (taken := [one.name for one in self._session.get_inputs()]) != ["IDS"]:
            raise PredictorRefused(f"{GRAPH[0]} takes {', '.join(taken)}, not IDS alone. {MADE_BY}")
        self._tokenizer = Tokenizer.from_str(contents[GRAPH[1]].decode())
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(tokens_max)

    def run(self, prompt: str, borders: Sequence[float]) -> tuple[NDArray[np.float32], float]:
        """Embedding and score of a prompt."""
        ids = np.array([self._tokenizer.encode(prompt).ids], np.int64)
        embedded, score = self._session.run(["EMBEDDED", "SCORE"], {"IDS": ids})
        return embedded[0], float(score[0])


class _Ngrams:
    """N-grams: their score is the class of the predicted tokens."""

    def __init__(self, contents: Mapping[str, bytes]) -> None:
        weights = np.load(io.BytesIO(contents[WEIGHTS]), allow_pickle=False)
        if weights.shape != (BUCKETS + 1,) or weights.dtype != np.float32:
            raise PredictorRefused(f"{WEIGHTS} holds {weights.dtype}{list(weights.shape)}. {MADE_BY}")
        self._ridge = NgramRidge(weights)

    def run(self, prompt: str, borders: Sequence[float]) -> tuple[NDArray[np.float32], float]:
        """Embedding and score of a prompt."""
        embedded, tokens = self._ridge.predicted(prompt)
        return embedded, float(bisect_right(borders, tokens))


class Predictor:
    """What predicts, and of each family the semantic cache on its embedding."""

    def __init__(self, folder: Path) -> None:
        """Read the files. Raises PredictorRefused."""
        stated, contents = _read(folder)
        try:
            self._borders = {str(f): [float(one) for one in each] for f, each in stated["families"].items()}
            threshold, tokens_max = float(stated["threshold"]), int(stated.get("tokens_max", 0))
            self._network = _Ngrams(contents) if WEIGHTS in contents else _Graph(folder, contents, tokens_max)
        except (ValueError, KeyError, TypeError, AttributeError, CatalogError) as error:
            raise PredictorRefused(f"{folder}: {error}. {MADE_BY}") from error
        width = self._network.run("a", ())[0].size
        self._caches = {family: SemanticCache(width, threshold) for family in self._borders}
        self._embedded: OrderedDict[tuple[str, str], NDArray[np.float32]] = OrderedDict()

    @property
    def families(self) -> list[str]:
        """Families that it was trained for."""
        return list(self._borders)

    def score(self, family: str, prompt: str) -> tuple[float, bool]:
        """Score of a prompt, and whether it is that of a true length in the cache."""
        borders = self._borders[family]
        embedded, score = self._network.run(prompt, borders)
        self._embedded[family, prompt] = embedded
        if len(self._embedded) > REMEMBERED_MAX:
            self._embedded.popitem(last=False)
        tokens = self._caches[family].length(embedded)
        return (score, False) if tokens is None else (float(bisect_right(borders, tokens)), True)

    def learn(self, family: str, prompt: str, tokens: int) -> None:
        """Keep a true length."""
        embedded = self._embedded.pop((family, prompt), None)
        if embedded is None:
            embedded, _ = self._network.run(prompt, self._borders[family])
        self._caches[family].learn(embedded, tokens)


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """What lengths.json states, and the files that it names: what was compared is what is used."""
    try:
        stated = json.loads(read_plain(folder / "lengths.json", FILE_BYTES_MAX, folder))
        if "family" in stated:
            raise PredictorRefused(f"{folder}/lengths.json states `family`; it is `families` now. {MADE_BY}")
        names = (WEIGHTS,) if WEIGHTS in stated["sha256"] else GRAPH
        contents = {name: read_plain(folder / name, FILE_BYTES_MAX, folder) for name in names}
        for name, content in contents.items():
            found = hashlib.sha256(content).hexdigest()
            if found != stated["sha256"][name]:
                raise PredictorRefused(
                    f"{name} has SHA-256 {found[:12]}, lengths.json names {stated['sha256'][name][:12]}. {MADE_BY}"
                )
    except (OSError, NotPlain, RecursionError, ValueError, KeyError, TypeError) as error:
        raise PredictorRefused(f"{folder}: {error}. {MADE_BY}") from error
    return stated, contents


def main(folder: Path) -> int:
    """Answer until the standard input ends; returns the exit code."""
    try:
        predictor = Predictor(folder)
    except PredictorRefused as refused:
        print(json.dumps({"refused": str(refused)}), flush=True)
        return 2
    print(json.dumps({"families": predictor.families}), flush=True)
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        if "tokens" in asked:
            predictor.learn(asked["family"], asked["prompt"], asked["tokens"])
        else:
            score, cached = predictor.score(asked["family"], asked["prompt"])
            print(json.dumps({"id": asked["id"], "score": score, "cached": cached}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
