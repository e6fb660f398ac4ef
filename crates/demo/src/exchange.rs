//! One request over a connection of its own.

use std::net::SocketAddr;
use std::pin::pin;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use oncegate_core::ErrorChain;
use tokio::net::TcpStream;

/// There is no answer, or only a part of it.
#[derive(Debug)]
pub(crate) struct Broken(String);

impl std::fmt::Display for Broken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// Sends the request and waits for the whole answer. Dropping the future closes the connection.
pub(crate) async fn exchange(
    address: SocketAddr,
    request: Request<Full<Bytes>>,
) -> Result<Response<Bytes>, Broken> {
    let stream = TcpStream::connect(address).await.map_err(broken)?;
    let _best_effort = stream.set_nodelay(true);
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(broken)?;
    let mut answer = pin!(async {
        let (parts, body) = sender.send_request(request).await?.into_parts();
        Ok(Response::from_parts(parts, body.collect().await?.to_bytes()))
    });
    tokio::select! {
        biased;
        answer = &mut answer => return answer.map_err(|error: hyper::Error| broken(error)),
        // Bytes that have arrived can still be read.
        _ = connection => {}
    }
    answer.await.map_err(broken)
}

fn broken(error: impl std::error::Error) -> Broken {
    Broken(ErrorChain(&error).to_string())
}
