// What a client needs to send one intent more than once: one valid key, and the same bytes for each attempt.
import { trimmedField } from './bytes.js';

const MAX_KEY_LENGTH = 255;
/** What a value that is missing turns into as a text. It would be one key for all intents. */
const MISSING = new Set(['undefined', 'null', 'nil', '<nil>', 'none', 'nan', '[object object]']);
const QUOTED = /^"((?:[ !#-[\]-~]|\\["\\])*)"$/;

/** Returns the key as its header field has it, or throws: without a valid key, each attempt may take effect. The texts do not repeat the key. */
export function checkedKey(value: unknown): string {
  const fail = (text: string): never => {
    throw new TypeError(`${text}; nothing was sent`);
  };
  if (typeof value !== 'string') return fail(`the key is ${value === null ? 'null' : `of the type ${typeof value}`}, and not a text; give the key of the intent`);
  const field = trimmedField(value);
  const quoted = QUOTED.exec(field)?.[1];
  const key = quoted === undefined ? field : quoted.replace(/\\(.)/g, '$1');
  if (/^ *$/.test(key)) return fail('the key is empty; give 1 to 255 characters, such as a UUID');
  if (MISSING.has(key.toLowerCase())) return fail(`the key is the text ${JSON.stringify(key)}, as of a missing value; give the key of the intent`);
  if (quoted === undefined && !/^[!#-+\--~]*$/.test(field)) {
    return fail('the key has a character that is not allowed; give visible ASCII characters without quote and comma, or put the key in quotes');
  }
  if (key.length > MAX_KEY_LENGTH) return fail(`the key has ${String(key.length)} characters; at most ${String(MAX_KEY_LENGTH)} are allowed`);
  return field;
}

/** The largest body that is copied so that it can be sent again. */
const MAX_COPY_BYTES = 64 * 1024 * 1024;

/** A body for all attempts. */
export interface IntentBody {
  body: BodyInit | undefined;
  /** The media type that belongs to the body, if `fetch` would not know it any more. */
  contentType: string | undefined;
  /** False if the body can be read only once. */
  isRepeatable: boolean;
}

/** By name and not by class: a test runner or a library may have classes of its own. */
function className(value: object): string {
  return Object.prototype.toString.call(value).slice(8, -1);
}

/**
 * Makes a body that has the same bytes for each attempt, also if the caller changes theirs, and if `fetch` writes it anew, as a form with
 * a new boundary. A stream, and whatever else is not known, is sent once.
 */
export async function intentBody(body: unknown, usesFetch: boolean): Promise<IntentBody> {
  const once = { body: body as BodyInit, contentType: undefined, isRepeatable: false };
  const copy = (bytes: Uint8Array, contentType?: string | null) => ({ body: bytes as unknown as BodyInit, contentType: contentType ?? undefined, isRepeatable: true });
  if (body === null || body === undefined) return { body: undefined, contentType: undefined, isRepeatable: true };
  if (typeof body === 'string') return { ...once, isRepeatable: true };
  if (ArrayBuffer.isView(body)) return copy(new Uint8Array(body.buffer, body.byteOffset, body.byteLength).slice());
  if (typeof body !== 'object') throw new TypeError(`the body is of the type ${typeof body}; give a text, bytes, a form or a stream; nothing was sent`);
  switch (className(body)) {
    case 'ArrayBuffer':
      return copy(new Uint8Array(body as ArrayBuffer).slice());
    case 'URLSearchParams':
      return { body: (body as URLSearchParams).toString(), contentType: 'application/x-www-form-urlencoded;charset=UTF-8', isRepeatable: true };
    case 'Blob':
    case 'File':
      // It never changes: if its file does, reading it is an error.
      return { ...once, isRepeatable: true };
    case 'FormData': {
      if (!(body instanceof FormData)) break;
      let size = 0;
      for (const [, value] of body) size += typeof value === 'string' ? value.length : value.size;
      if (size > MAX_COPY_BYTES) return once;
      const encoded = new Response(body);
      return copy(new Uint8Array(await encoded.arrayBuffer()), encoded.headers.get('content-type'));
    }
    case 'ReadableStream':
      return once;
  }
  // `fetch` takes each asynchronous iterable, and makes a text of everything else.
  if (usesFetch && !(Symbol.asyncIterator in body)) {
    throw new TypeError(`the body is of the class ${className(body)}, which fetch does not send; give a text, bytes, a form or a stream; nothing was sent`);
  }
  return once;
}

/** The body of a `Request`, which can be read once, in memory. */
export async function bytesOfRequest(request: Request): Promise<Uint8Array | undefined> {
  if (request.body === null) return undefined;
  const chunks: Uint8Array[] = [];
  let size = 0;
  for await (const chunk of request.body as unknown as AsyncIterable<Uint8Array>) {
    size += chunk.length;
    if (size > MAX_COPY_BYTES) throw new TypeError(`the body is larger than ${String(MAX_COPY_BYTES)} bytes, so it cannot be sent again; nothing was sent`);
    chunks.push(chunk);
  }
  return Buffer.concat(chunks);
}

/** Returns true for a `Request`, also of another library. */
export function isRequest(input: unknown): input is Request {
  return typeof input === 'object' && input !== null && className(input) === 'Request';
}
