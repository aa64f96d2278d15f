//! The core of attention against the CPU's, in both formats, and its bits beside other rows.

use longwave_cpu::numerics::{Profile, fake_fp8_group, round_slice};
use longwave_cpu::ops::attend::{State, TILE, tile};
use longwave_cpu::ops::rope::Frequencies;
use longwave_cuda::driver::Graph;
use longwave_cuda::ops::attend::{Attend, Attention, Entries, Job};
use longwave_cuda::ops::{BatchRow, Pages};
use longwave_model::formats::{bf16_bits, bf16_value, e4m3};
use longwave_model::{MainFormat, presets};

use crate::attend_data::{Query, REACH, Rows, job, outputs, picks, put_jobs, rows};
use crate::paged::{assert_same, bits};
use crate::rig::{Fresh, Rig, relative_error, rig, small};
use crate::rope::put_table;

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
