"""Requests and stream reading shared by the API tests."""

import json

MODEL = "k3-nano"

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather for a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "City name"}},
            "required": ["city"],
        },
    },
}
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string",
                                          "description": "Expression to evaluate"}},
            "required": ["expression"],
        },
    },
}

NO_THINKING = {"thinking": False}


def user(text):
    return [{"role": "user", "content": text}]


def chat_body(text, **extra):
    return {"model": MODEL, "messages": user(text), "temperature": 0, "thinking": False, **extra}


def frames(response):
    """The JSON of every frame of a finished SSE response; checks the framing."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("data: [DONE]\n\n"), response.text[-200:]
    out = []
    for block in response.text.split("\n\n")[:-2]:
        assert block.startswith("data: ") and "\n" not in block, block
        out.append(json.loads(block[6:]))
    return out


def joined(chunks):
    """Adds up a chat stream: (content, reasoning, {index: [id, name, arguments]}, finish, usage)."""
    content, reasoning, calls, finish, usage = "", "", {}, [], None
    for f in chunks:
        if f.get("usage"):
            usage = f["usage"]
        for c in f["choices"]:
            d = c["delta"]
            content += d.get("content", "")
            reasoning += d.get("reasoning_content", "")
            for call in d.get("tool_calls", []):
                slot = calls.setdefault(call["index"], ["", "", ""])
                slot[0] += call.get("id", "")
                slot[1] += call["function"].get("name", "")
                slot[2] += call["function"]["arguments"]
            if c.get("finish_reason"):
                finish.append(c["finish_reason"])
    return content, reasoning, calls, finish, usage


def summary(message):
    """What `joined` gives, from a whole message."""
    calls = {i: [c["id"], c["function"]["name"], c["function"]["arguments"]]
             for i, c in enumerate(message.get("tool_calls", []))}
    return message.get("content") or "", message.get("reasoning_content", ""), calls
