//! The refusals that requests of a route can get from the sidecar.

use http::StatusCode;
use oncegate_http::{CompletedBy, Condition, RefusalRow};

use crate::config::RouteConfig;

/// The refusals of requests with a covered method, in the order of [`Condition::ALL`], by their statuses.
pub(super) fn of(route: &RouteConfig) -> Vec<RefusalRow> {
    let settings = &route.settings;
    let profile = settings.profile();
    let is_upstream = settings.completed_by() == CompletedBy::Upstream;
    let no_response = if route.upstream_timeout.is_some() {
        &[StatusCode::BAD_GATEWAY, StatusCode::GATEWAY_TIMEOUT][..]
    } else {
        &[StatusCode::BAD_GATEWAY]
    };
    let by_layer = settings.possible_refusals();
    let mut rows = Vec::new();
    for condition in Condition::ALL {
        let own = by_layer.iter().filter(|(other, _)| *other == condition).map(|(_, status)| *status);
        let mut statuses: Vec<_> = own.collect();
        let usual = profile.refusal_status(condition);
        match condition {
            // The first request, if the service gave no response, or not the whole of one.
            Condition::OutcomeUnknown if !statuses.is_empty() && settings.keeps_server_errors() => {
                statuses.extend(no_response)
            }
            Condition::HandlerFailed if !statuses.is_empty() => statuses = no_response.to_vec(),
            Condition::RequestInProgress if is_upstream => statuses.extend(no_response),
            Condition::ResponseAwaited if is_upstream && route.reconcile_path.is_some() => {
                statuses.extend([&[usual], no_response].concat());
            }
            // The statuses of the service.
            Condition::ReplayDenied if route.authorize.is_some() => {
                statuses.extend([StatusCode::UNAUTHORIZED, StatusCode::FORBIDDEN, StatusCode::NOT_FOUND]);
            }
            Condition::AuthorizationUnavailable if route.authorize.is_some() => statuses.extend([
                StatusCode::INTERNAL_SERVER_ERROR,
                StatusCode::BAD_GATEWAY,
                StatusCode::SERVICE_UNAVAILABLE,
                StatusCode::GATEWAY_TIMEOUT,
            ]),
            Condition::UpstreamUnanswered if !profile.requires_key() => statuses.extend(no_response),
            Condition::UpstreamUnreachable
            | Condition::UpstreamHeadTooLarge
            | Condition::UpstreamUnsupported
            | Condition::RequestHeadTooLarge
            | Condition::RequestUnsupported => statuses.push(usual),
            _ => {}
        }
        statuses.sort_unstable();
        statuses.dedup();
        rows.extend(statuses.into_iter().map(|status| profile.refusal(condition, status)));
    }
    rows
}
