#!/usr/bin/env python3
"""The outputs with which a scripted server answers the client tests: replies.py > FILE, longwave serve --script FILE.

One reply by phrase in the last user message or tool result; the first match wins, so results stand before questions that a
client may send along with them. A chat thinks unless the request says otherwise, so most outputs start inside a thought.
"""
import json

BAR = "｜DSML｜"


def call(tool, /, **arguments):
    """One invoke block, in the order and with the types of `arguments`."""
    lines = [f'<{BAR}invoke name="{tool}">']
    for key, value in arguments.items():
        text = isinstance(value, str)
        value = value if text else json.dumps(value)
        lines.append(f'<{BAR}parameter name="{key}" string="{json.dumps(text)}">{value}</{BAR}parameter>')
    return "\n".join([*lines, f"</{BAR}invoke>"])


def calls(*blocks):
    return "\n\n" + "\n".join([f"<{BAR}tool_calls>", *blocks, f"</{BAR}tool_calls>"])


PARIS = call("get_weather", city="Paris")
PATCH = "*** Begin Patch\n*** Add File: made.txt\n+hello from codex\n*** End Patch\n"
CODE = 'const r = await tools.exec_command({cmd: "echo hello from codex > made.txt && cat made.txt"}); text(r.output);'
SHELL = "echo hello from {} > made.txt && cat made.txt"

REPLIES = [
    # Results of tools.
    ("21 degrees", "It is 21.</think>It is 21 degrees in Paris."),
    ("rome is warm", "Both are known.</think>Rome is warm, Oslo is cold."),
    ("hello from codex", "It is there.</think>The file is written by codex."),
    ("hello from claude", "It is there.</think>The file is written by claude."),
    ("hello from opencode", "It is there.</think>The file is written by opencode."),
    ("A made.txt", "The patch applied.</think>The patch is applied."),
    ("agent id", "It does not exist.</think>There is no such agent."),
    ("File created successfully", "It is there.</think>The file is created."),
    # Plain answers.
    ("capital of Norway", "They ask for a city.</think>The capital of Norway is Oslo."),
    ("capital of Sweden", "The capital of Sweden is Stockholm."),
    ("count to six", "one two three four five six"),
    ("long story", "Once upon a time there was a", {"finish": "length"}),
    ("long thought", "I think and think and", {"finish": "length"}),
    ("slow answer", "Slow.</think>" + "word " * 200, {"token_delay_ms": 50}),
    ("late answer", "Late.</think>At last.", {"delay_ms": 3000}),
    ("break the engine", "", {"error": "the engine broke as the script says"}),
    ("Write it in Greek", "Καλό.</think>Γειά σου, κόσμε! 🌍"),
    # Tools.
    ("weather in Paris, no thought", "I will look." + calls(PARIS)),
    ("weather in Paris", "I need the weather.</think>I will look." + calls(PARIS)),
    ("weather in Rome and Oslo", "Two.</think>" + calls(call("get_weather", city="Rome"), call("get_weather", city="Oslo"))),
    (
        "every type of argument",
        "All.</think>"
        + calls(call("every_type", s='a"b\\c\n2>&1', n=3, x=1.5, b=True, o={"k": None, "l": [1]}, a=[1, "two"], e="")),
    ),
    ("forced weather", "I must.</think>" + calls(PARIS)),
    # The prompt has opened the block: a forced choice without thinking.
    ("forced at once", PARIS + f"\n</{BAR}tool_calls>"),
    # Structured output.
    ("a person as JSON", 'A person.</think>{"name": "Ada", "age": 36}'),
    ("a person as plain JSON", '{"name": "Ada", "age": 36}'),
    ("a person by tool", "A person.</think>" + calls(call("Person", name="Ada", age=36))),
    ("the final result", "A person.</think>" + calls(call("final_result", name="Ada", age=36))),
    # Hand-over between agents.
    ("ask the poet", "The poet can.</think>" + calls(call("transfer_to_poet"))),
    ("{'assistant': 'poet'}", "I am the poet.</think>Roses are red."),
    ('{"assistant": "poet"}', "I am the poet.</think>Roses are red."),
    # Coding agents: titles and topics first, as they quote the question.
    ("Generate a title", "Short.</think>A file"),
    ("codex: write", "I write.</think>I write it." + calls(call("exec_command", cmd=SHELL.format("codex")))),
    ("codex: close", "I close.</think>" + calls(call("multi_agent_v1__close_agent", target="nobody"))),
    ("codex: run code", "I run.</think>" + calls(call("functions__exec", input=CODE))),
    ("codex: patch", "I patch.</think>" + calls(call("apply_patch", input=PATCH))),
    ("claude: write", "I write.</think>" + calls(call("Bash", command=SHELL.format("claude"), description="Write a file"))),
    ("opencode: write", "I write.</think>" + calls(call("bash", command=SHELL.format("opencode"), description="Write"))),
    ("", "I have nothing to say to that.</think>I do not know."),
]


def script():
    lines = []
    for match, reply, *more in REPLIES:
        line = {"match": match} | ({"reply": reply} if reply else {}) | (more[0] if more else {})
        lines.append(json.dumps(line, ensure_ascii=False))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(script(), end="")
