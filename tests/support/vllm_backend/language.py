"""The language model of the stand-in for Triton's vLLM backend: arithmetic, so that tests can tell each answer.

Token i of an answer is word `crc32(model, prompt, choice, i)` of WORDS, with a space before it; answers end by
themselves after 1 to 2 `tokens_mean` - 1 tokens. A prompt's tokens are its words, each with the space before it.
"""

import re
import zlib

SAMPLING = {
    "n": 1, "max_tokens": 16, "min_tokens": 0, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None,
    "stop": None, "ignore_eos": False, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
    "logprobs": None, "include_stop_str_in_output": False, "skip_special_tokens": True, "lora_name": None,
}  # fmt: skip
WORDS = ("a", "to", "of", "in", "is", "it", "on", "as", "by", "we", "or", "an", "so", "up", "if", "no")
PIECE = re.compile(r"\s*\S+|\s+\Z")


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
        self.limit = min(int(sampling["max_tokens"]), room)
        ends = max(natural_length(model, prompt, index, tokens_mean), int(sampling["min_tokens"]))
        self.ends = self.limit + 1 if sampling["ignore_eos"] else ends
        stop = sampling["stop"]
        self.stops = [stop] if isinstance(stop, str) else list(stop or ())
        self.keeps_stop = bool(sampling["include_stop_str_in_output"])
        self.text, self.tokens, self.reason = "", 0, None

    def step(self):
        """One more token."""
        if self.reason is not None:
            return
        self.text += token(self.model, self.prompt, self.index, self.tokens)
        self.tokens += 1
        found = [(at, stop) for stop in self.stops if (at := self.text.find(stop)) >= 0]
        if found:
            at, stop = min(found)
            self.text, self.reason = self.text[: at + len(stop) * self.keeps_stop], "stop"
        elif self.tokens >= self.ends:
            self.reason = "stop"
        elif self.tokens >= self.limit:
            self.reason = "length"


def answer(model, prompt, sampling=None, *, tokens_mean=12, max_model_len=2048):
    """All choices of a request, as the engine would give them alone: (text, tokens, finish reason) of each."""
    given = SAMPLING | (sampling or {})
    found = []
    for index in range(int(given["n"])):
        choice = Choice(model, prompt, index, given, max_model_len - len(pieces(prompt)), tokens_mean)
        while choice.reason is None:
            choice.step()
        found.append((choice.text, choice.tokens, choice.reason))
    return found
