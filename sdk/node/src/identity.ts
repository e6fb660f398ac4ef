// Identifiers of records, callers and keys. `crates/core/vectors/record_ids.json` has examples.
import { bytesOf, lp, sha256, u64, uuid8 } from './bytes.js';

/** A part of a request that tells callers apart, with its value. */
export interface CallerPart {
  kind: string;
  identity: Uint8Array;
}

/** The digest of a caller; 32 zero bytes for a single tenant. */
export function callerDigest(parts: readonly CallerPart[]): Buffer {
  if (parts.length === 0) return Buffer.alloc(32);
  return sha256(lp('oncegate-caller-1'), ...parts.flatMap(({ kind, identity }) => [lp(kind), lp(identity)]));
}

/** The identifier of a record: 32 bytes. */
export function recordId(
  service: string | undefined,
  caller: Uint8Array,
  operation: readonly (string | Uint8Array)[],
  key: string | Uint8Array,
): Buffer {
  const owner = service === undefined ? caller : sha256(lp('oncegate-service-1'), lp(service), lp(caller));
  return sha256(lp('oncegate-record-1'), lp(owner), u64(operation.length), ...operation.map(lp), lp(key));
}

/** The mark of a caller, by which operators find its records: 8 bytes. */
export function callerTag(caller: Uint8Array): Buffer {
  return Buffer.from(caller.subarray(0, 8));
}

/** The mark of a key, by which operators find its records: 8 bytes. Upper and lower case have one mark. */
export function keyTag(key: string | Uint8Array): Buffer {
  const lower = Buffer.from(bytesOf(key));
  for (const [at, byte] of lower.entries()) if (byte >= 0x41 && byte <= 0x5a) lower[at] = byte + 0x20;
  return sha256(lp('oncegate-key-1'), lp(lower)).subarray(0, 8);
}

/** The key for a request that an attempt sends to another service: the same for each attempt, another one for each name. */
export function downstreamKey(record: Uint8Array, name: string): string {
  return uuid8(sha256(lp('oncegate-downstream-1'), lp(record), lp(name)));
}

/**
 * The key of a business identity: the same for the same name and parts, everywhere and in every release. A corrected request is
 * another intent, so it differs in a part: `derivedKey('payment', ['order-123', 'v2'])`.
 */
export function derivedKey(name: string, parts: readonly string[]): string {
  return uuid8(sha256(lp('oncegate-intent-1'), lp(name), u64(parts.length), ...parts.map(lp)));
}
