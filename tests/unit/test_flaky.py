"""The plugin that runs a failed test with real processes once more."""

import pytest

from tests.support import flaky

FAILS_FIRST = """
import pathlib
import pytest

pytestmark = pytest.mark.{marker}
TRIES = pathlib.Path(__file__).with_suffix(".tries")

@pytest.fixture(scope="module")
def shared():
    yield TRIES.write_text(TRIES.read_text() + "made " if TRIES.exists() else "made ")

@pytest.mark.parametrize("number", range({tests}))
def test_it(shared, number):
    seen = pathlib.Path(f"{{TRIES}}{{number}}")
    tries = len(seen.read_text()) if seen.exists() else 0
    seen.write_text("x" * (tries + 1))
    assert tries >= {failures}, f"try {{tries}}"
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(flaky, "FOLDER", pytester.path / "out")
    pytester.makeini("[pytest]\nmarkers =\n    integration\n    unit\nasyncio_default_fixture_loop_scope = function\n")

    def once(source: str, *options: str) -> pytest.RunResult:
        pytester.makepyfile(test_one=source)
        return pytester.runpytest_inprocess("-p", "tests.support.flaky", "-p", "no:cacheprovider", *options)

    return once


def source(failures: int, tests: int = 1, marker: str = "integration") -> str:
    return FAILS_FIRST.format(failures=failures, tests=tests, marker=marker)


def test_failing_twice_fails_and_shows_both(run):
    result = run(source(failures=2))
    result.assert_outcomes(failed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*AssertionError: try 1*", "*first failure of two*", "*AssertionError: try 0*"])
    assert "FLAKY" not in result.stdout.str()


def test_failing_and_then_passing_is_named_with_the_reason(run, pytester):
    result = run(source(failures=1))
    result.assert_outcomes(passed=1)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["FLAKY test_one.py::test_it*0*: call: AssertionError: try 0"])
    assert (pytester.path / "test_one.tries").read_text() == "made made ", "the second try has fixtures of its own"


def test_three_flaky_tests_fail_the_run(run):
    result = run(source(failures=1, tests=3))
    result.assert_outcomes(passed=3)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["3 flaky tests, more than 2"])


def test_without_real_processes_nothing_runs_again(run):
    result = run(source(failures=1, marker="unit"))
    result.assert_outcomes(failed=1)
    assert "FLAKY" not in result.stdout.str()


def test_a_broken_fixture_counts_as_a_failure(run):
    breaks_first = "if not TRIES.exists():\n        TRIES.touch()\n        raise OSError('broken')\n    yield TRIES"
    result = run(source(failures=0).replace("yield TRIES", breaks_first))
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["FLAKY *: setup: OSError: broken"])


def test_each_try_has_the_whole_time_limit(run):
    hangs_first = source(failures=1).replace(
        "assert tries", "import time; time.sleep(2.0 if tries == 0 else 0.6); assert tries"
    )
    result = run(hangs_first, "--timeout=1")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["FLAKY *Timeout*"])
    hangs = source(failures=0).replace("assert tries", "import time; time.sleep(30); assert tries")
    run(hangs, "--timeout=1").assert_outcomes(failed=1)


def test_lanes_are_judged_together(run, tmp_path, capsys):
    assert run(source(failures=1, tests=2), "--lane=one").ret == pytest.ExitCode.OK, "two may be flaky"
    assert flaky.judge(flaky.FOLDER) == 0
    took, one, _ = (flaky.FOLDER / "one.txt").read_text().splitlines()
    (flaky.FOLDER / "other.txt").write_text(f"{took}\n{one}\n")
    assert flaky.judge(flaky.FOLDER) == 1
    said = capsys.readouterr().out
    assert said.count("FLAKY test_one.py::test_it[") == 2 + 2 + 3
    assert "3 flaky tests, more than 2" in said
