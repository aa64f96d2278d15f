//! Drafts taken back (M10): every depth, every place of the first wrong draft, every start modulo 128. Logits equal a
//! prefill's and, once the rejected rows are written over, so do the bytes of the cache. Every position is mapped.

use longwave_cpu::numerics::Profile;
use longwave_engine::step::{BlockId, Token};

use crate::invariance::{prompt, same_bits};
use crate::rig::{CACHE, Rig};

const MAX_DEPTH: usize = 7;
const PREFIX: usize = 128;

/// The units of one seat, all pools; a rig gives each seat one range of every pool.
fn bytes(rig: &Rig, seats: u32, seat: u32) -> Vec<u8> {
    let units = rig.units();
    let ranges = (0..3).flat_map(|b| (units[b] / seats * seat..units[b] / seats * (seat + 1)).map(move |i| (b, i)));
    ranges.flat_map(|(b, i)| rig.cache.unit(b, BlockId(i)).to_vec()).collect()
}

/// Marks what a pass does not write.
const POISON: u8 = 0xa5;

fn clear(rig: &mut Rig, seats: u32, seat: u32) {
    for b in 0..3 {
        let n = rig.units()[b] / seats;
        (n * seat..n * (seat + 1)).for_each(|i| rig.cache.unit_mut(b, BlockId(i)).fill(POISON));
    }
}

/// Verifies `depth` drafts of which `right` are right at 128 / `laps` starts, then runs over what was rejected.
fn walk(rig: &mut Rig, plain: &[f32], ids: &[Token], depth: usize, right: usize, offset: usize, laps: usize) -> usize {
    let vocab = rig.model.config.vocab_size;
    let mut at = PREFIX + offset;
    rig.batch(&[(1, 0, &ids[..at], 0)], None);
    for _ in 0..128 / laps {
        let mut tokens = ids[at..at + 1 + depth].to_vec();
        for t in &mut tokens[1 + right..] {
            *t = 16 + (*t + 1) % 2400;
        }
        let streams = rig.batch(&[(1, at as u32, &tokens, depth as u32)], None);
        let good = rig.logits(&streams, &(0..=right).collect::<Vec<_>>());
        let expected = &plain[at * vocab..(at + 1 + right) * vocab];
        assert!(same_bits(&good, expected), "start {at}, depth {depth}, {right} right");
        at += 1 + right;
    }
    let end = at + MAX_DEPTH + 1;
    for at in at..end {
        rig.batch(&[(1, at as u32, &ids[at..at + 1], 0)], None);
    }
    end
}

fn rejected_drafts_at_every_start(depths: std::ops::RangeInclusive<usize>) {
    let ids = prompt(PREFIX + 128 * (MAX_DEPTH + 1) + 64, 10);
    let mut rig = Rig::new(Profile::Serving, CACHE, 2, ids.len() as u32);
    let streams = rig.batch(&[(0, 0, &ids, 0)], None);
    let plain = rig.logits(&streams, &(0..ids.len()).collect::<Vec<_>>());
    for depth in depths {
        for right in 0..=depth {
            // Strides that divide 128 need one lap for each start they leave out.
            let laps = 1usize << (right + 1).trailing_zeros();
            for offset in 0..laps {
                clear(&mut rig, 2, 1);
                let end = walk(&mut rig, &plain, &ids, depth, right, offset, laps);
                clear(&mut rig, 2, 0);
                rig.batch(&[(0, 0, &ids[..end], 0)], None);
                // A prefill leaves out rows that nobody will read; what it writes must be the same.
                let (fresh, ours) = (bytes(&rig, 2, 0), bytes(&rig, 2, 1));
                let written = fresh.iter().filter(|b| **b != POISON).count();
                let wrong = fresh.iter().zip(&ours).filter(|(a, b)| **a != POISON && a != b).count();
                let of = format!("depth {depth}, {right} right, from {offset}");
                assert!(written > 100_000 && wrong == 0, "{of}: {wrong} of {written} bytes differ");
            }
        }
    }
}

#[test]
fn m10_every_start_at_depths_1_to_4() {
    rejected_drafts_at_every_start(1..=4);
}

#[test]
fn m10_every_start_at_depths_5_to_7() {
    rejected_drafts_at_every_start(5..=MAX_DEPTH);
}
