//! Notifications to systemd (`sd_notify(3)`): ready, stopping, reloading, and a sign of life for its watchdog.
//!
//! A notification is a datagram to the socket that `NOTIFY_SOCKET` names. Without this variable nothing is sent, and no failure
//! ever stops the sidecar: a manager that does not get a notification has its own timeouts.

use std::ffi::OsString;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use oncegate_core::ErrorChain;
use rustix::time::{ClockId, clock_gettime};

/// Sends notifications to the service manager that started this process. All clones use one socket.
#[derive(Clone, Debug, Default)]
pub(crate) struct ServiceManager(Option<Arc<Connection>>);

#[derive(Debug)]
struct Connection {
    socket: UnixDatagram,
    address: SocketAddr,
    /// The time within which the manager expects a sign of life.
    watchdog: Option<Duration>,
}

impl ServiceManager {
    /// The manager that the environment names, if it does.
    pub(crate) fn from_env() -> Self {
        let var = |name: &str| std::env::var_os(name);
        match Self::new(var, std::process::id()) {
            Ok(manager) => manager,
            Err(why) => {
                tracing::warn!("NOTIFY_SOCKET: {why}; systemd gets no notifications");
                Self::default()
            }
        }
    }

    fn new(var: impl Fn(&str) -> Option<OsString>, pid: u32) -> Result<Self, String> {
        let Some(name) = var("NOTIFY_SOCKET").filter(|name| !name.is_empty()) else {
            return Ok(Self::default());
        };
        let address = match name.as_bytes() {
            [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
            [b'/', ..] => SocketAddr::from_pathname(&name),
            _ => return Err(format!("{name:?} is neither a path nor an abstract socket")),
        };
        let address = address.map_err(|error| error.to_string())?;
        let socket = UnixDatagram::unbound().map_err(|error| error.to_string())?;
        // The manager reads at once. If it does not, a full queue must not stop the sidecar.
        socket.set_nonblocking(true).map_err(|error| error.to_string())?;
        let number = |name: &str| var(name)?.to_str()?.parse::<u64>().ok();
        let is_own = number("WATCHDOG_PID").is_none_or(|own| own == u64::from(pid));
        let watchdog =
            number("WATCHDOG_USEC").filter(|micros| is_own && *micros > 0).map(Duration::from_micros);
        Ok(Self(Some(Arc::new(Connection { socket, address, watchdog }))))
    }

    /// Reports that requests are accepted.
    pub(crate) fn ready(&self, status: &str) {
        self.send(&format!("READY=1\nSTATUS={status}"));
    }

    /// Reports that the configuration is read again. The end has to be reported by [`ready`](Self::ready).
    pub(crate) fn reloading(&self) {
        let now = clock_gettime(ClockId::Monotonic);
        let micros = i128::from(now.tv_sec) * 1_000_000 + i128::from(now.tv_nsec) / 1000;
        self.send(&format!("RELOADING=1\nMONOTONIC_USEC={micros}\nSTATUS=Reading the configuration again"));
    }

    /// Reports that the sidecar stops.
    pub(crate) fn stopping(&self, status: &str) {
        self.send(&format!("STOPPING=1\nSTATUS={status}"));
    }

    fn send(&self, message: &str) {
        if let Some(connection) = &self.0
            && let Err(error) = connection.socket.send_to_addr(message.as_bytes(), &connection.address)
        {
            tracing::debug!(error = %ErrorChain(&error), "systemd could not be notified");
        }
    }

    /// Sends signs of life as long as all threads have some, until it is dropped. Returns at once if none are expected.
    pub(crate) async fn watch(self, threads: ThreadHealth) {
        let Some(expected) = self.0.as_ref().and_then(|connection| connection.watchdog) else { return };
        // As sd_watchdog_enabled(3) recommends: at half of the time.
        let interval = (expected / 2).max(Duration::from_millis(1));
        let mut tick = tokio::time::interval(interval);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut is_silent = false;
        loop {
            tick.tick().await;
            match threads.oldest_sign() {
                Some((number, age)) if age > expected => {
                    if !std::mem::replace(&mut is_silent, true) {
                        tracing::error!(
                            thread = number,
                            "a serving thread does not respond; systemd gets no sign of life and will restart the sidecar"
                        );
                    }
                }
                _ => {
                    is_silent = false;
                    self.send("WATCHDOG=1");
                }
            }
        }
    }

    /// The signs of life of the threads, if the manager expects any.
    pub(crate) fn thread_health(&self) -> Option<ThreadHealth> {
        self.0.as_ref()?.watchdog.map(ThreadHealth::new)
    }
}

/// The signs of life of the serving threads. All clones share them.
#[derive(Clone, Debug)]
pub(crate) struct ThreadHealth {
    start: Instant,
    /// The interval of the signs of a thread.
    interval: Duration,
    /// The milliseconds after `start` of the last sign of each thread.
    signs: Arc<Mutex<Vec<Arc<AtomicU64>>>>,
}

impl ThreadHealth {
    fn new(expected: Duration) -> Self {
        let interval = (expected / 8).max(Duration::from_millis(1));
        Self { start: Instant::now(), interval, signs: Arc::default() }
    }

    /// Gives signs of life for one thread. To be spawned on its runtime, and to be aborted before it stops.
    pub(crate) async fn beat(self) {
        let sign = Arc::new(AtomicU64::new(self.now()));
        self.signs.lock().unwrap_or_else(PoisonError::into_inner).push(sign.clone());
        loop {
            tokio::time::sleep(self.interval).await;
            sign.store(self.now(), Ordering::Relaxed);
        }
    }

    /// The thread whose last sign is the oldest, and the age of this sign.
    fn oldest_sign(&self) -> Option<(usize, Duration)> {
        let now = self.now();
        let signs = self.signs.lock().unwrap_or_else(PoisonError::into_inner);
        // A thread that has ended gives none, and the sidecar ends with it.
        let ages = signs.iter().enumerate().filter(|(_, sign)| Arc::strong_count(sign) > 1);
        let ages = ages.map(|(number, sign)| (number, now.saturating_sub(sign.load(Ordering::Relaxed))));
        ages.max_by_key(|(_, age)| *age).map(|(number, age)| (number, Duration::from_millis(age)))
    }

    fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manager(vars: &[(&str, &str)]) -> Result<ServiceManager, String> {
        let var = |name: &str| vars.iter().find(|(own, _)| *own == name).map(|(_, value)| (*value).into());
        ServiceManager::new(var, 7)
    }

    #[test]
    fn only_a_socket_that_is_named_gets_notifications() {
        assert!(manager(&[]).unwrap().0.is_none());
        assert!(manager(&[("NOTIFY_SOCKET", "")]).unwrap().0.is_none());
        assert!(manager(&[("NOTIFY_SOCKET", "vsock:2:1")]).is_err());
        // A manager that is gone is no error.
        let gone = manager(&[("NOTIFY_SOCKET", "@oncegate-no-such-socket")]).unwrap();
        gone.ready("serving");
        let watchdog = |pid, micros| {
            manager(&[("NOTIFY_SOCKET", "@x"), ("WATCHDOG_PID", pid), ("WATCHDOG_USEC", micros)]).unwrap()
        };
        assert!(watchdog("7", "1000").thread_health().is_some());
        // The variables of a parent are not for this process.
        assert!(
            watchdog("8", "1000").thread_health().is_none() && watchdog("7", "0").thread_health().is_none()
        );
    }

    #[test]
    fn notifications_have_the_form_of_the_protocol() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        let manager = manager(&[("NOTIFY_SOCKET", path.to_str().unwrap())]).unwrap();
        let received = || {
            let mut bytes = [0; 200];
            let count = socket.recv(&mut bytes).unwrap();
            String::from_utf8(bytes[..count].to_vec()).unwrap()
        };
        manager.ready("serving");
        assert_eq!(received(), "READY=1\nSTATUS=serving");
        manager.reloading();
        let text = received();
        let micros = text.strip_prefix("RELOADING=1\nMONOTONIC_USEC=").unwrap().split('\n').next().unwrap();
        assert!(micros.parse::<u64>().unwrap() > 0);
        manager.stopping("stopping");
        assert_eq!(received(), "STOPPING=1\nSTATUS=stopping");
    }

    #[tokio::test]
    async fn a_thread_without_signs_of_life_is_noticed() {
        let health = ThreadHealth::new(Duration::from_millis(80));
        assert_eq!(health.oldest_sign(), None);
        let beating = tokio::spawn(health.clone().beat());
        oncegate_testkit::until("there is a sign", async || health.oldest_sign().is_some()).await;
        // This clock is the real one: a sign that is held back becomes old.
        let signs = health.signs.lock().unwrap().clone();
        let late = ThreadHealth { start: Instant::now() - Duration::from_secs(60), ..health.clone() };
        assert!(late.oldest_sign().unwrap().1 >= Duration::from_secs(59));
        beating.abort();
        let _aborted = beating.await;
        drop(signs);
        assert_eq!(health.oldest_sign(), None, "a thread that ended is not missed");
    }
}
