//! Requests with the date of their first sending: none is executed after its record may have been forgotten, by the clock that
//! forgets records.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use oncegate_core::{Command, MemoryStore, Outcome, RecordId, Store, StoreFuture, Timestamp, delegate_store};
use oncegate_engine::Engine;
use oncegate_http::{IdempotencyLayer, Profile, RequestBody, Settings};
use oncegate_testkit::ManualClock;
use tower_layer::Layer;
use tower_service::Service;

const HOUR: Duration = Duration::from_secs(3600);
const RETENTION: Duration = Duration::from_secs(24 * 3600);

#[derive(Clone, Default)]
struct Handler(Arc<AtomicUsize>);

impl Service<Request<RequestBody<Full<Bytes>>>> for Handler {
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<RequestBody<Full<Bytes>>>) -> Self::Future {
        self.0.fetch_add(1, Ordering::SeqCst);
        ready(Ok(Response::new(Full::from("done"))))
    }
}

/// A store whose time was last seen at its start, as by a process that has not used it since.
struct UnseenSince<S>(S, Timestamp);

impl<S: Store> Store for UnseenSince<S> {
    fn apply(&self, id: RecordId, command: Command) -> StoreFuture<'_, Outcome> {
        self.0.apply(id, command)
    }

    fn now(&self) -> Timestamp {
        self.1
    }

    delegate_store!(self, self.0 => lookup list purge audit check changed advisories accept_clock capabilities);
}

/// A client, a layer with the profile `oasis`, and the clock of its store, which shows `from` at first.
struct World {
    layer: IdempotencyLayer,
    handler: Handler,
    clock: Arc<ManualClock>,
    first: SystemTime,
}

impl World {
    /// A layer that sees the time of its store all the time, or only this one.
    fn new(from: SystemTime, seen: Option<SystemTime>) -> Self {
        let millis = |time: SystemTime| time.duration_since(UNIX_EPOCH).unwrap().as_millis() as u64;
        let clock = Arc::new(ManualClock::at_millis(millis(from)));
        let store = MemoryStore::new(clock.clone());
        let engine = match seen {
            Some(seen) => Engine::new(UnseenSince(store, Timestamp::from_millis(millis(seen)))),
            None => Engine::new(store),
        };
        let settings = Settings::new(Profile::named("oasis").unwrap());
        let layer = IdempotencyLayer::new(engine).with_settings(settings).unwrap();
        Self { layer, handler: Handler::default(), clock, first: from }
    }

    /// The status of the response to a request that was sent first at this time.
    async fn send(&self, first_sent: SystemTime) -> u16 {
        let request = Request::post("/orders")
            .header("repeatability-request-id", "01890a5d-ac96-774b-bcce-b302099a8057")
            .header("repeatability-first-sent", httpdate::fmt_http_date(first_sent));
        let mut service = self.layer.layer(self.handler.clone());
        service.call(request.body(Full::default()).unwrap()).await.unwrap().status().as_u16()
    }

    fn effects(&self) -> usize {
        self.handler.0.load(Ordering::SeqCst)
    }
}

/// The clock of this machine stands still for the whole test, as if it were set back all the time.
#[tokio::test]
async fn a_request_is_not_executed_again_after_the_store_has_forgotten_its_key() {
    let now = SystemTime::now();
    for seen in [None, Some(now)] {
        let world = World::new(now, seen);
        assert_eq!(world.send(world.first).await, 200);
        assert_eq!(world.send(world.first).await, 200, "the replay");
        world.clock.advance(RETENTION + HOUR);
        for _ in 0..3 {
            assert_eq!(world.send(world.first).await, 412, "{seen:?}");
        }
        assert_eq!(world.effects(), 1);
        // The claim that was refused leaves the key to requests of the present.
        if seen.is_none() {
            assert_eq!(world.send(world.first + RETENTION + HOUR).await, 200);
            assert_eq!(world.effects(), 2);
        }
    }
}

#[tokio::test]
async fn a_clock_of_this_machine_that_is_wrong_refuses_no_request() {
    for from in [SystemTime::now() - 40 * RETENTION, SystemTime::now() + 40 * RETENTION] {
        let world = World::new(from, None);
        assert_eq!(world.send(world.first).await, 200);
        assert_eq!(world.effects(), 1);
    }
}

/// A date in the future would look younger than its record, so it is refused by the time of the claim, too.
#[tokio::test]
async fn a_date_that_is_ahead_of_the_store_is_refused() {
    let (now, soon) = (SystemTime::now(), Duration::from_secs(240));
    let world = World::new(now, None);
    assert_eq!((world.send(now + HOUR).await, world.effects()), (400, 0));
    assert_eq!((world.send(now + soon).await, world.effects()), (200, 1));
    let world = World::new(now - HOUR, Some(now));
    assert_eq!((world.send(now + soon).await, world.effects()), (400, 0));
    assert_eq!((world.send(now - HOUR).await, world.effects()), (200, 1));
}
