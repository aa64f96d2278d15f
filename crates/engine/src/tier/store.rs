//! Copying what was published to the tiers, after the step that filled it is committed.
//!
//! Nodes and checkpoints that must reach a tier stand in a bounded list of the prefix cache. Each step reads the units of
//! some of them from the backend and hands records to host memory and to the disk queue. While the queue is full the rest
//! waits; an entry that is evicted before its turn is skipped. Checkpoints inside an answer come here only when they stay:
//! the last of an answer when it ends, others when somebody used them. Contents of published blocks never change, so it
//! does not matter who maps them meanwhile.

use longwave_model::geometry::LOGICAL_BLOCK;

use super::record::{Key, Kind, Title};
use super::{IDLE_WAITS, Tiers};
use crate::hash::BlockHash;
use crate::prefix::{NodeId, PrefixCache};
use crate::step::{Backend, BackendError, BlockId};

/// Bytes of records that one step copies; one record at least.
const STEP_BYTES: u64 = 64 << 20;
/// Entries that host memory gets in a step before a slow disk has taken those before them.
const HOST_AHEAD: usize = 16;
/// Entries that may wait for their turn.
const PENDING: usize = 8192;

/// A published entry that is to be copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fresh {
    pub node: NodeId,
    /// Tells whether the slot is still the same block.
    pub hash: BlockHash,
    /// The checkpoint at it instead of the node.
    pub checkpoint: Option<u64>,
}

impl PrefixCache {
    /// Puts an entry on the list for the tiers, if there are any.
    pub fn announce(&mut self, node: NodeId, checkpoint: Option<u64>) {
        if !self.announces {
            return;
        }
        if self.fresh.len() >= PENDING {
            self.fresh.pop_front();
            self.fresh_lost += 1;
        }
        let hash = self.node(node).hash;
        self.fresh.push_back(Fresh { node, hash, checkpoint });
    }

    /// Announces a checkpoint of an answer if it is still there.
    pub fn announce_answer(&mut self, answer: Option<(NodeId, u64)>) {
        if let Some((id, serial)) = answer
            && self.node(id).checkpoint.as_ref().is_some_and(|c| c.serial == serial)
        {
            self.announce(id, Some(serial));
        }
    }

    /// Title and blocks (pool, block) of an entry; `None` when it was evicted.
    fn entry(&self, fresh: &Fresh) -> Option<(Title, Vec<(u8, BlockId)>)> {
        let node = self.node(fresh.node);
        if !node.alive || node.hash != fresh.hash {
            return None;
        }
        let bucket = |group: usize| self.layout.groups[group].bucket as u8;
        let (kind, blocks) = match fresh.checkpoint {
            None => (Kind::Node, self.long.iter().zip(&node.blocks).map(|(&g, &b)| (bucket(g), b)).collect()),
            Some(serial) => {
                let checkpoint = node.checkpoint.as_ref().filter(|c| c.serial == serial)?;
                (Kind::Checkpoint, checkpoint.blocks.iter().map(|&(g, _, b)| (bucket(g), b)).collect())
            }
        };
        let title = Title {
            key: Key { hash: node.hash, kind },
            parent: node.parent.map_or(BlockHash::ROOT, |p| self.node(p).hash),
            salt: node.salt,
            depth: node.depth,
            tokens: node.tokens.clone(),
        };
        Some((title, blocks))
    }
}

impl Tiers {
    /// Copies entries of the list, as many as one step may.
    pub fn store<B: Backend>(&mut self, prefix: &mut PrefixCache, backend: &mut B) {
        if !self.is_on() {
            return;
        }
        if prefix.fresh_lost > 0 {
            self.skip(std::mem::take(&mut prefix.fresh_lost));
        }
        if self.idle_waits >= IDLE_WAITS {
            self.skip(prefix.fresh.len() as u64);
            prefix.fresh.clear();
        }
        let mut copied = 0;
        while copied < STEP_BYTES
            && let Some(&fresh) = prefix.fresh.front()
        {
            let Some(bytes) = self.store_one(&fresh, prefix, backend) else {
                // The disk is behind. Host memory need not wait for it.
                let ahead = if self.host.is_some() { HOST_AHEAD } else { 0 };
                let next: Vec<Fresh> = prefix.fresh.iter().skip(1).take(ahead).copied().collect();
                for fresh in next {
                    // What the disk did not take is looked at again.
                    let _ = self.store_one(&fresh, prefix, backend);
                }
                break;
            };
            copied += bytes;
            prefix.fresh.pop_front();
        }
        self.pending = prefix.fresh.len() as u64;
    }

    /// Copies one entry. Its bytes, or `None` when the disk takes no more now.
    fn store_one<B: Backend>(&mut self, fresh: &Fresh, prefix: &PrefixCache, backend: &mut B) -> Option<u64> {
        let Some((title, blocks)) = prefix.entry(fresh) else {
            self.skip(1);
            return Some(0);
        };
        let key = title.key;
        let bytes = self.form.record_bytes(key.kind, title.depth);
        let for_host = self.host.as_ref().is_some_and(|h| !h.contains(key));
        let for_disk = self.disk.as_ref().is_some_and(|d| d.takes() && !d.contains(key));
        if !for_host && !for_disk {
            return Some(0);
        }
        let disk_is_full = for_disk && !self.disk.as_ref().is_some_and(|d| d.queue.has_room(bytes));
        if disk_is_full && !for_host {
            return None;
        }
        let held = self.host.as_ref().and_then(|h| h.get(key));
        let record = match held.map_or_else(|| self.read(&title, &blocks, backend), Ok) {
            Ok(record) => record,
            Err(_) => {
                // The backend's next step will say what is wrong with it.
                self.skip(1);
                return Some(0);
            }
        };
        if for_host && let Some(host) = &mut self.host {
            host.put(&title, record.clone());
        }
        if disk_is_full {
            return None;
        }
        if for_disk && let Some(disk) = &mut self.disk {
            disk.put(&title, record);
        }
        Some(bytes)
    }

    fn read<B: Backend>(
        &mut self,
        title: &Title,
        blocks: &[(u8, BlockId)],
        backend: &mut B,
    ) -> Result<std::sync::Arc<Vec<u8>>, BackendError> {
        let units = self.form.units(title.key.kind, title.depth);
        assert!(units.len() == blocks.len(), "{} units of {} blocks", units.len(), title.depth * LOGICAL_BLOCK);
        let (form, scratch) = (&self.form, &mut self.scratch);
        form.encode(title, |i, out| {
            let (bucket, block) = blocks[i];
            scratch.resize(form.layout.buckets[bucket as usize].unit_bytes() as usize, 0);
            backend.read_unit(bucket, block, scratch)?;
            out.extend_from_slice(&scratch[..units[i].bytes as usize]);
            Ok(())
        })
    }

    /// Counts entries that no tier got.
    fn skip(&mut self, entries: u64) {
        if let Some(host) = &mut self.host {
            host.counts.skipped += entries;
        }
        if let Some(disk) = &mut self.disk {
            disk.counts.skipped += entries;
        }
    }
}
