//! Command lines of `vllm serve`: what is accepted, with which note, and what is refused.

use std::net::TcpListener;

use crate::program::{refused, run, served};

#[test]
fn a_vllm_command_line_works_by_replacing_the_programs_name() {
    let log = served(&[
        "--trust-remote-code",
        "--kv_cache_dtype",
        "fp8",
        "--block-size",
        "256",
        "--tokenizer-mode",
        "deepseek_v4",
        "--tool-call-parser",
        "deepseek_v4",
        "--enable-auto-tool-choice",
        "--reasoning-parser",
        "deepseek_v4",
        "--attention_config.use_fp4_indexer_cache=True",
        "--enable-expert-parallel",
        "--tensor_parallel_size=1",
        "--enable-prefix-caching",
        "--enable-chunked-prefill",
        "--async-scheduling",
        "--compilation-config",
        r#"{"cudagraph_mode":"FULL_AND_PIECEWISE"}"#,
        "-O3",
    ]);
    for part in [
        "cache fp8 main and fp4 index",
        "of scratch at most",
        "--trust-remote-code is not needed",
        "--enable-auto-tool-choice is always on",
        "--enable-prefix-caching",
        "--enable-chunked-prefill is always on",
        "--async-scheduling is not needed",
        "--compilation-config and -O are not needed",
    ] {
        assert!(log.contains(part), "{part:?} is not in {log}");
    }
}

#[test]
fn every_spelling_of_the_indexer_format_reaches_the_cache() {
    for (args, format) in [
        (&["--attention-config", r#"{"indexer_kv_dtype":"fp8"}"#][..], "fp8 index"),
        (&["--attention-config.use-fp4-indexer-cache=False", "--no-enable-prefix-caching", "-O", "2"], "fp8 index"),
        (&["--kv-cache-dtype=bfloat16", "--index-cache-dtype", "bf16"], "bf16 main and bf16 index"),
    ] {
        let log = served(args);
        assert!(log.contains(format), "{args:?}: {log}");
    }
}

#[test]
fn values_without_a_meaning_say_what_to_use() {
    for (args, parts) in [
        (&["--block-size", "128"][..], &["--block-size 128", "use 256"][..]),
        (&["--block_size=64"], &["--block-size 64", "use 256"]),
        (&["--tokenizer-mode", "mistral"], &["--tokenizer-mode mistral", "use deepseek_v4"]),
        (&["--reasoning-parser", "qwen3"], &["--reasoning-parser qwen3", "use deepseek_v4"]),
        (&["--tool-call-parser", "hermes"], &["--tool-call-parser hermes", "use deepseek_v4"]),
        (&["-tp", "8"], &["8 GPUs cannot share its 2 output groups", "--tensor-parallel-size"]),
        (&["-tp", "2", "--backend", "cpu"], &["--tensor-parallel-size 2", "--backend cuda"]),
        (&["-dp", "4"], &["--data-parallel-size 4", "use 1"]),
        (&["--load-format", "dummy", "--backend", "cpu"], &["random weights", "--backend cuda"]),
        (&["--layers", "3"], &["--layers", "--load-format dummy"]),
        (&["--backend", "cuda", "--numerics", "reference"], &["rounds as serving", "--backend cpu"]),
        (&["--attention-config.backend=FLASHMLA"], &["--attention-config.backend", "--index-cache-dtype"]),
        (&["--attention-config", r#"{"indexer_kv_dtype":"int4"}"#], &["use mxfp4 or fp8"]),
        (&["--max-model-len", "2M"], &["--max-model-len 2097152", "1048576, the model's context"]),
    ] {
        refused(&[&["serve", "--port", "0"], args].concat(), parts);
    }
}

#[test]
fn a_value_that_cannot_be_parsed_is_a_wrong_command_line() {
    let run = run(&["serve", "--kv-cache-dtype", "nvfp4_ds_mla"]);
    assert_eq!(run.code, Some(2));
    assert!(run.err.contains("use fp8"), "{}", run.err);
}

#[test]
fn a_port_in_use_is_named_before_the_model_loads() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    refused(&["serve", "--port", &port], &[&format!("port {port} on 127.0.0.1 is in use"), "--port"]);
}
