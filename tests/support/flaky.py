"""Plugin: a failed test with real processes is run once more. Passing then it is FLAKY; three of those fail the run.

What starts no process is never run again. Each lane of `make test` leaves its outcome in a file (`--lane NAME`);
`python -m tests.support.flaky SECONDS` prints and judges them together.
"""

import sys
import time
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "out" / "tests"
FLAKY, FLAKY_MAX = "FLAKY ", 2


class Reruns:
    """Runs tests marked `integration` once more where they fail, and remembers the first failure of those that pass."""

    def __init__(self, lane: str) -> None:
        self._lane = lane
        self._began_s = time.monotonic()
        self._flaky: list[str] = []
        self._first: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """Run a test with real processes, at most twice."""
        if item.get_closest_marker("integration") is None:
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        first = failure(reports)
        if first is not None:
            start_anew(item)
            reports = runtestprotocol(item, log=False, nextitem=nextitem)
            second = failure(reports)
            if second is not None:
                second.sections.append(("first failure of two", first.longreprtext))
            else:
                self._flaky.append(f"{FLAKY}{item.nodeid}: {reason(first)}")
                self._first.append(first.longreprtext)
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail the run where too many were flaky; leave what came of the lane."""
        if len(self._flaky) > FLAKY_MAX and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self._lane:
            FOLDER.mkdir(parents=True, exist_ok=True)
            took = f"{self._lane}: {session.testscollected} tests in {time.monotonic() - self._began_s:.0f} s"
            (FOLDER / f"{self._lane}.txt").write_text("\n".join([took, *self._flaky, ""]))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Name the flaky tests; what each failed with stands above."""
        if self._flaky:
            terminalreporter.section("failed, then passed")
        for flaky, text in zip(self._flaky, self._first, strict=True):
            terminalreporter.write_line(f"{text}\n{flaky}")
        if len(self._flaky) > FLAKY_MAX:
            terminalreporter.write_line(f"{len(self._flaky)} flaky tests, more than {FLAKY_MAX}")


def failure(reports: list[pytest.TestReport]) -> pytest.TestReport | None:
    """The first report of a test that is a failure."""
    return next((report for report in reports if report.failed), None)


def start_anew(item: pytest.Item) -> None:
    """Tear down every fixture that is shared with other tests, since the failure may have broken it; restart the time
    limit, which holds for each run."""
    pytest.CallInfo.from_call(lambda: item.session._setupstate.teardown_exact(None), when="teardown")
    limits = item.config.pluginmanager.get_plugin("timeout")
    if limits is not None:
        settings = limits._get_item_settings(item)
        if settings.timeout:
            item.ihook.pytest_timeout_set_timer(item=item, settings=settings)


def reason(report: pytest.TestReport) -> str:
    """The first line of a failure."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else report.longreprtext
    return f"{report.when}: {text.strip().splitlines()[0] if text.strip() else 'no message'}"


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--lane`."""
    parser.addoption("--lane", default="", help="leave what came of this run in out/tests/LANE.txt")


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin."""
    config.pluginmanager.register(Reruns(config.getoption("--lane")), "reruns")


def judge(folder: Path, took_s: str = "") -> int:
    """Print the time of each lane, that of all, and every flaky test of the whole run; 1 where those are too many."""
    lines = [line for path in sorted(folder.glob("*.txt")) for line in path.read_text().splitlines()]
    flaky = [line for line in lines if line.startswith(FLAKY)]
    everything = [f"everything: {took_s} s"] if took_s else []
    print(*(line for line in lines if line not in flaky), *everything, *flaky, sep="\n")
    if len(flaky) > FLAKY_MAX:
        print(f"{len(flaky)} flaky tests, more than {FLAKY_MAX}: the run has failed")
    return int(len(flaky) > FLAKY_MAX)


if __name__ == "__main__":
    sys.exit(judge(FOLDER, *sys.argv[1:]))
