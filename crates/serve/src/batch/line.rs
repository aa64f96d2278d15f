//! One line of a batch: what is asked, and what the answer looks like in the output file.
//!
//! OpenAI's forms. Refuses lines that are no such request, with the field at fault; a streamed answer has no place in a
//! file.

use serde_json::{Map, Value, json};

use crate::errors::ApiError;
use crate::generation::fresh_number;

/// Routes that lines may ask.
pub(super) const ENDPOINTS: [&str; 4] = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"];
/// Longest `custom_id`, bytes.
const MAX_ID_BYTES: usize = 512;

/// A request.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Line {
    pub(super) custom_id: String,
    pub(super) url: String,
    pub(super) body: Map<String, Value>,
}

/// What is wrong with a line.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Fault {
    pub(super) param: Option<&'static str>,
    pub(super) message: String,
}

fn fault(param: &'static str, message: impl Into<String>) -> Fault {
    Fault { param: Some(param), message: message.into() }
}

/// Reads a line; with `endpoint`, all lines must ask that one.
pub(super) fn parse(text: &str, endpoint: Option<&str>) -> Result<Line, Fault> {
    let mut object = match serde_json::from_str(text) {
        Ok(Value::Object(object)) => object,
        Ok(_) => return Err(Fault { param: None, message: "the line is not a JSON object".to_owned() }),
        Err(error) => return Err(Fault { param: None, message: format!("the line is not valid JSON: {error}") }),
    };
    let custom_id = match object.get("custom_id").and_then(Value::as_str) {
        Some(id) if !id.is_empty() && id.len() <= MAX_ID_BYTES => id.to_owned(),
        _ => return Err(fault("custom_id", format!("expected a text of 1 to {MAX_ID_BYTES} bytes"))),
    };
    if object.get("method").and_then(Value::as_str) != Some("POST") {
        return Err(fault("method", "expected \"POST\""));
    }
    let url = object.get("url").and_then(Value::as_str).unwrap_or_default().to_owned();
    match endpoint {
        Some(endpoint) if url != endpoint => {
            return Err(fault("url", format!("expected {endpoint:?}, the endpoint of the batch")));
        }
        _ if !ENDPOINTS.contains(&url.as_str()) => {
            return Err(fault("url", format!("expected one of {}", ENDPOINTS.join(", "))));
        }
        _ => {}
    }
    let Some(Value::Object(body)) = object.remove("body") else {
        return Err(fault("body", "expected a JSON object"));
    };
    for (field, param) in [("stream", "body.stream"), ("background", "body.background")] {
        if !matches!(body.get(field), None | Some(Value::Null | Value::Bool(false))) {
            return Err(fault(param, "not possible in a batch, whose answers go to a file; leave the field out"));
        }
    }
    Ok(Line { custom_id, url, body })
}

/// The line of an answer, good or bad.
pub(super) fn answered(custom_id: &str, status: u16, body: &Value) -> String {
    let response = json!({"status_code": status, "request_id": fresh_id("req-"), "body": body});
    json!({"id": fresh_id("batch_req_"), "custom_id": custom_id, "response": response, "error": null}).to_string()
}

/// The line of a request that was never answered.
pub(super) fn unanswered(custom_id: &str, code: &str, message: &str) -> String {
    let error = json!({"code": code, "message": message});
    json!({"id": fresh_id("batch_req_"), "custom_id": custom_id, "response": null, "error": error}).to_string()
}

/// The request that a line of an output file answers, and whether well; `None` when it is no such line.
pub(super) fn answers(text: &str) -> Option<(String, bool)> {
    let line: Value = serde_json::from_str(text).ok()?;
    let id = line.get("custom_id")?.as_str()?.to_owned();
    let status = line.get("response")?.get("status_code").and_then(Value::as_u64);
    Some((id, status == Some(200)))
}

/// An id that nobody guesses.
pub(super) fn fresh_id(prefix: &str) -> String {
    format!("{prefix}{:016x}{:016x}", fresh_number(), fresh_number())
}

impl From<Fault> for ApiError {
    fn from(fault: Fault) -> ApiError {
        ApiError::field(fault.param.unwrap_or("line"), fault.message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_read_or_the_field_is_named() {
        let good = r#"{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{"messages":[]},"other":1}"#;
        let line = parse(good, Some("/v1/chat/completions")).unwrap();
        assert_eq!((line.custom_id.as_str(), line.body.len()), ("a", 1));
        assert_eq!(parse(good, Some("/v1/responses")).unwrap_err().param, Some("url"));
        for (from, to, param) in [
            (r#""custom_id":"a","#, "", Some("custom_id")),
            (r#""a""#, r#""""#, Some("custom_id")),
            ("POST", "GET", Some("method")),
            ("/v1/chat/completions", "/v1/models", Some("url")),
            ("/v1/chat/completions", "/metrics", Some("url")),
            (r#"{"messages":[]}"#, "[]", Some("body")),
            (r#"{"messages":[]}"#, r#"{"stream":true}"#, Some("body.stream")),
            (r#"{"messages":[]}"#, r#"{"background":true}"#, Some("body.background")),
            (r#""other":1}"#, "", None),
        ] {
            assert_eq!(parse(&good.replace(from, to), None).unwrap_err().param, param, "{from} -> {to}");
        }
    }

    #[test]
    fn what_is_written_is_recognised() {
        assert_eq!(answers(&answered("x\"y", 200, &json!({"a": 1}))), Some(("x\"y".into(), true)));
        assert_eq!(answers(&answered("x", 400, &json!({}))), Some(("x".into(), false)));
        assert_eq!(answers(&unanswered("x", "batch_expired", "late")), Some(("x".into(), false)));
        assert_eq!(answers(r#"{"custom_id":"x"#), None);
    }
}
