//! The core of attention against the CPU's, in both formats, and its bits beside other rows.

use longwave_cpu::numerics::{Profile, fake_fp8_group, round_slice};
use longwave_cpu::ops::attend::{State, TILE, tile};
use longwave_cpu::ops::rope::Frequencies;
use longwave_cpu::ops::rows::{load_main, store_main};
use longwave_cuda::driver::{DeviceSlice, Graph};
use longwave_cuda::ops::attend::{Attend, Attention, Entries, Form, Job};
use longwave_cuda::ops::{BatchRow, Pages};
use longwave_model::formats::{bf16_bits, bf16_value, e4m3};
use longwave_model::{MainFormat, presets};

use crate::paged::{Paged, assert_same, bits};
use crate::rig::{Fresh, Rig, relative_error, rig, small};
use crate::rope::put_table;

const REACH: u32 = 127;

/// Rows of one kind: as stored, and widened from there.
struct Rows {
    paged: Paged,
    first: u32,
    wide: Vec<f32>,
}

fn rows(fresh: &mut Fresh, format: MainFormat, first: u32, end: u32, shift: u32) -> Rows {
    rows_as_large(fresh, format, first, end, shift, |_| 1.7)
}

/// Rows whose values are this large at most.
fn rows_as_large(
    fresh: &mut Fresh,
    format: MainFormat,
    first: u32,
    end: u32,
    shift: u32,
    size: fn(u32) -> f32,
) -> Rows {
    let page = (format.row_bytes() as usize) << shift;
    let blocks = (end as usize).div_ceil(1 << shift) + 1;
    // Two seats; the rows are the second one's.
    let mut paged = Paged::from(fresh, 2, (first >> shift) as usize, blocks, shift, page);
    let mut wide = Vec::new();
    for row in first..end {
        let x: Vec<f32> = fresh.floats(512).iter().map(|v| size(row) * v).collect();
        let (slot, n) = (paged.slot(row), paged.rows());
        // The first seat has the same rows with another sign.
        let other: Vec<f32> = x.iter().map(|v| -v).collect();
        store_main(format, &other, paged.page(0, row).unwrap(), slot, n);
        let page = paged.page(1, row).unwrap();
        store_main(format, &x, page, slot, n);
        let mut y = vec![0.0; 512];
        load_main(format, page, slot, n, &mut y);
        wide.extend(y);
    }
    Rows { paged, first, wide }
}

impl Rows {
    fn wide(&self, row: u32) -> &[f32] {
        &self.wide[(row - self.first) as usize * 512..][..512]
    }
}

/// A query of the batch.
#[derive(Clone)]
struct Query {
    position: u32,
    oldest: u32,
    picks: Vec<u32>,
}

/// What the CPU makes of one query: after rotation, rounded.
fn reference(
    q: &[f32],
    sinks: &[f32],
    query: &Query,
    window: &Rows,
    entries: Option<&Rows>,
    picked: &[u32],
) -> Vec<f32> {
    let heads = sinks.len();
    let mut state = State::new(heads);
    state.start(heads, sinks);
    let p = query.position;
    let from = p.saturating_sub(REACH).max(query.oldest);
    let mut t0 = from - from % TILE as u32;
    while t0 <= p {
        let n = TILE.min((p + 1 - t0) as usize);
        let mut kv = vec![0.0; n * 512];
        for row in from.max(t0)..t0 + n as u32 {
            kv[(row - t0) as usize * 512..][..512].copy_from_slice(window.wide(row));
        }
        let seen = (from.max(t0) - t0) as usize;
        tile(&mut state, 0, q, heads, &kv, n, &[(seen, n)], Profile::Serving);
        t0 += TILE as u32;
    }
    for part in picked.chunks(TILE) {
        let kv: Vec<f32> = part.iter().flat_map(|&e| entries.unwrap().wide(e).to_vec()).collect();
        tile(&mut state, 0, q, heads, &kv, part.len(), &[(0, part.len())], Profile::Serving);
    }
    let angles = Frequencies::compressed(&presets::flash()).angles(p);
    let mut out = vec![0.0; heads * 512];
    for (h, out) in out.chunks_mut(512).enumerate() {
        state.output(h, out);
        round_slice(out);
        angles.rotate_back(out);
        round_slice(out);
    }
    out
}

struct Case {
    heads: usize,
    /// 0: window only, 4: picks, 128: all entries.
    ratio: u32,
    first_window: u32,
    end: u32,
    positions: Vec<u32>,
    k: usize,
}

struct Outputs {
    out: DeviceSlice<u16>,
    codes: DeviceSlice<u8>,
    scales: DeviceSlice<f32>,
}

fn outputs(rig: &mut Rig, tokens: usize, heads: usize) -> Outputs {
    let n = tokens * heads * 512;
    Outputs { out: rig.poisoned(n), codes: rig.poisoned(n), scales: rig.poisoned(n / 128) }
}

fn job(row: usize, tokens: u32, query: &Query) -> Job {
    Job { seat: 1, row: row as u32, tokens, position: query.position, oldest: query.oldest, unused: [7; 3] }
}

fn put_jobs(rig: &mut Rig, jobs: &[Job]) -> DeviceSlice<u32> {
    let words: Vec<u32> = jobs.iter().flat_map(|j| [j.seat, j.row, j.tokens, j.position, j.oldest, 7, 7, 7]).collect();
    rig.put(&words)
}

fn picks(fresh: &mut Fresh, visible: u32, k: usize) -> Vec<u32> {
    let want = if visible as usize <= k { visible as usize } else { k };
    let mut all: Vec<u32> = (0..visible).collect();
    for i in 0..want {
        let j = i + fresh.below(all.len() - i);
        all.swap(i, j);
    }
    all.truncate(want);
    all.sort_unstable();
    all
}

fn check(rig: &mut Rig, fresh: &mut Fresh, format: MainFormat, case: &Case) {
    let attend = Attend::new(&rig.context, format).unwrap();
    let heads = case.heads;
    let window = rows(fresh, format, case.first_window, case.end, 6);
    let (ratio, shift) = (case.ratio, if case.ratio == 128 { 1 } else { 6 });
    let entries = (ratio > 0).then(|| rows(fresh, format, 0, case.end / ratio, shift));
    let mut queries: Vec<Query> = Vec::new();
    for (i, &position) in case.positions.iter().enumerate() {
        // Every seventh sees only a part of its window.
        let oldest = if i % 7 == 6 { position.saturating_sub(20) } else { case.first_window };
        let picks = if ratio == 4 { picks(fresh, (position + 1) / 4, case.k) } else { Vec::new() };
        queries.push(Query { position, oldest, picks });
    }
    let t = queries.len();
    let mut q = fresh.floats(t * heads * 512);
    q.iter_mut().for_each(|v| *v *= 2.0);
    round_slice(&mut q);
    let sinks = fresh.floats(heads);
    let list: Vec<u32> =
        queries.iter().flat_map(|q| (0..case.k).map(|i| q.picks.get(i).copied().unwrap_or(u32::MAX))).collect();
    let counts: Vec<u32> = queries.iter().map(|q| q.picks.len() as u32).collect();
    let batch: Vec<BatchRow> =
        queries.iter().map(|q| BatchRow { seat: 1, position: q.position, start: q.position, start_row: 0 }).collect();
    let jobs: Vec<Job> = queries.iter().enumerate().map(|(row, q)| job(row, 1, q)).collect();
    let (d_window, d_entries) = (window.paged.put(rig), entries.as_ref().map(|e| e.paged.put(rig)));
    let (d_picks, d_counts) = (rig.put(&list), rig.put(&counts));
    let pages = |e: &crate::paged::OnGpu| -> Pages { e.pages };
    let what = match (&d_entries, ratio) {
        (Some(e), 4) => Entries::Picked {
            pages: pages(e),
            picks: d_picks.address(),
            len: case.k as u32,
            counts: d_counts.address(),
        },
        (Some(e), _) => Entries::All { pages: pages(e), ratio },
        (None, _) => Entries::Window,
    };
    let q_bits: Vec<u16> = q.iter().map(|v| bf16_bits(*v)).collect();
    let out = outputs(rig, t, heads);
    let mut launch = Attention {
        queries: rig.put(&q_bits).address(),
        sinks: rig.put(&sinks).address(),
        angles: put_table(rig, &batch, 1).address(),
        jobs: put_jobs(rig, &jobs).address(),
        job_count: t as u32,
        job_tokens: 1,
        window: d_window.pages,
        reach: REACH,
        entries: what,
        heads: heads as u32,
        out: out.out.address(),
        codes: out.codes.address(),
        scales: out.scales.address(),
    };
    attend.attend(&rig.stream, &launch).unwrap();
    let ours = out.out.read(&rig.stream).unwrap();
    let (codes, scales) = (out.codes.read(&rig.stream).unwrap(), out.scales.read(&rig.stream).unwrap());
    let width = heads * 512;
    let (mut worst, mut worst_codes, mut worst_at) = (0.0f64, 0.0f64, 0);
    for (i, query) in queries.iter().enumerate() {
        let picked: Vec<u32> = match ratio {
            4 => query.picks.clone(),
            128 => (0..(query.position + 1) / 128).collect(),
            _ => Vec::new(),
        };
        let mut want = reference(&q[i * width..][..width], &sinks, query, &window, entries.as_ref(), &picked);
        let wide: Vec<f32> = ours[i * width..][..width].iter().map(|b| bf16_value(*b)).collect();
        let error = relative_error(&wide, &want);
        want.chunks_mut(128).for_each(fake_fp8_group);
        let at = |c: usize| e4m3::decode(codes[i * width + c]) * scales[(i * width + c) / 128];
        let wide_codes: Vec<f32> = (0..width).map(at).collect();
        let error_codes = relative_error(&wide_codes, &want);
        if error.is_nan() || error > worst {
            (worst, worst_at) = (error, query.position);
        }
        worst_codes = if error_codes.is_nan() { error_codes } else { worst_codes.max(error_codes) };
        // What is quantised is the plain output.
        let mut again = wide;
        again.chunks_mut(128).for_each(fake_fp8_group);
        assert_eq!(bits(&again), bits(&wide_codes), "position {}: codes are not those of the output", query.position);
    }
    println!(
        "attend {format:?} {heads} heads, ratio {ratio}, {t} rows up to {}: bf16 {worst:.1e} (position {worst_at}), e4m3 {worst_codes:.1e}",
        case.end
    );
    // A value near the middle between two e4m3 values goes to either side; of few heads a row has few values to even that out.
    let most_codes = if heads < 16 { 4e-2 } else { 2e-2 };
    assert!(worst < 5e-3 && worst_codes < most_codes, "{format:?} {heads} {ratio}: {worst} {worst_codes}");

    // Some rows without the others: other kernels and grids, the same bits. A padded job beside them.
    for some in [vec![0], vec![t / 2], vec![t - 1], (0..t.min(6)).collect()] {
        let few = outputs(rig, t, heads);
        let mut list: Vec<Job> = some.iter().map(|&row: &usize| jobs[row]).collect();
        list.push(Job { tokens: 0, ..jobs[0] });
        launch.jobs = put_jobs(rig, &list).address();
        (launch.job_count, launch.job_tokens) = (list.len() as u32, 1);
        (launch.out, launch.codes, launch.scales) = (few.out.address(), few.codes.address(), few.scales.address());
        attend.attend(&rig.stream, &launch).unwrap();
        let (mut want, mut want_codes) = (vec![0xffffu16; t * width], vec![0xffu8; t * width]);
        for row in &some {
            let at = row * width..(row + 1) * width;
            want[at.clone()].copy_from_slice(&ours[at.clone()]);
            want_codes[at.clone()].copy_from_slice(&codes[at]);
        }
        let name = format!("{format:?} {heads} {ratio}: rows {some:?} alone");
        assert_same(&name, &few.out.read(&rig.stream).unwrap(), &want);
        assert_same(&name, &few.codes.read(&rig.stream).unwrap(), &want_codes);
    }
    // In every form, padded jobs among them.
    let mut padded = jobs.clone();
    padded.push(Job { tokens: 0, ..jobs[0] });
    padded.insert(t / 3, Job { tokens: 0, ..jobs[0] });
    launch.jobs = put_jobs(rig, &padded).address();
    (launch.job_count, launch.job_tokens) = (padded.len() as u32, 1);
    for form in attend.forms() {
        let again = outputs(rig, t, heads);
        (launch.out, launch.codes, launch.scales) =
            (again.out.address(), again.codes.address(), again.scales.address());
        attend.attend_as(&rig.stream, &launch, form).unwrap();
        let name = format!("{format:?} {heads} {ratio}: {form:?}");
        assert_same(&name, &again.out.read(&rig.stream).unwrap(), &ours);
        assert_same(&name, &again.codes.read(&rig.stream).unwrap(), &codes);
        assert_same(&name, &bits(&again.scales.read(&rig.stream).unwrap()), &bits(&scales));
    }
    // Neighbouring positions in jobs of several tokens.
    if ratio != 4 {
        for job_tokens in [2, 4] {
            let mut jobs = Vec::new();
            let mut row = 0;
            while row < t {
                let mut n = 1;
                while n < job_tokens as usize
                    && row + n < t
                    && queries[row + n].position == queries[row].position + n as u32
                    && queries[row + n].oldest == queries[row].oldest
                {
                    n += 1;
                }
                jobs.push(job(row, n as u32, &queries[row]));
                row += n;
            }
            launch.jobs = put_jobs(rig, &jobs).address();
            (launch.job_count, launch.job_tokens) = (jobs.len() as u32, job_tokens);
            for form in attend.forms() {
                let many = outputs(rig, t, heads);
                (launch.out, launch.codes, launch.scales) =
                    (many.out.address(), many.codes.address(), many.scales.address());
                attend.attend_as(&rig.stream, &launch, form).unwrap();
                let name = format!("{format:?} {heads} {ratio}: jobs of {job_tokens}, {form:?}");
                assert_same(&name, &many.out.read(&rig.stream).unwrap(), &ours);
                assert_same(&name, &many.codes.read(&rig.stream).unwrap(), &codes);
            }
        }
    }
    rig.arena.reset();
}

#[test]
fn attention_with_few_heads_agrees_and_a_row_has_the_same_bits_in_any_batch() {
    attention_agrees(MainFormat::Fp8, 4);
    attention_agrees(MainFormat::Bf16, 4);
}

#[test]
fn attention_with_flash_heads_and_fp8_agrees_and_a_row_has_the_same_bits_in_any_batch() {
    attention_agrees(MainFormat::Fp8, 64);
}

#[test]
fn attention_with_flash_heads_and_bf16_agrees_and_a_row_has_the_same_bits_in_any_batch() {
    attention_agrees(MainFormat::Bf16, 64);
}

/// Contexts of no, few and many compressed entries, of 4 or 64 heads.
fn attention_agrees(format: MainFormat, heads: usize) {
    let Some(mut rig) = rig(1 << 30) else { return };
    let mut fresh = Fresh::new();
    let short: Vec<u32> = match small() {
        true => vec![0, 3, 63, 128, 129, 299],
        false => (0..40).chain([62, 63, 64, 126, 127, 128, 129, 298, 299]).collect(),
    };
    let long: Vec<u32> = vec![299, 300, 301, 302, 4095, 4096, 4097, 4996, 4997, 4998, 4999];
    let deep: Vec<u32> = vec![383_871, 383_872, 383_873, 383_998, 383_999];
    let k = if heads == 4 { 64 } else { 512 };
    for ratio in [0, 4, 128] {
        let positions = short.clone();
        check(&mut rig, &mut fresh, format, &Case { heads, ratio, first_window: 0, end: 300, positions, k });
    }
    if small() {
        return;
    }
    for ratio in [4, 128] {
        let positions = long.clone();
        check(&mut rig, &mut fresh, format, &Case { heads, ratio, first_window: 0, end: 5000, positions, k });
    }
    let case = Case { heads, ratio: 128, first_window: 383_700, end: 384_000, positions: deep, k };
    check(&mut rig, &mut fresh, format, &case);
}

/// Two blocks of heads, and enough rows for the widest kernel.
#[test]
fn attention_with_pro_heads_agrees_and_a_row_has_the_same_bits_in_any_batch() {
    let Some(mut rig) = rig(1 << 30) else { return };
    let mut fresh = Fresh::new();
    let positions = if small() { vec![4998, 4999] } else { (4900..5000).collect() };
    let case = Case { heads: 128, ratio: 4, first_window: 0, end: 5000, positions, k: 1024 };
    check(&mut rig, &mut fresh, MainFormat::Fp8, &case);
}

#[test]
fn attention_is_measured() {
    let Some(mut rig) = rig(1 << 30) else { return };
    let mut fresh = Fresh::new();
    let attend = Attend::new(&rig.context, MainFormat::Fp8).unwrap();
    let (heads, k, tokens) = (64usize, 512, 128usize);
    let end = 8192;
    let (window, c4) = (rows(&mut fresh, MainFormat::Fp8, 0, end, 6), rows(&mut fresh, MainFormat::Fp8, 0, end / 4, 6));
    let c128 = rows(&mut fresh, MainFormat::Fp8, 0, 1024, 1);
    let (d_window, d_c4, d_c128) = (window.paged.put(&mut rig), c4.paged.put(&mut rig), c128.paged.put(&mut rig));
    let query = Query { position: end - 1, oldest: 0, picks: picks(&mut fresh, end / 4, k) };
    let batch = vec![BatchRow { seat: 1, position: end - 1, start: 0, start_row: 0 }; tokens];
    let list: Vec<u32> = (0..tokens).flat_map(|_| query.picks.clone()).collect();
    let jobs: Vec<Job> = (0..tokens).map(|row| job(row, 1, &query)).collect();
    let out = outputs(&mut rig, tokens, heads);
    let q: Vec<u16> = fresh.floats(tokens * heads * 512).iter().map(|v| bf16_bits(*v)).collect();
    let (d_picks, d_counts) = (rig.put(&list), rig.put(&vec![k as u32; tokens]));
    let launch = Attention {
        queries: rig.put(&q).address(),
        sinks: rig.put(&fresh.floats(heads)).address(),
        angles: put_table(&mut rig, &batch, 1).address(),
        jobs: put_jobs(&mut rig, &jobs).address(),
        job_count: 1,
        job_tokens: 1,
        window: d_window.pages,
        reach: REACH,
        entries: Entries::Window,
        heads: heads as u32,
        out: 0,
        codes: out.codes.address(),
        scales: out.scales.address(),
    };
    let picked =
        Entries::Picked { pages: d_c4.pages, picks: d_picks.address(), len: k as u32, counts: d_counts.address() };
    // 8 positions per entry: 1,024 entries as at 128K.
    let all = Entries::All { pages: d_c128.pages, ratio: 8 };
    for (name, entries) in [("window", Entries::Window), ("512 picks", picked), ("1,024 entries", all)] {
        for jobs in [1, 4, 8, 16, 32, 128] {
            let launch = Attention { entries, job_count: jobs, ..launch };
            let graph = Graph::capture(&rig.stream, |s| (0..20).try_for_each(|_| attend.attend(s, &launch))).unwrap();
            println!("attend fp8, 64 heads, {name}, {jobs} tokens: {:.2} us", rig.median_us(&graph) / 20.0);
        }
    }
}

/// Prefill of two sequences, more rows than clusters, against the form that decode's tests compare with the CPU.
#[test]
fn rows_of_a_prefill_have_the_same_bits_in_every_form() {
    let Some(mut rig) = rig(2 << 30) else { return };
    let mut fresh = Fresh::new();
    for (format, heads) in [
        (MainFormat::Fp8, 64usize),
        (MainFormat::Fp8, 128),
        (MainFormat::Fp8, 4),
        (MainFormat::Bf16, 64),
        (MainFormat::Fp8, 32),
    ] {
        let attend = Attend::new(&rig.context, format).unwrap();
        let end = 2048u32;
        let k = if heads == 128 { 400 } else { 300 };
        // Scales above 1 among them.
        let size = |row| if row % 61 == 7 { 1500.0 } else { 1.7 };
        let [window, few, c128] = [(end, 6), (end / 4, 6), (end / 2, 1)]
            .map(|(end, shift)| rows_as_large(&mut fresh, format, 0, end, shift, size));
        let (d_window, d_few, d_c128) = (window.paged.put(&mut rig), few.paged.put(&mut rig), c128.paged.put(&mut rig));
        // Ragged: 131 tokens of one sequence from its start, 203 of the other at depth.
        let sequences = [(0u32, 0u32, 131u32), (1, 1845, 203)];
        let queries: Vec<(u32, Query)> = sequences
            .iter()
            .flat_map(|&(seat, start, n)| (start..start + n).map(move |position| (seat, position)))
            .map(|(seat, position)| {
                (seat, Query { position, oldest: 0, picks: picks(&mut fresh, (position + 1) / 4, k) })
            })
            .collect();
        let t = queries.len();
        let mut q = fresh.floats(t * heads * 512);
        q.iter_mut().for_each(|v| *v *= 2.0);
        let q: Vec<u16> = q.iter().map(|v| bf16_bits(*v)).collect();
        let list: Vec<u32> =
            queries.iter().flat_map(|(_, q)| (0..k).map(|i| q.picks.get(i).copied().unwrap_or(u32::MAX))).collect();
        let counts: Vec<u32> = queries.iter().map(|(_, q)| q.picks.len() as u32).collect();
        let batch: Vec<BatchRow> = queries
            .iter()
            .map(|(seat, q)| BatchRow { seat: *seat, position: q.position, start: q.position, start_row: 0 })
            .collect();
        let jobs_of = |n: usize| -> Vec<Job> {
            let mut jobs = Vec::new();
            let mut row = 0;
            for (seat, start, tokens) in sequences {
                for first in (0..tokens).step_by(n) {
                    let tokens = (n as u32).min(tokens - first);
                    jobs.push(Job { seat, row, tokens, position: start + first, oldest: 0, unused: [7; 3] });
                    row += tokens;
                }
                jobs.push(Job { tokens: 0, ..jobs[0] });
            }
            jobs
        };
        let (d_picks, d_counts) = (rig.put(&list), rig.put(&counts));
        let picked =
            Entries::Picked { pages: d_few.pages, picks: d_picks.address(), len: k as u32, counts: d_counts.address() };
        let all = Entries::All { pages: d_c128.pages, ratio: 2 };
        let mut launch = Attention {
            queries: rig.put(&q).address(),
            sinks: rig.put(&fresh.floats(heads)).address(),
            angles: put_table(&mut rig, &batch, 1).address(),
            jobs: 0,
            job_count: 0,
            job_tokens: 1,
            window: d_window.pages,
            reach: REACH,
            entries: Entries::Window,
            heads: heads as u32,
            out: 0,
            codes: 0,
            scales: 0,
        };
        for (kind, entries) in [("window", Entries::Window), ("picks", picked), ("entries", all)] {
            let mut want: Option<[Vec<u32>; 3]> = None;
            for job_tokens in if kind == "picks" { vec![1] } else { vec![1, 2, 4] } {
                let jobs = jobs_of(job_tokens);
                launch.jobs = put_jobs(&mut rig, &jobs).address();
                (launch.job_count, launch.job_tokens, launch.entries) = (jobs.len() as u32, job_tokens as u32, entries);
                for form in [Form::Alone, Form::Wide] {
                    if !attend.forms().contains(&form) {
                        continue;
                    }
                    let o = outputs(&mut rig, t, heads);
                    (launch.out, launch.codes, launch.scales) =
                        (o.out.address(), o.codes.address(), o.scales.address());
                    attend.attend_as(&rig.stream, &launch, form).unwrap();
                    let got = [
                        o.out.read(&rig.stream).unwrap().iter().map(|v| u32::from(*v)).collect(),
                        o.codes.read(&rig.stream).unwrap().iter().map(|v| u32::from(*v)).collect(),
                        bits(&o.scales.read(&rig.stream).unwrap()),
                    ];
                    let name = format!("{format:?}, {heads} heads, {kind}, jobs of {job_tokens}, {form:?}");
                    println!("{name}");
                    match &want {
                        Some(want) => (0..3).for_each(|i| assert_same(&format!("{name}, {i}"), &got[i], &want[i])),
                        None => want = Some(got),
                    }
                }
            }
        }
        rig.arena.reset();
        if small() {
            return;
        }
    }
}

#[test]
fn prefill_is_measured() {
    let Some(mut rig) = rig(2 << 30) else { return };
    if small() {
        return;
    }
    let mut fresh = Fresh::new();
    let attend = Attend::new(&rig.context, MainFormat::Fp8).unwrap();
    let (heads, k, tokens, end) = (64usize, 512, 2048usize, 8192u32);
    let (window, c4) = (rows(&mut fresh, MainFormat::Fp8, 0, end, 6), rows(&mut fresh, MainFormat::Fp8, 0, end / 4, 6));
    let c128 = rows(&mut fresh, MainFormat::Fp8, 0, end / 7, 1);
    let (d_window, d_c4, d_c128) = (window.paged.put(&mut rig), c4.paged.put(&mut rig), c128.paged.put(&mut rig));
    let first = end - tokens as u32;
    let queries: Vec<Query> = (first..end)
        .map(|position| Query { position, oldest: 0, picks: picks(&mut fresh, (position + 1) / 4, k) })
        .collect();
    let batch: Vec<BatchRow> =
        queries.iter().map(|q| BatchRow { seat: 1, position: q.position, start: 0, start_row: 0 }).collect();
    let list: Vec<u32> = queries.iter().flat_map(|q| q.picks.clone()).collect();
    let single: Vec<Job> = queries.iter().enumerate().map(|(row, q)| job(row, 1, q)).collect();
    let fours: Vec<Job> = (0..tokens).step_by(4).map(|row| job(row, 4, &queries[row])).collect();
    let out = outputs(&mut rig, tokens, heads);
    let q: Vec<u16> = fresh.floats(tokens * heads * 512).iter().map(|v| bf16_bits(*v)).collect();
    let (d_picks, d_counts) = (rig.put(&list), rig.put(&vec![k as u32; tokens]));
    let (d_single, d_fours) = (put_jobs(&mut rig, &single), put_jobs(&mut rig, &fours));
    let launch = Attention {
        queries: rig.put(&q).address(),
        sinks: rig.put(&fresh.floats(heads)).address(),
        angles: put_table(&mut rig, &batch, 1).address(),
        jobs: d_single.address(),
        job_count: 1,
        job_tokens: 1,
        window: d_window.pages,
        reach: REACH,
        entries: Entries::Window,
        heads: heads as u32,
        out: 0,
        codes: out.codes.address(),
        scales: out.scales.address(),
    };
    let picked =
        Entries::Picked { pages: d_c4.pages, picks: d_picks.address(), len: k as u32, counts: d_counts.address() };
    // On average 256 and 1,024 entries.
    let [few, many] = [28, 7].map(|ratio| Entries::All { pages: d_c128.pages, ratio });
    for (name, entries) in
        [("window", Entries::Window), ("512 picks", picked), ("256 entries", few), ("1,024 entries", many)]
    {
        for (tokens, job_tokens) in [(8, 1), (16, 1), (32, 1), (64, 1), (128, 1), (256, 1), (2048, 1), (2048, 4)] {
            if job_tokens == 4 && name == "512 picks" {
                continue;
            }
            let jobs = if job_tokens == 4 { &d_fours } else { &d_single };
            let launch =
                Attention { entries, jobs: jobs.address(), job_count: tokens / job_tokens, job_tokens, ..launch };
            let launches = if tokens == 2048 { 2 } else { 10 };
            let mut times = String::new();
            for form in attend.forms() {
                if matches!(form, Form::Cluster(_))
                    && (tokens > 256 || form != Form::Cluster(if tokens > 16 { 0 } else { 1 }))
                {
                    continue;
                }
                let launches_of = |s: &_| (0..launches).try_for_each(|_| attend.attend_as(s, &launch, form));
                let graph = Graph::capture(&rig.stream, launches_of).unwrap();
                times += &format!(" {form:?} {:.1}", rig.median_us(&graph) / f64::from(launches));
            }
            println!("attend fp8, 64 heads, {name}, {tokens} tokens in jobs of {job_tokens}, us:{times}");
        }
    }
}
