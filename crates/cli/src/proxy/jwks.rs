//! Fetches the key set (JWKS) that verifies tokens, from a file or from its issuer.

use std::fs::{self, File};
use std::future::Future;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, StatusCode, Uri, header};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use oncegate_http::{BoxError, JwksSource};
use tokio::sync::oneshot;

use super::headers::rewrite;
use super::interim;
use super::tls::connector;
use super::{MAX_HEAD, MAX_LINES};
use crate::config::{KeySetPlace, UpstreamProtocol};

/// The largest key set, in bytes.
const MAX_KEY_SET: usize = 256 * 1024;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// The place of a key set, from which it can be fetched.
pub(crate) struct KeySetSource {
    place: KeySetPlace,
    /// True while a thread reads the file.
    is_reading: Arc<AtomicBool>,
}

impl KeySetSource {
    pub(crate) fn new(place: &KeySetPlace) -> Self {
        Self { place: place.clone(), is_reading: Arc::default() }
    }
}

impl JwksSource for KeySetSource {
    fn fetch(&self) -> Pin<Box<dyn Future<Output = Result<Vec<u8>, BoxError>> + Send + '_>> {
        Box::pin(async {
            let result = match &self.place {
                KeySetPlace::File(path) => self.read_file(path.clone()).await,
                KeySetPlace::Url { .. } => self.fetch_url().await,
            };
            result.map_err(|error| format!("{}: {}", self.place, oncegate_core::ErrorChain(&*error)).into())
        })
    }

    fn is_private(&self) -> bool {
        matches!(self.place, KeySetPlace::File(_))
    }
}

/// Reads a key set in a file.
///
/// # Errors
/// If it cannot be read, is no regular file (a pipe could block for ever), or is too large.
pub(crate) fn read_key_set(path: &Path) -> io::Result<Vec<u8>> {
    let other = |what: &str| Err(io::Error::other(what));
    if !fs::metadata(path)?.is_file() {
        return other("it is not a regular file");
    }
    let mut key_set = Vec::new();
    File::open(path)?.take(MAX_KEY_SET as u64 + 1).read_to_end(&mut key_set)?;
    if key_set.len() > MAX_KEY_SET { other("it is larger than 256 KiB") } else { Ok(key_set) }
}

impl KeySetSource {
    /// Reads in a thread that nothing waits for: a file system that does not answer must neither use up the threads of the
    /// runtime nor keep the process from ending. There is one such thread at a time.
    async fn read_file(&self, path: PathBuf) -> Result<Vec<u8>, BoxError> {
        if self.is_reading.swap(true, Ordering::AcqRel) {
            return Err("the file system has not answered since the last time".into());
        }
        let (send, receive) = oneshot::channel();
        let is_reading = self.is_reading.clone();
        let read = move || {
            let key_set = read_key_set(&path);
            is_reading.store(false, Ordering::Release);
            let _gone = send.send(key_set);
        };
        if let Err(error) = thread::Builder::new().name("oncegate-jwks".to_owned()).spawn(read) {
            self.is_reading.store(false, Ordering::Release);
            return Err(error.into());
        }
        Ok(receive.await??)
    }

    /// Redirects are not followed: they could lead to a server without TLS.
    async fn fetch_url(&self) -> Result<Vec<u8>, BoxError> {
        let KeySetPlace::Url { server, path } = &self.place else { return Err("it is not a URL".into()) };
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
        let response = interim::send(&client, request).await?;
        if response.status() != StatusCode::OK {
            return Err(format!("the status is {}", response.status()).into());
        }
        let body = Limited::new(response.into_body(), MAX_KEY_SET).collect().await?;
        Ok(body.to_bytes().to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_regular_file_of_a_usual_size_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("keys.json");
        for (bytes, is_read) in [(0, true), (MAX_KEY_SET, true), (MAX_KEY_SET + 1, false)] {
            fs::write(&file, vec![b' '; bytes]).unwrap();
            assert_eq!(read_key_set(&file).map(|read| read.len()).ok(), is_read.then_some(bytes));
        }
        for other in [directory.path(), Path::new("/dev/zero")] {
            assert!(read_key_set(other).unwrap_err().to_string().contains("not a regular file"), "{other:?}");
        }
    }

    #[tokio::test]
    async fn a_file_that_is_still_being_read_is_not_read_again() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let source = KeySetSource::new(&KeySetPlace::File(file.path().to_owned()));
        assert!(source.fetch().await.is_ok());
        source.is_reading.store(true, Ordering::Release);
        let refused = source.fetch().await.unwrap_err().to_string();
        assert!(refused.contains("has not answered"), "{refused}");
        source.is_reading.store(false, Ordering::Release);
        assert!(source.fetch().await.is_ok());
    }
}
