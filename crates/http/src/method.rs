//! Methods in any case.
//!
//! Methods are case-sensitive (RFC 9110, section 9.1), but many frameworks turn them into upper case and execute `patch` as
//! `PATCH`. Browsers send `patch` as a page wrote it (Fetch, section 2.2.1). So a method is covered, recorded and compared in
//! upper case, and the service gets it as it was sent.

use std::borrow::Cow;

use http::Method;

/// The name that a method is recorded and compared under.
pub(crate) fn canonical(method: &Method) -> Cow<'_, str> {
    let name = method.as_str();
    match name.bytes().any(|byte| byte.is_ascii_lowercase()) {
        true => Cow::Owned(name.to_ascii_uppercase()),
        false => Cow::Borrowed(name),
    }
}

/// Returns true if one of these methods is this one, without regard to case.
pub(crate) fn contains(methods: &[Method], method: &Method) -> bool {
    methods.iter().any(|other| other.as_str().eq_ignore_ascii_case(method.as_str()))
}

/// Returns true if a request with this method may have an effect on a service.
pub(crate) fn has_effect(method: &Method) -> bool {
    const WITHOUT: [Method; 5] = [Method::GET, Method::HEAD, Method::OPTIONS, Method::TRACE, Method::CONNECT];
    !contains(&WITHOUT, method)
}
