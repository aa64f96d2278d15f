//! A whole answer with its log-probabilities, put together from its parts.
//! Used where an answer is not streamed.

use longwave_text::{ReplyFinish, ReplyMessage};
use serde_json::Value;

use crate::answer::{Answer, Next, Part};
use crate::errors::ApiError;

/// A message being put together.
#[derive(Default)]
pub(crate) struct Message {
    pub(crate) said: ReplyMessage,
    pub(crate) content_logprobs: Vec<Value>,
    pub(crate) reasoning_logprobs: Vec<Value>,
    pub(crate) token_ids: Vec<u32>,
}

impl Message {
    fn add(&mut self, mut part: Part) {
        self.said.add(&part.events);
        self.content_logprobs.append(&mut part.content_logprobs);
        self.reasoning_logprobs.append(&mut part.reasoning_logprobs);
        self.token_ids.append(&mut part.token_ids);
    }
}

/// Reads an answer to its end.
pub(crate) async fn whole(answer: &mut Answer) -> Result<(Message, ReplyFinish), ApiError> {
    let mut message = Message::default();
    loop {
        match answer.next().await? {
            Next::Started => {}
            Next::Part(part) => message.add(part),
            Next::End(part, finish) => {
                message.add(part);
                return Ok((message, finish));
            }
        }
    }
}
