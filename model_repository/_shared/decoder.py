"""The Triton python-backend model of generative families: a stream of tokens for each prompt, several at once.

Beside it in every version folder lie model.onnx, and links to decoding.py (the decoder itself) and model.py (pace and
checks). It runs inside the python stub of Triton, as model.py does. A request is PROMPT (one UTF-8 text) and maybe
MAX_TOKENS; its answer one response a token (TOKEN: the token's bytes), then the empty final one. Decoding is greedy.

Continuous batching: an iteration gives every stream its next token, prompts that arrived meanwhile their first one.
Streams join and leave between two iterations; one that was cancelled leaves before the next. At most max_batch_size
have a place, WAITING_MAX more wait, further ones are refused in Triton's words for a full queue.

Pace on a simulated slice: the profile's row of a batch of b is the time of an answer of average length (parameter
`tokens_mean`) beside b - 1 others, so an iteration with b streams takes that time over tokens_mean + 1, the last
iteration being the one that finds the end. It is not noisy: that answers differ in length is what varies.
Triton counts the time in which `execute` takes requests in, next to nothing. What decoding takes is the counter
trefoil_decode_seconds_total{model,version,instance,loaded} of Triton's metrics page, by which the power agent
attributes energy. `loaded` tells the counters of one load from those of the next, which Triton keeps side by side.
An error that is the request's own fault begins with "INVALID_ARGUMENT: ", for a stream's errors have no code.
"""

import json
import os
import threading
import time
import traceback
from collections import deque
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils
from decoding import Decoder, Refused
from model import DecodeSeconds, PaceError, TokenPace, providers, refuse_wrong_numpy

WAITING_MAX = 256
JOINING_MAX = 2  # an iteration: a prompt is more expensive than a token, and the other streams wait for it
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
WARM_UP = b"def main():"


class Client:
    """Who gets a stream's tokens."""

    def __init__(self, stream, sender):
        self.stream, self._sender = stream, sender

    def gone(self):
        """Whether the request was cancelled."""
        return self._sender.is_cancelled()

    def token(self, piece):
        """Send one token."""
        tensor = pb_utils.Tensor("TOKEN", np.array([[piece]], dtype=np.object_))
        self._sender.send(pb_utils.InferenceResponse(output_tensors=[tensor]))

    def end(self, why=""):
        """End the request, with an error if there is a reason."""
        if why:
            self._sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(why)))
        self._sender.send(flags=FINAL)


class TritonPythonModel:
    """One version of one generative family."""

    def initialize(self, args):
        """Load the graph, decode a little, open the pace file where there is one, and begin to decode."""
        refuse_wrong_numpy()
        import onnxruntime
        from onnxruntime.capi import onnxruntime_pybind11_state as errors

        self._errors = (errors.Fail, errors.InvalidArgument, errors.RuntimeException, errors.NotImplemented, PaceError)
        config = json.loads(args["model_config"])
        version = int(args["model_version"])
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = max(1, int(os.environ.get("OMP_NUM_THREADS", "1")))
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        path = Path(args["model_repository"]) / str(version) / "model.onnx"
        self._pace = None
        try:
            self._decoder = Decoder(path, int(config["max_batch_size"]), options, providers(onnxruntime))
            if pace_file := os.environ.get("TREFOIL_PACE_FILE", ""):
                self._pace = TokenPace(pace_file, args, config)
        except (ValueError, KeyError, PaceError) as error:
            raise pb_utils.TritonModelException(f"{path}: {type(error).__name__}: {error}") from error
        self._decoder.answer(WARM_UP, 2)
        self._decode_s = DecodeSeconds(args)
        self._waiting, self._clients = deque(), []
        self._news, self._closing = threading.Condition(), False
        self._thread = threading.Thread(target=self._decode, name="decode", daemon=True)
        self._thread.start()

    def execute(self, requests):
        """Take the requests in. Their answers come from the decoding thread."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                client = Client(self._decoder.admit(*self._read(request)), sender)
            except Refused as error:
                Client(None, sender).end(f"INVALID_ARGUMENT: {error}")
                continue
            with self._news:
                full = len(self._waiting) >= WAITING_MAX
                if not full:
                    self._waiting.append(client)
                    self._news.notify()
            if full:
                client.end(f"Exceeds maximum queue size: {WAITING_MAX} prompts wait")
        return None

    def finalize(self):
        """End what is still under way, which Triton only does to a model that it gives up."""
        with self._news:
            self._closing = True
            self._news.notify()
        self._thread.join()
        for client in (*self._clients, *self._waiting):
            client.end("this model is being unloaded")

    @staticmethod
    def _read(request):
        """Prompt [bytes] and most tokens of a request. Raises Refused."""
        prompt = pb_utils.get_input_tensor_by_name(request, "PROMPT")
        texts = prompt.as_numpy().reshape(-1) if prompt is not None else ()
        if len(texts) != 1:
            raise Refused(f"PROMPT has {len(texts)} texts. Remedy: one a request")
        most = pb_utils.get_input_tensor_by_name(request, "MAX_TOKENS")
        if most is None:
            return texts[0], None
        numbers = most.as_numpy().reshape(-1)
        if len(numbers) != 1:
            raise Refused(f"MAX_TOKENS has {len(numbers)} numbers. Remedy: one a request, or leave it out")
        return texts[0], int(numbers[0])

    def _decode(self):
        """Iterate until closed. Any error but one of the graph is a bug: the agent notices and restarts a dead stub, a
        thread that is gone would let every request hang."""
        try:
            while self._gather():
                self._iterate()
        finally:
            if not self._closing:
                traceback.print_exc()
                os._exit(1)

    def _gather(self):
        """Wait for work; let go of the cancelled. False: the model is being closed."""
        with self._news:
            while not (self._closing or self._waiting or self._clients):
                self._news.wait()
            if self._closing:
                return False
        for client in [client for client in self._clients if client.gone()]:
            self._leave(client)
        return True

    def _iterate(self):
        """One token for each stream, and for as many new ones as there is room for."""
        joining = []
        while self._waiting and len(joining) < min(JOINING_MAX, self._decoder.rows - len(self._clients)):
            client = self._waiting.popleft()
            if client.gone():
                client.end()
            else:
                joining.append(client)
        if not (joining or self._clients):
            return
        began_ns = time.monotonic_ns()
        try:
            self._make_tokens(joining)
        except self._errors as error:
            for client in dict.fromkeys((*self._clients, *joining)):
                self._leave(client, f"{type(error).__name__}: {error}")
            return
        finally:
            self._decode_s.add(time.monotonic_ns() - began_ns)
        for client in tuple(self._clients):
            if not client.stream.ended:
                client.token(self._decoder.pieces[client.stream.token])
            if client.stream.complete:
                self._leave(client)

    def _make_tokens(self, joining):
        count = len(self._clients) + len(joining)
        if self._pace is not None:
            self._pace.start(count)
        try:
            if self._clients:
                self._decoder.step()
            for client in joining:
                self._decoder.join(client.stream)
                self._clients.append(client)
        finally:
            if self._pace is not None:
                self._pace.finish(count)

    def _leave(self, client, why=""):
        """Free a place and end its request."""
        if client in self._clients:
            self._clients.remove(client)
        self._decoder.drop(client.stream)
        client.end(why)
