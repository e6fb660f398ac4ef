//! What comes before everything else: requests that no gateway may pass on are refused, and what HTTP/1.1 and HTTP/2 say
//! in different ways is said in one.

use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::uri::Authority;
use http::{Method, Request, Response, Version};
use oncegate_http::{Condition, GrpcForm, Refusal, Settings};

use super::body::ProxyBody;
use super::headers::{Peer, remove_unforwarded};
use super::{MAX_HEAD, MAX_LINES};
use crate::admin::Metrics;
use crate::config::Config;

/// Afterwards there is one valid `Host`, or none where the client need not say any, one line of cookies, and no field that the
/// service must not get from this peer.
///
/// # Errors
/// The answer for a request that goes no further, as its route words refusals.
pub(super) fn admit<B>(
    request: &mut Request<B>,
    peer: &Peer,
    config: &Config,
    metrics: &Metrics,
) -> Result<(), Box<Response<ProxyBody>>> {
    match check(request) {
        Ok(host) => {
            if let Some(host) = host {
                request.headers_mut().insert(header::HOST, host);
            }
            if request.version() == Version::HTTP_2 {
                join_cookies(request.headers_mut());
            }
            remove_unforwarded(request, peer, config);
            Ok(())
        }
        Err(refused) => {
            tracing::debug!(detail = refused.detail, "request refused");
            let route = config.route(request.method(), request.uri().path());
            let condition = refused.condition;
            let response = refused.into_response(request, &route.settings);
            metrics.observe_refused(condition, response.status());
            Err(Box::new(response))
        }
    }
}

struct Refused {
    condition: Condition,
    detail: &'static str,
}

const fn malformed(detail: &'static str) -> Refused {
    Refused { condition: Condition::RequestMalformed, detail }
}

const fn unsupported(detail: &'static str) -> Refused {
    Refused { condition: Condition::RequestUnsupported, detail }
}

/// HTTP/1.1 says it itself, without a body: there is no request then.
const fn too_large(detail: &'static str) -> Refused {
    Refused { condition: Condition::RequestHeadTooLarge, detail }
}

impl Refused {
    fn into_response<B>(self, request: &Request<B>, settings: &Settings) -> Response<ProxyBody> {
        let refusal = Refusal::new(self.condition).with_detail(self.detail);
        let response = refusal.into_response(settings, GrpcForm::of(request.headers()));
        let mut response = response.map(ProxyBody::own);
        if request.version() != Version::HTTP_2 {
            // The client may disagree with this proxy about where the next request begins.
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}

/// Finds what is wrong; otherwise the host, where another place than `Host` says it.
fn check<B>(request: &Request<B>) -> Result<Option<HeaderValue>, Refused> {
    let is = |method: Method| request.method().as_str().eq_ignore_ascii_case(method.as_str());
    if is(Method::CONNECT) {
        return Err(unsupported("This is no proxy for CONNECT."));
    }
    if is(Method::HEAD) && request.method() != Method::HEAD {
        // A service that takes it for HEAD sends a length and no body, and this proxy would wait for the body.
        return Err(unsupported("The method HEAD is understood in upper case only."));
    }
    // RFC 9112, 3.2.3 and 3.2.4. A service may take such a target for `/`, which has a route.
    let path = request.uri().path();
    let is_of_the_server = path == "*" && request.method() == Method::OPTIONS;
    if !path.starts_with('/') && !is_of_the_server {
        return Err(malformed("The target of the request is not a path."));
    }
    let headers = request.headers();
    if is_too_large(headers) {
        return Err(too_large(
            "Nothing was executed. It has more than 1000 field lines, or more than 128 KiB.",
        ));
    }
    // HTTP/1.1 takes two that are equal for one. HTTP/2 passes them on, and the service would get both.
    if headers.get_all(header::CONTENT_LENGTH).iter().nth(1).is_some() {
        return Err(malformed("There are several Content-Length fields."));
    }
    let mut codings = headers.get_all(header::TRANSFER_ENCODING).iter();
    if let Some(coding) = codings.next()
        && (!coding.as_bytes().eq_ignore_ascii_case(b"chunked") || codings.next().is_some())
    {
        // RFC 9112, 6.1. The service would not learn that something is left to be undone.
        return Err(unsupported("The one transfer coding that is understood is chunked."));
    }
    // RFC 9112, 3.2: otherwise two that read it could take it for requests to different hosts.
    let mut hosts = headers.get_all(header::HOST).iter();
    match (hosts.next(), hosts.next()) {
        (Some(_), Some(_)) => return Err(malformed("There are several Host fields.")),
        (Some(host), None) if !is_host(host.as_bytes()) => {
            return Err(malformed("The Host field is none."));
        }
        (None, _) if request.version() == Version::HTTP_11 => {
            return Err(malformed("There is no Host field."));
        }
        _ => {}
    }
    let Some(authority) = request.uri().authority() else { return Ok(None) };
    // RFC 9112, 3.2.2; RFC 9113, 8.3.1: what the target says counts.
    match HeaderValue::try_from(authority.as_str()) {
        Ok(host) if is_host(host.as_bytes()) => Ok(Some(host)),
        _ => Err(malformed("The target's authority is no host.")),
    }
}

/// Returns true if a head has more lines or bytes than the sidecar accepts. The limits of the library differ between
/// protocols.
pub(super) fn is_too_large(headers: &HeaderMap) -> bool {
    let bytes = |(name, value): (&HeaderName, &HeaderValue)| name.as_str().len() + value.len();
    headers.len() > MAX_LINES || headers.iter().map(bytes).sum::<usize>() > MAX_HEAD
}

/// A host and perhaps a port, or nothing at all, which is what a client says where its target has no authority.
fn is_host(octets: &[u8]) -> bool {
    let plain = |octet: &u8| octet.is_ascii_alphanumeric() || matches!(octet, b'.' | b'-');
    let name = octets.iter().position(|octet| !plain(octet)).unwrap_or(octets.len());
    match octets.split_at(name).1 {
        // Nearly all are, at a glance.
        [] => true,
        [b':', port @ ..] if port.iter().all(u8::is_ascii_digit) => true,
        _ => Authority::try_from(octets).is_ok_and(|authority| {
            // User information before the host is not part of the host.
            let behind = authority.as_str().strip_prefix(authority.host());
            let port = behind.map(|behind| behind.strip_prefix(':').unwrap_or(behind));
            port.is_some_and(|port| port.bytes().all(|octet| octet.is_ascii_digit()))
        }),
    }
}

/// RFC 9113, 8.2.3: HTTP/2 may split a field that other protocols expect in one line.
fn join_cookies(headers: &mut HeaderMap) {
    let mut lines = headers.get_all(header::COOKIE).iter();
    if let (Some(_), Some(_)) = (lines.next(), lines.next()) {
        let all: Vec<_> = headers.get_all(header::COOKIE).iter().map(HeaderValue::as_bytes).collect();
        if let Ok(joined) = HeaderValue::from_bytes(&all.join(&b"; "[..])) {
            headers.insert(header::COOKIE, joined);
        }
    }
}

#[cfg(test)]
mod tests {
    use oncegate_core::{MemoryStore, Store as _, SystemClock};

    use super::*;

    fn admitted(
        method: &str,
        target: &str,
        version: Version,
        fields: &[(&str, &str)],
    ) -> Result<HeaderMap, u16> {
        let mut request = Request::builder().method(method).uri(target).version(version);
        for (name, value) in fields {
            request = request.header(*name, *value);
        }
        let mut request = request.body(()).unwrap();
        let flags = crate::config::parse_flags(&["--to=http://127.0.0.1:3000"]).unwrap();
        let config = Config::load(&flags).unwrap();
        let metrics = Metrics::new(|| MemoryStore::new(SystemClock::new()).capabilities());
        let peer = Peer::new("192.0.2.7:1234".parse().unwrap(), false, false);
        match admit(&mut request, &peer, &config, &metrics) {
            Ok(()) => Ok(request.headers().clone()),
            Err(response) => Err(response.status().as_u16()),
        }
    }

    #[test]
    fn the_table_of_hosts() {
        let (one, one_0, two) = (Version::HTTP_11, Version::HTTP_10, Version::HTTP_2);
        for (target, version, hosts, expected) in [
            ("/", one, &["a.test"][..], Ok(Some("a.test"))),
            ("/", one, &["a.test:8080"], Ok(Some("a.test:8080"))),
            ("/", one, &["[::1]:8080"], Ok(Some("[::1]:8080"))),
            ("/", one, &[""], Ok(Some(""))),
            ("/", one, &["a_b.test"], Ok(Some("a_b.test"))),
            ("/", one, &["a.test:80a"], Err(400)),
            ("/", one, &["[::1"], Err(400)),
            ("/", one, &[], Err(400)),
            ("/", one, &["a.test", "a.test"], Err(400)),
            ("/", one, &["a.test, b.test"], Err(400)),
            ("/", one, &["a.test/b"], Err(400)),
            ("/", one, &["a.test#b"], Err(400)),
            ("/", one, &["me@a.test"], Err(400)),
            ("http://b.test/", one, &["a.test"], Ok(Some("b.test"))),
            ("http://b.test/", one, &[], Err(400)),
            ("http://me@b.test/", one, &["b.test"], Err(400)),
            ("/", one_0, &[], Ok(None)),
            ("/", one_0, &["a.test", "b.test"], Err(400)),
            ("http://b.test/", two, &[], Ok(Some("b.test"))),
            ("http://b.test/", two, &["a.test"], Ok(Some("b.test"))),
            ("http://b.test/", two, &["b.test", "a.test"], Err(400)),
            ("/", two, &["a.test"], Ok(Some("a.test"))),
            ("/", two, &[], Ok(None)),
        ] {
            let fields: Vec<_> = hosts.iter().map(|host| ("host", *host)).collect();
            let got = admitted("GET", target, version, &fields)
                .map(|headers| headers.get("host").map(|host| host.to_str().unwrap().to_owned()));
            assert_eq!(
                got.as_ref().map(|host| host.as_deref()).map_err(|e| *e),
                expected,
                "{target} {hosts:?}"
            );
        }
    }

    #[test]
    fn what_a_gateway_does_not_do() {
        let host = ("host", "a.test");
        let coded = |codings: &[&'static str]| {
            let mut fields = vec![host];
            fields.extend(codings.iter().map(|coding| ("transfer-encoding", *coding)));
            admitted("POST", "/", Version::HTTP_11, &fields).map(|_| ())
        };
        assert_eq!(coded(&["Chunked"]), Ok(()));
        for codings in
            [&["gzip, chunked"][..], &["chunked", "chunked"], &["gzip"], &["chunked;a=1"], &["\tchunked,"]]
        {
            assert_eq!(coded(codings), Err(501), "{codings:?}");
        }
        assert_eq!(admitted("CONNECT", "a.test:1", Version::HTTP_11, &[host]).unwrap_err(), 501);
        assert_eq!(admitted("CONNECT", "a.test:1", Version::HTTP_2, &[]).unwrap_err(), 501);
        for (method, target, status) in [
            ("connect", "a.test:1", Some(501)),
            ("connect", "/", Some(501)),
            ("head", "/", Some(501)),
            ("HEAD", "/", None),
            ("get", "/", None),
            ("patch", "/", None),
            ("POST", "a.test", Some(400)),
            ("GET", "a.test:80", Some(400)),
            ("OPTIONS", "a.test", Some(400)),
            ("POST", "*", Some(400)),
            ("options", "*", Some(400)),
            ("OPTIONS", "*", None),
            ("OPTIONS", "http://a.test", None),
            ("POST", "http://a.test", None),
            ("POST", "http://a.test?x=1", None),
        ] {
            let got = admitted(method, target, Version::HTTP_11, &[host]);
            assert_eq!(got.err(), status, "{method} {target}");
        }
    }

    #[test]
    fn cookies_of_http_2_are_one_line() {
        let cookies = [("cookie", "a=1"), ("cookie", "b=2; c=3")];
        let headers = admitted("GET", "http://a.test/", Version::HTTP_2, &cookies).unwrap();
        assert_eq!(headers.get_all("cookie").iter().collect::<Vec<_>>(), ["a=1; b=2; c=3"]);
    }
}
