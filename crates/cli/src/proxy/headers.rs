//! The header fields that a proxy removes and adds (RFC 9110, 7.6; RFC 7239).

use std::cell::LazyCell;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError};

use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::uri::{Authority, PathAndQuery};
use http::{Request, Uri, Version};
use oncegate_engine::LogThrottle;
use oncegate_http::{CallerScope, ClientCertificate, IdempotencyContext};
use rustls::pki_types::CertificateDer;

use super::{FULL_WARNING_INTERVAL, certificate};
use crate::config::{Config, Upstream};

/// Limits the log lines about removed fields that the settings need.
static UNTRUSTED: LazyLock<LogThrottle> = LazyLock::new(|| LogThrottle::new(FULL_WARNING_INTERVAL));

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");
pub(crate) const RECORD: HeaderName = HeaderName::from_static("oncegate-record");
pub(crate) const TOKEN: HeaderName = HeaderName::from_static("oncegate-token");
pub(crate) const ATTEMPT: HeaderName = HeaderName::from_static("oncegate-attempt");

/// The client of a connection, as it is described to the upstream.
#[derive(Debug)]
pub(crate) struct Peer {
    address: HeaderValue,
    /// The `Forwarded` element without its host.
    forwarded: String,
    scheme: HeaderValue,
    /// True if its information about the proxies before it is passed on.
    is_trusted: bool,
    /// The verified certificate of the client, after the handshake.
    certificate: OnceLock<ClientCertificate>,
    /// The host of the last request and its element: nearly always those of the next request, too.
    last: Mutex<Option<(HeaderValue, HeaderValue)>>,
}

impl Peer {
    pub(crate) fn new(address: SocketAddr, tls: bool, is_trusted: bool) -> Self {
        let ip = address.ip().to_canonical();
        let scheme = if tls { "https" } else { "http" };
        let node = match ip {
            IpAddr::V4(ip) => ip.to_string(),
            IpAddr::V6(ip) => format!("\"[{ip}]\""),
        };
        Self {
            // An address is visible ASCII.
            address: HeaderValue::try_from(ip.to_string()).unwrap_or(HeaderValue::from_static("unknown")),
            forwarded: format!("for={node};proto={scheme}"),
            scheme: HeaderValue::from_static(scheme),
            is_trusted,
            certificate: OnceLock::new(),
            last: Mutex::new(None),
        }
    }

    /// Notes the certificates that the client has shown in its handshake; the first one is its own.
    pub(crate) fn note_certificates(&self, chain: Option<&[CertificateDer<'_>]>) {
        if let Some(names) = chain.and_then(<[_]>::first).and_then(|own| certificate::names(own)) {
            let _only_once = self.certificate.set(names);
        }
    }

    /// True if its information about the request is believed.
    pub(crate) const fn is_trusted(&self) -> bool {
        self.is_trusted
    }

    /// `https` or `http`.
    pub(crate) fn scheme(&self) -> &'static str {
        if self.scheme.as_bytes() == b"https" { "https" } else { "http" }
    }

    pub(crate) fn certificate(&self) -> Option<&ClientCertificate> {
        self.certificate.get()
    }

    /// The element of `Forwarded` for a request to this host.
    fn element(&self, host: Option<&HeaderValue>) -> Option<HeaderValue> {
        let Some(host) = host else { return HeaderValue::try_from(&self.forwarded).ok() };
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, element)) = last.as_ref().filter(|(last, _)| last == host) {
            return Some(element.clone());
        }
        let name = host.to_str().ok()?.replace(['"', '\\'], "");
        let element = HeaderValue::try_from(format!("{};host=\"{name}\"", self.forwarded)).ok()?;
        *last = Some((host.clone(), element.clone()));
        Some(element)
    }
}

/// The fields that belong to one connection, in addition to those that `Connection` names.
const HOP_BY_HOP: [HeaderName; 7] = [
    header::CONNECTION,
    header::TRANSFER_ENCODING,
    header::TE,
    header::UPGRADE,
    header::PROXY_AUTHORIZATION,
    KEEP_ALIVE,
    PROXY_CONNECTION,
];

/// Removes the fields that belong to one connection, except those that are needed. Returns the protocol of an upgrade.
pub(crate) fn remove_hop_by_hop(
    headers: &mut HeaderMap,
    is_needed: impl Fn(&HeaderName) -> bool,
) -> Option<HeaderValue> {
    // Fast path: most messages have none of them.
    if !headers.keys().any(|name| HOP_BY_HOP.contains(name)) {
        return None;
    }
    let mut upgrade = None;
    let trailers = has_token(headers, &header::TE, b"trailers");
    if headers.contains_key(header::CONNECTION) {
        let mut nominated = Vec::new();
        for value in headers.get_all(header::CONNECTION) {
            for token in value.as_bytes().split(|b| *b == b',').map(<[u8]>::trim_ascii) {
                if token.eq_ignore_ascii_case(b"upgrade") {
                    upgrade = upgrade_of(headers);
                } else if let Ok(name) = HeaderName::from_bytes(token) {
                    nominated.push(name);
                }
            }
        }
        // A client must not remove fields that identify its request: the layer and the service must read the same fields.
        for name in &nominated {
            if headers.contains_key(name) && !PROTECTED.contains(name) && !is_needed(name) {
                headers.remove(name);
            }
        }
    }
    if headers.contains_key(header::TRANSFER_ENCODING) {
        // RFC 9112, 6.3: in a message with both, the length has no meaning.
        headers.remove(header::CONTENT_LENGTH);
    }
    for name in &HOP_BY_HOP {
        headers.remove(name);
    }
    if trailers {
        // gRPC needs trailers, and this proxy passes them on.
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
    }
    upgrade
}

/// The protocol to upgrade to. Never HTTP/2, because its requests would pass this proxy unseen.
fn upgrade_of(headers: &HeaderMap) -> Option<HeaderValue> {
    let upgrade = headers.get(header::UPGRADE)?;
    (!has_token(headers, &header::UPGRADE, b"h2c")).then(|| upgrade.clone())
}

/// Returns true if a list field has this member, without regard to case.
fn has_token(headers: &HeaderMap, name: &HeaderName, token: &[u8]) -> bool {
    let mut members = headers.get_all(name).iter().flat_map(|line| line.as_bytes().split(|b| *b == b','));
    members.any(|member| member.trim_ascii().eq_ignore_ascii_case(token))
}

/// Fields that are not removed if a client names them in `Connection`.
const PROTECTED: [HeaderName; 5] =
    [header::HOST, header::AUTHORIZATION, header::CONTENT_LENGTH, header::CONTENT_TYPE, header::COOKIE];

/// The protocol that a client asks to switch to.
#[derive(Clone)]
struct UpgradeTo(HeaderValue);

/// Removes all fields of a client that the service must not get: those of one connection, those that only this proxy sends, and
/// information about earlier hops from a peer that is not trusted. This happens before the layer reads the request, so that
/// scope and fingerprint never use a field that the service does not get.
pub(crate) fn remove_unforwarded<B>(request: &mut Request<B>, peer: &Peer, config: &Config) {
    let mut headers = std::mem::take(request.headers_mut());
    let settings = LazyCell::new(|| &config.route(request.method(), request.uri().path()).settings);
    let upgrade = remove_hop_by_hop(&mut headers, |name| settings.depends_on_header(name));
    // This proxy has fulfilled the client's expectation already.
    headers.remove(header::EXPECT);
    remove_ours(&mut headers);
    if !peer.is_trusted {
        remove_forwarded(&mut headers, |name| {
            if settings.depends_on_header(name)
                && let Some(suppressed) = UNTRUSTED.pass()
            {
                let client = peer.address.to_str().unwrap_or_default();
                tracing::warn!(
                    suppressed,
                    client,
                    "{name} identifies callers (scope) or requests (fingerprint.headers), and was removed, because its sender is not \
                     one of trusted-proxies"
                );
            }
        });
    }
    *request.headers_mut() = headers;
    if let Some(upgrade) = upgrade {
        request.extensions_mut().insert(UpgradeTo(upgrade));
    }
}

/// Adds the fields for the upstream to a request, after [`remove_unforwarded`]. Returns the protocol of the upgrade that the
/// client asks for.
pub(crate) fn prepare<B>(request: &mut Request<B>, peer: &Peer) -> Option<HeaderValue> {
    let context = request.extensions().get::<IdempotencyContext>().map(|context| context.attempt().clone());
    let upgrade = request.extensions_mut().remove::<UpgradeTo>().map(|UpgradeTo(protocol)| protocol);
    let via = via(request.version());
    let headers = request.headers_mut();
    forward(headers, peer);
    headers.append(header::VIA, via);
    if let Some(attempt) = context {
        if let Ok(record) = HeaderValue::try_from(attempt.record_id().to_string()) {
            headers.insert(RECORD, record);
        }
        headers.insert(TOKEN, HeaderValue::from(attempt.token().get()));
        headers.insert(ATTEMPT, HeaderValue::from(attempt.number()));
    }
    upgrade
}

/// Returns true if a field of this name is removed from every request before it is processed, from any client.
pub(crate) fn is_always_removed(name: &HeaderName) -> bool {
    HOP_BY_HOP.contains(name) || name == header::EXPECT || is_ours(name)
}

fn is_ours(name: &HeaderName) -> bool {
    const OURS: &[u8] = b"oncegate";
    let name = name.as_str().as_bytes();
    name.starts_with(OURS) && matches!(name.get(OURS.len()), Some(b'-' | b'_'))
}

/// Removes fields that only this proxy sends. `_` counts as `-`, because many services treat them alike.
pub(crate) fn remove_ours(headers: &mut HeaderMap) {
    while let Some(name) = headers.keys().find(|name| is_ours(name)).cloned() {
        headers.remove(name);
    }
}

/// The fields that must not be trailers, because some services merge trailers into the head: fields of the connection, the
/// framing, the routing, the caller and the attempt, and fields that are compared (RFC 9110, 6.5.1).
#[derive(Debug)]
pub(super) struct HeadFields(Arc<Config>);

impl HeadFields {
    pub(super) const fn new(config: Arc<Config>) -> Self {
        Self(config)
    }

    /// Removes these fields, with those of all routes, from trailers. The layer has read only the head.
    pub(super) fn remove_from(&self, trailers: &mut HeaderMap) {
        remove_from_trailers(trailers);
        let depends_on_header = |name: &HeaderName| {
            let routes = self.0.routes.iter().map(|route| &route.config);
            routes.chain([&self.0.default]).any(|route| route.settings.depends_on_header(name))
        };
        let is_of_head = |name: &HeaderName| {
            let hyphenated = name.as_str().contains('_').then(|| name.as_str().replace('_', "-"));
            let hyphenated = hyphenated.and_then(|name| HeaderName::try_from(name).ok());
            CallerScope::is_credential(name)
                || depends_on_header(name)
                || hyphenated.is_some_and(|name| depends_on_header(&name))
        };
        while let Some(name) = trailers.keys().find(|name| is_of_head(name)).cloned() {
            trailers.remove(name);
        }
    }
}

fn remove_from_trailers(trailers: &mut HeaderMap) {
    const OF_THE_HEAD: [HeaderName; 10] = [
        header::CONTENT_LENGTH,
        header::CONTENT_TYPE,
        header::CONTENT_ENCODING,
        header::HOST,
        header::AUTHORIZATION,
        header::COOKIE,
        header::EXPECT,
        header::TRAILER,
        header::VIA,
        HeaderName::from_static("idempotency-key"),
    ];
    remove_ours(trailers);
    remove_forwarded(trailers, |_| ());
    for name in HOP_BY_HOP.iter().chain(&OF_THE_HEAD) {
        trailers.remove(name);
    }
}

/// Removes the fields in which a proxy reports the origin and the original address of a request. `_` counts as `-`, because
/// many services treat them alike.
fn remove_forwarded(headers: &mut HeaderMap, removed: impl Fn(&HeaderName)) {
    const FORWARDED: &[u8] = b"x-forwarded";
    const OTHERS: [&str; 6] = [
        "x-real-ip", "x-original-url", "x-original-uri", "x-original-host", "x-original-method",
        "x-rewrite-url",
    ];
    let is_forwarded = |name: &HeaderName| {
        let spelled = name.as_str().bytes().map(|byte| if byte == b'_' { b'-' } else { byte });
        spelled.clone().take(FORWARDED.len()).eq(FORWARDED.iter().copied())
            || OTHERS.iter().any(|other| spelled.clone().eq(other.bytes()))
            || name == header::FORWARDED
    };
    while let Some(name) = headers.keys().find(|name| is_forwarded(name)).cloned() {
        removed(&name);
        headers.remove(name);
    }
}

pub(crate) const fn via(version: Version) -> HeaderValue {
    HeaderValue::from_static(match version {
        Version::HTTP_10 => "1.0 oncegate",
        Version::HTTP_2 => "2 oncegate",
        _ => "1.1 oncegate",
    })
}

/// Adds the fields in which this proxy reports the origin of a request.
pub(super) fn forward(headers: &mut HeaderMap, peer: &Peer) {
    let host = headers.get(header::HOST).cloned();
    if let Some(element) = peer.element(host.as_ref()) {
        let forwarded = match list(headers, &header::FORWARDED) {
            None => Some(element),
            Some(before) => {
                HeaderValue::try_from(format!("{before}, {}", element.to_str().unwrap_or_default())).ok()
            }
        };
        if let Some(forwarded) = forwarded {
            headers.insert(header::FORWARDED, forwarded);
        }
    }
    let address = match list(headers, &X_FORWARDED_FOR) {
        None => Some(peer.address.clone()),
        Some(before) => {
            let address = peer.address.to_str().unwrap_or_default();
            HeaderValue::try_from(format!("{before}, {address}")).ok()
        }
    };
    if let Some(address) = address {
        headers.insert(X_FORWARDED_FOR, address);
    }
    // Information of a trusted hop about the first client is kept.
    headers.entry(X_FORWARDED_PROTO).or_insert_with(|| peer.scheme.clone());
    if let Some(host) = host {
        headers.entry(X_FORWARDED_HOST).or_insert(host);
    }
}

/// All lines of a list field as one.
fn list(headers: &HeaderMap, name: &HeaderName) -> Option<String> {
    if !headers.contains_key(name) {
        return None;
    }
    let lines: Vec<_> = headers.get_all(name).iter().filter_map(|line| line.to_str().ok()).collect();
    (!lines.is_empty()).then(|| lines.join(", "))
}

/// The address of the request at the upstream. Its authority is the service's own, or with HTTP/2 the host that the client
/// asked for.
pub(crate) fn rewrite(to: &Upstream, asked: &Uri, host: Option<Authority>) -> Uri {
    let mut parts = http::uri::Parts::default();
    parts.scheme = Some(to.scheme.clone());
    parts.authority = Some(host.unwrap_or_else(|| to.authority.clone()));
    parts.path_and_query = asked.path_and_query().cloned().or_else(|| Some(PathAndQuery::from_static("/")));
    // All parts are present, so this cannot fail.
    Uri::from_parts(parts).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(fields: &[(&str, &str)]) -> Request<()> {
        let mut request = Request::new(());
        for (name, value) in fields {
            request
                .headers_mut()
                .append(HeaderName::from_bytes(name.as_bytes()).unwrap(), value.parse().unwrap());
        }
        request
    }

    /// Passes a request on as the sidecar does with these additional flags.
    fn pass(request: &mut Request<()>, peer: &Peer, flags: &[&str]) {
        let flags = [&["--to=http://127.0.0.1:3000"], flags].concat();
        let config = Config::load(&crate::config::parse_flags(&flags).unwrap()).unwrap();
        remove_unforwarded(request, peer, &config);
        prepare(request, peer);
    }

    fn peer() -> Peer {
        Peer::new("192.0.2.7:1234".parse().unwrap(), false, true)
    }

    #[test]
    fn fields_of_one_connection_are_removed() {
        let mut request = request(&[
            ("connection", "close, X-Secret, Authorization"),
            ("x-secret", "1"),
            ("authorization", "Bearer t"),
            ("keep-alive", "timeout=5"),
            ("te", "gzip"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "h2c"),
            ("x-kept", "1"),
        ]);
        assert_eq!(remove_hop_by_hop(request.headers_mut(), |_| false), None);
        let mut left: Vec<_> = request.headers().keys().map(HeaderName::as_str).collect();
        left.sort_unstable();
        assert_eq!(left, ["authorization", "x-kept"]);
    }

    #[test]
    fn a_client_cannot_remove_fields_that_identify_its_request() {
        let nominated = "X-Tenant, Idempotency-Key, Content-Encoding, X-Other, Keep-Alive";
        let mut request = request(&[
            ("connection", nominated),
            ("x-tenant", "a"),
            ("idempotency-key", "k"),
            ("content-encoding", "gzip"),
            ("x-other", "1"),
            ("keep-alive", "timeout=5"),
        ]);
        pass(&mut request, &peer(), &["--scope=header:x-tenant"]);
        for kept in ["x-tenant", "idempotency-key", "content-encoding"] {
            assert!(request.headers().contains_key(kept), "{kept}");
        }
        for gone in ["connection", "x-other", "keep-alive"] {
            assert!(!request.headers().contains_key(gone), "{gone}");
        }
    }

    #[test]
    fn an_upgrade_is_found_and_te_trailers_is_kept() {
        let mut request =
            request(&[("connection", "keep-alive, Upgrade"), ("upgrade", "websocket"), ("te", "trailers")]);
        assert_eq!(remove_hop_by_hop(request.headers_mut(), |_| false).unwrap(), "websocket");
        assert_eq!(request.headers()["te"], "trailers");
    }

    #[test]
    fn the_upstream_gets_the_origin_of_a_request() {
        let mut request = request(&[("host", "api.example:8080")]);
        pass(&mut request, &peer(), &[]);
        let headers = request.headers();
        assert_eq!(headers["forwarded"], "for=192.0.2.7;proto=http;host=\"api.example:8080\"");
        assert_eq!(headers["x-forwarded-for"], "192.0.2.7");
        assert_eq!(headers["x-forwarded-proto"], "http");
        assert_eq!(headers["x-forwarded-host"], "api.example:8080");
        assert_eq!(headers["via"], "1.1 oncegate");
    }

    #[test]
    fn information_of_trusted_hops_is_kept() {
        let mut request = request(&[
            ("host", "inner"),
            ("x-forwarded-for", "198.51.100.1"),
            ("x-forwarded-for", "203.0.113.2"),
            ("x-forwarded-proto", "https"),
            ("x-forwarded-host", "outer"),
            ("forwarded", "for=198.51.100.1"),
        ]);
        let v6 = Peer::new("[2001:db8::1]:1".parse().unwrap(), true, true);
        pass(&mut request, &v6, &[]);
        let headers = request.headers();
        assert_eq!(headers["x-forwarded-for"], "198.51.100.1, 203.0.113.2, 2001:db8::1");
        assert_eq!(headers["x-forwarded-proto"], "https");
        assert_eq!(headers["x-forwarded-host"], "outer");
        assert_eq!(
            headers["forwarded"],
            "for=198.51.100.1, for=\"[2001:db8::1]\";proto=https;host=\"inner\""
        );
    }

    #[test]
    fn information_of_untrusted_hops_is_removed() {
        let mut request = request(&[
            ("host", "inner"),
            ("x-forwarded-for", "198.51.100.1"),
            ("x_forwarded_for", "198.51.100.1"),
            ("x-forwarded-port", "1"),
            ("x-original-url", "/admin"),
            ("x_rewrite_url", "/admin"),
            ("x-forwarded-proto", "https"),
            ("x-forwarded-host", "outer"),
            ("x-real-ip", "198.51.100.1"),
            ("forwarded", "for=198.51.100.1"),
            ("x-forward", "kept"),
        ]);
        pass(&mut request, &Peer::new("192.0.2.7:1234".parse().unwrap(), false, false), &[]);
        let mut fields: Vec<_> =
            request.headers().iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
        fields.sort_unstable();
        let expected = [
            ("forwarded", "for=192.0.2.7;proto=http;host=\"inner\""),
            ("host", "inner"),
            ("via", "1.1 oncegate"),
            ("x-forward", "kept"),
            ("x-forwarded-for", "192.0.2.7"),
            ("x-forwarded-host", "inner"),
            ("x-forwarded-proto", "http"),
        ];
        assert_eq!(fields, expected);
    }

    #[test]
    fn fields_of_the_head_are_removed_from_trailers() {
        let mut trailers = request(&[
            ("oncegate-token", "9"),
            ("ONCEGATE_RECORD", "9"),
            ("x-forwarded-for", "198.51.100.1"),
            ("forwarded", "for=198.51.100.1"),
            ("content-length", "9"),
            ("transfer-encoding", "chunked"),
            ("authorization", "a"),
            ("x-sum", "1"),
            ("x-tenant", "2"),
            ("x_tenant", "2"),
            ("x-version", "2"),
            ("x-api-key", "2"),
            ("x-http-method-override", "DELETE"),
            ("x-rewrite-url", "/admin"),
        ]);
        let flags =
            ["--to=http://127.0.0.1:3000", "--fingerprint-headers=x-version", "--scope=header:x-tenant"];
        let config = Config::load(&crate::config::parse_flags(&flags).unwrap()).unwrap();
        HeadFields::new(Arc::new(config)).remove_from(trailers.headers_mut());
        assert_eq!(trailers.headers().keys().collect::<Vec<_>>(), ["x-sum"]);
    }

    #[test]
    fn a_client_cannot_set_the_fields_of_an_attempt() {
        let mut request =
            request(&[("oncegate-token", "9"), ("oncegate-record", "x"), ("oncegate-attempt", "1")]);
        pass(&mut request, &peer(), &[]);
        assert!(request.headers().keys().all(|name| !name.as_str().starts_with("oncegate-")));
    }

    #[test]
    fn addresses_are_rewritten_to_the_upstream() {
        let to = Upstream { scheme: http::uri::Scheme::HTTP, authority: "up:1".parse().unwrap() };
        for (asked, expected) in [
            ("/a?b=1", "http://up:1/a?b=1"),
            ("http://down/a", "http://up:1/a"),
            ("/", "http://up:1/"),
            ("/%2e%2e/x", "http://up:1/%2e%2e/x"),
        ] {
            assert_eq!(rewrite(&to, &asked.parse().unwrap(), None).to_string(), expected);
        }
    }
}
