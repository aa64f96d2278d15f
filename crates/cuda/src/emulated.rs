//! Kernels whose threads wait for each other, run on the CPU (`emulated/device.h`): their own sources, compiled for the host, against plain
//! sums. Without a GPU this is what finds a barrier that counts wrongly, a buffer that is given back too early or an index that is off;
//! what a GPU rounds and how long it takes, it cannot say.
//!
//! Needs a C++ compiler and says so where there is none. `EMULATED_FIRST` and `EMULATED_COUNT` choose other cases.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

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

/// The program, compiled once; none without a compiler.
fn program() -> Option<&'static PathBuf> {
    static PROGRAM: OnceLock<Option<PathBuf>> = OnceLock::new();
    PROGRAM
        .get_or_init(|| {
            if Command::new("c++").arg("--version").output().is_err() {
                println!("skipped: no c++ here to compile kernels for the CPU with");
                return None;
            }
            let folder = Path::new(env!("OUT_DIR")).join(format!("emulated-{}", std::process::id()));
            let sources = write_sources(&folder);
            let headers = Path::new(env!("CARGO_MANIFEST_DIR")).join("emulated");
            let object = |source: &Path| folder.join(source.file_stem().unwrap()).with_extension("o");
            let compile = |source: &PathBuf| {
                let mut command = Command::new("c++");
                command.args(FLAGS).arg("-I").arg(&headers).arg("-I").arg(&folder).arg(source).arg("-o");
                let output = command.arg(object(source)).output().unwrap();
                let errors = String::from_utf8_lossy(&output.stderr);
                assert!(output.status.success(), "{}: {errors}", source.display());
            };
            std::thread::scope(|scope| {
                let (even, odd): (Vec<_>, Vec<_>) = sources.iter().enumerate().partition(|(i, _)| i % 2 == 0);
                scope.spawn(move || even.into_iter().for_each(|(_, source)| compile(source)));
                odd.into_iter().for_each(|(_, source)| compile(source));
            });
            let program = folder.join("emulated");
            let objects = sources.iter().map(|source| object(source));
            let output = Command::new("c++").args(objects).arg("-o").arg(&program).output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            Some(program)
        })
        .as_ref()
}

/// Runs `count` cases of a kernel.
fn run(name: &str, count: u32) {
    let Some(program) = program() else { return };
    let number = |name: &str, or: u32| std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(or);
    let (first, count) = (number("EMULATED_FIRST", 1), number("EMULATED_COUNT", count));
    let output = Command::new(program).args([name, &first.to_string(), &count.to_string()]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{name}: {}", text.lines().rev().take(3).collect::<Vec<_>>().join(" | "));
}

#[test]
fn hyper_connections_in_one_launch_have_the_bits_of_two() {
    run("mhc", 10);
}

#[test]
fn bf16_products_on_warpgroups_sum_in_the_order_of_few_tokens() {
    run("linear_bf16", 8);
}

#[test]
fn fp8_tiles_in_clusters_get_every_column_block_once() {
    run("linear_fp8", 10);
}
