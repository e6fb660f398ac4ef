//! The policies for calls of tools, by the names of the tools.

use oncegate_engine::ConfigError;

/// The treatment of calls of a tool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum ToolPolicy {
    /// The tool has no effect: its calls pass, with a key or without one.
    ReadOnly,
    /// The client names the key of a call.
    ByKey,
    /// The key of a call is built from its intent: the tool, its arguments and the run of the agent. A key that the client
    /// chose is ignored.
    ByIntent,
}

/// The policies for calls of tools. A tool that is not named is [`ByKey`](ToolPolicy::ByKey).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ToolPolicies {
    rules: Vec<Rule>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Rule {
    /// The name, or the beginning of it.
    name: String,
    is_beginning: bool,
    policy: ToolPolicy,
}

impl ToolPolicies {
    /// Sets the policy for the tools that one of these patterns matches: a name, or the beginning of one and `*`.
    ///
    /// The longest pattern that matches a tool counts, and a whole name counts as longer than a beginning.
    ///
    /// # Errors
    /// If a pattern is empty, has a `*` that is not at its end, or has another policy already.
    pub fn with(
        mut self,
        policy: ToolPolicy,
        patterns: impl IntoIterator<Item = impl AsRef<str>>,
    ) -> Result<Self, ConfigError> {
        for pattern in patterns {
            let pattern = pattern.as_ref();
            let (name, is_beginning) = match pattern.strip_suffix('*') {
                Some(beginning) => (beginning, true),
                None => (pattern, false),
            };
            if pattern.is_empty() || name.contains('*') {
                return Err(ConfigError::new(format!(
                    "{pattern:?} is not the name of a tool; write a name, or the beginning of names with a star, such as \"get_*\""
                )));
            }
            match self.rules.iter().find(|own| own.name == name && own.is_beginning == is_beginning) {
                Some(own) if own.policy != policy => {
                    return Err(ConfigError::new(format!(
                        "the tools {pattern:?} are both in read-only-tools and in intent-tools"
                    )));
                }
                Some(_) => {}
                None => self.rules.push(Rule { name: name.to_owned(), is_beginning, policy }),
            }
        }
        Ok(self)
    }

    /// The policy for a tool.
    #[must_use]
    pub fn of(&self, tool: &str) -> ToolPolicy {
        let matching = self.rules.iter().filter(|rule| match rule.is_beginning {
            true => tool.starts_with(&rule.name),
            false => tool == rule.name,
        });
        let longest = matching.max_by_key(|rule| (!rule.is_beginning, rule.name.len()));
        longest.map_or(ToolPolicy::ByKey, |rule| rule.policy)
    }

    /// The patterns of the tools with this policy, as they were written.
    pub fn patterns(&self, policy: ToolPolicy) -> impl Iterator<Item = String> {
        let rules = self.rules.iter().filter(move |rule| rule.policy == policy);
        rules.map(|rule| format!("{}{}", rule.name, if rule.is_beginning { "*" } else { "" }))
    }

    /// Returns true if the key of some calls is built from their intent.
    #[must_use]
    pub fn has_intents(&self) -> bool {
        self.rules.iter().any(|rule| rule.policy == ToolPolicy::ByIntent)
    }

    /// Returns true if no tool has a policy.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_pattern_counts() {
        let policies = ToolPolicies::default()
            .with(ToolPolicy::ReadOnly, ["get_*", "search"])
            .and_then(|own| own.with(ToolPolicy::ByIntent, ["*", "get_and_delete", "get_and_*"]))
            .unwrap();
        for (tool, policy) in [
            ("get_order", ToolPolicy::ReadOnly),
            ("get_", ToolPolicy::ReadOnly),
            ("search", ToolPolicy::ReadOnly),
            ("searches", ToolPolicy::ByIntent),
            ("get_and_delete", ToolPolicy::ByIntent),
            ("get_and_put", ToolPolicy::ByIntent),
            ("pay", ToolPolicy::ByIntent),
            ("", ToolPolicy::ByIntent),
        ] {
            assert_eq!(policies.of(tool), policy, "{tool}");
        }
        assert_eq!(ToolPolicies::default().of("pay"), ToolPolicy::ByKey);
    }

    #[test]
    fn patterns_are_shown_as_they_were_written() {
        let policies = ToolPolicies::default().with(ToolPolicy::ReadOnly, ["get_*", "search"]).unwrap();
        let patterns: Vec<_> = policies.patterns(ToolPolicy::ReadOnly).collect();
        assert_eq!(patterns, ["get_*", "search"]);
        assert_eq!(policies.patterns(ToolPolicy::ByIntent).count(), 0);
    }

    #[test]
    fn patterns_that_mean_nothing_are_refused() {
        for pattern in ["", "a*b", "**"] {
            assert!(ToolPolicies::default().with(ToolPolicy::ReadOnly, [pattern]).is_err(), "{pattern}");
        }
        let one = ToolPolicies::default().with(ToolPolicy::ReadOnly, ["a", "a"]).unwrap();
        assert!(one.clone().with(ToolPolicy::ByIntent, ["a"]).is_err());
        assert!(one.with(ToolPolicy::ByIntent, ["a*"]).is_ok());
    }
}
