//! The figures of a run, from the ledger and the plan.

use std::collections::{HashMap, HashSet};

use serde::Serialize;

use crate::client::Ending;
use crate::plan::{FaultCounts, Plan};
use crate::service::Charge;

/// The counts of a run while it lasts, and its result when it has ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Figures {
    /// Intents that a client has begun.
    #[serde(skip)]
    pub(crate) begun: u64,
    /// Intents whose clicks have all ended.
    #[serde(skip)]
    pub(crate) ended: u64,
    pub(crate) intents: u64,
    /// Requests sent.
    pub(crate) attempts: u64,
    /// The faults that happened: the planned ones, without those that met no request while the sidecar was down.
    pub(crate) faults: FaultCounts,
    pub(crate) responses_lost: u64,
    pub(crate) charges: u64,
    /// Charges of an intent beyond its first.
    pub(crate) duplicates: u64,
    /// Intents without a charge.
    pub(crate) missing: u64,
    pub(crate) cents_meant: u64,
    pub(crate) cents_charged: u64,
    /// Intents whose customer got two receipts, or one that the ledger does not have.
    pub(crate) contradictions: u64,
    /// Intents whose customer got no receipt.
    pub(crate) unanswered: u64,
    /// Responses that were marked as replays.
    pub(crate) replays: u64,
    pub(crate) refused_in_progress: u64,
    pub(crate) refused_outcome_unknown: u64,
    /// Records that the operator resolved: the charge was in the ledger.
    pub(crate) resolved_completed: u64,
    /// Records that the operator resolved: there was no charge.
    pub(crate) resolved_released: u64,
    pub(crate) sidecar_kills: u64,
    /// The number of payments at the service when the sidecar was killed.
    pub(crate) in_flight_at_kill: Option<usize>,
    /// The work of two sidecars that share a store.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) two_sidecars: Option<TwoSidecars>,
    pub(crate) milliseconds: u64,
}

/// The work of two sidecars that share a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct TwoSidecars {
    /// Requests that reached the one that was killed.
    pub(crate) requests_to_the_killed: u64,
    /// Requests that reached the other one.
    pub(crate) requests_to_the_other: u64,
    /// Replays by one sidecar of requests that the other had executed, even if the client did not get them.
    pub(crate) replayed_by_the_other: u64,
}

impl Figures {
    /// Adds the figures of the ledger and of the customers' receipts.
    pub(crate) fn conclude(&mut self, plan: &Plan, ledger: &[Charge], endings: &[Vec<Ending>]) {
        let mut by_intent: HashMap<&str, HashSet<&str>> = HashMap::new();
        for charge in ledger {
            by_intent.entry(&charge.intent).or_default().insert(&charge.charge);
        }
        for (at, intent) in plan.intents.iter().enumerate() {
            let charges = by_intent.get(intent.name().as_str());
            let endings = endings.get(at).map_or(&[][..], Vec::as_slice);
            let receipts: HashSet<_> = endings.iter().flatten().map(String::as_str).collect();
            let is_unbacked = |receipt| charges.is_none_or(|charges| !charges.contains(receipt));
            self.missing += u64::from(charges.is_none());
            self.contradictions += u64::from(receipts.len() > 1 || receipts.iter().copied().any(is_unbacked));
            self.unanswered += u64::from(endings.is_empty() || endings.iter().any(Option::is_none));
        }
        self.intents = plan.intents.len() as u64;
        self.responses_lost = self.faults.responses_lost();
        self.charges = ledger.len() as u64;
        self.duplicates = (ledger.len() - by_intent.len()) as u64;
        self.cents_meant = plan.cents();
        self.cents_charged = ledger.iter().map(|charge| charge.cents).sum();
    }

    /// Returns true if every intent has exactly one charge, of the right amount, and every customer got its receipt.
    pub(crate) const fn is_clean(&self) -> bool {
        self.charges == self.intents
            && self.duplicates == 0
            && self.missing == 0
            && self.cents_charged == self.cents_meant
            && self.contradictions == 0
            && self.unanswered == 0
    }

    pub(crate) const fn resolved(&self) -> u64 {
        self.resolved_completed + self.resolved_released
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn charge(plan: &Plan, number: usize, charge: &str) -> Charge {
        let intent = &plan.intents[number - 1];
        Charge {
            charge: charge.into(),
            intent: intent.name(),
            customer: intent.customer.clone(),
            cents: intent.cents,
            record: None,
        }
    }

    fn told(charge: &str) -> Vec<Ending> {
        vec![Some(charge.into())]
    }

    fn count(plan: &Plan, ledger: &[Charge], endings: &[Vec<Ending>]) -> Figures {
        let mut figures = Figures::default();
        figures.conclude(plan, ledger, endings);
        figures
    }

    #[test]
    fn one_charge_for_each_intent_is_clean() {
        let plan = Plan::draw(1, 2);
        let ledger = [charge(&plan, 1, "a"), charge(&plan, 2, "b")];
        let figures = count(&plan, &ledger, &[told("a"), told("b")]);
        assert!(figures.is_clean(), "{figures:?}");
    }

    #[test]
    fn every_error_is_counted() {
        let plan = Plan::draw(1, 2);
        let (a, b, c) = (charge(&plan, 1, "a"), charge(&plan, 2, "b"), charge(&plan, 1, "c"));
        let strange = Charge { cents: b.cents + 1, ..b.clone() };
        let two = vec![Some("a".into()), Some("c".into())];
        for (ledger, endings, duplicates, missing, contradictions, unanswered) in [
            (vec![a.clone(), b.clone(), c.clone()], vec![told("a"), told("b")], 1, 0, 0, 0),
            (vec![a.clone(), b.clone(), c.clone()], vec![two, told("b")], 1, 0, 1, 0),
            (vec![a.clone()], vec![told("a"), vec![None]], 0, 1, 0, 1),
            (vec![a.clone(), c], vec![told("a"), told("b")], 1, 1, 1, 0),
            (vec![a.clone(), b.clone()], vec![told("a"), vec![]], 0, 0, 0, 1),
            (vec![a, strange], vec![told("a"), told("b")], 0, 0, 0, 0),
        ] {
            let figures = count(&plan, &ledger, &endings);
            let counted = (figures.duplicates, figures.missing, figures.contradictions, figures.unanswered);
            assert_eq!(counted, (duplicates, missing, contradictions, unanswered));
            assert!(!figures.is_clean());
        }
    }
}
