//! Typed access to the fields of a request body. Null counts as absent; a wrong type is an error that names the field.
//! For the fields that shape a prompt; what a value means is the readers' business.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::plan::ChatError;

pub(crate) fn read<T: DeserializeOwned>(value: &Value, param: impl Fn() -> String) -> Result<T, ChatError> {
    T::deserialize(value).map_err(|error| ChatError::field(param(), error))
}

/// A field that is present and not null.
pub(crate) fn present<'a>(body: &'a Map<String, Value>, name: &str) -> Option<&'a Value> {
    body.get(name).filter(|value| !value.is_null())
}

pub(crate) fn optional<T: DeserializeOwned>(body: &Map<String, Value>, name: &str) -> Result<Option<T>, ChatError> {
    present(body, name).map(|value| read(value, || name.to_owned())).transpose()
}

pub(crate) fn list<'a>(body: &'a Map<String, Value>, name: &str) -> Result<Option<&'a [Value]>, ChatError> {
    let Some(value) = present(body, name) else { return Ok(None) };
    value.as_array().map(|list| Some(list.as_slice())).ok_or_else(|| ChatError::field(name, "expected a list"))
}

pub(crate) fn object<'a>(
    body: &'a Map<String, Value>,
    name: &str,
) -> Result<Option<&'a Map<String, Value>>, ChatError> {
    let Some(value) = present(body, name) else { return Ok(None) };
    value.as_object().map(Some).ok_or_else(|| ChatError::field(name, "expected an object"))
}
