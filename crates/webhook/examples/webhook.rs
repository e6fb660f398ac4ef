//! A service that receives webhooks, each of which takes effect once: over retries of its senders, crashes and restarts.
//!
//! Its effect is a file in `DATA/effects` that is named by the downstream key, like a payment at a bank that takes keys.
//!
//! Configuration by environment: `PORT` (0 takes a free one), `DATA` (a directory, default `./webhook-data`), and a secret for
//! each configured sender: `STANDARD_SECRET`, `STRIPE_SECRET`, `GITHUB_SECRET`. `HANG=before-effect` and
//! `HANG=after-effect` make handlers stop there forever, so that a test can kill the process at that point.

use std::error::Error;
use std::fs::{File, OpenOptions, create_dir_all};
use std::future::pending;
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use oncegate_core::OnAbandoned;
use oncegate_embedded::{EmbeddedOptions, EmbeddedStore};
use oncegate_engine::{Attempt, ConfigError, Engine};
use oncegate_inbox::{
    DeadLetter, DeadLetterSink, HandlerError, Identity, Inbox, Message, PublishError, PutFuture,
};
use oncegate_webhook::{WebhookOptions, WebhookReceiver, WebhookScheme};
use tokio::signal::unix::{SignalKind, signal};

/// The handler of one webhook.
async fn handle(data: Arc<Data>, attempt: Attempt, message: Arc<Message>) -> Result<(), HandlerError> {
    data.note(&format!("{} attempt {}\n", message.topic, attempt.number()))?;
    if message.payload.is_empty() {
        return Err(HandlerError::reject("the event is empty"));
    }
    data.hang("before-effect").await;
    data.pay(&attempt.downstream_key("bank"), &message.payload)?;
    data.hang("after-effect").await;
    Ok(())
}

struct Data {
    directory: PathBuf,
    hang: Option<String>,
}

impl Data {
    /// The bank: a second payment under the same key is ignored.
    fn pay(&self, key: &str, payload: &[u8]) -> std::io::Result<()> {
        create(&self.directory.join("effects").join(key), payload)
    }

    fn note(&self, line: &str) -> std::io::Result<()> {
        let mut file = OpenOptions::new().create(true).append(true).open(self.directory.join("attempts"))?;
        file.write_all(line.as_bytes())
    }

    async fn hang(&self, place: &str) {
        if self.hang.as_deref() == Some(place) {
            pending::<()>().await;
        }
    }
}

/// Dead letters are files, too, so that the same one is written once.
struct DeadFiles(PathBuf);

impl DeadLetterSink for DeadFiles {
    fn put<'a>(&'a self, letter: &'a DeadLetter) -> PutFuture<'a> {
        Box::pin(async move {
            let text = format!("{} after {} attempts: {}\n", letter.reason, letter.attempts, letter.error);
            create(&self.0.join(&letter.id), text.as_bytes()).map_err(PublishError::unconfirmed)
        })
    }
}

/// Writes a file that is complete and on disk once it has its name. An existing file is left as it is.
fn create(path: &Path, text: &[u8]) -> std::io::Result<()> {
    let new = path.with_extension("new");
    let mut file = File::create(&new)?;
    file.write_all(text)?;
    file.sync_all()?;
    match std::fs::hard_link(&new, path) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
        _ => std::fs::remove_file(&new)?,
    }
    File::open(path.parent().unwrap_or(Path::new(".")))?.sync_all()
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let directory = PathBuf::from(std::env::var_os("DATA").unwrap_or_else(|| "webhook-data".into()));
    let port: u16 = std::env::var("PORT").unwrap_or_else(|_| "3000".into()).parse()?;
    create_dir_all(directory.join("effects"))?;
    create_dir_all(directory.join("dead"))?;
    let data = Arc::new(Data { directory: directory.clone(), hang: std::env::var("HANG").ok() });
    let engine = Engine::new(EmbeddedStore::open(EmbeddedOptions::new(directory.join("records")))?);

    // A name, the variable with the secret, and how the sender signs.
    type Sender = (&'static str, &'static str, fn(&str) -> Result<WebhookScheme, ConfigError>);
    let schemes: [Sender; 3] = [
        ("standard", "STANDARD_SECRET", WebhookScheme::standard),
        ("stripe", "STRIPE_SECRET", WebhookScheme::stripe),
        ("github", "GITHUB_SECRET", WebhookScheme::github),
    ];
    let mut router = Router::new();
    let mut receivers = Vec::new();
    for (topic, variable, scheme) in schemes {
        let Ok(secret) = std::env::var(variable) else { continue };
        // What its sender tells a webhook by is the identity. A handler that died runs again: its effect has a key.
        let inbox = Inbox::new(
            engine.clone(),
            "payments",
            Identity::broker(),
            OnAbandoned::Reexecute,
            DeadFiles(directory.join("dead")),
        )?;
        let data = data.clone();
        let processor = inbox
            .with_lease(Duration::from_secs(2))?
            .processor(move |attempt, message| handle(data.clone(), attempt, message));
        let receiver = WebhookReceiver::new(topic, WebhookOptions::new(scheme(&secret)?), processor)?;
        router = router.route(&format!("/webhooks/{topic}"), receiver.route());
        receivers.push(receiver);
    }

    let mut terminated = signal(SignalKind::terminate())?;
    let stop = async move {
        tokio::select! {
            _ = terminated.recv() => {}
            _ = tokio::signal::ctrl_c() => {}
        }
    };
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port)).await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, router).with_graceful_shutdown(stop).await?;
    // Handlers whose senders have hung up are still running.
    for receiver in receivers {
        receiver.drain(Duration::from_secs(10)).await;
    }
    Ok(())
}
