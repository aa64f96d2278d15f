//! The turns that this server's model wrote lately, to be recognised when clients send them back.
//!
//! Found by the id of a call, or by the content where nothing was called; by their own tenant only. In memory and bounded:
//! the oldest go first, and their texts are rendered as any other text then.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use longwave_text::Turn;

use crate::tenant::Tenant;

/// Kept turns.
#[derive(Default)]
pub(crate) struct Replays {
    shelf: Mutex<Shelf>,
}

#[derive(Default)]
struct Shelf {
    by_key: HashMap<Key, Arc<Turn>>,
    order: VecDeque<Key>,
    bytes: usize,
}

type Key = [u8; 32];

/// Calls by the first id, which no other turn has; texts by what they say.
fn key(tenant: Tenant, first_call: Option<&str>, content: &str) -> Key {
    let mut hash = blake3::Hasher::new();
    hash.update(&tenant.0.to_le_bytes());
    match first_call {
        Some(id) => hash.update(b"call").update(id.as_bytes()),
        None => hash.update(b"text").update(content.trim_end().as_bytes()),
    };
    *hash.finalize().as_bytes()
}

impl Replays {
    /// Keeps a turn, within `limit_bytes` for all.
    pub(crate) fn keep(&self, tenant: Tenant, turn: Turn, limit_bytes: usize) {
        let bytes = turn.bytes();
        if bytes > limit_bytes {
            return;
        }
        let key = key(tenant, turn.calls.first().map(|call| call.id.as_str()), &turn.content);
        let mut shelf = self.shelf.lock().unwrap_or_else(PoisonError::into_inner);
        shelf.bytes += bytes;
        match shelf.by_key.insert(key, Arc::new(turn)) {
            Some(old) => shelf.bytes -= old.bytes(),
            None => shelf.order.push_back(key),
        }
        while shelf.bytes > limit_bytes {
            let Some(oldest) = shelf.order.pop_front() else { break };
            if let Some(old) = shelf.by_key.remove(&oldest) {
                shelf.bytes -= old.bytes();
            }
        }
    }

    /// The turn with these calls, or with this content when there are none.
    pub(crate) fn find(&self, tenant: Tenant, calls: &[String], content: &str) -> Option<Arc<Turn>> {
        let key = key(tenant, calls.first().map(String::as_str), content);
        self.shelf.lock().unwrap_or_else(PoisonError::into_inner).by_key.get(&key).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use longwave_text::TurnCall;

    fn turn(id: Option<&str>, content: &str) -> Turn {
        let calls = id.into_iter().map(|id| TurnCall { id: id.into(), name: "f".into(), arguments: "{}".into() });
        Turn {
            tokens: vec![0; 100],
            thinking: false,
            reasoning: String::new(),
            content: content.into(),
            calls: calls.collect(),
        }
    }

    #[test]
    fn turns_are_found_by_call_or_content_by_their_own_tenant_and_the_oldest_go() {
        let replays = Replays::default();
        let (one, two) = (Tenant(1), Tenant(2));
        replays.keep(one, turn(Some("c1"), "x"), 3000);
        replays.keep(one, turn(None, "hello\n"), 3000);
        assert!(replays.find(one, &["c1".into()], "anything").is_some() && replays.find(one, &[], "hello").is_some());
        assert!(replays.find(two, &["c1".into()], "x").is_none() && replays.find(one, &[], "x").is_none());
        // The same text again takes no second place.
        for _ in 0..50 {
            replays.keep(one, turn(None, "hello"), 3000);
        }
        assert!(replays.find(one, &["c1".into()], "").is_some());
        for number in 0..50 {
            replays.keep(two, turn(Some(&number.to_string()), ""), 3000);
        }
        assert!(replays.find(one, &["c1".into()], "").is_none() && replays.find(two, &["49".into()], "").is_some());
        assert!(replays.shelf.lock().unwrap().bytes <= 3000);
    }
}
