// The header fields that a record keeps, and those that identify callers. The lists are those of crates/http.
import { contract } from './contract.js';
import type { StoredField } from './response.js';

const LISTS = contract.header_fields;

const KEPT: ReadonlySet<string> = new Set(LISTS.kept);

/** Fields that are never kept, even if they are configured: hop-by-hop, recomputed, secret, temporary, or names of one request. */
const NEVER: ReadonlySet<string> = new Set(LISTS.never);

/** Returns true if records keep a field of this name. */
export function isKept(name: string): boolean {
  return KEPT.has(name);
}

export function isNeverKept(name: string): boolean {
  return NEVER.has(name) || LISTS.never_prefixes.some((prefix) => name.startsWith(prefix));
}

/** The fields of a response that a record keeps. */
export function keptFields(fields: readonly StoredField[], more: ReadonlySet<string>): StoredField[] {
  const nominated = new Set(
    fields.filter(([name]) => name === 'connection').flatMap(([, value]) => value.split(',').map((token) => token.trim().toLowerCase())),
  );
  return fields.filter(([name]) => (KEPT.has(name) || more.has(name)) && !nominated.has(name));
}

/** Returns true if a field that middleware in front has set belongs to this request, and not to the response that is sent now. */
export function isOfRequest(name: string): boolean {
  return name === 'vary' || !(KEPT.has(name) || name === 'content-length' || name === 'transfer-encoding' || name === 'trailer' || name.startsWith('idempot'));
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
const USUAL: ReadonlySet<string> = new Set(LISTS.usual);

/** Fields that identify a caller and have none of the usual parts in their names. */
const LISTED: ReadonlySet<string> = new Set(LISTS.callers);

/** Returns true if a header field of this name, in lower case, usually identifies a caller. `Authorization` is not among them. */
export function isCredential(field: string): boolean {
  if (field === 'authorization' || USUAL.has(field)) return false;
  const name = hyphenated(field);
  if (LISTED.has(name)) return true;
  const looksLikeOne =
    LISTS.caller_parts.some((part) => name.includes(part)) || /auth(?!or)|auth(?=oriz|oris)/.test(name);
  const isKnownAsNone =
    name === 'lock-token' ||
    name.includes('verification-token') ||
    /^(?:sec|www|oncegate)-/.test(name) ||
    LISTS.no_caller_parts.some((part) => name.includes(part));
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
  return one.length === other.length && one !== other && hyphenated(one) === hyphenated(other);
}

const OVERRIDES = new Set([
  'x-http-method-override', 'x-http-method', 'x-method-override', 'x-original-method', 'x-original-url', 'x-original-uri',
  'x-rewrite-url',
]);

/** Returns true if a field of this name makes some frameworks take another method or path. */
export function isOverride(name: string): boolean {
  return name.startsWith('x') && OVERRIDES.has(hyphenated(name));
}
