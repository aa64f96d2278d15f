//! Hadamard rotation of the 128-wide indexer vectors (model.md 3.4), after RoPE.
//! Assumes exactly 128 channels. Queries and keys are both rotated, so scores change by rounding only.

/// `y = H x / sqrt(128)` with the Sylvester matrix, f32 butterflies, in place.
pub fn hadamard(x: &mut [f32]) {
    assert_eq!(x.len(), 128);
    let mut half = 1;
    while half < 128 {
        for start in (0..128).step_by(2 * half) {
            let (a, b) = x[start..start + 2 * half].split_at_mut(half);
            for (p, q) in a.iter_mut().zip(b) {
                (*p, *q) = (*p + *q, *p - *q);
            }
        }
        half *= 2;
    }
    for v in x {
        *v *= 0.088_388_35;
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn unit_vector_one_gives_alternating_signs() {
        let mut x = [0.0; 128];
        x[1] = 1.0;
        super::hadamard(&mut x);
        for (i, v) in x.iter().enumerate() {
            let want = if i % 2 == 0 { 0.0883883 } else { -0.0883883 };
            assert!((v - want).abs() < 1e-7);
        }
    }
}
