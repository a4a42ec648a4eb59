"""A folder of a predictor whose answer is known: it scores a prompt by its number of words, and embeds which it has.

Run by the process that predicts live; only its network is smaller: SCORE is `per_word` * words, EMBEDDED the mean of
the words' unit vectors, made of length one.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = ("[UNK]", "def", "class", "parse", "text", "long", "short", "one", "two")
BORDERS = (5.0, 10.0, 20.0, 50.0)


def write_predictor(folder: Path, family: str, per_word: float = 1.0, ids: str = "IDS") -> Path:
    """Write it; `per_word` may be NaN. `ids`: name of the graph's input."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    table = np.eye(len(WORDS), dtype=np.float32)
    nodes = [
        helper.make_node("Gather", ["table", ids], ["rows"]),
        helper.make_node("ReduceSum", ["rows", "one"], ["sum"], keepdims=0),
        helper.make_node("LpNormalization", ["sum"], ["EMBEDDED"], axis=1, p=2),
        helper.make_node("ReduceSum", ["sum", "one"], ["words"], keepdims=0),
        helper.make_node("Mul", ["words", "per_word"], ["SCORE"]),
    ]
    given = [helper.make_tensor_value_info(ids, TensorProto.INT64, ["B", "T"])]
    made = [
        helper.make_tensor_value_info("EMBEDDED", TensorProto.FLOAT, ["B", len(WORDS)]),
        helper.make_tensor_value_info("SCORE", TensorProto.FLOAT, ["B"]),
    ]
    held = [
        numpy_helper.from_array(table, "table"),
        numpy_helper.from_array(np.array([1], np.int64), "one"),
        numpy_helper.from_array(np.array([per_word], np.float32), "per_word"),
    ]
    graph = helper.make_graph(nodes, "words", given, made, held)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), folder / "predictor.onnx"
    )
    hashes = {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in ("predictor.onnx", "tokenizer.json")
    }
    told = {"families": {family: BORDERS}, "tokens_max": 128, "threshold": 0.8, "sha256": hashes}
    (folder / "lengths.json").write_text(json.dumps(told))
    return folder
