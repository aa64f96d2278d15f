//! The explorer's page and data: who may see what, what the page may load, what is refused.

use longwave_serve::ApiKeys;
use longwave_serve::explore::{Explorer, Refused};
use serde_json::{Value, json};

use crate::client::get;
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
