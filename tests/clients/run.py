#!/usr/bin/env python3
"""Runs the client tests against a scripted server that it starts: run.py path/to/longwave [GROUP ...].

    python -m venv .venv && .venv/bin/pip install -r tests/clients/requirements.txt
    .venv/bin/python tests/clients/run.py target/debug/longwave

Groups: sdk, frameworks, node, damaged, guarded, bfcl (these by default) and agents (1.2 GB of coding agents). Packages of npm are installed
where they are missing, from the lock files; the data of bfcl is fetched from PyPI into the target folder. Exits 1 when a
script failed, and after all of them have run.
"""
import argparse
import pathlib
import queue
import subprocess
import sys
import tempfile
import threading
import time

import replies

HERE = pathlib.Path(__file__).resolve().parent
NAMES = ["deepseek-v4-flash", "gpt-5.5", "gpt-6-sol", "claude-sonnet-4-5"]
GROUPS = {
    "sdk": ["openai_sdk.py", "openai_responses.py", "anthropic_sdk.py", "prefix_identity.py"],
    "frameworks": ["langchain_models.py", "agent_sdks.py"],
    "node": ["node/openai.mjs", "node/anthropic.mjs", "node/ai_sdk.mjs"],
    "damaged": ["damaged_requests.py"],
    "guarded": ["guarded_server.py"],
    "batch": ["batch.py"],
    "bfcl": ["bfcl.py"],
    "agents": ["agent_clis.py"],
}
FLAGS = {"damaged": ["--count", "2000"]}
READY_S = 60
BFCL = "bfcl-eval==2026.3.23"


class Server:
    """`longwave serve` with the replies of replies.py on a free port; ended by leaving the with statement."""

    def __init__(self, program, *flags):
        self.script = tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf8")
        self.script.write(replies.script())
        self.script.flush()
        self.batches = tempfile.TemporaryDirectory()
        command = [program, "serve", "--port", "0", "--script", self.script.name, "--batch-dir", self.batches.name]
        command += ["--served-model-name", *NAMES, *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        lines = queue.Queue()
        # Read to the end: a full pipe would stop the server.
        threading.Thread(target=lambda: [lines.put(line) for line in self.process.stderr] + [lines.put(None)], daemon=True).start()
        said, until = [], time.monotonic() + READY_S
        while True:
            try:
                line = lines.get(timeout=max(0, until - time.monotonic()))
            except queue.Empty:
                line = None
            if line is None:
                self.process.kill()
                sys.exit("the server did not get ready; it said:\n" + "".join(said))
            said.append(line)
            if "ready on " in line:
                self.address = line.split("ready on ")[1].split()[0]
                return

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(timeout=60)
        self.script.close()


def npm(folder):
    """Installs the packages of `folder` unless they are there."""
    if not (folder / "node_modules").exists():
        print(f"installing the packages of {folder.relative_to(HERE)}/package-lock.json", flush=True)
        # Agents come as one package per platform; newer versions of npm refuse `ci` when a lock file leaves some out.
        command = ["npm", "install", "--no-save"] if folder.name == "agents" else ["npm", "ci"]
        subprocess.run([*command, "--no-audit", "--no-fund", "--loglevel", "error"], cwd=folder, check=True)


def bfcl_wheel(program):
    """The wheel of bfcl-eval, whose dependencies are not needed for its data."""
    folder = pathlib.Path(program).resolve().parent.parent / "bfcl"
    if not list(folder.glob("bfcl_eval-*.whl")):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), BFCL]
        subprocess.run(command, check=True)
    return str(next(folder.glob("bfcl_eval-*.whl")))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("longwave", help="the program")
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=", ".join(GROUPS))
    args = parser.parse_args()
    for group in args.groups:
        if group not in GROUPS:
            parser.error(f"unknown group {group}; known: {', '.join(GROUPS)}")
    groups = args.groups or [group for group in GROUPS if group != "agents"]
    failed = []
    with Server(args.longwave) as server:
        for group in groups:
            if group in ("node", "agents"):
                npm(HERE / group)
            for name in GROUPS[group]:
                began = time.monotonic()
                interpreter = "node" if name.endswith(".mjs") else sys.executable
                if group in ("bfcl", "guarded"):
                    target = [args.longwave] + ([bfcl_wheel(args.longwave)] if group == "bfcl" else [])
                elif group == "batch":
                    target = [f"{server.address}/v1"]
                else:
                    target = [server.address, *FLAGS.get(group, [])]
                print(f"-- {name}", flush=True)
                done = subprocess.run([interpreter, str(HERE / name), *target], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                # A line per check of a script that passed would hide the others.
                shown = [line for line in done.stdout.splitlines() if done.returncode and not line.startswith("ok  ")]
                print("\n".join(shown or done.stdout.splitlines()[-1:]), f"({time.monotonic() - began:.1f} s)", flush=True)
                if done.returncode:
                    failed.append(name)
        if server.process.poll() is not None:
            failed.append("the server ended by itself")
    print("all client tests passed" if not failed else f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
