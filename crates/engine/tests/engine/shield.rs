//! Work that runs to its end, even if its caller goes away.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Duration;

use oncegate_core::MemoryStore;
use oncegate_engine::{Engine, ShieldRest};
use oncegate_testkit::Latch;

use crate::support::settle;

const NO_REST: fn(()) -> Option<ShieldRest> = |()| None;

struct Work {
    engine: Engine,
    latch: Latch,
    steps: Arc<AtomicUsize>,
}

impl Work {
    fn new() -> Self {
        let engine = Engine::builder(MemoryStore::default()).with_purge_interval(None).unwrap().build();
        Self { engine, latch: Latch::new(), steps: Arc::default() }
    }

    /// One step, a wait for the latch, and another step.
    fn run(&self) -> impl Future<Output = ()> + Send + 'static {
        let (latch, steps) = (self.latch.clone(), self.steps.clone());
        async move {
            steps.fetch_add(1, Ordering::SeqCst);
            latch.opened().await;
            steps.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn steps(&self) -> usize {
        self.steps.load(Ordering::SeqCst)
    }
}

/// Polls a future once, and returns it if it is pending.
async fn once<F: Future>(future: F) -> Option<std::pin::Pin<Box<F>>> {
    let mut future = Box::pin(future);
    let is_pending = poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx).is_pending())).await;
    is_pending.then_some(future)
}

fn tasks() -> usize {
    tokio::runtime::Handle::current().metrics().num_alive_tasks()
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_stays_needs_no_task() {
    let work = Work::new();
    let shielded = once(work.engine.shield(work.run(), NO_REST)).await.unwrap();
    assert_eq!(tasks(), 0);
    work.latch.open();
    shielded.await;
    assert_eq!((work.steps(), tasks()), (2, 0));
}

#[tokio::test(start_paused = true)]
async fn the_work_of_a_caller_that_leaves_goes_on() {
    let work = Work::new();
    drop(once(work.engine.shield(work.run(), NO_REST)).await);
    settle().await;
    assert_eq!((work.steps(), tasks()), (1, 1));
    work.latch.open();
    settle().await;
    assert_eq!((work.steps(), tasks()), (2, 0));
}

#[tokio::test(start_paused = true)]
async fn a_caller_may_leave_on_a_thread_without_a_runtime() {
    let work = Work::new();
    let engine = work.engine.clone();
    let run = work.run();
    let shielded = once(async move { engine.shield(run, NO_REST).await }).await.unwrap();
    std::thread::spawn(move || drop(shielded)).join().unwrap();
    work.latch.open();
    settle().await;
    assert_eq!(work.steps(), 2);
}

#[tokio::test(start_paused = true)]
async fn work_that_was_never_polled_does_not_begin() {
    let work = Work::new();
    drop(work.engine.shield(work.run(), NO_REST));
    settle().await;
    assert_eq!(work.steps(), 0);
}

#[tokio::test(start_paused = true)]
async fn only_the_work_of_a_caller_that_left_does_its_rest() {
    for stays in [true, false] {
        let work = Work::new();
        let (run, rest) = (work.run(), work.steps.clone());
        let output = async move {
            run.await;
            rest
        };
        let shielded = once(work.engine.shield(output, |steps| {
            Some(Box::pin(async move {
                tokio::task::yield_now().await;
                steps.fetch_add(10, Ordering::SeqCst);
            }))
        }));
        let shielded = shielded.await.filter(|_| stays);
        work.latch.open();
        if let Some(shielded) = shielded {
            shielded.await;
        }
        settle().await;
        assert_eq!(work.steps(), if stays { 2 } else { 12 });
    }
}

#[tokio::test(start_paused = true)]
async fn a_drain_waits_for_work_in_place() {
    let work = Work::new();
    let second = Duration::from_secs(1);
    let shielded = once(work.engine.shield(work.run(), NO_REST)).await.unwrap();
    assert_eq!(work.engine.drain(second).await, 1);
    drop(shielded);
    assert_eq!(work.engine.drain(second).await, 1, "in a task now");
    work.latch.open();
    assert_eq!(work.engine.drain(second).await, 0);
    assert_eq!(work.steps(), 2);
    // Nothing is left behind by work that ended in place.
    let shielded = once(work.engine.shield(async { tokio::task::yield_now().await }, NO_REST)).await;
    shielded.unwrap().await;
    assert_eq!(work.engine.drain(second).await, 0);
}

#[tokio::test(start_paused = true)]
async fn work_that_panicked_is_not_run_again() {
    let work = Work::new();
    let (engine, run, steps) = (work.engine.clone(), work.run(), work.steps.clone());
    let caller = tokio::spawn(async move {
        let panics = async move {
            run.await;
            std::panic::resume_unwind(Box::new("as ordered"));
        };
        engine.shield(panics, NO_REST).await;
        steps.fetch_add(100, Ordering::SeqCst);
    });
    settle().await;
    work.latch.open();
    assert!(caller.await.unwrap_err().is_panic());
    settle().await;
    assert_eq!((work.steps(), tasks()), (2, 0));
    assert_eq!(work.engine.drain(Duration::from_secs(1)).await, 0);
}

#[test]
fn a_runtime_that_ends_ends_the_work() {
    let work = Work::new();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (engine, run) = (work.engine.clone(), work.run());
    runtime.block_on(async {
        tokio::spawn(async move { engine.shield(run, NO_REST).await });
        settle().await;
    });
    drop(runtime);
    work.latch.open();
    assert_eq!(work.steps(), 1);
    assert_eq!(Arc::strong_count(&work.steps), 1, "the work was dropped");
}
