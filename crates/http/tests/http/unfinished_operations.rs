//! The responses of a handler whose steps have left an operation half-way: the end of the response does not end the operation.

use std::convert::Infallible;
use std::future::{Future, IntoFuture as _, pending};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use oncegate_core::{MemoryStore, OnAbandoned};
use oncegate_engine::{Attempt, Engine, Policy, StepError, StepFailure};
use oncegate_http::{
    Idempotency, IdempotencyContext, IdempotencyLayer, RequestBody, Settings, StoreDirective,
};
use oncegate_testkit::ManualClock;
use tower_layer::Layer as _;
use tower_service::Service;

/// The outcome of the shipping step.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Ship {
    Works,
    IsUnsure,
    Fails,
    /// The handler stops waiting.
    Hangs,
    /// The handler decides itself that it cannot ship.
    SoldOut,
}

#[derive(Debug)]
struct World {
    ship: Ship,
    /// The status of the handler's response if a step has no value, and its directive for the record.
    status: u16,
    directive: Option<StoreDirective>,
    /// The refund of the charge always fails.
    no_refund: bool,
    /// The effects that took place.
    effects: Vec<&'static str>,
    /// Shipping is the only step.
    ships_only: bool,
}

#[derive(Clone)]
struct Shop(Arc<Mutex<World>>);

impl Shop {
    fn new(ship: Ship, status: u16) -> Self {
        let world =
            World { ship, status, directive: None, no_refund: false, effects: Vec::new(), ships_only: false };
        Self(Arc::new(Mutex::new(world)))
    }

    fn did(&self, what: &'static str) {
        self.0.lock().unwrap().effects.push(what);
    }

    fn effects(&self) -> Vec<&'static str> {
        self.0.lock().unwrap().effects.clone()
    }

    async fn sell(&self, attempt: Attempt) -> Result<(), StepError<String>> {
        let (ship, ships_only) = {
            let world = self.0.lock().unwrap();
            (world.ship, world.ships_only)
        };
        if !ships_only {
            let refund = self.clone();
            attempt
                .step("charge", async |_| {
                    self.did("charge");
                    Ok::<_, StepFailure<String>>(())
                })
                .compensate(async move |_, ()| {
                    if refund.0.lock().unwrap().no_refund {
                        return Err(StepFailure::Final("the account is closed".to_owned()));
                    }
                    refund.did("refund");
                    Ok(())
                })
                .await?;
        }
        if ship == Ship::SoldOut {
            return Err(StepError::Refused { reason: "an error of its own".to_owned() });
        }
        let shipped = attempt.step("ship", async |_| match ship {
            Ship::Works => {
                self.did("ship");
                Ok(())
            }
            Ship::IsUnsure => Err(StepFailure::Unsure("timed out".to_owned())),
            Ship::Fails => Err(StepFailure::Final("out of stock".to_owned())),
            Ship::Hangs | Ship::SoldOut => pending().await,
        });
        match ship {
            Ship::Hangs => tokio::time::timeout(Duration::from_secs(1), shipped.into_future())
                .await
                .unwrap_or_else(|_| Err(StepError::Unsure("it hangs".to_owned()))),
            _ => shipped.await,
        }
    }
}

impl Service<Request<RequestBody<Full<Bytes>>>> for Shop {
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<RequestBody<Full<Bytes>>>) -> Self::Future {
        let shop = self.clone();
        Box::pin(async move {
            let context = IdempotencyContext::from_extensions(request.extensions()).unwrap().clone();
            let mut response = Response::new(Full::default());
            if shop.sell(context.attempt().clone()).await.is_err() {
                let world = shop.0.lock().unwrap();
                *response.status_mut() = StatusCode::from_u16(world.status).unwrap();
                if let Some(directive) = world.directive {
                    response.extensions_mut().insert(directive);
                }
            }
            Ok(response)
        })
    }
}

fn layer(shop: &Shop, on_abandoned: OnAbandoned) -> (Idempotency<Shop>, Arc<ManualClock>) {
    let clock = Arc::new(ManualClock::at_millis(1));
    let policy = Policy::default().with_on_abandoned(on_abandoned);
    let engine = Engine::new(MemoryStore::new(clock.clone()));
    let layer = IdempotencyLayer::new(engine).with_settings(Settings::default().with_policy(policy)).unwrap();
    (layer.layer(shop.clone()), clock)
}

async fn send(service: &mut Idempotency<Shop>, body: &'static str) -> (u16, bool) {
    let request = Request::post("/orders").header("idempotency-key", "k").body(Full::from(body)).unwrap();
    let response = service.call(request).await.unwrap();
    (response.status().as_u16(), response.headers().contains_key("idempotent-replayed"))
}

#[tokio::test]
async fn an_error_made_from_a_failed_step_does_not_end_the_operation() {
    for status in [503, 500, 400, 409] {
        let shop = Shop::new(Ship::IsUnsure, status);
        let (mut service, _) = layer(&shop, OnAbandoned::Reexecute);
        assert_eq!(send(&mut service, "one").await, (status, false));
        // The key still belongs to the first request.
        assert_eq!(send(&mut service, "another").await.0, 422, "{status}");
        shop.0.lock().unwrap().ship = Ship::Works;
        assert_eq!(send(&mut service, "one").await, (200, false), "{status}");
        assert_eq!(send(&mut service, "one").await, (200, true));
        assert_eq!(shop.effects(), ["charge", "ship"], "{status}");
    }
}

#[tokio::test]
async fn a_half_done_operation_that_may_not_run_again_is_left_to_an_operator() {
    let shop = Shop::new(Ship::IsUnsure, 503);
    let (mut service, _) = layer(&shop, OnAbandoned::Park);
    assert_eq!(send(&mut service, "one").await, (503, false));
    shop.0.lock().unwrap().ship = Ship::Works;
    assert_eq!(send(&mut service, "one").await, (500, false));
    assert_eq!(shop.effects(), ["charge"]);
}

#[tokio::test]
async fn an_operation_that_can_neither_finish_nor_be_compensated_is_left_to_an_operator() {
    let shop = Shop::new(Ship::Fails, 503);
    shop.0.lock().unwrap().no_refund = true;
    let (mut service, clock) = layer(&shop, OnAbandoned::Reexecute);
    assert_eq!(send(&mut service, "one").await, (503, false));
    assert_eq!(send(&mut service, "one").await, (500, false));
    clock.advance(Duration::from_secs(3600));
    assert_eq!(send(&mut service, "one").await, (500, false));
}

#[tokio::test]
async fn compensated_operations_and_explicit_directives_end_the_operation() {
    let shop = Shop::new(Ship::Fails, 409);
    let (mut service, _) = layer(&shop, OnAbandoned::Reexecute);
    assert_eq!(send(&mut service, "one").await, (409, false));
    assert_eq!(send(&mut service, "one").await, (409, true));
    assert_eq!(shop.effects(), ["charge", "refund"]);

    // The handler answers with a success although shipping is unsure, so the operation has ended.
    let shop = Shop::new(Ship::IsUnsure, 202);
    let (mut service, _) = layer(&shop, OnAbandoned::Reexecute);
    assert_eq!(send(&mut service, "one").await, (202, false));
    assert_eq!(send(&mut service, "one").await, (202, true));

    let shop = Shop::new(Ship::IsUnsure, 503);
    shop.0.lock().unwrap().directive = Some(StoreDirective::Replay);
    let (mut service, _) = layer(&shop, OnAbandoned::Reexecute);
    assert_eq!(send(&mut service, "one").await, (503, false));
    assert_eq!(send(&mut service, "one").await, (503, true));
}

/// A time-out around a first step proves nothing about its effect, whatever response the handler makes of it.
#[tokio::test(start_paused = true)]
async fn a_first_step_that_timed_out_does_not_free_the_key() {
    for (directive, status) in [(Some(StoreDirective::Release), 503), (None, 429), (None, 503)] {
        let shop = Shop::new(Ship::Hangs, status);
        {
            let mut world = shop.0.lock().unwrap();
            (world.directive, world.ships_only) = (directive, true);
        }
        let (mut service, clock) = layer(&shop, OnAbandoned::Reexecute);
        assert_eq!(send(&mut service, "one").await, (status, false));
        shop.0.lock().unwrap().ship = Ship::Works;
        assert_eq!(send(&mut service, "another").await.0, 422, "{directive:?} {status}");
        assert_eq!(send(&mut service, "one").await.0, 409, "{directive:?} {status}");
        clock.advance(Duration::from_secs(3600));
        assert_eq!(send(&mut service, "one").await, (200, false), "{directive:?} {status}");
        assert_eq!(shop.effects(), ["ship"]);
    }
}

#[tokio::test]
async fn a_handlers_own_error_compensates_finished_steps_before_it_is_the_response() {
    let shop = Shop::new(Ship::SoldOut, 422);
    let (mut service, _) = layer(&shop, OnAbandoned::Reexecute);
    assert_eq!(send(&mut service, "one").await, (422, false));
    assert_eq!(send(&mut service, "one").await, (422, true));
    assert_eq!(shop.effects(), ["charge", "refund"]);

    // A charge that cannot be refunded is left to an operator, and the error is not the response.
    let shop = Shop::new(Ship::SoldOut, 422);
    shop.0.lock().unwrap().no_refund = true;
    let (mut service, _) = layer(&shop, OnAbandoned::Reexecute);
    for _ in 0..2 {
        assert_eq!(send(&mut service, "one").await, (500, false));
    }
    assert_eq!(shop.effects(), ["charge"]);

    // The handler itself may declare with a directive that the operation has ended.
    let shop = Shop::new(Ship::SoldOut, 422);
    shop.0.lock().unwrap().directive = Some(StoreDirective::Replay);
    let (mut service, _) = layer(&shop, OnAbandoned::Reexecute);
    assert_eq!(send(&mut service, "one").await, (422, false));
    assert_eq!(send(&mut service, "one").await, (422, true));
    assert_eq!(shop.effects(), ["charge"]);
}
