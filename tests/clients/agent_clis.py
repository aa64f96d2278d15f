#!/usr/bin/env python3
"""Real coding agents, headless, against a running server: agent_clis.py BASE_URL [--bin agents/node_modules/.bin].

Codex speaks Responses, Claude Code speaks Messages, opencode speaks chat completions. Each gets a task, must accept the
scripted call (see replies.py), run its own tool in an empty folder, send the result back and print the last answer; then
the session is continued by another process. The later requests must find the earlier ones in the cache. The agents run
with an empty home and no account. The server must serve the names deepseek-v4-flash, gpt-5.5 and gpt-6-sol: Codex
sends freeform tools only for models it knows.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import urllib.request

from checks import Checks

HERE = pathlib.Path(__file__).resolve().parent
LIMIT_S = 120


def run(command, home, folder, **variables):
    """Runs an agent with nothing of this user's environment; returns its status and what it said."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "TERM": "dumb", "NO_COLOR": "1"} | variables
    try:
        done = subprocess.run(
            [str(part) for part in command],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
        )
        return done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        return "no end", (late.stdout or b"").decode(errors="replace")


def codex(c, bin_folder, home, folder, model, task, again):
    settings = home / ".codex"
    settings.mkdir(exist_ok=True)
    (settings / "config.toml").write_text(
        f'model = "{model}"\nmodel_provider = "longwave"\n\n[model_providers.longwave]\nname = "longwave"\n'
        f'base_url = "{c.v1}"\nenv_key = "LONGWAVE_API_KEY"\nwire_api = "responses"\nrequest_max_retries = 0\nstream_max_retries = 0\n'
    )
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    command = ["exec", "resume", "--last"] if again else ["exec"]
    return run([bin_folder / "codex", *command, *flags, task], home, folder, LONGWAVE_API_KEY="none")


def claude(c, bin_folder, home, folder, model, task, again):
    flags = ["--allowedTools", "Bash,Write,Read", *(["--continue"] if again else [])]
    return run(
        [bin_folder / "claude", "-p", task, *flags],
        home,
        folder,
        ANTHROPIC_BASE_URL=c.base_url,
        ANTHROPIC_API_KEY="none",
        ANTHROPIC_MODEL=model,
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        CLAUDE_CODE_MAX_RETRIES="0",
    )


def opencode(c, bin_folder, home, folder, model, task, again):
    limit = {"context": 100_000, "output": 8192}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "longwave",
        "options": {"baseURL": c.v1, "apiKey": "none"},
        "models": {model: {"name": model, "reasoning": True, "tool_call": True, "limit": limit}},
    }
    config = {"autoupdate": False, "share": "disabled", "provider": {"longwave": provider}, "model": f"longwave/{model}"}
    (folder / "opencode.json").write_text(json.dumps(config))
    return run([bin_folder / "opencode", "run", *(["--continue"] if again else []), task], home, folder, OPENCODE_DISABLE_MODELS_FETCH="1")


def last_prompt(c):
    """Cached and all tokens of the longest of the last two prompts: an agent may ask for a title beside its work."""
    with urllib.request.urlopen(c.base_url + "/debug/prefix", timeout=10) as answer:
        requests = json.load(answer)["requests"][:2]
    last = max(requests, key=lambda request: (request["prompt_tokens"], request["cached_tokens"]))
    return last["cached_tokens"], last["prompt_tokens"]


FLASH = "deepseek-v4-flash"
LEAST = 0.95
QUESTION = ("What is the capital of Norway?", "The capital of Norway is Oslo.")
# name, agent, model, task, what the tool leaves in made.txt, the last answer
TASKS = [
    ("codex, shell", codex, FLASH, "codex: write a file", "hello from codex", "The file is written by codex."),
    ("codex, freeform patch", codex, "gpt-5.5", "codex: patch a file", "hello from codex", "The patch is applied."),
    ("codex, tools as an input item", codex, "gpt-6-sol", "codex: run code", "hello from codex", "The file is written by codex."),
    ("codex, namespace", codex, FLASH, "codex: close an agent", None, "There is no such agent."),
    ("claude", claude, FLASH, "claude: write a file", "hello from claude", "The file is written by claude."),
    ("opencode", opencode, FLASH, "opencode: write a file", "hello from opencode", "The file is written by opencode."),
]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("base_url", help="for example http://127.0.0.1:8000")
    parser.add_argument("--bin", type=pathlib.Path, default=HERE / "agents/node_modules/.bin", help="folder of the agents' programs")
    parser.add_argument("--only", default="", help="run only the tasks whose name holds this text")
    args = parser.parse_args()
    c = Checks(args.base_url, FLASH)
    for name, agent, model, task, made, answer in TASKS:
        if args.only not in name:
            continue
        with tempfile.TemporaryDirectory() as base:
            home, folder = pathlib.Path(base, "home"), pathlib.Path(base, "task")
            home.mkdir()
            folder.mkdir()
            where = (c, args.bin.resolve(), home, folder, model)
            status, said = agent(*where, task, again=False)
            file = folder / "made.txt"
            wrote = file.read_text().strip() if file.exists() else None
            good = c.check(f"{name}: ends well", status == 0, status)
            good &= c.equal(f"{name}: its tool ran", wrote, made)
            good &= c.check(f"{name}: gives the last answer", answer in said, answer)
            good &= c.check(f"{name}: no markup shown", "DSML" not in said and "</think>" not in said)
            cached, prompt = last_prompt(c)
            good &= c.check(f"{name}: the result finds its prefix", cached >= LEAST * prompt, f"{cached} of {prompt} tokens")
            status, later = agent(*where, QUESTION[0], again=True)
            said += later
            good &= c.check(f"{name}, continued: answers", status == 0 and QUESTION[1] in later, status)
            cached, prompt = last_prompt(c)
            good &= c.check(f"{name}, continued: finds its prefix", cached >= LEAST * prompt, f"{cached} of {prompt} tokens")
            if not good:
                print("\n".join(f"    | {line}" for line in said[-3000:].splitlines()))
    print(f"{c.passed} passed, {c.failed} failed")
    return 1 if c.failed else 0


if __name__ == "__main__":
    sys.exit(main())
