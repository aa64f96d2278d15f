//! Tiers below the device: what comes back from host memory and disk, over restarts and cancellations, and that it
//! changes no token and no logit.

use std::fs;
use std::path::{Path, PathBuf};

use longwave_engine::report::PrefixReport;
use longwave_engine::request::{FinishReason, Request, RequestId};
use longwave_engine::sim::{DraftQuality, SimBackend, SimOptions};
use longwave_engine::step::{Limits, ReturnLogits, Token};
use longwave_engine::tier::TierOptions;
use longwave_engine::{Engine, EngineOptions};
use longwave_model::CacheLayout;

use crate::world::{
    Folder, Record, assert_home, flash_layout, paranoid, prompt, request, solo, tiny_layout, wide_limits,
};

/// Lengths of M1.
const EDGES: [u32; 13] = [1, 3, 4, 5, 127, 128, 129, 255, 256, 257, 511, 513, 1000];

fn host(bytes: u64) -> TierOptions {
    TierOptions { host_bytes: bytes, ..TierOptions::default() }
}

pub fn disk(folder: &Path, bytes: u64) -> TierOptions {
    TierOptions { directory: Some(folder.to_owned()), disk_bytes: bytes, ..TierOptions::default() }
}

pub fn options(tiers: TierOptions) -> EngineOptions {
    EngineOptions { tiers, ..paranoid() }
}

/// Pools that hold two running requests of a thousand tokens and hardly more.
pub fn narrow(layout: &CacheLayout) -> Limits {
    let units = [0, 1, 2].map(|i| layout.long_lived_units()[i] * 8 + layout.sliding_units(7)[i] * 4);
    Limits { seats: 2, units, context: 2048, ..wide_limits() }
}

pub fn engine(limits: Limits, tiers: TierOptions) -> Engine<SimBackend> {
    Engine::new(SimBackend::new(tiny_layout(), limits, SimOptions::default()), options(tiers))
}

pub fn submit(engine: &mut Engine<SimBackend>, request: &Request) -> (RequestId, Record) {
    let record = Record::default();
    (engine.submit(request.clone(), record.sink()).unwrap(), record)
}

/// Runs one request on an idle engine. Its tokens and logits must be those of its solo run.
pub fn ask(engine: &mut Engine<SimBackend>, request: &Request) -> (Vec<Token>, PrefixReport) {
    let (_, record) = submit(engine, request);
    while engine.step() {}
    assert_eq!(record.assert_complete(), FinishReason::Length);
    let alone = solo(&tiny_layout(), 4096, request);
    assert!(record.tokens() == alone.tokens() && record.logits() == alone.logits(), "{:?}", record.report());
    (record.tokens(), record.report().unwrap())
}

pub fn wanted(seed: u64, len: u32) -> Request {
    Request { logits: ReturnLogits::Sampled, ..request(prompt(seed, len), 20) }
}

fn edge(len: u32) -> u32 {
    (len - 1) / 256 * 256
}

/// Record files in a directory.
pub fn files(folder: &Path) -> Vec<PathBuf> {
    let all = fs::read_dir(folder).unwrap().map(|e| e.unwrap().path());
    let mut all: Vec<PathBuf> = all.filter(|p| p.extension().is_some_and(|e| e == "lwrecord")).collect();
    all.sort();
    all
}

/// A directory with what a server left that answered one request of `len` tokens.
pub fn left(seed: u64, len: u32) -> Folder {
    let folder = Folder::new();
    let mut first = engine(wide_limits(), disk(folder.path(), 1 << 30));
    ask(&mut first, &wanted(seed, len));
    first.stop("the test is over");
    assert!(first.status().tiers.disk.stored > 0);
    folder
}

#[test]
fn m4_evicted_prefixes_come_back_from_host_memory() {
    let mut engine = engine(narrow(&tiny_layout()), host(1 << 30));
    for (i, len) in EDGES.into_iter().enumerate() {
        let first = ask(&mut engine, &wanted(i as u64, len)).0;
        // Push everything out of the device.
        (0..3).for_each(|other| drop(ask(&mut engine, &wanted(1000 + 10 * i as u64 + other, 900))));
        let (second, report) = ask(&mut engine, &wanted(i as u64, len));
        assert_eq!(first, second);
        assert_eq!((report.cached_tokens, report.host_tokens), (edge(len), edge(len)), "{len} tokens: {report}");
    }
    let status = engine.status();
    assert_home(&status);
    let saved: u32 = EDGES.map(edge).iter().sum();
    assert_eq!((status.prefix.host_tokens, status.prefix.disk_tokens), (u64::from(saved), 0));
    assert_eq!((status.tiers.host.failed, status.tiers.host.skipped, status.tiers.pending), (0, 0, 0));
}

#[test]
fn m4_a_restarted_engine_goes_on_from_disk_at_every_edge() {
    for (layout_of_restart, limits) in [("wide", wide_limits()), ("narrow", narrow(&tiny_layout()))] {
        let folder = Folder::new();
        let mut texts = Vec::new();
        let mut first = engine(limits.clone(), disk(folder.path(), 1 << 30));
        for (i, len) in EDGES.into_iter().enumerate() {
            let (answer, report) = ask(&mut first, &wanted(i as u64, len));
            assert_eq!(report.cached_tokens, 0);
            texts.push(answer);
        }
        first.stop("a restart");
        assert_eq!(first.status().tiers.disk.failed, 0);
        drop(first);
        let mut second = engine(limits, disk(folder.path(), 1 << 30));
        for (i, len) in EDGES.into_iter().enumerate() {
            let (answer, report) = ask(&mut second, &wanted(i as u64, len));
            assert_eq!(answer, texts[i]);
            assert_eq!((report.cached_tokens, report.disk_tokens), (edge(len), edge(len)), "{layout_of_restart} {len}");
        }
        let status = second.status();
        assert_home(&status);
        assert_eq!((status.tiers.disk.failed, status.tiers.disk_fault), (0, None));
    }
}

#[test]
fn a_conversation_goes_on_after_a_restart_where_its_last_answer_ended() {
    let folder = Folder::new();
    let mut text = prompt(1, 300);
    for turn in 0..4 {
        // A new process for every turn.
        let mut engine = engine(wide_limits(), disk(folder.path(), 1 << 30));
        let (answer, report) = ask(&mut engine, &request(text.clone(), 300));
        let expected = if turn == 0 { 0 } else { (text.len() as u32 - 31) / 256 * 256 };
        assert_eq!((report.cached_tokens, report.disk_tokens), (expected, expected), "turn {turn}: {report}");
        text.extend(answer);
        text.extend(prompt(50 + turn, 30));
        engine.stop("the turn is over");
    }
}

#[test]
fn records_of_an_answer_are_few() {
    let folder = Folder::new();
    let mut engine = engine(wide_limits(), disk(folder.path(), 1 << 30));
    ask(&mut engine, &request(prompt(1, 10), 2000));
    engine.stop("the test is over");
    let checkpoints = files(folder.path()).iter().filter(|f| f.to_string_lossy().contains("checkpoint")).count();
    assert_eq!((files(folder.path()).len(), checkpoints), (7 + 1, 1), "7 blocks and where the answer ended");
}

#[test]
fn tenants_share_nothing_in_the_tiers_either() {
    let folder = Folder::new();
    let tiers = TierOptions { host_bytes: 1 << 30, ..disk(folder.path(), 1 << 30) };
    let of = |salt| Request { salt, ..wanted(1, 600) };
    let mut first = engine(wide_limits(), tiers.clone());
    ask(&mut first, &of(1));
    first.stop("a restart");
    drop(first);
    let mut second = engine(wide_limits(), tiers);
    assert_eq!(ask(&mut second, &of(2)).1.cached_tokens, 0);
    assert_eq!(ask(&mut second, &of(1)).1.disk_tokens, 512);
}

#[test]
fn tiers_stay_within_their_bytes() {
    let folder = Folder::new();
    // Room for about three requests of a thousand tokens.
    let one: u64 = files(left(1, 1000).path()).iter().map(|f| f.metadata().unwrap().len()).sum();
    let tiers = TierOptions { host_bytes: 2 * one, ..disk(folder.path(), 3 * one) };
    let mut engine = engine(narrow(&tiny_layout()), tiers);
    for seed in 0..12 {
        ask(&mut engine, &wanted(seed, 1000));
        let tiers = engine.status().tiers;
        assert!(tiers.host.bytes <= 2 * one && tiers.disk.bytes <= 3 * one, "{tiers:?}");
    }
    // The last ones are there, in one tier or the other.
    let (_, last) = ask(&mut engine, &wanted(11, 1000));
    let (_, before) = ask(&mut engine, &wanted(9, 1000));
    assert_eq!((last.cached_tokens, before.cached_tokens, before.disk_tokens), (768, 768, 768));
    engine.stop("the test is over");
    let on_disk: u64 = files(folder.path()).iter().map(|f| f.metadata().unwrap().len()).sum();
    let tiers = engine.status().tiers;
    assert!(on_disk <= 3 * one && on_disk == tiers.disk.bytes, "{on_disk} of {}: {tiers:?}", 3 * one);
    assert!(tiers.host.evicted > 0 && tiers.disk.evicted > 0);
}

#[test]
fn two_engines_cannot_write_to_one_directory() {
    let folder = left(1, 300);
    let held = engine(wide_limits(), disk(folder.path(), 1 << 30));
    let backend = || SimBackend::new(tiny_layout(), wide_limits(), SimOptions::default());
    let refused = |tiers| Engine::open(backend(), options(tiers)).err().unwrap().to_string();
    assert!(refused(disk(folder.path(), 1 << 30)).contains("in use by process"));
    drop(held);
    assert!(Engine::open(backend(), options(disk(folder.path(), 1 << 30))).is_ok());
    assert!(refused(disk(folder.path(), 0)).contains("0 bytes"));
    fs::write(folder.path().join("file"), b"").unwrap();
    assert!(refused(disk(&folder.path().join("file"), 1 << 30)).contains("not a directory"));
}

#[test]
fn a_request_that_waits_for_the_disk_holds_nobody_up_and_keeps_its_place() {
    let folder = left(1, 1000);
    // One file is read per step.
    let tiers = TierOptions { inline: true, ..disk(folder.path(), 1 << 30) };
    let mut engine = engine(Limits { seats: 1, ..wide_limits() }, tiers);
    let (_, loading) = submit(&mut engine, &wanted(1, 1000));
    let (_, other) = submit(&mut engine, &request(prompt(7, 40), 20));
    let (_, late) = submit(&mut engine, &request(prompt(8, 40), 3));
    engine.step();
    assert!(other.report().is_some() && loading.report().is_none(), "the second one runs while the first one loads");
    assert_eq!(engine.status().tiers.loading, 1);
    while engine.step() {
        assert!(late.report().is_none() || loading.report().is_some(), "the first one lost its place");
    }
    assert_eq!(loading.report().unwrap().disk_tokens, 768);
    [loading, other, late].iter().for_each(|r| assert_eq!(r.assert_complete(), FinishReason::Length));
    assert_eq!(engine.status().tiers.loading, 0);
    assert_home(&engine.status());
}

#[test]
fn two_requests_for_one_text_read_it_once() {
    let folder = left(1, 1000);
    let mut engine = engine(wide_limits(), TierOptions { inline: true, ..disk(folder.path(), 1 << 30) });
    let both = [0, 1].map(|_| submit(&mut engine, &wanted(1, 1000)).1);
    while engine.step() {}
    let reports = both.map(|r| r.report().unwrap());
    assert_eq!(reports.map(|r| (r.cached_tokens, r.disk_tokens)), [(768, 768), (768, 0)]);
    assert_eq!(engine.status().tiers.disk.restored, 4);
}

/// A client that leaves while its records are read, or while they are written, leaves nothing behind.
#[test]
fn m19_cancelling_during_a_load_or_a_store_brings_all_blocks_home() {
    let folder = left(1, 1000);
    for steps in 0..8 {
        let tiers = TierOptions { inline: true, host_bytes: 1 << 20, ..disk(folder.path(), 1 << 30) };
        let mut engine = engine(wide_limits(), tiers);
        let (id, loading) = submit(&mut engine, &wanted(1, 1000));
        let (other, storing) = submit(&mut engine, &wanted(100 + steps, 700));
        for _ in 0..steps {
            engine.step();
        }
        engine.cancel(id);
        engine.cancel(other);
        while engine.step() {}
        assert_home(&engine.status());
        for record in [loading, storing] {
            let reason = record.assert_complete();
            assert!(matches!(reason, FinishReason::Cancelled | FinishReason::Length), "{reason:?}");
        }
        assert_eq!(engine.status().tiers.loading, 0);
        let (_, report) = ask(&mut engine, &wanted(1, 1000));
        assert_eq!(report.cached_tokens, 768, "after {steps} steps");
        engine.stop("a restart");
    }
}

/// After days of eviction and restoring the bookkeeping must still fit the tiers (vllm#54914).
#[test]
fn m17_thousands_of_evictions_and_restores_leave_the_books_right() {
    let folder = Folder::new();
    let tiers = TierOptions { inline: true, host_bytes: 6 << 20, ..disk(folder.path(), 16 << 20) };
    let mut engine = engine(narrow(&tiny_layout()), tiers);
    let mut records = Vec::new();
    for i in 0..800u64 {
        let len = [300, 600, 777, 1000][(i % 4) as usize];
        let (id, record) = submit(&mut engine, &request(prompt(i * 7 % 23 / (1 + i % 3), len), 1 + (i % 3) as u32));
        for _ in 0..i % 5 {
            engine.step();
        }
        if i % 11 == 0 {
            engine.cancel(id);
        }
        records.push(record);
        if i % 40 == 0 {
            while engine.step() {}
        }
    }
    while engine.step() {}
    let status = engine.status();
    assert_home(&status);
    engine.check_integrity().unwrap();
    for record in records {
        record.assert_complete();
    }
    let tiers = status.tiers;
    assert!(tiers.host.bytes <= 6 << 20 && tiers.disk.bytes <= 16 << 20);
    assert!(tiers.disk.restored > 100 && tiers.disk.evicted > 100 && tiers.host.restored > 100, "{tiers:?}");
    assert_eq!((tiers.disk.failed, tiers.host.failed, tiers.disk_fault.clone()), (0, 0, None), "{tiers:?}");
    engine.stop("the test is over");
    let on_disk: u64 = files(folder.path()).iter().map(|f| f.metadata().unwrap().len()).sum();
    assert_eq!(on_disk, engine.status().tiers.disk.bytes);
}

#[test]
fn drafts_and_tiers_together_change_nothing() {
    let folder = Folder::new();
    let sim = || SimOptions { draft_quality: DraftQuality::Random, ..SimOptions::default() };
    let tiers = TierOptions { host_bytes: 2 << 20, ..disk(folder.path(), 1 << 30) };
    for round in 0..2 {
        let options = EngineOptions { drafts: 5, ..options(tiers.clone()) };
        let mut engine = Engine::new(SimBackend::new(tiny_layout(), narrow(&tiny_layout()), sim()), options);
        for seed in 0..6 {
            let (_, report) = ask(&mut engine, &wanted(seed, 800));
            assert_eq!(report.cached_tokens, if round == 0 { 0 } else { 768 });
        }
        engine.stop("a restart");
    }
}

/// serving.md counts 3.85 KB a token and 3.64 MB a checkpoint as what a tier should take.
#[test]
fn a_flash_record_holds_the_rows_and_little_else() {
    let folder = Folder::new();
    let backend = SimBackend::new(flash_layout(), wide_limits(), SimOptions::default());
    let mut engine = Engine::new(backend, options(disk(folder.path(), 1 << 30)));
    let (_, record) = submit(&mut engine, &request(prompt(1, 600), 1));
    while engine.step() {}
    record.assert_complete();
    engine.stop("the test is over");
    let sizes = |kind: &str| -> Vec<u64> {
        let of_kind = |f: &PathBuf| f.to_string_lossy().contains(kind);
        files(folder.path()).into_iter().filter(of_kind).map(|f| f.metadata().unwrap().len()).collect()
    };
    // fp8 index keys: 21 pages of 37,376 and of 8,448 bytes, 20 of 1,168.
    assert_eq!(sizes("node"), [21 * (37_376 + 8_448) + 20 * 1_168 + 1128 + 3 * 12 + 32; 2]);
    let windows = 2 * 44 * 37_376 + 21 * 37_376 + 21 * 8_448;
    assert_eq!(sizes("checkpoint"), [windows + 1128 + 6 * 12 + 32]);
}
