//! Where optional shared libraries are looked for, so that nobody has to set `LD_LIBRARY_PATH`.
//!
//! In this order: the folders of `LONGWAVE_LIB_PATH`, the layout that Python wheels leave in site-packages, the folders
//! of `LD_LIBRARY_PATH`, the system's. Only looks for files; loads nothing.

use std::path::{Path, PathBuf};

/// Something optional, and what it is for.
pub struct Library {
    /// File name.
    pub file: &'static str,
    /// What works with it.
    pub purpose: &'static str,
    /// How to get it.
    pub install: &'static str,
    /// Folders inside site-packages that hold it.
    wheel_folders: &'static [&'static str],
}

/// All optional things that `longwave doctor` names.
pub const OPTIONAL: &[Library] = &[
    Library {
        file: "libnccl.so.2",
        purpose: "several machines, later",
        install: "pip install nvidia-nccl-cu13",
        wheel_folders: &["nvidia/nccl/lib"],
    },
    Library {
        file: "libnixl_capi.so",
        purpose: "sending caches between machines",
        install: "pip install nixl-cu13",
        wheel_folders: &[".nixl_cu13.mesonpy.libs", "nixl_cu13.libs", ".nixl_cu12.mesonpy.libs"],
    },
    Library {
        file: "nvcc",
        purpose: "building kernels from source",
        install: "cargo xtask cuda-toolkit",
        wheel_folders: &["nvidia/cu13/bin", "nvidia/cuda_nvcc/bin"],
    },
];

/// The driver's library; comes with the driver and nothing else.
pub const DRIVER: Library = Library {
    file: "libcuda.so.1",
    purpose: "NVIDIA GPUs",
    install: "the NVIDIA driver (in a container: start it with GPU access)",
    wheel_folders: &[],
};

/// Folders of the system, most specific first.
const SYSTEM: &[&str] = &[
    "/usr/local/cuda/lib64",
    "/usr/local/cuda/bin",
    "/usr/local/lib",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/nvidia/lib64",
    "/usr/lib/wsl/lib",
];

/// What the search depends on, so that tests can set it.
#[derive(Debug, Clone, Default)]
pub struct Places {
    /// `LONGWAVE_LIB_PATH`.
    pub own: Vec<PathBuf>,
    /// Every site-packages folder.
    pub site_packages: Vec<PathBuf>,
    /// `LD_LIBRARY_PATH`, `PATH` and the system's folders.
    pub system: Vec<PathBuf>,
}

impl Places {
    /// The places of this process.
    pub fn of_environment() -> Places {
        let list = |name: &str| -> Vec<PathBuf> {
            std::env::var_os(name).map(|v| std::env::split_paths(&v).collect()).unwrap_or_default()
        };
        let own = list("LONGWAVE_LIB_PATH");
        let mut system = list("LD_LIBRARY_PATH");
        system.extend(SYSTEM.iter().map(PathBuf::from));
        let path = list("PATH");
        let mut roots: Vec<PathBuf> =
            ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(|n| std::env::var_os(n).map(PathBuf::from)).collect();
        roots.extend(std::env::var_os("HOME").map(|h| Path::new(&h).join(".local")));
        // Every Python on the PATH is `<root>/bin/python3`.
        roots.extend(path.iter().filter_map(|p| p.parent().map(Path::to_path_buf)));
        roots.extend(["/usr/local", "/usr"].map(PathBuf::from));
        system.extend(path);
        Places { own, site_packages: roots.iter().flat_map(|r| site_packages(r)).collect(), system }
    }

    /// The first file of `library`'s name in any place.
    pub fn find(&self, library: &Library) -> Option<PathBuf> {
        // LONGWAVE_LIB_PATH may name a site-packages folder whole, too.
        let wheels = self.own.iter().chain(&self.site_packages);
        let in_wheels = wheels.flat_map(|s| library.wheel_folders.iter().map(move |f| s.join(f)));
        let folders = self.own.iter().cloned().chain(in_wheels).chain(self.system.iter().cloned());
        folders.map(|folder| folder.join(library.file)).find(|p| p.is_file())
    }
}

/// `lib/python3.*/{site,dist}-packages` under `root`, and Debian's unversioned one.
fn site_packages(root: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for lib in ["lib", "lib64"] {
        let Ok(entries) = std::fs::read_dir(root.join(lib)) else { continue };
        for entry in entries.flatten().filter(|e| e.file_name().to_string_lossy().starts_with("python3")) {
            found.extend(
                ["site-packages", "dist-packages"].map(|s| entry.path().join(s)).into_iter().filter(|p| p.is_dir()),
            );
        }
    }
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wheels_and_own_folders_are_found_before_the_system() {
        let root = tempfile::tempdir().unwrap();
        let (site, own) = (root.path().join("lib/python3.13/site-packages"), root.path().join("own"));
        let wheel = site.join("nvidia/nccl/lib");
        std::fs::create_dir_all(&wheel).unwrap();
        std::fs::create_dir_all(&own).unwrap();
        std::fs::write(wheel.join("libnccl.so.2"), "").unwrap();
        let mut places = Places {
            own: vec![own.clone()],
            site_packages: site_packages(root.path()),
            system: vec![root.path().into()],
        };
        assert_eq!(places.site_packages, [site]);
        assert_eq!(places.find(&OPTIONAL[0]), Some(wheel.join("libnccl.so.2")));
        assert_eq!(places.find(&OPTIONAL[1]), None);
        std::fs::write(own.join("libnccl.so.2"), "").unwrap();
        assert_eq!(places.find(&OPTIONAL[0]), Some(own.join("libnccl.so.2")));
        places.own.clear();
        std::fs::write(root.path().join("libcuda.so.1"), "").unwrap();
        assert_eq!(places.find(&DRIVER), Some(root.path().join("libcuda.so.1")));
    }
}
