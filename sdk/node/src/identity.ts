// Identifiers of records, callers and keys. `crates/core/vectors/record_ids.json` has examples.
import { bytesOf, digestOf, lower, uuid8 } from './bytes.js';

/** A part of a request that tells callers apart, with its value. */
export interface CallerPart {
  kind: string;
  identity: Uint8Array;
}

/** The digest of a caller; 32 zero bytes for a single tenant. */
export function callerDigest(parts: readonly CallerPart[]): Buffer {
  if (parts.length === 0) return Buffer.alloc(32);
  return digestOf(['oncegate-caller-1', ...parts.flatMap(({ kind, identity }) => [kind, identity])]);
}

/** The plain identifier of a record: 32 bytes. With an id secret the store has another one. */
export function recordId(
  service: string | undefined,
  caller: Uint8Array,
  operation: readonly (string | Uint8Array)[],
  key: string | Uint8Array,
): Buffer {
  const owner = service === undefined ? caller : digestOf(['oncegate-service-1', service, caller]);
  return digestOf(['oncegate-record-1', owner, operation.length, ...operation, key]);
}

/** The beginning of the digest of a caller: 8 bytes. */
export function callerTag(caller: Uint8Array): Buffer {
  return Buffer.from(caller.subarray(0, 8));
}

/** The digest of a key whose beginning is its mark. Upper and lower case have one mark. */
export function keyDigest(key: string | Uint8Array): Buffer {
  const folded = typeof key === 'string' ? lower(key) : Buffer.from(lower(bytesOf(key).toString('latin1')), 'latin1');
  return digestOf(['oncegate-key-1', folded]);
}

/** The key for a request that an attempt sends to another service: the same for each attempt, another one for each name. */
export function downstreamKey(record: Uint8Array, name: string): string {
  return uuid8(digestOf(['oncegate-downstream-1', record, textOf(name, 'downstreamKey', 'the name')]));
}

/**
 * The key of a business identity: the same for the same name and parts, in every process, language and release. A part is a text or a
 * whole number, which counts as its digits. A corrected request is another intent, so it differs in a part:
 * `derivedKey('payment', ['order-123', 'v2'])`.
 */
export function derivedKey(name: string, parts: readonly (string | number)[]): string {
  if (!Array.isArray(parts)) throw new TypeError("derivedKey: the parts are an array, such as derivedKey('payment', [order.id])");
  return uuid8(digestOf(['oncegate-intent-1', checkedPart(name, 'derivedKey', 'the name'), parts.length, ...parts.map((part, at) => textOf(part, 'derivedKey', `part ${String(at)}`))]));
}

/** A part of a derived key: without this check, identities that differ might have one key. */
function textOf(part: unknown, where: string, what: string): string {
  return checkedPart(Number.isSafeInteger(part) ? String(part) : part, where, what);
}

function checkedPart(part: unknown, where: string, what: string): string {
  if (typeof part !== 'string') {
    const found = typeof part === 'number' ? `the number ${String(part)}` : part === null ? 'null' : `of type ${typeof part}`;
    throw new TypeError(`${where}: ${what} is ${found}: give a text, or a whole number up to 2^53 - 1; write others as a text, such as String(order.id)`);
  }
  // As UTF-8, halves of surrogate pairs would all be the same character.
  if (/\p{Cs}/u.test(part)) throw new TypeError(`${where}: ${what} has half of a surrogate pair`);
  return part;
}
