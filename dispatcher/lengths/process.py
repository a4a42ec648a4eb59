"""python -m dispatcher.lengths.process FOLDER: predicts lengths of answers, one prompt after the other.

Protocol: a JSON object a line. Says first {"family": ...}, or {"refused": why} and ends. {"id", "prompt"} is answered
    by {"id", "score", "cached"}, the score real-valued, 0 = the shortest class; {"prompt", "tokens"} is a true length,
    and is not answered. Ends with its standard input.
Files of FOLDER, written by `make pydoc-lengths`: lengths.json (family, borders of classes, hashes),
    predictor.onnx (IDS -> EMBEDDED, SCORE), tokenizer.json.
"""

import hashlib
import json
import sys
from bisect import bisect_right
from collections import OrderedDict
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dispatcher.lengths.core.semantic_cache import SemanticCache
from trefoil.core.errors import CatalogError
from trefoil.runtime.files import NotPlain, read_plain
from trefoil.runtime.given.onnx_file import check_external_data

FILES: Final = ("predictor.onnx", "tokenizer.json")
FILE_BYTES_MAX: Final = 2**28
REMEMBERED_MAX: Final = 1024  # embeddings of prompts whose true length is still to come


class PredictorRefused(Exception):
    """The folder's files cannot be used."""


class Predictor:
    """The network and the semantic cache on its embedding."""

    def __init__(self, folder: Path) -> None:
        """Read the files. Raises Refused."""
        try:
            import onnxruntime
            from tokenizers import Tokenizer
        except ImportError as error:
            raise PredictorRefused(f"{error}. Remedy: pip install 'trefoil[lengths]'") from error
        told, graph, tokenizer = self._told(folder)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        if (taken := [one.name for one in self._session.get_inputs()]) != ["IDS"]:
            raise PredictorRefused(f"{FILES[0]} takes {', '.join(taken)}, not IDS alone. Remedy: make pydoc-lengths")
        self._tokenizer = Tokenizer.from_str(tokenizer.decode())
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(int(told["tokens_max"]))
        self.family, self._borders = str(told["family"]), [float(each) for each in told["borders"]]
        self._cache = SemanticCache(self._run("a")[0].size, float(told["threshold"]))
        self._embedded: OrderedDict[str, NDArray[np.float32]] = OrderedDict()

    @staticmethod
    def _told(folder: Path) -> tuple[dict[str, Any], bytes, bytes]:
        """What lengths.json says, the graph and the tokenizer: what was compared is what is used."""
        try:
            told, *contents = (read_plain(folder / name, FILE_BYTES_MAX, folder) for name in ("lengths.json", *FILES))
            told = json.loads(told)
            for name, content in zip(FILES, contents, strict=True):
                found = hashlib.sha256(content).hexdigest()
                if found != told["sha256"][name]:
                    raise PredictorRefused(
                        f"{name} has SHA-256 {found[:12]}, lengths.json names {told['sha256'][name][:12]}. "
                        "Remedy: make pydoc-lengths"
                    )
            if check_external_data(folder / FILES[0], folder):
                raise PredictorRefused(f"{FILES[0]} keeps weights in other files. Remedy: make pydoc-lengths")
        except (OSError, NotPlain, CatalogError, RecursionError, ValueError, KeyError, TypeError) as error:
            raise PredictorRefused(f"{folder}: {error}. Remedy: make pydoc-lengths") from error
        return told, contents[0], contents[1]

    def _run(self, prompt: str) -> tuple[NDArray[np.float32], float]:
        ids = np.array([self._tokenizer.encode(prompt).ids], np.int64)
        embedded, score = self._session.run(["EMBEDDED", "SCORE"], {"IDS": ids})
        return embedded[0], float(score[0])

    def score(self, prompt: str) -> tuple[float, bool]:
        """Score of a prompt, and whether it is that of a true length in the cache."""
        embedded, score = self._run(prompt)
        self._embedded[prompt] = embedded
        if len(self._embedded) > REMEMBERED_MAX:
            self._embedded.popitem(last=False)
        tokens = self._cache.length(embedded)
        return (score, False) if tokens is None else (float(bisect_right(self._borders, tokens)), True)

    def learn(self, prompt: str, tokens: int) -> None:
        """Keep a true length."""
        embedded = self._embedded.pop(prompt, None)
        self._cache.learn(self._run(prompt)[0] if embedded is None else embedded, tokens)


def main(folder: Path) -> int:
    """Answer until the standard input ends; returns the exit code."""
    try:
        predictor = Predictor(folder)
    except PredictorRefused as refused:
        print(json.dumps({"refused": str(refused)}), flush=True)
        return 2
    print(json.dumps({"family": predictor.family}), flush=True)
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        if "tokens" in asked:
            predictor.learn(asked["prompt"], asked["tokens"])
        else:
            score, cached = predictor.score(asked["prompt"])
            print(json.dumps({"id": asked["id"], "score": score, "cached": cached}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
