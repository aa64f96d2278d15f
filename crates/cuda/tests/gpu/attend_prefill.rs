//! The core of attention over rows of a prefill: the same bits in every form, and each form measured.

use longwave_cuda::driver::Graph;
use longwave_cuda::ops::BatchRow;
use longwave_cuda::ops::attend::{Attend, Attention, Entries, Form, Job};
use longwave_model::MainFormat;
use longwave_model::formats::bf16_bits;

use crate::attend_data::{Query, REACH, job, outputs, picks, put_jobs, rows, rows_as_large};
use crate::paged::{assert_same, bits};
use crate::rig::{Fresh, Rig, rig, small};
use crate::rope::put_table;

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
    for format in [MainFormat::Fp8, MainFormat::Bf16] {
        prefill_in(&mut rig, format);
        rig.arena.reset();
    }
}

fn prefill_in(rig: &mut Rig, format: MainFormat) {
    let mut fresh = Fresh::new();
    let attend = Attend::new(&rig.context, format).unwrap();
    let (heads, k, tokens, end) = (64usize, 512, 2048usize, 8192u32);
    let (window, c4) = (rows(&mut fresh, format, 0, end, 6), rows(&mut fresh, format, 0, end / 4, 6));
    let c128 = rows(&mut fresh, format, 0, end / 7, 1);
    let (d_window, d_c4, d_c128) = (window.paged.put(rig), c4.paged.put(rig), c128.paged.put(rig));
    let first = end - tokens as u32;
    let queries: Vec<Query> = (first..end)
        .map(|position| Query { position, oldest: 0, picks: picks(&mut fresh, (position + 1) / 4, k) })
        .collect();
    let batch: Vec<BatchRow> =
        queries.iter().map(|q| BatchRow { seat: 1, position: q.position, start: 0, start_row: 0 }).collect();
    let list: Vec<u32> = queries.iter().flat_map(|q| q.picks.clone()).collect();
    let single: Vec<Job> = queries.iter().enumerate().map(|(row, q)| job(row, 1, q)).collect();
    let fours: Vec<Job> = (0..tokens).step_by(4).map(|row| job(row, 4, &queries[row])).collect();
    let out = outputs(rig, tokens, heads);
    let q: Vec<u16> = fresh.floats(tokens * heads * 512).iter().map(|v| bf16_bits(*v)).collect();
    let (d_picks, d_counts) = (rig.put(&list), rig.put(&vec![k as u32; tokens]));
    let (d_single, d_fours) = (put_jobs(rig, &single), put_jobs(rig, &fours));
    let launch = Attention {
        queries: rig.put(&q).address(),
        sinks: rig.put(&fresh.floats(heads)).address(),
        angles: put_table(rig, &batch, 1).address(),
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
            println!("attend {format:?}, 64 heads, {name}, {tokens} tokens in jobs of {job_tokens}, us:{times}");
        }
    }
}
