"""Export the variants of the family `efficientnet` to ONNX, from the architectures of transformers.

Run: `make export-efficientnet` (random weights), or this script in the environment of `make .venv-export/.ready`.
Weights: google/efficientnet-b{1,3,5,7} of the Hugging Face hub (Apache-2.0), or seeded random ones that keep every
layer's activations at scale: with the configuration's own initialisation the logits are near 1e-31, and a comparison
of two of those shows nothing.

Every variant takes IMAGE uint8 [N,224,224,3] (RGB) and returns LOGITS float32 [N,1000]: resizing to the variant's own
resolution and normalising are inside the graph. Stretching 224 pixels to 600 cannot restore detail, so a deployment
that wants the published accuracies should send larger images and change SIZE in this file and dims in config.pbtxt.
"""

import gc

import common
import torch
from torch import nn
from transformers import EfficientNetConfig, EfficientNetForImageClassification

SIZE = 224
CLASSES = 1000
MEAN = (0.485, 0.456, 0.406)
STD = (0.47853944, 0.4732864, 0.47434163)  # as the checkpoints' image processor has it
# width, depth, resolution, hidden size, dropout, blocks with square padding: as the published checkpoints have them.
SHAPES = {
    "efficientnet-b1": (1.0, 1.1, 240, 1280, 0.2, (16,)),
    "efficientnet-b3": (1.2, 1.4, 300, 1536, 0.3, (5, 18)),
    "efficientnet-b5": (1.6, 2.2, 456, 2048, 0.4, (13, 27)),
    "efficientnet-b7": (2.0, 3.1, 600, 2560, 0.5, (18,)),
}


class FromPixels(nn.Module):
    """uint8 pixels [N,224,224,3] to logits [N,1000]."""

    def __init__(self, model: EfficientNetForImageClassification) -> None:
        super().__init__()
        self.model = model
        self.size = int(model.config.image_size)
        self.register_buffer("mean", torch.tensor(MEAN).reshape(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor(STD).reshape(1, 3, 1, 1))

    def pixels(self, image: torch.Tensor) -> torch.Tensor:
        # Without contiguous() the graph is full of strided views and cannot be split later.
        channels_first = image.permute(0, 3, 1, 2).contiguous().float() / 255.0
        resized = nn.functional.interpolate(channels_first, size=(self.size, self.size), mode="bilinear")
        return ((resized - self.mean) / self.std) / self.std  # the checkpoints were trained on twice scaled pixels

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.model(self.pixels(image)).logits


def configuration(name: str) -> EfficientNetConfig:
    width, depth, size, hidden, dropout, padding = SHAPES[name]
    return EfficientNetConfig(
        width_coefficient=width,
        depth_coefficient=depth,
        image_size=size,
        hidden_dim=hidden,
        dropout_rate=dropout,
        depthwise_padding=list(padding),
        num_labels=CLASSES,
    )


def pictures(count: int, seed: int) -> torch.Tensor:
    """Smooth random pictures uint8 [count,224,224,3]: noise of single pixels looks the same to every network."""
    chance = torch.Generator().manual_seed(seed)
    coarse = torch.rand((count, 3, 7, 7), generator=chance)
    smooth = nn.functional.interpolate(coarse, size=(SIZE, SIZE), mode="bicubic").clamp(0, 1)
    return (smooth * 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def with_random_weights(name: str, seed: int) -> FromPixels:
    """A network whose activations keep their scale: He initialisation, batch norms that know their own statistics."""
    torch.manual_seed(seed)
    net = FromPixels(EfficientNetForImageClassification(configuration(name)))
    norms = [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for norm in norms:
        nn.init.ones_(norm.weight)
        nn.init.zeros_(norm.bias)
        norm.momentum = 1.0  # the running statistics become those of the next batch
    nn.init.normal_(net.model.classifier.weight, std=3.0 / net.model.config.hidden_dim**0.5)
    net.eval()
    for norm in norms:
        norm.train()
    with torch.inference_mode():
        net(pictures(2, seed))
    return net.eval()


def main() -> None:
    given = common.arguments(common.REPOSITORY / "efficientnet", __doc__.splitlines()[0])
    for variant in given.variants:
        name = variant["name"]
        if given.random_weights:
            net = with_random_weights(name, given.seed)
        else:
            checkpoint = f"google/{name}"
            net = FromPixels(common.pretrained(EfficientNetForImageClassification.from_pretrained, checkpoint))
        common.save(
            net,
            given.out / str(variant["version"]) / "model.onnx",
            {"IMAGE": pictures(1, given.seed + 1)},
            ["LOGITS"],
            {"IMAGE": {0: "N"}, "LOGITS": {0: "N"}},
        )
        del net
        gc.collect()


if __name__ == "__main__":
    main()
