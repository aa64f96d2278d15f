//! What handlers take of a request: its body, the name in its path, its query.
//!
//! Each is refused in the form that the clients of the route read, so no handler says it again. Assumes routes with one
//! name in the path.

use std::sync::Arc;

use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::request::Parts;
use axum::response::Response;
use bytes::Bytes;
use serde::de::DeserializeOwned;

use crate::errors::{ApiError, whole_body};
use crate::security::refusal;
use crate::server::App;

/// The bytes of the body, all of them, within the limit.
pub(crate) struct RawBody(pub(crate) Bytes);

impl FromRequest<Arc<App>> for RawBody {
    type Rejection = Response;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<RawBody, Response> {
        let path = request.uri().path().to_owned();
        let bytes = Bytes::from_request(request, app).await;
        whole_body(bytes, app.options.max_body_bytes).map(RawBody).map_err(|error| refusal(&path, error))
    }
}

/// The name in the path.
pub(crate) struct Name(pub(crate) String);

impl FromRequestParts<Arc<App>> for Name {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Name, Response> {
        let name = Path::<String>::from_request_parts(parts, app).await.map_err(ApiError::from);
        name.map(|Path(name)| Name(name)).map_err(|error| refusal(parts.uri.path(), error))
    }
}

/// The query.
pub(crate) struct Asked<T>(pub(crate) T);

impl<T: DeserializeOwned> FromRequestParts<Arc<App>> for Asked<T> {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Asked<T>, Response> {
        let query = Query::<T>::from_request_parts(parts, app).await.map_err(ApiError::from);
        query.map(|Query(query)| Asked(query)).map_err(|error| refusal(parts.uri.path(), error))
    }
}
