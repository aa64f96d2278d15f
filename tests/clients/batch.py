#!/usr/bin/env python3
"""Files and batches with the OpenAI Python SDK against a running server with --batch-dir (pip install openai).

    batch.py http://127.0.0.1:8000/v1 [--api-key KEY] [--lines 20] [--metrics]

Uploads a file, runs a batch to its end, reads its files, looks at errors, cancels another batch, deletes what it made.
With --metrics also reads /metrics with the official parser (pip install prometheus-client) and checks it. Prints one line
per check; exits 1 at the first that fails.
"""
import argparse
import io
import json
import time
import urllib.request

import openai

OVER = ("completed", "failed", "expired", "cancelled")


def line(name, **body):
    body = {"messages": [{"role": "user", "content": f"What is the capital of Norway? {name}"}], "max_tokens": 16, **body}
    body.setdefault("extra", {"source": "batch.py"})
    return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body})


def upload(client, lines):
    content = io.BytesIO(("\n".join(lines) + "\n").encode())
    return client.files.create(file=("requests.jsonl", content), purpose="batch")


def begin(client, file, **more):
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", **more
    )


def ended(client, batch):
    deadline = time.monotonic() + 300
    while batch.status not in OVER:
        assert time.monotonic() < deadline, batch
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    return batch


def said(text):
    print("ok  " + text, flush=True)


def answers(client, file_id):
    return [json.loads(text) for text in client.files.content(file_id).text.splitlines()]


def whole(client, count):
    names = [f"r{i}" for i in range(count)]
    file = upload(client, [line(name) for name in names] + [line("bad", temperature=9)])
    assert file.purpose == "batch" and file.filename == "requests.jsonl" and file.bytes > 0, file
    assert client.files.retrieve(file.id).id == file.id
    assert file.id in [one.id for one in client.files.list(purpose="batch")]
    said("files.create, retrieve, list")
    batch = ended(client, begin(client, file, metadata={"run": "whole"}))
    assert batch.status == "completed", batch
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (count + 1, count, 1), counts
    assert batch.metadata == {"run": "whole"} and batch.completed_at >= batch.created_at
    said(f"a batch of {count + 1} lines")
    good = answers(client, batch.output_file_id)
    assert sorted(one["custom_id"] for one in good) == sorted(names)
    for one in good:
        assert one["error"] is None and one["response"]["status_code"] == 200, one
        body = openai.types.chat.ChatCompletion.model_validate(one["response"]["body"])
        assert body.choices[0].finish_reason in ("stop", "length"), body
    (bad,) = answers(client, batch.error_file_id)
    assert bad["custom_id"] == "bad" and bad["response"]["status_code"] == 400, bad
    assert bad["response"]["body"]["error"]["param"] == "temperature", bad
    said("its output and its error file")
    listed = client.batches.list(limit=1)
    assert listed.data[0].id == batch.id, listed
    for one in (file.id, batch.output_file_id, batch.error_file_id):
        assert client.files.delete(one).deleted
    try:
        client.files.retrieve(file.id)
        raise AssertionError("a deleted file is still there")
    except openai.NotFoundError:
        said("batches.list, files.delete")


def faults(client):
    file = upload(client, [line("twice"), line("twice"), "{"])
    batch = ended(client, begin(client, file))
    assert batch.status == "failed" and [one.line for one in batch.errors.data] == [2, 3], batch
    client.files.delete(file.id)
    for call, kind in (
        (lambda: client.files.create(file=("x", b"{}"), purpose="fine-tune"), openai.BadRequestError),
        (lambda: client.batches.retrieve("batch_none"), openai.NotFoundError),
        (lambda: begin(client, file), openai.NotFoundError),
    ):
        try:
            call()
            raise AssertionError("no error")
        except kind as error:
            assert error.body["message"], error
    said("faults")


def cancelled(client):
    # A scripted server takes its time over "slow answer"; a model over the many tokens.
    slow = {"messages": [{"role": "user", "content": "slow answer"}], "max_tokens": 200, "ignore_eos": True}
    file = upload(client, [line(f"r{i}", **(slow if i > 4 else {})) for i in range(200)])
    batch = begin(client, file)
    while batch.request_counts.completed < 1:
        batch = client.batches.retrieve(batch.id)
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = ended(client, batch)
    assert batch.status == "cancelled" and 0 < batch.request_counts.completed < 200, batch
    client.files.delete(file.id)
    client.files.delete(batch.output_file_id)
    said("batches.cancel")


def metrics(base_url):
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(base_url.removesuffix("/v1") + "/metrics") as answer:
        text = answer.read().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    samples = {sample.name: sample for family in families.values() for sample in family.samples}
    # The parser takes `_total` off the names of counters.
    for name, kind in (
        ("vllm:prompt_tokens", "counter"), ("vllm:generation_tokens", "counter"), ("vllm:request_success", "counter"),
        ("vllm:num_requests_running", "gauge"), ("vllm:kv_cache_usage_perc", "gauge"),
        ("vllm:time_to_first_token_seconds", "histogram"), ("vllm:iteration_tokens_total", "histogram"),
    ):
        assert families[name].type == kind, (name, families[name].type)
    assert samples["vllm:generation_tokens_total"].value > 0
    assert set(samples["vllm:generation_tokens_total"].labels) == {"model_name", "engine"}
    for family in (f for f in families.values() if f.type == "histogram"):
        buckets = [sample.value for sample in family.samples if sample.name.endswith("_bucket")]
        count = sum(sample.value for sample in family.samples if sample.name.endswith("_count"))
        assert buckets and max(buckets) <= count, family.name
    said(f"/metrics has {len(families)} families")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("base_url")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--lines", type=int, default=20)
    parser.add_argument("--metrics", action="store_true")
    args = parser.parse_args()
    client = openai.OpenAI(base_url=args.base_url, api_key=args.api_key, max_retries=0, timeout=120)
    whole(client, args.lines)
    faults(client)
    cancelled(client)
    if args.metrics:
        metrics(args.base_url)


if __name__ == "__main__":
    main()
