//! Every case at every door on every store, each as a test of its own: `sidecar/embedded/C71-mismatch-while-in-flight`.

use libtest_mimic::{Arguments, Failed, Trial};
use oncegate_cases::table::cases;
use oncegate_cases::world::{Door, Kind};

fn main() {
    if std::env::var_os(oncegate_cases::CHILD).is_some() {
        oncegate_cases::child_main();
        return;
    }
    let mut trials = vec![
        Trial::test("table/names-are-not-used-twice", names_are_not_used_twice),
        Trial::test("table/everything-is-covered", everything_is_covered),
    ];
    for case in cases() {
        // A test that lives as long as the program, so that it can be run from any thread.
        let case: &'static _ = Box::leak(Box::new(case));
        for door in Door::ALL {
            for kind in Kind::ALL {
                if case.reason_against(door, kind).is_none() {
                    let run = move || {
                        case.run(door, kind);
                        Ok(())
                    };
                    trials.push(Trial::test(case.name(door, kind), run));
                }
            }
        }
    }
    let mut arguments = Arguments::from_args();
    // Most of them wait most of the time, for a lease or a retention to end.
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get);
    arguments.test_threads.get_or_insert(4 * cores);
    let conclusion = libtest_mimic::run(&arguments, trials);
    oncegate_cases::places::stop_servers();
    conclusion.exit();
}

fn names_are_not_used_twice() -> Result<(), Failed> {
    let mut seen = std::collections::HashSet::new();
    let twice: Vec<_> = cases().iter().map(|case| case.id).filter(|id| !seen.insert(*id)).collect();
    if twice.is_empty() { Ok(()) } else { Err(format!("used twice: {twice:?}").into()) }
}

fn everything_is_covered() -> Result<(), Failed> {
    let gaps = oncegate_cases::coverage::gaps();
    if gaps.is_empty() { Ok(()) } else { Err(format!("not covered: {gaps:#?}").into()) }
}
