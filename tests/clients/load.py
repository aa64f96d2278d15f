#!/usr/bin/env python3
"""Load on a server that this program starts: load.py path/to/longwave [--aiperf FILE] [--benchy FILE] [--seconds 60]

    python -m venv .venv-load && .venv-load/bin/pip install -r tests/clients/requirements-load.txt
    .venv-load/bin/python tests/clients/load.py target/release/longwave --aiperf .venv-load/bin/aiperf

In turn, each only where its tool is given: 64 streaming sessions of aiperf on the tiny model; the same number of sessions of
which 20 % close their connection at random; llama-benchy's reading of the stream; and the time that the server itself
adds, measured with a scripted engine that answers at once. Every complete stream must end as it should, the server must be
idle afterwards, and its memory must not grow from the second third to the last (the cache is filled before; sessions that
leave have gone on for two minutes). Exits 1 otherwise. No time is judged: they are printed.
"""
import argparse
import asyncio
import http.server
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
TOKENIZER = HERE.parent.parent / "testdata/tiny"
MODEL = "longwave-tiny"
READY_S = 120
# Tokens that the format of a chat adds to a message.
FRAME = 12
# Growth that is no leak: buffers of the allocator that were not yet returned.
GROWTH_BYTES = 16 << 20
# Small, so that it is full early: memory of the cache is touched as it fills.
CACHE = "128M"
# Longest time in seconds to fill it.
FILL_S = 300
# Load in seconds before memory is looked at: it levels off after 90 (202 MiB, then 311 to 312 over five minutes).
WARM_S = 120
WORDS = "the river house lamp bread winter letter room morning bridge church table garden paper silver window".split()


class Server:
    """`longwave serve` on a free port, with its resident memory sampled once a second."""

    def __init__(self, program, *flags):
        self.process = subprocess.Popen([program, "serve", "--port", "0", *flags], stderr=subprocess.PIPE, text=True)
        self.memory, self.address, ready = [], None, threading.Event()

        def read():
            for line in self.process.stderr:
                if "ready on " in line:
                    self.address = line.split("ready on ")[1].split()[0]
                    ready.set()
            ready.set()

        threading.Thread(target=read, daemon=True).start()
        if not ready.wait(READY_S) or self.address is None:
            self.process.kill()
            sys.exit("the server did not get ready")
        threading.Thread(target=self.sample, daemon=True).start()

    def sample(self):
        while self.process.poll() is None:
            try:
                status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
            except OSError:
                return
            rss = [line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")]
            if rss:
                self.memory.append((time.monotonic(), int(rss[0]) << 10))
            time.sleep(1)

    def growth(self, began):
        """Bytes by which the least of the last third since `began` is above that of the second third, and the former.

        A leak raises the floor; buffers that come and go with the load (some 50 MiB here) do not."""
        samples = [size for at, size in self.memory if at >= began] or [0] * 3
        third = max(1, len(samples) // 3)
        middle, last = (min(part) for part in (samples[third : 2 * third] or samples, samples[-third:]))
        return last - middle, last

    def metric(self, name):
        with urllib.request.urlopen(self.address + "/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)

    def idle(self):
        """Whether no request runs or waits, at the latest ten seconds from now."""
        for _ in range(100):
            if self.metric("vllm:num_requests_running") + self.metric("vllm:num_requests_waiting") == 0:
                return True
            time.sleep(0.1)
        return False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(timeout=60)


failed = 0


def check(name, good, detail=""):
    global failed
    failed += not good
    print(f"{'ok  ' if good else 'FAIL'} {name}" + (f": {detail}" if detail else ""), flush=True)


def compared(program, tool, name, flags, load, seconds, prompt):
    """aiperf and `longwave bench serve` on the same server at the same time: their medians agree.

    `load` is how each asks, as (aiperf's flag, ours, value). Together they must leave the processors some time, or each measures
    its own waiting."""
    with tempfile.TemporaryDirectory() as folder, Server(program, *flags) as server:
        # Without an end of the turn (token 1 of the tiny model): what follows one is not shown, and the tools' prompts differ.
        fields = json.dumps({"thinking": {"type": "disabled"}, "ignore_eos": True, "logit_bias": {"1": -100}})
        theirs = [tool, "profile", "-m", MODEL, "--url", server.address, "--endpoint-type", "chat", "--streaming", "--tokenizer", str(TOKENIZER)]
        theirs += [load[0], str(load[2]), "--benchmark-duration", str(seconds), "--prompt-input-tokens-mean", str(prompt - FRAME), "--prompt-output-tokens-mean", "32"]
        theirs += ["--extra-inputs", fields, "--ui", "none", "--no-gpu-telemetry", "--use-server-token-count", "--artifact-dir", folder]
        ours = [program, "bench", "serve", server.address, load[1], str(load[2]), "--duration", str(seconds)]
        ours += ["--input-len", str(prompt), "--output-len", "32", "--extra-body", fields, "--json", "-"]
        first = subprocess.Popen(theirs, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        # It takes some seconds to begin; both shall see the same of what else this machine does.
        while server.metric("vllm:request_success_total") == 0 and first.poll() is None:
            time.sleep(0.2)
        second = json.loads(subprocess.run(ours, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=seconds + 300, check=True).stdout)
        first.wait(timeout=600)
        report = json.loads(pathlib.Path(folder, "profile_export_aiperf.json").read_text())
    for theirs, ours in (("time_to_first_token", "median_ttft_ms"), ("inter_token_latency", "median_tpot_ms")):
        a, b = report[theirs]["p50"], second[ours]
        check(f"bench serve agrees with aiperf on {name}: {theirs}", abs(a - b) < 0.05 * a, f"{a:.2f} and {b:.2f} ms")
    print(f"     {report['request_count']['avg']:.0f} and {second['completed']} requests of {report['input_sequence_length']['avg']:.1f} and {second['total_input_tokens'] / second['completed']:.1f} prompt tokens")


def compare(program, tool):
    """With a scripted engine, which leaves the processors to the tools, and on the tiny model, with two requests in five seconds
    each, so that most meet no other and medians are those of a request alone, and prompts that take the model longer than the tools."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as script:
        script.write(json.dumps({"match": "", "reply": " ".join(WORDS * 4), "delay_ms": 200, "token_delay_ms": 20}))
        script.flush()
        compared(program, tool, "a scripted engine", ["--script", script.name], ("--concurrency", "--sessions", 8), 20, 128)
    # What the tools' prompts share, and how often drafts are right, is another matter for each.
    flags = ["--kv-cache-memory-bytes", CACHE, "--no-enable-prefix-caching", "--num-speculative-tokens", "0"]
    compared(program, tool, "the tiny model", flags, ("--request-rate", "--rate", 0.4), 150, 512)


def settled(server, name, began):
    check(f"{name}: the server is idle afterwards", server.idle())
    growth, size = server.growth(began)
    check(f"{name}: memory is flat", growth < GROWTH_BYTES, f"{growth / 2**20:+.1f} MiB from the floor of the second third to that of the last, {size / 2**20:.0f} MiB")
    check(f"{name}: the server lives", server.process.poll() is None)


def fill(server, count):
    """Sessions with longer texts until the cache is full, so that memory which grows later is not the cache's."""
    for seed in range(2, FILL_S // 5):
        sessions(server.address, MODEL, count, 5, 0, seed, words=180)
        with urllib.request.urlopen(server.address + "/debug/prefix", timeout=10) as answer:
            cache = json.load(answer)
        if cache["evicted_blocks"] > 0:
            break
    check("the cache is full before the load", cache["evicted_blocks"] > 0, f"{cache['blocks']} blocks, {cache['evicted_blocks']} evicted")


def aiperf(server, tool, args):
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        extra = json.dumps({"thinking": {"type": "disabled"}, "ignore_eos": True})
        command = [tool, "profile", "-m", MODEL, "--url", server.address, "--endpoint-type", args.endpoint, "--streaming"]
        command += ["--tokenizer", str(TOKENIZER), "--concurrency", str(args.sessions), "--benchmark-duration", str(args.seconds)]
        command += ["--prompt-input-tokens-mean", "64", "--prompt-output-tokens-mean", "32", "--extra-inputs", extra]
        command += ["--ui", "none", "--no-gpu-telemetry", "--use-server-token-count", "--random-seed", "1", "--artifact-dir", folder]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=args.seconds + 600)
        report = pathlib.Path(folder, "profile_export_aiperf.json")
        if done.returncode or not report.exists():
            check("aiperf", False, done.stdout[-3000:])
            return
        result = json.loads(report.read_text())
    count = result["request_count"]["avg"]
    check("aiperf: streams read", count >= args.sessions, f"{count:.0f} requests by {args.sessions} sessions in {args.seconds} s")
    check("aiperf: no error", not result["error_summary"] and result["request_error_rate"]["avg"] == 0, result["error_summary"])
    for name in ("time_to_first_token", "inter_token_latency", "request_latency"):
        value = result.get(name, {})
        check(f"aiperf: reports {name}", value.get("p50", 0) > 0, f"p50 {value.get('p50', 0):.1f} ms, p99 {value.get('p99', 0):.1f} ms")
    settled(server, "aiperf", began)


async def session(address, model, leaves, numbers, words):
    """One streamed chat over a socket of its own. Returns (how it went, s to the first token, s in all)."""
    host, port = address.removeprefix("http://").split(":")
    text = " ".join(numbers.choices(WORDS, k=words))
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 32, "stream": True}
    body |= {"ignore_eos": True, "thinking": {"type": "disabled"}}
    data = json.dumps(body).encode()
    # Where a leaver closes: while it waits for the headers, or after so many events.
    leave_after = numbers.choice([-1, -1, 0, 1, 3, 8, 16]) if leaves else None
    began, first = time.monotonic(), None
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\nconnection: close\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()
        if leave_after == -1:
            await asyncio.sleep(numbers.random() * 0.5)
            return "left", None, None
        status = (await reader.readline()).decode()
        if " 200 " not in status:
            return f"status {status.strip()}", None, None
        events, finish, done = 0, None, False
        while line := await reader.readline():
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                done = True
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                return f"error {chunk['error']}", None, None
            for choice in chunk["choices"]:
                finish = choice["finish_reason"] or finish
                if choice["delta"].get("content") and first is None:
                    first = time.monotonic() - began
            events += 1
            if leave_after is not None and events > leave_after:
                return "left", None, None
        if not done or finish is None:
            return f"cut after {events} events, finish {finish}", None, None
        return "whole", first, time.monotonic() - began
    finally:
        if leave_after is not None:
            writer.transport.abort()
        else:
            writer.close()


def sessions(address, model, count, seconds, leave, seed=1, words=48):
    """`count` sessions at a time for so many seconds. Returns how they went, and their times."""
    outcomes, times = {}, []
    until = time.monotonic() + seconds

    async def one(index):
        numbers = random.Random(seed * 1000 + index)
        while time.monotonic() < until:
            try:
                how, first, total = await asyncio.wait_for(session(address, model, numbers.random() < leave, numbers, words), 300)
            except (OSError, TimeoutError, asyncio.TimeoutError, ValueError) as error:
                how, first, total = f"{type(error).__name__} {error}", None, None
            outcomes[how] = outcomes.get(how, 0) + 1
            if total is not None:
                times.append((first, total))

    async def everyone():
        await asyncio.gather(*(one(index) for index in range(count)))

    asyncio.run(everyone())
    return outcomes, times


def leavers(server, args):
    sessions(server.address, MODEL, args.sessions, WARM_S, 0.2, seed=2)
    began = time.monotonic()
    # Three times as long: a third must be long enough to see the largest mix of prompts, to which buffers grow once.
    outcomes, _ = sessions(server.address, MODEL, args.sessions, 3 * args.seconds, 0.2)
    whole, left = outcomes.pop("whole", 0), outcomes.pop("left", 0)
    check("leavers: others get whole streams", not outcomes and whole > 0, f"{whole} whole, {left} left, {outcomes or 'nothing else'}")
    settled(server, "leavers", began)
    outcomes, _ = sessions(server.address, MODEL, 1, 1, 0)
    check("leavers: a new session is served", outcomes.get("whole", 0) > 0, outcomes)


class Book(http.server.BaseHTTPRequestHandler):
    """The text that llama-benchy cuts its prompts from; it fetches a novel otherwise."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(" ".join(random.Random(1).choices(WORDS, k=20_000)).encode())

    def log_message(self, *_):
        pass


def benchy(server, tool):
    books = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Book)
    threading.Thread(target=books.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        result = pathlib.Path(folder, "result.json")
        command = [tool, "--base-url", server.address + "/v1", "--model", MODEL, "--tokenizer", str(TOKENIZER)]
        command += ["--book-url", f"http://127.0.0.1:{books.server_port}/book.txt", "--pp", "128", "--tg", "16", "--depth", "0", "256"]
        command += ["--runs", "2", "--exact-tg", "--skip-coherence", "--format", "json", "--save-result", str(result)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
        if done.returncode or not result.exists():
            check("llama-benchy", False, done.stdout[-3000:])
            return
        report = json.loads(result.read_text())
    for run in report["benchmarks"]:
        names = {name: run[name]["mean"] for name in ("pp_throughput", "tg_throughput", "ttfr", "e2e_ttft") if run.get(name)}
        check(f"llama-benchy: depth {run['context_size']}", len(names) == 4 and all(names.values()), {k: round(v, 1) for k, v in names.items()})


def overhead(program, args):
    """The scripted engine takes no time, so all of it is the server's (and this client's)."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as script:
        script.write(json.dumps({"match": "", "reply": " ".join(WORDS * 4)}))
        script.flush()
        with Server(program, "--script", script.name) as server:
            for count in (1, args.sessions):
                sessions(server.address, MODEL, count, 2, 0)
                outcomes, times = sessions(server.address, MODEL, count, 10, 0)
                good = set(outcomes) == {"whole"}
                first, total = (sorted(t[i] * 1000 for t in times) for i in range(2))
                at = lambda values, share: values[min(len(values) - 1, int(len(values) * share))]  # noqa: E731
                check(
                    f"overhead, {count} at once",
                    good,
                    f"{outcomes}, {len(times) / 10:.0f} requests/s; to the first token p50 {at(first, 0.5):.2f} ms, p99 {at(first, 0.99):.2f} ms;"
                    f" whole stream of 32 tokens p50 {at(total, 0.5):.2f} ms, p99 {at(total, 0.99):.2f} ms",
                )
            began = time.monotonic()
            sessions(server.address, MODEL, args.sessions, args.seconds, 0.2)
            settled(server, "scripted engine with leavers", began)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("longwave", help="the program")
    parser.add_argument("--aiperf", help="aiperf's program")
    parser.add_argument("--benchy", help="llama-benchy's program")
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--endpoint", default="chat", help="what aiperf asks: chat, completions, responses or messages")
    parser.add_argument("--compare", action="store_true", help="compare aiperf with `longwave bench serve`, and nothing else")
    args = parser.parse_args()
    if args.aiperf:
        compare(args.longwave, args.aiperf)
    if args.compare and not args.aiperf:
        parser.error("--compare needs --aiperf")
    if args.compare:
        return 1 if failed else 0
    with Server(args.longwave, "--max-num-seqs", str(args.sessions), "--kv-cache-memory-bytes", CACHE) as server:
        fill(server, args.sessions)
        if args.aiperf:
            aiperf(server, args.aiperf, args)
        leavers(server, args)
        if args.benchy:
            benchy(server, args.benchy)
    overhead(args.longwave, args)
    print("all checks passed" if not failed else f"{failed} checks failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
