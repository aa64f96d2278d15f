//! Responses that were asked to be kept: for `previous_response_id`, for reading them again, for those in the background.
//!
//! In memory and bounded: the oldest go first. Each turn holds its own items and a link to the turn before it, so a long
//! session is kept once. A response is found by its own tenant only. Nothing survives a restart.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::Value;
use tokio::sync::watch;

/// Most responses that are kept, whatever their size.
const MAX_RESPONSES: usize = 16_384;

/// Input and output of a turn.
pub(crate) struct Turn {
    before: Option<Arc<Turn>>,
    /// The input, then the output.
    items: Vec<Value>,
    /// How many of the items are input.
    input: usize,
    bytes: usize,
    /// Of this turn and of all before it.
    chain_bytes: usize,
    held: Arc<AtomicUsize>,
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.held.fetch_sub(self.bytes, Ordering::Relaxed);
        // One after the other: a long chain must not be a deep recursion.
        let mut before = self.before.take();
        while let Some(turn) = before {
            before = Arc::into_inner(turn).and_then(|mut turn| turn.before.take());
        }
    }
}

/// A kept response.
struct Kept {
    tenant: u64,
    response: Value,
    turn: Arc<Turn>,
    /// Another request may go on after it.
    continues: bool,
    /// Set while it runs in the background.
    stop: Option<watch::Sender<bool>>,
}

/// All kept responses.
#[derive(Default)]
pub(crate) struct ResponseStore {
    kept: Mutex<Shelf>,
    held: Arc<AtomicUsize>,
}

#[derive(Default)]
struct Shelf {
    by_id: HashMap<String, Kept>,
    order: VecDeque<String>,
}

impl ResponseStore {
    fn lock(&self) -> MutexGuard<'_, Shelf> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The items of a response and of all turns before it, oldest first, and the last turn.
    pub(crate) fn history(&self, tenant: u64, id: &str) -> Option<(Vec<Value>, Arc<Turn>)> {
        let last = {
            let shelf = self.lock();
            shelf.by_id.get(id).filter(|kept| kept.tenant == tenant && kept.continues)?.turn.clone()
        };
        let mut turns = vec![&*last];
        while let Some(before) = &turns[turns.len() - 1].before {
            turns.push(before);
        }
        let items = turns.iter().rev().flat_map(|turn| turn.items.iter().cloned()).collect();
        Some((items, last))
    }

    /// Keeps a finished response, within `limit_bytes` for all.
    pub(crate) fn keep(
        &self,
        tenant: u64,
        response: &Value,
        input: Vec<Value>,
        before: Option<Arc<Turn>>,
        limit_bytes: usize,
    ) {
        let output = response["output"].as_array().cloned().unwrap_or_default();
        let (inputs, mut items) = (input.len(), input);
        items.extend(output);
        let mut turn = self.turn(response, items, inputs);
        turn.chain_bytes += before.as_ref().map_or(0, |turn| turn.chain_bytes);
        // One long session must not push out all others; it can be read, and is continued by sending its items.
        let continues = turn.chain_bytes <= limit_bytes / 2;
        if !continues {
            let (id, bytes) = (&response["id"], turn.chain_bytes);
            tracing::debug!("the session of {id} takes {bytes} bytes: too long to be continued by id");
        }
        turn.before = before.filter(|_| continues);
        self.put(Kept { tenant, response: response.clone(), turn: Arc::new(turn), continues, stop: None }, limit_bytes);
    }

    /// Keeps a response that runs in the background.
    pub(crate) fn begin(&self, tenant: u64, response: &Value, stop: watch::Sender<bool>, limit_bytes: usize) {
        let turn = Arc::new(self.turn(response, Vec::new(), 0));
        self.put(Kept { tenant, response: response.clone(), turn, continues: false, stop: Some(stop) }, limit_bytes);
    }

    /// A turn, its bytes counted.
    fn turn(&self, response: &Value, items: Vec<Value>, input: usize) -> Turn {
        // The text twice: parsed JSON takes about that.
        let bytes = 2 * (response.to_string().len() + items.iter().map(|item| item.to_string().len()).sum::<usize>());
        self.held.fetch_add(bytes, Ordering::Relaxed);
        Turn { before: None, items, input, bytes, chain_bytes: bytes, held: self.held.clone() }
    }

    fn put(&self, kept: Kept, limit_bytes: usize) {
        let Some(id) = kept.response["id"].as_str().map(str::to_owned) else { return };
        let mut gone = 0;
        {
            let mut shelf = self.lock();
            if shelf.by_id.insert(id.clone(), kept).is_none() {
                shelf.order.push_back(id);
            }
            while shelf.order.len() > 1
                && (self.held.load(Ordering::Relaxed) > limit_bytes || shelf.order.len() > MAX_RESPONSES)
            {
                let Some(oldest) = shelf.order.pop_front() else { break };
                // Dropped at once: the count of bytes decides about the next one.
                gone += usize::from(shelf.by_id.remove(&oldest).is_some());
            }
        }
        if gone > 0 {
            tracing::debug!("{gone} kept responses made room for newer ones");
        }
    }

    /// A kept response.
    pub(crate) fn get(&self, tenant: u64, id: &str) -> Option<Value> {
        self.lock().by_id.get(id).filter(|kept| kept.tenant == tenant).map(|kept| kept.response.clone())
    }

    /// The input items of a kept response.
    pub(crate) fn input(&self, tenant: u64, id: &str) -> Option<Vec<Value>> {
        self.lock()
            .by_id
            .get(id)
            .filter(|kept| kept.tenant == tenant)
            .map(|kept| kept.turn.items[..kept.turn.input].to_vec())
    }

    /// Forgets a response; whether it was there.
    pub(crate) fn delete(&self, tenant: u64, id: &str) -> bool {
        let mut shelf = self.lock();
        if shelf.by_id.get(id).is_none_or(|kept| kept.tenant != tenant) {
            return false;
        }
        shelf.order.retain(|other| other != id);
        let gone = shelf.by_id.remove(id);
        drop(shelf);
        if let Some(stop) = gone.and_then(|kept| kept.stop) {
            stop.send_replace(true);
        }
        true
    }

    /// Stops a response that runs in the background: `None` when there is no such response, else whether it ran.
    pub(crate) fn cancel(&self, tenant: u64, id: &str) -> Option<bool> {
        let shelf = self.lock();
        let kept = shelf.by_id.get(id).filter(|kept| kept.tenant == tenant)?;
        Some(kept.stop.as_ref().is_some_and(|stop| {
            stop.send_replace(true);
            true
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn response(id: &str, text: &str) -> Value {
        json!({"id": id, "output": [{"text": text}]})
    }

    #[test]
    fn a_chain_gives_all_its_items_and_belongs_to_one_tenant() {
        let store = ResponseStore::default();
        store.keep(1, &response("a", "1"), vec![json!(0)], None, 1 << 20);
        let (items, turn) = store.history(1, "a").unwrap();
        assert_eq!(items, [json!(0), json!({"text": "1"})]);
        store.keep(1, &response("b", "3"), vec![json!(2)], Some(turn), 1 << 20);
        let items = store.history(1, "b").unwrap().0;
        assert_eq!(items, [json!(0), json!({"text": "1"}), json!(2), json!({"text": "3"})]);
        assert!(store.history(2, "b").is_none() && store.get(2, "b").is_none() && !store.delete(2, "b"));
        // The earlier turn is part of the later one, also when it is forgotten by name.
        assert!(store.delete(1, "a") && store.get(1, "a").is_none());
        assert_eq!(store.history(1, "b").unwrap().0.len(), 4);
    }

    #[test]
    fn a_session_beyond_half_of_the_bytes_is_kept_but_not_continued() {
        let store = ResponseStore::default();
        let text = "y".repeat(300);
        store.keep(0, &response("a", &text), vec![json!(0)], None, 4000);
        let before = store.history(0, "a").unwrap().1;
        store.keep(0, &response("b", &text), vec![json!(1)], Some(before), 4000);
        assert!(store.history(0, "b").is_none());
        assert_eq!(
            (store.get(0, "b").unwrap()["id"].clone(), store.input(0, "b").unwrap()),
            (json!("b"), vec![json!(1)])
        );
        // What came before it is not held by it.
        let both = store.held.load(Ordering::Relaxed);
        assert!(store.delete(0, "a") && store.held.load(Ordering::Relaxed) <= both / 2 + 100);
    }

    #[test]
    fn the_oldest_go_when_the_bytes_run_out_and_long_chains_fall_without_recursion() {
        let store = ResponseStore::default();
        let mut last = None;
        for turn in 0..20_000 {
            let id = turn.to_string();
            store.keep(0, &response(&id, "x"), Vec::new(), last.take(), usize::MAX);
            last = Some(store.lock().by_id[&id].turn.clone());
        }
        let text = "y".repeat(1000);
        store.keep(0, &response("big", &text), Vec::new(), None, 10_000);
        drop(last);
        assert!(store.get(0, "0").is_none() && store.get(0, "big").is_some());
        store.keep(0, &response("big2", &text), Vec::new(), None, 10_000);
        assert!(store.held.load(Ordering::Relaxed) <= 10_000);
    }
}
