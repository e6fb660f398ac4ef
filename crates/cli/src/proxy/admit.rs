//! The first step for every request: refuses requests that no gateway may pass on, and gives requests of HTTP/1.1 and HTTP/2
//! the same form.

use std::sync::Arc;

use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::uri::Authority;
use http::{Method, Request, Response, Version};
use oncegate_http::{Condition, GrpcForm, Refusal, Settings};

use super::body::ProxyBody;
use super::headers::{Peer, remove_unforwarded};
use super::{MAX_HEAD, MAX_LINES};
use crate::admin::Metrics;
use crate::config::Config;

/// Checks and normalizes a request. Afterwards it has one valid `Host`, or none if the protocol does not require it, one line
/// of cookies, and no field that the service must not get from this peer.
///
/// # Errors
/// The refusal, in the form of the route.
pub(super) fn admit<B>(
    request: &mut Request<B>,
    peer: &Arc<Peer>,
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
            if let Some(certificate) = peer.certificate() {
                request.extensions_mut().insert(certificate.clone());
            }
            if config.may_ask() {
                request.extensions_mut().insert(peer.clone());
            }
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

/// Only for HTTP/2: the library refuses such heads of HTTP/1.1 by itself.
const fn too_large(detail: &'static str) -> Refused {
    Refused { condition: Condition::RequestHeadTooLarge, detail }
}

impl Refused {
    fn into_response<B>(self, request: &Request<B>, settings: &Settings) -> Response<ProxyBody> {
        let refusal = Refusal::new(self.condition).with_detail(self.detail);
        let response = refusal.into_response(settings, GrpcForm::of(request.headers()));
        let mut response = response.map(ProxyBody::own);
        if request.version() != Version::HTTP_2 {
            // The client may disagree with this proxy about the beginning of the next request.
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}

/// Checks a request. Returns the host if the target contains it.
fn check<B>(request: &Request<B>) -> Result<Option<HeaderValue>, Refused> {
    let is = |method: Method| request.method().as_str().eq_ignore_ascii_case(method.as_str());
    if is(Method::CONNECT) {
        return Err(unsupported("This proxy does not support CONNECT."));
    }
    if is(Method::HEAD) && request.method() != Method::HEAD {
        // A service that reads it as HEAD sends a length and no body, and this proxy would wait for the body.
        return Err(unsupported("The method HEAD must be in upper case."));
    }
    // RFC 9112, 3.2.3 and 3.2.4. A service may read such a target as `/`, which has a route.
    let path = request.uri().path();
    let is_of_the_server = path == "*" && request.method() == Method::OPTIONS;
    if !path.starts_with('/') && !is_of_the_server {
        return Err(malformed("The target of the request is not a path."));
    }
    let headers = request.headers();
    if is_too_large(headers) {
        return Err(too_large(
            "Nothing was executed. The head has more than 1000 field lines, or more than 128 KiB.",
        ));
    }
    // The library accepts two equal fields: it joins them in HTTP/1.1, but in HTTP/2 the service would get both.
    if headers.get_all(header::CONTENT_LENGTH).iter().nth(1).is_some() {
        return Err(malformed("There are several Content-Length fields."));
    }
    let mut codings = headers.get_all(header::TRANSFER_ENCODING).iter();
    if let Some(coding) = codings.next()
        && (!coding.as_bytes().eq_ignore_ascii_case(b"chunked") || codings.next().is_some())
    {
        // RFC 9112, 6.1. The service would not learn about the other coding.
        return Err(unsupported("The only supported transfer coding is chunked."));
    }
    // RFC 9112, 3.2: otherwise this proxy and the service could read different hosts.
    let mut hosts = headers.get_all(header::HOST).iter();
    match (hosts.next(), hosts.next()) {
        (Some(_), Some(_)) => return Err(malformed("There are several Host fields.")),
        (Some(host), None) if !is_host(host.as_bytes()) => {
            return Err(malformed("The Host field is not a valid host name."));
        }
        (None, _) if request.version() == Version::HTTP_11 => {
            return Err(malformed("There is no Host field."));
        }
        _ => {}
    }
    let Some(authority) = request.uri().authority() else { return Ok(None) };
    // RFC 9112, 3.2.2; RFC 9113, 8.3.1: the host in the target wins.
    match HeaderValue::try_from(authority.as_str()) {
        Ok(host) if is_host(host.as_bytes()) => Ok(Some(host)),
        _ => Err(malformed("The authority of the target is not a valid host name.")),
    }
}

/// Returns true if a head has more lines or bytes than the sidecar accepts. The limits of the library differ between
/// protocols.
pub(super) fn is_too_large(headers: &HeaderMap) -> bool {
    let bytes = |(name, value): (&HeaderName, &HeaderValue)| name.as_str().len() + value.len();
    headers.len() > MAX_LINES || headers.iter().map(bytes).sum::<usize>() > MAX_HEAD
}

/// Returns true for a host with or without a port, and for an empty value, which a client sends if its target has no authority.
fn is_host(bytes: &[u8]) -> bool {
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-');
    let name = bytes.iter().position(|byte| !plain(byte)).unwrap_or(bytes.len());
    match bytes.split_at(name).1 {
        // Fast path for nearly all hosts.
        [] => true,
        [b':', port @ ..] if port.iter().all(u8::is_ascii_digit) => true,
        _ => Authority::try_from(bytes).is_ok_and(|authority| {
            // User information before the host is not allowed.
            let rest = authority.as_str().strip_prefix(authority.host());
            let port = rest.map(|rest| rest.strip_prefix(':').unwrap_or(rest));
            port.is_some_and(|port| port.bytes().all(|byte| byte.is_ascii_digit()))
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
        let metrics = Metrics::new(|| MemoryStore::new(SystemClock::new()).capabilities(), None);
        let peer = Arc::new(Peer::new("192.0.2.7:1234".parse().unwrap(), false, false));
        match admit(&mut request, &peer, &config, &metrics) {
            Ok(()) => Ok(request.headers().clone()),
            Err(response) => Err(response.status().as_u16()),
        }
    }

    #[test]
    fn a_request_gets_one_valid_host_or_is_refused() {
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
    fn unsupported_codings_methods_and_targets_are_refused() {
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
