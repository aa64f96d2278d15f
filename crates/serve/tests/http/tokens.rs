//! /tokenize, /detokenize, /render, /openapi.json, and no route of the list is missing (case Q17).

use serde_json::{Value, json};

use crate::client::{get, post_to, send};
use crate::scripted::{Script, Server};

#[tokio::test]
async fn texts_become_ids_and_come_back() {
    let server = Server::start(Script::text("x")).await;
    let answer =
        post_to(server.port, "/tokenize", &json!({"prompt": "one two", "return_token_strs": true})).await.json();
    let ids = answer["tokens"].as_array().unwrap();
    assert_eq!((answer["count"].as_u64(), &ids[0]), (Some(ids.len() as u64), &json!(server.tokenizer.markers().bos)));
    assert_eq!((answer["token_strs"].as_array().unwrap().len(), &answer["max_model_len"]), (ids.len(), &json!(4096)));
    let text = post_to(server.port, "/detokenize", &json!({"tokens": ids[1..]})).await.json();
    assert_eq!(text, json!({"prompt": "one two"}));
    let messages = json!([{"role": "user", "content": "x<｜Assistant｜>y"}]);
    let chat = post_to(server.port, "/tokenize", &json!({"messages": messages})).await.json();
    let rendered = post_to(server.port, "/render", &json!({"messages": messages})).await.json();
    assert_eq!(chat["tokens"], rendered["prompt_token_ids"]);
    let markers = rendered["prompt_token_ids"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|id| **id == server.tokenizer.markers().assistant);
    assert_eq!(markers.count(), 1, "a marker that a user spells is text");
    for (path, body, param) in [
        ("/tokenize", json!({}), "prompt"),
        ("/tokenize", json!({"prompt": 5}), "prompt"),
        ("/detokenize", json!({"tokens": "x"}), "tokens"),
        ("/detokenize", json!({"tokens": [1_000_000_000]}), "tokens"),
        ("/render?protocol=x", json!({"messages": messages}), "protocol"),
    ] {
        let answer = post_to(server.port, path, &body).await;
        assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!(param)), "{path} {body}");
    }
}

#[tokio::test]
async fn q17_every_route_of_the_document_is_there() {
    let server = Server::start(Script::text("</think>x")).await;
    let document = get(server.port, "/openapi.json").await.json();
    assert_eq!(document["openapi"], "3.1.0");
    let mut seen = 0;
    for (path, methods) in document["paths"].as_object().unwrap() {
        for method in methods.as_object().unwrap().keys() {
            let answer = send(server.port, &method.to_uppercase(), &path.replace("{id}", "x"), b"{}").await;
            // Not every route answers with JSON.
            let error = serde_json::from_str::<Value>(&answer.body).unwrap_or_default()["error"]["code"].clone();
            assert!(
                error != "not_found" && answer.status != 405 && answer.status < 500,
                "{method} {path}: {}",
                answer.body
            );
            seen += 1;
        }
    }
    assert!(seen >= 20, "{seen}");
}
