#!/usr/bin/env python3
"""The Anthropic Python SDK on the Messages API: anthropic_sdk.py BASE_URL (see checks.py).

Whole and streamed messages, thinking blocks and signatures, tools with their results, count_tokens, cache marks, stop
sequences, models, and errors as the SDK's exceptions.
"""
import json

import anthropic
import pydantic

from checks import main

WEATHER = {
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
OFF = {"type": "disabled"}
ON = {"type": "enabled", "budget_tokens": 2000}


class Person(pydantic.BaseModel):
    name: str
    age: int


def client_of(c):
    return anthropic.Anthropic(base_url=c.base_url, api_key="none", max_retries=0, timeout=60)


def create(c, text, **options):
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
    return client_of(c).messages.create(**{"model": c.model, "max_tokens": 4000, "messages": messages} | options)


def text_of(message):
    return "".join(block.text for block in message.content if block.type == "text")


def whole(c):
    message = create(c, "What is the capital of Norway?", thinking=ON, system="Be brief.")
    c.equal("thinking: blocks", [block.type for block in message.content], ["thinking", "text"])
    c.equal("thinking: text", (message.content[0].thinking, text_of(message)), ("They ask for a city.", "The capital of Norway is Oslo."))
    c.check("thinking: signature", message.content[0].signature, message.content[0].signature)
    c.equal("message", (message.type, message.role, message.stop_reason, message.stop_sequence), ("message", "assistant", "end_turn", None))
    c.check("id, model", message.id.startswith("msg_") and message.model == c.model, message.id)
    c.check("usage", message.usage.input_tokens > 0 and message.usage.output_tokens > 0, message.usage)
    again = create(c, "What is the capital of Norway?", thinking=ON, system="Be brief.").usage
    c.equal("usage: cached tokens are not in input_tokens", again.input_tokens + again.cache_read_input_tokens, message.usage.input_tokens + message.usage.cache_read_input_tokens)
    c.check("usage: cached tokens", again.cache_read_input_tokens > 0, again)
    message = create(c, "What is the capital of Sweden?", thinking=OFF)
    c.equal("no thinking", [(block.type, block.text) for block in message.content], [("text", "The capital of Sweden is Stockholm.")])
    message = create(c, "What is the capital of Norway?", thinking={"type": "adaptive"}, extra_body={"output_config": {"effort": "low"}})
    c.equal("adaptive thinking with an effort", text_of(message), "The capital of Norway is Oslo.")
    message = create(c, "What is the capital of Sweden?", thinking=OFF, extra_body={"output_config": {"effort": "high"}})
    c.equal("an effort and no thinking", text_of(message), "The capital of Sweden is Stockholm.")
    message = create(c, "count to six", thinking=OFF, stop_sequences=["four"])
    c.equal("stop sequence", (text_of(message).strip(), message.stop_reason, message.stop_sequence), ("one two three", "stop_sequence", "four"))
    message = create(c, "count to six", thinking=OFF, max_tokens=2)
    c.equal("max_tokens", (message.stop_reason, message.usage.output_tokens), ("max_tokens", 2))
    blocks = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=AAAA;"},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
    ]
    asked = [{"role": "user", "content": [{"type": "text", "text": "What is the capital of Norway?", "cache_control": {"type": "ephemeral"}}]}]
    message = create(c, asked, system=blocks, thinking=ON, metadata={"user_id": "me"})
    c.equal("system blocks and cache marks", text_of(message), "The capital of Norway is Oslo.")
    used = message.usage
    c.equal("the billing line costs nothing", used.input_tokens + used.cache_read_input_tokens, again.input_tokens + again.cache_read_input_tokens)


def streamed(c):
    with client_of(c).messages.stream(model=c.model, max_tokens=4000, thinking=ON, messages=[{"role": "user", "content": "What is the capital of Norway?"}]) as stream:
        events = list(stream)
        final = stream.get_final_message()
    c.equal("stream: blocks", [(b.type, getattr(b, "text", None) or b.thinking) for b in final.content], [("thinking", "They ask for a city."), ("text", "The capital of Norway is Oslo.")])
    c.check("stream: signature", final.content[0].signature)
    c.equal("stream: stop reason", final.stop_reason, "end_turn")
    c.check("stream: usage", final.usage.input_tokens > 0 and final.usage.output_tokens > 5, final.usage)
    raw = list(create(c, "What is the capital of Norway?", thinking=ON, stream=True))
    kinds = [event.type for event in raw]
    c.equal("stream: begins and ends", (kinds[0], kinds[-2:]), ("message_start", ["message_delta", "message_stop"]))
    order = []
    for event in raw:
        if event.type in ("content_block_start", "content_block_stop"):
            order.append((event.type.removeprefix("content_block_"), event.index))
    c.equal("stream: one block after the other", order, [("start", 0), ("stop", 0), ("start", 1), ("stop", 1)])
    deltas = [event.delta.type for event in raw if event.type == "content_block_delta"]
    c.equal("stream: the signature ends the thought", deltas.index("signature_delta"), len([d for d in deltas if d == "thinking_delta"]))
    c.check("stream: helper events", {"text", "thinking"} <= {event.type for event in events})


def tools(c):
    asked = [{"role": "user", "content": "What is the weather in Paris?"}]
    first = create(c, asked, tools=[WEATHER], thinking=ON)
    c.equal("call: blocks", [block.type for block in first.content], ["thinking", "text", "tool_use"])
    call = first.content[-1]
    c.equal("call", (call.name, call.input, first.stop_reason), ("get_weather", {"city": "Paris"}, "tool_use"))
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "21 degrees"}]}
    turn = [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    last = create(c, asked + turn, tools=[WEATHER], thinking=ON)
    c.equal("call: answer after the result", text_of(last), "It is 21 degrees in Paris.")
    c.check("call: the earlier turn is reused", last.usage.cache_read_input_tokens > 100, last.usage)
    with client_of(c).messages.stream(model=c.model, max_tokens=4000, messages=asked, tools=[WEATHER]) as stream:
        for _ in stream:
            pass
        final = stream.get_final_message()
    c.equal("call, streamed", [(b.name, b.input) for b in final.content if b.type == "tool_use"], [("get_weather", {"city": "Paris"})])
    both = create(c, "The weather in Rome and Oslo?", tools=[WEATHER])
    uses = [block for block in both.content if block.type == "tool_use"]
    c.equal("parallel calls", [block.input["city"] for block in uses], ["Rome", "Oslo"])
    results = [{"type": "tool_result", "tool_use_id": b.id, "content": "rome is warm" if i == 0 else "oslo is cold"} for i, b in enumerate(uses)]
    turn = [{"role": "user", "content": "The weather in Rome and Oslo?"}, {"role": "assistant", "content": both.content}, {"role": "user", "content": results}]
    c.equal("parallel calls: answer", text_of(create(c, turn, tools=[WEATHER])), "Rome is warm, Oslo is cold.")
    failed = {"type": "tool_result", "tool_use_id": call.id, "content": "no such city: agent id", "is_error": True}
    turn = [{"role": "assistant", "content": first.content}, {"role": "user", "content": [failed, {"type": "text", "text": "Go on."}]}]
    c.equal("a failed result with text after it", text_of(create(c, asked + turn, tools=[WEATHER])), "There is no such agent.")
    none = create(c, "What is the weather in Paris?", tools=[WEATHER], tool_choice={"type": "none"})
    c.check("tool_choice none", not any(b.type == "tool_use" for b in none.content), none.stop_reason)


def forced_tools(c):
    for kind in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        forced = create(c, "forced at once", tools=[WEATHER], tool_choice=kind, thinking=OFF)
        c.check(f"tool_choice {kind['type']}, no thinking", any(b.type == "tool_use" for b in forced.content), forced.content)
        forced = create(c, "forced weather", tools=[WEATHER], tool_choice=kind, thinking=ON)
        c.check(f"tool_choice {kind['type']}, thinking", any(b.type == "tool_use" for b in forced.content), forced.content)


def structured(c):
    schema = {"type": "json_schema", "schema": Person.model_json_schema() | {"additionalProperties": False}}
    message = create(c, "Give a person as JSON", extra_body={"output_config": {"format": schema}})
    c.equal("output_config.format", json.loads(text_of(message)), {"name": "Ada", "age": 36})
    if hasattr(client_of(c).messages, "parse"):
        parsed = client_of(c).messages.parse(model=c.model, max_tokens=4000, messages=[{"role": "user", "content": "Give a person as JSON"}], output_format=Person)
        c.equal("parse", parsed.parsed_output, Person(name="Ada", age=36))


def counting(c):
    client = client_of(c)
    asked = [{"role": "user", "content": "What is the capital of Norway?"}]
    count = client.messages.count_tokens(model=c.model, messages=asked, system="Be brief.").input_tokens
    used = create(c, asked, system="Be brief.").usage
    c.equal("count_tokens is what a message costs", count, used.input_tokens + used.cache_read_input_tokens)
    with_tool = client.messages.count_tokens(model=c.model, messages=asked, system="Be brief.", tools=[WEATHER]).input_tokens
    c.check("count_tokens counts tools", with_tool > count + 100, (count, with_tool))
    c.raises("count_tokens of nothing", anthropic.BadRequestError, lambda: client.messages.count_tokens(model=c.model, messages=[]), "messages")


def errors(c):
    def refused(name, kind, words, text="What is the capital of Norway?", **options):
        error = c.raises(f"error: {name}", kind, lambda: create(c, text, **options), words)
        if error is not None:
            body = error.body or {}
            inner = body.get("error") or {}
            c.check(f"error: {name}: object", body.get("type") == "error" and inner.get("type") and inner.get("message"), body)

    bad = anthropic.BadRequestError
    refused("unknown model", anthropic.NotFoundError, "claude-9", model="claude-9")
    refused("no messages", bad, "messages", text=[])
    refused("max_tokens of zero", bad, "max_tokens", max_tokens=0)
    refused("temperature", bad, "temperature", extra_body={"temperature": 3})
    refused("unknown role", bad, "wizard", text=[{"role": "wizard", "content": "x"}])
    refused("unknown thinking", bad, "thinking", thinking={"type": "maybe"})
    refused("unknown block", bad, "messages", text=[{"role": "user", "content": [{"type": "hologram"}]}])
    refused("tool without a schema", bad, "tools", tools=[{"name": "f"}])
    refused("result of no call", bad, "tool", text=[{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "none", "content": "x"}]}])
    refused("unknown named tool", bad, "nothing", tools=[WEATHER], tool_choice={"type": "tool", "name": "nothing"})
    refused("error of the engine", anthropic.InternalServerError, "the engine broke", text="break the engine")

    def read():
        for _ in create(c, "break the engine", stream=True):
            pass

    c.raises("error of the engine, streamed", anthropic.APIError, read, "the engine broke")
    message = create(c, "What is the capital of Norway?", extra_body={"a_field_from_the_future": 1}, extra_headers={"anthropic-beta": "some-beta-2027-01-01"})
    c.check("unknown fields and betas are ignored", bool(message.content))


def models(c):
    listed = client_of(c).models.list().data
    c.check("models", c.model in [m.id for m in listed], [m.id for m in listed])
    c.equal("model", client_of(c).models.retrieve(c.model).id, c.model)


if __name__ == "__main__":
    main(whole, streamed, tools, forced_tools, structured, counting, errors, models)
