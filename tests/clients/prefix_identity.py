#!/usr/bin/env python3
"""What agents change when they send a conversation again must not cost its prefix: prefix_identity.py BASE_URL (see checks.py).

A turn makes a call with seven arguments; the next turn sends the call back with its keys in another order, other spaces,
moved cache marks, another billing line, or without its reasoning. Everything up to the end of the first answer must then be
reused: cached tokens are at least the first turn's prompt and answer without its last token.
"""
import json

import anthropic
import openai

from checks import main
from openai_sdk import EVERY_TYPE, client_of

ASKED = "Use every type of argument"
RESULT = "21 degrees"


def reordered(arguments):
    """The same JSON with keys the other way round and no spaces."""
    turn = lambda x: {k: turn(x[k]) for k in reversed(list(x))} if isinstance(x, dict) else x  # noqa: E731
    return json.dumps(turn(json.loads(arguments)), separators=(",", ":"))


def covers(c, name, cached, first):
    c.check(f"{name}: reused", cached >= first - 1, f"{cached} of {first} tokens")


# Each variant has a first turn of its own, or it would find what an earlier variant left in the cache.


def chat(c):
    def ask(messages):
        return client_of(c).chat.completions.create(model=c.model, messages=messages, tools=[EVERY_TYPE])

    def variant(name, change):
        asked = [{"role": "system", "content": f"Prefix test on chat, {name}."}, {"role": "user", "content": ASKED}]
        first = ask(asked)
        message = first.choices[0].message
        call = message.tool_calls[0]
        function = {"arguments": call.function.arguments, "name": call.function.name}
        turn = {"role": "assistant", "content": message.content or "", "reasoning_content": message.reasoning_content}
        turn["tool_calls"] = [{"function": function, "type": "function", "id": call.id}]
        change(turn, function)
        second = ask([*asked, turn, {"role": "tool", "tool_call_id": call.id, "content": RESULT}])
        covers(c, f"chat: {name}", second.usage.prompt_tokens_details.cached_tokens, first.usage.total_tokens)

    variant("the same", lambda turn, function: None)
    variant("keys in another order", lambda turn, function: function.update(arguments=reordered(function["arguments"])))
    variant("reasoning under the name reasoning", lambda turn, function: turn.update(reasoning=turn.pop("reasoning_content")))
    variant("reasoning left out", lambda turn, function: turn.pop("reasoning_content"))
    variant("reasoning empty", lambda turn, function: turn.update(reasoning_content=""))
    variant("content null", lambda turn, function: turn.update(content=None))


def messages(c):
    client = anthropic.Anthropic(base_url=c.base_url, api_key="none", max_retries=0, timeout=60)
    tool = {"name": "every_type", "input_schema": EVERY_TYPE["function"]["parameters"]}
    mark = {"cache_control": {"type": "ephemeral"}}

    def ask(name, turns, billing="AAAA", marked=0):
        system = [f"x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={billing};", f"Prefix test on messages, {name}.", "More."]
        system = [{"type": "text", "text": text} | (mark if at == marked + 1 else {}) for at, text in enumerate(system)]
        thinking = {"type": "enabled", "budget_tokens": 2000}
        return client.messages.create(model=c.model, max_tokens=4000, system=system, tools=[tool], thinking=thinking, messages=turns)

    def variant(name, change=lambda blocks, result: blocks, **options):
        asked = [{"role": "user", "content": ASKED}]
        first = ask(name, asked)
        blocks = [block.model_dump(exclude_none=True) for block in first.content]
        result = {"type": "tool_result", "tool_use_id": blocks[-1]["id"], "content": RESULT}
        blocks = change(blocks, result)
        second = ask(name, [*asked, {"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}], **options)
        size = first.usage.input_tokens + (first.usage.cache_read_input_tokens or 0) + first.usage.output_tokens
        covers(c, f"messages: {name}", second.usage.cache_read_input_tokens, size)

    def other_keys(blocks, _):
        blocks[-1]["input"] = json.loads(reordered(json.dumps(blocks[-1]["input"])))
        return blocks

    def hidden(blocks, _):
        blocks[0]["thinking"] = ""
        return blocks

    variant("the same")
    variant("another billing line", billing="BBBB")
    variant("moved cache marks", lambda blocks, result: result.update(mark) or blocks, marked=1)
    variant("keys in another order", other_keys)
    variant("reasoning left out", lambda blocks, _: blocks[1:])
    variant("reasoning empty, with its signature", hidden)


def responses(c):
    tool = {"type": "function"} | EVERY_TYPE["function"]
    secret = {"include": ["reasoning.encrypted_content"], "store": False}
    asked = [{"role": "user", "content": ASKED}]

    def ask(name, items, **options):
        text = f"Prefix test on responses, {name}."
        return client_of(c).responses.create(model=c.model, input=items, tools=[tool], instructions=text, **options)

    def variant(name, change):
        first = ask(name, asked, **secret)
        items = [item.model_dump(exclude_none=True) for item in first.output]
        result = {"type": "function_call_output", "call_id": items[-1]["call_id"], "output": RESULT}
        second = ask(name, [*asked, *change(items), result], **secret)
        covers(c, f"responses: {name}", second.usage.input_tokens_details.cached_tokens, first.usage.total_tokens)
        return items

    def other_keys(items):
        return [*items[:-1], items[-1] | {"arguments": reordered(items[-1]["arguments"])}]

    items = variant("the same", lambda items: items)
    c.check("responses: encrypted reasoning is given when asked for", items[0].get("encrypted_content"), items[0])
    variant("keys in another order", other_keys)
    variant("reasoning left out", lambda items: [item for item in items if item["type"] != "reasoning"])
    variant("encrypted reasoning alone", lambda items: [{k: v for k, v in item.items() if k != "content"} for item in items])
    variant("without ids", lambda items: [{k: v for k, v in item.items() if k != "id"} for item in items])
    first = ask("previous_response_id", asked)
    result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": RESULT}
    second = ask("previous_response_id", [result], previous_response_id=first.id)
    covers(c, "responses: by previous_response_id", second.usage.input_tokens_details.cached_tokens, first.usage.total_tokens)


def across(c):
    """A call that was made on one route and is sent back on another."""
    asked = ASKED + ", on another route"
    first = client_of(c).responses.create(model=c.model, input=asked, tools=[{"type": "function"} | EVERY_TYPE["function"]])
    call = first.output[-1]
    function = {"name": call.name, "arguments": reordered(call.arguments)}
    turns = [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": "", "tool_calls": [{"id": call.call_id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call.call_id, "content": RESULT},
    ]
    answer = client_of(c).chat.completions.create(model=c.model, messages=turns, tools=[EVERY_TYPE])
    covers(c, "a call of responses sent to chat", answer.usage.prompt_tokens_details.cached_tokens, first.usage.total_tokens)


def errors(c):
    stranger = {"role": "assistant", "content": "", "tool_calls": [{"id": "call_of_another", "type": "function", "function": {"name": "every_type", "arguments": '{"s": "x"}'}}]}
    turns = [{"role": "user", "content": ASKED}, stranger, {"role": "tool", "tool_call_id": "call_of_another", "content": RESULT}]
    answer = client_of(c).chat.completions.create(model=c.model, messages=turns, tools=[EVERY_TYPE])
    c.equal("a call of another server is accepted", answer.choices[0].message.content, "It is 21 degrees in Paris.")
    body = lambda: client_of(c).chat.completions.create(model=c.model, messages=turns[:2], tools=[EVERY_TYPE])  # noqa: E731
    c.raises("a call without its result", openai.BadRequestError, body, "tool_call")


if __name__ == "__main__":
    main(chat, messages, responses, across, errors)
