"""The language model of the stand-in for Triton's vLLM backend: arithmetic, so that tests can tell each answer.

Token i of an answer is word `crc32(model, prompt, choice, i)` of WORDS, with a space before it; answers end by
themselves after 1 to 2 `tokens_mean` - 1 tokens, the last of which is the end token, without text. A prompt's tokens
are its words, each with the space before it. Sampling parameters are judged as vLLM 0.32 does
(tests/engines/test_stand_in.py).
"""

import math
import re
import zlib

SAMPLING = {
    "n": 1, "max_tokens": 16, "min_tokens": 0, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None,
    "stop": None, "ignore_eos": False, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
    "logprobs": None, "include_stop_str_in_output": False, "skip_special_tokens": True, "lora_name": None,
    "prompt_logprobs": None, "stop_token_ids": None, "bad_words": None, "logit_bias": None, "allowed_token_ids": None,
    "spaces_between_special_tokens": True, "detokenize": True,
}  # fmt: skip
"""Keys that change something in an answer: n, max_tokens, min_tokens, stop, include_stop_str_in_output, ignore_eos,
logprobs."""
WHOLE = ("seed", "logprobs", "prompt_logprobs")
WORDS = ("a", "to", "of", "in", "is", "it", "on", "as", "by", "we", "or", "an", "so", "up", "if", "no")
PIECE = re.compile(r"\s*\S+|\s+\Z")


def judged(given):
    """Sampling parameters with defaults; None: the backend could make no SamplingParams of these."""
    try:
        kinds = {n: int if n in WHOLE else type(default) for n, default in SAMPLING.items()}
        made = SAMPLING | {n: v if kinds[n] is type(None) else kinds[n](v) for n, v in given.items()}
        stop = made["stop"]
        made["stop"] = [stop] if isinstance(stop, str) else list(stop or ())
        return made if _valid(made, made["stop"] if stop is None or isinstance(stop, (str, list)) else [""]) else None
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _valid(made, stops):
    logprobs = made["logprobs"], made["prompt_logprobs"]
    return (
        1 <= made["n"] <= (1 if made["temperature"] < 1e-5 else 16384)  # greedy choices would be equal
        and 0 <= made["temperature"] <= 2
        and 0 < made["top_p"] <= 1
        and made["top_k"] >= -1
        and 0 <= made["min_p"] <= 1
        and all(-2 <= made[name] <= 2 for name in ("presence_penalty", "frequency_penalty"))
        and 0 < made["repetition_penalty"] < math.inf
        and 0 <= made["min_tokens"] <= made["max_tokens"]
        and made["max_tokens"] >= 1
        and all(count is None or count >= -1 for count in logprobs)
        and all(len(stop) for stop in stops)
        and (made["detokenize"] or not stops)
    )


def pieces(text):
    """Tokens of a text."""
    return PIECE.findall(text)


def token(model, prompt, choice, index):
    """Token of an answer."""
    return " " + WORDS[zlib.crc32(f"{model}\0{prompt}\0{choice}\0{index}".encode()) % len(WORDS)]


def natural_length(model, prompt, choice, tokens_mean):
    """Tokens after which an answer ends by itself: 1 to 2 tokens_mean - 1."""
    return 1 + zlib.crc32(f"{model}\0{prompt}\0{choice}\0end".encode()) % max(1, 2 * tokens_mean - 1)


class Choice:
    """One answer under way."""

    def __init__(self, model, prompt, index, sampling, room, tokens_mean):
        self.model, self.prompt, self.index = model, prompt, index
        self.limit = min(sampling["max_tokens"], room)
        self.least = sampling["min_tokens"]
        ends = max(natural_length(model, prompt, index, tokens_mean), self.least + 1)
        self.ends = self.limit + 1 if sampling["ignore_eos"] else ends
        self.stops, self.keeps_stop = sampling["stop"], sampling["include_stop_str_in_output"]
        self.text, self.tokens, self.reason = "", 0, None

    @property
    def shown(self):
        """Text that a stream has so far: what may begin a stop sequence is kept back until the end."""
        kept = 0 if self.keeps_stop or self.reason else max(map(len, self.stops), default=1) - 1
        return self.text[: max(0, len(self.text) - kept)]

    def step(self):
        """One more token."""
        if self.reason is not None:
            return
        self.tokens += 1
        if self.tokens == self.ends:
            self.reason = "stop"
            return
        before = len(self.text)
        self.text += token(self.model, self.prompt, self.index, self.tokens - 1)
        # A stop sequence may begin before `min_tokens`, but must end after it.
        found = [
            (at, stop)
            for stop in self.stops
            if self.tokens > self.least and (at := self.text.find(stop, max(0, before - len(stop) + 1))) >= 0
        ]
        if found:
            at, stop = min(found, key=lambda one: one[0] + len(one[1]))  # the one that is complete first
            self.text, self.reason = self.text[: at + len(stop) * self.keeps_stop], "stop"
        elif self.tokens >= self.limit:
            self.reason = "length"


def answer(model, prompt, sampling=None, *, tokens_mean=12, max_model_len=2048):
    """All choices of a request, as the engine would give them alone: (text, tokens, finish reason) of each."""
    given = judged(sampling or {})
    found = []
    for index in range(given["n"]):
        choice = Choice(model, prompt, index, given, max_model_len - len(pieces(prompt)), tokens_mean)
        while choice.reason is None:
            choice.step()
        found.append((choice.text, choice.tokens, choice.reason))
    return found
