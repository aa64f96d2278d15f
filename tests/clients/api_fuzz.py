#!/usr/bin/env python3
"""Requests made from the OpenAPI document, right and wrong: api_fuzz.py BASE_URL [--examples 60] (pip install schemathesis).

Against a scripted server (see replies.py). The answers must be no 5xx, come within the time limit, and have a status,
content type and body that the document describes. `model` is narrowed to a served name first: with other names nearly every
request would end at 404. Exits 1 on a failure; the same requests are made in every run.
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import urllib.request

FIXTURES = pathlib.Path(__file__).resolve().parent.parent.parent / "testdata/clients"
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def narrow(node, model):
    """Every property `model` of a schema becomes the one name that is served."""
    if isinstance(node, dict):
        properties = node.get("properties")
        if isinstance(properties, dict) and isinstance(properties.get("model"), dict):
            properties["model"] = {"type": "string", "enum": [model]}
        for value in node.values():
            narrow(value, model)
    elif isinstance(node, list):
        for value in node:
            narrow(value, model)


def add_examples(document, model):
    """Requests of real clients, so that not only refusals are seen."""
    for client in ("codex", "claude_code", "opencode"):
        for request in json.loads((FIXTURES / f"{client}.json").read_text())["requests"]:
            body = document["paths"][request["path"].split("?")[0]]["post"]["requestBody"]["content"]["application/json"]
            for stream in (False, True):
                name = f"{client}: {request['name']}{', streamed' if stream else ''}"
                value = request["body"] | {"model": model, "stream": stream}
                body.setdefault("examples", {})[name] = {"value": value}


def get(url):
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.status, answer.read()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("base_url", help="for example http://127.0.0.1:8000")
    parser.add_argument("--model", default="deepseek-v4-flash")
    parser.add_argument("--examples", type=int, default=60, help="most requests of one kind for each route")
    parser.add_argument("--timeout", type=float, default=30, help="seconds after which a request counts as hanging")
    parser.add_argument("--path", help="only routes that match this regular expression")
    args = parser.parse_args()
    base = args.base_url.rstrip("/")
    document = json.loads(get(f"{base}/openapi.json")[1])
    routes = [f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods]
    print(f"{len(routes)} routes: {', '.join(routes)}", flush=True)
    # Answers name the model too, but only requests are generated.
    for path in document["paths"].values():
        for operation in path.values():
            if isinstance(operation, dict):
                narrow(operation.get("requestBody", {}), args.model)
    narrow({name: s for name, s in document.get("components", {}).get("schemas", {}).items() if "Request" in name}, args.model)
    add_examples(document, args.model)
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "openapi.json")
        file.write_text(json.dumps(document))
        program = pathlib.Path(sys.executable).parent / "schemathesis"
        command = [program, "run", file, "--url", base, "--checks", CHECKS, "--phases", "examples,coverage,fuzzing"]
        command += ["--max-examples", str(args.examples), "--request-timeout", str(args.timeout), "--workers", "2"]
        command += ["--generation-deterministic", "--continue-on-failure", "--no-color"]
        command += ["--suppress-health-check", "all", "--warnings", "off"]
        if args.path:
            command += ["--include-path-regex", args.path]
        failed = subprocess.run([str(part) for part in command], cwd=folder).returncode
    status, body = get(f"{base}/health")
    print(f"{'ok  ' if status == 200 else 'FAIL'} the server is well afterwards: {status} {body[:100]!r}")
    print("no failure" if not failed and status == 200 else "failed")
    return 1 if failed or status != 200 else 0


if __name__ == "__main__":
    sys.exit(main())
