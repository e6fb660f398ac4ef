//! The conformance suite behind `oncegate probe`: what an API does with repeated requests, seen from outside.
//!
//! The suite sends real requests and reports, row by row, an observation, the expectation of a profile, a verdict and advice.
//! It works with any API, because an [`Operation`] describes the request and the way in which its effects are counted.
//!
//! Three rules hold for all rows:
//! - **A row claims only what was seen.** If effects cannot be counted, a row that depends on them is `not tested`.
//! - **The counter is tested first.** Two requests under fresh keys must count as two effects; if not, no row uses the counter.
//! - **Requests are bounded** in number and rate, and leave this machine only if the operator has confirmed it.

#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic)
)]

mod budget;
mod cut_proxy;
mod error;
mod expectations;
mod operation;
mod report;
mod session;
mod suite;
mod target;
mod wire;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

pub use error::ProbeError;
pub use expectations::Expectations;
pub use operation::Operation;
pub use report::{Report, Row, Verdict};
pub use tokio_rustls::rustls::ClientConfig;

/// The most requests that one probe may be allowed to send.
pub const MAX_REQUESTS: u32 = 2_000;
/// The highest rate, in requests per second.
pub const MAX_RATE: u32 = 200;
/// The most duplicates at once.
pub const MAX_CONCURRENCY: u32 = 32;
/// The longest time that a probe may wait for the retention.
pub const MAX_WAIT: Duration = Duration::from_secs(8 * 24 * 60 * 60);

/// The settings of a probe.
#[derive(Clone)]
pub struct ProbeOptions {
    /// The behaviour that the verdicts compare with.
    pub expectations: Expectations,
    /// True if requests may go to addresses that are not on this machine.
    pub may_leave: bool,
    /// The most requests, those to the counting URL included.
    pub max_requests: u32,
    /// The most requests in one second.
    pub rate: u32,
    /// The number of duplicates that are sent at once.
    pub concurrency: u32,
    /// The longest time for one request, and for a retry to get a definite response.
    pub max_time: Duration,
    /// The time after which a kept response is asked for again; `None` leaves the row out.
    pub retention_wait: Option<Duration>,
    /// Restarts the API; `None` leaves the row out.
    pub restart: Option<Restart>,
    /// The time of the probe, by RFC 3339, as the report shows it.
    pub date: String,
    /// The trusted certificates, for `https`.
    pub tls: Option<Arc<ClientConfig>>,
}

/// A function that restarts the API. An error is the reason why the row was not tested.
pub type Restart = Arc<dyn Fn() -> Pin<Box<dyn Future<Output = Result<(), String>> + Send>> + Send + Sync>;

impl ProbeOptions {
    /// Options for an API on this machine: 400 requests, 20 in a second, 5 duplicates at once, 30 s for one request.
    #[must_use]
    pub fn new(expectations: Expectations) -> Self {
        Self {
            expectations,
            may_leave: false,
            max_requests: 400,
            rate: 20,
            concurrency: 5,
            max_time: Duration::from_secs(30),
            retention_wait: None,
            restart: None,
            date: String::new(),
            tls: None,
        }
    }

    fn check(&self) -> Result<(), ProbeError> {
        let within = |name: &str, value: u32, min: u32, max: u32| {
            if (min..=max).contains(&value) {
                return Ok(());
            }
            Err(ProbeError::Usage(format!("{name} is {value}; it must be from {min} to {max}")))
        };
        within("the number of requests", self.max_requests, 1, MAX_REQUESTS)?;
        within("the rate", self.rate, 1, MAX_RATE)?;
        within("the number of duplicates at once", self.concurrency, 2, MAX_CONCURRENCY)?;
        if self.max_time.is_zero() || self.max_time > Duration::from_secs(600) {
            return Err(ProbeError::Usage("the time for one request must be from 1 ms to 10 min".to_owned()));
        }
        if self.retention_wait.is_some_and(|time| time.is_zero() || time > MAX_WAIT) {
            return Err(ProbeError::Usage(
                "the time to wait for the retention must be from 1 ms to 8 days".to_owned(),
            ));
        }
        Ok(())
    }
}

/// A probe of one API, before it runs.
pub struct Probe(session::Session);

impl Probe {
    /// A probe of the API at this address. The path of the operation is appended to it. Sends nothing.
    ///
    /// # Errors
    /// The options are wrong, or an address is not found or may not be used.
    pub async fn new(
        uri: &http::Uri,
        operation: Operation,
        options: ProbeOptions,
    ) -> Result<Self, ProbeError> {
        options.check()?;
        Ok(Self(session::Session::new(uri, operation, options).await?))
    }

    /// Sends the requests of all rows.
    ///
    /// # Errors
    /// The API does not execute a plain request.
    pub async fn run(self) -> Result<Report, ProbeError> {
        self.run_until(std::future::pending()).await
    }

    /// Sends the requests of all rows until `interruption` is ready, for example `tokio::signal::ctrl_c()`.
    ///
    /// Rows that have not ended by then are not tested. A command that restarts the API is not broken off: the report waits for
    /// its end.
    ///
    /// # Errors
    /// The API does not execute a plain request.
    pub async fn run_until(self, interruption: impl Future<Output = ()>) -> Result<Report, ProbeError> {
        let mut rows = Box::pin(suite::run(&self.0));
        let rows = tokio::select! {
            rows = &mut rows => rows,
            () = interruption => {
                self.0.interrupt();
                rows.await
            }
        };
        Ok(Report::new(&self.0, rows?))
    }
}
