//! The stylesheet, the script and the icon, embedded in the program.

use std::hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher};
use std::sync::LazyLock;

use axum::extract::Path;
use axum::response::{IntoResponse as _, Response};
use http::header::{self, HeaderValue};

use super::PageError;
use crate::admin::problem::Problem;

const STYLESHEET: &str = include_str!("../../../assets/dashboard.css");
/// htmx 4.0.1, unchanged, whose licence is next to it, and what this dashboard adds.
const SCRIPT: &str =
    concat!(include_str!("../../../assets/htmx.min.js"), "\n", include_str!("../../../assets/dashboard.js"));
const ICON: &str = include_str!("../../../assets/icon.svg");

/// Files change with the program only, and their addresses contain their hash.
const CACHE: &str = "private, max-age=86400, immutable";

static STYLESHEET_PATH: LazyLock<String> =
    LazyLock::new(|| format!("/assets/dashboard.css?v={:016x}", hash(STYLESHEET)));
static SCRIPT_PATH: LazyLock<String> = LazyLock::new(|| format!("/assets/htmx.js?v={:016x}", hash(SCRIPT)));

fn hash(text: &str) -> u64 {
    BuildHasherDefault::<DefaultHasher>::default().hash_one(text)
}

pub(super) fn stylesheet_path() -> &'static str {
    &STYLESHEET_PATH
}

pub(super) fn script_path() -> &'static str {
    &SCRIPT_PATH
}

pub(super) async fn send(Path(name): Path<String>) -> Response {
    let (media_type, text) = match name.as_str() {
        "dashboard.css" => ("text/css; charset=utf-8", STYLESHEET),
        "htmx.js" => ("text/javascript; charset=utf-8", SCRIPT),
        "icon.svg" => ("image/svg+xml", ICON),
        _ => return PageError(Problem::no_such_path(&format!("/assets/{name}"))).into_response(),
    };
    let fields = [
        (header::CONTENT_TYPE, HeaderValue::from_static(media_type)),
        (header::CACHE_CONTROL, HeaderValue::from_static(CACHE)),
    ];
    (fields, text).into_response()
}
