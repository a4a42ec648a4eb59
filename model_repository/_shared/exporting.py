"""What the export scripts of the families share: their command line, and a check of every exported graph.

Environment: requirements/export.txt and requirements/export-torch.in (`make export-efficientnet` creates it). Imports
nothing of Trefoil, as all of model_repository.
"""

import argparse
import os
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch

OPSET = 18
SEED = 20261121
TOLERANCE = 2e-3  # of the largest output: torch and onnxruntime add up in different orders
HUB_OFFLINE = ("no route to its files", "--random-weights exports the same architecture with seeded random weights")


def arguments(folder: Path, description: str) -> argparse.Namespace:
    """The command line. `variants` are entries of the folder's family.toml, in its order."""
    family = tomllib.loads((folder / "family.toml").read_text())
    names = [variant["name"] for variant in family["variants"]]
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--variants", default=",".join(names), help=f"comma-separated; of {', '.join(names)}")
    parser.add_argument("--out", type=Path, default=folder, help="folder of the version folders; default: this one")
    parser.add_argument("--random-weights", action="store_true", help="seeded random weights; needs no network")
    parser.add_argument("--seed", type=int, default=SEED, help="of the random weights")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    wanted = given.variants.split(",")
    if unknown := sorted(set(wanted) - set(names)):
        parser.error(f"--variants names {', '.join(unknown)}; {family['name']} has {', '.join(names)}")
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
    model: torch.nn.Module,
    path: Path,
    inputs: Mapping[str, torch.Tensor],
    outputs: Sequence[str],
    dynamic: Mapping[str, Mapping[int, str]],
) -> None:
    """Export to `path`, compare with torch on `inputs`, and only then put the file in place.

    Raises:
        SystemExit: onnxruntime answers something else than torch, or nothing but zeros.
    """
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
