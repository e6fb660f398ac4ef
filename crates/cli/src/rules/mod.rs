//! The rules for keys of an API, made from its configuration: for programs as a JSON descriptor, for people as a page.

mod descriptor;
mod document;
pub(crate) mod openapi;
mod page;
mod recipe;
mod refusals;
mod retry_signal;
mod snippets;

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::builder::NonEmptyStringValueParser;
use clap::{Args, ValueEnum};
use http::Uri;
use oncegate_http::Condition;

pub(crate) use self::descriptor::PublishedRules;
use self::descriptor::Rules;
pub(crate) use self::openapi::{OpenapiArgs, run as run_openapi};
use crate::config::{Draft, Problem, ProxyArgs};

/// Prints the rules for keys.
#[derive(Args, Debug)]
pub(crate) struct RulesArgs {
    #[command(flatten)]
    settings: ProxyArgs,
    /// The form of the output: a page for the customers of the API, or the descriptor for programs
    #[arg(long, value_enum, default_value_t = Format::Markdown, help_heading = "Output")]
    format: Format,
    /// Writes a page for each problem into this directory instead, NAME.html, for a problem-base-url that ends with a slash
    #[arg(long, value_name = "DIR", conflicts_with = "format", help_heading = "Output")]
    problem_pages: Option<PathBuf>,
    /// The name of the API, for the title of the page
    #[arg(long, value_name = "NAME", default_value = "this API", value_parser = NonEmptyStringValueParser::new(), help_heading = "Output")]
    api: String,
    /// The address of the API, for the programs on the page
    #[arg(long, value_name = "URL", default_value = "https://api.example.com", value_parser = server, help_heading = "Output")]
    server: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    Markdown,
    Html,
    Json,
}

/// Prints the rules. The exit code is 1 if the configuration has errors.
pub(crate) fn run(args: &RulesArgs) -> ExitCode {
    let Draft { config, problems, .. } = Draft::read(&args.settings, std::env::vars_os());
    let Some(config) = config else {
        complain_of(&problems);
        return ExitCode::FAILURE;
    };
    if let Some(directory) = &args.problem_pages {
        return match write_problems(directory) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                complain!("error: {}: {error}", directory.display());
                ExitCode::FAILURE
            }
        };
    }
    let rules = Rules::of(&config);
    let text = match args.format {
        Format::Markdown => page::markdown(&page::page(&rules, &args.api, &args.server)),
        Format::Html => page::html(&page::page(&rules, &args.api, &args.server)),
        Format::Json => format!("{:#}\n", rules.json()),
    };
    print(&text);
    ExitCode::SUCCESS
}

/// An address without a query, and without a slash at its end.
fn server(text: &str) -> Result<String, String> {
    let is_address = |url: &Uri| {
        matches!(url.scheme_str(), Some("http" | "https"))
            && url.authority().is_some()
            && url.query().is_none()
    };
    let address = text.parse().ok().filter(is_address).filter(|_| !text.contains('#'));
    address
        .map(|_| text.trim_end_matches('/').to_owned())
        .ok_or("write an address such as https://api.example.com".to_owned())
}

fn complain_of(problems: &[Problem]) {
    for problem in problems.iter().filter(|problem| problem.is_error()) {
        complain!("error: {problem}");
    }
}

fn print(text: &str) {
    let _gone = io::stdout().lock().write_all(text.as_bytes()); // the reader may have left
}

fn write_problems(directory: &Path) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    Condition::ALL.into_iter().try_for_each(|condition| {
        let page = page::html(&page::of_problem(1, condition));
        fs::write(directory.join(format!("{condition}.html")), page)
    })
}
