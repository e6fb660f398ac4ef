//! Notifications to systemd, and `oncegate health`, from outside.

use std::fs;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::time::Duration;

use rustix::process::Signal;
use tokio::process::Command;

use crate::OK;
use crate::support::{Service, Sidecar, sidecar};

/// The socket of a manager.
struct Manager(UnixDatagram);

impl Manager {
    fn new(path: &Path) -> Self {
        let socket = UnixDatagram::bind(path).unwrap();
        socket.set_read_timeout(Some(crate::support::TIMEOUT)).unwrap();
        Self(socket)
    }

    fn next(&self) -> String {
        let mut bytes = [0; 1000];
        let count = loop {
            match self.0.recv(&mut bytes) {
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                received => break received.expect("a notification"),
            }
        };
        String::from_utf8(bytes[..count].to_vec()).unwrap()
    }

    /// The next notification that is no sign of life.
    fn state(&self) -> String {
        loop {
            let next = self.next();
            if next != "WATCHDOG=1" {
                return next;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_manager_learns_of_start_reload_life_and_stop() {
    let directory = tempfile::tempdir().unwrap();
    let manager = Manager::new(&directory.path().join("notify"));
    let service = Service::new().await.answers(OK);
    let config = directory.path().join("oncegate.toml");
    let write = |rest: &str| {
        fs::write(&config, format!("to = \"http://{}\"\nstore = \"memory:\"\n{rest}", service.address))
            .unwrap();
    };
    write("");
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    command.args(["proxy", "--listen=127.0.0.1:0", "--admin=127.0.0.1:0", "--config"]).arg(&config);
    command.env("NOTIFY_SOCKET", directory.path().join("notify")).env("WATCHDOG_USEC", "2000000");
    let mut sidecar = Sidecar::run(&mut command).await;
    assert!(manager.next().starts_with("READY=1\nSTATUS=oncegate listening on http://127.0.0.1:"));
    for _ in 0..3 {
        assert_eq!(manager.next(), "WATCHDOG=1");
    }
    for (settings, status) in [
        ("retention = \"2h\"\n", "Serving with the configuration that was read again"),
        ("nonsense = 1\n", "Serving with the previous configuration"),
    ] {
        write(settings);
        sidecar.process.signal(Signal::HUP);
        assert!(manager.state().starts_with("RELOADING=1\nMONOTONIC_USEC="));
        assert!(manager.state().starts_with(&format!("READY=1\nSTATUS={status}")));
    }
    // A process that is paused gives no sign.
    sidecar.process.freeze();
    manager.0.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    while manager.0.recv(&mut [0; 100]).is_ok() {}
    manager.0.set_read_timeout(Some(Duration::from_secs(3))).unwrap();
    assert!(manager.0.recv(&mut [0; 100]).is_err(), "a sign of life of a paused process");
    manager.0.set_read_timeout(Some(crate::support::TIMEOUT)).unwrap();
    sidecar.process.signal(Signal::CONT);
    assert_eq!(manager.next(), "WATCHDOG=1");
    sidecar.process.signal(Signal::TERM);
    assert!(manager.state().starts_with("STOPPING=1\n"));
    assert!(sidecar.process.ended().await.success());
}

#[tokio::test]
async fn a_manager_that_is_gone_stops_nothing() {
    let service = Service::new().await.answers(OK);
    let mut command = sidecar(&format!("http://{}", service.address));
    command.arg("--store=memory:").env("NOTIFY_SOCKET", "/nonexistent/notify").env("WATCHDOG_USEC", "1000");
    let mut one = Sidecar::run(&mut command).await;
    one.process.signal(Signal::TERM);
    assert!(one.process.ended().await.success());
}

#[tokio::test]
async fn health_is_an_exit_code() {
    let service = Service::new().await.answers(OK);
    let mut sidecar = Sidecar::start(service.address, &["--shutdown-delay=10m"]).await;
    let admin = sidecar.admin.to_string();
    let health_of = async |admin: &str, flags: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
        let output = command.arg("health").args(["--admin", admin]).args(flags).output().await.unwrap();
        let text = String::from_utf8([&output.stdout[..], &output.stderr].concat()).unwrap();
        (output.status.code().unwrap(), text)
    };
    let health = async |flags: &[&str]| health_of(&admin, flags).await;
    assert_eq!(health(&[]).await, (0, "ok\n".to_owned()));
    let (code, text) = health(&["--ready"]).await;
    assert!(code == 0 && text.starts_with("ready\n"), "{text}");
    sidecar.process.signal(Signal::TERM);
    sidecar.process.logs("stopping soon").await;
    let (code, text) = health(&["--ready"]).await;
    assert!(code == 1 && text.contains("stopping"), "{code} {text}");
    assert_eq!(health(&[]).await.0, 0, "it lives while it drains");
    // Another server at the address is not a healthy sidecar.
    let (code, _) = health_of(&service.address.to_string(), &[]).await;
    assert_eq!(code, 1);
    sidecar.process.kill().await;
    let (code, text) = health(&["--json"]).await;
    assert_eq!(code, 1, "{text}");
    assert_eq!(health(&["--timeout=0"]).await.0, 2);
}
