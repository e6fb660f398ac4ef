//! Ports for servers of other programs.

use std::fs::File;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Mutex, PoisonError};

use tokio::net::TcpSocket;

/// The first port of the range. The range is below the ports that a system gives to outgoing connections and to programs
/// that ask for any port. Those could otherwise take a port before the server listens on it, or while it restarts.
const FIRST: u16 = 20_000;
const BLOCKS: u16 = 40;
const PORTS_OF_A_BLOCK: u16 = 300;

/// Ports that only this process uses, because it has the lock of the file.
struct Block {
    _locked: File,
    first: u16,
    given: u16,
}

static BLOCK: Mutex<Option<Block>> = Mutex::new(None);

/// Finds a port of 127.0.0.1 on which no program listens, outside of the range that a system assigns by itself.
///
/// No other process that calls this function gets the port while this process runs, and this process gets it again only after
/// 299 others. So a server may stop, and start again on its port.
///
/// # Errors
/// If no free port was found, or 40 processes with ports of their own run.
pub fn free_port() -> io::Result<u16> {
    let mut block = BLOCK.lock().unwrap_or_else(PoisonError::into_inner);
    let block = match &mut *block {
        Some(block) => block,
        none => none.insert(Block::take()?),
    };
    for _ in 0..PORTS_OF_A_BLOCK {
        let port = block.first + block.given % PORTS_OF_A_BLOCK;
        block.given = (block.given + 1) % PORTS_OF_A_BLOCK;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return Ok(port);
        }
    }
    let (first, last) = (block.first, block.first + PORTS_OF_A_BLOCK - 1);
    Err(io::Error::new(io::ErrorKind::AddrInUse, format!("there is no free port from {first} to {last}")))
}

impl Block {
    fn take() -> io::Result<Self> {
        let directory = std::env::temp_dir().join("oncegate-ports");
        std::fs::create_dir_all(&directory)?;
        for number in 0..BLOCKS {
            let file = File::options().create(true).append(true).open(directory.join(number.to_string()))?;
            if file.try_lock().is_ok() {
                return Ok(Self { _locked: file, first: FIRST + number * PORTS_OF_A_BLOCK, given: 0 });
            }
        }
        let text = format!("{BLOCKS} processes have the locks of {}", directory.display());
        Err(io::Error::new(io::ErrorKind::AddrInUse, text))
    }
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
