//! Verifies that the store belongs to the id secret of this sidecar, or to none, also while there are no requests.
//!
//! Claims verify it themselves, and are refused otherwise. This task begins and ends the trial of a new store, and writes to
//! the log why requests are refused.

use std::mem::discriminant;
use std::sync::Arc;
use std::time::Duration;

use oncegate_core::{IdGuard, IdProblem};

/// The pauses between two checks: of a store that is verified, of one that is refused, and of one that does not answer.
///
/// A verified store is asked much more often than claims need it, by one lookup. If it loses its mark, a process without the
/// secret executes keys again until a process with the secret has put the mark back.
const VERIFIED: Duration = Duration::from_secs(2);
const REFUSED: Duration = Duration::from_secs(5);
const UNANSWERED: Duration = Duration::from_secs(1);

/// Checks until it is dropped.
pub(super) async fn run(guard: Arc<IdGuard>) {
    let mut logged: Option<IdProblem> = None;
    loop {
        let checked = guard.verify().await;
        let problem = guard.problem();
        if problem.as_ref().map(discriminant) != logged.as_ref().map(discriminant) {
            match &problem {
                Some(problem) if problem.is_temporary() => tracing::info!("{problem}"),
                Some(problem) => tracing::error!("{problem}; requests with a key are refused"),
                None => tracing::info!(
                    "the store belongs to the id secret of this sidecar, or to none, as it should"
                ),
            }
            logged = problem;
        }
        let pause = match problem {
            Some(problem) => {
                problem.next_check().map_or(REFUSED, |pause| pause.clamp(Duration::from_millis(100), REFUSED))
            }
            None if checked.is_ok() => VERIFIED,
            None => UNANSWERED,
        };
        tokio::time::sleep(pause).await;
    }
}
