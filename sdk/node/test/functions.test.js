import assert from 'node:assert/strict';
import { after, before, test } from 'node:test';
import { setTimeout as pause } from 'node:timers/promises';
import { drizzle } from 'drizzle-orm/node-postgres';
import { integer, pgTable } from 'drizzle-orm/pg-core';
import pg from 'pg';
import { completeInTransaction, FunctionError, idempotent, MemoryStore, Oncegate, sidecarAttempt, transaction } from '../dist/esm/index.js';
import { startPostgres } from './servers.js';

let postgres;
let pool;
before(async () => {
  postgres = await startPostgres();
  pool = new pg.Pool({ connectionString: postgres.url, max: 20 });
  pool.on('error', () => undefined);
  await pool.query('CREATE TABLE payments (amount integer NOT NULL)');
});
after(async () => { await pool?.end(); await postgres?.stop(); });

const rejects = (promise, kind) => assert.rejects(promise, (error) => error instanceof FunctionError && error.kind === kind);

test('a function runs once for each key', async () => {
  const oncegate = new Oncegate({ store: new MemoryStore(), warn: () => undefined });
  let runs = 0;
  const charge = idempotent(oncegate, { name: 'charge', key: (order) => order.id, errors: 'unknown' }, async (order, attempt) => {
    runs += 1;
    order.amount += 1;
    await pause(10);
    return { runs, amount: order.amount, downstream: attempt.downstreamKey('bank') };
  });
  const values = await Promise.all(Array.from({ length: 10 }, () => charge({ id: 'a', amount: 5 })));
  assert.equal(runs, 1);
  for (const value of values) assert.deepEqual(value, values[0]);
  await rejects(charge({ id: 'a', amount: 9 }), 'key-reused');
  for (const value of [null, 0, '', false]) {
    const falsy = idempotent(oncegate, { name: `falsy ${JSON.stringify(value)}`, key: () => 'k', errors: 'keep' }, () => { runs += 1; return value; });
    const before = runs;
    assert.deepEqual([await falsy(), await falsy(), runs], [value, value, before + 1]);
  }
});

test('errors: unknown, released, kept', async () => {
  const oncegate = new Oncegate({ store: new MemoryStore(), warn: () => undefined });
  const of = (errors) => {
    let runs = 0;
    const run = idempotent(oncegate, { name: `fails ${errors}`, key: () => 'k', errors }, () => { runs += 1; throw new RangeError('no money'); });
    return { run, runs: () => runs };
  };
  const unknown = of('unknown');
  await assert.rejects(unknown.run(), RangeError);
  await rejects(unknown.run(), 'unknown');
  const release = of('release');
  await assert.rejects(release.run(), RangeError);
  await assert.rejects(release.run(), RangeError);
  const keep = of('keep');
  await assert.rejects(keep.run(), RangeError);
  await assert.rejects(keep.run(), (error) => error.kind === 'failed' && error.stored.message === 'no money');
  assert.deepEqual([unknown.runs(), release.runs(), keep.runs()], [1, 2, 1]);
});

const payments = async () => Number((await pool.query('SELECT count(*) FROM payments')).rows[0].count);
async function withClient(work) {
  const client = await pool.connect();
  try { return await work(client); } finally { client.release(); }
}

test('a transaction: the rows and the record, or neither', async () => {
  let runs = 0;
  const pay = (key, amount, fails = false) =>
    withClient((client) =>
      transaction(client, key, async () => {
        runs += 1;
        await client.query('INSERT INTO payments VALUES ($1)', [amount]);
        await pause(10);
        if (fails) throw new Error('after the insert');
        return { paid: amount };
      }, { name: 'pay', input: { amount }, service: 'shop', wait: '10s' }),
    );
  const values = await Promise.all(Array.from({ length: 12 }, () => pay('t-1', 5)));
  assert.deepEqual([values, runs, await payments()], [Array(12).fill({ paid: 5 }), 1, 1]);
  await rejects(pay('t-1', 6), 'key-reused');
  await assert.rejects(pay('t-2', 7, true), /after the insert/);
  assert.equal(await payments(), 1);
  assert.deepEqual(await pay('t-2', 7), { paid: 7 });
  assert.equal(await payments(), 2);
});

test('a transaction through Drizzle, on the same connection', async () => {
  const table = pgTable('payments', { amount: integer().notNull() });
  const before = await payments();
  for (let at = 0; at < 2; at += 1) {
    await withClient((client) => transaction(client, 'drizzle', async () => { await drizzle(client).insert(table).values({ amount: 8 }); return 8; }, { name: 'pay', service: 'shop' }));
  }
  assert.equal(await payments(), before + 1);
});

test('behind a sidecar: the record is completed in the transaction, and a stale token rolls back', async () => {
  const record = '17'.repeat(32);
  const claim = async () => (await pool.query("SELECT * FROM oncegate.claim($1, gen_random_uuid()::text::bytea, $2, 50, 60000, 'reexecute')".replace('gen_random_uuid()::text::bytea', 'uuid_send(gen_random_uuid())'), [Buffer.from(record, 'hex'), Buffer.alloc(33, 1)])).rows[0];
  const { token } = await claim();
  const request = (own) => ({ headers: { 'oncegate-record': record, 'oncegate-token': own, 'oncegate-attempt': '1' } });
  const before = await payments();
  const pay = (own) => withClient(async (client) => {
    await client.query('BEGIN');
    try {
      await client.query('INSERT INTO payments VALUES (9)');
      await completeInTransaction(client, request(own), { status: 201, headers: { 'Content-Type': 'text/plain' }, body: 'paid' });
      await client.query('COMMIT');
    } catch (error) {
      await client.query('ROLLBACK');
      throw error;
    }
  });
  await assert.rejects(pay(String(BigInt(token) - 1n)), { code: 'OG001' });
  assert.equal(await payments(), before);
  await pay(token);
  assert.equal(await payments(), before + 1);
  assert.equal((await claim()).outcome, 'replay');
  assert.equal(sidecarAttempt({ headers: {} }), undefined);
  assert.throws(() => sidecarAttempt({ headers: { 'oncegate-record': 'x', 'oncegate-token': '1' } }), /does this request come from a sidecar/);
});
