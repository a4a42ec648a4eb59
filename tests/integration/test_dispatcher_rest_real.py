"""REST through the dispatcher beside REST straight to the same real Triton: whatever a client sees must be equal."""

import asyncio
import http.client
import json
from collections.abc import Iterator

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tests.support.perf_analyzer import perf_analyzer
from tests.support.special_models import SpecialTriton
from tests.support.special_world import serving

pytestmark = [pytest.mark.integration, pytest.mark.slow]
NAMES = ("kinds", "scores", "parrot", "repeat")
RNG = np.random.default_rng(7)
KINDS = {
    "BOOL": np.array([[True, False]]), "UINT8": np.array([[0, 255]], np.uint8),
    "UINT16": np.array([[0, 2**16 - 1]], np.uint16), "UINT32": np.array([[0, 2**32 - 1]], np.uint32),
    "UINT64": np.array([[0, 2**64 - 1]], np.uint64), "INT8": np.array([[-128, 127]], np.int8),
    "INT16": np.array([[-(2**15), 2**15 - 1]], np.int16), "INT32": np.array([[-(2**31), 2**31 - 1]], np.int32),
    "INT64": np.array([[-(2**63), 2**63 - 1]], np.int64), "FP16": np.array([[0.1, -65504]], np.float16),
    "FP32": np.array([[0.1, -3.4e38]], np.float32), "FP64": np.array([[0.1, -1.7e308]]),
    "STRING": np.array([["é\"\\\u2028".encode(), b""]], np.object_),
}  # fmt: skip
SCORES = RNG.normal(size=(3, 4)).astype(np.float32)


@pytest.fixture
def slice_(tmp_path) -> Iterator[SpecialTriton]:
    one = SpecialTriton(tmp_path, 0, 1, NAMES, http=True)
    yield one
    one.close()


def put(name, value, binary=True):
    tensor = triton.InferInput(name, list(value.shape), np_to_triton_dtype(value.dtype))
    tensor.set_data_from_numpy(value, binary_data=binary)
    return tensor


def want(name, binary=True, classes=0):
    return triton.InferRequestedOutput(name, binary_data=binary, class_count=classes)


def kinds(binary_in, binary_out, **more):
    def use(client):
        values = {name: value for name, value in KINDS.items() if name != "FP16" or (binary_in and binary_out)}
        values.setdefault("FP16", KINDS["FP16"])
        inputs = [put(name, value, binary_in or name == "FP16") for name, value in values.items()]
        result = client.infer("kinds", inputs, outputs=[want(n, binary_out or n == "FP16") for n in values], **more)
        for name, value in values.items():
            got = result.as_numpy(name)
            if name == "STRING":
                got = np.array([[e if isinstance(e, bytes) else e.encode() for e in row] for row in got], np.object_)
            np.testing.assert_array_equal(got, value)
        return seen(result)

    return use


def scores(classes, binary, **more):
    outputs = [want("SCORES", binary, classes)]
    return lambda client: seen(client.infer("scores", [put("SCORES", SCORES)], outputs=outputs, **more))


def parrot(**more):
    def use(client):
        answer, tensors = seen(client.infer("parrot", [put("TEXT", np.array([[b"a"]], np.object_), False)], **more))
        return answer, json.loads(tensors["PARAMETERS"][0][0])

    return use


def seen(result):
    """All that a client sees, but for our own parameters."""
    answer = result.get_response()
    ours = answer.pop("parameters", {})
    assert set(ours) <= {"trefoil_variant"}
    tensors = {output["name"]: result.as_numpy(output["name"]).tolist() for output in answer["outputs"]}
    return answer, tensors


def refused(use):
    def ask(client):
        with pytest.raises(InferenceServerException) as caught:
            use(client)
        return caught.value.status()

    return ask


SAME = {
    "binary both ways": kinds(True, True),
    "json both ways": kinds(False, False),
    "binary in, json out": kinds(True, False),
    "json in, binary out": kinds(False, True, request_id="é-1"),
    "gzip": kinds(True, True, request_compression_algorithm="gzip", response_compression_algorithm="gzip"),
    "deflate": kinds(False, False, request_compression_algorithm="deflate", response_compression_algorithm="deflate"),
    "two classes in binary": scores(2, True),
    "two classes in json": scores(2, False),
    "more classes than there are": scores(9, False),
    "no classes": scores(0, False, request_id="7"),
    "parameters": parrot(parameters={"a": 1, "b": "two", "c": True, "d": 0.5}, request_id="mine"),
    "no outputs named": lambda client: seen(client.infer("scores", [put("SCORES", SCORES)])),
    "model ready": lambda client: [client.is_model_ready("scores"), client.is_model_ready("nobody")],
    "live and ready": lambda client: [client.is_server_live(), client.is_server_ready()],
    "shared memory status": lambda client: client.get_system_shared_memory_status(),
    "metadata": lambda client: client.get_model_metadata("kinds"),
    "an unknown model": refused(lambda client: client.infer("nobody", [put("SCORES", SCORES)])),
    "an unknown version": refused(lambda client: client.infer("scores", [put("SCORES", SCORES)], model_version="9")),
    "metadata of an unknown model": refused(lambda client: client.get_model_metadata("nobody")),
    "another shape": refused(lambda client: client.infer("scores", [put("SCORES", SCORES[:, :3])])),
    "another datatype": refused(lambda client: client.infer("scores", [put("SCORES", SCORES.astype(np.float64))])),
    "another input": refused(lambda client: client.infer("scores", [put("OTHER", SCORES)])),
    "an output that is none": refused(
        lambda client: client.infer("scores", [put("SCORES", SCORES)], outputs=[want("OTHER")])
    ),
    "too large a batch": refused(lambda client: client.infer("scores", [put("SCORES", np.tile(SCORES, (5, 1)))])),
    "a decoupled model": refused(
        lambda client: client.infer("repeat", [put(n, np.ones((1, 1), np.int32)) for n in ("COUNT", "DELAY_MS")])
    ),
}  # fmt: skip

FP32_IN_JSON = {
    "inputs": [{"name": "SCORES", "shape": [1, 4], "datatype": "FP32", "data": [[1e-7, 0.1], [-1e39, 16777217]]}]
}
SAME_BYTES = {
    "an answer in json": ("/v2/models/scores/infer", json.dumps(FP32_IN_JSON).encode(), {}),
    "no such field": ("/v2/models/scores/infer", b'{"inputs":[{"name":"SCORES"}]}', {}),
    "json as long as nobody sent": (
        "/v2/models/scores/infer", b"{}", {"Inference-Header-Content-Length": "3"},
    ),
    "only the data": (
        "/v2/models/scores/infer", SCORES[0].tobytes(), {"Inference-Header-Content-Length": "0"},
    ),
    "a reserved parameter": (
        "/v2/models/scores/infer", json.dumps(FP32_IN_JSON | {"parameters": {"triton_x": 1}}).encode(), {},
    ),
    "an encoding that nobody knows": ("/v2/models/scores/infer", b"{}", {"Content-Encoding": "br"}),
    "a path that is none": ("/v2/nothing", b"", {}),
    "the index": ("/v2/repository/index", b"", {}),
}  # fmt: skip


JSON_FORMS = {
    "a byte order mark": (b"\xef\xbb\xbf", "[1,2,3,4]", "", ""),
    "an end by NUL": (b"", "[1,2,3,4]", "", "\0..."),
    "numbers that JSON has not": (b"", "[Inf,-Inf,NaN,-Infinity]", "", ""),
    "an infinite and no number": (b"", "[Infinity,-NaN,1e39,-0.0]", "", ""),
    "a number beyond 64 bits": (b"", "[123456789012345678901234567890,1e-400,1,2]", "", ""),
    "equal keys": (b"", '[1,2,3,4],"data":[5,6,7,8]', "", ""),
    "null parameters of an input": (b"", '[1,2,3,4],"parameters":null', "", ""),
    "a list of parameters of an output": (b"", "[1,2,3,4]", '"outputs":[{"name":"SCORES","parameters":[]}],', ""),
    "no classes": (b"", "[1,2,3,4]", '"outputs":[{"name":"SCORES","parameters":{"classification":0}}],', ""),
    "lists beside numbers": (b"", "[[1,[2]],3,[[[4]]]]", "", ""),
}
SAME_BYTES |= {
    name: ("/v2/models/scores/infer", mark + f'{{{more}"inputs":[{{"name":"SCORES","shape":[1,4],"datatype":"FP32",'
           f'"data":{data}}}]}}{end}'.encode(), {})
    for name, (mark, data, more, end) in JSON_FORMS.items()
}  # fmt: skip

NOT_FLOATS = '{{"inputs":[{{"name":"SCORES","shape":[1,4],"datatype":"FP32","data":{}}}]}}'
OUR_400_THEIR_500 = {
    "a shape and other data": NOT_FLOATS.format([1]),
    "text for numbers": NOT_FLOATS.format('["1","2","3","4"]'),
    "no json": "{",
    "null for the request's parameters": NOT_FLOATS.format("[1,2,3,4]").replace("{", '{"parameters":null,', 1),
    "null for outputs": NOT_FLOATS.format("[1,2,3,4]").replace("{", '{"outputs":null,', 1),
    "null for an id": NOT_FLOATS.format("[1,2,3,4]").replace("{", '{"id":null,', 1),
    "null among data": NOT_FLOATS.format("[1,null,3,4]"),
    "a number too large": NOT_FLOATS.format("[1e400,2,3,4]"),
    "inf in small letters": NOT_FLOATS.format("[inf,2,3,4]"),
    "two byte order marks": "\ufeff\ufeff" + NOT_FLOATS.format("[1,2,3,4]"),
}  # fmt: skip
"""A client's own mistakes, for which Triton blames itself."""


REPEAT = {"COUNT": 2, "DELAY_MS": 0}
GENERATED = {
    "a stream": ("repeat", "_stream", REPEAT),
    "a list of one, an id and a version": ("repeat/versions/1", "_stream", {**REPEAT, "COUNT": [2], "id": "é"}),
    "inputs among parameters": ("repeat", "_stream", {"parameters": REPEAT}),
    "an error after an answer": ("repeat", "_stream", {**REPEAT, "COUNT": -1}),
    "no answer": ("repeat", "_stream", {**REPEAT, "COUNT": 0}),
    "one of one": ("repeat", "", {**REPEAT, "COUNT": 1}),
    "a model that does not stream": ("scores", "", {"SCORES": [0.5, 1, 2, 3]}),
    "two items": ("scores", "_stream", {"SCORES": [0.5, 1, 2, 3, 4, 5, 6, 7]}),
    "parameters": ("parrot", "", {"TEXT": "a", "x": 1, "parameters": {"y": "b", "z": True, "w": 0.5}}),
    "an error at first": ("repeat", "_stream", {"COUNT": 1}),
    "elements too few": ("scores", "", {"SCORES": [0.5, 1, 2]}),
    "no such model": ("nothing", "_stream", {"SCORES": 1}),
    "a parameter that is a list": ("scores", "", {"SCORES": [1, 2, 3, 4], "x": [1]}),
}


def generated(answer):
    """Status, type and JSON of all events or of the only answer, without what is ours; of a refusal, its status."""
    status, content_type, _, data = answer
    if status != 200:
        return status, content_type, list(json.loads(data))
    texts = data.split(b"\n\n")[:-1] if content_type.startswith("text/event-stream") else [data]
    told = [json.loads(text.removeprefix(b"data: ")) for text in texts]
    for each in told:
        each.pop("trefoil_variant", None)
        if "PARAMETERS" in each:  # an id, and a key of ours that Triton counts among them
            each["PARAMETERS"] = json.loads(each["PARAMETERS"])[0]
    return status, content_type, told


def post(port, path, body, headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("POST", path, body, headers)
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    return answer.status, answer.getheader("Content-Type"), answer.getheader("Inference-Header-Content-Length"), data


def without_ours(answer):
    """Status, type and body of an answer without what is ours alone; of errors, that there is one."""
    status, content_type, length, data = answer
    if content_type.startswith("text/event-stream"):
        return generated(answer)
    head, rest = (data[: int(length)], data[int(length) :]) if length else (data, b"")
    body = json.loads(head, parse_constant=str)  # NaN is not equal to itself
    if status != 200:
        return status, list(body)
    if isinstance(body, dict):
        body.pop("parameters", None)
    return status, content_type, body, rest


@pytest.mark.gate
async def test_clients_cannot_tell_the_two_apart(state, tmp_path, slice_):
    await slice_.ready()
    async with serving(state, tmp_path, [slice_], rest_address="127.0.0.1:0") as world:
        running = world.running

        def compare():
            different = {}
            with (
                triton.InferenceServerClient(running.rest_address) as ours,
                triton.InferenceServerClient(f"127.0.0.1:{slice_.http_port}") as theirs,
            ):
                for name, use in SAME.items():
                    got, expected = use(ours), use(theirs)
                    if got != expected:
                        different[name] = (got, expected)
            for name, (path, body, headers) in SAME_BYTES.items():
                got, expected = (post(port, path, body, headers) for port in (running.rest.port, slice_.http_port))
                if without_ours(got) != without_ours(expected):
                    different[name] = (got, expected)
            for name, (model, kind, given) in GENERATED.items():
                path, body = f"/v2/models/{model}/generate{kind}", json.dumps(given).encode()
                got, expected = (post(port, path, body, {}) for port in (running.rest.port, slice_.http_port))
                if generated(got) != generated(expected):
                    different[name] = (got, expected)
            for name, text in OUR_400_THEIR_500.items():
                path, ports = "/v2/models/scores/infer", (running.rest.port, slice_.http_port)
                statuses = [post(port, path, text.encode(), {})[0] for port in ports]
                if statuses != [400, 500]:
                    different[name] = statuses
            return different

        assert await asyncio.to_thread(compare) == {}


async def test_the_unmodified_perf_analyzer_measures_over_http(state, tmp_path, slice_):
    tool = perf_analyzer()
    await slice_.ready()
    async with serving(state, tmp_path, [slice_], rest_address="127.0.0.1:0") as world:
        running = world.running
        for load in (("--concurrency-range", "4"), ("--request-rate-range", "50", "--request-distribution", "poisson")):
            options = ("-i", "http", "--request-count", "100", "--input-data", "zero", *load)
            report = await asyncio.to_thread(tool.run, running.rest_address, "scores", *options)
            (row,) = report.rows
            assert float(row["Inferences/Second"]) > 0
            assert float(row["Server Compute Infer"]) > 0, "the statistics counted what it sent"
        assert running.local.accounting.load.totals["scores"].answered >= 200
        assert running.local.accounting.load.totals["scores"].failed == 0
