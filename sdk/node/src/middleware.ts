// The middleware of each framework.
import { AsyncLocalStorage } from 'node:async_hooks';
import type { IncomingMessage, OutgoingHttpHeaders, ServerResponse } from 'node:http';
import { types } from 'node:util';
import type { Execution, Gate, Oncegate } from './gate.js';
import { admitNode, BodyReadEarlyError, breakResponse, clearExecution, concerns, declaredLength, isExecuting, setExecution, type NodeRequest } from './node.js';
import type { WireResponse } from './refusal.js';
import { isBehindSidecar, type RequestHead } from './request.js';
import { isOfRequest } from './headers.js';
import type { StoredField } from './response.js';
import { SettingsError, shown, type IdempotencyOptions } from './settings.js';

function gateOf(name: string, oncegate: unknown, options: IdempotencyOptions): Gate {
  // Not `instanceof`: a process may have loaded the library twice, by `import` and by `require`.
  if (typeof (oncegate as Partial<Oncegate> | undefined)?.gate === 'function') return (oncegate as Oncegate).gate(options);
  const call = name === 'fastify' ? 'app.register(fastify, { oncegate, ...options })' : `${name}(oncegate, options, …)`;
  throw new SettingsError(`${name}: oncegate is missing: make one by \`new Oncegate({ store })\`, and give it: ${call}`);
}

function checkHandler(name: string, handler: unknown): void {
  if (typeof handler !== 'function') throw new SettingsError(`${name}: the handler is no function, but ${shown(handler)}`);
}

/**
 * Middleware for Express 5 and 4, and for everything that takes `(req, res, next)`. Put it before body parsers, and after what checks
 * who the caller is.
 */
export function express(
  oncegate: Oncegate,
  options: IdempotencyOptions = {},
): (request: NodeRequest, response: ServerResponse, next: (error?: unknown) => void) => void {
  const gate = gateOf('express', oncegate, options);
  return (request, response, next) => {
    let head: RequestHead | undefined;
    try {
      head = concerns(gate, request, response);
    } catch (error) {
      next(error);
      return;
    }
    if (head === undefined) { next(); return; }
    admitNode(gate, request, response, head).then((admission) => {
      if (admission.kind !== 'answered') next();
    }, next);
  };
}

/** Wraps a handler of Node's HTTP server. A handler that throws has no response: its outcome is unknown, or the key is free. */
export function node(
  oncegate: Oncegate,
  options: IdempotencyOptions,
  handler: (request: IncomingMessage, response: ServerResponse) => unknown,
): (request: IncomingMessage, response: ServerResponse) => void {
  const gate = gateOf('node', oncegate, options);
  checkHandler('node', handler);
  return (request, response) => {
    void (async () => {
      const head = concerns(gate, request, response);
      const admission = head === undefined ? ({ kind: 'next' } as const) : await admitNode(gate, request, response, head);
      if (admission.kind === 'answered') return;
      try {
        await handler(request, response);
      } catch (error) {
        if (admission.kind === 'next') throw error;
        oncegate.engine.handlerFailed(error);
        await admission.response.fail();
      }
    })().catch((error: unknown) => {
      oncegate.engine.handlerFailed(error);
      if (!response.headersSent) response.writeHead(500).end();
      else if (!response.writableEnded) breakResponse(response);
    });
  };
}

/** What the plugin needs of an instance of Fastify. Without its types: the library has no dependencies. */
interface FastifyLike {
  // eslint-disable-next-line @typescript-eslint/no-explicit-any -- the types of Fastify depend on the server and on its plugins
  addHook(name: 'onRequest', hook: (request: any, reply: any, done: (error?: any) => void) => void): unknown;
}

interface FastifyRequestLike {
  raw: IncomingMessage;
}

interface FastifyReplyLike {
  raw: ServerResponse;
  hijack(): unknown;
  getHeaders(): OutgoingHttpHeaders;
}

/**
 * A plugin for Fastify 5: `await app.register(fastify, { oncegate })`. It covers the routes of the instance that registers it, and its
 * children.
 */
export const fastify = Object.assign(
  async (app: FastifyLike, { oncegate, ...options }: IdempotencyOptions & { oncegate: Oncegate }): Promise<void> => {
    // Fastify adds what concerns itself.
    const own = Object.fromEntries(Object.entries(options).filter(([name]) => name !== 'prefix' && name !== 'logLevel'));
    const gate = gateOf('fastify', oncegate, own);
    app.addHook('onRequest', (request: FastifyRequestLike, reply: FastifyReplyLike, done) => {
      let head: RequestHead | undefined;
      try {
        head = concerns(gate, request.raw, reply.raw, request);
      } catch (error) {
        done(error);
        return;
      }
      if (head === undefined) { done(); return; }
      const beforeAnswer = (): void => {
        // What hooks in front have set is not in the response of Node yet.
        for (const [name, value] of Object.entries(reply.getHeaders())) {
          if (value !== undefined && !reply.raw.hasHeader(name)) reply.raw.setHeader(name, value);
        }
      };
      admitNode(gate, request.raw, reply.raw, head, beforeAnswer).then((admission) => {
        if (admission.kind === 'answered') reply.hijack();
        else done();
      }, done);
    });
    await Promise.resolve();
  },
  { [Symbol.for('skip-override')]: true, [Symbol.for('fastify.display-name')]: 'oncegate' },
);

// Web requests and responses

function webHead(request: Request, source: unknown): RequestHead {
  const url = new URL(request.url);
  const headers: StoredField[] = [];
  request.headers.forEach((value, name) => { headers.push([name, value]); });
  if (!request.headers.has('host')) headers.push(['host', url.host]);
  return { method: request.method, target: url.pathname + url.search, headers, source };
}

async function readStream(
  body: ReadableStream<Uint8Array> | null,
  limit: number,
  timeoutMs: number,
  hold: (bytes: number) => boolean,
): Promise<Buffer | 'too-large' | 'incomplete' | 'budget'> {
  if (body === null) return Buffer.alloc(0);
  const reader = body.getReader();
  const chunks: Uint8Array[] = [];
  let size = 0;
  let timer: NodeJS.Timeout | undefined;
  const late = new Promise<'late'>((resolve) => { timer = setTimeout(() => { resolve('late'); }, timeoutMs); });
  try {
    for (;;) {
      const read = await Promise.race([reader.read(), late]);
      if (read === 'late') return 'incomplete';
      if (read.done) return Buffer.concat(chunks);
      size += read.value.length;
      if (size > limit) return 'too-large';
      if (!hold(read.value.length)) return 'budget';
      chunks.push(read.value);
    }
  } catch {
    return 'incomplete';
  } finally {
    clearTimeout(timer);
    reader.releaseLock();
  }
}

function webResponse({ status, headers, body }: WireResponse, stream?: ReadableStream<Uint8Array> | null): Response {
  const fields = new Headers();
  // The server frames the body itself. A stream keeps the length that its handler knows.
  const isChunked = headers.some(([name]) => name === 'transfer-encoding');
  for (const [name, value] of headers) {
    const isFraming = name === 'transfer-encoding' || name === 'trailer' || (name === 'content-length' && (stream === undefined || isChunked));
    if (!isFraming) fields.append(name, value);
  }
  const hasBody = status !== 204 && status !== 205 && status !== 304;
  if (!hasBody) void stream?.cancel().catch(() => undefined);
  return new Response(hasBody ? (stream ?? (body as unknown as BodyInit)) : null, { status, headers: fields });
}

/** Runs a handler of a Web request under a key. */
async function serve(
  gate: Gate,
  request: Request,
  source: unknown,
  handler: (request: Request) => Promise<Response>,
  readBefore: () => Promise<Buffer | undefined> = () => Promise.resolve(undefined),
): Promise<Response> {
  if (isExecuting(request, gate.shared)) return handler(request);
  const head = webHead(request, source);
  let body: Buffer | undefined;
  let copy: Request | undefined;
  const admission = await gate.admit(head, async (limit, timeoutMs, hold) => {
    if (!isRead(request) && isOfOwnKind(request)) copy = request.clone();
    const read = isRead(request)
      ? givenBack(await readBefore(), limit, hold)
      : await readStream((copy ?? request).body, limit, timeoutMs, hold);
    if (Buffer.isBuffer(read)) body = read;
    return read;
  });
  if (admission.kind === 'respond') return webResponse(admission.response);
  // A client that leaves must not cancel the handler: its own signal is that of the attempt.
  const next = body === undefined ? request : copy === undefined ? withBody(request, body) : withoutSignal(request);
  if (admission.kind === 'pass') return decorated(await handler(next), admission.fields, isBehindSidecar(head));
  const { execution } = admission;
  setExecution(next, execution);
  const response = await execute(gate, execution, () => handler(next));
  // Given again, the same object is another request.
  if (next === request) clearExecution(request);
  return response;
}

/**
 * Returns true if a request cannot be made anew with all that it is: it is of another class, or behind a proxy. A copy is read in its place.
 * Those of Next.js can.
 */
function isOfOwnKind(request: Request): boolean {
  return !('nextUrl' in request) && (types.isProxy(request) || classOf(request) !== undefined);
}

/** The class of a request, if it is one of its own. */
function classOf(request: Request): typeof Request | undefined {
  const { constructor: Own } = Object.getPrototypeOf(request) as { constructor?: unknown };
  // Next.js gives a proxy, whose `constructor` is a bound function.
  return typeof Own === 'function' && Own.prototype instanceof Request ? (Own as typeof Request) : undefined;
}

function withoutSignal(request: Request): Request {
  Reflect.defineProperty(request, 'signal', { configurable: true, value: new AbortController().signal });
  return request;
}

function isRead(request: Request): boolean {
  return request.bodyUsed || request.body?.locked === true;
}

/** A body that was read before, and that the framework has kept. */
function givenBack(body: Buffer | undefined, limit: number, hold: (bytes: number) => boolean): Buffer | 'too-large' | 'budget' {
  if (body === undefined) throw new BodyReadEarlyError('the body was read');
  if (body.length > limit) return 'too-large';
  return hold(body.length) ? body : 'budget';
}

/** The same request, whose body can be read again, with what middleware in front has set on it. */
function withBody(request: Request, body: Buffer): Request {
  const init: RequestInit & { duplex: 'half' } = { method: request.method, headers: request.headers, duplex: 'half' };
  if (body.length > 0 || request.body !== null) init.body = body as unknown as BodyInit;
  const next = newRequest(request, init);
  for (const key of Reflect.ownKeys(request)) {
    // What a class keeps under its symbols belongs to the old body.
    const own = typeof key === 'symbol' && Object.hasOwn(next, key) ? undefined : Object.getOwnPropertyDescriptor(request, key);
    if (own !== undefined) Reflect.defineProperty(next, key, own);
  }
  return next;
}

function newRequest(request: Request, init: RequestInit): Request {
  const Own = classOf(request);
  if (Own !== undefined) {
    try {
      // The `cookies` and the `nextUrl` of Next.js are those of its own class.
      return new Own(request.url, init);
    } catch {
      // It cannot be made from an address.
    }
  }
  return new Request(request.url, init);
}

/** Fields that only the middleware sets, and those that only it reads. */
const OWN_FIELDS = ['idempotency-status', 'idempotency-store'];

function decorated(response: Response, fields: readonly StoredField[], isBehind: boolean): Response {
  const own = OWN_FIELDS.slice(0, isBehind ? 1 : 2);
  if (fields.length === 0 && !own.some((name) => response.headers.has(name))) return response;
  const headers = new Headers(response.headers);
  for (const name of own) headers.delete(name);
  for (const [name, value] of fields) headers.set(name, value);
  return new Response(response.body, { status: response.status, statusText: response.statusText, headers });
}

/** The handler has ended, and another response has gone to the client meanwhile. */
class ResponseLostError extends Error {}

async function execute(gate: Gate, execution: Execution, handler: () => Promise<Response>): Promise<Response> {
  let timer: NodeJS.Timeout | undefined;
  const late = new Promise<'late'>((resolve) => { timer = setTimeout(() => { resolve('late'); }, execution.handlerTimeoutMs).unref(); });
  const work = (async () => {
    let response: Response;
    let body: Buffer | undefined;
    let rest: ReadableStream<Uint8Array> | undefined;
    try {
      try {
        response = await handler();
        if (response.type === 'error') throw new Error('the handler returned Response.error()');
        ({ body, rest } = await readResponse(execution, response));
      } finally {
        // It has ended. That the store takes its end late is no fault of the handler.
        clearTimeout(timer);
      }
    } catch (error) {
      if (error instanceof ResponseLostError) {
        // It was done, and its response went nowhere.
        return webResponse(await execution.finish({ status: 200, headers: [] }, undefined));
      }
      gate.shared.engine.handlerFailed(error);
      return webResponse(await execution.fail('its handler failed'));
    }
    const headers: StoredField[] = [];
    const isDecoded = isDecodedByFetch(response);
    response.headers.forEach((value, name) => {
      if (!isDecoded || (name !== 'content-encoding' && name !== 'content-length')) headers.push([name, value]);
    });
    const head = { status: response.status, headers };
    const declared = body === undefined ? undefined : declaredLength(head);
    if (body !== undefined && declared !== undefined && declared !== body.length) {
      return webResponse(await execution.finishIncomplete(head, body, declared), brokenStream(body, declared));
    }
    return webResponse(await execution.finish(head, body), rest);
  })();
  const first = await Promise.race([work, late]);
  return first === 'late' ? webResponse(await execution.fail('its handler ran for longer than handlerTimeout', true)) : first;
}

const CODINGS_OF_FETCH = ['gzip', 'x-gzip', 'deflate', 'br'];

/** Returns true if a response comes from `fetch`, which has decoded its body and left the fields of the encoded one. */
function isDecodedByFetch(response: Response): boolean {
  const codings = response.url === '' ? null : response.headers.get('content-encoding');
  return codings !== null && codings.split(',').every((coding) => CODINGS_OF_FETCH.includes(coding.trim().toLowerCase()));
}

/** A part of a body, after which the connection is closed. */
function brokenStream(body: Buffer, declared: number): ReadableStream<Uint8Array> {
  let isSent = body.length === 0;
  return new ReadableStream<Uint8Array>({
    pull(controller) {
      if (isSent) { controller.error(new Error('the response is incomplete')); return; }
      isSent = true;
      controller.enqueue(new Uint8Array(body.subarray(0, declared)));
    },
  });
}

/** Reads a response up to the limit. Beyond it, or if it has no end: a stream of all of it. */
async function readResponse(
  execution: Execution,
  response: Response,
): Promise<{ body: Buffer | undefined; rest: ReadableStream<Uint8Array> | undefined }> {
  const { body } = response;
  if (body === null) return { body: Buffer.alloc(0), rest: undefined };
  const type = response.headers.get('content-type') ?? '';
  if (execution.isEndless({ status: response.status, headers: [['content-type', type]] })) return { body: undefined, rest: body };
  const reader = body.getReader();
  const chunks: Uint8Array[] = [];
  let size = 0;
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return { body: Buffer.concat(chunks), rest: undefined };
    chunks.push(value);
    size += value.length;
    if (size <= execution.maxResponseBody) continue;
    const rest = new ReadableStream<Uint8Array>({
      async pull(controller) {
        const ahead = chunks.shift();
        if (ahead !== undefined) { controller.enqueue(ahead); return; }
        const next = await reader.read();
        if (next.done) controller.close();
        else controller.enqueue(next.value);
      },
      // The client is gone: a file that is the source would stay open.
      cancel(reason) {
        chunks.length = 0;
        return reader.cancel(reason);
      },
    });
    return { body: undefined, rest };
  }
}

/**
 * Wraps a handler of Web requests: a route handler of Next.js, or of any runtime with `Request` and `Response` on Node.
 *
 * ```ts
 * export const POST = withIdempotency(oncegate, { scope: 'cookie:session' }, async (request) => Response.json(await pay(request)));
 * ```
 */
export function withIdempotency<R extends Request, Rest extends unknown[]>(
  oncegate: Oncegate,
  options: IdempotencyOptions,
  handler: (request: R, ...rest: Rest) => Response | Promise<Response>,
): (request: R, ...rest: Rest) => Promise<Response> {
  const gate = gateOf('withIdempotency', oncegate, options);
  checkHandler('withIdempotency', handler);
  return (request, ...rest) =>
    serve(gate, request, request, async (next) => {
      try {
        return await handler(next as R, ...rest);
      } catch (error) {
        const response = responseOfNext(error);
        if (response === undefined) throw error;
        return response;
      }
    });
}

/** The response that Next.js makes of an error which `redirect`, `notFound`, `forbidden` or `unauthorized` has thrown. */
function responseOfNext(error: unknown): Response | undefined {
  const digest: unknown = typeof error === 'object' && error !== null && 'digest' in error ? error.digest : undefined;
  if (typeof digest !== 'string') return undefined;
  const [kind, ...parts] = digest.split(';');
  switch (kind) {
    case 'NEXT_REDIRECT': {
      // NEXT_REDIRECT;replace;/path;307;
      const [status, location] = [Number(parts.at(-2)), parts.slice(1, -2).join(';')];
      if (![303, 307, 308].includes(status) || location === '') return undefined;
      return new Response(null, { status, headers: { location } });
    }
    case 'NEXT_HTTP_ERROR_FALLBACK': {
      const status = Number(parts[0]);
      return status >= 400 && status < 500 ? new Response(null, { status }) : undefined;
    }
    case 'NEXT_NOT_FOUND':
      return new Response(null, { status: 404 });
    default:
      return undefined;
  }
}

interface HonoContext {
  req: { raw: Request; bodyCache?: object; arrayBuffer?: () => Promise<ArrayBuffer> };
  res: Response;
}

/** Marks what belongs to a handler, in contrast to middleware before it. */
const inside = new AsyncLocalStorage<object>();

/**
 * Runs what comes after the middleware, and returns its response. Middleware before this one, such as `timeout`, may have answered
 * meanwhile, and then Hono drops the response of the handler.
 *
 * @throws {ResponseLostError}
 */
async function responseOfHono(context: HonoContext, next: () => Promise<void>): Promise<Response> {
  const own = {};
  const accessor = Object.getOwnPropertyDescriptor(Object.getPrototypeOf(context) as object, 'res');
  let isAnswered = false;
  if (accessor?.set !== undefined) {
    Object.defineProperty(context, 'res', {
      configurable: true,
      get() { return accessor.get?.call(context) as unknown; },
      set(response: unknown) {
        isAnswered = inside.getStore() !== own;
        accessor.set?.call(context, response);
      },
    });
  }
  try {
    await inside.run(own, next);
  } finally {
    if (accessor?.set !== undefined) delete (context as { res?: Response }).res;
  }
  if (isAnswered) throw new ResponseLostError('the response of the handler is lost');
  return context.res;
}

/** The body that Hono keeps after `c.req.json()` or `c.req.text()`. The files of a form are not kept as they were sent. */
async function keptByHono({ req }: HonoContext): Promise<Buffer | undefined> {
  const [first] = Object.keys(req.bodyCache ?? {});
  if ((first !== 'json' && first !== 'text' && first !== 'arrayBuffer') || req.arrayBuffer === undefined) return undefined;
  return Buffer.from(await req.arrayBuffer());
}

/** Middleware for Hono: `app.use(hono(oncegate, { scope: 'required-header:authorization' }))`. */
export function hono(
  oncegate: Oncegate,
  options: IdempotencyOptions = {},
): (context: HonoContext, next: () => Promise<void>) => Promise<Response | undefined> {
  const gate = gateOf('hono', oncegate, options);
  return async (context, next) => {
    let hasRun = false;
    const handler = async (request: Request): Promise<Response> => {
      hasRun = true;
      context.req.raw = request;
      return responseOfHono(context, next);
    };
    const response = await serve(gate, context.req.raw, context, handler, () => keptByHono(context));
    // The handler's response has the fields of middleware in front already.
    if (!hasRun) {
      context.res.headers.forEach((value, name) => {
        if (isOfRequest(name) && (name === 'set-cookie' || !response.headers.has(name))) response.headers.append(name, value);
      });
    }
    // Hono merges the fields of an earlier response into a new one.
    context.res = undefined as unknown as Response;
    context.res = response;
    return undefined;
  };
}
