// The header fields that a record keeps, and those that identify callers. The lists are those of crates/http; a test compares
// them.
import type { StoredField } from './response.js';

export const KEPT: ReadonlySet<string> = new Set([
  'content-type', 'content-encoding', 'content-language', 'content-disposition', 'content-location', 'location', 'etag',
  'last-modified', 'link', 'cache-control', 'vary', 'content-range', 'accept-patch', 'preference-applied', 'deprecation', 'sunset',
]);

/** Fields that are never kept, even if they are configured: hop-by-hop, recomputed, secret, or temporary. */
export const NEVER: ReadonlySet<string> = new Set([
  'connection', 'keep-alive', 'proxy-connection', 'te', 'trailer', 'transfer-encoding', 'upgrade', 'content-length', 'date', 'age',
  'expires', 'set-cookie', 'set-cookie2', 'authorization', 'www-authenticate', 'authentication-info', 'authentication-control',
  'optional-www-authenticate', 'proxy-authenticate', 'proxy-authentication-info', 'proxy-authorization', 'clear-site-data',
  'strict-transport-security', 'alt-svc', 'via', 'server', 'traceparent', 'tracestate', 'baggage', 'b3', 'x-request-id',
  'request-id', 'x-correlation-id', 'x-trace-id', 'server-timing', 'retry-after', 'idempotency-key', 'idempotency-store',
  'idempotency-status',
]);

/** Fields in which clouds, networks and tracers name the request or the trace of a response. */
export const REQUEST_IDS: ReadonlySet<string> = new Set([
  'traceresponse', 'grpc-trace-bin', 'uber-trace-id', 'sentry-trace', 'newrelic', 'elastic-apm-traceparent', 'x-ot-span-context',
  'x-cloud-trace-context', 'x-guploader-uploadid', 'x-amzn-trace-id', 'x-amzn-requestid', 'x-amzn-request-id', 'x-amz-request-id',
  'x-amz-id-2', 'x-amz-apigw-id', 'apigw-requestid', 'x-ms-request-id', 'x-ms-client-request-id', 'x-ms-correlation-request-id',
  'x-ms-routing-request-id', 'x-msedge-ref', 'x-azure-ref', 'request-context', 'x-correlationid', 'correlation-id',
  'x-oss-request-id', 'eagleeye-traceid', 'cf-ray', 'cf-request-id', 'fly-request-id', 'x-vercel-id', 'x-nf-request-id',
  'x-akamai-request-id', 'x-served-by', 'x-timer', 'x-github-request-id', 'x-gitlab-meta', 'paypal-debug-id',
  'x-shopify-request-id', 'x-runtime',
]);

export const NEVER_PREFIXES: readonly string[] = [
  'access-control-', 'oncegate-', 'ratelimit', 'x-ratelimit-', 'x-b3-', 'x-datadog-', 'x-instana-', 'x-envoy-', 'x-amz-cf-',
  'x-newrelic-',
];

export function isNeverKept(name: string): boolean {
  return NEVER.has(name) || REQUEST_IDS.has(name) || NEVER_PREFIXES.some((prefix) => name.startsWith(prefix));
}

/** The fields of a response that a record keeps. */
export function keptFields(fields: readonly StoredField[], more: ReadonlySet<string>): StoredField[] {
  const nominated = new Set(
    fields.filter(([name]) => name === 'connection').flatMap(([, value]) => value.split(',').map((token) => token.trim().toLowerCase())),
  );
  return fields.filter(([name]) => (KEPT.has(name) || more.has(name)) && !nominated.has(name));
}

/** The fields of a stored response that are replayed: a service that completes its record itself may have put any field there. */
export function replayedFields(fields: readonly StoredField[]): StoredField[] {
  return fields.filter(([name, value]) => /^[!#$%&'*+\-.^_`|~0-9a-z]+$/.test(name) && isFieldValue(value) && !isNeverKept(name));
}

function isFieldValue(value: string): boolean {
   
  return !/[\u0000-\u0008\u000a-\u001f\u007f]/.test(value);
}

// Credentials

/** The fields of nearly all requests. They are no credentials. */
export const USUAL: ReadonlySet<string> = new Set([
  'accept', 'accept-encoding', 'accept-language', 'connection', 'content-encoding', 'content-length', 'content-type', 'forwarded',
  'host', 'idempotency-key', 'origin', 'referer', 'traceparent', 'user-agent', 'via', 'x-forwarded-for', 'x-forwarded-host',
  'x-forwarded-proto', 'x-request-id',
]);

/** Fields that identify a caller and have none of the usual parts in their names. */
export const LISTED: ReadonlySet<string> = new Set([
  'cookie', 'cookie2', 'remote-user', 'x-remote-user', 'x-forwarded-user', 'x-forwarded-email', 'x-auth-request-user',
  'x-consumer-id',
]);

/** The substrings of the names of such fields. */
export const CREDENTIAL_PARTS: readonly string[] = [
  'api-key', 'apikey', 'access-key', 'accesskey', 'app-key', 'appkey', 'assertion', 'bearer', 'credential', 'client-cert',
  'clientcert', 'client-dn', 'client-s-dn', 'client-key', 'dpop', 'functions-key', 'hmac', 'identity', 'jwt', 'license-key',
  'master-key', 'oidc', 'password', 'passwd', 'passphrase', 'principal', 'private-key', 'saml', 'secret', 'session', 'signature',
  'subscription-key', 'token', 'user-id', 'userid', 'user-name', 'username', 'user-email', 'user-login',
];

/** Fields that look like credentials and identify no caller. */
export const KNOWN_AS_NONE: readonly string[] = ['csrf', 'xsrf', 'antiforgery', 'anti-forgery', 'verificationtoken', 'captcha', 'idempoten'];

/** Returns true if a header field of this name, in lower case, usually identifies a caller. `Authorization` is not among them. */
export function isCredential(field: string): boolean {
  if (field === 'authorization' || USUAL.has(field)) return false;
  const name = hyphenated(field);
  if (LISTED.has(name)) return true;
  const looksLikeOne =
    CREDENTIAL_PARTS.some((part) => name.includes(part)) || /auth(?!or)|auth(?=oriz|oris)/.test(name);
  const isKnownAsNone =
    name === 'lock-token' ||
    name.includes('verification-token') ||
    /^(?:sec|www|oncegate)-/.test(name) ||
    KNOWN_AS_NONE.some((part) => name.includes(part));
  return looksLikeOne && !isKnownAsNone;
}

/** Returns true if the value of this field changes each time that a request is sent. */
export function changesEachTime(name: string): boolean {
  return /signature|dpop|hmac/.test(name);
}

const NEW_EACH_TIME = new Set(['digest', 'signature', 'hawk', 'mac', 'aws', 'sharedkey', 'sharedkeylite', 'negotiate', 'ntlm', 'hoba', 'mutual']);

/** Returns true if the credential in an `Authorization` field changes each time: it signs the request, the time or a counter. */
export function isNewEachTime(authorization: string): boolean {
  const end = authorization.indexOf(' ');
  const scheme = (end < 0 ? authorization : authorization.slice(0, end)).toLowerCase();
  const rest = end < 0 ? '' : authorization.slice(end);
  return (
    NEW_EACH_TIME.has(scheme) ||
    (rest !== '' && (scheme.includes('hmac') || scheme.startsWith('scram-'))) ||
    (scheme === 'oauth' && rest.includes('oauth_nonce'))
  );
}

/** A name with `-` for `_`: many services treat them alike. */
export function hyphenated(name: string): string {
  return name.replaceAll('_', '-');
}

/** Returns true if two names differ, and are equal to a service that treats `_` as `-`. */
export function isOtherSpelling(one: string, other: string): boolean {
  return one !== other && hyphenated(one) === hyphenated(other);
}

const OVERRIDES = new Set([
  'x-http-method-override', 'x-http-method', 'x-method-override', 'x-original-method', 'x-original-url', 'x-original-uri',
  'x-rewrite-url',
]);

/** Returns true if a field of this name makes some frameworks take another method or path. */
export function isOverride(name: string): boolean {
  return name.startsWith('x') && OVERRIDES.has(hyphenated(name));
}
