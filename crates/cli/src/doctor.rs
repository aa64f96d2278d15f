//! `longwave doctor`: what this machine offers and what is missing, with the command that mends it.
//!
//! Reads only files (`/proc`, library folders) and CPU flags; starts no GPU and loads no library, so it cannot hang on a
//! broken driver. Finding nothing is an answer, not an error.

use std::path::{Path, PathBuf};

use anyhow::Result;
use serde_json::{Value, json};

use crate::libraries::{DRIVER, OPTIONAL, Places};
use crate::output;
use crate::units::show_short;

/// Arguments of `longwave doctor`.
#[derive(clap::Args)]
pub struct Args {
    /// Print the findings as JSON.
    #[arg(long)]
    json: bool,
}

/// One GPU as the driver lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Gpu {
    name: String,
    bus: String,
}

/// One optional library.
struct Found {
    file: &'static str,
    purpose: &'static str,
    install: &'static str,
    path: Option<PathBuf>,
}

/// Everything that was found.
struct Findings {
    cpu: String,
    features: Vec<&'static str>,
    simd: &'static str,
    cores: usize,
    memory_bytes: Option<u64>,
    memory_available_bytes: Option<u64>,
    driver: Option<String>,
    driver_library: Option<PathBuf>,
    gpus: Vec<Gpu>,
    libraries: Vec<Found>,
}

/// Architectures of the GPU kernels in this program (`sm_90a`, ...); none when it was built without nvcc.
fn kernels() -> Vec<String> {
    let mut all: Vec<String> = longwave_cuda::cubins::CUBINS.iter().map(|cubin| format!("sm_{}", cubin.arch)).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// Looks and prints.
pub fn run(args: Args) -> Result<()> {
    let findings = look(Path::new("/proc"), &Places::of_environment());
    if args.json { output::json(&findings.json()) } else { output::text(&findings.text()) }
}

fn look(proc: &Path, places: &Places) -> Findings {
    let read = |name: &str| std::fs::read_to_string(proc.join(name)).unwrap_or_default();
    let (cpuinfo, meminfo) = (read("cpuinfo"), read("meminfo"));
    let kib = |key: &str| field(&meminfo, key)?.trim_end_matches("kB").trim().parse::<u64>().ok().map(|k| k * 1024);
    Findings {
        cpu: field(&cpuinfo, "model name").unwrap_or(std::env::consts::ARCH).to_string(),
        features: features(),
        simd: longwave_cpu::simd::level().name(),
        cores: std::thread::available_parallelism().map_or(1, |n| n.get()),
        memory_bytes: kib("MemTotal"),
        memory_available_bytes: kib("MemAvailable"),
        driver: driver_version(&read("driver/nvidia/version")),
        driver_library: places.find(&DRIVER),
        gpus: gpus(&proc.join("driver/nvidia/gpus")),
        libraries: OPTIONAL
            .iter()
            .map(|l| Found { file: l.file, purpose: l.purpose, install: l.install, path: places.find(l) })
            .collect(),
    }
}

/// Value of the first `key : value` line.
fn field<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    text.lines().find_map(|l| {
        let (k, v) = l.split_once(':')?;
        (k.trim() == key).then(|| v.trim())
    })
}

/// The first word of the form `580.95.05`.
fn driver_version(text: &str) -> Option<String> {
    let is_version =
        |w: &&str| w.contains('.') && w.split('.').all(|p| !p.is_empty() && p.bytes().all(|b| b.is_ascii_digit()));
    text.lines().next()?.split_whitespace().find(is_version).map(str::to_owned)
}

/// GPUs in the order of their bus addresses.
fn gpus(folder: &Path) -> Vec<Gpu> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut found: Vec<Gpu> = entries
        .flatten()
        .filter_map(|e| {
            let text = std::fs::read_to_string(e.path().join("information")).ok()?;
            let name = field(&text, "Model").unwrap_or("unknown NVIDIA GPU").to_string();
            Some(Gpu { name, bus: e.file_name().to_string_lossy().into_owned() })
        })
        .collect();
    found.sort_by(|a, b| a.bus.cmp(&b.bus));
    found
}

/// CPU features that the program uses or could use.
fn features() -> Vec<&'static str> {
    let mut out = Vec::new();
    #[cfg(target_arch = "x86_64")]
    {
        macro_rules! probe {
            ($($name:tt)*) => { $(if std::arch::is_x86_feature_detected!($name) { out.push($name); })* };
        }
        probe!("avx2" "fma" "f16c" "avx512f" "avx512bw" "avx512dq" "avx512vl" "avx512vnni" "avx512bf16" "avx512fp16");
    }
    #[cfg(target_arch = "aarch64")]
    if std::arch::is_aarch64_feature_detected!("neon") {
        out.push("neon");
    }
    out
}

impl Findings {
    fn text(&self) -> String {
        let size = |n: Option<u64>| n.map_or("unknown".into(), show_short);
        let or_none = |list: &[&str]| if list.is_empty() { "none".to_string() } else { list.join(" ") };
        let path = |p: &Option<PathBuf>| p.as_ref().map(|p| p.display().to_string());
        let mut rows = vec![
            ("version", format!("{} ({})", env!("CARGO_PKG_VERSION"), std::env::consts::ARCH)),
            ("CPU", format!("{}, {} cores for this process", self.cpu, self.cores)),
            ("CPU features", or_none(&self.features)),
            ("SIMD in use", format!("{} (LONGWAVE_SIMD can lower it)", self.simd)),
            ("memory", format!("{}, {} available", size(self.memory_bytes), size(self.memory_available_bytes))),
            ("driver", self.driver.as_ref().map_or("no NVIDIA driver".into(), |v| format!("NVIDIA {v}"))),
            (
                DRIVER.file,
                path(&self.driver_library).unwrap_or_else(|| format!("not found; it comes with {}", DRIVER.install)),
            ),
        ];
        if self.gpus.is_empty() {
            rows.push(("GPUs", "none".into()));
        }
        rows.extend(self.gpus.iter().map(|g| ("GPU", format!("{} at {}", g.name, g.bus))));
        let kernels = match kernels().join(" ") {
            none if none.is_empty() => "none: built without nvcc, computes on the CPU only".into(),
            some => some,
        };
        rows.push(("GPU kernels", kernels));
        rows.extend(self.libraries.iter().map(|l| {
            let place = path(&l.path).unwrap_or_else(|| format!("not found; to get it: {}", l.install));
            (l.file, format!("{place} (optional, for {})", l.purpose))
        }));
        rows.iter().map(|(k, v)| format!("{k:<17}{v}\n")).collect()
    }

    fn json(&self) -> Value {
        let gpu = |g: &Gpu| json!({"name": g.name, "bus": g.bus});
        let library = |l: &Found| json!({"file": l.file, "purpose": l.purpose, "path": l.path, "install": l.install});
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "architecture": std::env::consts::ARCH,
            "cpu": {"name": self.cpu, "cores": self.cores, "features": self.features, "simd": self.simd},
            "memory_bytes": self.memory_bytes,
            "memory_available_bytes": self.memory_available_bytes,
            "nvidia": {
                "driver": self.driver,
                "libcuda": self.driver_library,
                "gpus": self.gpus.iter().map(gpu).collect::<Vec<_>>(),
            },
            "kernels": kernels(),
            "libraries": self.libraries.iter().map(library).collect::<Vec<_>>(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn driver_versions_of_both_modules_are_read() {
        let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 10:11:16 UTC 2025\nGCC version: 12.2.0";
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57.08  Release Build\n";
        assert_eq!(driver_version(closed).as_deref(), Some("580.95.05"));
        assert_eq!(driver_version(open).as_deref(), Some("575.57.08"));
        assert_eq!(driver_version(""), None);
    }

    #[test]
    fn a_machine_with_gpus_is_described_and_one_without_too() {
        let root = tempfile::tempdir().unwrap();
        for (bus, name) in [("0000:1b:00.0", "NVIDIA H200"), ("0000:0a:00.0", "NVIDIA H100")] {
            let folder = root.path().join("driver/nvidia/gpus").join(bus);
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join("information"), format!("Model: \t\t {name}\nIRQ:   \t\t 34\n")).unwrap();
        }
        std::fs::write(root.path().join("driver/nvidia/version"), "NVRM version: X 580.95.05 Y\n").unwrap();
        std::fs::write(root.path().join("meminfo"), "MemTotal:  1048576 kB\nMemAvailable: 1024 kB\n").unwrap();
        std::fs::write(root.path().join("cpuinfo"), "processor\t: 0\nmodel name\t: Some CPU @ 3 GHz\n").unwrap();
        let found = look(root.path(), &Places::default());
        let text = found.text();
        assert!(text.contains("NVIDIA 580.95.05") && text.contains("Some CPU @ 3 GHz"), "{text}");
        assert!(text.find("NVIDIA H100 at 0000:0a:00.0").unwrap() < text.find("NVIDIA H200").unwrap());
        assert!(text.contains("1.00 GiB, 1.00 MiB available"), "{text}");
        assert!(text.contains("pip install nvidia-nccl-cu13") && text.contains("pip install nixl-cu13"), "{text}");
        assert_eq!(found.json()["nvidia"]["gpus"].as_array().map(Vec::len), Some(2));

        let bare = look(&root.path().join("nothing"), &Places::default());
        assert!(bare.text().contains("no NVIDIA driver") && bare.text().contains("memory           unknown"));
    }
}
