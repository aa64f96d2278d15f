//! The ways of serving that `longwave prove` compares with plain serving, and what each must have made happen.
//!
//! Plain data. A way whose requirement did not happen proves nothing and is reported as not exercised.

use longwave_cpu::simd::Level;
use longwave_engine::Status;
use longwave_engine::forced::Forced;

/// What a way must have made happen.
pub struct Must {
    /// What is missing when it did not, after "no".
    pub what: &'static str,
    /// Whether it did, from the status before and after the requests that are compared.
    pub happened: fn(&Status, &Status) -> bool,
}

/// One way of serving the set.
pub struct Way {
    /// As printed.
    pub name: &'static str,
    /// Tokens of a step.
    pub step_tokens: u32,
    /// Sequences at once; 0 means one after the other.
    pub seats: u32,
    /// Largest chunk of a prompt.
    pub chunk: Option<u32>,
    /// Draft tokens per sequence and step.
    pub drafts: u32,
    /// Which drafts; `None` leaves them to the model's drafter.
    pub forced: Option<Forced>,
    /// Serve the set twice and compare the second time, which finds prefixes of the first.
    pub again: bool,
    /// Before that, forget all checkpoints, so that windows are rebuilt. The prompts begin with one long text.
    pub forget: bool,
    /// A cache for the longest request and hardly more, in place of one for everything.
    pub small_cache: bool,
    /// Each request is more urgent than those before it, and finds them at work.
    pub urgent: bool,
    /// Host memory for the state of requests that lose their seats, bytes.
    pub spill_bytes: u64,
    /// What must have happened, all of it.
    pub must: &'static [Must],
    /// Where evicted prefixes go; then the second serving must find some there.
    pub tier: Tier,
    /// Instruction set.
    pub level: Level,
    /// Threads; 0 means all.
    pub threads: usize,
}

/// A tier below the cache.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Tier {
    /// None.
    None,
    /// Host memory, below a cache that is too small for the set.
    Host,
    /// A directory, and another engine over it for the second serving.
    Disk,
}

/// One request after the other, with room for everything.
pub const PLAIN: Way = Way {
    name: "plain",
    step_tokens: 4096,
    seats: 0,
    chunk: None,
    drafts: 0,
    forced: None,
    again: false,
    forget: false,
    small_cache: false,
    urgent: false,
    spill_bytes: 1 << 30,
    must: &[],
    tier: Tier::None,
    level: Level::Avx512,
    threads: 0,
};

const HIT: Must = Must { what: "prefix hit", happened: |a, b| b.prefix.hits > a.prefix.hits };
const REPLAY: Must = Must { what: "window replay", happened: |a, b| b.prefix.replays > a.prefix.replays };
const EVICTED: Must = Must {
    what: "eviction",
    happened: |a, b| {
        let evicted = |s: &Status| s.prefix.evicted_nodes + s.prefix.evicted_checkpoints;
        evicted(b) > evicted(a)
    },
};
const RESUMED: Must = Must { what: "resumed request", happened: |a, b| b.resumed > a.resumed };
const PREEMPTED: Must = Must { what: "preempted request", happened: |a, b| b.preempted > a.preempted };
const FROM_HOST: Must =
    Must { what: "token from host memory", happened: |a, b| b.prefix.host_tokens > a.prefix.host_tokens };
const FROM_DISK: Must = Must { what: "token from disk", happened: |a, b| b.prefix.disk_tokens > a.prefix.disk_tokens };
const PROPOSED: Must = Must { what: "draft", happened: |a, b| b.drafts_proposed > a.drafts_proposed };
const ACCEPTED: Must = Must { what: "accepted draft", happened: |a, b| b.drafts_accepted > a.drafts_accepted };
const NONE_REJECTED: Must = Must {
    what: "drafts that are all accepted",
    happened: |a, b| b.drafts_accepted - a.drafts_accepted == b.drafts_proposed - a.drafts_proposed,
};
const NONE_ACCEPTED: Must =
    Must { what: "drafts that are all rejected", happened: |a, b| b.drafts_accepted == a.drafts_accepted };

/// Every way but the plain one.
pub fn ways() -> Vec<Way> {
    let chunks = |name, n| Way { name, chunk: Some(n), ..PLAIN };
    let batch = |name, step_tokens, seats| Way { name, step_tokens, seats, ..PLAIN };
    let forced = |name, forced, drafts, must| Way { forced: Some(forced), drafts, must, ..batch(name, 64, 4) };
    vec![
        chunks("chunks of 1", 1),
        chunks("chunks of 3", 3),
        chunks("chunks of 64", 64),
        chunks("chunks of 129", 129),
        batch("batch of 4, 33 tokens a step", 33, 4),
        batch("batch of all, 256 tokens a step", 256, 64),
        Way { again: true, must: &[HIT], ..batch("reused prefixes", 256, 64) },
        Way { again: true, drafts: 3, must: &[HIT, ACCEPTED], ..batch("reused prefixes, drafts of 3", 64, 8) },
        Way { again: true, small_cache: true, must: &[EVICTED], ..batch("reused prefixes, constant eviction", 128, 4) },
        Way { urgent: true, must: &[RESUMED], ..batch("preemption, state kept", 64, 1) },
        Way {
            urgent: true,
            spill_bytes: 0,
            drafts: 1,
            must: &[PREEMPTED, ACCEPTED],
            ..batch("preemption, state lost, drafts of 1", 64, 2)
        },
        Way { must: &[REPLAY], again: true, forget: true, ..batch("evicted checkpoints, window replay", 256, 4) },
        Way {
            must: &[REPLAY, ACCEPTED],
            again: true,
            forget: true,
            drafts: 3,
            ..batch("the same, drafts of 3", 100, 4)
        },
        Way { again: true, tier: Tier::Host, must: &[FROM_HOST], ..batch("tier round trip, host", 256, 1) },
        Way { again: true, tier: Tier::Disk, must: &[FROM_DISK], ..batch("tier round trip, disk and restart", 256, 8) },
        Way { drafts: 1, must: &[ACCEPTED], ..batch("drafts of 1", 512, 64) },
        Way { drafts: 3, must: &[ACCEPTED], ..batch("drafts of 3, 33 tokens a step", 33, 4) },
        Way { drafts: 7, must: &[ACCEPTED], ..PLAIN.named("drafts of 7, one by one") },
        forced("right drafts of 3", Forced::Right, 3, &[ACCEPTED, NONE_REJECTED]),
        forced("wrong drafts of 3", Forced::Wrong, 3, &[PROPOSED, NONE_ACCEPTED]),
        forced("random drafts of 5", Forced::Random(5), 5, &[PROPOSED]),
        Way { threads: 1, ..batch("batch of all, one thread", 512, 64) },
        Way { level: Level::Avx2, ..batch("batch of all, AVX2", 512, 64) },
    ]
}

impl Way {
    fn named(self, name: &'static str) -> Way {
        Way { name, ..self }
    }

    /// Whether the model must have a drafter for it.
    pub fn needs_drafter(&self) -> bool {
        self.drafts > 0 && self.forced.is_none()
    }

    /// Whether it is about threads or instruction sets.
    pub fn is_of_cpu(&self) -> bool {
        self.threads > 0 || self.level != PLAIN.level
    }
}
