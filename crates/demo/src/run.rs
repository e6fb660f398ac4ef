//! One run of the traffic: directly to the service, or through the sidecar.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::client::{Clients, Ending};
use crate::figures::{Figures, TwoSidecars};
use crate::network::Network;
use crate::operator::Operator;
use crate::plan::Plan;
use crate::screen::{Screen, Style};
use crate::service::{Charge, Service};
use crate::shared::SharedStore;
use crate::sidecar::{Home, Sidecar, SidecarConfig};
use crate::story::Story;
use crate::tally::Tally;

/// The number of intents that are pursued at the same time.
const CONCURRENCY: usize = 12;

/// The number of requests that should be at the service when the sidecar is killed, and the longest time to wait for
/// them.
const IN_FLIGHT_AT_KILL: usize = 3;
const KILL_TIMEOUT: Duration = Duration::from_millis(1_500);

/// The length of the outage.
const OUTAGE: Duration = Duration::from_millis(300);

/// The interval between two rounds of the operator.
const OPERATOR_ROUND: Duration = Duration::from_millis(100);

/// The path of payments if the store belongs to the demonstration alone.
const PATH: &str = "/payments";

/// The result of a run.
pub(crate) struct Outcome {
    pub(crate) figures: Figures,
    pub(crate) ledger: Vec<Charge>,
}

/// The state that all parts of a run share.
struct Stage {
    plan: Arc<Plan>,
    tally: Arc<Tally>,
    story: Arc<Story>,
    screen: Arc<Screen>,
    service: Service,
    path: String,
    started: Instant,
}

/// Runs the traffic: clients → hostile network → service.
pub(crate) async fn without_oncegate(plan: Arc<Plan>, screen: Arc<Screen>) -> Result<Outcome, String> {
    let stage = Stage::set(plan, screen, PATH).await?;
    let network = stage.network(vec![stage.service.address]).await?;
    let (_no_operator, settled) = tokio::sync::watch::channel(0);
    let clients = stage.clients(&network, settled);
    let endings = stage.watched(pursue_all(clients)).await?;
    stage.end(&network, &endings, None, None).await
}

/// Runs the traffic: clients → hostile network → sidecar → service, with one kill -9 in the middle. Two sidecars use a `shared`
/// store, and the one that is killed stays down.
pub(crate) async fn with_oncegate(
    plan: Arc<Plan>,
    screen: Arc<Screen>,
    home: &Home,
    shared: Option<&SharedStore>,
) -> Result<Outcome, String> {
    let stage = Stage::set(plan, screen, shared.map_or(PATH, |shared| &shared.path)).await?;
    let to = stage.service.address;
    let (mut sidecar, mut other) = match shared {
        None => (Sidecar::start(to, SidecarConfig::single(home)).await?, None),
        Some(shared) => {
            let [first, second] = SidecarConfig::pair(home, shared);
            (Sidecar::start(to, first).await?, Some(Sidecar::start(to, second).await?))
        }
    };
    let network =
        stage.network([Some(&sidecar), other.as_ref()].into_iter().flatten().map(|s| s.listen).collect());
    let network = network.await?;
    let (settled, receiver) = tokio::sync::watch::channel(0);
    let mut operator = Operator {
        admin: other.as_ref().unwrap_or(&sidecar).admin,
        operation: shared.map(SharedStore::operation),
        ledger: stage.service.ledger.clone(),
        tally: stage.tally.clone(),
        story: stage.story.clone(),
        settled,
        nothing_since: HashMap::new(),
    };
    let clients = stage.clients(&network, receiver);
    let mut in_flight_at_kill = None;
    let traffic = async {
        tokio::select! {
            endings = pursue_all(clients) => endings,
            ended = stage.disturb(&mut sidecar, other.as_mut(), &mut operator, &mut in_flight_at_kill) => match ended? {},
        }
    };
    let endings = stage.watched(traffic).await?;
    let two = other.is_some().then_some(TwoSidecars::count as fn(&Tally) -> TwoSidecars);
    let outcome = stage.end(&network, &endings, in_flight_at_kill, two).await;
    sidecar.kill()?;
    if let Some(mut other) = other {
        other.kill()?;
    }
    outcome
}

impl Stage {
    async fn set(plan: Arc<Plan>, screen: Arc<Screen>, path: &str) -> Result<Self, String> {
        let story = Arc::new(Story::new(screen.clone()));
        let path = path.to_owned();
        let service = Service::start(plan.clone(), story.clone(), path.clone()).await?;
        Ok(Self { plan, tally: Arc::default(), story, screen, service, path, started: Instant::now() })
    }

    async fn network(&self, to: Vec<std::net::SocketAddr>) -> Result<Network, String> {
        Network::start(self.plan.clone(), to, self.tally.clone(), self.story.clone()).await
    }

    fn clients(&self, network: &Network, settled: tokio::sync::watch::Receiver<u64>) -> Clients {
        Clients {
            plan: self.plan.clone(),
            tally: self.tally.clone(),
            story: self.story.clone(),
            network: network.address,
            path: self.path.clone(),
            settled,
        }
    }

    /// Kills the sidecar once in the middle, and then does the operator's work.
    async fn disturb(
        &self,
        sidecar: &mut Sidecar,
        mut other: Option<&mut Sidecar>,
        operator: &mut Operator,
        in_flight_at_kill: &mut Option<usize>,
    ) -> Result<Infallible, String> {
        *in_flight_at_kill = Some(self.kill(sidecar, other.as_deref_mut()).await?);
        match &other {
            None => self.restart(sidecar).await?,
            Some(other) => {
                let text = format!("it stays down; the other one ({}) has the same records", other.pid());
                self.story.say("left alone", Style::Good, &text);
            }
        }
        let running = other.unwrap_or(sidecar);
        loop {
            running.check()?;
            operator.round().await?;
            sleep(OPERATOR_ROUND).await;
        }
    }

    /// Kills the sidecar in the middle of the run, with requests in flight. Returns their number, over both sidecars if there
    /// are two.
    async fn kill(&self, sidecar: &mut Sidecar, mut other: Option<&mut Sidecar>) -> Result<usize, String> {
        let middle = (self.plan.intents.len() as u64 / 2).max(1);
        while self.tally.begun.get() < middle {
            sidecar.check()?;
            if let Some(other) = &mut other {
                other.check()?;
            }
            sleep(Duration::from_millis(2)).await;
        }
        let mut running = self.service.running();
        for wanted in [IN_FLIGHT_AT_KILL.min(self.plan.intents.len().div_ceil(4)), 1] {
            if timeout(KILL_TIMEOUT, running.wait_for(|running| *running >= wanted)).await.is_ok() {
                break;
            }
        }
        let its_own = &self.tally.through[0];
        if other.is_some() {
            // The service does not know which sidecar sent a request.
            let some = async {
                while its_own.now() == 0 || *running.borrow() == 0 {
                    sleep(Duration::from_millis(1)).await;
                }
            };
            let _it_has_none = timeout(KILL_TIMEOUT, some).await;
        }
        let (its_own, in_flight) = (its_own.now(), *running.borrow());
        let pid = sidecar.pid();
        sidecar.kill()?;
        self.tally.kills.add();
        let text = match other {
            None => format!("kill -9 {pid}: the sidecar is gone, with {in_flight} payments in flight"),
            Some(_) => format!(
                "kill -9 {pid}: one of two sidecars is gone with {its_own} of the requests; {in_flight} payments are in flight"
            ),
        };
        self.story.say("killed", Style::Bad, &text);
        Ok(in_flight)
    }

    async fn restart(&self, sidecar: &mut Sidecar) -> Result<(), String> {
        sleep(OUTAGE).await;
        let restarting = Instant::now();
        sidecar.restart().await?;
        let text = format!(
            "the same store, the same port; it listens after {} ms",
            restarting.elapsed().as_millis()
        );
        self.story.say("restarted", Style::Good, &text);
        Ok(())
    }

    /// Shows the progress while a run lasts.
    async fn watched<T>(&self, run: impl Future<Output = T>) -> T {
        let mut run = std::pin::pin!(run);
        let intents = self.plan.intents.len() as u64;
        let (every, mut quarter) = (Duration::from_millis(100), 1);
        let result = loop {
            if let Ok(result) = timeout(every, &mut run).await {
                break result;
            }
            let ended = self.tally.ended.get();
            if self.screen.is_live() {
                self.screen.status(&format!("  {} {}", bar(ended, intents), self.progress()));
            } else if ended * 4 >= intents * quarter && ended < intents {
                self.screen.line(&format!("  … {}", self.progress()));
                quarter = ended * 4 / intents + 1;
            }
        };
        self.screen.end_status();
        result
    }

    fn progress(&self) -> String {
        let (charges, duplicates) = self.service.ledger.count();
        let (ended, intents) = (self.tally.ended.get(), self.plan.intents.len());
        let attempts = self.tally.attempts.get();
        format!(
            "{ended} of {intents} payments answered · {attempts} requests · {charges} charges · {duplicates} duplicates"
        )
    }

    /// Waits for requests in transit, and counts the result.
    async fn end(
        &self,
        network: &Network,
        endings: &[Vec<Ending>],
        in_flight_at_kill: Option<usize>,
        two_sidecars: Option<fn(&Tally) -> TwoSidecars>,
    ) -> Result<Outcome, String> {
        network.settle().await;
        let mut running = self.service.running();
        let _never_closed = running.wait_for(|running| *running == 0).await;
        let ledger = self.service.ledger.charges();
        let mut figures = Figures::count(&self.plan, &self.tally, &ledger, endings);
        figures.in_flight_at_kill = in_flight_at_kill;
        figures.two_sidecars = two_sidecars.map(|count| count(&self.tally));
        figures.milliseconds = self.started.elapsed().as_millis() as u64;
        self.screen.line(&format!("  {}", self.screen.paint(Style::Dim, &self.progress())));
        Ok(Outcome { figures, ledger })
    }
}

fn bar(done: u64, of: u64) -> String {
    let filled = (done * 20 / of.max(1)) as usize;
    format!("▕{}{}▏", "█".repeat(filled), "░".repeat(20 - filled.min(20)))
}

/// Pursues all intents; returns the end of each click, in the order of the plan.
async fn pursue_all(clients: Clients) -> Result<Vec<Vec<Ending>>, String> {
    let clients = Arc::new(clients);
    let next = Arc::new(AtomicUsize::new(0));
    let mut workers = JoinSet::new();
    for _ in 0..CONCURRENCY {
        let (clients, next) = (clients.clone(), next.clone());
        workers.spawn(async move {
            let mut endings = Vec::new();
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let Some(intent) = clients.plan.intents.get(at) else {
                    return endings;
                };
                endings.push((at, clients.pursue(intent).await));
            }
        });
    }
    let mut endings = Vec::new();
    while let Some(worker) = workers.join_next().await {
        endings.extend(worker.map_err(|error| format!("a client broke: {error}"))?);
    }
    endings.sort_unstable_by_key(|(at, _)| *at);
    Ok(endings.into_iter().map(|(_, endings)| endings).collect())
}
