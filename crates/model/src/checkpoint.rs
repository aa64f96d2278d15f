//! A checkpoint on disk (or embedded in the program): sharded safetensors, memory-mapped, checked against the
//! configuration before anything is used.
//!
//! Assumes the original tensor names (model.md 2.2). Missing, extra, misshaped or mistyped tensors are collected into
//! one error; a truncated shard, a broken header and checkpoints with other names are refused with what to do about it.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};
use thiserror::Error;

use crate::config::{ConfigError, ModelConfig};
use crate::tensors::{self, DType};

/// Why a checkpoint was refused.
#[derive(Debug, Error)]
pub enum CheckpointError {
    /// Its configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A file cannot be opened.
    #[error("cannot open {path}")]
    Io {
        /// The file.
        path: String,
        /// Cause.
        source: std::io::Error,
    },
    /// The folder has no weights.
    #[error(
        "{0} holds no *.safetensors file; download the whole checkpoint, for example: hf download deepseek-ai/DeepSeek-V4-Flash --local-dir {0}"
    )]
    NoShards(String),
    /// The index names a file that is absent.
    #[error(
        "model.safetensors.index.json names {missing} of {total} shards that are not there ({first}, ...); the download is incomplete, run it again"
    )]
    MissingShards {
        /// How many.
        missing: usize,
        /// Of how many.
        total: usize,
        /// One of them.
        first: String,
    },
    /// The index file is broken.
    #[error("{path}: {what}")]
    Index {
        /// The file.
        path: String,
        /// What is wrong.
        what: String,
    },
    /// A shard is broken.
    #[error("{path}: {what}; the file is damaged or its download was cut off, fetch it again")]
    Shard {
        /// The file.
        path: String,
        /// What is wrong.
        what: String,
    },
    /// The tensors are not those of the configuration.
    #[error("the tensors do not match config.json, {total} faults{}:\n  {}", if *.total > .faults.len() { format!(" (the first {})", .faults.len()) } else { String::new() }, .faults.join("\n  "))]
    Tensors {
        /// Number of faults.
        total: usize,
        /// The first 20, one line each.
        faults: Vec<String>,
    },
    /// Names of another spelling.
    #[error(
        "the tensors have transformers' names (model.embed_tokens, self_attn, ...): this is a converted checkpoint. Longwave reads the original release (embed.weight, layers.0.attn.wq_a.weight, ...)"
    )]
    Converted,
}

/// Bytes of one shard.
enum ShardBytes {
    Mapped(Mmap),
    Static(&'static [u8]),
}

impl ShardBytes {
    fn get(&self) -> &[u8] {
        match self {
            ShardBytes::Mapped(m) => m,
            ShardBytes::Static(b) => b,
        }
    }
}

/// A tensor of a checkpoint: a window into a shard that keeps the shard mapped.
#[derive(Clone)]
pub struct Tensor {
    /// Storage type.
    pub dtype: DType,
    /// Shape, rows first.
    pub shape: Vec<usize>,
    shard: Arc<ShardBytes>,
    range: Range<usize>,
}

impl Tensor {
    /// Raw bytes, little endian, row-major. Not necessarily aligned.
    pub fn bytes(&self) -> &[u8] {
        &self.shard.get()[self.range.clone()]
    }

    /// Values of an f32 or bf16 tensor, widened.
    pub fn to_f32(&self) -> Vec<f32> {
        let b = self.bytes();
        match self.dtype {
            DType::F32 => b.chunks_exact(4).map(|c| f32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect(),
            DType::BF16 => {
                b.chunks_exact(2).map(|c| crate::formats::bf16_value(u16::from_le_bytes([c[0], c[1]]))).collect()
            }
            other => panic!("to_f32 of a {} tensor", other.name()),
        }
    }

    /// Values of an int64 tensor.
    pub fn to_i64(&self) -> Vec<i64> {
        assert_eq!(self.dtype, DType::I64);
        let eight = |c: &[u8]| i64::from_le_bytes(c.try_into().expect("chunks of eight"));
        self.bytes().chunks_exact(8).map(eight).collect()
    }
}

/// One file of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shard {
    /// File name.
    pub name: String,
    /// Size of the file, header included.
    pub bytes: u64,
    /// Tensors in it.
    pub tensors: usize,
}

/// A checked checkpoint. Clones share the mapped files.
#[derive(Clone)]
pub struct Checkpoint {
    /// Its configuration.
    pub config: ModelConfig,
    /// Where it came from, for messages.
    pub source: String,
    /// Its files, in the order of their names.
    pub shards: Vec<Shard>,
    tensors: HashMap<String, Tensor>,
}

/// How far loading has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Bytes seen.
    pub done_bytes: u64,
    /// Bytes in all.
    pub total_bytes: u64,
}

impl Checkpoint {
    /// Opens the checkpoint in `folder`, reads its configuration and checks every tensor. `progress` counts the bytes
    /// that are read: the shards' headers and the values that are checked (scales and hash tables).
    pub fn open(folder: &Path, progress: &mut dyn FnMut(Progress)) -> Result<Checkpoint, CheckpointError> {
        let config = ModelConfig::read(folder)?;
        let files = shard_files(folder)?;
        let (mut tensors, mut shards) = (HashMap::new(), Vec::new());
        for path in &files {
            let io = |source| CheckpointError::Io { path: path.display().to_string(), source };
            let file = File::open(path).map_err(io)?;
            // SAFETY: the mapping is read-only; a file that another process shortens while we run would fault, which is
            // true of every mapped model and is documented in the README.
            let map = unsafe { Mmap::map(&file) }.map_err(io)?;
            shards.push(add_shard(&path.display().to_string(), ShardBytes::Mapped(map), &mut tensors)?);
        }
        Checkpoint::checked(config, folder.display().to_string(), shards, tensors, progress)
    }

    /// A checkpoint that is part of the program: `config.json` and one shard.
    pub fn embedded(name: &str, config_json: &str, shard: &'static [u8]) -> Result<Checkpoint, CheckpointError> {
        let value =
            serde_json::from_str(config_json).map_err(|source| ConfigError::Json { path: name.into(), source })?;
        let mut tensors = HashMap::new();
        let shards = vec![add_shard(name, ShardBytes::Static(shard), &mut tensors)?];
        Checkpoint::checked(ModelConfig::from_json(&value)?, name.to_string(), shards, tensors, &mut |_| {})
    }

    fn checked(
        config: ModelConfig,
        source: String,
        shards: Vec<Shard>,
        tensors: HashMap<String, Tensor>,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Checkpoint, CheckpointError> {
        if tensors.contains_key("model.embed_tokens.weight") {
            return Err(CheckpointError::Converted);
        }
        let mut faults = Vec::new();
        let mut expected = BTreeMap::new();
        let checked = |name: &str, t: &Tensor| t.dtype == DType::I64 || name.ends_with(".scale");
        let total_bytes = tensors.iter().filter(|(n, t)| checked(n, t)).map(|(_, t)| t.range.len() as u64).sum();
        let mut done_bytes = 0;
        for (_, spec) in tensors::all(&config) {
            match tensors.get(&spec.name) {
                None => faults.push(format!("missing: {} {:?}", spec.name, spec.shape)),
                Some(t) if t.shape != spec.shape => {
                    faults.push(format!("shape: {} is {:?}, expected {:?}", spec.name, t.shape, spec.shape));
                }
                Some(t) if !spec.dtypes.contains(&t.dtype) => {
                    let accepted: Vec<&str> = spec.dtypes.iter().map(|d| d.name()).collect();
                    faults.push(format!(
                        "dtype: {} is {}, expected {}",
                        spec.name,
                        t.dtype.name(),
                        accepted.join(" or ")
                    ));
                }
                Some(t) if checked(&spec.name, t) => {
                    faults.extend(bad_value(&spec.name, t, config.n_routed_experts));
                    done_bytes += t.range.len() as u64;
                    progress(Progress { done_bytes, total_bytes });
                }
                Some(_) => {}
            }
            expected.insert(spec.name, ());
        }
        let mut extra: Vec<&String> = tensors.keys().filter(|k| !expected.contains_key(*k)).collect();
        extra.sort();
        faults.extend(extra.into_iter().map(|k| format!("not expected: {k} {:?}", tensors[k].shape)));
        if faults.is_empty() {
            return Ok(Checkpoint { config, source, shards, tensors });
        }
        let total = faults.len();
        faults.truncate(20);
        Err(CheckpointError::Tensors { total, faults })
    }

    /// One tensor of a shard in memory, unchecked, for tests of ops on stored weights.
    pub fn loose_tensor(shard: &'static [u8], name: &str) -> Option<Tensor> {
        let mut tensors = HashMap::new();
        add_shard("memory", ShardBytes::Static(shard), &mut tensors).ok()?;
        tensors.remove(name)
    }

    /// A tensor of the configuration. Panics on a name that `tensors::all` does not list: that is a bug, every listed
    /// tensor was checked at opening.
    pub fn tensor(&self, name: &str) -> Tensor {
        self.tensors.get(name).unwrap_or_else(|| panic!("tensor {name} is not part of this configuration")).clone()
    }

    /// Bytes of all tensors and their number.
    pub fn totals(&self) -> (u64, usize) {
        (self.tensors.values().map(|t| t.range.len() as u64).sum(), self.tensors.len())
    }
}

/// Values that would become NaN or a wrong index later: block scales and hash tables are read whole, a twentieth of the
/// checkpoint.
fn bad_value(name: &str, t: &Tensor, experts: usize) -> Option<String> {
    let is_scale = name.ends_with(".scale");
    match t.dtype {
        DType::F8E8M0 if t.bytes().contains(&255) => Some(format!("value: {name} holds a NaN scale (byte 255)")),
        DType::F32 if is_scale && t.to_f32().iter().any(|v| !v.is_finite()) => {
            Some(format!("value: {name} holds a scale that is not finite"))
        }
        DType::I64 => {
            let wrong = t.to_i64().into_iter().find(|e| !(0..experts as i64).contains(e))?;
            Some(format!("value: {name} names expert {wrong}, there are {experts}"))
        }
        _ => None,
    }
}

/// The shards that the index names, or every `*.safetensors` of the folder.
fn shard_files(folder: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
    let index = folder.join("model.safetensors.index.json");
    if index.exists() {
        let path = index.display().to_string();
        let text =
            std::fs::read_to_string(&index).map_err(|source| CheckpointError::Io { path: path.clone(), source })?;
        let broken = |what: String| CheckpointError::Index { path: path.clone(), what };
        let json: serde_json::Value =
            serde_json::from_str(&text).map_err(|e| broken(format!("not valid JSON: {e}")))?;
        let map = json
            .get("weight_map")
            .and_then(|m| m.as_object())
            .ok_or_else(|| broken("it has no \"weight_map\"".into()))?;
        let mut names: Vec<&str> = map.values().filter_map(|v| v.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        if let Some(bad) = names.iter().find(|n| n.contains('/') || n.contains("..")) {
            return Err(broken(format!("shard name {bad:?} leaves the folder")));
        }
        let files: Vec<PathBuf> = names.iter().map(|n| folder.join(n)).collect();
        let missing: Vec<&&str> = names.iter().filter(|n| !folder.join(n).exists()).collect();
        return match missing.first() {
            None => Ok(files),
            Some(first) => Err(CheckpointError::MissingShards {
                missing: missing.len(),
                total: names.len(),
                first: first.to_string(),
            }),
        };
    }
    let io = |source| CheckpointError::Io { path: folder.display().to_string(), source };
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder)
        .map_err(io)?
        .filter_map(|e| e.ok().map(|e| e.path()))
        .filter(|p| p.extension().is_some_and(|e| e == "safetensors"))
        .collect();
    files.sort();
    if files.is_empty() { Err(CheckpointError::NoShards(folder.display().to_string())) } else { Ok(files) }
}

/// Reads a shard's header and adds its tensors.
fn add_shard(path: &str, bytes: ShardBytes, into: &mut HashMap<String, Tensor>) -> Result<Shard, CheckpointError> {
    let fault = |what: String| CheckpointError::Shard { path: path.to_string(), what };
    let len = bytes.get().len();
    let (header, meta) = SafeTensors::read_metadata(bytes.get()).map_err(|e| match described_bytes(bytes.get()) {
        Some(need) if need != len as u64 => fault(format!("the header describes {need} bytes, the file has {len}")),
        _ => fault(format!("no safetensors header ({e})")),
    })?;
    let data = header + 8;
    let shard = Arc::new(bytes);
    for (name, info) in meta.tensors() {
        let dtype = match info.dtype {
            Dtype::I8 | Dtype::U8 => DType::I8,
            Dtype::F8_E8M0 => DType::F8E8M0,
            Dtype::F8_E4M3 => DType::F8E4M3,
            Dtype::BF16 => DType::BF16,
            Dtype::F32 => DType::F32,
            Dtype::I64 => DType::I64,
            other => {
                return Err(CheckpointError::Tensors {
                    total: 1,
                    faults: vec![format!("dtype: {name} is {other:?}, which no V4 tensor has")],
                });
            }
        };
        let range = data + info.data_offsets.0..data + info.data_offsets.1;
        let tensor = Tensor { dtype, shape: info.shape.clone(), shard: shard.clone(), range };
        if into.insert(name.clone(), tensor).is_some() {
            return Err(fault(format!("tensor {name} is in two shards")));
        }
    }
    let name = Path::new(path).file_name().map_or(path.into(), |n| n.to_string_lossy().into_owned());
    Ok(Shard { name, bytes: len as u64, tensors: meta.tensors().len() })
}

/// Size of the file that a safetensors header describes; `None` when the header itself cannot be read.
fn described_bytes(file: &[u8]) -> Option<u64> {
    let len = u64::from_le_bytes(file.get(..8)?.try_into().ok()?);
    let end = len.checked_add(8)?;
    let header: serde_json::Value = serde_json::from_slice(file.get(8..usize::try_from(end).ok()?)?).ok()?;
    let ends = header.as_object()?.values().filter_map(|info| info.get("data_offsets")?.get(1)?.as_u64());
    end.checked_add(ends.max()?)
}
