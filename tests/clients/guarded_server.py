#!/usr/bin/env python3
"""Keys, limits, TLS and origins as the SDKs see them: guarded_server.py path/to/longwave. It starts the servers itself.

A wrong key is the SDK's AuthenticationError, a limit its RateLimitError with a Retry-After that its own retries follow, a
body over the limit a 413; TLS works with a certificate that the client trusts; pages of other origins are refused.
"""
import argparse
import pathlib
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

import anthropic
import openai

from checks import Checks
from run import Server

NORWAY = {"messages": [{"role": "user", "content": "What is the capital of Norway?"}]}
OSLO = "The capital of Norway is Oslo."


def open_ai(c, key="key-one", **options):
    return openai.OpenAI(**{"base_url": c.v1, "api_key": key, "max_retries": 0, "timeout": 60} | options)


def claude(c, **key):
    return anthropic.Anthropic(base_url=c.base_url, max_retries=0, timeout=60, **key)


def chat(client, **options):
    return client.chat.completions.create(**{"model": "deepseek-v4-flash"} | NORWAY | options)


def status(url, **options):
    try:
        with urllib.request.urlopen(urllib.request.Request(url, **options), timeout=10) as answer:
            return answer.status, answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.headers


def keys(c):
    c.equal("a key", chat(open_ai(c)).choices[0].message.content, OSLO)
    c.equal("another key, from the file", chat(open_ai(c, "key-two")).choices[0].message.content, OSLO)
    error = c.raises("a wrong key", openai.AuthenticationError, lambda: chat(open_ai(c, "key-three")))
    c.check("a wrong key: object", error and (error.body or {}).get("message") and error.code == "invalid_api_key", error and error.body)
    c.raises("a wrong key: models", openai.AuthenticationError, lambda: open_ai(c, "x").models.list())
    ask = {"model": "deepseek-v4-flash", "max_tokens": 2000} | NORWAY
    c.check("messages: x-api-key", claude(c, api_key="key-one").messages.create(**ask).content)
    c.check("messages: bearer", claude(c, auth_token="key-one").messages.create(**ask).content)
    error = c.raises("messages: a wrong key", anthropic.AuthenticationError, lambda: claude(c, api_key="x").messages.create(**ask))
    body = (error.body or {}) if error else {}
    c.equal("messages: object", (body.get("type"), (body.get("error") or {}).get("type")), ("error", "authentication_error"))
    c.equal("health needs no key", status(c.base_url + "/health")[0], 200)
    for path in ("/tokenize", "/v1/responses", "/v1/completions", "/v1/messages/count_tokens", "/render", "/v1/chat/completions"):
        code, _ = status(c.base_url + path, data=b"{}", headers={"content-type": "application/json"})
        c.equal(f"no key: {path}", code, 401)
    large = [{"role": "user", "content": "x" * 300_000}]
    error = c.raises("a body over the limit", openai.APIStatusError, lambda: chat(open_ai(c), messages=large))
    c.equal("a body over the limit: status", error and error.status_code, 413)


def concurrency(c):
    done = []

    def slow():
        with chat(open_ai(c), messages=[{"role": "user", "content": "a slow answer"}], stream=True) as stream:
            for _ in stream:
                if done:
                    return

    threads = [threading.Thread(target=slow) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(1)
    error = c.raises("a third request at once", openai.RateLimitError, lambda: chat(open_ai(c)))
    c.check("a third request at once: Retry-After", error and error.response.headers.get("retry-after"), error and error.response.headers.get("retry-after"))
    c.equal("another key is free", chat(open_ai(c, "key-two")).choices[0].message.content, OSLO)
    done.append(True)
    for thread in threads:
        thread.join()
    time.sleep(0.5)
    c.equal("afterwards the key is free", chat(open_ai(c)).choices[0].message.content, OSLO)


def rate(c):
    outcomes = []
    for _ in range(8):
        try:
            outcomes.append(chat(open_ai(c)).choices[0].message.content == OSLO)
        except openai.RateLimitError as error:
            after = float(error.response.headers["retry-after"])
            c.check("requests per minute: Retry-After", 0 < after <= 60, after)
            c.check("requests per minute: object", (error.body or {}).get("message"), error.body)
            break
    c.check("requests per minute: the limit holds", 1 <= len(outcomes) <= 6 and all(outcomes), f"{len(outcomes)} answered")
    began = time.monotonic()
    answer = chat(open_ai(c, max_retries=3, timeout=90))
    c.check("requests per minute: the SDK's retry gets through", answer.choices[0].message.content == OSLO, f"after {time.monotonic() - began:.0f} s")


def origins(c):
    def preflight(origin):
        headers = {"origin": origin, "access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
        return status(c.v1 + "/chat/completions", method="OPTIONS", headers=headers)[1].get("access-control-allow-origin")

    c.equal("an allowed origin", preflight("https://chat.example.org"), "https://chat.example.org")
    c.equal("another origin", preflight("https://other.example.org"), None)


def certificates(folder):
    key, certificate = pathlib.Path(folder, "key.pem"), pathlib.Path(folder, "cert.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate, "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE"]
    subprocess.run([str(part) for part in command], check=True, capture_output=True)
    return key, certificate


def tls(c, certificate):
    trusted = ssl.create_default_context(cafile=str(certificate))
    client = open_ai(c, http_client=openai.DefaultHttpxClient(verify=trusted))
    c.check("TLS: address", c.base_url.startswith("https://"), c.base_url)
    c.equal("TLS: chat", chat(client).choices[0].message.content, OSLO)
    text = "".join(k.choices[0].delta.content or "" for k in chat(client, stream=True) if k.choices)
    c.equal("TLS: stream", text, OSLO)
    c.raises("TLS: a certificate that is not trusted", openai.APIConnectionError, lambda: chat(open_ai(c)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("longwave", help="the program")
    program = parser.parse_args().longwave
    total = Checks("", "deepseek-v4-flash")

    def on(server, *bodies):
        checks = Checks(server.address, "deepseek-v4-flash")
        checks.run(*bodies)
        total.passed += checks.passed
        total.failed += checks.failed

    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "keys")
        file.write_text("# keys of the test\nkey-two\n")
        known = ["--api-key", "key-one", "--api-key-file", str(file)]
        with Server(program, *known, "--max-body-bytes", "256K", "--allowed-origins", "https://chat.example.org") as server:
            on(server, keys, origins)
        with Server(program, *known, "--max-concurrent-per-key", "2") as server:
            on(server, concurrency)
        with Server(program, *known, "--requests-per-minute-per-key", "6") as server:
            on(server, rate)
        key, certificate = certificates(folder)
        with Server(program, "--ssl-keyfile", str(key), "--ssl-certfile", str(certificate)) as server:
            on(server, lambda c: tls(c, certificate))
    print(f"{total.passed} passed, {total.failed} failed")
    return 1 if total.failed else 0


if __name__ == "__main__":
    sys.exit(main())
