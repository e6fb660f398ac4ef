//! The refusals that requests of a route can get.

use http::StatusCode;
use oncegate_core::OnAbandoned;

use crate::profile::ServerErrors;
use crate::refusal::Condition;
use crate::scope::CallerPart;
use crate::settings::{AuthorityRole, CompletedBy, Settings};

impl Settings {
    /// The refusals that the layer can give to a request with a covered method: the condition and the status, in the order of
    /// [`Condition::ALL`]. Those of a proxy around the layer are not among them.
    #[must_use]
    pub fn possible_refusals(&self) -> Vec<(Condition, StatusCode)> {
        let rows = Condition::ALL.into_iter().flat_map(|condition| {
            let statuses = match condition {
                Condition::ScopeUnavailable => self.scope_statuses(),
                _ if self.can_refuse(condition) => vec![self.profile.refusal_status(condition)],
                _ => Vec::new(),
            };
            statuses.into_iter().map(move |status| (condition, status))
        });
        rows.collect()
    }

    fn scope_statuses(&self) -> Vec<StatusCode> {
        let usual = self.profile.refusal_status(Condition::ScopeUnavailable);
        self.caller.unavailable_statuses(usual)
    }

    fn can_refuse(&self, condition: Condition) -> bool {
        let is_upstream = self.completed_by == CompletedBy::Upstream;
        let releases_errors = self.profile.server_errors == ServerErrors::Release;
        match condition {
            Condition::KeyMissing => self.profile.require_key,
            Condition::KeyExpired => self.profile.first_sent_header.is_some(),
            Condition::RateLimited => !self.rate_limits.is_empty(),
            Condition::ScopeNotSet => self.caller.is_default(),
            Condition::VerificationUnavailable => {
                self.caller.parts().any(|part| matches!(part, CallerPart::Jwt(_)))
            }
            Condition::HostDiffers => self.authority == AuthorityRole::Compared,
            Condition::ReplayDenied | Condition::AuthorizationUnavailable => self.authorize.is_some(),
            Condition::ResponseAwaited => self.recovers_responses(),
            // A record that the operation completes itself always tells the outcome.
            Condition::OutcomeUnknown => !is_upstream && self.may_not_know_the_outcome(),
            Condition::HandlerFailed => is_upstream || releases_errors,
            Condition::KeyInvalid
            | Condition::KeyReused
            | Condition::RequestTooLarge
            | Condition::RequestIncomplete
            | Condition::RequestMalformed
            | Condition::Overloaded
            | Condition::StoreUnavailable
            | Condition::RequestInProgress
            | Condition::ReplayUnavailable
            | Condition::ResponseSealed
            | Condition::RecordCorrupt => true,
            // The scope decides.
            Condition::ScopeUnavailable
            // Its method is not covered.
            | Condition::KeyUnsupported
            // A proxy says these.
            | Condition::UpstreamUnreachable
            | Condition::UpstreamUnanswered
            | Condition::UpstreamHeadTooLarge
            | Condition::UpstreamUnsupported
            | Condition::RequestHeadTooLarge
            | Condition::RequestUnsupported => false,
        }
    }

    /// Returns true if an operation can end without a known outcome.
    fn may_not_know_the_outcome(&self) -> bool {
        self.profile.server_errors == ServerErrors::Replay
            || self.policy.on_abandoned() != OnAbandoned::Reexecute
    }
}

#[cfg(test)]
mod tests {
    use http::header::{AUTHORIZATION, HeaderName};

    use super::*;
    use crate::profile::Profile;
    use crate::scope::CallerScope;

    fn statuses(settings: &Settings, condition: Condition) -> Vec<u16> {
        let rows = settings.possible_refusals().into_iter().filter(|(own, _)| *own == condition);
        rows.map(|(_, status)| status.as_u16()).collect()
    }

    #[test]
    fn the_refusals_of_a_request_without_a_caller() {
        let tenant = || CallerScope::required_header(HeaderName::from_static("x-tenant"));
        for (scope, expected) in [
            (CallerScope::single_tenant(), &[][..]),
            (CallerScope::default(), &[400]),
            (CallerScope::header(AUTHORIZATION), &[400]),
            (CallerScope::required_header(AUTHORIZATION), &[400, 401]),
            (tenant(), &[400]),
            (tenant().and(CallerScope::required_header(AUTHORIZATION)), &[400, 401]),
            (CallerScope::path_parameter("tenant").unwrap(), &[]),
            (CallerScope::host(), &[400]),
        ] {
            let is_default = scope.is_default();
            let settings = Settings::default().with_caller(scope);
            assert_eq!(statuses(&settings, Condition::ScopeUnavailable), expected, "{settings:?}");
            assert_eq!(statuses(&settings, Condition::ScopeNotSet).len(), usize::from(is_default));
        }
    }

    #[test]
    fn the_refusals_follow_the_settings() {
        let usual = Settings::default();
        let stripe = Settings::new(Profile::named("stripe").unwrap());
        let oasis = Settings::new(Profile::named("oasis").unwrap());
        let ignored = Settings::default().with_authority(AuthorityRole::Ignored);
        let upstream = Settings::default().with_upstream_completion();
        for (settings, condition, expected) in [
            (&usual, Condition::KeyMissing, &[][..]),
            (&usual.clone().with_required_key(true), Condition::KeyMissing, &[400]),
            (&usual, Condition::HostDiffers, &[422]),
            (&stripe, Condition::HostDiffers, &[400]),
            (&ignored, Condition::HostDiffers, &[]),
            (&usual, Condition::KeyExpired, &[]),
            (&oasis, Condition::KeyExpired, &[412]),
            (&usual, Condition::RateLimited, &[]),
            (&usual, Condition::OutcomeUnknown, &[500]),
            (&upstream, Condition::OutcomeUnknown, &[]),
            (&usual, Condition::HandlerFailed, &[]),
            (&oasis, Condition::HandlerFailed, &[500]),
            (&upstream, Condition::HandlerFailed, &[500]),
            (&usual, Condition::UpstreamUnreachable, &[]),
        ] {
            assert_eq!(statuses(settings, condition), expected, "{condition}");
        }
    }
}
