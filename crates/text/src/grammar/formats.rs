//! Patterns of the formats of JSON schemas that a raw string is held to. A format that is not listed only describes, as the
//! standard has it. Inside JSON the library knows the same names; it writes no addresses of IPv6 that end like one of IPv4,
//! and its form of a URI is narrower. Not taken: quoted local parts of mail addresses.

/// The pattern that a whole string of this format follows; `None` for formats that hold nobody to anything.
pub(super) fn pattern_of(format: &str) -> Option<String> {
    let date = "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-9])))";
    let time = "(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:(?:[0-5][0-9]|60)(?:[.][0-9]+)?(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9]))";
    let label = "[0-9A-Za-z](?:[0-9A-Za-z-]{0,61}[0-9A-Za-z])?";
    let byte = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])";
    Some(match format {
        "date" => date.to_owned(),
        "time" => time.to_owned(),
        "date-time" => format!("{date}[Tt]{time}"),
        "duration" => duration(),
        "uuid" => "[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}".to_owned(),
        "hostname" => format!("{label}(?:[.]{label})*"),
        "email" => {
            let word = "[0-9A-Za-z!#$%&'*+/=?^_`{|}~-]+";
            format!("{word}(?:[.]{word})*@(?:{label}(?:[.]{label})*|\\[{byte}(?:[.]{byte}){{3}}\\])")
        }
        "ipv4" => format!("{byte}(?:[.]{byte}){{3}}"),
        "ipv6" => ipv6(&format!("{byte}(?:[.]{byte}){{3}}")),
        "uri" => "[A-Za-z][0-9A-Za-z+.-]*:(?:[0-9A-Za-z._~:/?#@!$&'()*+,;=\\[\\]-]|%[0-9A-Fa-f]{2})*".to_owned(),
        _ => return None,
    })
}

/// Weeks, or days and times of which each unit may only be followed by the next smaller one.
fn duration() -> String {
    let chain = |units: [&str; 3]| {
        let [a, b, c] = units.map(|unit| format!("[0-9]+{unit}"));
        format!("(?:{a}(?:{b}(?:{c})?)?|{b}(?:{c})?|{c})")
    };
    let (date, time) = (chain(["Y", "M", "D"]), chain(["H", "M", "S"]));
    format!("P(?:[0-9]+W|{date}(?:T{time})?|T{time})")
}

/// Eight groups, of which one run may be written as `::` and the last two as an address of IPv4.
fn ipv6(ipv4: &str) -> String {
    let group = "[0-9A-Fa-f]{1,4}";
    let mut forms = vec![format!("{group}(?::{group}){{7}}"), format!("(?:{group}:){{6}}{ipv4}")];
    for before in 0..=7usize {
        // The run stands for at least one group.
        let head = if before == 0 { String::new() } else { format!("{group}(?::{group}){{{}}}", before - 1) };
        let tail = match 7 - before {
            0 => String::new(),
            rest => format!("(?:{group}(?::{group}){{0,{}}})?", rest - 1),
        };
        forms.push(format!("{head}::{tail}"));
        if let Some(rest) = 5usize.checked_sub(before) {
            forms.push(format!("{head}::(?:{group}:){{0,{rest}}}{ipv4}"));
        }
    }
    format!("(?:{})", forms.join("|"))
}
