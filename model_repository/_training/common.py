"""What the scripts that train and export the example families share: command line, check of a graph, files of a family.

Environment: requirements/train.txt, or requirements/export.txt with export-torch.in (`make export-efficientnet` creates
it). What only one of them has is imported where it is used. Imports nothing of Trefoil, as all of model_repository.
"""

import argparse
import hashlib
import os
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

REPOSITORY = Path(__file__).resolve().parents[1]
OPSET = 18
SEED = 20261121
TOLERANCE = 2e-3  # of the largest output: torch and onnxruntime add up in different orders
LOAD_S = 2.5  # assumption for a slice: starting a Triton or a swap takes 1.4-2.5 s on two cores
PIXEL_MAX = 16.0  # of UCI's digits
HUB_OFFLINE = ("no route to its files", "--random-weights exports the same architecture with seeded random weights")

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]

FAMILY_OF_DIGITS = """\
# Written by _training/train_{name}.py; accuracies are measured on validation.npz with the exported graphs.
name = "{name}"
metric = "top-1 accuracy"
task = "image classification"
generative = false
sequence_batching = false

[classes.""]
percentile = {percentile}
latency_ms = {latency_ms}
"""
CONTRACT_OF_DIGITS = """\
# The tensor contract of the family: every variant keeps it. The agent derives each slice's own config.pbtxt from it.
name: "%s"
backend: "onnxruntime"
max_batch_size: 8
input [ { name: "IMAGE" data_type: TYPE_UINT8 dims: [ 8, 8 ] } ]
output [ { name: "PROBABILITIES" data_type: TYPE_FP32 dims: [ 10 ] } ]
"""
LICENCE_OF_DIGITS = "trained here on UCI Optical Recognition of Handwritten Digits, CC BY 4.0"
VARIANT = """
[[variants]]
name = "{name}"
version = {version}
accuracy = {accuracy:.6f}
accuracy_source = "{source}"
memory_mib = {memory_mib}
load_s = {load_s}
macs = {macs}
licence = "{licence}"
sha256 = "{sha256}"
"""


def arguments(folder: Path, description: str) -> argparse.Namespace:
    """The command line of an export. `variants` are entries of the folder's family.toml, in its order."""
    family = tomllib.loads((folder / "family.toml").read_text())
    names = [variant["name"] for variant in family["variants"]]
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--variants", default=",".join(names), help=f"comma-separated; of {', '.join(names)}")
    parser.add_argument("--out", type=Path, default=folder, help="folder of the version folders; default: the family's")
    parser.add_argument("--random-weights", action="store_true", help="seeded random weights; needs no network")
    parser.add_argument("--seed", type=int, default=SEED, help="of the random weights")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    wanted = given.variants.split(",")
    if unknown := sorted(set(wanted) - set(names)):
        parser.error(f"--variants names {', '.join(unknown)}; {family['name']} has {', '.join(names)}")
    import torch

    given.variants = [variant for variant in family["variants"] if variant["name"] in wanted]
    torch.set_num_threads(given.threads)
    return given


def pretrained(load: Any, checkpoint: str) -> Any:
    """`load(checkpoint)`, or end with what to do where no hub can be reached."""
    try:
        return load(checkpoint)
    except (OSError, ConnectionError) as error:
        why = str(error).strip().splitlines()[0] if str(error).strip() else HUB_OFFLINE[0]
        sys.exit(f"{checkpoint} cannot be fetched from the model hub: {why}\nRemedy: {HUB_OFFLINE[1]}")


def save(
    model: "torch.nn.Module",
    path: Path,
    inputs: "Mapping[str, torch.Tensor]",
    outputs: Sequence[str],
    dynamic: Mapping[str, Mapping[int, str]],
) -> None:
    """Export to `path`, compare with torch on `inputs`, and only then put the file in place.

    Raises:
        SystemExit: onnxruntime answers something else than torch, or nothing but zeros.
    """
    import onnxruntime
    import torch

    model.eval()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder, torch.inference_mode():
        fresh = Path(folder) / path.name
        torch.onnx.export(
            model,
            tuple(inputs.values()),
            str(fresh),
            input_names=list(inputs),
            output_names=list(outputs),
            dynamic_axes={name: dict(axes) for name, axes in dynamic.items()},
            opset_version=OPSET,
            dynamo=False,  # a third of the other exporter's time and memory on the largest models
        )
        expected = model(*inputs.values())
        expected = expected if isinstance(expected, tuple) else (expected,)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(str(fresh), options, providers=["CPUExecutionProvider"])
        answers = session.run(list(outputs), {name: tensor.numpy() for name, tensor in inputs.items()})
        for name, want, have in zip(outputs, expected, answers, strict=True):
            largest, error = float(want.abs().max()), float(np.abs(want.numpy() - have).max())
            if not largest > 1e-3 or error > TOLERANCE * largest:
                sys.exit(f"{path}: {name} differs from torch by {error:g}, and its largest value is {largest:g}")
            print(f"{path}: {name} {list(have.shape)}, largest {largest:.3g}, error {error:.1e}", flush=True)
        os.replace(fresh, path)


def variant_table(
    folder: Path,
    name: str,
    version: int,
    *,
    accuracy: float,
    source: str,
    memory_mib: int,
    macs: int,
    licence: str,
) -> str:
    """Table of family.toml of the variant whose graph is `version`/model.onnx in its family's folder."""
    digest = hashlib.sha256((folder / str(version) / "model.onnx").read_bytes()).hexdigest()
    return VARIANT.format(
        name=name, version=version, accuracy=accuracy, source=source, memory_mib=memory_mib, load_s=LOAD_S, macs=macs,
        licence=licence, sha256=digest,
    )  # fmt: skip


@dataclass(frozen=True)
class Digits:
    """UCI's digits: to train on, to measure accuracies on, and for loads to send."""

    images: Images
    labels: Labels
    judged_images: Images
    judged_labels: Labels
    sent_images: Images
    sent_labels: Labels


def split_digits(folder: Path, kept_back: float, seed: int) -> Digits:
    """Split the images, of which training does not see `kept_back`, and write those: validation.npz and heldout.npz."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    images, labels = data.images.astype(np.uint8), data.target.astype(np.int64)
    kept, held = train_test_split(np.arange(len(labels)), test_size=kept_back, stratify=labels, random_state=seed)
    judged, sent = train_test_split(held, test_size=0.5, stratify=labels[held], random_state=seed)
    for name, part in (("validation.npz", judged), ("heldout.npz", sent)):
        np.savez_compressed(folder / name, images=images[part], labels=labels[part].astype(np.uint8))
    return Digits(images[kept], labels[kept], images[judged], labels[judged], images[sent], labels[sent])


def write_family_of_digits(folder: Path, latency_ms: float, percentile: float, tables: Iterable[str]) -> None:
    """Write family.toml, with the tables of its variants, and config.pbtxt of a family that knows digits."""
    head = FAMILY_OF_DIGITS.format(name=folder.name, percentile=percentile, latency_ms=latency_ms)
    (folder / "family.toml").write_text(head + "".join(tables))
    (folder / "config.pbtxt").write_text(CONTRACT_OF_DIGITS % folder.name)
