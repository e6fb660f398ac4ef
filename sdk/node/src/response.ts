// Stored responses as bytes. `crates/core/vectors/responses.json` has examples.

/** A field of a stored response. The name is in lower case; the value is bytes as a `latin1` text. */
export type StoredField = readonly [name: string, value: string];

export interface StoredResponse {
  status: number;
  headers: readonly StoredField[];
  trailers: readonly StoredField[];
  body: Buffer;
}

/** The largest stored response. */
export const MAX_RESPONSE_BYTES = 64 * 1024 * 1024;
/** The most header fields, and the most trailer fields, of a stored response. */
export const MAX_HEADER_FIELDS = 128;

/** Encodes a response. `undefined` if it cannot be stored: its status, its size, or the number of its fields. */
export function encodeResponse(response: StoredResponse): Buffer | undefined {
  const { status, headers, trailers, body } = response;
  if (status < 200 || status > 999 || headers.length > MAX_HEADER_FIELDS || trailers.length > MAX_HEADER_FIELDS) return undefined;
  const fields = trailers.length === 0 ? headers : [...headers, ...trailers];
  let length = 7 + body.length;
  for (const [name, value] of fields) length += 6 + name.length + value.length;
  if (length > MAX_RESPONSE_BYTES) return undefined;
  // Not from the pool: a record that is kept would keep a whole block of it.
  const encoded = Buffer.allocUnsafeSlow(length);
  encoded.writeUInt8(1, 0);
  encoded.writeUInt16BE(status, 1);
  encoded.writeUInt16BE(headers.length, 3);
  encoded.writeUInt16BE(trailers.length, 5);
  let at = 7;
  for (const [name, value] of fields) {
    encoded.writeUInt16BE(name.length, at);
    encoded.writeUInt32BE(value.length, at + 2);
    at += 6;
    at += encoded.write(name, at, 'latin1');
    at += encoded.write(value, at, 'latin1');
  }
  encoded.set(body, at);
  return encoded;
}

/**
 * Decodes a stored response.
 *
 * @throws {CorruptRecordError} if the bytes are not one
 */
export function decodeResponse(encoded: Buffer): StoredResponse {
  try {
    if (encoded.readUInt8(0) !== 1) throw new RangeError('version');
    const status = encoded.readUInt16BE(1);
    const counts = [encoded.readUInt16BE(3), encoded.readUInt16BE(5)];
    let at = 7;
    const [headers = [], trailers = []] = counts.map((count) => {
      const fields: StoredField[] = [];
      for (let field = 0; field < count; field += 1) {
        const nameLength = encoded.readUInt16BE(at);
        const valueLength = encoded.readUInt32BE(at + 2);
        const nameEnd = at + 6 + nameLength;
        const end = nameEnd + valueLength;
        if (end > encoded.length) throw new RangeError('length');
        fields.push([encoded.toString('latin1', at + 6, nameEnd), encoded.toString('latin1', nameEnd, end)]);
        at = end;
      }
      return fields;
    });
    return { status, headers, trailers, body: encoded.subarray(at) };
  } catch {
    throw new CorruptRecordError('the stored response of a record cannot be read');
  }
}

/** A record that cannot be read. Nothing was executed; an operator has to look at it. */
export class CorruptRecordError extends Error {
  override readonly name = 'CorruptRecordError';
}
