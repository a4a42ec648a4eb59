"""Python of the Tritons' environment: this one where their numpy has a wheel for it, else an older one."""

import functools
import hashlib
import http.server
import re
import ssl
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from trefoil.cli import setup
from trefoil.core.errors import StartError

ROOT = Path(__file__).resolve().parents[3]


def stands_in(folder: Path, name: str, *, version: str) -> None:
    """An executable that says its version; one of no version fails, as a shim does whose Python is not installed."""
    path = folder / name
    path.write_text(f"#!/bin/sh\necho {version}\n" if version else "#!/bin/sh\nexit 127\n")
    path.chmod(0o755)


def test_a_python_that_numpy_has_a_wheel_for_is_taken_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 12, 1, "final", 0))
    assert setup._python() == (sys.executable, "3.12")


@pytest.fixture
def newer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Python that is too new, and a PATH of its own."""
    monkeypatch.setattr(sys, "version_info", (3, 13, 0, "final", 0))
    monkeypatch.setenv("PATH", f"{tmp_path}")
    return tmp_path


def test_an_older_one_of_the_path_is_taken_if_it_runs(newer: Path) -> None:
    stands_in(newer, "python3.12", version="")
    stands_in(newer, "python3.11", version="3.11")
    assert setup._python() == (str(newer / "python3.11"), "3.11")
    stands_in(newer, "python3.12", version="3.12")
    assert setup._python() == (str(newer / "python3.12"), "3.12")


def test_without_any_the_remedy_is_named(newer: Path) -> None:
    with pytest.raises(StartError, match=r"numpy has no wheel for a newer one.*Remedy: install python3\.12"):
        setup._python()


@pytest.fixture
def signing_proxy(tmp_path: Path) -> Iterator[str]:
    """Index of one package, behind a certificate of an authority that no bundle holds."""
    folder, key = tmp_path / "index", ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    (folder / "small").mkdir(parents=True)
    about, files = "small-1.dist-info", {"METADATA": "Metadata-Version: 2.1\nName: small\nVersion: 1\n"}
    files |= {"WHEEL": "Wheel-Version: 1.0\nGenerator: none\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}
    with zipfile.ZipFile(folder / "small" / "small-1-py3-none-any.whl", "w") as wheel:
        for name, text in (files | {"RECORD": "".join(f"{about}/{name},,\n" for name in (*files, "RECORD"))}).items():
            wheel.writestr(f"{about}/{name}", text)
    for words in (
        f"req -x509 -subj /CN=proxy -keyout {tmp_path}/ca.key -out {tmp_path}/ca.crt {' '.join(key)}",
        f"req -x509 -subj /CN=localhost -addext subjectAltName=DNS:localhost -CA {tmp_path}/ca.crt "
        f"-CAkey {tmp_path}/ca.key -keyout {tmp_path}/own.key -out {tmp_path}/own.crt {' '.join(key)}",
    ):
        subprocess.run(["openssl", *words.split()], check=True, capture_output=True)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "own.crt", tmp_path / "own.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"https://localhost:{server.server_port}/"
    server.shutdown()
    server.server_close()


def test_packages_come_through_a_proxy_that_signs_tls_as_they_come_to_pip(tmp_path, monkeypatch, signing_proxy):
    digest = hashlib.sha256((tmp_path / "index/small/small-1-py3-none-any.whl").read_bytes()).hexdigest()
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "small.txt").write_text(f"small==1 --hash=sha256:{digest}\n")
    monkeypatch.setattr(setup, "SHIPPED", tmp_path)
    monkeypatch.setattr(setup, "LOCKS", (("small.txt", ()),))
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR", "PIP_FIND_LINKS", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    told = {"PIP_CERT": tmp_path / "ca.crt", "UV_HTTP_RETRIES": 0, "UV_CACHE_DIR": tmp_path / "cache"}
    for name, value in (told | dict.fromkeys(("PIP_INDEX_URL", "UV_DEFAULT_INDEX"), signing_proxy)).items():
        monkeypatch.setenv(name, str(value))
    setup._make(tmp_path / "made", sys.executable)
    assert list((tmp_path / "made").glob("lib/python3*/site-packages/small-1.dist-info"))


def test_make_setup_asks_pip_where_uv_gets_nothing():
    done = subprocess.run(
        ["make", "-n", "-W", "pyproject.toml", ".venv/.ready"], cwd=ROOT, capture_output=True, text=True
    )
    assert re.search(
        r"uv pip install [^|]*-r requirements/dev.txt[^|]*\|\| \S*pip install .*-r requirements/dev.txt", done.stdout
    )
