//! Retries over reqwest: a [transport](ReqwestTransport) for [`Client`](crate::Client), and [middleware](IntentMiddleware) for
//! `reqwest-middleware`.
//!
//! The application configures TLS and connections. This crate enables only the feature `http2` of reqwest, with its own
//! feature `http2`.

use std::error::Error;
use std::fmt;

use async_trait::async_trait;
use bytes::Bytes;
use http::{Extensions, Request, Response};
use reqwest::{ResponseBuilderExt, Url};
use reqwest_middleware::{Middleware, Next};

use oncegate_core::IdempotencyKey;

use crate::client::Transport;
use crate::failure::{AttemptFailure, AttemptFailureKind, BoxError};
use crate::middleware::{MiddlewareCore, RequestPlan, settings};
use crate::report::{SendError, SendErrorKind};
use crate::send::{AttemptSender, Redirected};

/// The largest number of header lines of a response. The default of reqwest, 100, is too small for some services. If the head
/// of a response cannot be read, the outcome of the operation stays in doubt.
const MAX_HEADER_LINES: usize = 1000;

/// The largest head of a response over HTTP/2, in bytes, for the same reason. The default is 16 KiB.
#[cfg(feature = "http2")]
const MAX_HEAD: u32 = 8 * 1024 * 1024;

/// Sends with a client of reqwest that follows no redirects and retries nothing by itself.
#[derive(Clone, Debug)]
pub struct ReqwestTransport {
    client: reqwest::Client,
}

impl ReqwestTransport {
    /// Creates a transport with the default settings of reqwest. See [`build`](Self::build).
    ///
    /// # Errors
    /// The errors of [`reqwest::ClientBuilder::build`].
    pub fn new() -> reqwest::Result<Self> {
        Self::build(reqwest::Client::builder())
    }

    /// Builds the client, and turns its redirects and retries off. A redirect is the response of the intent. After a redirect, a
    /// failed connection would no longer prove that nothing was sent.
    ///
    /// The head of a response may have 1000 header lines, and 8 MiB over HTTP/2. These settings override those of the builder.
    ///
    /// # Errors
    /// The errors of [`reqwest::ClientBuilder::build`].
    pub fn build(builder: reqwest::ClientBuilder) -> reqwest::Result<Self> {
        let builder = builder
            .redirect(reqwest::redirect::Policy::none())
            .retry(reqwest::retry::never())
            .http1_max_headers(MAX_HEADER_LINES);
        #[cfg(feature = "http2")]
        let builder = builder.http2_max_header_list_size(MAX_HEAD);
        Ok(Self { client: builder.build()? })
    }
}

impl Transport for ReqwestTransport {
    type Body = reqwest::Body;

    async fn send(&self, request: Request<Bytes>) -> Result<Response<reqwest::Body>, AttemptFailure> {
        let request = reqwest::Request::try_from(request).map_err(|error| failure(error, false))?;
        let response = self.client.execute(request).await.map_err(|error| failure(error, false))?;
        Ok(response.into())
    }
}

/// Classifies an error of reqwest. It does not tell at which of several addresses it happened: if the client follows
/// redirects, the first address may have done the operation.
fn failure(error: reqwest::Error, redirects: bool) -> AttemptFailure {
    let kind = if redirects {
        AttemptFailureKind::Doubtful
    } else if error.is_builder() {
        AttemptFailureKind::Unsendable
    } else if error.is_connect() {
        AttemptFailureKind::NotSent
    } else if was_refused(&error) {
        AttemptFailureKind::NotProcessed
    } else {
        AttemptFailureKind::Doubtful
    };
    // A URL may contain credentials.
    AttemptFailure::new(kind, error.without_url())
}

fn was_refused(error: &(dyn Error + 'static)) -> bool {
    #[cfg(feature = "http2")]
    return crate::was_refused_by_http2(error);
    #[cfg(not(feature = "http2"))]
    {
        let _ = error;
        false
    }
}

/// Sends requests until there is a definite response.
///
/// It takes the key of a request from its header, or from an [`IdempotencyKey`] among the extensions
/// (`RequestBuilder::with_extension`). A request without a key is sent once, and its response is passed on as it streams,
/// unless [`with_keyless_retries`](Self::with_keyless_retries) is set.
///
/// A definite response has a [`Report`](crate::Report) among its extensions. Everything else is an error, in which
/// [`send_error`] finds the [`SendError`] with the last response, such as a 503.
///
/// Turn redirects off in the client (`redirect::Policy::none()`) and set [`with_redirects_off`](Self::with_redirects_off).
/// If a client follows redirects, the second address may refuse the connection after the first one did the operation.
///
/// Set `http1_max_headers(1000)` and `http2_max_header_list_size` in the client, too. Without them reqwest reads 100 header
/// lines of a response, or 16 KiB over HTTP/2. A larger head ends the attempt without a response ("message head is too large").
/// The request is then sent again under its key until no attempts are left, and its outcome stays in doubt.
pub struct IntentMiddleware {
    core: MiddlewareCore,
    redirects: bool,
}

impl Default for IntentMiddleware {
    fn default() -> Self {
        Self::new()
    }
}

impl IntentMiddleware {
    /// The default policy, for an API that honours `Idempotency-Key`, on a client that may follow redirects.
    #[must_use]
    pub fn new() -> Self {
        Self { core: MiddlewareCore::new(), redirects: true }
    }

    settings!();

    /// Declares that the client follows no redirects, so that a failed connection proves that nothing was sent.
    #[must_use]
    pub fn with_redirects_off(self) -> Self {
        Self { redirects: false, ..self }
    }
}

impl fmt::Debug for IntentMiddleware {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IntentMiddleware").field("policy", &self.core.runner.policy).finish_non_exhaustive()
    }
}

/// The [`SendError`] in an error of the middleware.
#[must_use]
pub fn send_error(error: &reqwest_middleware::Error) -> Option<&SendError> {
    match error {
        reqwest_middleware::Error::Middleware(error) => error.downcast_ref(),
        reqwest_middleware::Error::Reqwest(_) => None,
    }
}

#[async_trait]
impl Middleware for IntentMiddleware {
    async fn handle(
        &self,
        mut request: reqwest::Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> reqwest_middleware::Result<reqwest::Response> {
        let key = extensions.get::<IdempotencyKey>().cloned();
        let method = request.method().clone();
        let way = self.core.plan(&method, request.headers_mut(), key.as_ref()).map_err(|error| {
            let error: BoxError = error.into();
            let send_error = SendError::new(SendErrorKind::Unsendable, 0, false).with_source(Some(error));
            reqwest_middleware::Error::middleware(send_error)
        })?;
        let ask = match way {
            RequestPlan::UntilDefinite(ask) => ask,
            RequestPlan::PassThrough => return next.run(request, extensions).await,
        };
        let url = request.url().clone();
        let redirects = self.redirects;
        let mut tries = MiddlewareSender {
            resendable: true,
            request: Some(request),
            url: url.clone(),
            extensions,
            next,
            redirects,
        };
        let sent = self.core.runner.run(&ask, &mut tries).await;
        let (response, report) = sent.map_err(reqwest_middleware::Error::middleware)?;
        let url = tries.url;
        let mut response = response.map(reqwest::Body::wrap);
        response.extensions_mut().insert(report);
        // The address is in an extension that only a builder can create.
        if let Ok(addressed) = Response::builder().url(url).body(()) {
            response.extensions_mut().extend(addressed.into_parts().0.extensions);
        }
        Ok(response.into())
    }
}

struct MiddlewareSender<'a, 'n> {
    request: Option<reqwest::Request>,
    resendable: bool,
    /// The address of the request, then that of the last response.
    url: Url,
    extensions: &'a mut Extensions,
    next: Next<'n>,
    redirects: bool,
}

impl AttemptSender for MiddlewareSender<'_, '_> {
    type Body = reqwest::Body;

    async fn send(&mut self) -> Result<Response<reqwest::Body>, AttemptFailure> {
        let request = match self.request.as_ref().and_then(reqwest::Request::try_clone) {
            Some(clone) => clone,
            None => {
                self.resendable = false;
                let body_is_gone =
                    || AttemptFailure::new(AttemptFailureKind::Unsendable, "the body was sent before");
                self.request.take().ok_or_else(body_is_gone)?
            }
        };
        let asked = request.url().clone();
        let response = match self.next.clone().run(request, self.extensions).await {
            Ok(response) => response,
            Err(reqwest_middleware::Error::Reqwest(error)) => return Err(failure(error, self.redirects)),
            Err(reqwest_middleware::Error::Middleware(error)) => {
                return Err(AttemptFailure::new(AttemptFailureKind::Doubtful, error));
            }
        };
        let is_elsewhere = {
            let (mut asked, mut answered) = (asked, response.url().clone());
            asked.set_fragment(None);
            answered.set_fragment(None);
            asked != answered
        };
        self.url = response.url().clone();
        let mut response = Response::from(response);
        if is_elsewhere {
            response.extensions_mut().insert(Redirected);
        }
        Ok(response)
    }

    fn can_send_again(&self) -> bool {
        self.resendable
    }
}
