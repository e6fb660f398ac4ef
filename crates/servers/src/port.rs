//! Ports for servers of other programs.

use std::hash::{BuildHasher as _, RandomState};
use std::io;
use std::net::{SocketAddr, TcpListener};

use tokio::net::TcpSocket;

/// The first port of the range. The range is below the ports that a system gives to outgoing connections and to programs
/// that ask for any port. Those could otherwise take a port before the server listens on it, or while it restarts.
const FIRST: u16 = 20_000;
const COUNT: u64 = 12_000;

/// Finds a port of 127.0.0.1 on which no program listens, outside of the range that a system assigns by itself.
///
/// Another caller of this function may get the same port until a server listens on it. If the server of a caller does not
/// start, the caller must ask again.
///
/// # Errors
/// If no free port was found.
pub fn free_port() -> io::Result<u16> {
    let random = RandomState::new();
    for turn in 0..100 {
        // Less than 12 000.
        let port = FIRST + u16::try_from(random.hash_one(turn) % COUNT).unwrap_or_default();
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return Ok(port);
        }
    }
    Err(io::Error::new(io::ErrorKind::AddrInUse, "there is no free port from 20000 to 31999"))
}

/// A bound port on which no process listens: connections to it are refused. No other process can take it while the socket lives.
///
/// # Errors
/// If the system has no port.
pub fn unused_port() -> io::Result<(TcpSocket, SocketAddr)> {
    let socket = TcpSocket::new_v4()?;
    socket.bind(([127, 0, 0, 1], 0).into())?;
    let address = socket.local_addr()?;
    Ok((socket, address))
}
