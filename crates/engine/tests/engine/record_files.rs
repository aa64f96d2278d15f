//! Record files that are not what they should be, and disks that do not do what they should: no hit, no wrong answer, no
//! refusal to start.

use std::fs;
use std::path::{Path, PathBuf};

use longwave_engine::engine::Engine;
use longwave_engine::report::PrefixReport;
use longwave_engine::sim::{SimBackend, SimOptions};
use longwave_engine::tier::{TierOptions, TiersStatus};

use crate::tiers::{ask, disk, engine, files, left, narrow, options, submit, wanted};
use crate::world::{Folder, tiny_layout, wide_limits};

#[test]
fn another_model_another_format_and_another_version_find_nothing_and_harm_nothing() {
    let folder = left(1, 600);
    let before = files(folder.path());
    let sim = SimOptions { seed: 9, ..SimOptions::default() };
    let mut other =
        Engine::new(SimBackend::new(tiny_layout(), wide_limits(), sim), options(disk(folder.path(), 1 << 30)));
    let (_, record) = submit(&mut other, &wanted(1, 600));
    while other.step() {}
    assert_eq!(record.report().unwrap().cached_tokens, 0);
    other.stop("a restart");
    drop(other);
    let mut layout = tiny_layout();
    layout.buckets[0].page_bytes += 64;
    let mut wider = Engine::new(
        SimBackend::new(layout, wide_limits(), SimOptions::default()),
        options(disk(folder.path(), 1 << 30)),
    );
    let (_, record) = submit(&mut wider, &wanted(1, 600));
    while wider.step() {}
    assert_eq!(record.report().unwrap().cached_tokens, 0);
    drop(wider);
    let mut again = engine(wide_limits(), disk(folder.path(), 1 << 30));
    assert_eq!(
        ask(&mut again, &wanted(1, 600)).1.disk_tokens,
        512,
        "three layouts share a directory, one after another"
    );
    drop(again);
    assert!(before.iter().all(|f| f.exists()));
    // A record that claims another version.
    for file in &before {
        let mut bytes = fs::read(file).unwrap();
        bytes[8] = 200;
        fs::write(file, bytes).unwrap();
    }
    let mut newer = engine(wide_limits(), disk(folder.path(), 1 << 30));
    assert_eq!(ask(&mut newer, &wanted(1, 600)).1.cached_tokens, 0);
}

#[test]
fn files_of_other_models_give_way_first() {
    let folder = left(1, 1000);
    let held: u64 = files(folder.path()).iter().map(|f| f.metadata().unwrap().len()).sum();
    let sim = SimOptions { seed: 9, ..SimOptions::default() };
    let backend = SimBackend::new(tiny_layout(), wide_limits(), sim);
    let mut other = Engine::new(backend, options(disk(folder.path(), held)));
    let old = files(folder.path());
    let (_, record) = submit(&mut other, &wanted(2, 1000));
    while other.step() {}
    record.assert_complete();
    other.stop("the test is over");
    let status = other.status().tiers.disk;
    assert!(status.bytes <= held && status.evicted > 0 && status.skipped == 0, "{status:?}");
    assert!(old.iter().all(|f| !f.exists()), "as many bytes were written as there were");
}

/// Damages every record of a directory in one way; a restarted engine must answer rightly and reuse nothing wrong.
fn damaged(how: impl Fn(&Path, Vec<u8>)) -> (PrefixReport, TiersStatus, Folder) {
    let folder = left(1, 1000);
    for file in files(folder.path()) {
        how(&file, fs::read(&file).unwrap());
    }
    let mut engine = engine(wide_limits(), disk(folder.path(), 1 << 30));
    let (_, report) = ask(&mut engine, &wanted(1, 1000));
    engine.check_integrity().unwrap();
    // What it computed is written again and good.
    let (_, again) = ask(&mut engine, &wanted(1, 1000));
    assert_eq!(again.cached_tokens, 768);
    let status = engine.status().tiers;
    engine.stop("a restart");
    drop(engine);
    let mut third = crate::tiers::engine(wide_limits(), disk(folder.path(), 1 << 30));
    assert_eq!(ask(&mut third, &wanted(1, 1000)).1.disk_tokens, 768, "bad files were replaced");
    (report, status, folder)
}

#[test]
fn cut_files_are_no_hit() {
    for keep in [0, 1, 100, 1127, 1128, 2000] {
        let (report, status, _) = damaged(|file, bytes| fs::write(file, &bytes[..keep]).unwrap());
        assert_eq!((report.cached_tokens, status.discarded_files), (0, 4), "{keep} bytes");
    }
}

#[test]
fn a_flipped_bit_is_no_hit() {
    // Behind the header it shows when the record is read: the first one read ends that plan.
    for at in [1200, 5000, 40_000] {
        let flip = |file: &Path, mut bytes: Vec<u8>| {
            bytes[at] ^= 4;
            fs::write(file, bytes).unwrap();
        };
        let (report, status, _) = damaged(flip);
        assert_eq!(report.cached_tokens, 0);
        assert!(status.disk.failed >= 1 && status.disk.restored == 0, "{status:?}");
        assert!(status.disk_fault.unwrap().contains("is not what it should be"));
    }
}

#[test]
fn a_record_under_another_name_is_no_hit() {
    let folder = left(1, 1000);
    let all = files(folder.path());
    let nodes: Vec<&PathBuf> = all.iter().filter(|f| f.to_string_lossy().contains("node")).collect();
    // Each takes the name of the next one.
    let contents: Vec<Vec<u8>> = nodes.iter().map(|f| fs::read(f).unwrap()).collect();
    for (i, name) in nodes.iter().enumerate() {
        fs::write(name, &contents[(i + 1) % nodes.len()]).unwrap();
    }
    let mut renamed = engine(wide_limits(), disk(folder.path(), 1 << 30));
    assert_eq!(renamed.status().tiers.discarded_files, 3);
    assert_eq!(ask(&mut renamed, &wanted(1, 1000)).1.cached_tokens, 0);
    drop(renamed);
    // The same while the server runs: the names were right when it opened the directory.
    let mut running = engine(narrow(&tiny_layout()), disk(folder.path(), 1 << 30));
    let nodes: Vec<PathBuf> =
        files(folder.path()).into_iter().filter(|f| f.to_string_lossy().contains("node")).collect();
    let contents: Vec<Vec<u8>> = nodes.iter().map(|f| fs::read(f).unwrap()).collect();
    for (i, name) in nodes.iter().enumerate() {
        fs::write(name, &contents[(i + 1) % nodes.len()]).unwrap();
    }
    let (_, report) = ask(&mut running, &wanted(1, 1000));
    assert_eq!(report.cached_tokens, 0);
    assert!(running.status().tiers.disk.failed >= 1);
}

#[test]
fn strangers_files_stay_and_are_never_read() {
    let folder = left(1, 600);
    let names = ["README", "model.safetensors", "x.lwrecord", ".hidden.tmp"];
    names.iter().for_each(|n| fs::write(folder.path().join(n), b"not ours").unwrap());
    let mut engine = engine(wide_limits(), disk(folder.path(), 1 << 30));
    assert_eq!(ask(&mut engine, &wanted(1, 600)).1.disk_tokens, 512);
    engine.stop("the test is over");
    names.iter().for_each(|n| assert_eq!(fs::read(folder.path().join(n)).unwrap(), b"not ours"));
}

#[test]
fn a_disk_that_fails_costs_nothing_but_itself() {
    let folder = Folder::new();
    let mut engine = engine(wide_limits(), disk(folder.path(), 1 << 30));
    ask(&mut engine, &wanted(1, 600));
    // The directory goes away under the server, with what was written.
    while engine.status().tiers.disk.stored < 3 {
        engine.step();
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    fs::remove_dir_all(folder.path()).unwrap();
    for seed in 2..9 {
        ask(&mut engine, &wanted(seed, 1000));
    }
    engine.stop("the test is over");
    let tiers = engine.status().tiers;
    assert!(tiers.disk_read_only && tiers.disk.failed >= 3, "{tiers:?}");
    assert!(tiers.disk_fault.unwrap().contains("writing failed"));
}

#[test]
fn a_tier_too_small_for_a_record_skips_it() {
    let folder = Folder::new();
    let tiers = TierOptions { host_bytes: 1000, ..disk(folder.path(), 1000) };
    let mut engine = engine(wide_limits(), tiers);
    ask(&mut engine, &wanted(1, 1000));
    assert_eq!(ask(&mut engine, &wanted(1, 1000)).1.cached_tokens, 768, "the device has it");
    engine.stop("the test is over");
    let tiers = engine.status().tiers;
    assert_eq!((tiers.disk.records, tiers.host.records, files(folder.path()).len()), (0, 0, 0));
    assert!(tiers.disk.skipped == 4 && tiers.host.skipped == 4 && !tiers.disk_read_only, "{tiers:?}");
}

/// Records hold prompts: nobody else on the machine reads them.
#[cfg(unix)]
#[test]
fn only_the_owner_reads_records() {
    use std::os::unix::fs::PermissionsExt;
    let outer = Folder::new();
    let folder = outer.path().join("made by the server");
    let mut engine = engine(wide_limits(), disk(&folder, 1 << 30));
    ask(&mut engine, &wanted(1, 600));
    engine.stop("a restart");
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&folder), 0o700);
    let records = files(&folder);
    assert!(!records.is_empty() && records.iter().all(|f| mode(f) == 0o600), "{records:?}");
}
