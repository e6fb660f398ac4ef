//! A TCP proxy that loses a response: it passes the request on, and cuts both connections when the response arrives.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use crate::target::Target;

/// A proxy for one connection.
pub(crate) struct CutProxy {
    pub(crate) address: SocketAddr,
    is_armed: Arc<AtomicBool>,
    task: JoinHandle<Result<(), String>>,
}

impl CutProxy {
    /// Listens on the loopback address. After a cut response has begun, the proxy waits until nothing has arrived for
    /// `quiet`: TLS sends records of its own before the response.
    pub(crate) async fn start(target: &Target, quiet: Duration) -> Result<Self, String> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await;
        let listener = listener.map_err(|error| format!("cannot listen on the loopback address: {error}"))?;
        let address = listener.local_addr().map_err(|error| error.to_string())?;
        let is_armed = Arc::new(AtomicBool::new(false));
        let task = tokio::spawn(serve(listener, target.clone(), Arc::clone(&is_armed), quiet));
        Ok(Self { address, is_armed, task })
    }

    /// From now on, nothing of the server reaches the client. The client calls this before it sends the request.
    pub(crate) fn arm(&self) {
        self.is_armed.store(true, Ordering::Release);
    }

    /// Waits until a response has arrived and was lost.
    pub(crate) async fn cut(mut self, limit: Duration) -> Result<(), String> {
        match tokio::time::timeout(limit, &mut self.task).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err("the proxy failed".to_owned()),
            Err(_) => Err(format!("no response arrived within {} s", limit.as_secs_f32())),
        }
    }
}

impl Drop for CutProxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(
    listener: TcpListener,
    target: Target,
    is_armed: Arc<AtomicBool>,
    quiet: Duration,
) -> Result<(), String> {
    let broken = |error: std::io::Error| format!("the proxy: {error}");
    let (client, _) = listener.accept().await.map_err(broken)?;
    let mut server: TcpStream = target.tcp().await?;
    let _best_effort = server.set_nodelay(true);
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.split();
    let upload = async {
        let mut buffer = vec![0; 16 * 1024];
        while let Ok(count @ 1..) = from_client.read(&mut buffer).await {
            if to_server.write_all(buffer.get(..count).unwrap_or_default()).await.is_err() {
                break;
            }
        }
        // The response decides when this ends, not the client.
        std::future::pending::<()>().await;
    };
    let download = async {
        let mut buffer = vec![0; 16 * 1024];
        loop {
            let count = from_server.read(&mut buffer).await.map_err(broken)?;
            if count == 0 {
                return Err("the API closed the connection without a response".to_owned());
            }
            if is_armed.load(Ordering::Acquire) {
                break;
            }
            to_client.write_all(buffer.get(..count).unwrap_or_default()).await.map_err(broken)?;
        }
        while let Ok(Ok(1..)) = tokio::time::timeout(quiet, from_server.read(&mut buffer)).await {}
        Ok(())
    };
    tokio::select! {
        result = download => result,
        () = upload => Ok(()),
    }
}
