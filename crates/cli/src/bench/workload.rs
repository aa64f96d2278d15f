//! What is asked: seeded texts of a wanted number of tokens, alone or as agents whose conversations grow.
//!
//! Prompts are common words in random order, so nothing but a shared system text is found in a cache. How many tokens a
//! word and the prompt's frame take is asked of the server once, with two small requests; the numbers of the report are the
//! server's own. Refuses lengths that are shorter than the frame.

use anyhow::{Result, bail};
use bytes::Bytes;
use hyper::Method;
use longwave_engine::proof::Numbers;
use serde_json::{Map, Value, json};

use crate::bench::connection::Server;

/// Words of one token in most vocabularies.
const WORDS: [&str; 96] = [
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
    "country",
    "problem",
    "hand",
    "part",
    "place",
    "case",
    "week",
    "company",
    "system",
    "program",
    "question",
    "work",
    "government",
    "number",
    "night",
    "point",
    "home",
    "water",
    "room",
    "mother",
    "area",
    "money",
    "story",
    "fact",
    "month",
    "lot",
    "right",
    "study",
    "book",
    "eye",
    "job",
    "word",
    "business",
    "issue",
    "side",
    "kind",
    "head",
    "house",
    "service",
    "friend",
    "father",
    "power",
    "hour",
    "game",
    "line",
    "end",
    "member",
    "law",
    "car",
    "city",
    "community",
    "name",
    "president",
    "team",
    "minute",
    "idea",
    "body",
    "information",
    "back",
    "parent",
    "face",
    "others",
    "level",
    "office",
    "door",
    "health",
    "person",
    "art",
    "war",
    "history",
    "party",
    "result",
    "change",
    "morning",
    "reason",
    "research",
    "girl",
    "guy",
    "moment",
    "air",
];
/// Words of the two texts that are measured.
const PROBES: [u32; 2] = [32, 288];

/// The route that is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Endpoint {
    /// /v1/chat/completions
    Chat,
    /// /v1/completions
    Completions,
}

impl Endpoint {
    /// Its path.
    pub fn route(self) -> &'static str {
        match self {
            Endpoint::Chat => "/v1/chat/completions",
            Endpoint::Completions => "/v1/completions",
        }
    }
}

/// What all requests have in common.
#[derive(Debug, Clone)]
pub struct Workload {
    /// Which route.
    pub endpoint: Endpoint,
    /// Tokens of a prompt; for agents, of the first question behind the system text.
    pub input_tokens: u32,
    /// Tokens of an answer.
    pub output_tokens: u32,
    /// Lengths are drawn from within this share of the above, 0 to below 1.
    pub range_ratio: f64,
    /// Requests of one session; 1 is no conversation.
    pub turns: u32,
    /// Tokens of the text that all agents begin with.
    pub system_tokens: u32,
    /// Tokens that each further turn of an agent adds, its answer aside.
    pub turn_tokens: u32,
    /// Other numbers give other texts.
    pub seed: u64,
    /// Fields of every body.
    pub fields: Map<String, Value>,
}

/// Tokens of texts on this server, measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scale {
    /// Of a word.
    pub per_word: f64,
    /// Of what the server puts around a prompt.
    pub frame: f64,
}

impl Scale {
    /// Asks the server.
    pub async fn measure(server: &Server, workload: &Workload) -> Result<Scale> {
        let mut counts = [0.0; 2];
        for (index, words) in PROBES.into_iter().enumerate() {
            let mut body = workload.fields.clone();
            let text = text(&mut Numbers::new(workload.seed ^ u64::from(words)), words);
            workload.put(&mut body, &[("user", text)]);
            body.insert("max_tokens".into(), 1.into());
            let answer = server.json(Method::POST, workload.endpoint.route(), Some(&Value::Object(body))).await?;
            match answer["usage"]["prompt_tokens"].as_u64() {
                Some(tokens) => counts[index] = tokens as f64,
                // Then lengths are words.
                None => return Ok(Scale { per_word: 1.0, frame: 0.0 }),
            }
        }
        let per_word = (counts[1] - counts[0]) / f64::from(PROBES[1] - PROBES[0]);
        if per_word <= 0.0 {
            bail!("{} counts {} tokens for a text and {} for a longer one", server.url(), counts[0], counts[1]);
        }
        Ok(Scale { per_word, frame: counts[0] - per_word * f64::from(PROBES[0]) })
    }

    fn words(self, tokens: f64) -> u32 {
        (tokens / self.per_word).round().max(1.0) as u32
    }
}

/// A conversation, or a single request.
#[derive(Debug, Clone)]
pub struct Session<'a> {
    workload: &'a Workload,
    scale: Scale,
    numbers: Numbers,
    messages: Vec<(&'static str, String)>,
}

impl Workload {
    /// Refuses prompts that are shorter than what the server puts around them.
    pub fn check(&self, scale: Scale) -> Result<()> {
        let least = scale.frame + scale.per_word;
        if f64::from(self.input_tokens) * (1.0 - self.range_ratio) < least {
            bail!(
                "--input-len {} is shorter than the {:.0} tokens of a prompt with one word; the server's own frame counts",
                self.input_tokens,
                least.ceil()
            );
        }
        Ok(())
    }

    /// The session of this number; the same number gives the same texts.
    pub fn session(&self, index: usize, scale: Scale) -> Session<'_> {
        let numbers = Numbers::new(self.seed.wrapping_mul(1_000_003).wrapping_add(index as u64 + 1));
        let mut session = Session { workload: self, scale, numbers, messages: Vec::new() };
        if self.system_tokens > 0 {
            // The same for all.
            let system = text(&mut Numbers::new(self.seed), scale.words(self.system_tokens.into()));
            session.messages.push(("system", system));
        }
        let tokens = session.around(self.input_tokens) - scale.frame;
        session.say(tokens);
        session
    }

    /// Puts messages into a body.
    fn put(&self, body: &mut Map<String, Value>, messages: &[(&str, String)]) {
        match self.endpoint {
            Endpoint::Chat => {
                let message = |(role, text): &(&str, String)| json!({"role": role, "content": text});
                body.insert("messages".into(), messages.iter().map(message).collect());
            }
            Endpoint::Completions => {
                let texts: Vec<&str> = messages.iter().map(|(_, text)| text.as_str()).collect();
                body.insert("prompt".into(), texts.join("\n").into());
            }
        }
    }
}

impl Session<'_> {
    /// The next request.
    pub fn body(&mut self) -> Bytes {
        let mut body = self.workload.fields.clone();
        self.workload.put(&mut body, &self.messages);
        let tokens = self.around(self.workload.output_tokens).round().max(1.0);
        body.insert("max_tokens".into(), (tokens as u64).into());
        body.insert("stream".into(), true.into());
        body.insert("stream_options".into(), json!({"include_usage": true}));
        Value::Object(body).to_string().into()
    }

    /// The answer came: the next request holds it and what comes behind it.
    pub fn go_on(&mut self, answer: String) {
        self.messages.push(("assistant", answer));
        let tokens = self.around(self.workload.turn_tokens);
        self.say(tokens);
    }

    fn say(&mut self, tokens: f64) {
        let words = self.scale.words(tokens);
        self.messages.push(("user", text(&mut self.numbers, words)));
    }

    /// A length from the range around `tokens`.
    fn around(&mut self, tokens: u32) -> f64 {
        let unit = self.numbers.below(1 << 32) as f64 / ((1u64 << 32) - 1) as f64;
        f64::from(tokens) * (1.0 + self.workload.range_ratio * (2.0 * unit - 1.0))
    }
}

fn text(numbers: &mut Numbers, words: u32) -> String {
    let mut out = String::with_capacity(words as usize * 7);
    for index in 0..words {
        if index > 0 {
            out.push(' ');
        }
        out.push_str(WORDS[numbers.below(WORDS.len() as u64) as usize]);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCALE: Scale = Scale { per_word: 2.0, frame: 10.0 };

    fn workload() -> Workload {
        Workload {
            endpoint: Endpoint::Chat,
            input_tokens: 50,
            output_tokens: 8,
            range_ratio: 0.0,
            turns: 3,
            system_tokens: 40,
            turn_tokens: 12,
            seed: 1,
            fields: Map::new(),
        }
    }

    fn read(body: &Bytes) -> Value {
        serde_json::from_slice(body).unwrap()
    }

    fn words(value: &Value) -> usize {
        value.as_str().unwrap().split(' ').count()
    }

    #[test]
    fn agents_share_a_system_text_and_their_turns_grow() {
        let workload = workload();
        let mut sessions = [0, 1].map(|index| workload.session(index, SCALE));
        let [first, second] = [0, 1].map(|index| read(&sessions[index].body()));
        assert_eq!(first["messages"][0], second["messages"][0]);
        assert_ne!(first["messages"][1], second["messages"][1]);
        assert_eq!([0, 1].map(|i| words(&first["messages"][i]["content"])), [20, 20]);
        sessions[0].go_on("so".into());
        let next = read(&sessions[0].body());
        assert_eq!(next["messages"].as_array().unwrap()[..2], first["messages"].as_array().unwrap()[..]);
        assert_eq!(next["messages"][2], json!({"role": "assistant", "content": "so"}));
        assert_eq!(words(&next["messages"][3]["content"]), 6);
    }

    #[test]
    fn the_same_seed_gives_the_same_bodies_and_lengths_stay_in_their_range() {
        let workload = Workload { range_ratio: 0.5, system_tokens: 0, ..workload() };
        let mut lengths = Vec::new();
        for index in 0..50 {
            let (a, b) = (workload.session(index, SCALE).body(), workload.session(index, SCALE).body());
            assert_eq!(a, b);
            let body = read(&a);
            assert!((4..=12).contains(&body["max_tokens"].as_u64().unwrap()));
            lengths.push(words(&body["messages"][0]["content"]));
        }
        // Between 25 and 75 tokens, 10 of them the frame.
        assert!(lengths.iter().all(|n| (7..=33).contains(n)), "{lengths:?}");
        assert!(lengths.iter().max() > lengths.iter().min());
    }

    #[test]
    fn completions_take_one_text_and_short_prompts_are_refused() {
        let workload = Workload { endpoint: Endpoint::Completions, input_tokens: 11, ..workload() };
        assert!(read(&workload.session(0, SCALE).body())["prompt"].as_str().unwrap().contains('\n'));
        let error = workload.check(SCALE).unwrap_err().to_string();
        assert!(error.contains("--input-len 11") && error.contains("12 tokens"), "{error}");
    }
}
