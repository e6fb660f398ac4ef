// Bytes and hashes, in the notation of the contract: lp(x) is the length of x as 8 bytes, big-endian, and x.
import { createHash } from 'node:crypto';

/** A number as 8 bytes, big-endian. */
export function u64(value: number | bigint): Buffer {
  const bytes = Buffer.alloc(8);
  bytes.writeBigUInt64BE(BigInt(value));
  return bytes;
}

/** The bytes of a text in UTF-8. Bytes stay as they are. */
export function bytesOf(value: string | Uint8Array): Buffer {
  return typeof value === 'string' ? Buffer.from(value, 'utf8') : Buffer.from(value.buffer, value.byteOffset, value.byteLength);
}

/** The length of a value as 8 bytes, and the value. */
export function lp(value: string | Uint8Array): Buffer {
  const bytes = bytesOf(value);
  return Buffer.concat([u64(bytes.length), bytes]);
}

export function sha256(...parts: Uint8Array[]): Buffer {
  const hash = createHash('sha256');
  for (const part of parts) hash.update(part);
  return hash.digest();
}

/** The first 16 bytes of a digest as a UUID of version 8 (RFC 9562). */
export function uuid8(digest: Uint8Array): string {
  const bytes = Buffer.from(digest.subarray(0, 16));
  bytes[6] = ((bytes[6] ?? 0) & 0x0f) | 0x80;
  bytes[8] = ((bytes[8] ?? 0) & 0x3f) | 0x80;
  const hex = bytes.toString('hex');
  return [hex.slice(0, 8), hex.slice(8, 12), hex.slice(12, 16), hex.slice(16, 20), hex.slice(20)].join('-');
}

/** Compares as bytes, as the contract sorts. */
export function compareBytes(one: string, other: string): number {
  return Buffer.compare(Buffer.from(one, 'utf8'), Buffer.from(other, 'utf8'));
}
