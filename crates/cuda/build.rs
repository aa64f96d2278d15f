//! Compiles `kernels/**/*.cu` to one cubin per file and architecture and writes the table that embeds them.
//!
//! nvcc comes from `target/cuda` (`cargo xtask cuda-toolkit`) or from `CUDA_HOME`. Without it the table is empty and
//! everything still builds. A file is compiled again when it, a header or this program changed. Warnings of ptxas that
//! mean serialised tensor core work fail the build.

use std::collections::hash_map::DefaultHasher;
use std::fmt::Write as _;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// One compilation.
struct Job {
    source: PathBuf,
    name: String,
    /// As nvcc spells it after `sm_`.
    arch: String,
    cubin: PathBuf,
    log: PathBuf,
}

fn main() {
    let root = PathBuf::from(env("CARGO_MANIFEST_DIR"));
    let (kernels, out) = (root.join("kernels"), PathBuf::from(env("OUT_DIR")));
    println!("cargo::rerun-if-changed=kernels");
    println!("cargo::rerun-if-env-changed=CUDA_HOME");
    println!("cargo::rerun-if-env-changed=LONGWAVE_RACECHECK");
    println!("cargo::rerun-if-env-changed=LONGWAVE_TIMELINE");
    if std::env::var_os("LONGWAVE_TIMELINE").is_some() {
        println!("cargo::rustc-env=LONGWAVE_TIMELINE_BUILT=1");
    }
    let toolkit = root.join("../../target/cuda/nvidia/cu13");
    // A path that is not there would make every build run this again; the chore that fetches nvcc touches this file.
    if toolkit.join("bin/nvcc").exists() {
        println!("cargo::rerun-if-changed={}", toolkit.join("bin/nvcc").display());
    }
    println!("cargo::rerun-if-changed=build.rs");
    let home = std::env::var_os("CUDA_HOME").map(PathBuf::from).into_iter().chain([toolkit]);
    let nvcc = home.map(|home| home.join("bin/nvcc")).find(|nvcc| nvcc.exists());

    let mut files = Vec::new();
    collect(&kernels, &mut files);
    files.sort();
    let mut table = String::from("&[\n");
    if let Some(nvcc) = nvcc {
        let headers: Vec<&PathBuf> = files.iter().filter(|f| f.extension().is_some_and(|e| e == "cuh")).collect();
        let shared = headers.iter().fold(String::new(), |text, file| text + &read(file));
        let jobs: Vec<Job> = files
            .iter()
            .filter(|f| f.extension().is_some_and(|e| e == "cu"))
            .flat_map(|f| jobs(f, &kernels, &out))
            .collect();
        compile(&nvcc, &kernels, &jobs, &shared);
        let mut report = String::new();
        for job in &jobs {
            let _ = writeln!(
                table,
                "    Cubin {{ name: {:?}, arch: {:?}, bytes: include_bytes!({:?}) }},",
                job.name, job.arch, job.cubin
            );
            let _ = writeln!(report, "== {} sm_{}\n{}", job.name, job.arch, read(&job.log));
        }
        std::fs::write(out.join("ptxas.txt"), report).expect("OUT_DIR can be written");
    } else {
        println!("cargo::warning=no nvcc: the CUDA backend has no kernels; `cargo xtask cuda-toolkit` fetches it");
        std::fs::write(out.join("ptxas.txt"), "no nvcc\n").expect("OUT_DIR can be written");
    }
    table.push_str("]\n");
    std::fs::write(out.join("cubins.rs"), table).expect("OUT_DIR can be written");
}

fn env(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("cargo sets {name}"))
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() { collect(&path, files) } else { files.push(path) }
    }
}

/// A file names its architectures in its first lines: `// architectures: 90a 100a`.
fn jobs(source: &Path, kernels: &Path, out: &Path) -> Vec<Job> {
    let text = read(source);
    let archs = text.lines().find_map(|line| line.strip_prefix("// architectures: "));
    let archs = archs.unwrap_or_else(|| panic!("{}: no line `// architectures: ...`", source.display()));
    let name = source.strip_prefix(kernels).expect("found below it").with_extension("");
    let name = name.to_string_lossy().replace('/', "_");
    let job = |arch: &str| Job {
        source: source.to_owned(),
        name: name.clone(),
        arch: arch.to_owned(),
        cubin: out.join(format!("{name}.sm_{arch}.cubin")),
        log: out.join(format!("{name}.sm_{arch}.txt")),
    };
    archs.split_whitespace().map(job).collect()
}

fn compile(nvcc: &Path, kernels: &Path, jobs: &[Job], shared: &str) {
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(why) = compile_one(nvcc, kernels, job, shared) {
                        failed.lock().expect("no thread panics with it").push(why);
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().expect("all threads have ended");
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

fn compile_one(nvcc: &Path, kernels: &Path, job: &Job, shared: &str) -> Result<(), String> {
    let mut hash = DefaultHasher::new();
    // All lanes arrive where one would do: kernels that compute-sanitizer's racecheck can follow (common/barrier.cuh).
    let racecheck = std::env::var_os("LONGWAVE_RACECHECK").map(|_| "-DLONGWAVE_RACECHECK");
    // Kernels that note when they begin (common/timeline.cuh).
    let timeline = std::env::var_os("LONGWAVE_TIMELINE").map(|_| "-DLONGWAVE_TIMELINE");
    (read(&job.source), shared, include_str!("build.rs"), nvcc, racecheck, timeline).hash(&mut hash);
    let (stamp, mark) = (job.cubin.with_extension("stamp"), format!("{:x}", hash.finish()));
    if read(&stamp) == mark && job.cubin.exists() {
        return Ok(());
    }
    let arch = &job.arch;
    let output = Command::new(nvcc)
        .args(["-std=c++20", "-O3", "-cubin", "-lineinfo", "-Xptxas", "-v", "-Werror", "all-warnings"])
        .arg(format!("-gencode=arch=compute_{arch},code=sm_{arch}"))
        .args(racecheck.into_iter().chain(timeline))
        .arg("-I")
        .arg(kernels)
        .arg("-o")
        .arg(&job.cubin)
        .arg(&job.source)
        .output()
        .map_err(|e| format!("cannot run {}: {e}", nvcc.display()))?;
    let text = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        return Err(format!("{} for sm_{arch}:\n{text}", job.source.display()));
    }
    if let Some(line) = text.lines().find(|l| l.contains("C7508") || l.contains("C7512")) {
        return Err(format!("{} for sm_{arch}: {line}", job.source.display()));
    }
    let write = |path: &Path, text: &str| std::fs::write(path, text).map_err(|e| format!("{}: {e}", path.display()));
    write(&job.log, &text)?;
    write(&stamp, &mark)
}
