"""Train the four variants of the family `resnets`, export them to ONNX, measure them on images they never saw.

Run: install requirements/train.txt into the environment of `make .venv-export/.ready`, then this script in it: minutes.
Data: UCI "Optical Recognition of Handwritten Digits" (CC BY 4.0), the 1,797 images that ship inside scikit-learn.
Split: by a fixed seed a stratified half is kept from training, and halved: validation.npz (449 images) sets the
accuracies that plans go by, heldout.npz (450) is what loads send: answers are judged on images that set nothing.
Writes: both, 1/ to 4/ model.onnx, config.pbtxt (the tensor contract), family.toml (measured accuracies).

Source: He et al. 2016 (arXiv 1512.03385): basic blocks of two 3 x 3 convolutions, section 4.2's counting of depth (2 x
blocks + 2), and answers averaged over crops as in section 4.1, here nine: the image and its shifts by one pixel. Long
et al. 2015 (arXiv 1411.4038), section 3.1: a network trained on a coarse grid sees a finer one by dilated convolutions.
Every variant takes IMAGE uint8 [N,8,8] (values 0..16) and returns PROBABILITIES float32 [N,10]. Its graph stretches
each crop to 32 x 32, which holds the 8 x 8 image at 16 shifts of a quarter pixel; with a dilation of 4 the convolutions
keep these apart, and their mean is taken before the last layer. So training needs one of the 16 at a time, drawn at
random, and a sixteenth of the work. Depths and widths: four of six that were tried, the more accurate the slower.
"""

import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import common
import onnxruntime
import torch
from common import PIXEL_MAX, Digits, Images, Labels
from torch import nn
from torch.nn import functional

HERE = common.REPOSITORY / "resnets"
SEED = 20261125
FINE = 4  # 8 x 8 pixels to 32 x 32
SHIFTS = 3  # by -1, 0, 1 pixels: nine crops
EPOCHS, BATCH = 10, 32
RATE_MAX = 4e-3
MEMORY_MIB = 64  # assumption: weights of 0.1 to 1.6 MB and the largest layer's activations of nine crops


@dataclass(frozen=True)
class Variant:
    """Shape of one variant: blocks in all, channels of each."""

    name: str
    version: int
    blocks: int
    width: int


VARIANTS = (
    Variant("resnet8", 1, 3, 16),
    Variant("resnet14", 2, 6, 24),
    Variant("resnet20", 3, 9, 32),
    Variant("resnet26", 4, 12, 32),
)


class Block(nn.Module):
    """Basic block: two 3 x 3 convolutions beside the identity."""

    def __init__(self, width: int, fine: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=fine, dilation=fine, bias=False)
        self.second = nn.Conv2d(width, width, 3, padding=fine, dilation=fine, bias=False)
        self.norms = nn.ModuleList((nn.BatchNorm2d(width), nn.BatchNorm2d(width)))
        nn.init.zeros_(self.norms[1].weight)  # begins as the identity

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = functional.relu(self.norms[0](self.first(x)))
        return functional.relu(x + self.norms[1](self.second(inner)))


class ResNet(nn.Module):
    """Residual network from pixels float [N,1,8 fine,8 fine] to logits [N,10]; its weights serve any fineness."""

    def __init__(self, variant: Variant, fine: int = 1) -> None:
        super().__init__()
        width = variant.width
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=fine, dilation=fine, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            *(Block(width, fine) for _ in range(variant.blocks)),
            nn.AvgPool2d(2 * fine),
            nn.Flatten(),
            nn.Linear(width * 4 * 4, 10),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class OverCrops(nn.Module):
    """Mean of a network's probabilities over an image and its shifts by one pixel: what is exported."""

    def __init__(self, variant: Variant, trained: ResNet) -> None:
        super().__init__()
        self.net = ResNet(variant, FINE)
        self.net.load_state_dict(trained.state_dict())

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        padded = functional.pad(image.float() / PIXEL_MAX, (1, 1, 1, 1))
        crops = [padded[:, y : y + 8, x : x + 8] for y in range(SHIFTS) for x in range(SHIFTS)]
        logits = self.net(stretched(torch.cat(crops).unsqueeze(1)))
        return functional.softmax(logits, 1).reshape(SHIFTS * SHIFTS, -1, 10).mean(0)


def stretched(pictures: torch.Tensor) -> torch.Tensor:
    """Pictures [N,1,8,8] at 32 x 32."""
    return functional.interpolate(pictures, scale_factor=FINE, mode="bilinear")


def macs(variant: Variant) -> int:
    """Multiply-adds of the convolutions for one image, all its crops."""
    return (SHIFTS * 8 * FINE) ** 2 * 9 * variant.width * (1 + 2 * variant.blocks * variant.width)


def train(variant: Variant, images: Images, labels: Labels) -> ResNet:
    """Fit a variant: AdamW under one cycle of the rate, images shifted at random by at most a pixel, and a fraction."""
    torch.manual_seed(SEED)
    net = ResNet(variant).train()
    padded = functional.pad(torch.from_numpy(images).float() / PIXEL_MAX, (1, 1, 1, 1)).unsqueeze(1)
    wanted = torch.from_numpy(labels)
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.05)
    steps = len(labels) // BATCH
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE_MAX, total_steps=EPOCHS * steps)
    for _ in range(EPOCHS):
        order = torch.randperm(len(labels))
        for part in order[: steps * BATCH].reshape(steps, BATCH):
            y, x = torch.randint(0, SHIFTS, (2,)).tolist()
            j, i = torch.randint(0, FINE, (2,)).tolist()
            seen = stretched(padded[part, :, y : y + 8, x : x + 8])[:, :, j::FINE, i::FINE]
            loss = functional.cross_entropy(net(seen), wanted[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            cycle.step()
    return net.eval()


def accuracy(path: Path, images: Images, labels: Labels) -> tuple[float, float]:
    """Share of right answers of an exported graph, and its mean time for one image on one thread [ms]."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    right, began_s = 0, time.thread_time()
    for image, label in zip(images, labels, strict=True):
        (probabilities,) = session.run(["PROBABILITIES"], {"IMAGE": image[None]})
        right += int(probabilities.argmax() == label)
    return right / len(labels), 1e3 * (time.thread_time() - began_s) / len(labels)


def make(variant: Variant, data: Digits) -> str:
    """Train, export and measure one variant; its table of family.toml."""
    torch.set_num_threads(1)  # one process a variant
    net = OverCrops(variant, train(variant, data.images, data.labels))
    path = HERE / str(variant.version) / "model.onnx"
    example = {"IMAGE": torch.from_numpy(data.judged_images[:2])}
    common.save(net, path, example, ["PROBABILITIES"], {"IMAGE": {0: "N"}, "PROBABILITIES": {0: "N"}})
    measured, took_ms = accuracy(path, data.judged_images, data.judged_labels)
    size_mb = path.stat().st_size / 1e6
    print(f"{variant.name}: accuracy {measured:.4f}, {took_ms:.1f} ms of one core, {size_mb:.2f} MB", flush=True)
    return common.variant_table(
        HERE,
        variant.name,
        variant.version,
        accuracy=measured,
        source=f"{len(data.judged_labels)} validation images (half of a stratified half, seed {SEED}), "
        f"onnxruntime {onnxruntime.__version__}",
        memory_mib=MEMORY_MIB,
        macs=macs(variant),
        licence=common.LICENCE_OF_DIGITS,
    )


def main() -> None:
    """Make all of the family."""
    data = common.split_digits(HERE, 0.5, SEED)
    with ProcessPoolExecutor(len(VARIANTS)) as pool:
        tables = list(pool.map(make, VARIANTS, [data] * len(VARIANTS)))
    common.write_family_of_digits(HERE, 750.0, 99.0, tables)


if __name__ == "__main__":
    main()
