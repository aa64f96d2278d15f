//! The turns that this server's model wrote lately, to be recognised when clients send them back.
//!
//! Found by the id of a call, or by all that came before where nothing was called; by their own tenant and salt only. In memory and bounded:
//! the oldest go first, and their texts are rendered as any other text then.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use longwave_text::{Turn, TurnKey};

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

/// Calls by the first id, which no other turn has; other turns by all that came before them.
fn key(owner: u64, key: &TurnKey<'_>) -> Key {
    let mut hash = blake3::Hasher::new();
    hash.update(&owner.to_le_bytes());
    match key.calls.first() {
        Some(id) => hash.update(b"call").update(id.as_bytes()),
        None => hash.update(b"text").update(&key.before),
    };
    *hash.finalize().as_bytes()
}

impl Replays {
    /// Keeps a turn, within `limit_bytes` for all.
    pub(crate) fn keep(&self, owner: u64, before: [u8; 32], turn: Turn, limit_bytes: usize) {
        let bytes = turn.bytes();
        if bytes > limit_bytes {
            return;
        }
        let calls: Vec<String> = turn.said.calls.iter().map(|call| call.id.clone()).collect();
        let key = key(owner, &TurnKey { calls: &calls, before });
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

    /// The turn of a key.
    pub(crate) fn find(&self, owner: u64, wanted: &TurnKey<'_>) -> Option<Arc<Turn>> {
        let key = key(owner, wanted);
        self.shelf.lock().unwrap_or_else(PoisonError::into_inner).by_key.get(&key).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use longwave_text::{ReplyCall, ReplyMessage};

    fn turn(id: Option<&str>, content: &str) -> Turn {
        let calls = id.into_iter().map(|id| ReplyCall { id: id.into(), name: "f".into(), arguments: "{}".into() });
        let said = ReplyMessage { reasoning: String::new(), content: content.into(), calls: calls.collect() };
        Turn { tokens: vec![0; 100], thinking: false, said }
    }

    fn find(replays: &Replays, owner: u64, call: Option<&str>, before: u8) -> bool {
        let calls: Vec<String> = call.into_iter().map(str::to_owned).collect();
        replays.find(owner, &TurnKey { calls: &calls, before: [before; 32] }).is_some()
    }

    #[test]
    fn turns_are_found_by_call_or_by_what_came_before_by_their_own_tenant_and_the_oldest_go() {
        let replays = Replays::default();
        replays.keep(1, [0; 32], turn(Some("c1"), "x"), 3000);
        replays.keep(1, [1; 32], turn(None, "hello"), 3000);
        assert!(find(&replays, 1, Some("c1"), 9) && find(&replays, 1, None, 1));
        assert!(!find(&replays, 2, Some("c1"), 0) && !find(&replays, 2, None, 1) && !find(&replays, 1, None, 0));
        // The same turn again takes no second place.
        for _ in 0..50 {
            replays.keep(1, [1; 32], turn(None, "hello"), 3000);
        }
        assert!(find(&replays, 1, Some("c1"), 0));
        for number in 0..50 {
            replays.keep(2, [0; 32], turn(Some(&number.to_string()), ""), 3000);
        }
        assert!(!find(&replays, 1, Some("c1"), 0) && find(&replays, 2, Some("49"), 0));
        assert!(replays.shelf.lock().unwrap().bytes <= 3000);
    }
}
