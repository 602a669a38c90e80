"""/v1/chat/completions through the official client and raw HTTP."""

import json

import openai
import pytest

from helpers import (CALCULATOR, MODEL, NO_THINKING, WEATHER, chat_body, frames, joined, summary,
                     user)

REPEAT = "smörgåsbord 🎉 party 🎉 数字"


def ask(client, text, **extra):
    body = {"thinking": False, **extra.pop("extra_body", {})}
    return client.chat.completions.create(model=MODEL, messages=user(text), temperature=0,
                                          extra_body=body, **extra)


def test_chat_answers(client):
    r = ask(client, "What is the capital of Peru?")
    assert "Lima" in r.choices[0].message.content
    assert r.choices[0].finish_reason == "stop"
    assert r.choices[0].message.role == "assistant"
    assert r.id.startswith("chatcmpl-") and len(r.id) == len("chatcmpl-") + 24
    assert r.model == MODEL


def test_H8_thinking_gives_reasoning_and_content(client):
    r = client.chat.completions.create(model=MODEL, messages=user("What is 17 + 25?"),
                                       temperature=0, max_tokens=128)
    m = r.choices[0].message
    assert "42" in m.content
    assert m.reasoning_content


def test_H28_with_thinking_the_first_delta_is_reasoning(http):
    r = http.post("/v1/chat/completions", json=chat_body("What is 17 + 25?", thinking=True,
                                                         max_tokens=128, stream=True))
    deltas = [f["choices"][0]["delta"] for f in frames(r)]
    assert deltas[0] == {"role": "assistant"}
    assert "reasoning_content" in deltas[1]


@pytest.mark.parametrize("off", [{"thinking": False}, {"thinking": {"type": "disabled"}},
                                 {"chat_template_kwargs": {"thinking": False}},
                                 {"chat_template_kwargs": {"enable_thinking": False}},
                                 {"reasoning_effort": "none"}])
def test_thinking_off_gives_no_reasoning(http, off):
    body = chat_body("What is the capital of Peru?", max_tokens=64)
    del body["thinking"]
    r = http.post("/v1/chat/completions", json={**body, **off})
    assert r.status_code == 200, r.text
    message = r.json()["choices"][0]["message"]
    assert "reasoning_content" not in message
    assert "Lima" in message["content"]


def test_H5_the_shape_of_a_stream(http):
    r = http.post("/v1/chat/completions", json=chat_body(
        "What is the capital of Peru?", stream=True, stream_options={"include_usage": True}))
    chunks = frames(r)
    assert len({f["id"] for f in chunks}) == 1
    assert all(f["object"] == "chat.completion.chunk" for f in chunks)
    assert [bool(f.get("usage")) for f in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["choices"] == []
    deltas = [f["choices"][0]["delta"] for f in chunks[:-1]]
    assert deltas[0] == {"role": "assistant"} and deltas[-1] == {}
    assert all(d for d in deltas[:-1])
    assert all(v is not None and v != "" for d in deltas for v in d.values())
    assert sum(1 for f in chunks[:-1] if f["choices"][0]["finish_reason"]) == 1


@pytest.mark.parametrize("body", [
    chat_body("What is the capital of Peru?"),
    chat_body("What is 17 + 25?", thinking=True, max_tokens=128),
    chat_body("Repeat exactly: " + REPEAT),
    chat_body("What is the weather in Paris?", tools=[WEATHER], max_tokens=128),
    chat_body("What is the weather in Paris?", tools=[WEATHER], thinking=True, max_tokens=128),
    chat_body("What is the weather in Rome and in Oslo?", tools=[WEATHER, CALCULATOR],
              max_tokens=160),
    chat_body("Tell me a story.", max_tokens=60, stop=["the", "zzz"]),
], ids=["plain", "thinking", "utf8", "tool", "tool-thinking", "two-tools", "stop"])
def test_H3_stream_equals_whole(http, body):
    whole = http.post("/v1/chat/completions", json=body).json()
    stream = joined(frames(http.post("/v1/chat/completions", json={
        **body, "stream": True, "stream_options": {"include_usage": True}})))
    assert stream[:3] == summary(whole["choices"][0]["message"])
    assert stream[3] == [whole["choices"][0]["finish_reason"]]
    assert stream[4] == whole["usage"]


def test_H19_utf8_survives(client):
    r = ask(client, "Repeat exactly: " + REPEAT)
    assert r.choices[0].message.content.strip() == REPEAT
    pieces = client.chat.completions.create(
        model=MODEL, messages=user("Repeat exactly: " + REPEAT), temperature=0, stream=True,
        extra_body=NO_THINKING)
    texts = [p.choices[0].delta.content or "" for p in pieces]
    assert "".join(texts).strip() == REPEAT
    assert not any("\ufffd" in t for t in texts)


def test_H7_a_tool_is_called(client):
    r = ask(client, "What is the weather in Paris?", tools=[WEATHER], max_tokens=128)
    choice = r.choices[0]
    assert choice.finish_reason == "tool_calls"
    call, = choice.message.tool_calls
    assert call.id == "get_weather:0" and call.type == "function"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}


def test_H4_H21_two_calls_stream_in_slots(http):
    r = http.post("/v1/chat/completions", json=chat_body(
        "What is the weather in Rome and in Oslo?", tools=[WEATHER, CALCULATOR], max_tokens=160,
        stream=True))
    chunks = frames(r)
    seen = set()
    for f in chunks:
        for call in f["choices"][0]["delta"].get("tool_calls", []):
            if call["index"] not in seen:
                seen.add(call["index"])
                assert set(call) == {"index", "id", "type", "function"}
                assert call["function"]["arguments"] == ""
            else:
                assert set(call) == {"index", "function"}
                assert set(call["function"]) == {"arguments"}
    _, _, calls, finish, _ = joined(chunks)
    assert sorted(calls) == [0, 1]
    assert [json.loads(calls[i][2])["city"] for i in (0, 1)] == ["Rome", "Oslo"]
    assert [calls[i][0] for i in (0, 1)] == ["get_weather:0", "get_weather:1"]
    assert finish == ["tool_calls"]


def test_tool_round_trip(client):
    messages = user("What is the weather in Paris?")
    first = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER],
                                           temperature=0, max_tokens=128, extra_body=NO_THINKING)
    call = first.choices[0].message.tool_calls[0]
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content,
         "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "sunny, 21 degrees"},
    ]
    second = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER],
                                            temperature=0, max_tokens=128, extra_body=NO_THINKING)
    assert second.choices[0].finish_reason == "stop"
    assert second.choices[0].message.content
    assert not second.choices[0].message.tool_calls


def test_H23_three_turns_of_tools_with_a_long_argument(http):
    messages = user("What is the weather in Paris?")
    for turn in range(3):
        messages += [
            {"role": "assistant", "tool_calls": [{
                "id": f"get_weather:{turn}", "type": "function",
                "function": {"name": "get_weather",
                             "arguments": json.dumps({"city": "Paris" + " x" * 60})}}]},
            {"role": "tool", "tool_call_id": f"get_weather:{turn}", "content": "sunny"},
        ]
    r = http.post("/v1/chat/completions", json={**chat_body("", max_tokens=32), "messages": messages,
                                                "tools": [WEATHER]})
    assert r.status_code == 200, r.text


def test_H26_tool_choice(http):
    base = chat_body("What is the weather in Paris?", tools=[WEATHER], max_tokens=128)
    none = http.post("/v1/chat/completions", json={**base, "tool_choice": "none"}).json()
    assert "tool_calls" not in none["choices"][0]["message"]
    assert none["choices"][0]["finish_reason"] in ("stop", "length")
    required = http.post("/v1/chat/completions", json={**base, "tool_choice": "required"}).json()
    assert required["choices"][0]["message"]["tool_calls"]
    assert required["choices"][0]["finish_reason"] == "tool_calls"
    named = http.post("/v1/chat/completions", json={
        **base, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}})
    assert named.status_code == 400 and "tool_choice" in named.json()["error"]["message"]
    missing = http.post("/v1/chat/completions", json={**chat_body("x"), "tool_choice": "required"})
    assert missing.status_code == 400


def test_H9_a_budget_eaten_by_thinking(http):
    r = http.post("/v1/chat/completions", json=chat_body("What is 17 + 25?", thinking=True,
                                                         max_tokens=8)).json()
    choice = r["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["reasoning_content"]
    assert not choice["message"]["content"]
    assert r["usage"]["completion_tokens"] == 8


def test_H10_H11_H27_no_marker_reaches_a_client(http):
    for body in (chat_body("What is the capital of Peru?"),
                 chat_body("What is 17 + 25?", thinking=True, max_tokens=128),
                 chat_body("What is the weather in Rome and in Oslo?", tools=[WEATHER, CALCULATOR],
                           thinking=True, max_tokens=200),
                 chat_body("What is the capital of Peru?", ignore_eos=True, max_tokens=80)):
        for stream in (False, True):
            text = http.post("/v1/chat/completions", json={**body, "stream": stream}).text
            assert "<|" not in text and "[EOS]" not in text


def test_stop_strings_reach_reasoning_too(http):
    whole = http.post("/v1/chat/completions", json=chat_body("What is 17 + 25?", thinking=True,
                                                             max_tokens=128)).json()
    reasoning = whole["choices"][0]["message"]["reasoning_content"]
    stop = reasoning[5:10]
    r = http.post("/v1/chat/completions", json=chat_body("What is 17 + 25?", thinking=True,
                                                         max_tokens=128, stop=stop)).json()
    assert r["choices"][0]["message"]["reasoning_content"] == reasoning[:reasoning.index(stop)]
    assert r["choices"][0]["finish_reason"] == "stop"
    assert r["choices"][0]["stop_reason"] == stop


def test_chat_logprobs(client):
    r = ask(client, "What is the capital of Peru?", logprobs=True, top_logprobs=3)
    entries = r.choices[0].logprobs.content
    assert "".join(e.token for e in entries) == r.choices[0].message.content
    for e in entries:
        assert e.logprob <= 0 and bytes(e.bytes).decode() == e.token
        assert len(e.top_logprobs) == 3 and e.top_logprobs[0].logprob >= e.top_logprobs[2].logprob


def test_chat_logprobs_of_split_characters_join_by_bytes(http):
    r = http.post("/v1/chat/completions", json=chat_body("Repeat exactly: " + REPEAT,
                                                         logprobs=True)).json()
    choice = r["choices"][0]
    data = b"".join(bytes(e["bytes"]) for e in choice["logprobs"]["content"])
    assert data.decode() == choice["message"]["content"]


def test_default_budget_is_the_rest_of_the_context(http):
    r = http.post("/v1/chat/completions", json=chat_body("What is the capital of Peru?")).json()
    assert r["choices"][0]["finish_reason"] == "stop"
    r = http.post("/v1/chat/completions", json=chat_body("Hi.", max_completion_tokens=3)).json()
    assert r["usage"]["completion_tokens"] <= 3


def test_H20_tokenize_of_messages_is_the_prompt_that_runs(http):
    body = {"messages": user("What is the weather in Paris?"), "tools": [WEATHER]}
    count = http.post("/tokenize", json=body).json()["count"]
    r = http.post("/v1/chat/completions", json={**body, "max_tokens": 1}).json()
    assert r["usage"]["prompt_tokens"] == count


def test_H6_think_tags_of_other_families_are_ordinary_text(http):
    assert http.post("/tokenize", json={"prompt": "<think>"}).json()["count"] > 1


def test_H29_reasoning_in_history_is_part_of_the_prompt(http):
    def count(**extra):
        return http.post("/tokenize", json={"messages": [
            {"role": "user", "content": "What is 17 + 25?"},
            {"role": "assistant", "content": "42", **extra},
            {"role": "user", "content": "And 1 more?"}]}).json()["count"]
    plain = count()
    assert count(reasoning_content="I need to compute 17 + 25.") > plain
    assert count(reasoning="I need to compute 17 + 25.") > plain


def test_content_parts_are_joined(http):
    parts = [{"type": "text", "text": "What is the capital"}, {"type": "text", "text": " of Peru?"}]
    a = http.post("/tokenize", json={"messages": [{"role": "user", "content": parts}]}).json()
    b = http.post("/tokenize", json={"messages": user("What is the capital of Peru?")}).json()
    assert a["tokens"] == b["tokens"]


def test_H36_a_second_turn_equals_its_cold_run(http):
    first = http.post("/v1/chat/completions", json=chat_body("What is the capital of Peru?")).json()
    messages = user("What is the capital of Peru?") + [
        {"role": "assistant", "content": first["choices"][0]["message"]["content"]},
        {"role": "user", "content": "What is the capital of France?"}]
    body = {**chat_body(""), "messages": messages}
    a, b = (http.post("/v1/chat/completions", json=body).json() for _ in range(2))
    assert a["choices"][0]["message"] == b["choices"][0]["message"]
    assert a["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_response_format_goes_into_the_prompt(http):
    plain = http.post("/tokenize", json={"messages": user("x")}).json()["count"]
    told = http.post("/tokenize", json={"messages": user("x"),
                                        "response_format": {"type": "json_object"}}).json()["count"]
    assert told > plain
    bad = http.post("/v1/chat/completions", json=chat_body("x", response_format={"type": "yaml"}))
    assert bad.status_code == 400 and "response_format" in bad.json()["error"]["message"]


@pytest.mark.parametrize("messages", [
    [], None, "x", [{"role": "wizard", "content": "x"}], [{"content": "x"}], ["x"],
    [{"role": "user", "content": 5}], [{"role": "tool", "content": "x"}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}],
])
def test_bad_messages_are_named(http, messages):
    r = http.post("/v1/chat/completions", json={"messages": messages})
    assert r.status_code == 400
    assert "messages" in r.json()["error"]["message"]


def test_the_client_raises_its_own_errors(client):
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4", messages=user("x"))
    with pytest.raises(openai.BadRequestError) as e:
        client.chat.completions.create(model=MODEL, messages=user("x"), temperature=3)
    assert e.value.body["param"] == "temperature"
