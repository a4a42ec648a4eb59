"""Of a slice that failed the first error of its Triton is shown, of its last start, in Triton's own words."""

import os

import pytest

from power_agent.triton.log_errors import log_size, read_first_error
from tests.public_reports.triton_logs import NO_GPU, TRITON_LOGS


@pytest.mark.parametrize("report", TRITON_LOGS, ids=str)
def test_the_first_error_of_a_triton(report, tmp_path):
    log = tmp_path / "slice.log"
    log.write_text('2024-06-07T11:00:00Z E 6 a.cc:1] "of the start before"\n')
    before = log_size(log)
    with log.open("a") as file:
        file.write(report.input)
    assert read_first_error(log, before) == report.expected


def test_a_log_that_is_gone_or_was_cut_is_read_from_its_begin(tmp_path):
    log = tmp_path / "slice.log"
    assert (log_size(log), read_first_error(log, 0)) == (0, "")
    log.write_text(f'{NO_GPU}2024-06-07T12:00:00Z E 7 a.cc:1] "here"\n')
    assert read_first_error(log, 10**6) == "here"
    log.write_bytes(b"\xff\xfe no text\n")
    assert read_first_error(log, 0).endswith("no text")
    log.unlink()
    os.mkfifo(log)
    assert read_first_error(log, 0) == ""
