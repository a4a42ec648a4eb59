"""Train the four variants of the family `digits`, export them to ONNX, measure them on images they never saw.

Run: in a virtual environment of requirements/train.txt, `python model_repository/_training/train_digits.py`.
Data: UCI "Optical Recognition of Handwritten Digits" (CC BY 4.0), the 1,797 images that ship inside scikit-learn.
Split: by a fixed seed a stratified third is kept from training, and halved: validation.npz (299 images) sets the
accuracies that plans go by, heldout.npz (300) is what loads send: answers are judged on images that set nothing.
Writes: both, 1/ to 4/ model.onnx, config.pbtxt (the tensor contract), family.toml (measured accuracies).

The variants differ in how much of the image they read and how much they compute, as real families do:

    digits-xs  mean of 2x2 blocks (16 values), linear                            160 multiply-adds
    digits-s   mean of pairs of columns (32 values), linear                      320
    digits-m   the same 32 values, one hidden layer of 24                      1,008
    digits-l   all 64 pixels, mean of three networks (192, 96), trained on 1-pixel shifts too   95,040

Widths and penalties were picked once so that the four lie on a useful frontier (a spread of accuracies, each step
dearer than the last), not to win a benchmark; the accuracies written down are those of this script as it stands.
Pooling, scaling and averaging are inside the graphs: every variant takes IMAGE uint8 [N,8,8] (values 0..16) and
returns PROBABILITIES float32 [N,10].
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import common
import numpy as np
import onnx
import onnxruntime
from common import PIXEL_MAX, Images, Labels
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier

HERE = common.REPOSITORY / "digits"
SEED = 20261121
OPSET = 17
IR_VERSION = 9

Floats = NDArray[np.float64]
Layers = list[tuple[Floats, Floats]]  # (weights [in, out], bias [out]) of each layer; ReLU between, softmax after


@dataclass(frozen=True)
class Variant:
    """One trained variant: `block` is the (rows, columns) of pixels that are averaged into one value."""

    name: str
    version: int
    block: tuple[int, int]
    networks: tuple[Layers, ...]
    memory_mib: int

    @property
    def macs(self) -> int:
        """Multiply-adds of one image, in the layers (pooling and averaging excluded)."""
        return sum(weights.size for network in self.networks for weights, _ in network)


def features(images: Images, block: tuple[int, int]) -> Floats:
    """Average blocks of pixels and scale to 0..1: what the graph does, for training."""
    rows, columns = block
    blocks = images.reshape(len(images), 8 // rows, rows, 8 // columns, columns).astype(np.float64)
    return blocks.mean(axis=(2, 4)).reshape(len(images), -1) / PIXEL_MAX


def with_shifts(images: Images, labels: Labels) -> tuple[Images, Labels]:
    """Return the images and their four 1-pixel shifts (zeros move in)."""
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1)))
    offsets = ((1, 1), (0, 1), (2, 1), (1, 0), (1, 2))
    return np.concatenate([padded[:, y : y + 8, x : x + 8] for y, x in offsets]), np.tile(labels, len(offsets))


def fit_linear(x: Floats, y: Labels, inverse_penalty: float) -> Layers:
    """Multinomial logistic regression."""
    model = LogisticRegression(C=inverse_penalty, max_iter=5000).fit(x, y)
    return [(model.coef_.T, model.intercept_)]


def fit_network(x: Floats, y: Labels, hidden: tuple[int, ...], epochs: int, seed: int) -> Layers:
    """Multi-layer perceptron with ReLU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the number of epochs is chosen, not reached by tolerance
        model = MLPClassifier(hidden, alpha=1e-3, max_iter=epochs, random_state=seed).fit(x, y)
    return list(zip(model.coefs_, model.intercepts_, strict=True))


def train(images: Images, labels: Labels) -> tuple[Variant, ...]:
    """Fit the four variants on the training images."""
    xs, s, full = (2, 2), (1, 2), (1, 1)
    many, many_labels = with_shifts(images, labels)
    ensemble = tuple(fit_network(features(many, full), many_labels, (192, 96), 60, seed) for seed in (0, 1, 2))
    return (
        Variant("digits-xs", 1, xs, (fit_linear(features(images, xs), labels, 10.0),), 16),
        Variant("digits-s", 2, s, (fit_linear(features(images, s), labels, 1.0),), 16),
        Variant("digits-m", 3, s, (fit_network(features(images, s), labels, (24,), 800, 0),), 16),
        Variant("digits-l", 4, full, ensemble, 32),
    )


def export(variant: Variant) -> onnx.ModelProto:
    """Write the variant as a graph from uint8 pixels to probabilities."""
    rows, columns = variant.block
    constants = [
        numpy_helper.from_array(np.array([0, 1, 8, 8], np.int64), "as_picture"),
        numpy_helper.from_array(np.array(1.0 / PIXEL_MAX, np.float32), "scale"),
    ]
    nodes = [
        helper.make_node("Cast", ["IMAGE"], ["pixels"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["pixels", "scale"], ["scaled"]),
        helper.make_node("Reshape", ["scaled", "as_picture"], ["picture"]),
        helper.make_node("AveragePool", ["picture"], ["pooled"], kernel_shape=[rows, columns], strides=[rows, columns]),
        helper.make_node("Flatten", ["pooled"], ["features"], axis=1),
    ]
    answers = [_export_network(i, layers, nodes, constants) for i, layers in enumerate(variant.networks)]
    nodes.append(helper.make_node("Mean", answers, ["PROBABILITIES"]))
    graph = helper.make_graph(
        nodes,
        variant.name,
        [helper.make_tensor_value_info("IMAGE", TensorProto.UINT8, ["N", 8, 8])],
        [helper.make_tensor_value_info("PROBABILITIES", TensorProto.FLOAT, ["N", 10])],
        constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], producer_name="trefoil")
    model.ir_version = IR_VERSION
    onnx.checker.check_model(model, full_check=True)
    return model


def _export_network(index: int, layers: Layers, nodes: list[onnx.NodeProto], constants: list[onnx.TensorProto]) -> str:
    """Append one network's layers; return the name of its probabilities."""
    value = "features"
    for depth, (weights, bias) in enumerate(layers):
        name = f"network{index}_layer{depth}"
        constants.append(numpy_helper.from_array(weights.astype(np.float32), f"{name}_weights"))
        constants.append(numpy_helper.from_array(bias.astype(np.float32), f"{name}_bias"))
        nodes.append(helper.make_node("Gemm", [value, f"{name}_weights", f"{name}_bias"], [name]))
        value = name
        if depth < len(layers) - 1:
            value = f"{name}_relu"
            nodes.append(helper.make_node("Relu", [name], [value]))
    nodes.append(helper.make_node("Softmax", [value], [f"network{index}"], axis=1))
    return f"network{index}"


def accuracy(model: onnx.ModelProto, images: Images, labels: Labels) -> float:
    """Share of right answers of the exported graph itself."""
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (probabilities,) = session.run(["PROBABILITIES"], {"IMAGE": images})
    return float(np.mean(probabilities.argmax(axis=1) == labels))


def write_family(variants: Sequence[Variant], measured: Sequence[float], images: int) -> None:
    """Write family.toml and the tensor contract."""
    source = (
        f"{images} validation images (half of a stratified third, seed {SEED}), onnxruntime {onnxruntime.__version__}"
    )
    tables = [
        common.variant_table(
            HERE,
            variant.name,
            variant.version,
            accuracy=value,
            source=source,
            memory_mib=variant.memory_mib,
            macs=variant.macs,
            licence=common.LICENCE_OF_DIGITS,
        )
        for variant, value in zip(variants, measured, strict=True)
    ]
    common.write_family_of_digits(HERE, 75.0, 95.0, tables)


def main() -> None:
    """Train, export, measure, write."""
    data = common.split_digits(HERE, 1 / 3, SEED)
    variants = train(data.images, data.labels)
    measured = []
    for variant in variants:
        model = export(variant)
        folder = HERE / str(variant.version)
        folder.mkdir(exist_ok=True)
        (folder / "model.onnx").write_bytes(model.SerializeToString(deterministic=True))
        measured.append(accuracy(model, data.judged_images, data.judged_labels))
        others = accuracy(model, data.sent_images, data.sent_labels)
        print(f"{variant.name:10s} accuracy {measured[-1]:.4f}, held out {others:.4f}  multiply-adds {variant.macs:,}")
    write_family(variants, measured, len(data.judged_labels))


if __name__ == "__main__":
    main()
