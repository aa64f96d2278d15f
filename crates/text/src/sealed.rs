//! Thoughts on their way through a client that must not read or keep them as text.
//!
//! Clients that ask for `reasoning.encrypted_content` send it back unread with the next request, and the thought is
//! restored from it, also after a restart and on another server. It is sealed against accidents, not against readers: the
//! same client may read the thought in the answer itself. A damaged or foreign text opens to nothing.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD as BASE64;

/// Names the format; everything else in the field comes from somewhere else.
const PREFIX: &str = "lw1.";

/// Seals a thought.
pub fn seal(thought: &str) -> String {
    let check = checksum(thought.as_bytes());
    let mut bytes = check.to_le_bytes().to_vec();
    bytes.extend_from_slice(thought.as_bytes());
    format!("{PREFIX}{}", BASE64.encode(bytes))
}

/// Opens what [`seal`] made.
pub fn open(sealed: &str) -> Option<String> {
    let bytes = BASE64.decode(sealed.strip_prefix(PREFIX)?).ok()?;
    let (check, thought) = bytes.split_first_chunk::<8>()?;
    let thought = std::str::from_utf8(thought).ok()?;
    (u64::from_le_bytes(*check) == checksum(thought.as_bytes())).then(|| thought.to_owned())
}

/// FNV-1a: enough against a text that was cut or edited.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_sealed_opens_and_nothing_else_does() {
        for thought in ["", "one", "zwei\n\u{1f600} \u{fffd}"] {
            assert_eq!(open(&seal(thought)).as_deref(), Some(thought));
        }
        let sealed = seal("a longer thought");
        assert_eq!(open(&sealed[..sealed.len() - 2]), None);
        assert_eq!(open(&sealed.replace("lw1.", "lw2.")), None);
        for foreign in ["", "lw1.", "lw1.!!", "gAAAAABo", "resp_1-0"] {
            assert_eq!(open(foreign), None, "{foreign}");
        }
    }
}
