#!/usr/bin/env python3
"""What pydantic makes of common types, as strict tools and response formats: schema_shapes.py BASE_URL [--model longwave-tiny].

A server that runs a model, not a script. The OpenAI SDK turns each type into a strict schema. Those that OpenAI's own strict
mode takes must be taken, and answers must hold; the others are taken as well or refused with the field named.
"""
import datetime
import decimal
import enum
import json
import typing
import uuid

import openai
import pydantic
from openai.lib._pydantic import to_strict_json_schema

from checks import THINKING_OFF, main

SEEDS = range(2)


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Part(pydantic.BaseModel):
    number: typing.Literal[1, 2]
    note: typing.Optional[typing.Literal["new", "old"]] = None


class Node(pydantic.BaseModel):
    value: typing.Literal["leaf", "branch"]
    kids: typing.Annotated[list["Node"], pydantic.Field(max_length=1)]


class Cat(pydantic.BaseModel):
    kind: typing.Literal["cat"]


class Dog(pydantic.BaseModel):
    kind: typing.Literal["dog"]


def limited(kind, **limits):
    return typing.Annotated[kind, pydantic.Field(**limits)]


# What OpenAI's strict mode documents. Texts and numbers have bounds, or a tiny model would not come to an end.
TAKEN = {
    "a date": datetime.date,
    "a date and time": datetime.datetime,
    "a time": datetime.time,
    "a duration": datetime.timedelta,
    "a UUID": uuid.UUID,
    "an optional number": typing.Optional[limited(int, ge=0, le=9)],
    "an object": Part,
    "a list of objects": limited(list[Part], min_length=1, max_length=2),
    "an enumeration": Colour,
    "a union": typing.Union[typing.Literal[1], Part],
    "one literal": typing.Literal["only"],
    "a recursion": Node,
    "a pattern": limited(str, pattern="^[ab]{2,4}$"),
    "a number in a range": limited(float, ge=0, le=1),
    "a multiple": limited(int, multiple_of=5, ge=0, le=100),
    "null": None,
}
MAYBE = {
    "an address": pydantic.AnyUrl,
    "a decimal": decimal.Decimal,
    "a map": dict[str, int],
    "a pair": tuple[int, str],
    "a union with a discriminator": limited(typing.Union[Cat, Dog], discriminator="kind"),
    "anything": typing.Any,
    "a set": set[int],
    "bytes": bytes,
}


def requests(c, kind):
    """(name, body, the answer's text of a choice) of both ways to give a schema; the model that reads answers."""
    model = pydantic.create_model("Answer", it=(kind, ...))
    schema = to_strict_json_schema(model)
    function = {"name": "answer", "strict": True, "parameters": schema}
    tool = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}}

    def arguments(choice):
        return choice.message.tool_calls[0].function.arguments if choice.finish_reason == "tool_calls" else None

    def content(choice):
        return choice.message.content if choice.finish_reason == "stop" else None

    return model, [("tool", tool, arguments), ("response_format", form, content)]


def ask(c, seed, tokens, body):
    client = openai.OpenAI(base_url=c.v1, api_key="none", max_retries=0, timeout=300)
    asked = [{"role": "user", "content": "Answer."}]
    common = {"model": c.model, "messages": asked, "max_tokens": tokens, "seed": seed, "temperature": 1, "extra_body": THINKING_OFF}
    return client.chat.completions.create(**common, **body).choices[0]


def taken(c):
    for name, kind in TAKEN.items():
        model, both = requests(c, kind)
        for where, body, text in both:
            try:
                texts = [text(ask(c, seed, 200, body)) for seed in SEEDS]
            except openai.BadRequestError as error:
                c.check(f"{name}, {where}", False, (error.body or {}).get("message"))
                continue
            ended = [t for t in texts if t is not None]
            wrong = []
            for answer in ended:
                try:
                    json.loads(answer)
                    model.model_validate_json(answer)
                except ValueError as error:
                    # A grammar knows no calendar: 31 February has the form of a date.
                    if not isinstance(kind, type) or kind.__module__ != "datetime":
                        wrong.append(f"{answer}: {error}")
            c.check(f"{name}, {where}", not wrong, wrong or f"{len(ended)} of {len(texts)} ended: {ended[:1]}")


def maybe(c):
    for name, kind in MAYBE.items():
        for where, body, _ in requests(c, kind)[1]:
            try:
                ask(c, 1, 2, body)
                c.check(f"{name}, {where}: taken", True)
            except openai.BadRequestError as error:
                param = str((error.body or {}).get("param"))
                c.check(f"{name}, {where}: refused, param {param}", param.startswith(where), (error.body or {}).get("message"))


if __name__ == "__main__":
    main(taken, maybe)
