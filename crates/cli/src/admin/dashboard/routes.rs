//! The routes, their settings with the sources, and the records of each.

use askama::Template;
use axum::extract::{Extension, Path, State};
use http::Method;
use http::header::HeaderMap;

use super::access::Access;
use super::format::{duration, number, query_text};
use super::keys::AsOfNote;
use super::waiting::{ASKED, WaitNote, still_waiting};
use super::{Frame, PageResult, Section, page};
use crate::admin::AdminState;
use crate::admin::keys::{Pairs, pairs};
use crate::admin::problem::Problem;
use crate::admin::surveys::{Answer, RouteCounts, Ticket};
use crate::config::RouteConfig;
use crate::explain::{Request, Row, read_request, rows};

/// The part of an address that means requests that match no route.
const DEFAULT: &str = "default";

#[derive(Template)]
#[template(path = "routes.html")]
struct RoutesPage {
    frame: Frame,
    routes: Vec<RouteLine>,
    has_shadow: bool,
    is_complete: bool,
    as_of: Option<AsOfNote>,
    wait: Option<WaitNote>,
    has_waited: bool,
    request: String,
    answer: Vec<String>,
    answer_href: String,
    error: String,
}

struct RouteLine {
    href: String,
    pattern: String,
    methods: String,
    profile: String,
    retention: String,
    on_abandoned: String,
    requires_key: bool,
    is_shadow: bool,
    counts: Vec<(&'static str, String)>,
}

impl RouteLine {
    /// Without counts while the records are being counted.
    fn new(place: Option<usize>, pattern: &str, route: &RouteConfig, counts: Option<&RouteCounts>) -> Self {
        let settings = &route.settings;
        let methods = [Method::POST, Method::PUT, Method::PATCH, Method::DELETE];
        let methods = methods.iter().filter(|method| settings.covers(method)).map(Method::as_str);
        Self {
            href: format!("/routes/{}", place.map_or_else(|| DEFAULT.to_owned(), |place| place.to_string())),
            pattern: pattern.to_owned(),
            methods: methods.collect::<Vec<_>>().join(", "),
            profile: settings.profile().name().to_owned(),
            retention: duration(settings.policy().retention().as_secs()),
            on_abandoned: format!("{:?}", settings.policy().on_abandoned()).to_ascii_lowercase(),
            requires_key: settings.profile().requires_key(),
            is_shadow: settings.is_shadow(),
            counts: counts
                .map(|counts| counts.of(place))
                .unwrap_or_default()
                .into_iter()
                .map(|(state, records)| (state.as_str(), number(records)))
                .collect(),
        }
    }
}

pub(super) async fn list(
    State(state): State<AdminState>,
    Extension(access): Extension<Access>,
    headers: HeaderMap,
    query: Pairs,
) -> PageResult {
    let config = state.live.borrow().config.clone();
    let (mut asked, mut ticket) = (String::new(), None);
    for (name, text) in pairs(query, &["request", ASKED])? {
        if name == ASKED {
            ticket = Ticket::read(&text);
        } else {
            asked = text;
        }
    }
    let address = if asked.is_empty() {
        "/routes".to_owned()
    } else {
        format!("/routes?request={}", query_text(&asked))
    };
    let (counts, as_of, wait) = match state.surveys.routes(&config, state.engine.store(), ticket).await? {
        Answer::Found(counts, as_of) => (Some(counts), as_of, None),
        Answer::Running(ticket) => {
            (None, None, Some(WaitNote::new("The records are being counted", &address, ticket)))
        }
    };
    if let (Some(_), Some(response)) = (&wait, still_waiting(&headers, ticket)) {
        return Ok(response);
    }
    let routes = config.routes.iter().enumerate().map(|(place, route)| {
        RouteLine::new(Some(place), route.pattern.as_str(), &route.config, counts.as_deref())
    });
    let others = RouteLine::new(None, "All other requests", &config.default, counts.as_deref());
    let routes: Vec<_> = routes.chain([others]).collect();
    let (mut answer, mut answer_href, mut error) = (Vec::new(), String::new(), String::new());
    if !asked.is_empty() {
        match read_request(&asked) {
            Some((method, path)) => {
                let place = config.route_number(&method, path.path());
                answer = Request { method: &method, path: path.path() }.explained(&config, place);
                answer_href = format!(
                    "/routes/{}",
                    place.map_or_else(|| DEFAULT.to_owned(), |place| place.to_string())
                );
            }
            None => {
                error = format!(
                    "{asked:?} is not a request; write a method and a path, such as POST /v1/orders."
                );
            }
        }
    }
    Ok(page(&RoutesPage {
        frame: Frame::new(&state, &access, Section::Routes, "Routes").waiting(wait.as_ref()),
        has_shadow: routes.iter().any(|route| route.is_shadow),
        routes,
        is_complete: counts.is_none_or(|counts| counts.is_complete),
        as_of: as_of.map(|as_of| AsOfNote::new(as_of, &address)),
        has_waited: ticket.is_some() && wait.is_none(),
        wait,
        request: asked,
        answer,
        answer_href,
        error,
    }))
}

#[derive(Template)]
#[template(path = "route.html")]
struct RoutePage {
    frame: Frame,
    pattern: String,
    given: Vec<Row>,
    defaults: Vec<Row>,
}

/// The settings of one route: first those that were given, then the others.
pub(super) async fn show(
    State(state): State<AdminState>,
    Extension(access): Extension<Access>,
    Path(route): Path<String>,
) -> PageResult {
    let config = state.live.borrow().config.clone();
    let place = match route.as_str() {
        DEFAULT => None,
        text => Some(text.parse::<usize>().ok().filter(|place| *place < config.routes.len())),
    };
    let no_route = || Problem::no_such_path(&format!("/routes/{route}"));
    let place = place.map(|place| place.ok_or_else(no_route)).transpose()?;
    let pattern = match place.and_then(|place| config.routes.get(place)) {
        Some(route) => route.pattern.as_str().to_owned(),
        None => "All other requests".to_owned(),
    };
    let is_given = |row: &Row| !row.source.starts_with("default") && !row.source.starts_with("profile ");
    let (given, defaults) = rows(&config, place, &config.given).into_iter().partition(is_given);
    let frame = Frame::new(&state, &access, Section::Routes, format!("Route {pattern}"));
    Ok(page(&RoutePage { frame, pattern, given, defaults }))
}
