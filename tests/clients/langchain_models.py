#!/usr/bin/env python3
"""langchain-openai and langchain-deepseek: langchain_models.py BASE_URL (see checks.py).

Whole and streamed answers, reasoning in additional_kwargs, bound tools with their results, structured output, usage, errors.
"""
import openai
import pydantic
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_deepseek import ChatDeepSeek
from langchain_openai import ChatOpenAI

from checks import THINKING_OFF, main


class Person(pydantic.BaseModel):
    """A person."""

    name: str
    age: int


@tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return "21 degrees" if city == "Paris" else "unknown"


def open_ai(c, **options):
    return ChatOpenAI(model=c.model, base_url=c.v1, api_key="none", max_retries=0, timeout=60, **options)


def deep_seek(c, **options):
    return ChatDeepSeek(model=c.model, api_base=c.v1, api_key="none", max_retries=0, timeout=60, **options)


def joined(chunks):
    total = None
    for chunk in chunks:
        total = chunk if total is None else total + chunk
    return total


def both(c):
    for name, make in {"ChatOpenAI": open_ai, "ChatDeepSeek": deep_seek}.items():
        model = make(c)
        answer = model.invoke([SystemMessage("Be brief."), HumanMessage("What is the capital of Norway?")])
        c.equal(f"{name}: invoke", answer.content, "The capital of Norway is Oslo.")
        c.check(f"{name}: usage", answer.usage_metadata["output_tokens"] > 0 and answer.usage_metadata["output_token_details"]["reasoning"] > 0, answer.usage_metadata)
        c.equal(f"{name}: finish reason", answer.response_metadata["finish_reason"], "stop")
        total = joined(make(c, stream_usage=True).stream("What is the capital of Norway?"))
        c.check(f"{name}: stream", isinstance(total, AIMessageChunk) and total.content == "The capital of Norway is Oslo.", total.content)
        c.check(f"{name}: stream usage", total.usage_metadata and total.usage_metadata["output_tokens"] > 0, total.usage_metadata)
        off = make(c, extra_body=THINKING_OFF).invoke("What is the capital of Sweden?")
        c.equal(f"{name}: thinking off", off.content, "The capital of Sweden is Stockholm.")

        with_tools = model.bind_tools([get_weather])
        asked = [HumanMessage("What is the weather in Paris?")]
        first = with_tools.invoke(asked)
        c.equal(f"{name}: call", [(k["name"], k["args"]) for k in first.tool_calls], [("get_weather", {"city": "Paris"})])
        results = [ToolMessage(get_weather.invoke(k["args"]), tool_call_id=k["id"]) for k in first.tool_calls]
        c.equal(f"{name}: answer after the result", with_tools.invoke([*asked, first, *results]).content, "It is 21 degrees in Paris.")
        total = joined(with_tools.stream("The weather in Rome and Oslo?"))
        c.equal(f"{name}: parallel calls, streamed", [k["args"]["city"] for k in total.tool_calls], ["Rome", "Oslo"])

        person = model.with_structured_output(Person, method="json_mode").invoke("Give a person as JSON")
        c.equal(f"{name}: structured output by json_mode", person, Person(name="Ada", age=36))
        c.raises(f"{name}: error", openai.BadRequestError, lambda: make(c, temperature=9).invoke("x"), "temperature")


def forced_tools(c):
    for name, make in {"ChatOpenAI": open_ai, "ChatDeepSeek": deep_seek}.items():
        model = make(c)
        person = model.with_structured_output(Person, method="function_calling").invoke("Give a person by tool")
        c.equal(f"{name}: structured output by a forced tool", person, Person(name="Ada", age=36))


def schemas(c):
    model = open_ai(c)
    person = model.with_structured_output(Person, method="json_schema").invoke("Give a person as JSON")
    c.equal("ChatOpenAI: structured output by json_schema", person, Person(name="Ada", age=36))
    # ChatDeepSeek makes a forced tool of a schema.
    person = deep_seek(c).with_structured_output(Person, method="json_schema").invoke("Give a person by tool")
    c.equal("ChatDeepSeek: structured output by json_schema", person, Person(name="Ada", age=36))


def reasoning(c):
    answer = deep_seek(c).invoke("What is the capital of Norway?")
    c.equal("ChatDeepSeek: reasoning", answer.additional_kwargs.get("reasoning_content"), "They ask for a city.")
    total = joined(deep_seek(c).stream("What is the capital of Norway?"))
    c.equal("ChatDeepSeek: reasoning, streamed", total.additional_kwargs.get("reasoning_content"), "They ask for a city.")


def responses(c):
    model = open_ai(c, use_responses_api=True)
    answer = model.invoke("What is the capital of Norway?")
    c.equal("Responses: invoke", answer.text if isinstance(answer.text, str) else answer.text(), "The capital of Norway is Oslo.")
    with_tools = model.bind_tools([get_weather])
    asked = [HumanMessage("What is the weather in Paris?")]
    first = with_tools.invoke(asked)
    c.equal("Responses: call", [(k["name"], k["args"]) for k in first.tool_calls], [("get_weather", {"city": "Paris"})])
    results = [ToolMessage("21 degrees", tool_call_id=k["id"]) for k in first.tool_calls]
    last = with_tools.invoke([*asked, first, *results])
    c.equal("Responses: answer after the result", last.text if isinstance(last.text, str) else last.text(), "It is 21 degrees in Paris.")


async def asynchronous(c):
    text = ""
    async for chunk in open_ai(c).astream("What is the capital of Norway?"):
        text += chunk.content
    c.equal("ChatOpenAI: asynchronous stream", text, "The capital of Norway is Oslo.")


if __name__ == "__main__":
    main(both, forced_tools, schemas, reasoning, responses, asynchronous)
