//! Who sent a request: put there by the key check, read by every handler that generates or stores something.
//!
//! Assumes that the check has run; a request without its mark is the one of a server without keys. Holds no key, only a
//! number that stands for it.

use std::convert::Infallible;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;

/// Least priority of a batch line: eight levels behind interactive requests of normal priority.
const BATCH_PRIORITY: i32 = 8;
/// The last level that a request can have.
const LAST_PRIORITY: i32 = 16;

/// The sender of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Caller {
    /// Stands for the API key: what one caller stored, no other one can read. 0 on a server without keys.
    pub(crate) tenant: u64,
    /// Whether the tenant enters the cache salt.
    pub(crate) isolated: bool,
    /// Whether it is a line of a batch, which waits behind interactive requests.
    pub(crate) batch: bool,
}

impl Caller {
    /// The cache salt of a request that asked for `salt`.
    pub(crate) fn salt(&self, salt: u64) -> u64 {
        if !self.isolated {
            return salt;
        }
        let mut both = [0; 16];
        both[..8].copy_from_slice(&self.tenant.to_le_bytes());
        both[8..].copy_from_slice(&salt.to_le_bytes());
        let mut mixed = [0; 8];
        mixed.copy_from_slice(&blake3::derive_key("longwave tenant salt", &both)[..8]);
        u64::from_le_bytes(mixed)
    }

    /// The priority of a request that asked for `priority`.
    pub(crate) fn priority(&self, priority: i32) -> i32 {
        if self.batch { (priority.max(0) + BATCH_PRIORITY).min(LAST_PRIORITY) } else { priority }
    }
}

impl<S: Sync> FromRequestParts<S> for Caller {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Caller, Infallible> {
        Ok(parts.extensions.get().copied().unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_isolated_callers_get_salts_of_their_own() {
        let open = Caller { tenant: 7, ..Caller::default() };
        assert_eq!((open.salt(0), open.salt(5)), (0, 5));
        let [one, two] = [7, 8].map(|tenant| Caller { tenant, isolated: true, batch: false });
        let salts = [one.salt(0), one.salt(5), two.salt(0), two.salt(5), 0, 5];
        for (i, salt) in salts.iter().enumerate() {
            assert!(!salts[..i].contains(salt), "{salts:?}");
        }
        assert_eq!(one.salt(5), one.salt(5));
    }

    #[test]
    fn batch_lines_wait_behind_everybody_of_normal_priority() {
        let line = Caller { batch: true, ..Caller::default() };
        assert_eq!([-16, 0, 3, 16].map(|p| line.priority(p)), [8, 8, 11, 16]);
        assert_eq!(Caller::default().priority(-3), -3);
    }
}
