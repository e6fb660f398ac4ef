// PostgreSQL and Redis: real servers, several processes, crashes and pauses.
import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { randomBytes } from 'node:crypto';
import { once } from 'node:events';
import { readdirSync, readFileSync } from 'node:fs';
import { createServer, request as httpRequest } from 'node:http';
import { createInterface } from 'node:readline';
import { after, before, test } from 'node:test';
import { setTimeout as pause } from 'node:timers/promises';
import expressFramework from 'express';
import { Redis } from 'ioredis';
import pg from 'pg';
import { createClient } from 'redis';
import { encodeResponse, express, MemoryStore, Oncegate, PostgresStore, RedisStore, StoreSetupError } from '../dist/esm/index.js';
import { startPostgres, startRedis } from './servers.js';

let postgres;
let redis;
let pool;
let ioredis;
let nodeRedis;
const children = new Set();
const listening = new Set();

before(async () => {
  [postgres, redis] = await Promise.all([startPostgres(), startRedis()]);
  pool = new pg.Pool({ connectionString: postgres.url, max: 10, connectionTimeoutMillis: 5000 });
  pool.on('error', () => undefined);
  await pool.query('CREATE TABLE charges (id serial PRIMARY KEY, name text NOT NULL)');
  ioredis = new Redis(redis.url);
  ioredis.on('error', () => undefined);
  nodeRedis = createClient({ url: redis.url });
  nodeRedis.on('error', () => undefined);
  await nodeRedis.connect();
});

after(async () => {
  for (const server of listening) { server.closeAllConnections(); server.close(); }
  for (const child of children) child.kill('SIGKILL');
  ioredis?.disconnect();
  await nodeRedis?.destroy();
  await pool?.end();
  await Promise.all([postgres?.stop(), redis?.stop()]);
});

const stores = {
  memory: () => new MemoryStore(),
  PostgreSQL: () => new PostgresStore(pool),
  'Redis by ioredis': () => new RedisStore(ioredis),
  'Redis by redis': () => new RedisStore(nodeRedis),
  'Redis by a function': () => new RedisStore(([name, ...args]) => ioredis.callBuffer(name, ...args)),
};

const FINGERPRINT = Buffer.concat([Buffer.of(1), Buffer.alloc(32, 7)]);
const claimOf = (more = {}) => ({ attempt: randomBytes(16), fingerprint: FINGERPRINT, leaseMs: 60_000, retentionMs: 600_000, onAbandoned: 'park', caller: Buffer.alloc(8, 1), keyTag: Buffer.alloc(8, 2), operation: 'POST /pay', ...more });

for (const [name, make] of Object.entries(stores)) {
  test(`${name}: every reply of the contract`, async () => {
    const store = make();
    const id = randomBytes(32);
    const response = encodeResponse({ status: 201, headers: [['x', '\xff']], trailers: [], body: randomBytes(300_000) });
    assert.equal(await store.lookup(id), undefined);
    const first = claimOf();
    const granted = await store.claim(id, first);
    assert.deepEqual([granted.outcome, granted.attempts, granted.afterAbandoned], ['execute', 1, false]);
    assert.equal((await store.claim(id, first)).token, granted.token);
    const busy = await store.claim(id, claimOf());
    assert.equal(busy.outcome, 'in-progress');
    assert.ok(busy.leaseLeftMs > 50_000 && busy.leaseLeftMs <= 60_000);
    assert.equal((await store.claim(id, claimOf({ fingerprint: Buffer.concat([Buffer.of(1), Buffer.alloc(32)]) }))).outcome, 'mismatch');
    assert.equal(await store.renew(id, granted.token, 60_000, 600_000), 'done');
    const seen = await store.lookup(id);
    assert.deepEqual([seen.state, seen.token, seen.attempt, seen.fingerprint, seen.byOperator], ['in-progress', granted.token, first.attempt, FINGERPRINT, false]);
    const stale = String(BigInt(granted.token) - 1n);
    assert.equal(await store.complete(id, stale, 'completed', response, 600_000), 'fenced');
    assert.equal(await store.release(id, granted.token, 60_000), 'done');
    const second = await store.claim(id, claimOf());
    assert.ok(BigInt(second.token) > BigInt(granted.token));
    assert.equal(await store.renew(id, granted.token, 60_000, 600_000), 'fenced');
    assert.equal(await store.complete(id, second.token, 'completed', response, 600_000), 'done');
    assert.equal(await store.complete(id, second.token, 'completed', response, 600_000), 'done');
    assert.deepEqual(await store.claim(id, claimOf()), { outcome: 'replay', response });
    assert.equal(await store.release(id, second.token, 60_000), 'fenced');
    const done = randomBytes(32);
    const { token } = await store.claim(done, claimOf());
    assert.equal(await store.complete(done, token, 'tombstone', undefined, 600_000), 'done');
    assert.equal((await store.claim(done, claimOf())).outcome, 'unreplayable');
    for (const [onAbandoned, outcome] of [['park', 'unknown'], ['reexecute', 'execute']]) {
      const lost = randomBytes(32);
      await store.claim(lost, claimOf({ leaseMs: 100 }));
      const deadline = Date.now() + 5000;
      let reply;
      do {
        await pause(10);
        reply = await store.claim(lost, claimOf({ onAbandoned }));
      } while (reply.outcome === 'in-progress' && Date.now() < deadline);
      assert.equal(reply.outcome, outcome);
      if (outcome === 'execute') assert.equal(reply.afterAbandoned, true);
    }
  });
}

const post = (url, key, body = '{"amount":5}') => fetch(url, { method: 'POST', body, headers: { 'content-type': 'application/json', 'idempotency-key': key } });

async function service(store, options = {}, shared = {}) {
  const app = expressFramework();
  app.use(express(new Oncegate({ store, service: 'shop', ...shared }), { scope: 'single-tenant', ...options }));
  let runs = 0;
  app.post('/pay', async (req, res) => { runs += 1; await pause(20); res.status(201).json({ runs }); });
  const server = createServer(app).listen(0, '127.0.0.1');
  listening.add(server);
  await once(server, 'listening');
  return { url: `http://127.0.0.1:${server.address().port}/pay`, runs: () => runs, close: () => { server.closeAllConnections(); server.close(); } };
}

test('two services on one store, one key, forty callers: one effect, one answer', async () => {
  for (const make of [stores.PostgreSQL, stores['Redis by ioredis'], stores['Redis by redis']]) {
    const [one, other] = [await service(make()), await service(make())];
    const key = randomBytes(8).toString('hex');
    const answers = await Promise.all(Array.from({ length: 40 }, (_, at) => post(at % 2 ? one.url : other.url, key)));
    // Another port is another host.
    const statuses = answers.map(({ status }) => status);
    assert.equal(one.runs() + other.runs(), 1);
    assert.ok(statuses.every((status) => status === 201 || status === 422), String(statuses));
    const [same, second] = [await service(make(), { authority: 'ignore' }), await service(make(), { authority: 'ignore' })];
    const all = await Promise.all(Array.from({ length: 40 }, (_, at) => post(at % 2 ? same.url : second.url, `${key}-2`)));
    assert.deepEqual([...new Set(await Promise.all(all.map((answer) => answer.text())))], ['{"runs":1}']);
    assert.equal(same.runs() + second.runs(), 1);
    for (const { close } of [one, other, same, second]) close();
  }
});

async function start(url, workers = '1') {
  const child = spawn(process.execPath, [new URL('./worker.js', import.meta.url).pathname, url, postgres.url, workers], { stdio: ['ignore', 'pipe', 'inherit'] });
  children.add(child);
  child.once('exit', () => children.delete(child));
  const [port] = await once(createInterface({ input: child.stdout }), 'line');
  return { child, url: `http://127.0.0.1:${port}/pay`, host: `127.0.0.1:${port}` };
}

const charges = async (name) => Number((await pool.query('SELECT count(*) FROM charges WHERE name = $1', [name])).rows[0].count);
async function until(condition) {
  const deadline = Date.now() + 20_000;
  while (!(await condition())) {
    assert.ok(Date.now() < deadline, 'not in time');
    await pause(10);
  }
}

test('a cluster of four workers: one effect; SIGTERM lets requests end', async () => {
  for (const store of [postgres, redis]) {
    const { child, url } = await start(store.url, '4');
    const name = randomBytes(6).toString('hex');
    const answers = await Promise.all(Array.from({ length: 60 }, () => post(`${url}?name=${name}&pause=100`, name)));
    assert.equal(new Set(await Promise.all(answers.map((answer) => answer.text()))).size, 1);
    assert.equal(await charges(name), 1);
    const last = post(`${url}?name=${name}-last&pause=400`, `${name}-last`);
    await until(async () => (await charges(`${name}-last`)) === 1);
    const exited = once(child, 'exit');
    child.kill('SIGTERM');
    assert.equal((await last).status, 201);
    assert.deepEqual((await exited)[0], 0);
  }
});

/** A request under the name of another host: the host is compared, and the processes have a port each. */
const postAs = (host, to, key, target) => new Promise((resolve, reject) => {
  const sent = httpRequest(`http://${to.host}${target}`, { method: 'POST', headers: { host, 'content-type': 'application/json', 'idempotency-key': key } }, async (answer) => {
    const parts = [];
    for await (const part of answer) parts.push(part);
    resolve({ status: answer.statusCode, headers: answer.headers, body: Buffer.concat(parts).toString() });
  });
  sent.on('error', reject);
  sent.end('{"amount":5}');
});

/** Sends SIGSTOP, and waits until every thread has stopped: the signal alone only asks for it. */
async function freeze({ pid }) {
  process.kill(pid, 'SIGSTOP');
  await until(() => readdirSync(`/proc/${pid}/task`).every((task) => /\) T [^)]*$/.test(readFileSync(`/proc/${pid}/task/${task}/stat`, 'utf8'))));
}

test('kill -9 of the owner: the same request is executed after its lease, because that is the policy', async () => {
  for (const store of [postgres, redis]) {
    const [own, other] = [await start(store.url), await start(store.url)];
    const name = randomBytes(6).toString('hex');
    const target = `/pay?name=${name}&pause=1500`;
    const first = postAs(own.host, own, name, target).catch(() => 'cut');
    await until(async () => (await charges(name)) === 1);
    own.child.kill('SIGKILL');
    assert.equal(await first, 'cut');
    assert.equal((await postAs(own.host, other, name, target)).status, 201);
    assert.equal(await charges(name), 2);
    other.child.kill('SIGKILL');
  }
});

test('an owner that is paused beyond its lease is fenced, and its response is not the one that is kept', async () => {
  for (const store of [postgres, redis]) {
    const [own, other] = [await start(store.url), await start(store.url)];
    const name = randomBytes(6).toString('hex');
    const target = `/pay?name=${name}&pause=1500`;
    const first = postAs(own.host, own, name, target);
    await until(async () => (await charges(name)) === 1);
    await freeze(own.child);
    const second = await postAs(own.host, other, name, target);
    assert.deepEqual([second.status, second.headers['idempotent-replayed']], [201, undefined]);
    own.child.kill('SIGCONT');
    const stale = await first;
    assert.deepEqual([stale.status, stale.headers['idempotency-status']], [201, 'fenced']);
    const third = await postAs(own.host, own, name, target);
    assert.deepEqual([third.body, third.headers['idempotent-replayed']], [second.body, 'true']);
    assert.equal(await charges(name), 2);
    own.child.kill('SIGKILL');
    other.child.kill('SIGKILL');
  }
});

test('a database without the contract, and a Redis that evicts, are refused with what to do', async () => {
  await pool.query('CREATE DATABASE empty');
  const empty = new pg.Pool({ connectionString: postgres.url.replace(/postgres$/, 'empty') });
  await assert.rejects(new PostgresStore(empty).check(), (error) => error instanceof StoreSetupError && /oncegate schema apply/.test(error.message));
  const there = await service(new PostgresStore(empty));
  assert.equal((await post(there.url, 'k')).status, 503);
  assert.equal(there.runs(), 0);
  there.close();
  await empty.end();
  await ioredis.config('SET', 'maxmemory-policy', 'allkeys-lru');
  await assert.rejects(new RedisStore(ioredis).check(), /allkeys-lru/);
  await ioredis.config('SET', 'maxmemory-policy', 'noeviction');
});

test('scripts that Redis forgot are sent again, and a full Redis refuses new keys', async () => {
  const there = await service(new RedisStore(ioredis));
  assert.equal((await post(there.url, 'flushed-1')).status, 201);
  await ioredis.script('FLUSH');
  assert.equal((await post(there.url, 'flushed-1')).headers.get('idempotent-replayed'), 'true');
  await ioredis.config('SET', 'maxmemory', '1');
  const refused = await post(there.url, 'full');
  assert.equal(refused.status, 503, await refused.text());
  assert.equal(there.runs(), 1);
  await ioredis.config('SET', 'maxmemory', '0');
  assert.equal((await post(there.url, 'flushed-1')).headers.get('idempotent-replayed'), 'true');
  there.close();
});

test('a pool without free connections: 503, and nothing is executed', async () => {
  const small = new pg.Pool({ connectionString: postgres.url, max: 1, connectionTimeoutMillis: 100 });
  const there = await service(new PostgresStore(small), {}, { storeTimeout: '1s' });
  const client = await small.connect();
  assert.equal((await post(there.url, 'exhausted')).status, 503);
  assert.equal(there.runs(), 0);
  client.release();
  await until(async () => (await post(there.url, 'exhausted')).status === 201);
  assert.equal(there.runs(), 1);
  there.close();
  await small.end();
});

test('a claim whose reply was lost is settled: one effect, and no orphan', async () => {
  for (const make of [stores.PostgreSQL, stores['Redis by ioredis']]) {
    const store = make();
    const claim = store.claim.bind(store);
    let losses = 1;
    store.claim = async (...args) => {
      const reply = await claim(...args);
      if (losses > 0) { losses -= 1; throw new Error('the connection broke'); }
      return reply;
    };
    const there = await service(store, { wait: 0 });
    const first = await post(there.url, `lost-${store.name}`);
    assert.equal(first.status, 201, await first.text());
    assert.equal(there.runs(), 1);
    // Both replies are lost: 503, and the claim is given back.
    losses = 2;
    assert.equal((await post(there.url, `lost-twice-${store.name}`)).status, 503);
    await until(async () => (await post(there.url, `lost-twice-${store.name}`)).status === 201);
    assert.equal(there.runs(), 2);
    there.close();
  }
});
