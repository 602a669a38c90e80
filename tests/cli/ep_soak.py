#!/usr/bin/env python3
"""A minute of one busy rank, then random arrivals, cancellations and idle gaps over N ranks; every
answer must be its single-rank run.

    tests/cli/ep_soak.py [--minutes 30] [--ep-size 4] [--mpi] [--seed 1]

Prints a line a minute and a summary; exits with 1 on the first wrong answer, lost slot or page, or
resident memory that still grows after the first quarter.
"""

import argparse
import http.client
import json
import pathlib
import random
import sys
import threading
import time
import urllib.parse

sys.path.insert(0, str(pathlib.Path(__file__).parent))


def request_pool(rng, count):
    words = "the cat sat on a mat and then it ran over hills of green with Paris France two".split()
    pool = []
    for _ in range(count):
        body = {
            "prompt": " ".join(rng.choices(words, k=rng.choice([1, 3, 8, 30, 120]))),
            "max_tokens": rng.choice([1, 4, 12, 40]),
            "temperature": rng.choice([0, 0.7, 1.1]),
            "seed": rng.randrange(1 << 30),
        }
        if rng.random() < 0.2:
            body["n"] = 2
        if rng.random() < 0.2:
            body["logprobs"] = 2
        if rng.random() < 0.2:
            body["stop"] = ["e "]
        pool.append(body)
    return pool


def ask(url, body, give_up_after=None, rank=None):
    """The choices; or None after `give_up_after` bytes of a stream, which closes the connection."""
    where = urllib.parse.urlparse(url)
    c = http.client.HTTPConnection(where.hostname, where.port, timeout=120)
    try:
        if give_up_after is not None:
            body = {**body, "stream": True, "max_tokens": 200, "ignore_eos": True}
        headers = {"Content-Type": "application/json"}
        if rank is not None:
            headers["X-data-parallel-rank"] = str(rank)
        c.request("POST", "/v1/completions", json.dumps(body), headers)
        r = c.getresponse()
        if give_up_after is not None:
            r.read(give_up_after)
            return None
        text = r.read()
        if r.status != 200:
            raise AssertionError(f"{r.status}: {text[:300]}")
        return json.loads(text)["choices"]
    finally:
        c.close()


def metric(url, name):
    where = urllib.parse.urlparse(url)
    c = http.client.HTTPConnection(where.hostname, where.port, timeout=30)
    c.request("GET", "/metrics")
    text = c.getresponse().read().decode()
    c.close()
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines()
               if line.split("{")[0].split(" ")[0] == name)


def rss_kib(pids):
    total = 0
    for pid in pids:
        with open(f"/proc/{pid}/status") as f:
            total += sum(int(line.split()[1]) for line in f if line.startswith("RssAnon"))
    return total


def soak(make_server, make_reference, seconds, seed=1, hold=2, report=print):
    """Returns the counts; raises AssertionError on a fault."""
    rng = random.Random(seed)
    pool = request_pool(rng, 40)
    reference = make_reference()
    want = [ask(reference.url, body) for body in pool]
    assert reference.stop() == 0

    server = make_server()
    # One busy rank, the others without a request of their own for `hold` seconds; then each answers.
    held = 0
    until = time.time() + hold
    while time.time() < until:
        for body, expected in zip(pool, want):
            if time.time() < until:
                assert ask(server.url, body, rank=0) == expected, body
                held += 1
    report(f"{held} answers of rank 0 alone in {hold} s")
    for rank in range(server.ep_size):
        assert ask(server.url, pool[rank], rank=rank) == want[rank], f"rank {rank} after the hold"
    counts = {"answers": 0, "cancelled": 0, "idle gaps": 0}
    lock = threading.Lock()
    faults = []
    start = time.time()
    end = start + seconds

    def client(number):
        mine = random.Random(seed * 1000 + number)
        while time.time() < end and not faults:
            try:
                i = mine.randrange(len(pool))
                if mine.random() < 0.15:
                    ask(server.url, pool[i], give_up_after=mine.choice([1, 100, 2000]))
                    kind = "cancelled"
                else:
                    got = ask(server.url, pool[i])
                    if got != want[i]:
                        faults.append(f"request {pool[i]}: got {got}, alone {want[i]}")
                    kind = "answers"
                with lock:
                    counts[kind] += 1
            except Exception as e:  # noqa: BLE001  any of them is a fault
                faults.append(repr(e))
            # All clients pause together now and then, so that the whole group falls idle.
            now = time.time()
            if int(now - start) % 20 >= 17:
                time.sleep(20 - (now - start) % 20)
                with lock:
                    counts["idle gaps"] += 1
            elif mine.random() < 0.2:
                time.sleep(mine.expovariate(4))

    threads = [threading.Thread(target=client, args=(n,)) for n in range(8)]
    for t in threads:
        t.start()
    memory = []
    try:
        while any(t.is_alive() for t in threads):
            time.sleep(min(60, max(1, seconds / 20)))
            memory.append(rss_kib(server.ranks().values()))
            report(f"{time.time() - start:6.0f} s  {counts}  anonymous memory {memory[-1]} KiB")
        for t in threads:
            t.join()
        assert not faults, faults[0]
        deadline = time.time() + 10
        while time.time() < deadline and metric(server.url, "k3:num_requests_running") > 0:
            time.sleep(0.1)
        assert metric(server.url, "k3:num_requests_running") == 0
        assert metric(server.url, "k3:num_requests_waiting") == 0
        quarter, last = memory[len(memory) // 4], memory[-1]
        if seconds >= 120:  # before, buffers still find their size
            assert last <= quarter * 1.1 + 8192, f"memory grew from {quarter} to {last} KiB"
        # Every slot and page is there again: as many long requests as fit run at once, and are right.
        again = [ask(server.url, body) for body in pool]
        assert again == want
    finally:
        code = server.stop()
    assert code == 0, "".join(server.log[-20:])
    return counts


def main():
    from test_ep import Serve, mpirun

    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--ep-size", type=int, default=4)
    parser.add_argument("--mpi", action="store_true", help="ranks as processes")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    launcher = mpirun(args.ep_size) if args.mpi else ()
    # With few arenas, memory that grows is memory that leaks, not one more thread's free list.
    few_arenas = {"MALLOC_ARENA_MAX": "2"}
    counts = soak(lambda: Serve("--ep-size", args.ep_size, launcher=launcher, env=few_arenas), Serve,
                  args.minutes * 60, args.seed, hold=60,
                  report=lambda line: print(line, flush=True))
    print("all right:", counts)


if __name__ == "__main__":
    try:
        main()
    except AssertionError as fault:
        sys.exit(f"FAULT {fault}")
