//! Ports for servers of other programs.

use std::hash::{BuildHasher as _, RandomState};
use std::io;
use std::net::TcpListener;

/// Where to look: below the ports that a system gives to outgoing connections and to those who ask for any port, which
/// otherwise take one in the moment before a server listens there, or while it is restarted.
const FIRST: u16 = 20_000;
const COUNT: u64 = 12_000;

/// A port of 127.0.0.1 where nobody listens, and which nobody gets who does not ask for it by number. Somebody who asks
/// here may get the same one until it is listened on: whose server does not start asks again.
///
/// # Errors
/// Where there is none.
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
