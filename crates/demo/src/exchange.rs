//! One request over a connection of its own.

use std::net::SocketAddr;
use std::pin::pin;
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Response, header};
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use oncegate_core::ErrorChain;
use tokio::net::TcpStream;
use tokio::time::timeout;

const ADMIN_TIMEOUT: Duration = Duration::from_secs(5);

/// Sends the request and waits for the whole response. Dropping the future closes the connection.
pub(crate) async fn exchange(
    address: SocketAddr,
    request: Request<Full<Bytes>>,
) -> Result<Response<Bytes>, String> {
    let stream = TcpStream::connect(address).await.map_err(broken)?;
    let _best_effort = stream.set_nodelay(true);
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(broken)?;
    let mut response = pin!(async {
        let (parts, body) = sender.send_request(request).await?.into_parts();
        Ok(Response::from_parts(parts, body.collect().await?.to_bytes()))
    });
    tokio::select! {
        biased;
        response = &mut response => return response.map_err(|error: hyper::Error| broken(error)),
        // Bytes that have arrived can still be read.
        _ = connection => {}
    }
    response.await.map_err(broken)
}

/// Sends a request to the admin API of a sidecar.
pub(crate) async fn ask_admin(
    admin: SocketAddr,
    method: Method,
    path: &str,
    body: String,
) -> Result<Response<Bytes>, String> {
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(header::HOST, admin.to_string())
        .header(header::CONNECTION, "close")
        .header(header::CONTENT_TYPE, "application/json")
        .body(Full::from(body))
        .map_err(broken)?;
    timeout(ADMIN_TIMEOUT, exchange(admin, request)).await.map_err(|_| "no response in time".to_owned())?
}

fn broken(error: impl std::error::Error) -> String {
    ErrorChain(&error).to_string()
}
