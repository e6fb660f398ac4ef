//! All cases with every deployment on every store, each as its own test: `sidecar/embedded/mismatch-while-in-flight`.

use libtest_mimic::{Arguments, Failed, Trial};
use oncegate_cases::library::Library;
use oncegate_cases::table::cases;
use oncegate_cases::together::{STORES, scenarios};
use oncegate_cases::world::{Deployment, StoreKind};

fn main() {
    if std::env::var_os(oncegate_cases::CHILD).is_some() {
        oncegate_cases::child_main();
        return;
    }
    let is_list = std::env::args().any(|argument| argument == "--list");
    if !is_list {
        print!("{}", oncegate_cases::coverage::summary_of_libraries());
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
    for library in Library::ALL {
        trials.push(Trial::test(format!("{}/settings/refused", library.name()), move || {
            refuses_settings(library)
        }));
        if std::env::var_os("ONCEGATE_CASES_EXCEPTIONS").is_some() {
            for (name, why) in oncegate_cases::coverage::exceptions(library) {
                let name_of_test = format!("exceptions/{}/{name}", library.name());
                trials.push(Trial::test(name_of_test, move || is_no_longer_excepted(library, name, why)));
            }
        }
    }
    for scenario in scenarios() {
        let scenario: &'static _ = Box::leak(Box::new(scenario));
        for store in STORES {
            let run = move || {
                scenario.run(store);
                Ok(())
            };
            trials.push(Trial::test(format!("together/{}/{}", store.name(), scenario.name), run));
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

/// A setting that a library accepts is no reason not to run a case on it.
fn refuses_settings(library: Library) -> Result<(), Failed> {
    let accepted = library.unexpected_settings();
    if accepted.is_empty() { Ok(()) } else { Err(format!("it accepts: {accepted:?}").into()) }
}

/// An exception that passes is none.
fn is_no_longer_excepted(library: Library, name: &str, why: &str) -> Result<(), Failed> {
    let case = cases().into_iter().find(|case| case.name == name).expect("a case");
    let run = || case.run(Deployment::Library(library), StoreKind::Redis);
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)) {
        Err(_) => Ok(()),
        Ok(()) => Err(format!("it passes, although {why:?}").into()),
    }
}
