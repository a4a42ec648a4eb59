"""The Triton python-backend model of families whose variants are python models: runs variant.py of its version.

Beside it in every version folder lie variant.py (the variant's TritonPythonModel, as imported) and a link to model.py
(pace and checks). On a simulated slice each batch of execute keeps the slice's pace, as model.py's batches do.

A decoupled variant answers by streams from threads of its own. The time in which at least one is open is counted as
decode time, by which the agent attributes energy. On a simulated slice all open streams share iterations, as in
decoder.py: each response waits for as many as it has tokens (output num_output_tokens, else 1; an answer that comes
whole and does not say has the contract's tokens_mean).
"""

import importlib.util
import inspect
import json
import os
import threading
import time
from pathlib import Path

import triton_python_backend_utils as pb_utils
from model import DecodeSeconds, Pace, PaceError, TokenPace, refuse_wrong_numpy

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
TOKENS = "num_output_tokens"


class Streams:
    """Streams that are open, the time in which any was, and the iterations of a simulated slice."""

    def __init__(self, args, config, pace_file):
        """Count from now on. Raises PaceError, ValueError or KeyError as TokenPace."""
        self._seconds, self._open, self._marked_ns = DecodeSeconds(args), 0, 0
        self._news = threading.Condition()
        self.iterations, self._failure = 0, ""
        self.pace = TokenPace(pace_file, args, config) if pace_file else None
        if self.pace is not None:
            self.tokens_mean = float(config["parameters"]["tokens_mean"]["string_value"])
            threading.Thread(target=self._iterate, name="pace", daemon=True).start()

    def enter(self):
        """One more is open."""
        with self._news:
            self._book()
            self._open += 1
            self._news.notify_all()

    def leave(self):
        """One has ended."""
        with self._news:
            self._book()
            self._open -= 1

    def wait(self, iteration):
        """Wait for the end of an iteration; count the time until now. Raises PaceError."""
        with self._news:
            while self.pace is not None and self.iterations < iteration and not self._failure:
                self._news.wait()
            self._book()
        if self._failure:
            raise PaceError(self._failure)

    def _book(self):
        now_ns = time.monotonic_ns()
        if self._open:
            self._seconds.add(now_ns - self._marked_ns)
        self._marked_ns = now_ns

    def _iterate(self):
        while not self._failure:
            with self._news:
                while not self._open:
                    self._news.wait()
                count = self._open
            try:
                self.pace.start(count)
                self.pace.finish(count)
            except PaceError as error:
                self._failure = str(error)
            with self._news:
                self.iterations += 1
                self._news.notify_all()


class Sender:
    """Sender of a decoupled request's responses, which tells when its stream begins and ends."""

    def __init__(self, sender, streams):
        self._sender, self._streams, self._ended = sender, streams, False
        streams.enter()
        self._at = streams.iterations  # the iteration whose token was sent last
        self._sent = False

    def is_cancelled(self):
        """Whether the client has left."""
        return self._sender.is_cancelled()

    def send(self, response=None, flags=0):
        """Send one response when its tokens are due."""
        if self._ended:
            return
        try:
            if self._streams.pace is not None:
                self._at = max(self._at + self._tokens(response, flags), self._streams.iterations)
            self._streams.wait(self._at)
        except PaceError as error:
            response, flags = pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error))), FINAL
        self._sent = True
        try:
            self._sender.send(response, flags)
        finally:
            if flags & FINAL:
                self.end()

    def end(self):
        """End the stream. Idempotent."""
        if not self._ended:
            self._ended = True
            self._streams.leave()

    def _tokens(self, response, flags):
        if response is None or response.has_error():
            return 0
        for tensor in response.output_tensors():
            if tensor.name() == TOKENS:
                return int(tensor.as_numpy().sum())
        return 1 if self._sent or not flags & FINAL else round(self._streams.tokens_mean)


class Request:
    """A decoupled request, whose sender is ours."""

    def __init__(self, request, streams):
        self._request, self._streams, self.sender = request, streams, None

    def __getattr__(self, name):
        return getattr(self._request, name)

    def get_response_sender(self):
        """The sender of its responses."""
        if self.sender is None:
            self.sender = Sender(self._request.get_response_sender(), self._streams)
        return self.sender


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
        config = json.loads(args["model_config"])
        self._first = config["input"][0]["name"] if int(config.get("max_batch_size", 0)) else ""
        if hasattr(self._variant, "initialize"):
            self._variant.initialize(args)
        self._pace = self._streams = None
        pace_file = os.environ.get("TREFOIL_PACE_FILE", "")
        try:
            if pb_utils.using_decoupled_model_transaction_policy(config):
                self._streams = Streams(args, config, pace_file)
            elif pace_file:
                version = int(args["model_version"])
                self._pace = Pace(pace_file, args["model_name"], version, args["model_instance_name"])
        except (PaceError, ValueError, KeyError) as error:
            raise pb_utils.TritonModelException(f"{path}: {type(error).__name__}: {error}") from error

    def execute(self, requests):
        """Have the variant answer, maybe by a coroutine; on a simulated slice fill the rest of the service time."""
        if self._streams is not None:
            return self._take_in([Request(request, self._streams) for request in requests])
        if self._pace is None:
            return self._variant.execute(requests)
        items = sum(self._items(request) for request in requests)
        try:
            self._pace.start(items)
        except PaceError as error:
            failure = pb_utils.TritonError(str(error))
            return [pb_utils.InferenceResponse(error=failure) for _ in requests]
        answered = None
        try:
            answered = self._variant.execute(requests)
            return self._awaited(answered, items) if inspect.iscoroutine(answered) else answered
        finally:
            if not inspect.iscoroutine(answered):
                self._pace.finish(items)

    def _take_in(self, requests):
        try:
            return self._variant.execute(requests)
        except Exception:  # Triton fails them all
            for request in requests:
                if request.sender is not None:
                    request.sender.end()
            raise

    async def _awaited(self, answered, items):
        try:
            return await answered
        finally:
            self._pace.finish(items)

    def _items(self, request):
        tensor = pb_utils.get_input_tensor_by_name(request, self._first) if self._first else None
        return tensor.shape()[0] if tensor is not None else 1

    def finalize(self):
        """Let the variant end."""
        if hasattr(self._variant, "finalize"):
            self._variant.finalize()
