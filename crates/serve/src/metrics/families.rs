//! Making metric families: registered ones that are counted up, and ones that are filled from a snapshot at a scrape.
//!
//! Names are written as they are exported (`vllm:prompt_tokens_total`). Assumes that each is made once; making one twice
//! or with a bad name is a mistake in this crate and panics at the start of the server.

use prometheus::core::Collector;
use prometheus::proto::{Bucket, Counter, Gauge, Histogram as Filled, LabelPair, Metric, MetricFamily, MetricType};
use prometheus::{Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, Opts, Registry};

const ONCE: &str = "every metric has a valid name and is made once";

/// Registers families.
pub(super) struct Maker<'a>(pub(super) &'a Registry);

impl Maker<'_> {
    fn register<C: Collector + Clone + 'static>(&self, made: prometheus::Result<C>) -> C {
        let made = made.expect(ONCE);
        self.0.register(Box::new(made.clone())).expect(ONCE);
        made
    }

    pub(super) fn counter(&self, name: &str, help: &str) -> IntCounter {
        self.register(IntCounter::new(name, help))
    }

    pub(super) fn counters(&self, name: &str, help: &str, label: &str) -> IntCounterVec {
        self.labelled(name, help, &[label])
    }

    pub(super) fn labelled(&self, name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
        self.register(IntCounterVec::new(Opts::new(name, help), labels))
    }

    pub(super) fn histogram(&self, name: &str, help: &str, edges: &[f64]) -> Histogram {
        self.register(Histogram::with_opts(HistogramOpts::new(name, help).buckets(edges.to_vec())))
    }

    pub(super) fn histograms(&self, name: &str, help: &str, edges: &[f64], labels: &[&str]) -> HistogramVec {
        self.register(HistogramVec::new(HistogramOpts::new(name, help).buckets(edges.to_vec()), labels))
    }
}

/// A label: name and value.
pub(super) type Label<'a> = (&'a str, &'a str);

/// Families from a snapshot, with labels that all of them carry.
pub(super) struct Sheet {
    common: Vec<LabelPair>,
    families: Vec<MetricFamily>,
}

impl Sheet {
    pub(super) fn new(common: &[Label]) -> Sheet {
        Sheet { common: pairs(common), families: Vec::new() }
    }

    pub(super) fn gauge(&mut self, name: &str, help: &str, value: f64) {
        self.gauges(name, help, &[(&[], value)]);
    }

    pub(super) fn gauges(&mut self, name: &str, help: &str, values: &[(&[Label], f64)]) {
        let metrics = values.iter().map(|&(labels, value)| {
            let (mut metric, mut gauge) = (self.metric(labels), Gauge::default());
            gauge.set_value(value);
            metric.set_gauge(gauge);
            metric
        });
        let metrics = metrics.collect();
        self.add(name, help, MetricType::GAUGE, metrics);
    }

    pub(super) fn counter(&mut self, name: &str, help: &str, value: u64) {
        self.counters(name, help, &[(&[], value as f64)]);
    }

    pub(super) fn counters(&mut self, name: &str, help: &str, values: &[(&[Label], f64)]) {
        let metrics = values.iter().map(|&(labels, value)| {
            let (mut metric, mut counter) = (self.metric(labels), Counter::default());
            counter.set_value(value);
            metric.set_counter(counter);
            metric
        });
        let metrics = metrics.collect();
        self.add(name, help, MetricType::COUNTER, metrics);
    }

    /// `counts` are those between the edges, the last one above all of them.
    pub(super) fn histogram(&mut self, name: &str, help: &str, edges: &[u64], counts: &[u64], sum: f64) {
        let mut total = 0;
        let mut bucket = |(&edge, &count): (&u64, &u64)| {
            total += count;
            let mut bucket = Bucket::default();
            bucket.set_upper_bound(edge as f64);
            bucket.set_cumulative_count(total);
            bucket
        };
        let mut filled = Filled::default();
        filled.set_bucket(edges.iter().zip(counts).map(&mut bucket).collect());
        filled.set_sample_count(counts.iter().sum());
        filled.set_sample_sum(sum);
        let mut metric = self.metric(&[]);
        metric.set_histogram(filled);
        self.add(name, help, MetricType::HISTOGRAM, vec![metric]);
    }

    pub(super) fn families(self) -> Vec<MetricFamily> {
        self.families
    }

    fn metric(&self, labels: &[Label]) -> Metric {
        Metric::from_label(self.common.iter().cloned().chain(pairs(labels)).collect())
    }

    fn add(&mut self, name: &str, help: &str, kind: MetricType, metrics: Vec<Metric>) {
        let mut family = MetricFamily::default();
        family.set_name(name.to_owned());
        family.set_help(help.to_owned());
        family.set_field_type(kind);
        family.set_metric(metrics);
        self.families.push(family);
    }
}

fn pairs(labels: &[Label]) -> Vec<LabelPair> {
    let pair = |&(name, value): &Label| {
        let mut pair = LabelPair::default();
        pair.set_name(name.to_owned());
        pair.set_value(value.to_owned());
        pair
    };
    labels.iter().map(pair).collect()
}
