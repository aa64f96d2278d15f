//! The kernels in this program, by file and architecture.
//!
//! Empty when it was built without nvcc; then opening the backend names the command that fetches it.

/// One compiled kernel file.
#[derive(Debug, Clone, Copy)]
pub struct Cubin {
    /// Path below `kernels/` without its ending, `/` as `_`.
    pub name: &'static str,
    /// `90a`: the architecture as nvcc spells it after `sm_`.
    pub arch: &'static str,
    /// The file.
    pub bytes: &'static [u8],
}

/// All of them.
pub static CUBINS: &[Cubin] = include!(concat!(env!("OUT_DIR"), "/cubins.rs"));

/// What the assembler said about registers, shared memory and spills.
pub static PTXAS: &str = include_str!(concat!(env!("OUT_DIR"), "/ptxas.txt"));

/// The cubin of `name` for a GPU of compute capability `major.minor`.
pub fn find(name: &str, major: u32, minor: u32) -> Option<&'static Cubin> {
    let fits = |arch: &str| arch.trim_end_matches(['a', 'f']) == format!("{major}{minor}");
    CUBINS.iter().find(|c| c.name == name && fits(c.arch))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_kernel_spills_registers() {
        let spilled =
            |line: &&str| line.contains("bytes spill") && !line.contains(" 0 bytes spill stores, 0 bytes spill loads");
        assert_eq!(PTXAS.lines().filter(spilled).collect::<Vec<_>>(), [""; 0]);
    }

    #[test]
    fn every_kernel_waits_for_the_one_before_it() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
        let mut kernels = 0;
        for entry in std::fs::read_dir(folder).unwrap().flatten() {
            let (path, text) = (entry.path(), std::fs::read_to_string(entry.path()).unwrap_or_default());
            // The kernels of roofs.cu run alone.
            if path.extension().is_none_or(|ending| ending != "cu") || path.ends_with("roofs.cu") {
                continue;
            }
            let waiting: Vec<&str> = text
                .split("__forceinline__ void ")
                .skip(1)
                .filter(|function| function.split("\n}\n").next().unwrap_or("").contains("longwave::wait_before();"))
                .filter_map(|function| function.split('(').next())
                .collect();
            for kernel in text.split("extern \"C\" __global__").skip(1) {
                let body = kernel.split_once('{').map_or("", |(_, body)| body);
                let own = body.split_once("longwave::").map_or("", |(_, call)| call);
                let first =
                    ["overlap();", "start_next();", "wait_before();"].iter().position(|call| own.starts_with(call));
                // Who does not wait at its beginning waits further on: itself, or in a function that it calls.
                let body = body.split("\n}\n").next().and_then(|code| code.split("    }\n\n").next()).unwrap_or("");
                let called =
                    waiting.iter().any(|name| body.contains(&format!("{name}<")) || body.contains(&format!("{name}(")));
                let waits = called || body.contains("longwave::wait_before();");
                assert!(
                    matches!(first, Some(0 | 2)) || waits,
                    "{}: does not wait: {}",
                    path.display(),
                    &body[..body.len().min(200)]
                );
                kernels += 1;
            }
        }
        assert!(kernels > 30, "{kernels}");
    }

    #[test]
    fn every_cubin_is_an_elf_file_for_its_gpu() {
        for cubin in CUBINS {
            assert_eq!(&cubin.bytes[..4], b"\x7fELF", "{}", cubin.name);
            let digits = cubin.arch.trim_end_matches(['a', 'f']);
            let (major, minor) = digits.split_at(digits.len() - 1);
            assert!(find(cubin.name, major.parse().unwrap_or(0), minor.parse().unwrap_or(0)).is_some());
        }
        assert!(find("no_such_kernel", 9, 0).is_none());
    }
}
