//! Connections that do next to nothing, for a server to keep.

use std::collections::VecDeque;
use std::io::Read as _;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::records::Result;

/// The number of connections that are busy at once, so that the queue of no listener overflows.
const AT_ONCE: usize = 128;

/// The interval between requests of a connection: servers close connections that are idle for longer.
const EVERY: Duration = Duration::from_secs(20);

/// Opens so many connections, each with a request now and then, and keeps them until the standard input ends. Says how many
/// there are at the start, and how many the server has not closed by the end.
pub(crate) async fn hold(server: SocketAddr, count: usize) -> Result<()> {
    let mut connections = VecDeque::with_capacity(count);
    while connections.len() < count {
        let few = AT_ONCE.min(count - connections.len());
        let opening: JoinSet<_> = (0..few)
            .map(|_| async move { request(TcpStream::connect(server).await?, server).await })
            .collect();
        for connection in opening.join_all().await {
            connections.push_back(connection?);
        }
    }
    println!("holding {count} connections");
    let mut end = tokio::task::spawn_blocking(|| std::io::stdin().read(&mut [0]));
    let mut turn = tokio::time::interval(EVERY * AT_ONCE as u32 / count as u32);
    loop {
        tokio::select! {
            _ = &mut end => break,
            _ = turn.tick() => {}
        }
        let few = AT_ONCE.min(connections.len());
        let busy: JoinSet<_> =
            connections.drain(..few).map(|connection| request(connection, server)).collect();
        connections.extend(busy.join_all().await.into_iter().flatten());
    }
    println!("{} still open", connections.len());
    Ok(())
}

async fn request(mut connection: TcpStream, server: SocketAddr) -> Result<TcpStream> {
    let request = format!("POST /pay HTTP/1.1\r\nHost: {server}\r\nContent-Length: 2\r\n\r\n{{}}");
    connection.write_all(request.as_bytes()).await?;
    let mut response = Vec::new();
    while !response.ends_with(b"\r\n\r\n{}") {
        if connection.read_buf(&mut response).await? == 0 {
            return Err(format!("closed after {:?}", String::from_utf8_lossy(&response)).into());
        }
    }
    Ok(connection)
}
