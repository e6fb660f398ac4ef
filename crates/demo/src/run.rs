//! One run of the traffic: directly to the service, or through the sidecar.

use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::client::{Clients, Ending};
use crate::figures::{Figures, TwoSidecars};
use crate::network::Network;
use crate::operator::Operator;
use crate::plan::Plan;
use crate::service::{Charge, Service};
use crate::sidecar::{Sidecar, SidecarConfig};
use crate::stage::{Screen, Stage, Style};

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

/// One run: its state, its service and its start.
struct Run {
    stage: Arc<Stage>,
    service: Service,
    started: Instant,
}

/// Runs the traffic: clients → hostile network → service.
pub(crate) async fn without_oncegate(plan: Arc<Plan>, screen: Screen) -> Result<Outcome, String> {
    let run = Run::start(Stage::new(plan, PATH.to_owned(), screen)).await?;
    let network = Network::start(run.stage.clone(), vec![run.service.address]).await?;
    let (_no_operator, settled) = watch::channel(0);
    let endings = run.watched(pursue_all(&run.stage, &network, settled)).await?;
    run.end(&network, &endings).await
}

/// Runs the traffic: clients → hostile network → sidecar → service, with one kill -9 in the middle. Two sidecars use a shared
/// store, and the one that is killed stays down.
pub(crate) async fn with_oncegate(
    plan: Arc<Plan>,
    screen: Screen,
    config: &SidecarConfig,
) -> Result<Outcome, String> {
    let path = config.shared.as_ref().map_or(PATH, |shared| &shared.path);
    let run = Run::start(Stage::new(plan, path.to_owned(), screen)).await?;
    let logs =
        if config.shared.is_some() { &["sidecar-1.log", "sidecar-2.log"][..] } else { &["sidecar.log"] };
    let mut sidecars = VecDeque::new();
    for log in logs {
        sidecars
            .push_back(Sidecar::start(run.service.address, SidecarConfig { log, ..config.clone() }).await?);
    }
    run.stage.figures().two_sidecars = config.shared.as_ref().map(|_| TwoSidecars::default());
    let network = Network::start(run.stage.clone(), sidecars.iter().map(|s| s.listen).collect()).await?;
    let (settled, receiver) = watch::channel(0);
    let traffic = async {
        tokio::select! {
            endings = pursue_all(&run.stage, &network, receiver) => endings,
            ended = run.disturb(sidecars, settled) => match ended? {},
        }
    };
    let endings = run.watched(traffic).await?;
    run.end(&network, &endings).await
}

impl Run {
    async fn start(stage: Arc<Stage>) -> Result<Self, String> {
        let service = Service::start(stage.clone()).await?;
        Ok(Self { stage, service, started: Instant::now() })
    }

    /// Kills the first sidecar in the middle, starts it again if it is the only one, and then does the operator's work.
    async fn disturb(
        &self,
        mut sidecars: VecDeque<Sidecar>,
        settled: watch::Sender<u64>,
    ) -> Result<Infallible, String> {
        self.wait_for_the_middle(&mut sidecars).await?;
        let in_flight = *self.service.running().borrow();
        let mut sidecar = sidecars.pop_front().ok_or("there is no sidecar to kill")?;
        let pid = sidecar.pid();
        sidecar.kill()?;
        {
            let mut figures = self.stage.figures();
            figures.sidecar_kills += 1;
            figures.in_flight_at_kill = Some(in_flight);
        }
        let mut running = if let Some(other) = sidecars.pop_front() {
            let text =
                format!("kill -9 {pid}: one of two sidecars is gone; {in_flight} payments are in flight");
            self.stage.say("killed", Style::Bad, &text);
            let text = format!("it stays down; the other one ({}) has the same records", other.pid());
            self.stage.say("left alone", Style::Good, &text);
            other
        } else {
            let text = format!("kill -9 {pid}: the sidecar is gone, with {in_flight} payments in flight");
            self.stage.say("killed", Style::Bad, &text);
            sleep(OUTAGE).await;
            let restarting = Instant::now();
            sidecar.restart().await?;
            let took = restarting.elapsed().as_millis();
            let text = format!("the same store, the same port; it listens after {took} ms");
            self.stage.say("restarted", Style::Good, &text);
            sidecar
        };
        let mut operator = Operator {
            admin: running.admin,
            ledger: self.service.ledger.clone(),
            stage: self.stage.clone(),
            settled,
            nothing_since: HashMap::new(),
        };
        loop {
            running.check()?;
            operator.round().await?;
            sleep(OPERATOR_ROUND).await;
        }
    }

    /// Waits for the middle of the run, and then for requests in flight.
    async fn wait_for_the_middle(&self, sidecars: &mut VecDeque<Sidecar>) -> Result<(), String> {
        let intents = self.stage.plan.intents.len();
        while self.stage.figures().begun < (intents as u64 / 2).max(1) {
            sidecars.iter_mut().try_for_each(Sidecar::check)?;
            sleep(Duration::from_millis(2)).await;
        }
        let mut running = self.service.running();
        for wanted in [IN_FLIGHT_AT_KILL.min(intents.div_ceil(4)), 1] {
            if timeout(KILL_TIMEOUT, running.wait_for(|running| *running >= wanted)).await.is_ok() {
                break;
            }
        }
        Ok(())
    }

    /// Shows the progress after each quarter of a run.
    async fn watched<T>(&self, run: impl Future<Output = T>) -> T {
        let mut run = std::pin::pin!(run);
        let (intents, mut quarter) = (self.stage.plan.intents.len() as u64, 1);
        loop {
            if let Ok(result) = timeout(Duration::from_millis(100), &mut run).await {
                return result;
            }
            let ended = self.stage.figures().ended;
            if ended * 4 >= intents * quarter && ended < intents {
                self.stage.screen.line(&format!("  … {}", self.progress()));
                quarter = ended * 4 / intents + 1;
            }
        }
    }

    fn progress(&self) -> String {
        let (charges, duplicates) = self.service.ledger.count();
        let Figures { ended, attempts, .. } = *self.stage.figures();
        let intents = self.stage.plan.intents.len();
        format!(
            "{ended} of {intents} payments answered · {attempts} requests · {charges} charges · {duplicates} duplicates"
        )
    }

    /// Waits for requests in transit, and counts the result.
    async fn end(&self, network: &Network, endings: &[Vec<Ending>]) -> Result<Outcome, String> {
        network.settle().await;
        let mut running = self.service.running();
        let _never_closed = running.wait_for(|running| *running == 0).await;
        let ledger = self.service.ledger.charges();
        let mut figures = self.stage.figures().clone();
        figures.conclude(&self.stage.plan, &ledger, endings);
        figures.milliseconds = self.started.elapsed().as_millis() as u64;
        self.stage.screen.line(&format!("  {}", self.stage.screen.paint(Style::Dim, &self.progress())));
        Ok(Outcome { figures, ledger })
    }
}

/// Pursues all intents; returns the end of each click, in the order of the plan.
async fn pursue_all(
    stage: &Arc<Stage>,
    network: &Network,
    settled: watch::Receiver<u64>,
) -> Result<Vec<Vec<Ending>>, String> {
    let clients = Arc::new(Clients { stage: stage.clone(), network: network.address, settled });
    let next = Arc::new(AtomicUsize::new(0));
    let mut workers = JoinSet::new();
    for _ in 0..CONCURRENCY {
        let (clients, next) = (clients.clone(), next.clone());
        workers.spawn(async move {
            let mut endings = Vec::new();
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let Some(intent) = clients.stage.plan.intents.get(at) else {
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
