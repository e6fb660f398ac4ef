// The store loses replies, or says something else than it was asked for; loggers fail; many wait.
import assert from 'node:assert/strict';
import { randomBytes } from 'node:crypto';
import { execFileSync } from 'node:child_process';
import { createServer } from 'node:http';
import { once } from 'node:events';
import { mock, test } from 'node:test';
import { setTimeout as pause } from 'node:timers/promises';
import { attemptOf, encodeResponse, idempotent, MemoryStore, node, Oncegate, PostgresStore, StoreFullError, StoreUnavailableError, withIdempotency } from '../dist/esm/index.js';

const GONE = () => Object.assign(new Error('read ECONNRESET'), { code: 'ECONNRESET' });
const REFUSED = () => Object.assign(new Error('connect ECONNREFUSED'), { code: 'ECONNREFUSED' });

/** A store on a server, in memory. What `before` and `after` of a command throw is the failure of the command. */
function remote(claimsMayCommitLate, { before = {}, after = {} } = {}) {
  const memory = new MemoryStore();
  const ends = [];
  const store = { name: claimsMayCommitLate ? 'postgres' : 'redis', claimsMayCommitLate, memory, ends };
  for (const name of ['claim', 'renew', 'lookup', 'complete', 'release']) {
    store[name] = async (...args) => {
      await before[name]?.(...args);
      const reply = await memory[name](...args);
      if (name === 'complete' || name === 'release') ends.push(`${name} ${reply}`);
      await after[name]?.(reply);
      return reply;
    };
  }
  return store;
}

async function until(condition, what) {
  const deadline = Date.now() + 20_000;
  while (!(await condition())) {
    assert.ok(Date.now() < deadline, `no ${what} in time`);
    await pause(5);
  }
}

for (const claimsMayCommitLate of [true, false]) {
  test(`a lost reply to a claim does not free a key whose completion is late (claims may commit late: ${claimsMayCommitLate})`, async () => {
    let claims = 0;
    let isAway = true;
    const store = remote(claimsMayCommitLate, {
      after: { claim: () => { claims += 1; if (claims === 1) throw GONE(); } },
      before: { complete: () => { if (isAway) throw REFUSED(); } },
    });
    const oncegate = new Oncegate({ store, service: 'x', warn: () => undefined });
    let effects = 0;
    const pay = idempotent(oncegate, { name: 'pay', key: (key) => key, errors: 'unknown', wait: 0 }, () => { effects += 1; return effects; });
    assert.equal(await pay('k'), 1);
    const { engine } = oncegate;
    // What looks for the lost claim is called here, and not at its time.
    const open = () => [...[...engine.unsettled.values()].flatMap((ofRecord) => [...ofRecord]), ...engine.lost];
    for (const { settle } of open()) await settle();
    isAway = false;
    assert.equal(await oncegate.drain(10_000), true);
    assert.deepEqual(store.ends, ['complete done']);
    const other = new Oncegate({ store, service: 'x', warn: () => undefined });
    const again = idempotent(other, { name: 'pay', key: (key) => key, errors: 'unknown', wait: 0 }, () => { effects += 1; return effects; });
    assert.equal(await again('k'), 1);
    assert.equal(effects, 1);
  });
}

for (const storeOutage of ['closed', 'open']) {
  test(`a lost claim of another request leaves a completed key as it is (storeOutage: ${storeOutage})`, async () => {
    let lose = 0;
    const store = remote(true, { before: { claim: () => { if (lose > 0) { lose -= 1; throw GONE(); } } } });
    const oncegate = new Oncegate({ store, service: 'x', warn: () => undefined });
    let effects = 0;
    const handler = withIdempotency(oncegate, { scope: 'single-tenant', storeOutage, wait: 0 }, async () => { effects += 1; return Response.json({ effects }); });
    const send = async (body) => {
      const response = await handler(new Request('http://a.test/', { method: 'POST', headers: { 'idempotency-key': 'k' }, body }));
      return [response.status, await response.text()];
    };
    const first = await send('a');
    assert.equal(first[0], 200);
    lose = 2;
    await send('b');
    const before = effects;
    assert.deepEqual(await send('a'), first);
    assert.equal(effects, before);
    assert.equal((await send('b'))[0], 422);
  });
}

test('a lost reply to a claim of a record of another one is not an outage', async () => {
  let lose = 0;
  const store = remote(true, { before: { claim: () => { if (lose > 0) { lose -= 1; throw GONE(); } } } });
  const gate = () => new Oncegate({ store, service: 'x', warn: () => undefined });
  let effects = 0;
  let go;
  const gone = new Promise((resolve) => { go = resolve; });
  const options = { scope: 'single-tenant', storeOutage: 'open', wait: 0 };
  const run = async () => { effects += 1; await gone; return Response.json({}); };
  const [one, other] = [withIdempotency(gate(), options, run), withIdempotency(gate(), options, run)];
  const request = () => new Request('http://a.test/', { method: 'POST', headers: { 'idempotency-key': 'k' }, body: 'a' });
  const first = one(request());
  await until(() => effects === 1, 'execution');
  lose = 1;
  assert.equal((await other(request())).status, 503);
  assert.equal(effects, 1);
  assert.equal((await other(request())).status, 409);
  go();
  assert.equal((await first).status, 200);
  assert.equal((await other(request())).headers.get('idempotent-replayed'), 'true');
});

test('a logger that fails neither ends the process nor keeps a key', async () => {
  const fallback = mock.method(console, 'warn', () => undefined);
  try {
    for (const warn of [() => { throw new TypeError('no private member'); }, async () => { throw new Error('the disk is full'); }]) {
      const oncegate = new Oncegate({ store: new MemoryStore(), warn });
      const handler = withIdempotency(oncegate, { scope: 'single-tenant', wait: 0 }, async () => { throw new Error('failed'); });
      const request = () => new Request('http://a.test/', { method: 'POST', headers: { 'idempotency-key': 'k' } });
      const first = await handler(request()).then(({ status }) => status, (error) => error.message);
      assert.ok(first === 500 || first === 'failed', String(first));
      assert.equal(oncegate.engine.running.size, 0);
      const server = createServer(node(oncegate, { scope: 'single-tenant', wait: 0 }, () => { throw new Error('failed'); })).listen(0, '127.0.0.1');
      await once(server, 'listening');
      const url = `http://127.0.0.1:${server.address().port}/`;
      assert.equal((await fetch(url, { method: 'POST', headers: { 'idempotency-key': 'other' } })).status, 500);
      server.closeAllConnections();
      server.close();
      assert.equal(await oncegate.drain(5000), true);
    }
    assert.ok(fallback.mock.callCount() >= 2);
    assert.match(fallback.mock.calls[0].arguments[0], /^oncegate: /);
  } finally {
    fallback.mock.restore();
  }
});

test('tens of thousands of duplicates wait for one attempt, which ends', async () => {
  const oncegate = new Oncegate({ store: new MemoryStore(), warn: () => undefined });
  let go;
  const gone = new Promise((resolve) => { go = resolve; });
  const pay = idempotent(oncegate, { name: 'pay', key: () => 'k', errors: 'unknown', wait: 1 }, async () => { await gone; return 'paid'; });
  const first = pay();
  for (let turn = 0; turn < 30; turn += 1) await Promise.allSettled(Array.from({ length: 900 }, () => pay()));
  go();
  assert.equal(await first, 'paid');
  assert.equal(await pay(), 'paid');
});

test('the wait of a duplicate has no timer once the attempt has ended', async () => {
  const oncegate = new Oncegate({ store: new MemoryStore(), warn: () => undefined });
  let go;
  const gone = new Promise((resolve) => { go = resolve; });
  const pay = idempotent(oncegate, { name: 'pay', key: () => 'k', errors: 'unknown', wait: '1h' }, async () => { await gone; return 'paid'; });
  const timers = () => process.getActiveResourcesInfo().filter((name) => name === 'Timeout').length;
  const before = timers();
  const calls = [pay(), pay()];
  await until(() => oncegate.engine.waiters === 1, 'duplicate that waits');
  go();
  assert.deepEqual(await Promise.all(calls), ['paid', 'paid']);
  assert.ok(timers() <= before);
});

test('lost claims count among the attempts without an end, and are not looked for while the store is left alone', async () => {
  let isAway = false;
  let sent = 0;
  const store = remote(false, { before: { claim: () => { if (isAway) throw GONE(); }, lookup: () => { sent += 1; if (isAway) throw GONE(); } } });
  const { engine } = new Oncegate({ store, service: 'x', warn: () => undefined });
  const policy = { leaseMs: 60_000, retentionMs: 60_000, waitMs: 0, onAbandoned: 'park' };
  const claimed = () => ({ id: randomBytes(32), fingerprint: Buffer.concat([Buffer.of(1), Buffer.alloc(32)]), callerTag: Buffer.alloc(8), keyTag: Buffer.alloc(8), operation: 'x' });
  const first = await engine.claim(claimed(), policy);
  await first.permit.complete('completed', encodeResponse({ status: 200, headers: [], trailers: [], body: Buffer.alloc(0) }));
  isAway = true;
  for (let turn = 0; turn < 2; turn += 1) await assert.rejects(engine.claim(claimed(), policy));
  assert.ok(engine.lost.size >= 1);
  const before = sent;
  for (const { settle } of engine.lost) assert.equal(await settle(), false);
  assert.equal(sent, before);
  isAway = false;
  // Those that have executed nothing keep no other key from executing.
  for (let at = 0; engine.lost.size < 65_536; at += 1) engine.lost.add({ settle: async () => true, hasExecuted: false, at });
  await until(() => engine.claim(claimed(), policy).then(({ outcome }) => outcome === 'execute', () => false), 'execution');
  engine.lostExecuted = 65_536;
  await assert.rejects(engine.claim(claimed(), policy), { name: 'StoreFullError', message: /too many attempts/ });
  engine.isClosed = true;
});

test('drain waits for a claim that is under way, and for a duplicate that waits for another process', async () => {
  let mayClaim = Promise.resolve();
  const store = remote(true, { before: { claim: () => mayClaim } });
  const [here, there] = [0, 0].map(() => new Oncegate({ store, service: 'x', warn: () => undefined }));
  const ran = [];
  const of = (oncegate, work) => idempotent(oncegate, { name: 'pay', key: (key) => key, errors: 'release', wait: '30s' }, work);
  const run = of(here, async (key) => { ran.push(`begun ${key}`); await pause(50); ran.push(`ended ${key}`); return 1; });
  let [fail, go] = [];
  const elsewhere = of(there, () => new Promise((_, reject) => { fail = reject; }))('b').catch(() => undefined);
  await until(() => fail, 'function');
  const duplicate = run('b');
  await until(() => here.engine.waiters === 1, 'waiting duplicate');
  mayClaim = new Promise((resolve) => { go = resolve; });
  const claiming = run('a');
  await pause(20);
  let isDrained = false;
  const draining = here.drain('30s').finally(() => { isDrained = true; });
  await pause(100);
  assert.deepEqual([isDrained, ran], [false, []]);
  await assert.rejects(run('c'), /shutting down/);
  go();
  await claiming;
  await pause(50);
  assert.equal(isDrained, false);
  fail(new Error('nothing took effect'));
  assert.equal(await draining, true);
  assert.deepEqual(ran, ['begun a', 'ended a', 'begun b', 'ended b']);
  await Promise.all([duplicate, elsewhere]);
});

test('drain tries once without any time, also while a handler runs, and again and again with some', async () => {
  let [isAway, completions] = [true, 0];
  const store = remote(true, { before: { complete: () => { completions += 1; if (isAway) throw REFUSED(); } } });
  const oncegate = new Oncegate({ store, service: 'x', warn: () => undefined });
  const ends = new Map();
  const pay = idempotent(oncegate, { name: 'pay', key: (key) => key, errors: 'unknown', wait: 0 }, (key) => (key.startsWith('slow') ? new Promise((resolve) => { ends.set(key, resolve); }) : key));
  assert.equal(await pay('k'), 'k');
  const slow = pay('slow');
  await until(() => ends.size === 1, 'handler');
  assert.equal(oncegate.engine.unsettledCount, 1);
  isAway = false;
  assert.equal(await oncegate.drain(0), false);
  assert.equal(oncegate.engine.unsettledCount, 0);
  assert.deepEqual(store.ends, ['complete done']);
  isAway = true;
  const before = completions;
  const draining = oncegate.drain('20s');
  ends.get('slow')('done');
  assert.equal(await slow, 'done');
  await until(() => completions > before + 4, 'tries');
  isAway = false;
  assert.equal(await draining, true);
});

test('shutdown stores what the store takes again while a response without an end is open', async () => {
  let isAway = true;
  const store = remote(false, { before: { complete: (_, __, state) => { if (isAway && state === 'completed') throw REFUSED(); } } });
  const oncegate = new Oncegate({ store, service: 'x', warn: () => undefined });
  // Its usual tries have pauses of seconds after a while.
  oncegate.engine.settleLater = () => undefined;
  const server = createServer(node(oncegate, { scope: 'single-tenant', wait: 0 }, (req, res) => {
    if (req.url === '/events') res.writeHead(200, { 'content-type': 'text/event-stream' }).write('data: 1\n\n');
    else res.end('paid');
  })).listen(0, '127.0.0.1');
  await once(server, 'listening');
  const url = `http://127.0.0.1:${server.address().port}`;
  const events = await fetch(`${url}/events`, { method: 'POST', headers: { 'idempotency-key': 'events' } });
  const paid = await fetch(url, { method: 'POST', headers: { 'idempotency-key': 'k', connection: 'close' } });
  assert.equal(paid.headers.get('idempotency-status'), 'not-stored');
  const shutdown = oncegate.shutdown(server, '1h');
  isAway = false;
  await until(() => oncegate.engine.unsettledCount === 0, 'end that is stored');
  await events.body.cancel();
  assert.equal(await shutdown, true);
});

test('shutdown drains before its time is over, also while a response without an end is open', async () => {
  const oncegate = new Oncegate({ store: remote(false), service: 'x', warn: () => undefined });
  const server = createServer(node(oncegate, { scope: 'single-tenant', wait: 0 }, (req, res) => {
    res.writeHead(200, { 'content-type': 'text/event-stream' }).write('data: 1\n\n');
  })).listen(0, '127.0.0.1');
  await once(server, 'listening');
  const events = await fetch(`http://127.0.0.1:${server.address().port}`, { method: 'POST', headers: { 'idempotency-key': 'k' } });
  const given = [];
  const drain = oncegate.engine.drain.bind(oncegate.engine);
  oncegate.engine.drain = (ms) => { given.push(ms); return drain(ms); };
  assert.equal(await oncegate.shutdown(server, 400), false);
  assert.ok(given.length === 1 && given[0] > 0, String(given));
  await events.body.cancel();
  server.closeAllConnections();
});

for (const [name, errors, isOutage] of [
  ['an answer of the server is no outage', [
    Object.assign(new Error('LOADING Redis is loading the dataset in memory'), { name: 'ReplyError' }),
    new Error('NOAUTH Authentication required.'),
    new Error('ERR max number of clients reached'),
    Object.assign(new Error('sorry, too many clients already'), { code: '53300' }),
    Object.assign(new Error('the database system is starting up'), { code: '57P03' }),
    Object.assign(new Error('canceling statement due to statement timeout'), { code: '57014' }),
    Object.assign(new Error('no such database'), { code: '08P01', severity: 'FATAL' }),
  ], false],
  ['a connection that was made and is broken each time is no outage', [
    GONE(),
    Object.assign(new Error('write EPIPE'), { code: 'EPIPE' }),
    Object.assign(new Error('read EHOSTUNREACH'), { code: 'EHOSTUNREACH', syscall: 'read' }),
    Object.assign(new Error('terminating connection due to administrator command'), { code: '57P01' }),
    new Error('Connection terminated unexpectedly'),
    new Error('Socket closed unexpectedly'),
  ], false],
  ['a certificate that is not trusted, and an error of this process, are no outage', [
    Object.assign(new Error('self-signed certificate'), { code: 'DEPTH_ZERO_SELF_SIGNED_CERT' }),
    Object.assign(new Error("Hostname/IP does not match certificate's altnames"), { code: 'ERR_TLS_CERT_ALTNAME_INVALID' }),
    new Error('The server does not support SSL connections'),
    new Error('SASL: SCRAM-SERVER-FIRST-MESSAGE: client password must be a string'),
    new Error('Cannot use a pool after calling end on the pool'),
    new Error('timeout exceeded when trying to connect'),
    ...['ENOBUFS', 'ENOMEM', 'EAGAIN', 'EADDRNOTAVAIL', 'EACCES', 'EPERM', 'EINVAL', 'EXYZ'].map((code) => Object.assign(new Error(`connect ${code}`), { code, syscall: 'connect' })),
    Object.assign(new AggregateError([REFUSED(), Object.assign(new Error('connect EACCES'), { code: 'EACCES', syscall: 'connect' })]), { code: 'ECONNREFUSED' }),
    new TypeError("Cannot read properties of undefined (reading '0')"),
  ], false],
  ['a connection that cannot be made is an outage', [
    REFUSED(),
    Object.assign(new Error('connect EHOSTUNREACH'), { code: 'EHOSTUNREACH', syscall: 'connect' }),
    new Error('Connection is closed.'),
    Object.assign(new Error('connect ENOENT /run/postgresql/.s.PGSQL.5432'), { code: 'ENOENT', syscall: 'connect' }),
    Object.assign(new AggregateError([]), { code: 'EHOSTUNREACH' }),
    new Error('Connection terminated due to connection timeout'),
    new Error('Reached the max retries per request limit (which is 20). Refer to "maxRetriesPerRequest" option for details.'),
    new Error('Too many Cluster redirections. Last error: Error: Connection is closed.'),
    new StoreUnavailableError('a store of another kind is away'),
    Object.assign(new Error('connection failure'), { code: '08006' }),
  ], true],
]) {
  test(`storeOutage open: ${name}`, async () => {
    for (const error of errors) {
      for (const claimsMayCommitLate of [true, false]) {
        const oncegate = new Oncegate({ store: remote(claimsMayCommitLate, { before: { claim: () => { throw error; } } }), storeTimeout: '300ms', service: 'x', warn: () => undefined });
        let runs = 0;
        const handler = withIdempotency(oncegate, { scope: 'single-tenant', storeOutage: 'open', wait: 0 }, () => { runs += 1; return new Response('x'); });
        // More often than a breaker needs, with other keys and with the same one.
        for (let at = 0; at < 8; at += 1) {
          const ask = async () => (await handler(new Request('http://a.test/', { method: 'POST', headers: { 'idempotency-key': `k${at % 5}` }, body: 'x' }))).status;
          // A time-out does not count while the event loop is late, as it may be on a busy machine.
          if (isOutage) await until(async () => (await ask()) === 200, error.message);
          else assert.equal(await ask(), 503, error.message);
        }
        assert.equal(runs, isOutage ? 8 : 0, error.message);
        oncegate.engine.isClosed = true;
      }
    }
  });
}

test('clients that hold all file descriptors of the process do not switch the protection off (storeOutage: open)', () => {
  const program = `
    import { once } from 'node:events';
    import { closeSync, openSync } from 'node:fs';
    import { connect, createServer } from 'node:net';
    import { MemoryStore, Oncegate, withIdempotency } from ${JSON.stringify(new URL('../dist/esm/index.js', import.meta.url))};
    const server = createServer((socket) => socket.resume()).listen(0, '127.0.0.1');
    await once(server, 'listening');
    const store = new MemoryStore();
    const claim = store.claim.bind(store);
    store.name = 'redis';
    store.claim = async (...args) => {
      const socket = connect(server.address().port, '127.0.0.1');
      await once(socket, 'connect');
      socket.destroy();
      return claim(...args);
    };
    const oncegate = new Oncegate({ store, service: 'shop' });
    let runs = 0;
    const handler = withIdempotency(oncegate, { scope: 'single-tenant', storeOutage: 'open', wait: 0 }, () => { runs += 1; return new Response('x'); });
    const ask = async () => (await handler(new Request('http://a.example/pay', { method: 'POST', body: '{}', headers: { 'idempotency-key': 'pay-1' } }))).status;
    const statuses = [await ask()];
    const held = [];
    try { for (;;) held.push(openSync('/dev/null', 'r')); } catch {}
    for (let i = 0; i < 3; i += 1) statuses.push(await ask());
    held.forEach((one) => closeSync(one));
    process.stdout.write(JSON.stringify({ statuses, runs }));
    process.exit();
  `;
  const limited = ['-c', 'ulimit -n 200 && exec "$0" --input-type=module -e "$1"', process.execPath, program];
  assert.deepEqual(JSON.parse(execFileSync('sh', limited, { encoding: 'utf8' })), { statuses: [200, 503, 503, 503], runs: 1 });
});

test('a retry of a claim whose reply was lost is not executed while the store is reached, also with storeOutage open', async () => {
  for (const again of [GONE(), new StoreFullError('PostgreSQL is a standby, or only reads', true), Object.assign(new Error('starting up'), { code: '57P03' })]) {
    let failure = GONE();
    const oncegate = new Oncegate({ store: remote(true, { before: { claim: () => { if (failure !== undefined) throw failure; } } }), storeTimeout: '300ms', service: 'x', warn: () => undefined });
    let runs = 0;
    const handler = withIdempotency(oncegate, { scope: 'single-tenant', storeOutage: 'open', wait: 0 }, () => { runs += 1; return new Response('x'); });
    const ask = async () => (await handler(new Request('http://a.test/', { method: 'POST', headers: { 'idempotency-key': 'k' }, body: 'x' }))).status;
    assert.equal(await ask(), 503);
    failure = again;
    for (let at = 0; at < 4; at += 1) assert.equal(await ask(), 503, again.message);
    assert.equal(runs, 0);
    failure = REFUSED();
    assert.equal(await ask(), 200);
    failure = undefined;
    assert.deepEqual([await ask(), runs], [200, 2]);
    assert.equal(await oncegate.drain(5000), true);
  }
});

for (const [name, run] of [
  ['begins while the claim is under way', async ({ ask, claims, finish, isAway }) => {
    const [first, second] = [ask(), ask()];
    await until(() => claims.length === 2, 'claims');
    claims[0]();
    await until(() => finish.length === 1, 'handler');
    isAway.now = true;
    claims[1]();
    assert.equal(await second, 503);
    finish[0]();
    assert.equal(await first, 200);
  }],
  ['begins and ends while the claim is under way', async ({ ask, claims, finish, isAway }) => {
    const [first, second] = [ask(), ask()];
    await until(() => claims.length === 2, 'claims');
    claims[0]();
    await until(() => finish.length === 1, 'handler');
    finish[0]();
    assert.equal(await first, 200);
    isAway.now = true;
    claims[1]();
    assert.equal(await second, 503);
  }],
  ['has an end that is stored while the claim is under way', async ({ ask, claims, finish, isAway }) => {
    const first = ask();
    await until(() => claims.length === 1, 'claim');
    claims[0]();
    await until(() => finish.length === 1, 'handler');
    isAway.now = true;
    finish[0]();
    assert.equal(await first, 200);
    isAway.now = false;
    const second = ask();
    await until(() => claims.length === 2, 'claim');
    isAway.now = true;
    claims[1]();
    assert.equal(await second, 503);
  }],
  ['was found in another process while the request waited', async ({ ask, claims, isAway, other }) => {
    const theirs = await other();
    const second = ask();
    await until(() => claims.length === 1, 'claim');
    claims[0]();
    await until(() => claims.length === 2, 'second claim of the waiting request');
    isAway.now = true;
    claims[1]();
    assert.equal(await second, 503);
    assert.equal(await theirs.permit.complete('tombstone'), 'done');
  }],
]) {
  test(`storeOutage open: a key whose owner ${name} is not executed`, async () => {
    const [claims, finish, isAway] = [[], [], { now: false }];
    let [isHeld, unprotected, claimed] = [true, 0, undefined];
    const use = () => { if (isAway.now) throw REFUSED(); };
    const held = async () => {
      if (isHeld) await new Promise((resolve) => { claims.push(resolve); });
      use();
    };
    const store = remote(false, { before: { claim: held, complete: use, lookup: use, renew: use } });
    const oncegate = new Oncegate({ store, service: 'x', warn: () => undefined });
    const handler = withIdempotency(oncegate, { scope: 'single-tenant', storeOutage: 'open', wait: '20s' }, async (request) => {
      if (attemptOf(request) === undefined) unprotected += 1;
      else await new Promise((resolve) => { finish.push(resolve); });
      return new Response('x');
    });
    const claim = oncegate.engine.claim.bind(oncegate.engine);
    oncegate.engine.claim = (...args) => { claimed = args; return claim(...args); };
    const ask = async (key = 'k') => (await handler(new Request('http://a.test/', { method: 'POST', headers: { 'idempotency-key': key }, body: 'x' }))).status;
    // A request that was not granted has shown what identifies it.
    const other = async () => {
      [isAway.now, isHeld] = [true, false];
      assert.equal(await ask(), 200);
      [isAway.now, isHeld, unprotected] = [false, true, 0];
      return new Oncegate({ store: store.memory, service: 'x' }).engine.claim(...claimed);
    };
    await run({ ask, claims, finish, isAway, other });
    assert.equal(unprotected, 0);
    assert.equal(oncegate.engine.contests.size, 0);
    // Nothing is known of another key.
    [isAway.now, isHeld] = [true, false];
    assert.equal(await ask('free'), 200);
    oncegate.engine.isClosed = true;
  });
}

const never = () => new Promise(() => undefined);

/** Requests to a store with a short time-out and `storeOutage: 'open'`. `ask` returns the status, and if it was executed without protection. */
function openOn(store) {
  const oncegate = new Oncegate({ store, service: 'x', storeTimeout: '100ms', warn: () => undefined });
  const handler = withIdempotency(oncegate, { scope: 'single-tenant', storeOutage: 'open', wait: 0 }, () => new Response('x'));
  const ask = async (key) => {
    const { status, headers } = await handler(new Request('http://a.test/', { method: 'POST', headers: { 'idempotency-key': key }, body: 'x' }));
    return `${status} ${headers.get('idempotency-status')?.split(';')[0] ?? 'protected'}`;
  };
  return { oncegate, ask };
}

/** The event loop may be late by itself on a busy machine. */
const opensAt = (ask) => until(async () => (await ask(randomBytes(8).toString('hex'))) === '200 failed-open', 'execution without protection');

test('storeOutage open: descriptors that were used up a moment ago keep other errors from counting', async () => {
  let error = Object.assign(new Error('connect EMFILE'), { code: 'EMFILE', syscall: 'connect' });
  const { oncegate, ask } = openOn(remote(false, { before: { claim: () => { throw error; } } }));
  const { now } = performance;
  let skipped = 0;
  performance.now = () => now.call(performance) + skipped;
  try {
    assert.equal(await ask('a'), '503 refused');
    error = REFUSED();
    for (const key of ['a', 'b', 'c', 'd']) assert.equal(await ask(key), '503 refused');
    skipped = 10_000;
    assert.equal(await ask('a'), '200 failed-open');
    error = Object.assign(new AggregateError([Object.assign(new Error(''), { code: 'ENFILE' })]), { code: 'EHOSTUNREACH' });
    skipped += 2000;
    for (const key of ['a', 'b', 'c', 'd']) assert.equal(await ask(key), '503 refused');
    skipped += 20_000;
    error = REFUSED();
    assert.equal(await ask('e'), '200 failed-open');
  } finally {
    // Other tests must not find them used up.
    skipped += 20_000;
    oncegate.engine.isClosed = true;
  }
});

const block = (ms) => { const end = performance.now() + ms; while (performance.now() < end); };

test('storeOutage open: a time-out of a blocked event loop is no outage, and replies that are there count', async () => {
  const base = remote(false);
  const { port1, port2 } = new MessageChannel();
  let [blocks, answers] = [true, false];
  // Messages are read where replies of servers are.
  const replies = [];
  port2.on('message', () => { replies.shift()(); });
  const store = { ...base, claim: async (...args) => {
    if (blocks) process.nextTick(block, 400);
    if (!answers) return never();
    const read = new Promise((resolve) => { replies.push(resolve); });
    port1.postMessage('');
    await read;
    return base.memory.claim(...args);
  } };
  const { oncegate, ask } = openOn(store);
  try {
    for (const key of ['a', 'b', 'c', 'd']) assert.equal(await ask(key), '503 refused');
    // What has opened the circuit breaker stays what it was.
    assert.ok(oncegate.engine.outages.get('').strikes >= 3);
    assert.equal(await ask('e'), '503 refused');
    blocks = false;
    await opensAt(ask);
    [blocks, answers] = [true, true];
    await until(async () => (await ask('f')) === '200 protected', 'claim');
    assert.equal(await ask('g'), '200 protected');
  } finally {
    port1.close();
    oncegate.engine.isClosed = true;
  }
});

test('storeOutage open: a store that answers other requests is not away', async () => {
  const slow = new Set();
  const store = remote(false, { before: { claim: (id) => (slow.has(id.toString('hex')) ? never() : undefined) } });
  const { oncegate, ask } = openOn(store);
  const { claim } = store;
  store.claim = (id, own) => { if (slow.size === 0) slow.add(id.toString('hex')); return claim(id, own); };
  let [result, others] = [undefined, 0];
  void ask('slow').then((own) => { result = own; });
  while (result === undefined) {
    assert.equal(await ask(`k${others}`), '200 protected');
    others += 1;
    await pause(5);
  }
  assert.equal(result, '503 refused');
  oncegate.engine.isClosed = true;
});

test('storeOutage open: a pool without a free connection is no outage', async () => {
  const pool = { totalCount: 1, idleCount: 0, waitingCount: 0, options: { max: 1 }, query: never };
  const { oncegate, ask } = openOn(new PostgresStore(pool));
  for (const key of ['a', 'b', 'c', 'd']) assert.equal(await ask(key), '503 refused');
  [pool.idleCount, pool.waitingCount] = [1, 1];
  for (const key of ['a', 'e']) assert.equal(await ask(key), '503 refused');
  pool.waitingCount = 0;
  await opensAt(ask);
  oncegate.engine.isClosed = true;
});

test('storeOutage open: a process that has not read the mark of an id secret executes no key of another node', async () => {
  let [isMarkAway, isAway] = [true, false];
  const isMark = (id) => id.toString('hex').startsWith('3a75297e');
  const base = remote(false, { before: { lookup: (id) => { if (isMark(id) && isMarkAway) throw REFUSED(); }, claim: () => { if (isAway) throw REFUSED(); } } });
  const ofParts = (partOf) => openOn({ ...base, partOf });
  const { oncegate, ask } = ofParts((id) => (isMark(id) ? 'one' : 'other'));
  for (const key of ['a', 'b', 'c', 'd']) assert.equal(await ask(key), '503 refused');
  isMarkAway = false;
  await until(async () => (await ask('e')) === '200 protected', 'look');
  // From now on, it is known that the store has no mark.
  [isMarkAway, isAway] = [true, true];
  assert.equal(await ask('f'), '200 failed-open');
  const same = ofParts(() => 'one');
  assert.equal(await same.ask('g'), '200 failed-open');
  for (const { engine } of [oncegate, same.oncegate]) engine.isClosed = true;
});

test('the signal of an attempt aborts when another attempt has the record, and not when its outcome has become unknown', async () => {
  for (const [onAbandoned, isAborted] of [['park', false], ['reexecute', true]]) {
    let now = 1000;
    const store = new MemoryStore({ now: () => now });
    const { engine } = new Oncegate({ store, service: 'x', warn: () => undefined });
    const policy = { leaseMs: 60_000, retentionMs: 3_600_000, waitMs: 0, onAbandoned };
    const claimed = { id: randomBytes(32), fingerprint: Buffer.concat([Buffer.of(1), Buffer.alloc(32)]), callerTag: Buffer.alloc(8), keyTag: Buffer.alloc(8), operation: 'x' };
    const { permit } = await engine.claim(claimed, policy);
    const { signal } = permit;
    now += 60_001;
    const retry = await new Oncegate({ store, service: 'x', warn: () => undefined }).engine.claim(claimed, policy);
    assert.equal(retry.outcome, isAborted ? 'execute' : 'unknown');
    await permit.renewOnce();
    assert.equal(signal.aborted, isAborted);
    assert.equal(await permit.complete('tombstone'), isAborted ? 'fenced' : 'done');
    retry.permit?.leave();
  }
});

test('broken connections of a pool are tried again, also by the first look at the store', async () => {
  let broken = 10;
  const use = () => { if (broken % 5 !== 0) { broken -= 1; throw GONE(); } };
  const store = remote(true, { before: { lookup: use, claim: use } });
  const oncegate = new Oncegate({ store, service: 'x', storeTimeout: '20s', warn: () => undefined });
  const handler = withIdempotency(oncegate, { scope: 'single-tenant', storeOutage: 'open', wait: 0 }, () => new Response('x'));
  for (const key of ['one', 'other']) {
    broken = key === 'one' ? 4 : 9;
    const response = await handler(new Request('http://a.test/', { method: 'POST', headers: { 'idempotency-key': key }, body: 'x' }));
    assert.deepEqual([response.status, response.headers.get('idempotency-status'), broken % 5], [200, null, 0]);
  }
  assert.equal(await oncegate.drain(5000), true);
});

test('a store that breaks every connection holds a request no longer than a part of storeTimeout', async () => {
  let tries = 0;
  const oncegate = new Oncegate({ store: remote(true, { before: { claim: () => { tries += 1; throw GONE(); } } }), service: 'x', storeTimeout: '20s', warn: () => undefined });
  const handler = withIdempotency(oncegate, { scope: 'single-tenant', storeOutage: 'open', wait: 0 }, () => new Response('x'));
  const begun = performance.now();
  const response = await handler(new Request('http://a.test/', { method: 'POST', headers: { 'idempotency-key': 'k' }, body: 'x' }));
  const took = performance.now() - begun;
  oncegate.engine.isClosed = true;
  assert.equal(response.status, 503);
  assert.ok(tries > 2 && took < 10_000, `${tries} tries in ${took} ms`);
});

test('a server that answers nothing to the look for an id secret is no wrong store', async () => {
  const log = [];
  const store = remote(false, { before: { lookup: () => { throw new StoreFullError('Redis takes no new keys (READONLY)', true); } } });
  const oncegate = new Oncegate({ store, service: 'x', warn: (line) => log.push(line) });
  const handler = withIdempotency(oncegate, { scope: 'single-tenant', storeOutage: 'open', wait: 0 }, () => new Response('x'));
  const response = await handler(new Request('http://a.test/', { method: 'POST', headers: { 'idempotency-key': 'k' }, body: 'x' }));
  assert.equal(response.status, 503);
  assert.match(log.join(), /READONLY/);
  assert.doesNotMatch(log.join(), /id secret/);
});

test('a claim that was granted before the store refused it is given back', async () => {
  for (const isAway of [false, true]) {
    let [claims, looks] = [0, 0];
    const store = remote(false, {
      after: { claim: () => { claims += 1; if (claims === 1) throw new StoreFullError('Redis takes no new keys (READONLY)', true); } },
      before: { lookup: () => { looks += 1; if (isAway && looks === 2) throw GONE(); } },
    });
    const { engine } = new Oncegate({ store, service: 'x', warn: () => undefined });
    const policy = { leaseMs: 60_000, retentionMs: 60_000, waitMs: 0, onAbandoned: 'park' };
    const claimed = { id: randomBytes(32), fingerprint: Buffer.concat([Buffer.of(1), Buffer.alloc(32)]), callerTag: Buffer.alloc(8), keyTag: Buffer.alloc(8), operation: 'x' };
    await assert.rejects(engine.claim(claimed, policy), { name: 'StoreFullError' });
    assert.equal(engine.lost.size, 1);
    for (const { settle } of engine.lost) assert.equal(await settle(), true);
    assert.deepEqual(store.ends, ['release done']);
    assert.equal((await engine.claim(claimed, policy)).outcome, 'execute');
    engine.isClosed = true;
  }
});

test('of very many lost claims, each is looked for during five minutes, and not longer', async () => {
  const gone = () => Promise.reject(GONE());
  const memory = new MemoryStore();
  let isStill = false;
  const store = { name: 'redis', claimsMayCommitLate: false };
  for (const name of ['claim', 'renew', 'lookup', 'complete', 'release']) store[name] = (...args) => (isStill ? gone() : memory[name](...args));
  let skipped = 0;
  const { now } = performance;
  performance.now = () => now.call(performance) + skipped;
  const realTimeout = globalThis.setTimeout;
  globalThis.setTimeout = (run, ms, ...rest) => realTimeout(() => { if (ms >= 1000) skipped += ms; run(...rest); }, Math.min(ms, 30));
  try {
    const { engine } = new Oncegate({ store, service: 'x', warn: () => undefined, storeTimeout: '100ms' });
    const policy = { leaseMs: 60_000, retentionMs: 3_600_000, waitMs: 0, onAbandoned: 'park' };
    const claimed = () => ({ id: randomBytes(32), fingerprint: Buffer.concat([Buffer.of(1), Buffer.alloc(32)]), callerTag: Buffer.alloc(8), keyTag: Buffer.alloc(8), operation: 'x' });
    (await engine.claim(claimed(), policy)).permit.leave();
    for (let at = 0; at < 8192; at += 1) engine.lost.add({ settle: async () => true, hasExecuted: false, at });
    isStill = true;
    await assert.rejects(engine.claim(claimed(), policy));
    assert.equal(engine.lost.size, 8193);
    await until(() => engine.lost.size === 8192, 'end of the search');
    assert.ok(skipped < 600_000, String(skipped));
    engine.isClosed = true;
  } finally {
    performance.now = now;
    globalThis.setTimeout = realTimeout;
  }
});

test('a claim that reaches a store which stood still for ten minutes is given back', async () => {
  const memory = new MemoryStore();
  const late = [];
  let isStill = false;
  const never = () => new Promise((resolve) => { late.push(resolve); });
  const store = { name: 'redis', claimsMayCommitLate: false };
  for (const name of ['claim', 'renew', 'lookup', 'complete', 'release']) {
    store[name] = (...args) => {
      if (!isStill) return memory[name](...args);
      // The server carries it out when it goes on.
      if (name === 'claim') late.push(() => memory.claim(...args));
      return Promise.race([never(), pause(20).then(() => { throw GONE(); })]);
    };
  }
  // The engine reads the time here, and sleeps with timers.
  let skipped = 0;
  const { now } = performance;
  performance.now = () => now.call(performance) + skipped;
  const realTimeout = globalThis.setTimeout;
  globalThis.setTimeout = (run, ms, ...rest) => realTimeout(() => { if (ms >= 1000) skipped += ms; run(...rest); }, Math.min(ms, 30));
  try {
    const oncegate = new Oncegate({ store, service: 'x', warn: () => undefined, storeTimeout: '100ms' });
    let runs = 0;
    const pay = idempotent(oncegate, { name: 'pay', key: (key) => key, errors: 'unknown', wait: 0, lease: '1m' }, () => { runs += 1; return runs; });
    assert.equal(await pay('before'), 1);
    isStill = true;
    await assert.rejects(pay('k'));
    await until(() => skipped > 600_000, 'ten minutes');
    isStill = false;
    for (const carryOut of late) await carryOut();
    await until(() => oncegate.engine.lost.size === 0 , 'end of the search');
    assert.equal(await pay('k'), 2);
  } finally {
    performance.now = now;
    globalThis.setTimeout = realTimeout;
  }
});
