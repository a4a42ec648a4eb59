"""Export the variants of the family `yolo` to ONNX, with a package that you installed and a licence that you accepted.

YOLOv5 is licensed under AGPL-3.0 (https://github.com/ultralytics/yolov5/blob/master/LICENSE): serving it to users over
a network obliges you to offer them the source of what serves it, unless you hold a commercial licence. This project
therefore ships neither its code nor its weights and does not install the package. Run, in an environment of
requirements/export.txt and export-torch.in into which you installed `ultralytics` or `yolov5` yourself:

    python model_repository/_training/export_yolo.py --weights FOLDER

FOLDER holds yolov5l.pt, yolov5x.pt and yolov5x6.pt (releases 6.2 or 7.0 of the project). Never run on the
project's own checkpoints here, which this licence and network keep away (yolo/README.md says what was tried): what is
exported is checked against torch, as for every family.

Every variant takes IMAGE uint8 [N,640,640,3] (RGB, letterboxed) and returns DETECTIONS float32 [N,300,6]: left, top,
right, bottom (0..1), score, class of the 300 best boxes, before suppression of overlapping ones. yolov5x6 sees the
image at 1,280 pixels; resizing is inside its graph.
"""

import argparse
import sys
from pathlib import Path

import common

FOLDER = common.REPOSITORY / "yolo"
SIZE = 640
BEST = 300
PIXELS = {"yolov5l": 640, "yolov5x": 640, "yolov5x6": 1280}
MISSING = """neither `ultralytics` nor `yolov5` can be imported ({error}).
Remedy: read the licence note at the top of this script; if you accept it, install one of the two in this environment"""


def load(weights: Path):
    """The network in a checkpoint, by whichever package is installed."""
    try:
        import ultralytics  # noqa: F401 - checkpoints of the project refer to its classes
    except ImportError:
        try:
            import yolov5  # noqa: F401
        except ImportError as error:
            sys.exit(MISSING.format(error=error))
    import torch

    # A checkpoint of this project is a pickle and runs code of its own: only take one that you trust.
    return torch.load(weights, map_location="cpu", weights_only=False)["model"].float().eval()


def detector(network, pixels: int):
    """uint8 image [N,640,640,3] to the 300 best boxes."""
    import torch
    from torch import nn

    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            picture = image.permute(0, 3, 1, 2).contiguous().float() / 255.0
            if pixels != SIZE:
                picture = nn.functional.interpolate(picture, size=(pixels, pixels), mode="bilinear")
            boxes = self.network(picture)[0]  # [N, boxes, x y w h objectness classes...]
            score, kind = (boxes[..., 4:5] * boxes[..., 5:]).max(dim=-1)
            best, chosen = score.topk(BEST, dim=1)
            box = boxes[..., :4].gather(1, chosen[..., None].expand(-1, -1, 4)) / pixels
            corners = torch.cat([box[..., :2] - box[..., 2:] / 2, box[..., :2] + box[..., 2:] / 2], dim=-1)
            return torch.cat([corners, best[..., None], kind.gather(1, chosen)[..., None].float()], dim=-1)

    return Detector()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=Path, required=True, help="folder with the .pt files")
    parser.add_argument(
        "--out",
        type=Path,
        default=common.REPOSITORY / "yolo",
        help="folder of the version folders; default: the family's",
    )
    given = parser.parse_args()
    for version, (name, pixels) in enumerate(PIXELS.items(), 1):
        network = load(given.weights / f"{name}.pt")
        import torch

        image = torch.randint(0, 256, (1, SIZE, SIZE, 3), dtype=torch.uint8)
        path = given.out / str(version) / "model.onnx"
        axes = {"IMAGE": {0: "N"}, "DETECTIONS": {0: "N"}}
        common.save(detector(network, pixels), path, {"IMAGE": image}, ["DETECTIONS"], axes)


if __name__ == "__main__":
    main()
