//! The name of a block of tokens and of everything before it: a chained 128-bit hash per 256 tokens.
//!
//! The hash of a block covers the hash of its parent, the tenant's salt and its own tokens, so equal hashes mean equal
//! texts from the start, up to collisions; whoever finds a block by its hash compares the tokens as well. Refuses blocks
//! that are not full.

use longwave_model::geometry::LOGICAL_BLOCK;

use crate::step::Token;

/// Tokens of a block, as a length.
pub(crate) const BLOCK: usize = LOGICAL_BLOCK as usize;

/// The first 16 bytes of a blake3 hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct BlockHash(pub [u8; 16]);

impl BlockHash {
    /// Parent of every first block.
    pub const ROOT: BlockHash = BlockHash([0; 16]);

    /// Hash of the block of `tokens` that follows this one.
    pub fn child(self, salt: u64, tokens: &[Token]) -> BlockHash {
        assert!(tokens.len() == BLOCK, "a block has {BLOCK} tokens, not {}", tokens.len());
        let mut bytes = [0; 16 + 8 + 4 * BLOCK];
        bytes[..16].copy_from_slice(&self.0);
        bytes[16..24].copy_from_slice(&salt.to_le_bytes());
        for (token, out) in tokens.iter().zip(bytes[24..].chunks_exact_mut(4)) {
            out.copy_from_slice(&token.to_le_bytes());
        }
        let mut hash = [0; 16];
        hash.copy_from_slice(&blake3::hash(&bytes).as_bytes()[..16]);
        BlockHash(hash)
    }
}

/// Hashes of all full blocks of `tokens`.
pub(crate) fn chain(salt: u64, tokens: &[Token]) -> Vec<BlockHash> {
    let mut last = BlockHash::ROOT;
    let next = |block| {
        last = last.child(salt, block);
        last
    };
    tokens.chunks_exact(BLOCK).map(next).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_part_changes_the_hash() {
        let tokens: Vec<Token> = (0..256).collect();
        let mut other = tokens.clone();
        other[255] ^= 1 << 31;
        let first = BlockHash::ROOT.child(0, &tokens);
        let all = [first, first.child(0, &tokens), BlockHash::ROOT.child(1, &tokens), BlockHash::ROOT.child(0, &other)];
        assert_eq!(BTreeSet::from(all).len(), 4);
        assert_eq!(first, BlockHash::ROOT.child(0, &tokens));
    }

    #[test]
    fn a_chain_has_one_hash_per_full_block() {
        let tokens: Vec<Token> = (0..700).collect();
        let hashes = chain(5, &tokens);
        assert_eq!(hashes.len(), 2);
        assert_eq!(hashes[1], hashes[0].child(5, &tokens[256..512]));
        assert_eq!(chain(5, &tokens[..255]), []);
    }

    #[test]
    fn the_format_is_parent_salt_and_tokens_in_little_endian() {
        let mut plain = vec![0; 16];
        plain.extend(7u64.to_le_bytes());
        (0..256u32).for_each(|t| plain.extend(t.to_le_bytes()));
        let tokens: Vec<Token> = (0..256).collect();
        assert_eq!(BlockHash::ROOT.child(7, &tokens).0, blake3::hash(&plain).as_bytes()[..16]);
    }
}
