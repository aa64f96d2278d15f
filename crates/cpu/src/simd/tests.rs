//! All implementations of the lanes give the bits of the plain one.

use super::*;

/// A mixed bag of finite numbers from a small generator.
fn numbers(seed: u64) -> [f32; 16] {
    let mut s = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    std::array::from_fn(|_| {
        s ^= s << 13;
        s ^= s >> 7;
        s ^= s << 17;
        ((s >> 40) as f32 / 8_388_608.0 - 1.0) * [1.0, 30.0, 1e-3, 80.0][(s % 4) as usize]
    })
}

#[inline(always)]
fn everything_body<V: Lanes>(seed: u64, out: &mut Vec<u32>) {
    let mut put = |v: V| {
        let mut x = [0.0; 16];
        v.store(&mut x);
        out.extend(x.map(f32::to_bits));
    };
    let (a, b, c) = (V::load(&numbers(seed)), V::load(&numbers(seed + 1)), V::load(&numbers(seed + 2)));
    for v in [a.add(b), a.sub(b), a.mul(b), a.div(b), a.fma(b, c), a.max(b), a.min(b), a.abs(), a.round_bf16()] {
        put(v);
    }
    put(a.round_int());
    put(a.round_int().exp2_int());
    put(a.exp());
    put(a.keep_above(b, 0.25));
    let bytes: [u8; 32] =
        std::array::from_fn(|i| (seed as u8).wrapping_mul(37).wrapping_add((i as u8).wrapping_mul(11)));
    let finite = bytes.map(|b| if b & 0x7f == 0x7f { b ^ 1 } else { b });
    put(V::load_e4m3(finite[..16].try_into().unwrap()));
    put(V::load_e4m3_small(finite[16..].try_into().unwrap()));
    put(V::load_e2m1(bytes[..8].try_into().unwrap()));
    put(V::load_bf16(&bytes.map(|b| b & 0xbf)));
    let many: [V; 16] = std::array::from_fn(|i| V::load(&numbers(seed + 7 * i as u64)));
    put(V::sums(&many));
    put(V::splat(many[5].sum()));
    put(V::splat(a.max_lane()));
}

#[test]
fn vector_levels_match_the_plain_one_bit_for_bit() {
    for seed in 0..500 {
        let mut plain = Vec::new();
        everything_body::<Scalar>(seed, &mut plain);
        #[cfg(target_arch = "x86_64")]
        {
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
            fn avx512(seed: u64, out: &mut Vec<u32>) {
                everything_body::<Avx512>(seed, out)
            }
            #[target_feature(enable = "avx2,fma,f16c")]
            fn avx2(seed: u64, out: &mut Vec<u32>) {
                everything_body::<Avx2>(seed, out)
            }
            let (mut wide, mut narrow) = (Vec::new(), Vec::new());
            if best_level() >= Level::Avx512 {
                // SAFETY: the CPU has it.
                unsafe { avx512(seed, &mut wide) };
                assert_eq!(plain, wide, "avx512, seed {seed}");
            }
            if best_level() >= Level::Avx2 {
                // SAFETY: the CPU has it.
                unsafe { avx2(seed, &mut narrow) };
                assert_eq!(plain, narrow, "avx2, seed {seed}");
            }
        }
    }
}

#[test]
fn exp_is_close_and_clean_at_the_ends() {
    let mut worst = 0.0f64;
    let mut x = -87.0f32;
    while x < 80.0 {
        let (got, want) = (f64::from(exp(x)), f64::from(x).exp());
        worst = worst.max(((got - want) / want).abs());
        x += 0.000_731;
    }
    assert!(worst < 1.3e-7, "worst relative error {worst:e}");
    assert_eq!((exp(0.0), exp(-1000.0), exp(f32::NEG_INFINITY)), (1.0, 0.0, 0.0));
}
