//! A line to a broker that can be cut.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

/// Connections through it end when it is cut; new ones are taken at once.
pub(crate) struct Line {
    port: u16,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    cut: Mutex<CancellationToken>,
    connections: AtomicUsize,
}

impl Line {
    pub(crate) async fn to(broker: u16) -> io::Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let port = listener.local_addr()?.port();
        let shared = Arc::new(Shared::default());
        let all = shared.clone();
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let cut = all.cut.lock().unwrap().clone();
                all.connections.fetch_add(1, Ordering::Relaxed);
                tokio::spawn(async move {
                    let Ok(mut server) = TcpStream::connect(("127.0.0.1", broker)).await else { return };
                    tokio::select! {
                        _ = tokio::io::copy_bidirectional(&mut client, &mut server) => {}
                        () = cut.cancelled() => {}
                    }
                });
            }
        });
        Ok(Self { port, shared })
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// The number of connections so far.
    pub(crate) fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::Relaxed)
    }

    pub(crate) fn cut(&self) {
        std::mem::take(&mut *self.shared.cut.lock().unwrap()).cancel();
    }
}
