//! The overhead of a journal for a call that succeeds at once, compared with the same call without one, and with nothing but
//! the two syncs that no journal on a disk can do without.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use http_body_util::Full;
use hyper_util::client::legacy::Client as HyperClient;
use hyper_util::rt::TokioExecutor;
use oncegate_client::tower::TowerTransport;
use oncegate_client::{Client, Intent, JournalDir, Transport};
use tokio::net::TcpListener;

use crate::records::Result;
use crate::service::service;
use crate::shared::{ROUNDS, Rounds};

const BODY: &str = r#"{"order":"order-123","amount":5}"#;
const CALLS: u64 = 1000;

/// One call after the other, with a journal in this directory.
pub(crate) async fn measure(directory: &Path) -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}/pay", listener.local_addr()?);
    tokio::spawn(async move { axum::serve(listener, service()).await });
    let hyper = HyperClient::builder(TokioExecutor::new()).build_http();
    let client = Client::new(TowerTransport::<_, Full<Bytes>>::new(hyper));
    let journal = JournalDir::open(directory.join("journal"))?;
    let with_journal = client.clone().with_journal(Arc::new(journal));
    let bare = directory.join("bare");
    fs::create_dir_all(&bare)?;
    let mut rounds = Rounds::default();
    for round in 0..=ROUNDS {
        let start = Instant::now();
        calls(&with_journal, &url, None).await?;
        let ours = start.elapsed().as_secs_f64();
        let start = Instant::now();
        calls(&client, &url, Some(&bare)).await?;
        let synced = start.elapsed().as_secs_f64();
        let start = Instant::now();
        calls(&client, &url, None).await?;
        let none = start.elapsed().as_secs_f64();
        if round > 0 {
            rounds.note("against two syncs by hand", [ours, synced]);
            rounds.note("against no journal", [ours, none]);
        }
    }
    rounds.print("client with a journal, one call after the other", "without", CALLS);
    Ok(())
}

async fn calls<T: Transport>(client: &Client<T>, url: &str, bare: Option<&Path>) -> Result<()> {
    for number in 0..CALLS {
        let intent = Intent::post(url)?.with_json(BODY);
        let file = bare.map(|bare| bare.join(number.to_string()));
        if let (Some(bare), Some(file)) = (bare, &file) {
            let (bare, file) = (bare.to_owned(), file.clone());
            tokio::task::spawn_blocking(move || {
                let mut written = File::create(&file)?;
                written.write_all(&[b'x'; 400])?;
                written.sync_all()?;
                File::open(bare)?.sync_all()
            })
            .await??;
        }
        client.send(&intent).await?;
        if let Some(file) = file {
            tokio::task::spawn_blocking(move || fs::remove_file(file)).await??;
        }
    }
    Ok(())
}
