import assert from 'node:assert/strict';
import { once } from 'node:events';
import { createServer } from 'node:http';
import { test } from 'node:test';
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
      const found = statuses.map((status) => judge(asked, status, headers, Buffer.from(body)));
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
