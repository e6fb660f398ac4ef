// PostgreSQL and Redis: real servers, several processes, crashes and pauses.
import assert from 'node:assert/strict';
import { execFileSync, spawn } from 'node:child_process';
import { randomBytes } from 'node:crypto';
import { once } from 'node:events';
import { readdirSync, readFileSync } from 'node:fs';
import { createServer, request as httpRequest } from 'node:http';
import { connect, createServer as createTcpServer } from 'node:net';
import { createInterface } from 'node:readline';
import { createServer as createTlsServer } from 'node:tls';
import { after, before, mock, test } from 'node:test';
import { setTimeout as pause } from 'node:timers/promises';
import expressFramework from 'express';
import { Cluster, Redis } from 'ioredis';
import pg from 'pg';
import { createClient, createCluster } from 'redis';
import { encodeResponse, express, idempotent, MemoryStore, Oncegate, PostgresStore, RedisStore, StoreSetupError, withIdempotency } from '../dist/esm/index.js';
import { recordId } from '../dist/esm/identity.js';
import { MARK } from '../dist/esm/ids.js';
import { startPostgres, startRedis, startRedisCluster } from './servers.js';

let postgres;
let redis;
let pool;
let ioredis;
let nodeRedis;
let cluster;
let ioredisCluster;
let nodeRedisCluster;
const children = new Set();
const listening = new Set();

before(async () => {
  [postgres, redis, cluster] = await Promise.all([startPostgres(), startRedis(), startRedisCluster()]);
  pool = new pg.Pool({ connectionString: postgres.url, max: 10, connectionTimeoutMillis: 5000 });
  pool.on('error', () => undefined);
  await pool.query('CREATE TABLE charges (id serial PRIMARY KEY, name text NOT NULL)');
  ioredis = new Redis(redis.url);
  ioredis.on('error', () => undefined);
  nodeRedis = createClient({ url: redis.url });
  nodeRedis.on('error', () => undefined);
  await nodeRedis.connect();
  ioredisCluster = new Cluster(cluster.addresses.map((address) => `redis://${address}`));
  ioredisCluster.on('error', () => undefined);
  nodeRedisCluster = createCluster({ rootNodes: cluster.addresses.map((address) => ({ url: `redis://${address}` })) });
  nodeRedisCluster.on('error', () => undefined);
  await nodeRedisCluster.connect();
});

after(async () => {
  for (const server of listening) { server.closeAllConnections(); server.close(); }
  for (const child of children) child.kill('SIGKILL');
  ioredis?.disconnect();
  await nodeRedis?.destroy();
  ioredisCluster?.disconnect();
  await nodeRedisCluster?.destroy();
  await pool?.end();
  await Promise.all([postgres?.stop(), redis?.stop(), cluster?.stop()]);
});

const stores = {
  memory: () => new MemoryStore(),
  PostgreSQL: () => new PostgresStore(pool),
  'Redis by ioredis': () => new RedisStore(ioredis),
  'Redis by redis': () => new RedisStore(nodeRedis),
  'Redis Cluster by ioredis': () => new RedisStore(ioredisCluster),
  'Redis Cluster by redis': () => new RedisStore(nodeRedisCluster),
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

test('a server that takes no writes was reached: nothing is executed, also with storeOutage open', async () => {
  const server = await startRedis();
  const client = new Redis(server.url);
  client.on('error', () => undefined);
  const trigger = `CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE EXCEPTION 'refused' USING ERRCODE = '25006'; END$$;
    CREATE TRIGGER refuse BEFORE INSERT OR UPDATE ON oncegate.records FOR EACH ROW WHEN (NEW.operation = 'POST /takes-no-writes') EXECUTE FUNCTION public.refuse()`;
  try {
    for (const [store, known, refuse, accept] of [
      // A replica runs no script that may write, so it is not read either.
      [new RedisStore(client), [503, null], () => client.call('REPLICAOF', '127.0.0.1', '1'), () => client.call('REPLICAOF', 'NO', 'ONE')],
      [new PostgresStore(pool), [200, 'true'], () => pool.query(trigger), () => pool.query('DROP FUNCTION public.refuse CASCADE')],
    ]) {
      let effects = 0;
      const oncegate = new Oncegate({ store, service: `no-writes-${randomBytes(8).toString('hex')}` });
      const options = { scope: 'single-tenant', storeOutage: 'open', wait: 0 };
      const handler = withIdempotency(oncegate, options, () => { effects += 1; return Response.json({ effects }); });
      const ask = async (key) => {
        const request = new Request('http://shop.test/takes-no-writes', { method: 'POST', headers: { 'idempotency-key': key }, body: '1' });
        const response = await handler(request);
        return [response.status, response.headers.get('idempotent-replayed')];
      };
      assert.deepEqual(await ask('known'), [200, null]);
      await refuse();
      try {
        // More often than a breaker needs.
        for (let time = 0; time < 12; time += 1) {
          assert.deepEqual(await ask('known'), known);
          assert.deepEqual(await ask(`new-${time}`), [503, null]);
        }
      } finally {
        await accept();
      }
      assert.equal(effects, 1);
      assert.deepEqual(await ask('new-0'), [200, null]);
    }
  } finally {
    client.disconnect();
    await server.stop();
  }
});

test('Redis that loads its data or has too many connections was reached: nothing is executed, also with storeOutage open', async () => {
  for (const name of ['ioredis', 'redis']) {
    const server = await startRedis();
    const client = name === 'ioredis' ? new Redis(server.url) : createClient({ url: server.url });
    client.on('error', () => undefined);
    if (name === 'redis') await client.connect();
    const admin = new Redis(server.url, { retryStrategy: () => 50, maxRetriesPerRequest: null });
    admin.on('error', () => undefined);
    let effects = 0;
    const oncegate = new Oncegate({ store: new RedisStore(client), service: 'x', storeTimeout: '1s', warn: () => undefined });
    const handler = withIdempotency(oncegate, { scope: 'single-tenant', storeOutage: 'open', wait: 0 }, () => { effects += 1; return Response.json({ effects }); });
    const ask = async (key) => {
      const response = await handler(new Request('http://shop.test/', { method: 'POST', headers: { 'idempotency-key': key }, body: '1' }));
      return [response.status, response.headers.get('idempotency-status')?.startsWith('failed-open') ?? false];
    };
    try {
      assert.deepEqual(await ask('before'), [200, false]);
      await admin.config('SET', 'maxclients', '1');
      await admin.client('KILL', 'TYPE', 'normal', 'SKIPME', 'yes');
      for (let time = 0; time < 6; time += 1) assert.deepEqual(await ask('too-many'), [503, false], name);
      await admin.config('SET', 'maxclients', '1000');
      await until(async () => (await ask('again'))[0] === 200);
      const pipeline = admin.pipeline();
      for (let at = 0; at < 2000; at += 1) pipeline.set(`other-${at}`, 'x'.repeat(100));
      await pipeline.exec();
      await admin.save();
      await server.kill();
      server.start('--key-load-delay', '10000', '--loading-process-events-interval-bytes', '1024');
      // 20 s.
      await until(async () => (await new Promise((resolve) => {
        const probe = connect(new URL(server.url).port, '127.0.0.1', () => probe.write('GET x\r\n')).on('error', () => resolve(''));
        probe.on('data', (text) => { probe.destroy(); resolve(`${text}`); });
      })).startsWith('-LOADING'));
      for (let time = 0; time < 6; time += 1) assert.deepEqual(await ask('loading'), [503, false], name);
      assert.equal(effects, 2);
      await server.kill();
      // Now no connection can be made.
      await until(async () => (await ask('away'))[1]);
    } finally {
      admin.disconnect();
      await (name === 'ioredis' ? client.disconnect() : client.destroy());
      await server.stop();
    }
  }
});

/** Asks a route that opens, and says if its request was executed without protection. */
function opening(client, effect = () => undefined) {
  client.on('error', () => undefined);
  const oncegate = new Oncegate({ store: new RedisStore(client), service: 'x', storeTimeout: '500ms', warn: () => undefined });
  const handler = withIdempotency(oncegate, { scope: 'single-tenant', storeOutage: 'open', wait: 0 }, () => { effect(); return Response.json({}); });
  return async (key) => {
    const response = await handler(new Request('http://shop.test/', { method: 'POST', headers: { 'idempotency-key': key }, body: '1' }));
    return [response.status, response.headers.get('idempotency-status')?.startsWith('failed-open') ?? false];
  };
}

test('Redis that has refused each connection for a while was reached, however long the client pauses', async () => {
  for (const why of ['maxclients', 'requirepass']) {
    for (const name of ['ioredis', 'redis']) {
      const server = await startRedis();
      const admin = new Redis(server.url);
      admin.on('error', () => undefined);
      await admin.config('SET', 'requirepass', 'first');
      const url = server.url.replace('//', '//:first@');
      const client = name === 'ioredis' ? new Redis(url) : createClient({ url });
      let effects = 0;
      const ask = opening(client, () => { effects += 1; });
      try {
        if (name === 'redis') await client.connect();
        assert.deepEqual(await ask('before'), [200, false]);
        let connections = 0;
        client.on('connect', () => { connections += 1; });
        await admin.config('SET', why, '1');
        await admin.client('KILL', 'TYPE', 'normal', 'SKIPME', 'yes');
        await until(() => connections > 5);
        for (let time = 0; time < 6; time += 1) {
          assert.deepEqual(await ask('k'), [503, false], `${name}, ${why}`);
          await pause(700);
        }
        assert.equal(effects, 1);
        // Now no connection can be made.
        await server.kill();
        await until(async () => (await ask('away'))[1]);
      } finally {
        admin.disconnect();
        await (name === 'ioredis' ? client.disconnect() : client.destroy());
        await server.stop();
      }
    }
  }
});

test('storeOutage open acts while a client of Redis that was connected finds nothing', async () => {
  const bulk = (text) => `$${text.length}\r\n${text}\r\n`;
  for (const [name, make] of [
    ['a client that gives up', (url) => new Redis(url, { retryStrategy: () => null })],
    ['a client that waits', (url) => new Redis(url, { retryStrategy: () => 60_000 })],
    ['a client of `redis`', (url) => createClient({ url })],
    ['a client of a Sentinel', (url, port) => new Redis({ sentinels: [{ host: '127.0.0.1', port }], name: 'main' })],
  ]) {
    const server = await startRedis();
    const sentinel = createTcpServer((socket) => {
      socket.on('error', () => undefined).on('data', (bytes) => {
        for (const command of String(bytes).split(/^\*\d+\r\n/m).slice(1)) {
          const isAddress = /get-master-addr-by-name/i.test(command);
          socket.write(isAddress ? `*2\r\n${bulk('127.0.0.1')}${bulk(new URL(server.url).port)}` : /sentinel/i.test(command) ? '*0\r\n' : '+OK\r\n');
        }
      });
    }).listen(0, '127.0.0.1');
    await once(sentinel, 'listening');
    const client = make(server.url, sentinel.address().port);
    const ask = opening(client);
    try {
      if ('connect' in client && !('callBuffer' in client)) await client.connect();
      assert.deepEqual(await ask('before'), [200, false], name);
      sentinel.close();
      await server.kill();
      // What was under way may be broken.
      await until(async () => (await ask('away'))[1]);
      for (let time = 0; time < 4; time += 1) {
        assert.deepEqual(await ask(`away-${time}`), [200, true], name);
        await pause(300);
      }
    } finally {
      await ('callBuffer' in client ? client.disconnect() : client.destroy());
      sentinel.close();
      await server.stop();
    }
  }
});

test('a client of Redis that has lost its connection, or that the program has closed, does not say that Redis is away', async () => {
  const server = await startRedis();
  const admin = new Redis(server.url);
  try {
    for (const [name, make, close] of [
      ['ioredis without a queue', () => new Redis(server.url, { enableOfflineQueue: false, retryStrategy: () => 100 }), (client) => client.quit()],
      ['ioredis without retries', () => new Redis(server.url, { maxRetriesPerRequest: 0 }), (client) => client.quit()],
      ['redis without a queue', () => createClient({ url: server.url, disableOfflineQueue: true }), (client) => client.close()],
    ]) {
      const client = make();
      let effects = 0;
      const ask = opening(client, () => { effects += 1; });
      await ('callBuffer' in client ? once(client, 'ready') : client.connect());
      assert.deepEqual(await ask(name.replaceAll(' ', '-')), [200, false], name);
      for (let time = 0; time < 5; time += 1) {
        const lost = new Promise((resolve) => { client.once('callBuffer' in client ? 'close' : 'reconnecting', resolve); });
        await admin.client('KILL', 'TYPE', 'normal', 'SKIPME', 'yes');
        await lost;
        assert.deepEqual(await ask(name.replaceAll(' ', '-')), [200, false], name);
      }
      await close(client);
      for (let time = 0; time < 5; time += 1) assert.deepEqual(await ask(name.replaceAll(' ', '-')), [503, false], name);
      assert.equal(effects, 1, name);
    }
    // Without a queue, an outage opens, too.
    for (const client of [new Redis(server.url, { enableOfflineQueue: false }), createClient({ url: server.url, disableOfflineQueue: true })]) {
      const ask = opening(client);
      await ('callBuffer' in client ? once(client, 'ready') : client.connect());
      assert.deepEqual(await ask('k'), [200, false]);
      await server.kill();
      await until(async () => (await ask('k'))[1]);
      await ('callBuffer' in client ? client.disconnect() : client.destroy());
      server.start();
      await until(() => admin.ping().then(() => true, () => false));
    }
  } finally {
    admin.disconnect();
    await server.stop();
  }
});

test('a server whose certificate is not trusted, or that does not speak TLS, was reached', async () => {
  const pem = execFileSync('openssl', ['req', '-x509', '-newkey', 'rsa:2048', '-nodes', '-subj', '/CN=other', '-keyout', '-', '-out', '-'], { stdio: ['ignore', 'pipe', 'ignore'] });
  const untrusted = createTlsServer({ key: pem, cert: pem }, (socket) => { socket.on('error', () => undefined); }).listen(0, '127.0.0.1');
  const plain = createTcpServer((socket) => { socket.on('error', () => undefined).once('data', () => socket.end('-ERR Protocol error\r\n')); }).listen(0, '127.0.0.1');
  await Promise.all([untrusted, plain].map((server) => once(server, 'listening')));
  try {
    for (const server of [untrusted, plain]) {
      const url = `rediss://127.0.0.1:${server.address().port}`;
      for (const client of [new Redis(url), createClient({ url })]) {
        let effects = 0;
        const ask = opening(client, () => { effects += 1; });
        if (!('callBuffer' in client)) client.connect().catch(() => undefined);
        for (let time = 0; time < 4; time += 1) assert.deepEqual(await ask('k'), [503, false]);
        assert.equal(effects, 0);
        await ('callBuffer' in client ? client.disconnect() : client.destroy());
      }
    }
    // The server of the tests has no TLS.
    const encrypted = new pg.Pool({ connectionString: postgres.url, ssl: true, connectionTimeoutMillis: 5000 });
    const oncegate = new Oncegate({ store: new PostgresStore(encrypted), service: 'x', warn: () => undefined });
    const handler = withIdempotency(oncegate, { scope: 'single-tenant', storeOutage: 'open', wait: 0 }, () => Response.json({}));
    const ask = async () => (await handler(new Request('http://shop.test/', { method: 'POST', headers: { 'idempotency-key': 'k' }, body: '1' }))).status;
    assert.equal(await ask(), 503);
    await encrypted.end();
    for (let time = 0; time < 4; time += 1) assert.equal(await ask(), 503);
  } finally {
    untrusted.close();
    plain.close();
  }
});

test('PostgreSQL that ends a statement, or breaks each connection, was reached', async () => {
  // The server resets connections that were made, as one behind a proxy does.
  const broken = createTcpServer((socket) => { socket.on('error', () => undefined).once('data', () => socket.resetAndDestroy()); }).listen(0, '127.0.0.1');
  await once(broken, 'listening');
  const timed = new pg.Pool({ connectionString: `${postgres.url}?options=-c%20statement_timeout%3D200`, max: 2, connectionTimeoutMillis: 5000 });
  const cut = new pg.Pool({ connectionString: `postgres://owner@127.0.0.1:${broken.address().port}/postgres`, max: 2, connectionTimeoutMillis: 5000 });
  const away = new pg.Pool({ connectionString: 'postgres://owner@127.0.0.1:1/postgres', max: 2, connectionTimeoutMillis: 5000 });
  const lock = await pool.connect();
  let effects = 0;
  try {
    const ask = async (store, key) => {
      const oncegate = new Oncegate({ store, service: 'reached', storeTimeout: '2s', warn: () => undefined });
      const handler = withIdempotency(oncegate, { scope: 'single-tenant', storeOutage: 'open', wait: 0 }, () => { effects += 1; return Response.json({ effects }); });
      const response = await handler(new Request('http://shop.test/', { method: 'POST', headers: { 'idempotency-key': key }, body: '1' }));
      return [response.status, response.headers.get('idempotency-status')?.startsWith('failed-open') ?? false];
    };
    await lock.query('BEGIN; LOCK oncegate.records IN ACCESS EXCLUSIVE MODE');
    assert.deepEqual(await ask(new PostgresStore(timed), 'ended'), [503, false]);
    await lock.query('ROLLBACK');
    assert.deepEqual(await ask(new PostgresStore(cut), 'cut'), [503, false]);
    assert.equal(effects, 0);
    assert.deepEqual(await ask(new PostgresStore(away), 'away'), [200, true]);
  } finally {
    lock.release(true);
    broken.close();
    await Promise.all([timed, cut, away].map((one) => one.end()));
  }
});

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

test('a client of ioredis with a prefix of keys is refused', () => {
  const single = (options) => new Redis({ lazyConnect: true, ...options });
  const clustered = (options) => new Cluster([{ host: '127.0.0.1', port: 1 }], { lazyConnect: true, ...options });
  for (const client of [single({ keyPrefix: 'app:' }), clustered({ keyPrefix: 'app:' }), clustered({ redisOptions: { keyPrefix: 'app:' } })]) {
    assert.throws(() => new RedisStore(client), { name: 'SettingsError', message: /keyPrefix "app:"/ });
  }
  for (const client of [single(), single({ keyPrefix: '' }), clustered()]) new RedisStore(client);
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

test('after a suspension of the machine nothing begins under a lease that may be over', async () => {
  const { now } = Date;
  for (const [reply, status, executed] of [['done', 201, 1], ['fenced', 409, 0]]) {
    const store = new MemoryStore();
    let [renewals, executions] = [0, 0];
    const suspended = Object.assign(Object.create(store), {
      claim: async (...args) => {
        const granted = await store.claim(...args);
        // The monotonic clock stands still meanwhile.
        mock.method(Date, 'now', () => now() + 3_600_000);
        return granted;
      },
      renew: async () => { renewals += 1; return reply; },
      release: async () => reply,
    });
    const handle = withIdempotency(new Oncegate({ store: suspended }), { scope: 'single-tenant' }, () => { executions += 1; return new Response('made', { status: 201 }); });
    try {
      const response = await handle(new Request('http://shop.test/pay', { method: 'POST', headers: { 'idempotency-key': 'k' }, body: '5' }));
      assert.deepEqual([response.status, executions, renewals], [status, executed, 1]);
    } finally {
      mock.restoreAll();
    }
  }
});

test('PostgreSQL: connections that fall silent are closed, and the store works again', async () => {
  const server = new URL(postgres.url);
  const target = new URL(postgres.url);
  const sockets = new Set();
  let generation = 0;
  // Connections of an older generation stay open, and nothing passes.
  const proxy = createTcpServer((socket) => {
    const own = generation;
    const upstream = connect(server.port, server.hostname);
    for (const [from, to] of [[socket, upstream], [upstream, socket]]) {
      sockets.add(from);
      from.on('data', (data) => { if (own === generation) to.write(data); });
      from.on('error', () => undefined);
      from.on('close', () => to.destroy());
    }
  }).listen(0, '127.0.0.1');
  await once(proxy, 'listening');
  target.port = String(proxy.address().port);
  const own = new pg.Pool({ connectionString: target.href, max: 4, connectionTimeoutMillis: 10_000 });
  own.on('error', () => undefined);
  try {
    const run = idempotent(new Oncegate({ store: new PostgresStore(own), service: 'silent', storeTimeout: 2500, warn: () => undefined }), { name: 'silent', key: (key) => key, errors: 'unknown', wait: '0s' }, () => 1);
    const all = (name) => Promise.all(Array.from({ length: 8 }, (_, at) => run(`${name} ${at}`)));
    const works = async (name) => {
      const deadline = Date.now() + 60_000;
      for (let turn = 1; ; turn += 1) {
        if (await all(`${name} ${turn}`).then(() => true, () => false)) return;
        assert.ok(Date.now() < deadline, `${name}: the store did not come back`);
      }
    };
    await works('before');
    assert.equal(own.totalCount, 4);
    generation += 1;
    await works('after');
  } finally {
    for (const socket of sockets) socket.destroy();
    proxy.close();
    await own.end();
  }
});

for (const name of ['Redis Cluster by ioredis', 'Redis Cluster by redis']) {
  test(`${name}: a node that is away takes its own keys away, and no other ones`, async () => {
    const store = stores[name]();
    const idOf = (key) => recordId('pay', Buffer.alloc(32), ['POST', '/pay'], key);
    const nodeOf = (key) => store.partOf(idOf(key));
    // The slots are those of the server.
    const [own] = cluster.addresses;
    for (const key of ['a', 'b', 'c', 'd']) {
      const slot = Number(cluster.cli(own, 'CLUSTER', 'KEYSLOT', `oncegate:{${idOf(key).toString('hex')}}`));
      const [node] = cluster.cli(own, 'CLUSTER', 'NODES').split('\n').filter((line) => line.split(' ').slice(8).some((range) => { const [from, to = from] = range.split('-').map(Number); return from <= slot && slot <= to; }));
      assert.equal(nodeOf(key), node.split(' ')[1].split('@')[0]);
    }
    const executed = [];
    const handle = withIdempotency(new Oncegate({ store, service: 'pay', warn: () => undefined }), { scope: 'single-tenant', wait: 0 }, (request) => { executed.push(request.headers.get('idempotency-key')); return new Response('made', { status: 201 }); });
    const send = async (key) => (await handle(new Request('http://shop.test/pay', { method: 'POST', headers: { 'idempotency-key': key }, body: '5' }))).status;
    const other = cluster.addresses.find((address) => address !== store.partOf(MARK));
    // A process that has read the mark goes on without its node.
    for (const away of [other, store.partOf(MARK)]) {
      const keys = Array.from({ length: 24 }, () => randomBytes(8).toString('hex'));
      const [lost, rest] = [keys.filter((key) => nodeOf(key) === away), keys.filter((key) => nodeOf(key) !== away)];
      assert.ok(lost.length > 1 && rest.length > 1);
      await until(async () => (await send(randomBytes(8).toString('hex'))) === 201);
      executed.length = 0;
      await cluster.kill(away);
      try {
        const statuses = async (of) => [...new Set(await Promise.all(of.map(send)))];
        assert.deepEqual([await statuses(lost), await statuses(rest), await statuses(lost), await statuses(rest)], [[503], [201], [503], [201]]);
        assert.deepEqual(executed.sort(), [...rest].sort());
      } finally {
        cluster.start(away);
      }
      // The keys work again when the node is back, and each is executed once.
      await until(async () => (await Promise.all(lost.map(send))).every((status) => status === 201));
      assert.deepEqual(executed.sort(), [...keys].sort());
    }
  });
}
