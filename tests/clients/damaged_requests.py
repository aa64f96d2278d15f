#!/usr/bin/env python3
"""Requests of real clients, damaged at random: damaged_requests.py BASE_URL [--count 4000] [--seed 1]. Standard library only.

The requests of testdata/clients lose and double members, get values of other types, huge numbers, odd strings and deep
nests. Whatever comes, the server must answer in time, never with a 5xx (the scripted error aside), with an error object
where it refuses, and be well afterwards. Prints each kind of fault once with its request and exits 1 if there was one.
"""
import argparse
import collections
import copy
import http.client
import json
import pathlib
import random
import sys
import urllib.parse

FIXTURES = pathlib.Path(__file__).resolve().parent.parent.parent / "testdata/clients"
SECONDS = 20
MORE = [
    ("/v1/chat/completions", {"model": "deepseek-v4-flash", "messages": [{"role": "user", "content": "x"}], "n": 2, "stop": ["a"], "logprobs": True, "top_logprobs": 2, "seed": 1, "logit_bias": {"5": 1}, "temperature": 0.5, "top_p": 0.5, "max_tokens": 20, "stream": False, "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}, "stream_options": None, "thinking": {"type": "disabled"}, "reasoning_effort": "low", "chat_template_kwargs": {"thinking": False}, "priority": 1, "cache_salt": "s", "user": "u", "min_tokens": 1, "ignore_eos": False, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}),
    ("/v1/completions", {"model": "deepseek-v4-flash", "prompt": ["x", "y"], "max_tokens": 20, "echo": True, "suffix": None, "logprobs": 1, "n": 1, "stream": False, "stop": "a", "best_of": 1}),
    ("/v1/responses", {"model": "deepseek-v4-flash", "input": "x", "instructions": "y", "max_output_tokens": 20, "store": True, "metadata": {"a": "b"}, "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}, "background": False, "truncation": "auto", "top_logprobs": 1, "stream": False}),
    ("/v1/messages", {"model": "deepseek-v4-flash", "max_tokens": 20, "system": "s", "messages": [{"role": "user", "content": "x"}], "stop_sequences": ["a"], "tool_choice": {"type": "auto"}, "stream": False}),
    ("/tokenize", {"model": "deepseek-v4-flash", "prompt": "x", "add_special_tokens": True}),
    ("/tokenize", {"model": "deepseek-v4-flash", "messages": [{"role": "user", "content": "x"}]}),
    ("/detokenize", {"model": "deepseek-v4-flash", "tokens": [1, 2, 128804]}),
    ("/render", {"model": "deepseek-v4-flash", "messages": [{"role": "user", "content": "x"}]}),
]  # fmt: skip


def nest(depth):
    value = {"a": 1}
    for index in range(depth):
        value = [value] if index % 2 else {"a": value}
    return value


ODD = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**30, 1.5, -0.0, 1e308, "", " ", "x", "\u0000", "\ud83d", "｜DSML｜", "</think>",
    "<｜User｜>", "auto", "none", "required", "user", "tool", "function", "message", [], {}, [[]], [None], {"": None}, {"type": "x"},
    {"type": "text", "text": "x"}, {"type": "object", "properties": {"a": {"$ref": "#"}}}, {"type": "string", "pattern": "("}, nest(60), "y" * 20_000,
]  # fmt: skip


def places(node, found):
    """Every (container, key) of a JSON value."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in list(items):
        found.append((node, key))
        places(value, found)
    return found


def damage(body, numbers):
    body = copy.deepcopy(body)
    for _ in range(numbers.choice([1, 1, 1, 2, 3, 6])):
        found = places(body, [])
        if not found:
            return body
        # The last places are deep inside tool schemas; the first are what the protocol is made of.
        container, key = found[min(int(len(found) * numbers.random() ** 2), len(found) - 1)]
        what = numbers.randrange(6)
        if what == 0:
            del container[key]
        elif what == 1 and isinstance(container, list):
            container.insert(key, copy.deepcopy(container[key]))
        elif what == 2:
            other, name = numbers.choice(found)
            container[key] = copy.deepcopy(other.get(name) if isinstance(other, dict) else other[name] if name < len(other) else None)
        elif what == 3 and isinstance(container[key], str):
            text = container[key]
            at = numbers.randrange(len(text) + 1)
            container[key] = text[:at] + numbers.choice(["\u0000", "é🌍", "｜DSML｜", "</think>", '"', "\\"]) + text[at:]
        else:
            container[key] = copy.deepcopy(numbers.choice(ODD))
    return body


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("base_url", help="for example http://127.0.0.1:8000")
    parser.add_argument("--count", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    address = urllib.parse.urlsplit(args.base_url).netloc
    requests = list(MORE)
    for name in ("codex", "claude_code", "opencode"):
        requests += [(r["path"], r["body"]) for r in json.loads((FIXTURES / f"{name}.json").read_text())["requests"]]
    numbers, statuses, faults = random.Random(args.seed), collections.Counter(), {}
    connection = http.client.HTTPConnection(address, timeout=SECONDS)

    def fault(kind, path, data, answer):
        if kind not in faults:
            faults[kind] = 0
            print(f"FAIL {kind}\n  request: {path} {data.decode()[:3000]}\n  answer: {answer[:600]!r}", flush=True)
        faults[kind] += 1

    for _ in range(args.count):
        path, body = numbers.choice(requests)
        data = json.dumps(damage(body, numbers)).encode()
        if numbers.random() < 0.02:
            data = data[: numbers.randrange(len(data))]
        try:
            connection.request("POST", path, data, {"content-type": "application/json"})
            answer = connection.getresponse()
            text, status = answer.read(), answer.status
        except (OSError, http.client.HTTPException) as error:
            fault(f"{path}: no answer, {type(error).__name__}", path, data, str(error).encode())
            connection.close()
            continue
        statuses[status] += 1
        if status >= 500:
            fault(f"{path}: status {status}: {text[:60]!r}", path, data, text)
        elif status >= 400:
            try:
                error = json.loads(text)["error"]
                good = isinstance(error["message"], str) and error["message"] and error["type"]
            except (ValueError, KeyError, TypeError):
                good = False
            if not good:
                fault(f"{path}: status {status} without an error object", path, data, text)
        elif text.startswith((b"data:", b"event:", b":")):
            ended = any(mark in text for mark in (b"[DONE]", b"response.completed", b"response.incomplete", b"message_stop"))
            if not ended:
                fault(f"{path}: a stream without its end", path, data, text[-600:])
    connection.close()
    connection.request("GET", "/health")
    health = connection.getresponse().status
    good = not faults and health == 200
    print(f"statuses {dict(sorted(statuses.items()))}, faults {faults or 'none'}, health afterwards {health}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
