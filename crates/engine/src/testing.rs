//! Small layouts, records and folders for the unit tests of this crate.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use longwave_model::config::LayerKind;
use longwave_model::geometry::{CacheFormats, CacheLayout, IndexFormat, MainFormat};
use longwave_model::presets;

use crate::admission::Admission;
use crate::blocks::{SequenceBlocks, Span};
use crate::hash::BlockHash;
use crate::pool::Pools;
use crate::prefix::{PrefixCache, PrefixOptions};
use crate::request::RequestId;
use crate::reuse::Reuse;
use crate::sequence::{Sequence, Waiting};
use crate::tier::{Form, Key, Kind, Title};

/// fp8 for both caches.
pub const FP8: CacheFormats = CacheFormats { main: MainFormat::Fp8, index: IndexFormat::Fp8 };

/// Five layers (ratios 0, 128, 4, 128, 4) and the MTP layer: every group kind, one group of each but the window.
pub fn tiny_layout() -> CacheLayout {
    use LayerKind::{C4, C128, Window};
    let config = longwave_model::ModelConfig {
        num_hidden_layers: 5,
        layers: vec![Window, C128, C4, C128, C4],
        vocab_size: 1000,
        ..presets::flash()
    };
    CacheLayout::new(&config, FP8)
}

/// A greedy request.
pub fn request(prompt: Vec<u32>, max_tokens: u32) -> crate::request::Request {
    crate::request::Request::greedy(prompt, max_tokens)
}

/// An empty prefix cache.
pub fn cache(interval: u32) -> PrefixCache {
    PrefixCache::new(&tiny_layout(), PrefixOptions { on: true, interval, answers: false, replay: false, drafts: false })
}

/// A sequence that computed all of its prompt and published nothing.
pub fn computed(pools: &mut Pools, prompt: Vec<u32>, interval: u32) -> Sequence {
    let (layout, len) = (tiny_layout(), prompt.len() as u32);
    let need = Admission::new(&layout, [9999; 3], 64, 0).need(len, 1);
    let waiting = Waiting::new(RequestId(0), request(prompt, 1), Box::new(|_| ()), 0, 1, need);
    let mut blocks = SequenceBlocks::new(&layout, len);
    blocks.extend(&layout, pools, Span { start: 0, end: len, drafts: 0 });
    let mut sequence = Sequence::new(waiting, blocks, len);
    sequence.reuse = Reuse { active: true, interval, ..Reuse::default() };
    sequence
}

/// How records of the tiny layout are written, by one of several models.
pub fn tiny_form(model: u8) -> Form {
    Form { layout: tiny_layout(), digest: [model; 32] }
}

/// Title of block `depth` of one text.
pub fn title(kind: Kind, depth: u32) -> Title {
    let tokens = |depth: u32| (0..256).map(|i| depth * 1000 + i).collect::<Vec<u32>>();
    let parent = (1..depth).fold(BlockHash::ROOT, |parent, d| parent.child(5, &tokens(d)));
    let tokens = tokens(depth);
    Title { key: Key { hash: parent.child(5, &tokens), kind }, parent, salt: 5, depth, tokens }
}

/// A record whose unit `i` is filled with `1 + i`.
pub fn record(form: &Form, title: &Title) -> Arc<Vec<u8>> {
    let units = form.units(title.key.kind, title.depth);
    let fill = |i: usize, out: &mut Vec<u8>| {
        out.resize(out.len() + units[i].bytes as usize, 1 + i as u8);
        Ok(())
    };
    form.encode(title, fill).expect("nothing fails here")
}

/// A folder that is removed with everything in it.
pub struct Folder(PathBuf);

impl Folder {
    pub fn new() -> Folder {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("longwave-test-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).expect("the system has room for temporary files");
        Folder(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
