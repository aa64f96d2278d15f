//! A turn being written down while it is generated, to be recognised when the client sends it back.
//! Nothing is kept of a turn that was cut: by the token limit, by a stop text, or because the client left.

use longwave_text::{ReplyEvent, ReplyFinish, ReplyMessage, Turn};

use crate::job::Recording;
use crate::server::App;

/// A turn so far.
pub(crate) struct TurnRecord {
    owner: u64,
    before: [u8; 32],
    turn: Turn,
    /// The model's own tokens begin here.
    opening: usize,
}

impl TurnRecord {
    pub(crate) fn new(recording: Recording) -> TurnRecord {
        let opening = recording.opening.len();
        let turn = Turn { tokens: recording.opening, thinking: false, said: ReplyMessage::default() };
        TurnRecord { owner: recording.owner, before: recording.before, turn, opening }
    }

    pub(crate) fn token(&mut self, token: u32) {
        self.turn.tokens.push(token);
    }

    pub(crate) fn events(&mut self, events: &[ReplyEvent]) {
        self.turn.said.add(events);
    }

    /// The end of the turn.
    pub(crate) fn keep(mut self, app: &App, finish: &ReplyFinish) {
        if !matches!(finish, ReplyFinish::Stop(None) | ReplyFinish::ToolCalls) || self.turn.tokens.len() == self.opening
        {
            return;
        }
        self.turn.thinking = self.turn.tokens.first() == Some(&app.tokenizer.markers().think);
        app.replays.keep(self.owner, self.before, self.turn, app.options.replay_bytes);
    }
}
