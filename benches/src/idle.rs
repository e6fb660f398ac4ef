//! Connections that do nothing, for a server to keep.

use std::io::Read as _;
use std::net::SocketAddr;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::records::Result;

/// At once, so that no listener's queue overflows.
const OPENING: usize = 128;

/// Opens so many connections, sends one request on each, reads its answer, and keeps them until the standard input ends.
/// Says how many there are at the start, and how many the server has not closed by the end.
pub(crate) async fn hold(server: SocketAddr, count: usize) -> Result<()> {
    let mut connections = Vec::with_capacity(count);
    while connections.len() < count {
        let mut opening = JoinSet::new();
        for _ in connections.len()..count.min(connections.len() + OPENING) {
            opening.spawn(open(server));
        }
        for connection in opening.join_all().await {
            connections.push(connection?);
        }
    }
    println!("holding {count} connections");
    tokio::task::spawn_blocking(|| std::io::stdin().read(&mut [0])).await??;
    let open = |connection: &TcpStream| {
        let read = connection.try_read(&mut [0]);
        read.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
    };
    println!("{} still open", connections.iter().filter(|connection| open(connection)).count());
    Ok(())
}

async fn open(server: SocketAddr) -> Result<TcpStream> {
    let mut stream = TcpStream::connect(server).await?;
    let request = format!("POST /pay HTTP/1.1\r\nHost: {server}\r\nContent-Length: 2\r\n\r\n{{}}");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\n{}") {
        if stream.read_buf(&mut answer).await? == 0 {
            return Err(format!("closed after {:?}", String::from_utf8_lossy(&answer)).into());
        }
    }
    Ok(stream)
}
