"""How docs and help are written: short sentences, plain words, and examples that are well-formed commands."""

import ast
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.prose import AVOIDED, RIDDLES, WORDS_MAX, examples, sentences, words
from trefoil.cli.main import COMMANDS, import_command
from trefoil.reproduce.runs import DOCUMENTED

ROOT: Final = Path(__file__).resolve().parent.parent
ENTRY_WORDS_MAX: Final = 20
README_WORDS_MAX: Final = 600
DOCS_WORDS_MAX: Final = 60_000  # as `wc -w` counts them
OF_PAPERS: Final = {"carbondis", "clover", "infadapter", "muserve", "wattwiser"}
PAGES: Final = [
    *sorted(
        str(path.relative_to(ROOT))
        for folder in ("docs", "benchmarks")
        for path in (ROOT / folder).rglob("*.md")
        if "node_modules" not in path.parts
    ),
    "CONTRIBUTING.md",
]


def faults(text: str) -> list[str]:
    """Sentences that are too long, or have a word to avoid."""
    long = [f"{words(one)} words: {one}" for one in sentences(text) if words(one) > WORDS_MAX]
    return long + [f"'{found[0]}': {one}" for one in sentences(text) if (found := AVOIDED.search(one))]


@pytest.mark.parametrize("name", ["README.md", *PAGES])
def test_a_page_has_short_sentences_and_plain_words(name):
    assert faults((ROOT / name).read_text()) == []


def test_docs_are_no_longer_than_they_may_be():
    assert len((ROOT / "README.md").read_text().split()) <= README_WORDS_MAX
    generated = {f"benchmarks/results/{paper}.md" for paper in OF_PAPERS}  # tables of claims, for the most part
    of_users = {*PAGES, "CHANGELOG.md"} - {"CONTRIBUTING.md"} - generated
    assert sum(len((ROOT / name).read_text().split()) for name in of_users) <= DOCS_WORDS_MAX


def test_an_entry_of_the_changelog_is_a_line_of_at_most_20_words():
    entries = re.findall(r"^- .*?(?=^- |^#|^\*|\Z)", (ROOT / "CHANGELOG.md").read_text(), re.M | re.S)
    assert len(entries) > 100
    assert [entry for entry in entries if sum(words(one) for one in sentences(entry)) > ENTRY_WORDS_MAX] == []


@pytest.mark.parametrize("package", ["trefoil", "controller", "dispatcher", "power_agent", "carbon_feed"])
def test_sources_name_the_actor_and_docstrings_have_short_sentences(package):
    """Comments, docstrings, log lines and messages of errors; of docstrings also the length of each sentence."""
    found: list[str] = []
    for path in sorted((ROOT / package).rglob("*.py")):
        text = path.read_text()
        found += [f"{path}:{text.count(chr(10), 0, at.start()) + 1}: {at[0]}" for at in RIDDLES.finditer(text)]
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, DOCUMENTED) and (about := ast.get_docstring(node)):
                found += [f"{path}: {words(one)} words: {one}" for one in sentences(about) if words(one) > WORDS_MAX]
    assert found == []


def test_faults_are_found():
    assert all(RIDDLES.search(text) for text in ("# whoever asks", '"is no file"', "# nobody waits", "# told anew"))
    assert not any(RIDDLES.search(text) for text in ("there is no file", "it is no longer", "the user `nobody`"))
    assert faults(" ".join(["word"] * 26) + ".")
    assert faults("| a | whoever asks |")
    assert not faults("```\n" + "word " * 30 + "\n```\n`" + "word " * 30 + "` is short. " + "word " * 25)


@cache
def commands() -> Mapping[str, Any]:
    """Commands by their whole name, groups included."""
    return {path: command for name in COMMANDS for path, command in below(name, import_command(name))}


def below(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from below(f"{path} {name}", inner)


def test_help_has_short_sentences_and_plain_words():
    texts = {path: command.help or "" for path, command in commands().items()}
    for path, command in commands().items():
        texts |= {f"{path} {option.opts[0]}": getattr(option, "help", "") or "" for option in command.params}
    assert {place: found for place, text in texts.items() if (found := faults(text))} == {}


@pytest.mark.parametrize("name", ["README.md", *PAGES])
def test_examples_are_well_formed(name):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for language, text in examples((ROOT / name).read_text()):
        if language == "python":
            ast.parse(text)
        elif language == "toml":
            tomllib.loads(text)
        elif re.search(r"^(trefoil|\.venv/bin/trefoil|make|docker|export) ", text, re.M):
            assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""
            for line in text.replace("\\\n", " ").splitlines():
                check_command(shlex.split(line, comments=True), targets)


def check_command(typed: list[str], targets: set[str]) -> None:
    """Check that a line calls a command of `trefoil` by its options, or a target of the Makefile."""
    if typed[:1] == ["make"]:
        assert {word for word in typed[1:] if "=" not in word} <= targets, typed
    if typed[:1] in (["trefoil"], [".venv/bin/trefoil"]):
        places = [word for word in typed[1:4] if not word.startswith("-")]
        named = [" ".join(places[:n]) for n in (3, 2, 1)]
        path = next((path for path in named if path in commands()), None)
        assert path, f"no command: {typed}"
        known = {name for option in commands()[path].params for name in (*option.opts, *option.secondary_opts)}
        given = {word.partition("=")[0] for word in typed if re.match(r"--?[a-z]", word)}
        assert given <= known, f"{typed}: no option {given - known}"
