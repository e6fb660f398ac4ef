// Requests and responses of Node's HTTP server, which Express and Fastify use, too.
import { EventEmitter } from 'node:events';
import { IncomingMessage, ServerResponse, type OutgoingHttpHeaders } from 'node:http';
import { constants } from 'node:http2';
import type { Duplex } from 'node:stream';
import type { Attempt, BodyRead, Execution, Gate, Oncegate, ParsedBody, ResponseHead } from './gate.js';
import { canonicalJsonOf } from './fingerprint.js';
import { isOfRequest } from './headers.js';
import type { WireResponse } from './refusal.js';
import { isBehindSidecar, type RequestHead } from './request.js';
import type { StoredField } from './response.js';

/** A request of Node, Express or Fastify (`request.raw`). A body parser may have read its body. */
export type NodeRequest = IncomingMessage & { originalUrl?: string; body?: unknown; rawBody?: unknown };

// A process may have loaded the library twice, by `import` and by `require`.
const MARK = Symbol.for('oncegate.execution');

/** What marks a request that is executed. One property costs less than two: with Express, each one has its price. */
interface Mark {
  owner: Oncegate;
  readonly attempt: Attempt;
}

/** The attempt under which a request is executed; undefined if it has no key. For Hono, give `c.req.raw`. */
export function attemptOf(request: object): Attempt | undefined {
  return (request as Record<symbol, Mark | undefined>)[MARK]?.attempt;
}

/** @internal */
export function setExecution(request: object, execution: Mark): void {
  (request as Record<symbol, Mark>)[MARK] = execution;
}

/** @internal */
export function clearExecution(request: object): void {
  (request as Record<symbol, Mark | undefined>)[MARK] = undefined;
}

/**
 * Returns true if middleware before this one executes the request already: it decides alone. A claim would wait for its own request.
 *
 * @throws if the other one has another store, because a request has one record
 * @internal
 */
export function isExecuting(request: object, own: Oncegate): boolean {
  const owner = (request as Record<symbol, Mark | undefined>)[MARK]?.owner;
  if (owner === undefined) return false;
  if (owner !== own) throw new Error('two middleware of oncegate with different stores are on the way of one request: leave one of them out');
  own.adviseOnce(
    'two middleware of oncegate are on the way of one request: the first one decides, and the options of the second one have no effect',
  );
  return true;
}

export function headOf(request: NodeRequest, source: unknown): RequestHead {
  let headers: StoredField[] = [];
  const { rawHeaders } = request;
  // Fastify keeps what hooks have set apart.
  const seen: SeenHeaders = (source as { headers?: SeenHeaders } | undefined)?.headers ?? request.headers;
  let isAsSent = true;
  let named = 0;
  for (let at = 0; at + 1 < rawHeaders.length; at += 2) {
    const name = (rawHeaders[at] ?? '').toLowerCase();
    const value = rawHeaders[at + 1] ?? '';
    if (name.startsWith(':')) {
      if (name === ':authority') headers.push(['host', value]);
      named += 1;
      continue;
    }
    headers.push([name, value]);
    named += 1;
    if (seen[name] !== value) isAsSent = false;
  }
  if (!isAsSent || Object.keys(seen).length !== named) headers = asSeen(headers, seen);
  if (headers.some(([, value]) => WIDE.test(value))) headers = headers.map(([name, value]) => [name, asBytes(value)]);
  return { method: request.method ?? 'GET', target: asBytes(request.originalUrl ?? request.url ?? '/'), headers, source };
}

const WIDE = /[^\u0000-\u00ff]/;

/** A text that middleware or an adapter has set may be more than bytes: cut to them, two users or two paths could be equal. */
function asBytes(text: string): string {
  return WIDE.test(text) ? Buffer.from(text).toString('latin1') : text;
}

type SeenHeaders = Readonly<Record<string, unknown>>;

/**
 * The lines of the header, as the handler sees them: middleware in front may have changed `request.headers`, for example to name the user
 * whom it has verified, and adapters of other servers fill only them. Fields that nobody has changed keep their lines.
 */
function asSeen(sent: readonly StoredField[], seen: SeenHeaders): StoredField[] {
  const lines = new Map<string, string[]>();
  for (const [name, value] of sent) {
    const before = lines.get(name);
    if (before === undefined) lines.set(name, [value]);
    else before.push(value);
  }
  const isUnchanged = (own: readonly string[], value: unknown): boolean =>
    Array.isArray(value) ? String(value) === String(own) : value === own[0] || value === own.join(', ') || value === own.join('; ');
  const isHostOfHttp2 = (name: string) => name === 'host' && seen['host'] === undefined && seen[':authority'] !== undefined;
  // Deleted once it is verified, a credential still tells callers apart.
  const isDeletedCredential = (name: string) => (name === 'authorization' || name === 'cookie') && seen[name] === undefined;
  const headers: StoredField[] = sent.filter(
    ([name]) => isHostOfHttp2(name) || isDeletedCredential(name) || isUnchanged(lines.get(name) ?? [], seen[name]),
  );
  for (const [given, value] of Object.entries(seen)) {
    const name = given.toLowerCase();
    if (value === undefined || value === null || name.startsWith(':') || isUnchanged(lines.get(name) ?? [], value)) continue;
    for (const line of Array.isArray(value) ? (value as unknown[]) : [value]) headers.push([name, String(line)]);
  }
  return headers;
}

/** The body was read before the middleware, and cannot be compared. */
export class BodyReadEarlyError extends Error {
  override readonly name = 'BodyReadEarlyError';
  constructor(what: string) {
    super(
      `${what} before oncegate: put oncegate before what reads it, such as a body parser. ` +
        'A parser of JSON may also keep the bytes: express.json({ verify: (req, _res, bytes) => { req.rawBody = bytes; } })',
    );
  }
}

/** The body of a request that a parser has read: its bytes, if they were kept, or its value. */
function bodyReadEarly(request: NodeRequest): Buffer | ParsedBody {
  const { rawBody, body } = request;
  for (const bytes of [rawBody, body]) {
    if (bytes instanceof Uint8Array) return Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    if (typeof bytes === 'string') return Buffer.from(bytes);
  }
  const type = request.headers['content-type'] ?? '';
  // Files are not in the parsed body, so two uploads would look alike.
  if (/^multipart\//i.test(type)) throw new BodyReadEarlyError('a multipart body was read');
  // Express 4, and others, say `{}` for what no parser has read.
  const isEmpty = typeof body === 'object' && body !== null && !Array.isArray(body) && Object.keys(body).length === 0;
  const isJson = /^application\/(?:[^;]*\+)?json\s*(?:;|$)/i.test(type) && !isOfExpress4(request);
  const isParsed = (request as { _body?: unknown })._body === true || (isJson && request.headers['content-length'] === '2');
  if (body === undefined || (isEmpty && !isParsed)) throw new BodyReadEarlyError('the body was read');
  // Equal values make equal bytes. A sidecar on the same store may compare other bytes, and then refuses.
  return { parsed: Buffer.from(canonicalJsonOf(body)) };
}

/** The parsers of Express 4 say with `_body` if they have read a body. Those of Express 5 leave `body` undefined if they have not. */
function isOfExpress4(request: NodeRequest): boolean {
  const { app } = request as { app?: { lazyrouter?: unknown } };
  return typeof app?.lazyrouter === 'function';
}

/** Returns true if no more bytes of the body will come. In HTTP/2, `complete` becomes true only when the handler has read all of them. */
function isWhole(request: NodeRequest): boolean {
  const { stream, _readableState } = request as { stream?: { readableEnded?: boolean }; _readableState?: { ended?: boolean } };
  if (stream?.readableEnded === true) return true;
  // The requests of `inject()` of Fastify are never complete, and those of adapters of functions in a cloud before they have a body.
  return _readableState?.ended ?? request.complete;
}

/**
 * Reads the whole body, and puts it back: body parsers after the middleware, and handlers that read the stream, find it as it was.
 */
export async function readNodeBody(
  request: NodeRequest,
  limit: number,
  timeoutMs: number,
  hold: (bytes: number) => boolean,
): Promise<BodyRead> {
  const { headers } = request;
  const length = headers['content-length'];
  // Those of `inject()` of Fastify come from no connection: streams have neither field.
  const isFramed = request.httpVersionMajor < 2 && !('_lightMyRequest' in request);
  if (length === '0' || (length === undefined && headers['transfer-encoding'] === undefined && isFramed)) {
    return Buffer.alloc(0);
  }
  if (request.readableDidRead || request.readableEnded) {
    const body = bodyReadEarly(request);
    return ('parsed' in body ? body.parsed : body).length > limit ? 'too-large' : body;
  }
  // What is read here goes to them, too, and what they read is missing here.
  if (request.readableFlowing === true || request.listenerCount('data') > 0 || request.listenerCount('readable') > 0) {
    throw new BodyReadEarlyError('a listener of `data` or `readable`, or a pipe, reads the body');
  }
  if (Number(length) > limit) return 'too-large';
  // The parser goes on with what came together with the head. A listener of `readable` in the same turn would end an empty body at once,
  // and then body parsers wait for an `end` that was before them.
  if (!isWhole(request)) await new Promise<void>((resolve) => { process.nextTick(resolve); });
  const chunks: Buffer[] = [];
  let size = 0;
  /** Takes what is there; the reason if it is too much. */
  const take = (): 'too-large' | 'budget' | undefined => {
    // With an explicit number, `read` never ends the stream, so that the bytes can be put back.
    while (request.readableLength > 0) {
      const chunk = request.read(request.readableLength) as Buffer | string | null;
      if (chunk === null) break;
      const bytes = typeof chunk === 'string' ? Buffer.from(chunk, request.readableEncoding ?? 'utf8') : chunk;
      size += bytes.length;
      if (size > limit) return 'too-large';
      if (!hold(bytes.length)) return 'budget';
      chunks.push(bytes);
    }
    return undefined;
  };
  const putBack = (): Buffer => {
    const body = Buffer.concat(chunks);
    if (body.length > 0) {
      request.unshift(body);
      // `@codegenie/serverless-express` says of each request, after its first turn, that it was read.
      if (!request.readable) request.readable = true;
    }
    return body;
  };
  if (isWhole(request)) return take() ?? putBack();
  if (request.destroyed) return 'incomplete';
  return new Promise((resolve) => {
    const finish = (read: BodyRead): void => {
      clearTimeout(timer);
      request.off('readable', onReadable);
      request.off('error', onBroken);
      request.off('close', onBroken);
      resolve(read);
    };
    const onBroken = (): void => { finish('incomplete'); };
    const onReadable = (): void => {
      const fault = take();
      if (fault !== undefined) { finish(fault); return; }
      if (isWhole(request)) finish(putBack());
      // Asks for more without an end of the stream.
      else if (request.readableLength === 0) request.read(0);
    };
    const timer = setTimeout(() => { finish('incomplete'); }, timeoutMs);
    request.on('readable', onReadable);
    request.on('error', onBroken);
    request.on('close', onBroken);
    if (request.readableLength > 0) onReadable();
  });
}

/** The fields of the framing. A whole response has a length and no trailers, and Node refuses `Trailer` for it. */
const FRAMING: ReadonlySet<string> = new Set(['content-length', 'transfer-encoding', 'trailer']);

/** The functions of a response, for one that other middleware has changed. */
type Raw = Readonly<Record<
  'setHeader' | 'removeHeader' | 'appendHeader' | 'writeHead' | 'write' | 'end' | 'flushHeaders' | 'emit' | 'destroy' | '_implicitHeader',
  AnyFunction
>>;

function rawOf(response: ServerResponse): Raw {
  // In HTTP/2 some do not exist.
  const { setHeader, removeHeader, appendHeader = nothing, writeHead, write, end, flushHeaders, emit, destroy, _implicitHeader = nothing } =
    response as unknown as Omit<Raw, 'appendHeader' | '_implicitHeader'> & Partial<Raw>;
  return { setHeader, removeHeader, appendHeader, writeHead, write, end, flushHeaders, emit, destroy, _implicitHeader };
}

const nothing = (): void => undefined;

/**
 * Sends the head of a whole response. Fields that middleware in front has set stay, unless they describe the body.
 * The head goes before the body: once it has counted the bytes, Node changes those of a `Content-Disposition` that is not ASCII.
 */
function sendHead(
  response: ServerResponse,
  raw: Raw,
  { status, headers }: Omit<WireResponse, 'body'>,
  length: number,
  inFront: readonly string[],
): void {
  const lines = grouped(headers);
  for (const name of FRAMING) lines.delete(name);
  for (const name of response.getHeaderNames()) {
    const line = lines.get(name);
    // Most fields are there already.
    if (line !== undefined && response.getHeader(name) === line) lines.delete(name);
    else if (line === undefined && !/^(access-control-|vary$)/.test(name) && !(inFront.includes(name) && isOfRequest(name))) {
      raw.removeHeader.call(response, name);
    }
  }
  for (const [name, line] of lines) raw.setHeader.call(response, name, line);
  response.statusCode = status;
  if (!isWithoutBody(status)) raw.setHeader.call(response, 'content-length', length);
  raw.writeHead.call(response, status);
}

/** Closes the connection of a response, or resets its stream in HTTP/2, so that a part of a response does not look whole. */
export function breakResponse(response: ServerResponse, destroy: AnyFunction = rawOf(response).destroy): void {
  const { req, stream } = response as { req?: IncomingMessage; stream?: { close(code: number): void } };
  if (stream !== undefined && req !== undefined && req.httpVersionMajor >= 2) stream.close(constants.NGHTTP2_INTERNAL_ERROR);
  else destroy.call(response);
}

const isWithoutBody = (status: number): boolean => status === 204 || status === 304;

/** Sends a whole response. `inFront`: the fields that middleware in front has set. */
export function sendWire(response: ServerResponse, wire: WireResponse, inFront: readonly string[], raw: Raw = rawOf(response)): void {
  sendHead(response, raw, wire, wire.body.length, inFront);
  raw.end.call(response, isWithoutBody(wire.status) ? undefined : wire.body);
}

function setFields(response: ServerResponse, raw: Pick<Raw, 'setHeader'>, fields: readonly StoredField[]): void {
  for (const [name, line] of grouped(fields)) raw.setHeader.call(response, name, line);
}

/** The value of each field: several, if it has several lines. */
function grouped(fields: readonly StoredField[]): Map<string, string | string[]> {
  const lines = new Map<string, string | string[]>();
  for (const [name, value] of fields) {
    const before = lines.get(name);
    if (before === undefined) lines.set(name, value);
    else if (typeof before === 'string') lines.set(name, [before, value]);
    else before.push(value);
  }
  return lines;
}

/** For each connection, the responses whose memory is held until the client has taken them. Responses in a queue get no event of their own. */
const OWED = new WeakMap<object, Set<() => void>>();

/** Counts the bytes of a response that was sent until its client has taken it, or is gone. */
function owe(gate: Pick<Execution, 'holdResponse'>, request: NodeRequest, response: ServerResponse, bytes: number): void {
  const { socket } = request;
  // The connection of an adapter of functions in a cloud may have no events: such a response is taken at once.
  if (bytes === 0 || typeof (socket as Partial<typeof socket> | null)?.once !== 'function') return;
  let owed = OWED.get(socket);
  if (owed === undefined) {
    const own = new Set<() => void>();
    owed = own;
    OWED.set(socket, own);
    socket.once('close', () => { for (const settle of [...own]) settle(); });
  }
  const all = owed;
  const settle = (): void => {
    if (all.delete(settle)) gate.holdResponse(-bytes);
  };
  all.add(settle);
  gate.holdResponse(bytes);
  response.once('finish', settle);
  response.once('close', settle);
  if ((socket as { destroyed?: boolean }).destroyed === true) settle();
}

/** Adds fields to a response when its head is sent, and removes those that only the middleware sets. */
export function decorate(response: ServerResponse, fields: readonly StoredField[], isBehindSidecar: boolean): void {
  // eslint-disable-next-line @typescript-eslint/unbound-method -- called with the response
  const writeHead = response.writeHead as (...args: unknown[]) => ServerResponse;
  response.writeHead = ((...args: unknown[]) => {
    const { status, reason, headers } = headArguments(args);
    response.writeHead = writeHead;
    applyHeaders(headers, (name, value) => { response.setHeader(name, value); });
    if (!isBehindSidecar) response.removeHeader('idempotency-store');
    response.removeHeader('idempotency-status');
    setFields(response, rawOf(response), fields);
    return reason === undefined ? writeHead.call(response, status) : writeHead.call(response, status, reason);
  });
}

type HeaderValue = number | string | readonly string[];

/** The status of a response, as Node reads it: a text of digits is a number, too. */
function statusCode(given: unknown): number {
  const status = (given as number) | 0;
  if (status < 100 || status > 999) {
    throw Object.assign(new RangeError(`Invalid status code: ${String(given)}`), { code: 'ERR_HTTP_INVALID_STATUS_CODE' });
  }
  return status;
}

function headArguments(args: readonly unknown[]): { status: number; reason: string | undefined; headers: unknown } {
  const [status, second, third] = args;
  const hasReason = typeof second === 'string';
  return { status: statusCode(status), reason: hasReason ? second : undefined, headers: hasReason ? third : (second ?? third) };
}

function applyHeaders(headers: unknown, set: (name: string, value: HeaderValue) => void): void {
  if (headers === undefined || headers === null) return;
  if (!Array.isArray(headers)) {
    for (const [name, value] of Object.entries(headers as OutgoingHttpHeaders)) if (value !== undefined) set(name, value);
    return;
  }
  const flat = (headers as unknown[]).flat() as HeaderValue[];
  const grouped = new Map<string, string[]>();
  for (let at = 0; at + 1 < flat.length; at += 2) {
    const name = String(flat[at]).toLowerCase();
    grouped.set(name, [...(grouped.get(name) ?? []), String(flat[at + 1])]);
  }
  for (const [name, values] of grouped) set(name, values.length === 1 ? (values[0] ?? '') : values);
}

function headersSent(): Error {
  const error = new Error('Cannot set headers after they are sent to the client') as Error & { code: string };
  error.code = 'ERR_HTTP_HEADERS_SENT';
  return error;
}

type AnyFunction = (...args: unknown[]) => unknown;

const HELD = Symbol('oncegate.held');
type Holding = ServerResponse & { [HELD]: HeldResponse };

// Shared by all responses: functions of each response would cost more than all else that is done for a request.
const METHODS: Readonly<Record<keyof Raw, (this: Holding, ...args: unknown[]) => unknown>> = {
  setHeader(...args) { return this[HELD].changeHead('setHeader', args); },
  removeHeader(...args) { return this[HELD].changeHead('removeHeader', args); },
  appendHeader(...args) { return this[HELD].changeHead('appendHeader', args); },
  writeHead(...args) { return this[HELD].writeHead(args); },
  flushHeaders() { this[HELD].flushHeaders(); },
  write(...args) { return this[HELD].write(args); },
  end(...args) { return this[HELD].end(args); },
  destroy(...args) { return this[HELD].destroy(args); },
  emit(...args) { return this[HELD].emit(args); },
  // Middleware such as express-session and compression calls it.
  _implicitHeader() { this[HELD].implicitHeader(); },
};

const stateOf = (name: 'headersSent' | 'writableEnded'): PropertyDescriptor => ({
  configurable: true,
  get(this: Holding): unknown {
    return this[HELD].seen(name) ?? Reflect.get(Object.getPrototypeOf(this) as object, name, this);
  },
});
const HEADERS_SENT = stateOf('headersSent');
const WRITABLE_ENDED = stateOf('writableEnded');
const SOCKET: PropertyDescriptor = {
  configurable: true,
  get(this: Holding): unknown { return this[HELD].socketSeen(); },
  set(this: Holding, socket: unknown) { this[HELD].setSocket(socket); },
};

/**
 * Puts the functions of a held response in the place of its own. They are named one by one: V8 turns an object that gets many
 * properties in another way into a dictionary, and then each use of it is slow.
 */
function override(response: ServerResponse, held: HeldResponse): void {
  const own = response as unknown as Record<keyof Raw, unknown> & { [HELD]: HeldResponse };
  own[HELD] = held;
  own.setHeader = METHODS.setHeader;
  own.removeHeader = METHODS.removeHeader;
  own.appendHeader = METHODS.appendHeader;
  own.writeHead = METHODS.writeHead;
  own.flushHeaders = METHODS.flushHeaders;
  own.write = METHODS.write;
  own.end = METHODS.end;
  own.destroy = METHODS.destroy;
  own.emit = METHODS.emit;
  own._implicitHeader = METHODS._implicitHeader;
  Object.defineProperty(response, 'headersSent', HEADERS_SENT);
  Object.defineProperty(response, 'writableEnded', WRITABLE_ENDED);
}

const LOCALLY_DESTROYED = Symbol('oncegate.locally-destroyed');

/** Notes if the service itself closes a connection, as Express does after a handler has failed in the middle of its response. */
function watchDestroy(socket: Duplex): void {
  const watched = socket as Duplex & { [LOCALLY_DESTROYED]?: boolean };
  if (watched[LOCALLY_DESTROYED] !== undefined) return;
  watched[LOCALLY_DESTROYED] = false;
  // eslint-disable-next-line @typescript-eslint/unbound-method -- called with the socket
  const { destroy } = watched;
  watched.destroy = function destroyed(this: typeof watched, error?: Error) {
    // When a client hangs up, Node destroys the connection after its end, or with an error.
    if (error === undefined && !this.destroyed && !this.readableEnded && !this.errored) this[LOCALLY_DESTROYED] = true;
    return destroy.call(this, error);
  };
}

const QUIET_EVENTS: ReadonlySet<unknown> & Iterable<string> = new Set(['close', 'end', 'error', 'finish']);
const CLOSING: ReadonlySet<PropertyKey> = new Set(['destroy', 'destroySoon', 'resetAndDestroy', 'end']);
const LISTENING: ReadonlySet<PropertyKey> = new Set([
  'on', 'once', 'off', 'addListener', 'removeListener', 'prependListener', 'prependOnceListener', 'listeners', 'listenerCount',
]);

/**
 * The connection, as a handler sees it while its response is held: a client that hangs up does not show. Express and others stop a file
 * that they send when the connection closes, and the effect of the handler is a fact by then.
 */
class QuietSocket implements ProxyHandler<Duplex> {
  readonly seen: Duplex;
  private events: EventEmitter | undefined;

  constructor(
    readonly socket: Duplex,
    private readonly held: {
      readonly isQuiet: boolean; readonly isWaiting: boolean; closeAfter: boolean; readonly response: ServerResponse; closesConnection(): void;
    },
  ) {
    this.seen = new Proxy(socket, this);
  }

  get(target: Duplex, name: PropertyKey): unknown {
    if (this.held.isQuiet) {
      if (name === 'destroyed' || name === 'closed' || name === 'readableEnded' || name === 'writableEnded') return false;
      if (name === 'writable' || name === 'readable') return true;
      // A handler that fails after its response has ended, or closes its connection: without this middleware, the client would have the
      // response by now.
      if ((name === 'destroy' || name === 'destroySoon' || name === 'end') && this.held.isWaiting) {
        return () => {
          this.held.closeAfter = true;
          return this.seen;
        };
      }
    }
    const value = Reflect.get(target, name, target) as unknown;
    if (typeof value !== 'function') return value;
    if (CLOSING.has(name)) {
      return (...args: unknown[]): unknown => {
        this.held.closesConnection();
        return (value as AnyFunction).apply(target, args);
      };
    }
    if (!LISTENING.has(name)) return (value as AnyFunction).bind(target);
    return (event: unknown, ...rest: unknown[]): unknown => {
      const own = QUIET_EVENTS.has(event) ? this.quietEvents() : target;
      const result = (own as unknown as Record<PropertyKey, AnyFunction>)[name]?.call(own, event, ...rest);
      return result === own ? this.seen : result;
    };
  }

  set(target: Duplex, name: PropertyKey, value: unknown): boolean {
    return Reflect.set(target, name, value, target);
  }

  private quietEvents(): EventEmitter {
    if (this.events === undefined) {
      // Emitted without a listener, `error` would end the process.
      this.events = new EventEmitter().on('error', nothing);
      if (!this.held.isQuiet) this.connect(this.socket);
    }
    return this.events;
  }

  emit(event: string, ...args: unknown[]): void {
    this.events?.emit(event, ...args);
  }

  /** From now on, the handler sees what the client does. */
  connect(socket: Duplex | null): void {
    if (this.events === undefined || socket === null) return;
    // The connection of an adapter of functions in a cloud may have no events.
    if (typeof (socket as Partial<Duplex>).once !== 'function') return;
    const relays = [...QUIET_EVENTS].map((event) => [event, (...args: unknown[]): void => { this.emit(event, ...args); }] as const);
    for (const [event, relay] of relays) socket.once(event, relay);
    // A connection has many responses.
    this.held.response.once('close', () => {
      for (const [event, relay] of relays) socket.off(event, relay);
    });
  }
}

/**
 * `on-finished` keeps one queue of callbacks for each message, in this property. What middleware in front has put there, such as a log,
 * is called when the connection itself closes, as without this middleware. What the handler adds, such as the end of a file that Express
 * sends, needs a queue of its own on the connection that the handler sees, or a client that hangs up would stop it.
 */
function hideQueue(message: object): void {
  const own = message as { __onFinished?: unknown };
  if (own.__onFinished !== undefined) own.__onFinished = undefined;
}

/**
 * Holds the response of a handler until the store has it. To the handler the response looks as if it was sent: its head cannot be
 * changed after the first write, and a second `end` has no effect. Only `finished` says so later: `server.close()` ends a
 * connection at once whose response has it.
 */
export class HeldResponse {
  private readonly raw: Raw;
  private readonly inFront: readonly string[];
  private head: ResponseHead | undefined;
  private readonly chunks: Buffer[] = [];
  private size = 0;
  /** `passing`: calls go to the response. `dead`: the client got another response, and calls have no effect. */
  private state: 'holding' | 'ended' | 'switching' | 'passing' | 'dead' = 'holding';
  private endCallback: AnyFunction | undefined;
  private held = 0;
  private isClosed = false;
  /** The handler has destroyed its response before its end. */
  private isAbandoned = false;
  /** The handler has closed its connection. */
  private isCutOff = false;
  /** It did so before its head, and may still end its response as a whole. */
  private goesOn = false;
  private readonly timer: NodeJS.Timeout;
  private afterSwitch: (() => void)[] = [];
  /** The time-out, or the end of the connection, while the store takes it. */
  private timingOut: Promise<unknown> | undefined;
  private readonly hasOwnSocket: boolean;
  private socket: unknown;
  private quiet: QuietSocket | undefined;
  /** True if the property of the response is the connection as a handler sees it. */
  private isInPlace = false;
  /** @internal */
  closeAfter = false;

  constructor(
    private readonly request: NodeRequest,
    /** @internal */
    readonly response: ServerResponse,
    private readonly execution: Execution,
    private readonly letGo: () => void,
  ) {
    this.raw = rawOf(response);
    this.inFront = response.getHeaderNames();
    this.timer = setTimeout(() => { this.timeOut().catch(this.cut); }, execution.handlerTimeoutMs);
    this.timer.unref();
    // In HTTP/2 it is a property of the class.
    this.hasOwnSocket = Object.hasOwn(response, 'socket');
    const { socket } = response;
    this.hideSocketOfRequest();
    hideQueue(response);
    hideQueue(request);
    // Express changes the prototype, and then V8 makes a new hidden class for each property that is added. A dictionary, which the
    // accessor makes of the object, costs a quarter of that.
    // Those of an adapter are two.
    const isOne = this.quiet === undefined || this.quiet.socket === socket;
    if (this.hasOwnSocket && socket !== null && isOne && Object.getPrototypeOf(response) === ServerResponse.prototype) {
      this.quiet ??= new QuietSocket(socket, this);
      (response as { socket: unknown }).socket = this.quiet.seen;
      this.isInPlace = true;
    } else {
      // A response in a queue gets its connection later.
      if (this.hasOwnSocket) this.socket = socket;
      Object.defineProperty(response, 'socket', SOCKET);
    }
    override(response, this);
  }

  /**
   * True while the handler must not see what the client does.
   * @internal
   */
  get isQuiet(): boolean {
    return this.state === 'holding' || this.state === 'ended' || this.state === 'switching' || this.timingOut !== undefined;
  }

  /**
   * True while the whole response waits for the store.
   * @internal
   */
  get isWaiting(): boolean {
    return this.state === 'ended' && !this.isAbandoned;
  }

  /** @internal */
  setSocket(socket: unknown): void {
    this.socket = socket;
  }

  /** @internal */
  socketSeen(): unknown {
    const { response } = this;
    const socket: unknown = this.hasOwnSocket ? this.socket : Reflect.get(Object.getPrototypeOf(response) as object, 'socket', response);
    if (!this.isQuiet || typeof socket !== 'object' || socket === null) return socket;
    this.quiet ??= new QuietSocket(socket as Duplex, this);
    return this.quiet.seen;
  }

  /** Body parsers take a request for finished if its connection is not readable, and skip its body. The handler would run without it. */
  private hideSocketOfRequest(): void {
    const { request } = this;
    const { socket } = request;
    if (request.httpVersionMajor >= 2 || !Object.hasOwn(request, 'socket') || (socket as unknown) === null) return;
    watchDestroy(socket);
    this.quiet = new QuietSocket(socket, this);
    (request as { socket: unknown }).socket = this.quiet.seen;
  }

  /** Gives the connection back, as it is, to the request and the response. */
  private restoreSocket(): void {
    const request = this.request as unknown as { socket: unknown };
    if (this.quiet !== undefined && request.socket === this.quiet.seen) request.socket = this.quiet.socket;
    if (!this.isInPlace || this.quiet === undefined) return;
    this.isInPlace = false;
    const response = this.response as unknown as { socket: unknown };
    if (response.socket === this.quiet.seen) response.socket = this.quiet.socket;
  }

  /** @internal */
  call(name: keyof Raw, args: readonly unknown[]): unknown {
    return this.raw[name].apply(this.response, args as unknown[]);
  }

  /** @internal */
  changeHead(name: 'setHeader' | 'removeHeader' | 'appendHeader', args: readonly unknown[]): unknown {
    if (this.state === 'dead' && !this.goesOn) return this.response;
    if (this.state !== 'passing' && this.head !== undefined) throw headersSent();
    return this.call(name, args);
  }

  /** @internal */
  writeHead(args: readonly unknown[]): unknown {
    const { response, raw } = this;
    if (this.state === 'passing') return this.call('writeHead', args);
    if (this.state === 'dead' && !this.goesOn) {
      response.statusCode = headArguments(args).status;
      return response;
    }
    if (this.head !== undefined) throw headersSent();
    const { status, reason, headers } = headArguments(args);
    response.statusCode = status;
    if (reason !== undefined) response.statusMessage = reason;
    applyHeaders(headers, (name, value) => { raw.setHeader.call(response, name, value); });
    this.takeHead();
    return response;
  }

  /** @internal */
  implicitHeader(): void {
    if (this.state === 'passing') this.call('_implicitHeader', []);
    else if (this.state !== 'dead') this.beginHead();
  }

  /** @internal */
  flushHeaders(): void {
    if (this.state === 'passing') this.call('flushHeaders', []);
    else if (this.state === 'holding' && this.execution.isEndless(this.beginHead())) this.switchToStream();
  }

  /** @internal */
  destroy(args: readonly unknown[]): unknown {
    if (this.state === 'holding') this.abandon('its handler destroyed its response').catch(this.cut);
    return this.call('destroy', args);
  }

  /**
   * A client that hangs up does not stop the handler, nor what it pipes into the response.
   * @internal
   */
  emit(args: readonly unknown[]): unknown {
    const [event] = args;
    if (this.isQuiet && (event === 'close' || event === 'finish')) {
      if (event === 'close') this.hangUp();
      return true;
    }
    // The server gives the connection to it, and a handler may close it.
    if (event === 'timeout' && this.isQuiet && this.quiet !== undefined && args[1] === this.quiet.socket) return this.call('emit', [event, this.quiet.seen]);
    return this.call('emit', args);
  }

  private hangUp(): void {
    this.isClosed = true;
    this.mark(false);
    // A handler that failed in the middle of its response goes on no more.
    const isLocal = (this.request.socket as Duplex & { [LOCALLY_DESTROYED]?: boolean })[LOCALLY_DESTROYED] === true;
    if (this.isCutOff || (isLocal && this.state === 'holding' && this.head !== undefined)) this.breakOff().catch(this.cut);
  }

  /**
   * The handler closes its connection, and so ends without a response. Its request does that, too, if it is destroyed before its end.
   * @internal
   */
  closesConnection(): void {
    if (this.state !== 'holding' || this.isCutOff || (this.request as { aborted?: boolean }).aborted === true) return;
    this.isCutOff = true;
    // Then no event of the connection comes.
    if (this.isClosed) this.breakOff().catch(this.cut);
  }

  /** The connection was destroyed before the end of the response. If the handler goes on and ends its response, it was done. */
  private async breakOff(): Promise<void> {
    if (this.state !== 'holding') return;
    const where = this.head === undefined ? 'before' : 'in the middle of';
    this.goesOn = this.head === undefined;
    this.state = 'dead';
    this.head = undefined;
    clearTimeout(this.timer);
    const failed = this.execution.fail(`its connection was destroyed ${where} the response`, true);
    this.timingOut = failed;
    await failed.finally(() => { this.timingOut = undefined; });
    this.open();
    this.mark(true);
    this.raw.emit.call(this.response, 'close');
    this.quiet?.emit('close');
    this.state = 'dead';
  }

  /** Says whether the response is destroyed, as Node does before it emits `close`. */
  private mark(isDestroyed: boolean): void {
    const response = this.response as unknown as Record<string, unknown>;
    if (!('_closed' in response)) return;
    response['destroyed'] = isDestroyed;
    response['_closed'] = isDestroyed;
  }

  /**
   * What the handler sees; undefined if it is what the response says itself.
   * @internal
   */
  seen(name: 'headersSent' | 'writableEnded'): boolean | undefined {
    if (this.state === 'passing') return undefined;
    return name === 'headersSent' ? this.head !== undefined : this.state === 'ended' || (this.state === 'dead' && !this.goesOn);
  }

  private takeHead(): ResponseHead {
    if (this.head !== undefined) return this.head;
    const headers: StoredField[] = [];
    for (const [name, value] of Object.entries(this.response.getHeaders())) {
      if (value === undefined) continue;
      for (const line of Array.isArray(value) ? value : [value]) headers.push([name, String(line)]);
    }
    this.head = { status: this.response.statusCode, headers };
    return this.head;
  }

  /** Takes the head that no call of `writeHead` has given. As in Node, middleware that waits for that call adds its fields now. */
  private beginHead(): ResponseHead {
    if (this.head === undefined) this.response.writeHead(this.response.statusCode);
    return this.takeHead();
  }

  /** @internal */
  write(args: readonly unknown[]): boolean {
    const { response, raw } = this;
    if (this.state === 'passing') return raw.write.apply(response, args as unknown[]) as boolean;
    if (args[0] === null) throw Object.assign(new TypeError('May not write null values to stream'), { code: 'ERR_STREAM_NULL_VALUES' });
    const [chunk, encoding, callback] = chunkArguments(args);
    if (this.state === 'ended' || this.state === 'dead') {
      // A part of a response is not kept.
      this.dropLate();
      const error = Object.assign(new Error('write after end'), { code: 'ERR_STREAM_WRITE_AFTER_END' });
      if (callback !== undefined) process.nextTick(callback, error);
      return false;
    }
    const head = this.beginHead();
    if (chunk !== undefined) this.keep(chunk, encoding);
    if (callback !== undefined) process.nextTick(callback);
    if (this.state === 'switching') return false;
    if (this.size > this.execution.maxResponseBody || this.execution.isEndless(head)) {
      this.switchToStream();
      return false;
    }
    return true;
  }

  /** The response of a handler that has closed its connection before. Its body is undefined if it cannot be kept. */
  private lateResponse(chunk: string | Uint8Array | undefined, encoding: BufferEncoding | undefined): [ResponseHead, Buffer | undefined] {
    const head = this.beginHead();
    const body = bytesOf(chunk ?? '', encoding);
    const declared = declaredLength(head);
    return [head, declared === undefined || declared === body.length ? body : undefined];
  }

  private dropLate(): void {
    if (!this.goesOn) return;
    this.goesOn = false;
    this.head = undefined;
  }

  private keep(chunk: string | Uint8Array, encoding: BufferEncoding | undefined): void {
    const bytes = bytesOf(chunk, encoding);
    this.chunks.push(bytes);
    this.size += bytes.length;
    this.held += bytes.length;
    this.execution.holdResponse(bytes.length);
    // With a time-out for idle connections, what the handler writes keeps its connection open, as without this middleware.
    const { client } = this.request as { client?: { timeout?: number; setTimeout?: (ms: number) => unknown } };
    if (client?.timeout !== undefined && client.timeout > 0) client.setTimeout?.(client.timeout);
  }

  /** @internal */
  end(args: readonly unknown[]): ServerResponse {
    const { response, raw } = this;
    if (this.state === 'passing') {
      raw.end.apply(response, args as unknown[]);
      return response;
    }
    const [chunk, encoding, callback] = chunkArguments(args);
    if (this.state === 'dead' && (this.goesOn || this.head === undefined)) {
      // The handler ran for too long, or has closed its connection, and has ended now: the outcome is known.
      const [late, body] = this.goesOn ? this.lateResponse(chunk, encoding) : [undefined, undefined];
      this.dropLate();
      const head = late ?? { status: statusCode(response.statusCode), headers: [] };
      this.head = head;
      // After the end that is stored before, which it replaces.
      void (async () => {
        await this.timingOut?.catch(nothing);
        await this.execution.finish(head, body);
      })().catch(nothing);
      return response;
    }
    if (this.state === 'ended' || this.state === 'dead') return response;
    if (this.state === 'switching') {
      if (chunk !== undefined) this.keep(chunk, encoding);
      this.afterSwitch.push(() => { raw.end.call(response, callback); });
      return response;
    }
    // Middleware may write what it has kept when the head begins.
    const head = this.beginHead();
    if (chunk !== undefined) this.keep(chunk, encoding);
    this.endCallback = callback;
    this.state = 'ended';
    clearTimeout(this.timer);
    this.finish(head).catch(this.cut);
    return response;
  }

  /** The response cannot be sent: its connection is closed, as that of every broken response. It must not end the process. */
  private readonly cut = (error: unknown): void => {
    this.execution.warn(`a response could not be sent: ${(error as Error).name}`);
    this.state = 'passing';
    this.restoreSocket();
    breakResponse(this.response, this.raw.destroy);
  };

  private async finish(head: ResponseHead): Promise<void> {
    const body = Buffer.concat(this.chunks);
    this.chunks.length = 0;
    const declared = declaredLength(head);
    if (declared !== undefined && declared !== body.length) {
      await this.finishIncomplete(head, body, declared);
      return;
    }
    this.send(await this.execution.finish(head, body));
  }

  /** A part of a response must not look whole: a retry is told that the request was done, and the connection of the first client is closed. */
  private async finishIncomplete(head: ResponseHead, body: Buffer, declared: number): Promise<void> {
    const wire = await this.execution.finishIncomplete(head, body, declared);
    this.open();
    const { response, raw } = this;
    if (this.isClosed) { this.close(); return; }
    sendHead(response, raw, wire, declared, this.inFront);
    if (declared > body.length) raw.write.call(response, body, () => { breakResponse(response, raw.destroy); });
    else raw.end.call(response, body.subarray(0, declared));
  }

  /** From now on, calls go to the response. */
  private open(): void {
    this.state = 'passing';
    this.restoreSocket();
    this.execution.holdResponse(-this.held);
    this.held = 0;
    if (!this.isClosed) this.quiet?.connect(this.response.socket);
  }

  /** The end of a response whose client was gone before it. To the handler it was sent: the store has it. */
  private close(): void {
    const { response } = this;
    // In HTTP/1, `writableEnded` reads it.
    if ('_closed' in response) (response as unknown as Record<string, unknown>)['finished'] = true;
    this.raw.emit.call(response, 'finish');
    this.mark(true);
    this.raw.emit.call(response, 'close');
    this.quiet?.emit('close');
  }

  private send(wire: WireResponse): void {
    this.open();
    const { response } = this;
    if (this.endCallback !== undefined) response.once('finish', this.endCallback);
    if (this.isClosed) { this.close(); return; }
    if (this.closeAfter || this.execution.isLastOfConnection) response.shouldKeepAlive = false;
    owe(this.execution, this.request, response, wire.body.length);
    sendWire(response, wire, this.inFront, this.raw);
  }

  /** The response is too large to be kept, or has no end: the record says so, and then the client gets it as it comes. */
  private switchToStream(): void {
    this.state = 'switching';
    clearTimeout(this.timer);
    void this.execution.finish(this.takeHead(), undefined).then((wire) => {
      const { response, raw } = this;
      this.open();
      // A stream ends when its client leaves, and handlers wait for that on the request, too.
      this.letGo();
      if (this.isClosed) {
        // What the handler still writes goes nowhere.
        this.mark(true);
        raw.emit.call(response, 'close');
        this.quiet?.emit('close');
        for (const next of this.afterSwitch.splice(0)) next();
        return;
      }
      for (const name of response.getHeaderNames()) raw.removeHeader.call(response, name);
      setFields(response, raw, wire.headers);
      response.statusCode = wire.status;
      raw.writeHead.call(response, wire.status);
      raw.flushHeaders.call(response);
      let isFree = true;
      for (const chunk of this.chunks.splice(0)) isFree = raw.write.call(response, chunk) as boolean;
      for (const next of this.afterSwitch.splice(0)) next();
      if (isFree) response.emit('drain');
    }).catch(this.cut);
  }

  /** The handler failed. If it has no response, the client is told so. What was sent of a stream must not look whole. */
  async fail(): Promise<void> {
    const { response, raw } = this;
    const breakOff = (): void => { if (!response.writableEnded) breakResponse(response, raw.destroy); };
    if (this.state === 'switching') this.afterSwitch.push(breakOff);
    if (this.state === 'passing') breakOff();
    if (this.state !== 'holding') return;
    this.state = 'ended';
    clearTimeout(this.timer);
    this.send(await this.execution.fail('its handler failed'));
  }

  /** The response was destroyed: there is none, and its handler may still run. */
  private async abandon(why: string): Promise<void> {
    this.state = 'ended';
    this.isAbandoned = true;
    clearTimeout(this.timer);
    await this.execution.fail(why, true);
    this.open();
    if (!this.isClosed) return;
    this.mark(true);
    this.raw.emit.call(this.response, 'close');
    this.quiet?.emit('close');
  }

  private async timeOut(): Promise<void> {
    if (this.state !== 'holding') return;
    this.state = 'dead';
    this.head = undefined;
    const failed = this.execution.fail('its handler ran for longer than handlerTimeout', true);
    this.timingOut = failed;
    this.send(await failed.finally(() => { this.timingOut = undefined; }));
    this.state = 'dead';
    this.response.statusCode = 200;
  }
}

/** The length that a head announces; undefined if the response has no body, or its end is known otherwise. */
export function declaredLength({ status, headers }: ResponseHead): number | undefined {
  if (status < 200 || isWithoutBody(status)) return undefined;
  const values = headers.filter(([name]) => name === 'content-length').map(([, value]) => value);
  const isChunked = headers.some(([name]) => name === 'transfer-encoding');
  return values.length === 1 && !isChunked && /^\d{1,15}$/.test(values[0] ?? '') ? Number(values[0]) : undefined;
}

function bytesOf(chunk: string | Uint8Array, encoding: BufferEncoding | undefined): Buffer {
  return typeof chunk === 'string' ? Buffer.from(chunk, encoding) : Buffer.from(chunk);
}

function chunkArguments(args: readonly unknown[]): [string | Uint8Array | undefined, BufferEncoding | undefined, AnyFunction | undefined] {
  const callback = args.find((arg) => typeof arg === 'function') as AnyFunction | undefined;
  const [chunk, encoding] = args.filter((arg) => typeof arg !== 'function');
  if (chunk !== undefined && chunk !== null && typeof chunk !== 'string' && !(chunk instanceof Uint8Array)) {
    throw Object.assign(new TypeError('The "chunk" argument must be of type string or an instance of Buffer or Uint8Array'), { code: 'ERR_INVALID_ARG_TYPE' });
  }
  return [chunk ?? undefined, typeof encoding === 'string' ? (encoding as BufferEncoding) : undefined, callback];
}

/** What is to be done with a request of Node. */
export type NodeAdmission = { kind: 'next' } | { kind: 'answered' } | { kind: 'held'; response: HeldResponse };

/**
 * Keeps a request readable that was read as a whole, and put back: a client that leaves must not take the body from a handler that has
 * not read it yet. Returns a function that ends this.
 */
function keepReadable(request: NodeRequest): () => void {
  const destroy = request.destroy.bind(request);
  let aborted: Error | undefined;
  const isAbort = (error: Error | undefined) => (error as NodeJS.ErrnoException | undefined)?.code === 'ECONNRESET';
  request.destroy = (error) => {
    if (!isAbort(error)) return destroy(error);
    aborted = error;
    return request;
  };
  return () => {
    request.destroy = destroy;
    if (aborted !== undefined) destroy(aborted);
  };
}

/**
 * Returns the head of a request about which the middleware decides. Undefined: it goes on at once, in the same turn, because a listener
 * of `data` in front may read its body by then. `source`: the request of the framework.
 */
export function concerns(gate: Gate, request: NodeRequest, response: ServerResponse, source: unknown = request): RequestHead | undefined {
  if (isExecuting(request, gate.shared)) return undefined;
  const head = headOf(request, source);
  if (!gate.passes(head)) return head;
  decorate(response, [], isBehindSidecar(head));
  return undefined;
}

/**
 * Makes a dictionary of a request or response whose prototype was changed, as Express does: after that, V8 makes a new hidden class for
 * each of them and each property that is added, and no code that uses them finds what it has seen before. A property that is taken out
 * and put back does it.
 */
function toDictionary(object: object, usual: object): void {
  if (Object.getPrototypeOf(object) === usual) return;
  const own = Object.getOwnPropertyDescriptor(object, 'socket');
  if (own?.configurable !== true || own.writable !== true || !Reflect.deleteProperty(object, 'socket')) return;
  (object as { socket: unknown }).socket = own.value;
}

/**
 * Decides about a request. If a handler is to run, its response is held until the store has it. `beforeAnswer` is called before the
 * middleware answers.
 */
export async function admitNode(
  gate: Gate,
  request: NodeRequest,
  response: ServerResponse,
  head: RequestHead,
  beforeAnswer?: () => void,
): Promise<NodeAdmission> {
  toDictionary(request, IncomingMessage.prototype);
  toDictionary(response, ServerResponse.prototype);
  let letGo = (): void => undefined;
  const admission = await gate.admit(head, async (limit, timeoutMs, hold) => {
    const body = await readNodeBody(request, limit, timeoutMs, hold);
    if (typeof body !== 'string') letGo = keepReadable(request);
    return body;
  });
  if (admission.kind !== 'execute') letGo();
  switch (admission.kind) {
    case 'pass':
      decorate(response, admission.fields, isBehindSidecar(head));
      return { kind: 'next' };
    case 'respond':
      owe(gate.shared, request, response, admission.response.body.length);
      beforeAnswer?.();
      sendWire(response, admission.response, response.getHeaderNames());
      return { kind: 'answered' };
    case 'execute':
      // Body parsers skip the body of a request whose client is gone, so that the handler would run without it.
      if ((request.socket as { destroyed?: boolean } | undefined)?.destroyed === true) {
        await admission.execution.release();
        return { kind: 'answered' };
      }
      setExecution(request, admission.execution);
      return { kind: 'held', response: new HeldResponse(request, response, admission.execution, letGo) };
  }
}
