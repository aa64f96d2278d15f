//! One self-describing record: a cached block or checkpoint as bytes, for host memory and disk.
//!
//! A header (what it is, in which layout, of which text), a table of units, the unit bytes of each group and a checksum
//! over all of it. A record is used only when every field is the expected one and the checksum is right: hashes find
//! records, contents decide. Assumes nothing of the bytes that it is given; refuses all but exact matches.

use std::ops::Range;
use std::sync::Arc;

use longwave_model::CacheLayout;
use longwave_model::geometry::LOGICAL_BLOCK;

use crate::hash::{BLOCK, BlockHash};
use crate::step::{BackendError, Token};

/// Version of the record format; another one is another layout.
pub(crate) const VERSION: u32 = 1;
const MAGIC: [u8; 8] = *b"LWRECORD";
/// Magic, version, kind, digest, hash, parent, salt, depth, units, length.
const FIXED_BYTES: usize = 8 + 4 + 4 + 32 + 16 + 16 + 8 + 4 + 4 + 8;
/// The part of a record that names it.
pub(crate) const HEADER_BYTES: usize = FIXED_BYTES + 4 * BLOCK;
/// Group, block index and length of one unit.
const TABLE_ENTRY_BYTES: usize = 12;
const CHECKSUM_BYTES: usize = 32;

/// What a record holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// The long-lived units of one block.
    Node,
    /// The sliding units that the position after a block reads.
    Checkpoint,
}

/// How records are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub hash: BlockHash,
    pub kind: Kind,
}

/// The text that a record belongs to, whatever its hash says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Title {
    pub key: Key,
    /// [`BlockHash::ROOT`] for a first block.
    pub parent: BlockHash,
    pub salt: u64,
    /// Blocks from the start, this one included.
    pub depth: u32,
    /// The block's own.
    pub tokens: Vec<Token>,
}

/// One unit in a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct UnitPlace {
    /// Group id.
    pub group: u32,
    /// Block index in the group.
    pub index: u32,
    /// The pages of the group's layers; what lies behind them in the unit belongs to nobody.
    pub bytes: u32,
}

/// Why a record is not used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Cut off, changed or never one of ours.
    Damaged,
    /// Written by another version, for another model or in other formats.
    OtherLayout,
    /// Another text.
    OtherText,
}

/// What all records of an engine have in common.
#[derive(Debug, Clone)]
pub(crate) struct Form {
    pub layout: CacheLayout,
    /// Differs whenever the bytes or their meaning do.
    pub digest: [u8; 32],
}

impl Form {
    /// The units of a record, in order.
    pub fn units(&self, kind: Kind, depth: u32) -> Vec<UnitPlace> {
        let boundary = depth * LOGICAL_BLOCK;
        let mut units = Vec::new();
        for (group, spec) in self.layout.groups.iter().enumerate() {
            if spec.is_sliding() != (kind == Kind::Checkpoint) {
                continue;
            }
            let first = match kind {
                Kind::Node => boundary - LOGICAL_BLOCK,
                Kind::Checkpoint => spec.retention.first_needed(boundary),
            };
            let bytes = spec.layers.len() as u32 * self.layout.buckets[spec.bucket as usize].page_bytes;
            let place = |index| UnitPlace { group: group as u32, index, bytes };
            units.extend((first / spec.block_tokens..boundary / spec.block_tokens).map(place));
        }
        units
    }

    /// Bytes of a whole record.
    pub fn record_bytes(&self, kind: Kind, depth: u32) -> u64 {
        let units = self.units(kind, depth);
        let data: u64 = units.iter().map(|u| u64::from(u.bytes)).sum();
        (HEADER_BYTES + units.len() * TABLE_ENTRY_BYTES + CHECKSUM_BYTES) as u64 + data
    }

    /// Writes a record; `read` fills in the units, in order.
    pub fn encode(
        &self,
        title: &Title,
        mut read: impl FnMut(usize, &mut Vec<u8>) -> Result<(), BackendError>,
    ) -> Result<Arc<Vec<u8>>, BackendError> {
        assert!(title.tokens.len() == BLOCK, "a record is of a full block");
        let units = self.units(title.key.kind, title.depth);
        let length = self.record_bytes(title.key.kind, title.depth);
        let mut out = Vec::with_capacity(length as usize);
        out.extend(MAGIC);
        out.extend(VERSION.to_le_bytes());
        out.extend(code(title.key.kind).to_le_bytes());
        out.extend(self.digest);
        out.extend(title.key.hash.0);
        out.extend(title.parent.0);
        out.extend(title.salt.to_le_bytes());
        out.extend(title.depth.to_le_bytes());
        out.extend((units.len() as u32).to_le_bytes());
        out.extend(length.to_le_bytes());
        title.tokens.iter().for_each(|t| out.extend(t.to_le_bytes()));
        for unit in &units {
            [unit.group, unit.index, unit.bytes].iter().for_each(|n| out.extend(n.to_le_bytes()));
        }
        for (i, unit) in units.iter().enumerate() {
            let end = out.len() + unit.bytes as usize;
            read(i, &mut out)?;
            assert!(out.len() == end, "unit {i} has {} bytes more than it should", out.len() as i64 - end as i64);
        }
        let checksum = blake3::hash(&out);
        out.extend(checksum.as_bytes());
        Ok(Arc::new(out))
    }

    /// Checks a whole record against the text that it should be of.
    pub fn check(&self, bytes: &[u8], title: &Title) -> Result<(), Fault> {
        let header = Header::read(bytes)?;
        if header.version != VERSION || header.digest != self.digest {
            return Err(Fault::OtherLayout);
        }
        if header.title != *title {
            return Err(Fault::OtherText);
        }
        let units = self.units(title.key.kind, title.depth);
        let data = bytes.len().checked_sub(CHECKSUM_BYTES).ok_or(Fault::Damaged)?;
        if header.length != bytes.len() as u64 || header.length != self.record_bytes(title.key.kind, title.depth) {
            return Err(Fault::Damaged);
        }
        if blake3::hash(&bytes[..data]).as_bytes() != &bytes[data..] {
            return Err(Fault::Damaged);
        }
        // The checksum covers the table, but a record of another program with our digest is still not ours.
        let table = bytes[HEADER_BYTES..].chunks_exact(TABLE_ENTRY_BYTES).take(units.len());
        let entry = |e: &[u8]| UnitPlace { group: word(e, 0), index: word(e, 4), bytes: word(e, 8) };
        if !table.map(entry).eq(units.iter().copied()) {
            return Err(Fault::OtherLayout);
        }
        Ok(())
    }

    /// Where the units of a record lie, in order.
    pub fn ranges(&self, kind: Kind, depth: u32) -> Vec<Range<usize>> {
        let units = self.units(kind, depth);
        let mut at = HEADER_BYTES + units.len() * TABLE_ENTRY_BYTES;
        let place = |u: &UnitPlace| {
            at += u.bytes as usize;
            at - u.bytes as usize..at
        };
        units.iter().map(place).collect()
    }
}

/// The first bytes of a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Header {
    pub version: u32,
    pub digest: [u8; 32],
    pub title: Title,
    /// Of the whole record, bytes.
    pub length: u64,
}

impl Header {
    /// Reads a header. Of another version only version and digest mean anything.
    pub fn read(bytes: &[u8]) -> Result<Header, Fault> {
        if bytes.len() < HEADER_BYTES || bytes[..8] != MAGIC {
            return Err(Fault::Damaged);
        }
        let version = word(bytes, 8);
        let kind = match word(bytes, 12) {
            _ if version != VERSION => Kind::Node,
            0 => Kind::Node,
            1 => Kind::Checkpoint,
            _ => return Err(Fault::Damaged),
        };
        let hash = |at: usize| BlockHash(array(bytes, at));
        let title = Title {
            key: Key { hash: hash(48), kind },
            parent: hash(64),
            salt: u64::from_le_bytes(array(bytes, 80)),
            depth: word(bytes, 88),
            tokens: bytes[FIXED_BYTES..HEADER_BYTES].chunks_exact(4).map(|t| word(t, 0)).collect(),
        };
        // Block indices of a longer text would not fit their type.
        let deep = title.depth == 0 || title.depth > u32::MAX / LOGICAL_BLOCK;
        let named = title.parent.child(title.salt, &title.tokens) == title.key.hash;
        if version == VERSION && (deep || !named) {
            return Err(Fault::Damaged);
        }
        Ok(Header { version, digest: array(bytes, 16), title, length: u64::from_le_bytes(array(bytes, 96)) })
    }
}

fn code(kind: Kind) -> u32 {
    match kind {
        Kind::Node => 0,
        Kind::Checkpoint => 1,
    }
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes[at..at + N].try_into().expect("as long as asked for")
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(bytes, at))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{record, tiny_form, title};

    #[test]
    fn a_record_holds_what_was_written() {
        let form = tiny_form(7);
        for kind in [Kind::Node, Kind::Checkpoint] {
            let title = title(kind, 3);
            let bytes = record(&form, &title);
            assert_eq!(bytes.len() as u64, form.record_bytes(kind, 3));
            form.check(&bytes, &title).unwrap();
            let units = form.ranges(kind, 3);
            assert_eq!(units.len(), form.units(kind, 3).len());
            assert_eq!(units.last().unwrap().end, bytes.len() - CHECKSUM_BYTES);
            for (i, unit) in units.into_iter().enumerate() {
                assert!(bytes[unit].iter().all(|&b| b == 1 + i as u8));
            }
            assert_eq!(Header::read(&bytes[..HEADER_BYTES]).unwrap().title, title);
        }
    }

    #[test]
    fn any_flipped_bit_is_seen() {
        let form = tiny_form(7);
        let title = title(Kind::Node, 1);
        let bytes = record(&form, &title);
        let places = (0..HEADER_BYTES + 64).chain((HEADER_BYTES..bytes.len()).step_by(997)).chain([bytes.len() - 1]);
        for at in places {
            for bit in [0, 7] {
                let mut bad = bytes.to_vec();
                bad[at] ^= 1 << bit;
                assert!(form.check(&bad, &title).is_err(), "byte {at} bit {bit}");
            }
        }
    }

    #[test]
    fn every_length_but_the_right_one_is_refused() {
        let form = tiny_form(7);
        let title = title(Kind::Checkpoint, 2);
        let bytes = record(&form, &title);
        for len in [0, 7, 8, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 5, bytes.len() / 2, bytes.len() - 1] {
            assert_eq!(form.check(&bytes[..len], &title), Err(Fault::Damaged), "{len}");
        }
        assert_eq!(form.check(&[&bytes[..], &[0]].concat(), &title), Err(Fault::Damaged));
    }

    #[test]
    fn another_model_text_or_place_is_refused_although_the_record_is_sound() {
        let form = tiny_form(7);
        let of = title(Kind::Node, 3);
        let bytes = record(&form, &of);
        assert_eq!(tiny_form(8).check(&bytes, &of), Err(Fault::OtherLayout));
        let salted = Title { salt: 1, ..of.clone() };
        let deeper = Title { depth: 4, ..of.clone() };
        let checkpoint = Title { key: Key { kind: Kind::Checkpoint, ..of.key }, ..of.clone() };
        let mut other = of.clone();
        other.tokens[255] += 1;
        for wanted in [salted, deeper, checkpoint, other] {
            assert_eq!(form.check(&bytes, &wanted), Err(Fault::OtherText), "{:?}", wanted.key);
        }
    }
}
