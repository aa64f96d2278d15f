#!/usr/bin/env python3
"""Agent frameworks: openai-agents and pydantic-ai: agent_sdks.py BASE_URL (see checks.py).

Each runs an agent with a tool to its end, hands over to another agent, and asks for typed output, on the chat and the
Responses API, whole and streamed; pydantic-ai also on the Messages API.
"""
import agents
import openai
import pydantic
import pydantic_ai
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from checks import main


class Person(pydantic.BaseModel):
    name: str
    age: int


CHAT_AND_RESPONSES = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}


def client_of(c):
    agents.set_tracing_disabled(True)
    return openai.AsyncOpenAI(base_url=c.v1, api_key="none", max_retries=0, timeout=60)


async def openai_agents(c):
    client = client_of(c)
    called = []

    @agents.function_tool
    def get_weather(city: str) -> str:
        """Get the weather in a city."""
        called.append(city)
        return "21 degrees"

    for name, kind in CHAT_AND_RESPONSES.items():
        model = kind(model=c.model, openai_client=client)
        called.clear()
        agent = agents.Agent(name="helper", instructions="Help.", model=model, tools=[get_weather])
        result = await agents.Runner.run(agent, "What is the weather in Paris?")
        c.equal(f"openai-agents, {name}: tool ran", called, ["Paris"])
        c.equal(f"openai-agents, {name}: answer", result.final_output, "It is 21 degrees in Paris.")
        called.clear()
        streamed = agents.Runner.run_streamed(agent, "What is the weather in Paris?")
        kinds = [event.type async for event in streamed.stream_events()]
        c.equal(f"openai-agents, {name}, streamed: tool ran", called, ["Paris"])
        c.equal(f"openai-agents, {name}, streamed: answer", streamed.final_output, "It is 21 degrees in Paris.")
        c.check(f"openai-agents, {name}, streamed: events", {"raw_response_event", "run_item_stream_event"} <= set(kinds))
        poet = agents.Agent(name="poet", instructions="Write poems.", model=model)
        front = agents.Agent(name="front", instructions="Hand over.", model=model, handoffs=[poet])
        result = await agents.Runner.run(front, "Please ask the poet")
        c.equal(f"openai-agents, {name}: hand-over", (result.last_agent.name, result.final_output), ("poet", "Roses are red."))
        typed = agents.Agent(name="typed", model=model, output_type=Person)
        result = await agents.Runner.run(typed, "Give a person as JSON")
        c.equal(f"openai-agents, {name}: typed output", result.final_output, Person(name="Ada", age=36))
        mistake = agents.Agent(name="mistake", model=model, model_settings=agents.ModelSettings(temperature=9))
        try:
            await agents.Runner.run(mistake, "x")
            c.check(f"openai-agents, {name}: error", False, "accepted")
        except openai.BadRequestError as error:
            c.check(f"openai-agents, {name}: error", "temperature" in str(error), error)


async def openai_agents_forced(c):
    @agents.function_tool
    def get_weather(city: str) -> str:
        """Get the weather in a city."""
        return "21 degrees"

    client = client_of(c)
    for name, kind in CHAT_AND_RESPONSES.items():
        settings = agents.ModelSettings(tool_choice="required")
        model = kind(model=c.model, openai_client=client)
        agent = agents.Agent(name="must", model=model, tools=[get_weather], model_settings=settings)
        result = await agents.Runner.run(agent, "forced weather")
        c.equal(f"openai-agents, {name}: forced tool", result.final_output, "It is 21 degrees in Paris.")


def models_of(c):
    client = client_of(c)
    return {
        "chat": OpenAIChatModel(c.model, provider=OpenAIProvider(openai_client=client)),
        "responses": OpenAIResponsesModel(c.model, provider=OpenAIProvider(openai_client=client)),
        "messages": AnthropicModel(c.model, provider=AnthropicProvider(base_url=c.base_url, api_key="none")),
    }


async def pydantic_agents(c):
    for name, model in models_of(c).items():
        called = []
        agent = pydantic_ai.Agent(model, instructions="Help.")

        @agent.tool_plain
        def get_weather(city: str) -> str:
            """Get the weather in a city."""
            called.append(city)
            return "21 degrees"

        result = await agent.run("What is the weather in Paris?")
        c.equal(f"pydantic-ai, {name}: tool ran", called, ["Paris"])
        c.equal(f"pydantic-ai, {name}: answer", result.output, "It is 21 degrees in Paris.")
        async with agent.run_stream("What is the capital of Norway?") as streamed:
            c.equal(f"pydantic-ai, {name}, streamed", await streamed.get_output(), "The capital of Norway is Oslo.")
        messages = (await agent.run("What is the capital of Norway?")).new_messages()
        thoughts = [part for message in messages for part in message.parts if part.part_kind == "thinking"]
        # Reasoning that is not a summary is kept aside on the Responses API.
        said = [part.content or "".join(part.provider_details["raw_content"]) for part in thoughts]
        c.equal(f"pydantic-ai, {name}: reasoning", said, ["They ask for a city."])
        if name == "messages":
            continue  # It offers schemas only for models of Anthropic.
        native = pydantic_ai.Agent(model, output_type=pydantic_ai.NativeOutput(Person))
        result = await native.run("Give a person as JSON")
        c.equal(f"pydantic-ai, {name}: typed output by schema", result.output, Person(name="Ada", age=36))


async def pydantic_agents_forced(c):
    for name, model in models_of(c).items():
        result = await pydantic_ai.Agent(model, output_type=Person).run("Give the final result")
        c.equal(f"pydantic-ai, {name}: typed output by a forced tool", result.output, Person(name="Ada", age=36))


if __name__ == "__main__":
    main(openai_agents, openai_agents_forced, pydantic_agents, pydantic_agents_forced)
