import assert from 'node:assert/strict';
import { getEventListeners, once } from 'node:events';
import { createReadStream, rmSync, writeFileSync } from 'node:fs';
import { createServer } from 'node:http';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { Readable } from 'node:stream';
import { mock, test } from 'node:test';
import { Client, OpenOutcomeError } from '../dist/esm/index.js';
import { retryAfterMs } from '../dist/esm/client.js';
import { judge } from '../dist/esm/verdict.js';
import { vectors } from './vectors.js';

test('responses have the published meanings', () => {
  const { contexts, statuses, responses } = vectors('client/vectors/meanings.json');
  let count = 0;
  for (const { name, headers, body, meanings } of responses) {
    for (const context of contexts) {
      const asked = { protection: context.protection, serverErrors: context.server_errors, inDoubt: context.in_doubt };
      const expected = meanings[context.name].flatMap(([times, meaning]) => Array(times).fill(meaning));
      const found = statuses.map((status) => judge(asked, status, new Headers(headers), Buffer.from(body)));
      found.forEach((meaning, at) => assert.equal(meaning, expected[at], `${name}, ${context.name}, ${statuses[at]}`));
      count += found.length;
    }
  }
  assert.deepEqual([responses.length, contexts.length, statuses.length, count], [168, 9, 38, 57_456]);
});

async function serve(handler) {
  const server = createServer(handler).listen(0, '127.0.0.1');
  await once(server, 'listening');
  return { url: `http://127.0.0.1:${server.address().port}/`, close: () => { server.closeAllConnections(); server.close(); } };
}

const quick = { backoff: { base: 1, cap: 5 } };

test('one key for all attempts, through cut connections, 503 and 409', async () => {
  const keys = [];
  const there = await serve((req, res) => {
    keys.push(req.headers['idempotency-key']);
    if (keys.length === 1) { req.socket.destroy(); return; }
    if (keys.length === 2) { res.writeHead(503).end(); return; }
    if (keys.length === 3) { res.writeHead(409).end(); return; }
    if (keys.length === 4) { res.writeHead(201, { 'content-length': 10 }); res.write('cut'); setImmediate(() => res.destroy()); return; }
    res.writeHead(201, { 'Idempotent-Replayed': 'true' }).end('{"id":1}');
  });
  const outcome = await new Client(quick).send(there.url, { method: 'POST', body: '{}' });
  assert.deepEqual([outcome.kind, outcome.verdict, outcome.attempts, outcome.isReplayed, await outcome.response.json()], ['definite', 'done', 5, true, { id: 1 }]);
  assert.equal(new Set(keys).size, 1);
  there.close();
});

test('what is not definite says if it may have taken effect', async () => {
  const there = await serve((req, res) => {
    const [status, headers] = { '/busy': [503, { 'retry-after': '600' }], '/late': [429, { 'retry-after': '600' }], '/no': [422, {}], '/hang': [], '/unknown': [500, { 'content-type': 'application/json' }] }[req.url];
    if (status !== undefined) res.writeHead(status, headers).end(req.url === '/unknown' ? '{"type":"urn:oncegate:problem:outcome-unknown","retry":"stop"}' : '');
  });
  const client = new Client({ ...quick, attemptTimeout: 1000, maxAttempts: 2 });
  const send = (path, more) => client.send(there.url.slice(0, -1) + path, { method: 'POST' }, more);
  const shown = async (path, more) => { const { kind, reason, verdict, advice, mayHaveTakenEffect } = await send(path, more); return [kind, reason ?? verdict, mayHaveTakenEffect ?? advice]; };
  assert.deepEqual(await shown('/busy'), ['open', 'come-back-later', true]);
  assert.deepEqual(await shown('/late'), ['open', 'come-back-later', false]);
  assert.deepEqual(await shown('/no'), ['definite', 'refused', 'fix-request']);
  assert.deepEqual(await shown('/no', { sentBefore: true }), ['open', 'turned-away', true]);
  assert.deepEqual(await shown('/hang'), ['open', 'attempts', true]);
  assert.deepEqual(await shown('/unknown'), ['open', 'unknown', true]);
  const controller = new AbortController();
  setTimeout(() => controller.abort(), 100);
  assert.deepEqual(await shown('/hang', { signal: controller.signal }), ['open', 'aborted', true]);
  there.close();
  const away = await serve(() => undefined);
  away.close();
  const gone = await new Client({ ...quick, maxAttempts: 3 }).send(away.url, { method: 'POST' });
  assert.deepEqual([gone.reason, gone.mayHaveTakenEffect, gone.attempts], ['attempts', false, 3]);
  await assert.rejects(new Client({ ...quick, maxAttempts: 1 }).fetch(there.url, { method: 'POST', headers: { 'idempotency-key': 'k' } }), OpenOutcomeError);
});

test('a budget stops retries of a service that is down', async () => {
  let requests = 0;
  const there = await serve((req, res) => { requests += 1; res.writeHead(503).end(); });
  const client = new Client({ ...quick, retryBudget: 20 });
  const reasons = [];
  for (let at = 0; at < 10; at += 1) reasons.push((await client.send(there.url, { method: 'POST' })).reason);
  assert.ok(reasons.slice(2).every((reason) => reason === 'budget'));
  assert.ok(requests < 20);
  there.close();
});

test('Retry-After in all its shapes', () => {
  const of = (headers) => retryAfterMs(new Headers(headers), Date.parse('Tue, 24 Nov 2026 18:00:00 GMT'));
  assert.equal(of({}), undefined);
  assert.equal(of({ 'retry-after': '7' }), 7000);
  assert.equal(of({ 'retry-after': 'soon' }), undefined);
  assert.equal(of({ 'retry-after': 'Tue, 24 Nov 2026 18:00:05 GMT' }), 5000);
  assert.equal(of({ 'retry-after': 'Tue, 24 Nov 2026 18:00:05 GMT', date: 'Tue, 24 Nov 2026 18:00:03 GMT' }), 2000);
  assert.equal(of({ 'retry-after': 'Tue, 24 Nov 2020 18:00:05 GMT' }), 0);
});

test('an address that is none of HTTP is an error, and nothing is retried', async () => {
  for (const url of ['htp:/x', 'localhost:3000/x', '/x', 'file:///etc/hosts', new URL('ftp://a.test/')]) {
    await assert.rejects(new Client().send(url, { method: 'POST' }), { name: 'TypeError', message: /does not begin with http:\/\/ or https:\/\/; nothing was sent/ });
  }
  // A function of its own may know other addresses.
  const outcome = await new Client({ fetch: async () => new Response('done', { status: 201 }) }).send('/x', { method: 'POST' });
  assert.equal(outcome.kind, 'definite');
});

test('a key is not sent again after the machine was suspended for longer than the deadline', async () => {
  const { now } = Date;
  let sent = 0;
  const fetch = async () => {
    sent += 1;
    // The monotonic clock stands still meanwhile.
    setTimeout(() => mock.method(Date, 'now', () => now() + 86_400_000), 1);
    return new Response('', { status: 503 });
  };
  try {
    const outcome = await new Client({ fetch, backoff: { base: 0, cap: 0 }, deadline: '2h' }).fetch('http://shop.test/', { method: 'POST', headers: { 'Idempotency-Key': 'k' } }).catch((error) => error.outcome);
    assert.deepEqual([outcome.kind, outcome.reason, outcome.mayHaveTakenEffect, sent], ['open', 'deadline', true, 1]);
  } finally {
    mock.restoreAll();
  }
});

/** A service that answers 503 once, and then 201. It keeps the keys and bodies. */
async function flaky() {
  const seen = [];
  const there = await serve((req, res) => {
    const parts = [];
    req.on('data', (part) => parts.push(part)).on('end', () => {
      seen.push([req.headers['idempotency-key'], req.headers['content-type'], Buffer.concat(parts).toString('latin1')]);
      res.writeHead(seen.length % 2 === 1 ? 503 : 201).end();
    });
  });
  return { ...there, seen };
}

test('a body that can be read once is not sent again empty', async () => {
  const file = join(tmpdir(), `oncegate-client-${process.pid}`);
  writeFileSync(file, 'payment');
  const parts = async function* () { yield Buffer.from('pay'); yield Buffer.from('ment'); };
  const bodies = {
    'a file': () => createReadStream(file),
    'a stream of Node': () => Readable.from(['pay', 'ment']),
    'an asynchronous generator': parts,
    'an asynchronous iterable': () => ({ [Symbol.asyncIterator]: parts }),
    'a stream of the Web': () => Readable.toWeb(Readable.from([Buffer.from('payment')])),
  };
  try {
    for (const [name, body] of Object.entries(bodies)) {
      for (const how of ['send', 'fetch']) {
        const there = await flaky();
        const client = new Client(quick);
        const init = { method: 'POST', body: body(), duplex: 'half', headers: { 'Idempotency-Key': 'k' } };
        const outcome = how === 'send' ? await client.send(there.url, init) : await client.fetch(there.url, init).catch((error) => error.outcome);
        assert.deepEqual([outcome.kind, outcome.reason, outcome.mayHaveTakenEffect, outcome.attempts], ['open', 'body', true, 1], name);
        assert.deepEqual(there.seen.map(([, , sent]) => sent), ['payment'], name);
        there.close();
      }
    }
  } finally {
    rmSync(file);
  }
});

test('each attempt has the same bytes', async () => {
  const there = await flaky();
  const client = new Client(quick);
  const form = new FormData();
  form.set('amount', '5');
  form.set('bill', new Blob(['pdf']), 'bill.pdf');
  const mutable = Buffer.from('AAAA');
  const bodies = { form, search: new URLSearchParams({ a: '1 2' }), blob: new Blob(['x'], { type: 'text/x' }), mutable, buffer: new Uint8Array([65, 66]).buffer, view: new DataView(new Uint8Array([65, 66, 67]).buffer, 1), text: 'text', absent: undefined };
  for (const [name, body] of Object.entries(bodies)) {
    there.seen.length = 0;
    mutable.fill('A');
    const headers = { 'X-Own': 'x' };
    const sending = client.send(there.url, { method: 'POST', body, headers }, { key: name });
    mutable.fill('B');
    form.set('amount', '6');
    headers['Idempotency-Key'] = 'other';
    const outcome = await sending;
    assert.deepEqual([outcome.verdict, outcome.attempts, outcome.key], ['done', 2, name]);
    assert.deepEqual(there.seen[0], there.seen[1], name);
    const [key, type, sent] = there.seen[0];
    assert.equal(key, name);
    if (name === 'form') assert.match(`${type} ${sent}`, /^multipart\/form-data; boundary=.*name="amount"\r\n\r\n5\r\n.*filename="bill\.pdf".*pdf/s);
    else assert.deepEqual([type, sent], { search: ['application/x-www-form-urlencoded;charset=UTF-8', 'a=1+2'], blob: ['text/x', 'x'], mutable: [undefined, 'AAAA'], buffer: [undefined, 'AB'], view: [undefined, 'BC'], text: ['text/plain;charset=UTF-8', 'text'], absent: [undefined, ''] }[name]);
  }
  there.seen.length = 0;
  for (const body of [{ amount: 5 }, [1], 5, function* () {}]) await assert.rejects(client.send(there.url, { method: 'POST', body }), { name: 'TypeError', message: /^the body is of the (class|type) \w+.*; give a text, bytes, a form or a stream; nothing was sent$/ });
  assert.equal(there.seen.length, 0);
  there.close();
});

test('a request without a valid key of its own is not sent', async () => {
  const there = await flaky();
  const client = new Client(quick);
  const empty = /^the key is empty; give 1 to 255 characters, such as a UUID; nothing was sent$/;
  const character = /^the key has a character that is not allowed; give visible ASCII characters without quote and comma, or put the key in quotes; nothing was sent$/;
  for (const [key, message] of [
    ['', empty], ['  ', empty], ['""', empty], ['"  "', empty], ['a\r\nb', character], ['a b', character], ['a, b', character], ['\u00e9', character], ['\u2603', character], ['"a', character], ['"a";p', character],
    ['x'.repeat(256), /^the key has 256 characters; at most 255 are allowed; nothing was sent$/],
    ['null', /^the key is the text "null", as of a missing value; give the key of the intent; nothing was sent$/], ['undefined', /text "undefined"/], ['NaN', /text "NaN"/], ['"None"', /text "None"/], ['<nil>', /text "<nil>"/],
    [null, /^the key is null, and not a text; give the key of the intent; nothing was sent$/], [undefined, /^the key is undefined; leave it out/], [NaN, /of the type number/], [5, /of the type number/], [{}, /of the type object/],
  ]) {
    await assert.rejects(client.send(there.url, { method: 'POST' }, { key }), { name: 'TypeError', message }, JSON.stringify(key));
    if (typeof key !== 'string' || /[\r\u2603]/.test(key)) continue;
    await assert.rejects(client.fetch(there.url, { method: 'POST', headers: { 'Idempotency-Key': key } }), { name: 'TypeError', message }, JSON.stringify(key));
  }
  const twice = new Headers([['idempotency-key', 'a'], ['idempotency-key', 'b']]);
  await assert.rejects(client.send(there.url, { method: 'POST', headers: twice }), { message: character });
  await assert.rejects(client.send(there.url, { method: 'POST', headers: { 'idempotency-key': 'a' } }, { key: 'b' }), /two places have different keys; give one key; nothing was sent/);
  // A mistyped option would give each call a new key.
  await assert.rejects(client.send(there.url, { method: 'POST' }, { keys: 'k' }), { name: 'SettingsError', message: /there is no option "keys" of send; did you mean "key"\?/ });
  await assert.rejects(client.send(there.url, { method: 'POST' }, 'k'), { name: 'SettingsError' });
  await assert.rejects(client.send(there.url, { method: 'POST' }, { key: 'k', sentBefore: 'yes' }), { name: 'SettingsError' });
  assert.equal(there.seen.length, 0);
  for (const key of ['k', 'x'.repeat(255), '"a, b"', '"a\\"b"', `"${'x'.repeat(255)}"`]) {
    there.seen.length = 0;
    assert.equal((await client.send(there.url, { method: 'POST' }, { key })).verdict, 'done');
    assert.deepEqual(there.seen.map(([sent]) => sent), [key, key]);
  }
  // The key of the header field is that of the intent.
  there.seen.length = 0;
  assert.equal((await client.send(there.url, { method: 'POST', headers: { 'Idempotency-Key': 'mine' } })).key, 'mine');
  assert.deepEqual(there.seen.map(([sent]) => sent), ['mine', 'mine']);
  there.close();
});

test('a request that fetch refuses is not tried again', async () => {
  let sent = 0;
  const there = await serve((req, res) => { sent += 1; res.end(); });
  const client = new Client(quick);
  const withPassword = there.url.replace('//', '//user:secret@');
  await assert.rejects(client.send(withPassword, { method: 'POST' }), (error) => /the URL has credentials; send them in Authorization; nothing was sent/.test(error.message) && !/secret/.test(String(error.stack)));
  for (const init of [{ method: 'PO ST' }, { method: 'GET', body: 'x' }]) await assert.rejects(client.send(there.url, init), { name: 'TypeError', message: 'the request is invalid; nothing was sent' });
  assert.equal(sent, 0);
  there.close();
});

test('fetch sends a Request again, too', async () => {
  const there = await flaky();
  const client = new Client(quick);
  const headers = { 'Idempotency-Key': 'k', 'Content-Type': 'text/x' };
  assert.equal((await client.fetch(new Request(there.url, { method: 'POST', body: 'payment', headers }))).status, 201);
  assert.deepEqual(there.seen, [['k', 'text/x', 'payment'], ['k', 'text/x', 'payment']]);
  there.seen.length = 0;
  assert.equal((await client.fetch(new Request(there.url, { method: 'POST', body: 'payment' }))).status, 503);
  const aborted = new Request(there.url, { method: 'POST', headers, signal: AbortSignal.abort() });
  await assert.rejects(client.fetch(aborted), (error) => error.outcome.reason === 'aborted' && error.outcome.attempts === 0);
  assert.equal(there.seen.length, 1);
  there.close();
});

test('the signal of a request ends it', async () => {
  const there = await serve(() => undefined);
  const controller = new AbortController();
  setTimeout(() => controller.abort(), 50);
  const outcome = await new Client(quick).send(there.url, { method: 'POST', signal: controller.signal });
  assert.deepEqual([outcome.reason, outcome.mayHaveTakenEffect, outcome.attempts], ['aborted', true, 1]);
  there.close();
});

test('the page behind a redirect is not the response to the intent', async () => {
  const there = await serve((req, res) => { if (req.url === '/login') res.end('log in'); else res.writeHead(302, { location: '/login' }).end(); });
  const outcome = await new Client({ ...quick, fetch: (url, init) => fetch(url, { ...init, redirect: 'follow' }) }).send(there.url, { method: 'POST' });
  assert.deepEqual([outcome.kind, outcome.reason, outcome.mayHaveTakenEffect], ['open', 'unknown', true]);
  const own = await new Client(quick).send(there.url, { method: 'POST' });
  assert.equal(own.response?.status, 302);
  there.close();
});

test('wrong settings are refused', () => {
  for (const [options, message] of [
    [{ maxAttempts: '3' }, 'maxAttempts: "3" is not a whole number from 1 to 1000'], [{ maxAttempts: NaN }, 'maxAttempts: NaN is not a whole number from 1 to 1000'], [{ maxAttempts: 0 }], [{ maxAttempts: 1.5 }],
    [{ retryBudget: 'x' }], [{ retryBudget: -1 }], [{ maxResponseBytes: '1' }], [{ maxResponseBytes: Infinity }],
    [{ serverErrors: 'agian' }, 'serverErrors: "agian" is none of "again", "final", "unknown"; did you mean "again"?'],
    [{ keyHeader: '' }], [{ keyHeader: 'a b' }], [{ keyHeader: 5 }], [{ backoff: {} }], [{ backoff: { base: '1s' } }], [{ backoff: 5 }], [{ backoff: { base: 1, cap: 2, max: 3 } }],
    [{ fetch: 1 }], [{ fetch: null }], [{ attemptTimeout: 0 }], [{ deadline: 'soon' }], [{ maxRetryAfter: -1 }], [{ retries: 3 }], [5], [null],
  ]) assert.throws(() => new Client(options), { name: 'SettingsError', ...(message === undefined ? {} : { message }) }, JSON.stringify(options));
});

test('only an error of connecting says that nothing was sent', async () => {
  const failing = (cause) => new Client({ maxAttempts: 1, fetch: async () => { throw new TypeError('fetch failed', { cause: Object.assign(new Error(), cause) }); } });
  const mayHaveTakenEffect = async (cause) => (await failing(cause).send('http://a.test/', { method: 'POST' })).mayHaveTakenEffect;
  for (const code of ['EHOSTUNREACH', 'ENETUNREACH', 'ETIMEDOUT']) {
    assert.equal(await mayHaveTakenEffect({ code, syscall: 'connect' }), false, code);
    assert.equal(await mayHaveTakenEffect({ code, errors: [] }), false, code);
    for (const syscall of ['read', 'write']) assert.equal(await mayHaveTakenEffect({ code, syscall }), true, code);
  }
  assert.equal(await mayHaveTakenEffect({ code: 'ECONNREFUSED' }), false);
});

test('either of two signals ends a request', async () => {
  for (const which of [0, 1]) {
    const signals = [new AbortController(), new AbortController()];
    const client = new Client({ fetch: (_, { signal }) => new Promise((_resolve, reject) => {
      signal.addEventListener('abort', () => reject(signal.reason));
      signals[which].abort();
    }) });
    const outcome = await client.send('http://a.test/', { method: 'POST', signal: signals[0].signal }, { signal: signals[1].signal });
    assert.deepEqual([outcome.kind, outcome.reason, outcome.attempts], ['open', 'aborted', 1]);
  }
});

test('a status that HTTP does not have is no outcome, and is not asked for again', async () => {
  let sent = 0;
  const client = new Client({ fetch: async () => { sent += 1; return { status: 777, headers: new Headers(), body: null, redirected: false }; } });
  const outcome = await client.send('http://a.test/', { method: 'POST' });
  assert.deepEqual([outcome.kind, outcome.reason, outcome.mayHaveTakenEffect, sent], ['open', 'unknown', true, 1]);
});

test('a signal of the caller keeps nothing of the requests', async () => {
  const { signal } = new AbortController();
  const client = new Client({ ...quick, maxAttempts: 2, fetch: async () => new Response(null, { status: 503 }) });
  for (let at = 0; at < 20; at += 1) await client.send('http://a.test/', { method: 'POST' }, { signal });
  assert.deepEqual(getEventListeners(signal, 'abort'), []);
  const kept = Object.getOwnPropertySymbols(signal).filter((symbol) => /dependant/i.test(String(symbol))).map((symbol) => signal[symbol]?.size ?? 0);
  assert.ok(kept.every((size) => size === 0), String(kept));
});
