//! The cost of the operations of a store with many records, compared with a store with few.
//!
//! Two stores, a small and a large one, take turns. A turn claims and completes some new records, replays old ones, moves the
//! clock ahead until the new ones have expired, and purges them: so each store has the same size again for its next turn.

use std::fmt::Write as _;
use std::future::Future;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use oncegate_core::{Clock, MemoryStore, Store, SystemClock, Timestamp};
use oncegate_embedded::{EmbeddedOptions, EmbeddedStore};

use crate::records::{LEASE, Result, claim, complete, replay, resident, scatter};

/// Commands in flight while something is measured, and while a store is filled.
const IN_FLIGHT: usize = 64;
const IN_FLIGHT_FILL: usize = 4096;
/// The number of records that a turn adds and purges, and the number that it replays.
const ADDED: u64 = 4096;
const REPLAYED: u64 = 65_536;
const ROUNDS: usize = 9;

/// The retention of the records that are there before, and of those that a turn adds.
const LONG: Duration = Duration::from_secs(300 * 24 * 60 * 60);
const SHORT: Duration = Duration::from_secs(60);

/// The operations, in the order in which a turn does them.
const OPERATIONS: [&str; 5] =
    ["claim", "completion", "replay, any record", "replay, one of 10 000 records", "purge"];

/// Seconds for one operation.
type Costs = [f64; OPERATIONS.len()];

/// The wall clock, which can be moved ahead.
struct MovedClock {
    wall: SystemClock,
    ahead: AtomicU64,
}

impl Clock for MovedClock {
    fn now(&self) -> Timestamp {
        self.wall.now().after(Duration::from_millis(self.ahead.load(Ordering::Relaxed)))
    }
}

/// A store and what is in it.
struct Population {
    store: Arc<dyn Store>,
    clock: Arc<MovedClock>,
    records: u64,
    /// The number of the next new record.
    next: u64,
    body: Bytes,
}

/// Fills a new store in this directory, with durable writes, many in flight.
pub(crate) async fn fill(directory: &Path, records: u64) -> Result<()> {
    let mut population = Population::embedded(directory, 0)?;
    let begun = Instant::now();
    population.fill(records).await?;
    let seconds = begun.elapsed().as_secs_f64();
    // Until the store has compacted its files.
    let mut bytes = 0;
    loop {
        let now = bytes_of(directory)?;
        if now == bytes {
            break;
        }
        bytes = now;
        tokio::time::sleep(Duration::from_secs(2)).await;
    }
    println!(
        "{{\"records\":{records},\"seconds\":{seconds:.1},\"disk_bytes\":{bytes},\"per_record\":{}}}",
        bytes / records
    );
    // As if it were killed: the store is not closed.
    std::mem::forget(population);
    Ok(())
}

fn bytes_of(directory: &Path) -> Result<u64> {
    let mut bytes = 0;
    for file in oncegate_embedded::segment_files(directory)? {
        bytes += std::fs::metadata(file)?.len();
    }
    Ok(bytes)
}

/// The latency of a claim and its completion while expired records are purged, and without.
pub(crate) async fn purge_latency(directory: &Path, records: u64) -> Result<()> {
    let mut population = Population::embedded(directory, 0)?;
    let mut lines = String::new();
    for round in 0..3 {
        let begun = population.next;
        population.fill_from(begun, records, SHORT).await?;
        let before = population.pairs_until(tokio::time::sleep(Duration::from_secs(5))).await?;
        let due = SHORT + LEASE + Duration::from_secs(3);
        population.clock.ahead.fetch_add(due.as_millis() as u64, Ordering::Relaxed);
        let store = population.store.clone();
        let purged = Arc::new(AtomicU64::new(0));
        let counted = purged.clone();
        let during = population
            .pairs_until(async move {
                // As the engine does it.
                loop {
                    let step = Instant::now();
                    match store.purge(500).await {
                        Ok(0) | Err(_) => break,
                        Ok(more) => counted.fetch_add(more as u64, Ordering::Relaxed),
                    };
                    tokio::time::sleep(step.elapsed().min(Duration::from_millis(50))).await;
                }
            })
            .await?;
        let purged = purged.load(Ordering::Relaxed);
        writeln!(
            lines,
            "| {} | {purged} | {:.2} / {:.2} | {:.2} / {:.2} | {:.2} |",
            round + 1,
            before.0,
            before.1,
            during.0,
            during.1,
            during.1 / before.1
        )?;
    }
    print!(
        "| round | purged | p50 / p99 without, ms | while purging | p99, ratio |\n|---|---|---|---|---|\n{lines}"
    );
    Ok(())
}

/// The memory of this process with a store of this many records: after opening, and after some turns.
pub(crate) async fn memory_of(directory: &Path, records: u64) -> Result<()> {
    let begun = Instant::now();
    let mut population = Population::embedded(directory, records)?;
    let (seconds, opened) = (begun.elapsed().as_secs_f64(), resident("VmRSS")?);
    // Numbers that no other run adds.
    population.next = 1 << 40;
    for _ in 0..6 {
        population.turn().await?;
    }
    println!(
        "{{\"records\":{records},\"open_seconds\":{seconds:.2},\"opened_bytes\":{opened},\"worked_bytes\":{},\"peak_bytes\":{}}}",
        resident("VmRSS")?,
        resident("VmHWM")?
    );
    Ok(())
}

/// Compares two embedded stores that were filled before.
pub(crate) async fn embedded(small: (&Path, u64), large: (&Path, u64)) -> Result<()> {
    let open = |(directory, records): (&Path, u64)| Population::embedded(directory, records);
    compare(open(small)?, open(large)?, 2).await
}

/// Compares two memory stores.
pub(crate) async fn memory(small: u64, large: u64) -> Result<()> {
    let mut populations = [Population::memory(), Population::memory()];
    for (population, records) in populations.iter_mut().zip([small, large]) {
        population.fill(records).await?;
    }
    let [small, large] = populations;
    compare(small, large, 8).await
}

async fn compare(mut small: Population, mut large: Population, turns: usize) -> Result<()> {
    let mut rounds = Vec::new();
    // The first round is for the caches.
    for round in 0..=ROUNDS {
        let mut costs = [Costs::default(); 2];
        for (population, costs) in [&mut small, &mut large].into_iter().zip(&mut costs) {
            for _ in 0..turns {
                let turn = population.turn().await?;
                costs.iter_mut().zip(turn).for_each(|(sum, cost)| *sum += cost / turns as f64);
            }
        }
        if round > 0 {
            rounds.push(costs);
        }
    }
    let mut text = format!(
        "| µs per operation | {} records | {} records | ratio | range |\n|---|---|---|---|---|\n",
        small.records, large.records
    );
    for (at, operation) in OPERATIONS.iter().enumerate() {
        let figures = |of: &dyn Fn(&[Costs; 2]) -> f64| {
            let mut figures: Vec<f64> = rounds.iter().map(of).collect();
            figures.sort_by(f64::total_cmp);
            figures
        };
        let [few, many] = [0, 1].map(|store| figures(&|costs| costs[store][at] * 1e6)[ROUNDS / 2]);
        let ratios = figures(&|[few, many]| many[at] / few[at]);
        let (low, ratio, high) = (ratios[0], ratios[ROUNDS / 2], ratios[ROUNDS - 1]);
        writeln!(text, "| {operation} | {few:.2} | {many:.2} | {ratio:.2} | {low:.2}–{high:.2} |")?;
    }
    print!("{text}");
    Ok(())
}

impl Population {
    fn embedded(directory: &Path, records: u64) -> Result<Self> {
        let clock = Arc::new(MovedClock { wall: SystemClock::new(), ahead: AtomicU64::new(0) });
        let options = EmbeddedOptions::new(directory).with_clock(clock.clone()).with_memory_bytes(640 << 20);
        let store = EmbeddedStore::open(options)?;
        Ok(Self::new(Arc::new(store), clock, records))
    }

    fn memory() -> Self {
        let clock = Arc::new(MovedClock { wall: SystemClock::new(), ahead: AtomicU64::new(0) });
        Self::new(Arc::new(MemoryStore::new(clock.clone()).with_max_records(u64::MAX)), clock, 0)
    }

    fn new(store: Arc<dyn Store>, clock: Arc<MovedClock>, records: u64) -> Self {
        Self {
            store,
            clock,
            records,
            next: records,
            body: Bytes::from_static(br#"{"id":"pay_A8Z5MHwQS7jUmZ","amount":4999,"status":"captured"}"#),
        }
    }

    /// Three times through the store in the order of identifiers, so that what is written together lies together: several
    /// times as fast as in random order, and the pages are about as full.
    async fn fill(&mut self, records: u64) -> Result<()> {
        for pass in 0..3 {
            let mut numbers: Vec<u64> = (pass..records).step_by(3).collect();
            numbers.sort_unstable_by_key(|number| scatter(*number));
            let (store, body, numbers) = (self.store.clone(), self.body.clone(), Arc::<[u64]>::from(numbers));
            let count = numbers.len() as u64;
            let pair = move |at| {
                let (store, body, number) = (store.clone(), body.clone(), numbers[at as usize]);
                async move {
                    let token = claim(&*store, number, LONG).await?;
                    complete(&*store, number, token, &body, LONG).await
                }
            };
            each(0..count, IN_FLIGHT_FILL, pair).await?;
        }
        (self.records, self.next) = (records, records);
        Ok(())
    }

    /// Adds records in the order of their numbers.
    async fn fill_from(&mut self, first: u64, records: u64, retention: Duration) -> Result<()> {
        let (store, body) = (self.store.clone(), self.body.clone());
        let pair = move |number| {
            let (store, body) = (store.clone(), body.clone());
            async move {
                let token = claim(&*store, number, retention).await?;
                complete(&*store, number, token, &body, retention).await
            }
        };
        each(first..first + records, IN_FLIGHT_FILL, pair).await?;
        self.next = first + records;
        Ok(())
    }

    /// Claims and completes new records until the future ends. Returns the median and the 99th percentile, in milliseconds.
    async fn pairs_until(&mut self, end: impl Future<Output = ()> + Send + 'static) -> Result<(f64, f64)> {
        let end = tokio::spawn(end);
        let next = Arc::new(AtomicU64::new(self.next));
        let is_over = Arc::new(AtomicBool::new(false));
        let tasks: Vec<_> = (0..IN_FLIGHT)
            .map(|_| {
                let (store, body) = (self.store.clone(), self.body.clone());
                let (next, is_over) = (next.clone(), is_over.clone());
                tokio::spawn(async move {
                    let mut latencies = Vec::new();
                    while !is_over.load(Ordering::Relaxed) {
                        let begun = Instant::now();
                        let number = next.fetch_add(1, Ordering::Relaxed);
                        let token = claim(&*store, number, LONG).await?;
                        complete(&*store, number, token, &body, LONG).await?;
                        latencies.push(begun.elapsed().as_secs_f64() * 1e3);
                    }
                    Result::Ok(latencies)
                })
            })
            .collect();
        end.await?;
        is_over.store(true, Ordering::Relaxed);
        let mut latencies = Vec::new();
        for task in tasks {
            latencies.append(&mut task.await??);
        }
        self.next = next.load(Ordering::Relaxed);
        latencies.sort_by(f64::total_cmp);
        let of =
            |share: f64| latencies.get((latencies.len() as f64 * share) as usize).copied().unwrap_or(0.0);
        Ok((of(0.5), of(0.99)))
    }

    async fn turn(&mut self) -> Result<Costs> {
        let added = self.next..self.next + ADDED;
        self.next = added.end;
        let (store, body, records) = (self.store.clone(), self.body.clone(), self.records);

        let claims = store.clone();
        let (claimed, tokens) = each(added.clone(), IN_FLIGHT, move |number| {
            let store = claims.clone();
            async move { Ok((number, claim(&*store, number, SHORT).await?)) }
        })
        .await?;

        let tokens: Arc<[_]> = tokens.into();
        let completions = store.clone();
        let (completed, _) = each(0..ADDED, IN_FLIGHT, move |at| {
            let (store, body, tokens) = (completions.clone(), body.clone(), tokens.clone());
            async move {
                let (number, token) = tokens[at as usize];
                complete(&*store, number, token, &body, SHORT).await
            }
        })
        .await?;

        let mut replayed = [0.0; 3];
        // The few are read twice: what counts is the second time, when they are as near as they get.
        let few = records.min(10_000);
        for (seconds, among) in replayed.iter_mut().zip([records, few, few]) {
            let (store, from) = (store.clone(), added.start);
            (*seconds, _) = each(0..REPLAYED, IN_FLIGHT, move |number| {
                let store = store.clone();
                async move { replay(&*store, scatter(from + number) % among).await }
            })
            .await?;
        }

        // A record is looked at when it would expire had its lease run out, and up to two seconds later.
        let due = SHORT + LEASE + Duration::from_secs(3);
        self.clock.ahead.fetch_add(due.as_millis() as u64, Ordering::Relaxed);
        let begun = Instant::now();
        let mut purged = 0;
        loop {
            // In the steps in which the engine purges.
            match store.purge(500).await? {
                0 => break,
                more => purged += more as u64,
            }
        }
        let seconds = begun.elapsed().as_secs_f64();
        if purged != ADDED {
            return Err(format!("{purged} records were purged, not {ADDED}").into());
        }
        let added = ADDED as f64;
        let [any, _, few] = replayed.map(|seconds| seconds / REPLAYED as f64);
        Ok([claimed / added, completed / added, any, few, seconds / added])
    }
}

/// Does this for each number, so many at a time. Gives the seconds that it took, and what came of it.
pub(crate) async fn each<T: Send + 'static, F: Future<Output = Result<T>> + Send>(
    numbers: Range<u64>,
    in_flight: usize,
    work: impl Fn(u64) -> F + Clone + Send + 'static,
) -> Result<(f64, Vec<T>)> {
    /// Few enough that all tasks end at about the same time, enough that they seldom meet.
    const STRIDE: u64 = 16;
    let (next, end) = (Arc::new(AtomicU64::new(numbers.start)), numbers.end);
    let begun = Instant::now();
    let tasks: Vec<_> = (0..in_flight)
        .map(|_| {
            let (next, work) = (next.clone(), work.clone());
            tokio::spawn(async move {
                let mut results = Vec::new();
                loop {
                    let from = next.fetch_add(STRIDE, Ordering::Relaxed);
                    if from >= end {
                        return Result::Ok(results);
                    }
                    for number in from..end.min(from + STRIDE) {
                        results.push(work(number).await?);
                    }
                }
            })
        })
        .collect();
    let mut results = Vec::new();
    for task in tasks {
        results.append(&mut task.await??);
    }
    Ok((begun.elapsed().as_secs_f64(), results))
}
