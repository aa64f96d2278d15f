//! The host tier: whole records in memory, up to a number of bytes.
//!
//! Assumes one owner. Records are shared with the disk queue, so one that is evicted here may live a moment longer.
//! Refuses records that are larger than the tier.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::record::{Key, Title};
use super::shelf::Shelf;
use super::status::TierStatus;

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Host {
    shelf: Shelf,
    records: BTreeMap<Key, Arc<Vec<u8>>>,
    pub counts: TierStatus,
}

impl Host {
    /// An empty tier for `limit` bytes.
    pub fn new(limit: u64) -> Host {
        Host { shelf: Shelf::new(limit), records: BTreeMap::new(), counts: TierStatus::default() }
    }

    pub fn contains(&self, key: Key) -> bool {
        self.shelf.contains(key)
    }

    pub fn get(&self, key: Key) -> Option<Arc<Vec<u8>>> {
        self.records.get(&key).cloned()
    }

    /// Adds a record, with room made for it.
    pub fn put(&mut self, title: &Title, record: Arc<Vec<u8>>) {
        let key = title.key;
        let bytes = record.len() as u64;
        let Some(gone) = self.shelf.put(key, title.parent, title.depth, bytes) else {
            self.counts.skipped += 1;
            return;
        };
        self.records.insert(key, record);
        self.counts.stored += 1;
        for key in gone {
            self.records.remove(&key);
            self.counts.evicted += 1;
        }
    }

    pub fn touch(&mut self, key: Key) {
        self.shelf.touch(key);
    }

    pub fn remove(&mut self, key: Key) {
        self.shelf.remove(key);
        self.records.remove(&key);
    }

    pub fn status(&self) -> TierStatus {
        let (limit_bytes, bytes, records) = (self.shelf.limit(), self.shelf.bytes(), self.shelf.len());
        TierStatus { limit_bytes, bytes, records, ..self.counts.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{record, tiny_form, title};
    use crate::tier::record::Kind;

    #[test]
    fn it_is_bounded_and_gives_back_what_it_holds() {
        let form = tiny_form(1);
        let titles: Vec<Title> = (1..=4).map(|depth| title(Kind::Node, depth)).collect();
        let one = form.record_bytes(Kind::Node, 1);
        let mut host = Host::new(3 * one);
        titles.iter().for_each(|t| host.put(t, record(&form, t)));
        let status = host.status();
        assert_eq!((status.records, status.bytes, status.stored, status.evicted), (3, 3 * one, 4, 1));
        let held: Vec<bool> = titles.iter().map(|t| host.get(t.key).is_some()).collect();
        assert_eq!(held, titles.iter().map(|t| host.contains(t.key)).collect::<Vec<_>>());
        assert_eq!(held, [true, true, true, false], "a text is kept from its start");
        host.remove(titles[2].key);
        assert_eq!((host.status().records, host.get(titles[2].key)), (2, None));
        let mut none = Host::new(one - 1);
        none.put(&titles[0], record(&form, &titles[0]));
        assert_eq!((none.status().skipped, none.status().records), (1, 0));
    }
}
