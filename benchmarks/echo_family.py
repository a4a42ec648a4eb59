"""A model repository with one family, `echo`, whose answers prove which request they answer.

A request's payload is two integers, a nonce and a number that only it has. Every variant gives both back unchanged, and
beside them its own version: three small ONNX graphs. `model.py` is the project's own, plus one thing: it notes the
nonce of every item that it executes in a file per stub, which a SIGKILL does not take back.
"""

import struct
from collections import Counter
from pathlib import Path
from typing import Any, Final

import numpy as np
from tritonclient.grpc import service_pb2

from trefoil.installation import CHECKOUT

FAMILY: Final = "echo"
VERSIONS: Final = (1, 2, 3)
DEVICE: Final = "A100-SXM4-40GB"
CLOCK_MHZ: Final = 1410
# Mean service time of one request [ms]. Assumed, like all of this family's profile: it has no work to do.
SERVICE_MS: Final = {"1g.5gb": 8.0, "2g.10gb": 5.0, "3g.20gb": 3.5, "4g.20gb": 3.0, "7g.40gb": 2.0}
OVERHEAD_MS: Final = 1.5  # of Triton and its python stub around a service time that is padded to the profile
NOTED: Final = "executed"  # folder of the notes, in the repository
NOTE: Final = struct.Struct("<q")

_CONFIG: Final = """\
name: "echo"
backend: "onnxruntime"
max_batch_size: 8
input [ { name: "PAYLOAD" data_type: TYPE_INT64 dims: [ 2 ] } ]
output [ { name: "ECHO" data_type: TYPE_INT64 dims: [ 2 ] }, { name: "VERSION" data_type: TYPE_INT64 dims: [ 2 ] } ]
"""
_NOTING: Final = '''

class TritonPythonModel(TritonPythonModel):
    """The project's model, which notes whom it executed before it does so. Nonce 0 is a probe or a warm-up."""

    def initialize(self, args):
        super().initialize(args)
        self._notes = os.open(f"{NOTES}/{os.getpid()}-{time.time_ns()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def _run(self, arrays):
        os.write(self._notes, np.ascontiguousarray(arrays["PAYLOAD"][:, 0]).tobytes())
        return super()._run(arrays)
'''


def make_repository(root: Path) -> Path:
    """Write the family below `root`; returns the repository."""
    notes = root / NOTED
    family = root / FAMILY
    shared = root / "_shared"
    for folder in (notes, family, shared):
        folder.mkdir(parents=True)
    notes.chmod(0o1777)  # a Triton runs as a separate user
    own = (CHECKOUT / "model_repository" / "_shared" / "model.py").read_text()
    (shared / "model.py").write_text(f"{own}{_NOTING}".replace("{NOTES}", str(notes.resolve())))
    (family / "config.pbtxt").write_text(_CONFIG)
    (family / "family.toml").write_text(_family())
    (family / "profile.csv").write_text(_profile())
    for version in VERSIONS:
        (family / str(version)).mkdir()
        (family / str(version) / "model.onnx").write_bytes(graph(version))
    return root


def executions(repository: Path) -> Counter[int]:
    """How often each nonce was executed, on whatever slice."""
    total: Counter[int] = Counter()
    for path in (repository / NOTED).iterdir():
        noted = path.read_bytes()
        total.update(np.frombuffer(noted[: len(noted) - len(noted) % NOTE.size], "<i8").tolist())
    del total[0]
    return total


class Requests:
    """Makes requests and judges answers. One is told from another by its nonce and by a secret that goes with it."""

    def __init__(self, seed: int) -> None:
        self._secrets = np.random.Generator(np.random.PCG64(seed))
        shape = service_pb2.ModelInferRequest(model_name=FAMILY)
        shape.inputs.add(name="PAYLOAD", datatype="INT64", shape=[1, 2])
        self._head: bytes = shape.SerializeToString()

    def payload(self, nonce: int) -> bytes:
        """The two integers of a request."""
        return struct.pack("<qq", nonce, int(self._secrets.integers(1, 2**62)))

    def message(self, nonce: int, payload: bytes) -> bytes:
        """A ModelInferRequest: fields that follow each other are merged."""
        name = str(nonce).encode()
        return b"%b\x1a%c%b\x3a\x10%b" % (self._head, len(name), name, payload)


def wrong(reply: Any, nonce: int, payload: bytes) -> str:
    """What is wrong with an answer, "" if it is the one to this request."""
    if reply.id != str(nonce):
        return f"id {reply.id!r} for {nonce}"
    outputs = dict(zip((output.name for output in reply.outputs), reply.raw_output_contents, strict=False))
    if outputs.get("ECHO") != payload:
        return f"payload {outputs.get('ECHO')!r} for {payload!r}"
    said = reply.parameters["trefoil_variant"].string_param if reply.parameters else ""
    if said not in {variant_name(version) for version in VERSIONS}:
        return f"variant {said!r}"
    if outputs.get("VERSION") != struct.pack("<qq", *(2 * (int(said[-1]),))):
        return f"{said} says that it is version {outputs.get('VERSION')!r}"
    return ""


def variant_name(version: int) -> str:
    """Of the family's variants."""
    return f"echo-{version}"


def rate_per_s(slice_type: str) -> float:
    """Requests that one slice answers at most, whichever its variant, on a machine with nothing else to do."""
    return 1e3 / (SERVICE_MS[slice_type] + OVERHEAD_MS)


def _family() -> str:
    variants = "".join(
        f'\n[[variants]]\nname = "{variant_name(v)}"\nversion = {v}\naccuracy = {0.90 + 0.02 * v:.2f}\n'
        f'accuracy_source = "assumed"\nmemory_mib = 16\nload_s = 2.5\nmacs = {v}\nlicence = "made here"\n'
        for v in VERSIONS
    )
    return f'name = "{FAMILY}"\nmetric = "assumed"\n\n[classes.""]\npercentile = 95.0\nlatency_ms = 100.0\n{variants}'


def _profile() -> str:
    head = "# basis: synthetic\n# source: benchmarks/echo_family.py\n# machine: none: assumed\n# date: 2026-11-21\n"
    rows = [
        "device_type,slice_type,variant,stage,batch,clock_mhz,cohosted,latency_ms_p50,latency_ms_p95,latency_ms_p99,"
        "throughput_per_s,energy_active_j_per_batch,power_w,memory_mib"
    ]
    for name, one_ms in SERVICE_MS.items():
        for version in VERSIONS:
            for batch in (1, 8):
                t = one_ms * batch
                quantiles = ",".join(f"{t * factor:.4f}" for factor in (1.0, 1.08, 1.12))
                joules = t * 0.03 * (1 + 0.01 * version)
                rows.append(
                    f"{DEVICE},{name},{variant_name(version)},0,{batch},{CLOCK_MHZ},,{quantiles},"
                    f"{batch / t * 1e3:.6f},{joules:.6f},{joules / t * 1e3:.6f},16"
                )
    return f"{head}# commit: none\n" + "\n".join(rows) + "\n"


def graph(version: int) -> bytes:
    """ONNX, opset 17: ECHO = PAYLOAD; VERSION = 0 * PAYLOAD + version. Field numbers are those of onnx.proto."""
    tensors = {"zero": 0, "version": version}
    nodes = (
        ("Identity", ("PAYLOAD",), "ECHO"),
        ("Mul", ("PAYLOAD", "zero"), "none"),
        ("Add", ("none", "version"), "VERSION"),
    )
    body = b"".join(
        _field(1, b"".join(_field(1, name) for name in inputs) + _field(2, output) + _field(4, kind))
        for kind, inputs, output in nodes
    )
    body += _field(2, FAMILY)
    body += b"".join(
        _field(5, _field(2, _INT64) + _field(8, name) + _field(9, struct.pack("<q", value)))  # no dims: a scalar
        for name, value in tensors.items()
    )
    shape = _field(2, _field(1, _field(2, "N")) + _field(1, _field(1, 2)))
    for number, name in ((11, "PAYLOAD"), (12, "ECHO"), (12, "VERSION")):
        body += _field(number, _field(1, name) + _field(2, _field(1, _field(1, _INT64) + shape)))
    return _field(1, 8) + _field(7, body) + _field(8, _field(2, 17))


_INT64: Final = 7


def _field(number: int, value: "int | str | bytes") -> bytes:
    """One field of a protobuf message: a varint, or anything with a length."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    raw = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(raw)) + raw


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))
