"""The Triton python-backend model of families whose variants are python models: runs variant.py of its version.

Beside it in every version folder lie variant.py (the variant's TritonPythonModel, as imported) and a link to model.py
(pace and checks). On a simulated slice each batch of execute keeps the slice's pace, as model.py's batches do.
"""

import importlib.util
import inspect
import json
import os
from pathlib import Path

import triton_python_backend_utils as pb_utils
from model import Pace, PaceError, refuse_wrong_numpy


class TritonPythonModel:
    """One version of one family."""

    def initialize(self, args):
        """Load the variant, and open the pace file where there is one."""
        refuse_wrong_numpy()
        path = Path(args["model_repository"]) / args["model_version"] / "variant.py"
        spec = importlib.util.spec_from_file_location("variant", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self._variant = module.TritonPythonModel()
        if inspect.iscoroutinefunction(self._variant.execute):
            raise pb_utils.TritonModelException(f"{path}: execute is asynchronous. Remedy: write a plain one")
        config = json.loads(args["model_config"])
        self._first = config["input"][0]["name"] if int(config.get("max_batch_size", 0)) else ""
        if hasattr(self._variant, "initialize"):
            self._variant.initialize(args)
        self._pace = None
        if pace_file := os.environ.get("TREFOIL_PACE_FILE", ""):
            try:
                version = int(args["model_version"])
                self._pace = Pace(pace_file, args["model_name"], version, args["model_instance_name"])
            except PaceError as error:
                raise pb_utils.TritonModelException(str(error)) from error

    def execute(self, requests):
        """Have the variant answer; on a simulated slice fill the rest of the service time."""
        if self._pace is None:
            return self._variant.execute(requests)
        items = sum(self._items(request) for request in requests)
        try:
            self._pace.start(items)
        except PaceError as error:
            failure = pb_utils.TritonError(str(error))
            return [pb_utils.InferenceResponse(error=failure) for _ in requests]
        try:
            return self._variant.execute(requests)
        finally:
            self._pace.finish(items)

    def _items(self, request):
        tensor = pb_utils.get_input_tensor_by_name(request, self._first) if self._first else None
        return tensor.shape()[0] if tensor is not None else 1

    def finalize(self):
        """Let the variant end."""
        if hasattr(self._variant, "finalize"):
            self._variant.finalize()
