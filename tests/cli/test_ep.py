"""Expert parallelism from outside: ranks as threads and as processes give one rank's answers, and a
lost rank ends the group with exit code 6 and no process left behind."""

import concurrent.futures
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

import pytest

from conftest import K3, NANO

MPIRUN = shutil.which("mpirun")
MPI_ENV = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}
needs_mpirun = pytest.mark.skipif(MPIRUN is None, reason="no mpirun (package openmpi-bin)")


def mpirun(n, *more):
    return [MPIRUN, "-n", str(n), *more]


class Serve:
    def __init__(self, *flags, launcher=(), port=0, env=None):
        self.ep_size = flags[flags.index("--ep-size") + 1] if "--ep-size" in flags else 1
        command = [*launcher, str(K3), "serve", "-m", str(NANO), "--port", str(port),
                   "--max-num-seqs", "4", "--max-model-len", "512", *map(str, flags)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
                                        text=True, env={**os.environ, **MPI_ENV, **(env or {})},
                                        start_new_session=True)
        self.log = []
        self.url = None
        self.found = threading.Event()
        threading.Thread(target=self.read, daemon=True).start()
        assert self.found.wait(60), "".join(self.log)
        deadline = time.time() + 120
        while time.time() < deadline:
            try:
                if urllib.request.urlopen(self.url + "/health").status == 200:
                    return
            except urllib.error.HTTPError:
                pass
            time.sleep(0.05)
        raise AssertionError("not ready: " + "".join(self.log))

    def read(self):
        for line in self.process.stderr:
            self.log.append(line)
            match = re.search(r"listening on (http://\S+)", line)
            if match:
                self.url = match.group(1)
                self.found.set()

    def complete(self, headers=None, **body):
        request = urllib.request.Request(
            self.url + "/v1/completions", json.dumps(body).encode(),
            {"Content-Type": "application/json", **(headers or {})})
        with urllib.request.urlopen(request, timeout=120) as r:
            return json.load(r)

    def ranks(self):
        """Pids of the processes of this server's session that run k3, by rank."""
        found = {}
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                if os.getsid(int(pid)) != self.process.pid or \
                        os.readlink(f"/proc/{pid}/exe") != str(K3.resolve()):
                    continue
                env = dict(e.split("=", 1) for e in
                           open(f"/proc/{pid}/environ").read().split("\0") if "=" in e)
                found[int(env.get("OMPI_COMM_WORLD_RANK", 0))] = int(pid)
            except OSError:
                pass
        return found

    def stop(self):
        if self.process.poll() is None:
            os.kill(self.ranks().get(0, self.process.pid), signal.SIGTERM)
        try:
            self.process.wait(60)
        finally:
            for pid in [*self.ranks().values(), self.process.pid]:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        return self.process.returncode


REQUESTS = [
    {"prompt": "The capital of France is", "max_tokens": 24, "temperature": 0},
    {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0.9, "seed": 5},
    {"prompt": ["A list of fruits:", "Two"], "max_tokens": 12, "temperature": 0.7, "seed": 9,
     "n": 3},
    {"prompt": "word " * 150, "max_tokens": 16, "temperature": 0, "logprobs": 2, "stop": ["e"]},
]


def answers(server):
    """All requests at once, each twice, from eight clients."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda r: server.complete(**r)["choices"], REQUESTS * 2))
    assert got[:len(REQUESTS)] == got[len(REQUESTS):]
    return got[:len(REQUESTS)]


@pytest.fixture(scope="module")
def one_rank():
    server = Serve()
    want = answers(server)
    assert server.stop() == 0
    return want


def check_group(server, want):
    try:
        assert answers(server) == want
        # Pinned, each rank alone, the others idle.
        for rank in range(4):
            got = server.complete(headers={"X-data-parallel-rank": str(rank)}, **REQUESTS[0])
            assert got["choices"] == want[0]
        for rank in ["4", "-1", "x", ""]:
            with pytest.raises(urllib.error.HTTPError) as e:
                server.complete(headers={"X-data-parallel-rank": rank}, **REQUESTS[0])
            assert e.value.code == 400
            assert "rank" in e.value.read().decode()
        # A refused request reaches no rank's step.
        with pytest.raises(urllib.error.HTTPError) as e:
            server.complete(prompt="", max_tokens=3)
        assert e.value.code == 400
        assert answers(server) == want
    finally:
        code = server.stop()
    assert code == 0, "".join(server.log)


def test_four_ranks_as_threads_answer_as_one(one_rank):
    check_group(Serve("--ep-size", 4), one_rank)


@needs_mpirun
def test_four_ranks_as_processes_answer_as_one(one_rank):
    check_group(Serve("--ep-size", 4, launcher=mpirun(4)), one_rank)


@needs_mpirun
def test_logits_of_processes_are_those_of_one_rank(tmp_path):
    ids = tmp_path / "ids"
    ids.write_text(" ".join(str((i * 37) % 1792) for i in range(90)))
    outputs = []
    for n in [1, 2, 4]:
        out = tmp_path / f"out{n}"
        launcher = mpirun(n) if n > 1 else []
        subprocess.run([*launcher, str(K3), "logits", "-m", str(NANO), "--tokens", str(ids),
                        "--out", str(out), "--ep-size", str(n), "--chunk", "33"],
                       check=True, env={**os.environ, **MPI_ENV}, timeout=120)
        outputs.append(out.read_bytes())
    assert len(outputs[0]) == 90 * 2048 * 4
    assert len(set(outputs)) == 1


def long_request(server, result):
    try:
        result.append(server.complete(prompt="x", max_tokens=480, ignore_eos=True))
    except Exception as e:  # noqa: BLE001  the kinds of a broken connection
        result.append(e)


@needs_mpirun
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("busy", [True, False])
def test_kill_9_of_a_rank_ends_the_group(victim, busy, tmp_path):
    # --enable-recovery: mpirun leaves the survivors alive, so that what ends them is k3's own. It
    # then keeps their exit codes to itself, so each rank's shell writes them down.
    note = f'"$@"; echo $? > {tmp_path}/$OMPI_COMM_WORLD_RANK'
    launcher = mpirun(4, "--enable-recovery", "sh", "-c", note, "sh")
    server = Serve("--ep-size", 4, "--ep-timeout", 3, launcher=launcher)
    try:
        ranks = server.ranks()
        assert sorted(ranks) == [0, 1, 2, 3]
        results = []
        clients = [threading.Thread(target=long_request, args=(server, results))
                   for _ in range(4 if busy else 0)]
        for c in clients:
            c.start()
        time.sleep(0.5)
        os.kill(ranks[victim], signal.SIGKILL)
        killed = time.time()
        for c in clients:
            c.join(30)
            assert not c.is_alive(), "a client hangs"
        # Never a wrong answer: an error, unless it had finished before.
        assert all(isinstance(r, Exception) or len(r["choices"][0]["text"]) for r in results)
        if victim != 0 and busy:
            assert any(isinstance(r, urllib.error.HTTPError) and r.code == 500 for r in results)
        deadline = killed + 20
        while time.time() < deadline and len(server.ranks()) > 0:
            time.sleep(0.1)
        assert server.ranks() == {}, "a rank still runs"
        server.process.wait(20)
        log = "".join(server.log)
        assert (tmp_path / str(victim)).read_text() == "137\n"
        for rank in set(range(4)) - {victim}:
            assert (tmp_path / str(rank)).read_text() == "6\n", log
            assert re.search(rf"rank={rank}/4.*the group is lost", log), log
        assert f"rank {victim}" in log
    finally:
        server.stop()


@needs_mpirun
def test_a_rank_that_stands_still_is_given_up(tmp_path):
    note = f'"$@"; echo $? > {tmp_path}/$OMPI_COMM_WORLD_RANK'
    launcher = mpirun(4, "--enable-recovery", "sh", "-c", note, "sh")
    server = Serve("--ep-size", 4, "--ep-timeout", 2, launcher=launcher)
    try:
        ranks = server.ranks()
        results = []
        client = threading.Thread(target=long_request, args=(server, results))
        client.start()
        time.sleep(0.3)
        os.kill(ranks[2], signal.SIGSTOP)
        client.join(30)
        assert not client.is_alive(), "a client hangs"
        deadline = time.time() + 20
        while time.time() < deadline and len(server.ranks()) > 1:
            time.sleep(0.1)
        assert list(server.ranks()) == [2]
        os.kill(ranks[2], signal.SIGCONT)  # it finds the group gone
        server.process.wait(30)
        for rank in range(4):
            assert (tmp_path / str(rank)).read_text() == "6\n", "".join(server.log)
    finally:
        server.stop()


@needs_mpirun
def test_a_signal_to_mpirun_ends_streams_with_an_error(tmp_path):
    server = Serve("--ep-size", 4, launcher=mpirun(4))
    try:
        where = urllib.parse.urlparse(server.url)
        c = http.client.HTTPConnection(where.hostname, where.port, timeout=30)
        c.request("POST", "/v1/completions", json.dumps(
            {"prompt": "x", "max_tokens": 480, "n": 4, "ignore_eos": True, "stream": True}),
            {"Content-Type": "application/json"})
        stream = c.getresponse()
        stream.read(200)
        os.kill(server.process.pid, signal.SIGTERM)  # mpirun itself; it kills two seconds later
        rest = stream.read().decode()
        assert '"error"' in rest and "shutting down" in rest, rest[-300:]
        assert rest.rstrip().endswith("}"), "no [DONE] after an error"
        server.process.wait(30)
    finally:
        server.stop()


@needs_mpirun
def test_mpiruns_own_clean_up_leaves_nothing(one_rank):
    server = Serve("--ep-size", 2, launcher=mpirun(2))
    try:
        os.kill(server.ranks()[1], signal.SIGKILL)
        assert server.process.wait(30) != 0
        deadline = time.time() + 10
        while time.time() < deadline and server.ranks():
            time.sleep(0.1)
        assert server.ranks() == {}
    finally:
        server.stop()


def test_kill_9_of_the_process_of_threads_frees_the_port():
    server = Serve("--ep-size", 4)
    results = []
    client = threading.Thread(target=long_request, args=(server, results))
    client.start()
    time.sleep(0.3)
    server.process.kill()
    client.join(30)
    assert isinstance(results[0], Exception)
    again = Serve("--ep-size", 4, port=int(server.url.rsplit(":", 1)[1]))
    assert again.complete(**REQUESTS[0])["choices"]
    assert again.stop() == 0


def test_a_size_that_does_not_divide_the_experts_is_refused(k3, tmp_path):
    ids = tmp_path / "ids"
    ids.write_text("1 2 3")
    for command in [["serve", "--port", 0], ["logits", "--tokens", ids, "--out", tmp_path / "y"]]:
        for size in [0, -1, 3, 64]:
            r = k3(*command, "-m", NANO, "--ep-size", size)
            assert r.code == 2, (command, size, r.err)
            assert f"--ep-size {size}" in r.err, r.err


@needs_mpirun
def test_a_group_of_another_size_than_mpiruns_is_refused():
    r = subprocess.run([*mpirun(2), str(K3), "serve", "-m", str(NANO), "--port", "0",
                        "--ep-size", "4"], capture_output=True, text=True, timeout=60,
                       env={**os.environ, **MPI_ENV})
    assert r.returncode != 0
    assert "mpirun started 2 processes" in r.stderr


@needs_mpirun
def test_ranks_that_run_different_models_are_refused():
    r = subprocess.run([MPIRUN, "-n", "1", str(K3), "serve", "-m", str(NANO), "--port", "0",
                        "--ep-size", "2", ":", "-n", "1", str(K3), "serve", "-m", str(NANO),
                        "--port", "0", "--ep-size", "2", "--layers", "6"],
                       capture_output=True, text=True, timeout=60, env={**os.environ, **MPI_ENV})
    assert r.returncode != 0
    assert "layers=6" in r.stderr and "layers=13" in r.stderr, r.stderr


@pytest.mark.parametrize("mpi", [False, pytest.param(True, marks=needs_mpirun)])
def test_a_short_soak(mpi):
    """The long one: tests/cli/ep_soak.py."""
    from ep_soak import soak

    launcher = mpirun(4) if mpi else ()
    counts = soak(lambda: Serve("--ep-size", 4, launcher=launcher), Serve, 10)
    assert counts["answers"] > 10 and counts["cancelled"] > 0
