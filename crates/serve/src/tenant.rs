//! Whose request it is: a number per API key, 0 where keys are not told apart.
//!
//! What is kept for later requests (responses, replays) is found by its own tenant only.

use axum::extract::FromRequestParts;
use axum::http::request::Parts;

use crate::caller::Caller;

/// A tenant: what the check of the API key found out about the caller.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Tenant(pub(crate) u64);

impl<S: Sync> FromRequestParts<S> for Tenant {
    type Rejection = std::convert::Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Tenant, Self::Rejection> {
        Ok(parts.extensions.get::<Caller>().map_or(Tenant(0), |caller| Tenant(caller.tenant)))
    }
}
