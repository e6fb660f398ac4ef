//! Calls of tools in MCP: keys, intents, streams, and refusals that a model reads.

use bytes::Bytes;
use oncegate_testkit::Latch;
use serde_json::{Value, json};

use crate::backend::{BodyPart, Script};
use crate::client::{Request, Response};
use crate::plan::{Callers, Plan};
use crate::table::Case;
use crate::world::World;

pub(super) fn cases() -> Vec<Case> {
    let mcp = || Plan { profile: "mcp", scope: Callers::SingleTenant, ..Plan::default() };
    let tools = || Plan { intent_tools: Some("order"), read_only_tools: Some("get_*"), ..mcp() };
    cases! {
        "agents-key": "a call with a used key has the first result, under its own id"
            .given(mcp()) => run (keys);
        "agents-stream": "the result in a stream is replayed as one message"
            .given(mcp()) => run (streams);
        "agents-stream-broken": "a stream that breaks off leaves an unknown outcome, and a tool error says so"
            .given(mcp()) => run (broken_stream);
        "agents-intent": "the key of an intent is that of tool, arguments and run, whatever key the client sends"
            .given(tools()) => run (intents);
        "agents-outcomes": "the result decides whether the key is free"
            .given(mcp()) => run (outcomes);
        "agents-refusals": "the refusal of another sidecar frees the key, and a field that the server passes on does not"
            .given(mcp()) => run (refusals);
        "agents-session": "a session is not ended while a call runs in it, under whatever name of the field"
            .given(mcp()) => run (sessions);
        "agents-other-messages": "other messages and reading tools pass; calls that cannot be told apart are refused"
            .given(Plan { require_key: true, ..tools() }) => run (other_messages);
    }
}

fn call(id: u32, tool: &str, amount: u32, meta: &Value) -> Request {
    let params = json!({"name": tool, "arguments": {"amount": amount, "to": "ada"}, "_meta": meta});
    message(&json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params}))
}

fn message(message: &Value) -> Request {
    Request::post("/mcp").json(message.to_string()).field("Accept", "application/json, text/event-stream")
}

fn key(text: &str) -> Value {
    json!({"idempotencyKey": text, "progressToken": 7})
}

fn result(id: u32) -> String {
    json!({"jsonrpc": "2.0", "id": id, "result": {"content": [{"type": "text", "text": "paid"}]}}).to_string()
}

fn answers(body: String) -> Script {
    Script::whole(200, "application/json", body)
}

fn in_stream(end: BodyPart) -> Script {
    let progress = "data: {\"jsonrpc\":\"2.0\",\"method\":\"notifications/progress\",\"params\":{}}\n\n";
    Script::pieces(200, "text/event-stream", vec![BodyPart::Data(Bytes::from(progress)), end])
}

#[track_caller]
fn is_replayed(response: &Response, id: u32) {
    let body = response.json();
    assert_eq!(body["id"], id, "{response:?}");
    assert_eq!(body["result"]["content"][0]["text"], "paid", "{response:?}");
    assert_eq!(body["result"]["_meta"]["oncegate/replayed"], true, "{response:?}");
    assert_eq!(response.get("idempotent-replayed"), Some("true"), "{response:?}");
    assert_eq!(response.get("content-type"), Some("application/json"), "{response:?}");
}

#[track_caller]
fn is_problem(response: &Response, id: u32, slug: &str) {
    assert_eq!(response.status(), 200, "{response:?}");
    let body = response.json();
    assert_eq!((&body["id"], &body["result"]["isError"]), (&json!(id), &json!(true)), "{response:?}");
    let problem = &body["result"]["_meta"]["oncegate/problem"];
    assert_eq!(problem["type"], format!("urn:oncegate:problem:{slug}"), "{response:?}");
}

async fn keys(world: World) {
    let done = Latch::new();
    let first = world.start_send(call(1, "pay", 1, &key("a")).script(answers(result(1)).held(&done)));
    world.backend.until_effects(1).await;
    is_problem(&world.send(call(2, "pay", 1, &key("a"))).await, 2, "request-in-progress");
    done.open();
    let first = first.await.unwrap().expect("a response");
    assert_eq!(first.json()["result"]["_meta"], Value::Null, "{first:?}");
    is_replayed(&world.send(call(3, "pay", 1, &key("a"))).await, 3);
    is_problem(&world.send(call(4, "pay", 2, &key("a"))).await, 4, "key-reused");
    is_problem(&world.send(call(5, "refund", 1, &key("a"))).await, 5, "key-reused");
    is_problem(&world.send(call(6, "pay", 1, &key(""))).await, 6, "key-invalid");
    assert_eq!(world.backend.effects(), 1);
    for effects in [2, 3] {
        world.send(call(7, "pay", 1, &json!({})).script(answers(result(7)))).await;
        assert_eq!(world.backend.effects(), effects, "a call without a key passes");
    }
}

async fn streams(world: World) {
    let last = BodyPart::Data(Bytes::from(format!("data: {}\n\n", result(1))));
    let first = world.send(call(1, "pay", 1, &key("a")).script(in_stream(last))).await;
    assert_eq!(first.get("content-type"), Some("text/event-stream"), "{first:?}");
    let text = String::from_utf8_lossy(&first.body).into_owned();
    assert!(text.contains("notifications/progress") && text.contains("paid"), "{text}");
    is_replayed(&world.send(call(2, "pay", 1, &key("a"))).await, 2);
    assert_eq!(world.backend.effects(), 1);
}

async fn broken_stream(world: World) {
    let first = world.send(call(1, "pay", 1, &key("a")).script(in_stream(BodyPart::Break))).await;
    let text = String::from_utf8_lossy(&first.body).into_owned();
    assert!(text.contains("urn:oncegate:problem:outcome-unknown"), "{first:?}");
    is_problem(&world.send(call(2, "pay", 1, &key("a"))).await, 2, "outcome-unknown");
    assert_eq!(world.backend.effects(), 1);
}

async fn intents(world: World) {
    let send =
        |id, amount, meta: Value| world.send(call(id, "order", amount, &meta).script(answers(result(id))));
    send(1, 1, json!({"runId": "r"})).await;
    is_replayed(&send(2, 1, json!({"runId": "r", "idempotencyKey": "another"})).await, 2);
    assert_eq!(world.backend.effects(), 1);
    for (effects, amount, run) in [(2, 2, "r"), (3, 1, "s")] {
        send(3, amount, json!({"runId": run})).await;
        assert_eq!(world.backend.effects(), effects);
    }
    is_problem(&send(4, 1, json!({})).await, 4, "key-missing");
    let in_session = |id| {
        let request = call(id, "order", 1, &json!({})).field("Mcp-Session-Id", "s-1");
        world.send(request.script(answers(result(id))))
    };
    in_session(5).await;
    is_replayed(&in_session(6).await, 6);
    assert_eq!(world.backend.effects(), 4);
}

async fn outcomes(world: World) {
    let error = |code: i32| json!({"jsonrpc": "2.0", "id": 1, "error": {"code": code, "message": "m"}});
    let mut visit = error(-32042);
    visit["error"]["data"] = json!({"elicitations": [{"mode": "url", "url": "https://bank.example/"}]});
    let mut both = visit.clone();
    both["result"] = json!({"content": []});
    let failed = json!({"jsonrpc": "2.0", "id": 1, "result": {"content": [], "isError": true}});
    let asks = json!({"jsonrpc": "2.0", "id": 1, "result": {"resultType": "input_required"}});
    for (number, (answer, is_kept)) in [
        (error(-32602), true),
        (visit, false),
        (both, true),
        (error(-32603), true),
        (failed, true),
        (asks, false),
    ]
    .into_iter()
    .enumerate()
    {
        let before = world.backend.effects();
        for _ in 0..2 {
            let request = call(1, "pay", 1, &key(&number.to_string())).script(answers(answer.to_string()));
            world.send(request).await;
        }
        let effects = world.backend.effects() - before;
        assert_eq!(effects, if is_kept { 1 } else { 2 }, "{answer}");
    }
}

async fn refusals(world: World) {
    let problem = json!({"type": "urn:oncegate:problem:overloaded", "retry": "same-key"});
    let refusal = |id: u32| {
        let result = json!({"content": [], "isError": true, "_meta": {"oncegate/problem": problem}});
        json!({"jsonrpc": "2.0", "id": id, "result": result}).to_string()
    };
    for (number, (answer, is_kept)) in
        [(refusal(1), false), (refusal(2), true), (result(1), true)].into_iter().enumerate()
    {
        let before = world.backend.effects();
        for _ in 0..2 {
            let field = ("Idempotency-Status", "refused; problem=overloaded; retry=same-key");
            let script = answers(answer.clone()).field(field.0, field.1);
            let response = world.send(call(1, "pay", 1, &key(&number.to_string())).script(script)).await;
            let refused = response.get("idempotency-status").unwrap_or_default();
            assert!(!refused.contains("overloaded"), "{response:?}");
        }
        let effects = world.backend.effects() - before;
        assert_eq!(effects, if is_kept { 1 } else { 2 }, "{answer}");
    }
}

async fn sessions(world: World) {
    let done = Latch::new();
    let request =
        call(1, "pay", 1, &key("a")).field("Mcp-Session-Id", "s").script(answers(result(1)).held(&done));
    let first = world.start_send(request);
    world.backend.until_effects(1).await;
    let end = |fields: &[(&str, &str)]| {
        let request = Request::new("DELETE", "/mcp");
        world.send(fields.iter().fold(request, |request, (name, value)| request.field(name, value)))
    };
    for fields in [
        &[("Mcp-Session-Id", "s")][..],
        &[("Mcp-Session-Id", "x"), ("Mcp-Session-Id", "s")],
        &[("Mcp-Session-Id", "x"), ("Mcp_Session_Id", "s")],
        &[("mcp_session_id", "s")],
    ] {
        let refused = end(fields).await;
        assert_eq!(refused.status(), 405, "{fields:?}: {refused:?}");
    }
    assert_eq!(world.backend.effects(), 1);
    done.open();
    first.await.unwrap().expect("a response");
    end(&[("Mcp-Session-Id", "s")]).await;
    assert_eq!(world.backend.effects(), 2, "the session is ended after the call");
}

async fn other_messages(world: World) {
    let list = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/list"});
    for request in [message(&list), call(2, "get_order", 1, &key("a")), call(3, "get_order", 1, &key("a"))] {
        let before = world.backend.effects();
        assert_eq!(world.send(request).await.status(), 201);
        assert_eq!(world.backend.effects(), before + 1);
    }
    is_problem(&world.send(call(4, "pay", 1, &json!({}))).await, 4, "key-missing");
    let batch = json!([{"jsonrpc": "2.0", "id": 5, "method": "tools/call", "params": {"name": "pay"}}]);
    for body in [batch.to_string(), "{\"method\":".to_owned(), "{\"method\":NaN}".to_owned()] {
        let refused = world.send(Request::post("/mcp").json(body)).await;
        assert_eq!(refused.status(), 400, "{refused:?}");
        assert_eq!(refused.json()["error"]["code"], -32600, "{refused:?}");
    }
    let cancelled =
        json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 4}});
    assert_eq!(world.send(message(&cancelled)).await.status(), 202);
    assert_eq!(world.backend.effects(), 3);
}
