"""Engines of language models that others wrote, as processes of `.venv-engines`: vLLM, Transformers, llama.cpp.

They are for tests and benchmarks only. All serve the tiny model of `llm_model.py`, on 127.0.0.1, without any hub.
"""

import json
import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import httpx
import psutil

from tests.support.ports import free_ports
from trefoil.runtime.clock import WallClock

CLOCK: Final = WallClock()
ROOT: Final = Path(__file__).resolve().parents[2]
ENVIRONMENT: Final = ROOT / ".venv-engines"
READY_S: Final = {"vllm": 1800.0, "transformers": 900.0, "llama": 300.0}
KINDS: Final = tuple(READY_S)
KEYED: Final = {"vllm": "--api-key", "llama": "--api_key"}
"""Flag of an engine that asks for an API key."""
EMBEDDING: Final = {"vllm": ("--runner", "pooling", "--convert", "embed"), "llama": ("--embedding", "true")}
"""Flags that make an engine embed."""
TOOLS: Final = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
CONTEXT: Final = 256
STREAMS: Final = 8
OFFLINE: Final = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0",
}  # fmt: skip


def make_model(folder: Path) -> Path:
    """The tiny model below `folder`, which may hold it already; returns `folder`."""
    if not (folder / "tiny.gguf").exists():
        in_environment("tests/support/llm_model.py", "make", str(folder))
    return folder


def in_environment(*words: str, stdin: str = "") -> str:
    """Output of the engines' Python."""
    command = ["nice", "-n", "5", str(ENVIRONMENT / "bin" / "python"), *words]
    done = subprocess.run(
        command, cwd=ROOT, input=stdin, capture_output=True, text=True, check=False, env=os.environ | OFFLINE
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


class Engine:
    """One engine's processes."""

    def __init__(
        self, kind: str, models: Path, *, key: str = "", embeds: bool = False, interrupts: bool = False
    ) -> None:
        """`models`: folder of `make_model`. `key`: API key that it asks for, if it can. `interrupts`: llama.cpp's
        server cuts a stream off when another request comes, a health probe included, as it does by default."""
        self.kind, self.port, self.embeds = kind, free_ports(1)[0], embeds
        self.key = key if kind in KEYED else ""
        self.address = f"http://127.0.0.1:{self.port}/v1"
        self.model = str(models / "tiny") if kind == "transformers" else "tiny"
        """What the engine calls the model."""
        self.log = models / f"{kind}-{self.port}.log"
        command = ["nice", "-n", "5", str(ENVIRONMENT / "bin" / "python"), *self._words(models)]
        command += [KEYED[kind], self.key] if self.key else []
        command += ["--interrupt_requests", str(interrupts).lower()] if kind == "llama" else []
        command += EMBEDDING[kind] if embeds else TOOLS if kind == "vllm" else ()
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | OFFLINE, start_new_session=True
            )

    def _words(self, models: Path) -> Sequence[str]:
        where = ["--host", "127.0.0.1", "--port", str(self.port)]
        match self.kind:
            case "vllm":
                sizes = ["--max-model-len", str(CONTEXT), "--max-num-seqs", str(STREAMS), "--dtype", "float32"]
                server = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(models / "tiny")]
                return [*server, *where, *sizes, "--served-model-name", "tiny", "--enforce-eager"]
            case "transformers":
                blocks = ["--continuous-batching", "--cb-num-blocks", "64"]
                return [str(ENVIRONMENT / "bin" / "transformers"), "serve", str(models / "tiny"), *where, *blocks]
        files = ["--model", str(models / "tiny.gguf"), "--model_alias", "tiny"]
        return ["-m", "llama_cpp.server", *files, *where, "--n_ctx", str(CONTEXT), "--n_threads", "1"]

    def wait_ready(self) -> float:
        """Wait for its first answer; seconds that it took.

        Raises:
            RuntimeError: it ended, or did not answer in time; with the end of its log.
        """
        began_s = CLOCK.monotonic_s()
        while (took_s := CLOCK.monotonic_s() - began_s) < READY_S[self.kind]:
            if self._process.poll() is not None:
                break
            try:
                chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1, "temperature": 0}
                path, asked = ("embeddings", {"input": "hello"}) if self.embeds else ("chat/completions", chat)
                headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
                body = {"model": self.model, **asked}
                if httpx.post(f"{self.address}/{path}", json=body, headers=headers, timeout=60.0).is_success:
                    return took_s
            except httpx.TransportError:
                pass
            CLOCK.block(1.0)
        raise RuntimeError(f"{self.kind} is not ready after {took_s:.0f} s: {self.log.read_text()[-2000:]}")

    def running(self) -> int | None:
        """Requests that run at the engine, by its own metrics; None: it has none."""
        if self.kind != "vllm":
            return None
        page = httpx.get(self.address.removesuffix("/v1") + "/metrics", timeout=30.0).text
        lines = [line for line in page.splitlines() if line.startswith("vllm:num_requests_running")]
        return int(sum(float(line.split()[-1]) for line in lines))

    def processes(self) -> list[psutil.Process]:
        """All of its processes that live, also orphans: they share its session."""
        found = []
        for one in psutil.process_iter():
            try:
                if os.getsid(one.pid) == self._process.pid and one.status() != psutil.STATUS_ZOMBIE:
                    found.append(one)
            except (ProcessLookupError, psutil.NoSuchProcess):
                continue
        return found

    def kill(self) -> None:
        """End it at once, with all of its processes."""
        while found := self.processes():
            for one in found:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
            self._process.poll()
            CLOCK.block(0.02)


def judge(cases: Sequence[dict[str, object]]) -> list[bool]:
    """Whether vLLM takes each of these sampling parameters."""
    told = in_environment("tests/support/llm_model.py", "judge", stdin=json.dumps(cases))
    return list(json.loads(told.splitlines()[-1]))
