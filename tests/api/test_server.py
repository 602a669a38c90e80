"""HTTP, limits, concurrency and the life of the process."""

import asyncio
import concurrent.futures
import json
import signal
import socket
import threading
import time

import httpx
import openai
import pytest

from helpers import CALCULATOR, MODEL, WEATHER, chat_body, frames, joined, summary, user

LONG = {"prompt": "Once upon a time", "max_tokens": 900, "temperature": 0, "ignore_eos": True}


def test_models_and_version(client, http):
    models = client.models.list().data
    assert [m.id for m in models] == [MODEL]
    assert http.get("/v1/models").json()["data"][0]["max_model_len"] == 1024
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    version = http.get("/version").json()
    assert version["version"] and version["engine"]
    assert http.get("/ping").status_code == 200


def test_errors_of_http(http):
    assert http.get("/v1/completions").status_code == 405
    assert http.post("/nope").status_code == 404
    assert http.post("/v1/completions", content="{", headers={"Content-Type": "application/json"}
                     ).status_code == 400
    assert http.post("/v1/completions", content="[" * 100000,
                     headers={"Content-Type": "application/json"}).status_code == 400
    assert http.post("/v1/completions", content=b'{"prompt":"\xff"}',
                     headers={"Content-Type": "application/json"}).status_code == 400
    assert http.post("/v1/completions", content='{"prompt":"a","prompt":"b"}',
                     headers={"Content-Type": "application/json"}).status_code == 400
    assert http.post("/v1/completions", content="x=1",
                     headers={"Content-Type": "application/x-www-form-urlencoded"}
                     ).status_code == 415
    r = http.post("/v1/completions", json={"prompt": "x", "bogus": 1})
    assert r.status_code == 400 and r.json()["error"]["param"] == "bogus"
    assert set(r.json()["error"]) == {"message", "type", "param", "code"}


def test_request_id_and_cors(http):
    r = http.get("/health", headers={"X-Request-Id": "abc-1", "Origin": "http://a"})
    assert r.headers["x-request-id"] == "abc-1"
    assert r.headers["access-control-allow-origin"] == "*"


def test_malformed_http_is_400(server):
    host, port = server.url[7:].split(":")
    with socket.create_connection((host, int(port)), 10) as s:
        s.sendall(b"\x16\x03\x01 this is not http\r\n\r\n")
        assert s.recv(4096).startswith(b"HTTP/1.1 400")


MIXED = [
    ("/v1/completions", {"prompt": "The capital of France is", "max_tokens": 24, "temperature": 0}),
    ("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 32, "temperature": 1.2,
                         "top_p": 1, "seed": 5}),
    ("/v1/chat/completions", chat_body("What is the capital of Peru?", max_tokens=64)),
    ("/v1/chat/completions", chat_body("What is 17 + 25?", thinking=True, max_tokens=96)),
    ("/v1/chat/completions", chat_body("What is the weather in Rome and in Oslo?", max_tokens=128,
                                       tools=[WEATHER, CALCULATOR])),
    ("/v1/chat/completions", chat_body("Repeat exactly: smörgåsbord 🎉 party 🎉 数字",
                                       max_tokens=64)),
    ("/v1/chat/completions", {**chat_body("Tell me a story.", max_tokens=48), "temperature": 0.9,
                              "seed": 77}),
    ("/v1/completions", {"prompt": ["The capital of Peru is", "Gold is"], "max_tokens": 12,
                         "temperature": 0.8, "seed": 3, "n": 2}),
]


def streamed(client, path, body):
    """What a streamed request says, by choice."""
    chunks = frames(client.post(path, json={**body, "stream": True}))
    if path.endswith("/chat/completions"):
        return joined(chunks)[:4]
    texts = {}
    for f in chunks:
        for c in f["choices"]:
            texts[c["index"]] = texts.get(c["index"], "") + c["text"]
    return texts


def test_H47_H24_32_mixed_streams_each_equal_their_single_run(server):
    with httpx.Client(base_url=server.url, timeout=300) as one:
        alone = [streamed(one, *m) for m in MIXED]

    def run(i):
        with httpx.Client(base_url=server.url, timeout=300) as c:
            return i, streamed(c, *MIXED[i % len(MIXED)])

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        for i, got in pool.map(run, range(32)):
            assert got == alone[i % len(MIXED)], MIXED[i % len(MIXED)]
    assert server.idle()


def test_H24_16_identical_tool_streams(server):
    body = chat_body("What is the weather in Paris?", tools=[WEATHER], max_tokens=128)

    def run(_):
        with httpx.Client(base_url=server.url, timeout=300) as c:
            return streamed(c, "/v1/chat/completions", body)

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        results = list(pool.map(run, range(16)))
    assert all(r == results[0] for r in results)
    assert json.loads(results[0][2][0][2]) == {"city": "Paris"}


def test_H30_short_answers_are_the_same_after_a_long_prompt(server, http):
    before = http.post("/v1/chat/completions", json=chat_body("What is the capital of Peru?")).json()
    r = http.post("/v1/completions", json={"prompt": [100, 200, 300] * 300, "max_tokens": 4,
                                           "temperature": 0})
    assert r.status_code == 200
    for _ in range(5):
        after = http.post("/v1/chat/completions",
                          json=chat_body("What is the capital of Peru?")).json()
        assert after["choices"][0]["message"] == before["choices"][0]["message"]


def test_H48_closing_streams_frees_their_slots(server, http):
    for stream in (True, False):
        clients = []
        for _ in range(17):  # one more than there are slots
            host, port = server.url[7:].split(":")
            s = socket.create_connection((host, int(port)), 10)
            body = json.dumps({**LONG, "stream": stream}).encode()
            s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                      b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
            clients.append(s)
        if stream:
            for _ in range(3):
                assert clients[0].recv(4096)
        deadline = time.time() + 10
        while server.metric("k3:num_requests_running") < 16 and time.time() < deadline:
            time.sleep(0.02)
        assert server.metric("k3:num_requests_running") >= 1
        for s in clients:
            s.close()
        assert server.idle(2.0), f"stream={stream}"
    assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200


def test_H49_aborts_at_any_time_leave_the_others_alone(server, http):
    expected = http.post("/v1/chat/completions", json=chat_body("What is the capital of Peru?")).json()
    host, port = server.url[7:].split(":")
    stop = threading.Event()

    def abuse(delay):
        body = json.dumps({**LONG, "max_tokens": 100, "stream": True}).encode()
        while not stop.is_set():
            with socket.create_connection((host, int(port)), 10) as s:
                s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
                          b"Content-Type: application/json\r\n"
                          b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
                time.sleep(delay)

    threads = [threading.Thread(target=abuse, args=(d,)) for d in (0, 0.001, 0.01, 0.05, 0.2)]
    for t in threads:
        t.start()
    try:
        for _ in range(5):
            got = http.post("/v1/chat/completions",
                            json=chat_body("What is the capital of Peru?")).json()
            assert got["choices"][0]["message"] == expected["choices"][0]["message"]
    finally:
        stop.set()
        for t in threads:
            t.join()
    assert server.idle(5.0)


def test_async_client(server):
    async def main():
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="x",
                                      max_retries=0) as c:
            async def one(i):
                text = ""
                stream = await c.chat.completions.create(
                    model=MODEL, messages=user("What is the capital of Peru?"), temperature=0,
                    stream=True, extra_body={"thinking": False})
                async for chunk in stream:
                    text += chunk.choices[0].delta.content or ""
                return text
            return await asyncio.gather(*(one(i) for i in range(8)))

    texts = asyncio.run(main())
    assert len(set(texts)) == 1 and "Lima" in texts[0]


def test_H12_the_log_names_the_end_ids(server):
    log = "".join(server.log)
    assert "1793" in log and "1794" in log


def test_the_log_has_one_line_a_request_and_no_prompt_text(server, http):
    http.post("/v1/completions", json={"prompt": "xyzzy-secret", "max_tokens": 2},
              headers={"X-Request-Id": "log-me-1"})
    time.sleep(0.2)
    lines = [line for line in server.log if "log-me-1" in line]
    assert len(lines) == 1 and "completion_tokens=2" in lines[0]
    assert not any("xyzzy-secret" in line for line in server.log)


def test_api_key_and_queue_and_drain(start_server):
    server = start_server("--api-key", "sesame", "--max-num-seqs", "1", "--max-queue", "1",
                          "--max-model-len", "4096")
    with httpx.Client(base_url=server.url, timeout=120) as c:
        assert c.get("/health").status_code == 200
        assert c.get("/v1/models").status_code == 401
        with pytest.raises(openai.AuthenticationError):
            server.client("wrong").models.list()
        assert server.client("sesame").models.list().data[0].id == MODEL

        auth = {"Authorization": "Bearer sesame"}
        results = []

        def run():
            r = httpx.post(server.url + "/v1/completions", json={**LONG, "max_tokens": 600},
                           headers=auth, timeout=120)
            results.append(r.status_code)

        threads = [threading.Thread(target=run) for _ in range(6)]
        for t in threads:
            t.start()
            time.sleep(0.05)
        for t in threads[:-1]:
            t.join(0.01)
        deadline = time.time() + 60
        while len(results) < 4 and time.time() < deadline:
            time.sleep(0.02)
        assert results[:4] == [503] * 4, "one runs, one waits, the others are told to come back"

        # SIGTERM: what runs may finish, what is new is refused, the exit code says all was well.
        server.process.send_signal(signal.SIGTERM)
        for t in threads:
            t.join()
        assert sorted(results) == [200, 200, 503, 503, 503, 503]
        assert server.process.wait(30) == 0
