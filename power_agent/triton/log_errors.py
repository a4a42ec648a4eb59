"""What a Triton's log says of its failure: its first error since its last start, in its own words."""

import os
import re
from pathlib import Path
from typing import Final

from trefoil.runtime.files import open_regular

LOG_BYTES_MAX: Final = 256 * 2**10  # from the start on: the first error is among them
WORDS_MAX: Final = 400  # characters of an error that are shown
# "2024-06-07T12:00:00Z E 123 server.cc:241] ..." with --log-format=ISO8601, "E0607 12:00:00.123456 123 ..." without
LINE: Final = re.compile(r"(?:\S+Z ([IWEF]) |([IWEF])\d{4} \S+ )\d+ [^\]]*\] ?(.*)")
TRACEBACK: Final = r"\n\nAt:\n"  # before the places in a python model's code, each on a line
ERRORS: Final = ("E", "F")
HARMLESS: Final = "CudaDriverHelper has not been initialized"  # of every start where there is no GPU
TABLE: Final = ("+-", "| ")  # Triton's own, of models and options


def log_size(path: Path) -> int:
    """Bytes of a log; 0: there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def read_first_error(path: Path, from_byte: int) -> str:
    """First error in a log from a byte on; "" for none, or where the log cannot be read."""
    try:
        with open(open_regular(path), "rb") as log:
            if from_byte <= log.seek(0, os.SEEK_END):  # else it was cut meanwhile
                log.seek(from_byte)
            else:
                log.seek(0)
            return first_error(log.read(LOG_BYTES_MAX).decode(errors="replace"))
    except OSError:
        return ""


def first_error(text: str) -> str:
    """First error of a Triton's log; where it has logged none, the last line that is not Triton's: of its loader, or
    a traceback of Python. "" for neither."""
    other = ""
    for line in text.splitlines():
        found = LINE.match(line)
        if found is None:
            other = line.strip() if line.strip() and not line.startswith(TABLE) else other
        elif (found[1] or found[2]) in ERRORS and HARMLESS not in found[3] and (words := _unquoted(found[3])):
            return words[:WORDS_MAX]
    return other[:WORDS_MAX]


def _unquoted(words: str) -> str:
    return words.partition(TRACEBACK)[0].strip().removeprefix('"').removesuffix('"').replace('\\"', '"').strip()
