"""Run each graph of a family once, where ONNX Runtime is here, before the family is written."""

import json
import subprocess
from pathlib import Path
from typing import Any, Final

from trefoil.core.errors import CatalogError
from trefoil.installation import triton_environment
from trefoil.profiler import assumed
from trefoil.runtime.given.onnx_file import check_external_data
from trefoil.runtime.given.repository_names import boundary
from trefoil.runtime.model_files import ENGINES, FILES, backend_of, contract, graph_dims, graph_probe, not_graphs
from trefoil.runtime.repository import load_family

SCRIPT: Final = Path(assumed.__file__).with_name("graph_run.py")
TIMEOUT_S: Final = 600.0
BATCHES: Final = (1, 2)  # a graph that was exported for one item fails with two


def run_graphs(folder: Path) -> str:
    """Run the graph of each variant with zeros. Returns a note, "" where all ran: engines run on their own GPU only.

    Raises:
        CatalogError: a graph does not run, or answers in other shapes than its config.pbtxt says.
    """
    config = contract(folder.parent, folder.name)
    if backend_of(config) == ENGINES:
        return "engines were not run: each loads on its own type of GPU only"
    if what := not_graphs(config):
        return f"{what} were not run: they run in Triton only; `trefoil family check {folder.name}` asks each once"
    python = triton_environment() / "bin" / "python"
    if not python.exists():
        return f"the graphs were not run: no ONNX Runtime ({python} is not there; `trefoil setup triton` makes it)"
    variants = load_family(folder)[0].variants
    graphs = [folder / str(variant.version) / FILES["onnxruntime"] for variant in variants]
    for graph in graphs:
        check_external_data(graph, boundary(folder.parent, folder.name))
    wanted: dict[str, Any] = {
        "inputs": {tensor.name: graph_probe(config, tensor) for tensor in config.input},
        "outputs": {tensor.name: graph_dims(tensor) for tensor in config.output},
        "batches": [size for size in BATCHES if size <= config.max_batch_size],
    }
    argv = [str(python), str(SCRIPT), json.dumps(wanted), *map(str, graphs)]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        remedy = "import fewer models at once, or smaller ones"
        raise CatalogError(f"the graphs ran longer than {TIMEOUT_S:g} s", field="--as", remedy=remedy) from error
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    if len(answers) < len(graphs):
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        answers.append(f"ONNX Runtime ended: {last}")
    for variant, why in zip(variants, answers, strict=False):
        if why:
            opened = [tensor.name for tensor in config.input if -1 in tensor.dims]
            remedy = "export it again"
            if opened:
                remedy = f"give --shape {opened[0]}=SIZES, what one item has where dims are -1 (1 was taken)"
            raise CatalogError(
                f"model {variant.name} does not run: {why}", field="model", value=variant.name, remedy=remedy
            )
    return ""
