//! Penalties under the engine: tokens follow the definition, whatever drafts, chunks and preemption do.

use longwave_engine::proof;
use longwave_engine::request::Request;
use longwave_engine::step::{ReturnLogits, Sampling, Token};
use longwave_engine::{Engine, EngineOptions};

use crate::invariance::prompt;
use crate::served::{drafting, request};

fn penalised(sampling: Sampling) -> Request {
    let sampling = Sampling { seed: 3, ..sampling };
    Request { logits: ReturnLogits::Sampled, sampling, ..request(prompt(300, 5), 60, 0) }
}

/// The greedy token of each row of logits by the definition in vLLM's documentation.
fn by_definition(r: &Request, logits: &[f32], tokens: &[Token]) -> Vec<Token> {
    let vocab = logits.len() / tokens.len();
    let choose = |i: usize| {
        let mut row = logits[i * vocab..(i + 1) * vocab].to_vec();
        for (t, logit) in row.iter_mut().enumerate() {
            let times = tokens[..i].iter().filter(|&&x| x as usize == t).count() as f32;
            if times > 0.0 || r.prompt.contains(&(t as Token)) {
                let by = r.sampling.repetition_penalty;
                *logit = if *logit > 0.0 { *logit / by } else { *logit * by };
            }
            let present = if times > 0.0 { r.sampling.presence_penalty } else { 0.0 };
            *logit -= r.sampling.frequency_penalty * times + present;
        }
        (0..vocab).max_by(|&a, &b| row[a].total_cmp(&row[b]).then(b.cmp(&a))).unwrap() as Token
    };
    (0..tokens.len()).map(choose).collect()
}

#[test]
fn greedy_tokens_with_penalties_follow_the_definition() {
    let base = Sampling::default();
    let mut seen = Vec::new();
    for sampling in [
        base.clone(),
        Sampling { presence_penalty: 1.5, ..base.clone() },
        Sampling { frequency_penalty: 0.7, ..base.clone() },
        Sampling { repetition_penalty: 1.3, ..base },
    ] {
        let r = Request { stop_tokens: vec![], ..penalised(sampling) };
        let mut answers = Vec::new();
        for (drafts, chunk) in [(0, None), (3, Some(64)), (7, None)] {
            let options = EngineOptions { drafts, max_chunk_tokens: chunk, paranoid: true, ..EngineOptions::default() };
            let mut engine = Engine::new(drafting(512, 1, 64 << 20, drafts), options);
            // The second time it starts behind a cached prefix: the history is told, not computed.
            answers.extend((0..2).map(|_| proof::serve(&mut engine, std::slice::from_ref(&r), 1).remove(0)));
        }
        let plain = &answers[0];
        assert_eq!(plain.tokens, by_definition(&r, &plain.logits, &plain.tokens));
        assert!(
            answers.iter().all(|a| proof::compare(std::slice::from_ref(plain), std::slice::from_ref(a)).is_equal())
        );
        seen.push(plain.tokens.clone());
    }
    seen.sort();
    seen.dedup();
    assert_eq!(seen.len(), 4, "each penalty changes the text");
}

/// A request that forbids every token fails alone; it once took the engine with it.
#[test]
fn a_request_that_forbids_every_token_fails_alone() {
    let mut engine =
        Engine::new(drafting(512, 2, 64 << 20, 0), EngineOptions { paranoid: true, ..EngineOptions::default() });
    let all: Vec<Token> = (0..engine.limits().vocab).collect();
    let sampling = Sampling { temperature: 1.0, top_p: 0.5, ..Sampling::default() };
    let hopeless = Request { stop_tokens: all, min_tokens: 2, ..penalised(sampling) };
    let greedy = Request { sampling: Sampling::default(), ..hopeless.clone() };
    let answers = proof::serve(&mut engine, &[hopeless, request(prompt(40, 1), 5, 0), greedy], 3);
    let failed = |i: usize| answers[i].failure.as_ref().is_some_and(|f| f.contains("every token is forbidden"));
    assert!(failed(0) && failed(2), "{:?}", [&answers[0].failure, &answers[2].failure]);
    assert!(answers[1].failure.is_none() && !answers[1].tokens.is_empty());
    assert!(engine.stopped().is_none());
}
