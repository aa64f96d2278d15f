//! Numbers with units, as people type and read them.
//! Sizes and token counts are binary (K = 1,024). Refuses what is not a number with a known suffix.

/// Parses a size in bytes: `4G`, `512MiB`, `1000000`. Suffixes are binary.
pub fn bytes(text: &str) -> Result<u64, String> {
    let wrong = || format!("{text:?} is not a size; write for example 4G, 512M or 1073741824");
    let at = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let number: f64 = text[..at].trim().parse().map_err(|_| wrong())?;
    let shift = match text[at..].to_ascii_lowercase().trim_end_matches("ib").trim_end_matches('b') {
        "" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        _ => return Err(wrong()),
    };
    let value = number * (1u64 << shift) as f64;
    if !value.is_finite() || value < 0.0 { Err(wrong()) } else { Ok(value as u64) }
}

/// Parses a token count: `131072`, `128K`, `1M` (binary, as context lengths are counted).
pub fn tokens(text: &str) -> Result<u32, String> {
    let wrong = || format!("{text:?} is not a token count; write for example 131072, 128K or 1M");
    let (number, factor) = match text.trim_end_matches(['k', 'K', 'm', 'M']) {
        n if n.len() == text.len() => (n, 1),
        n if text.ends_with(['k', 'K']) && n.len() + 1 == text.len() => (n, 1024),
        n if n.len() + 1 == text.len() => (n, 1024 * 1024),
        _ => return Err(wrong()),
    };
    let value = number.parse::<u64>().map_err(|_| wrong())?.checked_mul(factor).ok_or_else(wrong)?;
    u32::try_from(value).map_err(|_| wrong())
}

/// Parses a temperature: 0 to 2.
pub fn temperature(text: &str) -> Result<f32, String> {
    let value: f32 = text.parse().map_err(|_| format!("{text:?} is not a number"))?;
    if (0.0..=2.0).contains(&value) { Ok(value) } else { Err("a temperature is a number from 0 to 2".into()) }
}

/// Bytes in the largest fitting unit: `9.62 GiB`.
pub fn show_bytes(n: u64) -> String {
    match unit(n) {
        None => format!("{n} B"),
        Some((value, unit)) => format!("{value:.2} {unit}"),
    }
}

/// Bytes in the largest fitting unit, to three digits: `9.62 GiB`, `83.9 GiB`, `805 GiB`.
pub fn show_short(n: u64) -> String {
    match unit(n) {
        None => format!("{n} B"),
        Some((value, unit)) if value < 9.995 => format!("{value:.2} {unit}"),
        Some((value, unit)) if value < 99.95 => format!("{value:.1} {unit}"),
        Some((value, unit)) => format!("{value:.0} {unit}"),
    }
}

fn unit(n: u64) -> Option<(f64, &'static str)> {
    let (unit, shift) = match n {
        0..=1023 => return None,
        1024..=1_048_575 => ("KiB", 10),
        1_048_576..=1_073_741_823 => ("MiB", 20),
        _ => ("GiB", 30),
    };
    Some((n as f64 / (1u64 << shift) as f64, unit))
}

/// A number with thousands separators: `159,609,485,896`.
pub fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_counts_are_read_as_people_write_them() {
        assert_eq!(bytes("4G"), Ok(4 << 30));
        assert_eq!(bytes("1.5GiB"), Ok(3 << 29));
        assert_eq!(bytes("12mb"), Ok(12 << 20));
        assert_eq!(bytes("7"), Ok(7));
        assert!(bytes("many").is_err() && bytes("4X").is_err() && bytes("").is_err());
        assert_eq!((tokens("128K"), tokens("1M"), tokens("1048576")), (Ok(131_072), Ok(1_048_576), Ok(1_048_576)));
        assert!(tokens("9G").is_err() && tokens("-1").is_err() && tokens("5000M").is_err());
        assert_eq!(grouped(159_609_485_896), "159,609,485,896");
        assert_eq!((show_bytes(10_334_371_840), show_bytes(584)), ("9.62 GiB".into(), "584 B".into()));
        assert_eq!((show_short(10_334_371_840), show_short(90_060_095_488)), ("9.62 GiB".into(), "83.9 GiB".into()));
        assert_eq!((show_short(0), show_short(864_704_792_696)), ("0 B".into(), "805 GiB".into()));
    }
}
