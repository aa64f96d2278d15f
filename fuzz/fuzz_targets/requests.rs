//! Any body on every route that takes one. The first byte chooses the route. No panic, and never a 500.
//! The server is the real one, over an engine that plays a script.
#![no_main]

use std::sync::{Arc, LazyLock};

use axum::body::Body;
use axum::http::Request;
use libfuzzer_sys::fuzz_target;
use longwave_serve::{App, ServerOptions, read_script, router, scripted};
use longwave_text::Tokenizer;
use tower::ServiceExt;

const ROUTES: [&str; 9] = [
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/completions",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
    "/render?protocol=responses",
    "/render?protocol=messages",
];

static APP: LazyLock<Arc<App>> = LazyLock::new(|| {
    let tokenizer = Tokenizer::from_bytes(include_bytes!("../../testdata/tiny/tokenizer.json"));
    let tokenizer = Arc::new(tokenizer.expect("the embedded tokenizer"));
    let script = read_script(r#"{"reply": "thought</think>text"}"#).expect("a script");
    let engine = scripted(script, tokenizer.clone(), 4096);
    let options = ServerOptions { served_model_names: vec!["m".into()], ..ServerOptions::default() };
    Arc::new(App::new(options, engine, tokenizer))
});

fuzz_target!(|data: &[u8]| {
    let [route, body @ ..] = data else { return };
    let path = ROUTES[usize::from(*route) % ROUTES.len()];
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let request = Request::post(path).header("content-type", "application/json").body(Body::from(body.to_vec()));
        let answer = router(APP.clone()).oneshot(request.expect("a request")).await.expect("an answer");
        assert!(answer.status() != 500, "{path} {}", String::from_utf8_lossy(body));
        let body = axum::body::to_bytes(answer.into_body(), 1 << 24).await.expect("a body");
        assert!(!body.is_empty());
    });
});
