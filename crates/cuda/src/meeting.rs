//! Where the threads of several GPUs wait for each other while a backend opens and closes, and tell each other a number.
//!
//! Every thread has a [`Chair`]. A chair that is dropped ends the meeting: whoever waits or comes later is told so, and
//! nobody waits for ever for a thread that failed.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// A thread's place.
pub struct Chair {
    number: usize,
    meeting: Arc<Meeting>,
}

/// Somebody has left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Left;

struct Meeting {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// What was said in this round, by chair.
    said: Vec<Option<u64>>,
    /// What was said in the last complete one.
    heard: Vec<u64>,
    rounds: u64,
    left: bool,
}

/// A meeting of `count` threads.
pub fn chairs(count: usize) -> Vec<Chair> {
    let state = State { said: vec![None; count], heard: Vec::new(), rounds: 0, left: false };
    let meeting = Arc::new(Meeting { state: Mutex::new(state), changed: Condvar::new() });
    (0..count).map(|number| Chair { number, meeting: meeting.clone() }).collect()
}

impl Chair {
    /// Says `value` and waits for all others; what everybody said, by chair.
    pub fn meet(&self, value: u64) -> Result<Vec<u64>, Left> {
        let mut state = self.meeting.state.lock().unwrap_or_else(PoisonError::into_inner);
        let round = state.rounds;
        state.said[self.number] = Some(value);
        if state.said.iter().all(Option::is_some) {
            state.heard = state.said.iter_mut().filter_map(Option::take).collect();
            state.rounds += 1;
            self.meeting.changed.notify_all();
        }
        // The next round cannot end before everybody has come out of this one.
        while state.rounds == round {
            if state.left {
                return Err(Left);
            }
            state = self.meeting.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(state.heard.clone())
    }
}

impl Drop for Chair {
    fn drop(&mut self) {
        self.meeting.state.lock().unwrap_or_else(PoisonError::into_inner).left = true;
        self.meeting.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everybody_hears_everybody_round_after_round() {
        let threads: Vec<_> = chairs(3)
            .into_iter()
            .map(|chair| {
                std::thread::spawn(move || {
                    let hear = |round: u64| chair.meet(10 * round + chair.number as u64);
                    let heard: Vec<_> = (0..200).map(|round| hear(round).unwrap()).collect();
                    // Nobody leaves before the last round is over everywhere.
                    let _ = chair.meet(0);
                    heard
                })
            })
            .collect();
        let want: Vec<Vec<u64>> = (0..200).map(|round| (0..3).map(|i| 10 * round + i).collect()).collect();
        for thread in threads {
            assert_eq!(thread.join().unwrap(), want);
        }
    }

    #[test]
    fn who_waits_for_one_that_left_is_told() {
        let mut chairs = chairs(3);
        let leaving = chairs.pop().unwrap();
        let waiting: Vec<_> = chairs.into_iter().map(|c| std::thread::spawn(move || c.meet(1))).collect();
        drop(leaving);
        for thread in waiting {
            assert_eq!(thread.join().unwrap(), Err(Left));
        }
    }
}
