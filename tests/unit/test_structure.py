"""The rules of tests/test_tidy.py find what they are for."""

from pathlib import Path

from tests.support.structure import Pair, circles, equal_runs, more_than

ONE, OTHER = Path("one.py"), Path("other.py")
BODY = [f"    step_{number}()" for number in range(7)]


def test_a_run_is_found_whole_whatever_stands_between_its_lines():
    one = "\n".join(["import os", "def f():", *BODY])
    other = "\n".join(["def g():", "", *BODY[:3], "    # why", "    from os import path", *BODY[3:]])
    assert equal_runs({ONE: one, OTHER: other}) == [Pair(ONE, 3, OTHER, 3, 7)]


def test_five_lines_are_no_run_and_imports_are_none():
    assert equal_runs({ONE: "\n".join(["def f():", *BODY[:5]]), OTHER: "\n".join(["def g():", *BODY[:5]])}) == []
    imports = "\n".join(f"import m{number}" for number in range(9))
    assert equal_runs({ONE: imports, OTHER: imports}) == []


def test_a_run_within_one_module_is_found_once():
    assert equal_runs({ONE: "\n".join(["def f():", *BODY, "def g():", *BODY])}) == [Pair(ONE, 2, ONE, 10, 7)]


def test_folders_are_counted_without_their_init():
    paths = [Path("a/__init__.py"), Path("a/b.py"), Path("a/c.py"), Path("a/d/e.py")]
    assert more_than(1, paths) == {Path("a"): 2}
    assert more_than(2, paths) == {}


def test_circles_of_any_length_are_told_apart():
    imports = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a", "e"}, "e": {"d"}, "f": {"d"}}
    assert circles(imports) == [["a", "b", "c"], ["d", "e"]]
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []
