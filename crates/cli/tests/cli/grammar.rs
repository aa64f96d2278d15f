//! M11: answers of the tiny model that must follow a grammar, with thinking and drafts, greedy and sampled.

use std::path::PathBuf;
use std::sync::Arc;

use longwave_cpu::backend::{CpuBackend, CpuOptions};
use longwave_cpu::forward::Model;
use longwave_cpu::numerics::Profile;
use longwave_engine::forced::{Forced, ForcedDrafts};
use longwave_engine::proof::{self, Answer};
use longwave_engine::request::Request;
use longwave_engine::step::{Backend, ReturnLogits, Sampling};
use longwave_engine::{Engine, EngineOptions};
use longwave_model::Checkpoint;
use longwave_model::geometry::{CacheFormats, IndexFormat, MainFormat};
use longwave_text::{ChatDefaults, ChatPlan, Grammars, Reply, ReplyEnd, ReplyEvent, Tokenizer};
use serde_json::{Value, json};

use crate::program::Server;

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testdata/tiny")
}

fn backend(drafts: u32, seats: u32) -> CpuBackend {
    let checkpoint = Checkpoint::open(&folder(), &mut |_| {}).unwrap();
    let formats = CacheFormats { main: MainFormat::Fp8, index: IndexFormat::Fp8 };
    let model = Model::new(&checkpoint, Profile::Serving, formats);
    let options = CpuOptions { seats, step_tokens: 256, context: 2048, cache_bytes: 64 << 20, drafts };
    CpuBackend::new(model, options).unwrap()
}

fn schema() -> Value {
    json!({"type": "object", "properties": {"a": {"type": "integer", "minimum": -9999, "maximum": 9999}}, "required": ["a"], "additionalProperties": false})
}

fn tools() -> Value {
    let parameters = json!({"type": "object", "properties": {
        "city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "maximum": 99, "minimum": 0}, "unit": {"type": "string", "enum": ["c", "f"]}},
        "required": ["city", "days", "unit"], "additionalProperties": false});
    json!([{"type": "function", "function": {"name": "weather", "strict": true, "parameters": parameters}},
        {"type": "function", "function": {"name": "now", "strict": true, "parameters": {"type": "object", "properties": {}, "additionalProperties": false}}}])
}

/// What the bodies below ask for.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Kind {
    Json,
    Calls,
}

fn bodies() -> Vec<(Value, Kind)> {
    let questions = ["What is the capital of Norway?", "Hello, who are you?"];
    let mut bodies = Vec::new();
    for question in questions {
        for thinking in [true, false] {
            for (extra, kind) in [
                (
                    json!({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema()}}}),
                    Kind::Json,
                ),
                (json!({"tools": tools(), "tool_choice": "required", "parallel_tool_calls": false}), Kind::Calls),
            ] {
                let mut body = json!({"messages": [{"role": "user", "content": question}], "thinking": thinking});
                body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
                bodies.push((body, kind));
            }
        }
    }
    bodies
}

fn request(tokenizer: &Tokenizer, grammars: &Grammars, body: &Value, temperature: f32, seed: u64) -> Request {
    let plan = ChatPlan::from_body(body.as_object().unwrap(), ChatDefaults::default()).unwrap();
    let grammar = grammars.compile(&plan.rules).unwrap().unwrap();
    Request {
        prompt: plan.prompt().encode(tokenizer).unwrap(),
        max_tokens: 200,
        min_tokens: 0,
        stop_tokens: vec![tokenizer.markers().eos],
        sampling: Sampling { temperature, seed, top_p: 0.95, ..Sampling::default() },
        priority: (seed % 3) as i32 - 1,
        salt: 0,
        logits: ReturnLogits::No,
        attention: None,
        constraint: Some(longwave_serve::followed(grammar)),
    }
}

/// Whether the answer is what was asked for; one that its thought did not leave is neither.
fn check(tokenizer: &Tokenizer, body: &Value, kind: Kind, answer: &Answer) -> bool {
    assert_eq!(answer.failure, None);
    let plan = ChatPlan::from_body(body.as_object().unwrap(), ChatDefaults::default()).unwrap();
    let mut reply = Reply::new(plan.reply);
    let mut events = Vec::new();
    for &token in &answer.tokens {
        reply.push_token(tokenizer, token, &mut events);
    }
    reply.finish(ReplyEnd::Stop, &mut events);
    if plan.conversation.thinking_mode && !answer.tokens.contains(&tokenizer.markers().end_think) {
        assert_eq!(answer.tokens.len(), 200, "a thought is not an answer");
        return false;
    }
    let (mut content, mut name, mut arguments) = (String::new(), Vec::new(), String::new());
    for event in events {
        match event {
            ReplyEvent::Reasoning(_) => {}
            ReplyEvent::Content(text) => content.push_str(&text),
            ReplyEvent::ToolCallStart { name: called, .. } => name.push(called),
            ReplyEvent::ToolCallArguments { delta, .. } => arguments.push_str(&delta),
        }
    }
    match kind {
        Kind::Json => {
            let value: Value = serde_json::from_str(&content).unwrap_or_else(|e| panic!("{e}: {content:?}"));
            assert!(value.as_object().unwrap().len() == 1 && value["a"].is_i64(), "{value}");
        }
        Kind::Calls => {
            let value: Value = serde_json::from_str(&arguments).unwrap_or_else(|e| panic!("{e}: {arguments:?}"));
            assert!(name.len() == 1 && content.is_empty(), "{name:?} {content:?}");
            if name[0] == "weather" {
                assert!(value["city"].is_string() && (value["unit"] == "c" || value["unit"] == "f"), "{value}");
            } else {
                assert_eq!((name[0].as_str(), value), ("now", json!({})));
            }
        }
    }
    true
}

fn serve<B: Backend>(backend: B, drafts: u32, requests: &[Request]) -> (Vec<Answer>, longwave_engine::Status) {
    let mut engine = Engine::new(backend, EngineOptions { drafts, paranoid: true, ..EngineOptions::default() });
    let answers = proof::serve_slowly(&mut engine, requests, 2, 3);
    (answers, engine.status())
}

#[test]
fn m11_json_and_calls_follow_their_grammar_behind_thoughts_and_with_drafts() {
    let tokenizer = Arc::new(Tokenizer::from_file(&folder()).unwrap());
    let grammars = Grammars::new(tokenizer.clone());
    let (mut requests, mut asked) = (Vec::new(), Vec::new());
    for (i, (body, kind)) in bodies().into_iter().enumerate() {
        for temperature in [0.0, 1.0] {
            let seed = 10 * i as u64 + temperature as u64;
            requests.push(request(&tokenizer, &grammars, &body, temperature, seed));
            asked.push((body.clone(), kind));
        }
    }
    let (plain, _) = serve(backend(0, 1), 0, &requests);
    let whole =
        asked.iter().zip(&plain).filter(|((body, kind), answer)| check(&tokenizer, body, *kind, answer)).count();
    assert!(whole > requests.len() / 2, "{whole} of {} thoughts ended", requests.len());
    let tokens = |answers: &[Answer]| answers.iter().map(|a| a.tokens.clone()).collect::<Vec<_>>();
    // Batches, preemption, the model's own drafts.
    for (drafts, seats) in [(0, 4), (3, 1), (5, 4), (1, 2)] {
        let (answers, status) = serve(backend(drafts, seats), drafts, &requests);
        assert!(tokens(&answers) == tokens(&plain), "{drafts} drafts, {seats} seats");
        assert!(drafts == 0 || status.drafts_accepted > 0, "{status:?}");
    }
    // Right drafts cross from the thought into the grammar and to its end; wrong ones are cut or rejected.
    for (forced, all) in [(Forced::Right, true), (Forced::Wrong, false), (Forced::Random(2), false)] {
        let backend = ForcedDrafts::new(backend(0, 4), forced, 5, &requests, &plain);
        let (answers, status) = serve(backend, 5, &requests);
        assert!(tokens(&answers) == tokens(&plain), "{forced:?}");
        assert_eq!(status.drafts_accepted == status.drafts_proposed, all, "{status:?}");
    }
}

#[test]
fn m11_the_server_gives_what_response_format_and_tool_choice_ask_for() {
    let server = Server::start(&["--num-speculative-tokens", "3"]);
    for (body, kind) in bodies().into_iter().take(4) {
        let mut body = body;
        body["temperature"] = 0.into();
        body["max_tokens"] = 300.into();
        let answer = post(server.address(), "/v1/chat/completions", &body);
        let message = &answer["choices"][0]["message"];
        match kind {
            Kind::Json => {
                let value: Value = serde_json::from_str(message["content"].as_str().unwrap()).unwrap();
                assert!(value["a"].is_i64() && answer["choices"][0]["finish_reason"] == "stop", "{answer}");
            }
            Kind::Calls => {
                assert_eq!(answer["choices"][0]["finish_reason"], "tool_calls", "{answer}");
                assert!(["weather", "now"].contains(&message["tool_calls"][0]["function"]["name"].as_str().unwrap()));
            }
        }
    }
    let refused = json!({"messages": [{"role": "user", "content": "x"}], "guided_json": {"not": {}}});
    let answer = post(server.address(), "/v1/chat/completions", &refused);
    assert_eq!(answer["error"]["param"], "guided_json", "{answer}");
    let choice = json!({"prompt": "x", "guided_choice": ["yes", "no"], "temperature": 0});
    let answer = post(server.address(), "/v1/completions", &choice);
    assert!(["yes", "no"].contains(&answer["choices"][0]["text"].as_str().unwrap()), "{answer}");
}

fn post(address: &str, path: &str, body: &Value) -> Value {
    use std::io::{Read, Write};
    let mut socket = std::net::TcpStream::connect(address).unwrap();
    let body = body.to_string();
    let head = "host: test\r\nconnection: close\r\ncontent-type: application/json";
    write!(socket, "POST {path} HTTP/1.1\r\n{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len()).unwrap();
    let mut text = String::new();
    socket.read_to_string(&mut text).unwrap();
    let (_, body) = text.split_once("\r\n\r\n").unwrap();
    serde_json::from_str(body).unwrap_or_else(|e| panic!("{e}: {text}"))
}
