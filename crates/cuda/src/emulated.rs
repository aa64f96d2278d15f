//! Kernels whose threads wait for each other, run on the CPU (`emulated/device.h`): their own sources, compiled for the host, against plain
//! sums. Without a GPU this is what finds a barrier that counts wrongly, a buffer that is given back too early or an index that is off;
//! what a GPU rounds and how long it takes, it cannot say.
//!
//! Needs a C++ compiler and says so where there is none. `EMULATED_FIRST` and `EMULATED_COUNT` choose other cases.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Kernels that the cases run.
const KERNELS: [&str; 5] = ["mhc", "mhc_tensor", "mhc_tensor_few", "linear_bf16_wide", "linear_fp8_wide"];
/// Headers that are assembly: `emulated/ptx.h` stands in for them.
const ASSEMBLY: [&str; 13] = [
    "barrier",
    "bf16",
    "cluster",
    "copy",
    "fp8",
    "load",
    "mma",
    "overlap",
    "tensor_map",
    "tiles",
    "wgmma",
    "wgmma_bf16",
    "wgmma_fp8",
];
/// The emulation and its cases.
const OWN: [&str; 6] = ["device", "ptx", "mhc", "linear_bf16", "linear_fp8", "main"];
const FLAGS: [&str; 5] = ["-std=c++20", "-O1", "-w", "-ffp-contract=off", "-c"];

/// A kernel's source for the host: shared memory is the block's, and what speaks to the assembler alone is left out.
fn for_host(source: &str) -> String {
    let line = |line: &str| match line.trim_start() {
        code if code.starts_with("extern __shared__") => {
            "    uint8_t* memory = device::shared(device::rank());".to_string()
        }
        code if code.starts_with("asm volatile(\"bar.sync 1, 256;\"") => "    longwave::sync_first(256);".to_string(),
        code if code.starts_with("asm volatile(\"\"") || code.starts_with("asm volatile(\"prefetch") => String::new(),
        _ => line.to_string(),
    };
    source.lines().map(line).collect::<Vec<_>>().join("\n") + "\n"
}

/// Writes what is compiled to `to`; the sources.
fn write_sources(to: &Path) -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let common = to.join("common");
    std::fs::create_dir_all(&common).unwrap();
    for entry in std::fs::read_dir(root.join("kernels/common")).unwrap().flatten() {
        let name = entry.path().file_stem().unwrap().to_string_lossy().into_owned();
        let text = if ASSEMBLY.contains(&name.as_str()) {
            "#pragma once\n#include \"ptx.h\"\n".to_string()
        } else {
            for_host(&std::fs::read_to_string(entry.path()).unwrap())
        };
        std::fs::write(common.join(entry.file_name()), text).unwrap();
    }
    let kernels = KERNELS.map(|name| {
        let text = std::fs::read_to_string(root.join(format!("kernels/{name}.cu"))).unwrap();
        let path = to.join(format!("{name}_kernels.cpp"));
        std::fs::write(&path, format!("#include \"ptx.h\"\n{}", for_host(&text))).unwrap();
        path
    });
    let own = OWN.map(|name| root.join(format!("emulated/{name}.cpp")));
    kernels.into_iter().chain(own).collect()
}

/// Compiles the program below `folder`.
fn build(folder: &Path) -> PathBuf {
    let sources = write_sources(folder);
    let headers = Path::new(env!("CARGO_MANIFEST_DIR")).join("emulated");
    let object = |source: &Path| folder.join(source.file_stem().unwrap()).with_extension("o");
    let run = |command: &mut Command| {
        let output = command.output().unwrap();
        assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    };
    let compile = |source: &PathBuf| {
        let mut command = Command::new("c++");
        command.args(FLAGS).arg("-I").arg(&headers).arg("-I").arg(folder).arg(source).arg("-o").arg(object(source));
        run(&mut command);
    };
    std::thread::scope(|scope| {
        let (one, other) = sources.split_at(KERNELS.len());
        scope.spawn(move || one.iter().for_each(compile));
        other.iter().for_each(compile);
    });
    let program = folder.join("emulated");
    run(Command::new("c++").args(sources.iter().map(|source| object(source))).arg("-o").arg(&program));
    program
}

/// Runs cases of each kernel: hyper-connections in one launch against two, bf16 products in the order of few tokens, fp8 tiles in
/// clusters.
#[test]
fn kernels_whose_threads_wait_for_each_other_give_plain_sums() {
    if Command::new("c++").arg("--version").output().is_err() {
        println!("skipped: no c++ here to compile kernels for the CPU with");
        return;
    }
    let folder = std::env::temp_dir().join(format!("longwave-emulated-{}", std::process::id()));
    let program = build(&folder);
    let number = |name: &str| std::env::var(name).ok().and_then(|v| v.parse::<u32>().ok());
    let cases = |name: &str, count: u32| {
        let (first, count) = (number("EMULATED_FIRST").unwrap_or(1), number("EMULATED_COUNT").unwrap_or(count));
        let output = Command::new(&program).args([name, &first.to_string(), &count.to_string()]).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        let last = text.lines().rev().take(3).collect::<Vec<_>>().join(" | ");
        assert!(output.status.success(), "{name}, latest line first: {last}");
    };
    std::thread::scope(|scope| {
        scope.spawn(|| cases("mhc", 7));
        cases("linear_fp8", 6);
        cases("linear_bf16", 4);
    });
    std::fs::remove_dir_all(&folder).unwrap();
}
