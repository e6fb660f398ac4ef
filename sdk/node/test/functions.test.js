import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { inspect } from 'node:util';
import { Readable } from 'node:stream';
import { after, before, test } from 'node:test';
import { setTimeout as pause } from 'node:timers/promises';
import { drizzle } from 'drizzle-orm/node-postgres';
import { integer, pgTable } from 'drizzle-orm/pg-core';
import pg from 'pg';
import { completeInTransaction, CorruptRecordError, FunctionError, idempotent, Keyring, MemoryStore, Oncegate, PostgresStore, SealedError, SealedStore, sidecarAttempt, transaction } from '../dist/esm/index.js';
import { callerDigest, recordId } from '../dist/esm/identity.js';
import { startPostgres, until } from './servers.js';
import { vectors } from './vectors.js';

const { key_text: KEY } = vectors('seal/vectors/sealed.json');

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

test('a value whose members cannot be read is done, and not replayed', async () => {
  const oncegate = new Oncegate({ store: new MemoryStore(), warn: () => undefined });
  let runs = 0;
  const lazy = idempotent(oncegate, { name: 'lazy', key: () => 'k', errors: 'unknown', wait: 0 }, () => {
    runs += 1;
    return { get pipe() { throw new Error('not loaded'); } };
  });
  assert.equal(typeof await lazy(), 'object');
  await rejects(lazy(), 'unreplayable');
  assert.equal(runs, 1);
  assert.equal(await oncegate.drain(5000), true);
});

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

test('the key of a function may be a number', async () => {
  const oncegate = new Oncegate({ store: new MemoryStore(), warn: () => undefined });
  const of = (key) => idempotent(oncegate, { name: 'n', key: () => key, errors: 'keep' }, () => 7);
  assert.deepEqual([await of(5)(), await of('5')(), await of(5n)()], [7, 7, 7]);
  for (const wrong of [undefined, null, {}, 1.5, Promise.resolve('k')]) await assert.rejects(of(wrong)(), { name: 'SettingsError', message: /^a key is a text or a whole number, and this one is / });
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

const settings = (message) => ({ name: 'SettingsError', message });
const paid = (key) => async (client) => { await client.query('INSERT INTO payments VALUES ($1)', [key]); };
const paidWith = async (amount) => (await pool.query('SELECT count(*)::int AS count FROM payments WHERE amount = $1', [amount])).rows[0].count;

const MUST_NOT_END = /the function must not end the transaction; use savepoints/;

test('a statement that would end the transaction is refused, and nothing happens', async () => {
  const table = pgTable('payments', { amount: integer().notNull() });
  const insert = (client) => client.query('INSERT INTO payments VALUES (300)');
  const sent = (statement) => async (client) => { await insert(client); await client.query(statement); };
  const ways = {
    ...Object.fromEntries([
      'COMMIT', ' ;commit work', 'END', 'ABORT', 'ROLLBACK', 'ROLLBACK WORK', 'ROLLBACK AND CHAIN', '-- so\n/* and so */ rollback', 'BEGIN', 'START  TRANSACTION', "PREPARE TRANSACTION 'x'",
    ].map((statement) => [statement, sent(statement)])),
    'as an object': sent({ text: 'COMMIT' }),
    'by a callback': async (client) => { await insert(client); await new Promise((resolve, reject) => { client.query('COMMIT', (error) => (error ? reject(error) : resolve())); }); },
    'as a query of pg': async (client) => { await insert(client); client.query(new pg.Query('COMMIT')); },
    'by attempt.client': async (client, attempt) => { await insert(attempt.client); await attempt.client.query('COMMIT'); },
    'by Drizzle': (client) => drizzle(client).transaction((tx) => tx.insert(table).values({ amount: 300 })),
  };
  for (const [name, way] of Object.entries(ways)) {
    const pay = (run) => withClient((client) => transaction(client, 'k', (attempt) => run(client, attempt), { name: `refused ${name}`, service: 'shop' }));
    // Drizzle has the error as its cause.
    await assert.rejects(pay(way), (error) => MUST_NOT_END.test((error.cause ?? error).message), name);
    assert.equal(await paidWith(300), 0, name);
    assert.equal(await pay(() => 1), 1, name);
  }
  // The error is caught: what the nested transaction should have done is not there, and the rest is there once.
  const pay = () => withClient((client) => transaction(client, 'k', async () => {
    await drizzle(client).transaction(async (tx) => { await tx.insert(table).values({ amount: 310 }); tx.rollback(); }).catch(() => undefined);
    await drizzle(client).insert(table).values({ amount: 311 });
    return 1;
  }, { name: 'nested and caught', service: 'shop' }));
  assert.deepEqual([await pay(), await pay(), await paidWith(310), await paidWith(311)], [1, 1, 0, 1]);
});

test('savepoints are allowed, and the connection is given back as it was', async () => {
  await withClient(async (client) => {
    const { query } = client;
    const own = Object.hasOwn(client, 'query');
    const listeners = client.listenerCount('error');
    await transaction(client, 'k', async () => {
      await client.query('SAVEPOINT s');
      await client.query('INSERT INTO payments VALUES (312)');
      for (const statement of ['ROLLBACK TO s', 'rollback work to savepoint s', 'ROLLBACK TRANSACTION TO s', 'RELEASE s', 'SELECT 1 AS commit']) await client.query(statement);
      await client.query('INSERT INTO payments VALUES (313)');
      return 1;
    }, { name: 'savepoints', service: 'shop' });
    await assert.rejects(transaction(client, 'k2', () => { throw new Error('declined'); }, { name: 'savepoints', service: 'shop' }), /declined/);
    assert.deepEqual([client.query === query, Object.hasOwn(client, 'query'), client.listenerCount('error')], [true, own, listeners]);
    await client.query('BEGIN');
    await client.query('COMMIT');
  });
  assert.deepEqual([await paidWith(312), await paidWith(313)], [0, 1]);
});

// In a text behind another statement, it is not seen before.
const HIDDEN_COMMIT = 'SELECT 1; COMMIT';
const HIDDEN_ROLLBACK = 'SELECT 1; ROLLBACK';

test('a transaction that ends itself has an unknown outcome, and does not run again', async () => {
  const ways = {
    commit: async (client) => { await client.query('INSERT INTO payments VALUES (301)'); await client.query(HIDDEN_COMMIT); },
    'commit and begin': async (client) => { await client.query('INSERT INTO payments VALUES (301)'); await client.query(`${HIDDEN_COMMIT}; BEGIN`); },
    'commit, begin and a statement that fails': async (client) => {
      await client.query('INSERT INTO payments VALUES (301)');
      await client.query(`${HIDDEN_COMMIT}; BEGIN`);
      await client.query('SELECT 1/0').catch(() => undefined);
    },
    'rollback, then a write': async (client) => { await client.query(HIDDEN_ROLLBACK); await client.query('INSERT INTO payments VALUES (301)'); },
    'rollback, a write, begin and a statement that fails': async (client) => {
      await client.query(HIDDEN_ROLLBACK);
      await client.query('INSERT INTO payments VALUES (301)');
      await client.query('SELECT 1; BEGIN');
      await client.query('SELECT 1/0').catch(() => undefined);
    },
    'rollback, begin, a write and commit': async (client) => { await client.query(`${HIDDEN_ROLLBACK}; BEGIN; INSERT INTO payments VALUES (301); COMMIT`); },
    nested: (client) => transaction(client, 'inner', () => 1, { name: 'inner', service: 'shop' }),
  };
  for (const seals of [false, true]) {
    for (const fails of [false, true]) {
      for (const [name, way] of Object.entries(ways)) {
        await pool.query('DELETE FROM payments WHERE amount = 301');
        let runs = 0;
        const options = { name: `ends ${name} ${fails} ${seals}`, service: 'shop', wait: '0s', ...(seals && { sealKeys: Keyring.parse(KEY) }) };
        const pay = () => withClient((client) => transaction(client, 'k', async () => {
          runs += 1;
          await way(client);
          if (fails) throw new Error('declined');
          return 1;
        }, options));
        if (name === 'nested') {
          await assert.rejects(pay(), settings(/has an open transaction/));
          await assert.rejects(pay(), settings(/has an open transaction/));
          continue;
        }
        await rejects(pay(), 'ended');
        await rejects(pay(), 'unknown');
        assert.deepEqual([runs, await paidWith(301)], [1, 1], `${name} ${fails} ${seals}`);
      }
    }
  }
});

test('after a COMMIT of its own, duplicates are in progress while the function runs, and after its connection broke', async () => {
  for (const breaks of [false, true]) {
    let runs = 0;
    let [committed, go] = [];
    const isCommitted = new Promise((resolve) => { committed = resolve; });
    const mayGo = new Promise((resolve) => { go = resolve; });
    const client = new pg.Client(postgres.url);
    await client.connect();
    const options = { name: `slow after commit ${breaks}`, service: 'shop', wait: '0s' };
    const first = transaction(client, 'k', async () => {
      runs += 1;
      const { rows: [{ pid }] } = await client.query('SELECT pg_backend_pid() AS pid');
      await client.query(`INSERT INTO payments VALUES (314); COMMIT`);
      if (breaks) await pool.query('SELECT pg_terminate_backend($1)', [pid]);
      committed();
      await mayGo;
      return 1;
    }, options).catch((error) => error);
    await isCommitted;
    const again = () => withClient((other) => transaction(other, 'k', () => { runs += 1; }, options));
    await rejects(again(), 'in-progress');
    go();
    const error = await first;
    await rejects(again(), breaks ? 'in-progress' : 'unknown');
    assert.ok(error instanceof Error && !error.message.includes('rolled back'));
    assert.deepEqual([error.kind, runs, await paidWith(314)], ['ended', 1, breaks ? 2 : 1]);
    assert.match(error.message, breaks ? /The database did not take that its outcome is unknown: the key may be free/ : /It is not run again: its outcome is unknown/);
    await client.end().catch(() => undefined);
  }
});

test('the unknown outcome of a function that rolled back needs few rights, and leaves the record of another attempt', async () => {
  await pool.query('CREATE ROLE payer LOGIN; GRANT INSERT ON payments TO payer; GRANT USAGE ON SCHEMA oncegate TO payer; GRANT EXECUTE ON FUNCTION oncegate.lookup, oncegate.claim, oncegate.complete TO payer');
  const url = new URL(postgres.url);
  url.username = 'payer';
  const client = new pg.Client(url.href);
  await client.connect();
  try {
    for (const isOvertaken of [false, true]) {
      const options = { name: `few rights ${isOvertaken}`, service: 'shop' };
      const again = () => withClient((other) => transaction(other, 'k', () => 'the other one', options));
      const failure = await transaction(client, 'k', async () => {
        await client.query(HIDDEN_ROLLBACK);
        if (isOvertaken) await again();
        return 1;
      }, options).catch((error) => error);
      assert.equal(failure.kind, 'ended');
      assert.match(failure.message, isOvertaken ? /Another attempt has its key, which was free for a while/ : /It is not run again/);
      if (isOvertaken) assert.equal(await again(), 'the other one');
      else await rejects(again(), 'unknown');
    }
  } finally {
    await client.end();
  }
});

test('after a ROLLBACK of its own whose unknown outcome the database does not take, the error says that the key may be free', async () => {
  const [client, other] = [new pg.Client(postgres.url), new pg.Client(postgres.url)];
  await client.connect();
  await other.connect();
  try {
    const options = { name: 'not said', service: 'shop', wait: '0s' };
    const failure = await transaction(client, 'k', async () => {
      await client.query(`${HIDDEN_ROLLBACK}; INSERT INTO payments VALUES (330)`);
      // It cannot claim.
      await client.query('SET default_transaction_read_only = on');
      return 1;
    }, options).catch((error) => error);
    assert.deepEqual([failure.kind, /the key may be free, so find out before you call it again$/.test(failure.message)], ['ended', true], failure.message);
    assert.equal(await transaction(other, 'k', () => 2, options), 2);
    // The connection is lost, too.
    client.on('error', () => undefined);
    await client.query('RESET default_transaction_read_only');
    const lost = await transaction(client, 'lost', async () => {
      const { rows: [{ pid }] } = await client.query('SELECT pg_backend_pid() AS pid');
      await client.query(`${HIDDEN_ROLLBACK}; INSERT INTO payments VALUES (330)`);
      await pool.query('SELECT pg_terminate_backend($1)', [pid]);
      await client.query('SELECT 1');
      return 1;
    }, options).catch((error) => error);
    assert.deepEqual([lost.kind, /the key may be free/.test(lost.message), await paidWith(330)], ['ended', true, 2]);
  } finally {
    await client.end().catch(() => undefined);
    await other.end();
  }
});

test('a statement of a helper that outlives the function is refused', async () => {
  let fails = true;
  let late;
  let ended;
  const pay = (use) => withClient((client) => transaction(client, 'k', async (attempt) => {
    const own = use(client, attempt);
    const hasEnded = new Promise((resolve) => { ended = resolve; });
    late = (async () => { await own.query('SELECT 1'); await hasEnded; await own.query('INSERT INTO payments VALUES (315)'); })();
    late.catch(() => undefined);
    await Promise.all([late, fails && Promise.reject(new Error('no stock')), fails || ended()]);
    return 1;
  }, { name: 'late', service: 'shop' }));
  await assert.rejects(pay((_, { client }) => client), /no stock/);
  ended();
  await assert.rejects(late, settings(/has ended, so this statement was not sent/));
  assert.equal(await paidWith(315), 0);
  fails = false;
  assert.deepEqual([await pay((_, { client }) => client), await paidWith(315)], [1, 1]);
  // On the connection itself, until the transaction has ended.
  await withClient((client) => transaction(client, 'k', () => {
    late = Promise.resolve().then(() => Promise.resolve()).then(() => Promise.resolve()).then(() => client.query('INSERT INTO payments VALUES (316)'));
    late.catch(() => undefined);
    return 1;
  }, { name: 'late on the connection', service: 'shop' }));
  await assert.rejects(late, settings(/has ended, so this statement was not sent/));
  assert.equal(await paidWith(316), 0);
});

test('a transaction that PostgreSQL rolled back is no success', async () => {
  const pay = (fails) => withClient((client) => transaction(client, 'k', async () => {
    await paid(302)(client);
    // Not waited for: it fails after the function has returned.
    if (fails === 'not waited for') client.query('SELECT 1/0').catch(() => undefined);
    if (fails === 'ignored') await client.query('SELECT 1/0').catch(() => undefined);
    return { paid: true };
  }, { name: 'rolled back', service: 'shop' }));
  for (let at = 0; at < 5; at += 1) {
    await rejects(pay('not waited for'), 'rolled-back');
    await rejects(pay('ignored'), 'rolled-back');
  }
  assert.equal(await paidWith(302), 0);
  assert.deepEqual(await pay(), { paid: true });
  assert.equal(await paidWith(302), 1);
});

test('a deferred constraint that fails at COMMIT frees the key', async () => {
  await pool.query('CREATE TABLE deferred (id integer PRIMARY KEY, parent integer REFERENCES deferred (id) DEFERRABLE INITIALLY DEFERRED)');
  const pay = (parent) => withClient((client) => transaction(client, 'k', () => client.query('INSERT INTO deferred VALUES (1, $1)', [parent]).then(() => 1), { name: 'deferred', service: 'shop' }));
  await assert.rejects(pay(99), { code: '23503' });
  assert.equal(await pay(1), 1);
});

test('a transaction has the isolation level of its connection', async () => {
  const own = new pg.Pool({ connectionString: postgres.url, max: 12, options: '-c default_transaction_isolation=serializable' });
  try {
    await pool.query('CREATE TABLE wallet (amount integer NOT NULL); INSERT INTO wallet VALUES (100)');
    const withOwn = async (work) => { const client = await own.connect(); try { return await work(client); } finally { client.release(); } };
    let reads = 0;
    let bothRead;
    const haveRead = new Promise((resolve) => { bothRead = resolve; });
    const withdraw = (key) => withOwn((client) => transaction(client, key, async () => {
      const { rows: [{ sum }] } = await client.query('SELECT sum(amount)::int AS sum FROM wallet');
      reads += 1;
      if (reads === 2) bothRead();
      await haveRead;
      if (sum < 100) throw new Error('no money');
      await client.query('INSERT INTO wallet VALUES (-100)');
      return 'withdrawn';
    }, { name: 'withdraw', service: 'shop' }).catch((error) => error.code));
    assert.deepEqual((await Promise.all([withdraw('1'), withdraw('2')])).sort(), ['40001', 'withdrawn']);
    assert.equal((await pool.query('SELECT sum(amount)::int AS sum FROM wallet')).rows[0].sum, 0);
    // Nothing has run if the claim cannot be serialized, so it is sent again.
    let runs = 0;
    const once = () => withOwn((client) => transaction(client, 'same', async () => { runs += 1; await pause(20); return runs; }, { name: 'at once', service: 'shop', wait: '30s' }));
    assert.deepEqual([await Promise.all(Array.from({ length: 12 }, once)), runs], [Array(12).fill(1), 1]);
  } finally {
    await own.end();
  }
});

test('a claim that cannot be serialized is sent again, and a function is not', async () => {
  for (const [failures, outcome] of [[3, 1], [Infinity, '40001']]) {
    await withClient(async (client) => {
      const { query } = client;
      let left = failures;
      let runs = 0;
      client.query = (...args) => (String(args[0]).includes('oncegate.claim(') && left-- > 0 ? Promise.reject(Object.assign(new Error('could not serialize'), { code: '40001' })) : query.apply(client, args));
      const options = { name: `serialize ${failures}`, service: 'shop', wait: '0s' };
      const value = await transaction(client, 'k', () => { runs += 1; return runs; }, options).catch((error) => error.code);
      delete client.query;
      assert.deepEqual([value, runs], [outcome, outcome === 1 ? 1 : 0]);
      runs = 0;
      await assert.rejects(transaction(client, 'k2', () => { runs += 1; throw Object.assign(new Error('could not serialize'), { code: '40001' }); }, options), { code: '40001' });
      assert.equal(runs, 1);
    });
  }
});

test('a connection whose BEGIN has no reply in time is closed, so that no later write is lost', async () => {
  const own = new pg.Pool({ connectionString: postgres.url, max: 1, query_timeout: 700 });
  own.on('error', () => undefined);
  try {
    await own.query('SELECT 1');
    const client = await own.connect();
    const { rows: [{ pid }] } = await client.query('SELECT pg_backend_pid() AS pid');
    process.kill(pid, 'SIGSTOP');
    try {
      await assert.rejects(transaction(client, 'k', () => paid(317)(client), { name: 'begin', service: 'shop' }), /timeout/);
    } finally {
      process.kill(pid, 'SIGCONT');
      client.release();
    }
    await own.query('INSERT INTO payments VALUES (318)');
    assert.deepEqual([await paidWith(317), await paidWith(318)], [0, 1]);
  } finally {
    await own.end();
  }
});

test('PostgreSQL ends the connection while the function waits: the call rejects, and the key is free', async () => {
  // Without a listener of its own.
  const client = new pg.Client(postgres.url);
  await client.connect();
  const options = { name: 'terminated', service: 'shop' };
  let lost;
  await assert.rejects(transaction(client, 'k', async () => {
    await paid(319)(client);
    const isLost = new Promise((resolve) => { lost = resolve; });
    client.once('end', lost);
    const { rows: [{ pid }] } = await client.query('SELECT pg_backend_pid() AS pid');
    await pool.query('SELECT pg_terminate_backend($1)', [pid]);
    await isLost;
    return 1;
  }, options));
  assert.equal(await paidWith(319), 0);
  assert.equal(await withClient((other) => transaction(other, 'k', () => 1, options)), 1);
});

test('a transaction is refused on a pool, and on a connection with an open one, which stays as it was', async () => {
  const options = { name: 'refused', service: 'shop' };
  await assert.rejects(transaction(pool, 'k', () => 1, options), settings(/this is a pool/));
  await withClient(async (client) => {
    await client.query('BEGIN');
    await paid(303)(client);
    await assert.rejects(transaction(client, 'k', () => 1, options), settings(/has an open transaction/));
    await client.query('ROLLBACK');
    assert.equal(await paidWith(303), 0);
    assert.equal(await transaction(client, 'k', () => 1, options), 1);
  });
});

test('mistyped options, missing keys and callers are refused', async () => {
  const oncegate = new Oncegate({ store: new MemoryStore(), warn: () => undefined });
  await withClient(async (client) => {
    for (const [options, message] of [
      [{ name: 'pay', servcie: 'shop' }, /no option "servcie" of transaction; did you mean "service"/],
      [{ name: 'pay', service: 'shop', sealkeys: 1 }, /did you mean "sealKeys"/],
      [{ name: 'pay', service: 'shop', sealKeys: undefined }, /sealKeys: give a Keyring/],
      [{ name: 'pay', service: 'shop', sealKeys: 'ogseal1_' }, /sealKeys: give a Keyring/],
      [{ name: 'pay', service: 'shop', caller: undefined }, /caller: a caller is a kind and a value/],
    ]) await assert.rejects(transaction(client, 'k', () => 1, options), settings(message));
  });
  assert.throws(() => new SealedStore(new MemoryStore(), undefined), settings(/SealedStore: give a Keyring/));
  assert.throws(() => Keyring.parse(undefined), settings(/is their variable set/));
  assert.throws(() => Keyring.parse('abc'), settings(/line 1 of the seal keys is no key/));
  for (const client of [null, undefined, {}]) await assert.rejects(transaction(client, 'k', () => 1, { name: 'pay', service: 'shop' }), settings(/client: give one connection of `pg`/));
  const { FunctionError: Other } = createRequire(import.meta.url)('../dist/cjs/index.js');
  const [own, other] = [new FunctionError('unknown', 'pay'), new Other('unknown', 'pay')];
  assert.deepEqual([own instanceof Other, other instanceof FunctionError, new Error('x') instanceof FunctionError, own instanceof (class extends FunctionError {})], [true, true, false, false]);
  assert.doesNotMatch(inspect(own), /Symbol/);
  const of = (options) => idempotent(oncegate, { name: 'n', key: () => 'k', errors: 'keep', ...options }, () => 1);
  assert.throws(() => of({ onError: 1 }), settings(/no option "onError" of idempotent/));
  await assert.rejects(of({ caller: () => undefined })(), settings(/otherwise all such callers would share their keys/));
  for (const caller of ['', [], ['customer'], ['customer', ''], ['', '42'], ['customer', 42], ['customer', '42', '43'], { customer: '42' }]) {
    await assert.rejects(of({ caller: () => caller })(), settings(/such as \['customer', '42'\]/));
  }
  await assert.rejects(of({})(new Map([['amount', 5]])), /a Map or a Set is not JSON/);
  await assert.rejects(of({})(5n), /a bigint is not JSON: write it as a text, or say with `input`/);
});

test('a caller has a kind and a value, and the kind is a part of the key', async () => {
  const store = new MemoryStore();
  const oncegate = new Oncegate({ store, warn: () => undefined });
  let runs = 0;
  const of = (caller) => idempotent(oncegate, { name: 'pay', key: () => 'k', errors: 'keep', caller: () => caller }, (attempt) => { runs += 1; return attempt.record; })();
  const records = [];
  for (const caller of ['42', ['caller', '42'], ['customer', '42'], ['customer', '43']]) records.push(await of(caller));
  assert.deepEqual([runs, records[0] === records[1], new Set(records).size], [3, true, 3]);
  // The same record as in the other languages: see `record_ids.json`.
  assert.equal(records[2], recordId(undefined, callerDigest([{ kind: 'customer', identity: Buffer.from('42') }]), ['function:', 'pay'], 'k').toString('hex'));
  const inTransaction = (caller) => withClient((client) => transaction(client, 'k', (attempt) => attempt.record, { name: 'pay by a caller', service: 'shop', caller }));
  assert.equal(await inTransaction(['customer', '42']), recordId('shop', callerDigest([{ kind: 'customer', identity: Buffer.from('42') }]), ['pay by a caller'], 'k').toString('hex'));
  assert.notEqual(await inTransaction('42'), await inTransaction(['customer', '42']));
});

test('arguments whose content JSON does not show are refused, and texts of a form are compared', async () => {
  const oncegate = new Oncegate({ store: new MemoryStore(), warn: () => undefined });
  class Money { #amount; constructor(amount) { this.#amount = amount; } get amount() { return this.#amount; } }
  class Dated { toJSON() { return 'shown'; } }
  class Order { constructor() { this.id = 1; } }
  let runs = 0;
  const act = idempotent(oncegate, { name: 'act', key: (key) => key, errors: 'unknown' }, () => { runs += 1; return runs; });
  const hidden = [new Money(5), new URLSearchParams('a=5'), Promise.resolve(5), new Response('5'), new Headers(), Readable.from(['5']), new ReadableStream(), [5].values(), new Error('5'), /5/, new ArrayBuffer(5), new WeakMap(), { then: () => 5 }];
  for (const value of [...hidden, [hidden[0]], { value: hidden[0] }]) await assert.rejects(act('hidden', value), { name: 'TypeError', message: /is not JSON/ });
  await assert.rejects(act('hidden', new Money(5)), { message: /^an object of the class Money is not JSON/ });
  await withClient((client) => assert.rejects(transaction(client, 'k', () => 1, { name: 'n', service: 'shop', input: new Money(5) }), TypeError));
  await withClient((client) => assert.rejects(transaction(client, 'large', () => 10n, { name: 'n', service: 'shop' }), { message: 'a bigint is not JSON: write it as a text' }));
  assert.equal(runs, 0);
  for (const value of [{}, Object.create(null), [], new Date(), new Dated(), new Order(), Buffer.alloc(0), new Number(5), null, undefined, { nested: { a: [] } }]) await act(`shown ${runs}`, value);
  assert.equal(runs, 11);
  const form = (...entries) => { const data = new FormData(); for (const [name, value] of entries) data.append(name, value); return data; };
  const pay = idempotent(oncegate, { name: 'pay', key: (_, data) => data.get('key'), errors: 'unknown' }, (_, data) => ({ paid: data.get('amount') }));
  assert.deepEqual(await pay({}, form(['key', 'k'], ['amount', '5'])), { paid: '5' });
  assert.deepEqual(await pay({}, form(['key', 'k'], ['amount', '5'])), { paid: '5' });
  await rejects(pay({}, form(['key', 'k'], ['amount', '5000'])), 'key-reused');
  await assert.rejects(pay({}, form(['key', 'k2'], ['file', new Blob(['5'])])), { message: /FormData with a file/ });
});

test('a generator function is refused, and a value whose work may not be done has an unknown outcome', async () => {
  const oncegate = new Oncegate({ store: new MemoryStore(), warn: () => undefined });
  const of = (name, run) => idempotent(oncegate, { name, key: () => 'k', errors: 'release' }, run);
  for (const run of [function* () { yield 1; }, async function* () { yield 1; }]) {
    assert.throws(() => of('generator', run), settings(/a generator function does not run when it is called/));
    await withClient((client) => assert.rejects(transaction(client, 'k', run, { name: 'n', service: 'shop' }), settings(/a generator function does not run/)));
  }
  let runs = 0;
  const pending = { iterator: () => [1].values(), 'async iterator': () => (async function* () { yield 1; })(), response: () => new Response('x'), stream: () => new ReadableStream(), readable: () => Readable.from(['x']) };
  for (const [name, make] of Object.entries(pending)) {
    const run = of(name, () => { runs += 1; return make(); });
    await rejects(run(), 'not-json');
    await rejects(run(), 'unknown');
  }
  assert.equal(runs, 5);
  for (const make of [() => new Map([[1, 2]]), () => 10n, () => new (class { #hidden = 1; get hidden() { return this.#hidden; } })()]) {
    const run = of(`tombstone ${make}`, make);
    assert.equal(typeof await run(), typeof make());
    await rejects(run(), 'unreplayable');
  }
});

test('an attempt that was overtaken returns what the record has', async () => {
  for (const [ends, isDone] of [['returns', true], ['throws', true], ['returns', false]]) {
    const store = new MemoryStore();
    const away = Object.assign(Object.create(store), { renew: async () => { throw new Error('away'); } });
    const options = { name: 'overtaken', key: () => 'k', errors: 'keep', lease: '200ms', wait: '30s', onAbandoned: 'reexecute' };
    let go;
    const mayGo = new Promise((resolve) => { go = resolve; });
    const warnings = [];
    const first = idempotent(new Oncegate({ store: away, warn: (message) => warnings.push(message) }), options, async () => {
      await mayGo;
      if (ends === 'throws') throw new Error('the first one');
      return 'the first one';
    })().catch((error) => error);
    let second;
    const other = idempotent(new Oncegate({ store, warn: () => undefined }), options, () => { if (!isDone) { go(); return second; } return 'the second one'; });
    if (isDone) {
      assert.equal(await other(), 'the second one');
      go();
      assert.equal(await first, 'the second one');
    } else {
      let finish;
      second = new Promise((resolve) => { finish = resolve; });
      const running = other();
      const error = await first;
      assert.ok(error instanceof FunctionError && error.kind === 'stale');
      finish('the second one');
      assert.equal(await running, 'the second one');
    }
    assert.equal(warnings.filter((message) => message.includes('another attempt took over')).length, 1);
  }
});

test('halves of surrogate pairs are no keys, and a thrown text is kept', async () => {
  const oncegate = new Oncegate({ store: new MemoryStore(), warn: () => undefined });
  const of = (name, run) => idempotent(oncegate, { name, key: (key) => key, errors: 'keep' }, run);
  for (const key of ['a\ud800', '\ud801']) await assert.rejects(of('n', () => 1)(key), settings(/half of a surrogate pair/));
  assert.equal(await of('n', () => 1)('💶'), 1);
  const run = of('text', () => { throw 'no money'; });
  await assert.rejects(run('k'), (error) => error === 'no money');
  await assert.rejects(run('k'), (error) => error.kind === 'failed' && error.stored.message === 'no money');
});

test('concurrent claims that all lose their replies leave the key free', async () => {
  const store = new MemoryStore();
  for (const callers of [1, 2, 5]) {
    let loses = true;
    const lossy = Object.assign(Object.create(store), {
      claimsMayCommitLate: true,
      claim: async (...args) => {
        const reply = await store.claim(...args);
        await pause(5);
        if (loses) throw new Error('the reply was lost');
        return reply;
      },
    });
    let runs = 0;
    const run = idempotent(new Oncegate({ store: lossy, warn: () => undefined }), { name: `lost ${callers}`, key: () => 'k', errors: 'unknown', lease: '2s', wait: '0s' }, () => { runs += 1; return runs; });
    for (const { status } of await Promise.allSettled(Array.from({ length: callers }, () => run()))) assert.equal(status, 'rejected');
    loses = false;
    // Longer than the lease.
    const value = await until(async () => { try { return await run(); } catch (error) { if (error.kind === 'unknown') return error.kind; throw error; } });
    assert.deepEqual([value, runs], [1, 1], `${callers}`);
  }
});

test('an error while the error is judged leaves an unknown outcome', async () => {
  const oncegate = new Oncegate({ store: new MemoryStore(), warn: () => undefined });
  for (const [errors, thrown] of [['keep', undefined], ['keep', null], [(error) => error.response.status, new Error('network')], [() => 'nothing', new Error('x')]]) {
    const run = idempotent(oncegate, { name: `judged ${errors} ${thrown}`, key: () => 'k', errors, wait: '0s', lease: '300ms' }, () => { throw thrown; });
    await assert.rejects(run(), (error) => error === thrown);
    await rejects(run(), errors === 'keep' ? 'failed' : 'unknown');
  }
});

test('the store removes records whose retention is over', async () => {
  const oncegate = new Oncegate({ store: new PostgresStore(pool), service: 'purged', warn: () => undefined });
  const run = idempotent(oncegate, { name: 'old', key: (key) => key, errors: 'keep', retention: '1s' }, () => 1);
  await run('k');
  const count = async () => (await pool.query("SELECT count(*)::int AS count FROM oncegate.records WHERE operation = 'old'")).rows[0].count;
  assert.equal(await count(), 1);
  const deadline = Date.now() + 60_000;
  const claims = idempotent(oncegate, { name: 'new', key: (key) => key, errors: 'keep' }, () => 1);
  for (let at = 0; (await count()) > 0; at += 1) {
    assert.ok(Date.now() < deadline);
    await claims(`k-${at}`);
    await pause(100);
  }
});

test('a role without a right executes nothing', async () => {
  await pool.query("CREATE ROLE few LOGIN; GRANT USAGE ON SCHEMA oncegate TO few; GRANT EXECUTE ON FUNCTION oncegate.claim, oncegate.lookup, oncegate.contract_version, oncegate.now_ms TO few");
  const url = new URL(postgres.url);
  url.username = 'few';
  const own = new pg.Pool({ connectionString: url.href });
  try {
    let runs = 0;
    const oncegate = new Oncegate({ store: new PostgresStore(own), service: 'few', warn: () => undefined });
    await assert.rejects(idempotent(oncegate, { name: 'n', key: () => 'k', errors: 'keep' }, () => { runs += 1; })(), /the role may not call oncegate\.complete_if_owner, oncegate\.release, oncegate\.renew; see "Grants" in docs\/reference\/store-contract-postgres\.md/);
    assert.equal(runs, 0);
  } finally {
    await own.end();
  }
});

test('the grants of the documentation are enough, also without the right to remove records', async () => {
  const page = readFileSync(new URL('../../../docs/reference/store-contract-postgres.md', import.meta.url), 'utf8');
  const block = page.split('## Grants')[1].match(/```sql\n([^]*?)```/)[1];
  for (const [role, mayPurge] of [['web', true], ['web_without', false], ['orders', undefined]]) {
    await pool.query(`CREATE ROLE ${role} LOGIN; GRANT INSERT ON payments TO ${role}`);
    const statements = [...block.matchAll(/^GRANT [^;]*;/gm)].map(([text]) => text).filter((text) => text.endsWith(`TO ${role.replace('_without', '')};`) && (mayPurge !== false || !text.includes('purge')));
    assert.ok(statements.length >= 2, block);
    for (const statement of statements) await pool.query(statement.replace(/ TO \w+;$/, ` TO ${role}`));
    const url = new URL(postgres.url);
    url.username = role;
    const own = new pg.Pool({ connectionString: url.href });
    own.on('error', () => undefined);
    try {
      if (mayPurge === undefined) {
        const client = await own.connect();
        try {
          const options = { name: 'granted', service: 'shop' };
          for (const at of [1, 2]) assert.deepEqual([at, await transaction(client, 'k', async (attempt) => { await attempt.client.query('INSERT INTO payments VALUES (340)'); return 1; }, options)], [at, 1]);
          assert.equal(await paidWith(340), 1);
          await rejects(transaction(client, 'ends', () => client.query(HIDDEN_ROLLBACK), options), 'ended');
          await rejects(transaction(client, 'ends', () => 1, options), 'unknown');
        } finally {
          client.release();
        }
        continue;
      }
      const log = [];
      const oncegate = new Oncegate({ store: new PostgresStore(own), service: role, warn: (message) => log.push(message) });
      const run = idempotent(oncegate, { name: 'granted', key: (key) => key, errors: 'release', lease: '300ms' }, async (key) => { await pause(400); if (key === 'fails') throw new Error(key); return key; });
      assert.deepEqual([await run('k'), await run('k')], ['k', 'k']);
      await assert.rejects(run('fails'), /^Error: fails$/);
      assert.deepEqual(log.map((line) => /^records are not removed after their retention, because the role may not call oncegate\.purge/.test(line)), mayPurge ? [] : [true], log.join('\n'));
      assert.equal(await oncegate.drain(10_000), true);
    } finally {
      await own.end();
    }
  }
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
  await withClient(async (client) => {
    // The client of an older version of `pg`, which does not tell the state of its transaction.
    const older = { query: (text, values) => client.query(text, values) };
    for (const own of [client, older]) {
      await assert.rejects(completeInTransaction(own, request(token)), /has no open transaction/);
      await client.query('BEGIN');
      await assert.rejects(completeInTransaction(own, request(String(BigInt(token) - 1n))), { code: 'OG001' });
      await client.query('ROLLBACK');
    }
  });
  assert.equal(await payments(), before);
  await pay(token);
  assert.equal(await payments(), before + 1);
  assert.equal((await claim()).outcome, 'replay');
  assert.equal(sidecarAttempt({ headers: {} }), undefined);
  assert.throws(() => sidecarAttempt({ headers: { 'oncegate-record': 'x', 'oncegate-token': '1' } }), /does this request come from a sidecar/);
});

const OTHER_KEY = 'ogseal1_b3ee885d8929c226_' + '02'.repeat(32);
const stored = async (record) => (await pool.query('SELECT response FROM oncegate.records WHERE id = $1', [record])).rows[0].response;

test('a transaction seals its value, and without the key nothing runs', async () => {
  const sealKeys = Keyring.parse(KEY);
  let runs = 0;
  let record;
  const pay = (key, options, fails = false) =>
    withClient((client) =>
      transaction(client, key, async (attempt) => {
        runs += 1;
        record = Buffer.from(attempt.record, 'hex');
        await client.query('INSERT INTO payments VALUES (7)');
        await pause(10);
        if (fails) throw new Error('after the insert');
        return { balance: 17 };
      }, { name: 'seal', input: 1, service: 'shop', wait: '10s', ...options }),
    );
  const before = await payments();
  await assert.rejects(pay('s-1', { sealKeys }, true), /after the insert/);
  assert.equal(await payments(), before);
  const values = await Promise.all(Array.from({ length: 6 }, () => pay('s-1', { sealKeys })));
  assert.deepEqual([values, runs, await payments()], [Array(6).fill({ balance: 17 }), 2, before + 1]);
  assert.ok(!(await stored(record)).includes('balance') && (await stored(record)).includes('ogseal'));
  assert.deepEqual(await pay('s-1', { sealKeys: Keyring.parse(`${OTHER_KEY}\n${KEY}`), required: true }), { balance: 17 });
  await assert.rejects(pay('s-1', {}), SealedError);
  await assert.rejects(pay('s-1', { sealKeys: Keyring.parse(OTHER_KEY) }), (error) => error instanceof SealedError && error.message.includes(KEY.slice(8, 24)));
  // What is in clear is replayed, unless it must be sealed; keys that only open seal nothing.
  assert.deepEqual(await pay('s-2', { sealKeys, opensOnly: true }), { balance: 17 });
  assert.ok((await stored(record)).includes('balance'));
  assert.deepEqual(await pay('s-2', { sealKeys }), { balance: 17 });
  await assert.rejects(pay('s-2', { sealKeys, required: true }), SealedError);
  assert.deepEqual([runs, await payments()], [3, before + 2]);
  // Moved to another record, it is refused.
  const clear = record;
  await pay('s-3', { sealKeys });
  await pool.query('UPDATE oncegate.records SET response = (SELECT response FROM oncegate.records WHERE id = $1) WHERE id = $2', [record, clear]);
  await assert.rejects(pay('s-2', { sealKeys }), CorruptRecordError);
  assert.deepEqual([runs, await payments()], [4, before + 3]);
});

test('behind a sidecar that seals: the response is sealed under its record and token', async () => {
  const sealKeys = Keyring.parse(KEY);
  const store = new SealedStore(new PostgresStore(pool), sealKeys, { required: true });
  const record = Buffer.alloc(32, 0x18);
  const claim = (attempt) => ({ attempt: Buffer.alloc(16, attempt), fingerprint: Buffer.alloc(33, 1), leaseMs: 30_000, retentionMs: 60_000, onAbandoned: 'park', caller: Buffer.alloc(8), keyTag: Buffer.alloc(8), operation: 'POST /' });
  const { token } = await store.claim(record, claim(1));
  const request = { headers: { 'oncegate-record': record.toString('hex'), 'oncegate-token': token, 'oncegate-attempt': '1' } };
  await withClient(async (client) => {
    await client.query('BEGIN');
    await completeInTransaction(client, request, { status: 201, body: 'the balance is 17' }, { sealKeys });
    await client.query('COMMIT');
  });
  assert.ok(!(await stored(record)).includes('balance'));
  const reply = await store.claim(record, claim(2));
  assert.ok(reply.outcome === 'replay' && reply.response.includes('the balance is 17'));
});

test('a function without the keys says that its value is sealed', async () => {
  const memory = new MemoryStore();
  const charge = (store) => idempotent(new Oncegate({ store, warn: () => undefined }), { name: 'charge', key: () => 'k', errors: 'keep' }, () => 'the balance is 17');
  assert.equal(await charge(new SealedStore(memory, Keyring.parse(KEY)))(), 'the balance is 17');
  await assert.rejects(charge(memory)(), SealedError);
});
