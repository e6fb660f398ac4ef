//! Who a caller is: what a key is unique within.

use std::fmt;
use std::sync::Arc;

use http::header::HeaderName;
use http::request::Parts;
use oncegate_core::Scope;

/// Tells callers apart, so that one caller's key never meets another's record.
///
/// The identity is hashed at once; neither it nor the credential it comes from is stored.
#[derive(Clone)]
pub struct CallerScope(Kind);

#[derive(Clone)]
enum Kind {
    /// `anonymous` is the scope of callers without the field, where they have one.
    Header {
        name: HeaderName,
        kind: Arc<str>,
        anonymous: Option<Scope<'static>>,
    },
    SingleTenant,
    Function(Arc<Function>),
}

type Function = dyn Fn(&Parts) -> Option<Vec<u8>> + Send + Sync;

impl Default for CallerScope {
    /// By the `Authorization` field; callers without one share a scope.
    fn default() -> Self {
        Self::header(http::header::AUTHORIZATION)
    }
}

impl CallerScope {
    /// Tells callers apart by the value of a header field. All callers without the field share one scope.
    ///
    /// Where the field is a credential, a caller whose credential is rotated is another caller: a retry with the new
    /// credential executes again. Where the field is set by a trusted hop in front (such as `x-tenant-id`), use
    /// [`required_header`](Self::required_header) so that a request that came around that hop is refused.
    #[must_use]
    pub fn header(name: HeaderName) -> Self {
        let kind = format!("header:{name}").into();
        Self(Kind::Header { name, kind, anonymous: Some(Scope::caller("anonymous", b"")) })
    }

    /// The same, but a request without the field is refused.
    #[must_use]
    pub fn required_header(name: HeaderName) -> Self {
        let kind = format!("header:{name}").into();
        Self(Kind::Header { name, kind, anonymous: None })
    }

    /// All callers share one scope: right where there is one caller only, or where keys are unique by themselves and no
    /// caller may guess another's.
    #[must_use]
    pub const fn single_tenant() -> Self {
        Self(Kind::SingleTenant)
    }

    /// Tells callers apart by what the function reads from the request, such as a verified claim that an earlier layer put
    /// into its extensions. `None` refuses the request.
    #[must_use]
    pub fn from_fn(identity: impl Fn(&Parts) -> Option<Vec<u8>> + Send + Sync + 'static) -> Self {
        Self(Kind::Function(Arc::new(identity)))
    }

    /// The header field that tells callers apart, where one does.
    #[must_use]
    pub fn header_name(&self) -> Option<&HeaderName> {
        match &self.0 {
            Kind::Header { name, .. } => Some(name),
            Kind::SingleTenant | Kind::Function(_) => None,
        }
    }

    /// Whether all callers share one scope.
    #[must_use]
    pub const fn is_single_tenant(&self) -> bool {
        matches!(self.0, Kind::SingleTenant)
    }

    /// The caller's scope; `None` where the request has none and must be refused.
    pub(crate) fn of(&self, parts: &Parts) -> Option<Scope<'static>> {
        match &self.0 {
            Kind::SingleTenant => Some(Scope::single_tenant()),
            Kind::Function(identity) => identity(parts).map(|identity| Scope::caller("function", &identity)),
            Kind::Header { name, kind, anonymous } => {
                let mut values = parts.headers.get_all(name).iter();
                match (values.next(), values.next()) {
                    (Some(value), None) => Some(Scope::caller(kind, value.as_bytes())),
                    // Two credentials: whose request it is cannot be said.
                    (Some(_), Some(_)) => None,
                    (None, _) => *anonymous,
                }
            }
        }
    }
}

impl fmt::Debug for CallerScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::Header { kind, anonymous, .. } => {
                write!(f, "{kind}{}", if anonymous.is_none() { " (required)" } else { "" })
            }
            Kind::SingleTenant => f.write_str("single-tenant"),
            Kind::Function(_) => f.write_str("function"),
        }
    }
}
