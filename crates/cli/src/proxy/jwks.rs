//! Fetches the key set (JWKS) that verifies tokens, from a file or from its issuer.

use std::future::Future;
use std::path::PathBuf;
use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, StatusCode, Uri, header};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use oncegate_http::{BoxError, JwksSource};

use super::headers::rewrite;
use super::tls::connector;
use super::{MAX_HEAD, MAX_LINES};
use crate::config::{KeySetPlace, UpstreamProtocol};

/// The largest key set, in bytes.
const MAX_KEY_SET: usize = 256 * 1024;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// The place of a key set, from which it can be fetched.
pub(crate) struct KeySetSource(KeySetPlace);

impl KeySetSource {
    pub(crate) fn new(place: &KeySetPlace) -> Self {
        Self(place.clone())
    }
}

impl JwksSource for KeySetSource {
    fn fetch(&self) -> Pin<Box<dyn Future<Output = Result<Vec<u8>, BoxError>> + Send + '_>> {
        Box::pin(async {
            let result = match &self.0 {
                KeySetPlace::File(path) => read_file(path.clone()).await,
                KeySetPlace::Url { .. } => self.fetch_url().await,
            };
            result.map_err(|error| format!("{}: {}", self.0, oncegate_core::ErrorChain(&*error)).into())
        })
    }

    fn is_private(&self) -> bool {
        matches!(self.0, KeySetPlace::File(_))
    }
}

async fn read_file(path: PathBuf) -> Result<Vec<u8>, BoxError> {
    if tokio::fs::metadata(&path).await?.len() > MAX_KEY_SET as u64 {
        return Err("it is larger than 256KiB".into());
    }
    Ok(tokio::fs::read(path).await?)
}

impl KeySetSource {
    /// Redirects are not followed: they could lead to a server without TLS.
    async fn fetch_url(&self) -> Result<Vec<u8>, BoxError> {
        let KeySetPlace::Url { server, path } = &self.0 else { return Err("it is not a URL".into()) };
        // A new connection each time: key sets are rarely fetched, and a kept connection may be broken.
        let client = Client::builder(TokioExecutor::new())
            .timer(TokioTimer::new())
            .pool_max_idle_per_host(0)
            .http1_max_buf_size(MAX_HEAD)
            .http1_max_headers(MAX_LINES)
            .build(connector(server, UpstreamProtocol::Http1, CONNECT_TIMEOUT)?);
        let request = Request::get(rewrite(server, &Uri::from(path.clone()), None))
            .header(header::ACCEPT, "application/jwk-set+json, application/json")
            .header(header::USER_AGENT, concat!("oncegate/", env!("CARGO_PKG_VERSION")))
            .body(Empty::<Bytes>::new())?;
        let response = client.request(request).await?;
        if response.status() != StatusCode::OK {
            return Err(format!("the status is {}", response.status()).into());
        }
        let body = Limited::new(response.into_body(), MAX_KEY_SET).collect().await?;
        Ok(body.to_bytes().to_vec())
    }
}
