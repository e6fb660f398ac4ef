//! The behaviour of peers towards retries, which matters more than their speed.
//!
//! The service counts executions and tells the count at `/executions`. `/work` takes a tenth of a second and answers 201 with
//! the number of its execution; `/fail` answers 500 to the first request under a key, and 201 to the next.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::super::client::{Response, request, send};
use crate::run::Result;

/// The address for requests, and the address at which the service reports its number of calls.
pub(super) struct Target<'a> {
    pub(super) address: &'a str,
    pub(super) service: &'a str,
    pub(super) cookie: &'a str,
}

const BODY: &str = r#"{"amount":4999}"#;
const OTHER: &str = r#"{"amount":1}"#;
const AT_ONCE: usize = 100;

/// Five columns of a table: how often it was executed, and what was answered.
pub(super) fn behaviour(target: &Target<'_>) -> Result<String> {
    let (executed, responses) = target.count(|| {
        std::thread::scope(|scope| {
            let all: Vec<_> =
                (0..AT_ONCE).map(|_| scope.spawn(|| target.post("/work", "at-once", BODY))).collect();
            all.into_iter()
                .map(|one| one.join().unwrap_or_else(|_| Err("panicked".into())))
                .collect::<Result<Vec<_>>>()
        })
    })?;
    let mut statuses = BTreeMap::<u16, usize>::new();
    responses.iter().for_each(|response| *statuses.entry(response.status).or_default() += 1);
    let statuses: Vec<String> =
        statuses.iter().map(|(status, count)| format!("{count} × {status}")).collect();
    let mut columns = vec![format!("{executed} executed: {}", statuses.join(", "))];

    let first = target.post("/work", "one", BODY)?;
    let (executed, again) = target.count(|| target.post("/work", "one", BODY))?;
    columns.push(told(executed, &again, &first));
    let (executed, other) = target.count(|| target.post("/work", "one", OTHER))?;
    columns.push(told(executed, &other, &first));

    let failed = target.post("/fail", "fails", BODY)?;
    let (executed, again) = target.count(|| target.post("/fail", "fails", BODY))?;
    columns.push(told(executed, &again, &failed));

    let (executed, response) = target.count(|| {
        let before = target.executions()?;
        let hung_up = send(target.address, "POST /work", &target.fields("leaves"), BODY)?;
        wait(|| Ok(target.executions()? > before))?;
        drop(hung_up);
        // As long as it takes to work, and more.
        std::thread::sleep(Duration::from_millis(500));
        target.post("/work", "leaves", BODY)
    })?;
    columns.push(format!("{executed} executed, {}", response.status));
    Ok(columns.join(" | "))
}

/// The result of a retry.
fn told(executed: u64, response: &Response, first: &Response) -> String {
    let what = match (executed, response) {
        (0, response) if response.status == first.status && response.body == first.body => "replayed",
        (0, _) => "refused",
        _ => "executed again",
    };
    format!("{what}, {}", response.status)
}

fn wait(condition: impl Fn() -> Result<bool>) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !condition()? {
        if Instant::now() > deadline {
            return Err("it never began".into());
        }
    }
    Ok(())
}

impl Target<'_> {
    fn post(&self, path: &str, key: &str, body: &str) -> Result<Response> {
        request(self.address, &format!("POST {path}"), &self.fields(key), body)
    }

    fn fields(&self, key: &str) -> String {
        let cookie =
            if self.cookie.is_empty() { String::new() } else { format!("Cookie: {}\r\n", self.cookie) };
        format!("Idempotency-Key: {key}\r\n{cookie}")
    }

    /// Does something, and says how many executions there were meanwhile.
    fn count<T>(&self, what: impl FnOnce() -> Result<T>) -> Result<(u64, T)> {
        let before = self.executions()?;
        let done = what()?;
        Ok((self.executions()? - before, done))
    }

    fn executions(&self) -> Result<u64> {
        // One of the libraries insists on a key, whatever the method, and would replay the response.
        static READS: AtomicU64 = AtomicU64::new(0);
        let key = format!("read-{}", READS.fetch_add(1, Ordering::Relaxed));
        let response = request(self.service, "GET /executions", &self.fields(&key), "")?;
        response.body.trim().parse().map_err(|_| format!("/executions answered {}", response.body))
    }
}
