//! Reloads: SIGHUP reads the configuration again, and certificate files are read again when they change.
//!
//! An invalid configuration, and one that changes settings that only a restart can change, are refused as a whole: the previous
//! one stays in force. So are a certificate that does not match its key, as in the middle of a renewal, and one whose dates
//! clients would refuse while they accept the previous one.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use oncegate_engine::LogThrottle;
use oncegate_http::IdempotencyLayer;
use oncegate_seal::SealKeys;
use tokio::signal::unix::Signal;
use tokio::sync::watch;

use super::certificate;
use super::live::Live;
use super::reconcile::ReconcileClients;
use super::run::allow_many_files;
use super::{server_config, tls};
use crate::admin::{AdminLive, Metrics, RefusedReloads, ReloadSubject};
use crate::config::{Config, ProxyArgs, TlsFiles};
use crate::files;
use crate::seal;
use crate::systemd::ServiceManager;

/// The interval in which the certificate files are checked.
const CERTIFICATE_INTERVAL: Duration = Duration::from_secs(2);

/// The most routes that the log names if a reload makes keys new.
const MAX_CHANGES: usize = 20;

/// The interval in which the dates of the certificate in use are checked, and in which the log repeats the same
/// warning.
const DATES_INTERVAL: Duration = Duration::from_secs(3600);
const WARNING_INTERVAL: Duration = Duration::from_secs(24 * 3600);

/// The interval in which the age of the keys that verify tokens is checked.
const KEY_SET_INTERVAL: Duration = Duration::from_secs(60);

/// Replaces the configuration of a sidecar that runs.
pub(super) struct Reloader {
    args: ProxyArgs,
    metrics: Metrics,
    /// The layer with the engine, the observer and the budgets, which a reload keeps.
    base: IdempotencyLayer,
    live: watch::Sender<Live>,
    admin: watch::Sender<AdminLive>,
    /// The keys that encrypt stored responses, which a reload replaces.
    seal_keys: Option<SealKeys>,
    certificate: Certificate,
    /// Limits the warnings about the certificate in use.
    date_warnings: LogThrottle,
    /// Gets a note of each reload.
    manager: ServiceManager,
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

type Content = [Option<Vec<u8>>; 4];

/// Says which of the files was replaced.
fn replaced(before: Option<&Content>, now: &Content) -> &'static str {
    let is_new = |file: usize| before.is_none_or(|before| before.get(file) != now.get(file));
    match (is_new(0) || is_new(1), is_new(2)) {
        (true, _) => "the certificate was replaced",
        (false, true) => "the authorities of clients (tls-client-ca) were replaced",
        (false, false) => "the lists of revoked certificates (tls-client-crl) were replaced",
    }
}

impl Reloader {
    pub(super) fn new(
        args: ProxyArgs,
        metrics: Metrics,
        base: IdempotencyLayer,
        live: watch::Sender<Live>,
        admin: watch::Sender<AdminLive>,
        manager: ServiceManager,
    ) -> Self {
        let certificate = Certificate::default();
        let date_warnings = LogThrottle::new(WARNING_INTERVAL);
        Self { args, metrics, base, live, admin, seal_keys: None, certificate, date_warnings, manager }
    }

    /// Also replaces these keys.
    pub(super) fn with_seal_keys(self, seal_keys: Option<SealKeys>) -> Self {
        Self { seal_keys, ..self }
    }

    /// Reloads on each hangup, and when the certificate files change.
    pub(super) async fn run(mut self, mut hangup: Signal) {
        self.certificate.tried = self.read_certificate().await;
        let mut tick = tokio::time::interval(CERTIFICATE_INTERVAL);
        let mut dates = tokio::time::interval(DATES_INTERVAL);
        let mut keys = tokio::time::interval(KEY_SET_INTERVAL);
        keys.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                Some(()) = hangup.recv() => {
                    self.manager.reloading();
                    let status = match self.reload().await {
                        true => "Serving with the configuration that was read again",
                        false => "Serving with the previous configuration: the new one was refused, see the log",
                    };
                    self.manager.ready(status);
                }
                _ = dates.tick() => self.note_certificate(),
                _ = keys.tick() => self.refresh_keys(),
                _ = tick.tick() => self.check_certificate().await,
            }
        }
    }

    /// Returns true if the new configuration is in force.
    async fn reload(&mut self) -> bool {
        let content = self.read_certificate().await;
        let before = self.live.borrow().config.clone();
        let result = self.try_reload().await;
        let is_applied = result.is_ok();
        self.metrics.observe_reload(ReloadSubject::Configuration, is_applied);
        match result {
            Ok(config) => {
                for warning in &config.warnings {
                    tracing::warn!("{warning}");
                }
                let changes = config.identity_changes(&before);
                for change in changes.iter().take(MAX_CHANGES) {
                    tracing::warn!(
                        "the reload changed how requests of one operation are recognised ({change}); retries of requests that were sent \
                         before it may be executed again, or refused as other requests"
                    );
                }
                if let Some(more) = changes.len().checked_sub(MAX_CHANGES).filter(|more| *more > 0) {
                    tracing::warn!(more, "the reload changed this on more routes");
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
                self.admin.send_modify(|live| {
                    live.refused_reloads.note(ReloadSubject::Configuration, &problems);
                });
                for problem in &problems {
                    tracing::error!("{problem}");
                }
                tracing::error!("the configuration was not reloaded; the previous one stays in force");
            }
        }
        is_applied
    }

    async fn try_reload(&self) -> Result<Arc<Config>, Vec<String>> {
        let mut config = Config::load(&self.args)
            .map_err(|problems| problems.0.iter().map(ToString::to_string).collect::<Vec<_>>())?;
        allow_many_files(&mut config);
        let fixed = self.live.borrow().config.fixed_changes(&config);
        if !fixed.is_empty() {
            return Err(vec![format!(
                "{}: only a restart can change this; nothing was reloaded: restart the sidecar, or put the old value \
                 back and reload",
                fixed.join(", ")
            )]);
        }
        // First, because a program may have to be asked; and nothing is applied before everything is known to be right.
        let seal_keys = match &config.seal {
            Some(settings) => {
                let keys = seal::load(settings, |line| tracing::warn!("{line}")).await;
                Some(keys.map_err(|error| vec![error])?)
            }
            None => None,
        };
        config.keep_keys_of(&self.live.borrow().config);
        config.keep_counts_of(&self.live.borrow().config);
        if let Some(verifier) = config.jwt.clone() {
            self.metrics.watch(&verifier);
            tokio::spawn(async move { verifier.refresh().await });
        }
        let config = Arc::new(config);
        let one = |error: String| vec![error];
        let tls = config.tls.as_ref().map(server_config);
        let tls = tls.transpose().map_err(one)?;
        if let (Some(tls), Some(files)) = (&tls, &config.tls) {
            tls.may_replace(self.live.borrow().tls.as_ref(), files).map_err(one)?;
        }
        // The threads make their own connectors, which must not fail.
        tls::connector(&config.to, config.upstream_protocol, config.upstream_connect_timeout).map_err(one)?;
        let questions = ReconcileClients::new(config.clone(), self.metrics.clone()).map_err(one)?;
        let layer = config.routes_on(self.base.clone().without_routes(), |route| questions.settings(route));
        let layer = layer.map_err(|error| vec![error.to_string()])?;
        if let (Some(keys), Some(now)) = (&self.seal_keys, seal_keys) {
            let (warnings, described) = (seal::warnings(&keys.get(), &now), seal::describe(&now));
            keys.replace(now);
            for warning in warnings {
                tracing::warn!("{warning}");
            }
            tracing::info!("sealing: {described}");
        }
        let jwt = config.jwt.clone();
        self.admin.send_replace(AdminLive {
            config: config.clone(),
            layer: layer.clone(),
            token: config.admin_token.clone(),
            metrics_token: config.metrics_token.clone(),
            jwt,
            // The files of the certificate were read, too.
            refused_reloads: RefusedReloads::default(),
        });
        self.live.send_replace(Live { config: config.clone(), layer, tls });
        Ok(config)
    }

    /// Fetches the keys that verify tokens if they are old, also while there are no requests: an issuer that is away is noticed
    /// before the last key set is too old to be used.
    fn refresh_keys(&self) {
        if let Some(verifier) = self.live.borrow().config.jwt.clone() {
            tokio::spawn(async move { verifier.refresh_if_old().await });
        }
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
        let what = replaced(self.certificate.tried.as_ref(), &content);
        self.certificate = Certificate { tried: Some(content), ..Certificate::default() };
        let Some(files) = self.files() else { return };
        let result = server_config(&files).and_then(|tls| {
            let not_before = tls.validity.map(|validity| validity.not_before);
            self.certificate.retry_at = not_before.filter(|at| *at > certificate::now());
            tls.may_replace(self.live.borrow().tls.as_ref(), &files).map(|()| tls)
        });
        self.metrics.observe_reload(ReloadSubject::Certificate, result.is_ok());
        let problem = result.as_ref().err().cloned();
        self.admin.send_modify(|live| {
            live.refused_reloads.note(ReloadSubject::Certificate, problem.as_slice());
        });
        match result {
            Ok(tls) => {
                self.live.send_modify(|live| live.tls = Some(tls));
                tracing::info!(certificate = %files.cert.display(), "{what}");
                self.certificate.retry_at = None;
                self.date_warnings = LogThrottle::new(WARNING_INTERVAL);
                self.note_certificate();
            }
            Err(error) => tracing::error!("{error}; the previous certificate stays in use"),
        }
    }

    /// Shows the ends of the certificate and of the lists of revoked certificates in the metrics.
    ///
    /// It warns if clients refuse the certificate, or are refused because of a list, or soon will be.
    fn note_certificate(&self) {
        let live = self.live.borrow();
        let validity = live.tls.as_ref().and_then(|tls| tls.validity);
        self.metrics.set_certificate_end(validity.map(|validity| validity.not_after));
        let lists = live.tls.as_ref().and_then(|tls| tls.revocations);
        self.metrics.set_revocations_end(lists.map(|lists| lists.not_after));
        let Some(files) = &live.config.tls else { return };
        let now = certificate::now();
        let certificate = validity.and_then(|validity| validity.warning(now));
        let certificate =
            certificate.map(|what| format!("the certificate in {} {what}", files.cert.display()));
        let lists = lists.and_then(|lists| lists.warning_of_lists(now)).zip(files.client_crl.as_ref());
        let lists =
            lists.map(|(what, file)| format!("a list of revoked certificates in {} {what}", file.display()));
        if (certificate.is_some() || lists.is_some()) && self.date_warnings.pass().is_some() {
            for warning in certificate.iter().chain(&lists) {
                tracing::warn!("{warning}");
            }
        }
    }

    fn files(&self) -> Option<TlsFiles> {
        self.live.borrow().config.tls.clone()
    }

    /// Reads the files; `None` without TLS.
    async fn read_certificate(&self) -> Option<Content> {
        let files = self.files()?;
        let read = async |file: Option<&Path>| match file {
            Some(file) => {
                let file = file.to_owned();
                let read = tokio::task::spawn_blocking(move || files::read(&file, files::MAX_PEM));
                read.await.ok().and_then(Result::ok)
            }
            None => None,
        };
        let (cert, key, ca, crl) = tokio::join!(
            read(Some(&files.cert)),
            read(Some(&files.key)),
            read(files.client_ca.as_deref()),
            read(files.client_crl.as_deref()),
        );
        Some([cert, key, ca, crl])
    }
}
