// Express 5 and 4, Fastify, Hono, plain handlers and Web handlers, over real connections.
import assert from 'node:assert/strict';
import { createHash, randomBytes } from 'node:crypto';
import { once } from 'node:events';
import { createServer, request as httpRequest } from 'node:http';
import { connect } from 'node:net';
import { after, test } from 'node:test';
import { setTimeout as pause } from 'node:timers/promises';
import { serve as serveHono } from '@hono/node-server';
import express5 from 'express';
import express4 from 'express4';
import Fastify from 'fastify';
import { Hono } from 'hono';
import { pipeline, Readable } from 'node:stream';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { spawn } from 'node:child_process';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { attemptOf, express, fastify, hono, idempotent, MemoryStore, node, Oncegate, PostgresStore, RedisStore, withIdempotency } from '../dist/esm/index.js';

const servers = [];
after(() => { for (const server of servers) { server.closeAllConnections?.(); server.close(); } });

async function listen(server) {
  servers.push(server);
  server.listen(0, '127.0.0.1');
  await once(server, 'listening');
  return `http://127.0.0.1:${server.address().port}`;
}

const JSON_TYPE = { 'content-type': 'application/json' };
const post = (url, key, body = '{"amount":5}', headers = JSON_TYPE) =>
  fetch(url, { method: 'POST', body, headers: { ...headers, ...(key === undefined ? {} : { 'idempotency-key': key }) } });

const one = { scope: 'single-tenant' };
const newGate = (options) => new Oncegate({ store: new MemoryStore(), warn: () => undefined, ...options });
const raw = async (request) => {
  const parts = [];
  for await (const part of request) parts.push(part);
  return Buffer.concat(parts);
};
async function until(condition, what) {
  const deadline = Date.now() + 10_000;
  while (!(await condition())) {
    assert.ok(Date.now() < deadline, `no ${what} in time`);
    await pause(5);
  }
}

const frameworks = {
  'Express 5': (oncegate, options, handler) => {
    const app = express5();
    app.use(express(oncegate, options));
    app.use(express5.json());
    app.post('/pay', async (req, res) => {
      const { status, body, headers } = await handler(req.body, attemptOf(req));
      res.status(status).set(headers ?? {}).json(body);
    });
    return listen(createServer(app));
  },
  'Express 4': (oncegate, options, handler) => {
    const app = express4();
    app.use(express(oncegate, options));
    app.use(express4.json());
    app.post('/pay', (req, res, next) => {
      handler(req.body, attemptOf(req)).then(({ status, body, headers }) => res.status(status).set(headers ?? {}).json(body), next);
    });
    return listen(createServer(app));
  },
  'Express 5, body parser first': (oncegate, options, handler) => {
    const app = express5();
    app.use(express5.json());
    app.use(express(oncegate, options));
    app.post('/pay', async (req, res) => {
      const { status, body, headers } = await handler(req.body, attemptOf(req));
      res.status(status).set(headers ?? {}).json(body);
    });
    return listen(createServer(app));
  },
  Fastify: async (oncegate, options, handler) => {
    const app = Fastify();
    await app.register(fastify, { oncegate, ...options });
    app.post('/pay', async (request, reply) => {
      const { status, body, headers } = await handler(request.body, attemptOf(request.raw));
      return reply.code(status).headers(headers ?? {}).send(body);
    });
    await app.listen({ port: 0, host: '127.0.0.1' });
    servers.push(app.server);
    return `http://127.0.0.1:${app.server.address().port}`;
  },
  Hono: async (oncegate, options, handler) => {
    const app = new Hono();
    app.use(hono(oncegate, options));
    app.post('/pay', async (c) => {
      const { status, body, headers } = await handler(await c.req.json(), attemptOf(c.req.raw));
      return c.json(body, status, headers ?? {});
    });
    const server = serveHono({ fetch: app.fetch, port: 0, hostname: '127.0.0.1' });
    servers.push(server);
    await once(server, 'listening');
    return `http://127.0.0.1:${server.address().port}`;
  },
  'node:http': (oncegate, options, handler) =>
    listen(
      createServer(
        node(oncegate, options, async (req, res) => {
          const { status, body, headers } = await handler(JSON.parse(await raw(req)), attemptOf(req));
          res.writeHead(status, { ...JSON_TYPE, ...headers });
          res.end(JSON.stringify(body));
        }),
      ),
    ),
  'Web handlers': (oncegate, options, handler) => {
    const route = withIdempotency(oncegate, options, async (request) => {
      const { status, body, headers } = await handler(await request.json(), attemptOf(request));
      return Response.json(body, { status, headers });
    });
    return listen(
      createServer(async (req, res) => {
        const request = new Request(`http://${req.headers.host}${req.url}`, { method: req.method, headers: req.headers, body: await raw(req) });
        const response = await route(request);
        res.writeHead(response.status, Object.fromEntries(response.headers));
        res.end(Buffer.from(await response.arrayBuffer()));
      }),
    );
  },
};

for (const [name, framework] of Object.entries(frameworks)) {
  test(`${name}: one key, one effect`, async () => {
    let charges = 0;
    const oncegate = newGate();
    const url = `${await framework(oncegate, one, async ({ amount }, attempt) => {
      charges += 1;
      if (amount === 429) return { status: 429, body: {} };
      await pause(20);
      return { status: 201, body: { charges, amount, first: attempt?.number }, headers: { location: `/charges/${charges}` } };
    })}/pay`;
    // Twenty at once: one effect, one answer.
    const answers = await Promise.all(Array.from({ length: 20 }, () => post(url, 'k-1')));
    const bodies = await Promise.all(answers.map((answer) => answer.text()));
    assert.deepEqual([...new Set(bodies)], ['{"charges":1,"amount":5,"first":1}']);
    assert.deepEqual([...new Set(answers.map(({ status }) => status))], [201]);
    assert.equal(answers.filter(({ headers }) => headers.get('idempotent-replayed') === 'true').length, 19);
    for (const { headers } of answers) {
      assert.equal(headers.get('idempotency-key'), 'k-1');
      assert.equal(headers.get('location'), '/charges/1');
    }
    // Another spelling of the same JSON is the same request; another body is not.
    assert.equal((await post(url, '"k-1"', ' { "amount": 5.0 } ')).headers.get('idempotent-replayed'), 'true');
    const reused = await post(url, 'k-1', '{"amount":6}');
    assert.deepEqual([reused.status, (await reused.json()).type], [422, 'urn:oncegate:problem:key-reused']);
    // Without a key, nothing is protected.
    await post(url, undefined);
    await post(url, undefined);
    assert.equal(charges, 3);
    // Nothing was decided: the key is free again.
    assert.equal((await post(url, 'k-2', '{"amount":429}')).status, 429);
    assert.equal((await post(url, 'k-2', '{"amount":429}')).status, 429);
    assert.equal(charges, 5);
    assert.equal((await post(url, 'a, b')).status, 400);
    assert.equal(charges, 5);
  });

  test(`${name}: a handler that throws`, async () => {
    let runs = 0;
    const url = `${await framework(newGate(), one, async () => {
      runs += 1;
      throw new Error('secret of the handler');
    })}/pay`;
    const first = await post(url, 'k');
    assert.equal(first.status, 500);
    await first.text();
    const again = await post(url, 'k');
    assert.equal(again.status, 500);
    assert.equal(runs, 1, await again.text());
  });

  test(`${name}: a client that hangs up does not stop the handler`, async () => {
    let ends = 0;
    let begins = 0;
    const base = await framework(newGate(), one, async () => {
      begins += 1;
      await pause(150);
      ends += 1;
      return { status: 201, body: { ends } };
    });
    const body = '{"amount":5}';
    const socket = connect(new URL(base).port, '127.0.0.1');
    socket.write(`POST /pay HTTP/1.1\r\nHost: ${new URL(base).host}\r\nContent-Type: application/json\r\nIdempotency-Key: k\r\nContent-Length: ${body.length}\r\n\r\n${body}`);
    await until(() => begins === 1, 'handler');
    socket.destroy();
    const retry = await post(`${base}/pay`, 'k', body);
    assert.deepEqual([retry.status, await retry.json(), begins], [201, { ends: 1 }, 1]);
    assert.equal(retry.headers.get('idempotent-replayed'), 'true');
  });
}

test('bodies and responses of all kinds come back byte for byte', async () => {
  const oncegate = newGate();
  const large = randomBytes(3 * 1024 * 1024);
  const small = randomBytes(70_000);
  const runs = {};
  const app = express5();
  app.use(express(oncegate, { ...one, maxRequestBody: '4MiB' }));
  app.use((req, res, next) => { runs[req.path] = (runs[req.path] ?? 0) + 1; next(); });
  app.post('/binary', (req, res) => res.type('application/octet-stream').send(small));
  app.post('/empty', (req, res) => res.status(204).end());
  app.post('/large', (req, res) => res.send(large));
  app.post('/twice', (req, res) => { res.end('first'); res.end('second'); assert.throws(() => res.setHeader('x', '1'), { code: 'ERR_HTTP_HEADERS_SENT' }); });
  app.post('/pieces', (req, res) => {
    res.writeHead(201, 'Made', ['X-Other', '1', 'Link', '</a>', 'Link', '</b>']);
    assert.ok(res.headersSent);
    res.write('ä', 'latin1');
    res.write(Buffer.from('b'));
    res.end('c');
    assert.ok(res.writableEnded);
  });
  app.post('/piped', (req, res) => { pipeline(Readable.from([small.subarray(0, 1000), small.subarray(1000)]), res.type('bin'), () => undefined); });
  app.post('/events', async (req, res) => {
    res.writeHead(200, { 'content-type': 'text/event-stream' });
    for (let at = 0; at < 3; at += 1) { res.write(`data: ${at}\n\n`); await pause(5); }
    res.end();
  });
  app.post('/hash', async (req, res) => res.send(createHash('sha256').update(await raw(req)).digest('hex')));
  app.post('/early', (req, res) => { res.json({ early: true }); setTimeout(() => { runs.late = true; }, 1); });
  app.use((error, req, res, next) => { void next; res.status(500).json({ error: error.message }); });
  const url = await listen(createServer(app));
  const twice = async (path, body) => {
    const answers = [];
    for (let at = 0; at < 2; at += 1) {
      const answer = await post(url + path, `k${path}`, body, {});
      answers.push({ status: answer.status, text: answer.statusText, headers: answer.headers, body: Buffer.from(await answer.arrayBuffer()) });
    }
    assert.equal(runs[path], 1, path);
    return answers;
  };
  for (const [path, expected] of [['/binary', small], ['/empty', Buffer.alloc(0)], ['/piped', small], ['/twice', Buffer.from('first')], ['/early', Buffer.from('{"early":true}')]]) {
    for (const { body, headers } of await twice(path, 'x')) {
      assert.deepEqual(body, expected, path);
      if (path !== '/empty') assert.equal(headers.get('content-length'), String(expected.length));
    }
  }
  const [first, replayed] = await twice('/pieces', 'x');
  assert.deepEqual([first.status, first.body, first.headers.get('link'), first.headers.get('x-other')], [201, Buffer.from([0xe4, 0x62, 0x63]), '</a>, </b>', '1']);
  assert.deepEqual([replayed.status, replayed.body, replayed.headers.get('link'), replayed.headers.get('x-other')], [201, first.body, '</a>, </b>', null]);
  for (const path of ['/large', '/events']) {
    const [whole, again] = await twice(path, 'x');
    assert.deepEqual(whole.body, path === '/large' ? large : Buffer.from('data: 0\n\ndata: 1\n\ndata: 2\n\n'), path);
    assert.deepEqual([again.status, JSON.parse(again.body).type], [422, 'urn:oncegate:problem:replay-unavailable'], path);
  }
  for (const body of [large, Buffer.alloc(0), Buffer.from([0, 255, 13, 10])]) {
    const key = randomBytes(8).toString('hex');
    const digest = createHash('sha256').update(body).digest('hex');
    for (let at = 0; at < 2; at += 1) assert.equal(await (await post(`${url}/hash`, key, body, {})).text(), digest);
    // In chunks, without a length, and slowly.
    const sent = httpRequest(`${url}/hash`, { method: 'POST', headers: { 'idempotency-key': `${key}-chunked` } });
    for (let at = 0; at < body.length; at += 700_000) { sent.write(body.subarray(at, at + 700_000)); await pause(2); }
    sent.end();
    const [answer] = await once(sent, 'response');
    assert.equal((await raw(answer)).toString(), digest);
  }
  const tooLarge = await post(`${url}/hash`, 'too-large', randomBytes(5 * 1024 * 1024), {});
  assert.equal(tooLarge.status, 413);
});

test('fields that Node treats in its own way neither end the process nor change', async () => {
  const disposition = Buffer.from('attachment; filename="ü"', 'utf8').toString('latin1');
  const app = express5();
  app.use(express(newGate(), one));
  app.use((req, res) => {
    res.setHeader('idempotency-store', 'replay');
    res.setHeader('content-disposition', disposition);
    // A whole response has no trailers; by itself, Node throws.
    if (req.method === 'POST') res.setHeader('trailer', 'x-checksum');
    res.end('body');
  });
  const url = await listen(createServer(app));
  for (const replayed of [null, 'true']) {
    const response = await post(url, 'k');
    assert.deepEqual([response.status, await response.text(), response.headers.get('idempotent-replayed')], [200, 'body', replayed]);
    assert.equal(response.headers.get('content-disposition'), disposition);
    assert.equal(response.headers.get('trailer'), null);
  }
  // What a handler tells the middleware is for no client, whatever the method.
  assert.equal((await fetch(url)).headers.get('idempotency-store'), null);
});

test('a body that a parser cannot give back is refused before anything runs', async () => {
  let runs = 0;
  const app = express5();
  app.use((req, res, next) => { req.resume(); req.on('end', () => next()); });
  app.use(express(newGate(), one));
  app.post('/pay', (req, res) => { runs += 1; res.end(); });
  app.use((error, req, res, next) => { void next; res.status(500).json({ name: error.name }); });
  const url = await listen(createServer(app));
  const answer = await post(`${url}/pay`, 'k');
  assert.deepEqual([answer.status, await answer.json(), runs], [500, { name: 'BodyReadEarlyError' }, 0]);
});

test('the lease is renewed while the handler runs, and duplicates are told to come again', async () => {
  const store = new MemoryStore();
  let renewals = 0;
  const renew = store.renew.bind(store);
  store.renew = (...args) => { renewals += 1; return renew(...args); };
  const app = express5();
  let finish;
  app.use(express(newGate({ store }), { ...one, lease: 150, wait: 0 }));
  app.post('/pay', async (req, res) => { await new Promise((resolve) => { finish = resolve; }); res.json({ done: 1 }); });
  const url = `${await listen(createServer(app))}/pay`;
  const first = post(url, 'k');
  await until(() => renewals >= 6, 'renewals');
  const duplicate = await post(url, 'k');
  assert.equal(duplicate.status, 409);
  assert.ok(Number(duplicate.headers.get('retry-after')) >= 1);
  assert.equal(duplicate.headers.get('idempotency-status'), 'refused; problem=request-in-progress; retry=same-key');
  finish();
  assert.deepEqual(await (await first).json(), { done: 1 });
});

test('an attempt of this process is not abandoned while its handler runs, although its lease is over', async () => {
  for (const onAbandoned of ['park', 'reexecute']) {
    const store = new MemoryStore();
    let renewals = 0;
    // It says so, and does not.
    store.renew = () => { renewals += 1; return Promise.resolve('done'); };
    const app = express5();
    let finish;
    let runs = 0;
    app.use(express(newGate({ store }), { ...one, lease: 150, wait: 0, onAbandoned }));
    app.post('/pay', async (req, res) => { runs += 1; await new Promise((resolve) => { finish = resolve; }); res.json({ runs }); });
    const url = `${await listen(createServer(app))}/pay`;
    const first = post(url, 'k');
    await until(() => renewals >= 4, 'renewals');
    await pause(300);
    assert.equal((await post(url, 'k')).status, 409);
    assert.equal((await post(url, 'k', '{"amount":6}')).status, 422);
    finish();
    assert.deepEqual([(await first).status, await (await post(url, 'k')).json()], [200, { runs: 1 }]);
  }
});

test('a handler whose client left before it began does not run, and the key is free', async () => {
  const store = new MemoryStore();
  const claim = store.claim.bind(store);
  let isAsked = false;
  let grant;
  store.claim = async (...args) => {
    store.claim = claim;
    isAsked = true;
    await new Promise((resolve) => { grant = resolve; });
    return claim(...args);
  };
  const app = express5();
  let gone;
  app.use((req, res, next) => { gone ??= once(req.socket, 'close'); next(); });
  app.use(express(newGate({ store }), one));
  app.use(express5.json());
  let runs = 0;
  app.post('/pay', (req, res) => { runs += 1; res.json(req.body); });
  const url = `${await listen(createServer(app))}/pay`;
  const leaving = httpRequest(url, { method: 'POST', headers: { ...JSON_TYPE, 'idempotency-key': 'k' } });
  leaving.on('error', () => undefined);
  leaving.end('{"amount":5}');
  await until(() => isAsked, 'claim');
  leaving.destroy();
  await gone;
  grant();
  let answer;
  await until(async () => (answer = await post(url, 'k')).status !== 409, 'free key');
  assert.deepEqual([answer.status, await answer.text(), answer.headers.get('idempotent-replayed'), runs], [200, '{"amount":5}', null, 1]);
});

test('a store that is away: 503, and nothing is executed; with storeOutage open it is marked', async () => {
  const store = new MemoryStore();
  let claims = 0;
  store.claim = () => { claims += 1; return new Promise(() => undefined); };
  let runs = 0;
  const app = express5();
  const oncegate = newGate({ store, storeTimeout: 30 });
  app.use('/closed', express(oncegate, one));
  app.use('/open', express(oncegate, { ...one, storeOutage: 'open' }));
  app.use((req, res) => { runs += 1; res.set('Idempotency-Status', 'forged').json({}); });
  const url = await listen(createServer(app));
  for (let at = 0; at < 8; at += 1) {
    const refused = await post(`${url}/closed`, `k${at}`);
    assert.deepEqual([refused.status, refused.headers.get('retry-after'), (await refused.json()).type], [503, '1', 'urn:oncegate:problem:store-unavailable']);
  }
  // The breaker: after several failures, requests are refused without a claim. Each would be sent twice.
  assert.ok(claims < 16, String(claims));
  assert.equal(runs, 0);
  const open = await post(`${url}/open`, 'k-open');
  assert.deepEqual([open.status, open.headers.get('idempotency-status'), runs], [200, 'failed-open', 1]);
});

test('a result that the store does not take reaches the client, marked, and is stored later', async () => {
  const store = new MemoryStore();
  const complete = store.complete.bind(store);
  let isAway = true;
  store.complete = (...args) => (isAway ? Promise.reject(new Error('away')) : complete(...args));
  let runs = 0;
  const app = express5();
  app.use(express(newGate({ store }), { ...one, wait: 0 }));
  app.post('/pay', (req, res) => { runs += 1; res.json({ runs }); });
  const url = `${await listen(createServer(app))}/pay`;
  const first = await post(url, 'k');
  assert.deepEqual([first.status, first.headers.get('idempotency-status'), await first.json()], [200, 'not-stored', { runs: 1 }]);
  assert.ok([409, 503].includes((await post(url, 'k')).status));
  isAway = false;
  await until(async () => (await post(url, 'k')).headers.get('idempotent-replayed') === 'true', 'replay');
  assert.equal(runs, 1);
});

test('a handler that runs for too long has an unknown outcome, until it ends', async () => {
  const app = express5();
  let finish;
  app.use(express(newGate(), { ...one, handlerTimeout: 50, wait: 0, serverErrors: 'release' }));
  app.post('/pay', async (req, res) => { await new Promise((resolve) => { finish = resolve; }); res.json({ done: 1 }); });
  const url = `${await listen(createServer(app))}/pay`;
  const first = await post(url, 'k');
  assert.deepEqual([first.status, (await first.json()).type], [500, 'urn:oncegate:problem:outcome-unknown']);
  assert.equal((await post(url, 'k')).status, 500);
  finish();
  // It was done, and its response went nowhere.
  await until(async () => (await post(url, 'k')).status === 422, 'outcome');
});

test('limits: in flight, and draining', async () => {
  const oncegate = newGate({ maxInFlight: 2 });
  const app = express5();
  const ends = [];
  app.use(express(oncegate, one));
  app.post('/pay', async (req, res) => { await new Promise((resolve) => ends.push(resolve)); res.json({ done: 1 }); });
  const url = `${await listen(createServer(app))}/pay`;
  const running = [post(url, 'a'), post(url, 'b')];
  await until(() => ends.length === 2, 'handlers');
  const third = await post(url, 'c');
  assert.deepEqual([third.status, (await third.json()).type], [503, 'urn:oncegate:problem:overloaded']);
  assert.equal(await oncegate.drain(50), false);
  const draining = oncegate.drain();
  for (const end of ends) end();
  assert.equal(await draining, true);
  for (const answer of await Promise.all(running)) assert.equal(answer.status, 200);
  assert.equal((await post(url, 'd')).status, 503);
});

test('pages of another origin may read replays and refusals, if middleware before this one says so', async () => {
  const app = express5();
  app.use((req, res, next) => { res.set({ 'access-control-allow-origin': req.get('origin'), vary: 'Origin', 'x-other': '1' }); next(); });
  app.use(express(newGate(), one));
  app.use(express5.json());
  let count = 0;
  app.post('/pay', (req, res) => { count += 1; res.vary('Accept').status(201).json({ count }); });
  const url = `${await listen(createServer(app))}/pay`;
  const from = (origin, key, body) => post(url, key, body, { ...JSON_TYPE, origin });
  const shown = ({ status, headers }) => [status, headers.get('access-control-allow-origin'), headers.get('vary'), headers.get('x-other')];
  assert.deepEqual(shown(await from('http://a.example', 'k')), [201, 'http://a.example', 'Origin, Accept', '1']);
  assert.deepEqual(shown(await from('http://b.example', 'k')), [201, 'http://b.example', 'Origin, Accept', '1']);
  assert.deepEqual(shown(await from('http://b.example', 'k', '{"amount":6}')), [422, 'http://b.example', 'Origin', '1']);
  assert.equal(count, 1);
});

test('callers do not share keys, and nobody is a caller by accident', async () => {
  let runs = 0;
  const app = express5();
  app.use(express(newGate(), {}));
  app.post('/pay', (req, res) => { runs += 1; res.json({ runs }); });
  const url = `${await listen(createServer(app))}/pay`;
  const as = (headers) => post(url, 'k', '{}', { ...JSON_TYPE, ...headers });
  assert.deepEqual(await (await as({ authorization: 'Bearer ada' })).json(), { runs: 1 });
  assert.deepEqual(await (await as({ authorization: 'Bearer bob' })).json(), { runs: 2 });
  assert.deepEqual(await (await as({ authorization: 'Bearer ada' })).json(), { runs: 1 });
  const cookie = await as({ cookie: 'sid=1' });
  assert.deepEqual([cookie.status, (await cookie.json()).type], [400, 'urn:oncegate:problem:scope-not-set']);
  assert.equal(runs, 2);
});

/** One request of a client with a name, through each framework; `scope` sees the request of the framework. */
const named = {
  'Express 5': [(req) => req.user?.id, (oncegate, options) => {
    const app = express5();
    app.use((req, _res, next) => { req.user = { id: Number(req.get('x-user')) }; next(); });
    app.use(express(oncegate, options));
    let runs = 0;
    app.post('/pay', (_req, res) => res.json(runs += 1));
    return listen(createServer(app));
  }],
  Fastify: [(request) => request.user, async (oncegate, options) => {
    const app = Fastify();
    app.decorateRequest('user', null);
    app.addHook('onRequest', async (request) => { request.user = request.headers['x-user']; });
    await app.register(fastify, { oncegate, ...options });
    let runs = 0;
    app.post('/pay', async () => (runs += 1));
    await app.listen({ port: 0, host: '127.0.0.1' });
    servers.push(app.server);
    return `http://127.0.0.1:${app.server.address().port}`;
  }],
  Hono: [(c) => c.get('user'), async (oncegate, options) => {
    const app = new Hono();
    app.use(async (c, next) => { c.set('user', c.req.header('x-user')); await next(); });
    app.use(hono(oncegate, options));
    let runs = 0;
    app.post('/pay', (c) => c.json(runs += 1));
    const server = serveHono({ fetch: app.fetch, port: 0, hostname: '127.0.0.1' });
    servers.push(server);
    await once(server, 'listening');
    return `http://127.0.0.1:${server.address().port}`;
  }],
  'node:http': [(req, head) => head.method === 'POST' && req.headers['x-user'], (oncegate, options) => {
    let runs = 0;
    return listen(createServer(node(oncegate, options, (_req, res) => { res.end(`${runs += 1}`); })));
  }],
};
for (const [name, [scope, framework]] of Object.entries(named)) {
  test(`${name}: a scope function sees the request of the framework`, async () => {
    const url = `${await framework(newGate(), { scope })}/pay`;
    const send = async (user) => (await post(url, 'k', '{}', { ...JSON_TYPE, 'x-user': user })).text();
    assert.deepEqual([await send('7'), await send('8'), await send('7'), await send('8')], ['1', '2', '1', '2']);
  });
}

test('Web handlers: a scope function sees the Request', async () => {
  let runs = 0;
  const route = withIdempotency(newGate(), { scope: (request) => request.headers.get('x-user') }, () => Response.json(runs += 1));
  const send = async (user) => (await route(new Request('http://a.test/', { method: 'POST', headers: { 'idempotency-key': 'k', ...(user && { 'x-user': user }) } }))).status;
  assert.deepEqual([await send('a'), await send('b'), await send('a'), await send(undefined), runs], [200, 200, 200, 400, 2]);
});

test('Web handlers: a request with a key keeps its class', async () => {
  const seen = [];
  const route = withIdempotency(newGate(), one, async (request) => { seen.push(request.user, await request.text()); return new Response(); });
  const init = { method: 'POST', body: 'x', headers: { 'idempotency-key': 'k', 'x-user': 'a' } };
  class NamedRequest extends Request { get user() { return this.headers.get('x-user'); } }
  await route(new NamedRequest('http://a.test/named', init));
  // As Next.js gives it to a route handler.
  const get = (target, name) => { const value = Reflect.get(target, name, target); return typeof value === 'function' ? value.bind(target) : value; };
  await route(new Proxy(new NamedRequest('http://a.test/proxy', init), { get }));
  class PickyRequest extends Request { constructor(secret, url) { if (secret !== 1) throw new Error('picky'); super(url, init); } }
  await route(new PickyRequest(1, 'http://a.test/picky'));
  assert.deepEqual(seen, ['a', 'x', 'a', 'x', undefined, 'x']);
});

test('a scope function that returns something else is an error with a reason', async () => {
  const request = () => new Request('http://a.test/', { method: 'POST', headers: { 'idempotency-key': 'k' } });
  const route = (scope) => withIdempotency(newGate(), { scope }, () => new Response());
  assert.throws(() => route(async () => 'a'), { name: 'SettingsError', message: /an asynchronous function cannot tell who the caller is; find it out in middleware/ });
  // A rejection must not end the process.
  await assert.rejects(route(() => Promise.reject(new Error('away')))(request()), { name: 'SettingsError', message: /asynchronous function/ });
  await assert.rejects(route(() => ({ id: 1 }))(request()), { message: /the function returned object; return a text or a number/ });
  await assert.rejects(route(() => NaN)(request()), { message: /the function returned NaN/ });
  for (const nothing of [undefined, null, '']) assert.equal((await route(() => nothing)(request())).status, 400);
  for (const identity of [7, 0, 7n, 'a']) assert.equal((await route(() => identity)(request())).status, 200);
});

test('the error of a handler is reported with its stack, and the key is not', async () => {
  const warnings = [];
  const oncegate = newGate({ warn: (message) => warnings.push(message) });
  const fails = () => { throw new RangeError('no money'); };
  const url = await listen(createServer(node(oncegate, one, fails)));
  assert.match(await (await post(url, 'secret-key')).text(), /outcome-unknown/);
  assert.equal((await post(url, undefined)).status, 500);
  const route = withIdempotency(oncegate, one, fails);
  assert.match(await (await route(new Request('http://a.test/', { method: 'POST', headers: { 'idempotency-key': 'secret-web' } }))).text(), /outcome-unknown/);
  const [unknown, failed] = [/^record [0-9a-f]{64}: the outcome is unknown: its handler failed$/, /^a handler failed: RangeError: no money\n +at fails \(.*express\.test\.js/];
  assert.deepEqual([unknown, failed].map((kind) => warnings.filter((warning) => kind.test(warning)).length), [2, 3], warnings.join('\n'));
  assert.equal(warnings.length, 5);
  assert.doesNotMatch(warnings.join(), /secret/);
});

test('a store that is not set up says what is to be done', async () => {
  const warnings = [];
  const refuses = async () => { throw Object.assign(new Error('no schema'), { code: '3F000' }); };
  const oncegate = newGate({ store: new PostgresStore({ query: refuses }), service: 'shop', warn: (message) => warnings.push(message) });
  assert.equal((await post(await listen(createServer(node(oncegate, one, () => undefined))), 'k')).status, 503);
  assert.match(warnings[0], /^a claim failed: .*the database does not have the contract .* run `oncegate schema apply postgres/);
});

test('what is missing is named', () => {
  const oncegate = newGate();
  for (const [wrong, message] of [
    [() => new Oncegate(), /^store: give a store/],
    [() => new Oncegate({}), /^store: give a store/],
    [() => new Oncegate({ store: {} }), /^store: give a store/],
    [() => new Oncegate({ store: new MemoryStore(), servcie: 'shop' }), /there is no option "servcie" of Oncegate; did you mean "service"\?/],
    [() => new Oncegate({ store: new MemoryStore(), maxInFlight: '9' }), /^maxInFlight: "9" is not a whole number/],
    [() => express(one), /^express: oncegate is missing/],
    [() => hono(one), /^hono: oncegate is missing/],
    [() => node(oncegate, () => undefined), /^the options are an object, not a function/],
    [() => withIdempotency(oncegate, one), /^withIdempotency: the handler is no function/],
    [() => new PostgresStore({}), /^PostgresStore: give a pool of `pg`/],
    [() => new RedisStore({}), /^RedisStore: give a client/],
    [() => new RedisStore(), /^RedisStore: give a client/],
    [() => idempotent({}, { name: 'a', key: () => 'k', errors: 'keep' }, () => 1), /^idempotent: oncegate is missing/],
    [() => idempotent(oncegate, { name: 'a', key: () => 'k' }, () => 1), /^errors: write "unknown", "release" or "keep", .*: it is missing/],
    [() => idempotent(oncegate, { name: 'a', key: () => 'k', errors: 'x' }, () => 1), /: "x" is none of them$/],
    [() => idempotent(oncegate, { key: () => 'k', errors: 'keep' }, () => 1), /^name: write the name/],
    [() => idempotent(oncegate, { name: 'a', key: 'k', errors: 'keep' }, () => 1), /^key: give a function/],
  ]) assert.throws(wrong, { name: 'SettingsError', message });
});

test('a store in memory in a worker of a cluster is a warning', async () => {
  const text = `import cluster from 'node:cluster'; import { MemoryStore, Oncegate } from ${JSON.stringify(new URL('../dist/esm/index.js', import.meta.url).href)};
    if (cluster.isPrimary) cluster.fork(); new Oncegate({ store: new MemoryStore() }); if (!cluster.isPrimary) cluster.worker.disconnect();`;
  const dir = mkdtempSync(join(tmpdir(), 'oncegate-node-cluster-'));
  writeFileSync(join(dir, 'app.mjs'), text);
  const child = spawn(process.execPath, [join(dir, 'app.mjs')], { stdio: ['ignore', 'ignore', 'pipe'] });
  const [errors] = await Promise.all([child.stderr.toArray(), once(child, 'exit')]);
  rmSync(dir, { recursive: true, force: true });
  assert.deepEqual(Buffer.concat(errors).toString().match(/oncegate: MemoryStore in a worker of a cluster/g)?.length, 1);
});

test('a body is read as a whole, however its bytes come and whatever middleware in front says of its length', async () => {
  const app = express5();
  const lengths = [];
  // A part of the body has this length.
  app.use('/shortened', (req, _res, next) => { req.headers['content-length'] = '10'; next(); });
  app.use(express(newGate(), one));
  app.use(async (req, res) => { const { length } = await raw(req); lengths.push(length); res.json({ length }); });
  const { port } = new URL(await listen(createServer(app)));
  const socket = connect(Number(port), '127.0.0.1').setNoDelay(true);
  let answers = '';
  socket.on('data', (bytes) => { answers += String(bytes); });
  const expected = [];
  const send = async (path, key, body, first, answered) => {
    socket.write(`POST ${path} HTTP/1.1\r\nhost: a\r\nidempotency-key: ${key}\r\ncontent-length: ${body.length}\r\n\r\n${body.slice(0, first)}`);
    await pause(20);
    socket.write(body.slice(first));
    const until = Date.now() + 20_000;
    while (answers.split('HTTP/1.1 ').length <= answered && Date.now() < until) await pause(5);
  };
  for (const [path, length, first] of [
    ['/whole', 1000, 1000], ['/whole', 1000, 10], ['/whole', 1000, 0], ['/whole', 90_000, 90_000], ['/shortened', 1000, 10], ['/shortened', 1000, 1000],
  ]) {
    expected.push(length);
    await send(path, `whole-${expected.length}`, 'x'.repeat(length), first, expected.length);
  }
  assert.doesNotMatch(answers, /HTTP\/1.1 4/);
  // The body of the fifth request, up to that length.
  await send('/shortened', 'whole-5', 'x'.repeat(10) + 'y'.repeat(990), 10, expected.length + 1);
  assert.match(answers, /HTTP\/1.1 422/);
  assert.deepEqual(lengths, expected);
  socket.destroy();
});
