#!/usr/bin/env python3
"""What a page that looks costs the server: explorer_cost.py path/to/longwave [--pairs 100] [--pages 1] [--every-ms 250]

Pairs of one answer with a page of the explorer connected (its live view, as often as the page asks) and one without, on the tiny
model, in changing order. Compared is the server's own time from the first to the last token, which holds the steps and what
happens between them. Prints the median of the pairs' ratios with its 95 % interval (bootstrap). Many pages that ask often
(--pages 16 --every-ms 50) show what one view costs where one page is lost in the noise. Judges nothing: times depend on the
machine.
"""
import argparse
import json
import pathlib
import random
import socket
import statistics
import sys
import threading
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from load import Server  # noqa: E402

WARM = 3


class Page:
    """A page of the live view: reads what comes and throws it away."""

    def __init__(self, address, every_ms):
        host, port = address.removeprefix("http://").split(":")
        self.socket = socket.create_connection((host, int(port)))
        self.socket.sendall(f"GET /explore/api/live?every_ms={every_ms} HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())
        self.bytes, self.begun = 0, threading.Event()
        self.thread = threading.Thread(target=self.read, daemon=True)
        self.thread.start()
        if not self.begun.wait(10):
            sys.exit("the live view sends nothing")

    def read(self):
        try:
            while data := self.socket.recv(1 << 16):
                self.bytes += len(data)
                if b"step_list" in data:
                    self.begun.set()
        except ConnectionResetError:
            # The server was ended first.
            pass

    def close(self):
        self.socket.shutdown(socket.SHUT_RDWR)
        self.thread.join()
        self.socket.close()


def answer(server, tokens):
    """Seconds per token of one answer."""
    body = {"messages": [{"role": "user", "content": "Tell me of the river."}], "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    body |= {"thinking": {"type": "disabled"}}
    request = urllib.request.Request(server.address + "/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    name = "vllm:request_decode_time_seconds_sum"
    before = server.metric(name)
    with urllib.request.urlopen(request, timeout=600) as reply:
        count = json.load(reply)["usage"]["completion_tokens"]
    return (server.metric(name) - before) / (count - 1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("longwave", help="the program")
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--pages", type=int, default=1, help="pages that look at once, 16 at most")
    parser.add_argument("--every-ms", type=int, default=250, help="how often each asks")
    parser.add_argument("--json", help="write the numbers here")
    args = parser.parse_args()
    numbers, pairs = random.Random(1), []
    with Server(args.longwave, "--kv-cache-memory-bytes", "64M", "--max-num-seqs", "4") as server:
        for _ in range(WARM):
            answer(server, args.tokens)
        for turn in range(args.pairs):
            both = {}
            for looked in numbers.sample([False, True], 2):
                pages = [Page(server.address, args.every_ms) for _ in range(args.pages if looked else 0)]
                both[looked] = answer(server, args.tokens)
                for page in pages:
                    page.close()
            pairs.append((both[False], both[True]))
            if sys.stderr.isatty():
                print(f"\r{turn + 1} of {args.pairs}", end="", file=sys.stderr)
    ratios = [looked / alone - 1 for alone, looked in pairs]
    medians = sorted(statistics.median(numbers.choices(ratios, k=len(ratios))) for _ in range(2000))
    result = {
        "pairs": args.pairs,
        "pages": args.pages,
        "every_ms": args.every_ms,
        "tokens": args.tokens,
        "step_ms_without": round(1000 * statistics.median(alone for alone, _ in pairs), 4),
        "step_ms_with": round(1000 * statistics.median(looked for _, looked in pairs), 4),
        "overhead_percent": round(100 * statistics.median(ratios), 3),
        "interval_95_percent": [round(100 * medians[50], 3), round(100 * medians[-51], 3)],
    }
    print(json.dumps(result))
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
