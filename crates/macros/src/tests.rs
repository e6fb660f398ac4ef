//! What is said of a mistake, and where it points.

use std::str::FromStr as _;

use proc_macro2::TokenStream;

use crate::expand::idempotent;

const PAY: &str =
    "async fn pay(engine: &Engine, order: Order, note: &str) -> Result<u8, FunctionError<String>> { Ok(1) }";
const GOOD: &str = r#"key = "{order.id}", scope = "pay", errors = "store""#;

fn tokens(text: &str) -> TokenStream {
    TokenStream::from_str(text).unwrap()
}

/// What is said, and the text that it points at; nothing where it points at the whole attribute.
fn fault(attribute: &str, item: &str) -> (String, String) {
    let error = idempotent(tokens(attribute), tokens(item)).err();
    let error = error.unwrap_or_else(|| panic!("it was taken: {attribute}"));
    assert_eq!(error.clone().into_iter().count(), 1);
    (error.to_string(), error.span().source_text().unwrap_or_default())
}

fn expanded(attribute: &str, item: &str) -> String {
    idempotent(tokens(attribute), tokens(item)).unwrap().to_string()
}

#[test]
fn a_mistake_in_the_attribute_is_named_where_it_stands() {
    for (attribute, message, at) in [
        (
            r#"scope = "s""#,
            "an idempotent function needs `key = \"order-{order.id}\"`: what tells one call from another",
            "",
        ),
        (
            r#"key = "{order.id}""#,
            "an idempotent function needs `scope = \"charge\"`: what its keys are unique within. It stays as it is when \
             the function moves or gets another name",
            "",
        ),
        (r#"key = "{order.id}", scpoe = "s""#, "there is no option `scpoe`; did you mean `scope`?", "scpoe"),
        (
            "colour",
            "there is no option `colour`; there are: key, scope, caller, engine, fingerprint, skip, retain, lease, wait, \
             on_abandoned, policy, errors, attempt, detached, in_place, crate",
            "colour",
        ),
        (r#"key = "{order.id}", key = "b""#, "`key` is there twice", "key"),
        ("key", "`key = …` needs a value", "key"),
        ("scope = 5", "`scope` takes a text in quotes", "5"),
        (r#"scope = """#, "the scope is empty", r#""""#),
        ("attempt", "`attempt = …` needs the name that the body has for its attempt", "attempt"),
        ("detached = true", "`detached` stands alone", "="),
        ("in_place = true", "`in_place` stands alone", "="),
        ("detached, in_place", "`detached` and `in_place` are opposites", "in_place"),
        (
            r#"key = "{order.id}", scope = "s""#,
            "an idempotent function needs `errors = …`: what becomes of its key when it returns an error. \"store\": later \
             calls get the same error. \"release\": the key is free and the next call runs again, only if an error means that \
             nothing took effect. \"unknown\": it may have taken effect, so later calls are refused until an operator says. \
             Or the path of a `fn(&E) -> ErrorFate`, which decides for each error",
            "",
        ),
        ("skip = note", "`skip(…)` takes a list of arguments", "skip"),
        ("fingerprint", "`fingerprint(…)` takes a list of arguments, or parts of them", "fingerprint"),
        (
            r#"key = "{order.id}", scope = "s", errors = "store", fingerprint(order), skip(note)"#,
            "`fingerprint` says what is compared, and `skip` what is not: one of them is enough",
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
            "`on_abandoned` is one of \"park\", \"reexecute\", not \"rexecute\"; did you mean \"reexecute\"?",
            "\"rexecute\"",
        ),
        (
            r#"on_abandoned = "reconcile""#,
            "a function is not asked what became of it: take \"reexecute\", and look first where \
             `attempt.is_after_abandoned()`",
            "\"reconcile\"",
        ),
        (
            r#"errors = "keep""#,
            "`errors` is one of \"store\", \"release\", \"unknown\", not \"keep\"",
            "\"keep\"",
        ),
    ] {
        assert_eq!(fault(attribute, PAY), (message.to_owned(), at.to_owned()), "{attribute}");
    }
}

#[test]
fn a_mistake_in_the_key_is_named() {
    for (key, message) in [
        ("order-{ordr.id}", "there is no argument `ordr`; did you mean `order`?"),
        ("{customer}", "there is no argument `customer`; there are: engine, order, note"),
        ("{self.id}", "there is no `self` here"),
        ("{}", "a value in the key has no name: write an argument between the braces"),
        (
            "{order:?}",
            "`{order:?}` has a format: in a key there is none, a value is written as it is displayed",
        ),
        ("{1 + 1}", "`{1 + 1}` is not an argument, a field of one or what a method of one gives"),
        ("{order.}", "`{order.}` is not a value: unexpected end of input, expected identifier or integer"),
        (
            "order-{order.id",
            "the key \"order-{order.id\" has a brace without its other half; one that means itself is doubled",
        ),
        (
            "order-}",
            "the key \"order-}\" has a brace without its other half; one that means itself is doubled",
        ),
        (
            "{{order}}",
            "the key \"{{order}}\" has no value in it, and every call would be the same one: put an argument in \
             braces, or give an expression without quotes",
        ),
    ] {
        let literal = format!("\"{key}\"");
        let attribute = format!("scope = \"s\", errors = \"store\", key = {literal}");
        assert_eq!(fault(&attribute, PAY), (message.to_owned(), literal), "{key}");
    }
}

#[test]
fn what_the_arguments_have_to_be_is_named() {
    for (options, message, at) in [
        ("skip(nte)", "there is no argument `nte`; did you mean `note`?", "nte"),
        (
            "fingerprint(order.id, amount)",
            "there is no argument `amount`; there are: engine, order, note",
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
    let which =
        "which engine? Say `engine = self.engine`, or whatever it is, or take an argument of type `&Engine`";
    let none = "async fn pay(order: Order) -> Result<u8, E> { Ok(1) }";
    assert_eq!(fault(GOOD, none), (which.to_owned(), String::new()));
    let two = "async fn pay(a: Engine, b: State<Engine>, order: Order) -> Result<u8, E> { Ok(1) }";
    assert_eq!(
        fault(GOOD, two),
        ("which engine? There are two; say `engine = …`".to_owned(), "b".to_owned())
    );
}

#[test]
fn what_the_function_has_to_be_is_named() {
    let a_result = "an idempotent function returns a `Result`, because not every call can have its value: `Result<T, \
                    FunctionError<E>>`, or `Result<T, E>` where `E: From<FunctionError<E>>`";
    for (item, message, at) in [
        (
            "fn pay(order: Order) -> Result<u8, E> { Ok(1) }",
            "an idempotent function is an `async fn`: it waits for the store, before it runs and after it",
            "fn",
        ),
        ("struct Pay;", "`#[idempotent]` stands on an `async fn` with a body", "struct"),
        (
            "async fn pay(order: Order) -> Result<u8, E>;",
            "`#[idempotent]` stands on an `async fn` with a body",
            "async",
        ),
        ("async fn pay(engine: Engine, order: Order) { }", a_result, "pay"),
        ("async fn pay(engine: Engine, order: Order) -> (u8, u8) { (1, 2) }", a_result, "(u8, u8)"),
        (
            "fn pay<'life0, 'async_trait>(&'life0 self, order: Order) -> Pin<Box<dyn Future<Output = Result<u8, E>> + \
             Send + 'async_trait>> { Box::pin(async move { Ok(1) }) }",
            "`#[async_trait]` has rewritten this method before `#[idempotent]` saw it: move the body into an `async fn` \
             outside of the trait, put `#[idempotent]` on that, and call it here",
            "pay",
        ),
        (
            "async extern \"C\" fn pay(order: Order) -> Result<u8, E> { Ok(1) }",
            "an idempotent function has the ABI of Rust",
            "extern \"C\"",
        ),
    ] {
        assert_eq!(fault(GOOD, item), (message.to_owned(), at.to_owned()), "{item}");
    }
}

#[test]
fn all_arguments_are_compared_but_the_engine_and_what_is_left_out() {
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
fn the_body_s_error_is_what_the_signature_s_is_made_of() {
    let text = expanded(GOOD, PAY);
    assert!(text.contains(&tokens("-> Result<u8, String> { Ok(1) }").to_string()), "{text}");
    assert!(!text.contains("map_err"), "{text}");
    let other = "async fn pay(engine: &Engine, order: &Order) -> io::Result<u8> { Ok(1) }";
    let text = expanded(GOOD, other);
    assert!(text.contains(&tokens("-> io::Result<u8> { Ok(1) }").to_string()), "{text}");
    assert!(text.contains("map_err"), "{text}");
}

#[test]
fn limits_are_taken_and_one_beyond_is_not() {
    for good in [
        "lease = \"100ms\"",
        "lease = \"1h\"",
        "retain = \"1s\"",
        "retain = \"400d\"",
        "wait = \"0s\"",
        "wait = \"1h\"",
    ] {
        expanded(&format!("{GOOD}, {good}"), PAY);
    }
    for bad in ["lease = \"3601s\"", "retain = \"999ms\"", "retain = \"34560001s\"", "wait = \"3601s\""] {
        fault(&format!("{GOOD}, {bad}"), PAY);
    }
}

#[test]
fn a_body_that_owns_its_arguments_goes_on_without_its_caller() {
    let is_detached = |arguments: &str, option: &str| {
        let engine = if arguments.contains("engine") { "" } else { ", engine = ENGINE.clone()" };
        let item = format!("async fn pay({arguments}) -> Result<u8, E> {{ Ok(1) }}");
        let text =
            expanded(&format!("key = id(), scope = \"pay\", errors = \"store\"{engine}{option}"), &item);
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
    assert!(expanded(r#"key = id(), scope = "pay", errors = "store""#, generic).contains("run_in_place"));
}
