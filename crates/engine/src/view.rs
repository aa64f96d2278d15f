//! What an engine holds at one moment, unit by unit and request by request, for people who look.
//!
//! Made on the engine thread between two steps, and only when somebody asked. Counts and places, never tokens: a looker
//! learns nothing of texts. Costs time in proportion to the units, so it is not for every step.

use std::sync::Arc;

use longwave_model::CacheLayout;
use longwave_model::geometry::Bucket;

use crate::engine::Engine;
use crate::operators::OperatorTime;
use crate::pool::{Hold, UnitState, Units};
use crate::prefix::{Node, NodeId, PrefixCache};
use crate::sequence::Sequence;
use crate::status::Status;
use crate::step::{Backend, BlockId};

/// Waiting requests that are listed; the status says how many there are.
const WAITING_SHOWN: usize = 64;
/// Runs of blocks of the prefix tree that are listed, latest use first.
const RUNS_SHOWN: usize = 512;

/// What a unit is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum UnitUse {
    /// Nobody has it.
    Free = 0,
    /// Entries of one running request.
    LongLived = 1,
    /// Window or compressor state of one running request.
    Window = 2,
    /// Window or compressor state that the prefix cache keeps.
    Checkpoint = 3,
    /// Entries that only the prefix cache keeps.
    Cached = 4,
    /// Several running requests read it.
    Shared = 5,
}

/// Where a request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestPhase {
    /// No seat yet, or none any more.
    Waiting,
    /// Windows are rebuilt behind cached blocks.
    Replay,
    /// Its prompt is computed.
    Prefill,
    /// Its answer is generated.
    Decode,
}

impl RequestPhase {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            RequestPhase::Waiting => "waiting",
            RequestPhase::Replay => "replay",
            RequestPhase::Prefill => "prefill",
            RequestPhase::Decode => "decode",
        }
    }
}

/// A request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestView {
    /// Its id.
    pub id: u64,
    /// Where it is.
    pub phase: RequestPhase,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// Of them, reused from the cache.
    pub cached_tokens: u32,
    /// Positions with rows in the cache.
    pub committed: u32,
    /// Tokens generated.
    pub output_tokens: u32,
    /// Most tokens that it may generate.
    pub max_outputs: u32,
    /// Units that its tables map: large, middle, small.
    pub units: Units,
    /// Lower runs earlier.
    pub priority: i32,
}

/// Blocks of the prefix tree that follow each other without a branch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunView {
    /// Tells runs apart.
    pub id: u32,
    /// The run that it goes on from.
    pub parent: Option<u32>,
    /// Blocks before its first one.
    pub depth: u32,
    /// Blocks in it.
    pub blocks: u32,
    /// Of them, those that have a checkpoint.
    pub checkpoints: u32,
    /// Requests that started at one of these.
    pub uses: u32,
    /// Whether a running request reads its last block.
    pub held: bool,
    /// Steps since its last use.
    pub idle_steps: u64,
}

/// A step that somebody watched.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepView {
    /// Its number.
    pub number: u64,
    /// From planning to commit, us.
    pub wall_us: u32,
    /// Of it, in the backend, us; the rest is admission, planning, commit and copies to the tiers.
    pub run_us: u32,
    /// Tokens of prompts.
    pub prompt_tokens: u32,
    /// Tokens of answers.
    pub output_tokens: u32,
    /// Requests with a seat.
    pub running: u32,
    /// What its operators took, the longest first; none where they are not timed.
    pub operators: Arc<[OperatorTime]>,
}

/// An engine at one moment.
#[derive(Debug, Clone)]
pub struct View {
    /// The numbers of every moment.
    pub status: Status,
    /// Use of every unit: large, middle, small pool.
    pub units: [Vec<UnitUse>; 3],
    /// Requests with a seat, by seat, then the first ones that wait.
    pub requests: Vec<RequestView>,
    /// The prefix tree, parents before their children.
    pub tree: Vec<RunView>,
    /// Runs that are not listed.
    pub tree_hidden: u32,
    /// Steps since somebody began to watch, the last ones.
    pub steps: Vec<StepView>,
}

/// Receives a view on the engine thread; must return quickly.
pub type Look = Box<dyn FnOnce(View) + Send>;

impl<B: Backend> Engine<B> {
    /// Looks at everything. `steps` come from whoever measures them.
    pub fn view(&self, status: Status, steps: Vec<StepView>) -> View {
        let seated = self.seats.iter().flatten().map(|sequence| RequestView::running(sequence, &self.layout));
        let waiting = self.waiting.values().take(WAITING_SHOWN).map(|waiting| {
            let before = waiting.progress.as_ref();
            let known = waiting.request.prompt.len() as u32;
            let prompt_tokens = before.map_or(known, |progress| progress.prompt_tokens);
            RequestView {
                id: waiting.id.0,
                phase: RequestPhase::Waiting,
                prompt_tokens,
                cached_tokens: before.map_or(0, |progress| progress.cached_tokens),
                committed: 0,
                output_tokens: known - prompt_tokens,
                max_outputs: waiting.max_outputs,
                units: [0; 3],
                priority: waiting.request.priority,
            }
        });
        let (tree, tree_hidden) = self.prefix.runs(
            self.counters.steps,
            |block, bucket| matches!(self.pools.of(bucket).state(block), UnitState::Owned { tables, .. } if tables > 0),
        );
        let requests = seated.chain(waiting).collect();
        View { status, units: self.unit_uses(), requests, tree, tree_hidden, steps }
    }

    fn unit_uses(&self) -> [Vec<UnitUse>; 3] {
        let mut uses = [0, 1, 2].map(|pool| vec![UnitUse::Free; self.limits().units[pool] as usize]);
        let groups = &self.layout.groups;
        for (group, block, checkpoint) in self.prefix.all_blocks() {
            let kept = if checkpoint { UnitUse::Checkpoint } else { UnitUse::Cached };
            uses[groups[group].bucket as usize][block.0 as usize] = kept;
        }
        for sequence in self.seats.iter().flatten() {
            for (group, spec) in groups.iter().enumerate() {
                let pool = self.pools.of(spec.bucket);
                for &(_, block) in sequence.blocks.of(group) {
                    let shared = matches!(pool.state(block), UnitState::Owned { tables, .. } if tables > 1);
                    uses[spec.bucket as usize][block.0 as usize] = match Hold::of(spec) {
                        _ if shared => UnitUse::Shared,
                        Hold::Life => UnitUse::LongLived,
                        Hold::Window => UnitUse::Window,
                    };
                }
            }
        }
        uses
    }
}

impl RequestView {
    fn running(sequence: &Sequence, layout: &CacheLayout) -> RequestView {
        let phase = match (sequence.is_decoding(), sequence.reuse.replaying(sequence.committed)) {
            (true, _) => RequestPhase::Decode,
            (false, Some(_)) => RequestPhase::Replay,
            (false, None) => RequestPhase::Prefill,
        };
        RequestView {
            id: sequence.id.0,
            phase,
            prompt_tokens: sequence.prompt_tokens,
            cached_tokens: sequence.cached_tokens,
            committed: sequence.committed,
            output_tokens: sequence.outputs(),
            max_outputs: sequence.max_outputs,
            units: sequence.blocks.units(layout),
            priority: sequence.priority,
        }
    }
}

impl PrefixCache {
    /// Blocks that the cache holds: group, block, and whether a checkpoint does.
    fn all_blocks(&self) -> impl Iterator<Item = (usize, BlockId, bool)> + '_ {
        self.nodes.iter().filter(|node| node.alive).flat_map(|node| {
            let entries = self.long.iter().zip(&node.blocks).map(|(&group, &block)| (group, block, false));
            let kept = node.checkpoint.iter().flat_map(|checkpoint| &checkpoint.blocks);
            entries.chain(kept.map(|&(group, _, block)| (group, block, true)))
        })
    }

    /// The tree as runs without branches, and how many were left out.
    fn runs(&self, now: u64, held: impl Fn(BlockId, Bucket) -> bool) -> (Vec<RunView>, u32) {
        // A run begins at a root and behind every branch.
        let begins = |node: &Node| node.parent.is_none_or(|parent| self.node(parent).children.len() > 1);
        let starts = |id: &u32| {
            let node = self.node(NodeId(*id));
            node.alive && begins(node)
        };
        let first: Vec<u32> = (0..self.nodes.len() as u32).filter(starts).collect();
        let run_of = |mut id: NodeId| {
            while !begins(self.node(id)) {
                id = self.node(id).parent.expect("a node that begins no run has a parent");
            }
            id.0
        };
        let mut runs: Vec<RunView> = Vec::with_capacity(first.len());
        for &id in &first {
            let head = self.node(NodeId(id));
            let (mut node, mut blocks, mut checkpoints, mut uses) = (head, 0, 0, 0);
            loop {
                blocks += 1;
                checkpoints += u32::from(node.checkpoint.is_some());
                uses += node.checkpoint.as_ref().map_or(0, |checkpoint| checkpoint.uses);
                match node.children.as_slice() {
                    [only] => node = self.node(*only),
                    _ => break,
                }
            }
            let kept = self.long.first().zip(node.blocks.first());
            runs.push(RunView {
                id,
                parent: head.parent.map(run_of),
                depth: head.depth - 1,
                blocks,
                checkpoints,
                uses,
                held: kept.is_some_and(|(&group, &block)| held(block, self.layout.groups[group].bucket)),
                idle_steps: now.saturating_sub(node.last_use),
            });
        }
        // A parent was used when its child was, so those that stay have theirs.
        runs.sort_by_key(|run| (run.idle_steps, run.depth, run.id));
        let hidden = runs.len().saturating_sub(RUNS_SHOWN);
        runs.truncate(RUNS_SHOWN);
        let kept: std::collections::BTreeSet<u32> = runs.iter().map(|run| run.id).collect();
        runs.iter_mut().for_each(|run| run.parent = run.parent.filter(|parent| kept.contains(parent)));
        runs.sort_by_key(|run| (run.depth, run.id));
        (runs, hidden as u32)
    }
}
