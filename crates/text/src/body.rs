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

/// A whole request in the vendor's type. When that fails, its parts are read alone, beside `least`, to name the one that is
/// wrong: first the fields `whole`, with the names that clients know them by, then the elements of the lists `lists`.
pub(crate) fn typed<T: DeserializeOwned>(
    request: Value,
    least: &Value,
    whole: &[(&str, &str)],
    lists: &[&str],
) -> Result<T, ChatError> {
    let error = match T::deserialize(&request) {
        Ok(request) => return Ok(request),
        Err(error) => error,
    };
    let alone = |name: &str, value: Value| {
        let mut alone = least.clone();
        alone[name] = value;
        T::deserialize(alone).err()
    };
    for (name, param) in whole {
        if let Some(error) = alone(name, request[*name].clone()) {
            return Err(ChatError::field(*param, error));
        }
    }
    for name in lists {
        for (index, value) in request[*name].as_array().into_iter().flatten().enumerate() {
            if let Some(error) = alone(name, Value::Array(vec![value.clone()])) {
                return Err(ChatError::field(format!("{name}[{index}]"), error));
            }
        }
    }
    Err(ChatError { message: error.to_string(), param: None })
}
