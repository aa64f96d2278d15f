//! What one request did, from its arrival to its last event.
//!
//! Fed on the engine thread, where events happen: a slow client does not change what is measured. A token event costs a
//! clock reading and a few atomic additions; what happens once per request takes a short lock as well. Assumes the order of events that the engine keeps.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use longwave_engine::report::PrefixReport;
use longwave_engine::request::{Event, FinishReason, Request};
use prometheus::{Histogram, IntCounter, IntCounterVec};

use super::buckets;
use super::families::Maker;
use super::recent::{Latency, Recent};

/// Counters and histograms over requests.
pub(super) struct RequestFamilies {
    /// The same of the last minute.
    pub(super) recent: Recent,
    prompt_tokens: IntCounter,
    cached_tokens: IntCounter,
    computed_source: IntCounter,
    local_source: IntCounter,
    tier_source: IntCounter,
    local_cached: IntCounter,
    tier_cached: IntCounter,
    generation_tokens: IntCounter,
    stopped: IntCounter,
    length: IntCounter,
    aborted: IntCounter,
    failed: IntCounter,
    prefix_ends: IntCounterVec,
    first_token_s: Histogram,
    between_tokens_s: Histogram,
    per_token_s: Histogram,
    whole_s: Histogram,
    queue_s: Histogram,
    inference_s: Histogram,
    prefill_s: Histogram,
    decode_s: Histogram,
    prompt_size: Histogram,
    output_size: Histogram,
    most_output_size: Histogram,
    max_tokens: Histogram,
    computed_size: Histogram,
}

impl RequestFamilies {
    /// `context` bounds the buckets of token counts.
    pub(super) fn new(maker: &Maker, context: u32) -> RequestFamilies {
        let by_source =
            maker.counters("vllm:prompt_tokens_by_source_total", "Prompt tokens by where they came from.", "source");
        let cached_by_source = maker.counters(
            "vllm:prompt_tokens_cached_by_source_total",
            "Reused prompt tokens by where they came from.",
            "source",
        );
        let finished =
            maker.counters("vllm:request_success_total", "Requests that ended, by reason.", "finished_reason");
        let (latency, sizes) = (&buckets::LATENCY_S, &buckets::tokens(context)[..]);
        // The series that dashboards expect, from the start; nothing here ends for repeating itself.
        finished.with_label_values(&["repetition"]);
        RequestFamilies {
            recent: Recent::default(),
            prompt_tokens: maker.counter("vllm:prompt_tokens_total", "Prompt tokens, reused ones included."),
            cached_tokens: maker.counter("vllm:prompt_tokens_cached_total", "Prompt tokens that were reused."),
            computed_source: by_source.with_label_values(&["local_compute"]),
            local_source: by_source.with_label_values(&["local_cache_hit"]),
            tier_source: by_source.with_label_values(&["external_kv_transfer"]),
            local_cached: cached_by_source.with_label_values(&["local_cache_hit"]),
            tier_cached: cached_by_source.with_label_values(&["external_kv_transfer"]),
            generation_tokens: maker.counter("vllm:generation_tokens_total", "Tokens generated."),
            stopped: finished.with_label_values(&["stop"]),
            length: finished.with_label_values(&["length"]),
            aborted: finished.with_label_values(&["abort"]),
            failed: finished.with_label_values(&["error"]),
            prefix_ends: maker.counters(
                "longwave:prefix_end_total",
                "Requests by what ended the reuse of their prompt.",
                "reason",
            ),
            first_token_s: maker.histogram(
                "vllm:time_to_first_token_seconds",
                "From arrival to the first token.",
                &buckets::FIRST_TOKEN_S,
            ),
            between_tokens_s: maker.histogram(
                "vllm:inter_token_latency_seconds",
                "Between two deliveries of tokens to one request.",
                &buckets::TOKEN_S,
            ),
            per_token_s: maker.histogram(
                "vllm:request_time_per_output_token_seconds",
                "Mean time per token behind the first, one value per request.",
                &buckets::TOKEN_S,
            ),
            whole_s: maker.histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", latency),
            queue_s: maker.histogram("vllm:request_queue_time_seconds", "From arrival to a seat.", latency),
            inference_s: maker.histogram(
                "vllm:request_inference_time_seconds",
                "From a seat to the last token.",
                latency,
            ),
            prefill_s: maker.histogram("vllm:request_prefill_time_seconds", "From a seat to the first token.", latency),
            decode_s: maker.histogram("vllm:request_decode_time_seconds", "From the first to the last token.", latency),
            prompt_size: maker.histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", sizes),
            output_size: maker.histogram("vllm:request_generation_tokens", "Tokens generated for a request.", sizes),
            most_output_size: maker.histogram(
                "vllm:request_max_num_generation_tokens",
                "The same; each answer of several to one prompt is a request here.",
                sizes,
            ),
            max_tokens: maker.histogram("vllm:request_params_max_tokens", "Most tokens asked for.", sizes),
            computed_size: maker.histogram(
                "vllm:request_prefill_kv_computed_tokens",
                "Prompt tokens of a request that were not reused.",
                sizes,
            ),
        }
    }
}

#[cfg(test)]
impl RequestFamilies {
    /// Makes every family appear.
    pub(super) fn touch(&self) {
        self.prefix_ends.with_label_values(&["off"]);
    }
}

/// One request.
pub(crate) struct RequestWatch {
    families: Arc<RequestFamilies>,
    arrived: Instant,
    scheduled: Option<Instant>,
    first: Option<Instant>,
    last: Option<Instant>,
    prompt_tokens: u32,
    max_tokens: u32,
    report: PrefixReport,
    /// Set when the server ended it because the answer was complete.
    complete: Arc<AtomicBool>,
}

impl RequestWatch {
    pub(super) fn new(families: Arc<RequestFamilies>, request: &Request) -> RequestWatch {
        let (prompt_tokens, max_tokens) = (request.prompt.len() as u32, request.max_tokens);
        let (report, complete) = (PrefixReport::default(), Arc::default());
        let arrived = Instant::now();
        RequestWatch {
            families,
            arrived,
            scheduled: None,
            first: None,
            last: None,
            prompt_tokens,
            max_tokens,
            report,
            complete,
        }
    }

    /// To be set before a request is cancelled whose answer is complete (a stop text): its end is then no abort.
    pub(crate) fn complete(&self) -> Arc<AtomicBool> {
        self.complete.clone()
    }

    /// Takes an event in.
    pub(crate) fn see(&mut self, event: &Event) {
        match event {
            Event::Scheduled { prefix, .. } => {
                let now = Instant::now();
                self.scheduled = Some(now);
                self.report = *prefix;
                let queue = now - self.arrived;
                self.families.queue_s.observe(queue.as_secs_f64());
                self.families.recent.add(Latency::Queue, now, queue);
                self.families.prefix_ends.with_label_values(&[prefix.ended_by.name()]).inc();
            }
            Event::Tokens { tokens, .. } => self.tokens(tokens.len() as u64, Instant::now()),
            Event::Logits { .. } | Event::Attention(_) => {}
            Event::Finished { reason, output_tokens, .. } => self.finished(reason, *output_tokens, Instant::now()),
        }
    }

    fn tokens(&mut self, count: u64, now: Instant) {
        let families = &self.families;
        match self.last {
            Some(last) => families.between_tokens_s.observe((now - last).as_secs_f64()),
            None => {
                self.first = Some(now);
                families.first_token_s.observe((now - self.arrived).as_secs_f64());
                families.recent.add(Latency::FirstToken, now, now - self.arrived);
                let cached = u64::from(self.report.cached_tokens);
                let tiers = (u64::from(self.report.host_tokens) + u64::from(self.report.disk_tokens)).min(cached);
                let prompt = u64::from(self.prompt_tokens);
                families.prompt_tokens.inc_by(prompt);
                families.cached_tokens.inc_by(cached);
                families.computed_source.inc_by(prompt.saturating_sub(cached));
                families.local_source.inc_by(cached - tiers);
                families.tier_source.inc_by(tiers);
                families.local_cached.inc_by(cached - tiers);
                families.tier_cached.inc_by(tiers);
            }
        }
        self.last = Some(now);
        families.generation_tokens.inc_by(count);
    }

    fn finished(&mut self, reason: &FinishReason, output_tokens: u32, now: Instant) {
        let families = &self.families;
        match reason {
            FinishReason::Stop(_) | FinishReason::Complete => families.stopped.inc(),
            FinishReason::Length => families.length.inc(),
            FinishReason::Cancelled if self.complete.load(Ordering::Relaxed) => families.stopped.inc(),
            FinishReason::Cancelled => families.aborted.inc(),
            // Never began: an error of the request, not of the server, and no time to measure.
            FinishReason::Refused(_) => return,
            FinishReason::Failed(_) | FinishReason::Stalled { .. } | FinishReason::Constraint(_) => {
                families.failed.inc()
            }
        }
        families.whole_s.observe((now - self.arrived).as_secs_f64());
        families.prompt_size.observe(f64::from(self.prompt_tokens));
        families.output_size.observe(f64::from(output_tokens));
        families.most_output_size.observe(f64::from(output_tokens));
        families.max_tokens.observe(f64::from(self.max_tokens));
        let (Some(scheduled), Some(first), Some(last)) = (self.scheduled, self.first, self.last) else { return };
        let (prefill, decode) = (first - scheduled, last - first);
        families.prefill_s.observe(prefill.as_secs_f64());
        families.decode_s.observe(decode.as_secs_f64());
        families.inference_s.observe((prefill + decode).as_secs_f64());
        families.computed_size.observe(f64::from(self.prompt_tokens.saturating_sub(self.report.cached_tokens)));
        if output_tokens > 1 {
            families.per_token_s.observe(decode.as_secs_f64() / f64::from(output_tokens - 1));
            families.recent.add(Latency::PerToken, now, decode / (output_tokens - 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prometheus::Registry;

    fn request(prompt: usize) -> Request {
        Request::greedy(vec![1; prompt], 1000)
    }

    #[test]
    fn nothing_is_lost_when_many_threads_count() {
        const TOKENS: u64 = 50_000;
        let registry = Registry::new();
        let families = Arc::new(RequestFamilies::new(&Maker(&registry), 4096));
        let started = Instant::now();
        std::thread::scope(|threads| {
            for _ in 0..4 {
                let mut watch = RequestWatch::new(families.clone(), &request(10));
                threads.spawn(move || {
                    watch.see(&Event::Scheduled { cached_tokens: 0, prefix: PrefixReport::default() });
                    for _ in 0..TOKENS {
                        watch.see(&Event::Tokens { tokens: vec![7], logprobs: Vec::new() });
                    }
                    let reason = FinishReason::Length;
                    watch.see(&Event::Finished { reason, prompt_tokens: 10, cached_tokens: 0, output_tokens: 1 });
                });
            }
        });
        println!("{:?} per token event, four threads at once", started.elapsed() / (4 * TOKENS as u32));
        assert_eq!(families.generation_tokens.get(), 4 * TOKENS);
        assert_eq!(families.between_tokens_s.get_sample_count(), 4 * (TOKENS - 1));
        assert_eq!((families.prompt_tokens.get(), families.length.get()), (40, 4));
    }

    #[test]
    fn a_prompt_is_split_by_where_its_tokens_came_from() {
        let registry = Registry::new();
        let families = Arc::new(RequestFamilies::new(&Maker(&registry), 4096));
        let mut watch = RequestWatch::new(families.clone(), &request(1000));
        let prefix = PrefixReport { cached_tokens: 768, host_tokens: 256, disk_tokens: 256, ..PrefixReport::default() };
        watch.see(&Event::Scheduled { cached_tokens: 768, prefix });
        watch.see(&Event::Tokens { tokens: vec![7, 8], logprobs: Vec::new() });
        let counts =
            [&families.computed_source, &families.local_source, &families.tier_source, &families.cached_tokens];
        assert_eq!(counts.map(IntCounter::get), [232, 256, 512, 768]);
        assert_eq!(families.generation_tokens.get(), 2);
    }

    #[test]
    fn a_refused_request_is_no_served_one() {
        let registry = Registry::new();
        let families = Arc::new(RequestFamilies::new(&Maker(&registry), 4096));
        let mut watch = RequestWatch::new(families.clone(), &request(1));
        let reason = FinishReason::Refused(longwave_engine::request::Refusal::EmptyPrompt);
        watch.see(&Event::Finished { reason, prompt_tokens: 1, cached_tokens: 0, output_tokens: 0 });
        assert_eq!(families.whole_s.get_sample_count(), 0);
        let reason = FinishReason::Failed("x".into());
        watch.see(&Event::Finished { reason, prompt_tokens: 1, cached_tokens: 0, output_tokens: 0 });
        assert_eq!((families.failed.get(), families.whole_s.get_sample_count()), (1, 1));
    }
}
