"""Models that no family is made of yet, in real Tritons: sequences, decoupled answers, classification, parameters.

accumulator  sequence: VALUE i32[1] -> SUM i32[1] of its sequence so far, SLICE i32[1] that holds it
repeat       decoupled: COUNT i32[1] -> INDEX i32[1] count times, SLICE i32[1]; a negative COUNT is an error after that
             many answers. DELAY_MS i32[1] between answers
running      both: VALUE i32[1] -> SUM i32[1] twice for each request of a sequence
scores       classification: SCORES f32[4] -> SCORES f32[4] with labels
moody        CODE i32[1], MS i32[1], NONCE i32[1], TEXT bytes[1] -> NONCE i32[1] after MS; a CODE > 0 is an error with
             that text (STATUSES). Each nonce is noted before it is executed (`SpecialTriton.executions`)
moods        decoupled: the same
parrot       TEXT bytes[1] -> PARAMETERS bytes[1]: the request's parameters as JSON
kinds        one tensor [2] of every datatype -> the same ones
speller      decoupled, asked as models of the vLLM backend: text_input bytes[1] is JSON: `pieces` in hexadecimal, one
             an answer, every `ms`; then `error`, if there is one. Another text comes back as its one piece
embedder     text_input bytes[1] -> embedding f32[16] of length 1, by its words; num_input_tokens u32[1]: its words
echo         asked as models of the TensorRT-LLM backend: text_input bytes[1], max_tokens i32[1] -> text_output bytes[1]
"""

import contextlib
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import grpc
import numpy as np
import psutil
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from power_agent.triton.slice_launch import clean_shared_memory
from tests.support.ports import free_ports
from tests.support.triton_process import install
from tests.unit.dispatcher.worlds import key, node, plan
from trefoil.core.common import Revision
from trefoil.core.fleet import Hosted, NodeStatus, SliceState, SliceStatus
from trefoil.core.plan import Plan, Route, RouteTarget

IDLE_S = 120  # longer than a machine stands still

CONTROLS = """
sequence_batching {
  max_sequence_idle_microseconds: IDLE_US
  oldest { max_candidate_sequences: 64 }
  control_input [
    { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] },
    { name: "END" control [ { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } ] },
    { name: "CORRID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] }
  ]
}
"""
DECOUPLED = "model_transaction_policy { decoupled: true }"


def _tensors(kind: str, **dims: str) -> str:
    return "".join(f'{kind} [ {{ name: "{name}" data_type: {type_} }} ]\n' for name, type_ in dims.items())


I32 = "TYPE_INT32 dims: [ 1 ]"
MOODY = _tensors("input", CODE=I32, MS=I32, NONCE=I32, TEXT="TYPE_STRING dims: [ 1 ]") + _tensors("output", NONCE=I32)
STATUSES = (
    "OK",
    "UNKNOWN",
    "INTERNAL",
    "NOT_FOUND",
    "INVALID_ARG",
    "UNAVAILABLE",
    "UNSUPPORTED",
    "ALREADY_EXISTS",
    "CANCELLED",
)
"""What `pb_utils.TritonError` can say, by number."""
KINDS = ("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64",
         "STRING")  # fmt: skip
CONFIGS = {
    "accumulator": _tensors("input", VALUE=I32) + _tensors("output", SUM=I32, SLICE=I32) + CONTROLS,
    "repeat": _tensors("input", COUNT=I32, DELAY_MS=I32) + _tensors("output", INDEX=I32, SLICE=I32) + DECOUPLED,
    "running": _tensors("input", VALUE=I32) + _tensors("output", SUM=I32) + CONTROLS + DECOUPLED,
    "scores": _tensors("input", SCORES="TYPE_FP32 dims: [ 4 ]")
    + _tensors("output", SCORES='TYPE_FP32 dims: [ 4 ] label_filename: "labels.txt"'),
    "kinds": "".join(_tensors(side, **{k: f"TYPE_{k} dims: [ 2 ]" for k in KINDS}) for side in ("input", "output")),
    "parrot": _tensors("input", TEXT="TYPE_STRING dims: [ 1 ]")
    + _tensors("output", PARAMETERS="TYPE_STRING dims: [ 1 ]"),
}
MOODS = {"moody": MOODY, "moods": MOODY + DECOUPLED}
"""Models that answer as they are asked to: not among those of CONFIGS, which conformance tests start all of."""
LABELS = ("moss", "fern", "reed", "clover")

HEAD = """
import json, os, time
import numpy as np
import triton_python_backend_utils as pb_utils
SLICE = int(os.environ["TREFOIL_TEST_SLICE"])
def get(request, name):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy()
def answer(**tensors):
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, value) for name, value in tensors.items()])
def number(like, value):
    return np.full(like.shape, value, np.int32)
"""
SEQUENCE = """
class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}
    def add(self, request):
        id_ = int(get(request, "CORRID").ravel()[0])
        if get(request, "START").ravel()[0]:
            self.sums[id_] = 0
        self.sums[id_] += int(get(request, "VALUE").ravel()[0])
        return self.sums.pop(id_) if get(request, "END").ravel()[0] else self.sums[id_]
"""
MOOD = f"""
STATUSES = {STATUSES!r}
class TritonPythonModel:
    def initialize(self, args):
        self.notes = open(f"{{os.environ['TREFOIL_TEST_NOTES']}}/{{os.getpid()}}-{{time.time_ns()}}", "ab", buffering=0)
    def act(self, r):
        nonce, code = get(r, "NONCE"), int(get(r, "CODE").ravel()[0])
        self.notes.write(nonce.astype("<i4").tobytes())
        time.sleep(int(get(r, "MS").ravel()[0]) / 1e3)
        if code > 0:
            text = get(r, "TEXT").ravel()[0].decode()
            error = pb_utils.TritonError(text, getattr(pb_utils.TritonError, STATUSES[code]))
            return pb_utils.InferenceResponse(error=error)
        return answer(NONCE=nonce)
"""
SOURCES = {
    "accumulator": SEQUENCE
    + """
    def execute(self, requests):
        return [answer(SUM=number(get(r, "VALUE"), self.add(r)), SLICE=number(get(r, "VALUE"), SLICE))
                for r in requests]
""",
    "running": SEQUENCE
    + """
    def execute(self, requests):
        for r in requests:
            sender, sum_ = r.get_response_sender(), number(get(r, "VALUE"), self.add(r))
            sender.send(answer(SUM=sum_))
            sender.send(answer(SUM=sum_), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
""",
    "repeat": """
class TritonPythonModel:
    def execute(self, requests):
        for r in requests:
            sender, count = r.get_response_sender(), get(r, "COUNT")
            for i in range(abs(int(count.ravel()[0]))):
                time.sleep(int(get(r, "DELAY_MS").ravel()[0]) / 1e3)
                if sender.is_cancelled():
                    break
                sender.send(answer(INDEX=number(count, i), SLICE=number(count, SLICE)))
            if count.ravel()[0] < 0:
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("no more than that")))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
""",
    "speller": """
class TritonPythonModel:
    def execute(self, requests):
        for r in requests:
            sender, text = r.get_response_sender(), get(r, "text_input").ravel()[0]
            given = json.loads(text) if text[:1] == b"{" else {"pieces": [text.hex()]}
            for piece in given["pieces"]:
                time.sleep(given.get("ms", 0) / 1e3)
                if sender.is_cancelled():
                    break
                sender.send(answer(text_output=np.array([[bytes.fromhex(piece)]], np.object_)))
            if "error" in given:
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(given["error"])))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
""",
    "echo": """
class TritonPythonModel:
    def execute(self, requests):
        return [answer(text_output=get(r, "text_input")) for r in requests]
""",
    "embedder": """
import hashlib
class TritonPythonModel:
    def execute(self, requests):
        return [self.answer([t.decode() for t in get(r, "text_input").ravel()]) for r in requests]
    def answer(self, texts):
        if "!nan" in texts:
            return answer(embedding=np.full((len(texts), 16), np.nan, np.float32))
        if "!error" in texts:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("the text is bewitched"))
        counts = np.array([[len(t.split())] for t in texts], np.uint32)
        return answer(embedding=np.stack([self.vector(t) for t in texts]), num_input_tokens=counts)
    def vector(self, text):
        words = [hashlib.blake2b(word.encode(), digest_size=16).digest() for word in text.split()]
        whole = sum(np.frombuffer(w, np.uint8).astype(np.float32) - 127.5 for w in words)
        return (whole / np.linalg.norm(whole)).astype(np.float32)
""",
    "scores": """
class TritonPythonModel:
    def execute(self, requests):
        return [answer(SCORES=get(r, "SCORES")) for r in requests]
""",
    "moody": MOOD
    + """
    def execute(self, requests):
        return [self.act(r) for r in requests]
""",
    "moods": MOOD
    + """
    def execute(self, requests):
        for r in requests:
            sender = r.get_response_sender()
            sender.send(self.act(r))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
""",
    "kinds": """
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor(t.name(), t.as_numpy()) for t in r.inputs()])
                for r in requests]
""",
    "parrot": """
class TritonPythonModel:
    def execute(self, requests):
        said = [json.dumps([json.loads(r.parameters()), r.request_id()]).encode() for r in requests]
        return [answer(PARAMETERS=np.full(get(r, "TEXT").shape, text, np.object_)) for r, text in zip(requests, said)]
""",
}
TEXTS = {
    "speller": _tensors("input", text_input="TYPE_STRING dims: [ 1 ]")
    + 'input [ { name: "sampling_parameters" data_type: TYPE_STRING dims: [ 1 ] optional: true } ]'
    + _tensors("output", text_output="TYPE_STRING dims: [ 1 ]")
    + DECOUPLED
    + """
parameters { key: "chat_template" value { string_value: "{% for m in messages %}{{ m.content }}{% endfor %}" } }
""",
    "embedder": _tensors("input", text_input="TYPE_STRING dims: [ 1 ]")
    + _tensors("output", embedding="TYPE_FP32 dims: [ 16 ]", num_input_tokens="TYPE_UINT32 dims: [ 1 ]")
    + 'parameters { key: "dimensions" value { string_value: "4,8" } }',
    "echo": _tensors("input", text_input="TYPE_STRING dims: [ 1 ]", max_tokens=I32)
    + _tensors("output", text_output="TYPE_STRING dims: [ 1 ]"),
}
"""Asked as language models."""


def write_models(repository: Path, version: int, names: Sequence[str], idle_s: int = IDLE_S) -> Path:
    """A repository with those models, each in the one version. `idle_s`: how long a sequence may be idle."""
    for name in names:
        folder = repository / name / str(version)
        folder.mkdir(parents=True)
        (folder / "model.py").write_text(HEAD + SOURCES[name])
        (repository / name / "labels.txt").write_text("\n".join(LABELS) + "\n")
        (repository / name / "config.pbtxt").write_text(
            f'name: "{name}" backend: "python" max_batch_size: 8\n'
            f"version_policy {{ specific {{ versions: [ {version} ] }} }}\n"
            f"instance_group [ {{ kind: KIND_CPU count: 1 }} ]\n"
            + (CONFIGS | MOODS | TEXTS)[name].replace("IDLE_US", str(idle_s * 10**6))
        )
    return repository


class SpecialTriton:
    """Number `number` of a test's Tritons, with those models as version `version`. Ended by `close`."""

    def __init__(
        self, folder: Path, number: int, version: int, names: Sequence[str], http: bool = False, idle_s: int = IDLE_S
    ) -> None:
        self.number, self.version, self.names = number, version, tuple(names)
        self.notes = folder / f"notes-{number}"
        self.notes.mkdir()
        self.repository = write_models(folder / f"models-{number}", version, names, idle_s)
        self.port, metrics_port, self.http_port = free_ports(3)
        self.target = f"127.0.0.1:{self.port}"
        self.log = folder / f"triton-{number}.log"
        self._shm = f"trefoil-test-{self.port}-"
        found = install()
        argv = [
            str(found.binary), f"--model-repository={self.repository}", f"--backend-directory={found.backends}",
            f"--cache-directory={found.caches}", f"--backend-config=python,shm-region-prefix-name={self._shm}",
            f"--allow-http={str(http).lower()}", f"--http-port={self.http_port}", "--http-address=127.0.0.1",
            "--grpc-address=127.0.0.1", f"--grpc-port={self.port}",
            "--metrics-address=127.0.0.1", f"--metrics-port={metrics_port}", "--allow-gpu-metrics=false",
            "--exit-timeout-secs=2",
        ]  # fmt: skip
        env = {
            **os.environ,
            "PATH": os.pathsep.join([str(found.environment.absolute() / "bin"), os.environ["PATH"]]),
            "TREFOIL_TEST_SLICE": str(number), "TREFOIL_TEST_NOTES": str(self.notes),
            "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        if not found.libpython_loads:
            env["LD_LIBRARY_PATH"] = found.libpython_folder
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(argv, env=env, stdout=log, stderr=log, start_new_session=True)

    def executions(self) -> Counter[int]:
        """How often each nonce was executed; 0 is a probe's."""
        notes = [path.read_bytes() for path in self.notes.iterdir()]
        return Counter(int(nonce) for each in notes for nonce in np.frombuffer(each, "<i4"))

    async def ready(self, timeout_s: float = 60.0) -> None:
        """Every model is loaded."""
        async with grpc.aio.insecure_channel(self.target) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            answer = await stub.ServerReady(pb.ServerReadyRequest(), timeout=timeout_s, wait_for_ready=True)
            assert answer.ready, self.log.read_text()[-3000:]

    def status(self, state: SliceState = SliceState.READY, generation: int = 1) -> SliceStatus:
        """What an agent would publish."""
        return SliceStatus(
            key=key(self.number), generation=generation, mig_uuid=f"MIG-{self.number}", state=state,
            hosted=tuple(Hosted(name, self.variant, self.version, 0, 1, 1, 8) for name in self.names),
            grpc_target=self.target, since_s=1.0, revision=Revision(1, 1, 0), credits=4,
        )  # fmt: skip

    @property
    def variant(self) -> str:
        return f"v{self.version}"

    def close(self) -> None:
        stubs = []
        if self.process.poll() is None:
            stubs = psutil.Process(self.process.pid).children(recursive=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        psutil.wait_procs(stubs, timeout=5)
        clean_shared_memory(self._shm)


def special_node(tritons: Sequence[SpecialTriton]) -> NodeStatus:
    """All of them on one node, READY."""
    return node([triton.status() for triton in tritons])


def special_plan(
    tritons: Sequence[SpecialTriton], number: int = 1, credits: int = 4, draining: Sequence[int] = ()
) -> Plan:
    """Every model routed to every Triton that has it, in equal shares."""
    names = sorted({name for triton in tritons for name in triton.names})
    routes = [
        Route(name, "weighted", "fifo", tuple(
            RouteTarget(key(t.number), t.variant, 0, 1.0, credits, t.number in draining, "")
            for t in tritons if name in t.names
        ), 0, 0, {})
        for name in names
    ]  # fmt: skip
    return plan(routes, number=number)
