"""Stand-in for Triton's vLLM backend, for tests: the same model.json, tensors, flags and errors, another model.

Triton takes this folder as the Python-based backend `vllm`. Its language model is arithmetic: equal requests have equal
answers, which `language.answer` tells to tests. Contract: github.com/triton-inference-server/vllm_backend, 8de0c148.

As vLLM's, the engine has a separate process unless metrics are reported; it outlives a killed stub.
Continuous batching: a step gives each of at most `max_num_seqs` requests its next token; further ones wait. Differences
from vLLM: no weights, no LoRA, no images, no embeddings; temperature changes nothing; logprobs are made up. Knobs that
vLLM has no key for stand in its `hf_overrides`: `step_ms` (time of a step), `tokens_mean` (of answers that end).
"""

import json
import os
import subprocess
import threading
import time
from collections import deque

import numpy as np
import triton_python_backend_utils as pb_utils
from language import Choice, judged, pieces

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
ENGINE_KEYS = frozenset(
    {
        "model", "tokenizer", "dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "seed", "task",
        "gpu_memory_utilization", "enforce_eager", "tensor_parallel_size", "pipeline_parallel_size", "enable_lora",
        "disable_log_stats", "disable_log_requests", "enable_prefix_caching", "quantization", "served_model_name",
        "trust_remote_code", "hf_overrides",
    }
)  # fmt: skip
RETURNS = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")
LOGPROB = -0.5
WAKE_S = 0.05


class Request:
    """One request of Triton."""

    def __init__(self, request, engine):
        self.sender = request.get_response_sender()
        self.cancelled = False
        self.prompt = self._tensor(request, "text_input").decode()
        self.stream = bool(self._tensor(request, "stream", False))
        excluded = self._tensor(request, "exclude_input_in_output")
        self.prepends = not self.stream if excluded is None else not excluded
        if self.prepends and self.stream:
            raise ValueError("When streaming, `exclude_input_in_output` = False is not allowed.")
        self.returns = {name for name in RETURNS if self._tensor(request, f"return_{name}", False)}
        sampling = judged(self.parameters(request))
        if sampling is None:
            raise AttributeError("'NoneType' object has no attribute 'lora_name'")
        self.logprobs = sampling["logprobs"] is not None
        self.prompt_tokens = len(pieces(self.prompt))
        most = engine["max_model_len"]
        room = most - self.prompt_tokens
        if not self.prompt_tokens:
            raise ValueError("The decoder prompt cannot be empty")
        if room < 1:
            more, needed = "", "text tokens"
            if not room:
                more = "plus the number of requested output tokens (at least 1) "
                needed = "text tokens (prompt + requested output tokens)"
            raise ValueError(
                f"The decoder prompt (length {self.prompt_tokens}) {more}is longer than the maximum model length of "
                f"{most}. Make sure that `max_model_len` is no smaller than the number of {needed}."
            )
        self.choices = [
            Choice(engine["model"], self.prompt, index, sampling, room, engine["tokens_mean"])
            for index in range(sampling["n"])
        ]
        self.sent = [(0, 0)] * len(self.choices)  # characters, tokens

    @staticmethod
    def _tensor(request, name, default=None):
        found = pb_utils.get_input_tensor_by_name(request, name)
        return default if found is None else found.as_numpy().reshape(-1)[0]

    @classmethod
    def parameters(cls, request):
        """Sampling parameters as given: by their tensor, else the request's own."""
        given = cls._tensor(request, "sampling_parameters")
        return json.loads(given.decode() if given is not None else request.parameters())

    @property
    def finished(self):
        """Whether no token follows."""
        return all(choice.reason is not None for choice in self.choices)

    def response(self, prepend=False):
        """What is new since the last one."""
        before, self.sent = self.sent, [(len(choice.shown), choice.tokens) for choice in self.choices]
        head = self.prompt if prepend else ""
        both = list(zip(self.choices, before, strict=True))
        news = [choice.tokens - tokens for choice, (_, tokens) in both]
        made = {"text_output": np.array([(head + c.shown[at:]).encode() for c, (at, _) in both], np.object_)}
        if "finish_reason" in self.returns:
            made["finish_reason"] = np.array([str(c.reason) for c in self.choices], np.object_)  # "None" on the way
        if "cumulative_logprob" in self.returns:
            made["cumulative_logprob"] = np.array([LOGPROB * c.tokens for c in self.choices], np.float32)
        if "logprobs" in self.returns:
            one = {"0": {"logprob": LOGPROB, "rank": 1, "decoded_token": "?"}}
            texts = [json.dumps([one] * new) if self.logprobs else "null" for new in news]
            made["logprobs"] = np.array([text.encode() for text in texts], np.object_)
        if "num_input_tokens" in self.returns:
            made["num_input_tokens"] = np.asarray(self.prompt_tokens, np.uint32)
        if "num_output_tokens" in self.returns:
            made["num_output_tokens"] = np.array(news, np.uint32)
        tensors = [pb_utils.Tensor(name, array) for name, array in made.items()]
        return pb_utils.InferenceResponse(output_tensors=tensors)


class TritonPythonModel:
    """One engine."""

    @classmethod
    def auto_complete_config(cls, config):
        """As the backend: tensors, decoupled, no batching. A slice of Trefoil never asks for it."""
        text, flag = {"data_type": "TYPE_STRING", "dims": [1]}, {"data_type": "TYPE_BOOL", "dims": [1]}
        config.add_input({"name": "text_input", **text})
        for name in ("stream", "exclude_input_in_output", *(f"return_{name}" for name in RETURNS)):
            config.add_input({"name": name, "optional": True, **flag})
        config.add_input({"name": "sampling_parameters", "optional": True, **text})
        kinds = {"cumulative_logprob": "FP32", "num_input_tokens": "UINT32", "num_output_tokens": "UINT32"}
        for name in ("text_output", *RETURNS):
            config.add_output({"name": name, "data_type": f"TYPE_{kinds.get(name, 'STRING')}", "dims": [-1]})
        config.set_model_transaction_policy({"decoupled": True})
        config.set_max_batch_size(0)
        return config

    def initialize(self, args):
        """Read model.json and start the engine."""
        config = json.loads(args["model_config"])
        assert pb_utils.using_decoupled_model_transaction_policy(config), (
            "vLLM Triton backend must be configured to use decoupled model transaction policy"
        )
        path = os.path.join(pb_utils.get_model_dir(), "model.json")
        assert os.path.isfile(path), f"'model.json' containing vllm engine args must be provided in '{path[:-11]}'"
        with open(path) as file:
            given = json.load(file)
        parallel = int(given.get("tensor_parallel_size", 1)) * int(given.get("pipeline_parallel_size", 1))
        if args["model_instance_kind"] == "GPU" and parallel > 1:
            raise ValueError(
                "KIND_GPU is currently for single-GPU models, please specify KIND_MODEL in the model's config.pbtxt "
                "for multi-GPU models"
            )
        unknown = sorted(set(given) - ENGINE_KEYS)
        if unknown:
            raise TypeError(f"AsyncEngineArgs.__init__() got an unexpected keyword argument '{unknown[0]}'")
        own = given.get("hf_overrides", {})
        self._engine = {
            "model": given["model"], "max_model_len": int(given.get("max_model_len", 2048)),
            "max_num_seqs": int(given.get("max_num_seqs", 256)), "tokens_mean": int(own.get("tokens_mean", 12)),
        }  # fmt: skip
        self._step_s = float(own.get("step_ms", 1.0)) / 1e3
        reports = config.get("parameters", {}).get("REPORT_CUSTOM_METRICS", {}).get("string_value", "").lower()
        labels = {"model": args["model_name"], "version": args["model_version"]}
        self._counts, self._core = {}, None
        if reports == "true" and not given.get("disable_log_stats", False):
            for name in ("prompt", "generation"):
                made = pb_utils.MetricFamily(
                    name=f"vllm:{name}_tokens_total", description=f"Number of {name} tokens processed.",
                    kind=pb_utils.MetricFamily.COUNTER,
                )  # fmt: skip
                self._counts[name] = made, made.Metric(labels=labels)  # it lives as long as its family
        else:
            self._core = subprocess.Popen(["sleep", "86400"])
        self._waiting, self._running = deque(), []
        self._news, self._closing = threading.Condition(), False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def execute(self, requests):
        """Take the requests in; the engine answers them."""
        for request in requests:
            if Request.parameters(request).pop("lora_name", None) is not None:  # no JSON: all of the batch fail
                self._refuse(request.get_response_sender(), "LoRA feature is not enabled.", text=None)
                continue
            try:
                taken = Request(request, self._engine)
            except Exception as error:  # noqa: BLE001 - as the backend does
                self._refuse(request.get_response_sender(), f"Error generating stream: {error}")
                continue
            self._count("prompt", taken.prompt_tokens)
            with self._news:
                self._waiting.append(taken)
                self._news.notify()
        return None

    def finalize(self):
        """Answer what is under way, then end."""
        with self._news:
            self._closing = True
            self._news.notify()
        self._thread.join()
        if self._core is not None:
            self._core.kill()
            self._core.wait()

    @staticmethod
    def _refuse(sender, why, text="N/A"):
        tensor = pb_utils.Tensor("text_output", np.array([(why if text is None else text).encode()], np.object_))
        sender.send(pb_utils.InferenceResponse(output_tensors=[tensor], error=pb_utils.TritonError(why)), flags=FINAL)

    def _count(self, name, tokens):
        if name in self._counts:
            self._counts[name][1].increment(tokens)

    def _run(self):
        while True:
            with self._news:
                while not (self._closing or self._waiting or self._running):
                    self._news.wait(WAKE_S)
                if self._closing and not (self._waiting or self._running):
                    return
            while self._waiting and len(self._running) < self._engine["max_num_seqs"]:
                self._running.append(self._waiting.popleft())
            time.sleep(self._step_s)
            self._running = [request for request in self._running if self._step(request)]

    def _step(self, request):
        """Next token of a request; False: it is over. A stream's cancellation is noticed after the next response."""
        if request.cancelled if request.stream else request.sender.is_cancelled():
            if request.stream:
                error = pb_utils.TritonError("Request was cancelled", pb_utils.TritonError.CANCELLED)
                request.sender.send(pb_utils.InferenceResponse(error=error), flags=FINAL)
            else:
                request.sender.send(request.response(request.prepends), flags=FINAL)
            return False
        before = sum(choice.tokens for choice in request.choices)
        for choice in request.choices:
            choice.step()
        self._count("generation", sum(choice.tokens for choice in request.choices) - before)
        if not request.finished:
            if request.stream:
                request.sender.send(request.response())
                request.cancelled = request.sender.is_cancelled()
            return True
        request.sender.send(request.response(request.prepends and not request.stream), flags=FINAL)
        return False
