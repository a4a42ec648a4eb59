"""Text of an answer whose tokens are bytes: whole letters only, up to the first stop sequence. Pure."""

import codecs
from collections.abc import Sequence


class AnswerText:
    """Text of one answer. It keeps back what may begin a stop sequence or a letter, until further bytes decide. The
    text does not depend on how the bytes are cut."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stopped = False
        """Whether a stop sequence was found: nothing follows."""
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def add(self, data: bytes, may_stop: bool = True) -> str:
        """Text that these bytes make certain. `may_stop`: whether a stop sequence that is complete now counts."""
        if self.stopped:
            return ""
        text = self._held + self._decoder.decode(data)
        stops = self._stops if may_stop else ()
        found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
        if found:  # the one that was complete first
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        sizes = range(min(self._longest - 1, len(text)), 0, -1)
        held = next((n for n in sizes if any(stop.startswith(text[-n:]) for stop in self._stops)), 0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def end(self) -> str:
        """Text that was kept back, at the end of the answer; half a letter is dropped."""
        held, self._held = self._held, ""
        return held
