//! Measures the store against the disk and against bare redb, all in one run, and prints a table.
//!
//! ```text
//! cargo run --release -p oncegate-embedded --example measure [-- <directory> [<seconds for each figure>]]
//! ```
//!
//! - Pairs: a claim and a completion with a response of 1 KiB, each on disk before it is answered, by 1, 64 and 256 clients.
//! - Bare redb: the same bytes, read and written by a group-commit loop over bare redb with two-phase commit. The two are
//!   measured in turns; the ratio is that of one round.
//! - A flush of the disk: 4 KiB overwritten in a preallocated file and flushed, one thread.
//! - Replays: claims of completed records, two threads.
//!
//! Absolute figures depend on the machine. Compare only ratios.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use oncegate_core::{Command, Complete, Completion, Outcome, RecordId, Store, StoredResponse, codec};
use oncegate_embedded::{EmbeddedOptions, EmbeddedStore};
use oncegate_testkit::record_id as id;
use redb::{Database, Durability, ReadableTable as _, TableDefinition};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;

const CLIENTS: [usize; 3] = [1, 64, 256];
const ROUNDS: usize = 5;

fn main() {
    let mut args = std::env::args().skip(1);
    let dir = args.next().map_or_else(std::env::temp_dir, Into::into);
    let seconds = args.next().map_or(2.0, |text| text.parse().expect("seconds as a number"));
    let span = Duration::from_secs_f64(seconds);
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");

    let mut syncs = vec![fdatasync_rate(&dir, span)];
    println!(
        "| | pairs per s | bare redb, per s | ratio | range | p50, ms | p99, ms |\n|---|---|---|---|---|---|---|"
    );
    for clients in CLIENTS {
        let (mut ours, mut bare) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            ours.push(store_pairs(&runtime, &dir, clients, span));
            bare.push(bare_pairs(&runtime, &dir, clients, span));
            syncs.push(fdatasync_rate(&dir, span / 4));
        }
        let ratios: Vec<f64> = ours.iter().zip(&bare).map(|(ours, bare)| ours.per_s / bare.per_s).collect();
        let of = |figure: fn(&Rate) -> f64| median(ours.iter().map(figure).collect());
        println!(
            "| {clients} clients | {:.0} | {:.0} | {:.2} | {:.2}–{:.2} | {:.2} | {:.2} |",
            of(|rate| rate.per_s),
            median(bare.iter().map(|rate| rate.per_s).collect()),
            median(ratios.clone()),
            ratios.iter().copied().fold(f64::INFINITY, f64::min),
            ratios.iter().copied().fold(0.0, f64::max),
            of(|rate| rate.p50_ms),
            of(|rate| rate.p99_ms),
        );
    }
    let sync = 1000.0 / median(syncs);
    println!(
        "\nA flush of the disk (fdatasync after 4 KiB): {sync:.3} ms. Replays: {:.0} per s.",
        replay_rate(&dir, span)
    );
}

#[derive(Clone, Copy, Debug, Default)]
struct Rate {
    per_s: f64,
    p50_ms: f64,
    p99_ms: f64,
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

fn fdatasync_rate(dir: &Path, span: Duration) -> f64 {
    const LEN: u64 = 16 * 1024 * 1024;
    let dir = tempfile::tempdir_in(dir).expect("a directory");
    let file = File::create(dir.path().join("sync")).expect("a file");
    file.write_all_at(&vec![1; LEN as usize], 0).and_then(|()| file.sync_all()).expect("preallocation");
    let (start, mut count) = (Instant::now(), 0_u64);
    while start.elapsed() < span {
        file.write_all_at(&[count as u8; 4096], count * 4096 % LEN).expect("a write");
        file.sync_data().expect("a flush");
        count += 1;
    }
    count as f64 / start.elapsed().as_secs_f64()
}

/// Runs `pair` again and again in `clients` tasks at a time.
fn run_clients<F>(
    runtime: &Runtime,
    clients: usize,
    span: Duration,
    pair: impl Fn(u64) -> F + Send + Sync + 'static,
) -> Rate
where
    F: Future<Output = ()> + Send + 'static,
{
    let (next, pair) = (Arc::new(AtomicU64::new(0)), Arc::new(pair));
    let start = Instant::now();
    let client = || {
        let (next, pair) = (next.clone(), pair.clone());
        async move {
            let mut latencies = Vec::new();
            while start.elapsed() < span {
                let begun = Instant::now();
                pair(next.fetch_add(1, Ordering::Relaxed)).await;
                latencies.push(begun.elapsed().as_secs_f64() * 1000.0);
            }
            latencies
        }
    };
    let latencies: Vec<f64> = runtime.block_on(async {
        let clients: Vec<_> = (0..clients).map(|_| tokio::spawn(client())).collect();
        let mut latencies = Vec::new();
        for client in clients {
            latencies.extend(client.await.expect("a client's latencies"));
        }
        latencies
    });
    let elapsed = start.elapsed().as_secs_f64();
    let mut sorted = latencies;
    sorted.sort_by(f64::total_cmp);
    let at = |share: f64| sorted[((sorted.len() - 1) as f64 * share) as usize];
    Rate { per_s: sorted.len() as f64 / elapsed, p50_ms: at(0.5), p99_ms: at(0.99) }
}

fn store_pairs(runtime: &Runtime, dir: &Path, clients: usize, span: Duration) -> Rate {
    let dir = tempfile::tempdir_in(dir).expect("a directory");
    let store = Arc::new(EmbeddedStore::open(EmbeddedOptions::new(dir.path())).expect("a store"));
    run_clients(runtime, clients, span, move |n| {
        let store = store.clone();
        async move { pair(&store, n).await }
    })
}

/// Sends a claim and its completion.
async fn pair(store: &EmbeddedStore, n: u64) {
    let outcome = store.apply(id(n), claim(n)).await.expect("a reply");
    let Outcome::Execute(grant) = outcome else { panic!("not executed: {outcome:?}") };
    let completion = Completion::Replayable(response());
    let complete = Complete { token: grant.token, completion, retention: DAY };
    store.apply(id(n), Command::Complete(complete)).await.expect("a reply");
}

/// A write for the bare loop, and the channel to the client that waits for it.
type Put = (RecordId, Arc<[u8]>, oneshot::Sender<()>);

fn bare_pairs(runtime: &Runtime, dir: &Path, clients: usize, span: Duration) -> Rate {
    let (claimed, completed) = encoded();
    let dir = tempfile::tempdir_in(dir).expect("a directory");
    let database = Database::builder()
        .set_cache_size(64 * 1024 * 1024)
        .create(dir.path().join("bare.redb"))
        .expect("a database");
    let (puts, queue) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(move || bare_loop(&database, &queue));
        run_clients(runtime, clients, span, move |n| {
            let (puts, claimed, completed) = (puts.clone(), claimed.clone(), completed.clone());
            async move {
                for bytes in [claimed, completed] {
                    let (done, wait) = oneshot::channel();
                    puts.send((id(n), bytes, done)).expect("the loop runs");
                    wait.await.expect("a reply");
                }
            }
        })
    })
}

fn bare_loop(database: &Database, queue: &mpsc::Receiver<Put>) {
    const TABLE: TableDefinition<'_, &[u8; 32], &[u8]> = TableDefinition::new("records");
    while let Ok(first) = queue.recv() {
        let batch: Vec<Put> = std::iter::once(first).chain(queue.try_iter().take(1023)).collect();
        let mut txn = database.begin_write().expect("a transaction");
        txn.set_durability(Durability::Immediate).expect("durability");
        txn.set_two_phase_commit(true);
        {
            let mut table = txn.open_table(TABLE).expect("the table");
            for (id, bytes, _) in &batch {
                let before = table.get(id.as_bytes()).expect("a read").map(|bytes| bytes.value().len());
                assert!(before.is_none_or(|len| len < bytes.len()), "claimed, then completed");
                table.insert(id.as_bytes(), &**bytes).expect("a put");
            }
        }
        txn.commit().expect("a commit");
        for (_, _, done) in batch {
            let _ = done.send(());
        }
    }
}

fn replay_rate(dir: &Path, span: Duration) -> f64 {
    const RECORDS: u64 = 10_000;
    let dir = tempfile::tempdir_in(dir).expect("a directory");
    let store = Arc::new(EmbeddedStore::open(EmbeddedOptions::new(dir.path())).expect("a store"));
    let runtime = Builder::new_multi_thread().worker_threads(2).build().expect("a runtime");
    let next = Arc::new(AtomicU64::new(0));
    let fill = || {
        let (store, next) = (store.clone(), next.clone());
        async move {
            loop {
                let n = next.fetch_add(1, Ordering::Relaxed);
                if n >= RECORDS {
                    return;
                }
                pair(&store, n).await;
            }
        }
    };
    runtime.block_on(async {
        let fillers: Vec<_> = (0..256).map(|_| tokio::spawn(fill())).collect();
        for filler in fillers {
            filler.await.expect("no panic");
        }
    });
    let start = Instant::now();
    let count: u64 = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..2_u64)
            .map(|thread| {
                let store = &*store;
                scope.spawn(move || {
                    let runtime = Builder::new_current_thread().build().expect("a runtime");
                    runtime.block_on(async {
                        let mut n = thread * 7919;
                        while start.elapsed() < span {
                            for _ in 0..100 {
                                n += 7919;
                                let outcome = store.apply(id(n % RECORDS), claim(n)).await;
                                assert!(matches!(outcome, Ok(Outcome::Replay(_))), "{outcome:?}");
                            }
                        }
                        (n - thread * 7919) / 7919
                    })
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).sum()
    });
    count as f64 / start.elapsed().as_secs_f64()
}

const DAY: Duration = Duration::from_secs(86_400);

fn claim(n: u64) -> Command {
    Command::Claim(oncegate_testkit::claim(n, b"input"))
}

fn response() -> StoredResponse {
    let body = [Bytes::from(vec![b'x'; 1024])];
    StoredResponse::new(201, &[("content-type", &b"application/json"[..])], &body, &[])
        .expect("within the limits")
}

/// The encodings of a claimed and of a completed record.
fn encoded() -> (Arc<[u8]>, Arc<[u8]>) {
    let store = oncegate_core::MemoryStore::new(oncegate_core::SystemClock::new());
    let runtime = Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(async {
        let Ok(Outcome::Execute(grant)) = store.apply(id(0), claim(0)).await else { panic!("not executed") };
        let claimed = store.lookup(id(0)).await.expect("a reply").expect("a record");
        let complete =
            Complete { token: grant.token, completion: Completion::Replayable(response()), retention: DAY };
        store.apply(id(0), Command::Complete(complete)).await.expect("a reply");
        let completed = store.lookup(id(0)).await.expect("a reply").expect("a record");
        (codec::encode(&id(0), &claimed).into(), codec::encode(&id(0), &completed).into())
    })
}
