//! The messages for mistakes, and the places that they point at.

use std::str::FromStr as _;

use proc_macro2::TokenStream;

use crate::expand::idempotent;

const PAY: &str =
    "async fn pay(engine: &Engine, order: Order, note: &str) -> Result<u8, FunctionError<String>> { Ok(1) }";
const GOOD: &str = r#"key = "{order.id}", scope = "pay", errors = "keep""#;

fn tokens(text: &str) -> TokenStream {
    TokenStream::from_str(text).unwrap()
}

/// Returns the message and the source text that it points at, which is empty for the whole attribute.
fn fault(attribute: &str, item: &str) -> (String, String) {
    let error = idempotent(tokens(attribute), tokens(item)).err();
    let error = error.unwrap_or_else(|| panic!("it was accepted: {attribute}"));
    assert_eq!(error.clone().into_iter().count(), 1);
    (error.to_string(), error.span().source_text().unwrap_or_default())
}

fn expanded(attribute: &str, item: &str) -> String {
    idempotent(tokens(attribute), tokens(item)).unwrap().to_string()
}

#[test]
fn a_mistake_in_the_attribute_is_reported_at_its_place() {
    for (attribute, message, at) in [
        (
            r#"scope = "s""#,
            "an idempotent function needs `key = \"order-{order.id}\"`: the text that identifies a call",
            "",
        ),
        (
            r#"key = "{order.id}""#,
            "an idempotent function needs `scope = \"charge\"`: the namespace of its keys. Do not change it when the \
             function moves or is renamed",
            "",
        ),
        (r#"key = "{order.id}", scpoe = "s""#, "there is no option `scpoe`; did you mean `scope`?", "scpoe"),
        (
            "colour",
            "there is no option `colour`; the options are: key, scope, caller, engine, fingerprint, skip, retain, lease, wait, \
             on_abandoned, policy, errors, attempt, detached, in_place, crate",
            "colour",
        ),
        (r#"key = "{order.id}", key = "b""#, "`key` is given twice", "key"),
        ("key", "`key = …` needs a value", "key"),
        ("scope = 5", "`scope` takes a string in quotes", "5"),
        (r#"scope = """#, "the scope is empty: give it a name, such as \"charge\"", r#""""#),
        ("attempt", "`attempt = …` needs a name for the `Attempt` in the body", "attempt"),
        ("detached = true", "`detached` takes no value", "="),
        ("in_place = true", "`in_place` takes no value", "="),
        (
            "detached, in_place",
            "`detached` and `in_place` exclude each other: remove one of them",
            "in_place",
        ),
        (
            r#"key = "{order.id}", scope = "s""#,
            "an idempotent function needs `errors = …`: the rule for its key when it returns an error. \"keep\": later \
             calls get the same error. \"release\": the key becomes free and the next call runs again; use it only if an \
             error means that nothing took effect. \"unknown\": the function may have taken effect, so later calls are \
             refused until an operator decides. Or the path of a `fn(&E) -> ErrorFate`, which decides for each error",
            "",
        ),
        ("skip = note", "`skip(…)` takes a list of arguments", "skip"),
        ("fingerprint", "`fingerprint(…)` takes a list of arguments, or parts of them", "fingerprint"),
        (
            r#"key = "{order.id}", scope = "s", errors = "keep", fingerprint(order), skip(note)"#,
            "`fingerprint` lists the values that are compared, `skip` the arguments that are not: use only one",
            "skip",
        ),
        (
            r#"lease = "soon""#,
            "\"soon\" is not a duration; write a number and a unit (ms, s, m, h, d), such as \"500ms\", \"30s\", \"5m\", \
             \"24h\", \"7d\"",
            "\"soon\"",
        ),
        (r#"lease = "99ms""#, "`lease` is 99ms; it must be from 100ms to 3600s", "\"99ms\""),
        (r#"lease = "61m""#, "`lease` is 3660s; it must be from 100ms to 3600s", "\"61m\""),
        (r#"retain = "401d""#, "`retain` is 34646400s; it must be from 1s to 34560000s", "\"401d\""),
        (r#"wait = "2h""#, "`wait` is 7200s; it must be from 0ns to 3600s", "\"2h\""),
        (
            r#"on_abandoned = "rexecute""#,
            "`on_abandoned` must be one of \"park\", \"reexecute\", not \"rexecute\"; did you mean \"reexecute\"?",
            "\"rexecute\"",
        ),
        (
            r#"on_abandoned = "reconcile""#,
            "\"reconcile\" is for services that can report the outcome of an attempt: use \"reexecute\", and look for an \
             earlier effect first if `attempt.is_after_abandoned()`",
            "\"reconcile\"",
        ),
        (
            r#"errors = "store""#,
            "`errors` must be one of \"keep\", \"release\", \"unknown\", not \"store\"",
            "\"store\"",
        ),
    ] {
        assert_eq!(fault(attribute, PAY), (message.to_owned(), at.to_owned()), "{attribute}");
    }
}

#[test]
fn a_mistake_in_the_key_is_reported() {
    for (key, message) in [
        ("order-{ordr.id}", "there is no argument `ordr`; did you mean `order`?"),
        ("{customer}", "there is no argument `customer`; the arguments are: engine, order, note"),
        ("{self.id}", "this function has no `self`"),
        ("{}", "the key has empty braces: write an argument between them"),
        (
            "{order:?}",
            "`{order:?}` has a format, which a key does not support: a value is written with `Display`",
        ),
        ("{1 + 1}", "`{1 + 1}` is not an argument, a field of one, or a call of a method without arguments"),
        (
            "{order.}",
            "`{order.}` is not a valid expression: unexpected end of input, expected identifier or integer",
        ),
        (
            "order-{order.id",
            "the key \"order-{order.id\" has an unmatched brace: write `{{` or `}}` for a literal one",
        ),
        ("order-}", "the key \"order-}\" has an unmatched brace: write `{{` or `}}` for a literal one"),
        (
            "{{order}}",
            "the key \"{{order}}\" contains no value, so all calls would have the same key: put an argument in braces, \
             or write an expression without quotes",
        ),
    ] {
        let literal = format!("\"{key}\"");
        let attribute = format!("scope = \"s\", errors = \"keep\", key = {literal}");
        assert_eq!(fault(&attribute, PAY), (message.to_owned(), literal), "{key}");
    }
}

#[test]
fn a_wrong_argument_is_reported() {
    for (options, message, at) in [
        ("skip(nte)", "there is no argument `nte`; did you mean `note`?", "nte"),
        (
            "fingerprint(order.id, amount)",
            "there is no argument `amount`; the arguments are: engine, order, note",
            "amount",
        ),
        ("engine = enigne", "there is no argument `enigne`; did you mean `engine`?", "enigne"),
    ] {
        assert_eq!(
            fault(&format!("{GOOD}, {options}"), PAY),
            (message.to_owned(), at.to_owned()),
            "{options}"
        );
    }
    let no_engine = "no engine found: take an argument of type `&Engine`, or name one, for example `engine = self.engine`";
    let none = "async fn pay(order: Order) -> Result<u8, E> { Ok(1) }";
    assert_eq!(fault(GOOD, none), (no_engine.to_owned(), String::new()));
    let two = "async fn pay(a: Engine, b: State<Engine>, order: Order) -> Result<u8, E> { Ok(1) }";
    assert_eq!(
        fault(GOOD, two),
        ("more than one argument is an `Engine`: choose one with `engine = …`".to_owned(), "b".to_owned())
    );
}

#[test]
fn a_wrong_kind_of_function_is_reported() {
    let not_a_result = "an idempotent function must return a `Result`, because some calls get no value: `Result<T, \
                    FunctionError<E>>`, or `Result<T, E>` where `E: From<FunctionError<E>>`";
    for (item, message, at) in [
        (
            "fn pay(order: Order) -> Result<u8, E> { Ok(1) }",
            "an idempotent function must be an `async fn`: it waits for the store before and after its body runs",
            "fn",
        ),
        ("struct Pay;", "`#[idempotent]` needs an `async fn` with a body", "struct"),
        (
            "async fn pay(order: Order) -> Result<u8, E>;",
            "`#[idempotent]` needs an `async fn` with a body",
            "async",
        ),
        ("async fn pay(engine: Engine, order: Order) { }", not_a_result, "pay"),
        ("async fn pay(engine: Engine, order: Order) -> (u8, u8) { (1, 2) }", not_a_result, "(u8, u8)"),
        (
            "fn pay<'life0, 'async_trait>(&'life0 self, order: Order) -> Pin<Box<dyn Future<Output = Result<u8, E>> + \
             Send + 'async_trait>> { Box::pin(async move { Ok(1) }) }",
            "`#[async_trait]` has already rewritten this method: move the body into an `async fn` outside of the trait, put \
             `#[idempotent]` on that function, and call it here",
            "pay",
        ),
        (
            "async extern \"C\" fn pay(order: Order) -> Result<u8, E> { Ok(1) }",
            "an idempotent function must have the Rust ABI: remove `extern`",
            "extern \"C\"",
        ),
    ] {
        assert_eq!(fault(GOOD, item), (message.to_owned(), at.to_owned()), "{item}");
    }
}

#[test]
fn all_arguments_except_the_engine_and_skipped_ones_are_compared() {
    let of = |options: &str, compared: &[&str]| {
        let text = expanded(&format!("{GOOD}{options}"), PAY);
        let list: String =
            compared.iter().map(|value| format!("::oncegate::engine::compared(&{value}), ")).collect();
        assert!(text.contains(&tokens(&format!("&({list})")).to_string()), "{text}");
    };
    of("", &["order", "note"]);
    of(", skip(note)", &["order"]);
    of(", skip(order, note)", &[]);
    of(", fingerprint(order.amount, note.len())", &["order.amount", "note.len()"]);
    of(", fingerprint()", &[]);
}

#[test]
fn the_error_type_of_the_body_follows_from_the_signature() {
    let text = expanded(GOOD, PAY);
    assert!(text.contains(&tokens("-> Result<u8, String> { Ok(1) }").to_string()), "{text}");
    assert!(!text.contains("map_err"), "{text}");
    let other = "async fn pay(engine: &Engine, order: &Order) -> io::Result<u8> { Ok(1) }";
    let text = expanded(GOOD, other);
    assert!(text.contains(&tokens("-> io::Result<u8> { Ok(1) }").to_string()), "{text}");
    assert!(text.contains("map_err"), "{text}");
}

#[test]
fn values_at_a_limit_are_accepted_and_values_beyond_it_refused() {
    for good in [
        "lease = \"100ms\"", "lease = \"1h\"", "retain = \"1s\"", "retain = \"400d\"", "wait = \"0s\"",
        "wait = \"1h\"",
    ] {
        expanded(&format!("{GOOD}, {good}"), PAY);
    }
    for bad in ["lease = \"3601s\"", "retain = \"999ms\"", "retain = \"34560001s\"", "wait = \"3601s\""] {
        fault(&format!("{GOOD}, {bad}"), PAY);
    }
}

#[test]
fn a_body_that_owns_its_arguments_runs_detached() {
    let is_detached = |arguments: &str, option: &str| {
        let engine = if arguments.contains("engine") { "" } else { ", engine = ENGINE.clone()" };
        let item = format!("async fn pay({arguments}) -> Result<u8, E> {{ Ok(1) }}");
        let text =
            expanded(&format!("key = id(), scope = \"pay\", errors = \"keep\"{engine}{option}"), &item);
        match (text.contains(". run ("), text.contains(". run_in_place (")) {
            (true, false) => true,
            (false, true) => false,
            _ => panic!("{text}"),
        }
    };
    for owned in [
        "engine: Engine, order: Order",
        "engine: &Engine, order: Order",
        "State(engine): State<Engine>, Json(order): Json<Order>",
        "engine: Arc<Engine>, orders: Vec<(u8, [String; 2])>",
    ] {
        assert!(is_detached(owned, ""), "{owned}");
        assert!(!is_detached(owned, ", in_place"), "{owned}");
    }
    for borrowed in [
        "engine: &Engine, order: &Order",
        "engine: &mut Engine, order: Order",
        "&self, engine: Engine",
        "self, engine: Engine",
        "engine: Engine, name: Cow<'_, str>",
        "engine: Engine, order: impl Serialize",
        "engine: Engine, order: Box<dyn Order>",
        "engine: Engine, order: (u8, &str)",
        "engine: Engine, place: *const u8",
    ] {
        assert!(!is_detached(borrowed, ""), "{borrowed}");
        assert!(is_detached(borrowed, ", detached"), "{borrowed}");
    }
    let generic = "async fn pay<T: Serialize>(engine: Engine, order: T) -> Result<u8, E> { Ok(1) }";
    assert!(expanded(r#"key = id(), scope = "pay", errors = "keep""#, generic).contains("run_in_place"));
}
