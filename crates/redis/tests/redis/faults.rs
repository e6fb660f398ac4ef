//! Failures of a real server, and the replies of the store.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::support::*;
use bytes::Bytes;
use oncegate_core::{
    CallerTag, Command, Complete, Completion, Durability, Extent, Fencing, FencingToken, Label, ListQuery,
    Outcome, RecordStep, RecordedResponse, Resolution, Resolve, State, StateName, Step, Store as _,
    StoreErrorKind, StoredResponse,
};
use oncegate_redis::contract::record_key;
use oncegate_redis::{RedisOpenError, RedisStore, Severity};
use oncegate_servers::{RedisOptions as ServerOptions, RedisServer};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

fn start(options: ServerOptions) -> RedisServer {
    RedisServer::start(options).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exactly_one_of_a_hundred_claims_from_two_processes_executes() {
    let server = start(ServerOptions::new());
    let stores = [Arc::new(open(&server.url()).await), Arc::new(open(&server.url()).await)];
    for round in 0..10 {
        let claims = (0..100_u64).map(|n| {
            let store = stores[(n % 2) as usize].clone();
            tokio::spawn(async move { try_claim(&store, round, n).await.unwrap() })
        });
        let claims: Vec<_> = claims.collect();
        let (mut executed, mut waits) = (0, 0);
        for claim in claims {
            match claim.await.unwrap() {
                Outcome::Execute(_) => executed += 1,
                Outcome::InProgress { .. } => waits += 1,
                other => panic!("{other:?}"),
            }
        }
        assert_eq!((executed, waits), (1, 99));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scripts_that_the_server_forgets_are_loaded_again() {
    let server = start(ServerOptions::new());
    let store = open(&server.url()).await;
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                server.command(&["SCRIPT", "FLUSH"]).unwrap();
            }
        });
        tokio::task::block_in_place(|| {
            tokio::runtime::Handle::current().block_on(async {
                for n in 0..300 {
                    let grant = granted(&store, n, n).await;
                    assert!(matches!(
                        store.apply(id(n), renewal(grant.token)).await,
                        Ok(Outcome::Renewed { .. })
                    ));
                    assert_eq!(
                        store.apply(id(n), completion(grant.token, n)).await.unwrap(),
                        Outcome::Completed
                    );
                    assert_eq!(try_claim(&store, n, n).await.unwrap(), Outcome::Replay(response(n)));
                }
            });
        });
        done.store(true, Ordering::Relaxed);
    });
}

#[tokio::test]
async fn an_attempt_whose_record_was_flushed_is_fenced_and_the_next_token_is_greater() {
    let server = start(ServerOptions::new());
    let store = open(&server.url()).await;
    let lost = granted(&store, 1, 1).await;
    server.command(&["FLUSHALL"]).unwrap();
    for command in [renewal(lost.token), completion(lost.token, 1), release(lost.token)] {
        assert_eq!(store.apply(id(1), command).await.unwrap(), Outcome::Fenced);
    }
    assert_eq!(store.lookup(id(1)).await.unwrap(), None);
    let next = granted(&store, 1, 2).await;
    assert!(next.token > lost.token);
    assert_eq!(store.apply(id(1), completion(lost.token, 1)).await.unwrap(), Outcome::Fenced);
    assert_eq!(store.apply(id(1), completion(next.token, 2)).await.unwrap(), Outcome::Completed);
}

#[tokio::test]
async fn acknowledged_commands_survive_kill_9_if_every_write_is_flushed() {
    let mut server = start(ServerOptions::new().with_appendfsync("always"));
    let store = open(&server.url()).await;
    assert_eq!(store.capabilities().durability, Durability::Synced);
    assert_eq!(store.capabilities().fencing, Fencing::Monotonic);
    let mut tokens = Vec::new();
    for round in 0..3_u64 {
        for n in round * 100..(round + 1) * 100 {
            let grant = granted(&store, n, n).await;
            if n % 2 == 0 {
                store.apply(id(n), completion(grant.token, n)).await.unwrap();
            }
            tokens.push(grant.token);
        }
        server.kill();
        unavailable(try_claim(&store, 0, 9999).await);
        server.restart().unwrap();
        until_ok(|| store.check()).await;
        for (n, token) in (0_u64..).zip(&tokens) {
            let record = store.lookup(id(n)).await.unwrap().expect("it was acknowledged");
            assert_eq!(record.token, *token);
            if n % 2 == 0 {
                assert_eq!(record.state, State::Completed(RecordedResponse::Replayable(response(n))));
            } else {
                // The same attempt continues with its token.
                assert_eq!(granted(&store, n, n).await.token, *token);
            }
        }
    }
}

#[tokio::test]
async fn without_an_append_only_file_a_restart_loses_records_as_the_findings_warn() {
    let mut server = start(ServerOptions::new());
    let store = open(&server.url()).await;
    let found = store.capabilities();
    assert_eq!((found.durability, found.fencing), (Durability::Unlogged, Fencing::Equality));
    let findings = store.findings();
    let says =
        findings.iter().any(|f| f.severity == Severity::Warning && f.text.starts_with("appendonly no"));
    assert!(says, "{findings:?}");
    let before = granted(&store, 1, 1).await;
    server.kill();
    server.restart().unwrap();
    until_ok(|| store.check()).await;
    assert_eq!(store.apply(id(1), completion(before.token, 1)).await.unwrap(), Outcome::Fenced);
    assert!(granted(&store, 1, 2).await.token > before.token);
}

#[tokio::test]
async fn a_stopped_server_is_unavailable_in_bounded_time_and_then_recognises_the_attempt() {
    let server = start(ServerOptions::new());
    let url = format!("{}?timeout=300ms&connect-timeout=500ms", server.url());
    let store = open(&url).await;
    let first = granted(&store, 1, 1).await;
    let stopped = Stopped::new(&server);
    let started = Instant::now();
    unavailable(try_claim(&store, 2, 2).await);
    unavailable(store.apply(id(1), completion(first.token, 1)).await);
    unavailable(store.lookup(id(1)).await);
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
    drop(stopped);
    // The stopped server may or may not have applied the claim. Either way it is the same claim.
    let Outcome::Execute(second) = until_ok(|| try_claim(&store, 2, 2)).await else { panic!() };
    assert_eq!(second.attempts, 1);
    assert_eq!(store.apply(id(1), completion(first.token, 1)).await.unwrap(), Outcome::Completed);
    assert_eq!(store.apply(id(1), completion(first.token, 1)).await.unwrap(), Outcome::Completed);
}

#[tokio::test]
async fn a_full_memory_refuses_new_keys_and_still_answers_existing_ones() {
    let server = start(ServerOptions::new());
    let store = open(&server.url()).await;
    let (owned, done) = (granted(&store, 1, 1).await, granted(&store, 2, 2).await);
    store.apply(id(2), completion(done.token, 2)).await.unwrap();
    server.command(&["CONFIG", "SET", "maxmemory", "1"]).unwrap();
    assert!(unavailable(try_claim(&store, 3, 3).await).contains("OOM"));
    assert!(unavailable(store.apply(id(1), completion(owned.token, 1)).await).contains("OOM"));
    unavailable(store.check().await);
    // Commands that need no memory.
    assert!(matches!(store.apply(id(1), renewal(owned.token)).await, Ok(Outcome::Renewed { .. })));
    assert_eq!(try_claim(&store, 2, 22).await.unwrap(), Outcome::Replay(response(2)));
    assert!(matches!(try_claim(&store, 1, 11).await, Ok(Outcome::InProgress { .. })));
    assert!(store.lookup(id(1)).await.unwrap().is_some());
    server.command(&["CONFIG", "SET", "maxmemory", "0"]).unwrap();
    store.check().await.unwrap();
    assert_eq!(store.apply(id(1), completion(owned.token, 1)).await.unwrap(), Outcome::Completed);
    granted(&store, 3, 3).await;
}

/// A proxy between the store and the server. On request it cuts the connection instead of forwarding a reply.
struct Cutter {
    port: u16,
    cut: Arc<AtomicBool>,
    cuts: Arc<AtomicUsize>,
}

impl Cutter {
    async fn start(to: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let cutter = Self { port, cut: Arc::default(), cuts: Arc::default() };
        let (cut, cuts) = (cutter.cut.clone(), cutter.cuts.clone());
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (cut, cuts) = (cut.clone(), cuts.clone());
                let server = TcpStream::connect(("127.0.0.1", to)).await.unwrap();
                tokio::spawn(async move {
                    let (mut from_client, mut to_client) = client.into_split();
                    let (mut from_server, mut to_server) = server.into_split();
                    let there =
                        tokio::spawn(async move { tokio::io::copy(&mut from_client, &mut to_server).await });
                    let mut buffer = vec![0; 65536];
                    while let Ok(count @ 1..) = from_server.read(&mut buffer).await {
                        if cut.swap(false, Ordering::SeqCst) {
                            cuts.fetch_add(1, Ordering::SeqCst);
                            break;
                        }
                        if to_client.write_all(&buffer[..count]).await.is_err() {
                            break;
                        }
                    }
                    there.abort();
                });
            }
        });
        cutter
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_command_whose_reply_was_cut_off_is_recognised_when_it_is_sent_again() {
    let server = start(ServerOptions::new());
    let cutter = Cutter::start(server.port()).await;
    let store = open(&format!("redis://127.0.0.1:{}", cutter.port)).await;
    let direct = open(&server.url()).await;
    // Makes the server load the scripts first, so that the cut reply is that of a script.
    let grant = granted(&direct, 1_000_000, 1).await;
    direct.apply(id(1_000_000), completion(grant.token, 1)).await.unwrap();
    for n in 0..20 {
        cutter.cut.store(true, Ordering::SeqCst);
        unavailable(try_claim(&store, n, n).await);
        let applied = direct.lookup(id(n)).await.unwrap().expect("the server had applied it");
        assert!(matches!(try_claim(&direct, n, 1000 + n).await, Ok(Outcome::InProgress { .. })));
        let Outcome::Execute(again) = until_ok(|| try_claim(&store, n, n)).await else { panic!() };
        assert_eq!((again.token, again.attempts), (applied.token, 1));
        cutter.cut.store(true, Ordering::SeqCst);
        unavailable(store.apply(id(n), completion(again.token, n)).await);
        let done = until_ok(|| store.apply(id(n), completion(again.token, n))).await;
        assert_eq!(done, Outcome::Completed);
        assert_eq!(try_claim(&store, n, 2000 + n).await.unwrap(), Outcome::Replay(response(n)));
    }
    assert_eq!(cutter.cuts.load(Ordering::SeqCst), 40);
}

#[tokio::test]
async fn hostile_bytes_are_stored_unchanged() {
    let server = start(ServerOptions::new());
    let store = open(&server.url()).await;
    let operations =
        ["", "POST /\0x", "a'b\"c\\d\r\n*1\r\n$8\r\nFLUSHALL\r\n", "é🦀 ]] -- {x}", "%s%d%.0f", "return 1"];
    for (n, operation) in (0..).zip(operations) {
        let mut claim = claim(n);
        claim.label = Label::new(CallerTag::from_bytes([0xff; 8]), operation);
        let Outcome::Execute(grant) = store.apply(id(n), Command::Claim(claim)).await.unwrap() else {
            panic!()
        };
        let every: Vec<u8> = (0..=255).cycle().take(100_000).collect();
        let response = StoredResponse::new(
            200,
            &[("x-raw", &every[..256])],
            &[Bytes::from(every.clone())],
            &[("t", operation.as_bytes())],
        );
        let response = response.unwrap();
        let completion = Completion::Replayable(response.clone());
        let complete = Complete { token: grant.token, completion, retention: MINUTE };
        assert_eq!(
            store.apply(id(n), Command::Complete(complete.clone())).await.unwrap(),
            Outcome::Completed
        );
        assert_eq!(store.apply(id(n), Command::Complete(complete)).await.unwrap(), Outcome::Completed);
        assert_eq!(try_claim(&store, n, 77).await.unwrap(), Outcome::Replay(response));
        let record = store.lookup(id(n)).await.unwrap().unwrap();
        assert_eq!(record.label.operation(), operation);
    }
    let grant = granted(&store, 99, 99).await;
    let unknown = Complete { token: grant.token, completion: Completion::Unknown, retention: MINUTE };
    store.apply(id(99), Command::Complete(unknown)).await.unwrap();
    for (n, text) in (1..).zip(["a\0b\r\n", "'\"]]", "-- 🦀"]) {
        let resolve = Resolve {
            resolution: Resolution::Release,
            retention: MINUTE,
            force: true,
            amend: false,
            actor: text.to_owned(),
            reason: text.repeat(2),
        };
        let outcome = store.apply(id(99), Command::Resolve(resolve)).await.unwrap();
        assert!(matches!(outcome, Outcome::Resolved { .. }));
        let entry = store.audit(None, 1).await.unwrap().remove(0);
        assert_eq!((entry.number, entry.id, entry.to), (n, id(99), StateName::Released));
        assert_eq!((entry.actor.as_str(), entry.reason), (text, text.repeat(2)));
        granted(&store, 99, 100 + n).await;
    }
    assert_eq!(store.list(ListQuery::default()).await.unwrap().records.len(), operations.len() + 1);
}

/// Changes the bytes of a record, past the scripts.
fn damage(server: &RedisServer, n: u64, change: impl FnOnce(&mut Vec<u8>)) {
    let mut connection = redis::Client::open(server.url()).unwrap().get_connection().unwrap();
    let key = record_key(&id(n));
    let mut record: Vec<u8> = redis::cmd("GET").arg(&key).query(&mut connection).unwrap();
    change(&mut record);
    redis::cmd("SET").arg(&key).arg(record).arg("KEEPTTL").exec(&mut connection).unwrap();
}

/// Sends each command that could change the record, and expects that none does.
async fn all_refuse(server: &RedisServer, store: &RedisStore, n: u64, token: FencingToken, what: &str) {
    let (actor, reason) = ("a".to_owned(), "b".to_owned());
    let (resolution, amend) = (Resolution::Release, false);
    let resolve = Resolve { resolution, retention: MINUTE, force: true, amend, actor, reason };
    let step = RecordStep { token, number: 0, step: Step::new("charge", Bytes::new()).unwrap() };
    let key = record_key(&id(n));
    let before = server.command(&["DUMP", &key]).unwrap();
    for command in [
        Command::Claim(claim(n)),
        Command::Claim(claim(n + 1000)),
        renewal(token),
        Command::Step(step),
        completion(token, n),
        release(token),
        Command::Resolve(resolve),
    ] {
        let error = store.apply(id(n), command.clone()).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Corrupt, "{what} {command:?}: {error}");
    }
    assert_eq!(store.lookup(id(n)).await.unwrap_err().kind(), StoreErrorKind::Corrupt, "{what}");
    assert_eq!(server.command(&["DUMP", &key]).unwrap(), before, "{what}");
}

#[tokio::test]
async fn an_invalid_record_is_corrupt_and_stays_unchanged() {
    let server = start(ServerOptions::new());
    let store = open(&server.url()).await;
    let healthy = granted(&store, 0, 0).await;
    // Where the parts of a record in progress are.
    let (size, state, flags, changed, expires, lease, token) = (1, 5, 17, 19, 27, 35, 59);
    let (attempts, created, tag) = (67, 71, 120);
    let put = |at: usize, bytes: &'static [u8]| {
        move |record: &mut Vec<u8>| record[at..at + bytes.len()].copy_from_slice(bytes)
    };
    type Change = Box<dyn Fn(&mut Vec<u8>)>;
    let two_to_the_53rd = &[0, 0x20, 0, 0, 0, 0, 0, 0];
    let damages: Vec<(&str, Change)> = vec![
        ("version", Box::new(put(0, b"\x02"))),
        ("text", Box::new(|record| *record = b"something else".to_vec())),
        ("nothing", Box::new(Vec::clear)),
        ("one byte too many", Box::new(|record| record.push(0))),
        ("response of a record in progress", Box::new(put(size, b"\0\0\0\x01"))),
        ("unknown state", Box::new(put(state, b"\x0bin-progresz"))),
        ("state with another length", Box::new(put(state, b"\x0a"))),
        ("completed without a response", Box::new(|record| drop(record.splice(5..17, *b"\x09completed")))),
        ("released with a lease", Box::new(|record| drop(record.splice(5..17, *b"\x08released")))),
        ("flag by operator", Box::new(put(flags, b"\x02"))),
        ("flag after abandoned", Box::new(put(flags + 1, b"\xff"))),
        ("time of the change", Box::new(put(changed, two_to_the_53rd))),
        ("expiry", Box::new(put(expires, two_to_the_53rd))),
        ("no lease", Box::new(put(lease, &[0; 8]))),
        ("end of the lease", Box::new(put(lease, two_to_the_53rd))),
        ("no token", Box::new(put(token, &[0; 8]))),
        ("token", Box::new(put(token, two_to_the_53rd))),
        ("no attempts", Box::new(put(attempts, &[0; 4]))),
        ("time of creation", Box::new(put(created, &[0xff; 8]))),
        ("tag of the key", Box::new(put(tag, b"\x01"))),
        ("size of the operation", Box::new(put(tag + 1, b"\x01\x01"))),
        (
            "size of the resolution",
            Box::new(|record| {
                let at = record.len() - 2;
                record[at] = 1;
            }),
        ),
    ];
    for (n, (what, change)) in (1..).zip(&damages) {
        let grant = granted(&store, n, n).await;
        damage(&server, n, change);
        all_refuse(&server, &store, n, grant.token, what).await;
    }
    let count = damages.len() as u64;
    let grant = granted(&store, count + 1, count + 1).await;
    server.command(&["DEL", &record_key(&id(count + 1))]).unwrap();
    server.command(&["RPUSH", &record_key(&id(count + 1)), "x"]).unwrap();
    all_refuse(&server, &store, count + 1, grant.token, "another type").await;
    // A fingerprint of another version can be neither compared nor read, but its owner still owns the record.
    let n = count + 2;
    let grant = granted(&store, n, n).await;
    damage(&server, n, |record| record[79] = 2);
    for attempt in [n, n + 1000] {
        let error = try_claim(&store, n, attempt).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Corrupt, "{error}");
    }
    assert_eq!(store.lookup(id(n)).await.unwrap_err().kind(), StoreErrorKind::Corrupt);
    let page = store.list(ListQuery::default()).await.unwrap();
    assert_eq!((page.records.len() as u64, page.unreadable.len() as u64, page.next), (1, count + 2, None));
    assert_eq!(page.records[0].1.token, healthy.token);
    assert_eq!(store.apply(id(n), release(grant.token)).await.unwrap(), Outcome::Released);
}

/// However much of its end a record lost, it is not read as another record or as none.
#[tokio::test]
async fn a_record_without_its_end_is_corrupt() {
    let server = start(ServerOptions::new());
    let store = open(&server.url()).await;
    let step = |token| {
        let step = Step::new("charge", Bytes::from_static(b"result")).unwrap();
        Command::Step(RecordStep { token, number: 0, step })
    };
    let token = granted(&store, 1, 1).await.token;
    store.apply(id(1), step(token)).await.unwrap();
    let completed = granted(&store, 2, 2).await.token;
    store.apply(id(2), completion(completed, 2)).await.unwrap();
    let mut connection = redis::Client::open(server.url()).unwrap().get_connection().unwrap();
    for (n, token) in [(1, token), (2, completed)] {
        let key = record_key(&id(n));
        let whole: Vec<u8> = redis::cmd("GET").arg(&key).query(&mut connection).unwrap();
        // Without its only step, a record in progress is another record.
        let whole_without_step = whole.len() - 2 - 4 - "charge".len() - "result".len();
        for size in (0..whole.len()).filter(|size| n == 2 || *size != whole_without_step) {
            redis::cmd("SET").arg(&key).arg(&whole[..size]).exec(&mut connection).unwrap();
            for command in [Command::Claim(claim(n + 1000)), completion(token, n), release(token)] {
                let result = store.apply(id(n), command).await;
                let error = result.expect_err(&format!("record {n} cut to {size} bytes"));
                assert_eq!(error.kind(), StoreErrorKind::Corrupt, "{n} {size}: {error}");
            }
            assert_eq!(store.lookup(id(n)).await.unwrap_err().kind(), StoreErrorKind::Corrupt, "{n} {size}");
            let page = store.list(ListQuery::default()).await.unwrap();
            // What a listing leaves out, it does not miss.
            assert!(page.unreadable.contains(&id(n)), "{n} {size}");
        }
        redis::cmd("SET").arg(&key).arg(&whole).exec(&mut connection).unwrap();
        store.lookup(id(n)).await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn a_repeated_completion_must_have_the_same_bytes() {
    let server = start(ServerOptions::new());
    let store = open(&server.url()).await;
    let grant = granted(&store, 1, 1).await;
    assert_eq!(store.apply(id(1), completion(grant.token, 1)).await.unwrap(), Outcome::Completed);
    assert_eq!(store.apply(id(1), completion(grant.token, 1)).await.unwrap(), Outcome::Completed);
    assert_eq!(store.apply(id(1), completion(grant.token, 2)).await.unwrap(), Outcome::Fenced);
    assert_eq!(try_claim(&store, 1, 2).await.unwrap(), Outcome::Replay(response(1)));
}

#[tokio::test]
async fn an_awaited_completion_takes_its_response_once() {
    let server = start(ServerOptions::new());
    let store = open(&server.url()).await;
    let token = granted(&store, 1, 1).await.token;
    let awaited = Complete { token, completion: Completion::Awaited, retention: MINUTE };
    for _ in 0..2 {
        let outcome = store.apply(id(1), Command::Complete(awaited.clone())).await.unwrap();
        assert_eq!(outcome, Outcome::Completed);
        assert_eq!(try_claim(&store, 1, 2).await.unwrap(), Outcome::Unreplayable);
    }
    assert_eq!(store.apply(id(1), completion(token, 1)).await.unwrap(), Outcome::Completed);
    for command in [completion(token, 2), Command::Complete(awaited), release(token)] {
        assert_eq!(store.apply(id(1), command).await.unwrap(), Outcome::Fenced);
    }
    assert_eq!(try_claim(&store, 1, 2).await.unwrap(), Outcome::Replay(response(1)));
}

#[tokio::test]
async fn a_response_that_cannot_be_read_is_corrupt() {
    let server = start(ServerOptions::new());
    let store = open(&server.url()).await;
    let grant = granted(&store, 1, 1).await;
    store.apply(id(1), completion(grant.token, 1)).await.unwrap();
    damage(&server, 1, |record| {
        let at = record.len() - response(1).as_encoded().len();
        record[at] = 2;
    });
    for result in [try_claim(&store, 1, 2).await.map(drop), store.lookup(id(1)).await.map(drop)] {
        assert_eq!(result.unwrap_err().kind(), StoreErrorKind::Corrupt);
    }
}

#[tokio::test]
async fn a_refused_login_is_reported_without_the_password() {
    let server = start(ServerOptions::new().with_user("app", "hunter2", "~* &* +@all"));
    open(&server.url()).await;
    for url in [server.url().replace("hunter2", "hunter3"), format!("redis://127.0.0.1:{}", server.port())] {
        let error = RedisStore::open(options(&url)).await.unwrap_err();
        assert!(matches!(error, RedisOpenError::Unfit(_)), "{error}");
        assert!(!error.to_string().contains("hunter"), "{error}");
    }
}

#[tokio::test]
async fn settings_that_cannot_be_read_are_reported_and_lower_the_guarantees() {
    let rules = "~oncegate:* resetchannels +@read +@write +@scripting +@connection +time";
    let server = start(ServerOptions::new().with_appendfsync("always").with_user("app", "secret", rules));
    let store = open(&server.url()).await;
    let findings: Vec<_> = store.findings().into_iter().filter(|f| f.severity == Severity::Warning).collect();
    assert_eq!(findings.len(), 4, "{findings:?}");
    assert!(findings.iter().all(|f| f.text.contains("could not be read")), "{findings:?}");
    assert_eq!(store.capabilities().durability, Durability::Unlogged);
    // The user may not publish either, and can still end its attempts.
    let grant = granted(&store, 1, 1).await;
    assert_eq!(store.apply(id(1), completion(grant.token, 1)).await.unwrap(), Outcome::Completed);
    assert_eq!(try_claim(&store, 1, 2).await.unwrap(), Outcome::Replay(response(1)));
    store.check().await.unwrap();
    assert_eq!(store.list(ListQuery::default()).await.unwrap().records.len(), 1);
}

/// An operator may take rights away while everything runs. A check must then fail, so that a load balancer stops sending.
#[tokio::test]
async fn a_check_names_a_command_that_the_acl_no_longer_allows() {
    let rules = "~oncegate:* &oncegate:* -@all +eval +evalsha +time +get +getrange +set +append +spublish \
        +xadd +xrevrange +ping +scan +info +config|get +acl|dryrun +hello +ssubscribe +sunsubscribe +client|setinfo";
    let page = include_str!("../../../../docs/reference/store-contract-redis.md");
    for rule in rules.split_whitespace().filter(|rule| *rule != "+client|setinfo") {
        assert!(page.contains(rule), "the page lacks {rule}");
    }
    let rules =
        if server_version() < (7, 2) { rules.replace(" +client|setinfo", "") } else { rules.to_owned() };
    let options = ServerOptions::new().with_user("app", "secret", &rules);
    let server = start(options.with("user admin on >secret ~* &* +@all"));
    let admin = redis::Client::open(format!("redis://admin:secret@127.0.0.1:{}", server.port())).unwrap();
    let mut admin = admin.get_connection().unwrap();
    let mut acl = |rule: &str| {
        redis::cmd("ACL").arg("SETUSER").arg("app").arg(rule).exec(&mut admin).unwrap();
    };
    let store = open(&server.url()).await;
    store.check().await.unwrap();
    assert!(
        store.findings().iter().all(|f| !f.text.contains("ACL does not allow")),
        "{:?}",
        store.findings()
    );
    for command in ["time", "get", "getrange", "set", "append", "eval"] {
        acl(&format!("-{command}"));
        let error = store.check().await.unwrap_err();
        assert_eq!((error.kind(), error.extent()), (StoreErrorKind::Unavailable, Extent::Writes), "{error}");
        let named = format!("does not allow the user {} on oncegate:*", command.to_uppercase());
        assert!(error.to_string().contains(&named), "{command}: {error}");
        assert!(store.findings().iter().any(|f| f.severity == Severity::Warning && f.text.contains(&named)));
        if command == "set" {
            let error = try_claim(&store, 1, 1).await.unwrap_err().to_string();
            assert!(error.contains("the server's ACL does not allow the command"), "{error}");
        }
        acl(&format!("+{command}"));
        store.check().await.unwrap();
    }
    // A missing right that only operators need does not stop executions.
    acl("-xadd");
    store.check().await.unwrap();
    assert!(
        store.findings().iter().any(|f| f.text.contains("XADD on oncegate:{audit}")),
        "{:?}",
        store.findings()
    );
    granted(&store, 1, 1).await;
    let left = redis::cmd("KEYS").arg("*check}?*").query::<Vec<String>>(&mut admin).unwrap();
    assert!(left.is_empty(), "{left:?}");
}

fn server_version() -> (u32, u32) {
    let output = std::process::Command::new("redis-server").arg("--version").output().unwrap().stdout;
    let output = String::from_utf8(output).unwrap();
    let (_, version) = output.split_once("v=").unwrap();
    let mut numbers = version.split('.').map(|number| number.parse().unwrap_or(0));
    (numbers.next().unwrap(), numbers.next().unwrap())
}

#[tokio::test]
async fn a_default_user_without_rights_is_reported_because_a_restart_skips_records() {
    let options = ServerOptions::new().with_appendfsync("always").with_user("app", "secret", "~* &* +@all");
    let mut server = start(options);
    let store = open(&server.url()).await;
    assert_eq!(store.capabilities().durability, Durability::Synced);
    let grant = granted(&store, 1, 1).await;
    server.kill();
    server.restart().unwrap();
    until_ok(|| store.check()).await;
    assert_eq!(store.lookup(id(1)).await.unwrap().expect("it was acknowledged").token, grant.token);
    server.command(&["ACL", "SETUSER", "default", "reset"]).unwrap();
    store.check().await.unwrap();
    assert_eq!(store.capabilities().durability, Durability::Unlogged);
    assert!(store.findings().iter().any(|f| f.text.contains("SKIPS EVERY RECORD")), "{:?}", store.findings());
}

#[tokio::test]
async fn a_server_that_evicts_is_refused_unless_eviction_is_allowed() {
    let server = start(ServerOptions::new().with("maxmemory-policy allkeys-lru"));
    let error = RedisStore::open(options(&server.url())).await.unwrap_err();
    assert!(matches!(&error, RedisOpenError::Unfit(what) if what.contains("allkeys-lru")), "{error}");
    let store = open(&format!("{}?danger-allow-eviction=true", server.url())).await;
    assert!(store.findings().iter().any(|f| f.text.contains("EXECUTE AGAIN")));
    assert_eq!(store.capabilities().durability, Durability::Unlogged);
    // A server that begins to evict later is refused until it stops.
    server.command(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]).unwrap();
    let store = open(&server.url()).await;
    let done = granted(&store, 1, 1).await;
    assert_eq!(store.apply(id(1), completion(done.token, 1)).await.unwrap(), Outcome::Completed);
    let running = granted(&store, 2, 1).await;
    server.command(&["CONFIG", "SET", "maxmemory-policy", "volatile-ttl"]).unwrap();
    assert_eq!(store.check().await.unwrap_err().kind(), StoreErrorKind::Invalid);
    assert!(
        store.findings().iter().any(|f| f.text.contains("volatile-ttl") && f.severity == Severity::Warning)
    );
    let error = try_claim(&store, 3, 1).await.unwrap_err();
    assert_eq!((error.kind(), error.extent()), (StoreErrorKind::Unavailable, Extent::Writes), "{error}");
    assert!(error.is_unsent() && error.to_string().contains("volatile-ttl"), "{error}");
    assert_eq!(
        try_claim(&store, 1, 2).await.unwrap(),
        Outcome::Replay(response(1)),
        "an existing reply is replayed"
    );
    assert_eq!(store.apply(id(2), completion(running.token, 2)).await.unwrap(), Outcome::Completed);
    // A new connection gives the same result.
    server.command(&["CLIENT", "KILL", "TYPE", "normal"]).unwrap();
    until_ok(|| store.lookup(id(1))).await;
    assert!(try_claim(&store, 3, 1).await.unwrap_err().to_string().contains("volatile-ttl"));
    server.command(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]).unwrap();
    store.check().await.unwrap();
    granted(&store, 3, 1).await;
}

/// Guarantees and findings describe the current server, and not the server at the start.
#[tokio::test]
async fn findings_are_those_of_the_latest_connection() {
    let server = start(ServerOptions::new().with_appendfsync("always"));
    let store = open(&server.url()).await;
    assert_eq!(store.capabilities().durability, Durability::Synced);
    server.command(&["CONFIG", "SET", "appendonly", "no"]).unwrap();
    server.command(&["CLIENT", "KILL", "TYPE", "normal"]).unwrap();
    until_ok(|| store.lookup(id(1))).await;
    assert_eq!(store.capabilities().durability, Durability::Unlogged);
    assert!(store.findings().iter().any(|f| f.text.starts_with("appendonly no")), "{:?}", store.findings());
}

/// A server that wrote a log and stops to do so loses everything at its next restart.
#[tokio::test]
async fn a_server_that_keeps_less_than_before_is_an_advisory_until_it_keeps_as_much() {
    let server = start(ServerOptions::new().with_appendfsync("everysec"));
    let store = open(&server.url()).await;
    let promise = async |appendonly: &str| {
        server.command(&["CONFIG", "SET", "appendonly", appendonly]).unwrap();
        store.check().await.unwrap();
        (store.capabilities().durability, store.advisories())
    };
    assert_eq!((store.capabilities().durability, store.advisories()), (Durability::Buffered, Vec::new()));
    let (durability, advisories) = promise("no").await;
    assert_eq!(durability, Durability::Unlogged);
    assert_eq!(advisories.iter().map(|advisory| advisory.name).collect::<Vec<_>>(), ["less-durable"]);
    assert!(advisories[0].text.contains("(unlogged, and buffered before)"), "{advisories:?}");
    assert_eq!(promise("yes").await, (Durability::Buffered, Vec::new()));
    // What it is from the start is no change.
    server.command(&["CONFIG", "SET", "appendonly", "no"]).unwrap();
    let store = open(&server.url()).await;
    assert_eq!((store.capabilities().durability, store.advisories()), (Durability::Unlogged, Vec::new()));
}

#[tokio::test]
async fn a_reply_counts_only_when_enough_replicas_have_it() {
    let primary = start(ServerOptions::new());
    let waiting = |timeout| format!("{}?wait-replicas=1&wait-timeout={timeout}", primary.url());
    let hasty = open(&waiting("200ms")).await;
    let error = unavailable(try_claim(&hasty, 1, 1).await);
    assert!(error.contains("0 of 1 replicas"), "{error}");
    let replica = start(ServerOptions::new().with(format!("replicaof 127.0.0.1 {}", primary.port())));
    primary.wait_for(&["INFO", "replication"], "state=online").unwrap();
    // The same attempt gets its claim again.
    let store = open(&waiting("30s")).await;
    let grant = granted(&store, 1, 1).await;
    assert_eq!(grant.attempts, 1);
    assert_eq!(store.apply(id(1), completion(grant.token, 1)).await.unwrap(), Outcome::Completed);
    let on_replica = replica.command(&["GET", &record_key(&id(1))]).unwrap();
    assert!(on_replica.contains("completed"), "{on_replica}");
    // The store refuses a replica as its server.
    let error = RedisStore::open(options(&replica.url())).await.unwrap_err();
    assert!(error.to_string().contains("replica"), "{error}");
    // With a replica there may be a failover, so fencing is weaker regardless of the disk.
    store.check().await.unwrap();
    assert_eq!(store.capabilities().fencing, Fencing::Equality);
}

#[tokio::test]
async fn the_server_removes_a_record_ten_minutes_after_its_retention() {
    let server = start(ServerOptions::new());
    let store = open(&server.url()).await;
    let grant = granted(&store, 1, 1).await;
    let ttl = || {
        let reply = server.command(&["PTTL", &record_key(&id(1))]).unwrap();
        reply.trim().trim_start_matches(':').parse::<i64>().unwrap()
    };
    let near =
        |minutes: i64| assert!((minutes * 60_000 - 20_000..=minutes * 60_000).contains(&ttl()), "{}", ttl());
    near(12);
    store.apply(id(1), renewal(grant.token)).await.unwrap();
    near(12);
    store.apply(id(1), completion(grant.token, 1)).await.unwrap();
    near(11);
    assert_eq!(store.purge(10).await.unwrap(), 0);
}

#[tokio::test]
async fn listings_reach_every_record_page_by_page() {
    let server = start(ServerOptions::new());
    let store = open(&server.url()).await;
    for n in 0..500 {
        granted(&store, n, n).await;
        server.command(&["SET", &format!("other:{n}"), "x"]).unwrap();
    }
    for limit in [1, 7, 1000] {
        let (mut query, mut found) = (ListQuery::default(), std::collections::BTreeSet::new());
        query.limit = limit;
        loop {
            let page = store.list(query.clone()).await.unwrap();
            assert!(page.records.len() <= limit && page.unreadable.is_empty());
            found.extend(page.records.into_iter().map(|(id, _)| id));
            assert!(page.next.is_none() || page.next > query.after);
            query.after = page.next;
            if query.after.is_none() {
                break;
            }
        }
        assert_eq!(found, (0..500).map(id).collect(), "{limit}");
    }
}
