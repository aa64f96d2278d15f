//! Norms and both compressors of a c4 layer in one launch: the bytes of three launches, and the time of both.

use longwave_cuda::driver::{DeviceSlice, Graph, Stream};
use longwave_cuda::ops::compress::{Compress, Compressor};
use longwave_cuda::ops::keys::{Keys, Projected};
use longwave_cuda::ops::{BatchRow, Pages};
use longwave_model::{IndexFormat, MainFormat};

use crate::paged::{OnGpu, Paged, assert_same, batch, bits, put_rows};
use crate::rig::{Fresh, Rig, rig};
use crate::rope::put_table;

const EPS: f32 = 1e-6;
const Q_WIDTH: usize = 1024;
const NOWHERE: Pages = Pages { pool: 0, table: 0, unit_bytes: 0, table_len: 0, shift: 0 };

/// What the three launches write, all bytes of it.
struct Layer {
    /// Window, then state and entries of the main compressor and of the index's.
    caches: [OnGpu; 5],
    codes: DeviceSlice<u8>,
    scales: DeviceSlice<f32>,
    projected: Projected,
    main: Compressor,
    index: Compressor,
    rows: u64,
}

impl Layer {
    fn new(rig: &mut Rig, fresh: &mut Fresh, main: MainFormat, index: IndexFormat, rows: &[BatchRow]) -> Layer {
        let len = rows.iter().map(|r| r.position).max().unwrap_or(0) as usize + 1;
        let tokens = rows.len();
        let mut paged = |rows_of_cache: usize, shift: u32, row_bytes: usize| {
            let len = rows_of_cache.div_ceil(1 << shift);
            let mut cache = Paged::new(fresh, 3, len, shift, row_bytes << shift);
            // Rows of earlier steps are floats.
            let values = fresh.floats(cache.bytes.len() / 4);
            cache.bytes.chunks_mut(4).zip(&values).for_each(|(to, v)| to.copy_from_slice(&v.to_le_bytes()));
            cache
        };
        let (main_bytes, index_bytes) = (main.row_bytes() as usize, index.row_bytes() as usize);
        let caches = [
            paged(len, 6, main_bytes),
            paged(len, 2, 8 * 1024),
            paged(len.div_ceil(4), 6, main_bytes),
            paged(len, 1, 8 * 256),
            paged(len.div_ceil(4), 6, index_bytes),
        ]
        .map(|cache| cache.put(rig));
        let mut floats = |len: usize| rig.put(&fresh.floats(len)).address();
        let [products, q_norm, kv_norm] = [tokens * (Q_WIDTH + 512), Q_WIDTH, 512].map(&mut floats);
        let [main_products, main_ape, main_norm] = [tokens * 2048, 4 * 1024, 512].map(&mut floats);
        let [index_products, index_ape, index_norm] = [tokens * 512, 4 * 256, 128].map(&mut floats);
        let (codes, scales) = (rig.poisoned(tokens * Q_WIDTH), rig.poisoned(tokens * Q_WIDTH / 128));
        let list = put_rows(rig, rows).address();
        let projected = Projected {
            products,
            rows: list,
            angles: put_table(rig, rows, 1).address(),
            q_norm,
            kv_norm,
            codes: codes.address(),
            scales: scales.address(),
            window: caches[0].pages,
            local: NOWHERE,
            tokens: tokens as u32,
            q_width: Q_WIDTH as u32,
            eps: EPS,
        };
        let angles = put_table(rig, rows, 4).address();
        let compressor = |products, ape, norm, first: usize| {
            let (state, entries) = (caches[first].pages, caches[first + 1].pages);
            Compressor { products, ape, angles, norm, state, entries, eps: EPS }
        };
        let main = compressor(main_products, main_ape, main_norm, 1);
        let index = compressor(index_products, index_ape, index_norm, 3);
        Layer { caches, codes, scales, projected, main, index, rows: list }
    }

    fn apart(&self, stream: &Stream, keys: &Keys, compress: &Compress) {
        let tokens = self.projected.tokens;
        keys.project(stream, &self.projected).unwrap();
        compress.main4(stream, &self.main, self.rows, tokens).unwrap();
        compress.index4(stream, &self.index, self.rows, tokens).unwrap();
    }

    fn at_once(&self, stream: &Stream, compress: &Compress) {
        compress.rows4(stream, &self.projected, &self.main, &self.index, self.rows).unwrap();
    }

    /// All bytes after `work`, from the state that the caches have now, to which they return.
    fn after(&self, stream: &Stream, work: impl Fn(&Stream)) -> (Vec<Vec<u8>>, Vec<u8>, Vec<u32>) {
        let before: Vec<Vec<u8>> = self.caches.iter().map(|cache| cache.bytes.read(stream).unwrap()).collect();
        self.codes.fill(stream, 0xff).unwrap();
        self.scales.fill(stream, 0xff).unwrap();
        work(stream);
        let caches = self.caches.iter().map(|cache| cache.bytes.read(stream).unwrap()).collect();
        self.caches.iter().zip(&before).for_each(|(cache, bytes)| cache.bytes.write(stream, bytes).unwrap());
        (caches, self.codes.read(stream).unwrap(), bits(&self.scales.read(stream).unwrap()))
    }
}

#[test]
fn rows_of_a_c4_layer_at_once_have_the_bytes_of_three_launches() {
    let Some(mut rig) = rig(512 << 20) else { return };
    let mut fresh = Fresh::new();
    for main in [MainFormat::Fp8, MainFormat::Bf16] {
        for index in [IndexFormat::Fp8, IndexFormat::Fp4, IndexFormat::Bf16] {
            let (keys, compress) =
                (Keys::new(&rig.context, main).unwrap(), Compress::new(&rig.context, main, index).unwrap());
            // Rows that end a group and rows that do not, the first entry, several rows of a sequence, padded ones.
            for rows in [batch(&[(1, 499, 1)]), batch(&[(2, 0, 5), (0, 300, 8), (1, 498, 1)])] {
                let layer = Layer::new(&mut rig, &mut fresh, main, index, &rows);
                let apart = layer.after(&rig.stream, |s| layer.apart(s, &keys, &compress));
                let at_once = layer.after(&rig.stream, |s| layer.at_once(s, &compress));
                let names = ["window", "main state", "main entries", "index state", "index entries"];
                let untouched: Vec<_> =
                    layer.caches.iter().map(|cache| cache.bytes.read(&rig.stream).unwrap()).collect();
                for (i, name) in names.iter().enumerate() {
                    let what = format!("{main:?} {index:?}, {} rows: {name}", rows.len());
                    assert!(apart.0[i] != untouched[i], "{what} is not written");
                    assert_same(&what, &at_once.0[i], &apart.0[i]);
                }
                assert_same("codes", &at_once.1, &apart.1);
                assert_same("scales", &at_once.2, &apart.2);
                rig.arena.reset();
            }
        }
    }
}

#[test]
fn rows_of_a_c4_layer_are_measured() {
    let Some(mut rig) = rig(1 << 30) else { return };
    let mut fresh = Fresh::new();
    let (main, index) = (MainFormat::Fp8, IndexFormat::Fp4);
    let (keys, compress) = (Keys::new(&rig.context, main).unwrap(), Compress::new(&rig.context, main, index).unwrap());
    for tokens in [1u32, 8, 32] {
        // Every row ends a group, which costs most.
        let rows: Vec<BatchRow> = (0..tokens)
            .map(|row| BatchRow { seat: row % 3, position: 4 * row + 63, start: 4 * row + 63, start_row: row })
            .collect();
        let layer = Layer::new(&mut rig, &mut fresh, main, index, &rows);
        let us = |work: &dyn Fn(&Stream)| {
            let graph = Graph::capture(&rig.stream, |s| {
                (0..100).for_each(|_| work(s));
                Ok(())
            });
            rig.median_us(&graph.unwrap()) / 100.0
        };
        let apart = us(&|s| layer.apart(s, &keys, &compress));
        let at_once = us(&|s| layer.at_once(s, &compress));
        println!("rows of a c4 layer, {tokens}: {apart:.2} us in three launches, {at_once:.2} at once");
        assert!(apart > 0.0 && at_once > 0.0);
        rig.arena.reset();
    }
}
