"""Write a log of prompts and answers of three tasks in one, whose lengths differ as those of chats do: JSON lines.

Run: `make task-lengths`, which downloads Django's wheel (BSD-3-Clause), or `python tasks_log.py WHEEL OUT`.
Tasks: explain a function of the standard library (source: its docstring), write it (head and docstring: its body),
    translate a message of Django's catalogues (into each language that it has: its translation). EACH of every task,
    drawn. Nothing of either is committed: only the lengths that were held back, with their predictions.
Source: mu-Serve section 2.3 and Fig. 3: in LMSYS-Chat-1M, which is not public here, p95 over p50 is 1.7 to 20.5.
"""

import ast
import json
import re
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

EACH = 6000
SEED = 20261128
HEAD_CHARS, TEXT_CHARS = 200, 600
FOLDERS_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
CATALOGUE = re.compile(r"locale/(\w+)/LC_MESSAGES/django\.po$")
MESSAGE = re.compile(r'^msgid ((?:".*"\n)+)msgstr ((?:".*"\n)+)', re.MULTILINE)


def functions() -> Iterator[tuple[str, str, str]]:
    """Head, docstring and body of every documented function of the standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if FOLDERS_LEFT_OUT & set(path.relative_to(root).parts):
            continue
        text = path.read_bytes().decode(errors="replace")
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            documented = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node)
            if documented and len(node.body) > 1:
                head = "\n".join(lines[node.lineno - 1 : node.body[0].lineno - 1])
                yield head, documented, "\n".join(lines[node.body[1].lineno - 1 : node.end_lineno])


def messages(wheel: Path) -> Iterator[tuple[str, str, str]]:
    """Language, message and translation of every entry of the catalogues."""
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if found := CATALOGUE.search(name):
                for pair in MESSAGE.findall(archive.read(name).decode()):
                    message, translation = ("".join(map(ast.literal_eval, text.strip().split("\n"))) for text in pair)
                    if message and translation:
                        yield found[1], message, translation


def main(wheel: Path, out: Path) -> None:
    """Write the log."""
    tasks: dict[str, dict[str, str]] = {"explain": {}, "write": {}, "translate": {}}
    for head, documented, body in functions():
        text = f"explain this function:\n{head[:HEAD_CHARS]}\n{body[:TEXT_CHARS]}"
        tasks["explain"][text] = documented
        tasks["write"][f"write this function:\n{head[:HEAD_CHARS]}\n{documented[:TEXT_CHARS]}"] = body
    for language, message, translation in messages(wheel):
        tasks["translate"][f"translate into {language}: {message}"] = translation
    rng = np.random.default_rng(SEED)
    with out.open("w", encoding="utf-8") as file:
        for own in tasks.values():
            rows = sorted(own.items())
            for at in rng.permutation(len(rows))[:EACH].tolist():
                file.write(json.dumps({"family": "tasks", "prompt": rows[at][0], "answer": rows[at][1]}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
