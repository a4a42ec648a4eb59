"""Greedy decoding of several streams by one graph: each step gives every stream its next token.

The graph is that of a generative family (`_training/train_pydoc.py` makes it): IDS and POSITIONS int64 [B,T], MASK
float32 [B,1,T,P+T], PAST_KEY_i [B,H,D,P] and PAST_VALUE_i [B,H,P,D] -> LOGITS float32 [B,V] of the last token, KEY_i
and VALUE_i of the T new ones. Its metadata hold the vocabulary and the limits. Rows do not look at each other, so a
stream's tokens are those of the model run alone; a place that a stream leaves is filled by the last one.
"""

import json
from pathlib import Path

import numpy as np
import onnxruntime


class Refused(ValueError):
    """A prompt that cannot be answered; the message names field, value and remedy."""


class Stream:
    """One prompt and how far its answer is."""

    __slots__ = ("ended", "ids", "length", "limit", "made", "token")

    def __init__(self, ids, limit):
        self.ids, self.limit = ids, limit
        self.length = self.made = 0  # positions in the cache; tokens so far
        self.token = -1  # the newest
        self.ended = False  # the network chose to end instead of one more token

    @property
    def complete(self):
        """Whether no token follows."""
        return self.ended or self.made >= self.limit


class Decoder:
    """The graph, and the caches of up to `rows` streams."""

    def __init__(self, path, rows, options=None, providers=("CPUExecutionProvider",)):
        """Load the graph. Raises ValueError when its metadata are not those of a generative family."""
        if options is None:
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(str(path), options, providers=list(providers))
        told = self.session.get_modelmeta().custom_metadata_map
        missing = {"vocabulary", "border", "context", "prompt_max"} - set(told)
        if missing:
            raise ValueError(f"{Path(path)} is not a generative model: its metadata lack {', '.join(sorted(missing))}")
        self.pieces = [bytes.fromhex(piece) for piece in json.loads(told["vocabulary"])]
        self.border = int(told["border"])
        self.context, self.prompt_max = int(told["context"]), int(told["prompt_max"])
        self.cut = self.cutter(self.pieces)
        self.rows, self.streams = rows, []
        past = [i for i in self.session.get_inputs() if i.name.startswith("PAST_")]
        self._past = {i.name: self._blank(rows, i.shape, self.context) for i in past}
        self._nothing = {i.name: self._blank(1, i.shape, 0) for i in past}
        self._fresh = [name.removeprefix("PAST_") for name in self._past]
        self._mask = np.full((rows, 1, 1, self.context + 1), -np.inf, np.float32)
        self._mask[..., -1] = 0.0

    @staticmethod
    def _blank(rows, shape, positions):
        return np.zeros([rows, *(d if isinstance(d, int) else positions for d in shape[1:])], np.float32)

    @staticmethod
    def cutter(pieces):
        """The function that cuts bytes into the numbers of the longest pieces, from the left."""
        numbers = {piece: i for i, piece in enumerate(pieces) if piece}
        longest = max(map(len, numbers))

        def cut(text):
            ids, at = [], 0
            while at < len(text):
                size = next(n for n in range(min(longest, len(text) - at), 0, -1) if text[at : at + n] in numbers)
                ids.append(numbers[text[at : at + size]])
                at += size
            return ids

        return cut

    def admit(self, prompt, max_tokens):
        """A stream for a prompt [bytes]; `max_tokens` None: as many as fit. Raises Refused."""
        try:
            prompt.decode()
        except UnicodeDecodeError as error:
            raise Refused(f"PROMPT is not UTF-8 text: byte {error.start} is {prompt[error.start]:#04x}") from error
        if not prompt.strip():
            raise Refused("PROMPT is empty. Remedy: send the text to go on from, such as 'def parse(text):'")
        if len(prompt) > self.prompt_max * max(map(len, self.pieces)):
            raise Refused(
                f"PROMPT has {len(prompt)} bytes, more than {self.prompt_max} tokens can be. Remedy: shorten it"
            )
        ids = self.cut(prompt)
        if len(ids) > self.prompt_max:
            raise Refused(f"PROMPT has {len(ids)} tokens, at most {self.prompt_max} are taken. Remedy: shorten it")
        room = self.context - len(ids) - 1
        if max_tokens is not None and not 1 <= max_tokens <= self.context:
            raise Refused(f"MAX_TOKENS is {max_tokens}. Remedy: 1 to {self.context}, or leave it out")
        return Stream([*ids, self.border], room if max_tokens is None else min(max_tokens, room))

    def join(self, stream):
        """Take a stream in and make its first token; there must be room. Returns its logits [1,V]."""
        row, count = len(self.streams), len(stream.ids)
        feeds = {
            "IDS": np.array([stream.ids], np.int64),
            "POSITIONS": np.arange(count, dtype=np.int64)[None],
            "MASK": np.triu(np.full((count, count), -np.inf, np.float32), 1)[None, None],
            **self._nothing,
        }
        logits, *fresh = self.session.run(["LOGITS", *self._fresh], feeds)
        self._keep(row, 0, fresh, 0)
        self._mask[row, ..., :count] = 0.0
        stream.length = count
        self.streams.append(stream)
        self._give(stream, logits[0])
        return logits

    def step(self):
        """One more token for every stream. Returns their logits [B,V], in the order of `streams`."""
        count = len(self.streams)
        feeds = {
            "IDS": np.array([[s.token] for s in self.streams], np.int64),
            "POSITIONS": np.array([[s.length] for s in self.streams], np.int64),
            "MASK": self._mask[:count],
            **{name: array[:count] for name, array in self._past.items()},
        }
        logits, *fresh = self.session.run(["LOGITS", *self._fresh], feeds)
        for row, stream in enumerate(self.streams):
            self._keep(row, stream.length, fresh, row)
            self._mask[row, ..., stream.length] = 0.0
            stream.length += 1
            self._give(stream, logits[row])
        return logits

    def drop(self, stream):
        """Free a stream's place, if it has one: the last one takes it."""
        if stream not in self.streams:
            return
        row = self.streams.index(stream)
        last = self.streams.pop()
        if last is not stream:
            self.streams[row] = last
            for array in self._past.values():
                array[row] = array[len(self.streams)]
            self._mask[row] = self._mask[len(self.streams)]
        self._mask[len(self.streams), ..., :-1] = -np.inf

    def answer(self, prompt, max_tokens=None):
        """All tokens of a prompt [bytes], this stream alone: a list of bytes."""
        stream, tokens = self.admit(prompt, max_tokens), []
        self.join(stream)
        while not stream.ended:
            tokens.append(self.pieces[stream.token])
            if stream.complete:
                break
            self.step()
        self.drop(stream)
        return tokens

    def _give(self, stream, logits):
        """The likeliest token."""
        stream.token = int(np.argmax(logits))
        stream.ended = not self.pieces[stream.token]
        stream.made += not stream.ended

    def _keep(self, row, at, fresh, index):
        """Put the new keys [H,D,T] and values [H,T,D] of a stream where they belong."""
        for (name, array), new in zip(self._past.items(), fresh, strict=True):
            if name.startswith("PAST_KEY"):
                array[row, :, :, at : at + new.shape[3]] = new[index]
            else:
                array[row, :, at : at + new.shape[2]] = new[index]
