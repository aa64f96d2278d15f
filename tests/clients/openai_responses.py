#!/usr/bin/env python3
"""The OpenAI Python SDK on the Responses API: openai_responses.py BASE_URL (see checks.py).

Whole and streamed responses, reasoning items, function calls with their outputs (by previous_response_id and by sending
the items again), custom tools, structured output by `parse`, retrieve, delete, cancel, input items, and errors.
"""
import itertools
import json

import openai

from checks import main
from openai_sdk import Person, client_of

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def create(c, asked, /, **options):
    return client_of(c).responses.create(model=c.model, input=asked, **options)


def by_type(response, kind):
    return [item for item in response.output if item.type == kind]


def whole(c):
    response = create(c, "What is the capital of Norway?", instructions="Be brief.", max_output_tokens=500, metadata={"k": "v"})
    c.equal("text", response.output_text, "The capital of Norway is Oslo.")
    c.equal("object, status", (response.object, response.status, response.error), ("response", "completed", None))
    c.equal("item kinds", [item.type for item in response.output], ["reasoning", "message"])
    reasoning = by_type(response, "reasoning")[0]
    c.equal("reasoning text", [(part.type, part.text) for part in reasoning.content or []], [("reasoning_text", "They ask for a city.")])
    message = by_type(response, "message")[0]
    c.equal("message", (message.role, message.status, message.content[0].type), ("assistant", "completed", "output_text"))
    c.check("ids", response.id.startswith("resp_") and message.id.startswith("msg_") and reasoning.id.startswith("rs_"), response.id)
    usage = response.usage
    c.check("usage", usage.total_tokens == usage.input_tokens + usage.output_tokens and usage.output_tokens_details.reasoning_tokens > 0, usage)
    c.equal("the request's settings come back", (response.instructions, response.max_output_tokens, response.metadata), ("Be brief.", 500, {"k": "v"}))
    response = create(c, "What is the capital of Sweden?", reasoning={"effort": "none"})
    c.equal("effort none: no reasoning item", [item.type for item in response.output], ["message"])
    parts = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": [{"type": "input_text", "text": "capital of Norway"}]}]
    c.equal("input as items", create(c, parts, reasoning={"effort": "low"}).output_text, "The capital of Norway is Oslo.")
    response = create(c, "a long story", max_output_tokens=5, reasoning={"effort": "none"})
    c.equal("cut: status", (response.status, response.incomplete_details.reason), ("incomplete", "max_output_tokens"))


def streamed(c):
    events = list(create(c, "What is the capital of Norway?", stream=True))
    kinds = [event.type for event in events]
    c.equal("stream: begins", kinds[:2], ["response.created", "response.in_progress"])
    c.equal("stream: ends", kinds[-1], "response.completed")
    c.equal("stream: sequence numbers rise by one", [event.sequence_number for event in events], list(range(events[0].sequence_number, events[0].sequence_number + len(events))))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    c.equal("stream: text", text, "The capital of Norway is Oslo.")
    thought = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    c.equal("stream: reasoning", thought, "They ask for a city.")
    added = [event.item.type for event in events if event.type == "response.output_item.added"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    c.equal("stream: items added and done", (added, [item.type for item in done]), (["reasoning", "message"], ["reasoning", "message"]))
    final = events[-1].response
    c.equal("stream: the last event holds the items", [item.id for item in final.output], [item.id for item in done])
    c.check("stream: usage", final.usage.output_tokens > 0)
    order = ["response.content_part.added", "response.output_text.delta", "response.output_text.done", "response.content_part.done"]
    inside = [event.type for event in events if getattr(event, "item_id", None) == done[-1].id]
    c.equal("stream: order inside the message", [kind for kind, _ in itertools.groupby(inside)], order)
    with client_of(c).responses.stream(model=c.model, input="What is the capital of Norway?") as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    c.equal("stream helper", final.output_text, "The capital of Norway is Oslo.")


def functions(c):
    first = create(c, "What is the weather in Paris?", tools=[WEATHER], tool_choice="auto")
    calls = by_type(first, "function_call")
    c.equal("call", [(k.name, json.loads(k.arguments), k.status) for k in calls], [("get_weather", {"city": "Paris"}, "completed")])
    c.equal("call: item kinds", [item.type for item in first.output], ["reasoning", "message", "function_call"])
    result = {"type": "function_call_output", "call_id": calls[0].call_id, "output": "21 degrees"}
    answer = create(c, [result], previous_response_id=first.id, tools=[WEATHER])
    c.equal("call: answer by previous_response_id", answer.output_text, "It is 21 degrees in Paris.")
    c.equal("call: previous_response_id comes back", answer.previous_response_id, first.id)
    c.check("call: the earlier turn is reused", answer.usage.input_tokens_details.cached_tokens > 100, answer.usage.input_tokens_details)
    again = [{"role": "user", "content": "What is the weather in Paris?"}]
    again += [item.model_dump(exclude_none=True) for item in first.output] + [result]
    answer = create(c, again, tools=[WEATHER], store=False)
    c.equal("call: answer with all items sent again", answer.output_text, "It is 21 degrees in Paris.")
    events = list(create(c, "What is the weather in Paris?", tools=[WEATHER], stream=True))
    text = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    c.equal("call, streamed", (json.loads(text), json.loads(done[0].arguments)), ({"city": "Paris"}, {"city": "Paris"}))
    both = by_type(create(c, "The weather in Rome and Oslo?", tools=[WEATHER]), "function_call")
    c.equal("parallel calls", [json.loads(k.arguments)["city"] for k in both], ["Rome", "Oslo"])
    c.equal("parallel calls: call ids differ", len({k.call_id for k in both}), 2)


def custom_tools(c):
    patch = {"type": "custom", "name": "apply_patch", "description": "Changes files."}
    custom = by_type(create(c, "codex: patch", tools=[patch]), "custom_tool_call")
    c.check("custom tool", custom and custom[0].input.startswith("*** Begin Patch\n*** Add File: made.txt\n+hello from codex"), custom)
    if custom:
        items = [{"role": "user", "content": "codex: patch"}, custom[0].model_dump(exclude_none=True)]
        items.append({"type": "custom_tool_call_output", "call_id": custom[0].call_id, "output": "A made.txt"})
        c.equal("custom tool: answer", create(c, items, tools=[patch]).output_text, "The patch is applied.")


def forced_tools(c):
    for name, choice in {"required": "required", "a named function": {"type": "function", "name": "get_weather"}}.items():
        forced = create(c, "forced weather", tools=[WEATHER], tool_choice=choice)
        c.check(f"tool_choice {name}", by_type(forced, "function_call"), [item.type for item in forced.output])


def structured(c):
    parsed = client_of(c).responses.parse(model=c.model, input="Give a person as JSON", text_format=Person)
    c.equal("parse", parsed.output_parsed, Person(name="Ada", age=36))
    with client_of(c).responses.stream(model=c.model, input="Give a person as JSON", text_format=Person) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    c.equal("parse, streamed", final.output_parsed, Person(name="Ada", age=36))
    response = create(c, "Give a person as JSON", text={"format": {"type": "json_object"}})
    c.equal("text.format json_object", json.loads(response.output_text), {"name": "Ada", "age": 36})


def stored(c):
    client = client_of(c)
    first = create(c, "What is the capital of Sweden?", reasoning={"effort": "none"})
    found = client.responses.retrieve(first.id)
    c.equal("retrieve", (found.id, found.output_text), (first.id, first.output_text))
    follow = create(c, "What is the capital of Sweden?", previous_response_id=first.id, reasoning={"effort": "none"})
    c.equal("previous_response_id", follow.output_text, "The capital of Sweden is Stockholm.")
    c.check("previous_response_id: the prompt holds the earlier turn", follow.usage.input_tokens > first.usage.input_tokens, follow.usage)
    try:
        kinds = [event.type for event in client.responses.retrieve(first.id, stream=True)]
        c.equal("retrieve as a stream", kinds[-1:], ["response.completed"])
    except openai.BadRequestError as error:
        c.check("retrieve as a stream is refused clearly", "stream" in str(error), error)
    items = client.responses.input_items.list(first.id).data
    c.check("input items", items and items[0].type == "message", items)
    unstored = create(c, "What is the capital of Norway?", store=False)
    c.raises("store false is not kept", openai.NotFoundError, lambda: client.responses.retrieve(unstored.id), unstored.id)
    client.responses.delete(first.id)
    c.raises("deleted", openai.NotFoundError, lambda: client.responses.retrieve(first.id), first.id)
    c.raises("unknown response", openai.NotFoundError, lambda: client.responses.retrieve("resp_none"), "resp_none")
    body = lambda: create(c, "x", previous_response_id="resp_none")  # noqa: E731
    error = c.raises("unknown previous_response_id", openai.APIStatusError, body, "resp_none")
    c.check("unknown previous_response_id: status", error and error.status_code in (400, 404), error and error.status_code)


def background(c):
    client = client_of(c)
    response = create(c, "a slow answer", background=True)
    c.check("background: accepted", response.status in ("queued", "in_progress"), response.status)
    cancelled = client.responses.cancel(response.id)
    c.equal("background: cancelled", cancelled.status, "cancelled")
    c.equal("background: stays cancelled", client.responses.retrieve(response.id).status, "cancelled")
    c.raises("cancel of an unknown response", openai.NotFoundError, lambda: client.responses.cancel("resp_none"), "resp_none")


def errors(c):
    def refused(name, param, text="What is the capital of Norway?", **options):
        error = c.raises(f"error: {name}", openai.BadRequestError, lambda: create(c, text, **options))
        if error is not None:
            body = error.body or {}
            c.check(f"error: {name}: param {param}", str(body.get("param")).startswith(param) and body.get("message"), body)

    refused("no input", "input", text=[])
    refused("temperature", "temperature", temperature=3)
    refused("unknown effort", "reasoning", reasoning={"effort": "enormous"})
    refused("tool without a name", "tools", tools=[{"type": "function", "parameters": {}}])
    refused("output of no call", "input", text=[{"type": "function_call_output", "call_id": "none", "output": "x"}])
    c.raises("unknown model", openai.NotFoundError, lambda: client_of(c).responses.create(model="gpt-9", input="x"), "gpt-9")
    c.raises("error of the engine", openai.InternalServerError, lambda: create(c, "break the engine"), "the engine broke")
    kinds = []

    def read():
        for event in create(c, "break the engine", stream=True):
            kinds.append(event.type)
            if event.type in ("error", "response.failed"):
                raise openai.OpenAIError(event.to_json())

    c.raises("error of the engine, streamed", openai.OpenAIError, read, "the engine broke")


if __name__ == "__main__":
    main(whole, streamed, functions, custom_tools, forced_tools, structured, stored, background, errors)
