//! A process of any deployment, which can be suspended and killed.

use std::net::SocketAddr;

use oncegate_testkit::until;

use crate::client::{Connection, Request, Response, ResponseError};
use crate::library::LibraryService;
use crate::plan::Plan;
use crate::remote::LayerProcess;
use crate::sidecar::Sidecar;
use crate::world::{Deployment, World};

/// A process that serves requests. It is killed when this is dropped.
pub(crate) enum Process {
    Layer(LayerProcess),
    Sidecar(Box<Sidecar>),
    Library(LibraryService),
}

impl Process {
    /// Starts a process of a deployment with these settings. `upstream` is the address of the backend; for libraries the world
    /// has another one.
    pub(crate) async fn start(
        world: &World,
        deployment: Deployment,
        plan: &Plan,
        store: &str,
        upstream: SocketAddr,
    ) -> Self {
        match deployment {
            Deployment::Layer => Self::Layer(LayerProcess::start(plan, store, upstream).await),
            Deployment::Sidecar | Deployment::TwoSidecars | Deployment::SidecarOf(_) => {
                Self::Sidecar(Box::new(world.start_sidecar(plan, upstream).await))
            }
            Deployment::Library(library) => Self::Library(world.open_library(library, plan, true).await),
        }
    }

    pub(crate) const fn address(&self) -> SocketAddr {
        match self {
            Self::Layer(child) => child.address,
            Self::Sidecar(sidecar) => sidecar.address,
            Self::Library(service) => service.address,
        }
    }

    /// Suspends it.
    pub(crate) fn stop(&self) {
        match self {
            Self::Layer(child) => child.stop(),
            Self::Sidecar(sidecar) => sidecar.stop(),
            Self::Library(service) => service.stop(),
        }
    }

    /// Resumes it.
    pub(crate) fn resume(&self) {
        match self {
            Self::Layer(child) => child.resume(),
            Self::Sidecar(sidecar) => sidecar.resume(),
            Self::Library(service) => service.resume(),
        }
    }

    /// Kills it, as a power cut would.
    pub(crate) fn kill(&mut self) {
        match self {
            Self::Layer(child) => child.kill(),
            Self::Sidecar(sidecar) => sidecar.kill(),
            Self::Library(service) => service.kill(),
        }
    }
}

/// Sends a request to a process on a new connection, and returns its response.
pub(crate) async fn ask(process: &Process, request: &Request) -> Response {
    let response = Connection::open(process.address()).await.exchange(request).await;
    response.unwrap_or_else(|broken| panic!("no response: {broken:?}"))
}

/// Sends the request again and again until it is no longer in progress.
pub(crate) async fn ask_until_settled(process: &Process, request: &Request) -> Response {
    let mut last = None;
    until("the request is no longer in progress", async || {
        let response = ask(process, request).await;
        let settled = response.status() != 409;
        last = Some(response);
        settled
    })
    .await;
    last.expect("a response")
}

/// Sends a request to a process in the background.
pub(crate) fn start_ask(
    process: &Process,
    request: Request,
) -> tokio::task::JoinHandle<Result<Response, ResponseError>> {
    let address = process.address();
    tokio::spawn(async move { Connection::open(address).await.exchange(&request).await })
}
