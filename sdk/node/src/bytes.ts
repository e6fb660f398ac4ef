// Bytes and hashes, in the notation of the contract: lp(x) is the length of x as 8 bytes, big-endian, and x.
import * as crypto from 'node:crypto';

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

/** A part of what is hashed: a number as `u64`, and a text in UTF-8 or bytes as `lp`. */
export type Part = string | Uint8Array | number;

/** Hashes in one call. Node has it since 20.12, and it costs half as much as an object that hashes. */
const hashAtOnce = (crypto as Partial<Pick<typeof crypto, 'hash'>>).hash;
/** The longest text that is written letter by letter: a call of native code costs more. */
const SHORT = 64;
const scratch = Buffer.allocUnsafeSlow(16 * 1024);

/** The SHA-256 of parts one after the other. */
export function digestOf(parts: readonly Part[]): Buffer {
  let most = 8 * parts.length;
  for (const part of parts) most += typeof part === 'string' ? 3 * part.length : typeof part === 'number' ? 0 : part.length;
  // Without this, a part of another type, which has no length, would leave nothing to hash.
  if (!(most >= 0)) throw new TypeError('a part to hash is neither a text, bytes nor a number');
  if (hashAtOnce === undefined || most > scratch.length) return digestOfStream(parts);
  let end = 0;
  for (const part of parts) {
    if (typeof part === 'number') {
      end = writeNumber(part, end);
      continue;
    }
    const start = end + 8;
    end = start + (typeof part === 'string' ? writeText(part, start) : writeBytes(part, start));
    writeNumber(end - start, start - 8);
  }
  return Buffer.from(hashAtOnce('sha256', scratch.subarray(0, end), 'binary'), 'latin1');
}

function digestOfStream(parts: readonly Part[]): Buffer {
  const hash = crypto.createHash('sha256');
  for (const part of parts) {
    if (typeof part === 'number') {
      hash.update(u64(part));
      continue;
    }
    const bytes = bytesOf(part);
    hash.update(u64(bytes.length)).update(bytes);
  }
  return hash.digest();
}

function writeNumber(value: number, at: number): number {
  scratch.writeUInt32BE(Math.floor(value / 2 ** 32), at);
  return scratch.writeUInt32BE(value % 2 ** 32, at + 4);
}

/** Returns the number of bytes. */
function writeText(text: string, at: number): number {
  if (text.length > SHORT) return scratch.write(text, at, 'utf8');
  for (let letter = 0; letter < text.length; letter += 1) {
    const code = text.charCodeAt(letter);
    if (code > 0x7f) return scratch.write(text, at, 'utf8');
    scratch[at + letter] = code;
  }
  return text.length;
}

function writeBytes(bytes: Uint8Array, at: number): number {
  if (bytes.length > SHORT) scratch.set(bytes, at);
  else for (let byte = 0; byte < bytes.length; byte += 1) scratch[at + byte] = bytes[byte] ?? 0;
  return bytes.length;
}

const MAX_REMEMBERED = 256;
const MAX_REMEMBERED_LENGTH = 256;

/** Returns a function that remembers its results for texts that come again and again. The memory for them is bounded. */
export function remembered<T>(compute: (text: string) => T): (text: string) => T {
  const results = new Map<string, T>();
  return (text) => {
    let result = results.get(text);
    if (result !== undefined || results.has(text)) return result as T;
    result = compute(text);
    if (text.length > MAX_REMEMBERED_LENGTH) return result;
    if (results.size >= MAX_REMEMBERED) results.clear();
    results.set(text, result);
    return result;
  };
}

/** ASCII letters in lower case. */
export function lower(text: string): string {
  return /[A-Z]/.test(text) ? text.replace(/[A-Z]+/g, (letters) => letters.toLowerCase()) : text;
}

/** The first 16 bytes of a digest as a UUID of version 8 (RFC 9562). */
export function uuid8(digest: Uint8Array): string {
  const bytes = Buffer.from(digest.subarray(0, 16));
  bytes[6] = ((bytes[6] ?? 0) & 0x0f) | 0x80;
  bytes[8] = ((bytes[8] ?? 0) & 0x3f) | 0x80;
  const hex = bytes.toString('hex');
  return [hex.slice(0, 8), hex.slice(8, 12), hex.slice(12, 16), hex.slice(16, 20), hex.slice(20)].join('-');
}

/**
 * A text without these letters at its ends. An expression such as `/x+$/` takes time with the square of the length, because it begins again
 * at each letter.
 */
export function withoutEnds(text: string, letters: string): string {
  let [start, end] = [0, text.length];
  while (start < end && letters.includes(text[start] ?? '')) start += 1;
  while (end > start && letters.includes(text[end - 1] ?? '')) end -= 1;
  return start === 0 && end === text.length ? text : text.slice(start, end);
}

/** The value of a header field without spaces and tabs at its ends. */
export function trimmedField(value: string): string {
  return withoutEnds(value, ' \t');
}

/** Compares as bytes, as the contract sorts. */
export function compareBytes(one: string, other: string): number {
  return Buffer.compare(Buffer.from(one, 'utf8'), Buffer.from(other, 'utf8'));
}

const random = Buffer.alloc(4096);
let used = random.length;

/** The identifier of an attempt: 16 random bytes. They are taken in stock, because each call of the generator costs as much as a hash. */
export function attemptId(): Buffer {
  if (used === random.length) {
    crypto.randomFillSync(random);
    used = 0;
  }
  used += 16;
  return Buffer.from(random.subarray(used - 16, used));
}
