//! The identity of a checkpoint's weights, for caches that outlive a process.
//!
//! Contents of small checkpoints are read whole; of large ones [`SAMPLES`] pages at even distances over all tensors are, so
//! that opening 160 GB stays quick. Training changes all of a tensor, so a page shows it; an edit of single values between
//! two pages does not.

use crate::{Checkpoint, tensors};

/// Checkpoints up to this many bytes are read whole.
const WHOLE_BYTES: u64 = 256 << 20;
/// Pages read of larger ones.
const SAMPLES: u64 = 4096;
const PAGE_BYTES: usize = 4096;

/// Digest of the names, types, shapes and contents of all tensors.
pub fn weights(ckpt: &Checkpoint) -> [u8; 32] {
    let every = if ckpt.totals().0 <= WHOLE_BYTES { 0 } else { ckpt.totals().0 / SAMPLES };
    sampled(ckpt, every)
}

/// The same over one page in `every` bytes; all of them when it is 0.
fn sampled(ckpt: &Checkpoint, every: u64) -> [u8; 32] {
    let mut hash = blake3::Hasher::new();
    // Bytes from the start of the tensor to the next page.
    let mut next = 0;
    for (_, spec) in tensors::all(&ckpt.config) {
        let tensor = ckpt.tensor(&spec.name);
        let bytes = tensor.bytes();
        hash.update(spec.name.as_bytes());
        hash.update(tensor.dtype.name().as_bytes());
        for &n in &tensor.shape {
            hash.update(&(n as u64).to_le_bytes());
        }
        if every == 0 {
            hash.update(bytes);
            continue;
        }
        let len = bytes.len() as u64;
        while next < len {
            let at = next as usize;
            hash.update(&bytes[at..bytes.len().min(at + PAGE_BYTES)]);
            next += every;
        }
        next -= len;
    }
    *hash.finalize().as_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiny(change: impl Fn(&mut Vec<u8>)) -> Checkpoint {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/tiny");
        let config = std::fs::read_to_string(folder.join("config.json")).unwrap();
        let mut shard = std::fs::read(folder.join("model.safetensors")).unwrap();
        change(&mut shard);
        Checkpoint::embedded("tiny", &config, shard.leak()).unwrap()
    }

    #[test]
    fn one_bit_of_a_weight_is_another_model() {
        let (same, again) = (weights(&tiny(|_| ())), weights(&tiny(|_| ())));
        assert_eq!(same, again);
        assert_ne!(same, weights(&tiny(|shard| *shard.last_mut().unwrap() ^= 1)));
    }

    #[test]
    fn samples_lie_all_over_a_large_checkpoint() {
        let every = 1 << 17;
        let plain = sampled(&tiny(|_| ()), every);
        // A change of all weights shows, and so does one of a part as long as the distance of two pages.
        for start in [8_000_000, 12_000_000, 15_000_000] {
            let changed = tiny(|shard| shard[start..start + every as usize].iter_mut().for_each(|b| *b ^= 1));
            assert_ne!(plain, sampled(&changed, every), "{start}");
        }
        assert_ne!(plain, sampled(&tiny(|_| ()), every / 2));
    }
}
