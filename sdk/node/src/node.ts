// Requests and responses of Node's HTTP server, which Express and Fastify use, too.
import { type IncomingMessage, type OutgoingHttpHeaders, ServerResponse } from 'node:http';
import type { Attempt, BodyRead, Execution, Gate, ResponseHead } from './gate.js';
import { canonicalJsonOf } from './fingerprint.js';
import type { WireResponse } from './refusal.js';
import type { RequestHead } from './request.js';
import type { StoredField } from './response.js';

/** A request of Node, Express or Fastify (`request.raw`). A body parser may have read its body. */
export type NodeRequest = IncomingMessage & { originalUrl?: string; body?: unknown; rawBody?: unknown };

const ATTEMPT = Symbol.for('oncegate.attempt');

/** The attempt under which a request is executed; undefined if it has no key. For Hono, give `c.req.raw`. */
export function attemptOf(request: object): Attempt | undefined {
  return (request as Record<symbol, Attempt | undefined>)[ATTEMPT];
}

/** @internal */
export function setAttempt(request: object, attempt: Attempt): void {
  (request as Record<symbol, Attempt | undefined>)[ATTEMPT] = attempt;
}

export function headOf(request: NodeRequest): RequestHead {
  const headers: StoredField[] = [];
  const { rawHeaders } = request;
  for (let at = 0; at + 1 < rawHeaders.length; at += 2) {
    const name = (rawHeaders[at] ?? '').toLowerCase();
    const value = rawHeaders[at + 1] ?? '';
    if (name === ':authority') headers.push(['host', value]);
    else if (!name.startsWith(':')) headers.push([name, value]);
  }
  return { method: request.method ?? 'GET', target: request.originalUrl ?? request.url ?? '/', headers };
}

/** The body was read before the middleware, and cannot be compared. */
export class BodyReadEarlyError extends Error {
  override readonly name = 'BodyReadEarlyError';
  constructor(what: string) {
    super(
      `${what} before oncegate: put oncegate before the body parser, or let the parser keep the bytes: ` +
        'express.json({ verify: (req, _res, bytes) => { req.rawBody = bytes; } })',
    );
  }
}

/** The body of a request that a parser has read. */
function parsedBody(request: NodeRequest): Buffer {
  const { rawBody, body } = request;
  for (const bytes of [rawBody, body]) {
    if (bytes instanceof Uint8Array) return Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    if (typeof bytes === 'string') return Buffer.from(bytes);
  }
  const type = request.headers['content-type'] ?? '';
  // Files are not in the parsed body, so two uploads would look alike.
  if (/^multipart\//i.test(type)) throw new BodyReadEarlyError('a multipart body was read');
  if (body === undefined) throw new BodyReadEarlyError('the body was read');
  // Equal values make equal bytes. A sidecar on the same store may compare other bytes, and then refuses.
  return Buffer.from(canonicalJsonOf(body));
}

/**
 * Reads the whole body, and puts it back: body parsers after the middleware, and handlers that read the stream, find it as it was.
 */
export function readNodeBody(
  request: NodeRequest,
  limit: number,
  timeoutMs: number,
  hold: (bytes: number) => boolean,
): Promise<BodyRead> {
  const { headers } = request;
  if (headers['content-length'] === '0' || (headers['content-length'] === undefined && headers['transfer-encoding'] === undefined && request.httpVersionMajor < 2)) {
    return Promise.resolve(Buffer.alloc(0));
  }
  if (request.readableDidRead || request.readableEnded) {
    const body = parsedBody(request);
    return Promise.resolve(body.length > limit ? 'too-large' : body);
  }
  if (Number(headers['content-length']) > limit) return Promise.resolve('too-large');
  return new Promise((resolve) => {
    const chunks: Buffer[] = [];
    let size = 0;
    const finish = (read: BodyRead): void => {
      clearTimeout(timer);
      request.off('readable', onReadable);
      request.off('error', onBroken);
      request.off('close', onBroken);
      resolve(read);
    };
    const onBroken = (): void => { finish('incomplete'); };
    const onReadable = (): void => {
      // With an explicit number, `read` never ends the stream, so that the bytes can be put back.
      while (request.readableLength > 0) {
        const chunk = request.read(request.readableLength) as Buffer | string | null;
        if (chunk === null) break;
        const bytes = typeof chunk === 'string' ? Buffer.from(chunk, request.readableEncoding ?? 'utf8') : chunk;
        size += bytes.length;
        if (size > limit) { finish('too-large'); return; }
        if (!hold(bytes.length)) { finish('budget'); return; }
        chunks.push(bytes);
      }
      if (!request.complete) {
        // Asks for more without an end of the stream.
        if (request.readableLength === 0) request.read(0);
        return;
      }
      const body = Buffer.concat(chunks);
      if (body.length > 0) request.unshift(body);
      finish(body);
    };
    const timer = setTimeout(() => { finish('incomplete'); }, timeoutMs);
    request.on('readable', onReadable);
    request.on('error', onBroken);
    request.on('close', onBroken);
    if (request.readableLength > 0) onReadable();
  });
}

/** Sends a whole response. */
export function sendWire(response: ServerResponse, wire: WireResponse): void {
  for (const name of response.getHeaderNames()) response.removeHeader(name);
  setFields(response, wire.headers.filter(([name]) => name !== 'content-length' && name !== 'transfer-encoding'));
  response.statusCode = wire.status;
  if (wire.status !== 204 && wire.status !== 304) response.setHeader('content-length', wire.body.length);
  response.end(wire.status === 204 || wire.status === 304 ? undefined : wire.body);
}

function setFields(response: ServerResponse, fields: readonly StoredField[]): void {
  const grouped = new Map<string, string[]>();
  for (const [name, value] of fields) grouped.set(name, [...(grouped.get(name) ?? []), value]);
  for (const [name, values] of grouped) response.setHeader(name, values.length === 1 ? (values[0] ?? '') : values);
}

/** Adds fields to a response when its head is sent, and removes those that only the middleware sets. */
export function decorate(response: ServerResponse, fields: readonly StoredField[]): void {
  // eslint-disable-next-line @typescript-eslint/unbound-method -- called with the response
  const writeHead = response.writeHead as (...args: unknown[]) => ServerResponse;
  response.writeHead = ((...args: unknown[]) => {
    response.writeHead = writeHead;
    const { status, reason, headers } = headArguments(args);
    applyHeaders(headers, (name, value) => { response.setHeader(name, value); });
    response.removeHeader('idempotency-store');
    response.removeHeader('idempotency-status');
    setFields(response, fields);
    return reason === undefined ? writeHead.call(response, status) : writeHead.call(response, status, reason);
  });
}

type HeaderValue = number | string | readonly string[];

function headArguments(args: readonly unknown[]): { status: number; reason: string | undefined; headers: unknown } {
  const [status, second, third] = args;
  const hasReason = typeof second === 'string';
  return { status: status as number, reason: hasReason ? second : undefined, headers: hasReason ? third : (second ?? third) };
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

/**
 * Holds the response of a handler until the store has it. To the handler the response looks as if it was sent: its head cannot be
 * changed after the first write, and a second `end` has no effect.
 */
export class HeldResponse {
  private readonly raw: Readonly<Record<'setHeader' | 'removeHeader' | 'appendHeader' | 'writeHead' | 'write' | 'end' | 'flushHeaders' | 'emit' | 'destroy', AnyFunction>>;
  private head: ResponseHead | undefined;
  private readonly chunks: Buffer[] = [];
  private size = 0;
  /** `passing`: calls go to the response. `dead`: the client got another response, and calls have no effect. */
  private state: 'holding' | 'ended' | 'switching' | 'passing' | 'dead' = 'holding';
  private endCallback: AnyFunction | undefined;
  private held = 0;
  private isClosed = false;
  private readonly timer: NodeJS.Timeout;
  private afterSwitch: (() => void)[] = [];

  constructor(
    private readonly response: ServerResponse,
    private readonly execution: Execution,
  ) {
    const of = (name: string) => (response as unknown as Record<string, AnyFunction>)[name] ?? (() => undefined);
    this.raw = {
      setHeader: of('setHeader'), removeHeader: of('removeHeader'), appendHeader: of('appendHeader'), writeHead: of('writeHead'),
      write: of('write'), end: of('end'), flushHeaders: of('flushHeaders'), emit: of('emit'), destroy: of('destroy'),
    };
    this.timer = setTimeout(() => { void this.timeOut(); }, execution.handlerTimeoutMs);
    this.timer.unref();
    this.patch();
  }

  private patch(): void {
    const { response, raw } = this;
    const own = response as unknown as Record<string, AnyFunction>;
    const direct = (name: keyof HeldResponse['raw']) => (...args: unknown[]) => raw[name].apply(response, args);
    const changesHead = (name: 'setHeader' | 'removeHeader' | 'appendHeader') => {
      own[name] = (...args: unknown[]) => {
        if (this.state === 'dead') return response;
        if (this.state !== 'passing' && this.head !== undefined) throw headersSent();
        return direct(name)(...args);
      };
    };
    changesHead('setHeader');
    changesHead('removeHeader');
    changesHead('appendHeader');
    own['writeHead'] = (...args: unknown[]) => {
      if (this.state === 'passing') return direct('writeHead')(...args);
      if (this.state === 'dead') {
        response.statusCode = headArguments(args).status;
        return response;
      }
      if (this.head !== undefined) throw headersSent();
      const { status, reason, headers } = headArguments(args);
      if (!Number.isInteger(status) || status < 100 || status > 999) throw new RangeError(`Invalid status code: ${String(status)}`);
      response.statusCode = status;
      if (reason !== undefined) response.statusMessage = reason;
      applyHeaders(headers, (name, value) => { raw.setHeader.call(response, name, value); });
      this.takeHead();
      return response;
    };
    own['flushHeaders'] = () => {
      if (this.state === 'passing') { direct('flushHeaders')(); return; }
      if (this.state === 'holding' && this.execution.isEndless(this.takeHead())) this.switchToStream();
    };
    own['write'] = (...args: unknown[]) => this.write(args);
    own['end'] = (...args: unknown[]) => this.end(args);
    own['destroy'] = (...args: unknown[]) => {
      if (this.state === 'holding') void this.abandon();
      return direct('destroy')(...args);
    };
    // A client that hangs up does not stop the handler, nor what it pipes into the response.
    own['emit'] = (...args: unknown[]) => {
      if (args[0] === 'close' && (this.state === 'holding' || this.state === 'ended')) {
        this.isClosed = true;
        return true;
      }
      return direct('emit')(...args);
    };
    const property = (name: string, isNow: () => boolean) => {
      const inherited = (): unknown => Reflect.get(ServerResponse.prototype, name, response);
      Object.defineProperty(response, name, {
        configurable: true,
        get: () => (this.state === 'passing' ? inherited() : isNow()),
      });
    };
    property('headersSent', () => this.head !== undefined);
    property('writableEnded', () => this.state === 'ended' || this.state === 'dead');
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

  private write(args: readonly unknown[]): boolean {
    const { response, raw } = this;
    if (this.state === 'passing') return raw.write.apply(response, args as unknown[]) as boolean;
    const [chunk, encoding, callback] = chunkArguments(args);
    if (this.state === 'ended' || this.state === 'dead') {
      const error = Object.assign(new Error('write after end'), { code: 'ERR_STREAM_WRITE_AFTER_END' });
      if (callback !== undefined) process.nextTick(callback, error);
      return false;
    }
    const head = this.takeHead();
    if (chunk !== undefined) this.keep(chunk, encoding);
    if (callback !== undefined) process.nextTick(callback);
    if (this.state === 'switching') return false;
    if (this.size > this.execution.maxResponseBody || this.execution.isEndless(head)) {
      this.switchToStream();
      return false;
    }
    return true;
  }

  private keep(chunk: unknown, encoding: BufferEncoding | undefined): void {
    if (typeof chunk !== 'string' && !(chunk instanceof Uint8Array)) {
      throw new TypeError('The "chunk" argument must be of type string or an instance of Buffer or Uint8Array');
    }
    const bytes = typeof chunk === 'string' ? Buffer.from(chunk, encoding) : Buffer.from(chunk);
    this.chunks.push(bytes);
    this.size += bytes.length;
    this.held += bytes.length;
    this.execution.holdResponse(bytes.length);
  }

  private end(args: readonly unknown[]): ServerResponse {
    const { response, raw } = this;
    if (this.state === 'passing') {
      raw.end.apply(response, args as unknown[]);
      return response;
    }
    const [chunk, encoding, callback] = chunkArguments(args);
    if (this.state === 'dead' && this.head === undefined) {
      // The handler ran for too long, and has ended now: the outcome is known, and its response is lost.
      this.head = { status: response.statusCode, headers: [] };
      void this.execution.finish(this.head, undefined);
      return response;
    }
    if (this.state === 'ended' || this.state === 'dead') return response;
    if (this.state === 'switching') {
      if (chunk !== undefined) this.keep(chunk, encoding);
      this.afterSwitch.push(() => { raw.end.call(response, callback); });
      return response;
    }
    const head = this.takeHead();
    if (chunk !== undefined) this.keep(chunk, encoding);
    this.endCallback = callback;
    this.state = 'ended';
    clearTimeout(this.timer);
    void this.finish(head);
    return response;
  }

  private async finish(head: ResponseHead): Promise<void> {
    const body = Buffer.concat(this.chunks);
    const wire = await this.execution.finish(head, body);
    this.open();
    if (this.endCallback !== undefined) this.response.once('finish', this.endCallback);
    sendWire(this.response, wire);
  }

  /** From now on, calls go to the response. */
  private open(): void {
    this.state = 'passing';
    this.execution.holdResponse(-this.held);
    this.held = 0;
    if (this.isClosed) this.raw.emit.call(this.response, 'close');
  }

  /** The response is too large to be kept, or has no end: the record says so, and then the client gets it as it comes. */
  private switchToStream(): void {
    this.state = 'switching';
    clearTimeout(this.timer);
    void this.execution.finish(this.takeHead(), undefined).then((wire) => {
      const { response } = this;
      this.open();
      for (const name of response.getHeaderNames()) response.removeHeader(name);
      setFields(response, wire.headers);
      response.statusCode = wire.status;
      response.flushHeaders();
      let isFree = true;
      for (const chunk of this.chunks.splice(0)) isFree = response.write(chunk);
      for (const next of this.afterSwitch.splice(0)) next();
      if (isFree) response.emit('drain');
    });
  }

  /** The handler failed without a response. */
  async fail(): Promise<void> {
    if (this.state !== 'holding') return;
    this.state = 'ended';
    clearTimeout(this.timer);
    const wire = await this.execution.fail();
    this.open();
    sendWire(this.response, wire);
  }

  private async abandon(): Promise<void> {
    this.state = 'ended';
    clearTimeout(this.timer);
    await this.execution.fail();
    this.open();
  }

  private async timeOut(): Promise<void> {
    if (this.state !== 'holding') return;
    this.state = 'ended';
    this.head = undefined;
    const wire = await this.execution.fail(true);
    this.open();
    const { response } = this;
    sendWire(response, wire);
    this.state = 'dead';
    response.statusCode = 200;
  }
}

function chunkArguments(args: readonly unknown[]): [unknown, BufferEncoding | undefined, AnyFunction | undefined] {
  const callback = args.find((arg) => typeof arg === 'function') as AnyFunction | undefined;
  const [chunk, encoding] = args.filter((arg) => typeof arg !== 'function');
  return [chunk ?? undefined, typeof encoding === 'string' ? (encoding as BufferEncoding) : undefined, callback];
}

/** What is to be done with a request of Node. */
export type NodeAdmission = { kind: 'next' } | { kind: 'answered' } | { kind: 'held'; response: HeldResponse };

/** Decides about a request. If a handler is to run, its response is held until the store has it. */
export async function admitNode(gate: Gate, request: NodeRequest, response: ServerResponse): Promise<NodeAdmission> {
  const head = headOf(request);
  const admission = await gate.admit(head, (limit, timeoutMs, hold) => readNodeBody(request, limit, timeoutMs, hold));
  switch (admission.kind) {
    case 'pass':
      if (gate.covers(head.method)) decorate(response, admission.fields);
      return { kind: 'next' };
    case 'respond':
      sendWire(response, admission.response);
      return { kind: 'answered' };
    case 'execute':
      setAttempt(request, admission.execution.attempt);
      return { kind: 'held', response: new HeldResponse(response, admission.execution) };
  }
}
