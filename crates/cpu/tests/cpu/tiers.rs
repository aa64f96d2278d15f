//! Tiers over the CPU backend: what comes back from host memory and disk has the bits that were computed (M4).

use longwave_cpu::backend::{CpuBackend, CpuOptions};
use longwave_cpu::forward::Model;
use longwave_cpu::numerics::Profile;
use longwave_engine::request::Request;
use longwave_engine::step::{Backend, BlockId, ReturnLogits, Token};
use longwave_engine::tier::TierOptions;
use longwave_engine::{Engine, EngineOptions};
use longwave_model::{CacheFormats, IndexFormat, MainFormat};

use crate::invariance::prompt;
use crate::rig::{CACHE, tiny};
use crate::served::{drafting, request, serve_in_turn};

/// Lengths of M1 that reuse something, and one before.
const EDGES: [usize; 6] = [256, 257, 511, 512, 513, 1000];

fn wanted(text: Vec<Token>, seed: u64) -> Request {
    Request { logits: ReturnLogits::Sampled, stop_tokens: Vec::new(), ..request(text, 8, seed) }
}

fn options(tiers: TierOptions, drafts: u32) -> EngineOptions {
    EngineOptions { tiers, drafts, paranoid: true, ..EngineOptions::default() }
}

fn edge(len: usize) -> u32 {
    (len as u32 - 1) / 256 * 256
}

#[test]
fn m4_bits_survive_host_memory() {
    // Pools for little more than one request.
    let tiers = TierOptions { host_bytes: 1 << 30, ..TierOptions::default() };
    let mut engine = Engine::new(drafting(4096, 1, 2_400_000, 0), options(tiers, 0));
    for (i, len) in [257, 512, 1000].into_iter().enumerate() {
        let ask = wanted(prompt(len, 40 + i as u64), i as u64);
        let (first, _) = serve_in_turn(&mut engine, ask.clone());
        let evicted = engine.status().prefix.evicted_nodes;
        for other in 0..2 {
            serve_in_turn(&mut engine, wanted(prompt(1000, 400 + 10 * i as u64 + other), 0));
        }
        assert!(engine.status().prefix.evicted_nodes > evicted, "{:?}", engine.status());
        let (second, report) = serve_in_turn(&mut engine, ask);
        assert!(first == second && !first.logits.is_empty(), "{len} tokens: {report}");
        assert_eq!((report.cached_tokens, report.host_tokens), (edge(len), edge(len)), "{len} tokens: {report}");
    }
}

#[test]
fn m4_bits_survive_a_restart() {
    for drafts in [0, 3] {
        let folder = tempfile::tempdir().unwrap();
        let tiers =
            || TierOptions { directory: Some(folder.path().to_owned()), disk_bytes: 1 << 30, ..TierOptions::default() };
        let asks: Vec<Request> =
            EDGES.iter().enumerate().map(|(i, &len)| wanted(prompt(len, 70 + i as u64), i as u64)).collect();
        let mut first = Engine::new(drafting(4096, 1, 64 << 20, drafts), options(tiers(), drafts));
        let answers: Vec<_> = asks.iter().map(|ask| serve_in_turn(&mut first, ask.clone()).0).collect();
        first.stop("a restart");
        drop(first);
        let mut second = Engine::new(drafting(4096, 1, 64 << 20, drafts), options(tiers(), drafts));
        for (i, ask) in asks.into_iter().enumerate() {
            let (answer, report) = serve_in_turn(&mut second, ask);
            assert!(answer == answers[i], "{} tokens, {drafts} drafts: {report}", EDGES[i]);
            assert_eq!((report.cached_tokens, report.disk_tokens), (edge(EDGES[i]), edge(EDGES[i])), "{report}");
        }
    }
}

#[test]
fn what_changes_rows_changes_the_fingerprint() {
    let of = |profile, formats, drafts, context| {
        let options = CpuOptions { seats: 1, step_tokens: 64, context, cache_bytes: 16 << 20, drafts };
        CpuBackend::new(Model::new(&tiny(), profile, formats), options).unwrap().fingerprint()
    };
    let plain = of(Profile::Serving, CACHE, 0, 512);
    assert_eq!(plain, of(Profile::Serving, CACHE, 0, 4096), "sizes change no row");
    assert_eq!(of(Profile::Serving, CACHE, 1, 512), of(Profile::Serving, CACHE, 7, 512));
    let others = [
        of(Profile::Reference, CACHE, 0, 512),
        of(Profile::Serving, CacheFormats { main: MainFormat::Bf16, ..CACHE }, 0, 512),
        of(Profile::Serving, CacheFormats { index: IndexFormat::Fp8, ..CACHE }, 0, 512),
        of(Profile::Serving, CACHE, 3, 512),
    ];
    for (i, other) in others.iter().enumerate() {
        assert!(*other != plain && !others[..i].contains(other), "{i}");
    }
}

/// The arithmetic of this build has a name, so that a cache directory of an older build is never taken for one of this.
#[test]
fn another_arithmetic_has_another_name() {
    let mut hash = blake3::Hasher::new();
    for (profile, formats) in [
        (Profile::Serving, CACHE),
        (Profile::Reference, CacheFormats { main: MainFormat::Bf16, index: IndexFormat::Fp8 }),
    ] {
        let mut rig = crate::rig::Rig::new(profile, formats, 1, 600);
        let text = prompt(600, 77);
        for (start, end) in [(0, 300), (300, 301), (301, 600)] {
            let streams = rig.batch(&[(0, start, &text[start as usize..end], 0)], None);
            if end < 600 {
                rig.mtp_keys(0, start, &streams, &text[start as usize + 1..=end]);
            }
        }
        for (bucket, units) in rig.units().into_iter().enumerate() {
            for unit in 0..units {
                hash.update(rig.cache.unit(bucket, BlockId(unit)));
            }
        }
    }
    let rows = hash.finalize().to_hex().to_string();
    let known = longwave_cpu::fingerprint::ROWS;
    assert_eq!(rows[..32], *known, "the bytes of cache rows have changed: put the new digest into fingerprint.rs");
}
