//! The commands of developers and of continuous integration.
//!
//! ```text
//! cargo xtask test     every test; installs what it needs. Arguments go to `cargo test`, one program after the other
//! cargo xtask test --quick   the tests that need no server: units, and every case on the stores of one process
//! cargo xtask libraries   what the cases of the libraries in other languages need: packages, and programs from their sources
//! cargo xtask tidy     the rules that no compiler checks: dependencies between crates, words, links, limits
//! cargo xtask bench    the benchmarks; prints a table of ratios. `bench probes` makes docs/reference/peers.md
//! cargo xtask book     the documentation as a book in the target directory
//! cargo xtask picture  the picture in the README, from a run of the demo
//! cargo xtask manifests   the files in `deploy`, checked by the tools that read them; installs what it needs
//! cargo xtask dist     what is published: archive, Debian package, list of parts, checksums. `dist PROFILE` for another profile
//! ```

mod bench;
mod book;
mod dist;
mod language;
mod manifests;
mod picture;
mod run;
mod suites;
mod test;
mod tidy;
mod valkey;

use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let result = match arguments.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["test", rest @ ..] => test::run(rest),
        ["libraries"] => test::prepare_libraries(),
        ["tidy"] => tidy::run(),
        ["book"] => book::run(),
        ["picture"] => picture::run(),
        ["manifests"] => manifests::run_all(),
        ["dist"] => dist::dist("dist"),
        ["dist", profile] => dist::dist(profile),
        ["bench", rest @ ..] => bench::run(rest),
        _ => Err(
            "usage: cargo xtask test [--quick | FILTER] | libraries | tidy | book | picture | manifests | dist [PROFILE] | bench [NAME]".into(),
        ),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error}");
            ExitCode::FAILURE
        }
    }
}
