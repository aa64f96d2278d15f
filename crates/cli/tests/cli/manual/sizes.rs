//! Numbers of `docs/deployment.md` and `docs/attention.md`: weights of every GPU as the loader counts them, the requests that
//! fit beside them, and what was measured.

use longwave_cuda::loader;
use longwave_cuda::split::Share;
use longwave_model::memory::Memory;
use longwave_model::{CacheFormats, IndexFormat, MainFormat, ModelConfig, presets};
use serde_json::Value;

use super::page;

const GIB: f64 = (1u64 << 30) as f64;
/// Memory of an H200 that a program can take, and what the page keeps of it: a reserve of 1 GiB for the driver, 2 for scratch
/// and block tables.
const GPU_GIB: f64 = 139.0;
const KEPT_GIB: f64 = 3.0;

/// GiB of weights on the GPU of `ranks` that has most.
fn weights_gib(config: &ModelConfig, ranks: usize, drafts: bool) -> f64 {
    let most = (0..ranks).map(|rank| loader::bytes(config, Share { rank, ranks }, drafts)).max();
    most.unwrap() as f64 / GIB
}

/// Requests of `context` tokens that a cache of so many GiB admits: blocks for life, and two sets of windows and state.
fn requests(config: &ModelConfig, cache_gib: f64, context: u32) -> u64 {
    let formats = CacheFormats { main: MainFormat::Fp8, index: IndexFormat::Fp4 };
    let allocated = Memory::of(config, formats, context).allocated;
    (cache_gib * GIB) as u64 / (allocated.long_lived_bytes + 2 * allocated.sliding_bytes)
}

fn row(name: &str, config: &ModelConfig, ranks: usize) -> String {
    let [plain, drafts] = [false, true].map(|drafts| weights_gib(config, ranks, drafts));
    let cache = GPU_GIB - KEPT_GIB - plain;
    let fits = match cache > 0.0 {
        true => {
            let [short, long] = [131_072, 1_048_576].map(|context| requests(config, cache, context));
            format!("{cache:.1} | {short} | {long}")
        }
        false => "does not fit | | ".to_owned(),
    };
    format!("| {name} | {ranks} | {plain:.1} | {drafts:.1} | {fits} |")
}

#[test]
fn the_sizes_of_deployments_are_what_the_loader_and_the_calculator_count() {
    let text = page("docs/deployment.md").prose;
    let (flash, pro) = (presets::flash(), presets::pro());
    let all = [("Flash", &flash, 1), ("Flash", &flash, 2), ("Flash", &flash, 4), ("Flash", &flash, 8)];
    let all = all.into_iter().chain([("Pro", &pro, 4), ("Pro", &pro, 8)]);
    let rows: Vec<String> = all.map(|(name, config, ranks)| row(name, config, ranks)).collect();
    let missing: Vec<&String> = rows.iter().filter(|row| !text.contains(row.as_str())).collect();
    assert!(missing.is_empty(), "docs/deployment.md lacks rows; all of them are\n{}", rows.join("\n"));
}

fn measured(name: &str) -> Value {
    let text = std::fs::read_to_string(super::root().join("bench/results").join(name)).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// Two GPUs said what their weights are when they were opened.
#[test]
fn counted_weights_are_those_that_were_measured() {
    let flash = &measured("h200_ranks_2026-11-30.json")["flash"];
    for (measured, drafts) in [(flash, false), (&flash["with_3_drafts"], true)] {
        // With drafts factors of experts' rows came after the measurement.
        let since = measured["row_factors_since_gib"].as_f64().unwrap_or(0.0);
        let measured = measured["weights_gib_per_gpu"].as_f64().unwrap() + since;
        let counted = weights_gib(&presets::flash(), 2, drafts);
        assert!((measured - counted).abs() < 0.006, "measured {measured}, counted {counted}");
    }
}

#[test]
fn what_is_called_measured_stands_in_the_results() {
    let [steps, ranks] = ["h200_steps_2026-11-30.json", "h200_ranks_2026-11-30.json"].map(measured);
    let ms = |run: &Value, batch: u64, context: u64| {
        let all = run["steps"].as_array().unwrap().iter();
        let mut of = all.filter(|step| step["batch"] == batch && step["context"] == context);
        of.next().unwrap_or_else(|| panic!("no step of {batch} x {context}"))["ms"].as_f64().unwrap()
    };
    let thousands = |run: &Value, name: &str| {
        let number = run["prefill_tokens_per_s"][name].as_u64().unwrap();
        format!("{},{:03} ", number / 1000, number % 1000)
    };
    let (one, two) = (&steps["layers_36"], &ranks["flash"]);
    let number = |run: &Value, name: &str| run[name].as_f64().unwrap();
    let deployment = [
        format!("{:.1} GiB of them", number(one, "weights_gib")),
        format!("{:.1} ms a token behind 8K", ms(one, 1, 8192)),
        format!("{:.1} behind 128K, {:.1} behind a million", ms(one, 1, 131_072), ms(one, 1, 1_048_320)),
        format!("{}tokens/s of an 8K prompt", thousands(one, "1 x 8192")),
        format!("{} GiB of weights and {} of scratch on each", two["weights_gib_per_gpu"], two["scratch_gib_per_gpu"]),
        format!("{} GiB for Flash on one GPU, {} on each of two", one["scratch_gib"], two["scratch_gib_per_gpu"]),
        format!("open in {} s", two["open_s"]),
        format!("{} ms a token behind 1,000 tokens", ms(two, 1, 1000)),
        format!("{} behind 8K, {} behind 128K", ms(two, 1, 8192), ms(two, 1, 131_072)),
        format!("8 requests {:.1} ms and 32 requests {:.1} ms a step", ms(two, 8, 1000), ms(two, 32, 1000)),
        format!("{}tokens/s of an 8K prompt", thousands(two, "1 x 8192")),
        format!("{}of one of 128K", thousands(two, "1 x 131072")),
    ];
    let attention = [format!(
        "{:.1} ms a token behind 8K tokens, {:.1} behind 128K and {:.1} behind a million",
        ms(one, 1, 8192),
        ms(one, 1, 131_072),
        ms(one, 1, 1_048_320)
    )];
    let readme = [format!("{:.1} ms a token for one request", ms(two, 1, 1000))];
    let mut missing = Vec::new();
    let pages = [("docs/deployment.md", &deployment[..]), ("docs/attention.md", &attention), ("README.md", &readme)];
    for (path, wanted) in pages {
        let prose = page(path).prose.split_whitespace().collect::<Vec<_>>().join(" ");
        missing.extend(wanted.iter().filter(|text| !prose.contains(*text)).map(|text| format!("{path}: {text}")));
    }
    assert!(missing.is_empty(), "the results say otherwise:\n{}", missing.join("\n"));
}
