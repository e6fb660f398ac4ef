// The middleware of each framework.
import type { IncomingMessage, ServerResponse } from 'node:http';
import type { Execution, Gate, Oncegate } from './gate.js';
import { admitNode, setAttempt, type NodeRequest } from './node.js';
import type { WireResponse } from './refusal.js';
import type { RequestHead } from './request.js';
import type { StoredField } from './response.js';
import type { IdempotencyOptions } from './settings.js';

/**
 * Middleware for Express 5 and 4, and for everything that takes `(req, res, next)`. Put it before body parsers, and after what checks
 * who the caller is.
 */
export function express(
  oncegate: Oncegate,
  options: IdempotencyOptions = {},
): (request: NodeRequest, response: ServerResponse, next: (error?: unknown) => void) => void {
  const gate = oncegate.gate(options);
  return (request, response, next) => {
    admitNode(gate, request, response).then((admission) => {
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
  const gate = oncegate.gate(options);
  return (request, response) => {
    void (async () => {
      const admission = await admitNode(gate, request, response);
      if (admission.kind === 'answered') return;
      try {
        await handler(request, response);
      } catch (error) {
        if (admission.kind === 'next') throw error;
        oncegate.engine.warn(`a handler failed: ${(error as Error).name}`);
        await admission.response.fail();
      }
    })().catch(() => {
      if (!response.headersSent) response.writeHead(500);
      response.end();
    });
  };
}

interface FastifyLike {
  addHook(
    name: 'onRequest',
    hook: (request: { raw: IncomingMessage }, reply: { raw: ServerResponse; hijack(): unknown }) => Promise<unknown>,
  ): unknown;
}

/**
 * A plugin for Fastify 5: `await app.register(fastify, { oncegate })`. It covers the routes of the instance that registers it, and its
 * children.
 */
export const fastify = Object.assign(
  async (app: FastifyLike, { oncegate, ...options }: IdempotencyOptions & { oncegate: Oncegate }): Promise<void> => {
    // Fastify adds what concerns itself.
    const own = Object.fromEntries(Object.entries(options).filter(([name]) => name !== 'prefix' && name !== 'logLevel'));
    const gate = oncegate.gate(own);
    app.addHook('onRequest', async (request, reply) => {
      const admission = await admitNode(gate, request.raw, reply.raw);
      if (admission.kind !== 'answered') return undefined;
      reply.hijack();
      return reply;
    });
    await Promise.resolve();
  },
  { [Symbol.for('skip-override')]: true, [Symbol.for('fastify.display-name')]: 'oncegate' },
);

// Web requests and responses

function webHead(request: Request): RequestHead {
  const url = new URL(request.url);
  const headers: StoredField[] = [];
  request.headers.forEach((value, name) => { headers.push([name, value]); });
  if (!request.headers.has('host')) headers.push(['host', url.host]);
  return { method: request.method, target: url.pathname + url.search, headers };
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
  for (const [name, value] of headers) fields.append(name, value);
  const hasBody = status !== 204 && status !== 205 && status !== 304;
  return new Response(hasBody ? (stream ?? (body as unknown as BodyInit)) : null, { status, headers: fields });
}

/** Runs a handler of a Web request under a key. */
async function serve(gate: Gate, request: Request, handler: (request: Request) => Promise<Response>): Promise<Response> {
  const head = webHead(request);
  let body: Buffer | undefined;
  const admission = await gate.admit(head, async (limit, timeoutMs, hold) => {
    const read = await readStream(request.body, limit, timeoutMs, hold);
    if (Buffer.isBuffer(read)) body = read;
    return read;
  });
  if (admission.kind === 'respond') return webResponse(admission.response);
  // A client that leaves must not cancel the handler: its own signal is that of the attempt.
  const next = body === undefined ? request : withBody(request, body);
  if (admission.kind === 'pass') return decorated(await handler(next), gate.covers(request.method), admission.fields);
  const { execution } = admission;
  setAttempt(next, execution.attempt);
  return execute(gate, execution, () => handler(next));
}

/** The same request, whose body can be read again. */
function withBody(request: Request, body: Buffer): Request {
  const init: RequestInit & { duplex: 'half' } = { method: request.method, headers: request.headers, duplex: 'half' };
  if (body.length > 0 || request.body !== null) init.body = body as unknown as BodyInit;
  return new Request(request.url, init);
}

function decorated(response: Response, isCovered: boolean, fields: readonly StoredField[]): Response {
  if (!isCovered) return response;
  const headers = new Headers(response.headers);
  headers.delete('idempotency-store');
  headers.delete('idempotency-status');
  for (const [name, value] of fields) headers.set(name, value);
  return new Response(response.body, { status: response.status, statusText: response.statusText, headers });
}

async function execute(gate: Gate, execution: Execution, handler: () => Promise<Response>): Promise<Response> {
  let timer: NodeJS.Timeout | undefined;
  const late = new Promise<'late'>((resolve) => { timer = setTimeout(() => { resolve('late'); }, execution.handlerTimeoutMs).unref(); });
  const work = (async () => {
    let response: Response;
    let body: Buffer | undefined;
    let rest: ReadableStream<Uint8Array> | undefined;
    try {
      response = await handler();
      ({ body, rest } = await readResponse(execution, response));
    } catch (error) {
      gate.shared.engine.warn(`a handler failed: ${(error as Error).name}`);
      return webResponse(await execution.fail());
    }
    const headers: StoredField[] = [];
    response.headers.forEach((value, name) => { headers.push([name, value]); });
    const wire = await execution.finish({ status: response.status, headers }, body);
    return webResponse(wire, rest);
  })();
  const first = await Promise.race([work, late]);
  clearTimeout(timer);
  return first === 'late' ? webResponse(await execution.fail(true)) : first;
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
  const gate = oncegate.gate(options);
  return (request, ...rest) => serve(gate, request, async (next) => handler(next as R, ...rest));
}

interface HonoContext {
  req: { raw: Request };
  res: Response;
}

/** Middleware for Hono: `app.use(hono(oncegate, { scope: 'required-header:authorization' }))`. */
export function hono(
  oncegate: Oncegate,
  options: IdempotencyOptions = {},
): (context: HonoContext, next: () => Promise<void>) => Promise<Response | undefined> {
  const gate = oncegate.gate(options);
  return async (context, next) => {
    const response = await serve(gate, context.req.raw, async (request) => {
      context.req.raw = request;
      await next();
      return context.res;
    });
    // Hono merges the fields of an earlier response into a new one.
    context.res = undefined as unknown as Response;
    context.res = response;
    return undefined;
  };
}
