"""Starts `k3 serve` on a free port with models/k3-nano and hands the tests its address.

K3_BINARY names another program; without one, the tests are skipped with a message.
"""

import os
import pathlib
import re
import signal
import subprocess
import threading
import time

import httpx
import openai
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = pathlib.Path(os.environ.get("K3_BINARY", ROOT / "build" / "release" / "k3"))
MODEL_DIR = ROOT / "models" / "k3-nano"
MODEL = "k3-nano"


class Server:
    def __init__(self, *flags):
        command = [str(BINARY), "serve", "--model", str(MODEL_DIR), "--host", "127.0.0.1",
                   "--port", "0", "--served-model-name", MODEL, *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
                                        text=True, errors="replace")
        self.log = []
        self.url = None
        self._found = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        if not self._found.wait(60):
            self.process.kill()
            raise RuntimeError("the server did not say where it listens:\n" + "".join(self.log))
        deadline = time.time() + 120
        while time.time() < deadline:
            if httpx.get(self.url + "/health").status_code == 200:
                return
            time.sleep(0.05)
        raise RuntimeError("the server did not become ready:\n" + "".join(self.log))

    def _read(self):
        for line in self.process.stderr:
            self.log.append(line)
            match = re.search(r"listening on (http://\S+)", line)
            if match and self.url is None:
                self.url = match.group(1)
                self._found.set()

    def metric(self, name):
        """The sum of a metric's samples."""
        text = httpx.get(self.url + "/metrics").text
        values = [float(line.rsplit(" ", 1)[1]) for line in text.splitlines()
                  if re.match(re.escape(name) + r"[ {]", line)]
        assert values, f"no metric {name}"
        return sum(values)

    def idle(self, seconds=2.0):
        """Whether nothing runs or waits, `seconds` from now at the latest."""
        deadline = time.time() + seconds
        while time.time() < deadline:
            if (self.metric("k3:num_requests_running") == 0
                    and self.metric("k3:num_requests_waiting") == 0):
                return True
            time.sleep(0.02)
        return False

    def client(self, key="none"):
        return openai.OpenAI(base_url=self.url + "/v1", api_key=key, max_retries=0, timeout=120)

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                raise
        return self.process.returncode


@pytest.fixture(scope="session")
def start_server():
    if not BINARY.exists():
        pytest.skip(f"{BINARY} is not built (K3_BINARY names another)")
    started = []

    def start(*flags):
        started.append(Server(*flags))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="session")
def server(start_server):
    return start_server("--max-num-seqs", "16", "--max-model-len", "1024")


@pytest.fixture(scope="session")
def client(server):
    return server.client()


@pytest.fixture(scope="session")
def http(server):
    with httpx.Client(base_url=server.url, timeout=120) as c:
        yield c


@pytest.fixture(autouse=True)
def still_alive(request):
    """No test may take the shared server down with it."""
    yield
    if "server" in request.fixturenames:
        s = request.getfixturevalue("server")
        assert s.process.poll() is None, "the server died:\n" + "".join(s.log[-50:])
