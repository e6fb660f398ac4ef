//! Retries over any Tower service of HTTP requests: a [layer](IntentLayer), and a [transport](TowerTransport) for
//! [`Client`](crate::Client).
//!
//! The layer takes the key of a request from its header, or from an [`IdempotencyKey`] among its extensions. A request
//! without a key is sent once, and its response is passed on as it streams, unless
//! [`IntentLayer::with_keyless_retries`] is set.
//!
//! ```
//! use std::convert::Infallible;
//! use std::sync::atomic::{AtomicU32, Ordering};
//! use bytes::Bytes;
//! use http::{Request, Response};
//! use http_body_util::Full;
//! use oncegate_client::{IdempotencyKey, Report, Verdict, tower::IntentLayer};
//! use tower::{Layer, ServiceExt, service_fn};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // Instead of a real connection: a service that is overloaded at first.
//! static CALLS: AtomicU32 = AtomicU32::new(0);
//! let service = service_fn(async |request: Request<Full<Bytes>>| {
//!     assert_eq!(request.headers()["idempotency-key"], "order-123");
//!     let status = if CALLS.fetch_add(1, Ordering::SeqCst) == 0 { 503 } else { 201 };
//!     Ok::<_, Infallible>(Response::builder().status(status).body(Full::<Bytes>::default()).unwrap())
//! });
//!
//! let request = Request::post("https://shop.example/orders")
//!     .extension(IdempotencyKey::new("order-123")?)
//!     .body(Full::from("{}"))?;
//! let response = IntentLayer::new().layer(service).oneshot(request).await?;
//! let report = response.extensions().get::<Report>().unwrap();
//! assert_eq!((report.verdict, report.attempts), (Verdict::Done, 2));
//! # Ok(())
//! # }
//! ```

use std::error::Error;
use std::fmt;
use std::future::poll_fn;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use tower_layer::Layer;
use tower_service::Service;

use oncegate_core::IdempotencyKey;

use crate::client::Transport;
use crate::failure::{AttemptFailure, AttemptFailureKind, BoxError};
use crate::middleware::{MiddlewareCore, RequestPlan, settings};
use crate::received::ReceivedBody;
use crate::report::{SendError, SendErrorKind};
use crate::send::{AttemptSender, RequestInfo};

/// Classifies an error of the inner service.
type Classify = Arc<dyn Fn(&(dyn Error + 'static)) -> AttemptFailureKind + Send + Sync>;

/// The largest body of a request that is read so that it can be sent again. See [`IntentLayer::with_max_body_bytes`].
const MAX_BODY_BYTES: u64 = 1024 * 1024;

/// Sends requests until there is a definite response. See the [module](self).
#[derive(Clone)]
pub struct IntentLayer {
    core: MiddlewareCore,
    classify: Classify,
    max_body_bytes: u64,
}

impl Default for IntentLayer {
    fn default() -> Self {
        Self::new()
    }
}

impl IntentLayer {
    /// The default policy, for an API that honours `Idempotency-Key`.
    #[must_use]
    pub fn new() -> Self {
        Self { core: MiddlewareCore::new(), classify: Arc::new(classify), max_body_bytes: MAX_BODY_BYTES }
    }

    settings!();

    /// Sets the function that classifies errors of the inner service.
    ///
    /// The default recognizes refused streams of HTTP/2 (with the feature `http2`); all other errors are doubtful. If there was
    /// no connection, the function should return [`AttemptFailureKind::NotSent`], unless the client follows redirects.
    #[must_use]
    pub fn with_error_classifier(
        mut self,
        classify: impl Fn(&(dyn Error + 'static)) -> AttemptFailureKind + Send + Sync + 'static,
    ) -> Self {
        self.classify = Arc::new(classify);
        self
    }

    /// Sets the largest body that is read to be sent again: 1 MiB by default. A request with a larger body, or a body of unknown
    /// length, is sent once, as it streams.
    #[must_use]
    pub fn with_max_body_bytes(self, bytes: u64) -> Self {
        Self { max_body_bytes: bytes, ..self }
    }
}

impl<S> Layer<S> for IntentLayer {
    type Service = IntentService<S>;

    fn layer(&self, inner: S) -> IntentService<S> {
        IntentService { inner, layer: self.clone() }
    }
}

impl fmt::Debug for IntentLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IntentLayer").field("policy", &self.core.runner.policy).finish_non_exhaustive()
    }
}

/// The service of an [`IntentLayer`].
#[derive(Clone, Debug)]
pub struct IntentService<S> {
    inner: S,
    layer: IntentLayer,
}

impl<S, B, R> Service<Request<B>> for IntentService<S>
where
    S: Service<Request<B>, Response = Response<R>, Error: Into<BoxError>, Future: Send>
        + Clone
        + Send
        + 'static,
    B: Body<Data = Bytes, Error: Into<BoxError>> + From<Bytes> + Send + 'static,
    R: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    type Response = Response<ReceivedBody<R>>;
    type Error = SendError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, SendError>> + Send>>;

    /// Always ready: each attempt waits for the inner service.
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), SendError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let Self { inner, layer } = self.clone();
        Box::pin(async move {
            let (mut head, body) = request.into_parts();
            let key = head.extensions.remove::<IdempotencyKey>();
            let unsendable = |error: BoxError| {
                SendError::new(SendErrorKind::Unsendable, 0, false).with_source(Some(error))
            };
            let way = layer.core.plan(&head.method, &mut head.headers, key.as_ref());
            let ask = match way.map_err(|error| unsendable(error.into()))? {
                RequestPlan::UntilDefinite(ask) => ask,
                RequestPlan::PassThrough => {
                    return past(inner, &layer, Request::from_parts(head, body)).await;
                }
            };
            let body = if body.size_hint().upper().is_some_and(|upper| upper <= layer.max_body_bytes) {
                let read =
                    ReceivedBody::read(body, usize::MAX).await.map_err(|error| unsendable(error.into()))?;
                RequestBody::Whole(read.whole().cloned().unwrap_or_default())
            } else {
                RequestBody::Once(Some(body))
            };
            let mut tries = ServiceSender { inner, layer: &layer, head, body };
            until(&layer, &ask, &mut tries).await
        })
    }
}

async fn until<S, B, R>(
    layer: &IntentLayer,
    ask: &RequestInfo,
    tries: &mut ServiceSender<'_, S, B>,
) -> Result<Response<ReceivedBody<R>>, SendError>
where
    S: Service<Request<B>, Response = Response<R>, Error: Into<BoxError>, Future: Send> + Clone + Send,
    B: From<Bytes> + Send,
    R: Body<Data = Bytes, Error: Into<BoxError>> + Send,
{
    let (mut response, report) = layer.core.runner.run(ask, tries).await?;
    response.extensions_mut().insert(report);
    Ok(response)
}

/// Sends a request without protection once. Its response is not judged.
async fn past<S, B, R>(
    mut inner: S,
    layer: &IntentLayer,
    request: Request<B>,
) -> Result<Response<ReceivedBody<R>>, SendError>
where
    S: Service<Request<B>, Response = Response<R>, Error: Into<BoxError>>,
    R: Body<Data = Bytes>,
{
    match call(&mut inner, layer, request).await {
        Ok(response) => Ok(response.map(ReceivedBody::unread)),
        Err(failure) => {
            let may = failure.kind() == AttemptFailureKind::Doubtful;
            let why = if may { SendErrorKind::Unknown } else { SendErrorKind::Attempts };
            Err(SendError::new(why, 1, may).with_source(Some(failure.into_source())))
        }
    }
}

async fn call<S, B, R>(
    inner: &mut S,
    layer: &IntentLayer,
    request: Request<B>,
) -> Result<Response<R>, AttemptFailure>
where
    S: Service<Request<B>, Response = Response<R>, Error: Into<BoxError>>,
{
    if let Err(error) = poll_fn(|cx| inner.poll_ready(cx)).await {
        return Err(AttemptFailure::new(AttemptFailureKind::NotSent, error)); // the service did not accept it
    }
    inner.call(request).await.map_err(|error| {
        let error = error.into();
        AttemptFailure::new((layer.classify)(&*error), error)
    })
}

enum RequestBody<B> {
    Whole(Bytes),
    Once(Option<B>),
}

struct ServiceSender<'a, S, B> {
    inner: S,
    layer: &'a IntentLayer,
    head: http::request::Parts,
    body: RequestBody<B>,
}

impl<S, B, R> AttemptSender for ServiceSender<'_, S, B>
where
    S: Service<Request<B>, Response = Response<R>, Error: Into<BoxError>, Future: Send> + Clone + Send,
    B: From<Bytes> + Send,
    R: Body<Data = Bytes, Error: Into<BoxError>> + Send,
{
    type Body = R;

    async fn send(&mut self) -> Result<Response<R>, AttemptFailure> {
        let body = match &mut self.body {
            RequestBody::Whole(bytes) => B::from(bytes.clone()),
            RequestBody::Once(body) => match body.take() {
                Some(body) => body,
                None => {
                    return Err(AttemptFailure::new(
                        AttemptFailureKind::Unsendable,
                        "the body was sent before",
                    ));
                }
            },
        };
        let request = Request::from_parts(self.head.clone(), body);
        // A clone for each attempt: an abandoned attempt must not affect the next one.
        call(&mut self.inner.clone(), self.layer, request).await
    }

    fn can_send_again(&self) -> bool {
        matches!(self.body, RequestBody::Whole(_))
    }
}

/// The default classification of errors.
fn classify(error: &(dyn Error + 'static)) -> AttemptFailureKind {
    #[cfg(feature = "http2")]
    if crate::was_refused_by_http2(error) {
        return AttemptFailureKind::NotProcessed;
    }
    let _ = error;
    AttemptFailureKind::Doubtful
}

/// A [`Transport`] over a Tower service, such as a client of hyper, whose requests have bodies of type `B`.
pub struct TowerTransport<S, B> {
    inner: S,
    layer: IntentLayer,
    body: PhantomData<fn(B)>,
}

impl<S, B> TowerTransport<S, B> {
    /// A transport over this service.
    #[must_use]
    pub fn new(inner: S) -> Self {
        Self { inner, layer: IntentLayer::new(), body: PhantomData }
    }

    /// See [`IntentLayer::with_error_classifier`].
    #[must_use]
    pub fn with_error_classifier(
        mut self,
        classify: impl Fn(&(dyn Error + 'static)) -> AttemptFailureKind + Send + Sync + 'static,
    ) -> Self {
        self.layer.classify = Arc::new(classify);
        self
    }
}

impl<S: Clone, B> Clone for TowerTransport<S, B> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), layer: self.layer.clone(), body: PhantomData }
    }
}

impl<S, B> fmt::Debug for TowerTransport<S, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TowerTransport").finish_non_exhaustive()
    }
}

impl<S, B, R> Transport for TowerTransport<S, B>
where
    S: Service<Request<B>, Response = Response<R>, Error: Into<BoxError>, Future: Send> + Clone + Send + Sync,
    B: From<Bytes> + Send,
    R: Body<Data = Bytes, Error: Into<BoxError>> + Send,
{
    type Body = R;

    async fn send(&self, request: Request<Bytes>) -> Result<Response<R>, AttemptFailure> {
        call(&mut self.inner.clone(), &self.layer, request.map(B::from)).await
    }
}
