//! Reloads: SIGHUP reads the configuration again, and certificate files are read again when they change.
//!
//! An invalid configuration, and one that changes settings that only a restart can change, are refused as a whole: the previous
//! one stays in force. So are a certificate that does not match its key, as in the middle of a renewal, and one whose dates
//! clients would refuse while they accept the previous one.

use std::sync::Arc;
use std::time::Duration;

use oncegate_engine::LogThrottle;
use oncegate_http::IdempotencyLayer;
use tokio::signal::unix::Signal;
use tokio::sync::watch;

use super::certificate;
use super::live::Live;
use super::reconcile::ReconcileClients;
use super::run::allow_many_files;
use super::{server_config, tls};
use crate::admin::{AdminLive, Metrics, ReloadSubject};
use crate::config::{Config, ProxyArgs, TlsFiles};

/// The interval in which the certificate files are checked.
const CERTIFICATE_INTERVAL: Duration = Duration::from_secs(2);

/// The interval in which the dates of the certificate in use are checked, and in which the log repeats the same
/// warning.
const DATES_INTERVAL: Duration = Duration::from_secs(3600);
const WARNING_INTERVAL: Duration = Duration::from_secs(24 * 3600);

/// Replaces the configuration of a sidecar that runs.
pub(super) struct Reloader {
    args: ProxyArgs,
    metrics: Metrics,
    /// The layer with the engine, the observer and the budgets, which a reload keeps.
    base: IdempotencyLayer,
    live: watch::Sender<Live>,
    admin: watch::Sender<AdminLive>,
    certificate: Certificate,
    /// Limits the warnings about the certificate in use.
    date_warnings: LogThrottle,
}

/// The certificate files as they were last seen. `None` is a file that cannot be read.
#[derive(Default)]
struct Certificate {
    /// The content that is in use, or that was refused.
    tried: Option<Content>,
    /// New content. It is tried when it is seen a second time, because a file may be half written.
    seen: Option<Content>,
    /// The time at which a certificate that is not valid yet is tried again, in seconds since 1970.
    retry_at: Option<i64>,
}

type Content = [Option<Vec<u8>>; 3];

impl Reloader {
    pub(super) fn new(
        args: ProxyArgs,
        metrics: Metrics,
        base: IdempotencyLayer,
        live: watch::Sender<Live>,
        admin: watch::Sender<AdminLive>,
    ) -> Self {
        let certificate = Certificate::default();
        let date_warnings = LogThrottle::new(WARNING_INTERVAL);
        Self { args, metrics, base, live, admin, certificate, date_warnings }
    }

    /// Reloads on each hangup, and when the certificate files change.
    pub(super) async fn run(mut self, mut hangup: Signal) {
        self.certificate.tried = self.read_certificate().await;
        let mut tick = tokio::time::interval(CERTIFICATE_INTERVAL);
        let mut dates = tokio::time::interval(DATES_INTERVAL);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                Some(()) = hangup.recv() => self.reload().await,
                _ = dates.tick() => self.note_certificate(),
                _ = tick.tick() => self.check_certificate().await,
            }
        }
    }

    async fn reload(&mut self) {
        let content = self.read_certificate().await;
        let result = self.try_reload();
        self.metrics.observe_reload(ReloadSubject::Configuration, result.is_ok());
        match result {
            Ok(config) => {
                for warning in &config.warnings {
                    tracing::warn!("{warning}");
                }
                tracing::info!(config = config.safe_summary(), "the configuration was reloaded");
                // The files may have other names now.
                self.certificate = Certificate { tried: content, ..Certificate::default() };
                self.date_warnings = LogThrottle::new(WARNING_INTERVAL);
                self.note_certificate();
                if config.tls.is_some() {
                    self.certificate.tried = self.read_certificate().await;
                    self.metrics.observe_reload(ReloadSubject::Certificate, true);
                }
            }
            Err(problems) => {
                for problem in &problems {
                    tracing::error!("{problem}");
                }
                tracing::error!("the configuration was not reloaded; the previous one stays in force");
            }
        }
    }

    fn try_reload(&self) -> Result<Arc<Config>, Vec<String>> {
        let mut config = Config::load(&self.args)
            .map_err(|problems| problems.0.iter().map(ToString::to_string).collect::<Vec<_>>())?;
        allow_many_files(&mut config);
        let fixed = self.live.borrow().config.fixed_changes(&config);
        if !fixed.is_empty() {
            return Err(vec![format!(
                "{}: only a restart can change this; nothing was reloaded",
                fixed.join(", ")
            )]);
        }
        config.keep_keys_of(&self.live.borrow().config);
        if let Some(verifier) = config.jwt.clone() {
            tokio::spawn(async move { verifier.refresh().await });
        }
        let config = Arc::new(config);
        let one = |error: String| vec![error];
        let tls = config.tls.as_ref().map(server_config);
        let tls = tls.transpose().map_err(one)?;
        if let (Some(tls), Some(files)) = (&tls, &config.tls) {
            tls.may_replace(self.live.borrow().tls.as_ref(), &files.cert).map_err(one)?;
        }
        // The threads make their own connectors, which must not fail.
        tls::connector(&config.to, config.upstream_protocol, config.upstream_connect_timeout).map_err(one)?;
        let questions = ReconcileClients::new(config.clone(), self.metrics.clone()).map_err(one)?;
        let layer = config.routes_on(self.base.clone().without_routes(), |route| questions.settings(route));
        let layer = layer.map_err(|error| vec![error.to_string()])?;
        self.admin.send_replace(AdminLive { layer: layer.clone(), token: config.admin_token.clone() });
        self.live.send_replace(Live { config: config.clone(), layer, tls });
        Ok(config)
    }

    async fn check_certificate(&mut self) {
        let Some(content) = self.read_certificate().await else { return };
        let is_due = self.certificate.retry_at.is_some_and(|at| at <= certificate::now());
        if self.certificate.tried.as_ref() == Some(&content) && !is_due {
            self.certificate.seen = None;
            return;
        }
        if self.certificate.seen.as_ref() != Some(&content) {
            self.certificate.seen = Some(content);
            return;
        }
        self.certificate = Certificate { tried: Some(content), ..Certificate::default() };
        let Some(files) = self.files() else { return };
        let result = server_config(&files).and_then(|tls| {
            let not_before = tls.validity.map(|validity| validity.not_before);
            self.certificate.retry_at = not_before.filter(|at| *at > certificate::now());
            tls.may_replace(self.live.borrow().tls.as_ref(), &files.cert).map(|()| tls)
        });
        self.metrics.observe_reload(ReloadSubject::Certificate, result.is_ok());
        match result {
            Ok(tls) => {
                self.live.send_modify(|live| live.tls = Some(tls));
                tracing::info!(certificate = %files.cert.display(), "the certificate was replaced");
                self.certificate.retry_at = None;
                self.date_warnings = LogThrottle::new(WARNING_INTERVAL);
                self.note_certificate();
            }
            Err(error) => tracing::error!("{error}; the previous certificate stays in use"),
        }
    }

    /// Shows the end of the certificate in use in the metrics, and warns if clients refuse it or soon will.
    fn note_certificate(&self) {
        let live = self.live.borrow();
        let validity = live.tls.as_ref().and_then(|tls| tls.validity);
        self.metrics.set_certificate_end(validity.map(|validity| validity.not_after));
        let warning = validity.and_then(|validity| validity.warning(certificate::now()));
        if let (Some(what), Some(files)) = (warning, &live.config.tls)
            && self.date_warnings.pass().is_some()
        {
            tracing::warn!("the certificate in {} {what}", files.cert.display());
        }
    }

    fn files(&self) -> Option<TlsFiles> {
        self.live.borrow().config.tls.clone()
    }

    /// Reads the files; `None` without TLS.
    async fn read_certificate(&self) -> Option<Content> {
        let files = self.files()?;
        let client_ca = async {
            match &files.client_ca {
                Some(file) => tokio::fs::read(file).await.ok(),
                None => None,
            }
        };
        let (cert, key, client_ca) =
            tokio::join!(tokio::fs::read(&files.cert), tokio::fs::read(&files.key), client_ca);
        Some([cert.ok(), key.ok(), client_ca])
    }
}
