"""Logs of Tritons that did not serve, as their users report them, and the error that is shown of each."""

from tests.public_reports.report import Report

AT = "2024-06-07T12:00:00Z"
NO_GPU = (
    f'{AT} W 7 pinned_memory_manager.cc:273] "Unable to allocate pinned system memory"\n'
    f'{AT} E 7 server.cc:241] "CudaDriverHelper has not been initialized."\n'
)
DIMS = "model output 'label' must specify 'dims'"
STUB = "Internal: ModuleNotFoundError: No module named 'tokenizers'"
TRITON_LOGS = tuple(
    Report("triton log", source, text, words)
    for source, text, words in (
        (
            "scikit-learn as ONNX: a label without dims",
            f'{NO_GPU}{AT} I 7 model_lifecycle.cc:472] "loading: iris:1"\n'
            f"{AT} E 7 model_repository_manager.cc:1460] \"Poll failed for model directory 'iris': {DIMS}\"\n"
            "error: creating server: Internal - failed to load all models\n",
            f"Poll failed for model directory 'iris': {DIMS}",
        ),
        (
            "a python model without its package",
            f"{NO_GPU}{AT} E 7 model_lifecycle.cc:642] \"failed to load 'x' version 1: {STUB}\"\n"
            f'{AT} E 7 a.cc:1] "b"\n',
            f"failed to load 'x' version 1: {STUB}",
        ),
        (
            "the format that Triton has by default",
            f"I0607 12:00:00.123456 7 server.cc:604] \nE0607 12:00:00.123456 7 model_lifecycle.cc:642] {STUB}\n",
            STUB,
        ),
        ("an error in quotes", f'{AT} F 7 main.cc:5] "no model \\"iris\\""\n', 'no model "iris"'),
        (
            "a library that is missing",
            "/opt/tritonserver/bin/tritonserver: error while loading shared libraries: libnuma.so.1\n",
            "/opt/tritonserver/bin/tritonserver: error while loading shared libraries: libnuma.so.1",
        ),
        (
            "an option of another version",
            "tritonserver: unrecognized option '--x'\n+---+---+\n| Model | Version |\n+---+---+\n\n",
            "tritonserver: unrecognized option '--x'",
        ),
        ("a start on a machine without a GPU", f'{NO_GPU}{AT} I 7 server.cc:604] "up"\n+-------+\n', ""),
        ("nothing", "", ""),
        ("a very long error", f'{AT} E 7 a.cc:1] "{"x" * 5000}"\n', "x" * 400),
    )
)
"""The first error, and not what every Triton logs where there is no GPU."""
