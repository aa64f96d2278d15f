#!/usr/bin/env python3
"""A long agent session against a running server with the OpenAI Python SDK (pip install openai).

    session.py http://127.0.0.1:8000/v1 [--model NAME] [--turns 20] [--tokens 65536]

Every turn sends the whole conversation again with new text (as from a tool), until it has about --tokens tokens. Prints
one line per turn. Reusable are the whole blocks of 256 tokens of the previous turn's prompt and answer; the answer's last
token was chosen and never computed, so it does not count. Exits 1 when a turn from the second on reused less than 98 % of
them, or when a turn has no reason why no more was reused.
"""
import argparse
import random
import sys
import time

import openai

BLOCK = 256
LEAST = 0.98
NAMES = "Anna Bruno Clara David Elena Felix Greta Hugo Irene Jonas Klara Lukas Marta Nora Oscar Paula Rosa Simon".split()
THINGS = "a lamp|an old book|a red coat|two letters|the wrong key|a map of the town|some bread|a small boat".split("|")
PLACES = "in the kitchen|near the river|behind the church|at the market|under the bridge|in room 12".split("|")


def filler(numbers, characters):
    """Sentences that never come twice in the same order."""
    text = []
    while characters > 0:
        who, other = numbers.sample(NAMES, 2)
        text.append(f"{who} and {other} found {numbers.choice(THINGS)} {numbers.choice(PLACES)} on day {numbers.randrange(1000)}.")
        characters -= len(text[-1]) + 1
    return " ".join(text)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("base_url")
    parser.add_argument("--model", help="default: the first model of the list")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=65536, help="length of the last prompt, about")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    client = openai.OpenAI(base_url=args.base_url, api_key="none", max_retries=0, timeout=3600)
    model = args.model or client.models.list().data[0].id
    numbers = random.Random(args.seed)
    messages = [{"role": "system", "content": "You are an agent that reads reports."}]
    rate, size, before, failed = 3.0, 0, 0, 0
    print("turn   prompt   cached   reusable    share   seconds   ended by", flush=True)
    for turn in range(1, args.turns + 1):
        want = max(1, args.tokens * turn // args.turns - size)
        text = filler(numbers, want * rate)
        messages.append({"role": "user", "content": f"Report {turn}: {text} What did they find?"})
        began = time.monotonic()
        answer = client.chat.completions.create(
            model=model, messages=messages, temperature=0, max_tokens=60,
            extra_body={"thinking": {"type": "disabled"}, "prefix_report": True},
        )
        seconds = time.monotonic() - began
        messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
        usage, report = answer.usage, getattr(answer, "prefix_report", None) or {}
        cached = (usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens) or 0
        reusable = max(0, before - 1) // BLOCK * BLOCK
        share = cached / reusable if reusable else 1.0
        good = bool(report.get("ended_by")) and (turn == 1 or share >= LEAST)
        failed += not good
        reason = report.get("ended_by") or "no reason given"
        print(
            f"{turn:4} {usage.prompt_tokens:8} {cached:8} {reusable:10} {100 * share:7.1f}% {seconds:9.1f}   {reason}"
            + ("" if good else f"   FAIL {report.get('text', '')}"),
            flush=True,
        )
        if usage.prompt_tokens - size > 100:
            rate = len(text) / (usage.prompt_tokens - size)
        before = usage.prompt_tokens + usage.completion_tokens
        size = before
    print(f"{args.turns - failed} of {args.turns} turns reused what they could, with a reason for the rest")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
