//! The settings that decide which requests are one operation.

use crate::key::KeyFormat;
use crate::settings::{AuthorityRole, Settings};

impl Settings {
    /// The names of the settings by which a request may be another operation under these settings than it was before, or have no
    /// key any more. A retry of a request that was sent before would be executed again, or be refused as another request.
    ///
    /// Additions are left out: a further header field for keys changes nothing for the requests that have one already.
    #[must_use]
    pub fn identity_changes(&self, before: &Self) -> Vec<&'static str> {
        let (now, then) = (&self.profile, &before.profile);
        let hosts = [self.authority, before.authority].contains(&AuthorityRole::Scope);
        // Other formats only refuse keys. These fold the case of letters.
        let case = |format: &KeyFormat| match format {
            KeyFormat::Any | KeyFormat::Pattern(_) => 0,
            KeyFormat::Uuid => 1,
            KeyFormat::Ulid => 2,
        };
        // A request whose record has expired under the shorter one is not known to be late.
        let raises = self.policy.retention() > before.policy.retention();
        let changes = [
            ("retention", now.first_sent_header.is_some() && raises),
            ("scope", format!("{:?}", self.caller) != format!("{:?}", before.caller)),
            ("authority", hosts && self.authority != before.authority),
            ("key-header", lacks(&now.key_headers, &then.key_headers)),
            ("key-query", lacks(&now.key_query, &then.key_query)),
            ("key-member", lacks(&now.key_members, &then.key_members)),
            ("natural-key", format!("{:?}", self.natural_key) != format!("{:?}", before.natural_key)),
            ("protocol", now.protocol != then.protocol),
            ("run-member", now.run_members != then.run_members),
            ("read-only-tools, intent-tools", self.tools != before.tools),
            ("key-syntax", now.grammar.syntax != then.grammar.syntax),
            ("key-format", case(&now.grammar.format) != case(&then.grammar.format)),
            ("key-scope", now.key_scope != then.key_scope),
            ("key-scope-header", now.key_scope_headers != then.key_scope_headers),
            ("methods", lacks(&now.methods, &then.methods)),
            ("trailing-slash", self.trailing_slash != before.trailing_slash),
            ("path-case", self.path_case != before.path_case),
            ("shadow", self.is_shadow != before.is_shadow),
            (
                "fingerprint.*",
                (&now.fingerprint, now.body_comparison) != (&then.fingerprint, then.body_comparison)
                    || self.fingerprint_headers != before.fingerprint_headers,
            ),
        ];
        changes.into_iter().filter(|(_, has_changed)| *has_changed).map(|(name, _)| name).collect()
    }
}

fn lacks<T: PartialEq>(now: &[T], before: &[T]) -> bool {
    before.iter().any(|own| !now.contains(own))
}

#[cfg(test)]
mod tests {
    use http::Method;
    use http::header::HeaderName;
    use oncegate_core::NaturalKey;

    use super::*;
    use crate::key::KeySyntax;
    use crate::profile::{BodyComparison, KeyScope, Profile};
    use crate::scope::CallerScope;

    #[test]
    fn a_setting_that_makes_keys_new_is_named_and_others_are_not() {
        let of = |change: fn(Settings) -> Settings| {
            change(Settings::default()).identity_changes(&Settings::default())
        };
        let natural = |settings: Settings| {
            settings.with_natural_key(NaturalKey::new(vec!["/cart".parse().unwrap()]).unwrap())
        };
        assert_eq!(of(|settings| settings), [""; 0]);
        assert_eq!(of(|settings| settings.with_required_key(true)), [""; 0]);
        assert_eq!(of(|settings| settings.with_caller(CallerScope::single_tenant())), ["scope"]);
        assert_eq!(of(|settings| settings.with_authority(AuthorityRole::Scope)), ["authority"]);
        assert_eq!(of(|settings| settings.with_authority(AuthorityRole::Ignored)), [""; 0]);
        assert_eq!(of(natural), ["natural-key"]);
        assert_eq!(of(|settings| settings.with_key_scope(KeyScope::Caller)), ["key-scope"]);
        assert_eq!(of(|settings| settings.with_key_syntax(KeySyntax::Raw)), ["key-syntax"]);
        assert_eq!(of(|settings| settings.with_shadow(true)), ["shadow"]);
        assert_eq!(of(|settings| settings.with_key_format(KeyFormat::Uuid)), ["key-format"]);
        let bounded = |settings: Settings| settings.with_key_format(KeyFormat::pattern(".{9}").unwrap());
        assert_eq!(of(bounded), [""; 0]);
        assert_eq!(of(|settings| settings.with_methods(vec![Method::POST]).unwrap()), ["methods"]);
        assert_eq!(of(|settings| settings.with_body_comparison(BodyComparison::Raw)), ["fingerprint.*"]);
        let own = HeaderName::from_static("idempotency-key");
        let fields = |names: &[&HeaderName]| {
            Settings::default().with_key_headers(names.iter().map(|name| (*name).clone())).unwrap()
        };
        let other = HeaderName::from_static("x-key");
        assert_eq!(fields(&[&other, &own]).identity_changes(&Settings::default()), [""; 0]);
        assert_eq!(fields(&[&other]).identity_changes(&Settings::default()), ["key-header"]);
        let dated = |retention| {
            let policy = oncegate_engine::Policy::default().with_retention(retention).unwrap();
            Settings::new(Profile::named("oasis").unwrap()).with_policy(policy)
        };
        let [short, long] = [60, 61].map(|seconds| dated(std::time::Duration::from_secs(seconds)));
        assert_eq!(
            (long.identity_changes(&short), short.identity_changes(&long)),
            (vec!["retention"], vec![])
        );
        let stripe = Settings::new(Profile::named("stripe").unwrap());
        let expected = ["key-syntax", "key-scope", "key-scope-header", "methods"];
        assert_eq!(stripe.identity_changes(&Settings::default()), expected);
    }
}
