// Clients that hang up or send what costs much, handlers that end badly, and middleware around this one.
import assert from 'node:assert/strict';
import { once } from 'node:events';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { Agent, createServer, IncomingMessage, request, ServerResponse } from 'node:http';
import { connect as connectHttp2, createServer as createHttp2Server } from 'node:http2';
import { connect } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { PassThrough, Readable, Writable } from 'node:stream';
import { pipeline } from 'node:stream/promises';
import { after, test } from 'node:test';
import { setTimeout as pause } from 'node:timers/promises';
import { gzipSync } from 'node:zlib';
import { serve as serveHono } from '@hono/node-server';
import express5 from 'express';
import express4 from 'express4';
import Fastify from 'fastify';
import { Hono } from 'hono';
import { cors } from 'hono/cors';
import { streamText } from 'hono/streaming';
import { timeout } from 'hono/timeout';
import onFinished from 'on-finished';
import { attemptOf, express, fastify, hono, MemoryStore, node, Oncegate, RedisStore, StoreFullError, withIdempotency } from '../dist/esm/index.js';

const servers = [];
after(() => { for (const server of servers) { server.closeAllConnections?.(); server.close(); } });

async function listen(server) {
  servers.push(server);
  server.listen(0, '127.0.0.1');
  await once(server, 'listening');
  return `http://127.0.0.1:${server.address().port}`;
}
async function listenFastify(app) {
  await app.listen({ port: 0, host: '127.0.0.1' });
  servers.push(app.server);
  return `http://127.0.0.1:${app.server.address().port}`;
}
async function listenHono(app) {
  const server = serveHono({ fetch: app.fetch, port: 0, hostname: '127.0.0.1' });
  servers.push(server);
  await once(server, 'listening');
  return `http://127.0.0.1:${server.address().port}`;
}

const one = { scope: 'single-tenant', wait: 0 };
const newGate = (options) => new Oncegate({ store: new MemoryStore(), warn: () => undefined, ...options });
const logging = (options) => {
  const log = [];
  return { log, oncegate: newGate({ warn: (message) => log.push(message), ...options }) };
};
const post = (url, key, body = '', headers = {}) =>
  fetch(url, { method: 'POST', body, headers: { ...(key === undefined ? {} : { 'idempotency-key': key }), ...headers }, signal: AbortSignal.timeout(20_000) });
const said = async (answer) => [answer.status, answer.headers.get('idempotent-replayed') ?? answer.headers.get('idempotency-status')?.match(/problem=([a-z-]+)/)?.[1] ?? null, await answer.text()];

async function until(condition, what) {
  const deadline = Date.now() + 20_000;
  for (;;) {
    const found = await condition();
    if (found) return found;
    assert.ok(Date.now() < deadline, `no ${what} in time`);
    await pause(5);
  }
}

test('numbers, header lines and fields of any length cost time in proportion', async () => {
  let runs = 0;
  const url = await listen(createServer(node(newGate(), { scope: 'required-header:x-user' }, (req, res) => { runs += 1; req.resume(); res.end(); })));
  const digits = `{"a":1${'0'.repeat(400_000)}1}`;
  const fraction = `{"a":0.${'0'.repeat(400_000)}1${'0'.repeat(400_000)}1}`;
  const blank = ' '.repeat(400_000);
  const part = `--b\r\nX: a${blank}b\r\n\r\nx\r\n--b--\r\n`;
  const json = { 'content-type': 'application/json' };
  const begun = performance.now();
  for (const [body, headers] of [
    [digits, json], [fraction, json], [gzipSync(digits), { ...json, 'content-encoding': 'gzip' }],
    [part, { 'content-type': 'multipart/form-data; boundary=b' }],
    ['x', { 'content-type': `text/plain${' '.repeat(3000)}x` }], ['x', { 'content-encoding': `a${' '.repeat(3000)}b` }],
  ]) assert.equal((await post(url, `k${runs}`, body, { 'x-user': `a${' '.repeat(3000)}b`, ...headers })).status, 200);
  assert.equal((await post(url, `a${' '.repeat(10_000)}b`, 'x', { 'x-user': 'a' })).status, 400);
  // One of them took minutes.
  assert.ok(performance.now() - begun < 10_000, String(performance.now() - begun));
  assert.equal(runs, 6);
});

// A client that hangs up.
const file = join(mkdtempSync(join(tmpdir(), 'oncegate-node-http-')), 'receipt.txt');
writeFileSync(file, 'receipt '.repeat(1000));
after(() => { rmSync(join(file, '..'), { recursive: true }); });
const senders = {
  'Express, sendFile': (options, work) => {
    const app = express5();
    app.use(express(newGate(), options));
    app.post('/', async (req, res) => { await work(res); res.status(201).sendFile(file); });
    return listen(createServer(app));
  },
  'Express 4, sendFile': (options, work) => {
    const app = express4();
    app.use(express(newGate(), options));
    app.post('/', (req, res) => { void work(res).then(() => res.status(201).sendFile(file)); });
    return listen(createServer(app));
  },
  'Express, pipeline': (options, work, ended) => {
    const app = express5();
    app.use(express(newGate(), options));
    app.post('/', async (req, res) => { await work(res); res.status(201); await pipeline(Readable.from(['receipt ']), res); ended.push('pipeline'); });
    return listen(createServer(app));
  },
  'Express, the connection was watched': (options, work, ended) => {
    const app = express5();
    app.use(express(newGate(), options));
    app.post('/', async (req, res) => { res.socket.on('close', () => { if (!res.writableEnded) ended.push('close'); }); await work(res); res.status(201).send('receipt '); });
    return listen(createServer(app));
  },
  'Fastify, a stream': async (options, work) => {
    const app = Fastify();
    await app.register(fastify, { oncegate: newGate(), ...options });
    app.post('/', async (request, reply) => { await work(reply.raw); return reply.code(201).send(Readable.from(['receipt ', 'receipt '])); });
    return listenFastify(app);
  },
};
for (const [name, sender] of Object.entries(senders)) {
  test(`${name}: a client that hangs up gets the response of the handler when it comes again`, async () => {
    for (const options of [one, { ...one, serverErrors: 'release' }]) {
      let charges = 0;
      let goOn;
      const ended = [];
      const url = await sender(options, async (res) => {
        charges += 1;
        // The connection itself: `socket` does not tell.
        const gone = once(res.req.client, 'close');
        await new Promise((resolve) => { goOn = resolve; });
        await gone;
        assert.equal(res.destroyed || res.socket?.destroyed === true || res.closed === true, false);
      }, ended);
      const { port, host } = new URL(url);
      const socket = connect(port, '127.0.0.1');
      socket.write(`POST / HTTP/1.1\r\nHost: ${host}\r\nIdempotency-Key: k\r\nContent-Type: text/plain;charset=UTF-8\r\nContent-Length: 0\r\n\r\n`);
      await until(() => goOn, 'handler');
      socket.destroy();
      goOn();
      const answer = await until(async () => { const own = await post(url, 'k'); return own.status !== 409 && own; }, 'end');
      assert.deepEqual([answer.status, answer.headers.get('idempotent-replayed'), charges], [201, 'true', 1]);
      assert.match(await answer.text(), /^receipt /);
      if (name.endsWith('pipeline')) await until(() => ended.length === 1, 'end of the pipeline');
      if (name.endsWith('watched')) assert.deepEqual(ended, []);
    }
  });
}

for (const [name, framework] of [['Express 5', express5], ['Express 4', express4]]) {
  test(`${name}: a client that hangs up stops no file, also behind a log by on-finished`, async () => {
    const dir = mkdtempSync(join(tmpdir(), 'oncegate-files-'));
    after(() => { rmSync(dir, { recursive: true, force: true }); });
    writeFileSync(join(dir, 'file'), Buffer.alloc(200_000, 'a'));
    const { log, oncegate } = logging();
    const calls = [];
    let client;
    const app = framework();
    app.use((req, res, next) => {
      if (client !== undefined) onFinished(res, () => calls.push('log'));
      onFinished(req, () => undefined);
      next();
    });
    app.use(express(oncegate, { ...one, maxResponseBody: '1MiB' }));
    app.post('/file', (req, res) => {
      client?.destroy();
      res.sendFile(join(dir, 'file'), (error) => calls.push(`sent ${error?.code ?? 'whole'}`));
    });
    app.post('/later', async (req, res) => {
      onFinished(res, () => calls.push('after the response'));
      onFinished(req, () => calls.push('after the request'));
      client?.destroy();
      await until(() => calls.length > 0, 'end of the connection');
      calls.push('answers');
      res.end('done');
    });
    const url = await listen(createServer(app));
    for (const key of ['/file', '/later']) {
      calls.length = 0;
      client = connect(new URL(url).port, '127.0.0.1').on('error', () => undefined);
      client.write(`POST ${key} HTTP/1.1\r\nHost: ${new URL(url).host}\r\nIdempotency-Key: ${key}\r\nContent-Type: text/plain\r\nContent-Length: 7\r\n\r\n{"a":1}`);
      await once(client, 'close');
      client = undefined;
      const retry = await until(async () => {
        const answer = await post(url + key, key, '{"a":1}', { 'content-type': 'text/plain' });
        return answer.status === 409 ? undefined : answer;
      }, 'response');
      assert.deepEqual([retry.status, retry.headers.get('idempotent-replayed'), (await retry.text()).length], [200, 'true', key === '/file' ? 200_000 : 4]);
      const own = calls.filter((call) => call !== 'log');
      if (key === '/file') assert.deepEqual(own, ['sent whole']);
      // Each is called once. The log shows the end of the connection, and that of the handler the end of its response.
      else assert.deepEqual([calls.slice(0, 2), own.slice(1).sort()], [['log', 'answers'], ['after the request', 'after the response']]);
    }
    assert.deepEqual(log, []);
    assert.equal(await oncegate.drain(5000), true);
  });
}

// A client that hangs up while asynchronous middleware runs, before anything has read the body.
for (const [name, framework] of [['Express 5', express5], ['Express 4', express4]]) {
  test(`${name}: a handler does not run without the body of a client that hung up before its parser`, async () => {
    let wait;
    const runs = [];
    const app = framework();
    app.use(express(newGate(), one));
    app.use((req, res, next) => { wait({ socket: req.socket, next }); });
    app.use(framework.json(), framework.urlencoded({ extended: false }), framework.text());
    app.post('/', (req, res) => { runs.push(req.body); res.status(201).json({ got: req.body }); });
    app.post('/raw', async (req, res) => {
      const parts = [];
      for await (const part of req) parts.push(part);
      runs.push(String(Buffer.concat(parts)));
      res.status(201).json({ got: runs.at(-1) });
    });
    const { port, host } = new URL(await listen(createServer(app)));
    for (const [path, type, body, got] of [
      ['/', 'application/json', '{"amount":5}', { amount: 5 }], ['/', 'application/x-www-form-urlencoded', 'a=5', { a: '5' }], ['/', 'text/plain', 'five', 'five'], ['/raw', 'text/csv', 'x'.repeat(200_000), 'x'.repeat(200_000)],
    ]) {
      for (const isReset of [false, true]) {
        runs.length = 0;
        const key = `${type}-${isReset}`;
        const waiting = new Promise((resolve) => { wait = resolve; });
        const client = connect(port, '127.0.0.1');
        client.write(`POST ${path} HTTP/1.1\r\nHost: ${host}\r\nIdempotency-Key: ${key}\r\nContent-Type: ${type}\r\nContent-Length: ${body.length}\r\n\r\n${body}`);
        const { socket, next } = await waiting;
        const gone = new Promise((resolve) => { client.once('close', resolve); });
        if (isReset) client.resetAndDestroy(); else client.destroy();
        await gone;
        // What the handler sees says nothing of it.
        await pause(100);
        assert.deepEqual([socket.destroyed, socket.readable], [false, true]);
        next();
        await until(() => runs.length > 0, 'handler');
        wait = ({ next: goOn }) => goOn();
        const again = await until(async () => { const own = await post(`http://${host}${path}`, key, body, { 'content-type': type }); return own.status !== 409 && own; }, 'end');
        assert.deepEqual([again.status, again.headers.get('idempotent-replayed'), await again.json(), JSON.stringify(runs)], [201, 'true', { got }, JSON.stringify([got])]);
      }
    }
  });
}

// Middleware after this one.
/** Waits for `writeHead`, as express-session and compression do by on-headers, and replaces `end`. */
function wrapping(req, res, next) {
  const { writeHead, write, end } = res;
  let [isBegun, isEnded] = [false, false];
  res.writeHead = function (...args) {
    if (!isBegun) { isBegun = true; this.setHeader('set-cookie', 'sid=1'); this.setHeader('link', '</a>'); this.removeHeader('content-length'); }
    return writeHead.apply(this, args);
  };
  res.write = function (chunk, ...rest) {
    if (isEnded) return false;
    if (!this._header) this._implicitHeader();
    return write.call(this, String(chunk).toUpperCase(), ...rest);
  };
  res.end = function (chunk) {
    if (isEnded) return false;
    isEnded = true;
    if (!this._header) this._implicitHeader();
    return end.call(this, chunk === undefined ? chunk : String(chunk).toUpperCase());
  };
  next();
}
test('middleware after this one may replace the functions of the response', async () => {
  const app = express5();
  app.use(express(newGate(), { ...one, maxResponseBody: '1KiB' }), wrapping);
  app.post('/whole', (req, res) => res.status(201).send('whole'));
  app.post('/pieces', (req, res) => { res.status(201).write('pie'); res.write('c'); setTimeout(() => res.end('es'), 5); });
  app.post('/large', (req, res) => { res.status(201).write('x'.repeat(3000)); setTimeout(() => res.end('y'), 5); });
  const url = await listen(createServer(app));
  for (const [path, body] of [['/whole', 'WHOLE'], ['/pieces', 'PIECES']]) {
    for (const replayed of [null, 'true']) {
      const answer = await post(url + path, path);
      assert.equal(answer.headers.get('set-cookie'), replayed === null ? 'sid=1' : null);
      assert.equal(answer.headers.get('link'), '</a>');
      assert.deepEqual(await said(answer), [201, replayed, body]);
    }
  }
  const large = await post(`${url}/large`, 'large');
  assert.deepEqual([large.status, large.headers.get('set-cookie'), (await large.text()).length], [201, 'sid=1', 3001]);
});

test('a response of another length than it announced is done, not whole, and not replayed', async () => {
  const { log, oncegate } = logging();
  let runs = 0;
  const app = express5();
  app.use(express(oncegate, one));
  app.post('/short', (req, res) => { runs += 1; res.status(201).set('content-length', '1000').write('only a part'); res.end(); });
  app.post('/long', (req, res) => { runs += 1; res.writeHead(201, { 'content-length': 2 }); res.end('more'); });
  app.post('/empty', (req, res) => { runs += 1; res.writeHead(204, { 'content-length': 0 }); res.end(); });
  const url = await listen(createServer(app));
  const other = new Hono();
  other.use(hono(oncegate, one));
  other.post('/hono', (c) => { runs += 1; return c.body('x', 201, { 'content-length': '1000' }); });
  const honoUrl = await listenHono(other);
  for (const [path, base] of [['/short', url], ['/hono', honoUrl]]) {
    const first = await post(base + path, path);
    assert.equal(first.status, 201);
    await assert.rejects(first.text(), path);
    assert.deepEqual((await said(await post(base + path, path))).slice(0, 2), [422, 'replay-unavailable'], path);
  }
  assert.equal(await (await post(`${url}/long`, 'long')).text(), 'mo');
  assert.deepEqual((await said(await post(`${url}/long`, 'long'))).slice(0, 2), [422, 'replay-unavailable']);
  for (const replayed of [null, 'true']) assert.deepEqual(await said(await post(`${url}/empty`, 'empty')), [204, replayed, '']);
  assert.equal(runs, 4);
  assert.equal(log.filter((line) => /^record [0-9a-f]{64}: its response announced \d+ bytes and has \d+, so it is not replayed$/.test(line)).length, 3);
});

for (const [name, framework] of [['Express 5', express5], ['Express 4', express4]]) {
  test(`${name}: a handler that fails in the middle of its response has an unknown outcome at once, and the log names the record`, async () => {
    for (const serverErrors of ['replay', 'release']) {
      const { log, oncegate } = logging();
      let runs = 0;
      const app = framework();
      app.set('env', 'test');
      app.use(express(oncegate, { ...one, serverErrors }));
      app.post('/write', (req, res) => { runs += 1; res.write('part'); throw new Error('boom'); });
      app.post('/head', (req, res) => { runs += 1; res.writeHead(103); res.json({}); });
      const url = await listen(createServer(app));
      for (const path of ['/write', '/head']) {
        await assert.rejects(post(url + path, path).then((answer) => answer.text()), path);
        const retry = await until(async () => { const own = await post(url + path, path); return own.status !== 409 && own; }, 'end');
        assert.deepEqual((await said(retry)).slice(0, 2), [500, 'outcome-unknown']);
      }
      assert.equal(runs, 2);
      assert.equal(log.filter((line) => /: the outcome is unknown: its connection was destroyed in the middle/.test(line)).length, 2);
      assert.equal(log.filter((line) => /: the outcome of an earlier attempt is unknown/.test(line)).length, 2);
    }
  });
}

for (const [name, create, ask] of [
  ['HTTP/1', createServer, async (url, path, key) => (await post(url + path, key)).text()],
  ['HTTP/2', createHttp2Server, async (url, path, key) => {
    const client = connectHttp2(url);
    try {
      const stream = client.request({ ':method': 'POST', ':path': path, ...(key === undefined ? {} : { 'idempotency-key': key }) });
      let text = '';
      stream.setEncoding('utf8').on('data', (chunk) => { text += chunk; }).end();
      await once(stream, 'end', { signal: AbortSignal.timeout(20_000) });
      assert.equal(stream.rstCode, 0);
      return text;
    } finally {
      client.destroy();
    }
  }],
]) {
  test(`${name}: a handler of node() that throws after the head of a stream does not leave a part that looks whole`, async () => {
    const { log, oncegate } = logging();
    const sent = { '/large': ['text/plain', 'x'.repeat(2 << 20)], '/event': ['text/event-stream', 'data: 1\n\n'], '/part': ['text/plain', 'part'] };
    const url = await listen(create(node(oncegate, one, async (req, res) => {
      const [path, when] = req.url.split('?');
      const [type, text] = sent[path];
      res.writeHead(200, { 'content-type': type });
      res.write(text);
      // The response is a stream by then, or the middleware switches to one.
      if (when === 'later') await new Promise((resolve) => { res.once('drain', resolve); if (path === '/part' || (path === '/event' && !req.headers['idempotency-key'])) resolve(); });
      if (when === 'ended') res.end();
      throw new Error('boom');
    })));
    for (const key of [undefined, 'key']) {
      for (const path of ['/large', '/event', ...(key === undefined ? ['/part'] : [])]) {
        for (const when of ['now', 'later']) await assert.rejects(ask(url, `${path}?${when}`, key && path + when), `${path} ${when} ${key}`);
        assert.equal(await ask(url, `${path}?ended`, key && `${path}ended`), sent[path][1]);
      }
    }
    assert.ok(log.filter((line) => /a handler failed: Error: boom/.test(line)).length >= 15);
  });
}

test('a status that is a text of digits is a number, as in Node', async () => {
  let runs = 0;
  const app = express4();
  app.use(express(newGate(), one));
  app.post('/', (req, res) => { runs += 1; res.status('201').send('paid'); });
  const urls = [await listen(createServer(app))];
  const wrong = [];
  for (const handle of [
    (res) => { for (const status of ['abc', '99', 1000]) try { res.writeHead(status); } catch ({ name, code }) { wrong.push(name, code); } res.writeHead('201').end('paid'); },
    (res) => { res.statusCode = '201'; res.end('paid'); },
    (res) => { res.writeHead(201.5, 'Created', { 'x-a': 'b' }); res.end('paid'); },
  ]) urls.push(await listen(createServer(node(newGate(), one, (req, res) => { runs += 1; handle(res); }))));
  for (const url of urls) for (const replayed of [null, 'true']) assert.deepEqual(await said(await post(url, 'k')), [201, replayed, 'paid']);
  assert.equal(runs, 4);
  assert.deepEqual(wrong, Array(3).fill(['RangeError', 'ERR_HTTP_INVALID_STATUS_CODE']).flat());
});

// Bodies.
const http2Post = async (client, key, body) => {
  const stream = client.request({ ':method': 'POST', ':path': '/', 'content-type': 'text/plain', 'idempotency-key': key });
  let text = '';
  stream.setEncoding('utf8').on('data', (chunk) => { text += chunk; });
  stream.end(body);
  const [headers] = await once(stream, 'response');
  await once(stream, 'end');
  return [headers[':status'], headers['idempotent-replayed'] ?? null, text];
};
for (const [name, start] of Object.entries({
  'node:http2': async (handler) => listen(createHttp2Server(node(newGate(), one, async (req, res) => { let body = ''; for await (const part of req) body += part; await handler(res); res.end(`got ${body}`); }))),
  'Fastify with http2': async (handler) => {
    const app = Fastify({ http2: true });
    await app.register(fastify, { oncegate: newGate(), ...one });
    app.post('/', async (request, reply) => { await handler(reply.raw); return `got ${request.body ?? ''}`; });
    return listenFastify(app);
  },
})) {
  test(`${name}: one key, one effect`, async () => {
    let runs = 0;
    let goOn;
    let isSlow = false;
    const url = await start(async (res) => {
      runs += 1;
      if (isSlow) { await new Promise((resolve) => { goOn = resolve; }); assert.equal(res.writableEnded, false); }
    });
    const client = connectHttp2(url);
    const large = 'x'.repeat(300_000);
    for (const body of ['5', undefined, large]) {
      for (const replayed of [null, 'true']) {
        assert.deepEqual(await http2Post(client, `k${String(body).length}`, body), [200, replayed, `got ${body ?? ''}`]);
      }
    }
    assert.equal(runs, 3);
    isSlow = true;
    const leaving = client.request({ ':method': 'POST', ':path': '/', 'content-type': 'text/plain', 'idempotency-key': 'leaving' });
    leaving.on('error', () => undefined);
    leaving.end('6');
    await until(() => goOn, 'handler');
    leaving.close(8);
    await once(leaving, 'close');
    goOn();
    let again;
    await until(async () => (again = await http2Post(client, 'leaving', '6'))[0] !== 409, 'end');
    assert.deepEqual([again, runs], [[200, 'true', 'got 6'], 4]);
    client.close();
  });
}

test('Fastify: a request of inject() has its body', async () => {
  const app = Fastify();
  let runs = 0;
  await app.register(fastify, { oncegate: newGate(), ...one, bodyTimeout: '10s' });
  app.post('/', (request, reply) => { runs += 1; return reply.code(201).send({ got: request.body }); });
  const inject = (key, payload) => app.inject({ method: 'POST', url: '/', headers: { 'idempotency-key': key, ...(typeof payload === 'string' && { 'content-type': 'text/plain' }) }, payload });
  for (const [at, payload] of [undefined, { amount: 5 }, 'a'.repeat(200_000)].entries()) {
    const [first, again] = [await inject(`k${at}`, payload), await inject(`k${at}`, payload)];
    assert.deepEqual([first.statusCode, first.headers['idempotent-replayed'], first.json().got ?? undefined], [201, undefined, payload]);
    assert.deepEqual([again.statusCode, again.headers['idempotent-replayed'], again.body], [201, 'true', first.body]);
  }
  assert.equal(runs, 3);
  // A stream has no length and no transfer coding there.
  const stream = (payload) => app.inject({ method: 'POST', url: '/', headers: { 'idempotency-key': 'stream', 'content-type': 'application/json' }, payload: Readable.from([Buffer.from(payload)]) });
  assert.deepEqual((await stream('{"amount":5}')).json(), { got: { amount: 5 } });
  assert.equal((await stream('{"amount":5}')).headers['idempotent-replayed'], 'true');
  assert.equal((await stream('{"amount":6}')).statusCode, 422);
  assert.equal(runs, 4);
  await app.close();
});

test('Fastify: an empty chunked body together with its head is an empty body', async () => {
  const app = Fastify();
  await app.register(fastify, { oncegate: newGate(), ...one });
  app.addContentTypeParser('text/csv', { parseAs: 'string' }, (request, body, done) => { done(null, body); });
  app.post('/', async () => 'done');
  const { port } = new URL(await listenFastify(app));
  for (const type of ['text/plain', 'text/csv']) {
    const socket = connect(port, '127.0.0.1');
    socket.write(`POST / HTTP/1.1\r\nHost: h\r\nConnection: close\r\nIdempotency-Key: ${type}\r\nContent-Type: ${type}\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n`);
    let text = '';
    socket.setEncoding('utf8').on('data', (chunk) => { text += chunk; });
    await until(() => text !== '', `response for ${type}`);
    assert.match(text, /^HTTP\/1.1 200 /);
    socket.destroy();
  }
});

test('Express 4: the empty body that a parser leaves is not taken for the body', async () => {
  let runs = 0;
  const app = express4();
  app.use(express4.json());
  app.use((req, res, next) => {
    if (req.headers['content-type'] !== 'text/csv') { next(); return; }
    req.csv = '';
    req.on('data', (chunk) => { req.csv += chunk; }).on('end', () => next());
  });
  app.use(express(newGate(), one));
  app.post('/', (req, res) => { runs += 1; res.send(req.csv ?? req.body); });
  app.use((error, req, res, next) => { void next; res.status(500).send(error.name); });
  const url = await listen(createServer(app));
  for (const amount of [5, 900]) assert.deepEqual(await said(await post(url, 'csv', `amount,${amount}`, { 'content-type': 'text/csv' })), [500, null, 'BodyReadEarlyError']);
  assert.equal(runs, 0);
  for (const replayed of [null, 'true']) assert.deepEqual(await said(await post(url, 'json', '{}', { 'content-type': 'application/json' })), [200, replayed, '{}']);
});

test('Express 5: an empty object that a parser has read is compared', async () => {
  let runs = 0;
  const app = express5();
  app.use(express5.json());
  app.use(express(newGate(), one));
  app.post('/', (req, res) => { runs += 1; res.json(req.body); });
  const url = await listen(createServer(app));
  for (const type of ['application/json', 'application/json; charset=utf-8']) {
    for (const replayed of [null, 'true']) assert.deepEqual(await said(await post(url, type.slice(-3), '{}', { 'content-type': type })), [200, replayed, '{}']);
    assert.equal((await post(url, type.slice(-3), '{"a":1}', { 'content-type': type })).status, 422);
  }
  assert.equal(runs, 2);
});

test('Express 5: an empty object in the place of a body that a parser has not read is not taken for the body', async () => {
  let runs = 0;
  const app = express5();
  app.use((req, res, next) => { req.on('data', () => undefined).on('end', () => { req.body ??= {}; next(); }); });
  app.use(express(newGate(), one));
  app.post('/', (req, res) => { runs += 1; res.json(req.body); });
  app.use((error, req, res, next) => { void next; res.status(500).send(error.name); });
  const url = await listen(createServer(app));
  for (const amount of [5, 900]) assert.deepEqual(await said(await post(url, 'k', `{"amount":${amount}}`, { 'content-type': 'application/json' })), [500, null, 'BodyReadEarlyError']);
  assert.equal(runs, 0);
});

test('a listener that reads the body in front: requests without a key go on, and those with one are refused', async () => {
  const app5 = express5();
  const app4 = express4();
  for (const [app, framework] of [[app5, express5], [app4, express4]]) {
    app.use((req, res, next) => { req.seen = ''; req.on('data', (chunk) => { req.seen += chunk; }); next(); });
    app.use(express(newGate(), one), framework.json());
    app.post('/', (req, res) => { res.json({ seen: req.seen, got: req.body }); });
    app.use((error, req, res, next) => { void next; res.status(500).send(error.name); });
  }
  const json = { 'content-type': 'application/json' };
  const app = Fastify();
  app.addHook('onRequest', (request, reply, done) => { request.raw.on('data', () => undefined); done(); });
  await app.register(fastify, { oncegate: newGate(), ...one });
  app.post('/', (request) => ({ got: request.body }));
  app.setErrorHandler((error, request, reply) => { void reply.code(500).send(error.name); });
  const plain = createServer((req, res) => {
    req.on('data', () => undefined);
    node(newGate(), one, async (_, own) => {
      const parts = [];
      for await (const part of req) parts.push(part);
      own.end(JSON.stringify({ got: JSON.parse(Buffer.concat(parts)) }));
    })(req, res);
  });
  for (const url of [await listen(createServer(app5)), await listen(createServer(app4)), await listenFastify(app), await listen(plain)]) {
    const free = await post(url, undefined, '{"amount":5}', json);
    const { got, seen } = await free.json();
    assert.deepEqual([free.status, got, seen ?? '{"amount":5}'], [200, { amount: 5 }, '{"amount":5}']);
    for (const amount of [5, 6]) assert.equal((await post(url, 'k', `{"amount":${amount}}`, json)).status, 500);
  }
});

test('header fields are those that the handler sees', async () => {
  const users = { A: 'ann', M: 'mallory' };
  const app = express5();
  app.use((req, res, next) => {
    req.headers['x-user'] = users[req.headers.token];
    req.headers['idempotency-key'] ??= req.headers['x-request-id'];
    if (req.headers['x-unset'] !== undefined) delete req.headers['idempotency-key'];
    next();
  });
  let runs = 0;
  app.use(express(newGate(), { ...one, scope: 'required-header:x-user' }));
  app.post('/', (req, res) => { runs += 1; res.send(req.headers['x-user']); });
  const url = await listen(createServer(app));
  assert.deepEqual(await said(await post(url, 'k', 'a', { token: 'A', 'x-user': 'ann' })), [200, null, 'ann']);
  assert.deepEqual(await said(await post(url, 'k', 'a', { token: 'M', 'x-user': 'ann' })), [200, null, 'mallory']);
  for (const replayed of ['true', 'true']) assert.deepEqual(await said(await post(url, 'k', 'a', { token: 'A' })), [200, replayed, 'ann']);
  for (const replayed of [null, 'true']) assert.deepEqual(await said(await post(url, undefined, 'a', { token: 'A', 'x-request-id': 'r' })), [200, replayed, 'ann']);
  for (const replayed of [null, null]) assert.deepEqual(await said(await post(url, 'k', 'a', { token: 'A', 'x-unset': '1' })), [200, replayed, 'ann']);
  assert.equal(runs, 5);
  // Two keys are two, and not the first one.
  const { port } = new URL(url);
  const answer = await new Promise((resolve) => {
    request({ port, host: '127.0.0.1', method: 'POST', headers: ['Host', `127.0.0.1:${port}`, 'Token', 'A', 'X-User', 'b', 'Idempotency-Key', 'one', 'Idempotency-Key', 'two', 'Content-Length', '0'] }, (own) => { own.resume(); resolve(own); }).end();
  });
  assert.equal(answer.statusCode, 400);
});

test('Fastify: header fields are those that a hook in front has set', async () => {
  const users = { A: 'ann', M: 'mallory' };
  const app = Fastify();
  app.addHook('onRequest', (request, reply, done) => { request.headers = { ...request.headers, 'x-user': users[request.headers.token] }; done(); });
  await app.register(fastify, { oncegate: newGate(), ...one, scope: 'required-header:x-user' });
  app.post('/', (request) => request.headers['x-user']);
  const url = await listenFastify(app);
  for (const replayed of [null, 'true']) {
    for (const token of ['A', 'M']) assert.deepEqual(await said(await post(url, 'k', '1', { token, 'content-type': 'application/json' })), [200, replayed, users[token]]);
  }
});

test('a credential that middleware in front has deleted still tells callers apart', async () => {
  let runs = 0;
  const app = express5();
  app.use((req, res, next) => { delete req.headers.authorization; delete req.headers.cookie; next(); });
  app.use(express(newGate(), { wait: 0 }));
  app.post('/', (req, res) => { runs += 1; res.send(`${runs} ${req.headers.authorization}`); });
  const url = await listen(createServer(app));
  for (const replayed of [null, 'true']) {
    for (const [at, authorization] of ['Bearer ann', 'Bearer mallory'].entries()) {
      assert.deepEqual(await said(await post(url, 'k', 'a', { authorization })), [200, replayed, `${at + 1} undefined`]);
    }
  }
  assert.equal((await (await post(url, 'k', 'a', { cookie: 'session=1' })).json()).type, 'urn:oncegate:problem:scope-not-set');
  assert.equal(runs, 2);
});

test('header fields and targets that are no bytes are not cut to bytes', async () => {
  // What middleware or an adapter has made of a name. Their last eight bits are equal.
  const [one, two] = ['\u4e00', '\u4f00'];
  for (const [scope, change] of [
    ['required-header:x-user', (req, own) => { req.headers['x-user'] = own; }],
    ['cookie:user', (req, own) => { req.headers.cookie = `user=${own}`; }],
    ['required-header:x-user', (req, own) => { req.headers['x-user'] = own; req.rawHeaders.push('X-User', own); }],
    ['single-tenant', (req, own) => { req.url = `/?user=${own}`; req.originalUrl = req.url; }],
  ]) {
    const app = express5();
    let runs = 0;
    app.use((req, res, next) => { change(req, req.headers['x-second'] === undefined ? one : two); next(); });
    app.use(express(newGate(), { scope, wait: 0 }), (req, res) => { runs += 1; res.send(String(runs)); });
    const url = await listen(createServer(app));
    assert.deepEqual(await said(await post(url, 'k')), [200, null, '1']);
    assert.deepEqual(await said(await post(url, 'k')), [200, 'true', '1']);
    const other = await post(url, 'k', '', { 'x-second': '1' });
    if (scope === 'single-tenant') assert.equal(other.status, 422);
    else assert.deepEqual(await said(other), [200, null, '2']);
  }
});

test('a request of an adapter of functions in a cloud has its key and its body', async () => {
  // As `serverless-http` makes it: no raw header, a body that comes when it is read, and `complete` before it.
  const invoke = (app, key, body, marksAsRead) => new Promise((resolve) => {
    const socket = new PassThrough();
    const req = new IncomingMessage(socket);
    const headers = { host: 'a', 'content-type': 'application/json', 'content-length': body.length, 'idempotency-key': key };
    Object.assign(req, { complete: true, httpVersion: '1.1', httpVersionMajor: '1', httpVersionMinor: '1', method: 'POST', url: '/', headers });
    req._read = () => { req.push(Buffer.from(body)); req.push(null); };
    const res = new ServerResponse(req);
    const chunks = [];
    res.assignSocket(Object.assign(new Writable({ write(chunk, _, done) { chunks.push(chunk); done(); } }), { remoteAddress: '127.0.0.1' }));
    res.on('finish', () => { resolve([res.statusCode, res.getHeader('idempotent-replayed') ?? null, String(Buffer.concat(chunks)).split('\r\n\r\n')[1]]); });
    app(req, res);
    // As `@codegenie/serverless-express` does.
    if (marksAsRead) req.readable = false;
  });
  for (const marksAsRead of [false, true]) {
    for (const framework of [express5, express4]) {
      let charges = 0;
      const app = framework();
      app.use(express(newGate(), one), framework.json());
      app.post('/', (req, res) => { res.status(201).json({ charge: (charges += 1), amount: req.body?.amount }); });
      for (const replayed of [null, 'true']) assert.deepEqual(await invoke(app, 'k', '{"amount":5}', marksAsRead), [201, replayed, '{"charge":1,"amount":5}']);
      assert.equal((await invoke(app, 'k', '{"amount":6}', marksAsRead))[0], 422);
      assert.equal(charges, 1);
    }
  }
});

test('a connection of an adapter may have no events', async () => {
  const chunks = [];
  const req = new IncomingMessage({ encrypted: true, readable: false, remoteAddress: '127.0.0.1', address: () => ({ port: 443 }), on() {}, end() {}, destroy() {} });
  Object.assign(req, { complete: true, httpVersion: '1.1', httpVersionMajor: '1', httpVersionMinor: '1', method: 'POST', url: '/', headers: { host: 'a', 'idempotency-key': 'k' } });
  req._read = () => { req.push(null); };
  const res = new ServerResponse(req);
  // As `serverless-http` makes it.
  res.assignSocket({ _writableState: {}, writable: true, on() {}, removeListener() {}, destroy() {}, cork() {}, uncork() {}, write(chunk) { chunks.push(String(chunk)); return true; } });
  const finished = once(res, 'finish');
  node(newGate(), one, (own, answer) => { own.socket.on('close', () => undefined); answer.end('made'); })(req, res);
  await Promise.race([finished, once(res, 'close'), pause(10_000)]);
  assert.match(chunks.join(''), /^HTTP\/1\.1 200 OK[^]*made$/);
});

test('Web handlers: a request with a key keeps what middleware in front has set on it', async () => {
  const auth = (handler) => (own) => { own.auth = { user: 'ann' }; return handler(own); };
  const handler = auth(withIdempotency(newGate(), { ...one, scope: (own) => own.auth.user }, (own) => new Response(String(own.auth?.user))));
  for (const replayed of [null, 'true']) {
    const own = new Request('http://a.test/', { method: 'POST', body: 'a', headers: { 'idempotency-key': 'k' } });
    assert.deepEqual(await said(await handler(own)), [200, replayed, 'ann']);
  }
});

test('Web handlers: requests of other classes, and behind proxies, are whole', async () => {
  class Wrapped extends Request { constructor(inner) { super(inner); this.auth = 'ann'; } }
  class Private extends Request { #user; constructor(input, init, user) { super(input, init); this.#user = user; } get auth() { return this.#user; } }
  const proxied = (inner) => new Proxy(inner, {
    get(target, name) {
      if (name === 'auth') return 'ann';
      const value = Reflect.get(target, name, target);
      return typeof value === 'function' ? value.bind(target) : value;
    },
  });
  const kinds = { Wrapped: (inner) => new Wrapped(inner), Private: (inner) => new Private(inner, undefined, 'ann'), proxied };
  for (const [kind, make] of Object.entries(kinds)) {
    const client = new AbortController();
    const handler = withIdempotency(newGate(), one, async (own) => {
      client.abort();
      const parts = [own.method, own.auth, own.signal.aborted, own.headers.get('x-own'), attemptOf(own)?.key];
      return new Response(`${parts} ${await own.text()}`);
    });
    const own = (body) => make(new Request('http://a.test/', { method: 'POST', body, headers: { 'idempotency-key': 'k', 'x-own': '1' }, signal: client.signal }));
    const first = own('a');
    assert.deepEqual(await said(await handler(first)), [200, null, 'POST,ann,false,1,k a'], kind);
    // The same object again is another request, whose body is gone.
    await assert.rejects(handler(first), { name: 'BodyReadEarlyError' });
    assert.deepEqual(await said(await handler(own('a'))), [200, 'true', 'POST,ann,false,1,k a'], kind);
    assert.equal((await handler(own('b'))).status, 422);
  }
});

test('Express: a handler that fails after its response has ended does not cut it off', async () => {
  for (const framework of [express5, express4]) {
    const app = framework();
    app.set('env', 'test');
    const oncegate = newGate();
    const { store } = oncegate.engine;
    const complete = store.complete.bind(store);
    store.complete = async (...args) => { await pause(50); return complete(...args); };
    app.use(express(oncegate, one));
    app.post('/', (req, res, next) => { res.status(201).json({ paid: true }); next(new Error('after it')); });
    const url = await listen(createServer(app));
    for (const replayed of [null, 'true']) assert.deepEqual(await said(await post(url, 'k', 'a')), [201, replayed, '{"paid":true}']);
  }
});

test('Hono: a body that was read before is compared, if Hono has kept it', async () => {
  let runs = 0;
  const app = new Hono();
  app.use('/json', async (c, next) => { await c.req.json(); await next(); });
  app.use('/form', async (c, next) => { await c.req.parseBody(); await next(); });
  app.use('/raw', async (c, next) => { await c.req.raw.text(); await next(); });
  app.use(hono(newGate(), one));
  app.post('/json', async (c) => { runs += 1; return c.json({ runs, amount: (await c.req.json()).amount }); });
  app.post('/form', (c) => { runs += 1; return c.text('form'); });
  app.post('/raw', (c) => { runs += 1; return c.text('raw'); });
  app.onError((error, c) => c.text(error.name, 500));
  const url = await listenHono(app);
  for (const replayed of [null, 'true']) assert.deepEqual(await said(await post(`${url}/json`, 'k', '{"amount":5}')), [200, replayed, '{"runs":1,"amount":5}']);
  assert.deepEqual((await said(await post(`${url}/json`, 'k', '{"amount":6}'))).slice(0, 2), [422, 'key-reused']);
  const form = new FormData();
  form.set('file', new Blob(['x']), 'x.txt');
  assert.equal((await fetch(`${url}/raw`, { method: 'POST', body: 'x', headers: { 'idempotency-key': 'r' } })).status, 500);
  for (const body of [form]) assert.match(await (await fetch(`${url}/form`, { method: 'POST', body, headers: { 'idempotency-key': 'f' } })).text(), /^(?:form|BodyReadEarlyError)$/);
  const route = withIdempotency(newGate(), one, () => new Response('x'));
  const request = new Request('http://a.test/', { method: 'POST', body: 'x', headers: { 'idempotency-key': 'k' } });
  await request.text();
  await assert.rejects(route(request), { name: 'BodyReadEarlyError' });
});

test('Hono: a handler whose client was answered by middleware before it is done', async () => {
  let runs = 0;
  let goOn;
  const app = new Hono();
  app.use(timeout(30));
  app.use(hono(newGate(), one));
  app.post('/', async (c) => { runs += 1; await new Promise((resolve) => { goOn = resolve; }); return c.json({ runs }, 201); });
  const url = await listenHono(app);
  assert.equal((await post(url, 'k')).status, 504);
  goOn();
  await until(async () => (await post(url, 'k')).status === 422, 'end');
  assert.deepEqual((await said(await post(url, 'k'))).slice(0, 2), [422, 'replay-unavailable']);
  assert.equal(runs, 1);
});

test('Web handlers: handlerTimeout is over when the handler has ended, however long the store takes', async () => {
  const store = new MemoryStore();
  const complete = store.complete.bind(store);
  store.complete = async (...args) => { await pause(200); return complete(...args); };
  const handler = withIdempotency(newGate({ store }), { ...one, handlerTimeout: '100ms' }, () => new Response('paid'));
  const ask = async () => said(await handler(new Request('http://a.test/', { method: 'POST', headers: { 'idempotency-key': 'k' }, body: 'x' })));
  assert.deepEqual([await ask(), await ask()], [[200, null, 'paid'], [200, 'true', 'paid']]);
});

test('Next.js: redirect and notFound are responses', async () => {
  let runs = 0;
  const thrown = (digest) => { runs += 1; throw Object.assign(new Error(digest.split(';')[0]), { digest }); };
  for (const [digest, status, location] of [
    ['NEXT_REDIRECT;replace;/done?a=1;b=2;307;', 307, '/done?a=1;b=2'], ['NEXT_REDIRECT;push;https://a.test/x;303;', 303, 'https://a.test/x'],
    ['NEXT_HTTP_ERROR_FALLBACK;404', 404, null], ['NEXT_NOT_FOUND', 404, null],
  ]) {
    runs = 0;
    const route = withIdempotency(newGate(), one, () => thrown(digest));
    for (const replayed of [null, 'true']) {
      const answer = await route(new Request('http://a.test/pay', { method: 'POST', headers: { 'idempotency-key': 'k' } }));
      assert.deepEqual([answer.status, answer.headers.get('location'), answer.headers.get('idempotent-replayed'), runs], [status, location, replayed, 1], digest);
    }
  }
});

// Several of them on one way.
test('the middleware twice on one way: the first one decides, and the log says so once', async () => {
  for (const [name, start] of Object.entries({
    Express: (oncegate, other, handler) => {
      const app = express5();
      app.use(express(oncegate, one));
      app.post('/', express(other, { ...one, requireKey: true }), (req, res) => res.status(201).send(handler()));
      app.use((error, req, res, next) => { void next; res.status(500).set('idempotency-store', 'release').send(error.message); });
      return listen(createServer(app));
    },
    Fastify: async (oncegate, other, handler) => {
      const app = Fastify();
      await app.register(fastify, { oncegate, ...one });
      await app.register(async (sub) => {
        await sub.register(fastify, { oncegate: other, ...one, requireKey: true });
        sub.post('/', async (request, reply) => reply.code(201).send(handler()));
      });
      return listenFastify(app);
    },
    Hono: (oncegate, other, handler) => {
      const app = new Hono();
      app.use(hono(oncegate, one));
      app.post('/', hono(other, { ...one, requireKey: true }), (c) => c.text(handler(), 201));
      app.onError((error, c) => c.text(error.message, 500));
      return listenHono(app);
    },
  })) {
    const { log, oncegate } = logging();
    let runs = 0;
    const url = await start(oncegate, oncegate, () => String(runs += 1));
    for (const replayed of [null, 'true']) assert.deepEqual(await said(await post(url, 'k')), [201, replayed, '1'], name);
    assert.equal((await post(url, 'k2')).status, 201);
    // The second one decides about what the first one lets pass.
    assert.equal((await post(url, undefined)).status, 400);
    assert.deepEqual([runs, log.filter((line) => /two middleware of oncegate/.test(line)).length], [2, 1]);
    runs = 0;
    const mixed = await start(oncegate, newGate(), () => String(runs += 1));
    assert.match(await (await post(mixed, 'other')).text(), /two middleware of oncegate with different stores/);
    assert.equal(runs, 0);
  }
});

test('behind a sidecar: a refusal frees the key of the sidecar, which gets the word of the handler, too', async () => {
  const { log, oncegate } = logging();
  let finish;
  let runs = 0;
  const record = 'ab'.repeat(32);
  const behind = { 'oncegate-record': record, 'oncegate-token': '1' };
  const url = await listen(createServer(node(oncegate, one, async (req, res) => {
    runs += 1;
    res.setHeader('idempotency-store', 'tombstone');
    if (runs === 1) await new Promise((resolve) => { finish = resolve; });
    res.end('done');
  })));
  const first = post(url, 'k', 'x', behind);
  await until(() => finish, 'handler');
  const running = await post(url, 'k', 'x', behind);
  assert.deepEqual([running.status, running.headers.get('idempotency-store')], [409, 'release']);
  // Without a sidecar, the field is for no one.
  assert.equal((await post(url, 'k', 'x')).headers.get('idempotency-store'), null);
  finish();
  assert.equal((await first).headers.get('idempotency-store'), 'tombstone');
  const done = await post(url, 'k', 'x', behind);
  assert.deepEqual([done.status, done.headers.get('idempotency-store')], [422, 'release']);
  assert.equal(log.filter((line) => /a sidecar of Oncegate is in front of this service/.test(line)).length, 1);
  // One store and one name of the service: the record is the same, and each would wait for the other.
  const id = log.concat((await (await post(url, 'k', 'other')).text())).join(' ').match(/urn:oncegate:record:([0-9a-f]{64})/)[1];
  const same = await post(url, 'k', 'x', { 'oncegate-record': id });
  assert.deepEqual([same.status, same.headers.get('idempotency-store'), runs], [503, 'release', 1]);
  assert.match((await same.json()).detail, /one store and one name of the service/);
});

// Stores.
test('with storeOutage open, a request that was refused, or runs in this process, is not executed', async () => {
  const store = new MemoryStore();
  const lookup = store.lookup.bind(store);
  const complete = store.complete.bind(store);
  let [isAway, isFull, runs, finish] = [false, false, 0, undefined];
  const away = () => Promise.reject(Object.assign(new Error('away'), { code: '57P01' }));
  const mark = '3a75297e';
  store.lookup = (id) => (isAway && !id.toString('hex').startsWith(mark) ? away() : lookup(id));
  store.complete = (...args) => (isFull ? away() : complete(...args));
  const url = await listen(createServer(node(newGate({ store }), { ...one, storeOutage: 'open' }, async (req, res) => {
    runs += 1;
    if (req.url === '/slow') await new Promise((resolve) => { finish = resolve; });
    res.end(String(runs));
  })));
  await (await post(url, 'k', 'amount=5')).text();
  isAway = true;
  assert.deepEqual((await said(await post(url, 'k', 'amount=900'))).slice(0, 2), [503, 'store-unavailable']);
  const slow = post(`${url}/slow`, 'slow');
  await until(() => finish, 'handler');
  assert.deepEqual((await said(await post(`${url}/slow`, 'slow'))).slice(0, 2), [503, 'store-unavailable']);
  isFull = true;
  finish();
  assert.equal((await slow).headers.get('idempotency-status'), 'not-stored');
  assert.deepEqual((await said(await post(`${url}/slow`, 'slow'))).slice(0, 2), [503, 'store-unavailable']);
  assert.equal(runs, 2);
});

test('a full store still replays what it has, and the log says that it is full', async () => {
  const { log, oncegate } = logging();
  const store = oncegate.engine.store;
  const claim = store.claim.bind(store);
  let runs = 0;
  const url = await listen(createServer(node(oncegate, one, (req, res) => { runs += 1; res.end('first'); })));
  await (await post(url, 'k', 'x')).text();
  store.claim = () => Promise.reject(new StoreFullError('OOM'));
  assert.deepEqual(await said(await post(url, 'k', 'x')), [200, 'true', 'first']);
  assert.deepEqual((await said(await post(url, 'k', 'y'))).slice(0, 2), [422, 'key-reused']);
  assert.deepEqual((await said(await post(url, 'new', 'x'))).slice(0, 2), [503, 'store-unavailable']);
  store.claim = claim;
  assert.equal(runs, 1);
  assert.equal(log.filter((line) => /^a claim was refused, because the store is full: OOM/.test(line)).length, 1);
});

test('a store that takes no keys for a moment is not called full', async () => {
  const { log, oncegate } = logging();
  oncegate.engine.store.claim = () => Promise.reject(new StoreFullError('Redis takes no new keys (READONLY)', true));
  const url = await listen(createServer(node(oncegate, one, (req, res) => { res.end(); })));
  const answer = await post(url, 'k');
  const { detail } = await answer.json();
  assert.deepEqual([answer.status, answer.headers.get('retry-after'), /full/.test(detail), /full/.test(log.join())], [503, '1', false, false]);
  for (const [message, isPassing] of [['READONLY You', true], ['CLUSTERDOWN The', true], ['OOM command', false], ['MISCONF Redis', false]]) {
    const store = new RedisStore((command) => (command[0] === 'CONFIG' ? Promise.resolve(['maxmemory-policy', 'noeviction']) : Promise.reject(new Error(`${message} …`))));
    await assert.rejects(store.lookup(Buffer.alloc(32)), (error) => error instanceof StoreFullError && error.isPassing === isPassing);
  }
});

test('a handler that writes all the time keeps its connection, and one whose connection the server closed is done at its end', async () => {
  for (const isIdle of [false, true]) {
    let runs = 0;
    let mayEnd;
    const server = createServer(node(newGate(), one, async (req, res) => {
      runs += 1;
      for (let at = 0; at < 8; at += 1) { res.write(`row ${at}\n`); if (!isIdle) await pause(250); }
      if (isIdle) await new Promise((resolve) => { mayEnd = resolve; });
      res.end('end\n');
    }));
    server.setTimeout(1000);
    const url = await listen(server);
    const first = await post(url, 'k').then(said, (error) => error.name);
    if (isIdle) {
      assert.equal(first, 'TypeError');
      await until(async () => (await said(await post(url, 'k')))[1] === 'outcome-unknown', 'unknown outcome');
      mayEnd();
      await until(async () => (await said(await post(url, 'k')))[1] === 'replay-unavailable', 'known outcome');
    } else assert.deepEqual([first[0], (await said(await post(url, 'k'))).slice(0, 2)], [200, [200, 'true']]);
    assert.equal(runs, 1);
  }
});

test('responses that clients do not take count for the budget', async () => {
  const oncegate = newGate({ responseBudget: '8MiB' });
  const body = Buffer.alloc(1_000_000, 'x');
  const url = await listen(createServer(node(oncegate, one, (req, res) => { res.end(body); })));
  const { port, host } = new URL(url);
  await (await post(url, 'k')).arrayBuffer();
  const head = `POST / HTTP/1.1\r\nHost: ${host}\r\nIdempotency-Key: k\r\nContent-Type: text/plain;charset=UTF-8\r\nContent-Length: 0\r\n\r\n`;
  const socket = connect(port, '127.0.0.1');
  socket.pause();
  socket.write(head.repeat(60));
  const refused = await until(async () => { const own = await post(url, 'k'); await own.arrayBuffer(); return own.status === 503 && own; }, 'refusal');
  assert.match(refused.headers.get('idempotency-status'), /problem=overloaded/);
  socket.destroy();
  // All of it is given back.
  await until(async () => { const own = await post(url, 'k'); await own.arrayBuffer(); return own.status === 200; }, 'room');
  await until(() => oncegate.hasResponseBudget && oncegate.responseBytes === 0, 'end of all responses');
});

test('each record whose end is not stored is named, and drain waits for it', async () => {
  const { log, oncegate } = logging();
  const { store } = oncegate.engine;
  const complete = store.complete.bind(store);
  let isAway = true;
  store.complete = (...args) => (isAway ? Promise.reject(Object.assign(new Error('away'), { code: 'ECONNREFUSED' })) : complete(...args));
  let runs = 0;
  let goOn;
  const all = new Promise((resolve) => { goOn = resolve; });
  const url = await listen(createServer(node(oncegate, one, async (req, res) => {
    if ((runs += 1) === 10) goOn();
    await all;
    res.end('done');
  })));
  const answers = await Promise.all(Array.from({ length: 10 }, (_, at) => post(url, `k${at}`)));
  assert.deepEqual([...new Set(answers.map(({ headers }) => headers.get('idempotency-status')))], ['not-stored']);
  const named = log.map((line) => /^record ([0-9a-f]{64}): the end of an attempt is not stored yet: ECONNREFUSED$/.exec(line)?.[1]).filter(Boolean);
  assert.equal(new Set(named).size, 10);
  assert.equal(await oncegate.drain(300), false);
  const draining = oncegate.drain(20_000);
  isAway = false;
  assert.equal(await draining, true);
  let completed = 0;
  for (const id of named) completed += Number((await store.lookup(Buffer.from(id, 'hex'))).state === 'completed');
  assert.equal(completed, 10);
});

test('a request without a scope is in the log', async () => {
  const { log, oncegate } = logging();
  const url = await listen(createServer(node(oncegate, {}, (req, res) => { res.end(); })));
  for (let at = 0; at < 3; at += 1) assert.equal((await post(url, 'k', '', { cookie: 'sid=secret' })).status, 400);
  assert.deepEqual(log.map((line) => /^a request was refused: .*the setting `scope` is missing/.test(line)), [true]);
  assert.doesNotMatch(log.join(), /secret/);
});

test('Express: bodies that a parser has read are the same only if their values are', async () => {
  let runs = 0;
  const app = express5();
  app.use(express5.urlencoded({ extended: false }), express5.json());
  app.use(express(newGate(), one));
  app.post('/', (req, res) => { runs += 1; res.json(req.body); });
  app.use((error, req, res, next) => { void next; res.status(500).send(error.message); });
  const url = await listen(createServer(app));
  const form = { 'content-type': 'application/x-www-form-urlencoded' };
  for (const [at, [first, other]] of [
    ['to=x&formula=price%3D5%2B3', 'to=x&formula=price%3D5+3'],
    ['cb=%2Fx%3Fu%3D%2541', 'cb=%2Fx%3Fu%3DA'],
    ['cb=%3Fx%3D1%26to%3Dalice%26by%3Dbob', 'cb=%3Fx%3D1%26by%3Dbob%26to%3Dalice'],
  ].entries()) {
    for (const replayed of [null, 'true']) assert.deepEqual((await said(await post(url, `form-${at}`, first, form))).slice(0, 2), [200, replayed]);
    assert.deepEqual((await said(await post(url, `form-${at}`, other, form))).slice(0, 2), [422, 'key-reused']);
  }
  // What has no canonical form is compared as it is.
  const json = { 'content-type': 'application/json' };
  for (const [at, body] of ['{"id":1,"ID":2}', '{"id":9007199254740993}', '{"id":0.30000000000000004}', '"\\ud800"', `${'['.repeat(200)}${']'.repeat(200)}`].entries()) {
    const sent = at === 3 ? `[${body}]` : body;
    for (const replayed of [null, 'true']) assert.deepEqual((await said(await post(url, `json-${at}`, sent, json))).slice(0, 2), [200, replayed], sent);
    assert.deepEqual((await said(await post(url, `json-${at}`, '{"id":3}', json))).slice(0, 2), [422, 'key-reused']);
  }
  assert.equal(runs, 8);
});

test('Hono: a whole response has one framing, whatever the handler has set', async () => {
  const upstream = await listen(createServer((req, res) => {
    res.writeHead(200, { 'content-encoding': 'gzip', 'content-type': 'text/plain' });
    res.end(gzipSync('receipt '.repeat(100)));
  }));
  const app = new Hono();
  app.use(hono(newGate(), one));
  app.post('/stream', (c) => streamText(c, async (stream) => { await stream.write('rece'); await stream.write('ipt'); }));
  app.post('/fetch', () => fetch(upstream));
  app.post('/error', () => Response.error());
  const url = await listenHono(app);
  for (const replayed of [null, 'true']) {
    const response = await post(`${url}/stream`, 's');
    assert.equal(response.headers.get('transfer-encoding'), null);
    assert.deepEqual(await said(response), [200, replayed, 'receipt']);
    assert.deepEqual(await said(await post(`${url}/fetch`, 'f')), [200, replayed, 'receipt '.repeat(100)]);
  }
  assert.deepEqual((await said(await post(`${url}/error`, 'e'))).slice(0, 2), [500, 'outcome-unknown']);
});

test('Hono: a large response whose client hangs up cancels its source', async () => {
  let cancelled = 0;
  const app = new Hono();
  app.use(hono(newGate(), one));
  app.post('/', () => {
    const chunk = new Uint8Array(64 * 1024);
    return new Response(new ReadableStream({ pull(controller) { controller.enqueue(chunk); }, cancel() { cancelled += 1; } }));
  });
  const { port } = new URL(await listenHono(app));
  const socket = connect(port, '127.0.0.1');
  socket.write('POST / HTTP/1.1\r\nHost: h\r\nIdempotency-Key: k\r\nContent-Length: 0\r\n\r\n');
  await once(socket, 'data');
  socket.destroy();
  await until(() => cancelled === 1, 'cancel of the source');
});

const inFront = {
  Express: async () => {
    const app = express5();
    app.use((req, res, next) => { res.set({ 'access-control-allow-origin': '*', 'x-content-type-options': 'nosniff', etag: '"front"' }); next(); });
    app.use(express(newGate(), one));
    app.post('/', (req, res) => { res.send('receipt'); });
    return listen(createServer(app));
  },
  Fastify: async () => {
    const app = Fastify();
    app.addHook('onRequest', async (request, reply) => { reply.headers({ 'access-control-allow-origin': '*', 'x-content-type-options': 'nosniff', etag: '"front"' }); });
    await app.register(fastify, { oncegate: newGate(), ...one });
    app.post('/', async (request, reply) => reply.header('etag', '"own"').send('receipt'));
    return listenFastify(app);
  },
  Hono: async () => {
    const app = new Hono();
    app.use(cors(), async (c, next) => { c.header('x-content-type-options', 'nosniff'); c.header('etag', '"front"'); await next(); });
    app.use(hono(newGate(), one));
    app.post('/', (c) => { c.header('etag', '"own"'); return c.text('receipt'); });
    return listenHono(app);
  },
};
for (const [name, start] of Object.entries(inFront)) {
  test(`${name}: replays and refusals have the fields that middleware in front has set`, async () => {
    const url = await start();
    for (const [body, status] of [['a', 200], ['a', 200], ['b', 422]]) {
      const { status: got, headers } = await post(url, 'k', body, { origin: 'http://a.example' });
      assert.deepEqual([got, headers.get('access-control-allow-origin'), headers.get('x-content-type-options')], [status, '*', 'nosniff']);
      // A field that describes the body is that of the response.
      if (status === 422) assert.equal(headers.get('etag'), null);
      else if (name !== 'Express') assert.equal(headers.get('etag'), '"own"');
    }
  });
}

test('a response that is destroyed before its head does not free the key of a handler that still runs', async () => {
  let runs = 0;
  let go;
  const gone = new Promise((resolve) => { go = resolve; });
  const url = await listen(createServer(node(newGate(), { ...one, serverErrors: 'release' }, async (req, res) => {
    runs += 1;
    res.destroy();
    await gone;
    res.end('done');
  })));
  await assert.rejects(post(url, 'k'));
  await until(async () => { const [status, problem] = await said(await post(url, 'k')); return status !== 409 && problem === 'outcome-unknown'; }, 'unknown outcome');
  assert.equal(runs, 1);
  go();
});

test('a handler that destroys its response cuts its connection at once, and the outcome is unknown', async () => {
  for (const [name, breakOff] of [
    ['before its head', (req, res) => { res.destroy(); }],
    ['by the connection of the request', (req) => { req.socket.destroy(); }],
    ['by its connection, after a while', async (req, res) => { await pause(5); res.socket.destroy(); }],
    ['by the end of its connection', (req, res) => { res.connection.end(); }],
    ['after its head', (req, res) => { res.status(201).write('half of '); res.destroy(); }],
    ['with an error', (req, res) => { res.status(201).write('half of '); res.destroy(new Error('broken')); }],
    ['in the handler of errors', async (req, res) => { res.status(201).write('half of '); await pause(5); throw new Error('broken'); }],
  ]) {
    let executions = 0;
    const app = express5();
    app.use(express(newGate(), one));
    app.post('/', (req, res) => {
      executions += 1;
      return breakOff(req, res);
    });
    app.use((error, req, res, next) => (res.headersSent ? res.destroy() : res.status(500).end('failed')));
    const url = await listen(createServer(app));
    await assert.rejects(post(url, 'k'), (error) => error.name !== 'TimeoutError', name);
    const retry = await until(async () => {
      const answer = await post(url, 'k');
      return answer.status !== 409 && answer;
    });
    assert.deepEqual([retry.status, (await retry.json()).type.split(':').at(-1), executions], [500, 'outcome-unknown', 1], name);
  }
});

test('a handler that ends while the store takes its time-out is recorded', async () => {
  let isSlow = true;
  let letStore;
  const stored = new Promise((resolve) => { letStore = resolve; });
  class SlowStore extends MemoryStore {
    async complete(...args) {
      if (isSlow) { isSlow = false; await stored; }
      return super.complete(...args);
    }
  }
  let hasEnded = false;
  let responded;
  const url = await listen(createServer(node(newGate({ store: new SlowStore() }), { ...one, handlerTimeout: 50 }, async (req, res) => {
    responded = res;
    await until(() => !isSlow, 'time-out');
    res.statusCode = 201;
    res.setHeader('x-late', '1');
    res.end('done');
    hasEnded = true;
  })));
  const first = post(url, 'k');
  await until(() => hasEnded, 'end');
  assert.equal(responded.writableEnded, true);
  letStore();
  const answer = await first;
  assert.equal(answer.headers.get('x-late'), null);
  assert.deepEqual((await said(answer)).slice(0, 2), [500, 'outcome-unknown']);
  await until(async () => (await said(await post(url, 'k')))[1] !== 'outcome-unknown', 'known outcome');
});

test('a handler that ends while the store takes the end of its connection is recorded', async () => {
  const store = new MemoryStore();
  const complete = store.complete.bind(store);
  let letStore;
  const stored = new Promise((resolve) => { letStore = resolve; });
  let completions = 0;
  store.complete = async (...args) => {
    completions += 1;
    if (completions === 1) await stored;
    return complete(...args);
  };
  let runs = 0;
  const url = await listen(createServer(node(newGate({ store, storeTimeout: '60s' }), one, async (req, res) => {
    runs += 1;
    res.write('half');
    req.socket.destroy();
    await until(() => completions > 0, 'completion');
    res.end('of it');
    letStore();
  })));
  await assert.rejects(post(url, 'k'));
  await until(async () => (await said(await post(url, 'k')))[1] === 'replay-unavailable', 'known outcome');
  assert.equal(runs, 1);
});

test('a connection that is kept alive keeps nothing of its responses', async () => {
  const app = express5();
  app.use(express(newGate(), one));
  let socket;
  // The connection itself: `socket` is what a handler sees of it.
  app.post('/', (req, res) => { socket = req.client; res.sendFile(file); });
  const url = new URL(await listen(createServer(app)));
  const agent = new Agent({ keepAlive: true, maxSockets: 1 });
  const send = (key) => new Promise((resolve, reject) => {
    request({ hostname: url.hostname, port: url.port, agent, method: 'POST', headers: { 'idempotency-key': key } }, (answer) => { answer.resume().on('end', resolve); }).on('error', reject).end();
  });
  const listeners = () => ['close', 'end', 'error', 'finish'].map((name) => socket.listenerCount(name));
  try {
    await send('first');
    const before = listeners();
    const own = socket;
    for (let at = 0; at < 20; at += 1) await send(`k${at}`);
    assert.equal(socket, own);
    await until(() => listeners().every((count, at) => count <= before[at]), `few listeners: ${listeners()}`);
  } finally {
    agent.destroy();
  }
});

test('the request of a stream tells that its client has left', async () => {
  const seen = { without: [], k: [] };
  const url = await listen(createServer(node(newGate(), one, (req, res) => {
    const own = seen[req.headers['idempotency-key'] ?? 'without'];
    for (const name of ['close', 'aborted']) req.on(name, () => own.push(name));
    res.writeHead(200, { 'content-type': 'text/event-stream' });
    res.write('data: 1\n\n');
  })));
  for (const key of [undefined, 'k']) {
    const leaving = new AbortController();
    const answer = await fetch(url, { method: 'POST', body: 'a', signal: leaving.signal, headers: key === undefined ? {} : { 'idempotency-key': key } });
    await answer.body.getReader().read();
    leaving.abort();
    await until(() => seen[key ?? 'without'].includes('close'), `close of the request with the key ${key}`);
  }
});

test('a chunk of another type leaves the head as it was', async () => {
  for (const name of ['end', 'write']) {
    const url = await listen(createServer(node(newGate(), one, (req, res) => {
      try {
        res[name]({ a: 1 });
      } catch (error) {
        assert.equal(error.code, 'ERR_INVALID_ARG_TYPE');
        assert.equal(res.headersSent, false);
        res.statusCode = 500;
        res.end('failed');
      }
    })));
    for (const key of [undefined, 'k']) assert.equal(await (await post(url, key, 'a')).text(), 'failed');
  }
});

test('a form has no natural key, also after its parser', async () => {
  const keys = async (parser) => {
    const app = express5();
    if (parser !== undefined) app.use(parser);
    app.use(express(newGate(), { ...one, naturalKey: ['/cart'], requireKey: true }));
    app.post('/', (req, res) => { res.json({}); });
    return said(await post(await listen(createServer(app)), undefined, 'cart=1', { 'content-type': 'application/x-www-form-urlencoded' }));
  };
  const [status, problem] = await keys();
  assert.equal(status, 400);
  assert.deepEqual((await keys(express5.urlencoded({ extended: false }))).slice(0, 2), [status, problem]);
});

test('a handler that closes its connection before its response, and goes on, is replayed', async () => {
  for (const [name, close] of [
    ['by the end of its connection', (req) => { req.socket.end(); }],
    ['by its time-out', (req, res) => { res.setTimeout(20, (socket) => { socket.destroy(); }); }],
  ]) {
    for (const [how, respond, problem] of [
      ['as a whole', (res) => { res.status(201).set('location', '/made').json({ ok: 1 }); }, undefined],
      ['in parts', (res) => { res.status(201).write('{"ok"'); res.end(':1}'); }, 'replay-unavailable'],
      ['shorter than announced', (res) => { res.status(201).set('content-length', '9').end('short'); }, 'replay-unavailable'],
    ]) {
      let runs = 0;
      let seen;
      let goOn;
      const going = new Promise((resolve) => { goOn = resolve; });
      const app = express5();
      app.use(express(newGate(), one));
      app.post('/', async (req, res) => {
        runs += 1;
        close(req, res);
        await going;
        seen = [res.headersSent, res.writableEnded];
        respond(res);
        seen.push(res.headersSent, res.writableEnded);
      });
      const url = await listen(createServer(app));
      await assert.rejects(post(url, 'k'), (error) => error.name !== 'TimeoutError', name);
      await until(async () => (await said(await post(url, 'k')))[1] === 'outcome-unknown', 'unknown outcome');
      goOn();
      const retry = await until(async () => {
        const answer = await post(url, 'k');
        return answer.status !== 500 && answer;
      });
      assert.deepEqual(seen.slice(0, 2), [false, false], name);
      if (problem !== undefined) assert.equal((await said(retry))[1], problem, `${name}, ${how}`);
      else assert.deepEqual([retry.status, retry.headers.get('location'), await retry.text(), ...seen.slice(2)], [201, '/made', '{"ok":1}', true, true], name);
      assert.equal(runs, 1);
    }
  }
});

test('a handler of Fastify that closes its connection and goes on is replayed', async () => {
  const app = Fastify();
  await app.register(fastify, { oncegate: newGate(), ...one });
  let goOn;
  const going = new Promise((resolve) => { goOn = resolve; });
  app.post('/', async (request) => { request.raw.socket.destroy(); await going; return { ok: 1 }; });
  const url = await listenFastify(app);
  await assert.rejects(post(url, 'k'));
  await until(async () => (await said(await post(url, 'k')))[1] === 'outcome-unknown', 'unknown outcome');
  goOn();
  await until(async () => (await (await post(url, 'k')).text()) === '{"ok":1}', 'replay');
});

test('a handler that closes its connection after its response: the client has it', async () => {
  for (const close of ['end', 'destroySoon', 'destroy']) {
    const app = express5();
    app.use(express(newGate(), one));
    app.post('/', (req, res) => { res.json({ ok: 1 }); req.socket[close](); });
    const url = await listen(createServer(app));
    for (let time = 0; time < 2; time += 1) assert.equal(await (await post(url, 'k')).text(), '{"ok":1}', close);
  }
});
