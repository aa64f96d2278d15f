//! A running sequence's side of the prefix cache: what of its text is published, and where its prefill stops for checkpoints.
//!
//! Plain data beside the sequence; the cache fills it (`lookup.rs`, `publish.rs`). Assumes that the nodes on its path stay
//! while it runs, since it maps their blocks.

use longwave_model::geometry::LOGICAL_BLOCK;

use crate::hash::BlockHash;
use crate::prefix::NodeId;
use crate::step::Replay;

/// A running sequence's side of the cache.
#[derive(Debug, Default)]
pub(crate) struct Reuse {
    /// Whether its blocks are published at all.
    pub active: bool,
    /// Hashes of its full blocks, as far as they were needed.
    pub hashes: Vec<BlockHash>,
    /// Its last published block; the path to the root is its own.
    pub node: Option<NodeId>,
    /// How many of its blocks are published.
    pub published: u32,
    /// Where it leaves cached blocks behind a missing checkpoint; 0 is nowhere.
    pub junction: u32,
    pub interval: u32,
    /// How its windows are rebuilt, until it has computed as far as it has published.
    pub replay: Option<Replay>,
    /// The last checkpoint taken in its answer.
    pub answer: Option<(NodeId, u64)>,
}

impl Reuse {
    /// The next position, behind `committed`, where the prefill of a prompt must stop for a checkpoint.
    pub fn next_cut(&self, committed: u32, prompt: u32) -> Option<u32> {
        if !self.active {
            return None;
        }
        let down = |n: u32| n - n % LOGICAL_BLOCK;
        // A prompt that fills its last block is asked again one block earlier, because its last token is computed.
        let ends = [down(prompt - 1), down(prompt)];
        let step = self.interval.max(1);
        let regular = if self.interval == 0 { 0 } else { (committed / step + 1).saturating_mul(step) };
        let wanted = [self.junction, regular, ends[0], ends[1]];
        // While windows are rebuilt there is nothing to keep before they are complete.
        let least = (committed + 1).max(self.published * LOGICAL_BLOCK);
        wanted.into_iter().filter(|&n| n >= least && n <= prompt).min()
    }

    /// How the positions from `committed` on are replayed, if they are.
    pub fn replaying(&self, committed: u32) -> Option<Replay> {
        self.replay.filter(|_| committed < self.published * LOGICAL_BLOCK)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_end_where_checkpoints_are_wanted() {
        let cuts = |interval, junction, prompt| {
            let reuse = Reuse { active: true, interval, junction, ..Reuse::default() };
            let mut all = Vec::new();
            while let Some(cut) = reuse.next_cut(all.last().copied().unwrap_or(0), prompt) {
                all.push(cut);
            }
            all
        };
        assert_eq!(cuts(0, 0, 255), [0; 0]);
        assert_eq!(cuts(0, 0, 256), [256]);
        assert_eq!(cuts(0, 0, 511), [256]);
        assert_eq!(cuts(0, 0, 512), [256, 512], "the same prompt again can start at 256 only");
        assert_eq!(cuts(0, 512, 2000), [512, 1792]);
        assert_eq!(cuts(768, 512, 2000), [512, 768, 1536, 1792]);
        assert_eq!(Reuse::default().next_cut(0, 2000), None);
        let near_the_end = Reuse { active: true, interval: 1 << 31, ..Reuse::default() };
        assert_eq!(near_the_end.next_cut(u32::MAX - 300, u32::MAX - 1), Some(u32::MAX - 255));
    }
}
