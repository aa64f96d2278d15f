//! `--cache-dir`, `--disk-cache`, `--host-cache` and vLLM's spellings: what is accepted, refused and said.

use crate::program::{Server, refused, run, served, typed};

#[test]
fn a_server_says_where_its_tiers_are_and_what_it_found() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("deep/cache");
    let args = ["--cache-dir", path.to_str().unwrap(), "--disk-cache", "1G", "--host_cache=16M"];
    let log = served(&args);
    assert!(log.contains("evicted prefixes go to 16.00 MiB of host memory and "), "{log}");
    assert!(log.contains("deep/cache (0 records, 0 B of 1.00 GiB)"), "{log}");
    assert!(path.is_dir());
    assert!(!served::<&str>(&[]).contains("evicted prefixes"));
}

#[test]
fn two_servers_on_one_directory_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let first = Server::start(&["--cache-dir", path]);
    refused(&["serve", "--port", "0", "--cache-dir", path], &["is in use by process", "a directory of its own"]);
    drop(first);
    served(&["--cache-dir", path]);
}

#[test]
fn tiers_that_cannot_work_are_refused_before_the_model_loads() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, b"x").unwrap();
    let (file, path) = (file.to_str().unwrap(), folder.path().to_str().unwrap());
    let below = format!("{file}/below");
    for (args, parts) in [
        (&["--cache-dir", file][..], &["is not a directory"][..]),
        (&["--cache-dir", &below], &["cannot be made", "this user may write to"]),
        (&["--cache-dir", path, "--disk-cache", "0"], &["keeps nothing", "--cache-dir"]),
        (&["--cache-dir", path, "--disk-cache", "1K"], &["--disk-cache is 1.00 KiB", "one block of 256 tokens"]),
        (&["--host-cache", "5000"], &["--host-cache is 4.88 KiB", "one block of 256 tokens"]),
        (&["--kv_offloading_size", "0"], &["--kv-offloading-size 0", "--host-cache"]),
        (&["--kv-offloading-backend", "lmcache"], &["only native", "--cache-dir"]),
        (&["--host-cache", "1G", "--no-enable-prefix-caching"], &["leave one of them out"]),
    ] {
        refused(&[&["serve", "--port", "0"], args].concat(), parts);
    }
    let alone = run(&["serve", "--port", "0", "--disk-cache", "1G"]);
    assert!(alone.code == Some(2) && alone.err.contains("--cache-dir"), "{}", alone.err);
}

#[test]
fn vllms_flags_for_offloading_mean_the_host_tier() {
    let log = served(&["--kv_offloading_size", "0.5", "--kv-offloading-backend=native", "--swap-space", "4"]);
    assert!(log.contains("evicted prefixes go to 512.00 MiB of host memory"), "{log}");
}

#[test]
fn chat_goes_on_from_the_directory() {
    let folder = tempfile::tempdir().unwrap();
    let long = format!("{} What is the capital of Norway?\n", "Norway is a country. ".repeat(60));
    let args = ["chat", "--temperature", "0", "--cache-dir", folder.path().to_str().unwrap()];
    let first = typed(&args, &long);
    assert_eq!(first.code, Some(0), "{}", first.err);
    let records = std::fs::read_dir(folder.path())
        .unwrap()
        .filter(|e| e.as_ref().unwrap().path().extension().is_some_and(|e| e == "lwrecord"));
    assert!(records.count() >= 2, "blocks and a checkpoint");
    assert_eq!(typed(&args, &long).out, first.out);
}
