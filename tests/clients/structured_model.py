#!/usr/bin/env python3
"""Constrained answers of the tiny model through the SDKs: structured_model.py BASE_URL [--model longwave-tiny] (see checks.py).

A server that runs a model, not a script. Sampled at temperature 1 with several seeds, so the model alone would hardly ever
write what is asked for: the grammar must hold in every answer, thinking or not, streamed or not, on all three protocols.
"""
import json
import re
import typing

import anthropic
import openai
import pydantic

from checks import THINKING_OFF, main

SEEDS = range(4)


class Trip(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    city: typing.Literal["Oslo", "Rome", "Paris"]
    days: typing.Annotated[int, pydantic.Field(ge=1, le=99)]
    sure: bool
    stops: typing.Annotated[list[typing.Literal["sea", "hill"]], pydantic.Field(min_length=1, max_length=3)]


SCHEMA = Trip.model_json_schema()
TOOL = {"type": "function", "function": {"name": "plan_trip", "description": "Plan a trip.", "strict": True, "parameters": SCHEMA}}
LOW = {"reasoning_effort": "low"}
OFF = {"extra_body": THINKING_OFF}
ASKED = [{"role": "user", "content": "Plan a trip."}]


def client_of(c):
    return openai.OpenAI(base_url=c.v1, api_key="none", max_retries=0, timeout=300)


def ask(c, seed, **options):
    return client_of(c).chat.completions.create(**{"model": c.model, "messages": ASKED, "max_tokens": 400, "seed": seed, "temperature": 1} | options)


def fails(texts, read):
    """The texts that `read` does not take."""
    bad = []
    for text in texts:
        try:
            read(text)
        except Exception as error:  # noqa: BLE001
            bad.append(f"{text!r}: {str(error)[:100]}")
    return bad


def held(c, name, texts, read=Trip.model_validate_json):
    bad = fails(texts, read)
    c.check(f"{name}: {len(texts)} answers hold", not bad and texts, bad or texts[0])


def schemas(c):
    asked = {"response_format": {"type": "json_schema", "json_schema": {"name": "trip", "strict": True, "schema": SCHEMA}}}
    for name, mode in {"no thinking": OFF, "thinking": LOW}.items():
        answers = [ask(c, seed, **asked, **mode).choices[0] for seed in SEEDS]
        # The thought of a model of this size may not end; what follows a thought that ends must hold.
        held(c, f"json_schema, {name}", [a.message.content for a in answers if a.finish_reason == "stop"])
    texts = []
    for seed in SEEDS:
        texts.append("".join(k.choices[0].delta.content or "" for k in ask(c, seed, **asked, **OFF, stream=True) if k.choices))
    held(c, "json_schema, streamed", texts)
    parsed = [client_of(c).chat.completions.parse(model=c.model, messages=ASKED, response_format=Trip, seed=s, **OFF).choices[0].message.parsed for s in SEEDS]
    c.check("parse", all(isinstance(p, Trip) for p in parsed), parsed[0])
    parsed = client_of(c).responses.parse(model=c.model, input="Plan a trip.", text_format=Trip, reasoning={"effort": "none"}).output_parsed
    c.check("responses.parse", isinstance(parsed, Trip), parsed)
    answers = [ask(c, seed, response_format={"type": "json_object"}, **OFF).choices[0] for seed in SEEDS]
    done = [a.message.content for a in answers if a.finish_reason == "stop"]
    bad = fails(done, lambda text: isinstance(json.loads(text), dict) or json.loads(None))
    c.check("json_object: what ends is an object", not bad, bad or f"{len(done)} of {len(answers)} ended")


def tools(c):
    for name, mode in {"no thinking": OFF, "thinking": LOW}.items():
        for what, choice in {"required": "required", "named": {"type": "function", "function": {"name": "plan_trip"}}}.items():
            answers = [ask(c, seed, tools=[TOOL], tool_choice=choice, **mode).choices[0] for seed in SEEDS]
            calls = [a.message.tool_calls for a in answers if a.finish_reason == "tool_calls"]
            held(c, f"tool_choice {what}, {name}", [call[0].function.arguments for call in calls])
            c.check(f"tool_choice {what}, {name}: no markup", not any("DSML" in (a.message.content or "") for a in answers))
    client = anthropic.Anthropic(base_url=c.base_url, api_key="none", max_retries=0, timeout=300)
    tool = {"name": "plan_trip", "strict": True, "input_schema": SCHEMA}
    off = {"type": "disabled"}
    ask_claude = lambda **more: client.messages.create(model=c.model, max_tokens=400, messages=ASKED, thinking=off, **more)  # noqa: E731
    message = ask_claude(tools=[tool], tool_choice={"type": "any"})
    uses = [json.dumps(block.input) for block in message.content if block.type == "tool_use"]
    c.check("messages: tool_choice any: a call", uses or message.stop_reason == "max_tokens", message.stop_reason)
    if message.stop_reason == "tool_use":
        held(c, "messages: tool_choice any", uses[:1])
    # Arguments of a tool that is not strict are free, but they are called as the tool says.
    loose = ask(c, 1, tools=[{"type": "function", "function": TOOL["function"] | {"strict": False}}], tool_choice="required", **OFF).choices[0]
    if loose.finish_reason == "tool_calls":
        held(c, "tool_choice required, not strict", [loose.message.tool_calls[0].function.arguments], json.loads)


def guided(c):
    def outputs(field, value):
        return [ask(c, seed, extra_body=THINKING_OFF | {field: value}).choices[0].message.content for seed in SEEDS]

    def match(pattern):
        return lambda text: re.fullmatch(pattern, text).group()

    code = "[A-C]{2}-[0-9]{4}"
    grammar = 'start: "go " ("left" | "right") (" then " ("left" | "right"))? "."'
    held(c, "structured_outputs.regex", outputs("structured_outputs", {"regex": code}), match(code))
    held(c, "structured_outputs.choice", outputs("structured_outputs", {"choice": ["yes", "no"]}), match("yes|no"))
    held(c, "structured_outputs.json", outputs("structured_outputs", {"json": SCHEMA}))
    held(c, "structured_outputs.grammar", outputs("structured_outputs", {"grammar": grammar}), match(r"go (left|right)( then (left|right))?\."))
    held(c, "guided_regex", outputs("guided_regex", code), match(code))
    held(c, "guided_choice", outputs("guided_choice", ["yes", "no"]), match("yes|no"))


def errors(c):
    def refused(name, param, **options):
        error = c.raises(f"error: {name}", openai.BadRequestError, lambda: ask(c, 1, **options))
        if error is not None:
            c.check(f"error: {name}: param", str((error.body or {}).get("param")).startswith(param), error.body)

    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    refused("a schema that is none", "response_format", response_format=bad)
    refused("a regular expression that is none", "structured_outputs", extra_body={"structured_outputs": {"regex": "("}})
    refused("a grammar that is none", "structured_outputs", extra_body={"structured_outputs": {"grammar": "start: nothing"}})
    refused("two constraints", "structured_outputs", extra_body={"structured_outputs": {"regex": "a", "choice": ["a"]}})


if __name__ == "__main__":
    main(schemas, tools, guided, errors)
