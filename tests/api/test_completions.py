"""/v1/completions through the official client."""

import math

import httpx
import openai
import pytest

from helpers import MODEL, frames


def test_greedy_completion_is_right(client):
    r = client.completions.create(model=MODEL, prompt="The capital of France is", max_tokens=3,
                                  temperature=0)
    assert r.choices[0].text == " Paris."
    assert r.choices[0].finish_reason == "length"
    assert r.usage.completion_tokens == 3
    assert r.usage.total_tokens == r.usage.prompt_tokens + 3


def test_prompt_shapes_agree(client, http):
    text = "The capital of France is"
    ids = http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    expected = " Paris."
    for prompt, count in ((text, 1), (ids, 1), ([text, text], 2), ([ids, ids], 2), ([text, ids], 2)):
        r = client.completions.create(model=MODEL, prompt=prompt, max_tokens=3, temperature=0)
        assert [c.index for c in r.choices] == list(range(count))
        assert [c.text for c in r.choices] == [expected] * count


def test_default_max_tokens_is_sixteen(client):
    r = client.completions.create(model=MODEL, prompt="The capital of France is", temperature=0,
                                  extra_body={"ignore_eos": True})
    assert r.usage.completion_tokens == 16


def test_stream_equals_whole(client):
    args = dict(model=MODEL, prompt="The capital of France is", max_tokens=40, temperature=0)
    whole = client.completions.create(**args)
    pieces = list(client.completions.create(**args, stream=True,
                                            stream_options={"include_usage": True}))
    assert "".join(c.text for p in pieces for c in p.choices) == whole.choices[0].text
    assert pieces[-1].choices == [] and pieces[-1].usage == whole.usage
    assert sum(1 for p in pieces for c in p.choices if c.finish_reason) == 1


def test_continuous_usage_counts_up(http):
    r = http.post("/v1/completions", json={
        "prompt": "The capital of", "max_tokens": 8, "temperature": 0, "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True}})
    counts = [f["usage"]["completion_tokens"] for f in frames(r)]
    assert counts == sorted(counts) and counts[-1] == 8


def test_echo(client):
    r = client.completions.create(model=MODEL, prompt="The capital of France is", max_tokens=3,
                                  temperature=0, echo=True)
    assert r.choices[0].text == "The capital of France is Paris."
    with pytest.raises(openai.BadRequestError, match="echo"):
        client.completions.create(model=MODEL, prompt="x", echo=True, logprobs=1)


def test_n_gives_distinct_samples_and_choice_zero_is_the_single_one(client):
    args = dict(model=MODEL, prompt="Once upon a time", max_tokens=24, temperature=1.5, top_p=1,
                seed=11)
    many = client.completions.create(**args, n=4)
    assert [c.index for c in many.choices] == [0, 1, 2, 3]
    assert len({c.text for c in many.choices}) > 1
    assert many.choices[0].text == client.completions.create(**args).choices[0].text


def test_H13_ends_at_the_end_id_and_ignore_eos_goes_on(client, http):
    body = dict(model=MODEL, messages=[{"role": "user", "content": "What is the capital of Peru?"}],
                max_tokens=256, temperature=0)
    r = client.chat.completions.create(**body, extra_body={"thinking": False})
    assert r.choices[0].finish_reason == "stop" and r.usage.completion_tokens < 256
    r = client.completions.create(model=MODEL, prompt="The capital of France is", max_tokens=256,
                                  temperature=0, extra_body={"ignore_eos": True})
    assert r.choices[0].finish_reason == "length" and r.usage.completion_tokens == 256


def test_H14_temperature_and_seed_are_not_ignored(client):
    def say(seed):
        return client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=32,
                                         temperature=1.3, top_p=1, seed=seed).choices[0].text
    texts = [say(seed) for seed in (1, 2, 3)]
    assert len(set(texts)) > 1
    assert [say(seed) for seed in (1, 2, 3)] == texts


def test_H15_logprobs_have_one_entry_a_token(client):
    r = client.completions.create(model=MODEL, prompt="The capital of France is", max_tokens=6,
                                  temperature=0, logprobs=5, extra_body={"ignore_eos": True})
    l = r.choices[0].logprobs
    assert len(l.tokens) == len(l.token_logprobs) == len(l.top_logprobs) == len(l.text_offset) == 6
    for token, value, top in zip(l.tokens, l.token_logprobs, l.top_logprobs):
        assert math.isfinite(value) and value <= 0
        assert 5 <= len(top) <= 6
        assert top[token] == value == max(top.values())
    assert "".join(l.tokens) == r.choices[0].text
    assert l.text_offset[0] == 0 and l.text_offset[1] == len(l.tokens[0])


def test_H16_no_byte_of_a_stop_string_is_sent(client):
    args = dict(model=MODEL, prompt="The capital of France is", max_tokens=40, temperature=0)
    full = client.completions.create(**args).choices[0].text
    stop = full[3:12]
    for stream in (False, True):
        if stream:
            pieces = list(client.completions.create(**args, stop=stop, stream=True))
            text = "".join(c.text for p in pieces for c in p.choices)
            finish = [c.finish_reason for p in pieces for c in p.choices if c.finish_reason]
        else:
            choice = client.completions.create(**args, stop=[stop]).choices[0]
            text, finish = choice.text, [choice.finish_reason]
        assert text == full[:3]
        assert finish == ["stop"]
    kept = client.completions.create(**args, stop=stop,
                                     extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].text == full[:12]


def test_H17_H18_a_stop_string_that_never_comes_loses_nothing(client):
    args = dict(model=MODEL, prompt="The capital of France is", max_tokens=40, temperature=0)
    full = client.completions.create(**args).choices[0].text
    pieces = list(client.completions.create(**args, stop=["~~~never~~~", full[-4:] + "#"],
                                            stream=True))
    texts = [c.text for p in pieces for c in p.choices]
    assert "".join(texts) == full
    assert all(t for t in texts[:-1]), "an empty piece before the last frame"


def test_stop_token_ids_end_it(client, http):
    ids = http.post("/tokenize", json={"prompt": " Paris."}).json()["tokens"]
    r = client.completions.create(model=MODEL, prompt="The capital of France is", max_tokens=40,
                                  temperature=0, extra_body={"stop_token_ids": [ids[-1]]})
    assert r.choices[0].finish_reason == "stop"
    assert r.choices[0].stop_reason == ids[-1]
    assert r.choices[0].text == " Paris"
    assert r.usage.completion_tokens == len(ids)


def test_min_tokens_holds_the_end_off(client):
    r = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "What is the capital of Peru?"}],
        temperature=0, max_tokens=64, extra_body={"thinking": False, "min_tokens": 40})
    assert r.usage.completion_tokens >= 40


def test_logit_bias_forces_and_bans(client, http):
    first = http.post("/tokenize", json={"prompt": " Paris"}).json()["tokens"][0]
    said = http.post("/detokenize", json={"tokens": [first]}).json()["prompt"]
    ask = dict(model=MODEL, prompt="The capital of France is", max_tokens=1, temperature=0)
    assert client.completions.create(**ask).choices[0].text == said
    banned = client.completions.create(**ask, logit_bias={str(first): -100})
    assert banned.choices[0].text != said
    other = {**ask, "prompt": "The capital of Peru is"}
    assert client.completions.create(**other).choices[0].text != said
    forced = client.completions.create(**other, logit_bias={str(first): 100})
    assert forced.choices[0].text == said


def test_penalties_change_the_answer(client):
    ask = dict(model=MODEL, prompt="The capital of France is", max_tokens=48, temperature=0,
               extra_body={"ignore_eos": True})
    plain = client.completions.create(**ask).choices[0].text
    assert client.completions.create(**ask, presence_penalty=2, frequency_penalty=2
                                     ).choices[0].text != plain
    ask["extra_body"] = {"ignore_eos": True, "repetition_penalty": 2.0}
    assert client.completions.create(**ask).choices[0].text != plain


def test_top_k_one_is_greedy(client):
    ask = dict(model=MODEL, prompt="The capital of France is", max_tokens=20)
    greedy = client.completions.create(**ask, temperature=0).choices[0].text
    assert client.completions.create(**ask, temperature=1.5, seed=5,
                                     extra_body={"top_k": 1}).choices[0].text == greedy


@pytest.mark.parametrize("delta,status", [(-1, 200), (0, 200), (1, 400)])
def test_H50_the_context_limit_is_exact(http, delta, status):
    # A prompt near the limit, so that the allowed cases are short.
    limit = http.get("/v1/models").json()["data"][0]["max_model_len"]
    r = http.post("/v1/completions", json={"prompt": [100] * (limit - 4), "max_tokens": 4 + delta,
                                           "temperature": 0})
    assert r.status_code == status, r.text
    if status == 400:
        assert str(limit) in r.json()["error"]["message"]


@pytest.mark.parametrize("value", ["1000000000", "9223372036854775807", "9223372036854775808",
                                   "-1", "0", '"16"', "1.5", "1e400"])
def test_H50_absurd_budgets_are_refused(http, value):
    r = http.post("/v1/completions", content='{"prompt":"x","max_tokens":%s}' % value,
                  headers={"Content-Type": "application/json"})
    assert r.status_code == 400
    assert "max_tokens" in r.json()["error"]["message"] or value == "1e400"


def test_H46_a_prompt_beyond_the_context_is_refused_at_once(http, server):
    r = http.post("/v1/completions", json={"prompt": "word " * 100000, "max_tokens": 1})
    assert r.status_code == 400
    assert r.json()["error"]["code"] == "context_length_exceeded"
    assert server.metric("k3:num_requests_running") == 0


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], ["x", ""], [[1], []], None, 5, {}])
def test_empty_prompts_are_refused(http, prompt):
    r = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
    assert r.status_code == 400
    assert r.json()["error"]["param"].startswith("prompt")


def test_typed_markup_is_plain_text(http):
    assert http.post("/tokenize", json={"prompt": "<|open|>"}).json()["count"] > 1
    ids = http.post("/tokenize", json={"prompt": "<|open|>", "parse_special": True}).json()["tokens"]
    assert len(ids) == 1
    assert http.post("/detokenize", json={"tokens": ids}).json()["prompt"] == "<|open|>"
