//! The document of an API: its text, and the paths that its operations have on the wire.

use serde_saphyr::budget;

use super::METHODS;
use crate::rules::document::Node;

/// Reads a document in JSON or YAML 1.2.
///
/// A plain scalar is a boolean only as `true` and `false`, and digits after a zero are a text: `NO` is a country, and `0123` a
/// postcode.
pub(super) fn document(text: &str) -> Result<Node, String> {
    let json = serde_json::from_str(text);
    if let (Err(error), true) = (&json, text.trim_start().starts_with("{\"") || text.trim_start() == "{") {
        // Such a text may be YAML, too; its error would only confuse.
        if serde_saphyr::from_str_with_options::<Node>(text, options()).is_err() {
            return Err(format!("not JSON: {error}"));
        }
    }
    json.or_else(|_| {
        serde_saphyr::from_str_with_options(text, options())
            .map_err(|error| format!("neither YAML nor JSON: {error}"))
    })
}

/// The limits are those of the file: it is the operator's own, and at most [`super::MAX_DOCUMENT`] bytes long.
fn options() -> serde_saphyr::Options {
    serde_saphyr::options! {
        strict_booleans: true,
        leading_zero_numbers_as_strings: true,
        underscored_numbers_as_strings: true,
        budget: budget! {
            max_nodes: 8_000_000,
            max_events: 16_000_000,
            max_aliases: 1_000_000,
            enforce_alias_anchor_ratio: false,
        },
    }
}

/// The path before the paths of the document, by the first of its servers: `/v1` for `https://api.example.com/v1`.
pub(super) fn base_path(of: &Node) -> Option<String> {
    let server = of.get("servers")?.list().first()?;
    let mut url = server.text("url")?.to_owned();
    for (name, variable) in server.get("variables").map_or(&[][..], Node::members) {
        url = url.replace(&format!("{{{name}}}"), variable.text("default").unwrap_or("x"));
    }
    let path = match url.split_once("://") {
        Some((_, rest)) => rest.find('/').and_then(|at| rest.get(at..)).unwrap_or_default(),
        None => url.as_str(),
    };
    Some(path.trim_end_matches('/').to_owned())
}

/// The mistakes of a path item that leave it without rules, in words.
pub(super) fn cannot_be_read(item: &Node) -> Option<&'static str> {
    let has_operation = METHODS.iter().any(|method| item.get(method).is_some());
    (item.text("$ref").is_some() && !has_operation)
        .then_some("it is a reference; its operations get no rules, unless it is written here")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn json(text: &str) -> String {
        serde_json::to_string(&document(text).unwrap()).unwrap()
    }

    #[test]
    fn values_stay_what_they_are() {
        let text =
            "enum: [N, S, NO, on, y, yes, true]\nzip: 01234\nb: 1_000\nc: 0x1F\nd: ~\ne: 1.50\nf: -7\n";
        let expected = r#"{"enum":["N","S","NO","on","y","yes",true],"zip":"01234","b":"1_000","c":31,"d":null,"e":1.5,"f":-7}"#;
        assert_eq!(json(text), expected);
        assert_eq!(json("{a: 1, b: [x]}"), r#"{"a":1,"b":["x"]}"#);
        assert!(document("{\"a\": tru}").is_ok_and(|node| node.text("a") == Some("tru")));
        assert!(document("{\"a\": [1, 2").unwrap_err().starts_with("not JSON"));
        assert!(document("a: [1").unwrap_err().starts_with("neither YAML nor JSON"));
    }

    #[test]
    fn large_documents_are_read() {
        let aliases: String = (0..3000).map(|number| format!("p{number}: *r\n")).collect();
        assert!(document(&format!("r: &r {{a: 1, b: [2, 3]}}\n{aliases}")).is_ok());
        let many = format!("[{}1]", "{\"a\":1},".repeat(200_000));
        assert!(document(&many).is_ok());
        let many = format!("[{}1]", "{a: 1}, ".repeat(150_000));
        assert!(document(&many).is_ok());
    }

    #[test]
    fn the_path_of_the_first_server_counts() {
        for (servers, expected) in [
            ("[]", None),
            ("[{url: 'https://a.example'}]", Some("")),
            ("[{url: 'https://a.example/'}]", Some("")),
            ("[{url: 'https://a.example/v1/'}, {url: /v2}]", Some("/v1")),
            ("[{url: /v2}]", Some("/v2")),
            (
                "[{url: 'https://{host}/{base}/x', variables: {host: {default: a}, base: {default: v3}}}]",
                Some("/v3/x"),
            ),
        ] {
            let node = document(&format!("servers: {servers}")).unwrap();
            assert_eq!(base_path(&node).as_deref(), expected, "{servers}");
        }
    }
}
