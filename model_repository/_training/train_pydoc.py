"""Train the four variants of the family `pydoc`, export them to ONNX, measure them on signatures they never saw.

Run: `make pydoc`, or this script in the environment of `make .venv-export/.ready`. Under half an hour on two cores.
Data: signatures and docstrings of the standard library of the Python that runs this, read by `ast` (PSF licence). A
prompt is the line `def name(arguments):` or `class Name(Bases):`, its answer the first sentence of its docstring.
Split: by the SHA-256 of the prompt a tenth is kept from training (validation.json, which sets the accuracies that plans
go by) and another tenth (heldout.json, what loads send); no prompt stands in two parts. The pairs are few for the
largest variant: its first epochs are also on the other sentences of the docstrings that are trained on, each an answer
to nothing.
Writes: both, 1/ to 4/ model.onnx, config.pbtxt (the contract), family.toml (measured accuracies), card.json (losses,
entropy of lengths).

Source: Radford et al. 2019 (GPT-2): pre-norm blocks, learned positions, GELU, tied embeddings. Tokens are 256 bytes, an
end, a border between prompt and answer, and pieces that merges of frequent pairs gave (Sennrich et al. 2016, arXiv
1508.07909); text is cut into the longest pieces from the left. The graph takes the keys and values of what came before
as inputs, as many positions as the context has, and returns those of the new tokens alone: whoever runs it keeps them.
So one run serves the next token of several streams at once, and what one stream gets depends on no other.
Weights are rounded to half precision, as the file holds them, before anything is measured.
"""

import argparse
import ast
import hashlib
import json
import math
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import common
import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn
from torch.nn import functional

HERE = common.REPOSITORY / "pydoc"
sys.path.insert(0, str(common.REPOSITORY / "_shared"))

from decoding import Decoder, Stream  # noqa: E402

SEED = 20261126
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "turtledemo", "lib2to3", "__pycache__"}
PROMPT_CHARS_MAX, ANSWER_CHARS_MAX = 160, 200  # longer ones are left out
END, BORDER, PIECES = 256, 257, 1024  # the first two after the bytes; pieces in all
CONTEXT, PROMPT_MAX = 192, 96  # tokens; the rest of the context is for the answer
HEAD = 32
BATCH = 32
MEMORY_MIB = {1: 48, 2: 48, 3: 64, 4: 80}  # assumption: weights in single precision, eight caches, the runtime's own

LOSS_ROWS = 200  # of each part that losses are measured on

Pair = tuple[str, str]
Rows = Mapping[int, list[list[int]]]  # token sequences by part; 3: further sentences
Card = dict[str, float]


@dataclass(frozen=True)
class Cycle:
    """One rise and fall of the learning rate."""

    epochs: int
    rate_max: float
    drop: float = 0.1
    wide_epochs: int = 0  # the first so many of them are also on further sentences


@dataclass(frozen=True)
class Variant:
    """Shape of one variant, and how it is trained."""

    name: str
    version: int
    width: int
    blocks: int
    cycles: tuple[Cycle, ...]


VARIANTS = (
    Variant("pydoc-xs", 1, 32, 2, (Cycle(30, 4e-3),)),
    Variant("pydoc-s", 2, 64, 3, (Cycle(30, 4e-3),)),
    Variant("pydoc-m", 3, 128, 4, (Cycle(20, 3e-3),)),
    Variant("pydoc-l", 4, 192, 5, (Cycle(14, 2e-3, 0.2, 6), Cycle(6, 1.5e-3))),
)


@cache
def documented() -> list[Pair]:
    """Every signature of the standard library with its docstring, in order of the files; read once."""
    found = list[Pair]()
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if SKIPPED & set(path.relative_to(root).parts):
            continue
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.append((signature(node), ast.get_docstring(node) or ""))
    return found


def pairs() -> list[Pair]:
    """Every signature with the first sentence of its docstring; of equal ones the first."""
    found: dict[str, str] = {}
    for prompt, text in documented():
        answer = first_sentence(text)
        if answer and len(prompt) <= PROMPT_CHARS_MAX and len(answer) <= ANSWER_CHARS_MAX:
            found.setdefault(prompt, answer)
    return list(found.items())


def further(found: Sequence[Pair]) -> list[str]:
    """The other sentences of the docstrings that are trained on, once each, without what is an answer of `found`."""
    answers, sentences = {answer for _, answer in found}, dict[str, None]()
    for _, text in (each for each in documented() if part_of(each[0]) > 1):
        for paragraph in text.split("\n\n"):
            rest = " ".join(paragraph.split())
            while sentence := first_sentence(rest):
                rest = rest[len(sentence) :].strip()
                if len(sentence) <= ANSWER_CHARS_MAX and sentence not in answers:
                    sentences[sentence] = None
    return list(sentences)


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> str:
    """The line that a definition begins with, without annotations of what it returns."""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"class {node.name}({bases}):" if bases else f"class {node.name}:"
    word = "def" if isinstance(node, ast.FunctionDef) else "async def"
    return f"{word} {node.name}({ast.unparse(node.args)}):"


def first_sentence(text: str) -> str:
    """The first sentence of a docstring's first paragraph, on one line."""
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    end = next((i + 1 for i, c in enumerate(paragraph[:-1]) if c in ".!?" and paragraph[i + 1] == " "), None)
    return paragraph[:end]


def part_of(prompt: str) -> int:
    """0 to 9 by the prompt alone: 0 validates, 1 is held out, the others are trained on."""
    return hashlib.sha256(prompt.encode()).digest()[0] % 10


def learn_pieces(texts: Sequence[str]) -> list[bytes]:
    """The vocabulary: bytes, end, border, then what the most frequent pairs inside words merge to."""
    words = Counter(word for text in texts for word in _words(text))
    parts = {word: [bytes([b]) for b in word] for word in words}
    pieces = [bytes([b]) for b in range(256)] + [b"", b""]
    while len(pieces) < PIECES:
        seen: Counter[tuple[bytes, bytes]] = Counter()
        for word, cut in parts.items():
            for pair in pairwise(cut):
                seen[pair] += words[word]
        (left, right), _ = max(seen.items(), key=lambda item: (item[1], item[0]))
        merged = left + right
        if merged not in pieces:
            pieces.append(merged)
        for word, cut in parts.items():
            if merged in word:
                parts[word] = _merge(cut, left, right)
    return pieces


def _words(text: str) -> list[bytes]:
    """Words with the blank before them; what is no letter stands alone."""
    marked = "".join(c if c.isalnum() or c == "_" else f"\0{c}" if c == " " else f"\0{c}\0" for c in text)
    return [word.encode() for word in marked.split("\0") if word]


def _merge(cut: list[bytes], left: bytes, right: bytes) -> list[bytes]:
    merged: list[bytes] = []
    for piece in cut:
        if merged and merged[-1] == left and piece == right:
            merged[-1] = left + right
        else:
            merged.append(piece)
    return merged


class Block(nn.Module):
    """One transformer block, with keys and values of before as inputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD
        self.norms = nn.ModuleList((nn.LayerNorm(width), nn.LayerNorm(width)))
        self.joint = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout()

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [B,T,W], mask [B,1,T,P+T], key [B,H,D,P], value [B,H,P,D] -> x, the new keys [B,H,D,T] and values."""
        new = self.joint(self.norms[0](x))
        query, fresh_key, fresh = (
            part.reshape(x.shape[0], x.shape[1], self.heads, HEAD).transpose(1, 2) for part in new.chunk(3, -1)
        )
        fresh_key = fresh_key.transpose(2, 3)
        past = key.shape[3]
        scores = torch.cat((query @ key, query @ fresh_key), -1) / math.sqrt(HEAD) + mask
        weights = functional.softmax(scores, -1)
        mixed = weights[..., :past] @ value + weights[..., past:] @ fresh
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(x.shape)))
        return x + self.drop(self.down(functional.gelu(self.up(self.norms[1](x))))), fresh_key, fresh


class GPT(nn.Module):
    """The network; `forward` is what is exported."""

    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self.tokens = nn.Embedding(PIECES, variant.width)
        self.positions = nn.Embedding(CONTEXT, variant.width)
        self.drop = nn.Dropout()
        self.blocks = nn.ModuleList(Block(variant.width) for _ in range(variant.blocks))
        self.norm = nn.LayerNorm(variant.width)
        for each in self.parameters():
            if each.dim() > 1:
                nn.init.normal_(each, std=0.02)

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, *past: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """ids, positions [B,T]; mask as in Block, 0 or -inf; past: key and value of every block -> logits of the last
        token [B,V], new keys and values."""
        x, fresh = self.hidden(ids, positions, mask, past)
        return self.norm(x[:, -1]) @ self.tokens.weight.T, *fresh

    def hidden(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, past: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """What the last block gives [B,T,W], and the new keys and values."""
        x, fresh = self.drop(self.tokens(ids) + self.positions(positions)), []
        for i, block in enumerate(self.blocks):
            x, key, value = block(x, mask, past[2 * i], past[2 * i + 1])
            fresh += [key, value]
        return x, fresh

    def nothing_before(self, rows: int) -> list[torch.Tensor]:
        """Keys and values of no positions."""
        heads = self.blocks[0].heads
        shapes = ((rows, heads, HEAD, 0), (rows, heads, 0, HEAD))
        return [torch.zeros(shapes[i % 2]) for i in range(2 * len(self.blocks))]


def loss_in(net: GPT, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Mean cross entropy of every next token of a batch of token sequences, 0-dimensional."""
    length = max(map(len, rows))
    ids = torch.full((len(rows), length), END)
    wanted = torch.full((len(rows), length), -100)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        wanted[i, : len(row) - 1] = torch.tensor(row[1:])
    causal = torch.full((length, length), -torch.inf).triu(1)[None, None]
    positions = torch.arange(length).expand(len(rows), -1)
    x, _ = net.hidden(ids, positions, causal, net.nothing_before(len(rows)))
    return functional.cross_entropy((net.norm(x) @ net.tokens.weight.T).flatten(0, 1), wanted.flatten())


def train(variant: Variant, rows: Sequence[Sequence[int]], wide: Sequence[Sequence[int]]) -> GPT:
    """Fit a variant, cycle by cycle; `wide` are the further sentences."""
    torch.manual_seed(SEED)
    net = GPT(variant).train()
    for i, cycle in enumerate(variant.cycles):
        if i:
            torch.manual_seed(SEED + i)
        data = [[*rows, *wide] if epoch < cycle.wide_epochs else rows for epoch in range(cycle.epochs)]
        for epoch, loss in enumerate(run_cycle(net, cycle, data, np.random.default_rng(SEED + i))):
            print(f"{variant.name}: cycle {i + 1}, epoch {epoch + 1} of {cycle.epochs}, loss {loss:.3f}", flush=True)
        for each in net.parameters():
            each.data = each.data.half().float()  # as the file has them
    return net.eval()


def run_cycle(
    net: GPT, cycle: Cycle, data: Sequence[Sequence[Sequence[int]]], chance: np.random.Generator
) -> Iterator[float]:
    """AdamW under one cycle of the rate, sequences of like length together. Yields the mean loss of each epoch."""
    for each in net.modules():
        if isinstance(each, nn.Dropout):
            each.p = cycle.drop
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.1)
    steps = sum(math.ceil(len(part) / BATCH) for part in data)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, cycle.rate_max, total_steps=steps)
    for part in data:
        order = sorted(range(len(part)), key=lambda i: len(part[i]) + 4.0 * chance.random())
        losses = []
        for first in chance.permutation(np.arange(0, len(part), BATCH)):
            loss = loss_in(net, [part[i] for i in order[first : first + BATCH]])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            rate.step()
            losses.append(loss.item())
        yield float(np.mean(losses))


def export(variant: Variant, net: GPT, pieces: Sequence[bytes]) -> None:
    """Write the graph: matrices in half precision, cast when it is loaded; vocabulary and limits beside them."""
    path = HERE / str(variant.version) / "model.onnx"
    heads, past = variant.width // HEAD, CONTEXT
    inputs = {
        "IDS": torch.tensor([[BORDER, 5], [7, 9]]),
        "POSITIONS": torch.tensor([[3, 4], [1, 2]]),
        "MASK": torch.zeros(2, 1, 2, past + 2),
    }
    names = [f"{kind}_{i}" for i in range(variant.blocks) for kind in ("KEY", "VALUE")]
    torch.manual_seed(SEED)
    for name in names:
        inputs[f"PAST_{name}"] = torch.randn(*((2, heads, HEAD, past) if "KEY" in name else (2, heads, past, HEAD)))
    dynamic: dict[str, dict[int, str]] = {
        "IDS": {0: "B", 1: "T"},
        "POSITIONS": {0: "B", 1: "T"},
        "MASK": {0: "B", 2: "T", 3: "S"},
        "LOGITS": {0: "B"},
    }
    for name in names:
        axis = 3 if "KEY" in name else 2
        dynamic |= {f"PAST_{name}": {0: "B", axis: "P"}, name: {0: "B", axis: "T"}}
    common.save(net, path, inputs, ["LOGITS", *names], dynamic)
    model = onnx.load(path)
    halve(model.graph)
    told = {
        "vocabulary": json.dumps([piece.hex() for piece in pieces]),
        "border": str(BORDER),
        "context": str(CONTEXT),
        "prompt_max": str(PROMPT_MAX),
    }
    helper.set_model_props(model, told)
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString(deterministic=True))


def halve(graph: onnx.GraphProto) -> None:
    """Hold matrices in half precision, each with a cast that is folded when the graph is loaded."""
    casts = []
    for tensor in graph.initializer:
        array = numpy_helper.to_array(tensor)
        if tensor.data_type == TensorProto.FLOAT and array.ndim > 1:
            name = tensor.name
            tensor.CopyFrom(numpy_helper.from_array(array.astype(np.float16), f"{name}_half"))
            casts.append(helper.make_node("Cast", [f"{name}_half"], [name], to=TensorProto.FLOAT))
    nodes = [*casts, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)


def chrf(answer: str, wanted: str) -> float:
    """chrF2 of an answer (Popovic 2015): F-score of character n-grams up to six, blanks left out, recall twice."""
    texts = ["".join(text.split()) for text in (answer, wanted)]
    precisions, recalls = [], []
    for n in range(1, 7):
        have, want = (Counter(text[i : i + n] for i in range(len(text) - n + 1)) for text in texts)
        if not want:
            continue
        common = sum((have & want).values())
        precisions.append(common / max(1, have.total()))
        recalls.append(common / want.total())
    precision, recall = float(np.mean(precisions)), float(np.mean(recalls))
    return 5 * precision * recall / (4 * precision + recall) if precision + recall else 0.0


def entropy(values: Sequence[int]) -> float:
    """Entropy of whole numbers [bit]."""
    shares = np.array(list(Counter(values).values())) / len(values)
    return float(-(shares * np.log2(shares)).sum())


def loss_of(decoder: Decoder, row: Sequence[int]) -> list[float]:
    """Cross entropy [nat] of each token of a true answer, its end included, after those before it."""
    border = row.index(BORDER) + 1
    stream, found = Stream(row[:border], CONTEXT), []
    logits = decoder.join(stream)
    for wanted in row[border:]:
        high = float(logits[0].max())
        found.append(high + math.log(np.exp(logits[0] - high, dtype=np.float64).sum()) - float(logits[0, wanted]))
        stream.token = wanted
        logits = decoder.step() if stream.length < CONTEXT else logits
    decoder.drop(stream)
    return found


def measure(variant: Variant, rows: Rows, judged: Sequence[Pair]) -> Card:
    """Measure an exported graph: its part of the card."""
    path = HERE / str(variant.version) / "model.onnx"
    decoder = Decoder(path, 1)
    loss = {
        part: np.mean([nats for row in rows[part][:LOSS_ROWS] for nats in loss_of(decoder, row)]) for part in (0, 2)
    }
    answers = [decoder.answer(prompt.encode()) for prompt, _ in judged]
    texts = [b"".join(answer).decode(errors="replace") for answer in answers]
    lengths, true = [len(answer) for answer in answers], [len(row) - row.index(BORDER) - 2 for row in rows[0]]
    print("\n".join(f"{variant.name}: {p} -> {t}" for (p, _), t in zip(judged[:8], texts, strict=False)), flush=True)
    return {
        "bytes": path.stat().st_size,
        "chrf2": float(np.mean([chrf(text, wanted) for text, (_, wanted) in zip(texts, judged, strict=True)])),
        "loss_validation_nats_per_token": float(loss[0]),
        "loss_trained_nats_per_token": float(loss[2]),
        "tokens_mean": float(np.mean(lengths)),
        "tokens_cv": float(np.std(lengths) / np.mean(lengths)),
        "tokens_max": float(max(lengths)),
        "length_entropy_bits": entropy(lengths),
        "true_tokens_mean": float(np.mean(true)),
        "true_length_entropy_bits": entropy(true),
        "length_correlation": float(np.corrcoef(lengths, true)[0, 1]),
    }


def make(variant: Variant, rows: Rows, judged: Sequence[Pair], pieces: Sequence[bytes], trains: bool) -> Card:
    """Train and export one variant, if it is to be, and measure it."""
    torch.set_num_threads(1)  # one process a variant
    if trains:
        export(variant, train(variant, rows[2], rows[3]), pieces)
    card = measure(variant, rows, judged)
    print(variant.name, json.dumps(card), flush=True)
    return card


CONFIG = """\
# The contract of the family: a prompt in, a token an answer. The agent derives each slice's own config.pbtxt from it.
name: "pydoc"
backend: "python"
default_model_filename: "decoder.py"
max_batch_size: 8
model_transaction_policy { decoupled: true }
input [
  { name: "PROMPT" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "MAX_TOKENS" data_type: TYPE_INT32 dims: [ 1 ] optional: true }
]
output [ { name: "TOKEN" data_type: TYPE_STRING dims: [ 1 ] } ]
parameters { key: "tokens_mean" value { string_value: "%.3f" } }
parameters { key: "chat_template" value { string_value: "{{ messages[-1].content }}" } }
"""

FAMILY = """\
# Written by _training/train_pydoc.py; accuracies are measured on validation.json with the exported graphs.
name = "pydoc"
metric = "chrF2 of the answer"
task = "text generation"
generative = true
tokens_mean = {tokens_mean:.3f}
sequence_batching = false

[classes.""]
percentile = 95.0
latency_ms = 2000.0
"""

LICENCE = "trained here on docstrings of Python's standard library, PSF-2.0"


def write_family(cards: Mapping[str, Card], judged: int) -> None:
    """Write contract, family.toml and card.json."""
    tokens = float(np.mean([card["tokens_mean"] for card in cards.values()]))
    text = FAMILY.format(tokens_mean=tokens)
    for variant in VARIANTS:
        card = cards[variant.name]
        text += common.variant_table(
            HERE,
            variant.name,
            variant.version,
            accuracy=card["chrf2"],
            source=f"{judged} signatures of Python {sys.version.split()[0]} never trained on, "
            f"onnxruntime {onnxruntime.__version__}",
            memory_mib=MEMORY_MIB[variant.version],
            macs=12 * variant.width**2 * variant.blocks + PIECES * variant.width,
            licence=LICENCE,
        )
    (HERE / "family.toml").write_text(text)
    (HERE / "config.pbtxt").write_text(CONFIG % tokens)
    (HERE / "card.json").write_text(json.dumps({"python": sys.version.split()[0], "variants": cards}, indent=1) + "\n")


def main() -> None:
    """Make all of the family."""
    parser = argparse.ArgumentParser(description="train the family pydoc")
    parser.add_argument("--measure", action="store_true", help="the graphs that are there, without training")
    trains = not parser.parse_args().measure
    found = pairs()
    parts = {0: [p for p in found if part_of(p[0]) == 0], 1: [p for p in found if part_of(p[0]) == 1]}
    parts[2] = [p for p in found if part_of(p[0]) > 1]
    pieces = learn_pieces([text for pair in parts[2] for text in pair])
    cut = Decoder.cutter(pieces)
    texts = parts | {3: [("", sentence) for sentence in further(found)]}
    rows = {i: [[*cut(p.encode()), BORDER, *cut(a.encode()), END] for p, a in part] for i, part in texts.items()}
    rows = {
        i: [row for row in part if row.index(BORDER) <= PROMPT_MAX and len(row) <= CONTEXT] for i, part in rows.items()
    }
    for name, part in (("validation.json", parts[0]), ("heldout.json", parts[1])):
        (HERE / name).write_text(json.dumps(part, indent=0, ensure_ascii=False) + "\n")
    tokens = sum(map(len, rows[2]))
    print(f"{ {i: len(part) for i, part in parts.items()} } pairs, {tokens:,} tokens, {len(pieces)} pieces", flush=True)
    with ProcessPoolExecutor(len(VARIANTS)) as pool:
        n = len(VARIANTS)
        cards = list(pool.map(make, VARIANTS, [rows] * n, [parts[0]] * n, [pieces] * n, [trains] * n))
    write_family({v.name: card for v, card in zip(VARIANTS, cards, strict=True)}, len(parts[0]))


if __name__ == "__main__":
    main()
