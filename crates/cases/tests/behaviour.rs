//! All cases with every deployment on every store, each as its own test: `sidecar/embedded/mismatch-while-in-flight`.

use libtest_mimic::{Arguments, Failed, Trial};
use oncegate_cases::table::cases;
use oncegate_cases::world::{Deployment, StoreKind};

fn main() {
    if std::env::var_os(oncegate_cases::CHILD).is_some() {
        oncegate_cases::child_main();
        return;
    }
    let mut trials = vec![
        Trial::test("table/names-are-unique", names_are_unique),
        Trial::test("table/every-rule-of-the-protocol-has-a-case", every_rule_has_a_case),
    ];
    for case in cases() {
        // A test may run on any thread until the program ends.
        let case: &'static _ = Box::leak(Box::new(case));
        for deployment in Deployment::ALL {
            for store in StoreKind::ALL {
                if case.reason_against(deployment, store).is_none() {
                    let run = move || {
                        case.run(deployment, store);
                        Ok(())
                    };
                    trials.push(Trial::test(case.test_name(deployment, store), run));
                }
            }
        }
    }
    let mut arguments = Arguments::from_args();
    // Most cases wait most of the time, for a lease or a retention to end.
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get);
    arguments.test_threads.get_or_insert(4 * cores);
    let conclusion = libtest_mimic::run(&arguments, trials);
    oncegate_cases::databases::stop_servers();
    conclusion.exit();
}

fn names_are_unique() -> Result<(), Failed> {
    let mut seen = std::collections::HashSet::new();
    let twice: Vec<_> = cases().iter().map(|case| case.name).filter(|name| !seen.insert(*name)).collect();
    if twice.is_empty() { Ok(()) } else { Err(format!("used twice: {twice:?}").into()) }
}

fn every_rule_has_a_case() -> Result<(), Failed> {
    let gaps = oncegate_cases::coverage::gaps();
    if gaps.is_empty() { Ok(()) } else { Err(format!("not covered: {gaps:#?}").into()) }
}
