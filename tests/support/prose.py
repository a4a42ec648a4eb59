"""Sentences of Markdown pages and help texts, as tests of wording count them."""

import re
from collections.abc import Iterator
from typing import Final

WORDS_MAX: Final = 25
AVOIDED: Final = re.compile(
    r"\b(whoever|somebody|anybody|nobody|anew|heed(s|ed)?|beside|thereof|as it is|(come|comes|came) of|made of|"
    r"of (its|their|one's) own|(is|are) let|may be had)\b",
    re.IGNORECASE,
)
"""Words that most readers have to read twice."""
RIDDLES: Final = re.compile(
    r"\b(?:[Ww]hoever|[Ss]omebody|[Aa]nybody|(?<![`(])[Nn]obody(?!`)|anew|heed(?:s|ed)?|thereof|for ever\b(?!y)|"
    r"(?<![Tt]here )(?:is|are) no (?!(?:better|choice|earlier|faster|further|higher|larger|later|less|longer|lower|"
    r"matter|more|need|one|other|reason|room|shorter|slower|smaller|such|way|worse)\b)[a-z])"
)
"""Words of a source's comments, docstrings and messages that name no actor or no thing: "is no file" for "is not a
file". Texts of a program have many words of AVOIDED in another sense; these have one sense."""
FENCE: Final = re.compile(r" *(`{3,})")
ITEM: Final = re.compile(r"^ *(?:[-*]|\d+\.) +")


def sentences(markdown: str) -> Iterator[str]:
    """Sentences outside of code blocks. A code span is one word, a link is its text; headings and cells end one."""
    for block in _blocks(markdown):
        text = re.sub(r"``.+?``|`[^`]*`", "CODE", block)
        text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
        for sentence in re.split(r"(?<=[.!?:])[)\"*_]*\s+", text):
            if sentence.strip():
                yield " ".join(sentence.split())


def words(sentence: str) -> int:
    """Words of a sentence: what has a letter or a digit."""
    return sum(any(sign.isalnum() for sign in word) for word in sentence.split())


def examples(markdown: str) -> Iterator[tuple[str, str]]:
    """Language and text of each code block that begins a line."""
    yield from re.findall(r"^```(\w*)\n(.*?)^```", markdown, re.M | re.S)


def _blocks(markdown: str) -> Iterator[str]:
    """Paragraphs, items of lists, headings and cells of tables."""
    fence, waiting = "", ""
    for line in markdown.splitlines():
        mark = FENCE.match(line)
        if mark and (not fence or line.strip() == fence):
            fence = "" if fence else mark[1]
        if fence or mark or not line.strip() or line.startswith(("#", "|", "<")) or ITEM.match(line):
            yield waiting
            waiting = ""
        if fence or mark:
            continue
        if line.startswith("|"):
            yield from re.split(r"(?<!\\)\|", line)
        elif line.startswith("#"):
            yield line.lstrip("# ")
        else:
            waiting += " " + ITEM.sub("", line)
    yield waiting
