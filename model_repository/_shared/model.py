"""The one Triton python-backend model: runs the ONNX file of its version, and on a simulated slice keeps its pace.

A slice's repository links this file into every version folder, beside that version's model.onnx. It runs inside the
python stub of Triton, in a separate environment (numpy < 2, onnxruntime), so it imports nothing of Trefoil.

On real hardware the environment has no TREFOIL_PACE_FILE and nothing here pads. On a simulated slice the node process
maps a pace file per slice: the driver writes service times, this model really infers, sleeps what is left of a service
time drawn from them, and books its busy time. Batches that run beside others on the slice take longer, by the law of
trefoil/core/interference.py; what is booked is the time that they would have taken alone. Layout (little-endian; as
long as the table needs):

    driver writes   0 magic "TRFPACE2"   8 u64 seqlock (odd: being written)   16 u32 clock_mhz   20 u32 table_id
                    24 u32 entries   32 u64 rng_seed   40 f64 interference
                    4160 + 40 i: u32 family_crc32, u32 version, u32 batch, u32 -, f64 service_ms_mean, f64 service_cv,
                    f64 activity (the part of the slice that it keeps busy)
    model writes    64 + 64 i, i < 64, each instance its own: u32 version, u32 family_crc32, u64 busy_ns, batches,
                    items, overruns, overrun_ns, started_ns (CLOCK_MONOTONIC from which the batch in progress is not
                    in busy_ns yet, 0 = none), u32 instance, f32 activity of the batch in progress

An overrun is a batch whose real work took longer than its draw: then the simulation is too slow to be trusted, and
the node reports the share of such batches.
"""

import fcntl
import json
import mmap
import os
import time
import zlib
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

PACE_MAGIC = b"TRFPACE2"
SLOTS_AT, SLOTS, ENTRIES_AT = 64, 64, 4160
ENTRY = np.dtype(
    [
        ("family", "<u4"),
        ("version", "<u4"),
        ("batch", "<u4"),
        ("_", "<u4"),
        ("mean_ms", "<f8"),
        ("cv", "<f8"),
        ("activity", "<f8"),
    ]
)
SLOT = np.dtype(
    [
        ("version", "<u4"),
        ("family", "<u4"),
        ("busy_ns", "<u8"),
        ("batches", "<u8"),
        ("items", "<u8"),
        ("overruns", "<u8"),
        ("overrun_ns", "<u8"),
        ("started_ns", "<u8"),
        ("instance", "<u4"),
        ("activity", "<f4"),
    ]
)
SEQLOCK_TRIES = 1000  # a writer needs microseconds; 1,000 tries of 100 us are 0.1 s
NS_PER_MS = 1e6
STEP_NS = 2_000_000  # after which a batch looks who runs beside it
STALE_NS = 2_000_000_000  # a neighbour that has not moved for so long is dead, or its graph is not a paced one's
DECODE_SECONDS = "trefoil_decode_seconds_total"
PROBE_SHAPE = "trefoil_shape."  # parameter: the shape of one item of an input in a first request


class PaceError(Exception):
    """The pace file cannot be used; the message says why."""


class Pace:
    """An instance's view of the slice's pace file."""

    def __init__(self, path, family, version, instance=""):
        """Map the file and take a slot for this instance. Raises PaceError when it is not a pace file, or full."""
        self._path, self._family, self._version = path, zlib.crc32(family.encode()), version
        try:
            with open(path, "r+b") as file:
                self._map = mmap.mmap(file.fileno(), 0)
                if self._map[:8] != PACE_MAGIC:
                    raise PaceError(f"TREFOIL_PACE_FILE={path} is not a pace file: it begins with {self._map[:8]!r}")
                fcntl.flock(file, fcntl.LOCK_EX)  # no two take the same one
                try:
                    self._slot = self._take_slot(zlib.crc32(instance.encode()))
                finally:
                    fcntl.flock(file, fcntl.LOCK_UN)  # the map holds a copy of the descriptor, and so the lock
        except (OSError, ValueError) as error:
            raise PaceError(f"TREFOIL_PACE_FILE={path} cannot be mapped: {error}") from error
        self._sequence = np.frombuffer(self._map, "<u8", 1, 8)
        self._numbers = np.frombuffer(self._map, "<u4", 3, 16)
        self._seed = np.frombuffer(self._map, "<u8", 1, 32)
        self._interference = np.frombuffer(self._map, "<f8", 1, 40)
        self._slots = np.frombuffer(self._map, SLOT, SLOTS, SLOTS_AT)
        self._started_ns = self._left_ns = 0
        self._entries = np.frombuffer(self._map, ENTRY, -1, ENTRIES_AT)
        self._read_at = None
        self._table = ()
        self._chance = None

    def _take_slot(self, instance):
        """The slot that this instance had before, or the first that nobody has."""
        slots = np.frombuffer(self._map, SLOT, SLOTS, SLOTS_AT)
        mine = (slots["version"] == self._version) & (slots["family"] == self._family) & (slots["instance"] == instance)
        found = np.flatnonzero(mine | (slots["version"] == 0))
        if len(found) == 0:
            raise PaceError(f"{self._path} has no room for version {self._version}: {SLOTS} instances have run here")
        slot = slots[found[0] : found[0] + 1]
        slot["started_ns"] = slot["activity"] = 0  # a stub that was killed in a batch left them set
        slot["family"], slot["instance"] = self._family, instance
        slot["version"] = self._version  # last: from now on it is read
        return slot

    def _refresh(self):
        """Read the table when the driver changed it; the same sequence before and after means an untorn copy."""
        if int(self._sequence[0]) == self._read_at:
            return
        for _ in range(SEQLOCK_TRIES):
            before = int(self._sequence[0])
            if before % 2 == 0:
                count = min(int(self._numbers[2]), len(self._entries))
                entries, seed = self._entries[:count].copy(), int(self._seed[0])
                if int(self._sequence[0]) == before:
                    break
            time.sleep(1e-4)  # noqa: TID251 - the stub's environment does not hold trefoil.runtime.clock
        else:
            raise PaceError(f"{self._path} stayed locked by its writer")
        mine = entries[(entries["family"] == self._family) & (entries["version"] == self._version)]
        self._table = np.sort(mine, order="batch")
        self._read_at = before
        if self._chance is None:
            words = (seed, self._family, self._version, int(self._slot["instance"][0]))
            self._chance = np.random.Generator(np.random.PCG64(np.random.SeedSequence(words)))

    def row(self, items):
        """Mean service time [ms], coefficient of variation and activity of a batch of that many items."""
        self._refresh()
        if len(self._table) == 0:
            raise PaceError(f"{self._path} has no service time for version {self._version}: no profile row for it")
        batches, largest = self._table["batch"], int(self._table["batch"][-1])
        mean_ms = float(np.interp(items, batches, self._table["mean_ms"]))
        cv = float(np.interp(items, batches, self._table["cv"]))
        if items > largest:
            mean_ms *= items / largest
        return mean_ms, cv, float(np.interp(items, batches, self._table["activity"]))

    def draw(self, items):
        """A service time [ns] for a batch of that many items, and its activity."""
        mean_ms, cv, activity = self.row(items)
        if cv > 0:
            mean_ms = float(self._chance.gamma(1.0 / cv**2, mean_ms * cv**2))
        return int(mean_ms * NS_PER_MS), activity

    def start(self, items):
        """Draw what a batch takes, and book that it runs from now on."""
        self._left_ns, activity = self.draw(items)
        self._started_ns = time.monotonic_ns()
        self._slot["started_ns"] = self._started_ns
        self._slot["activity"] = activity

    def finish(self, items):
        """Sleep what is left of the drawn service time, longer beside others, and book the batch."""
        try:
            self._advance()
            if self._left_ns < 0:
                self._slot["overruns"] += 1
                self._slot["overrun_ns"] += -self._left_ns
            while self._left_ns > 0:
                alone = np.count_nonzero(self._slots["version"]) == 1
                step_ns = self._left_ns * self._stretch()
                time.sleep((step_ns if alone else min(STEP_NS, step_ns)) / 1e9)  # noqa: TID251 - as above
                self._advance()
        finally:
            self._slot["batches"] += 1
            self._slot["items"] += items
            self._slot["started_ns"] = self._slot["activity"] = 0

    def _advance(self):
        """Book what was done since the last look, at the pace that the neighbours of now leave."""
        now_ns = time.monotonic_ns()
        done_ns = int((now_ns - self._started_ns) / self._stretch())
        self._left_ns -= done_ns
        self._slot["busy_ns"] += done_ns
        self._slot["started_ns"] = self._started_ns = now_ns

    def _stretch(self):
        """Time of the batch over its time alone, beside those who compute now."""
        mine, others = float(self._slot["activity"][0]), 0.0
        for slot in self._slots[self._slots["activity"] > 0]:
            if self._started_ns - int(slot["started_ns"]) < STALE_NS:
                others += float(slot["activity"])
        others -= mine
        return max(1.0, mine + others) * (1.0 + float(self._interference[0]) * others) if others > 1e-6 else 1.0


class TokenPace(Pace):
    """Pace of iterations, each of which gives every stream a token, instead of answers."""

    def __init__(self, path, args, config):
        """As Pace. Raises KeyError or ValueError where the contract does not say how long an answer is."""
        super().__init__(path, args["model_name"], int(args["model_version"]), args["model_instance_name"])
        self._iterations = float(config["parameters"]["tokens_mean"]["string_value"]) + 1

    def draw(self, items):
        """An iteration's time [ns] with that many streams, and its activity."""
        mean_ms, _, activity = self.row(items)
        return int(mean_ms * NS_PER_MS / self._iterations), activity


class DecodeSeconds:
    """Counter of the time in which tokens are made, on Triton's metrics page: Triton counts the time of execute."""

    def __init__(self, args):
        """Publish it for this instance; `loaded` tells it from those of other loads."""
        self._family = pb_utils.MetricFamily(
            name=DECODE_SECONDS, description="Time in which tokens were made", kind=pb_utils.MetricFamily.COUNTER
        )  # it must live as long as its metric
        labels = {
            "model": args["model_name"],
            "version": args["model_version"],
            "instance": args["model_instance_name"],
        }
        self._metric = self._family.Metric(labels=labels | {"loaded": str(time.monotonic_ns())})

    def add(self, passed_ns):
        """Count so much more."""
        self._metric.increment(passed_ns / 1e9)


def refuse_wrong_numpy():
    """With numpy 2 the stub of this Triton returns outputs of 0 bytes with status OK: refuse to serve at all."""
    if int(np.__version__.split(".")[0]) >= 2:
        raise pb_utils.TritonModelException(
            f"numpy {np.__version__} in Triton's Python environment ({np.__file__}): outputs would be empty. "
            "Remedy: install numpy<2 there, and put its bin/ first on Triton's PATH"
        )


def providers(onnxruntime):
    """What the graph runs on. A slice of a real GPU must not compute on the CPU, where nobody would notice."""
    if os.environ.get("TREFOIL_ON_GPU") != "1" or os.environ.get("TREFOIL_PACE_FILE"):
        return ["CPUExecutionProvider"]
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        raise pb_utils.TritonModelException(
            f"this slice has a GPU, and onnxruntime {onnxruntime.__version__} ({onnxruntime.__file__}) cannot use it. "
            "Remedy: install onnxruntime-gpu there instead, or an image that has Triton's onnxruntime backend"
        )
    return ["CUDAExecutionProvider", "CPUExecutionProvider"]


def shape_of(tensor):
    """Shape of one item of an input as the graph takes it: Triton has reshaped what the client sent."""
    dims = tensor["reshape"].get("shape", []) if "reshape" in tensor else tensor["dims"]
    return tuple(int(size) for size in dims)


class TritonPythonModel:
    """One version of one family. Inputs and outputs are those of the generated config.pbtxt."""

    def initialize(self, args):
        """Load the graph, run it once, and open the pace file where there is one."""
        refuse_wrong_numpy()
        import onnxruntime
        from onnxruntime.capi import onnxruntime_pybind11_state as errors

        config = json.loads(args["model_config"])
        self._inputs = {
            i["name"]: (np.dtype(pb_utils.triton_string_to_numpy(i["data_type"])), shape_of(i)) for i in config["input"]
        }
        self._outputs = [o["name"] for o in config["output"]]
        self._batch_max = int(config.get("max_batch_size", 0))  # 0: the first dimension does not count items
        self._run_errors = (errors.Fail, errors.InvalidArgument, errors.RuntimeException, errors.NotImplemented)
        version = int(args["model_version"])
        path = Path(args["model_repository"]) / str(version) / "model.onnx"
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = max(1, int(os.environ.get("OMP_NUM_THREADS", "1")))
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        wanted = providers(onnxruntime)
        self._session = onnxruntime.InferenceSession(str(path), options, providers=wanted)
        if self._session.get_providers()[0] != wanted[0]:  # it falls back with a warning only
            raise pb_utils.TritonModelException(f"{path} does not run on {wanted[0]}: see the lines above in this log")
        self._refuse_other_contract(path)
        self._session.run(self._outputs, self._first(config))
        self._pace = None
        pace_file = os.environ.get("TREFOIL_PACE_FILE", "")
        if pace_file:
            try:
                self._pace = Pace(pace_file, args["model_name"], version, args["model_instance_name"])
            except PaceError as error:
                raise pb_utils.TritonModelException(str(error)) from error

    def _first(self, config):
        """The arrays of a first request: zeros; open dimensions by the contract's parameter, else 1."""
        first = {}
        for tensor in config["input"]:
            dtype, dims = self._inputs[tensor["name"]]
            given = config.get("parameters", {}).get(PROBE_SHAPE + tensor["name"])
            sizes = given["string_value"].split(",") if given else []
            opened = iter([int(size) for size, dim in zip(sizes, tensor["dims"], strict=False) if int(dim) < 0])
            dims = [next(opened, 1) if size < 0 else size for size in dims]
            shape = [1, *dims] if self._batch_max else dims
            first[tensor["name"]] = np.full(shape, b"0" if dtype == np.object_ else 0, dtype)
        return first

    def _refuse_other_contract(self, path):
        """Every variant of a family has the same tensors; one that has not would fail at its first request."""
        have = ({i.name for i in self._session.get_inputs()}, {o.name for o in self._session.get_outputs()})
        want = (set(self._inputs), set(self._outputs))
        if have[0] != want[0] or not want[1] <= have[1]:
            raise pb_utils.TritonModelException(f"{path} has tensors {have}, the family's config.pbtxt says {want}")

    def execute(self, requests):
        """Answer the requests as one batch, or one by one where the model does not batch. A request that cannot be run
        gets its error; the others are answered."""
        responses = [None] * len(requests)
        batch = []
        for index, request in enumerate(requests):
            try:
                batch.append((index, self._read(request)))
            except ValueError as error:
                responses[index] = pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))
        for part in [batch] if self._batch_max else [[one] for one in batch]:
            self._answer(part, responses)
        return responses

    def _answer(self, batch, responses):
        """Run one batch and put its responses where its requests stood."""
        if not batch:
            return
        arrays = batch[0][1]
        if len(batch) > 1:
            arrays = {name: np.concatenate([own[name] for _, own in batch]) for name in self._inputs}
        try:
            outputs = self._run(arrays)
        except (*self._run_errors, PaceError) as error:
            failure = pb_utils.TritonError(f"{type(error).__name__}: {error}")
            for index, _ in batch:
                responses[index] = pb_utils.InferenceResponse(error=failure)
        else:
            self._split(batch, outputs, responses)

    def _read(self, request):
        """Return the request's arrays by input name. Raises ValueError saying what is wrong with them."""
        arrays = {}
        for name, (dtype, dims) in self._inputs.items():
            tensor = pb_utils.get_input_tensor_by_name(request, name)
            if tensor is None:
                raise ValueError(f"input {name} is missing")
            array = tensor.as_numpy()
            own = array.shape[1:] if self._batch_max else array.shape
            fits = len(own) == len(dims) and all(want in (-1, have) for want, have in zip(dims, own, strict=True))
            if self._batch_max:
                fits = fits and 1 <= array.shape[0] <= self._batch_max
            if array.dtype != dtype or not fits:
                wanted = [*([f"1..{self._batch_max}"] if self._batch_max else []), *dims]
                raise ValueError(
                    f"input {name} is {array.dtype}{list(array.shape)}; expected {dtype}[{', '.join(map(str, wanted))}]"
                )
            arrays[name] = array
        if self._batch_max and len({len(a) for a in arrays.values()}) > 1:
            raise ValueError(f"inputs differ in their number of items: { {n: len(a) for n, a in arrays.items()} }")
        return arrays

    def _run(self, arrays):
        """Infer for real; on a simulated slice fill the rest of the service time."""
        if self._pace is None:
            return self._session.run(self._outputs, arrays)
        items = len(next(iter(arrays.values()))) if self._batch_max else 1
        self._pace.start(items)
        try:
            return self._session.run(self._outputs, arrays)
        finally:
            self._pace.finish(items)

    def _split(self, batch, outputs, responses):
        """Give each request its rows."""
        start = 0
        for index, arrays in batch:
            end = start + (len(next(iter(arrays.values()))) if self._batch_max else 0)
            tensors = [
                pb_utils.Tensor(name, np.ascontiguousarray(output[start:end] if self._batch_max else output))
                for name, output in zip(self._outputs, outputs, strict=True)
            ]
            responses[index] = pb_utils.InferenceResponse(output_tensors=tensors)
            start = end
