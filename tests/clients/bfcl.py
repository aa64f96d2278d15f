#!/usr/bin/env python3
"""Expected calls of the Berkeley Function Calling Leaderboard, written as the model would and parsed back.

    pip install deepseek-recipe && pip download --no-deps bfcl-eval==2026.3.23
    bfcl.py path/to/longwave bfcl_eval-2026.3.23-py3-none-any.whl

The vendor's own encoder (deepseek-recipe) renders every expected call as DSML; `longwave parse --jsonl` reads the text
and must give back the same names and arguments, type by type, with no text left over. Where the answer key allows several
values for a parameter, one case is made for each, up to --variants. Prints counts by category and exits 1 on a difference.
"""
import argparse
import ast
import collections
import json
import re
import subprocess
import sys
import zipfile

import deepseek_recipe as recipe

SINGLE = (
    "simple_python simple_java simple_javascript multiple parallel parallel_multiple "
    "live_simple live_multiple live_parallel live_parallel_multiple"
).split()
MULTI_TURN = "multi_turn_base multi_turn_long_context multi_turn_miss_func multi_turn_miss_param".split()
CLASSES = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}
# Types of the data set that JSON Schema calls otherwise.
TYPES = {
    "dict": "object", "HashMap": "object", "Hashtable": "object",
    "float": "number", "double": "number",
    "byte": "integer", "short": "integer", "long": "integer", "Bigint": "integer",
    "bool": "boolean", "char": "string", "String": "string",
    "list": "array", "tuple": "array", "ArrayList": "array", "Array": "array", "Queue": "array", "Stack": "array",
}  # fmt: skip
JSON_TYPES = {"object", "array", "string", "number", "integer", "boolean", "null"}
THOUGHT = "I need a tool."


def schema(node):
    """The data set's parameter description as JSON Schema; a type that JSON does not have is left open."""
    if isinstance(node, list):
        return [schema(item) for item in node]
    if not isinstance(node, dict):
        return node
    out = {}
    for key, value in node.items():
        if key == "type" and isinstance(value, str):
            value = TYPES.get(value, value)
            if value in JSON_TYPES:
                out[key] = value
        elif key == "properties":
            out[key] = {name: schema(item) for name, item in value.items()}
        elif key in ("items", "description", "enum", "required"):
            out[key] = schema(value)
    return out


def tool_name(name):
    """Dots are not allowed in tool names."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)


def tools_of(functions):
    named = {tool_name(f["name"]): f for f in functions}  # A few cases list a function twice.
    return [
        {
            "type": "function",
            "function": {"name": name, "description": f["description"], "parameters": schema(f["parameters"])},
        }
        for name, f in named.items()
    ]


def chosen(allowed, variant):
    """One of the allowed values of a parameter; (False, None) when it is left out."""
    values = [value for value in allowed if value != ""]
    if not values:
        return ("" in allowed and allowed != [""], "") if variant else (allowed == [""], "")
    return True, settled(values[variant % len(values)], variant)


def settled(value, variant):
    """Objects inside a value list the allowed values of each of their members again."""
    if isinstance(value, dict):
        members = {}
        for name, allowed in value.items():
            if isinstance(allowed, list):
                given, member = chosen(allowed, variant)
                if given:
                    members[name] = member
            else:
                members[name] = settled(allowed, variant)
        return members
    if isinstance(value, list):
        return [settled(item, variant) for item in value]
    return value


def single_turn(data, category, variants):
    questions = {q["id"]: q for q in data(f"BFCL_v4_{category}.json")}
    for answer in data(f"possible_answer/BFCL_v4_{category}.json"):
        question = questions[answer["id"]]
        made = []
        for variant in range(variants):
            calls = []
            for call in answer["ground_truth"]:
                ((name, allowed),) = call.items()
                arguments = {}
                for parameter, values in allowed.items():
                    given, value = chosen(values, variant)
                    if given:
                        arguments[parameter] = value
                calls.append((tool_name(name), arguments))
            if calls not in made:
                made.append(calls)
                yield answer["id"], question["question"][0], tools_of(question["function"]), calls


def multi_turn(data, category):
    questions = {q["id"]: q for q in data(f"BFCL_v4_{category}.json")}
    for answer in data(f"possible_answer/BFCL_v4_{category}.json"):
        question = questions[answer["id"]]
        functions = [f for name in question["involved_classes"] for f in data(f"multi_turn_func_doc/{CLASSES[name]}.json")]
        order = {f["name"]: list(f["parameters"]["properties"]) for f in functions}
        for turn, texts in enumerate(answer["ground_truth"]):
            calls = []
            for text in texts:
                node = ast.parse(text, mode="eval").body
                arguments = dict(zip(order[node.func.id], (ast.literal_eval(a) for a in node.args)))
                arguments |= {k.arg: ast.literal_eval(k.value) for k in node.keywords}
                calls.append((node.func.id, arguments))
            if calls:
                asked = question["question"][turn] or [{"role": "user", "content": "Go on."}]
                yield f"{answer['id']}.{turn}", asked, tools_of(functions), calls


def output_text(calls):
    """What the model writes after the prompt: a thought, then the calls as the vendor's encoder renders them."""
    history = [
        recipe.ToolCall(f"call_{index:03}", name, json.dumps(arguments, ensure_ascii=False))
        for index, (name, arguments) in enumerate(calls)
    ]
    messages = [recipe.UserMessage("x"), recipe.AssistantMessage("", THOUGHT, history)]
    # The encoder keeps the thought of an earlier turn only where there are tools.
    conversation = recipe.Conversation(messages, tools=[recipe.ToolDefinition("f")])
    prompt = recipe.DeepseekV4Encoding().render_conversation(conversation).prompt
    return prompt.split("<｜Assistant｜><think>")[1].removesuffix("<｜end▁of▁sentence｜>")


def difference(calls, result):
    """Why `result` is not `calls`, or None."""
    message = result["message"]
    if result.get("finish_reason") != "tool_calls":
        return f"finish_reason {result.get('finish_reason')!r}"
    if message.get("content") or message.get("reasoning_content") != THOUGHT:
        return f"content {message.get('content')!r}, reasoning {message.get('reasoning_content')!r}"
    got = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls") or []]
    # json.dumps tells 1 from 1.0 and from true, which == does not.
    if json.dumps(got) != json.dumps(calls):
        return f"got {json.dumps(got, ensure_ascii=False)}"
    return None


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("longwave", help="the program")
    parser.add_argument("wheel", help="the wheel of bfcl-eval")
    parser.add_argument("--variants", type=int, default=3, help="most cases made of one answer")
    parser.add_argument("--pieces", action="append", help="how the parser is fed; may be repeated (default: whole, chars)")
    args = parser.parse_args()
    archive = zipfile.ZipFile(args.wheel)
    lines = {}

    def data(name):
        if name not in lines:
            text = archive.read(f"bfcl_eval/data/{name}").decode()
            lines[name] = [json.loads(line) for line in text.splitlines() if line.strip()]
        return lines[name]

    cases = [(c, *case) for c in SINGLE for case in single_turn(data, c, args.variants)]
    cases += [(c, *case) for c in MULTI_TURN for case in multi_turn(data, c)]
    feed = "".join(
        json.dumps(
            {
                "request": {"model": "deepseek-v4-flash", "messages": messages, "tools": tools},
                "output": output_text(calls),
            }
        )
        + "\n"
        for _, _, messages, tools, calls in cases
    )
    failed = 0
    for pieces in args.pieces or ["whole", "chars"]:
        command = [args.longwave, "parse", "--jsonl", "--pieces", pieces]
        done = subprocess.run(command, input=feed, capture_output=True, text=True, timeout=1200)
        if done.returncode:
            sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        results = [json.loads(line) for line in done.stdout.splitlines()]
        if len(results) != len(cases):
            sys.exit(f"{len(results)} results for {len(cases)} outputs")
        counts = collections.defaultdict(lambda: [0, 0, 0])
        for (category, name, _, _, calls), result in zip(cases, results):
            why = difference(calls, result)
            count = counts[category]
            count[0] += 1
            count[1] += len(calls)
            if why:
                count[2] += 1
                if count[2] <= 3:
                    print(f"FAIL {name}: expected {json.dumps(calls, ensure_ascii=False)}, {why}")
        for category, (outputs, calls, wrong) in counts.items():
            print(f"{'ok  ' if not wrong else 'FAIL'} {pieces}, {category}: {outputs} outputs, {calls} calls, {wrong} differ")
        outputs, calls, wrong = (sum(c[i] for c in counts.values()) for i in range(3))
        print(f"{pieces}: {outputs - wrong} of {outputs} outputs with {calls} calls parsed back to the expected calls")
        failed += wrong
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
