//! API keys: which are accepted, and whose a request is.
//!
//! A key is kept and compared as its blake3 hash, in constant time over all keys, and is never printed. Sent as
//! `Authorization: Bearer KEY` (OpenAI) or `x-api-key: KEY` (Anthropic). Refuses keys that are empty or cannot stand in a
//! header.

use std::fmt;

use axum::http::{HeaderMap, header};
use thiserror::Error;

/// Longest key, bytes.
const MAX_KEY_BYTES: usize = 512;
/// Most keys of a server.
const MAX_KEYS: usize = 10_000;

/// Why a key is not accepted. Says which one by its place, never the key.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum KeyError {
    /// Nothing in it.
    #[error("API key {place} is empty")]
    Empty {
        /// From 1, in the order of the source.
        place: usize,
    },
    /// A header could not carry it, or it has spaces around it.
    #[error("API key {place} must be 1 to {MAX_KEY_BYTES} visible ASCII characters without spaces")]
    Unusable {
        /// From 1, in the order of the source.
        place: usize,
    },
    /// Checking takes longer with every key.
    #[error("{count} API keys are too many, at most {MAX_KEYS}")]
    TooMany {
        /// How many were given.
        count: usize,
    },
}

/// The accepted keys; none means that everybody may ask.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct ApiKeys {
    hashes: Vec<blake3::Hash>,
}

impl fmt::Debug for ApiKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ApiKeys({} keys)", self.hashes.len())
    }
}

impl ApiKeys {
    /// Takes keys in; equal ones count once.
    pub fn new<'a>(keys: impl IntoIterator<Item = &'a str>) -> Result<ApiKeys, KeyError> {
        let mut hashes = Vec::new();
        for (index, key) in keys.into_iter().enumerate() {
            let place = index + 1;
            if key.is_empty() {
                return Err(KeyError::Empty { place });
            }
            if key.len() > MAX_KEY_BYTES || !key.bytes().all(|byte| byte.is_ascii_graphic()) {
                return Err(KeyError::Unusable { place });
            }
            let hash = blake3::hash(key.as_bytes());
            if !hashes.contains(&hash) {
                hashes.push(hash);
            }
        }
        let count = hashes.len();
        if count > MAX_KEYS { Err(KeyError::TooMany { count }) } else { Ok(ApiKeys { hashes }) }
    }

    /// The keys of a file: one a line, without empty lines and those that begin with `#`.
    pub fn lines(text: &str) -> impl Iterator<Item = &str> {
        text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'))
    }

    /// Whether everybody may ask.
    pub fn is_empty(&self) -> bool {
        self.hashes.is_empty()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.hashes.len()
    }

    /// Number of the key that a request carries, if it is accepted. A client may send two headers; one good key is enough.
    pub(crate) fn find(&self, headers: &HeaderMap) -> Option<usize> {
        let bearer = headers.get(header::AUTHORIZATION).and_then(|value| bearer(value.as_bytes()));
        let own = headers.get("x-api-key").map(|value| value.as_bytes());
        bearer.into_iter().chain(own).filter_map(|key| self.number_of(key)).next()
    }

    /// Looks at every key, whichever fits: the time tells nothing.
    fn number_of(&self, key: &[u8]) -> Option<usize> {
        let key = blake3::hash(key);
        let mut found = None;
        for (number, hash) in self.hashes.iter().enumerate() {
            // `blake3::Hash` compares in constant time.
            if *hash == key {
                found = Some(number);
            }
        }
        found
    }

    /// Stands for a key in cache salts and in names of what its owner stored; survives restarts.
    pub(crate) fn tenant(&self, number: usize) -> u64 {
        let derived = blake3::derive_key("longwave tenant", self.hashes[number].as_bytes());
        let mut tenant = [0; 8];
        tenant.copy_from_slice(&derived[..8]);
        u64::from_le_bytes(tenant)
    }
}

/// The token of `Bearer TOKEN`; the scheme's name may have any case.
fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| token.trim_ascii())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        pairs.iter().map(|&(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect()
    }

    #[test]
    fn a_key_is_found_in_either_header() {
        let keys = ApiKeys::new(["sk-one", "sk-two", "sk-one"]).unwrap();
        assert_eq!(keys.len(), 2);
        for (pairs, number) in [
            (&[("authorization", "Bearer sk-one")][..], Some(0)),
            (&[("authorization", "bearer  sk-two ")], Some(1)),
            (&[("x-api-key", "sk-two")], Some(1)),
            (&[("authorization", "Bearer none"), ("x-api-key", "sk-one")], Some(0)),
            (&[("authorization", "sk-one")], None),
            (&[("authorization", "Basic sk-one")], None),
            (&[("authorization", "Bearer ")], None),
            (&[("authorization", "Bearer sk-onesk-one")], None),
            (&[("x-api-key", "sk-on")], None),
            (&[], None),
        ] {
            assert_eq!(keys.find(&headers(pairs)), number, "{pairs:?}");
        }
    }

    #[test]
    fn bad_keys_are_refused_by_place_and_never_shown() {
        assert_eq!(ApiKeys::new(["a", ""]), Err(KeyError::Empty { place: 2 }));
        for key in ["with space", "tab\t", "schlüssel", &"x".repeat(513)] {
            let error = ApiKeys::new([key]).unwrap_err();
            assert_eq!(error, KeyError::Unusable { place: 1 });
            assert!(!error.to_string().contains(key));
        }
        let shown = format!("{:?}", ApiKeys::new(["sk-secret"]).unwrap());
        assert_eq!(shown, "ApiKeys(1 keys)");
    }

    #[test]
    fn a_file_has_a_key_per_line_and_comments() {
        let lines: Vec<&str> = ApiKeys::lines("# team\n\n sk-one \r\nsk-two\n").collect();
        assert_eq!(lines, ["sk-one", "sk-two"]);
    }

    #[test]
    fn tenants_differ_and_stay() {
        let keys = ApiKeys::new(["a", "b"]).unwrap();
        assert_ne!(keys.tenant(0), keys.tenant(1));
        assert_eq!(keys.tenant(1), ApiKeys::new(["b"]).unwrap().tenant(0));
    }
}
