//! POST /v1/completions over real sockets.

use serde_json::json;

use crate::client::post_to;
use crate::scripted::{Script, Server};

#[tokio::test]
async fn a_plain_prompt_gets_a_plain_answer_with_markers_spelled() {
    let server = Server::start(Script::text("a thought</think>Answer")).await;
    let answer =
        post_to(server.port, "/v1/completions", &json!({"prompt": "Say", "max_tokens": 50, "echo": true})).await.json();
    assert_eq!(answer["object"], "text_completion");
    assert_eq!(answer["choices"][0]["text"], "Saya thought</think>Answer");
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    let prompt = server.last_request().prompt;
    assert_eq!(prompt[0], server.tokenizer.markers().bos);
    assert_eq!(answer["usage"]["prompt_tokens"], prompt.len());
}

#[tokio::test]
async fn sixteen_tokens_are_the_default_and_several_prompts_have_their_answers_in_order() {
    let server = Server::start(Script::text("one two three")).await;
    let answer = post_to(server.port, "/v1/completions", &json!({"prompt": ["a", [5, 6, 7]], "n": 2, "logprobs": 1}))
        .await
        .json();
    let choices = answer["choices"].as_array().unwrap();
    assert_eq!(choices.iter().map(|choice| choice["index"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 1, 2, 3]);
    assert_eq!(server.last_request().max_tokens, 16);
    let requests = server.seen.requests.lock().unwrap().clone();
    assert_eq!(requests[2].prompt, [5, 6, 7]);
    let prompts: usize = requests[0].prompt.len() + 3;
    assert_eq!(answer["usage"]["prompt_tokens"], prompts);
    let logprobs = &choices[0]["logprobs"];
    let tokens = logprobs["tokens"].as_array().unwrap();
    assert_eq!(tokens.iter().map(|token| token.as_str().unwrap()).collect::<String>(), "one two three");
    assert_eq!(logprobs["text_offset"][0], 0);
    assert_eq!(logprobs["token_logprobs"].as_array().unwrap().len(), tokens.len());
}

#[tokio::test]
async fn a_stream_says_what_the_whole_answer_says() {
    let server = Server::start(Script::text("one two\n\nthree")).await;
    let mut body = json!({"prompt": "a", "stop": "\n\n", "max_tokens": 50});
    let whole = post_to(server.port, "/v1/completions", &body).await.json();
    body["stream"] = true.into();
    body["stream_options"] = json!({"include_usage": true});
    let events = post_to(server.port, "/v1/completions", &body).await.events();
    let text: String = events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect();
    assert_eq!((text.as_str(), &whole["choices"][0]["text"]), ("one two", &json!("one two")));
    let last = &events[events.len() - 2]["choices"][0];
    assert_eq!((&last["finish_reason"], &last["stop_reason"]), (&json!("stop"), &json!("\n\n")));
    assert_eq!(events[events.len() - 1]["usage"]["prompt_tokens"], whole["usage"]["prompt_tokens"]);
}

#[tokio::test]
async fn bad_prompts_are_refused_with_the_field() {
    let server = Server::start(Script::text("x")).await;
    for (body, param) in [
        (json!({}), "prompt"),
        (json!({"prompt": 5}), "prompt"),
        (json!({"prompt": []}), "prompt"),
        (json!({"prompt": [[]]}), "prompt"),
        (json!({"prompt": [1, "a"]}), "prompt"),
        (json!({"prompt": [99_999_999]}), "prompt"),
        (json!({"prompt": "a", "suffix": 1}), "suffix"),
        (json!({"prompt": [1], "suffix": "b"}), "suffix"),
        (json!({"prompt": "a", "echo": true, "logprobs": 1}), "echo"),
        (json!({"prompt": "a", "best_of": 3}), "best_of"),
        (json!({"prompt": "a", "logprobs": 21}), "logprobs"),
        (json!({"prompt": "a", "stop": {}}), "stop"),
    ] {
        let answer = post_to(server.port, "/v1/completions", &body).await;
        assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!(param)), "{body}");
    }
}

#[tokio::test]
async fn token_ids_come_with_each_choice_and_its_prompt() {
    let server = Server::start(Script::text("one two")).await;
    let body = json!({"prompt": ["a", [5, 6, 7]], "return_token_ids": true});
    let whole = post_to(server.port, "/v1/completions", &body).await.json();
    let prompts: Vec<Vec<u32>> =
        server.seen.requests.lock().unwrap().iter().map(|request| request.prompt.clone()).collect();
    let mut output = server.tokenizer.encode_output("one two").unwrap();
    output.push(server.tokenizer.markers().eos);
    for (index, choice) in whole["choices"].as_array().unwrap().iter().enumerate() {
        assert_eq!((&choice["prompt_token_ids"], &choice["token_ids"]), (&json!(prompts[index]), &json!(output)));
    }
    let body = json!({"prompt": [5, 6, 7], "return_token_ids": true, "stream": true});
    let events = post_to(server.port, "/v1/completions", &body).await.events();
    let choices = || events.iter().map(|event| &event["choices"][0]);
    assert_eq!(choices().next().unwrap()["prompt_token_ids"], json!([5, 6, 7]));
    let ids: Vec<u64> = choices()
        .filter_map(|choice| choice["token_ids"].as_array())
        .flatten()
        .map(|id| id.as_u64().unwrap())
        .collect();
    assert_eq!(ids, output.iter().map(|&id| u64::from(id)).collect::<Vec<_>>());
}
