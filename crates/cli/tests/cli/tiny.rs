//! Copies of the tiny checkpoint in a temporary folder, to be broken in one place each.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

/// A tensor of a shard.
pub struct Tensor {
    pub name: String,
    pub dtype: String,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

/// A copy of the tiny checkpoint: configuration, tokenizer, one shard and no index.
pub struct Tiny {
    dir: tempfile::TempDir,
}

fn original() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/tiny")
}

impl Tiny {
    pub fn copy() -> Tiny {
        let dir = tempfile::tempdir().unwrap();
        for file in ["config.json", "tokenizer.json", "generation_config.json", "model.safetensors"] {
            std::fs::copy(original().join(file), dir.path().join(file)).unwrap();
        }
        Tiny { dir }
    }

    pub fn path(&self) -> &str {
        self.dir.path().to_str().unwrap()
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The tiny configuration with `changes`; a null removes a field.
    pub fn config(changes: Value) -> Value {
        let mut config: Value =
            serde_json::from_str(&std::fs::read_to_string(original().join("config.json")).unwrap()).unwrap();
        let map = config.as_object_mut().unwrap();
        for (key, value) in changes.as_object().unwrap() {
            if value.is_null() {
                map.remove(key);
            } else {
                map.insert(key.clone(), value.clone());
            }
        }
        config
    }

    /// Edits the tensors of the shard.
    pub fn edit(self, edit: impl FnOnce(&mut Vec<Tensor>)) -> Tiny {
        let path = self.file("model.safetensors");
        let mut tensors = read(&std::fs::read(&path).unwrap());
        edit(&mut tensors);
        std::fs::write(&path, write(&tensors)).unwrap();
        self
    }

    /// Edits one tensor.
    pub fn edit_one(self, name: &str, edit: impl FnOnce(&mut Tensor)) -> Tiny {
        self.edit(|all| edit(all.iter_mut().find(|t| t.name == name).unwrap()))
    }
}

fn read(file: &[u8]) -> Vec<Tensor> {
    let len = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let header: Map<String, Value> = serde_json::from_slice(&file[8..8 + len]).unwrap();
    let number = |v: &Value| v.as_u64().unwrap() as usize;
    let tensor = |(name, info): (&String, &Value)| Tensor {
        name: name.clone(),
        dtype: info["dtype"].as_str().unwrap().to_string(),
        shape: info["shape"].as_array().unwrap().iter().map(number).collect(),
        bytes: file[8 + len..][number(&info["data_offsets"][0])..number(&info["data_offsets"][1])].to_vec(),
    };
    header.iter().filter(|(name, _)| *name != "__metadata__").map(tensor).collect()
}

fn write(tensors: &[Tensor]) -> Vec<u8> {
    let (mut header, mut at) = (Map::new(), 0);
    for t in tensors {
        let end = at + t.bytes.len();
        header.insert(t.name.clone(), json!({"dtype": t.dtype, "shape": t.shape, "data_offsets": [at, end]}));
        at = end;
    }
    let mut text = serde_json::to_vec(&header).unwrap();
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut out = (text.len() as u64).to_le_bytes().to_vec();
    out.extend(text);
    tensors.iter().for_each(|t| out.extend(&t.bytes));
    out
}
