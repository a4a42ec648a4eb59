"""EfficientNet, ResNet and BERT in plain torch, with random weights: what benchmarks/gpu_profile.py measures.

Architectures: Tan and Le (ICML 2019), He et al. (CVPR 2016), Devlin et al. (NAACL 2019). Shapes and operators are those
of the papers, so that time and energy are; there is nothing to be learnt from what they answer.
"""

import math
from collections.abc import Callable
from typing import Any, Final

RESOLUTION: Final = {"b1": 240, "b3": 300, "b5": 456, "b7": 600}
WIDTH_DEPTH: Final = {"b1": (1.0, 1.1), "b3": (1.2, 1.4), "b5": (1.6, 2.2), "b7": (2.0, 3.1)}
# EfficientNet-B0: expansion, channels, blocks, first stride, kernel (Tan and Le 2019, Table 1)
STAGES: Final = (
    (1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5), (6, 192, 4, 2, 5), (6, 320, 1, 1, 3),
)  # fmt: skip
RESNETS: Final = {
    "resnet18": (False, (2, 2, 2, 2)), "resnet34": (False, (3, 4, 6, 3)), "resnet50": (True, (3, 4, 6, 3)),
    "resnet101": (True, (3, 4, 23, 3)), "resnet152": (True, (3, 8, 36, 3)),
}  # fmt: skip
BERTS: Final = {"bert-base": (12, 768, 12), "bert-large": (24, 1024, 16)}
TOKENS, VOCABULARY = 128, 30522
MODELS: Final = (*(f"efficientnet-{name}" for name in RESOLUTION), *RESNETS, *BERTS)


def build(name: str) -> tuple[Any, Callable[[int], Any]]:
    """Network and a maker of inputs of a batch; weights random, evaluation mode."""
    import torch

    torch.manual_seed(1)
    if name in BERTS:
        network, shape, high = bert(*BERTS[name]), (TOKENS,), VOCABULARY
        return network.eval(), lambda batch: torch.randint(0, high, (batch, *shape))
    side = RESOLUTION[name.removeprefix("efficientnet-")] if name.startswith("efficientnet") else 224
    network = efficientnet(name.removeprefix("efficientnet-")) if name.startswith("efficientnet") else resnet(name)
    return network.eval(), lambda batch: torch.randn(batch, 3, side, side)


def conv(inside: int, outside: int, kernel: int, stride: int = 1, groups: int = 1, act: Any = None) -> Any:
    """Convolution, normalisation, activation."""
    from torch import nn

    layer = nn.Conv2d(inside, outside, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outside), *([act] if act is not None else []))


def residual(body: Any, shortcut: Any, act: Any) -> Any:
    """act(body(x) + shortcut(x))."""
    from torch import nn

    class Residual(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.body, self.shortcut, self.act = body, shortcut, act

        def forward(self, x: Any) -> Any:
            return self.act(self.body(x) + self.shortcut(x))

    return Residual()


def gated(inside: int, squeezed: int) -> Any:
    """Squeeze and excitation."""
    from torch import nn

    class Gate(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Sequential(
                nn.AdaptiveAvgPool2d(1), nn.Conv2d(inside, squeezed, 1), nn.SiLU(),
                nn.Conv2d(squeezed, inside, 1), nn.Sigmoid(),
            )  # fmt: skip

        def forward(self, x: Any) -> Any:
            return x * self.gate(x)

    return Gate()


def efficientnet(name: str) -> Any:
    """EfficientNet by its width and depth."""
    from torch import nn

    width, depth = WIDTH_DEPTH[name]

    def channels(count: int) -> int:
        rounded = max(8, int(count * width + 4) // 8 * 8)
        return rounded + 8 if rounded < 0.9 * count * width else rounded

    layers: list[Any] = [conv(3, channels(32), 3, 2, act=nn.SiLU())]
    inside = channels(32)
    for expansion, count, blocks, first, kernel in STAGES:
        for index in range(math.ceil(blocks * depth)):
            stride, outside, wide = first if index == 0 else 1, channels(count), inside * expansion
            body = [conv(inside, wide, 1, act=nn.SiLU())] if expansion > 1 else []
            body += [conv(wide, wide, kernel, stride, wide, nn.SiLU()), gated(wide, max(1, inside // 4))]
            body.append(conv(wide, outside, 1))
            same = stride == 1 and inside == outside
            block = nn.Sequential(*body)
            layers.append(residual(block, nn.Identity(), nn.Identity()) if same else block)
            inside = outside
    layers.append(conv(inside, channels(1280), 1, act=nn.SiLU()))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels(1280), 1000))


def resnet(name: str) -> Any:
    """ResNet of basic or bottleneck blocks (He et al. 2016)."""
    from torch import nn

    bottleneck, counts = RESNETS[name]
    layers: list[Any] = [conv(3, 64, 7, 2, act=nn.ReLU()), nn.MaxPool2d(3, 2, 1)]
    inside = 64
    for stage, count in enumerate(counts):
        middle = 64 * 2**stage
        outside = middle * (4 if bottleneck else 1)
        for index in range(count):
            stride = 2 if stage > 0 and index == 0 else 1
            if bottleneck:
                body = [conv(inside, middle, 1, act=nn.ReLU()), conv(middle, middle, 3, stride, act=nn.ReLU())]
                body.append(conv(middle, outside, 1))
            else:
                body = [conv(inside, middle, 3, stride, act=nn.ReLU()), conv(middle, outside, 3)]
            plain = stride == 1 and inside == outside
            shortcut = nn.Identity() if plain else conv(inside, outside, 1, stride)
            layers.append(residual(nn.Sequential(*body), shortcut, nn.ReLU()))
            inside = outside
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 1000))


def bert(layers: int, hidden: int, heads: int) -> Any:
    """BERT's encoder with its token and position embeddings."""
    import torch
    from torch import nn

    class Bert(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(VOCABULARY, hidden), nn.Embedding(512, hidden)
            self.norm = nn.LayerNorm(hidden)
            layer = nn.TransformerEncoderLayer(hidden, heads, 4 * hidden, 0.0, "gelu", batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

        def forward(self, tokens: Any) -> Any:
            places = self.places(torch.arange(tokens.shape[1], device=tokens.device))
            return self.encoder(self.norm(self.words(tokens) + places))

    return Bert()
