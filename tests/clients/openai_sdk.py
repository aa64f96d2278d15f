#!/usr/bin/env python3
"""The OpenAI Python SDK on chat completions, completions and models: openai_sdk.py BASE_URL (see checks.py).

Whole and streamed answers, reasoning, tools with their results, structured output by `parse`, logprobs, n, stop, usage,
and errors as the SDK's exceptions with param and code.
"""
import json

import openai
import pydantic

from checks import THINKING_OFF, main

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
EVERY_TYPE = {
    "type": "function",
    "function": {
        "name": "every_type",
        "parameters": {
            "type": "object",
            "properties": {
                "s": {"type": "string"},
                "n": {"type": "integer"},
                "x": {"type": "number"},
                "b": {"type": "boolean"},
                "o": {"type": "object"},
                "a": {"type": "array"},
                "e": {"type": "string"},
            },
        },
    },
}
PLANS = {"s": 'a"b\\c\n2>&1', "n": 3, "x": 1.5, "b": True, "o": {"k": None, "l": [1]}, "a": [1, "two"], "e": ""}


class Person(pydantic.BaseModel):
    name: str
    age: int


def client_of(c):
    return openai.OpenAI(base_url=c.v1, api_key="none", max_retries=0, timeout=60)


def ask(c, text, **options):
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
    return client_of(c).chat.completions.create(**{"model": c.model, "messages": messages} | options)


def join(stream):
    """One message from the deltas of a stream; also the chunks."""
    out = {"role": None, "content": "", "reasoning_content": "", "calls": {}, "finish": None, "usage": None, "chunks": []}
    for chunk in stream:
        out["chunks"].append(chunk)
        out["usage"] = chunk.usage or out["usage"]
        for choice in chunk.choices:
            delta = choice.delta
            out["role"] = delta.role or out["role"]
            out["content"] += delta.content or ""
            out["reasoning_content"] += getattr(delta, "reasoning_content", None) or ""
            out["finish"] = choice.finish_reason or out["finish"]
            for part in delta.tool_calls or []:
                call = out["calls"].setdefault(part.index, {"id": None, "name": None, "arguments": "", "parts": 0})
                call["id"] = part.id or call["id"]
                call["parts"] += 1
                if part.function:
                    call["name"] = part.function.name or call["name"]
                    call["arguments"] += part.function.arguments or ""
    return out


def models(c):
    listed = client_of(c).models.list().data
    c.check("models: the model is listed with its context", any(m.max_model_len > 0 for m in listed), [m.id for m in listed])
    c.equal("models: one", client_of(c).models.retrieve(c.model).id, c.model)
    c.raises("models: an unknown one", openai.NotFoundError, lambda: client_of(c).models.retrieve("gpt-9"), "gpt-9")


def answers(c):
    answer = ask(c, "What is the capital of Norway?")
    message = answer.choices[0].message
    c.equal("thinking: content", message.content, "The capital of Norway is Oslo.")
    c.equal("thinking: reasoning", message.reasoning_content, "They ask for a city.")
    c.equal("thinking: finish", answer.choices[0].finish_reason, "stop")
    usage = answer.usage
    c.check("usage adds up", usage.total_tokens == usage.prompt_tokens + usage.completion_tokens > 0, usage.total_tokens)
    reasoning = usage.completion_tokens_details.reasoning_tokens
    c.check("usage: reasoning tokens", 0 < reasoning < usage.completion_tokens, reasoning)
    c.check("answer has the SDK's fields", answer.id and answer.object == "chat.completion" and answer.created > 0)
    answer = ask(c, "What is the capital of Sweden?", extra_body=THINKING_OFF)
    c.equal("no thinking: content", answer.choices[0].message.content, "The capital of Sweden is Stockholm.")
    c.check("no thinking: no reasoning", not getattr(answer.choices[0].message, "reasoning_content", None))
    for name, options in {
        "reasoning_effort none": {"reasoning_effort": "none"},
        "chat_template_kwargs.thinking": {"extra_body": {"chat_template_kwargs": {"thinking": False}}},
        "chat_template_kwargs.enable_thinking": {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
        "thinking and an effort": {"reasoning_effort": "high", "extra_body": THINKING_OFF},
    }.items():
        content = ask(c, "What is the capital of Sweden?", **options).choices[0].message.content
        c.equal(f"no thinking by {name}", content, "The capital of Sweden is Stockholm.")
    for effort in ("minimal", "low", "medium", "high", "xhigh", "max"):
        message = ask(c, "What is the capital of Norway?", reasoning_effort=effort).choices[0].message
        c.equal(f"effort {effort}", message.content, "The capital of Norway is Oslo.")
    message = ask(c, "Write it in Greek").choices[0].message
    c.equal("text beyond ASCII", message.content, "Γειά σου, κόσμε! 🌍")
    roles = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is the "}, {"type": "text", "text": "capital of Norway?"}]},
    ]
    c.equal("developer and content parts", ask(c, roles).choices[0].message.content, "The capital of Norway is Oslo.")


def streams(c):
    got = join(ask(c, "What is the capital of Norway?", stream=True, stream_options={"include_usage": True}))
    c.equal("stream: role", got["role"], "assistant")
    c.equal("stream: content", got["content"], "The capital of Norway is Oslo.")
    c.equal("stream: reasoning", got["reasoning_content"], "They ask for a city.")
    c.equal("stream: finish", got["finish"], "stop")
    last = got["chunks"][-1]
    c.check("stream: the last chunk has usage only", last.choices == [] and last.usage.completion_tokens > 0, last.usage)
    c.check("stream: other chunks have no usage", not any(chunk.usage for chunk in got["chunks"][:-1]))
    c.equal("stream: one id", len({chunk.id for chunk in got["chunks"]}), 1)
    got = join(ask(c, "Write it in Greek", stream=True))
    c.equal("stream: text beyond ASCII", got["content"], "Γειά σου, κόσμε! 🌍")
    c.check("stream: no usage unless asked for", got["usage"] is None)
    with client_of(c).chat.completions.stream(
        model=c.model, messages=[{"role": "user", "content": "What is the capital of Norway?"}]
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    c.equal("stream helper: content", final.choices[0].message.content, "The capital of Norway is Oslo.")
    c.check("stream helper: events", "content.delta" in kinds and "content.done" in kinds, sorted(set(kinds)))


def tools(c):
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    first = ask(c, messages, tools=[WEATHER]).choices[0]
    calls = first.message.tool_calls or []
    c.equal("call: count", len(calls), 1)
    c.equal("call: name and arguments", (calls[0].function.name, json.loads(calls[0].function.arguments)), ("get_weather", {"city": "Paris"}))
    c.equal("call: finish", first.finish_reason, "tool_calls")
    c.equal("call: text before it", first.message.content, "I will look.")
    got = join(ask(c, messages, tools=[WEATHER], stream=True))
    c.equal("call, streamed", [(k["name"], json.loads(k["arguments"])) for k in got["calls"].values()], [("get_weather", {"city": "Paris"})])
    c.check("call, streamed: id, finish, text", got["calls"][0]["id"] and (got["finish"], got["content"]) == ("tool_calls", "I will look."))
    messages += [
        first.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": calls[0].id, "content": '{"temperature": "21 degrees"}'},
    ]
    last = ask(c, messages, tools=[WEATHER])
    c.equal("call: answer after the result", last.choices[0].message.content, "It is 21 degrees in Paris.")
    c.check("call: the earlier turn is reused", last.usage.prompt_tokens_details.cached_tokens > 100, last.usage.prompt_tokens_details)

    messages = [{"role": "user", "content": "The weather in Rome and Oslo?"}]
    first = ask(c, messages, tools=[WEATHER], parallel_tool_calls=True).choices[0].message
    cities = [json.loads(call.function.arguments)["city"] for call in first.tool_calls]
    c.equal("parallel calls", cities, ["Rome", "Oslo"])
    c.equal("parallel calls: ids differ", len({call.id for call in first.tool_calls}), 2)
    c.equal("parallel calls: content", first.content or "", "")
    got = join(ask(c, messages, tools=[WEATHER], stream=True))
    c.equal("parallel calls, streamed: indexes", sorted(got["calls"]), [0, 1])
    c.equal("parallel calls, streamed", [json.loads(k["arguments"])["city"] for k in got["calls"].values()], ["Rome", "Oslo"])
    messages.append(first.model_dump(exclude_none=True))
    # Results in the other order.
    messages += [{"role": "tool", "tool_call_id": k.id, "content": f"{'rome is warm' if i == 0 else 'oslo is cold'}"} for i, k in reversed(list(enumerate(first.tool_calls)))]
    c.equal("parallel calls: answer", ask(c, messages, tools=[WEATHER]).choices[0].message.content, "Rome is warm, Oslo is cold.")

    call = ask(c, "Use every type of argument", tools=[EVERY_TYPE]).choices[0].message.tool_calls[0]
    c.equal("every type of argument", json.loads(call.function.arguments), PLANS)
    got = join(ask(c, "Use every type of argument", tools=[EVERY_TYPE], stream=True))
    c.equal("every type of argument, streamed", json.loads(got["calls"][0]["arguments"]), PLANS)
    message = ask(c, "What is the weather in Paris?", tools=[WEATHER], tool_choice="none").choices[0].message
    c.check("tool_choice none: no call", not message.tool_calls)


def forced_tools(c):
    named = {"type": "function", "function": {"name": "get_weather"}}
    for name, choice in {"required": "required", "a named tool": named}.items():
        choice0 = ask(c, "forced weather", tools=[WEATHER], tool_choice=choice).choices[0]
        calls = choice0.message.tool_calls or []
        c.check(f"tool_choice {name}, thinking", calls and json.loads(calls[0].function.arguments) == {"city": "Paris"}, choice0)
        choice0 = ask(c, "forced at once", tools=[WEATHER], tool_choice=choice, extra_body=THINKING_OFF).choices[0]
        calls = choice0.message.tool_calls or []
        c.check(f"tool_choice {name}, no thinking", calls and json.loads(calls[0].function.arguments) == {"city": "Paris"}, choice0)


def structured(c):
    schema = {"name": "person", "strict": True, "schema": Person.model_json_schema() | {"additionalProperties": False}}
    asked = [{"role": "user", "content": "Give a person as JSON"}]
    content = ask(c, asked, response_format={"type": "json_schema", "json_schema": schema}).choices[0].message.content
    c.equal("response_format json_schema", json.loads(content), {"name": "Ada", "age": 36})
    content = ask(c, asked, response_format={"type": "json_object"}).choices[0].message.content
    c.equal("response_format json_object", json.loads(content), {"name": "Ada", "age": 36})
    parsed = client_of(c).chat.completions.parse(model=c.model, messages=asked, response_format=Person)
    c.equal("parse", parsed.choices[0].message.parsed, Person(name="Ada", age=36))
    plain = [{"role": "user", "content": "Give a person as plain JSON"}]
    parsed = client_of(c).chat.completions.parse(model=c.model, messages=plain, response_format=Person, extra_body=THINKING_OFF)
    c.equal("parse, no thinking", parsed.choices[0].message.parsed, Person(name="Ada", age=36))
    with client_of(c).chat.completions.stream(model=c.model, messages=asked, response_format=Person) as stream:
        final = stream.get_final_completion()
    c.equal("parse, streamed", final.choices[0].message.parsed, Person(name="Ada", age=36))
    tool = openai.pydantic_function_tool(Person)
    by_tool = [{"role": "user", "content": "Give a person by tool"}]
    parsed = client_of(c).chat.completions.parse(model=c.model, messages=by_tool, tools=[tool])
    c.equal("parse: strict tool", parsed.choices[0].message.tool_calls[0].function.parsed_arguments, Person(name="Ada", age=36))


def sampling_fields(c):
    answer = ask(c, "What is the capital of Sweden?", logprobs=True, top_logprobs=1, extra_body=THINKING_OFF)
    content = answer.choices[0].logprobs.content
    c.equal("logprobs: tokens join to the text", "".join(t.token for t in content), "The capital of Sweden is Stockholm.")
    c.check("logprobs: one alternative, bytes", all(len(t.top_logprobs) == 1 and t.bytes for t in content))
    answer = ask(c, "What is the capital of Sweden?", n=3, extra_body=THINKING_OFF)
    c.equal("n: three choices", [(k.index, k.message.content) for k in answer.choices], [(i, "The capital of Sweden is Stockholm.") for i in range(3)])
    seen = set()
    for chunk in ask(c, "What is the capital of Sweden?", n=2, stream=True, extra_body=THINKING_OFF):
        seen |= {choice.index for choice in chunk.choices}
    c.equal("n, streamed: both indexes", seen, {0, 1})
    answer = ask(c, "count to six", stop=["four"], extra_body=THINKING_OFF).choices[0]
    c.equal("stop", (answer.message.content.strip(), answer.finish_reason), ("one two three", "stop"))
    got = join(ask(c, "count to six", stop="ee fo", stream=True, extra_body=THINKING_OFF))
    c.equal("stop across tokens, streamed", (got["content"], got["finish"]), ("one two thr", "stop"))
    for field in ("max_tokens", "max_completion_tokens"):
        answer = ask(c, "count to six", **{field: 2}, extra_body=THINKING_OFF)
        c.equal(f"{field}", (answer.choices[0].finish_reason, answer.usage.completion_tokens), ("length", 2))
    answer = ask(c, "a long thought", max_tokens=50).choices[0]
    c.equal("cut while thinking", (answer.finish_reason, answer.message.content or ""), ("length", ""))
    answer = ask(c, "count to six", seed=7, temperature=0.5, top_p=0.9, presence_penalty=0.1, frequency_penalty=0.1, user="me", extra_body=THINKING_OFF | {"top_k": 5, "min_p": 0.1})
    c.check("sampling fields are accepted", answer.choices[0].message.content)


def completions(c):
    client = client_of(c)
    answer = client.completions.create(model=c.model, prompt="count to six", max_tokens=50)
    c.equal("completions: text", answer.choices[0].text, "one two three four five six")
    c.equal("completions: object, finish", (answer.object, answer.choices[0].finish_reason), ("text_completion", "stop"))
    chunks = list(client.completions.create(model=c.model, prompt="count to six", stream=True, stream_options={"include_usage": True}))
    c.equal("completions, streamed", "".join(k.choices[0].text for k in chunks if k.choices), "one two three four five six")
    c.check("completions, streamed: usage", chunks[-1].usage and chunks[-1].usage.completion_tokens > 0)
    answer = client.completions.create(model=c.model, prompt=["count to six", "count to six"], echo=True)
    c.equal("completions: two prompts with echo", [k.text for k in answer.choices], ["count to sixone two three four five six"] * 2)
    answer = client.completions.create(model=c.model, prompt="count to six", logprobs=1, stop="four")
    c.check("completions: logprobs and stop", answer.choices[0].logprobs.tokens and "four" not in answer.choices[0].text)
    c.raises("completions: no prompt", openai.BadRequestError, lambda: client.completions.create(model=c.model, prompt=[]), "prompt")


def errors(c):
    def refused(name, kind, param, code=None, text="What is the capital of Norway?", **options):
        error = c.raises(f"error: {name}", kind, lambda: ask(c, text, **options))
        if error is not None:
            body = error.body or {}
            whole = isinstance(body, dict) and all(key in body for key in ("message", "type", "param", "code"))
            c.check(f"error: {name}: object, param {param}", whole and str(body["param"]).startswith(param), body)
            if code:
                c.equal(f"error: {name}: code", error.code, code)

    bad = openai.BadRequestError
    refused("unknown model", openai.NotFoundError, "model", "model_not_found", model="gpt-9")
    refused("no messages", bad, "messages", text=[])
    refused("temperature of a wrong type", bad, "temperature", temperature="hot")
    refused("temperature out of range", bad, "temperature", temperature=3)
    refused("top_p out of range", bad, "top_p", top_p=0)
    refused("n of zero", bad, "n", n=0)
    refused("unknown effort", bad, "reasoning_effort", reasoning_effort="enormous")
    refused("over the context", bad, "m", "context_length_exceeded", max_tokens=100_000_000)
    refused("top_logprobs without logprobs", bad, "top_logprobs", top_logprobs=3)
    refused("unknown named tool", bad, "tool_choice", tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "nothing"}})
    old = [{"name": "get_weather", "parameters": {"type": "object"}}]
    refused("functions, which tools replaced", bad, "function", functions=old)
    refused("tool without a name", bad, "tools[0]", tools=[{"type": "function", "function": {}}])
    refused("response_format without its schema", bad, "response_format", response_format={"type": "json_schema"})
    orphan = [{"role": "user", "content": "x"}, {"role": "tool", "tool_call_id": "call_1", "content": "y"}]
    refused("result of no call", bad, "messages", text=orphan)
    refused("unknown role", bad, "messages[0]", text=[{"role": "wizard", "content": "x"}])
    c.raises("error of the engine", openai.InternalServerError, lambda: ask(c, "break the engine"), "the engine broke")

    def read():
        for _ in ask(c, "break the engine", stream=True):
            pass

    c.raises("error of the engine, streamed", openai.APIError, read, "the engine broke")
    answer = ask(c, "What is the capital of Norway?", extra_body={"a_field_from_the_future": 1})
    c.check("unknown fields are ignored", bool(answer.choices))


def disconnects(c):
    stream = ask(c, "a slow answer", stream=True)
    for index, _ in enumerate(stream):
        if index == 5:
            break
    stream.close()
    c.equal("after a closed stream the server answers", ask(c, "What is the capital of Norway?").choices[0].message.content, "The capital of Norway is Oslo.")
    quick = openai.OpenAI(base_url=c.v1, api_key="none", max_retries=0, timeout=0.5)
    body = lambda: quick.chat.completions.create(model=c.model, messages=[{"role": "user", "content": "a late answer"}])  # noqa: E731
    c.raises("a client that gives up", openai.APITimeoutError, body)


if __name__ == "__main__":
    main(models, answers, streams, tools, forced_tools, structured, sampling_fields, completions, errors, disconnects)
