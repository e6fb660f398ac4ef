//! Contenders take turns, and are set against the first of their group in the same round.

use std::fmt::Write as _;
use std::process::Command;

use super::ROUNDS;
use super::load::{Figure, median, wrk_command, wrk_on};
use super::servers::{Server, program};
use crate::run::{Result, output, run as command};

/// One thing that is measured.
pub(super) struct Contender {
    name: String,
    /// `true` if the following rows, up to the next such row, are compared with this one.
    reference: bool,
    measure: Box<dyn Fn(usize) -> Result<Figure>>,
}

impl Contender {
    /// A server under a load of wrk, compared with the last reference before it.
    pub(super) fn new(name: &str, server: &Server, load: &'static str) -> Result<Self> {
        Self::with_cookies(name, server, load, String::new())
    }

    /// The value with which others are compared.
    pub(super) fn reference(name: &str, server: &Server, load: &'static str) -> Result<Self> {
        Ok(Self { reference: true, ..Self::new(name, server, load)? })
    }

    /// One whose requests carry one cookie of several, which are separated by semicolons.
    pub(super) fn with_cookies(
        name: &str,
        server: &Server,
        load: &'static str,
        cookies: String,
    ) -> Result<Self> {
        let (url, process) = (server.url(), server.process());
        if load == "replay" {
            // The first request under each of the 512 keys has to be over before replays are measured.
            output(wrk_command(&url, load, 16, 5, 0).env("COOKIES", &cookies))?;
        }
        let measure = move |round| wrk_on(process, &url, load, &cookies, round);
        Ok(Self::by(name, false, measure))
    }

    /// One that is measured in a way of its own.
    pub(super) fn by(
        name: &str,
        reference: bool,
        measure: impl Fn(usize) -> Result<Figure> + 'static,
    ) -> Self {
        Self { name: name.to_owned(), reference, measure: Box::new(measure) }
    }
}

/// Measures all contenders in turn, several times.
pub(super) fn table(title: &str, contenders: Vec<Contender>) -> Result<String> {
    // On a virtual machine the first touch of a page of memory may cost the host twenty times what it costs later. A
    // program that has run for a while reuses memory; one that has just started would be measured by its host.
    command(Command::new(program("oncegate-benches")).args(["touch", "6"]))?;
    let mut figures: Vec<Vec<Figure>> = contenders.iter().map(|_| Vec::new()).collect();
    for round in 0..ROUNDS {
        for (place, contender) in figures.iter_mut().zip(&contenders) {
            let figure = (contender.measure)(round)?;
            eprintln!("  round {round}: {}: {:.0} per second", contender.name, figure.per_second);
            place.push(figure);
        }
    }
    let mut text = format!(
        "{title}\n\n| | requests per s | of the reference | range | p99, ms | CPU, µs |\n|---|---|---|---|---|---|\n"
    );
    let mut reference = &figures[0];
    for (contender, own) in contenders.iter().zip(&figures) {
        if contender.reference {
            reference = own;
        }
        let ratios: Vec<f64> =
            own.iter().zip(reference).map(|(own, first)| own.per_second / first.per_second).collect();
        let low = ratios.iter().copied().fold(f64::INFINITY, f64::min);
        let high = ratios.iter().copied().fold(0.0, f64::max);
        let rate = median(own.iter().map(|figure| figure.per_second).collect());
        let p99 = median(own.iter().map(|figure| figure.p99_micros).collect()) / 1000.0;
        let (ratio, name) = (median(ratios), &contender.name);
        let name = if contender.reference { format!("**{name}**") } else { name.clone() };
        let cpu = median(own.iter().map(|figure| figure.cpu_micros).collect());
        let known = |figure: f64, digits| {
            if figure.is_nan() { "–".to_owned() } else { format!("{figure:.digits$}") }
        };
        let (p99, cpu) = (known(p99, 2), known(cpu, 1));
        let _infallible =
            writeln!(text, "| {name} | {rate:.0} | {ratio:.2} | {low:.2}–{high:.2} | {p99} | {cpu} |");
    }
    Ok(text)
}
