"""What a tree of modules looks like: runs of equal lines in two places, folders with many modules, import circles."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

RUN_LINES_MIN = 6


@dataclass(frozen=True)
class Line:
    """A line that says something, without its indentation."""

    number: int
    text: str


@dataclass(frozen=True)
class Pair:
    """Two places with the same run of lines, each from its first line on."""

    first: Path
    first_line: int
    second: Path
    second_line: int
    lines: int

    def __str__(self) -> str:
        return f"{self.first}:{self.first_line} ~ {self.second}:{self.second_line}, {self.lines} lines"


def telling(text: str) -> list[Line]:
    """Lines of a module but blank ones, comments, lone punctuation and imports."""
    imports = {
        number
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    rows = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if number not in imports)
    return [Line(number, line) for number, line in rows if not line.startswith("#") and re.search(r"\w", line)]


def equal_runs(modules: dict[Path, str]) -> list[Pair]:
    """Every pair of places with at least RUN_LINES_MIN equal lines, each run whole and once."""
    lines = {path: telling(text) for path, text in modules.items()}
    places: dict[tuple[str, ...], list[tuple[Path, int]]] = defaultdict(list)
    for path, found in lines.items():
        for i in range(len(found) - RUN_LINES_MIN + 1):
            places[tuple(line.text for line in found[i : i + RUN_LINES_MIN])].append((path, i))
    return sorted(
        (pair for same in places.values() for pair in whole(lines, same)),
        key=lambda pair: (pair.first, pair.first_line, pair.second, pair.second_line),
    )


def whole(lines: dict[Path, list[Line]], same: Sequence[tuple[Path, int]]) -> Iterator[Pair]:
    """The runs that begin at these places; one that began earlier is another's."""
    for (first, i), (second, j) in combinations(same, 2):
        one, other = lines[first], lines[second]
        overlap = first == second and abs(i - j) < RUN_LINES_MIN
        earlier = i > 0 and j > 0 and one[i - 1].text == other[j - 1].text
        if overlap or earlier:
            continue
        length = RUN_LINES_MIN
        while i + length < len(one) and j + length < len(other) and one[i + length].text == other[j + length].text:
            length += 1
        yield Pair(first, one[i].number, second, other[j].number, length)


def more_than(limit: int, modules: Sequence[Path]) -> dict[Path, int]:
    """Folders with more modules than that, `__init__` aside."""
    count: dict[Path, int] = defaultdict(int)
    for path in modules:
        count[path.parent] += path.name != "__init__.py"
    return {folder: number for folder, number in count.items() if number > limit}


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, however many steps it takes."""
    reached = {module: reachable(imports, module) for module in imports}
    found = {
        frozenset(other for other in reached[module] if module in reached.get(other, ()))
        for module in imports
        if module in reached[module]
    }
    return sorted(sorted(group) for group in found)


def reachable(imports: dict[str, set[str]], start: str) -> set[str]:
    """Modules that one imports, and what those import."""
    seen: set[str] = set()
    todo = [start]
    while todo:
        fresh = imports.get(todo.pop(), set()) - seen
        seen |= fresh
        todo += fresh
    return seen
