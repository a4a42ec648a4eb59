"""The health check of containers: one line and an exit code, without what makes a start slow."""

import subprocess
import sys
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from trefoil.health import main

KEYS = Path("tests/support")
CA = KEYS / "localhost.crt"
FEED = "trefoil.carbon_feed.v1.CarbonFeed"


@pytest.fixture
def server():
    made, servicer = grpc.server(futures.ThreadPoolExecutor(2)), health.HealthServicer()
    servicer.set(FEED, health_pb2.HealthCheckResponse.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, made)
    yield made
    made.stop(0)


def test_it_says_in_one_line_whether_a_process_or_one_of_its_services_serves(server, capsys):
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    for words, code, said in (
        ([], 0, ": SERVING"),
        (["--service", FEED], 1, f" {FEED}: NOT_SERVING"),
        (["--service", "nobody"], 1, " nobody: NOT_FOUND: "),
        (["--timeout", "0.5", "--ca", str(CA)], 1, ": UNAVAILABLE: "),  # nobody speaks TLS there
    ):
        assert main([target, *words]) == code
        out = capsys.readouterr().out
        assert out.startswith(f"{target}{said}")
        assert out.count("\n") == 1


def test_over_tls_the_authority_decides(server, capsys, tmp_path):
    pair = ((KEYS / "localhost.key").read_bytes(), CA.read_bytes())
    target = f"localhost:{server.add_secure_port('127.0.0.1:0', grpc.ssl_server_credentials([pair]))}"
    server.start()
    assert main([target, "--ca", str(CA)]) == 0
    assert main([target, "--timeout", "0.5"]) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["8101"], "HOST:PORT = '8101': no address. Remedy: write"),
        (["host:0"], "HOST:PORT = 'host:0'"),
        (["host:1", "--service", "x" * 128], "--service = 'xxx"),
        (["host:1", "--ca", "/absent.pem"], "--ca = '/absent.pem': No such file or directory. Remedy: name a PEM file"),
        (
            ["host:1", "--ca", "tests/support/localhost.key"],
            "--ca = 'tests/support/localhost.key': holds no certificate",
        ),
        (["host:1", "--timeout", "nan"], "--timeout = nan: 0 to 3600 s. Remedy"),
    ],
)
def test_arguments_that_cannot_be_are_named(words, said, capsys):
    assert main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {said}")
    assert err.count("\n") == 1


def test_where_nobody_listens_it_says_so_in_one_line_and_it_brings_grpc_and_nothing_else(unused_tcp_port):
    target = f"127.0.0.1:{unused_tcp_port}"
    code = (
        "import sys; from trefoil.health import main; code = main(sys.argv[1:]); "
        "sys.exit(sorted({'pydantic', 'numpy', 'redis', 'structlog', 'typer'} & set(sys.modules)) or code)"
    )
    done = subprocess.run([sys.executable, "-c", code, target], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith(f"{target}: UNAVAILABLE: ")
    assert done.stdout.count("\n") == 1
