//! Timers of operators: names that floors know, the same answers, nothing when they are off.

use longwave_cpu::backend::{CpuBackend, CpuOptions};
use longwave_cpu::forward::Model;
use longwave_cpu::numerics::Profile;
use longwave_engine::proof;
use longwave_engine::request::Request;
use longwave_engine::step::Backend;
use longwave_engine::{Engine, EngineOptions};
use longwave_model::floors::{self, ALL_EXPERTS, StepShape};

use crate::rig::{CACHE, tiny};

/// Operators that move too little to have a floor.
const WITHOUT: [&str; 5] = ["angles and embedding", "router choice", "head mixing", "sampling", "sampling of drafts"];

#[test]
fn timers_name_the_operators_that_have_floors_and_change_no_answer() {
    let config = tiny().config;
    let options = CpuOptions { seats: 2, step_tokens: 512, context: 2048, cache_bytes: 64 << 20, drafts: 1 };
    let backend = CpuBackend::new(Model::new(&tiny(), Profile::Serving, CACHE), options).unwrap();
    let mut engine = Engine::new(backend, EngineOptions { prefix_cache: false, drafts: 1, ..EngineOptions::default() });
    // Long enough for the indexer to choose.
    let prompt = |i: u32| (0..4 * config.index_topk as u32 + 300).map(|p| 16 + (p * 7919 + i) % 2000).collect();
    let requests = [0, 1].map(|i| Request::greedy(prompt(i), 6));
    let plain = proof::serve(&mut engine, &requests, 2);
    assert_eq!(engine.backend_mut().time_operators(true).unwrap(), []);
    let timed = proof::serve(&mut engine, &requests, 2);
    let times = engine.backend_mut().time_operators(false).unwrap();
    assert!(proof::compare(&plain, &timed).is_equal());
    assert_eq!(engine.backend_mut().time_operators(false).unwrap(), []);

    let shape = StepShape { sequences: 2, rows: 1, context: 1024, logits: 2, ranks: 1 };
    let mut expected: Vec<&str> = floors::step(&config, CACHE, &shape).iter().map(|work| work.name).collect();
    expected.retain(|name| !["routed experts", "shared expert"].contains(name));
    expected.push(ALL_EXPERTS);
    for name in &expected {
        assert!(times.iter().any(|time| time.name == *name && time.calls > 0), "{name} was not timed: {times:?}");
    }
    for time in &times {
        let known = expected.contains(&time.name) || WITHOUT.contains(&time.name) || time.name == "MTP input";
        assert!(known && time.us.is_finite() && time.us >= 0.0, "{time:?}");
    }
    assert!(times.windows(2).all(|pair| pair[0].us >= pair[1].us));
}
