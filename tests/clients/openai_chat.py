#!/usr/bin/env python3
"""Black-box check of a running server with the OpenAI Python SDK (pip install openai).

    openai_chat.py http://127.0.0.1:8000/v1 [--model NAME] [--any-text]

Prints one line per check and exits 1 when one failed. The expected texts are those of the embedded tiny model, which
was trained without the effort text that high and max effort put into the prompt: requests that think therefore ask for
reasoning_effort "low". With --any-text the wording is not compared (other models, scripted servers).
"""
import argparse
import json
import sys

import openai

CAPITAL = [{"role": "user", "content": "What is the capital of Norway?"}]
OSLO = "The capital of Norway is Oslo."
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "City name"}},
            "required": ["city"],
        },
    },
}
OFF = {"thinking": {"type": "disabled"}}


class Checks:
    def __init__(self, any_text):
        self.any_text = any_text
        self.failed = 0

    def check(self, name, good, detail=""):
        self.failed += not good
        print(f"{'ok  ' if good else 'FAIL'} {name}" + (f": {detail}" if detail else ""), flush=True)

    def text(self, name, got, want):
        good = bool(got.strip()) if self.any_text else got.strip() == want
        self.check(name, good, repr(got))

    def run(self, name, body):
        """A check that raises is a failed check, and the others still run."""
        try:
            body()
        except Exception as error:  # noqa: BLE001
            self.check(name, False, f"{type(error).__name__}: {error}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("base_url")
    parser.add_argument("--model", help="default: the first model of the list")
    parser.add_argument("--any-text", action="store_true")
    args = parser.parse_args()
    client = openai.OpenAI(base_url=args.base_url, api_key="none", max_retries=0, timeout=120)
    checks = Checks(args.any_text)

    models = client.models.list().data
    checks.check("models list", len(models) > 0, ", ".join(f"{m.id} ({m.max_model_len} tokens)" for m in models))
    model = args.model or models[0].id
    checks.check("one model", client.models.retrieve(model).id.lower() == model.lower())

    def ask(messages=CAPITAL, **options):
        # Greedy, so that the answer is the model's own and not the dice's.
        return client.chat.completions.create(**{"model": model, "messages": messages, "temperature": 0, "max_tokens": 100} | options)

    def chat():
        answer = ask(extra_body=OFF)
        choice = answer.choices[0]
        checks.text("chat, thinking off", choice.message.content, OSLO)
        checks.check("finish reason stop", choice.finish_reason == "stop", choice.finish_reason)
        checks.check("no reasoning", not getattr(choice.message, "reasoning_content", None))
        usage = answer.usage
        checks.check("usage adds up", usage.total_tokens == usage.prompt_tokens + usage.completion_tokens > 0, f"{usage.prompt_tokens} + {usage.completion_tokens}")
        cut = ask(extra_body=OFF, max_tokens=2)
        checks.check("max_tokens cuts", (cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("length", 2))

    def stream():
        text, usage, finish = "", None, None
        for chunk in ask(extra_body=OFF, stream=True, stream_options={"include_usage": True}):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
        checks.text("stream, thinking off", text, OSLO)
        checks.check("stream ends with stop and usage", finish == "stop" and usage is not None and usage.completion_tokens > 0)

    def thinking():
        answer = ask(reasoning_effort="low")
        message = answer.choices[0].message
        checks.text("thinking: reasoning", message.reasoning_content, OSLO)
        checks.text("thinking: content", message.content, OSLO)
        checks.check("thinking: both names", message.reasoning == message.reasoning_content)
        reasoning_tokens = answer.usage.completion_tokens_details.reasoning_tokens
        checks.check("thinking: reasoning tokens", 0 < reasoning_tokens < answer.usage.completion_tokens, str(reasoning_tokens))
        parts = {"reasoning_content": "", "content": ""}
        for chunk in ask(reasoning_effort="low", stream=True):
            for choice in chunk.choices:
                for name in parts:
                    parts[name] += getattr(choice.delta, name, None) or ""
        checks.check("thinking: stream joins to the same", (parts["reasoning_content"], parts["content"]) == (message.reasoning_content, message.content))

    def tools(name, **options):
        messages = [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": "What is the weather in Paris?"},
        ]
        first = ask(messages, tools=[WEATHER], **options).choices[0]
        calls = first.message.tool_calls or []
        good = len(calls) == 1 and calls[0].function.name == "get_weather" and "city" in json.loads(calls[0].function.arguments)
        checks.check(f"{name}: structured call", good, repr(first.message.content or "") + " " + str([c.function for c in calls]))
        checks.check(f"{name}: finish reason tool_calls", first.finish_reason == "tool_calls", first.finish_reason)
        checks.check(f"{name}: no markup in the content", "DSML" not in (first.message.content or ""))
        if not good:
            return
        arguments, call_id = "", None
        for chunk in ask(messages, tools=[WEATHER], stream=True, **options):
            for choice in chunk.choices:
                for call in choice.delta.tool_calls or []:
                    call_id = call_id or call.id
                    arguments += call.function.arguments or ""
        checks.check(f"{name}: streamed call", bool(call_id) and arguments == calls[0].function.arguments, arguments)

        result = json.dumps({"city": "Paris", "temperature": 21, "condition": "sunny"})
        messages.append(first.message.model_dump(exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": calls[0].id, "content": result})
        final = ask(messages, tools=[WEATHER], **options).choices[0]
        checks.text(f"{name}: answer after the result", final.message.content, "It is 21 degrees and sunny in Paris.")
        checks.check(f"{name}: no second call", not final.message.tool_calls)

    def error_cases():
        def refused(name, kind, words, **options):
            try:
                ask(**options)
            except kind as error:
                body = error.body or {}
                complete = all(key in body for key in ("message", "type", "param", "code"))
                checks.check(f"error: {name}", complete and words in str(error), str(body.get("message")))
            else:
                checks.check(f"error: {name}", False, "accepted")

        bad = openai.BadRequestError
        refused("unknown model", openai.NotFoundError, "gpt-9", model="gpt-9")
        refused("empty messages", bad, "messages", messages=[])
        refused("wrong type", bad, "temperature", temperature="hot")
        refused("unknown effort", bad, "reasoning_effort", reasoning_effort="enormous")
        refused("unknown role", bad, "messages[0]", messages=[{"role": "wizard", "content": "x"}])
        refused("over the context", bad, "context length", max_tokens=100_000_000)
        refused("too many answers", bad, "n:", n=500)
        answer = ask(extra_body=OFF | {"a_field_from_the_future": 1})
        checks.check("unknown fields are ignored", bool(answer.choices))

    checks.run("chat", chat)
    checks.run("stream", stream)
    checks.run("thinking", thinking)
    checks.run("tools", lambda: tools("tools", extra_body=OFF))
    checks.run("tools, thinking", lambda: tools("tools, thinking", reasoning_effort="low"))
    checks.run("errors", error_cases)
    print("all checks passed" if not checks.failed else f"{checks.failed} checks failed")
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
