"""Models of Triton repositories in the shapes of public ones. Expected: parts of the family's config.pbtxt, or words of
the refusal; `notes`: what the import says that it left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.public_reports.report import Report

KIND = "config.pbtxt"
N = "N"
"""A dimension of any size."""


@dataclass(frozen=True)
class Model:
    """One model's folder. `graph`: inputs and outputs by name, each a type of ONNX and a shape."""

    config: str
    inputs: Mapping[str, tuple[str, list[Any]]] = field(default_factory=lambda: {"x": ("FLOAT", [N, 4])})
    outputs: Mapping[str, tuple[str, list[Any]]] = field(default_factory=lambda: {"y": ("FLOAT", [N, 3])})
    files: Mapping[str, str] = field(default_factory=dict)
    model: str = "1/model.onnx"
    weights: str = ""
    """Where its weights lie, from the folder of the graph; "" = in the graph."""
    options: tuple[str, ...] = ()
    """Of the import."""


@dataclass(frozen=True)
class Family:
    """What the family has."""

    config: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    files: tuple[str, ...] = ("1/model.onnx",)


def row(source: str, model: Model, expected: Family | str) -> Report:
    return Report(KIND, source, model, expected)


XY = """
input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 3 ] } ]
"""
ONNX = 'platform: "onnxruntime_onnx" max_batch_size: 8' + XY
IMAGE = {"data_0": ("FLOAT", [1, 3, 224, 224])}
TOKENS = {name: ("INT64", [N, "L"]) for name in ("input_ids", "attention_mask")}
TOKENS_TEXT = """
input [ { name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ] },
        { name: "attention_mask" data_type: TYPE_INT64 dims: [ -1 ] } ]
output [ { name: "logits" data_type: TYPE_FP32 dims: [ 2 ] } ]
"""
LOGITS = {"logits": ("FLOAT", [N, 2])}
FLOWERS = {"X": ("FLOAT", [N, 4])}
CLASSES = {"label": ("INT64", [N]), "probabilities": ("FLOAT", [N, 3])}
CLASSIFIER = """
input [ { name: "X" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "label" data_type: TYPE_INT64 dims: [ ] }, { name: "probabilities" data_type: TYPE_FP32 dims: [ 3 ] } ]
"""
DETECTOR = {"images": ("FLOAT", [1, 3, 640, 640])}
PLAN = 'platform: "tensorrt_plan"' + XY

ADOPTED = (
    row(
        "Triton's quickstart, densenet_onnx: no batches, reshaped, labels",
        Model(
            'name: "m" platform: "onnxruntime_onnx" max_batch_size: 0\n'
            'input [ { name: "data_0" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [ 3, 224, 224 ]'
            " reshape { shape: [ 1, 3, 224, 224 ] } } ]\n"
            'output [ { name: "fc6_1" data_type: TYPE_FP32 dims: [ 1000 ] reshape { shape: [ 1, 1000, 1, 1 ] }'
            ' label_filename: "densenet_labels.txt" } ]',
            IMAGE,
            {"fc6_1": ("FLOAT", [1, 1000, 1, 1])},
            {"densenet_labels.txt": "".join(f"class {number}\n" for number in range(1000))},
        ),
        Family(
            {
                "max_batch_size": 0,
                "input[0].dims": [3, 224, 224],
                "input[0].reshape.shape": [1, 3, 224, 224],
                "input[0].format": 2,
                "output[0].label_filename": "densenet_labels.txt",
                "output[0].reshape.shape": [1, 1000, 1, 1],
            },
            files=("1/model.onnx", "densenet_labels.txt"),
        ),
    ),
    row("a model that batches", Model(ONNX), Family({"max_batch_size": 8, "input[0].dims": [4]})),
    row(
        "a detector exported for one image, written without batches",
        Model(
            'platform: "onnxruntime_onnx" max_batch_size: 0\n'
            'input [ { name: "images" data_type: TYPE_FP32 dims: [ 1, 3, 640, 640 ] } ]\n'
            'output [ { name: "output0" data_type: TYPE_FP32 dims: [ 1, 84, 8400 ] } ]',
            DETECTOR,
            {"output0": ("FLOAT", [1, 84, 8400])},
        ),
        Family({"max_batch_size": 0, "input[0].dims": [1, 3, 640, 640]}),
    ),
    row(
        "... written with batches of one",
        Model(
            'backend: "onnxruntime" max_batch_size: 1\n'
            'input [ { name: "images" data_type: TYPE_FP32 dims: [ 3, 640, 640 ] } ]\n'
            'output [ { name: "output0" data_type: TYPE_FP32 dims: [ 84, 8400 ] } ]',
            DETECTOR,
            {"output0": ("FLOAT", [1, 84, 8400])},
        ),
        Family({"max_batch_size": 1}),
    ),
    row(
        "a batch dimension in dims, open",
        Model(
            'platform: "onnxruntime_onnx"\n'
            'input [ { name: "x" data_type: TYPE_FP32 dims: [ -1, 4 ] } ]\n'
            'output [ { name: "y" data_type: TYPE_FP32 dims: [ -1, 3 ] } ]'
        ),
        Family({"max_batch_size": 0, "input[0].dims": [-1, 4]}),
    ),
    row(
        "Optimum's export of a classifier: open batch and length",
        Model('backend: "onnxruntime" max_batch_size: 16' + TOKENS_TEXT, TOKENS, LOGITS, {"1/tokenizer.json": "{}"}),
        Family({"input[0].dims": [-1], "input[1].name": "attention_mask"}, files=("1/model.onnx", "1/tokenizer.json")),
    ),
    row(
        "Optimum's export of an encoder, without a config.pbtxt",
        Model("", TOKENS, {"last_hidden_state": ("FLOAT", [N, "L", 384])}),
        Family({"max_batch_size": 4, "output[0].dims": [-1, 384], "dynamic_batching": True}),
    ),
    row(
        "scikit-learn's classifier as ONNX: a label for each item",
        Model("", FLOWERS, CLASSES),
        Family({"max_batch_size": 4, "output[0].dims": [1], "output[0].reshape.shape": [], "output[1].dims": [3]}),
    ),
    row(
        "a configuration of a name only",
        Model('name: "m"'),
        Family({"max_batch_size": 4, "input[0].dims": [4], "backend": "onnxruntime", "dynamic_batching": True}),
    ),
    row(
        "tensors left to the graph, batch stated",
        Model('platform: "onnxruntime_onnx" max_batch_size: 32'),
        Family({"max_batch_size": 32, "output[0].dims": [3]}),
    ),
    row(
        "tensors left to a graph of one shape",
        Model('backend: "onnxruntime"', DETECTOR, {"output0": ("FLOAT", [1, 84, 8400])}),
        Family({"max_batch_size": 0, "output[0].dims": [1, 84, 8400]}),
    ),
    row(
        "open sizes of an image, a size for the first request",
        Model(
            'platform: "onnxruntime_onnx" max_batch_size: 4\n'
            'input [ { name: "x" data_type: TYPE_FP32 dims: [ 3, -1, -1 ] } ]\n'
            'output [ { name: "y" data_type: TYPE_FP32 dims: [ 3 ] } ]',
            {"x": ("FLOAT", [N, 3, "H", "W"])},
            options=("--shape", "x=3,320,320"),
        ),
        Family({"input[0].dims": [3, -1, -1], "parameters[trefoil_shape.x]": "3,320,320"}),
    ),
    row(
        "a warm-up sample says the size",
        Model(
            ONNX.replace("dims: [ 4 ]", "dims: [ -1 ]")
            + 'model_warmup [ { name: "w" batch_size: 1 inputs { key: "x" value { data_type: TYPE_FP32 dims: [ 4 ]'
            " zero_data: true } } } ]"
        ),
        Family({"parameters[trefoil_shape.x]": "4", "model_warmup": False}, ("model_warmup [{ name",)),
    ),
    row(
        "metadata in parameters",
        Model(
            ONNX + 'parameters { key: "labels" value { string_value: "cat/dog, bird" } }\n'
            'parameters { key: "hf_model" value { string_value: "org/name" } }'
        ),
        Family({"parameters[labels]": "cat/dog, bird", "parameters[hf_model]": "org/name"}),
    ),
    row(
        "Triton's tutorial of ONNX Runtime on CUDA: memory limit in parameters",
        Model(
            ONNX + 'parameters { key: "cudnn_conv_algo_search" value: { string_value: "0" } }\n'
            'parameters { key: "gpu_mem_limit" value: { string_value: "4294967200" } }'
        ),
        Family({"parameters[cudnn_conv_algo_search]": "0", "parameters[gpu_mem_limit]": "4294967200"}),
    ),
    row(
        "Triton's tutorial of OpenVINO inside of ONNX Runtime, on CPUs",
        Model(
            ONNX + 'optimization { execution_accelerators { cpu_execution_accelerator : [ { name : "openvino" } ] }}'
            " instance_group [ { count: 2 kind: KIND_CPU } ]"
        ),
        Family(
            {"optimization.execution_accelerators.cpu_execution_accelerator[0].name": "openvino"},
            ("optimization acts where", "instance_group [{ count: 2 kind: KIND_CPU }] is left out"),
        ),
    ),
    row(
        "CUDA graphs asked of ONNX Runtime",
        Model(ONNX + "optimization { cuda { graphs: true busy_wait_events: true } }"),
        Family({"optimization.cuda.graphs": True}, ("optimization acts where",)),
    ),
    row(
        "one version by its number",
        Model(
            ONNX + "version_policy: { specific { versions: [ 1, 3 ] } }",
            files={"2/model.onnx": "=", "3/model.onnx": "="},
        ),
        Family({"version_policy": False}, ("versions 1, 3 are served there, 3 is taken",)),
    ),
    row(
        "a byte-order mark and Windows' lines",
        Model("\ufeff" + ONNX.replace("\n", "\r\n")),
        Family({"max_batch_size": 8}),
    ),
    row(
        "one answer, said",
        Model(ONNX + "model_transaction_policy { decoupled: False }"),
        Family({"model_transaction_policy.decoupled": False}),
    ),
    row(
        "priorities and a queue policy",
        Model(
            ONNX + "dynamic_batching { priority_levels: 2 default_priority_level: 1 preserve_ordering: true"
            " default_queue_policy { timeout_action: REJECT default_timeout_microseconds: 9000 max_queue_size: 10 } }"
        ),
        Family({"dynamic_batching.priority_levels": 2, "dynamic_batching.default_queue_policy.max_queue_size": 10}),
    ),
    row(
        "threads of the backend",
        Model(ONNX + 'parameters { key: "intra_op_thread_count" value { string_value: "4" } }'),
        Family({"parameters[intra_op_thread_count]": None}, ("parameters.intra_op_thread_count 4 is left out",)),
    ),
    row(
        "instance groups on two GPUs",
        Model(ONNX + "instance_group [ { count: 2 kind: KIND_GPU gpus: [ 0, 1 ] } ]"),
        Family({"instance_group": False}, ("instance_group", "the plan decides devices and instances")),
    ),
    row(
        "a response cache",
        Model(ONNX + "response_cache { enable: true }"),
        Family({"response_cache": False}, ("response_cache { enable: true } is left out",)),
    ),
    row(
        "TensorRT inside of ONNX Runtime",
        Model(
            ONNX + "optimization { execution_accelerators { gpu_execution_accelerator : [ { name : 'tensorrt'"
            " parameters { key: 'precision_mode' value: 'FP16' } } ] } }"
        ),
        Family(
            {"optimization.execution_accelerators.gpu_execution_accelerator[0].name": "tensorrt"},
            ("optimization acts where Triton's onnxruntime backend serves",),
        ),
    ),
    row(
        "graph optimisation level",
        Model(ONNX + "optimization { graph { level: 1 } }"),
        Family({"optimization.graph.level": 1}, ("optimization acts where",)),
    ),
    row(
        "dynamic batching with a delay",
        Model(ONNX + "dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100 }"),
        Family({"dynamic_batching.preferred_batch_size": [4, 8], "dynamic_batching.max_queue_delay_microseconds": 100}),
    ),
    row(
        "two versions served",
        Model(ONNX + "version_policy { latest { num_versions: 2 } }", files={"2/model.onnx": "=", "3/model.onnx": "="}),
        Family({"version_policy": False}, ("versions 2, 3 are served there, 3 is taken",)),
    ),
    row(
        "a file of another name",
        Model(ONNX + 'default_model_filename: "net.onnx"', model="1/net.onnx"),
        Family({"default_model_filename": ""}),
    ),
    row(
        "... beside a graph that is not served",
        Model(ONNX + 'default_model_filename: "net.onnx"', model="1/net.onnx", files={"1/model.onnx": "an older one"}),
        Family({"default_model_filename": ""}, ("not taken from its folder: '1/model.onnx'",)),
    ),
    row(
        "weights beside the graph",
        Model(ONNX, weights="model.onnx_data"),
        Family(files=("1/model.onnx", "1/model.onnx_data")),
    ),
    row(
        "weights in a folder below the graph",
        Model(ONNX, weights="weights/part0.bin"),
        Family(files=("1/model.onnx", "1/weights/part0.bin")),
    ),
    row("... with a dot before it", Model(ONNX, weights="./w.bin"), Family(files=("1/model.onnx", "1/w.bin"))),
    row(
        "files beside the versions",
        Model(ONNX, files={"README.md": "mine", "warmup/raw": "0"}),
        Family({}, ("not taken from its folder: 'README.md', 'warmup'",)),
    ),
    row(
        "a scalar for each item, reshaped",
        Model(
            'platform: "onnxruntime_onnx" max_batch_size: 8\n'
            'input [ { name: "x" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ ] } } ]\n'
            'output [ { name: "y" data_type: TYPE_FP32 dims: [ 3 ] } ]',
            {"x": ("FLOAT", [N])},
        ),
        Family({"input[0].dims": [1], "input[0].reshape.shape": []}),
    ),
    row(
        "texts in, labels out",
        Model(
            ONNX.replace("TYPE_FP32", "TYPE_STRING"),
            {"x": ("STRING", [N, 4])},
            {"y": ("STRING", [N, 3])},
        ),
        Family({"input[0].data_type": 13}),
    ),
    row(
        "a TensorRT plan with an optimization",
        Model(PLAN + "max_batch_size: 4 optimization { cuda { graphs: true } }", model="1/model.plan"),
        Family({"optimization.cuda.graphs": True}, ("engines were not run",), ("1/model.plan",)),
    ),
    row(
        "a TensorRT plan of one shape, by the file's name alone",
        Model(XY, model="1/model.plan"),
        Family({"backend": "tensorrt", "max_batch_size": 0}, files=("1/model.plan",)),
    ),
)

PYTHON_MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils
from neighbour import FACTOR

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", FACTOR + x[:, :3])]))
        return answers
"""
ADOPTED += (
    row(
        "a python backend",
        Model(
            'backend: "python" max_batch_size: 8' + XY.replace("dims: [ 4 ]", "dims: [ 4 ] optional: false"),
            files={"1/model.py": PYTHON_MODEL, "1/neighbour.py": "FACTOR = 1\n"},
            model="1/model.py",
        ),
        Family(
            {"backend": "python", "default_model_filename": "opaque.py"},
            ("python models were not run",),
            ("1/variant.py", "1/neighbour.py"),
        ),
    ),
    row(
        "a decoupled python model",
        Model(
            'backend: "python" model_transaction_policy { decoupled: true }' + XY,
            files={"1/model.py": PYTHON_MODEL},
            model="1/model.py",
            options=("--tokens-mean", "9", "--memory-mib", "m=900"),
        ),
        Family(
            {"model_transaction_policy.decoupled": True, "parameters[tokens_mean]": "9"},
            ("python models were not run",),
            ("1/variant.py",),
        ),
    ),
    row(
        "vLLM",
        Model(
            'backend: "vllm" instance_group [ { count: 1 kind: KIND_MODEL } ]',
            files={"1/model.json": '{"model": "facebook/opt-125m", "gpu_memory_utilization": 0.5}'},
            model="1/model.json",
            options=("--tokens-mean", "9", "--memory-mib", "m=900"),
        ),
        Family(
            {"backend": "vllm", "model_transaction_policy.decoupled": True, "input[0].name": "text_input"},
            ("instance_group", "its version holds a model.json alone", "were not run"),
            ("1/model.json",),
        ),
    ),
)

REFUSED = (
    row(
        "an ensemble of preprocessing and model",
        Model(
            'platform: "ensemble" max_batch_size: 8' + XY + "ensemble_scheduling { step [ { model_name: 'pre'"
            " model_version: -1 input_map { key: 'a' value: 'x' } output_map { key: 'b' value: 'z' } },"
            " { model_name: 'net' model_version: -1 input_map { key: 'c' value: 'z' }"
            " output_map { key: 'd' value: 'y' } } ] }"
        ),
        r"ensemble_scheduling = .*Remedy: import the model that costs most",
    ),
    row(
        "an ensemble of one model, under other names",
        Model(
            'platform: "ensemble" max_batch_size: 8' + XY + "ensemble_scheduling { step [ { model_name: 'net'"
            " model_version: -1 input_map { key: 'a' value: 'x' } output_map { key: 'y' value: 'y' } } ] }"
        ),
        r"ensemble_scheduling = .*Remedy: import net, the one model that it runs; clients .*: a for x$",
    ),
    row(
        "a python model that completes itself", Model('backend: "python"', model="1/model.py"), "write input and output"
    ),
    row(
        "a decoupled python model of unknown answers",
        Model('backend: "python" model_transaction_policy { decoupled: true }' + XY, model="1/model.py"),
        "--tokens-mean: the models answer by streams",
    ),
    row("a decoupled graph", Model(ONNX + "model_transaction_policy { decoupled: true }"), "decoupled = True"),
    row(
        "a python model with a file of ours",
        Model('backend: "python" max_batch_size: 8' + XY, model="1/model.py", files={"1/decoder.py": "x"}),
        "file = 'decoder.py'.*another name",
    ),
    row(
        "python_backend's example of a platform handler",
        Model('backend: "python" platform: "pytorch" max_batch_size: 8' + XY, model="1/model.py"),
        r"platform = 'pytorch': .*Remedy: write model.py as a TritonPythonModel",
    ),
    row(
        "Triton's tutorial of Stable Diffusion: a backend of its own, before optional inputs",
        Model('backend: "diffusion"' + XY.replace("dims: [ 4 ]", "dims: [ 4 ] optional: true"), model="1/model.py"),
        r"backend = 'diffusion': .*one of onnxruntime, tensorrt, python, vllm, tensorrtllm: export",
    ),
    row(
        "Triton's example of sequences, on CPUs",
        Model(
            ONNX + "sequence_batching { max_sequence_idle_microseconds: 10000000 oldest { } control_input ["
            ' { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] } ] }'
            " instance_group [ { count: 2 kind: KIND_CPU } ]"
        ),
        r"sequence_batching = ",
    ),
    row("DALI", Model('backend: "dali" max_batch_size: 8' + XY, model="1/model.dali"), "backend = 'dali'.*ONNX"),
    row("PyTorch", Model('platform: "pytorch_libtorch"' + XY, model="1/model.pt"), "backend = 'pytorch_libtorch'"),
    row("TensorFlow", Model('platform: "tensorflow_savedmodel"' + XY, model="1/x"), "backend = 'tensorflow_savedm"),
    row("OpenVINO", Model('backend: "openvino"' + XY, model="1/model.xml"), "backend = 'openvino'"),
    row("vLLM without its arguments", Model('backend: "vllm"', model="1/model.json"), "model.json is not JSON"),
    row("no configuration, no known file", Model("", model="1/weights.bin"), "write its config.pbtxt"),
    row("sequences", Model(ONNX + "sequence_batching { direct { } }"), "sequence_batching"),
    row(
        "an execution environment",
        Model(
            ONNX + 'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "$$TRITON_MODEL_DIRECTORY/e.tar" } }'
        ),
        r"parameters.EXECUTION_ENV_PATH = .*Remedy: install its packages in Triton's own environment",
    ),
    row(
        "a file in a parameter",
        Model(ONNX + 'parameters { key: "vocab_file" value { string_value: "/opt/vocab.txt" } }'),
        "parameters.vocab_file = '/opt/vocab.txt'",
    ),
    row(
        "an engine cache elsewhere",
        Model(
            ONNX + "optimization { execution_accelerators { gpu_execution_accelerator : [ { name : 'tensorrt'"
            " parameters { key: 'trt_engine_cache_path' value: '/tmp/cache' } } ] } }"
        ),
        "optimization.*/tmp/cache",
    ),
    row("a DLA", Model(ONNX + "instance_group [ { secondary_devices [ { device_id: 0 } ] } ]"), "secondary_devices"),
    row("a passive instance", Model(ONNX + "instance_group [ { passive: true } ]"), "instance_group.passive = 'True'"),
    row("ragged batches", Model(ONNX.replace("dims: [ 4 ]", "dims: [ 4 ] allow_ragged_batch: true")), "x.allow_ragged"),
    row("an optional input", Model(ONNX.replace("dims: [ 4 ]", "dims: [ 4 ] optional: true")), "x.optional = True"),
    row("batch input", Model(ONNX + "batch_input { kind: BATCH_ELEMENT_COUNT target_name: 'n' }"), "batch_input"),
    row("a custom operator", Model(ONNX + "model_operations { op_library_filename: 'x.so' }"), "model_operations"),
    row(
        "a graph of one item that is said to batch",
        Model(ONNX, {"x": ("FLOAT", [1, 4])}, {"y": ("FLOAT", [1, 3])}),
        r"x is \[1, 4\] in its graph, the contract says \[-1, 4\].*max_batch_size: 0",
    ),
    row(
        "dims with the batch in them",
        Model(ONNX.replace("dims: [ 4 ]", "dims: [ 1, 4 ]")),
        r"x is \[-1, 4\] in its graph, the contract says \[-1, 1, 4\]",
    ),
    row(
        "scikit-learn's classifier: a label without dims",
        Model(ONNX.replace(XY, CLASSIFIER), FLOWERS, CLASSES),
        r"label.dims: .*Remedy: write it; dims: \[ 1 \] reshape \{ shape: \[ \] \} where each item is one value",
    ),
    row(
        "a python model's output without a type",
        Model(
            'backend: "python" max_batch_size: 8' + XY.replace('"y" data_type: TYPE_FP32', '"y"'), model="1/model.py"
        ),
        "y.data_type: .*write it, e.g. TYPE_FP32",
    ),
    row("dims of another size", Model(ONNX.replace("dims: [ 3 ]", "dims: [ 2 ]")), r"y is \[-1, 3\] in its graph"),
    row(
        "a type of another size",
        Model(ONNX.replace('"x" data_type: TYPE_FP32', '"x" data_type: TYPE_FP16')),
        "TYPE_FP16",
    ),
    row(
        "an output whose shape only a run shows",
        Model(ONNX, outputs={"y": ("FLOAT", [N, "M"])}),
        r"output y of inputs .* is \[1, 1\], config.pbtxt says \[1, 3\]",
    ),
    row(
        "labels that are missing",
        Model(ONNX.replace("dims: [ 3 ]", 'dims: [ 3 ] label_filename: "labels.txt"')),
        "label_filename = 'labels.txt'.*put that file",
    ),
    row(
        "labels with the name of another file",
        Model(ONNX.replace("dims: [ 3 ]", 'dims: [ 3 ] label_filename: "family.toml"'), files={"family.toml": "x"}),
        "label_filename = 'family.toml'.*another name",
    ),
    row(
        "a shape that is none of the input",
        Model(ONNX.replace("dims: [ 4 ]", "dims: [ -1 ]"), options=("--shape", "x=4,4")),
        r"trefoil_shape.x = '4,4'",
    ),
    row("a shape of no input", Model(ONNX, options=("--shape", "z=4")), "--shape = 'z'.*the inputs are x"),
    row(
        "a clone without its large files",
        Model(
            ONNX, files={"1/model.onnx": "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"}
        ),
        "is a pointer of Git LFS, not the file. Remedy: git lfs pull",
    ),
    row("a model of TensorFlow Serving", Model("", model="1/saved_model.pb"), "it is a SavedModel: export it to ONNX"),
    row("two accuracies", Model(ONNX, options=("--accuracy", "m=0.7")), "--accuracy m: has two values, 0.5 and 0.7"),
    row(
        "two instance profiles of an engine",
        Model(PLAN + 'max_batch_size: 4 instance_group [ { profile: "1" } ]', model="1/model.plan"),
        "instance_group.profile",
    ),
)
