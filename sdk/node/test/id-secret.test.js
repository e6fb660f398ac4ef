// Stores that belong to an id secret. The library never makes the mark of a store; a process with another secret, or with none, executes
// nothing, whatever its settings say.
import assert from 'node:assert/strict';
import { randomBytes } from 'node:crypto';
import { after, before, mock, test } from 'node:test';
import { setTimeout as pause } from 'node:timers/promises';
import { Redis } from 'ioredis';
import pg from 'pg';
import { idempotent, IdSecret, Keyring, MemoryStore, Oncegate, PostgresStore, RedisStore, SealedStore, StoreSetupError, StoreUnavailableError, transaction, withIdempotency } from '../dist/esm/index.js';
import { needsProgram, schema, startPostgres, startRedis, startSidecar } from './servers.js';
import { vectors } from './vectors.js';

const [OWN, OTHER] = vectors('core/vectors/keyed_ids.json').secrets;
const MARK = Buffer.from('3a75297e597197ee0ce18fc37dbf727315937c8c01ac214d7c7bbc0a3c333cac', 'hex');
let postgres;
let redis;
let pool;
let ioredis;

before(async () => {
  [postgres, redis] = await Promise.all([startPostgres(), startRedis()]);
  ioredis = new Redis(redis.url);
  ioredis.on('error', () => undefined);
  pool = new pg.Pool({ connectionString: postgres.url });
  pool.on('error', () => undefined);
});
after(async () => {
  ioredis?.disconnect();
  await pool?.end();
  await Promise.all([postgres?.stop(), redis?.stop()]);
});

/** A new engine on one of the servers, as each process has. */
const servers = {
  PostgreSQL: { url: () => postgres.url, open: () => new PostgresStore(pool), empty: () => pool.query('DELETE FROM oncegate.records') },
  Redis: { url: () => redis.url, open: () => new RedisStore(ioredis), empty: () => ioredis.flushall() },
};

const YEAR = 400 * 86_400_000;
/** Marks a store, as a sidecar with this secret does. */
const setMark = async (store, { name, mark } = OWN, { onTrial = false } = {}) =>
  (await store.claim(MARK, {
    attempt: Buffer.from(mark.attempt, 'hex'), fingerprint: Buffer.from(`01${mark.fingerprint}`, 'hex'), leaseMs: onTrial ? 30_000 : 3_600_000, retentionMs: onTrial ? 90_000 : YEAR,
    onAbandoned: 'park', caller: Buffer.alloc(8), keyTag: Buffer.alloc(8), operation: `id secret ${name} of this store (not a request)`,
  })).token;

const newKey = () => randomBytes(8).toString('hex');

function service(store, storeOutage, idSecret, options = { authority: 'ignore' }) {
  const own = { executions: 0, warnings: '' };
  const oncegate = new Oncegate({ store, service: 'pay', idSecret, storeTimeout: '20s', warn: (message) => { own.warnings += `${message}\n`; } });
  own.oncegate = oncegate;
  const handle = withIdempotency(oncegate, { scope: 'single-tenant', storeOutage, ...options }, () => { own.executions += 1; return new Response('made by the library', { status: 201 }); });
  own.post = async (key = newKey(), body = '5', host = own.host ?? 'shop.test') => handle(new Request(`http://${host}/pay`, { method: 'POST', headers: { 'idempotency-key': key }, body }));
  own.replays = async (key) => {
    const [executed, response] = [own.executions, await own.post(key)];
    assert.deepEqual([response.status, response.headers.get('idempotent-replayed'), own.executions], [201, 'true', executed]);
    return response.text();
  };
  own.serves = async () => {
    const executed = own.executions;
    return (await own.post()).status === 201 && own.executions === executed + 1;
  };
  own.isRefused = async (key) => {
    const executed = own.executions;
    const { status, headers } = await own.post(key);
    assert.doesNotMatch(headers.get('idempotency-status') ?? '', /failed-open/);
    return status === 503 && own.executions === executed;
  };
  return own;
}

async function until(condition, what) {
  const deadline = Date.now() + 60_000;
  while (!(await condition())) {
    assert.ok(Date.now() < deadline, what);
    await pause(50);
  }
}

for (const [name, { url, open, empty }] of Object.entries(servers)) {
  test(`${name}: one effect with a sidecar, in both directions`, needsProgram, async () => {
    await empty();
    const own = service(open(), 'open', OWN.text, {});
    // The store is new. Only a sidecar marks it.
    assert.ok(await own.isRefused('first'));
    assert.match(own.warnings, new RegExp(`does not have the mark of the id secret ${OWN.name}, .*start a sidecar with this secret`));
    let sidecar = await startSidecar(url(), OWN.text, '--service=pay', '--scope=single-tenant');
    // The fingerprint has the host, too.
    own.host = sidecar.host;
    try {
      await until(async () => (await sidecar.post('first')).status === 201, 'the sidecar does not serve');
      assert.equal(sidecar.executions, 1);
      // The process that was refused serves from now on, and finds what the sidecar has stored.
      await until(own.serves, 'the library does not serve');
      assert.equal(await own.replays('first'), 'made by the service of the sidecar');
      assert.equal((await own.post('first', '6')).status, 422);
      assert.equal(await (await own.post('second')).text(), 'made by the library');
      const replayed = await sidecar.post('second');
      assert.deepEqual([replayed.headers.get('idempotent-replayed'), await replayed.text()], ['true', 'made by the library']);
      assert.equal((await sidecar.post('second', '6')).status, 422);
      assert.equal(sidecar.executions, 1);
      let runs = 0;
      const charge = idempotent(own.oncegate, { name: 'charge', key: (order) => order, errors: 'unknown' }, () => (runs += 1));
      assert.deepEqual([await charge('order-1'), await charge('order-1'), runs], [1, 1, 1]);
      for (const [wrong, why] of [[OTHER.text, `and this process has ${OTHER.name}`], [undefined, 'and this process has none']]) {
        const refused = service(open(), 'open', wrong);
        assert.ok((await refused.isRefused('first')) && (await refused.isRefused()));
        assert.ok(refused.warnings.includes(`belongs to the id secret ${OWN.name}, ${why}`), refused.warnings);
        assert.ok(!refused.warnings.includes(OWN.secret_hex) && !refused.warnings.includes(OTHER.secret_hex));
      }
    } finally {
      await sidecar.stop();
    }
    // The mark was not touched: a sidecar starts again, at once.
    sidecar = await startSidecar(url(), OWN.text, '--service=pay', '--scope=single-tenant', '--authority=ignore');
    try {
      assert.ok((await sidecar.post('third')).status === 201 && sidecar.executions === 1);
      assert.equal((await sidecar.post('third')).headers.get('idempotent-replayed'), 'true');
    } finally {
      await sidecar.stop();
    }
  });

  test(`${name}: the mark must be there, and not on trial`, async () => {
    await empty();
    const [store, own] = [open(), service(open(), 'open', IdSecret.parse(OWN.text))];
    const token = await setMark(store, OWN, { onTrial: true });
    for (const from = Date.now(); Date.now() < from + 1500; await pause(100)) assert.ok(await own.isRefused());
    assert.match(own.warnings, /waits until all others have noticed/);
    // The end of the trial is seen without a start.
    await store.renew(MARK, token, 3_600_000, YEAR);
    await until(own.serves, 'the end of the trial was not seen');
    // A mark that is gone is not put back here.
    await store.release(MARK, token, 3_600_000);
    await until(() => own.isRefused(), 'the loss of the mark was not seen');
    assert.equal((await store.lookup(MARK)).state, 'released');
    await setMark(store);
    await until(own.serves, 'the mark that came back was not seen');
    assert.doesNotMatch(own.warnings, /ends in/);
    // One that no sidecar has renewed for long is reported.
    await store.renew(MARK, (await store.lookup(MARK)).token, 1000, 30 * 86_400_000);
    await until(async () => (await own.serves()) && /mark of the id secret of the store ends in (29|30) days/.test(own.warnings), 'no warning');
  });

  test(`${name}: the mark of another secret refuses for good, unless it is on trial`, async () => {
    await empty();
    const [store, own, plain] = [open(), service(open(), 'open', OWN.text), service(open(), 'open')];
    await setMark(store, OTHER, { onTrial: true });
    assert.ok((await own.isRefused()) && (await plain.isRefused()));
    await empty();
    await until(plain.serves, 'the trial lapsed, and was not forgotten');
    await setMark(store);
    await until(own.serves, 'the trial of another secret lapsed, and was not forgotten');
    await empty();
    await setMark(store, OTHER);
    await until(() => own.isRefused(), 'the mark of another secret was not seen');
    await empty();
    for (const from = Date.now(); Date.now() < from + 3000; await pause(100)) assert.ok(await own.isRefused());
  });

  test(`${name}: sealed and keyed, and the host is compared`, async () => {
    await empty();
    await setMark(open());
    const { key_text: key } = vectors('seal/vectors/sealed.json');
    const own = () => service(new SealedStore(open(), Keyring.parse(key)), 'closed', OWN.text, {});
    assert.equal((await own().post('k')).status, 201);
    assert.equal(await own().replays('k'), 'made by the library');
    assert.equal((await (await own().post('k', '5', 'other.test')).json()).type, 'urn:oncegate:problem:host-differs');
    assert.equal((await (await own().post('k', '6')).json()).type, 'urn:oncegate:problem:key-reused');
  });

  test(`${name}: a look ends to count by the wall clock, too`, async () => {
    await empty();
    const own = service(open(), 'open');
    assert.ok(await own.serves());
    await setMark(open());
    // As after a suspension of the machine, during which the monotonic clock stands still.
    const { now } = Date;
    mock.method(Date, 'now', () => now() + 3_600_000);
    try {
      assert.ok(await own.isRefused());
    } finally {
      mock.restoreAll();
    }
  });

  test(`${name}: nothing is executed on a marked store`, async () => {
    await empty();
    const store = open();
    const early = service(open(), 'open');
    assert.equal((await early.post('first')).status, 201);
    const token = await setMark(store);
    const late = service(open(), 'open');
    assert.ok(await late.isRefused());
    assert.ok(await late.isRefused('first'));
    const charge = idempotent(late.oncegate, { name: 'charge', key: (order) => order, errors: 'unknown' }, () => assert.fail('the function was executed'));
    await assert.rejects(charge('order-1'), (error) => error instanceof StoreSetupError && /id secret/.test(error.message));
    // A process that found no mark before looks again while it is used.
    await until(() => early.isRefused(), 'the mark was not seen');
    // A store that loses its mark still has keyed records.
    await store.release(MARK, token, 3_600_000);
    for (const lostAt = Date.now(); Date.now() < lostAt + 5000; await pause(100)) {
      assert.ok(await early.isRefused());
      assert.ok(await late.isRefused());
    }
    // A released mark binds no process that is started now.
    assert.equal((await service(open(), 'closed').post()).status, 201);
  });

  test(`${name}: a slow claim looks again`, async () => {
    await empty();
    const [store, own] = [open(), open()];
    let looks = 0;
    const slow = Object.assign(Object.create(store), {
      claim: async (...args) => { await setMark(own); await pause(4500); return store.claim(...args); },
      lookup: async (id) => { if (id.equals(MARK)) looks += 1; return store.lookup(id); },
    });
    assert.ok(await service(slow, 'open').isRefused('slow'));
    assert.equal(looks, 2);
    // The key is free again.
    const { token } = await own.lookup(MARK);
    await own.release(MARK, token, 3_600_000);
    assert.equal((await service(open(), 'closed').post('slow')).status, 201);
  });

  test(`${name}: a mark that cannot be read`, async () => {
    await empty();
    const store = open();
    let looks = 0;
    let failure;
    const away = () => Object.assign(Object.create(store), {
      lookup: async (id) => {
        if (id.equals(MARK)) { looks += 1; if (failure !== undefined) throw failure; }
        return store.lookup(id);
      },
    });
    const early = service(away(), 'closed');
    assert.equal((await early.post()).status, 201);
    failure = new StoreUnavailableError('the node is down');
    const seen = looks;
    await until(async () => {
      assert.equal((await early.post()).status, 201);
      return looks >= seen + 2;
    }, 'it does not look again');
    assert.ok(await service(away(), 'closed').isRefused());
    // A mark that may not be read is no outage.
    failure = new StoreSetupError('the user lacks a right');
    assert.ok(await service(away(), 'open').isRefused());
    await until(() => early.isRefused(), 'a mark that may not be read');
  });
}

test('a transaction on a marked database', async () => {
  await pool.query('CREATE DATABASE marked');
  const own = new pg.Pool({ connectionString: postgres.url.replace(/postgres$/, 'marked') });
  own.on('error', () => undefined);
  try {
    await own.query(schema());
    let runs = 0;
    const pay = async (slowly, idSecret, key = newKey(), service = 'shop') => {
      const client = await own.connect();
      const query = async (text, values) => {
        if (slowly && /oncegate\.claim\(/.test(text)) { await setMark(new PostgresStore(own)); await pause(4500); }
        return client.query(text, values);
      };
      try { return await transaction({ query }, key, () => (runs += 1), { name: 'pay', service, idSecret }); } finally { client.release(); }
    };
    const refused = (error) => error instanceof StoreSetupError && /id secret/.test(error.message);
    await pay(false);
    await assert.rejects(pay(true), refused);
    await own.query('DELETE FROM oncegate.records');
    await assert.rejects(pay(false), refused);
    await assert.rejects(pay(false, OWN.text), /does not have the mark/);
    await setMark(new PostgresStore(own), OWN, { onTrial: true });
    await assert.rejects(pay(false, OWN.text), /waits until all others have noticed/);
    await own.query('DELETE FROM oncegate.records');
    await setMark(new PostgresStore(own));
    assert.deepEqual([await pay(false, OWN.text, 'order-1'), await pay(false, IdSecret.parse(OWN.text), 'order-1'), runs], [2, 2, 2]);
    await assert.rejects(pay(false, OTHER.text, 'order-1'), new RegExp(OTHER.name));
    await assert.rejects(pay(false, undefined, 'order-1'), refused);
    // A function with the name of the transaction has other records, in the same way as without a secret.
    assert.equal((await own.query('SELECT count(*) FROM oncegate.records')).rows[0].count, '2');
    // A database is shared.
    await assert.rejects(pay(false, OWN.text, 'order-1', null), { name: 'SettingsError', message: 'service: a database is shared; name your service, so that others do not share its keys' });
    assert.equal(runs, 2);
  } finally {
    await own.end();
  }
});

test('a store in memory needs no mark', async () => {
  const store = new MemoryStore();
  const [keyed, plain] = [service(store, 'closed', OWN.text), service(store, 'closed')];
  assert.ok((await keyed.post('k')).status === 201 && (await keyed.replays('k')) === 'made by the library');
  // Without the secret it is another key. All programs on one store have the same secret.
  assert.ok((await plain.post('k')).status === 201 && store.size === 2);
});
