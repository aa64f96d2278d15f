//! The simulator itself: it must refuse malformed steps and notice every wrong block, or the other tests prove nothing.

use longwave_engine::sim::{SimBackend, SimOptions};
use longwave_engine::step::{
    Backend, BackendError, BlockCopy, BlockId, LAST_SAMPLED, Limits, Sampling, Seat, SeqStep, Step, TableWrite, Token,
};
use longwave_model::CacheLayout;
use longwave_model::geometry::{CacheKind, LOGICAL_BLOCK};

use crate::world::{prompt, tiny_layout, wide_limits};

fn backend() -> SimBackend {
    SimBackend::new(tiny_layout(), Limits { step_tokens: 400, ..wide_limits() }, SimOptions::default())
}

/// Every block of every group up to position 512, ids counted per pool from `base`.
fn all_blocks(layout: &CacheLayout, base: u32) -> Vec<TableWrite> {
    let mut next = [base; 3];
    let mut writes = Vec::new();
    for (group, spec) in layout.groups.iter().enumerate() {
        for index in 0..2 * LOGICAL_BLOCK / spec.block_tokens {
            let id = &mut next[spec.bucket as usize];
            writes.push(TableWrite { group: group as u8, index, block: BlockId(*id) });
            *id += 1;
        }
    }
    writes
}

/// A step of one sequence at seat 0.
fn step(number: u64, start: u32, tokens: Vec<Token>, writes: Vec<TableWrite>) -> Step {
    let seq = SeqStep {
        fresh: start == 0,
        writes: 0..writes.len() as u32,
        sample: Some(Sampling::default()),
        ..SeqStep::new(Seat(0), start, 0..tokens.len() as u32)
    };
    Step { number, seqs: vec![seq], tokens, writes, ..Step::default() }
}

fn compute(backend: &mut SimBackend, step: Step) -> Result<Vec<Token>, String> {
    let result = backend.submit(&step).and_then(|ticket| backend.collect(ticket));
    match result {
        Ok(result) => Ok(result.seqs.into_iter().next().unwrap().tokens),
        Err(BackendError::BadStep { what, .. }) => Err(what),
        Err(other) => panic!("{other}"),
    }
}

/// Computes 300 positions and then one more, after `spoil` had its way with that second step.
fn second_step(spoil: impl FnOnce(&mut SimBackend, &mut Step)) -> Result<Vec<Token>, String> {
    let mut backend = backend();
    compute(&mut backend, step(1, 0, prompt(1, 300), all_blocks(&tiny_layout(), 0))).unwrap();
    let mut second = step(2, 300, vec![7], past_blocks());
    spoil(&mut backend, &mut second);
    second.seqs[0].writes = 0..second.writes.len() as u32;
    compute(&mut backend, second)
}

/// Takes out what nothing reads from position 300 on.
fn past_blocks() -> Vec<TableWrite> {
    let layout = tiny_layout();
    let past = |w: &TableWrite| {
        let spec = &layout.groups[w.group as usize];
        spec.is_sliding() && (w.index + 1) * spec.block_tokens <= spec.retention.first_needed(300)
    };
    all_blocks(&layout, 0).into_iter().filter(past).map(|w| TableWrite { block: BlockId::NONE, ..w }).collect()
}

/// Block of `kind` at a position, as [`all_blocks`] numbers them.
fn at(kind: CacheKind, position: u32) -> TableWrite {
    let layout = tiny_layout();
    let group = layout.groups.iter().position(|g| g.kind == kind).unwrap();
    let index = position / layout.groups[group].block_tokens;
    *all_blocks(&layout, 0).iter().find(|w| w.group as usize == group && w.index == index).unwrap()
}

#[test]
fn an_untouched_cache_gives_one_answer() {
    let whole = compute(&mut backend(), step(1, 0, [prompt(1, 300), vec![7]].concat(), all_blocks(&tiny_layout(), 0)));
    assert_eq!(second_step(|_, _| ()), whole);
    let elsewhere =
        compute(&mut backend(), step(1, 0, [prompt(1, 300), vec![7]].concat(), all_blocks(&tiny_layout(), 9)));
    assert_eq!(elsewhere, whole, "ids of blocks do not matter");
}

#[test]
fn a_block_that_is_still_read_is_missed() {
    for (kind, position) in [
        (CacheKind::Window, 173),
        (CacheKind::Window, 299),
        (CacheKind::C4State, 296),
        (CacheKind::IndexState, 299),
        (CacheKind::C128State, 256),
    ] {
        let gone = TableWrite { block: BlockId::NONE, ..at(kind, position) };
        let answer = second_step(|_, step| step.writes.push(gone));
        assert!(answer.as_ref().is_err_and(|e| e.contains("is not mapped")), "{kind:?} {position}: {answer:?}");
    }
}

#[test]
fn a_block_that_is_past_must_be_taken_out() {
    for (kind, position) in [(CacheKind::Window, 127), (CacheKind::C4State, 291), (CacheKind::C128State, 255)] {
        let kept = at(kind, position);
        let answer = second_step(|_, step| step.writes.push(kept));
        assert!(answer.as_ref().is_err_and(|e| e.contains("is past and still mapped")), "{kind:?}: {answer:?}");
    }
}

#[test]
fn a_wrong_or_unwritten_block_is_noticed() {
    let kinds = [
        CacheKind::C4Main,
        CacheKind::C4Index,
        CacheKind::C128Main,
        CacheKind::Window,
        CacheKind::C4State,
        CacheKind::IndexState,
        CacheKind::C128State,
    ];
    for kind in kinds {
        let spec_of = at(kind, 299);
        let position = if tiny_layout().groups[spec_of.group as usize].is_sliding() { 299 } else { 100 };
        let swapped = TableWrite { block: at(kind, 40).block, ..at(kind, position) };
        let unwritten = TableWrite { block: BlockId(599), ..at(kind, position) };
        for write in [swapped, unwritten] {
            if write == at(kind, position) {
                continue;
            }
            let answer = second_step(|_, step| step.writes.push(write));
            assert!(answer.is_err(), "{kind:?} with {write:?}: {answer:?}");
        }
    }
}

#[test]
fn a_stale_row_of_another_sequence_changes_the_token() {
    // Unit 500 gets the same positions of another prompt, so its tags are right and its contents are not.
    for kind in [CacheKind::C4Main, CacheKind::C128Main, CacheKind::Window, CacheKind::C4State, CacheKind::C128State] {
        let bucket = tiny_layout().groups[at(kind, 0).group as usize].bucket as u8;
        let write = at(kind, if tiny_layout().groups[at(kind, 0).group as usize].is_sliding() { 299 } else { 0 });
        let answer = second_step(|backend, step| {
            let mut other = self::backend();
            compute(&mut other, self::step(1, 0, prompt(2, 300), all_blocks(&tiny_layout(), 0))).unwrap();
            let mut bytes = vec![0; tiny_layout().buckets[bucket as usize].unit_bytes() as usize];
            other.read_unit(bucket, write.block, &mut bytes).unwrap();
            backend.write_unit(bucket, BlockId(500), &bytes).unwrap();
            step.writes.push(TableWrite { block: BlockId(500), ..write });
        });
        assert_ne!(answer, second_step(|_, _| ()), "{kind:?}");
    }
}

#[test]
fn copied_and_moved_units_are_as_good_as_the_originals() {
    let good = second_step(|_, _| ());
    let past = past_blocks();
    let needed = |w: &TableWrite| !past.iter().any(|p| (p.group, p.index) == (w.group, w.index));
    for write in all_blocks(&tiny_layout(), 0).into_iter().filter(needed) {
        let bucket = tiny_layout().groups[write.group as usize].bucket as u8;
        let to = BlockId(500);
        let remapped = TableWrite { block: to, ..write };
        let copied = second_step(|backend, step| {
            backend.copy(&[BlockCopy { bucket, from: write.block, to }]).unwrap();
            step.writes.push(remapped);
        });
        let moved = second_step(|backend, step| {
            let mut bytes = vec![0; tiny_layout().buckets[bucket as usize].unit_bytes() as usize];
            backend.read_unit(bucket, write.block, &mut bytes).unwrap();
            backend.write_unit(bucket, to, &bytes).unwrap();
            step.writes.push(remapped);
        });
        assert_eq!((copied, moved), (good.clone(), good.clone()), "{write:?}");
    }
}

#[test]
fn malformed_steps_are_refused() {
    let refused = |spoil: fn(&mut Step), why: &str| {
        let answer = second_step(|_, step| spoil(step));
        assert!(answer.as_ref().is_err_and(|e| e.contains(why)), "{why}: {answer:?}");
    };
    refused(|s| s.number = 3, "it follows step 1");
    refused(|s| s.seqs[0].start = 299, "starts at 299");
    refused(|s| s.seqs[0].start = 301, "starts at 301");
    refused(|s| s.seqs[0].fresh = true, "is not mapped");
    refused(|s| s.seqs[0].seat = Seat(16), "does not exist");
    refused(|s| s.seqs[0].seat = Seat(3), "starts at 300");
    refused(|s| s.seqs.push(s.seqs[0].clone()), "is there twice");
    refused(|s| s.tokens[0] = 61, "token 61");
    refused(|s| s.tokens.push(1), "belong to no sequence");
    refused(|s| s.seqs[0].tokens = 0..2, "do not follow");
    refused(|s| s.seqs[0].drafts = 1, "1 drafts among 1 tokens");
    refused(|s| s.seqs[0].want_drafts = 8, "wants 8 drafts");
    refused(|s| (s.seqs[0].masks, s.masks) = (0..1, vec![1]), "do not follow 0 with 2 words");
    refused(|s| (s.seqs[0].masks, s.masks) = (2..4, vec![1; 4]), "do not follow 0");
    refused(|s| s.masks.push(1), "belong to no sequence");
    refused(|s| (s.seqs[0].masks, s.masks) = (0..2, vec![0, 1 << 31]), "a mask allows nothing");
    refused(|s| s.writes.push(TableWrite { group: 99, index: 0, block: BlockId(0) }), "group 99");
    refused(|s| s.writes.push(TableWrite { group: 0, index: 9, block: BlockId(0) }), "leaves a hole");
    refused(|s| s.writes.push(TableWrite { group: 0, index: 0, block: BlockId(600) }), "block 600 does not exist");
    let long = compute(&mut backend(), step(1, 0, prompt(1, 401), all_blocks(&tiny_layout(), 0)));
    assert_eq!(long, Err("401 tokens, the limit is 400".into()));
}

#[test]
fn one_block_for_two_sequences_is_noticed() {
    let mut twice = step(1, 0, prompt(1, 50), all_blocks(&tiny_layout(), 0));
    let mut other = twice.seqs[0].clone();
    other.seat = Seat(1);
    other.tokens = 50..100;
    other.writes = twice.writes.len() as u32..2 * twice.writes.len() as u32;
    twice.tokens.extend(prompt(2, 50));
    twice.writes.extend(all_blocks(&tiny_layout(), 0));
    twice.seqs.push(other);
    let answer = compute(&mut backend(), twice);
    assert!(answer.as_ref().is_err_and(|e| e.contains("is stored to by")), "{answer:?}");
}

/// Seat 0 computes 256 positions; then it and seat 1, which maps its blocks, compute the next one. `spoil` changes the
/// table of seat 1.
fn two_behind_one_prefix(spoil: impl FnOnce(&mut Vec<TableWrite>)) -> Result<Vec<Token>, String> {
    let layout = tiny_layout();
    let mut backend = backend();
    compute(&mut backend, step(1, 0, prompt(1, 256), all_blocks(&layout, 0))).unwrap();
    let first = |w: &TableWrite| w.index * layout.groups[w.group as usize].block_tokens;
    let past = |w: &TableWrite| {
        let spec = &layout.groups[w.group as usize];
        first(w) + spec.block_tokens <= spec.retention.first_needed(256)
    };
    let (shared, own) = (all_blocks(&layout, 0), all_blocks(&layout, 200));
    let mut both = step(2, 256, vec![7, 7], Vec::new());
    both.seqs.push(SeqStep { seat: Seat(1), fresh: true, ..both.seqs[0].clone() });
    both.writes.extend(shared.iter().filter(|w| past(w)).map(|w| TableWrite { block: BlockId::NONE, ..*w }));
    both.writes.retain(|w| layout.groups[w.group as usize].is_sliding());
    let cut = both.writes.len() as u32;
    let mut writes: Vec<_> = shared.into_iter().filter(|w| first(w) < 256 && !past(w)).collect();
    writes.extend(own.into_iter().filter(|w| first(w) >= 256));
    spoil(&mut writes);
    both.writes.extend(writes);
    (both.seqs[0].tokens, both.seqs[0].writes) = (0..1, 0..cut);
    (both.seqs[1].tokens, both.seqs[1].writes) = (1..2, cut..both.writes.len() as u32);
    match backend.submit(&both).and_then(|ticket| backend.collect(ticket)) {
        Ok(result) => Ok(result.seqs.into_iter().flat_map(|s| s.tokens).collect()),
        Err(error) => Err(error.to_string()),
    }
}

#[test]
fn shared_blocks_are_read_and_never_stored_to() {
    let tokens = two_behind_one_prefix(|_| ()).unwrap();
    assert_eq!(tokens[0], tokens[1], "the same text before it, the same token after it");
    let layout = tiny_layout();
    for group in layout.sliding() {
        let index = 256 / layout.groups[group].block_tokens;
        let theirs = *all_blocks(&layout, 0).iter().find(|w| w.group as usize == group && w.index == index).unwrap();
        let answer = two_behind_one_prefix(|writes| writes.push(theirs));
        assert!(answer.as_ref().is_err_and(|e| e.contains("another one maps it")), "group {group}: {answer:?}");
    }
    let elsewhere = TableWrite { index: 1, ..all_blocks(&layout, 0)[0] };
    let answer = two_behind_one_prefix(|writes| writes.push(elsewhere));
    assert!(answer.as_ref().is_err_and(|e| e.contains("and also")), "a block has one meaning: {answer:?}");
}

#[test]
fn the_last_sampled_token_may_stay_on_the_device() {
    let run = |second: fn(Token) -> Token| {
        let mut backend = backend();
        let first = compute(&mut backend, step(1, 0, prompt(1, 30), all_blocks(&tiny_layout(), 0))).unwrap()[0];
        compute(&mut backend, step(2, 30, vec![second(first)], Vec::new()))
    };
    assert_eq!(run(|_| LAST_SAMPLED), run(|token| token));
    let nothing = compute(&mut backend(), step(1, 0, vec![LAST_SAMPLED], all_blocks(&tiny_layout(), 0)));
    assert_eq!(nothing, Err("seat 0: nothing was sampled here before".into()));
}
