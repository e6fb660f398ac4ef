// Worker processes that are replaced, and a service that is stopped and started again, under load.
import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { randomBytes } from 'node:crypto';
import { once } from 'node:events';
import { Agent, request as httpRequest } from 'node:http';
import { createInterface } from 'node:readline';
import { after, before, test } from 'node:test';
import { setTimeout as pause } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import pg from 'pg';
import { startPostgres, startRedis } from './servers.js';

let postgres;
let redis;
let pool;
const children = new Set();

before(async () => {
  [postgres, redis] = await Promise.all([startPostgres(), startRedis()]);
  pool = new pg.Pool({ connectionString: postgres.url, max: 8 });
  pool.on('error', () => undefined);
  await pool.query('CREATE TABLE charges (id serial PRIMARY KEY, name text NOT NULL)');
});

after(async () => {
  for (const child of children) child.kill('SIGKILL');
  await pool?.end();
  await Promise.all([postgres?.stop(), redis?.stop()]);
});

/** A service of two workers. */
async function start(store, port = '0') {
  const child = spawn(process.execPath, [fileURLToPath(new URL('worker.js', import.meta.url)), store, postgres.url, '2', port], { stdio: ['ignore', 'pipe', 'inherit'] });
  children.add(child);
  child.once('exit', () => children.delete(child));
  const lines = createInterface({ input: child.stdout });
  const [own] = await once(lines, 'line');
  const replace = async () => {
    const replaced = once(lines, 'line');
    child.kill('SIGHUP');
    assert.deepEqual(await replaced, ['replaced']);
  };
  const stop = async () => {
    const ended = once(child, 'exit');
    child.kill('SIGTERM');
    assert.equal((await ended)[0], 0);
  };
  return { port: own, replace, stop };
}

/** Twelve clients, which send a request again under its key until it has a response of the handler. */
function load(port, keepAlive) {
  const agent = new Agent({ keepAlive });
  const own = { keys: [], failures: [] };
  let isOver = false;
  const send = (key) =>
    new Promise((resolve, reject) => {
      const path = `/pay?name=${key}&pause=${Math.floor(Math.random() * 60)}`;
      const request = httpRequest({ agent, host: '127.0.0.1', port, path, method: 'POST', headers: { 'content-type': 'application/json', 'idempotency-key': key } }, (response) => {
        response.on('error', reject).on('end', () => { resolve(response.statusCode); }).resume();
      });
      request.on('error', reject).end('{"amount":5}');
    });
  const client = async () => {
    while (!isOver) {
      const key = randomBytes(8).toString('hex');
      own.keys.push(key);
      for (const deadline = Date.now() + 60_000; ; await pause(25)) {
        assert.ok(Date.now() < deadline, 'a request has no response');
        const failure = await send(key).then((status) => (status === 201 ? undefined : `status ${status}`), async ({ code }) => {
          // A connection may break before its request is read. Once the handler has begun, its response must come.
          const { rows } = await pool.query('SELECT 1 FROM charges WHERE name = $1', [key]);
          return rows.length === 0 ? 'not begun' : code;
        });
        if (failure === undefined) break;
        own.failures.push(failure);
      }
    }
  };
  const clients = Array.from({ length: 12 }, client);
  /** Waits until there were so many more requests. */
  own.requests = async (count) => {
    const all = own.keys.length + count;
    for (const deadline = Date.now() + 60_000; own.keys.length < all; await pause(20)) assert.ok(Date.now() < deadline, 'there is no load');
  };
  own.end = async () => {
    isOver = true;
    await Promise.all(clients);
    agent.destroy();
    const { rows } = await pool.query('SELECT name, count(*) FROM charges WHERE name = ANY($1) GROUP BY name', [own.keys]);
    assert.deepEqual([rows.length, rows.filter(({ count }) => count !== '1')], [own.keys.length, []]);
  };
  return own;
}

for (const [name, store, kinds] of [['PostgreSQL', () => postgres, [true, false]], ['Redis', () => redis, [true]]]) {
  for (const keepAlive of kinds) {
    test(`${name}: workers are replaced under load, ${keepAlive ? 'with' : 'without'} keep-alive: no key twice, and no request fails that has begun`, async () => {
      const service = await start(store().url);
      const own = load(service.port, keepAlive);
      await own.requests(30);
      await service.replace();
      await own.end();
      assert.deepEqual(own.failures.filter((failure) => failure !== 'not begun'), []);
      await service.stop();
    });
  }

  test(`${name}: the service is stopped under load, and started again: no key twice, and no request fails that has begun`, async () => {
    let service = await start(store().url);
    const own = load(service.port, true);
    await own.requests(30);
    await service.stop();
    service = await start(store().url, service.port);
    await own.requests(30);
    await own.end();
    assert.deepEqual(own.failures.filter((failure) => failure !== 'not begun'), []);
    await service.stop();
  });
}
