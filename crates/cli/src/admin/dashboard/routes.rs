//! The routes, their settings with the sources, and the records of each.

use std::collections::{BTreeMap, HashMap};

use askama::Template;
use axum::extract::{Extension, Path, State};
use http::Method;
use oncegate_core::{ListQuery, StateName, limits};

use super::access::Access;
use super::format::{duration, number};
use super::{Frame, PageResult, Section, page};
use crate::admin::AdminState;
use crate::admin::keys::{Pairs, pairs, request_of_operation};
use crate::admin::listing::walk;
use crate::admin::problem::Problem;
use crate::config::{Config, RouteConfig};
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
    fn new(place: Option<usize>, pattern: &str, route: &RouteConfig, counts: &Counts) -> Self {
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
            counts: counts.of(place),
        }
    }
}

/// The numbers of records by route and state.
#[derive(Default)]
struct Counts(BTreeMap<(Option<usize>, StateName), u64>);

impl Counts {
    /// Counts the records that the store returns within the time for a walk; false if there are more.
    async fn read(state: &AdminState, config: &Config) -> Result<(Self, bool), Problem> {
        let mut query = ListQuery::default();
        query.limit = limits::MAX_PAGE_RECORDS;
        let mut counts = Self::default();
        // Most records have one of a few operations.
        let mut known: HashMap<String, Option<usize>> = HashMap::new();
        let is_complete = walk(&**state.engine.store(), &query, |page, now| {
            for (_, record) in &page.records {
                let operation = record.label.operation();
                let place = match known.get(operation) {
                    Some(place) => *place,
                    None => {
                        let (method, path) = request_of_operation(operation);
                        let place = config.route_number(&method, path);
                        if known.len() < limits::MAX_PAGE_RECORDS {
                            known.insert(operation.to_owned(), place);
                        }
                        place
                    }
                };
                *counts.0.entry((place, record.state_name(now))).or_default() += 1;
            }
        })
        .await?;
        Ok((counts, is_complete))
    }

    fn of(&self, place: Option<usize>) -> Vec<(&'static str, String)> {
        let states = StateName::ALL.into_iter();
        states.filter_map(|state| Some((state.as_str(), number(*self.0.get(&(place, state))?)))).collect()
    }
}

pub(super) async fn list(
    State(state): State<AdminState>,
    Extension(access): Extension<Access>,
    query: Pairs,
) -> PageResult {
    let config = state.live.borrow().config.clone();
    let asked = pairs(query, &["request"])?.into_iter().next().map(|(_, text)| text).unwrap_or_default();
    let (counts, is_complete) = Counts::read(&state, &config).await?;
    let routes =
        config.routes.iter().enumerate().map(|(place, route)| {
            RouteLine::new(Some(place), route.pattern.as_str(), &route.config, &counts)
        });
    let others = RouteLine::new(None, "All other requests", &config.default, &counts);
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
        frame: Frame::new(&state, &access, Section::Routes, "Routes"),
        has_shadow: routes.iter().any(|route| route.is_shadow),
        routes,
        is_complete,
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
