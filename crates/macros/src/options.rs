//! The options of the attribute, and how they are parsed.

use std::time::Duration;

use oncegate_core::limits;
use proc_macro2::Span;
use syn::ext::IdentExt as _;
use syn::parse::{Parse, ParseStream};
use syn::punctuated::Punctuated;
use syn::{Error, Expr, ExprLit, Ident, Lit, LitStr, Path, Result, Token, parenthesized};

use crate::template::Template;

/// All options, in the order in which messages list them.
const NAMES: [&str; 16] = [
    "key", "scope", "caller", "engine", "fingerprint", "skip", "retain", "lease", "wait", "on_abandoned",
    "policy", "errors", "attempt", "detached", "in_place", "crate",
];

/// The complete options of the attribute.
pub(crate) struct Options {
    pub(crate) key: KeySource,
    pub(crate) scope: LitStr,
    pub(crate) caller: Option<Expr>,
    pub(crate) engine: Option<Expr>,
    /// The arguments that are compared. Default: all of them.
    pub(crate) compared: ComparedArguments,
    pub(crate) retain: Option<Duration>,
    pub(crate) lease: Option<Duration>,
    pub(crate) wait: Option<Duration>,
    pub(crate) on_abandoned: Option<OnAbandoned>,
    /// The policy that the four options above change.
    pub(crate) policy: Option<Expr>,
    pub(crate) errors: ErrorPolicy,
    /// The name of the attempt in the body.
    pub(crate) attempt: Option<Ident>,
    /// The way in which the body runs. `None`: depends on the types of the arguments.
    pub(crate) run_mode: Option<RunMode>,
    /// The path of the crate `oncegate`.
    pub(crate) krate: Option<Path>,
}

pub(crate) enum KeySource {
    Template(Template),
    Expr(Expr),
}

pub(crate) enum ComparedArguments {
    All,
    Only(Punctuated<Expr, Token![,]>),
    AllBut(Punctuated<Ident, Token![,]>),
}

/// The way in which the body runs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum RunMode {
    /// In a task of its own.
    Detached,
    /// In the caller's task.
    InPlace,
}

#[derive(Clone, Copy)]
pub(crate) enum OnAbandoned {
    Park,
    Reexecute,
}

pub(crate) enum ErrorPolicy {
    Keep,
    Release,
    Unknown,
    /// Any other policy, such as a function from an error to its fate.
    Custom(Box<Expr>),
}

/// The options parsed so far.
#[derive(Default)]
struct ParsedOptions {
    key: Option<KeySource>,
    scope: Option<LitStr>,
    caller: Option<Expr>,
    engine: Option<Expr>,
    fingerprint: Option<Punctuated<Expr, Token![,]>>,
    skip: Option<(Span, Punctuated<Ident, Token![,]>)>,
    retain: Option<Duration>,
    lease: Option<Duration>,
    wait: Option<Duration>,
    on_abandoned: Option<OnAbandoned>,
    policy: Option<Expr>,
    errors: Option<ErrorPolicy>,
    attempt: Option<Ident>,
    run_mode: Option<RunMode>,
    krate: Option<Path>,
}

impl Parse for Options {
    fn parse(input: ParseStream<'_>) -> Result<Self> {
        let mut parsed = ParsedOptions::default();
        let mut seen: Vec<Ident> = Vec::new();
        while !input.is_empty() {
            let name = input.call(Ident::parse_any)?;
            if seen.contains(&name) {
                return Err(Error::new(name.span(), format!("`{name}` is given twice")));
            }
            parsed.option(&name, input)?;
            seen.push(name);
            if !input.is_empty() {
                input.parse::<Token![,]>()?;
            }
        }
        parsed.finish()
    }
}

impl ParsedOptions {
    fn option(&mut self, name: &Ident, input: ParseStream<'_>) -> Result<()> {
        match name.to_string().as_str() {
            "key" => self.key = Some(key(value(name, input)?)?),
            "scope" => self.scope = Some(scope(name, input)?),
            "caller" => self.caller = Some(value(name, input)?),
            "engine" => self.engine = Some(value(name, input)?),
            "fingerprint" => self.fingerprint = Some(list(name, "arguments, or parts of them", input)?),
            "skip" => self.skip = Some((name.span(), list(name, "arguments", input)?)),
            "retain" => {
                self.retain = Some(duration(name, input, limits::MIN_RETENTION, limits::MAX_RETENTION)?);
            }
            "lease" => self.lease = Some(duration(name, input, limits::MIN_LEASE, limits::MAX_LEASE)?),
            "wait" => self.wait = Some(duration(name, input, Duration::ZERO, limits::MAX_LEASE)?),
            "on_abandoned" => self.on_abandoned = Some(on_abandoned(&text(name, input)?)?),
            "policy" => self.policy = Some(value(name, input)?),
            "errors" => self.errors = Some(errors(value(name, input)?)?),
            "attempt" => {
                equals(name, "a name for the `Attempt` in the body", input)?;
                self.attempt = Some(input.parse()?);
            }
            option @ ("detached" | "in_place") => {
                if input.peek(Token![=]) {
                    return Err(input.error(format!("`{option}` takes no value")));
                }
                if self.run_mode.is_some() {
                    return Err(Error::new(
                        name.span(),
                        "`detached` and `in_place` exclude each other: remove one of them",
                    ));
                }
                self.run_mode = Some(if option == "detached" { RunMode::Detached } else { RunMode::InPlace });
            }
            "crate" => {
                equals(name, "the path of the crate `oncegate`", input)?;
                self.krate = Some(input.call(Path::parse_mod_style)?);
            }
            other => {
                let hint = nearest(other, NAMES).map_or_else(
                    || format!("the options are: {}", NAMES.join(", ")),
                    |name| format!("did you mean `{name}`?"),
                );
                return Err(Error::new(name.span(), format!("there is no option `{other}`; {hint}")));
            }
        }
        Ok(())
    }

    fn finish(self) -> Result<Options> {
        let Some(key) = self.key else {
            return Err(missing("key = \"order-{order.id}\"", "the text that identifies a call"));
        };
        let Some(scope) = self.scope else {
            return Err(missing(
                "scope = \"charge\"",
                "the namespace of its keys. Do not change it when the function moves or is renamed",
            ));
        };
        let Some(errors) = self.errors else {
            return Err(missing(
                "errors = …",
                "the rule for its key when it returns an error. \"keep\": later calls get the same error. \"release\": the key \
                 becomes free and the next call runs again; use it only if an error means that nothing took effect. \"unknown\": \
                 the function may have taken effect, so later calls are refused until an operator decides. Or the path of a \
                 `fn(&E) -> ErrorFate`, which decides for each error",
            ));
        };
        let compared = match (self.fingerprint, self.skip) {
            (Some(_), Some((span, _))) => {
                let message = "`fingerprint` lists the values that are compared, `skip` the arguments that are not: use only one";
                return Err(Error::new(span, message));
            }
            (Some(only), None) => ComparedArguments::Only(only),
            (None, Some((_, but))) => ComparedArguments::AllBut(but),
            (None, None) => ComparedArguments::All,
        };
        Ok(Options {
            key,
            scope,
            caller: self.caller,
            engine: self.engine,
            compared,
            retain: self.retain,
            lease: self.lease,
            wait: self.wait,
            on_abandoned: self.on_abandoned,
            policy: self.policy,
            errors,
            attempt: self.attempt,
            run_mode: self.run_mode,
            krate: self.krate,
        })
    }
}

fn missing(option: &str, meaning: &str) -> Error {
    Error::new(Span::call_site(), format!("an idempotent function needs `{option}`: {meaning}"))
}

fn equals(name: &Ident, wanted: &str, input: ParseStream<'_>) -> Result<()> {
    if input.peek(Token![=]) {
        return input.parse::<Token![=]>().map(drop);
    }
    Err(Error::new(name.span(), format!("`{name} = …` needs {wanted}")))
}

fn value(name: &Ident, input: ParseStream<'_>) -> Result<Expr> {
    equals(name, "a value", input)?;
    input.parse()
}

fn text(name: &Ident, input: ParseStream<'_>) -> Result<LitStr> {
    equals(name, "a string in quotes", input)?;
    if !input.peek(LitStr) {
        return Err(input.error(format!("`{name}` takes a string in quotes")));
    }
    input.parse()
}

fn list<T: Parse>(name: &Ident, of: &str, input: ParseStream<'_>) -> Result<Punctuated<T, Token![,]>> {
    if !input.peek(syn::token::Paren) {
        return Err(Error::new(name.span(), format!("`{name}(…)` takes a list of {of}")));
    }
    let content;
    parenthesized!(content in input);
    Punctuated::parse_terminated(&content)
}

fn key(value: Expr) -> Result<KeySource> {
    match value {
        Expr::Lit(ExprLit { lit: Lit::Str(text), .. }) => Template::read(&text).map(KeySource::Template),
        expr => Ok(KeySource::Expr(expr)),
    }
}

fn scope(name: &Ident, input: ParseStream<'_>) -> Result<LitStr> {
    let scope = text(name, input)?;
    if scope.value().is_empty() {
        return Err(Error::new(scope.span(), "the scope is empty: give it a name, such as \"charge\""));
    }
    Ok(scope)
}

fn on_abandoned(text: &LitStr) -> Result<OnAbandoned> {
    match text.value().as_str() {
        "park" => Ok(OnAbandoned::Park),
        "reexecute" => Ok(OnAbandoned::Reexecute),
        "reconcile" => Err(Error::new(
            text.span(),
            "\"reconcile\" is for services that can report the outcome of an attempt: use \"reexecute\", and look for an \
             earlier effect first if `attempt.is_after_abandoned()`",
        )),
        other => Err(Error::new(text.span(), one_of("on_abandoned", other, &["park", "reexecute"]))),
    }
}

fn errors(value: Expr) -> Result<ErrorPolicy> {
    match value {
        Expr::Lit(ExprLit { lit: Lit::Str(text), .. }) => match text.value().as_str() {
            "keep" => Ok(ErrorPolicy::Keep),
            "release" => Ok(ErrorPolicy::Release),
            "unknown" => Ok(ErrorPolicy::Unknown),
            other => Err(Error::new(text.span(), one_of("errors", other, &["keep", "release", "unknown"]))),
        },
        policy => Ok(ErrorPolicy::Custom(Box::new(policy))),
    }
}

fn one_of(option: &str, written: &str, allowed: &[&'static str]) -> String {
    let list: Vec<_> = allowed.iter().map(|name| format!("{name:?}")).collect();
    let hint = nearest(written, allowed.iter().copied())
        .map_or_else(String::new, |name| format!("; did you mean {name:?}?"));
    format!("`{option}` must be one of {}, not {written:?}{hint}", list.join(", "))
}

/// Parses a duration in the format of the configuration: `"500ms"`, `"30s"`, `"5m"`, `"24h"`, `"7d"`.
fn duration(name: &Ident, input: ParseStream<'_>, min: Duration, max: Duration) -> Result<Duration> {
    const ALLOWED: &str =
        "write a number and a unit (ms, s, m, h, d), such as \"500ms\", \"30s\", \"5m\", \"24h\", \"7d\"";
    let literal = text(name, input)?;
    let text = literal.value();
    let fault = |message: String| Error::new(literal.span(), message);
    let (number, unit) = text.split_at(text.bytes().take_while(u8::is_ascii_digit).count());
    let of = match unit {
        "ms" => 1,
        "s" => 1000,
        "m" => 60 * 1000,
        "h" => 60 * 60 * 1000,
        "d" => 24 * 60 * 60 * 1000,
        _ => return Err(fault(format!("{text:?} is not a duration; {ALLOWED}"))),
    };
    let millis = number.parse::<u64>().ok().and_then(|number| number.checked_mul(of));
    let Some(value) = millis.map(Duration::from_millis) else {
        return Err(fault(format!("{text:?} is not a duration; {ALLOWED}")));
    };
    if value < min || value > max {
        return Err(fault(format!("`{name}` is {value:?}; it must be from {min:?} to {max:?}")));
    }
    Ok(value)
}

/// Returns the name that is most similar to the written one, if any is similar.
pub(crate) fn nearest<'a>(written: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    names
        .into_iter()
        .map(|name| (strsim::damerau_levenshtein(written, name), name))
        // One difference in three letters is a typing error. More is another word.
        .filter(|(distance, name)| *distance <= name.len().max(written.len()).div_ceil(3))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, name)| name)
}
