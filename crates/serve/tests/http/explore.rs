//! The explorer's page and data: who may see what, what the page may load, what is refused.

use longwave_engine::attention::{LayerKind, Reads};
use longwave_serve::ApiKeys;
use longwave_serve::explore::{Explorer, Refused};
use serde_json::{Value, json};

use crate::client::{get, post_to};
use crate::scripted::{Script, Server};

/// Counts what it is asked.
pub fn explorer() -> Explorer {
    let answer = |query: &std::collections::HashMap<String, String>| match query.get("model") {
        Some(model) => Ok(json!({"model": model})),
        None => Err(Refused { field: "model".into(), message: "name one of a, b".into() }),
    };
    Explorer { models: json!({"models": []}), memory: Box::new(answer), table: Box::new(answer) }
}

#[tokio::test]
async fn the_page_is_open_and_may_load_nothing_from_elsewhere() {
    let keys = |options: &mut longwave_serve::ServerOptions| options.security.keys = ApiKeys::new(["sk-one"]).unwrap();
    let server = Server::with(Script::text("x"), 4096, keys).await;
    assert_eq!(get(server.port, "/explore").await.status, 308);
    for (path, kind) in
        [("/explore/", "text/html"), ("/explore/app.js", "text/javascript"), ("/explore/style.css", "text/css")]
    {
        let response = get(server.port, path).await;
        assert_eq!(response.status, 200, "{path}");
        assert!(response.headers.contains(kind), "{}", response.headers);
        for part in ["default-src 'none'", "connect-src 'self'", "nosniff"] {
            assert!(response.headers.contains(part), "{path}: {}", response.headers);
        }
    }
    assert!(get(server.port, "/explore/").await.body.contains("content=\"server\""));
    assert_eq!(get(server.port, "/explore/api/memory?model=a").await.json(), json!({"model": "a"}));
    // What the engine does is not for everybody.
    assert_eq!(get(server.port, "/explore/api/live").await.status, 401);
    assert_eq!(post_to(server.port, "/explore/api/attention", &json!({"text": "x", "layer": 0})).await.status, 401);
    assert_eq!(get(server.port, "/explore/api/about").await.status, 200);
}

#[tokio::test]
async fn unknown_files_and_bad_values_are_refused() {
    let server = Server::start(Script::text("x")).await;
    for path in ["/explore/nothing.js", "/explore/..%2fserver.rs", "/explore/api/nothing"] {
        assert_eq!(get(server.port, path).await.status, 404, "{path}");
    }
    for path in ["/explore/api/memory", "/explore/api/table"] {
        let response = get(server.port, path).await;
        assert_eq!((response.status, &response.json()["error"]["param"]), (400, &Value::from("model")), "{path}");
    }
    for wrong in ["0", "49", "x", "60001"] {
        let response = get(server.port, &format!("/explore/api/live?every_ms={wrong}")).await;
        assert_eq!((response.status, &response.json()["error"]["param"]), (400, &Value::from("every_ms")), "{wrong}");
    }
}

#[tokio::test]
async fn an_engine_without_a_view_says_so_and_ends_the_stream() {
    let server = Server::start(Script::text("x")).await;
    let response = get(server.port, "/explore/api/live").await;
    assert!(response.headers.contains("text/event-stream"));
    assert!(response.body.contains("this engine shows nothing"), "{}", response.body);
}

/// An engine that can tell of three layers.
fn telling(reads: Vec<Reads>) -> Script {
    let attention_layers = vec![LayerKind::Window, LayerKind::C128, LayerKind::C4];
    Script { attention_layers, reads, ..Script::text("river") }
}

#[tokio::test]
async fn what_tokens_read_is_told_of_a_text_that_runs_behind_other_requests() {
    let reads = Reads { window: vec![0.75], sink: 0.25, ..Reads::default() };
    let server = Server::start(telling(vec![reads; 3])).await;
    let about = get(server.port, "/explore/api/about").await.json();
    assert_eq!(about["attention"]["layers"], json!(["window", "c128", "c4"]));
    assert_eq!(about["attention"]["most_tokens"], 512);
    let told = post_to(server.port, "/explore/api/attention", &json!({"text": "the river", "layer": 2})).await;
    assert_eq!(told.status, 200, "{}", told.body);
    let told = told.json();
    assert_eq!((&told["kind"], told["reads"].as_array().unwrap().len()), (&json!("c4"), 3));
    assert_eq!(
        told["reads"][0],
        json!({"from": 0, "window": [750_000], "entries": [], "weights": [], "sink": 250_000})
    );
    assert!(told["next"]["id"].is_u64());
    let request = server.seen.requests.lock().unwrap()[0].clone();
    assert_eq!((request.attention, request.max_tokens), (Some(2), 1));
    assert!(request.priority > 0, "it waits behind others");
    let markers = server.tokenizer.markers();
    assert_eq!(request.prompt[0], markers.bos);
    let texts: Vec<&str> =
        told["tokens"].as_array().unwrap().iter().map(|token| token["text"].as_str().unwrap()).collect();
    assert_eq!(texts[1..].concat(), "the river");
}

#[tokio::test]
async fn more_texts_than_two_at_once_wait_for_their_turn() {
    // An engine that answers when it is told to: pauses are long enough to keep both places taken.
    let script = Script { pause: std::time::Duration::from_secs(1), ..telling(Vec::new()) };
    let server = Server::start(script).await;
    let body = json!({"text": "the river", "layer": 2});
    let ask = || async { post_to(server.port, "/explore/api/attention", &body).await };
    let (one, two, three) = tokio::join!(ask(), ask(), ask());
    let all = [one, two, three];
    let refused: Vec<_> = all.iter().filter(|answer| answer.status == 429).collect();
    assert_eq!((all.iter().filter(|answer| answer.status == 200).count(), refused.len()), (2, 1));
    assert!(refused[0].body.contains("2 texts are being read already"), "{}", refused[0].body);
    // Places come back.
    assert_eq!(ask().await.status, 200);
}

#[tokio::test]
async fn texts_and_layers_that_cannot_be_shown_are_refused_with_what_can() {
    let server = Server::start(telling(Vec::new())).await;
    let long = "the river ".repeat(400);
    for (body, param, said) in [
        (json!({"text": "x"}), "layer", "a layer from 0 to 2"),
        (json!({"text": "x", "layer": 3}), "layer", "a layer from 0 to 2"),
        (json!({"text": "x", "layer": -1}), "layer", "a layer from 0 to 2"),
        (json!({"layer": 0}), "text", "expected a text"),
        (json!({"text": long, "layer": 0}), "text", "512 can be shown at most"),
    ] {
        let response = post_to(server.port, "/explore/api/attention", &body).await;
        let error = response.json()["error"].clone();
        assert_eq!((response.status, &error["param"]), (400, &Value::from(param)), "{body}");
        assert!(error["message"].as_str().unwrap().contains(said), "{error}");
    }
    // One that cannot tell says what does.
    let server = Server::start(Script::text("x")).await;
    let about = get(server.port, "/explore/api/about").await.json();
    assert!(about["attention"].is_null() && about["why"].as_str().unwrap().contains("longwave explore"), "{about}");
    let response = post_to(server.port, "/explore/api/attention", &json!({"text": "x", "layer": 0})).await;
    assert_eq!(response.status, 400);
    assert!(response.body.contains("longwave explore"), "{}", response.body);
}
