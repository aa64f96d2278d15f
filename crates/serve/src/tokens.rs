//! POST /tokenize, /detokenize and /render: what a request looks like in tokens, without running it.
//!
//! `/tokenize` takes a `prompt` or the `messages` of a chat; `/render` a whole body of any protocol (`?protocol=`, chat by
//! default) and gives the prompt as text and ids. Ids of users' texts are never control tokens.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use longwave_text::ChatPlan;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::controls::Fields;
use crate::errors::{ApiError, json_object};
use crate::input::{Asked, RawBody};
use crate::job;
use crate::server::App;

/// Which protocol a body is of.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Form {
    protocol: Option<String>,
}

/// The prompt of a body: text and ids.
pub(crate) async fn render(
    State(app): State<Arc<App>>,
    Asked(form): Asked<Form>,
    RawBody(body): RawBody,
) -> Result<Json<Value>, ApiError> {
    let rendered = job::blocking(&app, move |app| {
        let protocol = form.protocol.as_deref().unwrap_or("chat");
        let plan = ChatPlan::of_protocol(protocol, &json_object(&body)?, app.options.chat)
            .ok_or_else(|| ApiError::field("protocol", "expected chat, responses or messages"))??;
        let prompt = plan.prompt();
        let ids = prompt.encode(&app.tokenizer).map_err(|error| ApiError::field("messages", error))?;
        Ok(json!({
            "prompt": prompt.text, "prompt_token_ids": ids, "count": ids.len(),
            "max_model_len": app.engine.limits.context, "thinking": plan.thinking(),
        }))
    });
    Ok(Json(rendered.await?))
}

/// Ids of a text or of a chat's prompt.
pub(crate) async fn tokenize(State(app): State<Arc<App>>, RawBody(body): RawBody) -> Result<Json<Value>, ApiError> {
    let answer = job::blocking(&app, move |app| {
        let body = json_object(&body)?;
        job::model(app, &body)?;
        let ids = match (body.get("prompt"), body.get("messages")) {
            (Some(Value::String(text)), _) => {
                let text = app.tokenizer.encode_text(text).map_err(|error| ApiError::field("prompt", error))?;
                let bos =
                    Fields(&body).flag("add_special_tokens")?.unwrap_or(true).then_some(app.tokenizer.markers().bos);
                bos.into_iter().chain(text).collect()
            }
            (None | Some(Value::Null), Some(_)) => {
                let plan = ChatPlan::from_body(&body, app.options.chat)?;
                plan.prompt().encode(&app.tokenizer).map_err(|error| ApiError::field("messages", error))?
            }
            (Some(_), _) => return Err(ApiError::field("prompt", "expected a string")),
            (None, None) => return Err(ApiError::field("prompt", "a prompt or messages are needed")),
        };
        let ids: Vec<u32> = ids;
        let spelled = |&id: &u32| String::from_utf8_lossy(app.tokenizer.token_bytes(id)).into_owned();
        let strings = Fields(&body)
            .flag("return_token_strs")?
            .unwrap_or(false)
            .then(|| ids.iter().map(spelled).collect::<Vec<_>>());
        Ok(json!({
            "count": ids.len(), "max_model_len": app.engine.limits.context, "tokens": ids, "token_strs": strings,
        }))
    });
    Ok(Json(answer.await?))
}

/// The text of ids.
pub(crate) async fn detokenize(State(app): State<Arc<App>>, RawBody(body): RawBody) -> Result<Json<Value>, ApiError> {
    let answer = job::blocking(&app, move |app| {
        let body = json_object(&body)?;
        job::model(app, &body)?;
        let vocab = u64::from(app.engine.limits.vocab);
        let bad = || ApiError::field("tokens", format!("expected a list of token ids below {vocab}"));
        let tokens = body.get("tokens").and_then(Value::as_array).ok_or_else(bad)?;
        let mut bytes = Vec::new();
        for token in tokens {
            let token = token.as_u64().filter(|&token| token < vocab).ok_or_else(bad)?;
            bytes.extend_from_slice(app.tokenizer.token_bytes(token as u32));
        }
        Ok(json!({"prompt": String::from_utf8_lossy(&bytes)}))
    });
    Ok(Json(answer.await?))
}
